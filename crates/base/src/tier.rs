//! The Tier port: somewhere below DRAM that keeps page copies. A tier never chooses, it is told.
//!
//! Memory tiers answer `load` at once. Block tiers mostly answer *where* to read (`Loaded::Read`),
//! so that the caller can put many reads in flight on its own ring and never blocks on the fault
//! path; it then calls `check`.

use std::os::fd::RawFd;

use crate::ids::{Slot, Stamp};
use crate::units::Bytes;

/// What kind of storage a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierKind {
    /// Compressed DRAM; its bytes count towards the client's memory limit.
    Ram,
    /// A file or block device.
    File,
}

/// What does not change while a tier lives.
#[derive(Clone, Debug)]
pub struct TierInfo {
    /// Name for reports, as the user gave it: `ram`, `file:/var/swap`.
    pub name: String,
    /// The kind.
    pub kind: TierKind,
    /// True when the device's speed is emulated; every report must say so.
    pub emulated: bool,
    /// Most stored bytes it may hold.
    pub capacity: Bytes,
}

/// What a tier holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// Pages held, before compression, in bytes.
    pub logical: Bytes,
    /// Bytes of the copies themselves, after compression.
    pub stored: Bytes,
    /// Bytes taken from the underlying memory or device, with fragmentation and metadata. For a RAM
    /// tier this is the DRAM it costs.
    pub held: Bytes,
}

/// Why a device refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailKind {
    /// The file system or device is full (ENOSPC, EDQUOT).
    NoSpace,
    /// Any other I/O error.
    Io,
}

/// Why a page was not stored. No slot is taken, and nothing that was written can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The tier is at its capacity: use the next one, or keep the page.
    #[error("the tier is full")]
    Full,
    /// Storing it here would not save memory: use the next tier, or keep the page.
    #[error("the page does not compress")]
    Incompressible,
    /// The device failed: use another tier, or keep the page.
    #[error("the device failed: {0:?}")]
    Failed(FailKind),
}

/// Why a copy could not be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The bytes are not those that were stored under this slot and stamp. Retrying a read may help
    /// once.
    #[error("the copy does not match its checksum")]
    Corrupt,
    /// The device failed to read.
    #[error("the device failed: {0:?}")]
    Failed(FailKind),
}

/// One page to store. `result` is filled in by the tier.
#[derive(Debug)]
pub struct Store<'a> {
    /// The page's bytes, one whole page.
    pub page: &'a [u8],
    /// Generation; `load` must give the same.
    pub stamp: Stamp,
    /// Checksum of `page` seeded with `stamp` ([`crate::Tier`] implementations keep it with the
    /// slot).
    pub checksum: u64,
    /// The outcome: where it is now, or why not. Callers set `Err(StoreError::Full)` beforehand.
    pub result: Result<Slot, StoreError>,
}

/// The answer of `load`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The bytes are in `dst` and verified.
    Done,
    /// The caller reads one page at `offset` of `fd` into a page-aligned buffer, then calls
    /// `check`.
    Read {
        /// Open for O_DIRECT reads; belongs to the tier and lives as long as it.
        fd: RawFd,
        /// Byte offset, page-aligned.
        offset: u64,
    },
}

/// Somewhere below DRAM that keeps page copies. Called from several threads at once.
///
/// A slot may be loaded any number of times, by several threads, until it is freed. The engine
/// frees a slot only when no load of it is in progress; a demotion may still *read* a slot being
/// freed, and finds out by its checksum.
pub trait Tier: Send + Sync {
    /// What this tier is. Cost: none.
    fn info(&self) -> &TierInfo;

    /// What it holds now. Cost: a few atomic loads; called on the fault path.
    fn usage(&self) -> TierUsage;

    /// DRAM the tier takes now. It counts toward the client's limit. Cost: as [`Tier::usage`].
    fn dram(&self) -> Bytes {
        match self.info().kind {
            TierKind::Ram => self.usage().held,
            _ => Bytes(0),
        }
    }

    /// Stores a batch; fills each `result`. Blocks for I/O: worker threads only. A page whose
    /// `result` is `Ok` is readable before this returns.
    fn store(&self, batch: &mut [Store<'_>]);

    /// Does a few milliseconds of work that can wait. Called by a worker that has nothing else to
    /// do.
    fn tidy(&self) {}

    /// Loads one page into `dst` (one whole page), or says where to read it. Fault path: no
    /// allocation, no I/O.
    ///
    /// Errors: `Corrupt` when the slot does not hold what was stored with `stamp`.
    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError>;

    /// The checksum kept for `slot`: what a `Loaded::Read` page must hash to with `stamp`, and what
    /// tells whether a resident page is unchanged. `None`: nothing of this generation is kept
    /// there, as far as the tier can tell; where it cannot, the checksum tells, since the
    /// generation is part of it.
    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64>;

    /// Gives slots back. Freeing a free slot is the caller's bug: panics.
    fn free(&self, slots: &[Slot]);
}
