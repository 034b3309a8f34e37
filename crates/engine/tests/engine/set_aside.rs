//! A group whose process does not answer: beside the batches to come, whatever happens to its pages
//! meanwhile.

use crate::common;
use undercroft_base::{PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{
    Engine, EvictItem, FaultAnswer, HALF_PAGES, LoadPlan, Outcome, Taken, VecLedger,
};

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// An engine with pages 0 to 99 of two spaces resident; the last 32 are recent.
fn engine() -> (Engine<VecLedger>, SpaceId, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(8, 1000, reclaim);
    let spaces = (engine.layout().add_space(), engine.layout().add_space());
    for space in [spaces.0, spaces.1] {
        engine.layout().attached(space, range(0, 512));
        for page in 0..100 {
            common::touch(&mut engine, space, VirtPage(page));
        }
    }
    (engine, spaces.0, spaces.1)
}

/// Sets pages `pages` of `space` aside; the items.
fn set_aside(engine: &mut Engine<VecLedger>, space: SpaceId, pages: VirtRange) -> Vec<EvictItem> {
    let mut batch = Vec::new();
    assert!(engine.evictions().select_these(space, &[pages], &mut batch));
    engine.evictions().set_aside(&mut batch);
    batch
}

/// Lets one batch leave; its pages.
fn leave(engine: &mut Engine<VecLedger>) -> Vec<(SpaceId, VirtPage)> {
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    // Pages that are passed over are met once.
    while {
        let kept = engine.books().kept_pages();
        !engine.evictions().select(16, &mut batch) && engine.books().kept_pages() != kept
    } {}
    for item in &batch {
        engine
            .evictions()
            .publish(item.at, Outcome::Fill(0), &mut wake);
    }
    engine.books().audit();
    batch.iter().map(|item| (item.space, item.page)).collect()
}

fn read(engine: &mut Engine<VecLedger>, space: SpaceId, page: u64) -> FaultAnswer {
    let fault = common::fault(space, VirtPage(page), false);
    engine.faults().answer(fault, &mut LoadPlan::default())
}

#[test]
fn others_leave_meanwhile_and_what_was_set_aside_is_settled_or_published_later() {
    let (mut engine, still, other) = engine();
    let items = set_aside(&mut engine, still, range(0, 8));
    let mut left = Vec::new();
    for _ in 0..3 {
        left.extend(leave(&mut engine));
    }
    assert!(left.len() > 32, "others leave");
    assert!(left.iter().all(|(space, _)| *space == other), "{left:?}");
    assert!(
        !engine
            .evictions()
            .select_these(still, &[range(8, 20)], &mut Vec::new())
    );
    // A thread waits for one that turns out to have stayed, and for one that was moved.
    assert_eq!(read(&mut engine, still, 2), FaultAnswer::Wait);
    assert_eq!(read(&mut engine, still, 5), FaultAnswer::Wait);
    let mut wake = Vec::new();
    for item in &items[..4] {
        assert!(engine.evictions().is_at(item.at, item.page));
        engine
            .evictions()
            .settle(item.at, Taken::NotTried, &mut wake);
    }
    assert_eq!(engine.evictions().wanted_mask(&items[4..]), 0b10);
    for item in &items[4..] {
        let stored = Outcome::Stored(TierId(0), Slot(item.page.0));
        engine.evictions().publish(item.at, stored, &mut wake);
    }
    wake.sort_unstable();
    assert_eq!(wake, [(still, VirtPage(2)), (still, VirtPage(5))]);
    engine.evictions().pass_over(still, false);
    while engine.evictions().take_back(still, 7) {}
    engine.books().audit();
    assert_eq!(
        engine.books().entry(still, VirtPage(3)).state,
        PageState::Resident
    );
    let stored = engine.books().entry(still, VirtPage(6));
    assert_eq!((stored.state, stored.slot), (PageState::Stored, Slot(6)));
    let left: Vec<_> = (0..12).flat_map(|_| leave(&mut engine)).collect();
    assert!(left.iter().any(|(space, _)| *space == still), "{left:?}");
}

#[test]
fn what_happens_to_its_pages_meanwhile_is_what_counts() {
    let (mut engine, still, _) = engine();
    let items = set_aside(&mut engine, still, range(0, 8));
    leave(&mut engine);
    assert!(engine.layout().removed(still, range(0, 1)).cancel_batch);
    let effect = engine.layout().remapped(still, range(1, 2), VirtPage(300));
    assert!(effect.expect("room").cancel_batch);
    let (child, effect) = engine.forks().forked(still, &[]).expect("room");
    assert!(effect.cancel_batch);
    leave(&mut engine);
    assert_eq!(engine.evictions().alive_mask(&items[..2]), 0b10);
    assert!(
        engine.evictions().is_at(items[1].at, VirtPage(300))
            && !engine.evictions().is_at(items[1].at, items[1].page)
    );
    let mut places = Vec::new();
    engine.evictions().places_of(items[1].at, &mut places);
    assert_eq!(places, [(still, VirtPage(300)), (child, VirtPage(300))]);
    let mut wake = Vec::new();
    for item in &items {
        let stored = Outcome::Stored(TierId(0), Slot(item.page.0));
        engine.evictions().publish(item.at, stored, &mut wake);
    }
    engine.books().audit();
    let at = |space, page| {
        let entry = engine.books().entry(space, VirtPage(page));
        (entry.state, entry.slot)
    };
    assert_eq!(at(still, 0).0, PageState::Untouched);
    for (space, page, slot) in [(still, 300, 1), (child, 300, 1), (child, 7, 7)] {
        assert_eq!(at(space, page), (PageState::Stored, Slot(slot)));
    }
    let mut freed = Vec::new();
    engine.take_freed(&mut freed);
    assert_eq!(freed, [(TierId(0), Slot(0))], "no page has the first");
}

/// Four batches at once, two of one space: each has places of its own, and ends by its own indices.
#[test]
fn batches_in_flight_have_places_of_their_own() {
    let (mut engine, first, second) = engine();
    let third = engine.layout().add_space();
    engine.layout().attached(third, range(0, 512));
    let (mut one, mut more) = (Vec::new(), Vec::new());
    let (mut two, mut none) = (Vec::new(), Vec::new());
    assert!(
        engine
            .evictions()
            .select_these(first, &[range(0, 4)], &mut one)
    );
    let mut others = engine.evictions();
    assert!(others.select_these(first, &[range(9, 12)], &mut more));
    let places = |items: &[EvictItem]| items.iter().map(|item| item.place).collect::<Vec<_>>();
    assert_eq!(places(&one), [0, 1, 2, 3]);
    assert_eq!(places(&more), [32, 33, 34], "the other half");
    assert!(!others.select_these(first, &[range(20, 24)], &mut none));
    assert!(none.is_empty());
    let mut rest = Vec::new();
    assert!(engine.evictions().select(64, &mut two));
    assert!(engine.evictions().select(64, &mut rest));
    for half in [&two, &rest] {
        assert!(half.len() <= HALF_PAGES);
        assert!(half.iter().all(|item| item.space == second));
    }
    assert!(
        !engine.evictions().select(64, &mut none),
        "all halves are in flight"
    );
    two.extend(rest);
    for page in 0..100 {
        common::touch(&mut engine, third, VirtPage(page));
    }
    let mut three = Vec::new();
    assert!(engine.evictions().select(8, &mut three));
    assert!(three.iter().all(|item| item.space == third));
    // The second ends first, and its places serve the next.
    assert!(engine.layout().removed(first, range(1, 2)).cancel_batch);
    let mut wake = Vec::new();
    for item in two.iter().chain(&three).chain(&one).chain(&more) {
        let stored = Outcome::Stored(TierId(0), Slot(u64::from(item.no.0)));
        assert!(engine.evictions().alive_mask(&[*item]) == 1 || item.page == VirtPage(1));
        engine.evictions().publish(item.at, stored, &mut wake);
        engine.books().audit();
    }
    for item in two
        .iter()
        .chain(&three)
        .chain(&one)
        .filter(|item| item.page != VirtPage(1))
    {
        let entry = engine.books().entry(item.space, item.page);
        assert_eq!(
            (entry.state, entry.slot),
            (PageState::Stored, Slot(u64::from(item.no.0)))
        );
    }
    let mut four = Vec::new();
    assert!(engine.evictions().select(8, &mut four));
    assert_eq!(four[0].at.place(), one[0].at.place());
    assert_ne!(four[0].at, one[0].at);
}

#[test]
fn several_groups_keep_apart_and_their_places_are_used_again() {
    let (mut engine, first, second) = engine();
    let one = set_aside(&mut engine, first, range(0, 4));
    let two = set_aside(&mut engine, second, range(0, 60));
    assert_ne!(one[0].at, two[0].at);
    let mut wake = Vec::new();
    for item in &one {
        engine
            .evictions()
            .settle(item.at, Taken::NotTried, &mut wake);
    }
    engine.evictions().pass_over(first, false);
    while engine.evictions().take_back(first, 7) {}
    leave(&mut engine);
    let three = set_aside(&mut engine, first, range(60, 64));
    assert_eq!(
        three[0].at.place(),
        one[0].at.place(),
        "a free place is taken"
    );
    assert!(engine.layout().removed(second, range(0, 100)).cancel_batch);
    engine.layout().remove_space(first);
    for item in two.iter().chain(&three) {
        assert_eq!(engine.evictions().alive_mask(&[*item]), 0);
        engine
            .evictions()
            .settle(item.at, Taken::NotTried, &mut wake);
    }
    engine.books().audit();
}
