//! Doubly linked lists over page numbers: the common ground of every reclaim policy.
//!
//! Only pages that are in a list have links. Those of a chunk (512 pages) lie one after the other, in the order of their
//! page numbers, in pieces of a common pool. Two bits a page say which list it is in and two are the policy's mark; the
//! listed pages counted up to a page say where its link is, so nothing stores that:
//!
//! ```text
//! Chunk: 512 pages, 304 bytes; none while no page of it is in a list
//! +----------------------------------------------------------------------+
//! | blocks: 8 x 64 pages: list bit 0, list bit 1, mark bit 0, mark bit 1 |     Link, 7 bytes
//! | listed: u16 x 8: pages in a list, up to the end of each block        |     +--------------+------------------+
//! | pieces: u32 x 8 ---> Piece: 64 links (the last is partly filled)     |     | next page 28 | previous page 28 |
//! +----------------------------------------------------------------------+     +--------------+------------------+
//! ```
//! Bytes a page of the chunks, residents spread at random: 1.8 when 12 % are in a list, 4.6 when half are, 7.6 when all
//! are (8.0 always with two links of 4 bytes for every page, as it was); the manager's memory grows by as much.
//! Nanoseconds, and in brackets those of the 8-byte links of c86e851 put beside it for the same two runs; half of the
//! pages resident, all accesses at random (2026-11-21, Linux 6.18, 2 noisy cores;
//! `cargo test --release -p undercroft-policy -- --ignored --nocapture lists_table` prints ours):
//!
//! ```text
//!                             2^18 pages               2^21 pages
//! mark a page (CLOCK touch)   4-5     (3-4)            4       (30-31)
//! front to back (the hand)    40-42   (14-16)          183-215 (166-171)
//! move to back (LRU touch)    49-51   (12-26)          243-253 (134-147)
//! remove one, insert one      174-221 (14-25)          355-697 (128-143)
//! ```
//! Rejected: queues of page numbers in which a moved page leaves a stale entry (1 + 5 bytes for a resident page): runs of
//! stale entries in front make a rare call long, and tags that tell them apart wrap. Links in a heap array a chunk: 11
//! bytes a page in the process when all are resident, 7.6 of them counted, for holes between arrays that grow. Chunks of
//! 128 or 256 pages: no faster where it counts, 0.1 to 0.7 bytes more.
//!
//! At an end of a list the link that leads nowhere holds any number: who asks compares with the list's front and back.
//! Limit: page numbers below 2^28 (1 TiB of address space, what the ledger is laid out for).

use undercroft_base::{Bytes, CHUNK_PAGES, PageCount, PageNo};

const PAGE_BITS: u32 = 28;
const PAGE_MASK: u32 = (1 << PAGE_BITS) - 1;
const PER_CHUNK: usize = CHUNK_PAGES as usize;
const PER_BLOCK: usize = 64;
const BLOCKS: usize = PER_CHUNK / PER_BLOCK;
/// Links in a piece, and the most pieces of a chunk.
const PIECE_LINKS: usize = 64;
const PIECES: usize = PER_CHUNK / PIECE_LINKS;
/// Pieces allocated at once.
const SLAB_PIECES: usize = 16;

/// One of the lists that share the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum List {
    /// The first list.
    A = 1,
    /// The second.
    B = 2,
    /// The third.
    C = 3,
}

/// Neighbours of a page: next in bits 0..28, previous in bits 28..56. Each field is read and written whole: a load that
/// overlaps a store just made, but is not the same bytes, has to wait for it.
#[derive(Clone, Copy, Default)]
struct Link {
    low: [u8; 4],
    middle: [u8; 2],
    high: u8,
}

const _: () = assert!(size_of::<Link>() == 7, "the metadata budget of a page");

impl Link {
    fn next(&self) -> u32 {
        u32::from_le_bytes(self.low) & PAGE_MASK
    }

    fn prev(&self) -> u32 {
        let high = u32::from(u16::from_le_bytes(self.middle)) | u32::from(self.high) << 16;
        high << (32 - PAGE_BITS) | u32::from_le_bytes(self.low) >> PAGE_BITS
    }

    fn set_next(&mut self, page: u32) {
        self.low = (u32::from_le_bytes(self.low) & !PAGE_MASK | page).to_le_bytes();
    }

    fn set_prev(&mut self, page: u32) {
        self.low = (self.next() | page << PAGE_BITS).to_le_bytes();
        let high = page >> (32 - PAGE_BITS);
        self.middle = (high as u16).to_le_bytes();
        self.high = (high >> 16) as u8;
    }
}

/// Bit planes of 64 pages.
#[derive(Clone, Copy, Default)]
struct Block {
    list: [u64; 2],
    mark: [u64; 2],
}

impl Block {
    fn listed(&self) -> u64 {
        self.list[0] | self.list[1]
    }
}

/// Number at `bit` of two planes.
fn get(planes: [u64; 2], bit: u32) -> u8 {
    (planes[0] >> bit & 1) as u8 | ((planes[1] >> bit & 1) as u8) << 1
}

fn set(planes: &mut [u64; 2], bit: u32, value: u8) {
    for (plane, value) in planes.iter_mut().zip([value & 1, value >> 1]) {
        *plane = *plane & !(1 << bit) | u64::from(value) << bit;
    }
}

/// Place of a page in its chunk: its block, and its bit there.
fn place(page: u32) -> (usize, u32) {
    (page as usize / PER_BLOCK % BLOCKS, page % PER_BLOCK as u32)
}

type Piece = [Link; PIECE_LINKS];

/// Pieces in use and free ones, all of one size: no holes between them. What was once allocated is kept for the next chunk.
#[derive(Default)]
struct Pool {
    slabs: Vec<Box<[Piece; SLAB_PIECES]>>,
    /// The free piece to take next, plus one; the `next` of its first link leads to another in the same way.
    free: u32,
}

impl Pool {
    fn take(&mut self) -> u32 {
        if self.free == 0 {
            let first = (self.slabs.len() * SLAB_PIECES) as u32;
            self.slabs
                .push(Box::new([[Link::default(); PIECE_LINKS]; SLAB_PIECES]));
            for piece in (first..first + SLAB_PIECES as u32).rev() {
                self.give(piece);
            }
        }
        let piece = self.free - 1;
        self.free = self.piece(piece)[0].next();
        piece
    }

    fn give(&mut self, piece: u32) {
        let free = std::mem::replace(&mut self.free, piece + 1);
        self.piece(piece)[0].set_next(free);
    }

    fn piece(&mut self, piece: u32) -> &mut Piece {
        let piece = piece as usize;
        &mut self.slabs[piece / SLAB_PIECES][piece % SLAB_PIECES]
    }
}

#[derive(Default)]
struct Chunk {
    blocks: [Block; BLOCKS],
    listed: [u16; BLOCKS],
    /// Those that the links need; the rest is of no meaning.
    pieces: [u32; PIECES],
}

impl Chunk {
    fn list(&self, page: u32) -> u8 {
        let (block, bit) = place(page);
        get(self.blocks[block].list, bit)
    }

    /// Pages in a list.
    fn len(&self) -> usize {
        usize::from(self.listed[BLOCKS - 1])
    }

    /// Where the link of a page in a list is, or would go.
    fn slot(&self, page: u32) -> usize {
        let (block, bit) = place(page);
        let not_below = self.blocks[block].listed() >> bit;
        usize::from(self.listed[block]) - not_below.count_ones() as usize
    }

    fn insert(&mut self, page: u32, list: List, link: Link, pool: &mut Pool) {
        let (slot, len) = (self.slot(page), self.len());
        let (first, last) = (slot / PIECE_LINKS, len / PIECE_LINKS);
        if len.is_multiple_of(PIECE_LINKS) {
            self.pieces[last] = pool.take();
        }
        let (mut from, mut carried) = (slot % PIECE_LINKS, link);
        for index in first..=last {
            let piece = pool.piece(self.pieces[index]);
            let end = if index < last {
                PIECE_LINKS - 1
            } else {
                len % PIECE_LINKS
            };
            let out = piece[end];
            piece.copy_within(from..end, from + 1);
            piece[from] = carried;
            (from, carried) = (0, out);
        }
        let (block, bit) = place(page);
        set(&mut self.blocks[block].list, bit, list as u8);
        for (index, listed) in self.listed.iter_mut().enumerate() {
            *listed += u16::from(index >= block);
        }
    }

    fn remove(&mut self, page: u32, pool: &mut Pool) {
        let (slot, len) = (self.slot(page), self.len());
        let (first, last) = (slot / PIECE_LINKS, (len - 1) / PIECE_LINKS);
        let mut carried = Link::default();
        for index in (first..=last).rev() {
            let piece = pool.piece(self.pieces[index]);
            let to = if index > first { 0 } else { slot % PIECE_LINKS };
            let out = piece[to];
            piece.copy_within(to + 1.., to);
            piece[PIECE_LINKS - 1] = carried;
            carried = out;
        }
        if len % PIECE_LINKS == 1 {
            pool.give(self.pieces[last]);
        }
        let (block, bit) = place(page);
        set(&mut self.blocks[block].list, bit, 0);
        set(&mut self.blocks[block].mark, bit, 0);
        for (index, listed) in self.listed.iter_mut().enumerate() {
            *listed -= u16::from(index >= block);
        }
    }
}

/// `front` and `back` are pages only while `len` is not 0.
#[derive(Clone, Copy, Default)]
struct Ends {
    front: u32,
    back: u32,
    len: u64,
}

/// Up to three lists; a page is in one of them or in none. No operation looks at more than a page and its neighbours;
/// `push_back` and `remove` also move the links of the chunk's higher pages (at most 3.5 KiB).
#[derive(Default)]
pub struct PageLists {
    chunks: Vec<Option<Box<Chunk>>>,
    chunks_used: usize,
    chunks_used_peak: usize,
    pool: Pool,
    ends: [Ends; 3],
}

impl PageLists {
    /// Empty lists. Cost: no allocation.
    pub fn new() -> PageLists {
        PageLists::default()
    }

    /// Puts the page at the back, with mark 0. Panics when it is in a list already, or its number does not fit 28 bits
    /// (the link would name another page). Allocates at the first page of a chunk, and 7 KiB when the pool has no free piece.
    pub fn push_back(&mut self, list: List, page: PageNo) {
        assert!(page.0 <= PAGE_MASK, "{page:?} needs more than 28 bits");
        let index = page.chunk().0 as usize;
        if index >= self.chunks.len() {
            self.chunks.resize_with(index + 1, || None);
        }
        let slot = &mut self.chunks[index];
        if slot.is_none() {
            self.chunks_used += 1;
            self.chunks_used_peak = self.chunks_used_peak.max(self.chunks_used);
        }
        let chunk = slot.get_or_insert_default();
        assert!(chunk.list(page.0) == 0, "{page:?} is inserted twice");
        let mut link = Link::default();
        link.set_prev(self.ends[list as usize - 1].back);
        chunk.insert(page.0, list, link, &mut self.pool);
        self.join_back(list, page.0);
    }

    /// Takes the page out of its list and says which it was. Panics when it is in none.
    pub fn remove(&mut self, page: PageNo) -> List {
        let list = self.unlink(page);
        let slot = &mut self.chunks[page.chunk().0 as usize];
        if let Some(chunk) = slot {
            chunk.remove(page.0, &mut self.pool);
            if chunk.len() == 0 {
                *slot = None;
                self.chunks_used -= 1;
            }
        }
        list
    }

    /// Moves a page that is in a list to the back of `list` (the same or another); its mark stays. Panics as `remove`.
    pub fn move_to_back(&mut self, list: List, page: PageNo) {
        let ends = self.ends[list as usize - 1];
        if ends.len > 0 && ends.back == page.0 {
            return;
        }
        if self.unlink(page) != list {
            let (block, bit) = place(page.0);
            set(
                &mut self.chunk_mut(page.0).blocks[block].list,
                bit,
                list as u8,
            );
        }
        let back = self.ends[list as usize - 1].back;
        self.link_mut(page.0).set_prev(back);
        self.join_back(list, page.0);
    }

    /// Puts all of `from` behind the back of `to`, in order. Cost: O(pages of `from`).
    pub fn append(&mut self, from: List, to: List) {
        while let Some(page) = self.front(from) {
            self.move_to_back(to, page);
        }
    }

    /// The page at the front.
    pub fn front(&self, list: List) -> Option<PageNo> {
        let ends = self.ends[list as usize - 1];
        (ends.len > 0).then_some(PageNo(ends.front))
    }

    /// The list the page is in.
    pub fn list(&self, page: PageNo) -> Option<List> {
        match self.chunk(page.0)?.list(page.0) {
            0 => None,
            1 => Some(List::A),
            2 => Some(List::B),
            _ => Some(List::C),
        }
    }

    /// Pages in `list`.
    pub fn len(&self, list: List) -> PageCount {
        PageCount(self.ends[list as usize - 1].len)
    }

    /// Pages in all lists.
    pub fn total(&self) -> PageCount {
        PageCount(self.ends.iter().map(|ends| ends.len).sum())
    }

    /// The page's mark, 0..4; 0 when it is in no list.
    pub fn mark(&self, page: PageNo) -> u8 {
        let (block, bit) = place(page.0);
        self.chunk(page.0)
            .map_or(0, |chunk| get(chunk.blocks[block].mark, bit))
    }

    /// Sets the mark. Panics when the page is in no list or `mark` is above 3.
    pub fn set_mark(&mut self, page: PageNo, mark: u8) {
        assert!(mark < 4, "a mark has two bits");
        let (block, bit) = place(page.0);
        let block = &mut self.chunk_mut(page.0).blocks[block];
        assert!(block.listed() >> bit & 1 == 1, "{page:?} is in no list");
        set(&mut block.mark, bit, mark);
    }

    /// Sets bits of the mark if the page is in a list: one look for [`PageLists::list`] and [`PageLists::set_mark`]. Panics when
    /// `bits` is above 3.
    #[inline]
    pub fn mark_listed(&mut self, page: PageNo, bits: u8) {
        assert!(bits < 4, "a mark has two bits");
        if let Some(Some(chunk)) = self.chunks.get_mut(page.0 as usize / PER_CHUNK) {
            let (block, bit) = place(page.0);
            let block = &mut chunk.blocks[block];
            let listed = block.listed() >> bit & 1;
            block.mark[0] |= (listed & u64::from(bits)) << bit;
            block.mark[1] |= (listed & u64::from(bits >> 1)) << bit;
        }
    }

    /// Most bytes held so far. Cost: O(1).
    pub fn held_bytes_peak(&self) -> Bytes {
        let slabs = self.pool.slabs.len() * size_of::<[Piece; SLAB_PIECES]>();
        let chunks = self.chunks_used_peak * size_of::<Chunk>();
        let tables = self.chunks.capacity() + self.pool.slabs.capacity();
        Bytes((slabs + chunks + tables * size_of::<usize>()) as u64)
    }

    /// Joins a page behind the back of `list`; its link says so already.
    fn join_back(&mut self, list: List, page: u32) {
        let ends = &mut self.ends[list as usize - 1];
        let Ends { back, len, .. } = *ends;
        ends.back = page;
        ends.len += 1;
        if len == 0 {
            ends.front = page;
        } else {
            self.link_mut(back).set_next(page);
        }
    }

    /// Joins the neighbours of a page. Its bits and its link stay.
    fn unlink(&mut self, page: PageNo) -> List {
        let Some(list) = self.list(page) else {
            panic!("{page:?} is in no list: removed twice, or never inserted");
        };
        let link = self.link_mut(page.0);
        let (next, prev) = (link.next(), link.prev());
        let ends = &mut self.ends[list as usize - 1];
        let (is_front, is_back) = (ends.front == page.0, ends.back == page.0);
        ends.len -= 1;
        if is_front {
            ends.front = next;
        }
        if is_back {
            ends.back = prev;
        }
        if !is_front {
            self.link_mut(prev).set_next(next);
        }
        if !is_back {
            self.link_mut(next).set_prev(prev);
        }
        list
    }

    fn chunk(&self, page: u32) -> Option<&Chunk> {
        self.chunks.get(page as usize / PER_CHUNK)?.as_deref()
    }

    fn chunk_mut(&mut self, page: u32) -> &mut Chunk {
        match self.chunks.get_mut(page as usize / PER_CHUNK) {
            Some(Some(chunk)) => chunk,
            _ => panic!("page {page} is in no list"),
        }
    }

    /// The link of a page that is in a list.
    fn link_mut(&mut self, page: u32) -> &mut Link {
        let chunk = self.chunk_mut(page);
        let slot = chunk.slot(page);
        let piece = chunk.pieces[slot / PIECE_LINKS];
        &mut self.pool.piece(piece)[slot % PIECE_LINKS]
    }
}

#[cfg(test)]
mod tests;
