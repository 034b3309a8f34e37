//! One tier with its counters and latencies.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use hdrhistogram::Histogram;
use undercroft_base::{
    Bytes, LoadError, Loaded, Nanos, PAGE_BYTES, PageCount, Slot, Stamp, Store, Tier, TierKind,
    TierUsage,
};
use undercroft_policy::place::{LatencyClass, TierState};
use undercroft_sys::nvm::MappedAs;
use undercroft_tier::file::FileMeter;
use undercroft_tier::nvm::NvmTier;
use undercroft_tier::profile::Profile;
use undercroft_tier::remote::{RemoteMeter, RemoteTier};
use undercroft_tier::shape::{Shape, ShapeName, Shaped, read_time};
use undercroft_tier::spec::{RamSpec, Rated, TierSpec};

use crate::gauges::latency::new_histogram;
use crate::report::Drain;
use crate::sync::lock;

/// Nanoseconds to decompress a page. Not measured: two readings of the clock would cost a tenth.
const RAM_LOAD_NS: u64 = 3_000;

/// Nanoseconds to copy a page from a mapping and verify it. Not measured, for the same reason.
const NVM_LOAD_NS: u64 = 1_000;

/// Nanoseconds that a read of a device is thought to take before any was measured.
const FILE_LOAD_NS: u64 = 80_000;

/// Nanoseconds that a read over the network is thought to take before any was measured.
const REMOTE_LOAD_NS: u64 = 300_000;

/// Reads that the mean time of a load remembers.
const LOADS: u64 = 64;

/// One tier with what is measured around it.
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
    /// The counts of its cluster; none if it has no cluster.
    pub remote: Option<RemoteMeter>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// What the user says that it costs.
    pub rated: Rated,
    /// It answers from memory, but takes long enough to measure.
    measures: bool,
    /// How it was asked for, if it is compressed memory.
    pub pool: Option<RamSpec>,
    /// What was measured of its device before this run.
    pub profile: Option<Profile>,
    /// How it is mapped; none if it is not.
    pub mapped_as: Option<MappedAs>,
    /// Nanoseconds of a load lately.
    load_ns: AtomicU64,
    /// Bytes that it may hold, if its own capacity is more: the limit was lowered.
    ceiling: AtomicU64,
    peaks: Mutex<(TierUsage, TierUsage)>,
    /// How it was emptied, if it is used no more.
    pub removed: OnceLock<Drain>,
}

impl MeteredTier {
    pub(crate) fn new(tier: Box<dyn Tier>, file: Option<FileMeter>) -> MeteredTier {
        let load_ns = match tier.info().kind {
            TierKind::Ram => RAM_LOAD_NS,
            TierKind::Nvm => NVM_LOAD_NS,
            TierKind::File => FILE_LOAD_NS,
            TierKind::Remote => REMOTE_LOAD_NS,
        };
        MeteredTier {
            tier,
            file,
            remote: None,
            measures: false,
            shape: None,
            rated: Rated::default(),
            pool: None,
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
            removed: OnceLock::new(),
        }
    }

    /// A tier that is mapped.
    pub(crate) fn nvm(tier: NvmTier, shape: Option<Shape>) -> MeteredTier {
        let mapped_as = Some(tier.mapped_as());
        MeteredTier {
            mapped_as,
            ..MeteredTier::memory(tier, shape)
        }
    }

    /// A tier in a cluster.
    pub(crate) fn remote(tier: RemoteTier) -> MeteredTier {
        let remote = Some(tier.meter());
        MeteredTier {
            remote,
            ..MeteredTier::new(Box::new(tier), None)
        }
    }

    /// A tier that answers at once, or as late as a device.
    pub(crate) fn memory(tier: impl Tier + 'static, shape: Option<Shape>) -> MeteredTier {
        match shape {
            Some(shape) => MeteredTier {
                measures: true,
                ..MeteredTier::new(Box::new(Shaped::new(tier, shape)), None)
            },
            None => MeteredTier::new(Box::new(tier), None),
        }
    }

    /// It is as slow as a device: a load takes that much longer, until reads say more.
    pub(crate) fn slowed(mut self, shape: Option<ShapeName>) -> MeteredTier {
        self.shape = shape;
        let more = shape.map_or(0, |name| read_time(name).0);
        self.load_ns.fetch_add(more, Ordering::Relaxed);
        self
    }

    /// A load was measured to take this long.
    pub(crate) fn measured(self, load: Nanos) -> MeteredTier {
        self.load_ns.store(load.0, Ordering::Relaxed);
        self
    }

    /// It was asked for by this description: what it costs, of a pool its part of the limit, and
    /// what was measured before. A load takes as long as then, until reads say more.
    pub(crate) fn of(mut self, spec: &TierSpec, profile: Option<Profile>) -> MeteredTier {
        self.rated = spec.rated();
        self.profile = profile;
        let is_memory = matches!(spec, TierSpec::Ram(_) | TierSpec::Nvm(_));
        if let (Some(profile), false) = (&self.profile, is_memory) {
            let load = (profile.read_seconds.p50 * 1e9) as u64;
            self.load_ns.store(load, Ordering::Relaxed);
        }
        if let TierSpec::Ram(ram) = spec {
            self.pool = Some(*ram);
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
                let stored = PageCount(self.writes.load(Ordering::Relaxed)).bytes();
                Bytes(stored.0.saturating_sub(unwritten))
            }
        }
    }

    /// Whether the copies that it has can be changed in place.
    pub(crate) fn updates_copies(&self) -> bool {
        self.tier.info().kind == TierKind::Nvm
    }

    /// Has the copy in `slot` changed in place, and counts. False: it is gone, and the caller frees
    /// the slot.
    pub(crate) fn update(&self, slot: Slot, item: &Store<'_>) -> bool {
        match self.tier.update(slot, item) {
            Some(Ok(written)) => {
                let unwritten = (PAGE_BYTES as u64).saturating_sub(written.0);
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
    /// measured. Zero: unknown.
    pub(crate) fn least_load(&self) -> Nanos {
        let shaped = self.shape.map_or(Nanos(0), read_time);
        let latencies = lock(&self.read_latency);
        let measured = if latencies.is_empty() {
            0
        } else {
            latencies.min()
        };
        shaped.max(Nanos(measured))
    }

    /// Whether a store is work of the processor, and few pages at a time are as good as many.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.tier.info().kind, TierKind::Ram | TierKind::Nvm)
    }

    /// How fast it is. This decides whether it keeps second copies (`Config::for_tiers`), and which
    /// thread demotes from it.
    pub(crate) fn latency(&self) -> LatencyClass {
        match self.tier.info().kind {
            TierKind::Ram => LatencyClass::Memory,
            TierKind::Nvm => LatencyClass::Nvm,
            TierKind::File | TierKind::Remote => LatencyClass::Device,
        }
    }

    /// What it may hold now.
    fn capacity(&self) -> Bytes {
        let ceiling = Bytes(self.ceiling.load(Ordering::Relaxed));
        self.tier.capacity().min(ceiling)
    }

    /// It may hold no more than this. What is above moves down, or leaves with its pages.
    pub(crate) fn set_ceiling(&self, ceiling: Bytes) {
        self.ceiling.store(ceiling.0, Ordering::Relaxed);
    }

    /// Its state, which the engine needs before a decision.
    pub(crate) fn state(&self) -> TierState {
        let usage = self.tier.usage();
        TierState {
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
