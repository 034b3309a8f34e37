//! Ranges that the program drops. The kernel tells of a drop first, and drops the pages when that
//! was read. In between, a page of the range may be found in memory. It must not be counted: it
//! could then leave, and come back with the bytes that the program dropped.
//!
//! Only a count of pages that were there before their mapping was registered can find such a page.
//! All others come through us, and leave the books when the drop is read.
//!
//! Not closed: a dropping thread that gets no CPU, or not the lock of its address space, for longer
//! than a range is kept here. A fresh page that comes before the kernel drops the range goes with
//! it, and reads as zeros when it is touched again.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use undercroft_base::VirtRange;

use crate::sync::lock;

/// Time after which the kernel has surely dropped the pages. It takes some 20 us, or longer if the
/// dropping thread waits for a CPU or for the lock of its address space.
const DROPPED: Duration = Duration::from_secs(1);

/// Most ranges that are remembered. At its fastest, a program drops this many in a fifth of a
/// second. Of more, the oldest are forgotten earlier.
const RANGES_MAX: usize = 8192;

/// The ranges of one address space, the oldest first.
#[derive(Default)]
pub(crate) struct Dropping(Mutex<VecDeque<(Instant, VirtRange)>>);

impl Dropping {
    /// The drop of `range` was read.
    pub(crate) fn add(&self, range: VirtRange, now: Instant) {
        let mut ranges = lock(&self.0);
        let is_old = |of: &(Instant, _)| now.saturating_duration_since(of.0) >= DROPPED;
        while ranges.len() >= RANGES_MAX || ranges.front().is_some_and(is_old) {
            ranges.pop_front();
        }
        ranges.push_back((now, range));
    }

    /// The parts of `found` that are surely not about to be dropped, in ascending order.
    pub(crate) fn without(&self, found: VirtRange, now: Instant) -> Vec<VirtRange> {
        let dropping: Vec<VirtRange> = lock(&self.0)
            .iter()
            .filter(|(at, _)| now.saturating_duration_since(*at) < DROPPED)
            .map(|(_, range)| *range)
            .filter(|range| !range.intersect(found).is_empty())
            .collect();
        found.minus(&dropping)
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::VirtPage;

    use super::*;

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn pages_that_are_about_to_be_dropped_are_left_out() {
        let (dropping, now) = (Dropping::default(), Instant::now());
        assert_eq!(dropping.without(pages(0, 9), now), [pages(0, 9)]);
        dropping.add(pages(6, 8), now);
        dropping.add(pages(2, 4), now + DROPPED / 2);
        let rest = [pages(0, 2), pages(4, 6), pages(8, 9)];
        assert_eq!(dropping.without(pages(0, 9), now + DROPPED / 2), rest);
        assert_eq!(dropping.without(pages(2, 3), now + DROPPED / 2), []);
        // Later the kernel has done it, and pages there are new.
        let rest = [pages(0, 2), pages(4, 9)];
        assert_eq!(dropping.without(pages(0, 9), now + DROPPED), rest);
    }

    #[test]
    fn ranges_are_forgotten_by_age_and_by_number() {
        let (dropping, now) = (Dropping::default(), Instant::now());
        for at in 0..2 * RANGES_MAX as u64 {
            dropping.add(pages(2 * at, 2 * at + 1), now);
        }
        assert_eq!(lock(&dropping.0).len(), RANGES_MAX);
        assert_eq!(dropping.without(pages(0, 2), now), [pages(0, 2)]);
        dropping.add(pages(5, 6), now + DROPPED);
        assert_eq!(lock(&dropping.0).len(), 1);
    }
}
