//! The links of the listed pages of a chunk (512 pages), in pieces of a common pool.
//!
//! A page needs a link only if its neighbours in the list are not the pages before and after it.
//! Two bits a page say which list it is in, two are the policy's mark, and one says whether it has
//! a link. Where the links are sorted by page, the number of link bits up to a page is the place of
//! its link, so no place is stored. Where they are few, they are not sorted, and an *order* says
//! where each is:
//!
//! ```text
//! Chunk: 512 pages, 368 bytes; none while no page of it is in a list
//! +--------------------------------------------------------------------------+
//! | blocks: 8 x 64 pages: list bits 0 and 1, mark bits 0 and 1, has a link   |
//! | pieces: u32 x 8 ---> Piece: 64 links, or 56 and four orders              |
//! | index, sorted: how to find them there; len: links                        |
//! | listed, holes; holed: blocks with holes; implied                         |
//! +--------------------------------------------------------------------------+
//! Link, 8 bytes: | next page, 32 bits | previous page, 32 bits |
//! ```
//! *Few* means that the chunk has 56 links or fewer, and that none of its quarters of 128 pages has
//! more than 21. A new link then goes to any free place of one piece, and no link ever moves. The
//! order of a quarter has the places of its links, by page, 6 bits each. Chunks with more links
//! have them *sorted* by page. A page that leaves its list leaves its link behind as a *hole*. The
//! next link of the chunk goes into the nearest hole, so that few others have to move. The links
//! are compacted when there are 32 holes, or 8 holes and 40 other links or fewer. After that they
//! are no longer sorted, if they are 40 or fewer and fit the orders.

use std::ops::Range;

use undercroft_base::CHUNK_PAGES;

use super::List;

pub(super) const PER_CHUNK: usize = CHUNK_PAGES as usize;
const PER_BLOCK: usize = 64;
const BLOCKS: usize = PER_CHUNK / PER_BLOCK;
const LAST_BLOCK: usize = BLOCKS - 1;
const UNTIL_BITS: usize = 9;
const LINK_BYTES: usize = size_of::<Link>();
/// Links in a piece, and the most pieces of a chunk.
pub(super) const PIECE_LINKS: usize = 64;
const PIECES: usize = PER_CHUNK / PIECE_LINKS;
/// Pieces allocated at once.
pub(super) const SLAB_PIECES: usize = 16;
/// Blocks that share an order, and the orders of a chunk.
const PER_ORDER: usize = 2;
const ORDERS: usize = BLOCKS / PER_ORDER;
const _: () = assert!(
    PER_ORDER == 2,
    "a rank in an order looks at one block before"
);
/// Most links that are not sorted: of a chunk, and of one order.
pub(super) const FEW_LINKS: usize =
    (size_of::<Piece>() - size_of::<[Order; ORDERS]>()) / LINK_BYTES;
const PER_ORDER_MAX: u32 = u128::BITS / PLACE_BITS;
/// Bits of a place.
const PLACE_BITS: u32 = 6;
/// Holes at which the links of a chunk are compacted.
pub(super) const HOLES_MAX: u8 = 32;
/// The same for a chunk with at most [`UNSORTED_AGAIN`] other links: they need not be sorted any
/// more, unless an order would be too full.
const HOLES_MAX_OF_FEW: u8 = 8;
const UNSORTED_AGAIN: usize = 40;

/// Neighbours of a page: next in bits 0..32, previous in bits 32..64.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u64);

impl Link {
    #[inline]
    pub(super) fn new(next: u32, prev: u32) -> Link {
        Link(u64::from(next) | u64::from(prev) << 32)
    }

    /// The neighbours of a page without a link.
    #[inline]
    pub(super) fn implied(page: u32) -> Link {
        Link::new(after(page), before(page))
    }

    #[inline]
    fn read(bytes: [u8; LINK_BYTES]) -> Link {
        Link(u64::from_le_bytes(bytes))
    }

    #[inline]
    pub(super) fn next(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn prev(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Neighbours of a page that has no link.
#[inline]
fn after(page: u32) -> u32 {
    page.wrapping_add(1)
}

#[inline]
pub(super) fn before(page: u32) -> u32 {
    page.wrapping_sub(1)
}

/// How far from `bit` the nearest set bit is, upwards and downwards; 64 if there is none.
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
    /// Pages that own a link. Of a listed page it names the neighbours; otherwise it is a hole.
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

    /// Pages whose links are implied, so not needed.
    ///
    /// * `first`: the block's first page.
    /// * `links`: the links, from its first on.
    fn implied(&self, first: u32, links: &[[u8; LINK_BYTES]]) -> u64 {
        let (mut pages, mut found) = (self.links, 0);
        for link in links {
            if pages == 0 {
                break;
            }
            let bit = pages.trailing_zeros();
            pages &= pages - 1;
            let implied = Link::read(*link) == Link::implied(first + bit);
            found |= u64::from(implied) << bit;
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

/// A set bit for each of the first `blocks` blocks, as [`Chunk::index`] counts them.
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

/// The places of the links of two blocks, by page, [`PLACE_BITS`] each. The bits above them mean
/// nothing.
#[derive(Clone, Copy, Default)]
struct Order(u128);

impl Order {
    #[inline]
    fn place(self, rank: u32) -> usize {
        (self.0 >> (PLACE_BITS * rank)) as usize & ((1 << PLACE_BITS) - 1)
    }

    /// Adds a place, before the one at `rank`.
    #[inline]
    fn with(self, rank: u32, place: u32) -> Order {
        let below = (1 << (PLACE_BITS * rank)) - 1;
        let above = (self.0 & !below) << PLACE_BITS;
        Order(self.0 & below | u128::from(place) << (PLACE_BITS * rank) | above)
    }

    /// Removes the place at `rank`.
    #[inline]
    fn without(self, rank: u32) -> Order {
        let below = (1 << (PLACE_BITS * rank)) - 1;
        Order(self.0 & below | (self.0 >> PLACE_BITS) & !below)
    }
}

/// Links side by side. If they are not sorted, the last 64 bytes are the orders.
#[derive(Clone, Copy)]
pub(super) struct Piece([u8; PIECE_LINKS * LINK_BYTES]);

const _: () = assert!(
    size_of::<Piece>() == 512 && FEW_LINKS == 56 && FEW_LINKS <= 1 << PLACE_BITS,
    "the metadata budget of a page"
);

impl Piece {
    /// Where the orders start, in their own size.
    const FIRST: usize = size_of::<Piece>() / size_of::<Order>() - ORDERS;
    const EMPTY: Piece = Piece([0; PIECE_LINKS * LINK_BYTES]);

    #[inline]
    fn get(&self, at: usize) -> Link {
        Link::read(self.0.as_chunks().0[at])
    }

    #[inline]
    fn set(&mut self, at: usize, link: Link) {
        self.0.as_chunks_mut::<LINK_BYTES>().0[at] = link.0.to_le_bytes();
    }

    /// Copies links, as [`slice::copy_within`].
    fn copy_within(&mut self, links: Range<usize>, to: usize) {
        let bytes = links.start * LINK_BYTES..links.end * LINK_BYTES;
        self.0.copy_within(bytes, to * LINK_BYTES);
    }

    #[inline]
    fn order(&self, at: usize) -> Order {
        Order(u128::from_le_bytes(self.0.as_chunks().0[Self::FIRST + at]))
    }

    #[inline]
    fn set_order(&mut self, at: usize, order: Order) {
        self.0.as_chunks_mut().0[Self::FIRST + at] = order.0.to_le_bytes();
    }
}

/// Pieces in use and free ones, all of one size, so there are no gaps. Allocated memory is kept for
/// the next chunk.
#[derive(Default)]
pub(super) struct Pool {
    pub(super) slabs: Vec<Box<[Piece; SLAB_PIECES]>>,
    /// The free piece to take next, plus one. Its first link leads to the next free one.
    pub(super) free: u32,
}

impl Pool {
    #[inline(never)]
    fn take(&mut self) -> u32 {
        if self.free == 0 {
            let first = (self.slabs.len() * SLAB_PIECES) as u32;
            self.slabs.push(Box::new([Piece::EMPTY; SLAB_PIECES]));
            for piece in (first..first + SLAB_PIECES as u32).rev() {
                self.give(piece);
            }
        }
        let piece = self.free - 1;
        self.free = self.after_free(piece);
        piece
    }

    fn give(&mut self, piece: u32) {
        let free = std::mem::replace(&mut self.free, piece + 1);
        self.piece(piece).set(0, Link::new(free, 0));
    }

    /// The value of [`Pool::free`] once this free piece is taken.
    pub(super) fn after_free(&mut self, piece: u32) -> u32 {
        self.piece(piece).get(0).next()
    }

    pub(super) fn held_bytes(&self) -> usize {
        let slabs = self.slabs.len() * size_of::<[Piece; SLAB_PIECES]>();
        slabs + self.slabs.capacity() * size_of::<usize>()
    }

    #[inline]
    fn piece(&mut self, piece: u32) -> &mut Piece {
        let piece = piece as usize;
        &mut self.slabs[piece / SLAB_PIECES][piece % SLAB_PIECES]
    }
}

#[derive(Default)]
pub(super) struct Chunk {
    pub(super) blocks: [Block; BLOCKS],
    /// Sorted links: the number of links, holes included, up to the end of each block except the
    /// last, 9 bits each; all are counted up and down at once. Unsorted links: the free places of
    /// their piece, a bit each.
    index: u64,
    /// The pieces that the links need; the other elements mean nothing.
    pieces: [u32; PIECES],
    /// Links, holes among them.
    len: u16,
    /// Pages in a list.
    pub(super) listed: u16,
    pub(super) holes: u8,
    /// Blocks that have a hole, one bit each.
    pub(super) holed: u8,
    /// A listed page may have a link that is implied.
    implied: bool,
    /// The links are sorted by page. Otherwise an order says where each is.
    pub(super) sorted: bool,
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
        // Behind the counts of the other blocks is a zero: no branch that could be mispredicted.
        let counted = (self.index >> (UNTIL_BITS * block)) as usize & ((1 << UNTIL_BITS) - 1);
        let all = if block == LAST_BLOCK { self.len() } else { 0 };
        counted | all
    }

    #[inline]
    pub(super) fn has_link(&self, page: u32) -> bool {
        let (block, bit) = place(page);
        self.blocks[block].links >> bit & 1 == 1
    }

    /// Where the page's link is, or would go, among sorted links: the number of links of lower
    /// pages.
    #[inline]
    fn rank(&self, page: u32) -> usize {
        let (block, bit) = place(page);
        let not_below = self.blocks[block].links >> bit;
        self.end(block) - not_below.count_ones() as usize
    }

    /// Links of the blocks that have the order `at`.
    #[inline]
    fn links_of(&self, at: usize) -> u32 {
        let blocks = self.blocks.as_chunks::<PER_ORDER>().0[at];
        blocks.iter().map(|block| block.links.count_ones()).sum()
    }

    /// Which order has the place of the page's link, and how many places of lower pages it has.
    #[inline]
    fn rank_in_order(&self, page: u32) -> (usize, u32) {
        let (block, bit) = place(page);
        let at = block / PER_ORDER;
        let below = self.blocks[block].links & ((1 << bit) - 1);
        // Those of the block before, too, if it has the same order.
        let before = self.blocks[block & !1].links & (block as u64 & 1).wrapping_neg();
        (at, below.count_ones() + before.count_ones())
    }

    /// The page's link, and where it is.
    #[inline(always)] // on both paths
    fn link_at<'a>(&self, page: u32, pool: &'a mut Pool) -> (&'a mut Piece, usize) {
        if !self.sorted {
            let piece = pool.piece(self.pieces[0]);
            let (order, rank) = self.rank_in_order(page);
            let at = piece.order(order).place(rank);
            return (piece, at);
        }
        let rank = self.rank(page);
        (
            pool.piece(self.pieces[rank / PIECE_LINKS]),
            rank % PIECE_LINKS,
        )
    }

    /// The link of a page that has one.
    #[inline]
    pub(super) fn link(&self, page: u32, pool: &mut Pool) -> Link {
        let (piece, at) = self.link_at(page, pool);
        piece.get(at)
    }

    /// Changes the link of a page that has one.
    #[inline]
    pub(super) fn change_link(
        &mut self,
        page: u32,
        change: impl FnOnce(Link) -> Link,
        pool: &mut Pool,
    ) {
        let (piece, at) = self.link_at(page, pool);
        piece.set(at, change(piece.get(at)));
        self.implied = true;
    }

    /// Gives a listed page that has no link this one.
    #[inline(always)] // on the fault path
    pub(super) fn add_link(&mut self, page: u32, link: Link, pool: &mut Pool) {
        let (block, bit) = place(page);
        let (order, rank) = self.rank_in_order(page);
        let is_full = self.len() >= PER_ORDER_MAX as usize
            && (self.len() == FEW_LINKS || self.links_of(order) == PER_ORDER_MAX);
        if self.sorted || is_full {
            self.add_sorted(page, link, pool);
            return;
        }
        if self.len() == 0 {
            self.pieces[0] = pool.take();
            self.index = (1 << FEW_LINKS) - 1;
        }
        let at = self.index.trailing_zeros();
        self.index &= self.index - 1;
        self.blocks[block].links |= 1 << bit;
        self.len += 1;
        let piece = pool.piece(self.pieces[0]);
        piece.set_order(order, piece.order(order).with(rank, at));
        piece.set(at as usize, link);
    }

    /// Takes a listed page out of its list. Returns its neighbours there.
    #[inline(always)] // on the eviction path
    pub(super) fn take_out(&mut self, page: u32, pool: &mut Pool) -> Link {
        let (at, bit) = place(page);
        let block = &mut self.blocks[at];
        let others = !(1 << bit);
        block.list[0] &= others;
        block.list[1] &= others;
        block.mark[0] &= others;
        block.mark[1] &= others;
        self.listed -= 1;
        if block.links >> bit & 1 == 0 {
            return Link::implied(page);
        }
        if !self.sorted {
            return self.take_link(page, pool);
        }
        self.holes += 1;
        self.holed |= 1 << at;
        self.link(page, pool)
    }

    /// Whether its links should be compacted: to free pieces, or because they need not be sorted
    /// any more.
    #[inline]
    pub(super) fn has_many_holes(&self) -> bool {
        let few = self.len() - usize::from(self.holes) <= UNSORTED_AGAIN;
        self.holes >= if few { HOLES_MAX_OF_FEW } else { HOLES_MAX }
    }

    /// Whether it holds memory that it no longer needs: it is empty, or has too many holes.
    #[inline]
    pub(super) fn holds_unneeded(&self) -> bool {
        self.listed == 0 || self.has_many_holes()
    }

    /// Takes out the link of a page, where links are not sorted.
    #[inline(always)] // on the eviction path
    fn take_link(&mut self, page: u32, pool: &mut Pool) -> Link {
        let (block, bit) = place(page);
        let (order, rank) = self.rank_in_order(page);
        let piece = pool.piece(self.pieces[0]);
        let places = piece.order(order);
        let at = places.place(rank);
        let link = piece.get(at);
        piece.set_order(order, places.without(rank));
        self.index |= 1 << at;
        self.blocks[block].links &= !(1 << bit);
        self.len -= 1;
        if self.len == 0 {
            pool.give(self.pieces[0]);
        }
        link
    }

    /// Sorts the links, because one more would be too many for an order or for the chunk.
    fn sort(&mut self, pool: &mut Pool) {
        let piece = pool.piece(self.pieces[0]);
        let (old, mut to) = (*piece, 0);
        for order in 0..ORDERS {
            for rank in 0..self.links_of(order) {
                piece.set(to, old.get(old.order(order).place(rank)));
                to += 1;
            }
        }
        (self.index, self.sorted) = (0, true);
        for (at, block) in self.blocks.iter().enumerate() {
            self.index += u64::from(block.links.count_ones()) * (ones(LAST_BLOCK) - ones(at));
        }
    }

    /// Ends the sorting of links if they are few enough and have no holes. The other places are
    /// free then.
    fn unsort(&mut self, pool: &mut Pool) {
        let too_many = |order| self.links_of(order) > PER_ORDER_MAX;
        if self.len() > UNSORTED_AGAIN || (0..ORDERS).any(too_many) {
            return;
        }
        self.sorted = false;
        if self.len == 0 {
            return;
        }
        let piece = pool.piece(self.pieces[0]);
        let mut at = 0;
        for order in 0..ORDERS {
            let mut places = Order::default();
            for rank in 0..self.links_of(order) {
                places = places.with(rank, at);
                at += 1;
            }
            piece.set_order(order, places);
        }
        self.index = ((1 << FEW_LINKS) - 1) & !((1 << at) - 1);
    }

    /// As [`Chunk::add_link`], for links that are sorted, or will be with this one. There may be
    /// holes.
    #[inline(never)]
    fn add_sorted(&mut self, page: u32, link: Link, pool: &mut Pool) {
        if !self.sorted {
            self.sort(pool);
        }
        let (block, bit) = place(page);
        let rank = self.rank(page);
        let free = match self.hole_near(block, bit) {
            Some((at, hole)) => {
                let hole_rank = self.rank((at * PER_BLOCK) as u32 + hole);
                self.blocks[at].links &= !(1 << hole);
                self.hole_filled(at);
                self.index = self.index.wrapping_add(ones(at));
                hole_rank
            }
            None => {
                let len = self.len();
                if len.is_multiple_of(PIECE_LINKS) {
                    self.pieces[len / PIECE_LINKS] = pool.take();
                }
                self.index += ones(LAST_BLOCK);
                self.len += 1;
                len
            }
        };
        self.index = self.index.wrapping_sub(ones(block));
        self.blocks[block].links |= 1 << bit;
        self.put_link(free, rank, link, pool);
    }

    /// Puts a link before the one at `rank`. The link at `from` means nothing; those between move.
    #[inline]
    fn put_link(&self, from: usize, rank: usize, link: Link, pool: &mut Pool) {
        let down = from < rank;
        let to = rank - usize::from(down);
        if from / PIECE_LINKS != to / PIECE_LINKS {
            if down {
                self.shift_down(from, to, pool)
            } else {
                self.shift_up(to, from, pool)
            }
            pool.piece(self.pieces[to / PIECE_LINKS])
                .set(to % PIECE_LINKS, link);
            return;
        }
        let piece = pool.piece(self.pieces[to / PIECE_LINKS]);
        let (from, to) = (from % PIECE_LINKS, to % PIECE_LINKS);
        let (start, end, dest) = if down {
            (from + 1, to + 1, from)
        } else {
            (to, from, to + 1)
        };
        piece.copy_within(start..end, dest);
        piece.set(to, link);
    }

    /// The hole nearest to a page without a link, in its own block if there is one. Returns the
    /// hole's block and bit.
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

    /// Counts a hole less in a block.
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
            let (start, end) = links_in(index, from, to);
            pool.piece(self.pieces[index])
                .copy_within(start..end, start + 1);
            if index > first {
                let carried = pool.piece(self.pieces[index - 1]).get(PIECE_LINKS - 1);
                pool.piece(self.pieces[index]).set(0, carried);
            }
        }
    }

    /// Moves links `from + 1..=to` one place down.
    fn shift_down(&self, from: usize, to: usize, pool: &mut Pool) {
        let (first, last) = (from / PIECE_LINKS, to / PIECE_LINKS);
        for index in first..=last {
            let (start, end) = links_in(index, from, to);
            pool.piece(self.pieces[index])
                .copy_within(start + 1..end + 1, start);
            if index < last {
                let carried = pool.piece(self.pieces[index + 1]).get(0);
                pool.piece(self.pieces[index]).set(PIECE_LINKS - 1, carried);
            }
        }
    }

    /// Compacts the links: removes the holes and the implied links.
    ///
    /// * `first`: the chunk's first page.
    pub(super) fn compact(&mut self, first: u32, pool: &mut Pool) {
        let len = self.len();
        let pieces = self.pieces;
        let pieces = &pieces[..len.div_ceil(PIECE_LINKS)];
        let (mut one, mut all);
        let bytes = match pieces {
            [piece] => {
                one = pool.piece(*piece).0;
                &mut one[..]
            }
            _ => {
                all = [Piece::EMPTY.0; PIECES];
                for (links, piece) in all.iter_mut().zip(pieces) {
                    *links = pool.piece(*piece).0;
                }
                all.as_flattened_mut()
            }
        };
        let links_of_chunk = bytes.as_chunks_mut().0;
        // The first link not moved yet, and where it goes. The links between two removed ones are
        // moved at once.
        let (mut start, mut kept, mut until) = (0, 0, 0);
        let mut before_block = 0;
        for index in 0..BLOCKS {
            let block = &self.blocks[index];
            let page = first + (index * PER_BLOCK) as u32;
            let goes = if self.implied {
                block.holes() | block.implied(page, &links_of_chunk[before_block..])
            } else {
                block.holes()
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
        for (links, piece) in bytes.as_chunks().0.iter().zip(used) {
            pool.piece(*piece).0 = *links;
        }
        for piece in free {
            pool.give(*piece);
        }
        (self.index, self.len) = (until, kept as u16);
        (self.holes, self.holed, self.implied) = (0, 0, false);
        self.unsort(pool);
    }

    /// Whether the orders name different places, and all other places are free. For links that are
    /// not sorted.
    #[cfg(test)]
    pub(super) fn has_sound_orders(&self, pool: &mut Pool) -> bool {
        let mut used = 0u64;
        for order in 0..ORDERS {
            for rank in 0..self.links_of(order) {
                let place = pool.piece(self.pieces[0]).order(order).place(rank);
                if place >= FEW_LINKS || used >> place & 1 == 1 {
                    return false;
                }
                used |= 1 << place;
            }
        }
        self.len == 0 || used == !self.index & ((1 << FEW_LINKS) - 1)
    }

    pub(super) fn give_all(&self, pool: &mut Pool) {
        for index in 0..self.len().div_ceil(PIECE_LINKS) {
            pool.give(self.pieces[index]);
        }
    }
}

/// The first and last place in piece `index` of the links `from..=to`.
#[inline]
fn links_in(index: usize, from: usize, to: usize) -> (usize, usize) {
    let start = if index > from / PIECE_LINKS {
        0
    } else {
        from % PIECE_LINKS
    };
    let end = if index < to / PIECE_LINKS {
        PIECE_LINKS - 1
    } else {
        to % PIECE_LINKS
    };
    (start, end)
}
