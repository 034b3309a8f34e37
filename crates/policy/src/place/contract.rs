//! The contract of [`Place`]: every implementation passes it.

use proptest::prelude::*;
use undercroft_base::{Bytes, Nanos, PageCount, PageNo, TierId};

use super::{
    Ask, BATCH_PAGES, Event, LatencyClass, Leaving, Loaded, MIGRATE_PAGES_MAX, NAMES, Place,
    TIERS_MAX, TierState, by_name,
};
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
    if let Some(migration) = place.next_move(Ask::Oldest(limit), tiers) {
        let (from, to) = (usize::from(migration.from.0), usize::from(migration.to.0));
        prop_assert!(from < tiers.len() && to < tiers.len() && from != to);
        prop_assert!(tiers[from].demotes, "pages of this tier cannot move on");
        prop_assert!(tiers[from].held.0 > 0, "an empty tier is relieved");
        prop_assert!((1..=MIGRATE_PAGES_MAX).contains(&migration.pages.0));
    }
    Ok(())
}

/// Groups that are moved: between tiers that are there, and no page twice.
fn check_groups(
    place: &mut dyn Place,
    now: Nanos,
    tiers: &[TierState],
) -> Result<(), TestCaseError> {
    for asked in 0.. {
        let mut pages = Vec::new();
        let Some(group) = place.next_move(Ask::Group(now, &mut pages), tiers) else {
            break;
        };
        let (from, to) = (usize::from(group.from.0), usize::from(group.to.0));
        prop_assert!(from < tiers.len() && to < tiers.len() && from != to);
        let named = pages.len();
        prop_assert!((1..=MIGRATE_PAGES_MAX).contains(&(named as u64)));
        prop_assert_eq!(group.pages, PageCount(named as u64));
        pages.sort_unstable();
        pages.dedup();
        prop_assert_eq!(pages.len(), named, "a page is named twice");
        prop_assert!(asked < 10_000, "there is no end");
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

/// Pages that are loaded together left together, and no page is named twice.
fn check_links(
    place: &mut dyn Place,
    random: &mut Random,
    tiers: &[TierState],
) -> Result<(), TestCaseError> {
    let first = random.below(1 << 10) as u32;
    let count = random.below(BATCH_PAGES) as u32;
    let unused = random.below(3) == 0;
    let leaving: Vec<Leaving> = (first..first + count)
        .map(|no| Leaving {
            no: PageNo(no),
            unused,
        })
        .collect();
    for page in &leaving {
        loaded(place, page.no, random, tiers, 1);
    }
    place.heard(Event::Leaving(&leaving, tiers));
    for page in &leaving {
        let mut together = Vec::new();
        place.together(page.no, &mut together);
        prop_assert!(
            together
                .iter()
                .all(|no| (first..first + count).contains(&no.0))
        );
        let named = together.len();
        together.sort_unstable();
        together.dedup();
        prop_assert_eq!(together.len(), named, "a page is named twice");
        if random.below(2) == 0 {
            loaded(place, page.no, random, tiers, 0);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_placement_names_tiers_that_are_there_once_and_relieves_what_may_be(seed: u64, count in 0..=TIERS_MAX) {
        for name in NAMES {
            let mut place = by_name(name).expect("a known policy");
            let shown = place.shown(0);
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
                if shown.links_pages {
                    check_links(place.as_mut(), &mut random, &tiers)?;
                }
                check(place.as_mut(), limit, &tiers, PageNo(no))?;
                let now = Nanos(u64::from(no) * 1_000_000_000 * random.below(3));
                if shown.moves_groups {
                    check_groups(place.as_mut(), now, &tiers)?;
                }
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
            while let Some(migration) = place.next_move(Ask::Oldest(Bytes(1 << 24)), &tiers) {
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
