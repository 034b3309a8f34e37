//! Managed ranges. After random attaching and unmapping they equal a set of pages. Pages in them
//! count before they are found.

use std::collections::BTreeSet;

use undercroft_base::{PageCount, PageState, ThreadId, VirtPage, VirtRange};
use undercroft_engine::{Fault, FaultAnswer, LoadPlan};

use crate::common;

const PAGES: u64 = 40;

#[test]
fn regions_are_the_pages_attached_and_not_unmapped() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(4, 1000, reclaim);
    let space = engine.layout().add_space();
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
                engine.layout().attached(space, range);
                pages.extend(range.pages());
            }
            _ => {
                engine.layout().unmapped(space, range);
                pages.retain(|page| !range.contains(*page));
            }
        }
        let regions = engine.books().regions(space);
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

/// The program unmapped what was just registered, and mapped something else there, which is not
/// registered. Its pages would leave and read as zeros.
#[test]
fn pages_found_where_no_region_is_any_more_are_not_counted() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(2, 1000, reclaim);
    let space = engine.layout().add_space();
    let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    engine.layout().attached(space, range(0, 20));
    engine.layout().attached(space, range(40, 60));
    engine.layout().detached(space, range(10, 50));
    engine.discovery().found_resident(space, range(0, 100));
    assert_eq!(engine.books().resident().0, 20);
    for page in [10, 30, 49, 60] {
        let entry = engine.books().entry(space, VirtPage(page));
        assert_eq!(entry.state, PageState::Untouched, "page {page}");
    }
    let child = engine.layout().add_space();
    engine.layout().attached(child, range(0, 5));
    let mut found = |page| {
        let mut discovery = engine.discovery();
        discovery.found_shared(child, VirtPage(page), &[space])
    };
    assert!(found(4) && !found(5));
    engine.books().audit();
}

/// A client is attached with pages in memory, and faults while they are being counted. It may not
/// get more than the limit.
#[test]
fn pages_that_will_be_found_take_room() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(100, 100, reclaim);
    let space = engine.layout().add_space();
    engine
        .layout()
        .attached(space, VirtRange::new(VirtPage(0), VirtPage(1000)));
    let mut plan = LoadPlan::default();
    let fault = |page| common::fault(space, VirtPage(page), true);
    engine.discovery().expect_found(PageCount(100));
    assert_eq!(
        engine.faults().answer(fault(500), &mut plan),
        FaultAnswer::NoRoom
    );
    assert!(
        !engine.books().reclaim_wanted(),
        "nothing is there to leave"
    );
    let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    // A page that is reported takes its own room, not another's. Some are reported twice.
    engine.discovery().found_resident(space, range(0, 60));
    engine.discovery().found_resident(space, range(50, 100));
    assert_eq!(
        (engine.books().room(), engine.books().resident().0),
        (0, 100)
    );
    engine.layout().removed(space, range(0, 50));
    assert_eq!(
        engine.faults().answer(fault(500), &mut plan),
        FaultAnswer::Load
    );
    // Fewer than were expected: the missing ones count until all are reported.
    engine.discovery().expect_found(PageCount(49));
    assert_eq!(
        engine.faults().answer(fault(501), &mut plan),
        FaultAnswer::NoRoom
    );
    let mut waiters = Vec::new();
    engine.faults().take_waiters(&mut waiters);
    assert_eq!(waiters, []);
    engine.discovery().expect_found(PageCount(0));
    engine.faults().take_waiters(&mut waiters);
    assert_eq!(waiters.len(), 2);
    assert_eq!(
        engine.faults().answer(fault(501), &mut plan),
        FaultAnswer::Load
    );
}

/// The thread that makes room must not wait for it. Others do.
#[test]
fn an_urgent_fault_is_served_without_room() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(1, 8, reclaim);
    let space = engine.layout().add_space();
    engine
        .layout()
        .attached(space, VirtRange::new(VirtPage(0), VirtPage(64)));
    engine
        .discovery()
        .found_resident(space, VirtRange::new(VirtPage(0), VirtPage(8)));
    let mut plan = LoadPlan::default();
    let mut answer = |urgent| {
        let fault = Fault {
            space,
            page: VirtPage(20),
            write: true,
            thread: ThreadId(1),
            urgent,
        };
        engine.faults().answer(fault, &mut plan)
    };
    assert_eq!(answer(false), FaultAnswer::NoRoom);
    assert_eq!(answer(true), FaultAnswer::Load);
}
