//! Decides whether a fault thread waits for storage awake. An idle CPU is halted, and on a virtual
//! machine it takes some 20 us to come back. That is a third of the time of a read from a fast
//! disk.
//!
//! A thread that waits awake polls, and takes the CPU from others. So it does so only for a client
//! thread that is the only one to fault, and that waits on the same CPU. It stops after
//! [`LOOK_MAX`]. It rests if other threads run here too, or if reads take longer.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;

/// Longest wait awake: three times a read from a fast disk.
const LOOK_MAX: Duration = Duration::from_micros(200);

/// A gap of this length between two polls shows that another thread had the CPU for a slice. An
/// interrupt takes less.
const TAKEN: Duration = Duration::from_micros(500);

/// After this many waits in a row that were too short, the storage counts as slow.
const SHORT_MAX: u32 = 8;

/// Rest without waits awake: twice as long each time, up to the maximum, until [`CALM`] waits went
/// well.
const REST_MIN: Duration = Duration::from_millis(20);
const REST_MAX: Duration = Duration::from_secs(1);
const CALM: u32 = 1000;

const _: () = assert!(REST_MIN.as_nanos() < REST_MAX.as_nanos());
const _: () =
    assert!(LOOK_MAX.as_nanos() < TAKEN.as_nanos() && TAKEN.as_nanos() < REST_MIN.as_nanos());

/// The state of one fault thread.
#[derive(Debug)]
pub(crate) struct Awake {
    /// The start of the wait in progress, and its last poll.
    wait: Option<(Instant, Instant)>,
    rests_until: Option<Instant>,
    rest: Duration,
    short: u32,
    good: u32,
}

impl Default for Awake {
    fn default() -> Awake {
        Awake {
            wait: None,
            rests_until: None,
            rest: REST_MIN,
            short: 0,
            good: 0,
        }
    }
}

impl Awake {
    /// Waits for events, first awake if it `may`, then asleep for at most `limit`. Replaces
    /// `events`, up to its capacity.
    pub(super) fn wait(
        &mut self,
        epoll: &OwnedFd,
        events: &mut Vec<epoll::Event>,
        may: bool,
        limit: Option<Duration>,
    ) -> rustix::io::Result<()> {
        let at_once = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let limit = limit.map(|limit| rustix::fs::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        events.clear();
        let mut awake = may && self.is_rested(Instant::now());
        loop {
            let timeout = if awake {
                Some(&at_once)
            } else {
                limit.as_ref()
            };
            epoll::wait(epoll, spare_capacity(events), timeout)?;
            if !events.is_empty() {
                if awake {
                    self.found();
                }
                return Ok(());
            }
            if !awake && limit.is_some() {
                return Ok(());
            }
            awake = awake && self.stays_awake(Instant::now());
        }
    }

    fn is_rested(&self, now: Instant) -> bool {
        self.rests_until.is_none_or(|until| now >= until)
    }

    /// A poll at `now` found nothing. True if the thread is to poll again instead of sleeping.
    fn stays_awake(&mut self, now: Instant) -> bool {
        if !self.is_rested(now) {
            return false;
        }
        let (began, last) = *self.wait.get_or_insert((now, now));
        if now.duration_since(last) >= TAKEN {
            self.short = 0;
            self.rests(now);
            return false;
        }
        if now.duration_since(began) >= LOOK_MAX {
            self.wait = None;
            self.short += 1;
            if self.short == SHORT_MAX {
                self.short = 0;
                self.rests(now);
            }
            return false;
        }
        self.wait = Some((began, now));
        true
    }

    /// Notes that events came. Events at the first poll needed no wait, so they prove nothing.
    fn found(&mut self) {
        if self.wait.take().is_none() {
            return;
        }
        self.short = 0;
        self.good += 1;
        if self.good == CALM {
            self.good = 0;
            self.rest = REST_MIN;
        }
    }

    /// Begins a rest.
    fn rests(&mut self, now: Instant) {
        self.wait = None;
        self.good = 0;
        self.rests_until = Some(now + self.rest);
        self.rest = (2 * self.rest).min(REST_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks every `step` from `from` on, for at most `time`. Returns how long it was told to stay
    /// awake.
    fn waits(awake: &mut Awake, from: Instant, step: Duration, time: Duration) -> Duration {
        let mut now = from;
        while awake.stays_awake(now) && now < from + time {
            now += step;
        }
        now - from
    }

    const STEP: Duration = Duration::from_micros(1);
    const LONG: Duration = Duration::from_secs(1);

    #[test]
    fn a_wait_awake_is_bounded_and_slow_storage_is_not_waited_for_awake() {
        let (mut awake, mut now) = (Awake::default(), Instant::now());
        for _ in 0..SHORT_MAX {
            assert_eq!(waits(&mut awake, now, STEP, LONG), LOOK_MAX);
            now += LONG;
        }
        assert!(!awake.stays_awake(now - LONG + REST_MIN / 2));
        assert!(awake.stays_awake(now), "it rests for ever");
        awake.found();
        // One that comes in time makes up for those that did not.
        for _ in 0..10 {
            for _ in 1..SHORT_MAX {
                assert_eq!(waits(&mut awake, now, STEP, LONG), LOOK_MAX);
            }
            assert!(waits(&mut awake, now, STEP, LOOK_MAX / 2) >= LOOK_MAX / 2);
            awake.found();
        }
    }

    #[test]
    fn it_rests_longer_and_longer_while_others_have_the_processor_and_starts_anew_after_a_calm() {
        let (mut awake, mut now) = (Awake::default(), Instant::now());
        let mut rest = REST_MIN;
        for _ in 0..10 {
            assert!(awake.stays_awake(now));
            now += TAKEN;
            assert!(!awake.stays_awake(now));
            assert!(
                !awake.stays_awake(now + rest - STEP),
                "a rest below {rest:?}"
            );
            now += rest;
            rest = (2 * rest).min(REST_MAX);
        }
        assert_eq!(rest, REST_MAX);
        for _ in 0..CALM {
            assert!(awake.stays_awake(now));
            awake.found();
        }
        assert!(awake.stays_awake(now));
        assert!(!awake.stays_awake(now + TAKEN));
        now += TAKEN + REST_MIN;
        // Events that needed no wait prove nothing: the second rest is twice as long as the first.
        for _ in 0..CALM {
            awake.found();
        }
        assert!(awake.stays_awake(now));
        assert!(!awake.stays_awake(now + TAKEN));
        awake.found();
        assert!(!awake.stays_awake(now + TAKEN + REST_MIN));
        now += TAKEN + 2 * REST_MIN;
        assert!(awake.stays_awake(now));
        for _ in 0..CALM {
            awake.found();
        }
        assert!(awake.stays_awake(now));
        assert!(!awake.stays_awake(now + TAKEN));
        assert!(!awake.stays_awake(now + TAKEN + 3 * REST_MIN));
        assert!(awake.stays_awake(now + TAKEN + 4 * REST_MIN));
    }
}
