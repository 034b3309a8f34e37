//! The ledger in a memfd: the page table that survives the manager. Its layout is drawn in
//! `engine/src/ledger.rs`.

use std::io;
use std::sync::atomic::AtomicU64;

use undercroft_engine::FlatLedger;
use undercroft_sys::mapping::SharedMemory;

/// A ledger over shared memory.
pub(crate) type MemfdLedger = FlatLedger<Memfd>;

/// Shared memory as words.
pub(crate) struct Memfd(SharedMemory);

impl AsRef<[AtomicU64]> for Memfd {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

/// Bytes of shared memory for `chunks` chunks; sparse, so only used chunks take memory.
pub(crate) fn bytes_for(chunks: usize) -> usize {
    undercroft_engine::bytes_for(chunks)
}

/// Lays out an empty ledger over fresh shared memory. Errors: it is too small.
pub(crate) fn create(memory: SharedMemory, chunks: usize) -> io::Result<MemfdLedger> {
    FlatLedger::create(Memfd(memory), chunks)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}
