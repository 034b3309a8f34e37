//! How much of a CPU a plugin gets: a part of it for long, and some CPU time ahead. Its thread has
//! the idle class, but a CPU that never sleeps makes others slower, too.

use std::time::Duration;

/// Parts of a CPU, of which a plugin gets one.
const SHARE: u32 = 4;

/// CPU time that it may have ahead, e.g. for what a scan has found.
const AHEAD: Duration = Duration::from_millis(250);

/// CPU time that a plugin may still use. In all it is `passed / SHARE + AHEAD` at most, and that of
/// its last turn.
#[derive(Debug)]
pub(super) struct Allowance {
    left: Duration,
    /// Passed, and used CPU time of the thread.
    seen: [Duration; 2],
}

impl Allowance {
    /// * `passed`, `used`: the time now, and the CPU time of the thread.
    pub(super) fn new(passed: Duration, used: Duration) -> Allowance {
        Allowance {
            left: AHEAD,
            seen: [passed, used],
        }
    }

    /// How long the thread has to rest now.
    pub(super) fn rest(&mut self, passed: Duration, used: Duration) -> Duration {
        let [before, used_before] = self.seen;
        self.seen[1] = used;
        let gained = (passed.saturating_sub(before)) / SHARE;
        let (has, spent) = (self.left + gained, used.saturating_sub(used_before));
        let owed = spent.saturating_sub(has) * SHARE;
        self.left = has.saturating_sub(spent).min(AHEAD);
        self.seen[0] = passed + owed; // what it rests for is paid by the rest
        owed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works in turns of `turn` for a minute, and rests as it is told. Returns the CPU time.
    fn worked(turn: Duration) -> Duration {
        let (mut passed, mut used) = (Duration::ZERO, Duration::ZERO);
        let mut allowance = Allowance::new(passed, used);
        while passed < Duration::from_secs(60) {
            (passed, used) = (passed + turn, used + turn);
            passed += allowance.rest(passed, used);
        }
        used
    }

    #[test]
    fn work_without_end_gets_its_share_and_a_little_work_rests_never() {
        for micros in [100, 3_000, 70_000, 400_000] {
            let turn = Duration::from_micros(micros);
            let most = Duration::from_secs(15) + AHEAD + turn;
            let used = worked(turn);
            assert!(used <= most && used * 10 > most * 9, "{turn:?}: {used:?}");
        }
        let second = Duration::from_secs(1);
        let mut allowance = Allowance::new(second, second);
        for n in 1..100 {
            let used = second + n * second / 5;
            assert_eq!(allowance.rest(second + n * second, used), Duration::ZERO);
        }
        // What is not used is kept up to a bound.
        let used = 21 * second;
        assert_eq!(allowance.rest(1000 * second, used), Duration::ZERO);
        let owed = allowance.rest(1000 * second, used + second);
        assert_eq!(owed, (second - AHEAD) * SHARE);
    }
}
