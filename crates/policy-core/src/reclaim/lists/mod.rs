//! Doubly linked lists over page numbers, which every reclaim policy uses.
//!
//! Most pages arrive in the order of their numbers. A page whose neighbours in the list are the
//! pages before and after it needs no link; every other page has one. The layout of links:
//! `lists/chunk.rs`. What they cost, and what was rejected: docs/design/0013.
//!
//! The page at the back has no link yet. The list's ends hold its place until the next page comes
//! and both neighbours are known. The front page's link to the page before it may hold any number:
//! callers compare with the front instead. Limit: page numbers below 2^28, 1 TiB of address space,
//! as in the ledger.

mod chunk;

use super::Shown;
use undercroft_base::{Bytes, PageCount, PageNo};

use chunk::{Chunk, Link, PER_CHUNK, Pool, before, get, place, set};

/// Empty chunks kept for the next chunk that is needed.
const SPARE_CHUNKS: usize = 16;

/// The lists that share the links.
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
    /// The list of this number; `None` for 0.
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

/// A set of lists A to C. Two sets share the links, and each page belongs to one set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Set {
    /// The set of a policy that needs only one.
    #[default]
    First = 0,
    /// The other.
    Second = 1,
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

/// Up to three lists in each of two sets. A page is in one of them or in none.
///
/// Two bits a page say which list of its set. The set is not stored: the caller must know it by the
/// page's number, and every call is about the set that [`PageLists::turn_to`] named last. Every
/// operation reads only a page and its neighbours. `push_back`, `remove`, `pop_front` and
/// `move_to_back` may also move links of the chunks concerned, at most 3.5 KiB each.
#[derive(Default)]
pub struct PageLists {
    chunks: Vec<Option<Box<Chunk>>>,
    #[expect(clippy::vec_box, reason = "they go to `chunks` and come from there")]
    spare: Vec<Box<Chunk>>,
    chunks_used: usize,
    chunks_used_peak: usize,
    pool: Pool,
    ends: [Ends; 6],
    set: Set,
}

impl PageLists {
    /// Empty lists. Cost: no allocation.
    pub fn new() -> PageLists {
        PageLists::default()
    }

    /// All calls are about the lists and pages of `set` from now on. O(1).
    #[inline]
    pub fn turn_to(&mut self, set: Set) -> &mut PageLists {
        self.set = set;
        self
    }

    /// Where the ends of `list` are.
    #[inline]
    fn ends_of(&self, list: List) -> usize {
        self.set as usize * 3 + list as usize - 1
    }

    /// Puts the page at the back, with mark 0. Panics if it is in a list. Allocates at the first
    /// page of a chunk if there is no spare chunk, and 8 KiB if the pool has no free piece.
    #[inline(always)] // on the fault path
    pub fn push_back(&mut self, list: List, page: PageNo) {
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

    /// Takes the page out of its list, which it returns. Panics if it is in none.
    #[inline]
    pub fn remove(&mut self, page: PageNo) -> List {
        let PageLists { chunks, pool, .. } = self;
        let Some(Some(chunk)) = chunks.get_mut(page.0 as usize / PER_CHUNK) else {
            not_listed(page);
        };
        let (at, bit) = place(page.0);
        let Some(list) = List::of(get(chunk.blocks[at].list, bit)) else {
            not_listed(page);
        };
        let link = chunk.take_out(page.0, pool);
        let (next, mut prev) = (link.next(), link.prev());
        let unneeded = chunk.holds_unneeded();
        let ends = &self.ends[self.ends_of(list)];
        if ends.back == page.0 {
            prev = ends.before_back;
        }
        // Joined after the page has left. Where there are holes, its link is then the nearest for
        // its neighbours.
        self.join_neighbours(list, page.0, next, prev);
        if unneeded {
            self.free_unneeded(page);
        }
        list
    }

    /// Takes out the page at the front.
    #[inline(always)] // on the eviction path
    pub fn pop_front(&mut self, list: List) -> Option<PageNo> {
        let page = self.front(list)?;
        let at = self.ends_of(list);
        let ends = &mut self.ends[at];
        let Some(Some(chunk)) = self.chunks.get_mut(page.0 as usize / PER_CHUNK) else {
            not_listed(page);
        };
        ends.front = chunk.take_out(page.0, &mut self.pool).next();
        ends.len -= 1;
        if chunk.holds_unneeded() {
            self.free_unneeded(page);
        }
        Some(page)
    }

    /// Moves a listed page to the back of `list`, the same or another. Its mark stays. Panics as
    /// `remove`.
    pub fn move_to_back(&mut self, list: List, page: PageNo) {
        let ends = self.ends[self.ends_of(list)];
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

    /// Appends all of `from` to `to`, in order. Cost: O(pages of `from`).
    pub fn append(&mut self, from: List, to: List) {
        while let Some(page) = self.front(from) {
            self.move_to_back(to, page);
        }
    }

    /// The page at the front.
    #[inline]
    pub fn front(&self, list: List) -> Option<PageNo> {
        let ends = self.ends[self.ends_of(list)];
        (ends.len > 0).then_some(PageNo(ends.front))
    }

    /// The list the page is in.
    pub fn list(&self, page: PageNo) -> Option<List> {
        self.chunk(page.0)?.list(page.0)
    }

    /// Pages in `list`.
    pub fn len(&self, list: List) -> PageCount {
        PageCount(self.ends[self.ends_of(list)].len)
    }

    /// Pages in all lists of both sets.
    pub fn total(&self) -> PageCount {
        PageCount(self.ends.iter().map(|ends| ends.len).sum())
    }

    /// The page's mark, 0..4; 0 when it is in no list.
    #[inline]
    pub fn mark(&self, page: PageNo) -> u8 {
        let (block, bit) = place(page.0);
        self.chunk(page.0)
            .map_or(0, |chunk| get(chunk.blocks[block].mark, bit))
    }

    /// Sets the mark. Panics when the page is in no list or `mark` is above 3.
    #[inline]
    pub fn set_mark(&mut self, page: PageNo, mark: u8) {
        assert!(mark < 4, "a mark has two bits");
        let (block, bit) = place(page.0);
        let block = &mut self.chunk_mut(page.0).blocks[block];
        assert!(block.listed() >> bit & 1 == 1, "{page:?} is in no list");
        set(&mut block.mark, bit, mark);
    }

    /// Sets bits of the mark if the page is in a list: [`PageLists::list`] and
    /// [`PageLists::set_mark`] in one access. Panics if `bits` is above 3.
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

    /// State of a policy over these lists. Cost: O(1).
    pub fn shown(&self) -> Shown {
        Shown {
            len: self.total(),
            metadata: self.held_bytes_peak(),
            choice: None,
        }
    }

    /// Most bytes held so far. Cost: O(1).
    pub fn held_bytes_peak(&self) -> Bytes {
        let chunks = self.chunks_used_peak * size_of::<Chunk>();
        let table = self.chunks.capacity() * size_of::<usize>();
        Bytes((self.pool.held_bytes() + chunks + table) as u64)
    }

    /// The list of a page that must be listed.
    #[inline]
    fn listed(&self, page: PageNo) -> List {
        match self.list(page) {
            Some(list) => list,
            None => not_listed(page),
        }
    }

    /// Joins a page to the back of `list`. Its bits say already that it is in `list`.
    #[inline(always)] // on the fault path
    fn join_back(&mut self, list: List, page: u32) {
        let at = self.ends_of(list);
        let ends = &mut self.ends[at];
        let old = *ends;
        ends.back = page;
        ends.len += 1;
        if old.len == 0 {
            ends.front = page;
            ends.before_back = before(page);
        } else {
            ends.before_back = old.back;
            let link = Link::new(page, old.before_back);
            self.set_link(old.back, |_| link);
        }
    }

    /// Joins the neighbours of a page that leaves the list.
    fn join_neighbours(&mut self, list: List, page: u32, next: u32, prev: u32) {
        let at = self.ends_of(list);
        let ends = &mut self.ends[at];
        ends.len -= 1;
        if ends.front == page {
            ends.front = next;
            return;
        }
        if ends.back == page {
            ends.back = prev;
            self.ends[at].before_back = self.link_of(prev).prev();
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

    /// Frees the memory that a chunk no longer needs.
    #[cold]
    fn free_unneeded(&mut self, page: PageNo) {
        let slot = &mut self.chunks[page.chunk().0 as usize];
        let Some(chunk) = slot else {
            return;
        };
        if chunk.listed > 0 {
            if chunk.has_many_holes() {
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
        let ends = self.ends[self.ends_of(list)];
        let link = self.link_of(page);
        if ends.back == page {
            (link.next(), ends.before_back)
        } else {
            (link.next(), link.prev())
        }
    }

    /// The page's neighbours, as its link or the lack of one says. Not valid for the page at the
    /// back of its list.
    fn link_of(&mut self, page: u32) -> Link {
        let PageLists { chunks, pool, .. } = self;
        match chunks.get(page as usize / PER_CHUNK) {
            Some(Some(chunk)) if chunk.has_link(page) => chunk.link(page, pool),
            _ => Link::implied(page),
        }
    }

    fn set_next(&mut self, page: u32, next: u32) {
        self.set_link(page, |link| Link::new(next, link.prev()));
    }

    fn set_prev(&mut self, page: u32, prev: u32) {
        self.set_link(page, |link| Link::new(link.next(), prev));
    }

    /// Changes the link of a page. A page without a link gets one, unless its new neighbours need
    /// none.
    #[inline(always)] // on the fault path
    fn set_link(&mut self, page: u32, change: impl FnOnce(Link) -> Link) {
        let PageLists { chunks, pool, .. } = self;
        let Some(Some(chunk)) = chunks.get_mut(page as usize / PER_CHUNK) else {
            return;
        };
        if chunk.has_link(page) {
            chunk.change_link(page, change, pool);
            return;
        }
        let implied = Link::implied(page);
        let link = change(implied);
        if link != implied {
            chunk.add_link(page, link, pool);
        }
    }
}

#[cfg(test)]
mod tests;
