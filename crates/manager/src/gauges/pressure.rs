//! Memory pressure as the kernel gives it (PSI): averages over 10, 60 and 300 seconds.
//!
//! The averages decay as in `kernel/sched/psi.c`: every two seconds, by `exp(-2 s / window)`. The
//! time is that of all faults, so threads that wait at once count each; a period has at most 100 %.

use std::time::{Duration, Instant};

use crate::report::Pressure;

/// The kernel's period (`PSI_FREQ`).
const PERIOD: Duration = Duration::from_secs(2);

/// The averages of one client, and when they were last brought up to date.
pub(crate) struct PressureMeter {
    since: Instant,
    stall: Duration,
    percent: [f64; 3],
}

impl PressureMeter {
    pub(crate) fn new(now: Instant) -> PressureMeter {
        PressureMeter {
            since: now,
            stall: Duration::ZERO,
            percent: [0.0; 3],
        }
    }

    /// Ends the period if it is over. Several that have passed share their stall evenly. Cost: none
    /// within a period, so the caller need not ask for `stall` then.
    pub(crate) fn note(&mut self, now: Instant, stall: impl FnOnce() -> Duration) {
        let passed = now.saturating_duration_since(self.since);
        if passed < PERIOD {
            return;
        }
        let stall = stall();
        let waited = stall.saturating_sub(self.stall).as_secs_f64();
        let share = (100.0 * waited / passed.as_secs_f64()).min(100.0);
        for (average, window) in self.percent.iter_mut().zip([10.0, 60.0, 300.0]) {
            let kept = (-passed.as_secs_f64() / window).exp();
            *average = *average * kept + share * (1.0 - kept);
        }
        (self.since, self.stall) = (now, stall);
    }

    /// * `stall`: of all faults until now.
    pub(crate) fn read(&self, stall: Duration) -> Pressure {
        let [avg10, avg60, avg300] = self.percent;
        Pressure {
            avg10,
            avg60,
            avg300,
            total_micros: stall.as_micros() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_approach_the_share_of_time_and_decay_as_the_kernels_do() {
        let began = Instant::now();
        let mut meter = PressureMeter::new(began);
        let stall = |seconds: u64| Duration::from_millis(seconds * 250);
        for second in 0..=600 {
            meter.note(began + Duration::from_secs(second), || stall(second));
        }
        let full = meter.read(stall(600));
        assert!((full.avg10 - 25.0).abs() < 0.01, "{full:?}");
        assert!(
            (full.avg300 - 25.0 * (1.0 - (-2f64).exp())).abs() < 0.01,
            "{full:?}"
        );
        assert_eq!(full.total_micros, 150_000_000);
        // Ten seconds without a stall: 1/e of it is left.
        meter.note(began + Duration::from_secs(610), || stall(600));
        let less = meter.read(stall(600)).avg10;
        assert!((less - 25.0 / 1f64.exp()).abs() < 0.01, "{less}");
        // Four threads that wait at once are no more than all of the time.
        meter.note(began + Duration::from_secs(1200), || {
            Duration::from_secs(9000)
        });
        assert!(meter.read(Duration::ZERO).avg10 <= 100.0);
    }
}
