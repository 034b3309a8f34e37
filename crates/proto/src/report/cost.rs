//! Cost of a run: peak use of each tier times its price, DRAM besides (RapidSwap §4.3), and how
//! much of a device's life its writes take. Prices are the user's: without one there is no cost.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, Price};
use undercroft_tier::spec::Rated;

/// Cost of a tier at its peak.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TierCost {
    /// As the user gave it (`price=`).
    pub dollars_per_gib: f64,
    /// The most bytes taken from the memory or device below, at this price.
    pub dollars_at_peak: f64,
}

/// How far writes have worn a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TierWear {
    /// Bytes that the device is rated for, as the user gave it (`tbw=`).
    pub tbw_bytes: f64,
    /// The part of it that this run has written: 1 = all.
    pub tbw_part: f64,
    /// Years in which all of it would be written at the mean rate of this run; null before the
    /// first write.
    pub tbw_years: Option<f64>,
}

/// DRAM and tiers, against the same pages all in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CostReport {
    /// Price of DRAM, as the user gave it (`--memory-price`).
    pub dram_dollars_per_gib: f64,
    /// DRAM at its peak. Without what `ram` tiers hold, if those have a price of their own.
    pub dram_dollars: f64,
    /// All tiers that are not in `dram_dollars`, each at its own peak.
    pub tiers_dollars: f64,
    /// Both.
    pub total_dollars: f64,
    /// The most pages that the program had, in memory and out of it.
    pub all_in_dram_bytes: u64,
    /// Cost of these in DRAM.
    pub all_in_dram_dollars: f64,
    /// The total as a part of that; null where that is nothing.
    pub part_of_all_in_dram: Option<f64>,
}

/// Figures of a tier's cost.
#[derive(Clone, Copy, Debug)]
pub struct TierUse {
    /// Its bytes are DRAM, or stand for memory with a price of its own.
    pub charged_to_limit: bool,
    /// Price and rating, as the user says.
    pub rated: Rated,
    /// Most bytes that it took from what is below.
    pub held_peak: Bytes,
    /// Bytes written to what is below.
    pub written: Bytes,
}

impl TierUse {
    /// The cost; `None` without a price.
    pub fn cost(&self) -> Option<TierCost> {
        let price = self.rated.price?;
        Some(TierCost {
            dollars_per_gib: price.dollars_per_gib(),
            dollars_at_peak: price.of(self.held_peak),
        })
    }

    /// The wear after `seconds`; `None` without a budget of writes.
    pub fn wear(&self, seconds: f64) -> Option<TierWear> {
        let budget = self.rated.budget?;
        Some(TierWear {
            tbw_bytes: budget.bytes(),
            tbw_part: budget.share(self.written),
            tbw_years: budget.years(self.written, seconds),
        })
    }

    fn is_dram(&self) -> bool {
        self.charged_to_limit && self.rated.price.is_none()
    }
}

impl CostReport {
    /// The cost at the peaks: `[resident pages, resident pages and what is in memory of tiers, all
    /// pages]`. `None`: DRAM has no price, or a tier that was used and is not DRAM has none; or no
    /// page was counted, because the program was below its limit all the time.
    pub fn of(
        memory: Option<Price>,
        [resident, dram, pages]: [Bytes; 3],
        tiers: &[TierUse],
    ) -> Option<CostReport> {
        let memory = memory.filter(|_| pages > Bytes(0))?;
        let own_price = |tier: &TierUse| tier.charged_to_limit && !tier.is_dram();
        let dram = if tiers.iter().any(own_price) {
            resident
        } else {
            dram
        };
        let mut tiers_dollars = 0.0;
        for tier in tiers.iter().filter(|tier| !tier.is_dram()) {
            tiers_dollars += match tier.cost() {
                Some(cost) => cost.dollars_at_peak,
                None if tier.held_peak == Bytes(0) => 0.0,
                None => return None,
            };
        }
        let dram_dollars = memory.of(dram);
        let total_dollars = dram_dollars + tiers_dollars;
        let all_in_dram_dollars = memory.of(pages);
        let part = total_dollars / all_in_dram_dollars;
        Some(CostReport {
            dram_dollars_per_gib: memory.dollars_per_gib(),
            dram_dollars,
            tiers_dollars,
            total_dollars,
            all_in_dram_bytes: pages.0,
            all_in_dram_dollars,
            part_of_all_in_dram: part.is_finite().then_some(part),
        })
    }
}

/// On one line.
impl fmt::Display for CostReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "${:.4} at peak (DRAM ${:.4}, tiers ${:.4})",
            self.total_dollars, self.dram_dollars, self.tiers_dollars
        )?;
        match self.part_of_all_in_dram {
            Some(part) => write!(f, ", {:.0} % of all in DRAM", part * 100.0),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn tier(charged_to_limit: bool, price: Option<&str>, held: u64) -> TierUse {
        TierUse {
            charged_to_limit,
            rated: Rated {
                price: price.map(|text| text.parse().expect("a price")),
                budget: None,
            },
            held_peak: Bytes(held),
            written: Bytes(0),
        }
    }

    fn cost(tiers: &[TierUse]) -> Option<CostReport> {
        let peaks = [6 * GIB, 8 * GIB, 12 * GIB].map(Bytes);
        CostReport::of("4".parse().ok(), peaks, tiers)
    }

    #[test]
    fn dram_and_tiers_are_paid_for_once_each() {
        let file = tier(false, Some("0.5"), 4 * GIB);
        let of = cost(&[tier(true, None, 2 * GIB), file]).expect("all priced");
        assert_eq!((of.dram_dollars, of.tiers_dollars), (32.0, 2.0));
        assert_eq!((of.total_dollars, of.all_in_dram_dollars), (34.0, 48.0));
        assert_eq!(of.part_of_all_in_dram, Some(34.0 / 48.0));
        // The pool stands for memory with a price of its own.
        let of = cost(&[tier(true, Some("2"), 2 * GIB), file]).expect("all priced");
        assert_eq!((of.dram_dollars, of.tiers_dollars), (24.0, 6.0));
    }

    #[test]
    fn without_a_price_there_is_no_cost() {
        let none = tier(false, None, 4 * GIB);
        assert_eq!(none.cost(), None);
        assert_eq!(cost(&[none]), None);
        assert!(cost(&[tier(false, None, 0)]).is_some(), "not used");
        assert_eq!(CostReport::of(None, [Bytes(1); 3], &[]), None);
        let uncounted = [Bytes(0), Bytes(4096), Bytes(0)];
        assert_eq!(CostReport::of("4".parse().ok(), uncounted, &[]), None);
        let free = CostReport::of("0".parse().ok(), [Bytes(1); 3], &[]).expect("a price");
        assert_eq!(free.part_of_all_in_dram, None);
    }

    #[test]
    fn wear_is_a_part_of_the_budget_and_a_number_of_years() {
        let mut tier = tier(false, None, 0);
        assert_eq!(tier.wear(1.0), None);
        tier.rated.budget = Some("100G".parse().expect("a budget"));
        assert_eq!(tier.wear(1.0).and_then(|wear| wear.tbw_years), None);
        tier.written = Bytes(25_000_000_000);
        let wear = tier.wear(365.25 * 86_400.0).expect("a budget");
        assert_eq!((wear.tbw_bytes, wear.tbw_part), (1e11, 0.25));
        assert!((wear.tbw_years.expect("a rate") - 4.0).abs() < 1e-9);
    }
}
