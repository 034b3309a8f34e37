//! The control thread's check: pressure, discovery, and changes that raise no event.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, SpaceId};
use undercroft_proto::options::AccessScan;
use undercroft_sys::process;
use undercroft_sys::procfs::Statm;

use super::Control;
use super::onset::Onset;
use super::still::Still;
use super::toll::Served;
use crate::books::metered::MeteredTier;
use crate::cpus::guard;
use crate::gauges::MemoryNow;
use crate::log::warn;
use crate::space::access::Accesses;
use crate::space::discover;
use crate::space::process::Process;
use crate::sync::lock;

/// Time between two checks: the longest, the shortest while the client is busy, and the shortest
/// before pressure.
const TICK_MAX: Duration = Duration::from_millis(100);
const TICK_BUSY: Duration = Duration::from_millis(5);
const TICK_MIN: Duration = Duration::from_micros(500);

/// The same after [`CALM_AFTER`] without a fault, an event or growth, until something stirs. Half
/// of it beside fork relatives, which may take frames without a fault.
const TICK_CALM: Duration = Duration::from_millis(1920);
const CALM_AFTER: Duration = Duration::from_secs(5);

const _: () = assert!(TICK_MIN.as_nanos() < TICK_BUSY.as_nanos());
const _: () = assert!(TICK_BUSY.as_nanos() < TICK_MAX.as_nanos());

/// Longest rest after a check that took long.
const REST_MAX: Duration = Duration::from_millis(250);

/// Time for a look at the frames of fork relatives: a quarter of the longest time between two
/// checks. A run may have thousands, of some ms each, and new processes wait meanwhile.
const FRAMES_MAX: Duration = Duration::from_millis(25);

const _: () = assert!(FRAMES_MAX.as_nanos() * 4 <= TICK_MAX.as_nanos());

/// The result of the first part of a check, which reads no mapping.
struct Pressure {
    /// Managing begins with this check.
    begins: bool,
    /// Page faults so far.
    faults: u64,
    /// Time until the next check, while nothing is managed.
    wait: Duration,
}

/// Sizes of the processes, by their address spaces.
#[derive(Default)]
pub(super) struct Sizes {
    pub(super) statm: HashMap<SpaceId, Statm>,
    /// Address space at the last check, in bytes.
    seen: HashMap<SpaceId, u64>,
}

impl Sizes {
    pub(super) fn forget(&mut self, space: SpaceId) {
        self.statm.remove(&space);
        self.seen.remove(&space);
    }
}

/// When checks are due, and the findings of the last ones.
pub(super) struct Checks {
    /// Time between two checks while the client is managed.
    tick: Duration,
    /// When the next one is due.
    pub(super) at: Instant,
    rest_until: Instant,
    faults: u64,
    onset: Onset,
    pub(super) quiet: Quiet,
    pub(super) still: Still,
    /// The fork relative whose frames are looked at next, or the one that follows.
    frames_next: SpaceId,
    /// When the pages of all processes are counted again, after a takeover.
    pub(super) recount_at: Option<Instant>,
    /// Room for mappings and page map entries that are read.
    pub(super) maps: String,
    pagemap: Vec<u8>,
}

impl Checks {
    pub(super) fn new(now: Instant) -> Checks {
        Checks {
            tick: Duration::ZERO,
            at: now,
            rest_until: now,
            faults: 0,
            onset: Onset::new(now),
            quiet: Quiet::new(now),
            still: Still::new(now),
            frames_next: SpaceId(0),
            recount_at: None,
            maps: String::new(),
            pagemap: vec![0; 4096 * 8],
        }
    }
}

/// Since when nothing happens.
pub(super) struct Quiet {
    /// When a check last saw something happen in a managed client.
    busy_at: Instant,
    /// The kernel does not tell of all new mappings.
    blind: bool,
    /// A client that is not managed has not grown for long.
    stands_still: bool,
    /// The heap was given back since the client was last busy.
    is_trimmed: bool,
}

impl Quiet {
    fn new(now: Instant) -> Quiet {
        Quiet {
            busy_at: now,
            blind: false,
            stands_still: false,
            is_trimmed: false,
        }
    }

    /// A process is not watched for new mappings.
    pub(super) fn is_blind(&mut self) {
        self.blind = true;
    }

    /// Nothing happens: what the manager has freed goes back to the kernel, once.
    fn rests(&mut self) {
        if !std::mem::replace(&mut self.is_trimmed, true) {
            process::trim_heap();
        }
    }
}

/// Time until the next look at a client that is not managed.
///
/// * `age`: since it started. A young one is looked at more often, so that the peak of one that
///   ends soon is known.
/// * `fastest`: what it needs to its limit if it grows as fast as one thread can.
/// * `stands_still`: it has not grown for long. If it begins, it may do so with several threads.
fn wait(age: Duration, fastest: Duration, stands_still: bool) -> Duration {
    let usual = fastest.min((age / 32).clamp(TICK_BUSY, TICK_MAX));
    let wait = if stands_still {
        (fastest / 4).clamp(usual, TICK_CALM)
    } else {
        usual
    };
    wait.max(TICK_MIN)
}

/// Visits `all` from place `from` on, and then those before it, as long as `visit` says so. Returns
/// the first that was not visited.
fn in_turn<T>(all: &[T], from: usize, mut visit: impl FnMut(&T) -> bool) -> Option<&T> {
    let mut turn = all[from..].iter().chain(&all[..from]);
    let more = turn.by_ref().all(&mut visit);
    if more { None } else { turn.next() }
}

impl Control {
    /// Starts a thread that scans Accessed bits while pages leave (`--access-scan auto`).
    pub(super) fn scan_on_demand(&self) {
        if self.shared.options.access_scan != AccessScan::Auto {
            return;
        }
        let of = self.shared.clone();
        let thread = std::thread::Builder::new().name("uc-access".into());
        if let Err(error) = thread.spawn(move || Accesses::on_demand(of)) {
            warn(&format!(
                "the thread that scans Accessed bits did not start ({error}): policies learn from \
                 faults alone"
            ));
        }
    }

    /// Starts the guard, which moves threads of the manager that get no CPU.
    pub(super) fn guard_threads(&self) {
        let of = self.shared.clone();
        let thread = std::thread::Builder::new().name("uc-guard".into());
        let body = move || guard::run(&of.cpu_plan, &of.signals);
        if let Err(error) = thread.spawn(body) {
            warn(&format!(
                "the thread that looks after the others did not start ({error}): real-time \
                 programs may delay faults"
            ));
        }
    }

    /// Time until the next check.
    pub(super) fn until_check(&self) -> Duration {
        let wait = self.checks.at.saturating_duration_since(Instant::now());
        let calm = self.shared.signals.is_calm() || self.checks.quiet.stands_still;
        wait.min(if calm { TICK_CALM } else { TICK_MAX })
    }

    /// Brings the next check forward, because something has changed.
    pub(super) fn check_soon(&mut self) {
        let within = if self.managing { TICK_BUSY } else { TICK_MIN };
        let at = self.checks.rest_until.max(Instant::now() + within);
        self.checks.at = self.checks.at.min(at);
    }

    /// Checks the program if a check is due.
    ///
    /// - Before pressure a check costs next to nothing, and is due at each event.
    /// - After that, checks take a fifth of the time at most, however many processes there are.
    /// - A check of more than [`REST_MAX`] / 5 is followed by a rest of [`REST_MAX`] only.
    pub(super) fn check_if_due(&mut self) {
        let began = Instant::now();
        if self.managing && began < self.checks.at {
            return;
        }
        let tick = self.check();
        self.checks.rest_until = if self.managing {
            began + (5 * began.elapsed()).min(REST_MAX)
        } else {
            began + 4 * began.elapsed()
        };
        self.checks.at = self.checks.rest_until.max(began + tick);
    }

    /// Announces the resident pages of these address spaces that are still to be discovered. Until
    /// then they count as used.
    fn expect(&self, to_find: &HashMap<SpaceId, u64>) {
        let pages = PageCount(to_find.values().sum());
        self.shared.books.engine().discovery().expect_found(pages);
        self.shared.signals.kick_evictor(); // it admits faults that waited for room
    }

    /// Discovers what is new in a process. True if it has changed.
    /// * `everything`: reads all its mappings.
    fn check_process(&mut self, process: &Arc<Process>, pid: u32, everything: bool) -> bool {
        let size = self
            .sizes
            .statm
            .get(&process.space)
            .and_then(|s| s.read().ok());
        let size = size.unwrap_or_default().virtual_size.0;
        process.partners.look(pid, &process.row, process.commands());
        let before = self.sizes.seen.insert(process.space, size);
        let again = process.backlog.recheck.take();
        if everything || before != Some(size) || process.wants_discovery() {
            discover::manage(&self.shared, process, &mut self.checks.maps);
            return true;
        }
        discover::manage_again(&self.shared, process, &again);
        discover::lock_threads(&self.shared.books, &self.shared.signals, process, pid);
        !again.is_empty()
    }

    /// Pages of the processes that are not managed, by process.
    fn unmanaged(&self, processes: &[Arc<Process>]) -> HashMap<SpaceId, u64> {
        let unmanaged = (processes.iter()).filter(|p| !p.managed.load(Ordering::Relaxed));
        let pages = |process: &Arc<Process>| {
            let statm = self.sizes.statm.get(&process.space)?;
            Some((process.space, process.anonymous_pages(statm)))
        };
        unmanaged.filter_map(pages).collect()
    }

    /// All pages that the books do not have yet.
    pub(super) fn unmanaged_pages(&self) -> PageCount {
        let of_processes = self.unmanaged(&self.shared.processes.all());
        PageCount(of_processes.values().sum::<u64>() + self.guest.unmanaged(&self.shared).0)
    }

    /// Compares the memory in use with the limit. Near the limit, everything is managed from then
    /// on.
    fn check_pressure(&mut self, processes: &[Arc<Process>]) -> Pressure {
        let limit = self.shared.books.engine().books().limit().0;
        let to_find = self.unmanaged(processes);
        let unmanaged = to_find.values().sum::<u64>() + self.guest.unmanaged(&self.shared).0;
        let unmanaged = unmanaged * BASE_PAGE_BYTES as u64;
        let held = self.shared.books.pool_held();
        let (now, stored, faults) = {
            let mut engine = self.shared.books.engine();
            engine.migrations().set_pool_held(held);
            let books = engine.books();
            (MemoryNow::of(books), books.stored(), books.stats().faults)
        };
        self.shared.gauges.note_memory(now);
        if self
            .shared
            .books
            .tiers
            .ranked()
            .any(MeteredTier::is_scattered)
        {
            let _later = self.have_migrator(); // the next check tries again
        }
        let used = unmanaged + now.dram.0;
        let look =
            (self.checks.onset).look(Instant::now(), (processes.len(), used), limit, TICK_MAX);
        let footprint = &self.shared.gauges.footprint;
        footprint.note(Bytes(
            used - held.0 + stored.bytes().0 + footprint.strays().0,
        ));
        // Scans at an interval are of memory that is managed, whether pages leave or not.
        let scans = match self.shared.options.access_scan {
            AccessScan::Every(_) => true,
            AccessScan::Auto => self.shared.books.scan_interval().is_some(),
            AccessScan::Never => false,
        };
        let begins = !self.managing && (look.begins || scans && !processes.is_empty());
        if !self.managing && !begins {
            footprint.note_unmanaged(Bytes(used));
        }
        if begins {
            self.managing = true;
            // Resident pages count before they are discovered: faults are served meanwhile.
            self.expect(&to_find);
        }
        self.checks.quiet.stands_still = look.is_still && !self.managing && !self.is_bounded();
        if self.checks.quiet.stands_still {
            self.checks.quiet.rests();
        }
        Pressure {
            begins,
            faults,
            wait: wait(
                self.shared.elapsed(),
                look.wait,
                self.checks.quiet.stands_still,
            ),
        }
    }

    /// Begins to manage the processes. All their memory is registered before anything else is done,
    /// because they go on growing until then.
    fn begin(&mut self, processes: &[Arc<Process>]) {
        let mut enrolled = Vec::new();
        for process in processes {
            enrolled.push(discover::enroll(
                &self.shared,
                process,
                &mut self.checks.maps,
            ));
        }
        for process in processes {
            self.watch(process);
            if let Some(identity) = process.identity.get() {
                for child in identity.tasks.children(identity.pid).unwrap_or_default() {
                    process
                        .partners
                        .started(child, identity.pid, process.commands());
                }
            }
            // What was mapped before the watch began has no record.
            enrolled.push(discover::enroll(
                &self.shared,
                process,
                &mut self.checks.maps,
            ));
        }
        let _ = process::set_fair(0); // the rest is not urgent
        self.scan_on_demand();
        self.guard_threads();
        let mut to_find = HashMap::new();
        for process in processes {
            if let Some(statm) = self.sizes.statm.get(&process.space) {
                to_find.insert(process.space, process.anonymous_pages(statm));
            }
        }
        self.expect(&to_find);
        for one in enrolled.into_iter().flatten() {
            to_find.remove(&one.count(&self.shared));
            self.expect(&to_find);
        }
        self.expect(&HashMap::new());
    }

    /// Checks pressure, discovers, and finds changes that raise no event. Returns the time until
    /// the next check.
    pub(super) fn check(&mut self) -> Duration {
        let processes = self.shared.processes.all();
        let Pressure {
            begins,
            faults,
            wait,
        } = self.check_pressure(&processes);
        if !self.managing {
            return wait;
        }
        if begins {
            self.begin(&processes);
        }
        self.look_for_guest(&processes);
        if begins {
            self.keep_to_limit(); // a limit that was lowered before is in force from now on
        }
        self.end_orphans();
        let now = self.shared.elapsed().as_nanos() as u64;
        self.shared.cpu_plan.pin.expire(now);
        let everything = self
            .shared
            .signals
            .discover_again
            .swap(false, Ordering::Relaxed);
        let mut growing = false;
        for process in &processes {
            let running = |_: &u32| !process.exited.load(Ordering::Relaxed);
            let Some(pid) = process.pid().filter(running) else {
                if process.has_lost_its_memory() {
                    self.forget(process);
                }
                continue;
            };
            growing |= self.check_process(process, pid, everything);
            if process.agent.get().is_some_and(|a| a.has_ended()) {
                self.part_with(process); // it called exec, and its new program has no shim
            }
        }
        self.look_at_still(&processes);
        let time = lock(&self.shared.gauges.fault_latency).waited();
        let served = Served { faults, time };
        self.since.toll.look(Instant::now(), served, &processes);
        if self.since.curve_from.is_some() {
            self.begin_curve_when_known();
        }
        // After the dead are forgotten: frames that only they were charged for are found then.
        let mut relatives = self.shared.processes.all();
        relatives.retain(|of| of.relatives.parent.is_some() || of.relatives.family != of.space);
        let (forked, checking) = self.look_at_frames(&relatives);
        let busy = growing || forked || faults != self.checks.faults;
        self.checks.faults = faults;
        self.rest_if_calm(busy);
        self.checks.tick = if self.shared.signals.is_calm() {
            TICK_CALM / (1 + u32::from(!relatives.is_empty()))
        } else if busy {
            // This takes a twentieth of the time at most.
            TICK_BUSY.max(checking * 20).min(TICK_MAX)
        } else {
            (self.checks.tick * 2).clamp(TICK_BUSY, TICK_MAX)
        };
        self.note_peaks();
        self.checks.tick
    }

    /// A fork child takes frames of its own without a fault that we see: only a look finds them.
    /// Some in each check, in turn. Returns whether one of them may have inherited pages, and the
    /// time.
    fn look_at_frames(&mut self, relatives: &[Arc<Process>]) -> (bool, Duration) {
        let (shared, pagemap) = (&self.shared, &mut self.checks.pagemap);
        let (began, mut forked) = (Instant::now(), false);
        let from = relatives.partition_point(|of| of.space < self.checks.frames_next);
        let next = in_turn(relatives, from, |process| {
            forked |= discover::note_own_frames(&shared.books, &shared.signals, process, pagemap);
            began.elapsed() < FRAMES_MAX
        });
        if let Some(next) = next {
            self.checks.frames_next = next.space;
        }
        (forked || next.is_some(), began.elapsed())
    }

    /// Notes whether something happens. A bound is looked after at all times, and so is a client
    /// whose new mappings only a check finds.
    fn rest_if_calm(&mut self, busy: bool) {
        if busy || self.is_bounded() || self.checks.quiet.blind {
            self.checks.quiet.busy_at = Instant::now();
            self.checks.quiet.is_trimmed = false;
            self.shared.signals.end_calm();
        } else if self.checks.quiet.busy_at.elapsed() >= CALM_AFTER {
            self.checks.quiet.rests();
            self.shared.signals.set_calm();
        }
    }

    /// A bound is looked after at all times.
    fn is_bounded(&self) -> bool {
        self.has_latency_bound()
    }

    /// Checks soon if something has stirred in a calm client.
    pub(super) fn check_if_stirred(&mut self) {
        if self.checks.tick >= TICK_CALM / 2 && !self.shared.signals.is_calm() {
            self.checks.quiet.busy_at = Instant::now();
            self.checks.tick = TICK_BUSY;
            self.check_soon();
        }
    }

    fn note_peaks(&self) {
        let managed = self.shared.books.engine().books().managed_pages().0;
        let peak = &self.shared.gauges.managed_pages_peak;
        peak.fetch_max(managed, Ordering::Relaxed);
        for tier in self.shared.books.tiers.iter() {
            tier.note_usage();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_far_from_its_limit_is_looked_at_seldom_once_it_stands_still() {
        let ms = Duration::from_millis;
        // A gigabyte is 250 ms of one thread's growth.
        for (fastest, grows, stands_still) in [
            (0, TICK_MIN, TICK_MIN),
            (50, ms(50), ms(50)),
            (125, TICK_MAX, TICK_MAX),
            (1000, TICK_MAX, ms(250)),
            (60_000, TICK_MAX, TICK_CALM),
        ] {
            let old = Duration::from_secs(60);
            assert_eq!(wait(old, ms(fastest), false), grows);
            assert_eq!(wait(old, ms(fastest), true), stands_still);
        }
        assert_eq!(wait(ms(10), ms(1000), false), TICK_BUSY);
        assert_eq!(wait(ms(1600), ms(1000), false), ms(50));
    }

    #[test]
    fn each_has_its_turn_and_none_has_two() {
        let mut from = 0;
        let mut rounds = [0; 5];
        for at in 0..15 {
            let mut visits = 0;
            let next = in_turn(&[0, 1, 2, 3, 4], from, |of: &usize| {
                rounds[*of] += 1;
                visits += 1;
                visits < 3
            });
            assert_eq!((next, visits), (Some(&((at + 1) * 3 % 5)), 3));
            from = next.copied().unwrap_or(from);
        }
        assert_eq!(rounds, [9; 5]);
        assert_eq!(in_turn(&[0, 1], 1, |_: &usize| true), None);
        assert_eq!(in_turn(&[], 0, |_: &usize| true), None);
    }
}
