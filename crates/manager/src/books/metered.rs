//! A tier with its counters and latencies.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use hdrhistogram::Histogram;
use undercroft_base::{
    Bytes, LoadError, Loaded, Nanos, PageKey, Slot, Stamp, Store, StoreError, Tier, TierFacts,
    TierUsage,
};
use undercroft_policy::place::{LatencyClass, TierState};
use undercroft_proto::report::Drain;
use undercroft_sys::nvm::MappedAs;
use undercroft_tier::file::{FileMeter, space_max};
use undercroft_tier::profile::Profile;
use undercroft_tier::shape::{ShapeName, read_time};
use undercroft_tier::spec::{Limit, Rated, TierSpec};

use crate::gauges::latency::new_histogram;
use crate::sync::lock;

/// Reads that the mean time of a load remembers.
const LOADS: u64 = 64;

/// Loads that are tried, where none is measured.
const TRIALS: usize = 32;

/// A tier with what is measured around it.
pub(crate) struct MeteredTier {
    pub tier: Box<dyn Tier>,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub errors: AtomicU64,
    /// Of `writes`, the pages whose older copy was changed in place.
    pub updates: AtomicU64,
    /// Bytes of these pages that were as before, and not written.
    unwritten: AtomicU64,
    /// Reads of its device that faults wait for now.
    pub page_ins: AtomicU32,
    pub read_latency: Mutex<Histogram<u64>>,
    /// The counts of its file; none if it has no file.
    pub file: Option<FileMeter>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// Costs, as the user says.
    pub rated: Rated,
    /// The tier answers from memory, but takes long enough to measure.
    measures: bool,
    /// Most memory that the user lets a pool hold; `None`: a share of the limit.
    pub max: Option<Limit>,
    /// Figures of its device, measured before this run.
    pub profile: Option<Profile>,
    /// How it is mapped; none if it is not.
    pub mapped_as: Option<MappedAs>,
    /// Nanoseconds of a load lately.
    load_ns: AtomicU64,
    /// Bytes that it may hold, if its own capacity is more: the limit was lowered.
    ceiling: AtomicU64,
    peaks: Mutex<(TierUsage, TierUsage)>,
    /// The least time of a load, by trial.
    tried: OnceLock<Nanos>,
    /// How it was emptied, if it is used no more.
    pub removed: OnceLock<Drain>,
}

impl MeteredTier {
    pub(crate) fn new(tier: Box<dyn Tier>, file: Option<FileMeter>) -> MeteredTier {
        let load_ns = tier.info().facts.first_load.0;
        MeteredTier {
            tier,
            file,
            measures: false,
            shape: None,
            rated: Rated::default(),
            max: None,
            profile: None,
            mapped_as: None,
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            updates: AtomicU64::new(0),
            unwritten: AtomicU64::new(0),
            page_ins: AtomicU32::new(0),
            read_latency: Mutex::new(new_histogram()),
            load_ns: AtomicU64::new(load_ns),
            ceiling: AtomicU64::new(u64::MAX),
            peaks: Mutex::default(),
            tried: OnceLock::new(),
            removed: OnceLock::new(),
        }
    }

    /// Facts of its kind.
    pub(crate) fn facts(&self) -> &'static TierFacts {
        self.tier.info().facts
    }

    /// Makes it as slow as a device: a load takes that much longer, until reads say more.
    pub(crate) fn slowed(mut self, shape: Option<ShapeName>) -> MeteredTier {
        self.shape = shape;
        self.measures = shape.is_some() && self.is_memory();
        let more = shape.map_or(0, |name| read_time(name).0);
        self.load_ns.fetch_add(more, Ordering::Relaxed);
        self
    }

    /// A load was measured to take this long.
    pub(crate) fn measured(self, load: Nanos) -> MeteredTier {
        self.load_ns.store(load.0, Ordering::Relaxed);
        self
    }

    /// Takes over the description that asked for it: what it costs, of a pool its part of the
    /// limit, and what was measured before. A load takes as long as then, until reads say more.
    pub(crate) fn of(mut self, spec: &TierSpec, profile: Option<Profile>) -> MeteredTier {
        (self.rated, self.max) = (spec.rated, spec.max);
        self.profile = profile;
        if let (Some(profile), false) = (&self.profile, self.is_memory()) {
            let load = (profile.read_seconds.p50 * 1e9) as u64;
            self.load_ns.store(load, Ordering::Relaxed);
        }
        self
    }

    /// Bytes written to what is below, as its budget of writes counts them: of a file, what was
    /// written, and not the pages that were freed before. Of other kinds, all pages stored, without
    /// what was as before.
    pub(crate) fn bytes_written(&self) -> Bytes {
        match &self.file {
            Some(file) => Bytes(file.read().bytes_written),
            None => {
                let unwritten = self.unwritten.load(Ordering::Relaxed);
                let stored = self.writes.load(Ordering::Relaxed) * self.page_bytes();
                Bytes(stored.saturating_sub(unwritten))
            }
        }
    }

    fn page_bytes(&self) -> u64 {
        self.tier.info().page.bytes() as u64
    }

    /// Whether the copies that it has can be changed in place.
    pub(crate) fn updates_copies(&self) -> bool {
        self.facts().updates_copies
    }

    /// Has the copy in `slot` changed in place, and counts. False: it is gone, and the caller frees
    /// the slot.
    pub(crate) fn update(&self, slot: Slot, item: &Store<'_>) -> bool {
        match self.tier.update(slot, item) {
            Some(Ok(written)) => {
                let unwritten = self.page_bytes().saturating_sub(written.0);
                self.unwritten.fetch_add(unwritten, Ordering::Relaxed);
                self.writes.fetch_add(1, Ordering::Relaxed);
                self.updates.fetch_add(1, Ordering::Relaxed);
                true
            }
            Some(Err(_)) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
                false
            }
            None => false,
        }
    }

    /// Notes that a read of the device took `nanos`.
    pub(crate) fn note_read(&self, nanos: u64) {
        lock(&self.read_latency).saturating_record(nanos);
        // Two threads may lose a reading to each other: it is a mean of many.
        let mean = self.load_ns.load(Ordering::Relaxed);
        let next = mean - mean / LOADS + nanos / LOADS;
        self.load_ns.store(next, Ordering::Relaxed);
    }

    /// The least time of a load: that of the device it is shaped as, or the fastest that was
    /// measured. Loads of memory are not measured, so some are tried. Zero: unknown.
    ///
    /// * `key`: of the checksums of the run.
    pub(crate) fn least_load(&self, key: &PageKey) -> Nanos {
        let shaped = self.shape.map_or(Nanos(0), read_time);
        let latencies = lock(&self.read_latency);
        let measured = if latencies.is_empty() {
            0
        } else {
            latencies.min()
        };
        let tried = || *self.tried.get_or_init(|| self.try_load(key));
        let known = shaped.max(Nanos(measured));
        if known == Nanos(0) && self.is_memory() {
            tried()
        } else {
            known
        }
    }

    /// The fastest of some loads of a page that hardly has to be unpacked. Zero: there is no room
    /// for it.
    fn try_load(&self, key: &PageKey) -> Nanos {
        let mut page = vec![0; self.tier.info().page.bytes()];
        page[0] = 1; // pages of zeros alone are in no tier
        let stamp = Stamp(0);
        let mut batch = [Store {
            page: &page,
            stamp,
            checksum: key.checksum(&page, stamp),
            result: Err(StoreError::Full),
        }];
        self.tier.store(&mut batch);
        let Ok(slot) = batch[0].result else {
            return Nanos(0);
        };
        let mut room = vec![0; page.len()];
        let mut load = || {
            let begun = Instant::now();
            let loaded = self.tier.load(slot, stamp, &mut room);
            (loaded == Ok(Loaded::Done)).then(|| Nanos(begun.elapsed().as_nanos() as u64))
        };
        let times = (0..TRIALS).filter_map(|_| load());
        let least = times.min().unwrap_or_default();
        self.tier.free(&[slot]);
        least
    }

    /// Whether a store is work of the processor, and few pages at a time are as good as many.
    pub(crate) fn is_memory(&self) -> bool {
        self.facts().is_memory()
    }

    /// How fast it is. This decides whether it keeps second copies (`Config::for_tiers`), and which
    /// thread demotes from it.
    pub(crate) fn latency(&self) -> LatencyClass {
        self.facts().class
    }

    /// Most bytes that it may hold now.
    fn capacity(&self) -> Bytes {
        let ceiling = Bytes(self.ceiling.load(Ordering::Relaxed));
        self.tier.capacity().min(ceiling)
    }

    /// Lets it hold no more than this. What is above moves down, or leaves with its pages.
    pub(crate) fn set_ceiling(&self, ceiling: Bytes) {
        self.ceiling.store(ceiling.0, Ordering::Relaxed);
    }

    /// Whether it has more space than its copies are worth, so that they should be stored together.
    pub(crate) fn is_scattered(&self) -> bool {
        let usage = self.tier.usage();
        self.facts().grows && usage.held > space_max(usage.stored, self.tier.info().page)
    }

    /// Its state, which the engine needs before a decision.
    pub(crate) fn state(&self) -> TierState {
        let usage = self.tier.usage();
        TierState {
            page: self.tier.info().page,
            capacity: self.capacity(),
            held: usage.held,
            dram: self.tier.dram(),
            copies: usage.logical.pages_floor(),
            packed: usage.stored,
            load_ns: self.load_ns.load(Ordering::Relaxed),
            latency: self.latency(),
            demotes: false, // the engine knows
        }
    }

    /// Loads, and counts reads and errors. The caller records the latency of a `Read` or `Fetch`
    /// answer.
    pub(crate) fn load(
        &self,
        slot: Slot,
        stamp: Stamp,
        dst: &mut [u8],
    ) -> Result<Loaded, LoadError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let begun = self.measures.then(Instant::now);
        let result = self.tier.load(slot, stamp, dst);
        if let Some(begun) = begun {
            self.note_read(begun.elapsed().as_nanos() as u64);
        }
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

#[cfg(test)]
mod tests {
    use undercroft_sys::mapping::SharedMemory;
    use undercroft_tier::ram::{Compressor, RamPool};

    use super::*;

    #[test]
    fn a_load_of_memory_takes_some_time_and_the_page_that_shows_it_is_gone() {
        let capacity = Bytes(1 << 20);
        let reserve = RamPool::reserve_for(capacity).0 as usize;
        let memory = SharedMemory::create("uc-test-pool", reserve).expect("a memfd");
        let key = &PageKey::KNOWN;
        let pool = RamPool::new(memory, Compressor::Lz4, capacity, key).expect("an empty pool");
        let tier = MeteredTier::new(Box::new(pool), None);
        let least = tier.least_load(key);
        assert!(least > Nanos(0) && least < Nanos(1_000_000), "{least}");
        assert_eq!(tier.least_load(key), least, "it is tried once");
        assert_eq!(tier.tier.usage().logical, Bytes(0));
        tier.note_read(700);
        assert_eq!(tier.least_load(key), Nanos(700), "it was measured");
    }
}
