//! The ledger: flat words that survive the manager. One word a page, one word a chunk, and notes of
//! unfinished work.
//!
//! ```text
//! page 0      header: magic, version, chunks; from word 8 on: the key of the page checksums; from
//!             word 64 on: notes
//! page 1..    chunk heads, one word each, padded to a page
//! then        entries, 512 words (one page) a chunk
//! ```
//! All else that the engine knows follows from these words (counts, order of pages, shared slots):
//! `recover.rs`.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{
    BASE_PAGE_BYTES, CHUNK_PAGES, ChunkNo, Entry, PageKey, PageNo, PageState, SpaceId, VirtPage,
    VirtRange,
};

/// Words of notes: see `notes.rs`.
pub const NOTE_WORDS: usize = 448;

/// The memory the page table is written to. All slices keep their length and address; `entries` has
/// 512 words for each word of `chunks`. Fresh memory is all zero.
pub trait Ledger: Send {
    /// A [`Entry`] word a page.
    fn entries(&self) -> &[AtomicU64];
    /// A head word a chunk; zero = free.
    fn chunks(&self) -> &[AtomicU64];
    /// [`NOTE_WORDS`] words: what a successor could not derive from the entries.
    fn notes(&self) -> &[AtomicU64];
    /// Writes one of the words above. Release order: a successor sees no word before the words it
    /// points to. Tests replace it, to have a manager die between two words.
    #[inline]
    fn write(&self, word: &AtomicU64, value: u64) {
        word.store(value, Ordering::Release);
    }
    /// Every chunk that was ever in use has a smaller number. All others are still all zero, heads
    /// and entries. A successor does not read those: in sparse memory, reading takes memory.
    fn touched_chunks(&self) -> usize {
        self.chunks().len()
    }
    /// The managed ranges of `space` are these from now on. A ledger whose successor cannot ask
    /// elsewhere keeps them.
    #[inline]
    fn regions_changed(&self, _space: SpaceId, _regions: &[VirtRange]) {}
    /// `range` is managed from now on ([`VirtRange::add_to`]), or is not any more
    /// ([`VirtRange::cut_from`]). Called after each such change.
    /// * `regions`: all managed ranges of `space` now.
    #[inline]
    fn region_changed(
        &self,
        _space: SpaceId,
        _range: VirtRange,
        _is_managed: bool,
        _regions: &[VirtRange],
    ) {
    }
}

/// Why the ledger of a dead manager cannot be taken over. It is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// The ledger is shorter than its own header, or than what the header says.
    #[error("the ledger has {found} bytes and needs {needed}: it was cut off")]
    TooShort {
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The memory does not begin with a ledger's magic number.
    #[error("not a ledger: byte 0 is not its magic number")]
    NotALedger,
    /// Another version wrote it.
    #[error("byte 8: the ledger is of version {0}, and only version {VERSION} can be read")]
    Version(u64),
    /// A chunk's head is impossible.
    #[error("the head of chunk {chunk} is damaged: {why}")]
    Head {
        /// Which chunk.
        chunk: u32,
        /// The reason.
        why: &'static str,
    },
    /// A page's entry is impossible.
    #[error("the entry of page {page} ({word:#018x}) is damaged: {why}")]
    Entry {
        /// Which page, counted from the start of the entries.
        page: u32,
        /// The entry.
        word: u64,
        /// The reason.
        why: &'static str,
    },
}

const MAGIC: u64 = u64::from_le_bytes(*b"ucledger");
/// Version of the layout above. A ledger of another is refused.
pub const VERSION: u64 = 5;
const HEADER_WORDS: usize = BASE_PAGE_BYTES / 8;
const KEY_AT: usize = 8;
const KEY_WORDS: usize = PageKey::BYTES / 8;
const NOTES_AT: usize = 64;

const _: () = assert!(KEY_AT + KEY_WORDS <= NOTES_AT && NOTES_AT + NOTE_WORDS <= HEADER_WORDS);

/// A ledger in one flat piece of memory, drawn at the head of this module.
#[derive(Clone, Debug)]
pub struct FlatLedger<M> {
    memory: M,
    chunks: usize,
}

/// Bytes for a ledger of `chunks` chunks. In sparse memory only used chunks cost memory.
pub fn bytes_for(chunks: usize) -> usize {
    BASE_PAGE_BYTES + heads_bytes(chunks) + chunks * BASE_PAGE_BYTES
}

fn heads_bytes(chunks: usize) -> usize {
    (chunks * 8).next_multiple_of(BASE_PAGE_BYTES)
}

impl<M: AsRef<[AtomicU64]>> FlatLedger<M> {
    /// Lays out an empty ledger over fresh memory, all zero. It keeps `key` for successors.
    ///
    /// Errors: the memory is too short.
    pub fn create(memory: M, chunks: usize, key: &PageKey) -> Result<FlatLedger<M>, LedgerError> {
        let ledger = FlatLedger::over(memory, chunks)?;
        let header = ledger.memory.as_ref();
        header[1].store(VERSION, Ordering::Relaxed);
        header[2].store(chunks as u64, Ordering::Relaxed);
        let (words, _) = key.secret().as_chunks();
        for (place, word) in header[KEY_AT..].iter().zip(words) {
            place.store(u64::from_le_bytes(*word), Ordering::Relaxed);
        }
        header[0].store(MAGIC, Ordering::Release);
        Ok(ledger)
    }

    /// Opens the ledger that a dead manager left in `memory`. Checks the header only; recovery
    /// checks the rest.
    pub fn open(memory: M) -> Result<FlatLedger<M>, LedgerError> {
        let words = memory.as_ref();
        if words.len() < HEADER_WORDS {
            return Err(LedgerError::TooShort {
                needed: BASE_PAGE_BYTES as u64,
                found: words.len() as u64 * 8,
            });
        }
        if words[0].load(Ordering::Acquire) != MAGIC {
            return Err(LedgerError::NotALedger);
        }
        match words[1].load(Ordering::Relaxed) {
            VERSION => {}
            other => return Err(LedgerError::Version(other)),
        }
        let chunks = words[2].load(Ordering::Relaxed);
        // Page numbers have 32 bits.
        let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
        FlatLedger::over(memory, chunks.min(1 << 32))
    }

    /// The key of the run's page checksums.
    pub fn key(&self) -> PageKey {
        let mut secret = [0; PageKey::BYTES];
        let words = &self.memory.as_ref()[KEY_AT..KEY_AT + KEY_WORDS];
        for (part, word) in secret.chunks_mut(8).zip(words) {
            part.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        PageKey::new(secret)
    }

    /// As [`Ledger::touched_chunks`], if everything behind byte `end` of the memory is zero.
    pub fn chunks_before(&self, end: u64) -> usize {
        let entries = (HEADER_WORDS * 8 + heads_bytes(self.chunks)) as u64;
        let entries = end.saturating_sub(entries).div_ceil(BASE_PAGE_BYTES as u64);
        (entries as usize).min(self.chunks)
    }

    fn over(memory: M, chunks: usize) -> Result<FlatLedger<M>, LedgerError> {
        let (needed, found) = (bytes_for(chunks) as u64, memory.as_ref().len() as u64 * 8);
        let nameable = chunks as u64 * u64::from(CHUNK_PAGES) <= 1 << 32;
        if needed <= found && nameable {
            Ok(FlatLedger { memory, chunks })
        } else {
            Err(LedgerError::TooShort { needed, found })
        }
    }
}

impl<M: AsRef<[AtomicU64]> + Send> Ledger for FlatLedger<M> {
    fn entries(&self) -> &[AtomicU64] {
        let at = HEADER_WORDS + heads_bytes(self.chunks) / 8;
        &self.memory.as_ref()[at..at + self.chunks * CHUNK_PAGES as usize]
    }

    fn chunks(&self) -> &[AtomicU64] {
        &self.memory.as_ref()[HEADER_WORDS..HEADER_WORDS + self.chunks]
    }

    fn notes(&self) -> &[AtomicU64] {
        &self.memory.as_ref()[NOTES_AT..NOTES_AT + NOTE_WORDS]
    }
}

/// A ledger in ordinary memory: simulations and tests.
#[derive(Debug)]
pub struct VecLedger {
    entries: Vec<AtomicU64>,
    chunks: Vec<AtomicU64>,
    notes: Vec<AtomicU64>,
}

impl VecLedger {
    /// Room for `chunks` chunks (2 MiB of address space each).
    pub fn new(chunks: usize) -> VecLedger {
        let words = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        VecLedger {
            entries: words(chunks * CHUNK_PAGES as usize),
            chunks: words(chunks),
            notes: words(NOTE_WORDS),
        }
    }
}

impl Ledger for VecLedger {
    #[inline]
    fn entries(&self) -> &[AtomicU64] {
        &self.entries
    }

    #[inline]
    fn chunks(&self) -> &[AtomicU64] {
        &self.chunks
    }

    #[inline]
    fn notes(&self) -> &[AtomicU64] {
        &self.notes
    }
}

/// Bits of the number of a space, in a chunk's head and in a note.
pub(crate) const SPACE_BITS: u32 = 24;

/// A chunk's head word: in use (bit 63), space (24 bits), 2 MiB-aligned position (36 bits, 57-bit
/// addresses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkHead {
    pub space: SpaceId,
    pub first: VirtPage,
}

impl ChunkHead {
    /// How many positions, in units of a chunk, fit the word.
    pub(crate) const POSITIONS: u64 = 1 << 36;

    #[inline]
    pub(crate) fn pack(self) -> u64 {
        assert!(
            self.space.0 < 1 << SPACE_BITS,
            "more address spaces than the ledger can name"
        );
        (1 << 63) | (u64::from(self.space.0) << 36) | (self.first.0 / u64::from(CHUNK_PAGES))
    }

    #[inline]
    pub(crate) fn unpack(word: u64) -> Option<ChunkHead> {
        (word >> 63 == 1).then_some(ChunkHead {
            space: SpaceId((word >> 36) as u32 & ((1 << SPACE_BITS) - 1)),
            first: VirtPage((word & (Self::POSITIONS - 1)) * u64::from(CHUNK_PAGES)),
        })
    }
}

/// Reads and writes of single words. Only the engine writes, so relaxed order is enough for
/// reading.
pub(crate) trait LedgerWords: Ledger {
    #[inline]
    fn entry(&self, page: PageNo) -> Entry {
        Entry::unpack(self.entries()[page.0 as usize].load(Ordering::Relaxed))
    }

    /// The words of a chunk's pages.
    #[inline]
    fn words(&self, chunk: ChunkNo) -> &[AtomicU64] {
        let first = chunk.page(0).0 as usize;
        &self.entries()[first..][..CHUNK_PAGES as usize]
    }

    #[inline]
    fn set_entry(&self, page: PageNo, entry: Entry) {
        self.write(&self.entries()[page.0 as usize], entry.pack());
    }

    #[inline]
    fn set_state(&self, page: PageNo, state: PageState) {
        let word = &self.entries()[page.0 as usize];
        self.write(word, Entry::with_state(word.load(Ordering::Relaxed), state));
    }

    #[inline]
    fn head(&self, chunk: ChunkNo) -> Option<ChunkHead> {
        ChunkHead::unpack(self.chunks()[chunk.0 as usize].load(Ordering::Relaxed))
    }

    #[inline]
    fn set_head(&self, chunk: ChunkNo, head: Option<ChunkHead>) {
        let word = head.map_or(0, ChunkHead::pack);
        self.write(&self.chunks()[chunk.0 as usize], word);
    }
}

impl<L: Ledger + ?Sized> LedgerWords for L {}
