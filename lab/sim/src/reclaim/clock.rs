//! CLOCK: a hand goes round. A page that was used since the hand last passed gets another lap; the
//! others leave.
//!
//! The hand is at the front of the list, and new pages go behind it. Without touches it is FIFO by
//! arrival.

use undercroft_base::PageNo;
use undercroft_policy::reclaim::lists::{List, PageLists};
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};

/// Every page except those in `SKIPPED`, with the hand in front.
pub(super) const RING: List = List::A;
/// Pages that the engine has skipped in this call. They wait here, so that the hand does not meet
/// them again.
const SKIPPED: List = List::B;

const USED: u8 = 1;

/// A ring of pages and a hand.
#[derive(Default)]
pub(super) struct Clock {
    lists: PageLists,
}

/// Turns the hand of `RING` as [`Reclaim::select`] says. `again`: takes a page's mark. It returns
/// the page's new mark if the page gets another lap, and `None` if the page is a candidate.
pub(super) fn turn(
    lists: &mut PageLists,
    again: impl Fn(u8) -> Option<u8>,
    want: usize,
    scan_max: usize,
    verdict: &mut dyn FnMut(PageNo) -> Verdict,
    out: &mut Vec<PageNo>,
) {
    let mut wanted = want;
    for _ in 0..scan_max {
        let (Some(page), true) = (lists.front(RING), wanted > 0) else {
            break;
        };
        if let Some(mark) = again(lists.mark(page)) {
            lists.set_mark(page, mark);
            lists.move_to_back(RING, page);
            continue;
        }
        match verdict(page) {
            Verdict::Take => {
                out.extend(lists.pop_front(RING));
                wanted -= 1;
            }
            Verdict::Skip => lists.move_to_back(SKIPPED, page),
        }
    }
    lists.append(SKIPPED, RING);
}

impl Reclaim for Clock {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        self.lists.push_back(RING, page);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        self.lists.mark_listed(page, USED);
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let again = |mark| (mark == USED).then_some(0);
        turn(&mut self.lists, again, want, scan_max, verdict, out);
    }

    fn shown(&self) -> Shown {
        self.lists.shown()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hand_passes_a_used_page_once_and_new_pages_go_behind_it() {
        let mut clock = Clock::default();
        for page in 0..3 {
            clock.insert(PageNo(page), Arrival::FirstTouch);
        }
        clock.touch(PageNo(0), false);
        let mut out = Vec::new();
        clock.select(1, 10, &mut |_| Verdict::Take, &mut out);
        clock.insert(PageNo(3), Arrival::FirstTouch);
        clock.select(3, 10, &mut |_| Verdict::Take, &mut out);
        assert_eq!(out, [1, 2, 0, 3].map(PageNo));
    }
}
