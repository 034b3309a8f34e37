//! The ledger in a memfd: the page table that survives the manager. Its layout is drawn in
//! `engine/src/ledger.rs`. Managed ranges are not in it; the legacy keeps them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use undercroft_base::{PageKey, SpaceId, VirtRange};
use undercroft_engine::{FlatLedger, Ledger, LedgerError};
use undercroft_proto::legacy::Legacy;
use undercroft_sys::mapping::SharedMemory;

/// A ledger over shared memory.
pub(crate) struct MemfdLedger {
    flat: FlatLedger<Memfd>,
    legacy: Arc<Legacy>,
    /// Chunks that were in use before this manager. All, if there was none before.
    touched: usize,
}

impl MemfdLedger {
    /// The key of the run's page checksums.
    pub(crate) fn key(&self) -> PageKey {
        self.flat.key()
    }
}

/// Shared memory as words.
pub(crate) struct Memfd(SharedMemory);

impl AsRef<[AtomicU64]> for Memfd {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

impl Ledger for MemfdLedger {
    #[inline]
    fn entries(&self) -> &[AtomicU64] {
        self.flat.entries()
    }

    #[inline]
    fn chunks(&self) -> &[AtomicU64] {
        self.flat.chunks()
    }

    #[inline]
    fn notes(&self) -> &[AtomicU64] {
        self.flat.notes()
    }

    fn touched_chunks(&self) -> usize {
        self.touched
    }

    fn regions_changed(&self, space: SpaceId, regions: &[VirtRange]) {
        self.legacy.regions_changed(space, regions);
    }

    fn region_changed(
        &self,
        space: SpaceId,
        range: VirtRange,
        is_managed: bool,
        regions: &[VirtRange],
    ) {
        (self.legacy).region_changed(space, range, is_managed, regions);
    }
}

/// Lays out an empty ledger over fresh shared memory. Errors: it is too small.
pub(crate) fn create(
    memory: SharedMemory,
    chunks: usize,
    key: &PageKey,
    legacy: Arc<Legacy>,
) -> io::Result<MemfdLedger> {
    let flat = FlatLedger::create(Memfd(memory), chunks, key)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Ok(MemfdLedger {
        flat,
        legacy,
        touched: chunks,
    })
}

/// The ledger that a dead manager left. Errors: it is none, or of another version.
pub(crate) fn open(memory: SharedMemory, legacy: Arc<Legacy>) -> Result<MemfdLedger, LedgerError> {
    let end = memory.data_end().unwrap_or(memory.len() as u64);
    let flat = FlatLedger::open(Memfd(memory))?;
    let touched = flat.chunks_before(end);
    Ok(MemfdLedger {
        flat,
        legacy,
        touched,
    })
}
