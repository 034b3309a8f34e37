//! Windows that kept a bound or missed it (NVSwap §IV, tail latency monitoring).
//!
//! A window is judged by counts, not by a percentile that was rounded to a bucket: it kept the
//! bound if enough page-ins were within the limit. It ends when the caller says so, but not before
//! it has as many page-ins as the percentile needs: a single slow page-in of few is no tail.

use undercroft_base::Nanos;

use crate::bound::LatencyBound;
use crate::tail::Tail;

/// Whether a window kept its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// Enough page-ins were within the limit.
    Kept,
    /// Too many took longer.
    Missed,
}

/// A window that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its page-ins.
    pub page_ins: u64,
    /// Page-ins above the limit.
    pub over: u64,
    /// The percentile of the bound.
    pub tail: Nanos,
    /// Whether it kept the bound.
    pub judged: Judged,
}

/// The page-ins of one client, by windows. Memory: 8 KiB; never grows.
#[derive(Clone, Debug)]
pub struct Monitor {
    bound: LatencyBound,
    /// Of the window in progress.
    tail: Tail,
    over: u64,
    /// Of all windows that have ended.
    whole: Tail,
    whole_over: u64,
    kept: u64,
    missed: u64,
    last: Option<Window>,
    worst: Option<Nanos>,
}

impl Monitor {
    /// No window has ended.
    pub fn new(bound: LatencyBound) -> Monitor {
        Monitor {
            bound,
            tail: Tail::default(),
            over: 0,
            whole: Tail::default(),
            whole_over: 0,
            kept: 0,
            missed: 0,
            last: None,
            worst: None,
        }
    }

    /// The bound.
    pub fn bound(&self) -> LatencyBound {
        self.bound
    }

    /// Adds a page-in to the window in progress. O(1).
    pub fn add(&mut self, took: Nanos) {
        self.tail.add(took);
        self.over += u64::from(took > self.bound.limit);
    }

    /// Adds `count` page-ins of a bucket of [`crate::tail`].
    pub fn add_many(&mut self, bucket: usize, count: u32) {
        self.tail.add_many(bucket, count);
    }

    /// Says how many of the page-ins of [`Monitor::add_many`] were above the limit.
    pub fn add_over(&mut self, over: u64) {
        self.over += over;
    }

    /// Ends the window. `None`: it has too few page-ins, and goes on.
    pub fn end_window(&mut self) -> Option<Window> {
        let samples = self.tail.samples();
        if samples < self.bound.percentile.samples_min() {
            return None;
        }
        let tail = self.tail.at(self.bound.percentile)?;
        let judged = if self.bound.allows(self.over, samples) {
            self.kept += 1;
            Judged::Kept
        } else {
            self.missed += 1;
            Judged::Missed
        };
        let window = Window {
            page_ins: samples,
            over: self.over,
            tail,
            judged,
        };
        self.whole.merge(&self.tail);
        self.whole_over += self.over;
        self.tail.clear();
        self.over = 0;
        self.last = Some(window);
        self.worst = self.worst.max(Some(tail));
        Some(window)
    }

    /// Windows that kept the bound, and windows that missed it.
    pub fn windows(&self) -> (u64, u64) {
        (self.kept, self.missed)
    }

    /// Page-ins of these windows, and those of them above the limit.
    pub fn page_ins(&self) -> (u64, u64) {
        (self.whole.samples(), self.whole_over)
    }

    /// Whether the window in progress misses the bound if it has `page_ins`, and the rest of them
    /// are fast.
    pub fn would_miss(&self, page_ins: u64) -> bool {
        !self.bound.allows(self.over, page_ins.max(self.over))
    }

    /// Page-ins since the last window ended: of none that was judged.
    pub fn pending(&self) -> u64 {
        self.tail.samples()
    }

    /// The window that ended last.
    pub fn last(&self) -> Option<Window> {
        self.last
    }

    /// The percentile of the worst window.
    pub fn worst(&self) -> Option<Nanos> {
        self.worst
    }

    /// The percentile over all windows.
    pub fn whole(&self) -> Option<Nanos> {
        self.whole.at(self.bound.percentile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn monitor(text: &str) -> Monitor {
        Monitor::new(text.parse().expect("a bound"))
    }

    #[test]
    fn a_window_of_few_page_ins_goes_on_and_one_of_none_too() {
        let mut of = monitor("p99=200us");
        assert_eq!(of.end_window(), None);
        for _ in 0..99 {
            of.add(Nanos(1));
        }
        assert_eq!(of.end_window(), None);
        assert_eq!((of.windows(), of.pending()), ((0, 0), 99));
        of.add(Nanos(300_000));
        let window = of.end_window().expect("100 page-ins");
        assert_eq!((window.page_ins, window.over), (100, 1));
        assert_eq!(window.judged, Judged::Kept, "one of 100 may be slower");
        assert_eq!((of.windows(), of.pending()), ((1, 0), 0));
    }

    /// The limit lies inside of a bucket: the counts decide, not the bucket.
    #[test]
    fn a_page_in_at_the_limit_is_within_it_and_one_above_is_not() {
        for (took, judged) in [(200_000, Judged::Kept), (200_001, Judged::Missed)] {
            let mut of = monitor("p50=200us");
            (0..10).for_each(|_| of.add(Nanos(took)));
            assert_eq!(of.end_window().map(|window| window.judged), Some(judged));
        }
    }

    #[test]
    fn worst_and_whole_are_over_all_windows() {
        let mut of = monitor("p50=1us");
        for (nanos, count) in [(500, 10), (31, 30), (20, 4)] {
            (0..count).for_each(|_| of.add(Nanos(nanos)));
            of.end_window();
        }
        assert_eq!(of.worst(), Some(Nanos(503)));
        assert_eq!(of.whole(), Some(Nanos(31)));
        assert_eq!(of.last().map(|window| window.tail), Some(Nanos(20)));
        assert_eq!(of.page_ins(), (44, 0));
    }

    proptest! {
        /// Kept exactly if the exact percentile is within the limit.
        #[test]
        fn windows_are_judged_by_the_exact_percentile(
            values in prop::collection::vec(1_000u64..3_000, 100..400),
            limit in 1_000u64..3_000,
        ) {
            let mut of = monitor(&format!("p99={limit}ns"));
            values.iter().for_each(|value| of.add(Nanos(*value)));
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let exact = sorted[(values.len() * 99).div_ceil(100) - 1];
            let judged = of.end_window().expect("enough").judged;
            prop_assert_eq!(judged == Judged::Kept, exact <= limit);
        }
    }
}
