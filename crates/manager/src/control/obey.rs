//! What the daemon says of the knobs of latency control. It keeps the bounds of all its clients by
//! one control (docs/design/0038). A run obeys for [`TURN_HOLDS`], whether it has a bound or not,
//! and then turns its own knobs: so a daemon that dies costs it nothing.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::Control;
use crate::gauges::knobs::Turned;
use crate::grant::{PageIns, TURN_HOLDS, Turn};

/// What the keeper passes on from the daemon. The answer is an `Option<PageIns>`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Which page-ins has it not been told of?
    PageIns,
    /// Turn the knobs so. The answer is `None`.
    Turn(Turn),
}

impl Control {
    /// Answers the daemon, or does what it says.
    pub(super) fn hear_daemon(&mut self, word: &Word) -> Option<PageIns> {
        let gauges = &self.shared.gauges;
        match word {
            Word::PageIns => {
                let (bound, page_ins) = (self.bound.as_mut()?, gauges.page_ins.get()?);
                bound.tell(page_ins)
            }
            Word::Turn(turn) => {
                let turned = Turned {
                    batch: turn.batch as usize,
                    goes: turn.goes,
                };
                self.obeys = Some((turned, Instant::now() + TURN_HOLDS));
                match &mut self.bound {
                    Some(bound) => bound.turn_to(&gauges.knobs, Some(turned)),
                    None => gauges.knobs.set(Some(turned)),
                }
                None
            }
        }
    }

    /// How the daemon has the knobs turned. If its word is too old, the run turns its own again.
    pub(super) fn obeyed(&mut self, now: Instant) -> Option<Turned> {
        let (turned, until) = self.obeys?;
        if now < until {
            return Some(turned);
        }
        self.obeys = None;
        let knobs = &self.shared.gauges.knobs;
        match &mut self.bound {
            Some(bound) => bound.turn(knobs),
            None => knobs.set(None),
        }
        None
    }
}
