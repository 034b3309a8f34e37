//! Doubly linked lists over page numbers: the common ground of every reclaim policy.
//!
//! Links are stored beside each other, in chunks made at the first insertion into them; nothing is ever copied to grow
//! except the table of chunk pointers (8 bytes for 512 pages). A page costs 8 bytes:
//!
//! ```text
//! next word                            prev word
//! 31  30 29                        0   31  30 29                        0
//! +-----+--------------------------+   +-----+--------------------------+
//! |list | next page, or NONE       |   |mark | previous page, or NONE   |
//! +-----+--------------------------+   +-----+--------------------------+
//! ```
//! `list` 0 = in no list, so fresh zeroed memory is right. `mark` is two bits for the policy; it outlives the page's
//! stay in a list, so a policy can remember something of a page that has left. Limit: page numbers below 2^30 - 1
//! (4 TiB of address space).

use undercroft_base::{CHUNK_PAGES, PageCount, PageNo};

const BITS: u32 = 30;
const NONE: u32 = (1 << BITS) - 1;
const PER_CHUNK: usize = CHUNK_PAGES as usize;

/// One of the lists that share a link array.
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

#[derive(Clone, Copy, Default)]
struct Link {
    next: u32,
    prev: u32,
}

const _: () = assert!(size_of::<Link>() == 8, "the metadata budget of a page");

#[derive(Clone, Copy)]
struct Ends {
    front: u32,
    back: u32,
    len: u64,
}

/// Up to three lists; a page is in one of them or in none. All operations are O(1).
pub struct PageLists {
    chunks: Vec<Option<Box<[Link; PER_CHUNK]>>>,
    ends: [Ends; 3],
}

impl Default for PageLists {
    fn default() -> Self {
        PageLists::new()
    }
}

impl PageLists {
    /// Empty lists. Cost: no allocation.
    pub fn new() -> PageLists {
        let ends = Ends {
            front: NONE,
            back: NONE,
            len: 0,
        };
        PageLists {
            chunks: Vec::new(),
            ends: [ends; 3],
        }
    }

    /// Puts the page at the back. Panics when it is in a list already, or its number does not fit 30 bits (the link
    /// would name another page). Allocates 4 KiB at the first page of a chunk.
    pub fn push_back(&mut self, list: List, page: PageNo) {
        self.make(page);
        self.link_back(list, page.0);
    }

    /// Puts the page at the front. Panics and allocates as `push_back`.
    pub fn push_front(&mut self, list: List, page: PageNo) {
        self.make(page);
        let page = page.0;
        let front = self.ends[list as usize - 1].front;
        let link = self.link_mut(page);
        link.next = front | (list as u32) << BITS;
        link.prev = (link.prev & !NONE) | NONE;
        match front {
            NONE => self.ends[list as usize - 1].back = page,
            front => set(&mut self.link_mut(front).prev, page),
        }
        let ends = &mut self.ends[list as usize - 1];
        ends.front = page;
        ends.len += 1;
    }

    /// Takes the page out of its list and says which it was. Panics when it is in none. The mark stays.
    pub fn remove(&mut self, page: PageNo) -> List {
        let (list, next, prev) = match self.link(page.0) {
            Some(link) if link.next >> BITS != 0 => {
                (list_of(link.next), link.next & NONE, link.prev & NONE)
            }
            _ => panic!("{page:?} is in no list: removed twice, or never inserted"),
        };
        let ends = &mut self.ends[list as usize - 1];
        ends.len -= 1;
        if next == NONE {
            ends.back = prev;
        }
        if prev == NONE {
            ends.front = next;
        }
        if next != NONE {
            set(&mut self.link_mut(next).prev, prev);
        }
        if prev != NONE {
            set(&mut self.link_mut(prev).next, next);
        }
        self.link_mut(page.0).next = 0;
        list
    }

    /// Moves a page that is in a list to the back of `list` (the same or another). Panics as `remove`.
    pub fn move_to_back(&mut self, list: List, page: PageNo) {
        if self.ends[list as usize - 1].back == page.0 {
            return;
        }
        self.remove(page);
        self.link_back(list, page.0);
    }

    /// Puts all of `from` behind the back of `to`, in order. Cost: O(pages of `from`).
    pub fn append(&mut self, from: List, to: List) {
        while let Some(page) = self.front(from) {
            self.move_to_back(to, page);
        }
    }

    /// The page at the front.
    pub fn front(&self, list: List) -> Option<PageNo> {
        let front = self.ends[list as usize - 1].front;
        (front != NONE).then_some(PageNo(front))
    }

    /// The list the page is in.
    pub fn list(&self, page: PageNo) -> Option<List> {
        let next = self.link(page.0)?.next;
        (next >> BITS != 0).then(|| list_of(next))
    }

    /// Pages in `list`.
    pub fn len(&self, list: List) -> PageCount {
        PageCount(self.ends[list as usize - 1].len)
    }

    /// Pages in all lists.
    pub fn total(&self) -> PageCount {
        PageCount(self.ends.iter().map(|ends| ends.len).sum())
    }

    /// The page's mark, 0..4; 0 when its chunk was never used.
    pub fn mark(&self, page: PageNo) -> u8 {
        self.link(page.0)
            .map_or(0, |link| (link.prev >> BITS) as u8)
    }

    /// Sets the mark. Panics when the page was never in a list or `mark` is above 3.
    pub fn set_mark(&mut self, page: PageNo, mark: u8) {
        assert!(mark < 4, "a mark has two bits");
        let prev = &mut self.link_mut(page.0).prev;
        *prev = (*prev & NONE) | u32::from(mark) << BITS;
    }

    /// Sets bits of the mark if the page is in a list: one look for [`PageLists::list`] and [`PageLists::set_mark`]. Panics when
    /// `bits` is above 3.
    #[inline]
    pub fn mark_listed(&mut self, page: PageNo, bits: u8) {
        assert!(bits < 4, "a mark has two bits");
        let chunk = self.chunks.get_mut(page.chunk().0 as usize);
        if let Some(Some(chunk)) = chunk {
            let link = &mut chunk[page.offset() as usize];
            if link.next >> BITS != 0 {
                link.prev |= u32::from(bits) << BITS;
            }
        }
    }

    /// Bytes of metadata held now.
    pub fn held_bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count();
        chunks * size_of::<[Link; PER_CHUNK]>() + self.chunks.capacity() * size_of::<usize>()
    }

    fn make(&mut self, page: PageNo) {
        assert!(page.0 < NONE, "{page:?} needs more than 30 bits");
        let chunk = page.chunk().0 as usize;
        if chunk >= self.chunks.len() {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let links =
            self.chunks[chunk].get_or_insert_with(|| Box::new([Link::default(); PER_CHUNK]));
        let link = links[page.offset() as usize];
        assert!(link.next >> BITS == 0, "{page:?} is inserted twice");
    }

    fn link_back(&mut self, list: List, page: u32) {
        let back = self.ends[list as usize - 1].back;
        let link = self.link_mut(page);
        link.next = NONE | (list as u32) << BITS;
        set(&mut link.prev, back);
        match back {
            NONE => self.ends[list as usize - 1].front = page,
            back => set(&mut self.link_mut(back).next, page),
        }
        let ends = &mut self.ends[list as usize - 1];
        ends.back = page;
        ends.len += 1;
    }

    fn link(&self, page: u32) -> Option<Link> {
        let chunk = self.chunks.get(page as usize / PER_CHUNK)?.as_ref()?;
        Some(chunk[page as usize % PER_CHUNK])
    }

    fn link_mut(&mut self, page: u32) -> &mut Link {
        match self.chunks.get_mut(page as usize / PER_CHUNK) {
            Some(Some(chunk)) => &mut chunk[page as usize % PER_CHUNK],
            _ => panic!("page {page} was never in a list"),
        }
    }
}

/// Changes the page number in a link word and keeps its two high bits.
fn set(word: &mut u32, page: u32) {
    *word = (*word & !NONE) | page;
}

fn list_of(next: u32) -> List {
    match next >> BITS {
        1 => List::A,
        2 => List::B,
        _ => List::C,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn lists_cost_eight_bytes_a_page_of_touched_chunks() {
        let mut lists = PageLists::new();
        for page in 0..100 * CHUNK_PAGES {
            lists.push_back(List::A, PageNo(page));
        }
        let pages = 100 * PER_CHUNK;
        assert!(lists.held_bytes() <= pages * 8 + pages / 8);
    }

    #[test]
    fn mark_outlives_removal() {
        let mut lists = PageLists::new();
        lists.push_back(List::C, PageNo(7));
        lists.set_mark(PageNo(7), 3);
        assert_eq!(lists.remove(PageNo(7)), List::C);
        assert_eq!(lists.mark(PageNo(7)), 3);
        lists.push_front(List::A, PageNo(7));
        assert_eq!(lists.mark(PageNo(7)), 3);
        assert_eq!(lists.mark(PageNo(1 << 20)), 0);
    }

    #[test]
    #[should_panic(expected = "inserted twice")]
    fn push_of_a_listed_page_panics() {
        let mut lists = PageLists::new();
        lists.push_back(List::A, PageNo(7));
        lists.push_back(List::B, PageNo(7));
    }

    #[test]
    #[should_panic(expected = "in no list")]
    fn remove_of_an_unlisted_page_panics() {
        let mut lists = PageLists::new();
        lists.push_back(List::A, PageNo(7));
        lists.remove(PageNo(8));
    }

    #[test]
    #[should_panic(expected = "30 bits")]
    fn page_number_beyond_the_link_panics() {
        PageLists::new().push_back(List::A, PageNo(NONE));
    }

    const LISTS: [List; 3] = [List::A, List::B, List::C];

    proptest! {
        #[test]
        fn lists_equal_three_deques(ops in prop::collection::vec((0..6u8, 0..3usize, 0..600u32), 0..800)) {
            let mut lists = PageLists::new();
            let mut model: [VecDeque<u32>; 3] = Default::default();
            let mut marks = [0u8; 600];
            for (op, list, page) in ops {
                let held = model.iter().position(|deque| deque.contains(&page));
                match (op, held) {
                    (0, None) => {
                        lists.push_back(LISTS[list], PageNo(page));
                        model[list].push_back(page);
                    }
                    (1, None) => {
                        lists.push_front(LISTS[list], PageNo(page));
                        model[list].push_front(page);
                    }
                    (2, Some(held)) => {
                        prop_assert_eq!(lists.remove(PageNo(page)), LISTS[held]);
                        model[held].retain(|&other| other != page);
                    }
                    (3, Some(held)) => {
                        lists.move_to_back(LISTS[list], PageNo(page));
                        model[held].retain(|&other| other != page);
                        model[list].push_back(page);
                    }
                    (4, Some(_)) => {
                        lists.set_mark(PageNo(page), list as u8);
                        marks[page as usize] = list as u8;
                    }
                    (4, None) => lists.mark_listed(PageNo(page), 3),
                    (5, Some(_)) if page >= 20 => {
                        lists.mark_listed(PageNo(page), list as u8);
                        marks[page as usize] |= list as u8;
                    }
                    (5, _) if page < 20 && list != 2 => {
                        lists.append(LISTS[2], LISTS[list]);
                        let moved = std::mem::take(&mut model[2]);
                        model[list].extend(moved);
                    }
                    _ => prop_assert_eq!(lists.list(PageNo(page)), held.map(|held| LISTS[held])),
                }
                prop_assert_eq!(lists.mark(PageNo(page)), marks[page as usize]);
            }
            for (list, mut deque) in LISTS.into_iter().zip(model) {
                prop_assert_eq!(lists.len(list).0, deque.len() as u64);
                while let Some(page) = lists.front(list) {
                    lists.remove(page);
                    prop_assert_eq!(Some(page.0), deque.pop_front());
                }
                prop_assert!(deque.is_empty());
            }
        }
    }
}
