//! Moves between tiers: which pages are chosen, and which copies are believed.

use std::sync::{Arc, Mutex};

use crate::common;
use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, PageNo, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{Config, DemoteItem, Engine, Mover, Outcome, Room, Taken, VecLedger};
use undercroft_policy::place::{LatencyClass, Migration, Place, TierOrder, TierState};
use undercroft_policy::reclaim::lru::Lru;

pub(crate) const FAST: TierId = TierId(0);
pub(crate) const SLOW: TierId = TierId(1);

/// An engine over two tiers, with 1024 pages of which the first `stored` are in the fast tier, page
/// n in slot n.
pub(crate) fn engine(stored: u64) -> (Engine<VecLedger>, SpaceId) {
    engine_that(stored, false)
}

/// The same. * `keeps`: copies of pages that are in memory again.
pub(crate) fn engine_that(stored: u64, keeps: bool) -> (Engine<VecLedger>, SpaceId) {
    let config = Config {
        limit: Bytes(2000 * BASE_PAGE_BYTES as u64),
        retain: vec![keeps; 2],
        demotes: vec![true, false],
        room: Room::Ahead,
    };
    let prefetch = undercroft_policy::prefetch::by_name("none").expect("a policy");
    let ledger = VecLedger::new(2);
    let mut engine = Engine::new(ledger, Box::new(Lru::new()), prefetch, config);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(1024));
    engine.layout().attached(space, all);
    for page in 0..1024 {
        common::touch(&mut engine, space, VirtPage(page));
    }
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    let mut left = 0;
    while left < stored {
        let want = (stored - left).min(64) as usize;
        assert!(engine.evictions().select(want, &mut batch));
        for item in &batch {
            let stored = Outcome::Stored(FAST, Slot(item.page.0));
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            engine.evictions().publish(item.at, stored, &mut wake);
        }
        left += batch.len() as u64;
    }
    (engine, space)
}

pub(crate) fn place(engine: &Engine<VecLedger>, space: SpaceId, page: u64) -> (TierId, Slot) {
    let entry = engine.books().entry(space, VirtPage(page));
    assert_eq!(entry.state, PageState::Stored);
    (entry.tier, entry.slot)
}

fn select(engine: &mut Engine<VecLedger>, want: usize) -> Vec<DemoteItem> {
    let mut items = Vec::new();
    engine.migrations().select(FAST, want, &mut items);
    items
}

/// A device may hang for long. By the time a copy arrives, another copy of the page may have the
/// same slot, and the same stamp: those come again.
#[test]
fn a_copy_that_took_as_long_as_stamps_need_to_repeat_is_not_believed() {
    let (mut engine, space) = engine(2);
    let late = select(&mut engine, 1)[0];
    // Each selection moves the stamp on.
    let mut others = 0;
    while others < u64::from(u16::MAX) {
        let item = select(&mut engine, 1)[0];
        assert!(engine.migrations().failed(item), "it is still there");
        others += 1;
    }
    engine.migrations().demoted(late, SLOW, Slot(9));
    assert_eq!(place(&engine, space, 0), (FAST, Slot(0)));
    let mut freed = Vec::new();
    engine.take_freed(&mut freed);
    assert_eq!(freed, [(SLOW, Slot(9))]);
}

/// Copies in these slots alone are found, and move inside their tier. What is shared, or changed
/// meanwhile, stays. A page keeps its age.
#[test]
fn copies_in_named_slots_are_found_and_move_inside_their_tier() {
    let (mut engine, space) = engine(600);
    let named = [Slot(3)..Slot(5), Slot(100)..Slot(130), Slot(599)..Slot(700)];
    let mut items = Vec::new();
    let next = (engine.migrations()).select_slots(FAST, &named, PageNo(0), &mut items);
    assert_eq!(next, None);
    let mut found: Vec<u64> = items.iter().map(|item| item.slot.0).collect();
    found.sort_unstable();
    let expected: Vec<u64> = (3..5).chain(100..130).chain(599..600).collect();
    assert_eq!(found, expected);
    let demoted = engine.books().stats().demoted;
    for item in &items {
        let slot = Slot(1000 + item.slot.0);
        engine.migrations().demoted(*item, FAST, slot);
    }
    // The same again comes too late: its own slot is freed, and nothing else.
    engine.migrations().demoted(items[0], FAST, Slot(5000));
    for page in 0..600 {
        let moved = expected.contains(&page);
        let slot = Slot(if moved { 1000 + page } else { page });
        assert_eq!(place(&engine, space, page), (FAST, slot));
    }
    assert_eq!(engine.books().stats().demoted, demoted, "it is no demotion");
    items.clear();
    engine.migrations().select(FAST, 10, &mut items);
    let oldest: Vec<u64> = items.iter().map(|item| item.slot.0).collect();
    let expected: Vec<u64> = [0, 1, 2, 1003, 1004, 5, 6, 7, 8, 9].into();
    assert_eq!(oldest, expected, "they are as old as before");
    items.clear();
    engine.migrations().close(FAST);
    let next = (engine.migrations()).select_slots(FAST, &named, PageNo(0), &mut items);
    assert_eq!((next, items), (None, vec![]));
}

/// A part after the other, as many as move together. A closed tier is offered no page.
#[test]
fn a_drain_finds_every_page_of_its_tier_in_parts() {
    let (mut engine, space) = engine(600);
    engine.migrations().close(FAST);
    let (mut from, mut parts) = (Some(PageNo(0)), Vec::new());
    while let Some(start) = from {
        let mut items = Vec::new();
        from = engine.migrations().select_all(FAST, start, &mut items);
        for item in &items {
            let slot = Slot(1000 + item.slot.0);
            engine.migrations().demoted(*item, SLOW, slot);
        }
        parts.push(items.len());
    }
    assert_eq!(parts, [256, 256, 88]);
    for page in 0..600 {
        assert_eq!(place(&engine, space, page), (SLOW, Slot(1000 + page)));
    }
    let tier = TierState {
        capacity: Bytes(1 << 30),
        ..TierState::empty(LatencyClass::Device)
    };
    engine.migrations().set_tiers([tier; 2]);
    let mut batch = Vec::new();
    assert!(engine.evictions().select(1, &mut batch));
    let offered = engine.evictions().tiers_for(batch[0].at);
    assert_eq!(offered.iter().collect::<Vec<_>>(), [SLOW]);
    assert_eq!(engine.migrations().refuge_from(FAST), Some(SLOW));
}

fn state(capacity: u64, held: u64, latency: LatencyClass) -> TierState {
    TierState {
        capacity: Bytes(capacity),
        held: Bytes(held),
        packed: Bytes(held),
        ..TierState::empty(latency)
    }
}

/// A tier with a late number may be the second fastest. The policy speaks of ranks, the engine of
/// numbers, and only the last rank keeps its pages.
#[test]
fn a_tier_that_is_added_between_others_takes_what_the_fast_one_moves_down() {
    const MIB: u64 = 1 << 20;
    const NEW: TierId = TierId(2);
    let (mut engine, _) = engine(64);
    let [full, slow, new] = [
        state(MIB, MIB, LatencyClass::Memory),
        state(64 * MIB, 0, LatencyClass::Device),
        state(64 * MIB, 0, LatencyClass::Nvm),
    ];
    let wanted = |engine: &mut Engine<VecLedger>, states: &[TierState]| {
        engine.migrations().set_tiers(states.iter().copied());
        let asked = engine.migrations().wanted(Mover::Evictor);
        asked.map(|asked| (asked.from, asked.to))
    };
    assert_eq!(wanted(&mut engine, &[full, slow]), Some((FAST, SLOW)));
    engine.migrations().add(NEW, LatencyClass::Nvm, 1);
    assert_eq!(engine.migrations().ranks(), [FAST, NEW, SLOW]);
    assert_eq!(wanted(&mut engine, &[full, slow, new]), Some((FAST, NEW)));
    // It fills up, and moves down itself.
    let filled = state(64 * MIB, 64 * MIB, LatencyClass::Nvm);
    let asked = wanted(&mut engine, &[full, slow, filled]);
    assert_eq!(asked, Some((NEW, SLOW)));
    engine.migrations().close(SLOW);
    assert_eq!(
        engine.migrations().refuge_from(SLOW),
        None,
        "the others are full"
    );
    engine.migrations().set_tiers([full, slow, new]);
    assert_eq!(engine.migrations().refuge_from(SLOW), Some(NEW));
    engine.migrations().remove(SLOW);
    assert_eq!(engine.migrations().ranks(), [FAST, NEW]);
    let asked = wanted(&mut engine, &[full, slow, filled]);
    assert_eq!(asked, Some((FAST, NEW)), "the last one keeps its pages");
    // Its number is free again. What lies in the tier above gets ages, and can move.
    engine.migrations().add(SLOW, LatencyClass::Device, 2);
    let asked = wanted(&mut engine, &[full, slow, filled]);
    assert_eq!(asked, Some((NEW, SLOW)));
}

/// Pages that lie in a tier since it was the last one have no age until they are noted.
#[test]
fn ages_are_noted_of_pages_that_are_in_a_tier_already() {
    let (mut engine, _) = engine(64);
    let selected = select(&mut engine, 256);
    assert_eq!(selected.len(), 64);
    assert!(select(&mut engine, 256).is_empty(), "each is taken once");
    assert_eq!(engine.migrations().note_ages(FAST, PageNo(0)), None);
    assert_eq!(select(&mut engine, 256).len(), 64);
}

/// Notes for which pages it was asked.
struct Asked(Arc<Mutex<Vec<PageNo>>>);

impl Place for Asked {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        self.0.lock().expect("one thread").push(no);
        TierOrder::downwards(tiers.len())
    }

    fn next_move(&mut self, _: Bytes, _: &[TierState]) -> Option<Migration> {
        None
    }
}

/// The number of a dropped page may be another page's, or none at all.
#[test]
fn the_placement_is_not_asked_for_a_page_that_was_dropped_on_its_way() {
    let (mut engine, space) = engine(0);
    let asked = Arc::new(Mutex::new(Vec::new()));
    engine.set_place(Box::new(Asked(asked.clone())));
    let tiers = [TierState::empty(LatencyClass::Device); 2];
    engine.migrations().set_tiers(tiers);
    let mut batch = Vec::new();
    assert!(engine.evictions().select(2, &mut batch));
    let dropped = VirtRange::new(batch[0].page, VirtPage(batch[0].page.0 + 1));
    engine.layout().removed(space, dropped);
    for item in &batch {
        let order = engine.evictions().tiers_for(item.at);
        assert_eq!(order.get(0), Some(FAST));
    }
    assert_eq!(*asked.lock().expect("one thread"), [batch[1].no]);
}
