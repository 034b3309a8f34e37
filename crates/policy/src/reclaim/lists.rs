//! Doubly linked lists over page numbers: the common ground of every reclaim policy.
//!
//! Only pages that are in a list have links, and of those only the ones whose neighbours are not the pages before and after
//! them in memory: pages that came one after the other, as most do, need none. The links of a chunk (512 pages) lie in the
//! order of their page numbers in pieces of a common pool. Two bits a page say which list it is in, two are the policy's mark,
//! and one says that it has a link; those bits counted up to a page say where, so nothing stores that:
//!
//! ```text
//! Chunk: 512 pages, 368 bytes; none while no page of it is in a list
//! +------------------------------------------------------------------------------+
//! | blocks: 8 x 64 pages: list bits 0 and 1, mark bits 0 and 1, has a link       |     Link, 7 bytes
//! | until, len: links up to the end of each block, 9 bits each; in all           |     +--------------+------------------+
//! | pieces: u32 x 8 ---> Piece: 64 links (the last is partly filled)             |     | next page 28 | previous page 28 |
//! | listed, holes: u16; holed: blocks with holes; understood                     |     +--------------+------------------+
//! +------------------------------------------------------------------------------+
//! ```
//! While the links of a chunk fit one piece, they lie close together. In chunks with more, a page that leaves its list leaves its
//! link behind as a *hole*. The next link of the chunk goes into the nearest hole, so that few others have to make way; when 32 have
//! gathered, the chunk's links move together.
//!
//! Bytes a page of the chunks: 0.7 when all are in a list and came in order, 7.8 when all are and came at random; at random,
//! 2.3 when 12 % are in a list, 5.0 when half are. Nanoseconds, and in brackets those of packed links for every listed
//! page, run in turn; half of the pages listed, all accesses at random (2026-11-21, Linux 6.18, 2 noisy cores, the better of two;
//! `cargo test --release -p undercroft-policy -- --ignored --nocapture lists_table` prints ours):
//!
//! ```text
//!                             2^18 pages     2^21 pages
//! mark a page (CLOCK touch)   2   (2)        3   (2)
//! front to back (the hand)    22  (30)       99  (54)
//! move to back (LRU touch)    25  (35)       103 (139)
//! remove one, insert one      90  (141)      169 (192)
//! ... every page listed       64  (171)      181 (253)
//! ```
//! Rejected: queues of page numbers in which a moved page leaves a stale entry (1 + 5 bytes for a resident page): runs of
//! stale entries in front make a rare call long, and tags that tell them apart wrap. Links in a heap array a chunk: 11
//! bytes a page in the process when all are resident, 7.6 of them counted, for holes between arrays that grow. Chunks of
//! 128 or 256 pages: no faster where it counts, 0.1 to 0.7 bytes more. Links packed without holes: each removal moves the
//! links of all higher pages of the chunk, up to 3.5 KiB.
//!
//! The page at the back keeps its place in the list's ends, not in its link: that is written once, when the next page comes
//! and both neighbours are known. At the front the link that leads nowhere holds any number: who asks compares with the front.
//! Limit: page numbers below 2^28 (1 TiB of address space, what the ledger is laid out for).

use undercroft_base::{Bytes, CHUNK_PAGES, PageCount, PageNo};

const PAGE_BITS: u32 = 28;
const PAGE_MASK: u32 = (1 << PAGE_BITS) - 1;
const PER_CHUNK: usize = CHUNK_PAGES as usize;
const PER_BLOCK: usize = 64;
const BLOCKS: usize = PER_CHUNK / PER_BLOCK;
const LAST_BLOCK: usize = BLOCKS - 1;
const UNTIL_BITS: usize = 9;
/// Links in a piece, and the most pieces of a chunk.
const PIECE_LINKS: usize = 64;
const PIECES: usize = PER_CHUNK / PIECE_LINKS;
/// Pieces allocated at once.
const SLAB_PIECES: usize = 16;
/// Links that move by one place in so few instructions that fewer would not be faster.
const FEW_LINKS: usize = 8;
/// Holes at which the links of a chunk move together.
const HOLES_MAX: u16 = 32;
/// Empty chunks kept for the next one to come.
const SPARE_CHUNKS: usize = 16;

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

impl List {
    /// The list of this number; 0: none.
    #[inline]
    fn of(number: u8) -> Option<List> {
        match number {
            0 => None,
            1 => Some(List::A),
            2 => Some(List::B),
            _ => Some(List::C),
        }
    }
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
    #[inline]
    fn new(next: u32, prev: u32) -> Link {
        let high = prev >> (32 - PAGE_BITS);
        Link {
            low: (next | prev << PAGE_BITS).to_le_bytes(),
            middle: (high as u16).to_le_bytes(),
            high: (high >> 16) as u8,
        }
    }

    #[inline]
    fn next(&self) -> u32 {
        u32::from_le_bytes(self.low) & PAGE_MASK
    }

    #[inline]
    fn prev(&self) -> u32 {
        let high = u32::from(u16::from_le_bytes(self.middle)) | u32::from(self.high) << 16;
        high << (32 - PAGE_BITS) | u32::from_le_bytes(self.low) >> PAGE_BITS
    }

    /// Whether it says of `page` what no link would say as well.
    #[inline]
    fn is_understood(&self, page: u32) -> bool {
        self.next() == after(page) && self.prev() == before(page)
    }

    #[inline]
    fn set_next(&mut self, page: u32) {
        self.low = (u32::from_le_bytes(self.low) & !PAGE_MASK | page).to_le_bytes();
    }
}

/// Neighbours of a page that has no link.
#[inline]
fn after(page: u32) -> u32 {
    page.wrapping_add(1) & PAGE_MASK
}

#[inline]
fn before(page: u32) -> u32 {
    page.wrapping_sub(1) & PAGE_MASK
}

/// How far from `bit` the nearest set bit is, upwards and below; 64 when there is none.
#[inline]
fn nearest(bits: u64, bit: u32) -> (u32, u32) {
    let (above, below) = (bits >> bit, bits & ((1 << bit) - 1));
    let down = match below {
        0 => 64,
        below => bit + below.leading_zeros() - 63,
    };
    (above.trailing_zeros(), down)
}

/// Bit planes of 64 pages.
#[derive(Clone, Copy, Default)]
struct Block {
    list: [u64; 2],
    mark: [u64; 2],
    /// Pages that own a link: a listed one's says its neighbours, another's is a hole.
    links: u64,
}

impl Block {
    #[inline]
    fn listed(&self) -> u64 {
        self.list[0] | self.list[1]
    }

    fn holes(&self) -> u64 {
        self.links & !self.listed()
    }

    /// Pages whose links say no more than what is understood. * `first`: the block's first page; `links`: from its first on.
    fn understood(&self, first: u32, links: &[Link]) -> u64 {
        let (mut pages, mut found) = (self.links, 0);
        for link in links {
            if pages == 0 {
                break;
            }
            let bit = pages.trailing_zeros();
            pages &= pages - 1;
            found |= u64::from(link.is_understood(first + bit)) << bit;
        }
        found
    }
}

/// Number at `bit` of two planes.
#[inline]
fn get(planes: [u64; 2], bit: u32) -> u8 {
    (planes[0] >> bit & 1) as u8 | ((planes[1] >> bit & 1) as u8) << 1
}

#[inline]
fn set(planes: &mut [u64; 2], bit: u32, value: u8) {
    for (plane, value) in planes.iter_mut().zip([value & 1, value >> 1]) {
        *plane = *plane & !(1 << bit) | u64::from(value) << bit;
    }
}

/// One for each of the first `blocks` blocks, as they are counted in [`Chunk::until`].
#[inline]
fn ones(blocks: usize) -> u64 {
    const ONES: u64 = ((1 << (UNTIL_BITS * LAST_BLOCK)) - 1) / ((1 << UNTIL_BITS) - 1);
    ONES & ((1 << (UNTIL_BITS * blocks)) - 1)
}

/// Place of a page in its chunk: its block, and its bit there.
#[inline]
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
    #[inline(never)]
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

    #[inline]
    fn piece(&mut self, piece: u32) -> &mut Piece {
        let piece = piece as usize;
        &mut self.slabs[piece / SLAB_PIECES][piece % SLAB_PIECES]
    }
}

#[derive(Default)]
struct Chunk {
    blocks: [Block; BLOCKS],
    /// Links, holes among them, up to the end of each block but the last, 9 bits each: counted up and down all at once.
    until: u64,
    /// Those that the links need; the rest is of no meaning.
    pieces: [u32; PIECES],
    /// Links, holes among them.
    len: u16,
    /// Pages in a list.
    listed: u16,
    holes: u16,
    /// Blocks that have a hole, one bit each.
    holed: u8,
    /// A listed page may have a link that says what is understood without one.
    understood: bool,
}

const _: () = assert!(
    size_of::<Chunk>() == 368,
    "the metadata budget of a page, and the drawing above"
);

impl Chunk {
    #[inline]
    fn list(&self, page: u32) -> Option<List> {
        let (block, bit) = place(page);
        List::of(get(self.blocks[block].list, bit))
    }

    /// Links, holes among them.
    fn len(&self) -> usize {
        self.len.into()
    }

    /// Links, holes among them, up to the end of a block.
    #[inline]
    fn end(&self, block: usize) -> usize {
        // Behind those of the other blocks is a zero: no branch that could be guessed wrong.
        let counted = (self.until >> (UNTIL_BITS * block)) as usize & ((1 << UNTIL_BITS) - 1);
        let all = if block == LAST_BLOCK { self.len() } else { 0 };
        counted | all
    }

    #[inline]
    fn has_link(&self, page: u32) -> bool {
        let (block, bit) = place(page);
        self.blocks[block].links >> bit & 1 == 1
    }

    /// Where the page's link is, or would go: the links of lower pages.
    #[inline]
    fn rank(&self, page: u32) -> usize {
        let (block, bit) = place(page);
        let not_below = self.blocks[block].links >> bit;
        self.end(block) - not_below.count_ones() as usize
    }

    #[inline]
    fn link<'a>(&self, rank: usize, pool: &'a mut Pool) -> &'a mut Link {
        &mut pool.piece(self.pieces[rank / PIECE_LINKS])[rank % PIECE_LINKS]
    }

    /// Gives a listed page that has no link this one.
    #[inline]
    fn add_link(&mut self, page: u32, link: Link, pool: &mut Pool) {
        let len = self.len();
        if len >= PIECE_LINKS {
            self.add_link_among_many(page, link, pool);
            return;
        }
        if len == 0 {
            self.pieces[0] = pool.take();
        }
        let (block, bit) = place(page);
        let rank = self.rank(page);
        self.blocks[block].links |= 1 << bit;
        self.until += ones(LAST_BLOCK) - ones(block);
        self.len += 1;
        let piece = pool.piece(self.pieces[0]);
        match len - rank <= FEW_LINKS && rank < PIECE_LINKS - FEW_LINKS {
            true => piece.copy_within(rank..rank + FEW_LINKS, rank + 1),
            false => piece.copy_within(rank..len, rank + 1),
        }
        piece[rank] = link;
    }

    /// Takes the link of a page out, where all links of the chunk are in one piece.
    #[inline]
    fn take_link(&mut self, page: u32, pool: &mut Pool) -> Link {
        let (block, bit) = place(page);
        let (rank, len) = (self.rank(page), self.len());
        self.blocks[block].links &= !(1 << bit);
        self.until -= ones(LAST_BLOCK) - ones(block);
        self.len -= 1;
        let piece = pool.piece(self.pieces[0]);
        let link = piece[rank];
        match len - rank <= FEW_LINKS && rank < PIECE_LINKS - FEW_LINKS {
            true => piece.copy_within(rank + 1..rank + 1 + FEW_LINKS, rank),
            false => piece.copy_within(rank + 1..len, rank),
        }
        if len == 1 {
            pool.give(self.pieces[0]);
        }
        link
    }

    /// As [`Chunk::add_link`], where the links fill a piece or more: there may be holes.
    #[inline(never)]
    fn add_link_among_many(&mut self, page: u32, link: Link, pool: &mut Pool) {
        let (block, bit) = place(page);
        let rank = self.rank(page);
        let free = match self.hole_near(block, bit) {
            Some((at, hole)) => {
                let hole_rank = self.rank((at * PER_BLOCK) as u32 + hole);
                self.blocks[at].links &= !(1 << hole);
                self.hole_filled(at);
                self.until = self.until.wrapping_add(ones(at));
                hole_rank
            }
            None => {
                let len = self.len();
                if len.is_multiple_of(PIECE_LINKS) {
                    self.pieces[len / PIECE_LINKS] = pool.take();
                }
                self.until += ones(LAST_BLOCK);
                self.len += 1;
                len
            }
        };
        self.until = self.until.wrapping_sub(ones(block));
        self.blocks[block].links |= 1 << bit;
        self.put_link(free, rank, link, pool);
    }

    /// Puts a link before the one at `rank`. The one at `from` is of no meaning; those between make way.
    #[inline]
    fn put_link(&self, from: usize, rank: usize, link: Link, pool: &mut Pool) {
        let down = from < rank;
        let to = rank - usize::from(down);
        if from / PIECE_LINKS != to / PIECE_LINKS {
            match down {
                true => self.shift_down(from, to, pool),
                false => self.shift_up(to, from, pool),
            }
            *self.link(to, pool) = link;
            return;
        }
        let piece = pool.piece(self.pieces[to / PIECE_LINKS]);
        let (from, to) = (from % PIECE_LINKS, to % PIECE_LINKS);
        let (start, end, dest) = match down {
            true => (from + 1, to + 1, from),
            false => (to, from, to + 1),
        };
        piece.copy_within(start..end, dest);
        piece[to] = link;
    }

    /// The hole nearest to a page that has no link, in its own block if there is one; its block and bit there.
    fn hole_near(&self, block: usize, bit: u32) -> Option<(usize, u32)> {
        if self.holed == 0 {
            return None;
        }
        let own = self.blocks[block].holes();
        if own != 0 {
            let (up, down) = nearest(own, bit);
            return Some((block, if up < down { bit + up } else { bit - down }));
        }
        let (up, down) = nearest(self.holed.into(), block as u32);
        if up < down {
            let at = block + up as usize;
            return Some((at, self.blocks[at].holes().trailing_zeros()));
        }
        let at = block - down as usize;
        Some((at, 63 - self.blocks[at].holes().leading_zeros()))
    }

    /// One hole less in a block.
    #[inline]
    fn hole_filled(&mut self, block: usize) {
        self.holes -= 1;
        if self.blocks[block].holes() == 0 {
            self.holed &= !(1 << block);
        }
    }

    /// Moves links `from..to` one place up.
    fn shift_up(&self, from: usize, to: usize, pool: &mut Pool) {
        let (first, last) = (from / PIECE_LINKS, to / PIECE_LINKS);
        for index in (first..=last).rev() {
            let start = if index > first { 0 } else { from % PIECE_LINKS };
            let end = if index < last {
                PIECE_LINKS - 1
            } else {
                to % PIECE_LINKS
            };
            pool.piece(self.pieces[index])
                .copy_within(start..end, start + 1);
            if index > first {
                pool.piece(self.pieces[index])[0] =
                    pool.piece(self.pieces[index - 1])[PIECE_LINKS - 1];
            }
        }
    }

    /// Moves links `from + 1..=to` one place down.
    fn shift_down(&self, from: usize, to: usize, pool: &mut Pool) {
        let (first, last) = (from / PIECE_LINKS, to / PIECE_LINKS);
        for index in first..=last {
            let start = if index > first { 0 } else { from % PIECE_LINKS };
            let end = if index < last {
                PIECE_LINKS - 1
            } else {
                to % PIECE_LINKS
            };
            pool.piece(self.pieces[index])
                .copy_within(start + 1..=end, start);
            if index < last {
                pool.piece(self.pieces[index])[PIECE_LINKS - 1] =
                    pool.piece(self.pieces[index + 1])[0];
            }
        }
    }

    /// Moves the links together, less the holes and those that say what is understood. * `first`: the chunk's first page.
    fn compact(&mut self, first: u32, pool: &mut Pool) {
        let len = self.len();
        let pieces = self.pieces;
        let pieces = &pieces[..len.div_ceil(PIECE_LINKS)];
        let mut all: [Piece; PIECES] = std::array::from_fn(|at| match pieces.get(at) {
            Some(piece) => *pool.piece(*piece),
            None => [Link::default(); PIECE_LINKS],
        });
        let links_of_chunk = all.as_flattened_mut();
        // The first link not moved yet, and where it goes: those between two that go are moved at once.
        let (mut start, mut kept, mut until) = (0, 0, 0);
        let mut before_block = 0;
        for index in 0..BLOCKS {
            let block = &self.blocks[index];
            let page = first + (index * PER_BLOCK) as u32;
            let goes = match self.understood {
                true => block.holes() | block.understood(page, &links_of_chunk[before_block..]),
                false => block.holes(),
            };
            let mut next = goes;
            while next != 0 {
                let below = (1 << next.trailing_zeros()) - 1;
                let rank = before_block + (block.links & below).count_ones() as usize;
                next &= next - 1;
                links_of_chunk.copy_within(start..rank, kept);
                kept += rank - start;
                start = rank + 1;
            }
            before_block = self.end(index);
            self.blocks[index].links &= !goes;
            if index < LAST_BLOCK {
                until |= ((kept + before_block - start) as u64) << (UNTIL_BITS * index);
            }
        }
        links_of_chunk.copy_within(start..len, kept);
        kept += len - start;
        let (used, free) = pieces.split_at(kept.div_ceil(PIECE_LINKS));
        for (links, piece) in all.iter().zip(used) {
            *pool.piece(*piece) = *links;
        }
        for piece in free {
            pool.give(*piece);
        }
        (self.until, self.len) = (until, kept as u16);
        (self.holes, self.holed, self.understood) = (0, 0, false);
    }

    fn give_all(&self, pool: &mut Pool) {
        for index in 0..self.len().div_ceil(PIECE_LINKS) {
            pool.give(self.pieces[index]);
        }
    }
}

/// `front` and `back` are pages only while `len` is not 0, `before_back` only while it is above 1.
#[derive(Clone, Copy, Default)]
struct Ends {
    front: u32,
    back: u32,
    before_back: u32,
    len: u64,
}

#[cold]
fn not_listed(page: PageNo) -> ! {
    panic!("{page:?} is in no list: removed twice, or never inserted");
}

/// Up to three lists; a page is in one of them or in none. No operation looks at more than a page and its neighbours;
/// `push_back`, `remove` and `move_to_back` may also move links of the chunks concerned (at most 3.5 KiB each).
#[derive(Default)]
pub struct PageLists {
    chunks: Vec<Option<Box<Chunk>>>,
    #[expect(clippy::vec_box, reason = "they go to `chunks` and come from there")]
    spare: Vec<Box<Chunk>>,
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
    /// (the link would name another page). Allocates at the first page of a chunk when no spare chunk is there, and 7 KiB when
    /// the pool has no free piece.
    #[inline]
    pub fn push_back(&mut self, list: List, page: PageNo) {
        assert!(page.0 <= PAGE_MASK, "{page:?} needs more than 28 bits");
        let index = page.chunk().0 as usize;
        if index >= self.chunks.len() {
            self.chunks.resize_with(index + 1, || None);
        }
        let slot = &mut self.chunks[index];
        let chunk = match slot {
            Some(chunk) => chunk,
            None => {
                self.chunks_used += 1;
                self.chunks_used_peak = self.chunks_used_peak.max(self.chunks_used);
                slot.insert(self.spare.pop().unwrap_or_default())
            }
        };
        let (at, bit) = place(page.0);
        let block = &mut chunk.blocks[at];
        assert!(get(block.list, bit) == 0, "{page:?} is inserted twice");
        block.list[0] |= u64::from(list as u8 & 1) << bit;
        block.list[1] |= u64::from(list as u8 >> 1) << bit;
        let is_hole = block.links >> bit & 1 == 1;
        chunk.listed += 1;
        if is_hole {
            chunk.hole_filled(at);
        }
        self.join_back(list, page.0);
    }

    /// Takes the page out of its list and says which it was. Panics when it is in none.
    #[inline]
    pub fn remove(&mut self, page: PageNo) -> List {
        let PageLists {
            chunks, pool, ends, ..
        } = self;
        let Some(Some(chunk)) = chunks.get_mut(page.0 as usize / PER_CHUNK) else {
            not_listed(page);
        };
        let (at, bit) = place(page.0);
        let block = &mut chunk.blocks[at];
        let Some(list) = List::of(get(block.list, bit)) else {
            not_listed(page);
        };
        let others = !(1 << bit);
        block.list[0] &= others;
        block.list[1] &= others;
        block.mark[0] &= others;
        block.mark[1] &= others;
        chunk.listed -= 1;
        let (mut next, mut prev) = (after(page.0), before(page.0));
        if chunk.blocks[at].links >> bit & 1 == 1 {
            let link = match chunk.len() <= PIECE_LINKS {
                true => chunk.take_link(page.0, pool),
                false => {
                    chunk.holes += 1;
                    chunk.holed |= 1 << at;
                    *chunk.link(chunk.rank(page.0), pool)
                }
            };
            (next, prev) = (link.next(), link.prev());
        }
        let settle = chunk.listed == 0 || chunk.holes >= HOLES_MAX;
        let ends = &mut ends[list as usize - 1];
        if ends.front == page.0 {
            ends.front = next;
            ends.len -= 1;
        } else {
            if ends.back == page.0 {
                prev = ends.before_back;
            }
            // After the page has left: its link is then the nearest hole for those of its neighbours.
            self.join_neighbours(list, page.0, next, prev);
        }
        if settle {
            self.settle(page);
        }
        list
    }

    /// Moves a page that is in a list to the back of `list` (the same or another); its mark stays. Panics as `remove`.
    pub fn move_to_back(&mut self, list: List, page: PageNo) {
        let ends = self.ends[list as usize - 1];
        if ends.len > 0 && ends.back == page.0 {
            return;
        }
        let old = self.listed(page);
        let (next, prev) = self.neighbours(old, page.0);
        self.join_neighbours(old, page.0, next, prev);
        if old != list {
            let (block, bit) = place(page.0);
            set(
                &mut self.chunk_mut(page.0).blocks[block].list,
                bit,
                list as u8,
            );
        }
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
        self.chunk(page.0)?.list(page.0)
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

    /// The list of a page that must be in one.
    #[inline]
    fn listed(&self, page: PageNo) -> List {
        match self.list(page) {
            Some(list) => list,
            None => not_listed(page),
        }
    }

    /// Joins a page, whose bits say that it is in `list`, behind the back of it.
    #[inline]
    fn join_back(&mut self, list: List, page: u32) {
        let ends = &mut self.ends[list as usize - 1];
        let old = *ends;
        ends.back = page;
        ends.len += 1;
        if old.len == 0 {
            ends.front = page;
            ends.before_back = before(page);
        } else {
            ends.before_back = old.back;
            let link = Link::new(page, old.before_back);
            self.set_link(old.back, |of| *of = link);
        }
    }

    /// Joins the neighbours of a page that leaves the list.
    fn join_neighbours(&mut self, list: List, page: u32, next: u32, prev: u32) {
        let ends = &mut self.ends[list as usize - 1];
        ends.len -= 1;
        if ends.front == page {
            ends.front = next;
            return;
        }
        if ends.back == page {
            ends.back = prev;
            let (_, before) = self.link_of(prev);
            self.ends[list as usize - 1].before_back = before;
            return;
        }
        let next_is_back = ends.back == next;
        if next_is_back {
            ends.before_back = prev;
        } else {
            self.set_prev(next, prev);
        }
        self.set_next(prev, next);
    }

    /// Gives back what a chunk no longer needs.
    #[cold]
    fn settle(&mut self, page: PageNo) {
        let slot = &mut self.chunks[page.chunk().0 as usize];
        let Some(chunk) = slot else {
            return;
        };
        if chunk.listed > 0 {
            if chunk.holes >= HOLES_MAX {
                chunk.compact(page.chunk().page(0).0, &mut self.pool);
            }
            return;
        }
        chunk.give_all(&mut self.pool);
        self.chunks_used -= 1;
        if let Some(mut chunk) = slot.take()
            && self.spare.len() < SPARE_CHUNKS
        {
            *chunk = Chunk::default();
            self.spare.push(chunk);
        }
    }

    #[inline]
    fn chunk(&self, page: u32) -> Option<&Chunk> {
        self.chunks.get(page as usize / PER_CHUNK)?.as_deref()
    }

    #[inline]
    fn chunk_mut(&mut self, page: u32) -> &mut Chunk {
        match self.chunks.get_mut(page as usize / PER_CHUNK) {
            Some(Some(chunk)) => chunk,
            _ => panic!("page {page} is in no list"),
        }
    }

    /// The pages after and before a page of `list`; any number where there is none.
    #[inline]
    fn neighbours(&mut self, list: List, page: u32) -> (u32, u32) {
        let ends = self.ends[list as usize - 1];
        match ends.back == page {
            true => (after(page), ends.before_back),
            false => self.link_of(page),
        }
    }

    /// What the page's link says, or that it has none: its neighbours, unless it is at the back of its list.
    fn link_of(&mut self, page: u32) -> (u32, u32) {
        let PageLists { chunks, pool, .. } = self;
        match chunks.get(page as usize / PER_CHUNK) {
            Some(Some(chunk)) if chunk.has_link(page) => {
                let link = chunk.link(chunk.rank(page), pool);
                (link.next(), link.prev())
            }
            _ => (after(page), before(page)),
        }
    }

    fn set_next(&mut self, page: u32, next: u32) {
        self.set_link(page, |link| link.set_next(next));
    }

    fn set_prev(&mut self, page: u32, prev: u32) {
        self.set_link(page, |link| *link = Link::new(link.next(), prev));
    }

    /// Changes the link of a page; one that has none gets one unless it says as much without.
    #[inline]
    fn set_link(&mut self, page: u32, set: impl FnOnce(&mut Link)) {
        let PageLists { chunks, pool, .. } = self;
        let Some(Some(chunk)) = chunks.get_mut(page as usize / PER_CHUNK) else {
            return;
        };
        if chunk.has_link(page) {
            set(chunk.link(chunk.rank(page), pool));
            chunk.understood = true;
            return;
        }
        let mut link = Link::new(after(page), before(page));
        set(&mut link);
        if !link.is_understood(page) {
            chunk.add_link(page, link, pool);
        }
    }
}

#[cfg(test)]
mod tests;
