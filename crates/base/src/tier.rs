//! The Tier port: storage below DRAM that keeps page copies. A tier makes no choices.
//!
//! Memory tiers answer `load` at once. Block tiers mostly answer *where* to read (`Loaded::Read`),
//! and the caller then calls `checksum`. So the caller can put many reads in flight on its own
//! ring, and never blocks on the fault path. A remote tier answers that the copy must be fetched
//! (`Loaded::Fetch`). The caller asks for it by `fetch`, and finds it in its inbox.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::ids::{Slot, Stamp};
use crate::units::{Bytes, Nanos, PageSize};

/// How long a tier takes to load a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LatencyClass {
    /// Compressed in DRAM: some microseconds, on the loading thread.
    Memory,
    /// Mapped memory that is not DRAM: a microsecond, on the loading thread.
    Nvm,
    /// A request to a device.
    Device,
}

impl LatencyClass {
    /// Whether latency control keeps clients that do not need it out of the fastest tier, if this
    /// is how fast it is. A compressed tier is no scarce device that others share, and the limit
    /// pays for it already.
    pub fn is_spared(self) -> bool {
        self != LatencyClass::Memory
    }
}

/// Properties of every tier of one kind. Code that treats tiers differently asks for these, and
/// never for the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierFacts {
    /// Name for people: in `--tier`, in reports and in messages.
    pub kind: &'static str,
    /// How fast it is. Decides which tiers keep second copies, and which thread demotes.
    pub class: LatencyClass,
    /// Time that a load is thought to take before any was measured.
    pub first_load: Nanos,
    /// Its bytes are DRAM, and count towards the client's memory limit.
    pub charged_to_limit: bool,
    /// Copies can be changed in place ([`Tier::update`]).
    pub updates_copies: bool,
    /// Space is taken as copies come: the quota may change, and the copies are gathered.
    pub grows: bool,
    /// Copies are on other machines: they are fetched ([`Tier::fetch`]), and the end of the run
    /// deletes them ([`Tier::close`]).
    pub remote: bool,
    /// Its copies are the pages of a file that another program has written: nothing is ever stored
    /// in it, none of its slots is in use, and no copy has a checksum.
    pub is_source: bool,
}

impl TierFacts {
    /// A kind with none of the properties.
    pub const fn of(kind: &'static str, class: LatencyClass, first_load: Nanos) -> TierFacts {
        TierFacts {
            kind,
            class,
            first_load,
            charged_to_limit: false,
            updates_copies: false,
            grows: false,
            remote: false,
            is_source: false,
        }
    }

    /// Whether loads and stores are work of the processor, in memory.
    pub fn is_memory(&self) -> bool {
        self.class != LatencyClass::Device
    }

    /// Whether copies are in a file or device of this machine.
    pub fn is_local_device(&self) -> bool {
        !self.is_memory() && !self.remote
    }
}

/// Constants of a tier while it lives.
#[derive(Clone, Debug)]
pub struct TierInfo {
    /// Name for reports, as the user gave it: `ram`, `nvm:/mnt/pmem`, `file:/var/swap`.
    pub name: String,
    /// Facts of its kind.
    pub facts: &'static TierFacts,
    /// Size of the pages of its copies. No other is stored in it.
    pub page: PageSize,
    /// True when the device's speed is emulated; every report must say so.
    pub emulated: bool,
    /// Most stored bytes it may ever hold: see [`Tier::capacity`].
    pub capacity: Bytes,
}

/// Bytes that a tier holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Bytes of the pages it holds, before compression.
    pub logical: Bytes,
    /// Bytes of the copies themselves, after compression.
    pub stored: Bytes,
    /// Bytes used of the underlying memory or device, with fragmentation and metadata. For a RAM
    /// tier this is its DRAM.
    pub held: Bytes,
}

/// Counts of what happened in a remote tier since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounts {
    /// Pages with one copy now.
    pub degraded: u64,
    /// Copies that were found missing.
    pub missing: u64,
    /// Pages whose copies were stored anew.
    pub mended: u64,
    /// Reads for which the second master was asked because the first was late.
    pub hedged: u64,
    /// Reads that ended at the deadline, and were tried again.
    pub late: u64,
    /// Values that did not verify.
    pub damaged: u64,
    /// Reads that found no copy, so that a page is lost.
    pub lost: u64,
    /// Connections that broke or could not be made.
    pub breaks: u64,
}

/// Why a device failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailKind {
    /// The file system or device is full (ENOSPC, EDQUOT).
    NoSpace,
    /// Any other I/O error.
    Io,
}

/// Why a page was not stored. It took no slot, and nothing of it is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The tier is at its capacity. Use the next one, or keep the page.
    #[error("the tier is full")]
    Full,
    /// Storing it here would save no memory. Use the next tier, or keep the page.
    #[error("the page does not compress")]
    Incompressible,
    /// The device failed. Use another tier, or keep the page.
    #[error("the device failed: {0:?}")]
    Failed(FailKind),
}

/// Why a copy could not be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The bytes are not those that were stored under this slot and stamp. One more read may help.
    #[error("the copy does not match its checksum")]
    Corrupt,
    /// The device failed to read.
    #[error("the device failed: {0:?}")]
    Failed(FailKind),
    /// The copy did not come before the deadline. It may come if it is asked for again.
    #[error("the copy did not come in time")]
    Late,
}

/// A copy that was fetched, or why not.
#[derive(Debug)]
pub struct Fetched {
    /// As the caller gave it.
    pub token: u64,
    /// A whole page, verified.
    pub page: Result<Box<[u8]>, LoadError>,
}

/// Where copies arrive that were asked for by [`Tier::fetch`]. Any thread may call it.
pub trait Inbox: Send + Sync {
    /// Takes an arrival, and wakes the thread that waits for it. Never blocks for long.
    fn deliver(&self, arrival: Fetched);
}

/// A page to store. `result` is filled in by the tier.
#[derive(Debug)]
pub struct Store<'a> {
    /// The page's bytes, one whole page.
    pub page: &'a [u8],
    /// Generation; `load` must be given the same.
    pub stamp: Stamp,
    /// Checksum of `page` seeded with `stamp` ([`crate::Tier`] implementations keep it with the
    /// slot).
    pub checksum: u64,
    /// Where the page is now, or why it was not stored. The caller sets `Err(StoreError::Full)`
    /// before.
    pub result: Result<Slot, StoreError>,
}

/// The answer of `load`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The bytes are in `dst` and verified.
    Done,
    /// The caller reads one page at `offset` of `fd` into a page-aligned buffer, then calls
    /// `unpack` and `checksum`. Several copies may be in one place.
    Read {
        /// Open for O_DIRECT reads. The tier owns it and keeps it open while it lives.
        fd: RawFd,
        /// Byte offset, page-aligned.
        offset: u64,
    },
    /// The copy is on another machine: the caller calls [`Tier::fetch`].
    Fetch,
}

/// Storage below DRAM that keeps page copies. Several threads call it at once.
///
/// Six methods make a tier. Eleven more have a default. Only a tier that puts work off needs its
/// own [`Tier::dram`], for pages that wait in memory, and [`Tier::tidy`], for the work. Only one
/// that gives space back in large pieces needs [`Tier::scattered`] and [`Tier::gathered`]. Only one
/// whose speed is emulated needs [`Tier::reading`]. Only one that keeps several copies in one place
/// needs [`Tier::unpack`]. Only a remote one needs [`Tier::fetch`] and [`Tier::remote_counts`]. One
/// that uses a file or a cluster needs [`Tier::close`]. Only one whose copies can be changed byte
/// by byte needs [`Tier::update`]. Only one that may be given more or less room while it is used
/// needs [`Tier::capacity`].
///
/// A slot may be loaded any number of times, by several threads, until it is freed. The engine
/// frees a slot only when no load of it is in progress. A demotion may still *read* a slot that is
/// being freed; the checksum shows it.
pub trait Tier: Send + Sync {
    /// Constants of this tier. Cost: none.
    fn info(&self) -> &TierInfo;

    /// Most stored bytes it may hold now. Cost: as [`Tier::usage`].
    fn capacity(&self) -> Bytes {
        self.info().capacity
    }

    /// Bytes that it holds now. Cost: a few atomic loads; called on the fault path.
    fn usage(&self) -> TierUsage;

    /// DRAM that the tier uses now. It counts towards the client's limit. Cost: as [`Tier::usage`].
    fn dram(&self) -> Bytes {
        if self.info().facts.charged_to_limit {
            self.usage().held
        } else {
            Bytes(0)
        }
    }

    /// Stores a batch and fills each `result`. Blocks for I/O: worker threads only. A page whose
    /// `result` is `Ok` is readable when this returns.
    fn store(&self, batch: &mut [Store<'_>]);

    /// Makes the copy in `slot` one of `item`, and writes only what differs from it. Returns how
    /// many bytes were written. `None`: the tier has no way to; nothing was changed. The caller
    /// owns the slot: no entry names it, and no thread loads or frees it meanwhile. It may be
    /// loaded, with the stamp of `item`, once this has returned.
    ///
    /// Errors: the copy is gone, and the caller frees the slot.
    fn update(&self, _slot: Slot, _item: &Store<'_>) -> Option<Result<Bytes, StoreError>> {
        None
    }

    /// Does a few milliseconds of deferred work. An idle worker calls it. True: there is more.
    fn tidy(&self) -> bool {
        false
    }

    /// Ranges of slots, ascending, whose copies should be stored again so that the space of the
    /// ranges can be given back. No slot of a range that has copies is given out until
    /// [`Tier::gathered`]. Empty: nothing is to be done.
    fn scattered(&self) -> Vec<Range<Slot>> {
        Vec::new()
    }

    /// Tells the tier that all copies that could be stored again were. The slots of the ranges that
    /// still have copies are used as before.
    fn gathered(&self) {}

    /// Loads one page into `dst` (one whole page), or says where to read it. On the fault path: no
    /// allocation, no I/O.
    ///
    /// Errors: `Corrupt` if the slot does not hold what was stored with `stamp`.
    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError>;

    /// A read that [`Loaded::Read`] asked for begins, perhaps one of several pages. It is not
    /// complete before this time has passed: the emulated device is slower than the one below.
    fn reading(&self, _offset: u64, _bytes: u64) -> Nanos {
        Nanos(0)
    }

    /// Makes the page of `slot` of what was read for it ([`Loaded::Read`]), in place. The bytes may
    /// be damaged, so the caller verifies what comes of them. False: they are no copy. Cost: none
    /// for a copy that is a whole page; otherwise it is decompressed. No I/O. The first call of a
    /// thread may allocate.
    fn unpack(&self, _slot: Slot, _page: &mut [u8]) -> bool {
        true
    }

    /// Begins to fetch a copy for which `load` answered [`Loaded::Fetch`]. Exactly one arrival with
    /// `token` is delivered to `inbox`, before the tier's deadline, perhaps before this returns.
    /// Its bytes are verified. No I/O in the calling thread.
    fn fetch(&self, _slot: Slot, _stamp: Stamp, token: u64, inbox: &Arc<dyn Inbox>) {
        inbox.deliver(Fetched {
            token,
            page: Err(LoadError::Failed(FailKind::Io)),
        });
    }

    /// The counts of a tier on other machines.
    fn remote_counts(&self) -> Option<RemoteCounts> {
        None
    }

    /// The tier is empty and used no more, or it is in a cluster and the run has ended. Gives its
    /// space back. Only [`Tier::info`] and [`Tier::usage`] are called after this one. Takes a few
    /// seconds at most.
    fn close(&self) {}

    /// The checksum kept for `slot`. A `Loaded::Read` page must have it, and so must a resident
    /// page that is unchanged. `None` if the tier knows that it keeps nothing of this generation
    /// there. A tier that cannot know returns a checksum that does not match, because the
    /// generation is part of it.
    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64>;

    /// Frees slots. Panics if a slot is free already: the caller's bug.
    fn free(&self, slots: &[Slot]);
}
