//! The links of the listed pages of a chunk (512 pages), in the order of their page numbers, in pieces of a common pool.
//!
//! Only a page whose neighbours in its list are not the pages before and after it in memory has a link. Two bits a page say which
//! list it is in, two are the policy's mark, and one says that it has a link; those bits counted up to a page say where, so nothing
//! stores that:
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

use undercroft_base::CHUNK_PAGES;

use super::List;

const PAGE_BITS: u32 = 28;
pub(super) const PAGE_MASK: u32 = (1 << PAGE_BITS) - 1;
pub(super) const PER_CHUNK: usize = CHUNK_PAGES as usize;
const PER_BLOCK: usize = 64;
const BLOCKS: usize = PER_CHUNK / PER_BLOCK;
const LAST_BLOCK: usize = BLOCKS - 1;
const UNTIL_BITS: usize = 9;
/// Links in a piece, and the most pieces of a chunk.
pub(super) const PIECE_LINKS: usize = 64;
const PIECES: usize = PER_CHUNK / PIECE_LINKS;
/// Pieces allocated at once.
pub(super) const SLAB_PIECES: usize = 16;
/// Links that move by one place in so few instructions that fewer would not be faster.
const FEW_LINKS: usize = 8;
/// Holes at which the links of a chunk move together.
pub(super) const HOLES_MAX: u16 = 32;

/// Neighbours of a page: next in bits 0..28, previous in bits 28..56. Each field is read and written whole: a load that
/// overlaps a store just made, but is not the same bytes, has to wait for it.
#[derive(Clone, Copy, Default)]
pub(super) struct Link {
    low: [u8; 4],
    middle: [u8; 2],
    high: u8,
}

const _: () = assert!(size_of::<Link>() == 7, "the metadata budget of a page");

impl Link {
    #[inline]
    pub(super) fn new(next: u32, prev: u32) -> Link {
        let high = prev >> (32 - PAGE_BITS);
        Link {
            low: (next | prev << PAGE_BITS).to_le_bytes(),
            middle: (high as u16).to_le_bytes(),
            high: (high >> 16) as u8,
        }
    }

    #[inline]
    pub(super) fn next(&self) -> u32 {
        u32::from_le_bytes(self.low) & PAGE_MASK
    }

    #[inline]
    pub(super) fn prev(&self) -> u32 {
        let high = u32::from(u16::from_le_bytes(self.middle)) | u32::from(self.high) << 16;
        high << (32 - PAGE_BITS) | u32::from_le_bytes(self.low) >> PAGE_BITS
    }

    /// Whether it says of `page` what no link would say as well.
    #[inline]
    pub(super) fn is_understood(&self, page: u32) -> bool {
        self.next() == after(page) && self.prev() == before(page)
    }

    #[inline]
    pub(super) fn set_next(&mut self, page: u32) {
        self.low = (u32::from_le_bytes(self.low) & !PAGE_MASK | page).to_le_bytes();
    }
}

/// Neighbours of a page that has no link.
#[inline]
pub(super) fn after(page: u32) -> u32 {
    page.wrapping_add(1) & PAGE_MASK
}

#[inline]
pub(super) fn before(page: u32) -> u32 {
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
pub(super) struct Block {
    pub(super) list: [u64; 2],
    pub(super) mark: [u64; 2],
    /// Pages that own a link: a listed one's says its neighbours, another's is a hole.
    pub(super) links: u64,
}

impl Block {
    #[inline]
    pub(super) fn listed(&self) -> u64 {
        self.list[0] | self.list[1]
    }

    pub(super) fn holes(&self) -> u64 {
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
pub(super) fn get(planes: [u64; 2], bit: u32) -> u8 {
    (planes[0] >> bit & 1) as u8 | ((planes[1] >> bit & 1) as u8) << 1
}

#[inline]
pub(super) fn set(planes: &mut [u64; 2], bit: u32, value: u8) {
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
pub(super) fn place(page: u32) -> (usize, u32) {
    (page as usize / PER_BLOCK % BLOCKS, page % PER_BLOCK as u32)
}

type Piece = [Link; PIECE_LINKS];

/// Pieces in use and free ones, all of one size: no holes between them. What was once allocated is kept for the next chunk.
#[derive(Default)]
pub(super) struct Pool {
    pub(super) slabs: Vec<Box<[Piece; SLAB_PIECES]>>,
    /// The free piece to take next, plus one; the `next` of its first link leads to another in the same way.
    pub(super) free: u32,
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

    pub(super) fn held_bytes(&self) -> usize {
        let slabs = self.slabs.len() * size_of::<[Piece; SLAB_PIECES]>();
        slabs + self.slabs.capacity() * size_of::<usize>()
    }

    #[inline]
    pub(super) fn piece(&mut self, piece: u32) -> &mut Piece {
        let piece = piece as usize;
        &mut self.slabs[piece / SLAB_PIECES][piece % SLAB_PIECES]
    }
}

#[derive(Default)]
pub(super) struct Chunk {
    pub(super) blocks: [Block; BLOCKS],
    /// Links, holes among them, up to the end of each block but the last, 9 bits each: counted up and down all at once.
    until: u64,
    /// Those that the links need; the rest is of no meaning.
    pieces: [u32; PIECES],
    /// Links, holes among them.
    len: u16,
    /// Pages in a list.
    pub(super) listed: u16,
    pub(super) holes: u16,
    /// Blocks that have a hole, one bit each.
    pub(super) holed: u8,
    /// A listed page may have a link that says what is understood without one.
    pub(super) understood: bool,
}

const _: () = assert!(
    size_of::<Chunk>() == 368,
    "the metadata budget of a page, and the drawing above"
);

impl Chunk {
    #[inline]
    pub(super) fn list(&self, page: u32) -> Option<List> {
        let (block, bit) = place(page);
        List::of(get(self.blocks[block].list, bit))
    }

    /// Links, holes among them.
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// Links, holes among them, up to the end of a block.
    #[inline]
    pub(super) fn end(&self, block: usize) -> usize {
        // Behind those of the other blocks is a zero: no branch that could be guessed wrong.
        let counted = (self.until >> (UNTIL_BITS * block)) as usize & ((1 << UNTIL_BITS) - 1);
        let all = if block == LAST_BLOCK { self.len() } else { 0 };
        counted | all
    }

    #[inline]
    pub(super) fn has_link(&self, page: u32) -> bool {
        let (block, bit) = place(page);
        self.blocks[block].links >> bit & 1 == 1
    }

    /// Where the page's link is, or would go: the links of lower pages.
    #[inline]
    pub(super) fn rank(&self, page: u32) -> usize {
        let (block, bit) = place(page);
        let not_below = self.blocks[block].links >> bit;
        self.end(block) - not_below.count_ones() as usize
    }

    #[inline]
    pub(super) fn link<'a>(&self, rank: usize, pool: &'a mut Pool) -> &'a mut Link {
        &mut pool.piece(self.pieces[rank / PIECE_LINKS])[rank % PIECE_LINKS]
    }

    /// Gives a listed page that has no link this one.
    #[inline(always)] // on the way of every fault
    pub(super) fn add_link(&mut self, page: u32, link: Link, pool: &mut Pool) {
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

    /// Takes a listed page out of its list; its neighbours there, as its link says them or as they are understood.
    #[inline(always)] // on the way of every page that leaves
    pub(super) fn take_out(&mut self, page: u32, pool: &mut Pool) -> (u32, u32) {
        let (at, bit) = place(page);
        let block = &mut self.blocks[at];
        let others = !(1 << bit);
        block.list[0] &= others;
        block.list[1] &= others;
        block.mark[0] &= others;
        block.mark[1] &= others;
        self.listed -= 1;
        if block.links >> bit & 1 == 0 {
            return (after(page), before(page));
        }
        let link = match self.len() <= PIECE_LINKS {
            true => self.take_link(page, pool),
            false => {
                self.holes += 1;
                self.holed |= 1 << at;
                *self.link(self.rank(page), pool)
            }
        };
        (link.next(), link.prev())
    }

    /// Whether it holds what it no longer needs: everything, or too many holes.
    #[inline]
    pub(super) fn is_to_settle(&self) -> bool {
        self.listed == 0 || self.holes >= HOLES_MAX
    }

    /// Takes the link of a page out, where all links of the chunk are in one piece.
    #[inline(always)] // on the way of every page that leaves
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
    pub(super) fn hole_filled(&mut self, block: usize) {
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
    pub(super) fn compact(&mut self, first: u32, pool: &mut Pool) {
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

    pub(super) fn give_all(&self, pool: &mut Pool) {
        for index in 0..self.len().div_ceil(PIECE_LINKS) {
            pool.give(self.pieces[index]);
        }
    }
}
