//! The ledger: flat words that survive the manager. One word a page, one word a chunk.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{CHUNK_PAGES, ChunkNo, Entry, PageNo, SpaceId, VirtPage};

/// The memory the page table is written to. Both slices keep their length and address; `entries` has
/// 512 words for each word of `chunks`. Fresh memory is all zero.
pub trait Ledger: Send {
    /// One [`Entry`] word a page.
    fn entries(&self) -> &[AtomicU64];
    /// One head word a chunk; zero = free.
    fn chunks(&self) -> &[AtomicU64];
}

/// A ledger in ordinary memory: simulations and tests.
#[derive(Debug)]
pub struct VecLedger {
    entries: Vec<AtomicU64>,
    chunks: Vec<AtomicU64>,
}

impl VecLedger {
    /// Room for `chunks` chunks (2 MiB of address space each).
    pub fn new(chunks: usize) -> VecLedger {
        let words = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        VecLedger {
            entries: words(chunks * CHUNK_PAGES as usize),
            chunks: words(chunks),
        }
    }
}

impl Ledger for VecLedger {
    fn entries(&self) -> &[AtomicU64] {
        &self.entries
    }

    fn chunks(&self) -> &[AtomicU64] {
        &self.chunks
    }
}

/// A chunk's head word: in use (bit 63), space (24 bits), 2 MiB-aligned position (36 bits, 57-bit addresses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkHead {
    pub space: SpaceId,
    pub first: VirtPage,
}

impl ChunkHead {
    fn pack(self) -> u64 {
        assert!(
            self.space.0 < 1 << 24,
            "more address spaces than the ledger can name"
        );
        (1 << 63) | (u64::from(self.space.0) << 36) | (self.first.0 / u64::from(CHUNK_PAGES))
    }

    fn unpack(word: u64) -> Option<ChunkHead> {
        (word >> 63 == 1).then_some(ChunkHead {
            space: SpaceId((word >> 36) as u32 & 0xff_ffff),
            first: VirtPage((word & ((1 << 36) - 1)) * u64::from(CHUNK_PAGES)),
        })
    }
}

/// Reads and writes of single words. The engine is the only writer, so relaxed order is enough; the release store
/// keeps a word from becoming visible to a successor before what it points to.
pub(crate) trait LedgerWords: Ledger {
    fn entry(&self, page: PageNo) -> Entry {
        Entry::unpack(self.entries()[page.0 as usize].load(Ordering::Relaxed))
    }

    fn set_entry(&self, page: PageNo, entry: Entry) {
        self.entries()[page.0 as usize].store(entry.pack(), Ordering::Release);
    }

    fn head(&self, chunk: ChunkNo) -> Option<ChunkHead> {
        ChunkHead::unpack(self.chunks()[chunk.0 as usize].load(Ordering::Relaxed))
    }

    fn set_head(&self, chunk: ChunkNo, head: Option<ChunkHead>) {
        self.chunks()[chunk.0 as usize].store(head.map_or(0, ChunkHead::pack), Ordering::Release);
    }
}

impl<L: Ledger + ?Sized> LedgerWords for L {}
