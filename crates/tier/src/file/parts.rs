//! Packed slots: several compressed pages in one block of the file.
//!
//! ```text
//! slot of a packed tier:  | block | part, 3 bits |    part 0: a whole page, as it is
//! block of parts 1..=7:   | end of each part, 7 x 2 bytes | part 1 | part 2 | ...
//! table, behind the rest: | parts in use, 8 bits a block | checksums of part 1, 8 bytes a block |
//!                         | of part 2 | ...
//! ```
//! The slot says whether its copy is compressed. Blocks are written once, and used again when the
//! last of their parts is free. The bytes of a block come from a device: they are anything until
//! they were parsed, and the checksum of the page verifies what comes of them.
//!
//! A block bit is set before the bits of its parts, and cleared after them: [`Parts::recover`].

use std::sync::atomic::{AtomicU64, Ordering::*};

use undercroft_base::{BASE_PAGE_BYTES, PageSize, Slot};
use undercroft_sys::mapping::SharedMemory;

use super::slab_slots;
use super::slabs::Bitmaps;
use crate::ram::compressor::{Compressor, with_scratch};

/// Bits of a slot that say which part it is.
const SHIFT: u32 = 3;
/// Most pages in one block.
pub(super) const PARTS_MAX: usize = (1 << SHIFT) - 1;
/// Bytes before the first part.
const HEAD: usize = 2 * PARTS_MAX;
/// Longest part. Another of a fifth of a page has room beside it.
pub(super) const PART_BYTES_MAX: usize = 3 << 10;
/// Most bytes of a packed tier: a page entry can name no more slots.
pub(super) const PACKED_BYTES_MAX: u64 = (Slot::LIMIT >> SHIFT) * BASE_PAGE_BYTES as u64;

/// Blocks whose bits are in one word.
const IN_WORD: u64 = 8;

/// Which parts of a tier's blocks are in use.
#[derive(Debug)]
pub(super) struct Parts {
    /// Where the bits begin.
    first_word: usize,
    /// Blocks of the tier.
    blocks: u64,
    /// Parts in use.
    live: AtomicU64,
}

impl Parts {
    /// Words of the slot table, for this many slabs.
    pub(super) fn words(slabs: usize) -> usize {
        let blocks = slabs * slab_slots(PageSize::Base) as usize;
        blocks.div_ceil(IN_WORD as usize) + PARTS_MAX * blocks
    }

    /// Over words of the table that are all zeros, or as an earlier manager left them.
    pub(super) fn over(first_word: usize, slabs: u32) -> Parts {
        Parts {
            first_word,
            blocks: u64::from(slabs) * u64::from(slab_slots(PageSize::Base)),
            live: AtomicU64::new(0),
        }
    }

    pub(super) fn slot(block: u64, part: u8) -> Slot {
        Slot(block << SHIFT | u64::from(part))
    }

    pub(super) fn block(slot: Slot) -> u64 {
        slot.0 >> SHIFT
    }

    fn part(slot: Slot) -> usize {
        slot.0 as usize & PARTS_MAX
    }

    /// Pages in use.
    pub(super) fn live(&self) -> u64 {
        self.live.load(Relaxed)
    }

    fn word<'a>(&self, table: &'a SharedMemory, block: u64) -> (&'a AtomicU64, u32) {
        let word = &table.words()[self.first_word + (block / IN_WORD) as usize];
        (word, (block % IN_WORD * 8) as u32)
    }

    /// A bit for each part of a block that is in use.
    pub(super) fn of_block(&self, table: &SharedMemory, block: u64) -> u8 {
        let (word, shift) = self.word(table, block);
        (word.load(Relaxed) >> shift) as u8
    }

    pub(super) fn is_taken(&self, table: &SharedMemory, slot: Slot) -> bool {
        let block = Parts::block(slot);
        block < self.blocks && self.of_block(table, block) >> Parts::part(slot) & 1 == 1
    }

    /// The word of the slot's checksum, from the first of the table. `None`: it is that of a whole
    /// page, by its block.
    pub(super) fn sum_word(&self, slot: Slot) -> Option<usize> {
        let plane = Parts::part(slot).checked_sub(1)?;
        let bits = self.blocks.div_ceil(IN_WORD) as usize;
        let before = plane * self.blocks as usize;
        Some(self.first_word + bits + before + Parts::block(slot) as usize)
    }

    /// The part is in use from now on, and its block already. The caller has the lock of the slabs.
    pub(super) fn take(&self, table: &SharedMemory, slot: Slot) {
        let (word, shift) = self.word(table, Parts::block(slot));
        let bit = 1 << (shift as usize + Parts::part(slot));
        word.fetch_or(bit, Relaxed);
        self.live.fetch_add(1, Relaxed);
    }

    /// Frees a part. True: it was the last of its block. Panics if it is free already: the caller's
    /// books are wrong. The caller has the lock of the slabs.
    pub(super) fn free(&self, table: &SharedMemory, slot: Slot) -> bool {
        assert!(
            self.is_taken(table, slot),
            "slot {slot:?} of the file tier is free already"
        );
        let (word, shift) = self.word(table, Parts::block(slot));
        let bit = 1 << (shift as usize + Parts::part(slot));
        let left = word.fetch_and(!bit, Release) & !bit;
        self.live.fetch_sub(1, Relaxed);
        left >> shift & 0xff == 0
    }

    /// Makes the bits of the blocks fit those of their parts, and counts. A manager may have died
    /// between the two.
    ///
    /// * `slabs`: no later one has a block in use.
    pub(super) fn recover(&self, table: &SharedMemory, bitmaps: Bitmaps<'_>, slabs: u32) {
        let blocks = u64::from(slabs) * u64::from(slab_slots(PageSize::Base));
        let mut live = 0;
        for block in 0..blocks {
            let parts = self.of_block(table, block);
            if bitmaps.is_taken(block) != (parts != 0) {
                bitmaps.set_taken(block, parts != 0);
            }
            live += u64::from(parts.count_ones());
        }
        self.live.store(live, Relaxed);
    }
}

/// Begins a block. Returns its length so far.
pub(super) fn begin(block: &mut [u8]) -> usize {
    block[..HEAD].fill(0);
    HEAD
}

/// Appends a part to a block of this length.
/// * `part`: its number, from 1.
pub(super) fn append(block: &mut [u8], (length, part): (usize, u8), bytes: &[u8]) -> usize {
    let end = length + bytes.len();
    block[length..end].copy_from_slice(bytes);
    let at = 2 * usize::from(part - 1);
    block[at..at + 2].copy_from_slice(&(end as u16).to_le_bytes());
    end
}

/// Where a part lies in a block that was read. `None`: the block is damaged, or has no such part.
fn find(block: &[u8], part: usize) -> Option<std::ops::Range<usize>> {
    let end_of = |part: usize| {
        let at = 2 * (part - 1);
        usize::from(u16::from_le_bytes([block[at], block[at + 1]]))
    };
    let start = if part == 1 { HEAD } else { end_of(part - 1) };
    let end = end_of(part);
    (HEAD <= start && start < end && end <= block.len()).then_some(start..end)
}

/// Makes the page of `slot` of the block that was read into `page`. False: the block is damaged.
/// True says nothing of the bytes: the caller verifies them.
pub(super) fn unpack(slot: Slot, page: &mut [u8]) -> bool {
    let part = Parts::part(slot);
    if part == 0 {
        return true;
    }
    if page.len() != BASE_PAGE_BYTES {
        return false;
    }
    let Some(range) = find(page, part) else {
        return false;
    };
    with_scratch(|scratch| {
        let bytes = range.len();
        scratch.object[..bytes].copy_from_slice(&page[range]);
        scratch.decompress(Compressor::Lz4, bytes, page)
    })
}

/// Says whether it is worth the time to compress a page: a page like those before it, of which none
/// became short, is tried only now and then.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    /// Pages that did not become short since one did.
    misses: u32,
}

/// As many in a row show that pages do not compress.
const MISSES: u32 = 32;
/// Then each of this many is tried.
const TRIED: u32 = 8;

impl Evidence {
    /// Calls `store` with the page's compressed bytes, if they are short enough.
    pub(super) fn compress<T>(&mut self, page: &[u8], store: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let misses = self.misses;
        self.misses = misses.wrapping_add(1);
        if misses >= MISSES && !misses.is_multiple_of(TRIED) {
            return None;
        }
        with_scratch(|scratch| {
            scratch.reserve(Compressor::Lz4, 1);
            let bytes = scratch.compress(Compressor::Lz4, page, 0)?;
            if bytes > PART_BYTES_MAX {
                return None;
            }
            self.misses = 0;
            Some(store(&scratch.objects[..bytes]))
        })
    }
}
