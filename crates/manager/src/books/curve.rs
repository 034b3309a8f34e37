//! The miss-ratio curve of a run: hands what the engine saw of the followed pages to the estimator.
//!
//! The estimator works on the evictor's thread, not on the fault path. Its lock is taken before the
//! engine's, and held until the events are dealt with: so they keep their order.

use std::sync::Mutex;

use undercroft_base::PageCount;
use undercroft_engine::limits;
use undercroft_policy::mrc::{Curve, Estimator, Event, Pool, pool_ratio};
use undercroft_policy::place::{LatencyClass, TierState};
use undercroft_policy::reclaim::ReclaimName;

use super::Books;
use super::metered::MeteredTier;
use crate::sync::lock;

/// Copies in a page of compressed memory, until there are enough to measure it.
const RATIO_FIRST: f64 = 2.5;

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
fn free_below(limit: PageCount) -> PageCount {
    const WAITING_MAX: u64 = 256; // 1 MiB
    const WAITING_FROM: u64 = 8192; // 32 MiB
    let waiting = match limit.0 {
        WAITING_FROM.. => (limit.0 / 64).min(WAITING_MAX) / 2,
        _ => 0,
    };
    PageCount(limits::reserve(limit).0 * 5 / 4 + waiting)
}

impl Follower {
    /// For a client with this limit, before its first page.
    pub(crate) fn new(reclaim: &ReclaimName, limit: PageCount) -> Follower {
        Follower {
            state: Mutex::new(State {
                estimator: Estimator::new(reclaim, limit, free_below),
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
        let share = {
            let mut engine = self.engine();
            engine.uses().follow(estimator.sampling());
            engine.uses().take_seen(events);
            let limit = engine.books().limit().0 as f64;
            (limit, engine.books().share())
        };
        if events.is_empty() {
            return;
        }
        let (limit, target) = (share.0, share.1.map(|share| share.target.0));
        let states: Vec<_> = self.tiers.iter().map(MeteredTier::state).collect();
        estimator.feed(events, pool(&states, limit, target));
        events.clear();
    }

    /// The curve so far. `None` if no page is followed.
    ///
    /// * `faults`: those that read a tier, since the start.
    pub(crate) fn curve(&self, faults: u64) -> Option<Curve> {
        let follower = self.curve.as_ref()?;
        Some(lock(&follower.state).estimator.curve(faults))
    }

    /// Bytes of the estimator's tables.
    pub(crate) fn curve_bytes(&self) -> u64 {
        let follower = self.curve.as_ref();
        follower.map_or(0, |follower| {
            lock(&follower.state).estimator.metadata_bytes()
        })
    }
}

/// Compressed memory as it is now. `target`: bytes that the placement policy gives it, if it has
/// decided.
fn pool(tiers: &[TierState], limit: f64, target: Option<u64>) -> Pool {
    let memory = tiers
        .iter()
        .filter(|tier| tier.latency == LatencyClass::Memory);
    let (mut capacity, mut dram, mut copies) = (0, 0, PageCount(0));
    for tier in memory {
        capacity += tier.capacity.0;
        dram += tier.dram.0;
        copies.0 += tier.copies.0;
    }
    let most = target.unwrap_or(capacity).min(capacity);
    Pool {
        share: most as f64 / limit,
        ratio: pool_ratio(copies, undercroft_base::Bytes(dram)).unwrap_or(RATIO_FIRST),
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::Bytes;

    use super::*;

    #[test]
    fn pool_is_the_memory_tiers_alone_and_no_larger_than_its_target() {
        let tier = |latency, capacity, dram, copies| TierState {
            capacity: Bytes(capacity),
            held: Bytes(dram),
            dram: Bytes(dram),
            copies: PageCount(copies),
            packed: Bytes(dram),
            load_ns: 0,
            latency,
            demotes: false,
        };
        let tiers = [
            tier(LatencyClass::Memory, 50 << 20, 10 << 20, 5 * 2560),
            tier(LatencyClass::Device, 1 << 40, 1 << 20, 100),
        ];
        let limit = f64::from(100 << 20);
        let all = pool(&tiers, limit, None);
        assert_eq!((all.share, all.ratio), (0.5, 5.0));
        assert_eq!(pool(&tiers, limit, Some(20 << 20)).share, 0.2);
        assert_eq!(pool(&tiers[1..], limit, None).share, 0.0);
    }
}
