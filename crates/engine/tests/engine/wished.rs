//! Places and moves that a plugin wishes: what is honoured, and what is left out.

use std::sync::{Arc, Mutex};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Flags, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::reclaim::{Goes, Turned};
use undercroft_engine::{BookEvent, DemoteItem, Engine, Journal, Outcome, Taken, VecLedger};
use undercroft_engine::{Fault, Install, LoadPlan, Placing, WishedMove};
use undercroft_policy::place::{LatencyClass, TierState};

use crate::moves::{FAST, SLOW, engine, engine_that, place};

/// Two devices with room.
fn devices(engine: &mut Engine<VecLedger>) {
    let tier = TierState {
        capacity: Bytes(1 << 30),
        ..TierState::empty(LatencyClass::Device)
    };
    engine.migrations().set_tiers([tier; 2]);
}

fn down(space: SpaceId, page: u64, pages: u64) -> WishedMove {
    WishedMove {
        space,
        page: VirtPage(page),
        pages,
        from: FAST,
        to: SLOW,
    }
}

fn select(engine: &mut Engine<VecLedger>, wish: WishedMove) -> Vec<DemoteItem> {
    let mut items = Vec::new();
    let tiers = (engine.migrations()).select_wished(&[wish], &mut items);
    assert_eq!(tiers.is_some(), !items.is_empty());
    if let Some(tiers) = tiers {
        assert_eq!(tiers, (wish.from, wish.to));
    }
    items
}

#[test]
fn a_wished_move_takes_those_pages_of_the_range_that_are_in_its_tier() {
    let (mut engine, space) = engine(300);
    devices(&mut engine);
    let items = select(&mut engine, down(space, 200, 256));
    let found: Vec<u64> = items.iter().map(|item| item.slot.0).collect();
    assert_eq!(
        found,
        (200..300).collect::<Vec<_>>(),
        "the others are in memory"
    );
    engine.migrations().demoted(items[0], SLOW, Slot(7));
    assert_eq!(place(&engine, space, 200), (SLOW, Slot(7)));
    assert_eq!(
        select(&mut engine, down(space, 200, 1)),
        [],
        "it is there already"
    );
    let up = WishedMove {
        from: SLOW,
        to: FAST,
        ..down(space, 0, 256)
    };
    assert_eq!(select(&mut engine, up).len(), 1);
    // A page that is named twice moves once.
    let (mut twice, mut items) = ([down(space, 210, 4), down(space, 212, 4)], Vec::new());
    (engine.migrations()).select_wished(&twice, &mut items);
    let found: Vec<u64> = items.iter().map(|item| item.slot.0).collect();
    assert_eq!(found, (210..216).collect::<Vec<_>>());
    twice[0].space = SpaceId(77);
    assert!(
        (engine.migrations())
            .select_wished(&twice, &mut items)
            .is_some()
    );
    assert_eq!(items.len(), 6 + 4);
    assert_eq!(
        select(&mut engine, down(space, 0, 10_000)).len(),
        255,
        "256 numbers at most"
    );
}

#[test]
fn a_wished_move_of_wrong_numbers_or_into_a_tier_that_takes_nothing_is_left_out() {
    let (mut engine, space) = engine(64);
    let wish = down(space, 0, 64);
    assert_eq!(
        select(&mut engine, wish),
        [],
        "nothing is known of the tiers yet"
    );
    devices(&mut engine);
    let tiers = |from: u8, to: u8| WishedMove {
        from: TierId(from),
        to: TierId(to),
        ..wish
    };
    let nowhere = [
        tiers(0, 0),
        tiers(0, 2),
        tiers(2, 0),
        tiers(255, 1),
        tiers(0, 255),
        tiers(1, 0),
        down(SpaceId(space.0 + 1), 0, 64),
        down(SpaceId(u32::MAX), 0, 64),
        down(space, u64::MAX, 64),
        down(space, 1 << 60, 64),
        down(space, 64, 256),
        down(space, 0, 0),
    ];
    for wish in nowhere {
        assert_eq!(select(&mut engine, wish), [], "{wish:?}");
    }
    let set = |engine: &mut Engine<VecLedger>, capacity, latency| {
        let device = TierState {
            capacity: Bytes(1 << 30),
            ..TierState::empty(LatencyClass::Device)
        };
        let to = TierState {
            capacity: Bytes(capacity),
            latency,
            ..device
        };
        engine.migrations().set_tiers([device, to]);
    };
    set(
        &mut engine,
        64 * BASE_PAGE_BYTES as u64 - 1,
        LatencyClass::Device,
    );
    assert_eq!(
        select(&mut engine, wish),
        [],
        "it has no room for all of them"
    );
    set(&mut engine, 1 << 30, LatencyClass::Memory);
    assert_eq!(
        select(&mut engine, wish),
        [],
        "the limit would have to pay for it"
    );
    devices(&mut engine);
    engine.migrations().close(SLOW);
    assert_eq!(select(&mut engine, wish), [], "it is being emptied");
    engine.migrations().reopen(SLOW);
    assert_eq!(select(&mut engine, wish).len(), 64);
}

#[test]
fn nothing_moves_up_while_latency_control_spares_the_buffer() {
    let (mut engine, space) = engine(64);
    devices(&mut engine);
    for item in select(&mut engine, down(space, 0, 64)) {
        engine.migrations().demoted(item, SLOW, item.slot);
    }
    let up = WishedMove {
        from: SLOW,
        to: FAST,
        ..down(space, 0, 64)
    };
    let goes = Goes::ToDevice;
    engine.turn(Some(Turned { batch: 64, goes }));
    assert_eq!(select(&mut engine, up), []);
    engine.turn(None);
    assert_eq!(select(&mut engine, up).len(), 64);
}

#[test]
fn a_page_is_offered_once_to_the_tier_that_was_wished_and_then_to_the_others() {
    let (mut engine, space) = engine(0);
    devices(&mut engine);
    let mut wish = |page, tier| {
        engine
            .evictions()
            .place(space, VirtPage(page), Placing::In(TierId(tier)))
    };
    assert!(wish(1, 1) && wish(2, 0) && wish(3, 1));
    assert!(!wish(1, 2) && !wish(1, 255), "there are two tiers");
    assert!(
        !wish(5000, 1) && !wish(u64::MAX, 1),
        "there is no such page"
    );
    // A newer wish is in force.
    assert!(wish(3, 0));
    let mut batch = Vec::new();
    let offered = |engine: &mut Engine<VecLedger>, batch: &mut Vec<_>| {
        assert!(engine.evictions().select(4, batch));
        let order = |at| engine.evictions().tiers_for(at).iter().collect::<Vec<_>>();
        batch
            .iter()
            .map(|item: &undercroft_engine::EvictItem| item.at)
            .map(order)
            .collect::<Vec<_>>()
    };
    let all = [
        vec![FAST, SLOW],
        vec![SLOW, FAST],
        vec![FAST, SLOW],
        vec![FAST, SLOW],
    ];
    assert_eq!(offered(&mut engine, &mut batch), all);
    assert_eq!(engine.books().stats().placed, 3);
    let mut wake = Vec::new();
    for item in &batch {
        engine.evictions().settle(item.at, Taken::Busy, &mut wake);
    }
    // Of a plugin that has ended, nothing is wished.
    let page = batch[1].page;
    assert!(engine.evictions().place(space, page, Placing::In(SLOW)));
    engine.evictions().forget_places();
    batch.clear();
    let all = [(); 4].map(|()| vec![FAST, SLOW]);
    assert_eq!(offered(&mut engine, &mut batch), all);
    // A page that is out cannot be placed.
    let (mut other, space) = crate::moves::engine(1);
    devices(&mut other);
    let slow = Placing::In(SLOW);
    assert!(!other.evictions().place(space, VirtPage(0), slow));
}

/// The pages that come with a fault on this one, that included. They are all there then.
fn come(engine: &mut Engine<VecLedger>, space: SpaceId, page: u64) -> Vec<u64> {
    let fault = Fault {
        space,
        page: VirtPage(page),
        write: false,
        thread: undercroft_base::ThreadId(1),
        urgent: false,
    };
    let mut plan = LoadPlan::default();
    engine.faults().answer(fault, &mut plan);
    for item in &mut plan.items {
        item.install = Install::Done;
    }
    engine.faults().finish(fault, &mut plan.items);
    plan.items.iter().map(|item| item.page.0).collect()
}

#[test]
fn linked_pages_come_together_and_leave_no_copy_in_the_slowest_tier() {
    let (mut engine, space) = engine_that(40, true);
    devices(&mut engine);
    for page in [8, 9] {
        let item = select(&mut engine, down(space, page, 1))[0];
        engine.migrations().demoted(item, SLOW, Slot(page));
    }
    let link = |engine: &mut Engine<VecLedger>, page, next| {
        let next = Placing::With(VirtPage(next));
        engine.evictions().place(space, VirtPage(page), next)
    };
    assert!(link(&mut engine, 12, 12), "nothing comes with it");
    let circle = [(30, 3), (3, 9), (9, 30), (5, 6), (6, 7), (7, 6)];
    for (page, next) in circle {
        assert!(link(&mut engine, page, next));
    }
    for (page, next) in [(3, 5000), (5000, 3), (3, u64::MAX), (u64::MAX, 3)] {
        assert!(!link(&mut engine, page, next), "there is no such page");
    }
    assert_eq!(come(&mut engine, space, 9), [3, 9, 30]);
    assert_eq!(come(&mut engine, space, 5), [5, 6, 7], "each comes once");
    assert_eq!(come(&mut engine, space, 8), [8]);
    let kept = |page| {
        let entry = engine.books().entry(space, VirtPage(page));
        entry.flags.has(Flags::RETAINED)
    };
    assert_eq!([3, 9, 30, 8].map(kept), [true, false, true, true]);
    // A link that is taken back, and those of a plugin that has ended.
    assert!(link(&mut engine, 20, 21) && link(&mut engine, 20, 20) && link(&mut engine, 22, 23));
    assert_eq!(come(&mut engine, space, 20), [20]);
    engine.evictions().forget_places();
    assert_eq!(come(&mut engine, space, 22), [22]);
}

/// The linked page may be in another mapping by then, or its number that of another page.
#[test]
fn a_link_that_leads_nowhere_is_forgotten_by_the_next_fault() {
    let (mut engine, space) = engine_that(40, true);
    devices(&mut engine);
    let item = select(&mut engine, down(space, 8, 1))[0];
    engine.migrations().demoted(item, SLOW, Slot(8));
    let next = Placing::With(VirtPage(30));
    assert!(engine.evictions().place(space, VirtPage(8), next));
    engine
        .layout()
        .unmapped(space, VirtRange::one(VirtPage(20)));
    assert_eq!(come(&mut engine, space, 8), [8]);
    let entry = engine.books().entry(space, VirtPage(8));
    assert!(
        entry.flags.has(Flags::RETAINED),
        "its copy stays, as of a page without a link"
    );
}

/// Notes what is told of tiers.
#[derive(Default)]
struct Told(Mutex<Vec<(&'static str, u64, u8)>>);

impl Journal for Told {
    fn note(&self, event: BookEvent) {
        let told = match event {
            BookEvent::Stored(_, page, tier) => ("stored", page.0, tier.0),
            BookEvent::Migrated(_, page, tier) => ("moved", page.0, tier.0),
            BookEvent::Loaded(_, page, tier) => ("loaded", page.0, tier.0),
            _ => return,
        };
        self.0.lock().expect("one thread").push(told);
    }
}

#[test]
fn where_copies_go_and_come_from_is_told_by_rank() {
    let (mut engine, space) = engine(0);
    devices(&mut engine);
    let told = Arc::new(Told::default());
    engine.add_journal(told.clone());
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    assert!(engine.evictions().select(3, &mut batch));
    let ends = [
        Outcome::Stored(SLOW, Slot(0)),
        Outcome::Stored(FAST, Slot(1)),
        Outcome::Stored(TierId::FILL, Slot(0)),
    ];
    for (item, end) in batch.iter().zip(ends) {
        engine.evictions().settle(item.at, Taken::Moved, &mut wake);
        engine.evictions().publish(item.at, end, &mut wake);
    }
    let item = select(&mut engine, down(space, 0, 8))[0];
    engine.migrations().demoted(item, SLOW, Slot(2));
    for page in 0..3 {
        assert_eq!(come(&mut engine, space, page), [page]);
    }
    let dropped = VirtRange::new(VirtPage(0), VirtPage(3));
    engine.layout().removed(space, dropped);
    let expected = [
        ("stored", 0, 1),
        ("stored", 1, 0),
        ("moved", 1, 1),
        ("loaded", 0, 1),
        ("loaded", 1, 1),
    ];
    assert_eq!(*told.0.lock().expect("one thread"), expected);
}

/// Pages that come together leave in one batch, side by side, and those that it has no room for
/// first in the next one.
#[test]
fn linked_pages_leave_together_side_by_side() {
    let (mut engine, space) = engine_that(200, true);
    devices(&mut engine);
    // Those that are to leave next. Each has its neighbours in the other circle.
    let [first, second] = [200, 201].map(|from| (0..12).map(move |at| from + 2 * at));
    for pages in [first.clone(), second.clone()] {
        let after = pages.clone().cycle().skip(1);
        for (page, next) in pages.zip(after) {
            let next = Placing::With(VirtPage(next));
            assert!(engine.evictions().place(space, VirtPage(page), next));
        }
    }
    let mut leave = |want| {
        let (mut items, mut wake) = (Vec::new(), Vec::new());
        assert!(engine.evictions().select(want, &mut items));
        for item in &items {
            let stored = Outcome::Stored(FAST, Slot(item.page.0));
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            engine.evictions().publish(item.at, stored, &mut wake);
        }
        items.iter().map(|item| item.page.0).collect::<Vec<_>>()
    };
    let (begun, left) = (second.clone().take(4), second.skip(4));
    assert_eq!(leave(16), first.chain(begun).collect::<Vec<_>>());
    assert_eq!(leave(12), left.chain(224..228).collect::<Vec<_>>());
    assert_eq!(leave(3), [228, 229, 230]);
    // A page that was linked, and whose chunk is no more.
    let next = Placing::With(VirtPage(600));
    assert!(engine.evictions().place(space, VirtPage(231), next));
    let gone = VirtRange::new(VirtPage(512), VirtPage(1024));
    engine.layout().unmapped(space, gone);
    let mut items = Vec::new();
    assert!(engine.evictions().select(2, &mut items));
    let pages: Vec<u64> = items.iter().map(|item| item.page.0).collect();
    assert_eq!(pages, [231, 232]);
}
