//! When managing begins: close to the limit, earlier the faster the client grows, and in a small
//! limit also when it has stopped growing.

use std::time::{Duration, Instant};

/// Room below the limit at which managing begins: this part of the limit. In a small limit it is
/// [`SLACK_MIN`], or a quarter of the limit if that is less.
const SLACK_PART: u64 = 16;
const SLACK_MIN: u64 = 16 << 20;

/// The room covers this time of the growth that was seen, but at most three quarters of the limit:
/// a hypervisor may stop the CPU of the control thread, and the client goes on growing on others.
const LATE: Duration = Duration::from_millis(50);

/// Fastest growth of a program that a check notices in time, in bytes a second: first touches of
/// fresh memory.
const GROWTH_MAX: f64 = 4e9;

/// Longest wait between two looks, in seconds. Those who look have shorter ones.
const WAIT_MAX: f64 = 60.0;

/// Growth is measured over this time at least.
const MEASURE_MIN: Duration = Duration::from_millis(1);

/// A client that has not grown for this long is managed, if checks for its growth would be
/// frequent: its faults are reported from then on.
const STILL_AFTER: Duration = Duration::from_secs(10);

/// Watches the growth of a client that is not managed.
pub(super) struct Onset {
    /// When the client was last looked at, its processes and the bytes that it used then.
    seen: Option<(Instant, usize, u64)>,
    /// Bytes a second, at the last look.
    growth: f64,
    /// Since when the client has not grown, and what it used then, in bytes.
    still_since: Instant,
    still: u64,
}

/// The findings of a look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Look {
    pub(super) begins: bool,
    /// Time until the next look is due. It may be none.
    pub(super) wait: Duration,
    /// The client has not grown for long.
    pub(super) is_still: bool,
}

impl Onset {
    pub(super) fn new(now: Instant) -> Onset {
        Onset {
            seen: None,
            growth: 0.0,
            still_since: now,
            still: 0,
        }
    }

    /// Looks at what the client uses.
    /// * `processes`: how many it has. One that comes brings its memory at once, which is no speed.
    /// * `used`, `limit`: bytes now.
    /// * `frequent`: a wait below this makes looks frequent.
    pub(super) fn look(
        &mut self,
        now: Instant,
        (processes, used): (usize, u64),
        limit: u64,
        frequent: Duration,
    ) -> Look {
        let (at, before, seen) = *self.seen.get_or_insert((now, processes, used));
        let passed = now.saturating_duration_since(at);
        if passed >= MEASURE_MIN || processes != before {
            let grown = if processes == before {
                used.saturating_sub(seen)
            } else {
                0
            };
            let seconds = passed.max(MEASURE_MIN).as_secs_f64();
            self.growth = (grown as f64 / seconds).min(GROWTH_MAX);
            self.seen = Some((now, processes, used));
        }
        // Without a limit, what it used before is the measure.
        let measure = if limit == u64::MAX { self.still } else { limit };
        if used > self.still + measure / 64 {
            (self.still_since, self.still) = (now, used);
        }
        let near = (limit / SLACK_PART).max(SLACK_MIN.min(limit / 4));
        let fast = ((self.growth * LATE.as_secs_f64()) as u64).min(limit / 4 * 3);
        let threshold = limit - near.max(fast);
        let headroom = threshold.saturating_sub(used) as f64;
        let wait = Duration::from_secs_f64((headroom / GROWTH_MAX).min(WAIT_MAX));
        let is_still = now.saturating_duration_since(self.still_since) >= STILL_AFTER;
        Look {
            begins: used >= threshold || is_still && wait < frequent,
            wait,
            is_still,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const FREQUENT: Duration = Duration::from_millis(100);

    fn looks(limit: u64, used: &[(u64, u64)]) -> Vec<bool> {
        let begun = Instant::now();
        let mut onset = Onset::new(begun);
        let mut look = |&(ms, mib)| {
            let now = begun + Duration::from_millis(ms);
            onset
                .look(now, (1, mib * MIB), limit * MIB, FREQUENT)
                .begins
        };
        used.iter().map(&mut look).collect()
    }

    #[test]
    fn managing_begins_near_the_limit() {
        let slow = [(1000, 30), (2000, 47), (3000, 48)];
        assert_eq!(looks(64, &slow), [false, false, true]);
        let slow = [(1000, 900), (2000, 959), (3000, 960)];
        assert_eq!(looks(1024, &slow), [false, false, true]);
    }

    #[test]
    fn a_client_that_grows_fast_is_managed_earlier() {
        // 1 GiB/s: 51.2 MiB in 50 ms.
        assert_eq!(
            looks(128, &[(10, 10), (60, 60), (78, 78)]),
            [false, false, true]
        );
        // Three quarters of the limit at most.
        assert_eq!(
            looks(64, &[(1, 0), (4, 12), (8, 15), (9, 17)]),
            [false, false, false, true]
        );
        // What it had at the first look, or another process brings, is no growth.
        assert_eq!(looks(64, &[(1, 40), (2, 40)]), [false, false]);
        let begun = Instant::now();
        let mut onset = Onset::new(begun);
        for (ms, processes, mib) in [(0, 1, 10), (2, 2, 40), (4, 2, 40)] {
            let now = begun + Duration::from_millis(ms);
            let look = onset.look(now, (processes, mib * MIB), 64 * MIB, FREQUENT);
            assert!(!look.begins, "after {ms} ms");
        }
        // It has stopped to grow fast.
        assert_eq!(looks(64, &[(10, 30), (500, 40)]), [false, false]);
        // In a large limit the usual room is more than that.
        assert_eq!(looks(4096, &[(1000, 1024), (2000, 3000)]), [false, false]);
    }

    #[test]
    fn a_client_that_stands_still_is_managed_if_looks_would_be_frequent() {
        let at = |ms, used| (ms, used);
        // A 64th of the limit is no growth.
        let used = [at(1000, 40), at(8000, 41), at(10_999, 40), at(11_000, 40)];
        assert_eq!(looks(64, &used), [false, false, false, true]);
        let far = [at(1000, 40), at(20_000, 40)];
        assert_eq!(looks(4096, &far), [false, false]);
        let begun = Instant::now();
        let mut onset = Onset::new(begun);
        let mut is_still = |seconds, mib| {
            let now = begun + Duration::from_secs(seconds);
            let used = (1, mib * MIB);
            onset.look(now, used, 4096 * MIB, FREQUENT).is_still
        };
        assert!(!is_still(1, 100) && is_still(11, 150) && !is_still(12, 200));
        let mut onset = Onset::new(begun);
        let mut is_still = |seconds, mib| {
            let now = begun + Duration::from_secs(seconds);
            onset.look(now, (1, mib * MIB), u64::MAX, FREQUENT).is_still
        };
        assert!(!is_still(1, 100) && !is_still(11, 110) && is_still(21, 111));
    }

    #[test]
    fn the_wait_is_the_time_of_the_fastest_growth() {
        let begun = Instant::now();
        let look = Onset::new(begun).look(begun, (1, 8 * MIB), 64 * MIB, FREQUENT);
        let wait = 40.0 * MIB as f64 / GROWTH_MAX;
        assert!((look.wait.as_secs_f64() - wait).abs() < 1e-6, "{look:?}");
    }
}
