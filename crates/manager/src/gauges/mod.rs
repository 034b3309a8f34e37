//! The measurements of a run. Every thread adds to them; the control thread reads them.

pub(crate) mod ages;
pub(crate) mod footprint;
pub(crate) mod knobs;
pub(crate) mod latency;
pub(crate) mod limit;
pub(crate) mod page_ins;
pub(crate) mod scale;
pub(crate) mod unserved;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use undercroft_base::{Bytes, Nanos, SpaceId, VirtRange};
use undercroft_engine::{BooksView, Ledger};
use undercroft_proto::report::GuestAccess;
use undercroft_qos::LatencyBound;

use self::ages::AgeGauge;
use self::footprint::Footprint;
use self::knobs::Knobs;
use self::latency::{Breakdown, FaultLatency};
use self::limit::{Exceeded, Fixed, Paused};
use self::page_ins::PageIns;
use self::scale::{Longest, Shortages};
use self::unserved::Unserved;
use crate::sync::lock;

/// The gauges of one run.
pub(crate) struct Gauges {
    pub fault_latency: Mutex<FaultLatency>,
    /// The page-ins, from when the run has a latency bound.
    pub page_ins: OnceLock<Box<PageIns>>,
    pub unserved: Unserved,
    /// The last decision of latency control.
    pub knobs: Knobs,
    /// Bytes of DRAM that the user asks to keep to.
    memory_max: AtomicU64,
    /// Limit of the pool of huge pages; all ones: it has not run out.
    pool_max: AtomicU64,
    /// Times that it had none for a page.
    pub pool_short: AtomicU64,
    /// Why no page leaves: the reasons of [`Hold`], one bit each.
    held: AtomicU8,
    pub pauses: Mutex<Paused>,
    pub breakdown: Breakdown,
    pub exceeded: Mutex<Exceeded>,
    pub fixed: Mutex<Fixed>,
    pub footprint: Footprint,
    pub eviction: EvictionCost,
    pub scans: Scans,
    pub ages: AgeGauge,
    pub shortages: Shortages,
    /// Holds of the layout lock of any address space. Those of the engine's are in the books.
    pub layout_holds: Longest,
    pub spaces_seen: AtomicU64,
    pub managed_pages_peak: AtomicU64,
    /// The most mappings that one process was seen to have.
    pub mappings_peak: AtomicU64,
    /// The most processes at once that were found to be without the shim.
    pub strays_peak: AtomicU64,
    /// Mappings of one process above which the user is warned: 80 % of what the kernel allows.
    mappings_warn: u64,
}

/// Why a run is paused.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hold {
    /// A user wants it (`undercroft set PID paused=yes`).
    User = 1,
    /// The kernel swaps, and would lose pages that are moved out meanwhile.
    Swap = 2,
    /// A process dumps core, and its pages are to be there.
    Core = 4,
}

/// Totals of the evictor's work.
#[derive(Debug, Default)]
pub(crate) struct EvictionCost {
    pub batches: AtomicU64,
    /// Times that the engine was locked for the batches.
    pub engine_locks: AtomicU64,
    /// Commands that an agent did not answer in time.
    pub commands_given_up: AtomicU64,
}

impl EvictionCost {
    /// Adds a batch, and the `locks` of the engine for it.
    pub(crate) fn note(&self, locks: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.engine_locks.fetch_add(locks, Ordering::Relaxed);
    }
}

/// Totals of the scans of Accessed bits.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    pub count: AtomicU64,
    pub nanos: AtomicU64,
    pub pages_used: AtomicU64,
    /// The last look at a guest.
    pub guest: Mutex<GuestAccess>,
    /// Most bytes that were used to remember pages from scan to scan.
    pub metadata: AtomicU64,
}

/// Memory in use at a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryNow {
    pub dram: Bytes,
    /// The part of it that cannot leave.
    pub immovable: Bytes,
    /// By how much the limit is raised for that.
    pub raised: Bytes,
}

impl MemoryNow {
    pub(crate) fn of<L: Ledger>(books: BooksView<'_, L>) -> MemoryNow {
        MemoryNow {
            dram: books.dram_used(),
            immovable: books.immovable(),
            raised: books.raised(),
        }
    }
}

impl Gauges {
    /// * `memory_max`: what the user asks for at the start.
    pub(crate) fn new(bound: Option<LatencyBound>, memory_max: Bytes) -> Gauges {
        Gauges {
            memory_max: AtomicU64::new(memory_max.0),
            pool_max: AtomicU64::new(u64::MAX),
            pool_short: AtomicU64::new(0),
            held: AtomicU8::new(0),
            pauses: Mutex::default(),
            fault_latency: Mutex::new(FaultLatency::new()),
            page_ins: bound.map_or_else(OnceLock::new, |bound| PageIns::boxed(bound).into()),
            unserved: Unserved::default(),
            knobs: Knobs::default(),
            breakdown: Breakdown::default(),
            exceeded: Mutex::default(),
            fixed: Mutex::default(),
            footprint: Footprint::default(),
            eviction: EvictionCost::default(),
            scans: Scans::default(),
            ages: AgeGauge::default(),
            shortages: Shortages::default(),
            layout_holds: Longest::default(),
            spaces_seen: AtomicU64::new(0),
            managed_pages_peak: AtomicU64::new(0),
            mappings_peak: AtomicU64::new(0),
            strays_peak: AtomicU64::new(0),
            mappings_warn: undercroft_sys::procfs::mappings_max() / 5 * 4,
        }
    }

    /// The limit that the user asks for now. That in force is above it while memory shrinks.
    pub(crate) fn memory_max(&self) -> Bytes {
        Bytes(self.memory_max.load(Ordering::Relaxed))
    }

    /// The user asks for another limit.
    pub(crate) fn ask_memory_max(&self, asked: Bytes) {
        self.memory_max.store(asked.0, Ordering::Relaxed);
    }

    /// The limit to keep to now: none while the run is paused, or what the pool of huge pages
    /// allows, if it has run out.
    pub(crate) fn limit_now(&self) -> Bytes {
        if self.is_paused() {
            Bytes(u64::MAX)
        } else {
            self.memory_max().min(self.pool_max())
        }
    }

    /// Bytes that the pool of huge pages allows; `u64::MAX`: it has not run out.
    pub(crate) fn pool_max(&self) -> Bytes {
        Bytes(self.pool_max.load(Ordering::Relaxed))
    }

    /// The pool of huge pages allows this much now.
    pub(crate) fn allow_pool(&self, bytes: Bytes) {
        self.pool_max.store(bytes.0, Ordering::Relaxed);
    }

    /// Notes that the pool has none for a page. True the first time.
    pub(crate) fn note_pool_short(&self) -> bool {
        self.pool_short.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// True while nothing may be evicted or moved between tiers.
    pub(crate) fn is_paused(&self) -> bool {
        self.held.load(Ordering::Relaxed) != 0
    }

    /// Pauses the run for a reason, or takes the reason back: the run goes on if there is no other.
    /// False if nothing of that changes the run.
    pub(crate) fn pause(&self, why: Hold, paused: bool) -> bool {
        let bit = why as u8;
        let before = if paused {
            self.held.fetch_or(bit, Ordering::Relaxed)
        } else {
            self.held.fetch_and(!bit, Ordering::Relaxed)
        };
        let others = before & !bit != 0;
        let changes = !others && (before != 0) != paused;
        if changes {
            lock(&self.pauses).note(paused, Instant::now());
        }
        changes
    }

    /// Threads that wait for pages of `range` are woken `now`, since the start of the run: their
    /// waits end.
    pub(crate) fn woken(&self, space: SpaceId, range: VirtRange, now: Duration) {
        let end = Nanos(now.as_nanos() as u64);
        (self.unserved).woken((space, range), now, |waited| {
            lock(&self.fault_latency).note_wait(waited, end);
        });
    }

    /// Notes the memory in use, and what of it cannot leave. Called by the control thread at each
    /// check, and by the evictor. Says once that the limit is raised for it.
    pub(crate) fn note_memory(&self, now: MemoryNow) {
        let limit = self.limit_now().0;
        let over = now
            .dram
            .0
            .saturating_sub(limit.saturating_add(now.raised.0));
        let at = Instant::now();
        lock(&self.exceeded).note(over, at);
        if lock(&self.fixed).note(now.immovable.0, now.raised.0, at) {
            crate::log::warn(&format!(
                "{} cannot leave memory: the program may not write there, has locked it, or has \
                 processes without an agent; or it is a monitor's own, beside huge pages. The limit \
                 of {} is passed by as much as the rest needs",
                now.immovable,
                Bytes(limit)
            ));
        }
    }

    /// Notes the mappings of a process, and warns once if they come near the kernel's limit.
    pub(crate) fn note_mappings(&self, pid: u32, count: u64) {
        if let Some(warning) = self.mappings_warning(pid, count) {
            crate::log::warn(&warning);
        }
    }

    /// Notes the mappings of a process. Returns a warning once: when the peak crosses the
    /// threshold.
    fn mappings_warning(&self, pid: u32, count: u64) -> Option<String> {
        let before = self.mappings_peak.fetch_max(count, Ordering::Relaxed);
        let most = self.mappings_warn;
        (before < most && count >= most).then(|| {
            format!(
                "process {pid} has {count} mappings, of {} that the kernel allows one process; \
                 raise vm.max_map_count (sysctl)",
                most / 4 * 5
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_warn_once_and_from_four_fifths_of_what_the_kernel_allows() {
        let gauges = Gauges::new(None, Bytes(u64::MAX));
        let allowed = undercroft_sys::procfs::mappings_max();
        let most = allowed / 5 * 4;
        assert_eq!(gauges.mappings_warning(7, most - 1), None);
        let warning = gauges.mappings_warning(7, most).expect("a warning");
        assert!(warning.starts_with(&format!("process 7 has {most} mappings, of ")));
        assert!(warning.contains("vm.max_map_count"), "{warning}");
        // Not again: neither for more, nor for another process, nor after a fall.
        for (pid, count) in [(7, most + 1), (8, allowed), (7, 10), (7, most)] {
            assert_eq!(gauges.mappings_warning(pid, count), None);
        }
        assert_eq!(gauges.mappings_peak.load(Ordering::Relaxed), allowed);
    }

    /// A process jumps over the threshold between two looks.
    #[test]
    fn mappings_that_jump_over_the_threshold_warn_too() {
        let gauges = Gauges::new(None, Bytes(u64::MAX));
        let allowed = undercroft_sys::procfs::mappings_max();
        assert_eq!(gauges.mappings_warning(7, 100), None);
        assert!(gauges.mappings_warning(7, allowed).is_some());
    }

    #[test]
    fn a_run_is_paused_until_the_last_reason_is_gone() {
        let gauges = Gauges::new(None, Bytes(1 << 20));
        assert!(gauges.pause(Hold::User, true) && gauges.is_paused());
        assert!(!gauges.pause(Hold::User, true));
        assert!(!gauges.pause(Hold::Swap, true));
        assert!(!gauges.pause(Hold::User, false) && gauges.is_paused());
        assert_eq!(gauges.limit_now(), Bytes(u64::MAX));
        assert!(gauges.pause(Hold::Swap, false) && !gauges.is_paused());
        assert!(!gauges.pause(Hold::Swap, false));
        assert_eq!(gauges.limit_now(), Bytes(1 << 20));
        assert_eq!(lock(&gauges.pauses).until(Instant::now()).count, 1);
    }
}
