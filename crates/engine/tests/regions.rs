//! Managed ranges: what is attached and unmapped at random is what a set of pages says.

mod common;

use std::collections::BTreeSet;

use undercroft_base::{VirtPage, VirtRange};

const PAGES: u64 = 40;

#[test]
fn regions_are_the_pages_attached_and_not_unmapped() {
    let reclaim = undercroft_policy::reclaim::by_name("clock").expect("a policy");
    let mut engine = common::engine(4, 1000, reclaim);
    let space = engine.add_space();
    let mut pages = BTreeSet::new();
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for step in 0..20_000 {
        let start = random(PAGES);
        let range = VirtRange::new(VirtPage(start), VirtPage(start + 1 + random(8)));
        match random(2) {
            0 => {
                engine.attached(space, range);
                pages.extend(range.pages());
            }
            _ => {
                engine.unmapped(space, range);
                pages.retain(|page| !range.contains(*page));
            }
        }
        let regions = engine.regions(space);
        let known: Vec<VirtPage> = regions.iter().flat_map(|region| region.pages()).collect();
        assert_eq!(
            known,
            pages.iter().copied().collect::<Vec<_>>(),
            "step {step}"
        );
        assert!(
            regions.iter().all(|region| !region.is_empty()),
            "step {step}: {regions:?}"
        );
        let found: Vec<_> = regions[range.overlapping(regions)].to_vec();
        let touched = |region: &&VirtRange| !region.intersect(range).is_empty();
        let expected: Vec<_> = regions.iter().filter(touched).copied().collect();
        assert_eq!(found, expected, "step {step}: {range:?} of {regions:?}");
    }
}
