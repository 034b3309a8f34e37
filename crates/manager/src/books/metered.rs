//! One tier with its counters and latencies.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use hdrhistogram::Histogram;
use undercroft_base::{LoadError, Loaded, Slot, Stamp, Tier, TierKind, TierUsage};
use undercroft_policy::place::{LatencyClass, TierState};

use crate::gauges::latency::new_histogram;
use crate::sync::lock;

/// One tier with what is measured around it.
pub(crate) struct MeteredTier {
    pub tier: Box<dyn Tier>,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub errors: AtomicU64,
    pub read_latency: Mutex<Histogram<u64>>,
    peaks: Mutex<(TierUsage, TierUsage)>,
}

impl MeteredTier {
    pub(crate) fn new(tier: Box<dyn Tier>) -> MeteredTier {
        MeteredTier {
            tier,
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            read_latency: Mutex::new(new_histogram()),
            peaks: Mutex::default(),
        }
    }

    pub(crate) fn is_ram(&self) -> bool {
        self.tier.info().kind == TierKind::Ram
    }

    /// Its state, which the engine needs before a decision.
    pub(crate) fn state(&self) -> TierState {
        TierState {
            capacity: self.tier.info().capacity,
            held: self.tier.usage().held,
            dram: self.tier.dram(),
            latency: if self.is_ram() {
                LatencyClass::Memory
            } else {
                LatencyClass::Device
            },
            demotes: false, // the engine knows
        }
    }

    /// Loads, and counts reads and errors. The caller records the latency of a `Read` answer.
    pub(crate) fn load(
        &self,
        slot: Slot,
        stamp: Stamp,
        dst: &mut [u8],
    ) -> Result<Loaded, LoadError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let result = self.tier.load(slot, stamp, dst);
        if result.is_err() {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Notes the present usage. Returns the peak of each field, and the usage at the logical peak.
    pub(crate) fn note_usage(&self) -> (TierUsage, TierUsage) {
        let now = self.tier.usage();
        let mut peaks = lock(&self.peaks);
        if now.logical >= peaks.0.logical {
            peaks.1 = now;
        }
        peaks.0 = TierUsage {
            logical: peaks.0.logical.max(now.logical),
            stored: peaks.0.stored.max(now.stored),
            held: peaks.0.held.max(now.held),
        };
        *peaks
    }
}
