//! Whether a bound can be kept at all: the least limit that the tiers allow, from their measured
//! times (NVSwap Eq. 2 asks the same of the sizes of buffer and NV-zone).
//!
//! A page-in takes the way through the manager and one read. Page-ins are taken to be spread evenly
//! over the pages that are not in memory, which are in the fastest tiers that have room. Without
//! their number, only the fastest tier counts. So a bound that is refused cannot be kept. One that
//! is admitted may still be missed: by the load, or by a tier that is slower than it was.

use undercroft_base::Nanos;

use crate::bound::{LatencyBound, Percentile};

/// A tier, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The read of a page, of an idle tier.
    pub read: Nanos,
    /// Pages that it can hold.
    pub pages: u64,
}

/// Needs of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The least time of a page-in besides its read.
    pub path: Nanos,
    /// Its pages that are not in memory; `None`: unknown.
    pub pages: Option<u64>,
}

/// The bound is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the latency bound {bound} cannot be kept with these tiers: a page-in takes {least} at least; \
     {could} could be kept; or give a faster tier",
    could = bound.suggest(*least)
)]
pub struct Refused {
    /// The bound.
    pub bound: LatencyBound,
    /// The least limit that could be kept.
    pub least: Nanos,
}

/// The least limit that can be kept for a percentile. O(tiers).
///
/// * `tiers`: in any order. Panics if there is none.
pub fn least(percentile: Percentile, demand: Demand, tiers: &[Capacity]) -> Nanos {
    assert!(!tiers.is_empty(), "pages that leave need a tier");
    let mut tiers = tiers.to_vec();
    tiers.sort_unstable_by_key(|tier| tier.read);
    let mut left = demand.pages.map_or(0, |pages| percentile.rank(pages));
    let mut read = Nanos(0);
    for tier in tiers {
        read = tier.read;
        left = left.saturating_sub(tier.pages);
        if left == 0 {
            break;
        }
    }
    Nanos(read.0 + demand.path.0)
}

/// Errors: no combination of the tiers keeps the bound.
pub fn admit(bound: LatencyBound, demand: Demand, tiers: &[Capacity]) -> Result<(), Refused> {
    let least = least(bound.percentile, demand, tiers);
    if bound.limit < least {
        return Err(Refused { bound, least });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Capacity = Capacity {
        read: Nanos(1_000),
        pages: 500,
    };
    const SLOW: Capacity = Capacity {
        read: Nanos(90_000),
        pages: 100_000,
    };

    #[test]
    fn least_limit_is_that_of_the_tier_in_which_the_percentile_falls() {
        for (pages, percentile, tiers, micros) in [
            (None, "99", vec![SLOW, FAST], 3),
            (None, "99", vec![SLOW], 92),
            (Some(500), "99", vec![FAST, SLOW], 3),
            // 505 pages: rank 500 of p99 is in the fast tier; 506: rank 501 is not.
            (Some(505), "99", vec![FAST, SLOW], 3),
            (Some(506), "99", vec![FAST, SLOW], 92),
            (Some(1000), "50", vec![FAST, SLOW], 3),
            (Some(1_000_000), "99", vec![FAST, SLOW], 92),
        ] {
            let demand = Demand {
                path: Nanos(2_000),
                pages,
            };
            let percentile = percentile.parse().expect("a percentile");
            let found = least(percentile, demand, &tiers);
            assert_eq!(found, Nanos(micros * 1000), "{pages:?} {percentile}");
        }
    }

    #[test]
    fn a_refusal_has_the_limit_that_could_be_kept() {
        let demand = Demand {
            path: Nanos(2_000),
            pages: None,
        };
        let of = |text: &str| admit(text.parse().expect("a bound"), demand, &[SLOW]);
        assert_eq!(of("p99=92us"), Ok(()));
        let refused = of("p99=91us").expect_err("too short").to_string();
        assert!(refused.contains("p99=91us cannot"), "{refused}");
        assert!(refused.contains("p99=92us could"), "{refused}");
    }
}
