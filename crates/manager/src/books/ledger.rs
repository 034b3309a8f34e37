//! The ledger in a memfd: the page table that survives the manager. Its layout is drawn in
//! `engine/src/ledger.rs`. Managed ranges are not in it; the legacy keeps them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use undercroft_base::{SpaceId, VirtRange};
use undercroft_engine::{FlatLedger, Ledger, LedgerError};
use undercroft_sys::mapping::SharedMemory;

use crate::legacy::Legacy;

/// A ledger over shared memory.
pub(crate) struct MemfdLedger {
    flat: FlatLedger<Memfd>,
    legacy: Arc<Legacy>,
    /// Chunks that were in use before this manager. All, if there was none before.
    touched: usize,
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
}

/// Bytes of shared memory for `chunks` chunks; sparse, so only used chunks take memory.
pub(crate) fn bytes_for(chunks: usize) -> usize {
    undercroft_engine::bytes_for(chunks)
}

/// Lays out an empty ledger over fresh shared memory. Errors: it is too small.
pub(crate) fn create(
    memory: SharedMemory,
    chunks: usize,
    legacy: Arc<Legacy>,
) -> io::Result<MemfdLedger> {
    let flat = FlatLedger::create(Memfd(memory), chunks)
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
