//! Copies that are changed in place: who owns the slot meanwhile.

use crate::common;
use undercroft_base::{Flags, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{Engine, EvictItem, Outcome, Taken, VecLedger};
use undercroft_policy::reclaim::lru::Lru;

const NVM: TierId = TierId(0);
const COPY: (TierId, Slot) = (NVM, Slot(5));
const PAGE: VirtPage = VirtPage(0);

fn leave(engine: &mut Engine<VecLedger>) -> EvictItem {
    let mut batch = Vec::new();
    assert!(engine.evictions().select(1, &mut batch));
    let moved = Taken::Moved;
    engine
        .evictions()
        .settle(batch[0].at, moved, &mut Vec::new());
    batch[0]
}

fn publish(engine: &mut Engine<VecLedger>, item: EvictItem, outcome: Outcome) {
    let mut wake = Vec::new();
    engine.evictions().publish(item.at, outcome, &mut wake);
}

fn freed(engine: &mut Engine<VecLedger>) -> Vec<(TierId, Slot)> {
    let mut freed = Vec::new();
    engine.take_freed(&mut freed);
    freed
}

/// A page that left, came back and keeps its copy, and is on its way out again.
fn on_its_way() -> (Engine<VecLedger>, SpaceId, EvictItem) {
    let mut engine = common::engine_with(1, 1000, Box::new(Lru::new()), true);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(64));
    engine.layout().attached(space, all);
    common::touch(&mut engine, space, PAGE);
    let item = leave(&mut engine);
    publish(&mut engine, item, Outcome::Stored(NVM, Slot(5)));
    common::touch(&mut engine, space, PAGE);
    let item = leave(&mut engine);
    assert_eq!(
        item.retained.map(|(tier, slot, _)| (tier, slot)),
        Some(COPY)
    );
    (engine, space, item)
}

#[test]
fn a_copy_that_was_taken_is_the_evictors_until_it_is_published() {
    let (mut engine, space, item) = on_its_way();
    assert_eq!(engine.evictions().take_retained(item.at), Some(COPY));
    assert_eq!(engine.evictions().take_retained(item.at), None, "once");
    let entry = engine.books().entry(space, PAGE);
    assert!(!entry.flags.has(Flags::RETAINED), "no entry names it");
    publish(&mut engine, item, Outcome::Stored(COPY.0, COPY.1));
    let entry = engine.books().entry(space, PAGE);
    assert_eq!((entry.state, entry.slot), (PageState::Stored, COPY.1));
    assert_eq!(entry.stamp, item.stamp);
    assert!(freed(&mut engine).is_empty());
}

/// No other page may get the slot while its bytes are changed.
#[test]
fn a_page_that_is_dropped_meanwhile_frees_the_slot_once_and_late() {
    let (mut engine, space, item) = on_its_way();
    engine.evictions().take_retained(item.at);
    engine.layout().removed(space, VirtRange::one(PAGE));
    assert!(freed(&mut engine).is_empty(), "it is the evictor's");
    publish(&mut engine, item, Outcome::Stored(COPY.0, COPY.1));
    assert_eq!(freed(&mut engine), [COPY]);
}

#[test]
fn a_copy_in_a_closed_tier_or_of_a_dropped_page_is_not_taken() {
    let (mut engine, _, item) = on_its_way();
    engine.migrations().close(NVM);
    assert_eq!(engine.evictions().take_retained(item.at), None);
    let (mut engine, space, item) = on_its_way();
    engine.layout().removed(space, VirtRange::one(PAGE));
    assert_eq!(engine.evictions().take_retained(item.at), None);
    assert_eq!(freed(&mut engine), [COPY]);
}
