//! The latency bound of a run: its windows, from what fault threads counted.

use std::time::{Duration, Instant};

use undercroft_qos::control::MISSES_MAX;
use undercroft_qos::tail::BUCKETS;
use undercroft_qos::{LatencyBound, Misses, Monitor, Unkeepable};

use super::Control;
use crate::gauges::page_ins::PageIns;
use crate::log::warn;

/// Least time of a window. The paper's monitor has windows of a second, too (NVSwap Fig. 6).
const WINDOW: Duration = Duration::from_secs(1);

/// The bound, and how far the counts are known.
pub(super) struct Bound {
    pub monitor: Monitor,
    misses: Misses,
    /// The counts as they were read last.
    seen: Box<[u32; BUCKETS]>,
    over_seen: u64,
    window_since: Instant,
}

impl Bound {
    pub(super) fn new(bound: LatencyBound) -> Bound {
        Bound {
            monitor: Monitor::new(bound),
            misses: Misses::default(),
            seen: Box::new([0; BUCKETS]),
            over_seen: 0,
            window_since: Instant::now(),
        }
    }

    /// Reads what is new in the counts.
    fn read(&mut self, page_ins: &PageIns) {
        // First: every page-in that is counted here is in the counts below.
        let over = page_ins.over();
        self.monitor.add_over(over - self.over_seen);
        self.over_seen = over;
        let monitor = &mut self.monitor;
        let seen = &mut self.seen;
        page_ins
            .all
            .news(seen, |bucket, count| monitor.add_many(bucket, count));
    }

    /// Ends the window if it is old enough and has enough page-ins. Says once that the bound cannot
    /// be kept.
    fn end_window(&mut self, page_ins: &PageIns, now: Instant) -> Option<Unkeepable> {
        if now.saturating_duration_since(self.window_since) < WINDOW {
            return None;
        }
        self.read(page_ins);
        let window = self.monitor.end_window()?;
        self.window_since = now;
        // Nothing is controlled yet, so nothing is left undone.
        self.misses.note(window, true);
        self.misses.take_unkeepable(self.monitor.bound())
    }
}

impl Control {
    /// Ends the window of the latency bound, if it is time. Called at each round of the control
    /// thread: at least every 100 ms.
    pub(super) fn note_page_ins(&mut self) {
        if let (Some(bound), Some(page_ins)) = (&mut self.bound, &self.shared.gauges.page_ins)
            && let Some(found) = bound.end_window(page_ins, Instant::now())
        {
            warn(&unkeepable(found));
        }
    }

    /// Ends the last window, however short it is: the program has ended.
    pub(super) fn end_last_window(&mut self) {
        if let (Some(bound), Some(page_ins)) = (&mut self.bound, &self.shared.gauges.page_ins) {
            bound.read(page_ins);
            let _ = bound.monitor.end_window();
        }
    }
}

/// What the user is told of a bound that cannot be kept.
fn unkeepable(found: Unkeepable) -> String {
    format!(
        "the latency bound {} cannot be kept: {MISSES_MAX} windows in a row missed it. p{}={} would \
         have kept them; or raise --memory-max, or give a faster tier",
        found.bound, found.bound.percentile, found.possible
    )
}

#[cfg(test)]
mod tests {
    use undercroft_base::Nanos;

    use super::*;

    #[test]
    fn a_window_ends_after_a_second_with_all_that_was_counted() {
        let bound: LatencyBound = "p90=100us".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let mut of = Bound::new(bound);
        let began = of.window_since;
        let mut after = |millis: u64, fast: u32, slow: u32| {
            (0..fast).for_each(|_| page_ins.add(Nanos(50_000), false));
            (0..slow).for_each(|_| page_ins.add(Nanos(150_000), true));
            let told = of.end_window(&page_ins, began + Duration::from_millis(millis));
            assert_eq!(told, None);
            (of.monitor.windows(), of.monitor.page_ins())
        };
        assert_eq!(after(999, 90, 10), ((0, 0), (0, 0)));
        assert_eq!(after(1000, 0, 0), ((1, 0), (100, 10)));
        assert_eq!(after(1999, 80, 10), ((1, 0), (100, 10)));
        assert_eq!(after(2000, 0, 0), ((1, 1), (190, 20)));
        // Too few for p90: the window goes on, and ends as soon as there are ten.
        assert_eq!(after(9000, 9, 0), ((1, 1), (190, 20)));
        assert_eq!(after(9001, 1, 0), ((2, 1), (200, 20)));
        assert_eq!(after(9500, 90, 0), ((2, 1), (200, 20)));
    }

    #[test]
    fn a_bound_that_is_missed_again_and_again_is_told_once() {
        let bound: LatencyBound = "p90=100us".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let mut of = Bound::new(bound);
        let began = of.window_since;
        let mut told = Vec::new();
        // In milliseconds: a miss, a window that is kept, then four misses.
        for (second, took) in [5, 0, 2, 3, 1, 4].into_iter().enumerate() {
            (0..10).for_each(|_| page_ins.add(Nanos(took * 1_000_000), true));
            let now = began + Duration::from_secs(second as u64 + 1);
            let found = of.end_window(&page_ins, now);
            told.extend(found.map(|found| (second, unkeepable(found))));
        }
        let [(second, text)] = &told[..] else {
            panic!("told {} times", told.len());
        };
        assert_eq!(*second, 4, "after the third miss in a row");
        assert!(
            text.contains("p90=100us cannot be kept: 3 windows"),
            "{text}"
        );
        assert!(text.contains("p90=3.0 ms would have"), "{text}");
    }
}
