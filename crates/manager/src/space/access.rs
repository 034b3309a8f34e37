//! Tells the reclaim policy which resident pages were used. A thread scans Accessed bits at an
//! interval, off the fault path.
//!
//! ```text
//!   each interval, each managed process:
//!     scan -> used = bit set, and the same frame as at the last scan -> touch -> clear
//! ```
//! - The kernel sets the bit of every page that it maps. That includes prefetched pages, which may
//!   never be used. So a page counts as used from the *second* scan on at which it has the same
//!   frame. At its first scan a page is only remembered.
//! - A scan is a hint and may be late: pages leave, move and come meanwhile. [`Uses::touch_at`]
//!   checks the books under the engine's lock, and pages are dropped while a layout event is
//!   unread. An error that remains costs a wrong guess of the policy.
//! - The engine is locked for at most [`TOUCH_PAGES`] pages at a time, and no other lock is held.
//!   [`Pace`] bounds the time, so large programs are scanned less often than the user asked.
//! - The pages of a guest are found otherwise (`guest_access.rs`), by the same thread, at the same
//!   interval and under the same bound. What is found goes the same ways.
//! - Unless the user gave an interval, or the run's policy file asks for one (`scans.rs`), no
//!   scanner is made and no bit is read while no page leaves: the policy needs no order then.
//!
//! Accessed bits show uses, not writes: a page installed through userfaultfd is dirty from the
//! start.
//!
//! [`Uses::touch_at`]: undercroft_engine::Uses::touch_at

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{Nanos, SpaceId, VirtPage, VirtRange};
use undercroft_proto::report::{Ages, GuestAccess};
use undercroft_sys::access::{self, AccessError, AccessScanner, BLOCK_PAGES, ClearRefs};
use undercroft_sys::process;

use crate::books::runs::RUNS_MAX;
use crate::space::findings::{Last, TICK};
use crate::space::guest_access::{GuestScans, Seen, Spent};
use crate::space::process::Process;
use crate::space::scans::ForPolicy;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Pages told to the engine under one hold of its lock: some 5 us.
const TOUCH_PAGES: usize = 64;

/// Scans on demand: one is due when this fraction of the resident pages has left.
const TURNOVER: u64 = 64;
/// Scans on demand: and when threads have waited for pages this many times as long as the last scan
/// took. The program pays for a scan too: the CPU sets each bit again.
const WAITS: u32 = 10;
/// Scans on demand: one is due after this time if any page has left.
const AT_LEAST_EVERY: Duration = Duration::from_millis(500);

/// The cost of a use of a page of a guest that a scan has taken out of page tables: the CPU maps it
/// again. Measured under KVM with shadow pages; threads of the host pay a quarter of it.
const USE_COST: Duration = Duration::from_micros(8);

/// Time without a page that leaves, after which the rest of those that were named stay.
const STUCK: Duration = Duration::from_secs(10);

/// How often to scan.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// At most one scan in this time.
    interval: Duration,
    /// Scans take at most one part in `share` of the time.
    share: u32,
    /// Only while pages leave, and as often as they leave.
    on_demand: bool,
}

/// The next step of scanning on demand.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Scan,
    /// Looks again soon.
    Wait,
    /// No page leaves.
    Rest,
}

/// Counts since the last scan or rest.
#[derive(Clone, Copy)]
struct Since {
    /// Pages that left, and pages in memory now.
    left: u64,
    resident: u64,
    /// How long threads waited for pages.
    waited: Duration,
    /// Time that has passed.
    passed: Duration,
}

impl Since {
    /// The next step, if the last scan took `took`. The bits are worth a look when many pages have
    /// left: a policy that has gone through a part of memory needs to know what of it was used.
    /// They are worth their cost where threads wait for much longer than a scan takes.
    fn next(self, took: Duration) -> Next {
        let late = self.passed >= AT_LEAST_EVERY;
        let pays = self.left >= self.resident / TURNOVER && self.waited >= took * WAITS;
        match self.left {
            0 if late => Next::Rest,
            0 => Next::Wait,
            _ if late || pays => Next::Scan,
            _ => Next::Wait,
        }
    }
}

impl Pace {
    /// The pace of `--access-scan auto`, measured in `docs/design/0010-access-bits.md`.
    const AUTO: Pace = Pace {
        interval: Duration::from_millis(20),
        share: 20,
        on_demand: true,
    };

    /// The pace of `--access-scan INTERVAL`.
    fn every(interval: Duration) -> Pace {
        Pace {
            interval,
            share: 10,
            on_demand: false,
        }
    }
}

/// The parts of `ranges` in the blocks that begin at `starts`; both ascend. Neighbours are one
/// range.
fn parts(ranges: &[VirtRange], starts: &[VirtPage]) -> Vec<VirtRange> {
    let mut parts: Vec<VirtRange> = Vec::new();
    let mut starts = starts.iter().peekable();
    for range in ranges {
        while let Some(start) = starts.peek() {
            let block = VirtRange::new(**start, start.plus(BLOCK_PAGES));
            let part = block.intersect(*range);
            match parts.last_mut() {
                _ if part.is_empty() => {}
                // Only within one range: what lies between two ranges is not managed.
                Some(last) if last.end == part.start && part.start > range.start => {
                    last.end = part.end;
                }
                _ => parts.push(part),
            }
            // The next range may begin in this block too.
            if block.end > range.end {
                break;
            }
            starts.next();
        }
    }
    parts
}

/// Time until the next look while no page leaves: longer in a calm run, where nothing happens.
fn rest(shared: &Shared) -> Duration {
    AT_LEAST_EVERY * if shared.signals.is_calm() { 4 } else { 1 }
}

/// Longest time without a look whether a policy file asks for scans: if there is one, and if not.
const LOOKS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];

/// The time in [`TICK`]s since the start.
fn ticks(shared: &Shared) -> u32 {
    let now = shared.elapsed().as_millis() / TICK.as_millis();
    u32::try_from(now).unwrap_or(u32::MAX)
}

/// Sleeps. False if the run has ended meanwhile; its end does not wait for this thread.
fn sleep(shared: &Shared, pause: Duration) -> bool {
    std::thread::sleep(pause);
    !shared.signals.stopped()
}

/// State of the `uc-access` thread.
pub(crate) struct Accesses {
    shared: Arc<Shared>,
    /// `None`: this machine gives no Accessed bits, and the run has a guest, which needs none.
    scanner: Option<AccessScanner>,
    guests: GuestScans,
    pace: Pace,
    /// Pages evicted so far, as of the last scan or rest, and when that was.
    left: u64,
    since: Instant,
    /// How long threads had waited for pages by then, and how long the last scan took.
    waited: Nanos,
    took: Duration,
    /// Costs of guests in the scan that is under way.
    spent: Spent,
    /// How long they took, with rests.
    guests_took: Duration,
    last: HashMap<SpaceId, Last>,
    /// There was a scan.
    has_scanned: bool,
    used: Vec<VirtPage>,
    /// Blocks with Accessed bits set.
    set: Vec<VirtPage>,
    /// For the run's policy file.
    policy: ForPolicy,
    /// No scan begins before.
    earliest: Instant,
    /// A scan has failed, and the user was warned.
    failed: bool,
    /// Address spaces where the kernel refuses to clear bits by range.
    refused: HashSet<SpaceId>,
}

impl Accesses {
    /// Scans at `interval` until the run ends: a thread's life.
    ///
    /// * `scanner`: `None` only if the run has a guest.
    pub(crate) fn every(shared: Arc<Shared>, scanner: Option<AccessScanner>, interval: Duration) {
        Accesses::new(shared, scanner, Pace::every(interval)).run();
    }

    /// Scans while pages leave, until the run ends: a thread's life. Returns at once if the machine
    /// gives no Accessed bits (`doctor` says why). Called when pages begin to leave.
    pub(crate) fn on_demand(shared: Arc<Shared>) {
        // A scanner is made at the first eviction. Short runs, and runs that only come near their
        // limit, never pay for one.
        let asks = || shared.books.scan_interval().is_some();
        while shared.books.engine().books().stats().pages_swapped_out == 0 && !asks() {
            if !sleep(&shared, rest(&shared)) {
                return;
            }
        }
        let _ = process::set_affinity(0, &shared.cpu_plan.worker_cpus());
        match AccessScanner::open() {
            Ok(scanner) => Accesses::new(shared, Some(scanner), Pace::AUTO).run(),
            Err(_) if shared.guest.is_some() => Accesses::new(shared, None, Pace::AUTO).run(),
            Err(why) => {
                while !asks() {
                    if !sleep(&shared, LOOKS[1]) {
                        return;
                    }
                }
                crate::log::warn(&format!(
                    "the policy file asks for scans of access bits, and hears of none: {why}"
                ));
            }
        }
    }

    fn new(shared: Arc<Shared>, scanner: Option<AccessScanner>, pace: Pace) -> Accesses {
        Accesses {
            shared,
            scanner,
            guests: GuestScans::new(),
            pace,
            left: 0,
            since: Instant::now(),
            waited: Nanos(0),
            took: Duration::ZERO,
            spent: Spent::default(),
            guests_took: Duration::ZERO,
            last: HashMap::new(),
            has_scanned: false,
            used: Vec::new(),
            set: Vec::new(),
            policy: ForPolicy::default(),
            earliest: Instant::now(),
            failed: false,
            refused: HashSet::new(),
        }
    }

    /// Scans until the run ends.
    fn run(mut self) {
        let mut pause = self.pace.interval;
        while self.rests_for(pause) {
            match self.next() {
                Next::Scan => {}
                Next::Wait => {
                    pause = self.pace.interval;
                    continue;
                }
                Next::Rest => {
                    // After a rest, the bits show uses of long ago: the next scan only clears them,
                    // if no policy file waits for those.
                    if self.policy.due(&self.shared).is_none() {
                        self.last = HashMap::new();
                    }
                    pause = rest(&self.shared);
                    continue;
                }
            }
            let _ = process::set_affinity(0, &self.shared.cpu_plan.worker_cpus());
            let began = Instant::now();
            let processes = self.shared.processes.all();
            let lives = |space: &SpaceId| processes.iter().any(|p| p.space == *space);
            self.last.retain(|space, _| lives(space));
            self.refused.retain(lives);
            let mut scanned = false;
            let _ = self.policy.due(&self.shared); // of another file nothing is remembered
            for process in &processes {
                if process.hosted.is_some() {
                    scanned |= self.scan_guest(process);
                } else if process.managed.load(Ordering::Relaxed) && process.has_running_identity()
                {
                    let has_relatives = !self.shared.processes.relatives(process).is_empty();
                    // The bits of shared pages are cleared under a lock that installations wait
                    // for. That is done only if the user gave an interval.
                    let refused = has_relatives || self.refused.contains(&process.space);
                    if refused && self.pace.on_demand {
                        self.last.remove(&process.space);
                    } else {
                        scanned |= self.scan(process, has_relatives);
                    }
                }
            }
            pause = self.ended(began, scanned);
        }
    }

    /// Tells what a scan has found that `began` then. Returns the time until the next.
    ///
    /// * `scanned`: there was something to scan.
    fn ended(&mut self, began: Instant, scanned: bool) -> Duration {
        if scanned && !self.pace.on_demand {
            let mut ages = Ages::default();
            for last in self.last.values() {
                last.add_to(&mut ages);
            }
            self.shared.gauges.ages.set(ages);
        }
        let (passed, spent) = (began.elapsed(), std::mem::take(&mut self.spent));
        let guests = std::mem::take(&mut self.guests_took);
        let took = passed.saturating_sub(guests) + spent.work;
        self.took = took + spent.charge;
        let scans = &self.shared.gauges.scans;
        if scanned {
            scans.count.fetch_add(1, Ordering::Relaxed);
            let nanos = took.as_nanos() as u64;
            scans.nanos.fetch_add(nanos, Ordering::Relaxed);
        }
        let metadata = self.last.values().map(Last::bytes).sum::<u64>() + self.policy.bytes();
        scans.metadata.fetch_max(metadata, Ordering::Relaxed);
        self.policy.tell(&self.shared);
        self.has_scanned = true;
        let least = passed.saturating_sub(guests) * (self.pace.share - 1) + spent.owed;
        self.earliest = Instant::now() + least;
        self.pace.interval.saturating_sub(passed).max(least)
    }

    /// The time in [`TICK`]s since the start, if ages are remembered.
    fn ticks(&self) -> Option<u32> {
        (!self.pace.on_demand).then(|| ticks(&self.shared))
    }

    /// Sleeps, and names old pages meanwhile if a user asks. False if the run has ended.
    fn rests_for(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        while !self.shared.signals.stopped() {
            let due = self.policy.due(&self.shared);
            let until = due.map_or(until, |due| until.min(due.max(self.earliest)));
            let now = Instant::now();
            if until <= now {
                return true;
            }
            let look = until.min(now + LOOKS[usize::from(self.shared.books.advice().is_none())]);
            if self.pace.on_demand {
                std::thread::sleep(look - now);
                continue;
            }
            let Some(older) = self.shared.gauges.ages.wait(look) else {
                continue;
            };
            if !self.has_scanned {
                self.shared.gauges.ages.later(older);
                return true; // no age is known before the first scan, so it comes now
            }
            self.name_unused(older);
            self.shared.gauges.ages.done();
        }
        false
    }

    /// Has the evictor take pages out of memory that have not been used for `older`, and waits for
    /// it: until all were tried, or nothing moves.
    fn name_unused(&self, older: Duration) {
        for (space, last) in &self.last {
            for run in last.unused_for(older) {
                if !self.evictor_has_below(RUNS_MAX) {
                    return;
                }
                self.shared.gauges.ages.note_named(run.count().0);
                self.shared.books.named.queue().push_back((*space, run));
            }
        }
        let _ = self.evictor_has_below(1);
    }

    /// Waits until the evictor has fewer runs than that before it. False: it gets nowhere, or the
    /// run ends, and it has none any more.
    fn evictor_has_below(&self, most: usize) -> bool {
        let named = &self.shared.books.named;
        let (mut last, mut since) = (usize::MAX, Instant::now());
        loop {
            let left = named.queue().len();
            if left < most {
                return true;
            }
            if left != last {
                (last, since) = (left, Instant::now());
            }
            if since.elapsed() > STUCK || self.shared.signals.stopped() {
                named.queue().clear();
                return false;
            }
            self.shared.signals.kick_evictor();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The next step.
    fn next(&mut self) -> Next {
        let due = self.policy.due(&self.shared);
        if !self.pace.on_demand || due.is_some_and(|due| due <= Instant::now()) {
            return Next::Scan;
        }
        let (left, resident) = {
            let engine = self.shared.books.engine();
            let books = engine.books();
            (books.stats().pages_swapped_out, books.resident().0)
        };
        let waited = lock(&self.shared.gauges.fault_latency).served();
        let since = Since {
            left: left - self.left,
            resident,
            waited: Duration::from_nanos(waited.0.saturating_sub(self.waited.0)),
            passed: self.since.elapsed(),
        };
        let next = since.next(self.took);
        if !matches!(next, Next::Wait) {
            (self.left, self.since, self.waited) = (left, Instant::now(), waited);
        }
        next
    }

    /// Scans and touches the pages of a guest. False if nothing is known of their use.
    fn scan_guest(&mut self, process: &Process) -> bool {
        let began = Instant::now();
        let before = self.last.remove(&process.space);
        let (again, mut last) = (before.is_some(), before.unwrap_or_default());
        let mut next = Last::default();
        self.used.clear();
        let (shared, used, spent) = (&self.shared, &mut self.used, &mut self.spent);
        let (share, asks_ages) = (self.pace.share, !self.pace.on_demand);
        let each = |seen: &Seen| {
            let block = seen.block(last.frames(seen.start));
            let (now, before) = (asks_ages.then(|| ticks(shared)), used.len());
            last.used(&block, now, &mut next, used);
            USE_COST * (used.len() - before) as u32
        };
        // The bound holds within a scan, too: a large guest takes seconds.
        let done = self.guests.scan(process, each, |work, charge| {
            let pause = spent.add(work, charge, share);
            pause.is_zero() || sleep(shared, pause)
        });
        self.guests_took += began.elapsed();
        let Some(done) = done else {
            return false; // its process ends
        };
        *lock(&self.shared.gauges.scans.guest) = done;
        if done != GuestAccess::Scanned {
            return false;
        }
        self.last.insert(process.space, next);
        self.tell(process);
        self.policy.note(process.space, &self.used, again);
        true
    }

    /// Scans, touches and clears the pages of a process. False if there was nothing to scan.
    fn scan(&mut self, process: &Process, has_relatives: bool) -> bool {
        let (Some(pid), Some(identity)) = (process.pid(), process.identity.get()) else {
            return false;
        };
        let ranges = self.shared.books.regions(process.space);
        let blocks = access::blocks_of(&ranges);
        if blocks.is_empty() {
            return false;
        }
        let before = self.last.remove(&process.space);
        let (again, mut last) = (before.is_some(), before.unwrap_or_default());
        let mut next = Last::default();
        self.used.clear();
        self.set.clear();
        let now = self.ticks();
        let (used, set) = (&mut self.used, &mut self.set);
        let Some(scanner) = &mut self.scanner else {
            return false;
        };
        let scanned = scanner.scan(pid, &blocks, |block| {
            if block.accessed != [0; BLOCK_PAGES as usize / 64] {
                set.push(block.start);
            }
            last.used(block, now, &mut next, used);
        });
        match scanned {
            Ok(()) => {}
            Err(AccessError::Gone) => return false,
            // Scans worked when the run began. The policies go on without them, and the report
            // counts no more.
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    crate::log::warn(&format!(
                        "scanning Accessed bits fails now ({error}): policies learn from faults alone"
                    ));
                }
                return false;
            }
        }
        self.last.insert(process.space, next);
        self.tell(process);
        self.policy.note(process.space, &self.used, again);
        let set = parts(&ranges, &self.set);
        let pidfd = identity.pidfd.as_fd();
        self.clear(process.space, pid, pidfd, &set, has_relatives);
        // Bits that cannot be cleared say nothing.
        !(self.pace.on_demand && self.refused.contains(&process.space))
    }

    /// Tells the engine and the trace which pages were used.
    fn tell(&self, process: &Process) {
        for batch in self.used.chunks(TOUCH_PAGES) {
            // The scan may be ahead of the books: a mapping that moved is already at its new place.
            if process.event_pending() || !process.is_alive() {
                continue;
            }
            let mut known = 0;
            let mut engine = self.shared.books.engine();
            for page in batch {
                if engine.uses().touch_at(process.space, *page, false) {
                    known += 1;
                }
            }
            drop(engine);
            self.shared
                .gauges
                .scans
                .pages_used
                .fetch_add(known, Ordering::Relaxed);
        }
    }

    /// Clears the bits. For pages that fork relatives share, only `clear_refs` does it. It does not
    /// flush cached translations, so used pages may look unused, and installations wait for it. So
    /// it is used only if the user gave an interval.
    fn clear(
        &mut self,
        space: SpaceId,
        pid: u32,
        pidfd: BorrowedFd<'_>,
        ranges: &[VirtRange],
        has_relatives: bool,
    ) {
        if !self.refused.contains(&space)
            && let Err(error) = access::clear(pidfd, ranges)
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            self.refused.insert(space);
        }
        if !self.pace.on_demand && (has_relatives || self.refused.contains(&space)) {
            let _ = ClearRefs::open(pid).and_then(|all| all.clear());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_with_bits_set_are_cleared_and_nothing_between_ranges() {
        let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
        let ranges = [
            range(100, 300),
            range(300, 600),
            range(700, 2048),
            range(5000, 6000),
        ];
        let starts = |blocks: &[u64]| -> Vec<VirtPage> {
            blocks.iter().map(|block| VirtPage(block * 512)).collect()
        };
        assert_eq!(parts(&ranges, &[]), []);
        let of = |blocks: &[u64]| parts(&ranges, &starts(blocks));
        assert_eq!(of(&[0]), [range(100, 300), range(300, 512)]);
        assert_eq!(of(&[1, 2]), [range(512, 600), range(700, 1536)]);
        assert_eq!(
            of(&[2, 9, 11]),
            [range(1024, 1536), range(5000, 5120), range(5632, 6000)]
        );
    }

    #[test]
    fn a_scan_is_due_when_a_64th_has_left_and_threads_waited_ten_times_a_scan() {
        let took = Duration::from_millis(3);
        let next = |left: u64, waited_ms: u64, passed_ms: u64| {
            let since = Since {
                left,
                resident: 8_000,
                waited: Duration::from_millis(waited_ms),
                passed: Duration::from_millis(passed_ms),
            };
            since.next(took)
        };
        assert_eq!(next(125, 30, 20), Next::Scan);
        assert_eq!(next(125, 29, 20), Next::Wait, "a scan costs too much");
        assert_eq!(next(124, 600, 20), Next::Wait, "too few pages have left");
        // Half a second later any page that left is enough, and none is a rest.
        assert_eq!(next(1, 0, 499), Next::Wait);
        assert_eq!(next(1, 0, 500), Next::Scan);
        assert_eq!(next(0, 600, 499), Next::Wait);
        assert_eq!(next(0, 600, 500), Next::Rest);
    }
}
