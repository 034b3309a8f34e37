//! Active and inactive lists (RapidSwap §3.1) with activation by refault distance.
//!
//! ```text
//! first touch, prefetch, far refault          near refault, returned, used again
//!            v                                              v
//!      [ inactive, at least 10 % ] <---- overflow ---- [ active, at most 90 % ]
//!            v                                    (a used page goes round again)
//!         victims; active fronts when inactive is empty
//! ```
//! Accessed bits are known only where they are scanned (`--access-scan`). So arrivals must tell
//! which pages are hot: a page that comes back after few evictions left too early. *Few* is
//! relative. The threshold follows the lowest tenth of the distances seen, between a quarter and
//! four times the resident pages. So active changes slowly and fills with the hottest pages,
//! whatever the load. Part of a loop larger than memory stays and hits; under plain FIFO none of it
//! does. A scan passes through the inactive tenth only.
//!
//! The rule is in `two_lists.rs`. Misses beside FIFO and LRU, and the rules that were rejected:
//! docs/design/0013.

use undercroft_base::{PageCount, PageNo};

use super::lists::{List, PageLists};
use super::two_lists::{Search, TwoLists};
use super::{Arrival, Reclaim, Shown, Verdict};

/// Two lists; a page that is soon faulted back goes to the active one.
pub struct ActiveInactive {
    lists: PageLists,
    rule: TwoLists,
}

impl Default for ActiveInactive {
    fn default() -> Self {
        ActiveInactive::new()
    }
}

impl ActiveInactive {
    /// Empty.
    pub fn new() -> ActiveInactive {
        ActiveInactive {
            lists: PageLists::new(),
            rule: TwoLists::new(List::A, List::B),
        }
    }

    /// Pages on the active list.
    pub fn active(&self) -> PageCount {
        self.rule.active(&self.lists)
    }
}

impl Reclaim for ActiveInactive {
    fn insert(&mut self, page: PageNo, arrival: Arrival) {
        self.rule.insert(&mut self.lists, page, arrival);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        if let Some(list) = self.lists.list(page) {
            self.rule.touch(&mut self.lists, list, page);
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let mut laps = self.rule.begin(&mut self.lists, scan_max);
        let mut search = Search {
            wanted: want,
            looks: scan_max,
            verdict,
            out,
        };
        let rule = &mut self.rule;
        rule.select(&mut self.lists, &mut laps, want, &mut search);
    }

    fn shown(&self) -> Shown {
        self.lists.shown()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(policy: &mut ActiveInactive, want: usize) -> Vec<u32> {
        let mut out = Vec::new();
        policy.select(want, 1000, &mut |_| Verdict::Take, &mut out);
        out.into_iter().map(|page| page.0).collect()
    }

    fn filled(pages: u32) -> ActiveInactive {
        let mut policy = ActiveInactive::new();
        for page in 0..pages {
            policy.insert(PageNo(page), Arrival::FirstTouch);
        }
        policy
    }

    #[test]
    fn near_refault_outlives_a_scan() {
        let mut policy = filled(100);
        let distance = PageCount(3);
        assert_eq!(select(&mut policy, 1), [0]);
        policy.insert(PageNo(0), Arrival::SwapIn { distance });
        for page in 100..1000 {
            policy.insert(PageNo(page), Arrival::FirstTouch);
            assert_ne!(select(&mut policy, 1), [0]);
        }
    }

    #[test]
    fn far_refault_and_prefetch_leave_in_order_of_arrival() {
        let mut policy = filled(10);
        let distance = PageCount(1000);
        policy.insert(PageNo(20), Arrival::SwapIn { distance });
        policy.insert(PageNo(21), Arrival::Prefetch);
        assert_eq!(select(&mut policy, 12)[10..], [20, 21]);
    }

    #[test]
    fn first_touch_of_a_prefetched_page_is_not_a_second_use() {
        let mut policy = filled(4);
        policy.insert(PageNo(20), Arrival::Prefetch);
        policy.touch(PageNo(20), false);
        policy.touch(PageNo(0), false);
        assert_eq!(select(&mut policy, 4), [1, 2, 3, 20]);
    }

    #[test]
    fn active_front_leaves_when_inactive_is_empty() {
        let mut policy = ActiveInactive::new();
        for page in 0..100 {
            policy.insert(PageNo(page), Arrival::Returned);
        }
        assert!(policy.active().0 <= 91);
        let mut order = select(&mut policy, 100);
        assert_eq!(policy.shown().len, PageCount(0));
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
