//! Runs in pairs: the same trace, page size and memory under CLOCK and under CLOCK-W.

use super::load::Loaded;
use super::study::{Pages, base};
use crate::results::SimulatedRun;
use undercroft_sim::Setup;
use undercroft_sim::setup::FaultTouch;

/// A trace, page size and memory under both policies.
pub(super) struct Pair<'a> {
    pub(super) clock: &'a SimulatedRun,
    pub(super) clock_w: &'a SimulatedRun,
}

impl Pair<'_> {
    /// The time under CLOCK-W to the time under CLOCK.
    pub(super) fn ratio(&self, time: impl Fn(&SimulatedRun) -> f64) -> f64 {
        time(self.clock_w) / time(self.clock)
    }
}

/// CLOCK's runs with their CLOCK-W twins, which follow them.
pub(super) fn pairs(runs: &[SimulatedRun]) -> Vec<Pair<'_>> {
    runs.chunks_exact(2)
        .map(|pair| Pair {
            clock: &pair[0],
            clock_w: &pair[1],
        })
        .collect()
}

/// Runs a trace under both policies.
///
/// * `touches`: what a fault sets, under CLOCK and under CLOCK-W.
pub(super) fn both(
    trace: &Loaded,
    page_bytes: u64,
    percents: &[f64],
    touches: [FaultTouch; 2],
) -> anyhow::Result<Vec<SimulatedRun>> {
    let pages = Pages::of(trace, page_bytes)?;
    let mut runs = Vec::new();
    for percent in percents {
        for (reclaim, touch) in ["clock", "clock_w"].into_iter().zip(touches) {
            let setup = Setup {
                reclaim: reclaim.to_owned(),
                fault_touch: touch,
                ..base()
            };
            runs.push(pages.simulate(*percent, &setup)?.1);
        }
    }
    Ok(runs)
}
