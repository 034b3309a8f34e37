//! How long, and by how much, the client was above its limit; how long it was paused.
//!
//! DRAM in use: 4096 times the resident, evicting and loading pages of all spaces, without
//! inherited ones; and what tiers hold in memory, with their fragmentation and metadata. A page is
//! counted when its plan is made, before it is installed, and uncounted when it is published.

use std::time::Instant;

use undercroft_proto::report::{Immovable, LimitExceeded, Pauses};

/// Time spent above the limit.
#[derive(Debug, Default)]
pub(crate) struct Exceeded {
    /// The sum of the excesses that have ended.
    ended: LimitExceeded,
    /// The start of the present excess.
    since: Option<Instant>,
}

impl Exceeded {
    /// Notes that memory in use is `over` bytes above the limit at `now`.
    pub(crate) fn note(&mut self, over: u64, now: Instant) {
        match (over > 0, self.since) {
            (true, None) => {
                self.since = Some(now);
                self.ended.events += 1;
            }
            (false, Some(_)) => {
                self.ended.seconds = self.until(now).seconds;
                self.since = None;
            }
            _ => {}
        }
        self.ended.bytes_peak = self.ended.bytes_peak.max(over);
    }

    /// The sum, with the present excess up to `now`.
    pub(crate) fn until(&self, now: Instant) -> LimitExceeded {
        LimitExceeded {
            seconds: self.ended.seconds + going_on(self.since, now),
            ..self.ended
        }
    }
}

/// Memory that could not leave, and the limit that was raised for it.
#[derive(Debug, Default)]
pub(crate) struct Fixed {
    /// The times that have ended, and the figures now.
    so_far: Immovable,
    /// Since when the limit is raised.
    since: Option<Instant>,
}

impl Fixed {
    /// Notes that `bytes` cannot leave, and that the limit is `raised` for them at `now`. True the
    /// first time that it is.
    pub(crate) fn note(&mut self, bytes: u64, raised: u64, now: Instant) -> bool {
        let first = raised > 0 && self.so_far.limit_raised_bytes_peak == 0;
        self.so_far.limit_raised_seconds = self.until(now).limit_raised_seconds;
        self.since = (raised > 0).then_some(now);
        let of = &mut self.so_far;
        of.bytes = bytes;
        of.bytes_peak = of.bytes_peak.max(bytes);
        of.limit_raised_bytes_peak = of.limit_raised_bytes_peak.max(raised);
        first
    }

    /// The figures at `now`.
    pub(crate) fn until(&self, now: Instant) -> Immovable {
        Immovable {
            limit_raised_seconds: self.so_far.limit_raised_seconds + going_on(self.since, now),
            ..self.so_far
        }
    }
}

/// Seconds from `since`, if there is one, to `now`.
fn going_on(since: Option<Instant>, now: Instant) -> f64 {
    since.map_or(0.0, |since| now.duration_since(since).as_secs_f64())
}

/// Time in which the run was paused.
#[derive(Debug, Default)]
pub(crate) struct Paused {
    /// The sum of the pauses that have ended.
    ended: Pauses,
    /// The start of the present pause.
    since: Option<Instant>,
}

impl Paused {
    /// Notes that a pause begins or ends at `now`.
    pub(crate) fn note(&mut self, paused: bool, now: Instant) {
        self.ended = self.until(now);
        self.ended.count += u64::from(paused && self.since.is_none());
        self.since = paused.then_some(now);
    }

    /// The sum, with the present pause up to `now`.
    pub(crate) fn until(&self, now: Instant) -> Pauses {
        Pauses {
            seconds: self.ended.seconds + going_on(self.since, now),
            ..self.ended
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn time_above_the_limit_counts_while_it_lasts() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut exceeded = Exceeded::default();
        exceeded.note(0, at(0));
        assert_eq!(exceeded.until(at(1)), LimitExceeded::default());
        exceeded.note(5, at(1));
        exceeded.note(9, at(2));
        let seen = |events, seconds| LimitExceeded {
            events,
            bytes_peak: 9,
            seconds,
        };
        assert_eq!(exceeded.until(at(4)), seen(1, 3.0));
        exceeded.note(0, at(5));
        assert_eq!(exceeded.until(at(100)), seen(1, 4.0));
        exceeded.note(1, at(100));
        assert_eq!(exceeded.until(at(101)), seen(2, 5.0));
    }

    #[test]
    fn the_time_of_a_raised_limit_adds_up_and_its_start_is_told_once() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut fixed = Fixed::default();
        assert!(!fixed.note(5, 0, at(0)) && fixed.note(9, 4, at(1)) && !fixed.note(7, 2, at(3)));
        assert!(!fixed.note(3, 0, at(4)) && !fixed.note(3, 1, at(10)));
        let seen = Immovable {
            bytes: 3,
            bytes_peak: 9,
            limit_raised_bytes_peak: 4,
            limit_raised_seconds: 4.0,
        };
        assert_eq!(fixed.until(at(11)), seen);
    }

    #[test]
    fn pauses_add_up_and_the_present_one_counts() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut paused = Paused::default();
        assert_eq!(paused.until(at(9)), Pauses::default());
        paused.note(true, at(1));
        assert_eq!(
            (paused.until(at(3)).count, paused.until(at(3)).seconds),
            (1, 2.0)
        );
        paused.note(false, at(4));
        paused.note(true, at(10));
        let seen = paused.until(at(11));
        assert_eq!((seen.count, seen.seconds), (2, 4.0));
    }
}
