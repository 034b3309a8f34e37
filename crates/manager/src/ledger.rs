//! The ledger in a memfd: the page table that survives the manager.
//!
//! ```text
//! page 0      header: magic, version, chunks
//! page 1..    chunk heads, one word each, padded to a page
//! then        entries, 512 words (one page) a chunk
//! ```

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{CHUNK_PAGES, PAGE_BYTES};
use undercroft_engine::Ledger;
use undercroft_sys::mapping::SharedMemory;

const MAGIC: u64 = u64::from_le_bytes(*b"ucledger");
const VERSION: u64 = 1;
const HEADER_WORDS: usize = PAGE_BYTES / 8;

/// A [`Ledger`] over shared memory.
pub(crate) struct MemfdLedger {
    memory: SharedMemory,
    chunks: usize,
    entries_at: usize,
}

/// Bytes of shared memory for `chunks` chunks; sparse, so only used chunks take memory.
pub(crate) fn bytes_for(chunks: usize) -> usize {
    PAGE_BYTES + heads_bytes(chunks) + chunks * PAGE_BYTES
}

fn heads_bytes(chunks: usize) -> usize {
    (chunks * 8).next_multiple_of(PAGE_BYTES)
}

impl MemfdLedger {
    /// Lays out an empty ledger over fresh shared memory.
    pub fn create(memory: SharedMemory, chunks: usize) -> io::Result<MemfdLedger> {
        if memory.len() < bytes_for(chunks) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the ledger's memory is too small",
            ));
        }
        let header = memory.words();
        header[1].store(VERSION, Ordering::Relaxed);
        header[2].store(chunks as u64, Ordering::Relaxed);
        header[0].store(MAGIC, Ordering::Release);
        let entries_at = HEADER_WORDS + heads_bytes(chunks) / 8;
        Ok(MemfdLedger {
            memory,
            chunks,
            entries_at,
        })
    }
}

impl Ledger for MemfdLedger {
    fn entries(&self) -> &[AtomicU64] {
        let len = self.chunks * CHUNK_PAGES as usize;
        &self.memory.words()[self.entries_at..self.entries_at + len]
    }

    fn chunks(&self) -> &[AtomicU64] {
        &self.memory.words()[HEADER_WORDS..HEADER_WORDS + self.chunks]
    }
}
