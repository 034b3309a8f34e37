//! Tests of the lists: equality with deques, cost of a page, misuse; and a table of times.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use proptest::prelude::*;

use undercroft_base::CHUNK_PAGES;

use super::chunk::{FEW_LINKS, HOLES_MAX, PIECE_LINKS, SLAB_PIECES};
use super::*;
use undercroft_seeded::Random;

const LISTS: [List; 3] = [List::A, List::B, List::C];

impl PageLists {
    /// Panics if counters, links and bits contradict each other, or a piece is lost. O(pages).
    fn audit(&mut self) {
        let (mut chunks, mut pieces) = (0, 0);
        for chunk in self.chunks.iter().flatten() {
            let (mut links, mut listed, mut holes) = (0, 0, 0);
            for (index, block) in chunk.blocks.iter().enumerate() {
                links += block.links.count_ones() as u16;
                listed += block.listed().count_ones() as u16;
                holes += block.holes().count_ones() as u8;
                if chunk.sorted {
                    assert_eq!(chunk.end(index), usize::from(links));
                }
                assert_eq!(chunk.holed >> index & 1 == 1, block.holes() != 0);
                assert_eq!((block.mark[0] | block.mark[1]) & !block.listed(), 0);
            }
            assert_eq!((chunk.listed, chunk.holes), (listed, holes));
            assert!(listed > 0, "an empty chunk is kept");
            assert!(!chunk.has_many_holes(), "{holes} holes");
            assert_eq!(chunk.len(), usize::from(links));
            assert!(chunk.sorted || chunk.len() <= FEW_LINKS);
            assert!(chunk.sorted || chunk.has_sound_orders(&mut self.pool));
            assert!(
                holes == 0 || chunk.sorted,
                "holes among links that are not sorted"
            );
            pieces += chunk.len().div_ceil(PIECE_LINKS);
            chunks += 1;
        }
        let mut free = self.pool.free;
        while free != 0 {
            pieces += 1;
            free = self.pool.after_free(free - 1);
        }
        assert_eq!(pieces, self.pool.slabs.len() * SLAB_PIECES);
        assert_eq!(self.chunks_used, chunks);
        let set = self.set;
        for list in LISTS {
            self.turn_to(Set::First).audit_list(list);
            self.turn_to(Set::Second).audit_list(list);
        }
        self.turn_to(set);
    }

    fn audit_list(&mut self, list: List) {
        let ends = self.ends[self.ends_of(list)];
        let (mut page, mut before) = (ends.front, None);
        for left in (0..ends.len).rev() {
            let (next, prev) = self.neighbours(list, page);
            assert!(before.is_none_or(|before| before == prev));
            before = Some(page);
            page = if left > 0 { next } else { page };
        }
        assert!(ends.len == 0 || page == ends.back);
    }
}

/// The order that the lists must equal.
#[derive(Default)]
struct Model {
    lists: [VecDeque<u32>; 3],
    marks: HashMap<u32, u8>,
}

impl Model {
    fn held(&self, page: u32) -> Option<usize> {
        let holds = |list: &VecDeque<u32>| list.contains(&page);
        self.marks.contains_key(&page).then_some(())?;
        self.lists.iter().position(holds)
    }

    fn take(&mut self, held: usize, page: u32) {
        let list = &mut self.lists[held];
        let at = list.iter().position(|&other| other == page);
        list.remove(at.expect("it is held"));
    }
}

/// Does operation `op` to both, unless it would be misuse. Compares what can be compared in O(1).
fn step(lists: &mut PageLists, model: &mut Model, op: u8, list: usize, page: u32) {
    let held = model.held(page);
    match (op, held) {
        (0..6, None) => {
            lists.push_back(LISTS[list], PageNo(page));
            model.lists[list].push_back(page);
            model.marks.insert(page, 0);
        }
        (0..4, Some(held)) => {
            assert_eq!(lists.remove(PageNo(page)), LISTS[held]);
            model.take(held, page);
            model.marks.remove(&page);
        }
        (4..7, Some(held)) => {
            lists.move_to_back(LISTS[list], PageNo(page));
            model.take(held, page);
            model.lists[list].push_back(page);
        }
        (7, Some(_)) => {
            let mark = (page + list as u32) as u8 % 4;
            lists.set_mark(PageNo(page), mark);
            model.marks.insert(page, mark);
        }
        (7, None) => lists.mark_listed(PageNo(page), 3),
        (10, held) => {
            let bits = (page / 4 + list as u32) as u8 % 4;
            lists.mark_listed(PageNo(page), bits);
            if held.is_some() {
                *model.marks.entry(page).or_default() |= bits;
            }
        }
        (8, _) => {
            let first = lists.pop_front(LISTS[list]);
            assert_eq!(model.lists[list].pop_front(), first.map(|page| page.0));
            let Some(first) = first else { return };
            assert_eq!((lists.list(first), lists.mark(first)), (None, 0));
            model.marks.remove(&first.0);
        }
        (9, _) if list != 2 && page.is_multiple_of(16) => {
            lists.append(LISTS[2], LISTS[list]);
            let moved = std::mem::take(&mut model.lists[2]);
            model.lists[list].extend(moved);
        }
        _ => assert_eq!(lists.list(PageNo(page)), held.map(|held| LISTS[held])),
    }
    let mark = model.marks.get(&page).copied().unwrap_or(0);
    assert_eq!(lists.mark(PageNo(page)), mark);
    for (list, deque) in LISTS.into_iter().zip(&model.lists) {
        assert_eq!(lists.len(list).0, deque.len() as u64);
        assert_eq!(lists.front(list).map(|page| page.0), deque.front().copied());
    }
}

/// Empties both and compares the whole order.
fn drain(mut lists: PageLists, model: Model) {
    for (list, deque) in LISTS.into_iter().zip(model.lists) {
        for page in deque {
            match page % 2 {
                0 => assert_eq!(lists.pop_front(list), Some(PageNo(page))),
                _ => {
                    assert_eq!(lists.front(list), Some(PageNo(page)));
                    assert_eq!(lists.remove(PageNo(page)), list);
                }
            }
        }
        assert_eq!(lists.pop_front(list), None);
        assert_eq!(lists.front(list), None);
    }
    lists.audit();
    assert_eq!(lists.chunks_used, 0);
}

proptest! {
    #[test]
    fn lists_equal_three_deques(ops in prop::collection::vec((0..11u8, 0..3usize, 0..1200u32), 0..800)) {
        let (mut lists, mut model) = (PageLists::new(), Model::default());
        for (op, list, page) in ops {
            step(&mut lists, &mut model, op, list, page);
        }
        lists.audit();
        drain(lists, model);
    }

    #[test]
    fn lists_of_few_pages_equal_three_deques(ops in prop::collection::vec((0..11u8, 0..3usize, 0..6u32), 0..200)) {
        let (mut lists, mut model) = (PageLists::new(), Model::default());
        for (op, list, page) in ops {
            // The ends of blocks and chunks, and the highest page there is.
            let page = [0, 63, 64, 511, 512, (1 << 28) + 5][page as usize];
            step(&mut lists, &mut model, op, list, page);
            lists.audit();
        }
        drain(lists, model);
    }
}

#[test]
fn lists_equal_three_deques_for_200_000_operations() {
    println!("seed 5");
    let mut random = Random::new(5);
    let (mut lists, mut model) = (PageLists::new(), Model::default());
    // Chunks whose links are sorted, and how often sorting ended and started.
    let (mut sorted, mut ends, mut starts) = (vec![false; 4], 0, 0);
    for round in 0..20u64 {
        // From some 20 pages of each chunk in a list to all of them, and back.
        let fill = [1, 3, 2, 12, 24, 12][round as usize % 6];
        for index in 0..10_000 {
            let (page, list) = (random.below(2000) as u32, random.below(3) as usize);
            let op = match model.held(page) {
                None if random.below(24) >= fill => continue,
                Some(_) if random.below(24) < fill => 4 + random.below(4) as u8,
                Some(_) if random.below(4) == 0 => 8,
                _ => random.below(4) as u8,
            };
            step(&mut lists, &mut model, op, list, page);
            for (was, chunk) in sorted.iter_mut().zip(lists.chunks.iter().flatten()) {
                ends += u32::from(*was && !chunk.sorted);
                starts += u32::from(!*was && chunk.sorted);
                *was = chunk.sorted;
            }
            if index % 500 == 0 {
                lists.audit();
            }
        }
        lists.audit();
    }
    assert!(
        starts > 12 && ends > 8,
        "sorted {starts} times, ended {ends}"
    );
    assert!(lists.total().0 > 100, "the end has something to compare");
    drain(lists, model);
}

/// Bytes for each page of 1,000 chunks, with the `resident` ones in a list: in the order of their
/// numbers, or far from each other.
fn bytes_a_page(in_order: bool, resident: impl Fn(u32) -> bool) -> f64 {
    let pages = 1000 * CHUNK_PAGES;
    let mut lists = PageLists::new();
    // 7919 has no divisor in common with the pages.
    let order = (0..pages).map(|at| {
        if in_order {
            at
        } else {
            (u64::from(at) * 7919 % u64::from(pages)) as u32
        }
    });
    for page in order.filter(|&page| resident(page)) {
        lists.push_back(List::A, PageNo(page));
    }
    lists.audit();
    lists.held_bytes_peak().0 as f64 / f64::from(pages)
}

#[test]
fn lists_cost_what_the_resident_pages_need() {
    let cost = bytes_a_page(false, |_| true);
    assert!(cost <= 8.8, "{cost}");
    let cost = bytes_a_page(false, |page| page % 2 == 0);
    assert!(cost <= 5.1, "{cost}");
    let cost = bytes_a_page(false, |page| page % 8 == 0);
    assert!(cost <= 2.0, "{cost}");
    let cost = bytes_a_page(true, |page| page < CHUNK_PAGES);
    assert!(cost <= 0.02, "{cost}");
}

#[test]
fn sets_are_apart_though_their_pages_are_neighbours() {
    println!("seed 6");
    let mut random = Random::new(6);
    let set_of = |page: u32| match page / 3 % 2 {
        0 => Set::First,
        _ => Set::Second,
    };
    let mut lists = PageLists::new();
    let mut models = [Model::default(), Model::default()];
    for _ in 0..200_000 {
        let (page, list) = (random.below(1200) as u32, random.below(3) as usize);
        let set = set_of(page);
        lists.turn_to(set);
        let op = random.below(11) as u8;
        step(&mut lists, &mut models[set as usize], op, list, page);
    }
    lists.audit();
    let [first, second] = models;
    for (set, model) in [(Set::First, first), (Set::Second, second)] {
        for (list, deque) in LISTS.into_iter().zip(model.lists) {
            assert!(!deque.is_empty(), "nothing to compare");
            for page in deque {
                assert_eq!(lists.turn_to(set).pop_front(list), Some(PageNo(page)));
            }
        }
    }
    lists.audit();
    assert_eq!((lists.total(), lists.chunks_used), (PageCount(0), 0));
}

#[test]
fn implied_links_are_removed_when_links_are_compacted() {
    let mut lists = PageLists::new();
    for at in 0..CHUNK_PAGES {
        lists.push_back(List::A, PageNo(at * 37 % CHUNK_PAGES));
    }
    for page in 0..CHUNK_PAGES {
        lists.move_to_back(List::A, PageNo(page));
    }
    for page in (0..CHUNK_PAGES).step_by(8) {
        lists.remove(PageNo(page));
    }
    lists.audit();
    let links = lists.chunks[0].as_ref().map_or(0, |chunk| chunk.len());
    // Those of the neighbours of what was removed, and holes.
    let most = 2 * CHUNK_PAGES as usize / 8 + usize::from(HOLES_MAX);
    assert!((1..=most).contains(&links), "{links}");
}

/// Whether the links of the first chunk are sorted, and how many there are.
fn first_chunk(lists: &PageLists) -> Option<(bool, usize)> {
    let chunk = lists.chunks[0].as_ref()?;
    Some((chunk.sorted, chunk.len()))
}

#[test]
fn links_are_sorted_when_they_are_many_and_not_when_they_are_few_again() {
    // All of the chunk, or only 128 pages of it. The first is full before any order is; the second
    // has a full order.
    for (pages, most) in [(CHUNK_PAGES, FEW_LINKS), (128, 21)] {
        let mut lists = PageLists::new();
        let order: Vec<u32> = (0..pages).map(|at| at * 37 % pages).collect();
        for &page in &order[..=most] {
            lists.push_back(List::A, PageNo(page));
            lists.audit();
        }
        assert_eq!(first_chunk(&lists), Some((false, most)));
        for &page in &order[most + 1..] {
            lists.push_back(List::A, PageNo(page));
            assert!(first_chunk(&lists).is_some_and(|(sorted, _)| sorted));
            lists.audit();
        }
        // What stays is far apart, so each page has a link.
        for page in (0..pages).filter(|page| page % 16 != 0) {
            lists.remove(PageNo(page));
            lists.audit();
        }
        let left = pages as usize / 16;
        assert!(first_chunk(&lists).is_some_and(|(sorted, len)| !sorted && len <= left));
        let expected: Vec<u32> = order.into_iter().filter(|page| page % 16 == 0).collect();
        for page in expected {
            assert_eq!(lists.pop_front(List::A), Some(PageNo(page)));
        }
        lists.audit();
    }
}

#[test]
fn pages_that_come_in_order_cost_no_links() {
    let cost = bytes_a_page(true, |_| true);
    assert!(cost <= 0.8, "{cost}");
    // Every fault brings its neighbours along.
    let mut lists = PageLists::new();
    for window in 0..8000u32 {
        let first = window * 7919 % 8000 * 16;
        for page in first..first + 16 {
            lists.push_back(List::A, PageNo(page));
        }
    }
    lists.audit();
    let cost = lists.held_bytes_peak().0 as f64 / (8000.0 * 16.0);
    assert!(cost <= 2.2, "{cost}");
}

#[test]
fn links_are_given_back_while_half_of_the_pages_stay() {
    let pages = 64 * CHUNK_PAGES;
    let mut random = Random::new(8);
    let mut order: Vec<u32> = (0..pages).collect();
    for index in (1..pages as usize).rev() {
        order.swap(index, random.below(index as u64 + 1) as usize);
    }
    let mut lists = PageLists::new();
    for &page in &order {
        lists.push_back(List::A, PageNo(page));
    }
    for &page in &order[..pages as usize / 2] {
        lists.remove(PageNo(page));
    }
    lists.audit();
    let chunks = lists.chunks.iter().flatten();
    let links: usize = chunks.map(|chunk| chunk.len()).sum();
    assert!(links <= pages as usize / 2 + 64 * usize::from(HOLES_MAX));
}

#[test]
fn pieces_are_used_again() {
    let mut lists = PageLists::new();
    let mut held = Bytes(0);
    for round in 0..10 {
        for page in 0..20 * CHUNK_PAGES {
            lists.push_back(List::A, PageNo(round * 10 * CHUNK_PAGES + page));
        }
        lists.audit();
        if round == 0 {
            held = lists.held_bytes_peak();
        }
        while let Some(page) = lists.front(List::A) {
            lists.remove(page);
        }
    }
    lists.audit();
    // The table of chunks grows with the highest page number.
    assert!(lists.held_bytes_peak().0 <= held.0 + 8 * 256);
    assert!(lists.spare.len() <= SPARE_CHUNKS);
}

#[test]
fn mark_ends_with_the_stay_in_a_list() {
    let mut lists = PageLists::new();
    lists.push_back(List::C, PageNo(6));
    lists.push_back(List::C, PageNo(7));
    lists.set_mark(PageNo(7), 3);
    lists.move_to_back(List::A, PageNo(7));
    assert_eq!(lists.mark(PageNo(7)), 3);
    assert_eq!(lists.remove(PageNo(7)), List::A);
    assert_eq!(lists.mark(PageNo(7)), 0);
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
#[should_panic(expected = "in no list")]
fn mark_of_an_unlisted_page_panics() {
    let mut lists = PageLists::new();
    lists.push_back(List::A, PageNo(7));
    lists.set_mark(PageNo(8), 1);
}

/// Mean nanoseconds of `count` calls.
fn nanos(count: u32, mut call: impl FnMut(u32)) -> f64 {
    let start = Instant::now();
    for index in 0..count {
        call(index);
    }
    start.elapsed().as_nanos() as f64 / f64::from(count)
}

#[test]
#[ignore = "prints the table of docs/design/0013; seconds in a release build"]
fn lists_table() {
    for (pages, percent) in [(18, 12), (18, 50), (18, 100), (21, 12), (21, 50), (21, 100)] {
        print_times(1 << pages, percent);
    }
}

fn print_times(pages: u32, percent: u32) {
    const CALLS: u32 = 2_000_000;
    let mut random = Random::new(3);
    let mut order: Vec<u32> = (0..pages).collect();
    for index in (1..pages as usize).rev() {
        order.swap(index, random.below(index as u64 + 1) as usize);
    }
    // Residents first; a replaced page and its successor change places.
    let resident = pages / 100 * percent;
    let absent = pages - resident;
    let mut lists = PageLists::new();
    let fill = nanos(resident, |index| {
        lists.push_back(List::A, PageNo(order[index as usize]));
    });
    let page = |index: u32| PageNo(order[(index % resident) as usize]);
    let touch = nanos(CALLS, |index| {
        lists.mark_listed(page(index), 1);
    });
    // A stride, so that neighbours in the list are not used one after the other.
    let to_back = nanos(CALLS, |index| {
        lists.move_to_back(List::A, page(index.wrapping_mul(7919)));
    });
    let hand = nanos(CALLS, |_| {
        if let Some(page) = lists.front(List::A) {
            lists.set_mark(page, 0);
            lists.move_to_back(List::A, page);
        }
    });
    let replace = nanos(CALLS.min(resident), |index| {
        lists.remove(PageNo(order[index as usize]));
        let new = if absent == 0 {
            index
        } else {
            resident + index % absent
        };
        lists.push_back(List::A, PageNo(order[new as usize]));
        order.swap(index as usize, new as usize);
    });
    let bytes = lists.held_bytes_peak().0 as f64 / f64::from(pages);
    println!(
        "{pages} pages, {percent:>3} %: ns: fill {fill:.0}, touch {touch:.0}, to back {to_back:.0}, \
         hand {hand:.0}, replace {replace:.0}; {bytes:.2} bytes a page"
    );
}
