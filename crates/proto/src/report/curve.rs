//! Cost of other limits: the miss-ratio curve as reports and snapshots give it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::Nanos;
use undercroft_engine::Stats;
use undercroft_policy::mrc::{Curve, Point};

/// Time of a fault besides that between reading and answering it: the program waits for its pager,
/// and back.
const HAND_OVER_SECONDS: f64 = 8e-6;

/// The faults that other limits would have had since the start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MissRatioCurve {
    /// Most pages that were followed at once.
    pub pages_followed: u64,
    /// Pages for each of them.
    pub pages_each: u64,
    /// When the counting began: 0 = with the program; later = when its limit was changed last.
    #[serde(default)]
    pub since_seconds: f64,
    /// Mean time that a thread waited for a fault.
    pub fault_seconds: f64,
    /// Smallest limit first.
    pub limits: Vec<LimitPoint>,
}

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LimitPoint {
    /// The limit.
    pub memory_max_bytes: u64,
    /// True for the limit in force.
    pub in_force: bool,
    /// Faults that would have read a tier.
    pub swap_in: f64,
    /// Hardly fewer than this.
    pub swap_in_least: f64,
    /// Hardly more than this; null = they may be far more.
    pub swap_in_most: Option<f64>,
    /// First touches, too.
    pub faults: f64,
    /// About how long the program would have taken.
    pub wall_seconds: f64,
}

/// Seconds without digits that say nothing.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

impl MissRatioCurve {
    /// `None` while no page has left memory: nothing is known of other limits then.
    ///
    /// * `stats`, `wall`: as counted in the time `wall.0`, which began at `wall.1`.
    /// * `fault_latency`: mean, from reading a fault to answering it.
    pub fn of(
        curve: &Curve,
        in_force: u64,
        stats: &Stats,
        (wall, since): (Nanos, Nanos),
        fault_latency: Nanos,
    ) -> Option<MissRatioCurve> {
        if stats.pages_swapped_out == 0 {
            return None;
        }
        let each = fault_latency.seconds() + HAND_OVER_SECONDS;
        let now = stats.swap_in as f64;
        // No limit saves more time than faults took.
        let least = (wall.seconds() - now * each).max(0.0);
        let point = |point: &Point| LimitPoint {
            memory_max_bytes: point.limit.0,
            in_force: point.limit.0 == in_force,
            swap_in: point.faults.round(),
            swap_in_least: point.least.round(),
            swap_in_most: point.most.map(f64::round),
            faults: (point.faults + stats.first_touch as f64).round(),
            wall_seconds: micros((wall.seconds() + (point.faults - now) * each).max(least)),
        };
        Some(MissRatioCurve {
            pages_followed: curve.followed.0,
            pages_each: curve.one_in,
            since_seconds: micros(since.seconds()),
            fault_seconds: micros(each),
            limits: curve.points.iter().map(point).collect(),
        })
    }
}
