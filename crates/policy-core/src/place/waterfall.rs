//! New pages go to the fastest tier with room. The oldest pages of a full tier go to the next one.
//! Of several full tiers, the slowest is relieved first, so that the one above finds room in it.
//!
//! Room is made ahead: a tier that could not take the next two batches is relieved. Otherwise new
//! pages would go to a slower tier than old ones.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageNo, TierId};

use super::{BATCH_PAGES, LatencyClass, MIGRATE_PAGES_MAX, Migration, Place, TierOrder, TierState};

/// Part of a device that is kept free, and the most: it is relieved in the background, while
/// evictions go on.
const DEVICE_PART: u64 = 16;
const DEVICE_FREE_MAX: u64 = 64 << 20;

/// The oldest pages of a full tier go to the next one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waterfall;

/// Room that a tier should have for the next batches: at most a quarter of a small one.
pub fn wanted(tier: &TierState) -> Bytes {
    let batches = 2 * BATCH_PAGES * BASE_PAGE_BYTES as u64;
    let free = match tier.latency {
        LatencyClass::Memory | LatencyClass::Nvm => batches,
        LatencyClass::Device => {
            let part = (tier.capacity.0 / DEVICE_PART).min(DEVICE_FREE_MAX);
            part.max(batches)
        }
    };
    Bytes(free.min(tier.capacity.0 / 4))
}

/// How much moves at once. It is a quarter of a small tier, so that pages stored just now stay.
fn portion(tier: &TierState) -> PageCount {
    PageCount((tier.capacity_pages().0 / 4).clamp(1, MIGRATE_PAGES_MAX))
}

/// The next move of [`Waterfall`].
pub fn relieves(tiers: &[TierState]) -> Option<Migration> {
    let above_others = tiers.split_last()?.1;
    let is_full = |tier: &TierState| tier.demotes && tier.headroom() < wanted(tier);
    let from = above_others.iter().rposition(is_full)?;
    let pages = portion(&above_others[from]);
    // A full device is relieved in the background. Until then its pages go past it.
    let takes = |tier: &TierState| tier.headroom() >= pages.bytes();
    let past = tiers[from + 1..].iter().position(takes).unwrap_or(0);
    Some(Migration {
        from: TierId(from as u8),
        to: TierId((from + 1 + past) as u8),
        pages,
    })
}

impl Place for Waterfall {
    fn order(&mut self, _: PageNo, tiers: &[TierState]) -> TierOrder {
        TierOrder::downwards(tiers.len())
    }

    fn next_move(&mut self, _: Bytes, tiers: &[TierState]) -> Option<Migration> {
        relieves(tiers)
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
            copies: PageCount(held / BASE_PAGE_BYTES as u64),
            packed: Bytes(held),
            demotes: true,
            ..TierState::empty(LatencyClass::Memory)
        }
    }

    #[test]
    fn the_slowest_full_tier_is_relieved_a_mebibyte_at_a_time() {
        const MIB: u64 = 1 << 20;
        let move_on = |tiers: &[TierState]| {
            let found = relieves(tiers);
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

    /// The device is given more room than memory. While it is full, pages from above go past it.
    #[test]
    fn a_full_device_is_relieved_early_and_passed_meanwhile() {
        const MIB: u64 = 1 << 20;
        let device = |held: u64, demotes| TierState {
            latency: LatencyClass::Device,
            demotes,
            ..pool(64 * MIB, held)
        };
        let move_on = |tiers: &[TierState]| {
            let found = relieves(tiers);
            found.map(|m| (m.from.0, m.to.0))
        };
        let last = device(0, false);
        assert_eq!(move_on(&[device(60 * MIB, true), last]), None);
        assert_eq!(move_on(&[device(60 * MIB + 1, true), last]), Some((0, 1)));
        // Free places count, though every slab has some pages.
        let sparse = TierState {
            held: Bytes(64 * MIB),
            ..device(30 * MIB, true)
        };
        assert_eq!(move_on(&[sparse, last]), None);
        let full = pool(64 * MIB, 64 * MIB);
        assert_eq!(
            move_on(&[full, device(60 * MIB, false), last]),
            Some((0, 1))
        );
        assert_eq!(
            move_on(&[full, device(64 * MIB, false), last]),
            Some((0, 2))
        );
        let none = device(64 * MIB, false);
        assert_eq!(move_on(&[full, none, none]), Some((0, 1)));
    }

    #[test]
    fn a_tier_that_is_nearly_full_keeps_no_copy_of_a_page_that_came_back() {
        let keeps = |held, demotes| {
            let tier = TierState {
                demotes,
                latency: LatencyClass::Nvm,
                ..pool(100, held)
            };
            tier.keeps_copies()
        };
        assert!(keeps(0, true) && keeps(75, true));
        assert!(!keeps(76, true) && !keeps(100, true));
        assert!(keeps(100, false), "the last tier has nothing to drive out");
    }

    #[test]
    fn a_small_tier_keeps_a_quarter_free_and_moves_a_quarter() {
        let page = BASE_PAGE_BYTES as u64;
        let of = |held| {
            let found = relieves(&[pool(40 * page, held), pool(page, 0)]);
            found.map(|m| m.pages.0)
        };
        assert_eq!(of(30 * page), None);
        assert_eq!(of(30 * page + 1), Some(10));
        assert_eq!(relieves(&[pool(0, 0), pool(page, 0)]), None);
        let tiny = relieves(&[pool(page, page), pool(page, 0)]);
        assert_eq!(tiny.map(|m| m.pages.0), Some(1));
    }
}
