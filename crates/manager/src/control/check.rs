//! The control thread's check: pressure, discovery, and what no event tells.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{Bytes, PAGE_BYTES, PageCount, SpaceId};
use undercroft_sys::process;

use super::Control;
use crate::log::warn;
use crate::options::AccessScan;
use crate::space::access::Accesses;
use crate::space::discover;
use crate::space::process::Process;

/// Time between two checks: the most, the least while the client is busy, and the least before
/// pressure.
const TICK_MAX: Duration = Duration::from_millis(100);
const TICK_BUSY: Duration = Duration::from_millis(5);
const TICK_MIN: Duration = Duration::from_micros(500);

const _: () = assert!(TICK_MIN.as_nanos() < TICK_BUSY.as_nanos());
const _: () = assert!(TICK_BUSY.as_nanos() < TICK_MAX.as_nanos());

/// Longest that a check which took long makes the next one wait.
const REST_MAX: Duration = Duration::from_millis(250);

/// Room that is left when a program is first managed, as a part of the limit. In a small limit it
/// is [`SLACK_MIN`], or a quarter of it.
const SLACK_PART: u64 = 16;
const SLACK_MIN: u64 = 16 << 20;

/// Fastest growth of a program that is noticed in time, in bytes a second: first touch of fresh
/// memory.
const GROWTH: f64 = 4e9;

/// What a check finds before it reads any mapping.
struct Pressure {
    /// This check is the one that begins to manage.
    begins: bool,
    /// Pages of each address space that are in memory and not found yet.
    to_find: HashMap<SpaceId, u64>,
    /// Page faults so far.
    faults: u64,
    /// Until the next check, while nothing is managed.
    wait: Duration,
}

impl Control {
    /// Pages are about to leave: from now on it may pay to know which are used.
    fn scan_on_demand(&self) {
        if self.shared.options.access_scan != AccessScan::Auto {
            return;
        }
        let of = self.shared.clone();
        let thread = std::thread::Builder::new().name("uc-access".into());
        if let Err(error) = thread.spawn(move || Accesses::on_demand(of)) {
            warn(&format!(
                "no thread to look at pages, so policies learn from faults alone: {error}"
            ));
        }
    }

    /// Time until the next check; below a second.
    pub(super) fn until_check(&self) -> Duration {
        let wait = self.check_at.saturating_duration_since(Instant::now());
        wait.min(TICK_MAX)
    }

    /// Something has changed: the next check is not to wait for its turn.
    pub(super) fn check_soon(&mut self) {
        let within = if self.managing { TICK_BUSY } else { TICK_MIN };
        let at = self.rest_until.max(Instant::now() + within);
        self.check_at = self.check_at.min(at);
    }

    /// Checks the program if it is time to.
    ///
    /// - Before pressure a check costs next to nothing, and is due whenever something happens.
    /// - Then, and where there are many processes, checks take a fifth of the time at most.
    /// - A check of more than [`REST_MAX`] / 5 is followed by a rest of [`REST_MAX`] only.
    pub(super) fn check_if_due(&mut self) {
        let began = Instant::now();
        if self.managing && began < self.check_at {
            return;
        }
        let tick = self.check();
        self.rest_until = if self.managing {
            began + (5 * began.elapsed()).min(REST_MAX)
        } else {
            began + 4 * began.elapsed()
        };
        self.check_at = self.rest_until.max(began + tick);
    }

    /// So many pages of these address spaces are in memory and not found yet.
    fn expect(&self, to_find: &HashMap<SpaceId, u64>) {
        let pages = PageCount(to_find.values().sum());
        self.shared.books.engine().discovery().expect_found(pages);
        self.shared.signals.kick_evictor(); // it lets in who waited for that
    }

    /// Discovers what is new in a process. `everything`: wherever it may be. True when it has
    /// changed.
    fn check_process(&mut self, process: &Arc<Process>, pid: u32, everything: bool) -> bool {
        let size = self.statm.get(&process.space).and_then(|s| s.read().ok());
        let size = size.unwrap_or_default().virtual_size.0;
        let before = self.virtual_sizes.insert(process.space, size);
        let again = process.recheck.take();
        if everything || before != Some(size) || process.wants_discovery() {
            discover::manage(&self.shared, process, &mut self.maps);
            return true;
        }
        discover::manage_again(&self.shared, process, &again);
        discover::lock_threads(&self.shared.books, &self.shared.signals, process, pid);
        !again.is_empty()
    }

    /// How near the limit is; where it is reached, everything is managed from here on.
    fn check_pressure(&mut self, processes: &[Arc<Process>]) -> Pressure {
        let limit = self.shared.books.engine().books().limit().0;
        let (mut unmanaged, mut to_find) = (0u64, HashMap::new());
        for process in processes
            .iter()
            .filter(|p| !p.managed.load(Ordering::Relaxed))
        {
            if let Some(statm) = self.statm.get(&process.space) {
                let pages = process.anonymous_pages(statm);
                unmanaged += pages * PAGE_BYTES as u64;
                to_find.insert(process.space, pages);
            }
        }
        let held = self.shared.books.pool_held();
        let (dram, faults) = {
            let mut engine = self.shared.books.engine();
            engine.migrations().set_pool_held(held);
            (engine.books().dram_used(), engine.books().stats().faults)
        };
        self.shared.gauges.note_limit(dram, Bytes(limit));
        let used = unmanaged + dram.0;
        let threshold = limit - (limit / SLACK_PART).max(SLACK_MIN.min(limit / 4));
        let begins = !self.managing && used >= threshold;
        if begins {
            self.managing = true;
            // What is there counts before it has been found: faults are served meanwhile.
            self.expect(&to_find);
            self.scan_on_demand();
            for process in processes {
                self.watch(process);
            }
        }
        let headroom = threshold.saturating_sub(used) as f64;
        let wait = Duration::from_secs_f64((headroom / GROWTH).min(1.0));
        Pressure {
            begins,
            to_find,
            faults,
            wait: wait.clamp(TICK_MIN, TICK_MAX),
        }
    }

    /// Pressure, discovery, and what no event tells. Returns when it is to be done again.
    pub(super) fn check(&mut self) -> Duration {
        let processes = self.shared.processes.all();
        let Pressure {
            begins,
            mut to_find,
            faults,
            wait,
        } = self.check_pressure(&processes);
        if !self.managing {
            return wait;
        }
        let now = self.shared.elapsed().as_nanos() as u64;
        self.shared.placement.pin.expire(now);
        let everything = self
            .shared
            .signals
            .discover_again
            .swap(false, Ordering::Relaxed);
        let mut growing = false;
        // A fork child takes frames of its own without a fault of ours: only a check finds them.
        let (mut forked, mut checking) = (false, Duration::ZERO);
        for process in &processes {
            let running = |_: &u32| !process.exited.load(Ordering::Relaxed);
            let Some(pid) = process.pid().filter(running) else {
                if process.has_lost_its_memory(&self.zeros) {
                    self.forget(process);
                }
                continue;
            };
            if self.check_process(process, pid, everything) {
                growing = true;
                if begins {
                    to_find.remove(&process.space);
                    self.expect(&to_find);
                }
            }
            if process.agent.get().is_some_and(|a| a.has_ended()) {
                self.part_with(process); // it called exec, and what it runs now has no shim
            }
        }
        if begins {
            self.expect(&HashMap::new());
            let _ = process::set_fair(0);
        }
        // When the dead are forgotten: what only they were charged for is found then.
        for process in self.shared.processes.all() {
            if process.parent.is_some() || process.family != process.space {
                let began = Instant::now();
                forked |= discover::note_own_frames(
                    &self.shared.books,
                    &self.shared.signals,
                    &process,
                    &mut self.pagemap,
                );
                checking += began.elapsed();
            }
        }
        let busy = growing || forked || faults != self.last_faults;
        self.last_faults = faults;
        self.tick = if busy {
            // At most a twentieth of the time goes into this.
            TICK_BUSY.max(checking * 20).min(TICK_MAX)
        } else {
            (self.tick * 2).clamp(TICK_BUSY, TICK_MAX)
        };
        self.note_peaks();
        self.tick
    }

    fn note_peaks(&self) {
        let managed = self.shared.books.engine().books().managed_pages().0;
        let peak = &self.shared.gauges.managed_pages_peak;
        peak.fetch_max(managed, Ordering::Relaxed);
        for tier in &self.shared.books.tiers {
            tier.note_usage();
        }
    }
}
