//! The stall bound of a run: how much of the time the program waits for pages, and the control that
//! shifts sequences of pages from the disk to the SSD. The law is that of `undercroft-qos`, as in
//! the simulator.

use std::time::{Duration, Instant};

use undercroft_base::Nanos;
use undercroft_proto::messages::Answered;
use undercroft_proto::report::{PressureReport, StallBoundReport};
use undercroft_qos::pressure::Pressure;
use undercroft_qos::{StallControl, StallMax};

use super::Control;
use crate::log::warn;
use crate::sync::lock;

/// Least time of a window.
const WINDOW: Duration = Duration::from_secs(1);

/// Windows in a row that miss the bound, with nothing left to shift, before the user is told.
const MISSES_MAX: u32 = 3;

/// How long the program waits, and the bound of that, if it has one.
#[derive(Default)]
pub(super) struct Stall {
    pressure: Pressure,
    bound: Option<StallWatch>,
}

struct StallWatch {
    control: StallControl,
    /// When it came into force, and the wait until then: these do not count.
    since: (Nanos, Nanos),
    window_since: Instant,
    /// The time and the wait when the window began.
    window: (Nanos, Nanos),
    /// Windows in a row that missed it with nothing left to shift.
    in_vain: u32,
    warned: bool,
    ratio: f64,
}

impl Stall {
    /// Whether there is a bound.
    pub(super) fn is_bounded(&self) -> bool {
        self.bound.is_some()
    }

    /// As the kernel's pressure files give it.
    pub(super) fn pressure(&self) -> PressureReport {
        PressureReport::of(&self.pressure)
    }

    /// How the bound is kept.
    pub(super) fn report(&self) -> Option<StallBoundReport> {
        let of = self.bound.as_ref()?;
        let (windows_kept, windows_missed) = of.control.windows();
        Some(StallBoundReport {
            bound: of.control.bound().to_string(),
            ratio: (of.ratio * 1e4).round() / 1e4,
            windows_kept,
            windows_missed,
            shift: (of.control.shift() * 1e2).round() / 1e2,
        })
    }
}

impl StallWatch {
    /// Ends the window. Returns what the user should be told.
    ///
    /// * `all`: the least shift at which nothing goes to the last tier, if that is known.
    fn end_window(&mut self, now: Nanos, waited: Nanos, all: Option<f64>) -> Option<String> {
        let (began, before) = self.since;
        self.ratio = waited.since(before).seconds() / now.since(began).seconds();
        let (from, by_then) = std::mem::replace(&mut self.window, (now, waited));
        let lately = waited.since(by_then).seconds() / now.since(from).seconds();
        self.control.end_window(self.ratio, lately, all);
        let bound = self.control.bound();
        let in_vain = self.control.is_exhausted() && self.ratio > bound.part();
        self.in_vain = if in_vain { self.in_vain + 1 } else { 0 };
        if self.in_vain < MISSES_MAX || std::mem::replace(&mut self.warned, true) {
            return None;
        }
        Some(format!(
            "the stall bound {bound} cannot be kept: the program waits for {:.0}% of the time, and \
             pages go to the last tier only where there is no room above it. Give more memory, a larger \
             or faster tier above it, or a higher bound",
            self.ratio * 100.0
        ))
    }
}

impl Control {
    /// Since the start: the time, and how much of it some thread waited.
    fn time_and_wait(&self) -> (Nanos, Nanos) {
        let waited = lock(&self.shared.gauges.fault_latency).some_waited();
        (Nanos(self.shared.elapsed().as_nanos() as u64), waited)
    }

    /// Takes the averages, and ends the window of the bound, if it is time. Called at each round of
    /// the control thread: at least every 100 ms if there is a bound.
    pub(super) fn note_stall(&mut self) {
        let (now, waited) = self.time_and_wait();
        self.bounds.stall.pressure.note(now, waited);
        if let Some(advice) = self.shared.books.advice() {
            advice.note_waited(waited);
        }
        let Some(bound) = &mut self.bounds.stall.bound else {
            return;
        };
        if bound.window_since.elapsed() < WINDOW {
            return;
        }
        bound.window_since = Instant::now();
        let mut engine = self.shared.books.engine();
        let all = engine.books().placement(0).shift_of_all;
        let told = bound.end_window(now, waited, all);
        engine.migrations().set_shift(bound.control.asked());
        if let Some(told) = told {
            warn(&told);
        }
    }

    /// Sets another stall bound while the program runs. What it waited before does not count.
    pub(super) fn change_stall(&mut self, bound: Option<StallMax>) -> Answered {
        let options = &self.shared.options;
        if bound.is_some() {
            let both = if self.has_latency_bound() {
                options.can_bound_both()
            } else {
                Ok(())
            };
            if let Err(why) = options.can_bound_stall().and(both) {
                return Answered::Refused(why.to_owned());
            }
        }
        self.set_stall(bound);
        Answered::Yes
    }

    /// Sets the stall bound; `None` ends it.
    pub(super) fn set_stall(&mut self, bound: Option<StallMax>) {
        self.bounds.stall.bound = bound.map(|bound| StallWatch {
            control: StallControl::new(bound),
            since: self.time_and_wait(),
            window: self.time_and_wait(),
            window_since: Instant::now(),
            in_vain: 0,
            warned: false,
            ratio: 0.0,
        });
        let shift = (self.bounds.stall.bound.as_ref()).map_or(1.0, |bound| bound.control.asked());
        self.shared.books.engine().migrations().set_shift(shift);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_nothing_keeps_is_told_once_with_what_the_program_waits() {
        let mut bound = StallWatch {
            control: StallControl::new("30%".parse().expect("a bound")),
            since: (Nanos(5_000_000_000), Nanos(5_000_000_000)),
            window: (Nanos(5_000_000_000), Nanos(5_000_000_000)),
            window_since: Instant::now(),
            in_vain: 0,
            warned: false,
            ratio: 0.0,
        };
        let second = 1_000_000_000;
        let told: Vec<_> = (1..8)
            .map(|at| {
                bound.end_window(
                    Nanos((5 + at) * second),
                    Nanos(5 * second + at * second / 2),
                    None,
                )
            })
            .collect();
        assert_eq!(told.iter().flatten().count(), 1);
        let text = told[2].as_ref().expect("after three windows in vain");
        assert!(
            text.contains("30% cannot be kept") && text.contains("50%"),
            "{text}"
        );
    }
}
