//! New pages go to the fastest tier with room. The oldest pages of a full tier go to the next one.
//! Of several full tiers, the slowest is relieved first, so that the one above finds room in it.
//!
//! Room is made ahead: a tier that could not take the next two batches is relieved. Otherwise new
//! pages would go to a slower tier than old ones.

use undercroft_base::{Bytes, PAGE_BYTES, PageCount, TierId};

use super::{BATCH_PAGES, MIGRATE_PAGES_MAX, Migration, PageFacts, Place, TierOrder, TierState};

/// The oldest pages of a full tier go to the next one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waterfall;

/// Room that a tier should have for the next batches: at most a quarter of a small one.
fn wanted(tier: &TierState) -> Bytes {
    let batches = 2 * BATCH_PAGES * PAGE_BYTES as u64;
    Bytes(batches.min(tier.capacity.0 / 4))
}

/// How much moves at once. It is a quarter of a small tier, so that pages stored just now stay.
fn portion(tier: &TierState) -> PageCount {
    PageCount((tier.capacity_pages().0 / 4).clamp(1, MIGRATE_PAGES_MAX))
}

impl Place for Waterfall {
    fn order(&mut self, _: PageFacts, tiers: &[TierState]) -> TierOrder {
        TierOrder::downwards(tiers.len())
    }

    fn migrate(&mut self, _: Bytes, tiers: &[TierState]) -> Option<Migration> {
        let above_others = tiers.split_last()?.1;
        let is_full = |tier: &TierState| tier.demotes && tier.headroom() < wanted(tier);
        let from = above_others.iter().rposition(is_full)?;
        Some(Migration {
            from: TierId(from as u8),
            to: TierId(from as u8 + 1),
            pages: portion(&above_others[from]),
        })
    }

    fn name(&self) -> &'static str {
        "waterfall"
    }
}

#[cfg(test)]
mod tests {
    use super::super::LatencyClass;
    use super::*;

    fn pool(capacity: u64, held: u64) -> TierState {
        TierState {
            capacity: Bytes(capacity),
            held: Bytes(held),
            dram: Bytes(held),
            copies: PageCount(held / PAGE_BYTES as u64),
            packed: Bytes(held),
            load_ns: 0,
            latency: LatencyClass::Memory,
            demotes: true,
        }
    }

    #[test]
    fn the_slowest_full_tier_is_relieved_a_mebibyte_at_a_time() {
        const MIB: u64 = 1 << 20;
        let move_on = |tiers: &[TierState]| {
            let found = Waterfall.migrate(Bytes(0), tiers);
            found.map(|m| (m.from.0, m.to.0, m.pages.0))
        };
        let (full, free) = (
            pool(64 * MIB, 64 * MIB - MIB / 2 + 1),
            pool(64 * MIB, 63 * MIB),
        );
        assert_eq!(move_on(&[full, free]), Some((0, 1, 256)));
        assert_eq!(move_on(&[free, full]), None, "the last has nowhere to go");
        assert_eq!(move_on(&[free, full, free]), Some((1, 2, 256)));
        assert_eq!(move_on(&[full, full, free]), Some((1, 2, 256)));
        let fixed = TierState {
            demotes: false,
            ..full
        };
        assert_eq!(move_on(&[fixed, free]), None);
        assert_eq!(move_on(&[fixed, full, free]), Some((1, 2, 256)));
        assert_eq!(move_on(&[]), None);
    }

    #[test]
    fn a_tier_that_is_nearly_full_keeps_no_copy_of_a_page_that_came_back() {
        let keeps = |held, demotes| {
            let tier = TierState {
                demotes,
                latency: LatencyClass::Nvm,
                ..pool(100, held)
            };
            Waterfall.keeps(Some(PageCount(1)), &tier)
        };
        assert!(keeps(0, true) && keeps(75, true));
        assert!(!keeps(76, true) && !keeps(100, true));
        assert!(keeps(100, false), "the last tier has nothing to drive out");
    }

    #[test]
    fn a_small_tier_keeps_a_quarter_free_and_moves_a_quarter() {
        let page = PAGE_BYTES as u64;
        let of = |held| {
            let found = Waterfall.migrate(Bytes(0), &[pool(40 * page, held), pool(page, 0)]);
            found.map(|m| m.pages.0)
        };
        assert_eq!(of(30 * page), None);
        assert_eq!(of(30 * page + 1), Some(10));
        assert_eq!(
            Waterfall.migrate(Bytes(0), &[pool(0, 0), pool(page, 0)]),
            None
        );
        let tiny = Waterfall.migrate(Bytes(0), &[pool(page, page), pool(page, 0)]);
        assert_eq!(tiny.map(|m| m.pages.0), Some(1));
    }
}
