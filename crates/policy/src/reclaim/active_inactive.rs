//! Active and inactive lists (RapidSwap §3.1) with activation by refault distance. The default.
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
//! Misses beside FIFO and LRU, and the rules that were rejected: docs/design/0013.

use undercroft_base::{Bytes, PageCount, PageNo};

use super::lists::{List, PageLists};
use super::{Arrival, Reclaim, Verdict};

const INACTIVE: List = List::A;
const ACTIVE: List = List::B;

/// Used since the policy last came to it.
const USED: u8 = 1;
/// Prefetched and not known to be used: its first touch does not count as a second one.
const UNPROVEN: u8 = 2;

/// Active holds at most this share of the pages.
const ACTIVE_PERCENT_MAX: u64 = 90;
/// Share of the refaults that the threshold lets activate.
const NEAR_PERCENT: u64 = 10;
/// Each refault moves the threshold by about 1/64.
const THRESHOLD_STEPS: u64 = 64;
/// Refaults beyond this multiple of the resident pages are cold.
const FAR_TIMES: u64 = 4;
/// Refaults within this fraction of the resident pages always activate.
const NEAR_FRACTION: u64 = 4;

/// Two lists; a page that is soon faulted back goes to the active one.
pub struct ActiveInactive {
    lists: PageLists,
    /// Refault distance up to which a page is hot.
    threshold: u64,
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
            threshold: u64::MAX,
        }
    }

    /// Pages on the active list.
    pub fn active(&self) -> PageCount {
        self.lists.len(ACTIVE)
    }

    /// True if a refault at `distance` is near. Moves the threshold.
    fn is_near(&mut self, distance: u64) -> bool {
        let resident = self.lists.total().0;
        let far = resident.saturating_mul(FAR_TIMES);
        if distance > far {
            return false;
        }
        let threshold = self.threshold.min(far);
        let near = distance <= threshold.max(resident / NEAR_FRACTION);
        self.threshold = if distance <= threshold {
            threshold - (threshold * (100 - NEAR_PERCENT)).div_ceil(100 * THRESHOLD_STEPS)
        } else {
            threshold + (threshold * NEAR_PERCENT) / (100 * THRESHOLD_STEPS) + 1
        };
        near
    }

    /// Moves the active front to inactive while active is above its share. Scans up to `most`
    /// pages.
    fn shrink_active(&mut self, most: usize) {
        for _ in 0..most {
            if self.lists.len(ACTIVE).0 * 100 <= self.lists.total().0 * ACTIVE_PERCENT_MAX {
                return;
            }
            let Some(page) = self.lists.front(ACTIVE) else {
                return;
            };
            let used = self.lists.mark(page) == USED;
            self.lists.set_mark(page, 0);
            let list = if used { ACTIVE } else { INACTIVE };
            self.lists.move_to_back(list, page);
        }
    }
}

impl Reclaim for ActiveInactive {
    fn insert(&mut self, page: PageNo, arrival: Arrival) {
        let (list, mark) = match arrival {
            Arrival::FirstTouch => (INACTIVE, 0),
            Arrival::Prefetch => (INACTIVE, UNPROVEN),
            Arrival::SwapIn { distance } if self.is_near(distance.0) => (ACTIVE, 0),
            Arrival::SwapIn { .. } => (INACTIVE, 0),
            Arrival::Returned => (ACTIVE, 0),
        };
        self.lists.push_back(list, page);
        self.lists.set_mark(page, mark);
        self.shrink_active(2);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        match (self.lists.list(page), self.lists.mark(page)) {
            (None, _) => {}
            (Some(_), UNPROVEN) => self.lists.set_mark(page, 0),
            (Some(INACTIVE), USED) => {
                self.lists.set_mark(page, 0);
                self.lists.move_to_back(ACTIVE, page);
                self.shrink_active(2);
            }
            (Some(_), _) => self.lists.set_mark(page, USED),
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        self.shrink_active(scan_max);
        let (mut wanted, mut looks) = (want, scan_max);
        for list in [INACTIVE, ACTIVE] {
            // Pages that are kept go to a back, so one lap is exactly the pages listed now.
            for _ in 0..self.lists.len(list).0 {
                let Some(page) = self.lists.front(list) else {
                    break;
                };
                if wanted == 0 || looks == 0 {
                    return;
                }
                looks -= 1;
                if list == INACTIVE && self.lists.mark(page) == USED {
                    self.lists.set_mark(page, 0);
                    self.lists.move_to_back(ACTIVE, page);
                    continue;
                }
                match verdict(page) {
                    Verdict::Take => {
                        out.extend(self.lists.pop_front(list));
                        wanted -= 1;
                    }
                    Verdict::Skip => self.lists.move_to_back(list, page),
                }
            }
        }
    }

    fn len(&self) -> PageCount {
        self.lists.total()
    }

    fn metadata_bytes(&self) -> Bytes {
        self.lists.held_bytes_peak()
    }

    fn name(&self) -> &'static str {
        "active_inactive"
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
        assert_eq!(policy.len(), PageCount(0));
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
