//! CLOCK-W: a clock whose hand tests the *written* bit. Pages that are being written stay, which
//! saves write-outs.
//!
//! Source: PCM swap §III-4. The hand clears the bit of a written page and gives the page another
//! lap. A second bit remembers that the page must be written out when it leaves. The first page not
//! written since the last lap leaves. Reads give no second chance. Differs: nothing known. Without
//! touches it is FIFO, as CLOCK is.

use undercroft_base::PageNo;
use undercroft_policy::reclaim::lists::PageLists;
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};

use super::clock::{RING, turn};

/// Written since the hand last passed.
const WRITTEN: u8 = 1;
/// Written since it became resident, though the hand has cleared `WRITTEN`.
const REMEMBERED: u8 = 2;

/// The ring of CLOCK, driven by writes.
#[derive(Default)]
pub(super) struct ClockW {
    lists: PageLists,
}

impl Reclaim for ClockW {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        self.lists.push_back(RING, page);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, write: bool) {
        if write {
            self.lists.mark_listed(page, WRITTEN);
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let again = |mark| (mark & WRITTEN != 0).then_some(REMEMBERED);
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
    fn hand_passes_a_written_page_once_and_remembers_the_write() {
        let mut clock = ClockW::default();
        for page in 0..3 {
            clock.insert(PageNo(page), Arrival::FirstTouch);
        }
        clock.touch(PageNo(0), true);
        clock.touch(PageNo(1), false);
        let mut out = Vec::new();
        clock.select(1, 10, &mut |_| Verdict::Take, &mut out);
        assert_eq!(out, [PageNo(1)], "a read gives no second chance");
        let marks = [0, 2].map(|page| clock.lists.mark(PageNo(page)));
        assert_eq!(marks, [REMEMBERED, 0], "page 0 was written");
        out.clear();
        clock.select(2, 10, &mut |_| Verdict::Take, &mut out);
        assert_eq!(out, [PageNo(2), PageNo(0)]);
    }
}
