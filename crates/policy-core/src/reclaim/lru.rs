//! LRU: the page used longest ago leaves first. Without touches it is FIFO by arrival.
//!
//! The limit reclaimer of FlexSwap §4.3. One list. Pages that the engine skipped go to the back, so
//! the next call scans others.

use undercroft_base::PageNo;

use super::lists::{List, PageLists};
use super::{Arrival, Reclaim, Shown, Verdict};

const ALL: List = List::A;

/// A list, the page used longest ago in front.
#[derive(Default)]
pub struct Lru {
    lists: PageLists,
}

impl Lru {
    /// Empty.
    pub fn new() -> Lru {
        Lru::default()
    }
}

impl Reclaim for Lru {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        self.lists.push_back(ALL, page);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        if self.lists.list(page).is_some() {
            self.lists.move_to_back(ALL, page);
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let mut wanted = want;
        // Skipped pages go to the back, so one lap is exactly the pages listed now.
        for _ in 0..scan_max.min(self.lists.len(ALL).0 as usize) {
            let (Some(page), true) = (self.lists.front(ALL), wanted > 0) else {
                return;
            };
            match verdict(page) {
                Verdict::Take => {
                    out.extend(self.lists.pop_front(ALL));
                    wanted -= 1;
                }
                Verdict::Skip => self.lists.move_to_back(ALL, page),
            }
        }
    }

    fn shown(&self) -> Shown {
        self.lists.shown()
    }
}
