//! The daemon's questions to a run, and its knobs of latency control. It keeps the bounds of
//! all its clients by one control (docs/design/0038). A run obeys for [`TURN_HOLDS`], whether it
//! has a bound or not, and then turns its own knobs: so a daemon that dies costs it nothing.

use std::time::Instant;

use undercroft_base::Nanos;
use undercroft_engine::reclaim::Turned;
use undercroft_proto::grant::{CurveFigures, Figures, TURN_HOLDS};
use undercroft_proto::messages::Word;
use undercroft_proto::report::MissRatioCurve;

use super::Control;
use crate::sync::lock;

impl Control {
    /// Answers the daemon, or does what it says.
    pub(super) fn hear_daemon(&mut self, word: &Word) -> Option<Figures> {
        let gauges = &self.shared.gauges;
        match word {
            Word::Figures => Some(self.figures()),
            Word::Turn(turn) => {
                let turned = Turned {
                    batch: turn.batch as usize,
                    goes: turn.goes,
                };
                self.bounds.obeys = Some((turned, Instant::now() + TURN_HOLDS));
                match &mut self.bounds.latency {
                    Some(bound) => bound.turn_to(&gauges.knobs, Some(turned)),
                    None => gauges.knobs.set(Some(turned)),
                }
                None
            }
        }
    }

    fn figures(&mut self) -> Figures {
        let shared = &self.shared;
        let uptime = shared.elapsed();
        let (stats, dram) = self.memory_now();
        let curve = self.curve(&stats, Nanos(uptime.as_nanos() as u64));
        let page_ins = match (&mut self.bounds.latency, shared.gauges.page_ins.get()) {
            (Some(bound), Some(page_ins)) => bound.tell(page_ins),
            _ => None,
        };
        let served = lock(&shared.gauges.fault_latency).mean();
        let each = served.seconds() + HAND_OVER_SECONDS;
        Figures {
            dram: dram.0,
            limit: undercroft_proto::report::limit(shared.gauges.memory_max().0),
            stall_seconds: lock(&shared.gauges.fault_latency).waited().seconds(),
            swap_ins: stats.swap_in,
            page_ins,
            curve: (curve.as_ref()).map(|curve| figures_of(curve, uptime.as_secs_f64(), each)),
        }
    }

    /// How the daemon has the knobs turned. If its word is too old, the run turns its own again.
    pub(super) fn obeyed(&mut self, now: Instant) -> Option<Turned> {
        let (turned, until) = self.bounds.obeys?;
        if now < until {
            return Some(turned);
        }
        self.bounds.obeys = None;
        let knobs = &self.shared.gauges.knobs;
        match &mut self.bounds.latency {
            Some(bound) => bound.turn(knobs),
            None => knobs.set(None),
        }
        None
    }
}

/// Seconds of a fault besides those between reading and answering it, about. The same for all runs,
/// because they are compared: what a fault cost a program is not known of each.
const HAND_OVER_SECONDS: f64 = 8e-6;

/// The seconds of stall that other limits would cost in a second.
///
/// * `each`: seconds of a fault.
fn figures_of(curve: &MissRatioCurve, uptime: f64, each: f64) -> CurveFigures {
    let seconds = (uptime - curve.since_seconds).max(0.0);
    let stall = |faults: f64| faults * each / seconds.max(1e-3);
    let points = curve.limits.iter();
    CurveFigures {
        seconds,
        points: points
            .map(|point| (point.memory_max_bytes, stall(point.swap_in)))
            .collect(),
    }
}
