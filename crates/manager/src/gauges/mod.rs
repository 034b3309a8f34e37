//! What is measured of a run. Every thread adds to it; the control thread reads it.

pub(crate) mod latency;
pub(crate) mod limit;
pub(crate) mod scale;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;
use undercroft_base::Bytes;

use self::latency::{Breakdown, new_histogram};
use self::limit::Exceeded;
use self::scale::{Holds, Shortages};
use crate::sync::lock;

/// The gauges of one run.
pub(crate) struct Gauges {
    pub fault_latency: Mutex<Histogram<u64>>,
    pub breakdown: Breakdown,
    pub exceeded: Mutex<Exceeded>,
    pub eviction: EvictionCost,
    pub scans: Scans,
    pub shortages: Shortages,
    pub holds: Holds,
    pub spaces_seen: AtomicU64,
    pub managed_pages_peak: AtomicU64,
    /// The most mappings that one process was seen to have.
    pub mappings_peak: AtomicU64,
    /// From so many mappings of one process on the user is warned: 80 % of what the kernel allows.
    mappings_warn: u64,
}

/// What the evictor's work came to.
#[derive(Debug, Default)]
pub(crate) struct EvictionCost {
    pub batches: AtomicU64,
    /// Times the engine was locked for them.
    pub engine_locks: AtomicU64,
    /// Orders that an agent did not answer in time.
    pub orders_given_up: AtomicU64,
}

impl EvictionCost {
    /// A batch has left, for which the engine was locked so many times.
    pub fn note(&self, locks: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.engine_locks.fetch_add(locks, Ordering::Relaxed);
    }
}

/// What the scans of Accessed bits came to.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    pub count: AtomicU64,
    pub nanos: AtomicU64,
    pub pages_used: AtomicU64,
    /// Most bytes in which pages were remembered from one scan to the next.
    pub metadata: AtomicU64,
}

impl Gauges {
    pub fn new() -> Gauges {
        Gauges {
            fault_latency: Mutex::new(new_histogram()),
            breakdown: Breakdown::default(),
            exceeded: Mutex::default(),
            eviction: EvictionCost::default(),
            scans: Scans::default(),
            shortages: Shortages::default(),
            holds: Holds::default(),
            spaces_seen: AtomicU64::new(0),
            managed_pages_peak: AtomicU64::new(0),
            mappings_peak: AtomicU64::new(0),
            mappings_warn: undercroft_sys::procfs::mappings_max() / 5 * 4,
        }
    }

    /// Keeps the books of time above the limit. Called by the control thread on each tick and by
    /// the evictor.
    pub fn note_limit(&self, dram: Bytes, limit: Bytes) {
        let over = dram.0.saturating_sub(limit.0);
        lock(&self.exceeded).note(over, Instant::now());
    }

    /// A process was seen to have that many mappings.
    pub fn note_mappings(&self, pid: u32, count: u64) {
        let before = self.mappings_peak.fetch_max(count, Ordering::Relaxed);
        // Once: when the peak passes the threshold.
        let most = self.mappings_warn;
        if before < most && count >= most {
            crate::log::warn(&format!(
                "process {pid} has {count} mappings, of {} that the kernel allows one process; \
                 raise vm.max_map_count (sysctl)",
                most / 4 * 5
            ));
        }
    }
}
