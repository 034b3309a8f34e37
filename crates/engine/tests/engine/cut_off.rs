//! A search for victims has an end, even where every page was used.

use std::collections::{HashSet, VecDeque};

use undercroft_base::{Bytes, PageCount, PageNo, VirtPage, VirtRange};
use undercroft_engine::Taken;
use undercroft_engine::limits::{EVICT_PAGES_MAX, SELECT_SCAN_MAX};
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};

use crate::common;

/// Pages in a circle. One that was used gets another lap, and that takes a look.
#[derive(Default)]
struct Circle {
    pages: VecDeque<PageNo>,
    used: HashSet<PageNo>,
}

impl Reclaim for Circle {
    fn insert(&mut self, page: PageNo, _: Arrival) {
        self.pages.push_back(page);
    }

    fn remove(&mut self, page: PageNo) {
        self.pages.retain(|of| *of != page);
    }

    fn touch(&mut self, page: PageNo, _: bool) {
        self.used.insert(page);
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let most = out.len() + want;
        for _ in 0..scan_max.min(self.pages.len()) {
            if out.len() == most {
                break;
            }
            let Some(page) = self.pages.pop_front() else {
                break;
            };
            if !self.used.remove(&page) && verdict(page) == Verdict::Take {
                out.push(page);
            } else {
                self.pages.push_back(page);
            }
        }
    }

    fn shown(&self) -> Shown {
        Shown {
            len: PageCount(self.pages.len() as u64),
            metadata: Bytes(0),
            choice: None,
        }
    }
}

#[test]
fn a_search_past_used_pages_is_cut_off_with_what_it_found() {
    let pages = SELECT_SCAN_MAX as u64 + 200;
    let mut engine = common::engine(3, 2 * pages, Box::new(Circle::default()));
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(pages));
    engine.layout().attached(space, all);
    for page in all.pages() {
        common::touch(&mut engine, space, page);
    }
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    let mut search = |used: u64, want: usize| {
        for page in 0..used {
            let no = engine.uses().number(space, VirtPage(page)).expect("known");
            engine.uses().touch(no, false);
        }
        engine.evictions().select(want, &mut batch);
        for item in &batch {
            let taken = Taken::NotTried;
            engine.evictions().settle(item.at, taken, &mut wake);
        }
        batch.len()
    };
    let of_a_batch = 10;
    let used = (SELECT_SCAN_MAX - of_a_batch) as u64;
    assert_eq!(search(used, EVICT_PAGES_MAX), of_a_batch);
    assert_eq!(search(0, EVICT_PAGES_MAX), EVICT_PAGES_MAX);
    assert_eq!(search(0, 5), 5);
}
