//! How DRAM is divided among clients: protection first, then where one more page saves the most
//! waiting.
//!
//! A client whose miss-ratio curve is known says how much it would wait at each limit. Memory goes
//! to the steepest part of the curves' lower convex hulls, times the client's weight, as long as
//! there is some (the rule of marginal worth: Stone, Turek, Wolf, *Optimal Partitioning of Cache
//! Memory*, IEEE ToC 1992). A client without a curve gets its share by weight, or as much as it can
//! use. What is left goes to all, by weight.

use undercroft_base::{BASE_PAGE_BYTES, Bytes};

/// Memory moves by curves only if that saves this part of the waiting, and some of it.
const GAIN_MIN: f64 = 0.05;
const STALL_MIN: f64 = 0.01;

/// Smallest change of a limit, and the smallest while a client waits.
pub const STEP_MIN: Bytes = Bytes(1 << 20);
const STEP_URGENT: u64 = 64 << 10;

/// Bounds of a client's memory, and what memory is worth to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Want {
    /// Its weight, 1 at least.
    pub weight: u32,
    /// Its protection: it always gets this much.
    pub least: Bytes,
    /// Its ceiling: it never gets more than this.
    pub most: Bytes,
    /// More than this is of no use to it now, as far as is known.
    pub enough: Bytes,
    /// Whether it waits for its pages now.
    pub waits: bool,
    /// Its curve; empty = unknown.
    pub curve: Vec<Waits>,
}

/// A point of a curve: at this limit, a client waits for this part of the time, summed over its
/// threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waits {
    /// The limit.
    pub limit: Bytes,
    /// Seconds a second.
    pub stall: f64,
}

/// The protections do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the protected memory of all clients is {needed}, and there is {memory}")]
pub struct Short {
    /// Sum of the protections.
    pub needed: Bytes,
    /// Memory to divide.
    pub memory: Bytes,
}

/// Divides `memory`. Shares are whole pages, and never more than `memory` in all. O(n * points *
/// log).
///
/// Errors: the protections alone are more than `memory`.
pub fn divide(memory: Bytes, wants: &[Want]) -> Result<Vec<Bytes>, Short> {
    let wants: Vec<Want> = wants.iter().map(sane).collect();
    let needed: u64 = wants.iter().map(|want| want.least.0).sum();
    if needed > memory.0 {
        let needed = Bytes(needed);
        return Err(Short { needed, memory });
    }
    let mut shares: Vec<u64> = wants.iter().map(|want| want.least.0).collect();
    fill(memory.0 - needed, &mut shares, &wants, |want| want.most.0);
    let fair = shares.clone();
    for ((share, want), fair) in shares.iter_mut().zip(&wants).zip(fair) {
        // Nothing is known of limits below the first point.
        let known = want.curve.first().map_or(want.enough, |first| first.limit);
        // A curve tells little of limits far from the present one. So a client that waits keeps
        // half of its share by weight, however flat its curve is.
        let kept = if want.waits { fair / 2 } else { 0 };
        *share = fair.min(known.0.max(kept)).max(want.least.0);
    }
    let mut left = memory.0 - shares.iter().sum::<u64>();
    for slope in slopes(&wants, &shares) {
        let take = slope.bytes.min(left);
        shares[slope.client] += take;
        left -= take;
    }
    fill(left, &mut shares, &wants, |want| want.most.0);
    let pages = |share: &u64| Bytes(share / BASE_PAGE_BYTES as u64 * BASE_PAGE_BYTES as u64);
    Ok(shares.iter().map(pages).collect())
}

/// The limits that clients come to next. `None`: those they have are as good.
///
/// * `limits`: those in force, of the first of `wants`. The others have none yet.
/// * `stirred`: a client has come or gone. Otherwise memory moves by curves, which are estimates: a
///   client gives a quarter at a time.
///
/// Errors: as [`divide`].
pub fn targets(
    memory: Bytes,
    wants: &[Want],
    limits: &[Bytes],
    stirred: bool,
) -> Result<Option<Vec<Bytes>>, Short> {
    let mut targets = divide(memory, wants)?;
    if stirred {
        return Ok(Some(targets));
    }
    let (now, then) = (stall(wants, limits), stall(wants, &targets));
    if now < STALL_MIN || then > now * (1.0 - GAIN_MIN) {
        return Ok(None);
    }
    for (target, limit) in targets.iter_mut().zip(limits) {
        *target = (*target).max(Bytes(limit.0 - limit.0 / 4));
    }
    Ok(Some(targets))
}

/// The rest of `memory` for the protection of another client.
pub fn unprotected(memory: Bytes, protected: impl Iterator<Item = Bytes>) -> Bytes {
    let protected = protected.fold(0, |sum: u64, of| sum.saturating_add(of.0));
    Bytes(memory.0.saturating_sub(protected))
}

/// Whether a client with this limit is asked to come down to `target`. Smaller changes wait, unless
/// it is `urgent`: a client waits to be admitted, and many small parts are its share.
pub fn gives(limit: Bytes, target: Bytes, urgent: bool) -> bool {
    let less = limit.0.saturating_sub(target.0);
    let step = STEP_MIN.0.max(limit.0 / 64).min(1 << 40);
    less >= if urgent { STEP_URGENT } else { step }
}

/// Memory that is enough for a client that uses this much and has not swapped: an eighth and 8 MiB
/// more.
pub fn enough(uses: Bytes) -> Bytes {
    Bytes(uses.0 + uses.0 / 8 + (8 << 20))
}

/// Whether a client that waited `waited` of `passed` seconds counts as one that waits.
pub fn is_waiting(waited: f64, passed: f64) -> bool {
    waited > passed * STALL_MIN
}

/// The waits of all clients with a curve, weighted, with these shares.
pub fn stall(wants: &[Want], shares: &[Bytes]) -> f64 {
    let each = wants.iter().zip(shares);
    each.map(|(want, share)| {
        let want = sane(want);
        f64::from(want.weight) * at(&hull(&want.curve), share.0)
    })
    .sum()
}

/// The mean of several curves of one client, at the limits of the last one. A curve counts where it
/// has points on both sides.
pub fn mean(curves: &[Vec<Waits>]) -> Vec<Waits> {
    let Some(last) = curves.last() else {
        return Vec::new();
    };
    let covers = |curve: &&Vec<Waits>, limit: Bytes| {
        let (first, last) = (curve.first(), curve.last());
        first.is_some_and(|it| it.limit <= limit) && last.is_some_and(|it| it.limit >= limit)
    };
    let mean_at = |point: &Waits| {
        let known = curves.iter().filter(|curve| covers(curve, point.limit));
        let stalls: Vec<f64> = known.map(|curve| at(curve, point.limit.0)).collect();
        Waits {
            limit: point.limit,
            stall: stalls.iter().sum::<f64>() / stalls.len().max(1) as f64,
        }
    };
    last.iter().map(mean_at).collect()
}

/// A want that cannot mislead: a weight of 1 at least, protection within the maximum, a curve of
/// finite points in order.
fn sane(want: &Want) -> Want {
    let least = want.least.min(want.most);
    let mut curve: Vec<Waits> = want.curve.clone();
    curve.retain(|point| point.stall.is_finite() && point.stall >= 0.0);
    curve.sort_by_key(|point| point.limit);
    curve.dedup_by_key(|point| point.limit);
    Want {
        weight: want.weight.max(1),
        least,
        most: want.most,
        enough: want.enough.clamp(least, want.most),
        waits: want.waits,
        curve,
    }
}

/// Gives `left` bytes to clients by their weights, each up to `most`. A client that has enough
/// leaves the rest to the others.
fn fill(mut left: u64, shares: &mut [u64], wants: &[Want], most: impl Fn(&Want) -> u64) {
    loop {
        let open: Vec<usize> = (0..wants.len())
            .filter(|at| shares[*at] < most(&wants[*at]))
            .collect();
        let weights: u64 = open.iter().map(|at| u64::from(wants[*at].weight)).sum();
        if left == 0 || open.is_empty() {
            return;
        }
        let before = left;
        for at in &open {
            let part = u128::from(before) * u128::from(wants[*at].weight) / u128::from(weights);
            let take = (part as u64).min(most(&wants[*at]) - shares[*at]).min(left);
            shares[*at] += take;
            left -= take;
        }
        if left == before {
            return; // less than a byte each
        }
    }
}

/// A part of a client's hull.
struct Slope {
    client: usize,
    bytes: u64,
    /// Weighted seconds a second that each byte saves.
    worth: f64,
}

/// The parts of all hulls above the shares, the steepest first.
fn slopes(wants: &[Want], shares: &[u64]) -> Vec<Slope> {
    let mut found = Vec::new();
    for (client, (want, share)) in wants.iter().zip(shares).enumerate() {
        for pair in hull(&want.curve).windows(2) {
            let from = pair[0].limit.0.max(*share);
            let to = pair[1].limit.0.min(want.most.0);
            let width = (pair[1].limit.0 - pair[0].limit.0) as f64;
            let worth = (pair[0].stall - pair[1].stall) / width * f64::from(want.weight);
            if to > from && worth > 0.0 {
                let bytes = to - from;
                found.push(Slope {
                    client,
                    bytes,
                    worth,
                });
            }
        }
    }
    // Stable: parts of one client that are equally steep stay in order.
    found.sort_by(|a, b| b.worth.total_cmp(&a.worth));
    found
}

/// The lower convex hull of a curve in order of its limits.
fn hull(curve: &[Waits]) -> Vec<Waits> {
    let mut found: Vec<Waits> = Vec::new();
    for point in curve {
        while let [.., first, second] = found[..] {
            let (x1, x2) = (
                (second.limit.0 - first.limit.0) as f64,
                (point.limit.0 - first.limit.0) as f64,
            );
            let is_above = (second.stall - first.stall) * x2 >= (point.stall - first.stall) * x1;
            if !is_above {
                break;
            }
            found.pop();
        }
        found.push(*point);
    }
    found
}

/// The value of a curve in order of its limits at one of them; the nearest end outside of it.
fn at(hull: &[Waits], limit: u64) -> f64 {
    let (Some(first), Some(last)) = (hull.first(), hull.last()) else {
        return 0.0;
    };
    let next = hull.partition_point(|point| point.limit.0 <= limit);
    if next == 0 {
        return first.stall;
    }
    let Some(above) = hull.get(next) else {
        return last.stall;
    };
    let below = hull[next - 1];
    let part = (limit - below.limit.0) as f64 / (above.limit.0 - below.limit.0) as f64;
    below.stall + part * (above.stall - below.stall)
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn small_parts_are_given_only_while_a_client_waits() {
        let gives = |limit: u64, less: u64, urgent| {
            let limit = limit * MIB;
            gives(Bytes(limit), Bytes(limit - less), urgent)
        };
        assert!(!gives(20, MIB / 2, false) && gives(20, MIB / 2, true));
        assert!(gives(20, MIB, false));
        assert!(!gives(640, 9 * MIB, false) && gives(640, 10 * MIB, false));
        assert!(!gives(20, 0, true) && !gives(20, 100, true));
        assert!(
            !super::gives(Bytes(MIB), Bytes(2 * MIB), true),
            "it shall have more"
        );
    }

    #[test]
    fn limits_move_by_curves_only_if_that_saves_some_waiting_and_a_quarter_at_a_time() {
        let waiting = Want {
            waits: true,
            ..with_curve(&[(40, 8.0), (80, 0.1)])
        };
        let idle = with_curve(&[(20, 0.0), (60, 0.0)]);
        let wants = [waiting, idle.clone()];
        let limits = [Bytes(50 * MIB), Bytes(50 * MIB)];
        let memory = Bytes(100 * MIB);
        let divided = divide(memory, &wants).expect("enough");
        let by_curves = targets(memory, &wants, &limits, false).expect("enough");
        let by_curves = by_curves.expect("it saves waiting");
        assert!(divided[1] < by_curves[1], "{divided:?} {by_curves:?}");
        assert_eq!(by_curves[1], Bytes(50 * MIB - 50 * MIB / 4));
        assert_eq!(targets(memory, &wants, &limits, true), Ok(Some(divided)));
        let calm = [idle.clone(), idle];
        assert_eq!(
            targets(memory, &calm, &limits, false),
            Ok(None),
            "nothing to save"
        );
    }

    fn blind(weight: u32, least: u64, most: u64) -> Want {
        Want {
            weight,
            least: Bytes(least * MIB),
            most: Bytes(most * MIB),
            enough: Bytes(most * MIB),
            waits: false,
            curve: Vec::new(),
        }
    }

    fn with_curve(points: &[(u64, f64)]) -> Want {
        let point = |(limit, stall): &(u64, f64)| Waits {
            limit: Bytes(limit * MIB),
            stall: *stall,
        };
        Want {
            curve: points.iter().map(point).collect(),
            ..blind(1, 0, 10_000)
        }
    }

    fn mib(shares: &[Bytes]) -> Vec<u64> {
        shares.iter().map(|share| share.0 / MIB).collect()
    }

    fn divided(memory: u64, wants: &[Want]) -> Vec<u64> {
        mib(&divide(Bytes(memory * MIB), wants).expect("it fits"))
    }

    #[test]
    fn without_curves_weights_decide_within_protection_and_maximum() {
        assert_eq!(
            divided(90, &[blind(1, 0, 1000), blind(2, 0, 1000)]),
            [30, 60]
        );
        let protected = [blind(1, 50, 1000), blind(1, 0, 1000)];
        assert_eq!(divided(90, &protected), [70, 20], "protection comes first");
        assert_eq!(divided(90, &[blind(1, 0, 10), blind(1, 0, 1000)]), [10, 80]);
        assert_eq!(divided(90, &[blind(1, 0, 10), blind(1, 0, 20)]), [10, 20]);
        assert_eq!(divided(90, &[]), [0; 0]);
        let short = divide(Bytes(90 * MIB), &[blind(1, 50, 60), blind(1, 50, 60)]);
        assert_eq!(short.map_err(|short| short.needed.0 / MIB), Err(100));
    }

    #[test]
    fn a_client_that_cannot_use_its_share_leaves_it_to_one_whose_curve_falls() {
        let mut idle = blind(1, 0, 1000);
        idle.enough = Bytes(10 * MIB);
        let steep = with_curve(&[(20, 0.9), (80, 0.0)]);
        assert_eq!(divided(90, &[idle, steep]), [10, 80]);
    }

    #[test]
    fn memory_goes_where_it_saves_most_and_a_weight_counts() {
        let (flat, steep) = ([(20, 0.4), (60, 0.3)], [(20, 0.9), (60, 0.1)]);
        let mut wants = [with_curve(&flat), with_curve(&steep)];
        assert_eq!(divided(80, &wants), [20, 60]);
        wants[0].weight = 100;
        assert_eq!(divided(80, &wants), [60, 20]);
        // What waits keeps half of its share by weight.
        let mut waits = [with_curve(&[(5, 0.1), (10, 0.1)]), with_curve(&steep)];
        assert_eq!(divided(60, &waits)[0], 5);
        waits[0].waits = true;
        assert_eq!(divided(60, &waits)[0], 15);
        // A cliff behind a plateau is worth its mean slope: the hull sees past the plateau.
        let cliff = with_curve(&[(20, 0.8), (50, 0.8), (60, 0.0)]);
        assert_eq!(divided(80, &[with_curve(&flat), cliff]), [20, 60]);
    }

    #[test]
    fn the_mean_of_curves_counts_each_where_it_is_known() {
        let curve = |points: &[(u64, f64)]| with_curve(points).curve;
        let curves = [
            curve(&[(10, 0.8), (20, 0.4)]),
            curve(&[(15, 0.2), (25, 0.0)]),
        ];
        let mean = mean(&curves);
        assert_eq!(mean.len(), 2);
        assert!((mean[0].stall - 0.4).abs() < 1e-9, "0.6 and 0.2: {mean:?}");
        assert_eq!(mean[1].stall, 0.0, "only the second");
        assert_eq!(super::mean(&[]), []);
    }

    #[test]
    fn shares_keep_every_promise_whatever_clients_say() {
        let mut random = Random::new(77);
        for _ in 0..3000 {
            let memory = Bytes(random.below(1 << 34));
            let wants: Vec<Want> = (0..random.index(7))
                .map(|_| {
                    let point = |_| Waits {
                        limit: Bytes(random.below(1 << 33)),
                        stall: [0.5, f64::NAN, -1.0, f64::INFINITY, 1e300][random.index(5)],
                    };
                    let curve = (0..3).map(point).collect();
                    Want {
                        weight: random.below(5) as u32,
                        least: Bytes(random.below(1 << 32)),
                        most: Bytes(random.below(1 << 34)),
                        enough: Bytes(random.below(1 << 34)),
                        waits: random.below(2) == 0,
                        curve,
                    }
                })
                .collect();
            let Ok(shares) = divide(memory, &wants) else {
                continue;
            };
            let sum: u64 = shares.iter().map(|share| share.0).sum();
            assert!(sum <= memory.0);
            let page = BASE_PAGE_BYTES as u64;
            for (want, share) in wants.iter().zip(&shares) {
                assert!(share.0 <= want.most.0);
                assert!(share.0 + page > want.least.min(want.most).0);
            }
            let room = wants.iter().zip(&shares);
            let room: u64 = room.map(|(want, share)| want.most.0 - share.0).sum();
            let slack = (wants.len() as u64 + 1) * page;
            assert!(sum + slack > memory.0 || room <= slack, "memory lies idle");
        }
    }

    /// Convex curves of whole MiB: every division is tried.
    #[test]
    fn shares_are_as_good_as_the_best_of_all_divisions() {
        let mut random = Random::new(78);
        for round in 0..200 {
            let wants: Vec<Want> = (0..3)
                .map(|_| {
                    let mut falls: Vec<f64> = (0..8).map(|_| random.below(100) as f64).collect();
                    falls.sort_by(|a, b| b.total_cmp(a));
                    let total: f64 = falls.iter().sum();
                    let mut points = vec![(0, total)];
                    let mut stall = total;
                    for (at, fall) in falls.iter().enumerate() {
                        stall -= fall;
                        points.push((at as u64 + 1, stall));
                    }
                    with_curve(&points)
                })
                .collect();
            let shares = divide(Bytes(9 * MIB), &wants).expect("it fits");
            let mut best = f64::MAX;
            for a in 0..=9u64 {
                for b in 0..=9 - a {
                    let tried = [a, b, 9 - a - b].map(|mib| Bytes(mib * MIB));
                    best = best.min(stall(&wants, &tried));
                }
            }
            let got = stall(&wants, &shares);
            assert!(got <= best + 1e-6, "round {round}: {got} against {best}");
        }
    }
}
