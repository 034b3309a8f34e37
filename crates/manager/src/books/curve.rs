//! The miss-ratio curve of a run: hands what the engine saw of the followed pages to the estimator.
//!
//! The estimator works on the evictor's thread, not on the fault path. Its lock is taken before the
//! engine's, and held until the events are dealt with: so they keep their order. It runs the
//! policies of reclaim and placement in miniature, at twelve limits (`policy/src/mrc`).

use std::sync::Mutex;

use undercroft_base::PageCount;
use undercroft_engine::limits;
use undercroft_policy::mrc::{Curve, Estimator, Event, Tiers};
use undercroft_policy::place::PlacementName;
use undercroft_policy::reclaim::ReclaimName;

use super::Books;
use crate::sync::lock;

/// The estimator, and what it has not dealt with yet.
pub(crate) struct Follower {
    state: Mutex<State>,
}

struct State {
    estimator: Estimator,
    events: Vec<Event>,
}

/// Pages that are free below a limit, on average: reclaim begins when the reserve is used, and ends
/// at one and a half. Half of the pages that may wait to be written do.
///
/// * `part`: one in this many pages is the reserve (`Shown::reserve_part`).
fn free_below(limit: PageCount, part: u64) -> PageCount {
    const WAITING_MAX: u64 = 256; // 1 MiB
    const WAITING_FROM: u64 = 8192; // 32 MiB
    let waiting = match limit.0 {
        WAITING_FROM.. => (limit.0 / 64).min(WAITING_MAX) / 2,
        _ => 0,
    };
    PageCount(limits::reserve(limit, part).0 * 5 / 4 + waiting)
}

impl Follower {
    /// For a client with this limit, before its first page.
    pub(crate) fn new(reclaim: &ReclaimName, place: &PlacementName, limit: PageCount) -> Follower {
        let part = place.make().shown().reserve_part;
        let free = move |limit| free_below(limit, part);
        Follower {
            state: Mutex::new(State {
                estimator: Estimator::new(reclaim, place, limit, free),
                events: Vec::new(),
            }),
        }
    }
}

impl Books {
    /// Follows pages from now on.
    pub(crate) fn with_curve(mut self, follower: Follower) -> Books {
        let sampling = lock(&follower.state).estimator.sampling();
        self.engine().uses().follow(sampling);
        self.curve = Some(follower);
        self
    }

    /// Deals with what the engine saw of the followed pages. Cost: about a microsecond for each
    /// time that one of them came or was used. Never call it with the engine locked.
    pub(crate) fn follow_pages(&self) {
        let Some(follower) = &self.curve else { return };
        let mut state = lock(&follower.state);
        let State { estimator, events } = &mut *state;
        let clean = {
            let mut engine = self.engine();
            engine.uses().follow(estimator.sampling());
            engine.uses().take_seen(events);
            engine.books().stats().clean_part()
        };
        if events.is_empty() {
            return;
        }
        let states = self.tiers.ranked_states();
        estimator.feed(events, &Tiers::new(&states, clean));
        events.clear();
    }

    /// The curve so far. `None` if no page is followed.
    ///
    /// * `faults`: those that read a tier, since the start.
    pub(crate) fn curve(&self, faults: u64) -> Option<Curve> {
        let follower = self.curve.as_ref()?;
        Some(lock(&follower.state).estimator.curve(faults))
    }

    /// The limit is another one from now on: the curve begins anew, for limits around this one.
    pub(crate) fn begin_curve_again(&self, limit: PageCount) {
        self.follow_pages();
        if let Some(follower) = &self.curve {
            lock(&follower.state).estimator.set_limit(limit);
        }
    }

    /// Bytes of the estimator's tables.
    pub(crate) fn curve_bytes(&self) -> u64 {
        let follower = self.curve.as_ref();
        follower.map_or(0, |follower| {
            lock(&follower.state).estimator.metadata_bytes()
        })
    }
}
