//! The miss-ratio curve of a client: scans as in a live run, and what they found.
//!
//! The trace has every use, but a live run does not know of most. So the estimator gets what it
//! would get there: faults, and which pages a scan finds used, one each time that a 64th of the
//! resident pages has left. A page counts as used from the second scan on.

use undercroft_base::PageCount;
use undercroft_engine::{Engine, VecLedger, limits};
use undercroft_policy::mrc::{Curve, Estimator, Event, Tiers};
use undercroft_policy::place::PlacementName;
use undercroft_policy::reclaim::ReclaimName;

use crate::setup::SimRoom;

/// A scan is due when this fraction of the resident pages has left.
const TURNOVER: u64 = 64;

/// The estimator of one client.
pub(super) struct Following {
    estimator: Estimator,
    events: Vec<Event>,
    /// Pages evicted until the last scan.
    left: u64,
}

impl Following {
    /// For a client with `frames` pages.
    ///
    /// * `part`: one in this many pages is kept free
    ///   ([`Shown::reserve_part`](undercroft_policy::place::Shown::reserve_part)).
    pub(super) fn new(
        reclaim: &ReclaimName,
        place: &PlacementName,
        frames: u64,
        room: SimRoom,
        part: u64,
    ) -> Following {
        let free = move |limit| match room {
            SimRoom::AfterPlan => PageCount(0),
            SimRoom::Ahead => PageCount(limits::reserve(limit, part).0 * 5 / 4),
        };
        Following {
            estimator: Estimator::new(reclaim, place, PageCount(frames), free),
            events: Vec::new(),
            left: 0,
        }
    }

    /// Tells the engine which pages to follow.
    pub(super) fn begin(&self, engine: &mut Engine<VecLedger>) {
        engine.uses().follow(self.estimator.sampling());
    }

    /// Whether a scan is due.
    #[inline]
    pub(super) fn is_due(&self, engine: &Engine<VecLedger>) -> bool {
        let left = engine.books().stats().pages_swapped_out - self.left;
        left > 0 && left >= engine.books().resident().0 / TURNOVER
    }

    /// Gives the estimator all that happened since the last time, a scan at the end.
    pub(super) fn feed(&mut self, engine: &mut Engine<VecLedger>, tiers: &Tiers) {
        self.left = engine.books().stats().pages_swapped_out;
        engine.uses().take_seen(&mut self.events);
        self.estimator.feed(&self.events, tiers);
        self.events.clear();
        engine.uses().follow(self.estimator.sampling());
    }

    /// The client has another limit from now on: the curve begins anew.
    pub(super) fn set_limit(&mut self, limit: PageCount) {
        self.estimator.set_limit(limit);
    }

    /// The curve so far. * `faults`: those that there were.
    pub(super) fn curve(&self, faults: u64) -> Curve {
        self.estimator.curve(faults)
    }
}
