//! Cost of other limits: the miss-ratio curve as reports and snapshots give it.

use std::cmp::Ordering;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::Nanos;
use undercroft_engine::Stats;
use undercroft_policy::mrc::{Curve, Point};

/// A fault may have cost the program less than was measured, and more, by these parts. What it
/// waited for is measured. A program whose faults leave its caches cold, and that shares its CPUs
/// with the manager, pays for that too. docs/design/0018 has the measurements.
const LESS: f64 = 0.25;
const MORE: f64 = 1.25;

/// A time is given only if neither of its ends is further from it than this part of that end.
const DOUBT_MAX: f64 = 0.3;

/// The event that began the counting of a curve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CurveBegan {
    /// The program's start.
    #[default]
    Start,
    /// Another limit.
    Limit,
    /// Another manager: one was upgraded, or died.
    Manager,
}

/// The faults that other limits would have had since the start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MissRatioCurve {
    /// Most pages that were followed at once.
    pub pages_followed: u64,
    /// Pages for each of them.
    pub pages_each: u64,
    /// When the counting began, in the time of the manager that counts; 0 = with the program.
    #[serde(default)]
    pub since_seconds: f64,
    /// The event that it began with.
    #[serde(default)]
    pub began: CurveBegan,
    /// Mean time that the program lost by a fault; null = it could not be measured.
    pub fault_seconds: Option<f64>,
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
    /// About how long the program would have taken, to 30 %; null = that cannot be known from this
    /// run, as for all limits below the one in force.
    pub wall_seconds: Option<f64>,
    /// Hardly longer than this; null = not known.
    #[serde(default)]
    pub wall_seconds_most: Option<f64>,
}

/// Seconds without digits that say nothing.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

impl MissRatioCurve {
    /// `None` while no page has left memory: nothing is known of other limits then.
    ///
    /// * `stats`, `wall`: as counted in the time `wall.0`, which began at `wall.1`, with `began`.
    /// * `each`: what a fault cost the program, if that is known.
    pub fn of(
        curve: &Curve,
        in_force: u64,
        stats: &Stats,
        (wall, since, began): (Nanos, Nanos, CurveBegan),
        each: Option<Nanos>,
    ) -> Option<MissRatioCurve> {
        if stats.pages_swapped_out == 0 {
            return None;
        }
        let each = each.map(Nanos::seconds);
        let wall = wall.seconds();
        let now = stats.swap_in as f64;
        let point = |point: &Point| {
            let (about, most) = match (point.limit.0.cmp(&in_force), each) {
                (Ordering::Equal, _) => (Some(wall), Some(wall)),
                (Ordering::Greater, Some(each)) => wall_times(wall, now, point, each),
                _ => (None, None),
            };
            LimitPoint {
                memory_max_bytes: point.limit.0,
                in_force: point.limit.0 == in_force,
                swap_in: point.faults.round(),
                swap_in_least: point.least.round(),
                swap_in_most: point.most.map(f64::round),
                faults: (point.faults + stats.first_touch as f64).round(),
                wall_seconds: about.map(micros),
                wall_seconds_most: most.map(micros),
            }
        };
        Some(MissRatioCurve {
            pages_followed: curve.followed.0,
            pages_each: curve.one_in,
            since_seconds: micros(since.seconds()),
            began,
            fault_seconds: each.map(micros),
            limits: curve.points.iter().map(point).collect(),
        })
    }
}

/// About how long the program would have taken under a higher limit, if that can be known, and
/// hardly longer.
///
/// * `wall`, `now`: the time and the faults that there were.   * `each`: what one cost.
fn wall_times(wall: f64, now: f64, point: &Point, each: f64) -> (Option<f64>, Option<f64>) {
    let without = |faults: f64, part: f64| wall - (now - faults).max(0.0) * each * part;
    let about = without(point.faults, 1.0);
    let shortest = without(point.least, 1.0 + MORE);
    let longest = without(point.most.unwrap_or(now), 1.0 - LESS);
    if longest <= 0.0 {
        return (None, None); // the program did not wait for its faults one after the other
    }
    let known = about - shortest <= DOUBT_MAX * shortest && longest - about <= DOUBT_MAX * longest;
    (known.then_some(about), Some(longest))
}
