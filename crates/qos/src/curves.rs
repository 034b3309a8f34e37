//! The curves of one client that count for its share: the last few, and their mean.
//!
//! The work of a program changes, and one curve is of one limit. A limit that changes begins a new
//! curve, so each is of a few seconds.

use std::collections::VecDeque;

use undercroft_base::Nanos;

use crate::shares::{self, Waits};

/// A curve that was counted for less says little.
const SECONDS_MIN: f64 = 5.0;

/// Curves that count.
const CURVES: usize = 4;

/// Two curves that began within this time are one.
const SLACK: Nanos = Nanos(1_000_000_000);

/// The last curves that say something. Memory: as many points as the caller gives, four times.
#[derive(Clone, Debug, Default)]
pub struct Curves {
    /// The newest last.
    kept: VecDeque<Vec<Waits>>,
    /// When the newest began.
    since: Nanos,
}

impl Curves {
    /// Notes a curve that was counted for `seconds` until `now`. Points that are no numbers are
    /// left out; a curve of too short a time is, too.
    pub fn note(&mut self, mut points: Vec<Waits>, seconds: f64, now: Nanos) {
        if seconds.is_nan() || seconds < SECONDS_MIN {
            return;
        }
        points.retain(|point| point.stall.is_finite());
        points.sort_by_key(|point| point.limit);
        let since = now.0.saturating_sub((seconds.min(1e6) * 1e9) as u64);
        // A curve that began with the last one goes on: it takes its place.
        let goes_on = since < self.since.0.saturating_add(SLACK.0);
        if goes_on {
            self.kept.pop_back();
        } else if self.kept.len() == CURVES {
            self.kept.pop_front();
        }
        self.kept.push_back(points);
        self.kept.make_contiguous();
        self.since = Nanos(since);
    }

    /// Their mean; empty while nothing is known.
    pub fn mean(&self) -> Vec<Waits> {
        shares::mean(self.kept.as_slices().0)
    }

    /// True while nothing is known.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::Bytes;

    use super::*;

    fn stall_of(curves: &Curves) -> Option<f64> {
        curves.mean().first().map(|point| point.stall)
    }

    fn note(curves: &mut Curves, stall: f64, seconds: f64, now: u64) {
        let limit = Bytes(1 << 20);
        let points = vec![Waits { limit, stall }];
        curves.note(points, seconds, Nanos(now * 1_000_000_000));
    }

    #[test]
    fn a_curve_that_goes_on_takes_its_own_place_and_the_last_four_count() {
        let mut curves = Curves::default();
        note(&mut curves, 9.0, 4.9, 5);
        note(&mut curves, f64::NAN, f64::NAN, 5);
        assert!(curves.is_empty(), "too short, or no number");
        note(&mut curves, 1.0, 6.0, 10);
        note(&mut curves, 3.0, 12.0, 16);
        assert_eq!(stall_of(&curves), Some(3.0), "both began at 4");
        for (stall, now) in [(5.0, 30), (5.0, 40), (5.0, 50)] {
            note(&mut curves, stall, 6.0, now);
        }
        assert_eq!(stall_of(&curves), Some(4.5));
        note(&mut curves, 5.0, 6.0, 60);
        assert_eq!(stall_of(&curves), Some(5.0), "the oldest no longer counts");
    }
}
