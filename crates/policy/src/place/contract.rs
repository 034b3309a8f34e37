//! The contract of [`Place`]: every implementation passes it.

use proptest::prelude::*;
use undercroft_base::{Bytes, PageCount, PageNo, TierId};

use super::{LatencyClass, Loaded, MIGRATE_PAGES_MAX, NAMES, Place, TIERS_MAX, TierState, by_name};
use undercroft_seeded::Random;

/// A tier of any size: empty, full, or overfull because its capacity was lowered.
fn tier(random: &mut Random) -> TierState {
    let bits = random.below(40);
    let capacity = random.below(1 << bits);
    let held = match random.below(4) {
        0 => 0,
        1 => capacity,
        2 => capacity.saturating_add(random.below(1 << 30)),
        _ => random.below(capacity + 1),
    };
    TierState {
        page: undercroft_base::PageSize::Base,
        capacity: Bytes(capacity),
        held: Bytes(held),
        dram: Bytes(random.below(held + 1)),
        copies: PageCount(if held == 0 { 0 } else { random.below(1 << 20) }),
        packed: Bytes(random.below(held + 1)),
        load_ns: random.below(1 << 30),
        latency: [
            LatencyClass::Memory,
            LatencyClass::Nvm,
            LatencyClass::Device,
        ][random.below(3) as usize],
        demotes: random.below(3) != 0,
    }
}

fn check(
    place: &mut dyn Place,
    limit: Bytes,
    tiers: &[TierState],
    page: PageNo,
) -> Result<(), TestCaseError> {
    let order = place.order(page, tiers);
    let mut seen = [false; TIERS_MAX];
    for tier in order.iter().map(|tier| usize::from(tier.0)) {
        prop_assert!(tier < tiers.len(), "a tier that is not there");
        prop_assert!(!std::mem::replace(&mut seen[tier], true), "a tier twice");
    }
    prop_assert_eq!(tiers.is_empty(), order.get(0).is_none(), "no tier is tried");
    if let Some(migration) = place.next_move(limit, tiers) {
        let (from, to) = (usize::from(migration.from.0), usize::from(migration.to.0));
        prop_assert!(from < tiers.len() && to < tiers.len() && from != to);
        prop_assert!(tiers[from].demotes, "pages of this tier cannot move on");
        prop_assert!(tiers[from].held.0 > 0, "an empty tier is relieved");
        prop_assert!((1..=MIGRATE_PAGES_MAX).contains(&migration.pages.0));
    }
    Ok(())
}

/// The page came from a tier, if there is one.
fn loaded(
    place: &mut dyn Place,
    no: PageNo,
    random: &mut Random,
    tiers: &[TierState],
    waited: u64,
) {
    let from = random.below(tiers.len().max(1) as u64) as usize;
    let bits = random.below(24);
    let distance = (waited > 0).then(|| PageCount(random.below(1 << bits)));
    if let Some(tier) = tiers.get(from) {
        place.loaded(Loaded {
            no,
            from: TierId(from as u8),
            tier,
            distance,
            waited,
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_placement_names_tiers_that_are_there_once_and_relieves_what_may_be(seed: u64, count in 0..=TIERS_MAX) {
        for name in NAMES {
            let mut place = by_name(name).expect("a known policy");
            let shown = place.shown();
            prop_assert!(shown.reserve_part > 0);
            let mut random = Random::new(seed);
            for no in 0..200 {
                let tiers: Vec<TierState> = (0..count).map(|_| tier(&mut random)).collect();
                for _ in 0..random.below(20) {
                    let page = PageNo(random.below(1 << 20) as u32);
                    loaded(place.as_mut(), page, &mut random, &tiers, 1);
                }
                let bits = random.below(40);
                let limit = Bytes(random.below(1 << bits));
                check(place.as_mut(), limit, &tiers, PageNo(no))?;
            }
        }
    }
}

/// Migrations that are carried out come to an end: each makes room, until there is nothing left to
/// move.
#[test]
fn every_placement_is_content_after_its_migrations() {
    for name in NAMES {
        let mut place = by_name(name).expect("a known policy");
        let mut random = Random::new(7);
        for _ in 0..200 {
            let count = 1 + random.below(TIERS_MAX as u64) as usize;
            let mut tiers: Vec<TierState> = (0..count).map(|_| tier(&mut random)).collect();
            for state in &mut tiers {
                state.capacity = Bytes(state.capacity.0.min(1 << 24));
                state.held = Bytes(state.held.0.min(1 << 24));
                state.packed = state.held;
            }
            // The last takes everything.
            tiers[count - 1].capacity = Bytes(1 << 50);
            let mut rounds = 0;
            while let Some(migration) = place.next_move(Bytes(1 << 24), &tiers) {
                let (from, to) = (usize::from(migration.from.0), usize::from(migration.to.0));
                let bytes = migration.pages.bytes().0.min(tiers[from].held.0);
                tiers[from].held.0 -= bytes;
                tiers[to].held.0 += bytes;
                tiers[from].packed = tiers[from].held;
                tiers[to].packed = tiers[to].held;
                rounds += 1;
                assert!(rounds < 1 << 24, "{name} never has enough");
            }
        }
    }
}
