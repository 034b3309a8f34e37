//! The rule of `active_inactive` over two of the lists that a policy has. `auto` has it twice.
//!
//! What the rule does and why: `active_inactive.rs`. In *recency mode* the rule is that of `lru`:
//! all that arrives or is used goes to the back of inactive, and active drains. So a change of mode
//! moves no page. The oldest pages are those at the front of active, as long as it has any. Some
//! victims come from inactive even then, so a wrong change costs less.

use undercroft_base::{PageCount, PageNo};

use super::lists::{List, PageLists};
use super::{Arrival, Verdict};

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

/// In recency mode one victim in this many is taken from inactive while active has pages.
const INACTIVE_SHARE: usize = 4;

/// The work that a call of [`Reclaim::select`](super::Reclaim::select) may still do.
pub(super) struct Search<'a> {
    pub wanted: usize,
    pub looks: usize,
    pub verdict: &'a mut dyn FnMut(PageNo) -> Verdict,
    pub out: &'a mut Vec<PageNo>,
}

impl Search<'_> {
    /// Looks at up to `lap` pages from the front of `list`, and takes up to `most` of them. `lap`
    /// is counted down. Skipped pages go to the back, so a lap of all pages meets none twice.
    /// Returns how many pages went to the other list.
    /// * `again`: a page with this mark goes to the back of that list instead, with mark 0.
    pub(super) fn lap(
        &mut self,
        lists: &mut PageLists,
        list: List,
        lap: &mut u64,
        most: usize,
        again: Option<(u8, List)>,
    ) -> u64 {
        let (mut most, mut moved) = (most.min(self.wanted), 0);
        while *lap > 0 && most > 0 && self.looks > 0 {
            let Some(page) = lists.front(list) else {
                break;
            };
            *lap -= 1;
            self.looks -= 1;
            if let Some((mark, to)) = again
                && lists.mark(page) == mark
            {
                lists.set_mark(page, 0);
                lists.move_to_back(to, page);
                moved += 1;
                continue;
            }
            match (self.verdict)(page) {
                Verdict::Take => {
                    self.out.extend(lists.pop_front(list));
                    self.wanted -= 1;
                    most -= 1;
                }
                Verdict::Skip => lists.move_to_back(list, page),
            }
        }
        moved
    }
}

/// Pages that one call has not looked at yet, of inactive and of active.
#[derive(Clone, Copy)]
pub(super) struct Laps {
    inactive: u64,
    active: u64,
}

/// Two lists; a page that is soon faulted back goes to the active one.
pub(super) struct TwoLists {
    inactive: List,
    active: List,
    /// Refault distance up to which a page is hot.
    threshold: u64,
    /// In recency mode.
    recency: bool,
}

impl TwoLists {
    /// Over these two, both empty.
    pub(super) fn new(inactive: List, active: List) -> TwoLists {
        TwoLists {
            inactive,
            active,
            threshold: u64::MAX,
            recency: false,
        }
    }

    /// From now on in recency mode, or no longer. O(1).
    pub(super) fn set_recency(&mut self, on: bool) {
        self.recency = on;
    }

    /// Pages on the active list.
    pub(super) fn active(&self, lists: &PageLists) -> PageCount {
        lists.len(self.active)
    }

    /// Pages on both lists.
    pub(super) fn len(&self, lists: &PageLists) -> u64 {
        lists.len(self.inactive).0 + lists.len(self.active).0
    }

    /// True if a refault at `distance` is near. Moves the threshold.
    fn is_near(&mut self, lists: &PageLists, distance: u64) -> bool {
        let resident = lists.total().0;
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
    fn shrink_active(&mut self, lists: &mut PageLists, most: usize) {
        for _ in 0..most {
            if lists.len(self.active).0 * 100 <= self.len(lists) * ACTIVE_PERCENT_MAX {
                return;
            }
            let Some(page) = lists.front(self.active) else {
                return;
            };
            let used = lists.mark(page) == USED;
            lists.set_mark(page, 0);
            let list = if used { self.active } else { self.inactive };
            lists.move_to_back(list, page);
        }
    }

    /// The page is resident now. O(1).
    pub(super) fn insert(&mut self, lists: &mut PageLists, page: PageNo, arrival: Arrival) {
        let (list, mark) = match arrival {
            Arrival::FirstTouch => (self.inactive, 0),
            Arrival::Prefetch => (self.inactive, UNPROVEN),
            Arrival::SwapIn { distance } if self.is_near(lists, distance.0) => (self.active, 0),
            Arrival::SwapIn { .. } => (self.inactive, 0),
            Arrival::Returned => (self.active, 0),
        };
        if self.recency {
            lists.push_back(self.inactive, page);
            return;
        }
        lists.push_back(list, page);
        lists.set_mark(page, mark);
        self.shrink_active(lists, 2);
    }

    /// A page that is in one of the two lists was used. O(1).
    pub(super) fn touch(&mut self, lists: &mut PageLists, list: List, page: PageNo) {
        let mark = lists.mark(page);
        if self.recency {
            lists.set_mark(page, 0);
            lists.move_to_back(self.inactive, page);
        } else if mark == UNPROVEN {
            lists.set_mark(page, 0);
        } else if list == self.inactive && mark == USED {
            lists.set_mark(page, 0);
            lists.move_to_back(self.active, page);
            self.shrink_active(lists, 2);
        } else {
            lists.set_mark(page, USED);
        }
    }

    /// Begins a search: all pages are to be looked at. Scans up to `scan_max` pages.
    pub(super) fn begin(&mut self, lists: &mut PageLists, scan_max: usize) -> Laps {
        if !self.recency {
            self.shrink_active(lists, scan_max);
        }
        Laps {
            inactive: lists.len(self.inactive).0,
            active: lists.len(self.active).0,
        }
    }

    /// Takes up to `most` victims out.
    pub(super) fn select(
        &mut self,
        lists: &mut PageLists,
        laps: &mut Laps,
        most: usize,
        search: &mut Search,
    ) {
        let before = search.out.len();
        let left = |search: &Search| most - (search.out.len() - before);
        let (inactive, active) = (self.inactive, self.active);
        if self.recency {
            let first = most - most / INACTIVE_SHARE;
            search.lap(
                lists,
                active,
                &mut laps.active,
                first,
                Some((USED, inactive)),
            );
            let rest = left(search);
            search.lap(lists, inactive, &mut laps.inactive, rest, None);
        } else {
            let rest = left(search);
            let again = Some((USED, active));
            laps.active += search.lap(lists, inactive, &mut laps.inactive, rest, again);
        }
        let rest = left(search);
        search.lap(lists, active, &mut laps.active, rest, None);
    }
}
