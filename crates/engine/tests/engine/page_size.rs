//! A space of 2 MiB pages beside one of 4 KiB pages: the limit, batches, plans, tiers, recovery.

use undercroft_base::{
    Bytes, LatencyClass, PageCount, PageSize, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{
    BatchIndex, Engine, FaultAnswer, FlatLedger, Install, LoadPlan, Mover, Outcome, Taken,
    VecLedger, bytes_for,
};
use undercroft_policy::place::TierState;
use undercroft_policy::reclaim;

use crate::common;

/// Base pages of a large page.
const LARGE: u64 = PageSize::Large.base_pages();

fn engine(limit: u64) -> (Engine<VecLedger>, SpaceId, SpaceId) {
    let lru = reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(8, limit, lru);
    let small = engine.layout().add_space();
    let large = (engine.layout().new_space(PageSize::Large, |_| false)).expect("a number");
    for space in [small, large] {
        let all = VirtRange::new(VirtPage(0), VirtPage(4 * LARGE));
        engine.layout().attached(space, all);
    }
    (engine, small, large)
}

fn touch(engine: &mut Engine<VecLedger>, space: SpaceId, pages: std::ops::Range<u64>) {
    for page in pages {
        common::touch(engine, space, VirtPage(page));
    }
}

fn answer(engine: &mut Engine<VecLedger>, space: SpaceId, page: u64) -> FaultAnswer {
    let fault = common::fault(space, VirtPage(page), false);
    engine.faults().answer(fault, &mut LoadPlan::default())
}

/// Has a batch leave: the space of its pages, and how many.
fn evict(engine: &mut Engine<VecLedger>, slot: u64) -> Vec<SpaceId> {
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    engine.evictions().select(64, &mut batch);
    for (at, item) in (0..).zip(&batch) {
        engine.evictions().settle(item.at, Taken::Moved, &mut wake);
        let outcome = Outcome::Stored(TierId(0), Slot(slot + at));
        engine.evictions().publish(item.at, outcome, &mut wake);
    }
    engine.books().audit();
    batch.iter().map(|item| item.space).collect()
}

#[test]
fn a_large_page_takes_512_base_pages_of_the_limit_until_it_left() {
    let (mut engine, small, large) = engine(8 * LARGE);
    touch(&mut engine, large, 0..2);
    touch(&mut engine, small, 0..100);
    let used = |engine: &Engine<VecLedger>| engine.books().dram_used();
    assert_eq!(used(&engine), Bytes((4 << 20) + 100 * 4096));
    assert_eq!(engine.books().room(), 6 * LARGE as i64 - 100);
    assert_eq!(
        engine.books().stats().resident_peak,
        PageCount(2 * LARGE + 100)
    );
    engine.books().audit();
    let all = VirtRange::new(VirtPage(0), VirtPage(2));
    engine.layout().lock(large, all, true);
    assert_eq!(engine.books().immovable(), Bytes(4 << 20));
    engine.layout().lock(large, all, false);
    assert_eq!(engine.books().immovable(), Bytes(0));
    engine.layout().removed(large, VirtRange::one(VirtPage(1)));
    assert_eq!(used(&engine), Bytes((2 << 20) + 100 * 4096));
    engine
        .layout()
        .remapped(large, VirtRange::one(VirtPage(0)), VirtPage(600))
        .expect("room");
    engine.books().audit();
    engine.layout().remove_space(large);
    assert_eq!(used(&engine), Bytes(100 * 4096));
    engine.books().audit();
}

#[test]
fn victims_leave_in_their_order_and_a_large_one_ends_the_batch() {
    let (mut engine, small, large) = engine(16 * LARGE);
    touch(&mut engine, small, 0..10);
    touch(&mut engine, large, 0..2);
    touch(&mut engine, small, 10..110);
    let left: Vec<_> = (0..4).map(|at| evict(&mut engine, 100 * at)).collect();
    let oldest: Vec<_> = [vec![small; 10], vec![large]].concat();
    assert_eq!(
        left,
        [oldest, vec![large], vec![small; 64], vec![small; 18]]
    );
    assert_eq!(
        engine.books().resident().0 + engine.books().stored().0,
        2 * LARGE + 110
    );
    assert_eq!(engine.books().stored().0, 2 * LARGE + 10 + 82);
}

#[test]
fn a_large_fault_waits_until_a_large_page_fits_and_nothing_comes_along() {
    let limit = 4 * LARGE;
    let (mut engine, small, large) = engine(limit);
    touch(&mut engine, small, 0..limit - LARGE + 1);
    assert_eq!(answer(&mut engine, large, 0), FaultAnswer::NoRoom);
    assert!(engine.books().is_full() && engine.books().room() == LARGE as i64 - 1);
    assert!(
        engine.books().reclaim_wanted(),
        "whatever part the reserve is"
    );
    let mut freed = Vec::new();
    engine.faults().take_waiters(&mut freed);
    assert_eq!(freed, [], "it waits for a whole page");
    assert_eq!(evict(&mut engine, 0).len(), 64);
    engine.faults().take_waiters(&mut freed);
    assert_eq!(freed, [(large, VirtPage(0))]);
    touch(&mut engine, large, 0..1);
    assert!(engine.books().reclaim_unfinished());
}

/// The engine asks a tier only for pages of its size, for new copies and for copies that move.
#[test]
fn pages_go_to_tiers_of_their_size() {
    let (mut engine, small, large) = engine(16 * LARGE);
    for (at, rank) in [(1, 1), (2, 2), (3, 3)] {
        engine
            .migrations()
            .add(TierId(at), LatencyClass::Device, rank);
    }
    let tier = |page, latency, held: u64| TierState {
        page,
        capacity: Bytes(64 << 20),
        held: Bytes(held),
        packed: Bytes(held),
        ..TierState::empty(latency)
    };
    let (base, big) = (PageSize::Base, PageSize::Large);
    let full = |page| tier(page, LatencyClass::Nvm, 64 << 20);
    let slow = |page| tier(page, LatencyClass::Device, 0);
    let states = [full(base), full(big), slow(base), slow(big)];
    engine.migrations().set_tiers(states);
    touch(&mut engine, large, 0..3);
    touch(&mut engine, small, 0..70);
    let offered = |engine: &mut Engine<VecLedger>| {
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        engine.evictions().select(64, &mut batch);
        let order = |engine: &mut Engine<VecLedger>, at: BatchIndex| {
            engine.evictions().tiers_for(at).iter().collect::<Vec<_>>()
        };
        let orders: Vec<_> = batch.iter().map(|item| order(engine, item.at)).collect();
        for (slot, item) in (7..).zip(&batch) {
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            let first = orders[0][0];
            let outcome = Outcome::Stored(first, Slot(slot));
            engine.evictions().publish(item.at, outcome, &mut wake);
        }
        (batch[0].space, orders)
    };
    let (space, orders) = offered(&mut engine);
    assert_eq!(
        (space, &orders[..]),
        (large, &[vec![TierId(1), TierId(3)]][..])
    );
    while offered(&mut engine).0 == large {}
    engine
        .migrations()
        .set_tiers([full(base), slow(big), slow(base), slow(big)]);
    let asked = engine
        .migrations()
        .wanted(Mover::Evictor)
        .expect("the first is full");
    assert_eq!((asked.from, asked.to), (TierId(0), TierId(2)));
    engine
        .migrations()
        .set_tiers([slow(base), full(big), slow(base), slow(big)]);
    let asked = engine
        .migrations()
        .wanted(Mover::Evictor)
        .expect("the second is full");
    assert_eq!((asked.from, asked.to), (TierId(1), TierId(3)));
    let mut moves = Vec::new();
    engine
        .migrations()
        .select(asked.from, asked.pages.0 as usize, &mut moves);
    assert_eq!(moves.len(), 1, "a large page moves alone");
    engine.migrations().close(TierId(1));
    assert_eq!(engine.migrations().refuge_from(TierId(1)), Some(TierId(3)));
    engine.migrations().close(TierId(3));
    assert_eq!(engine.migrations().refuge_from(TierId(1)), None);
}

#[test]
fn a_fork_child_and_a_successor_have_the_sizes_that_were() {
    let memory: std::sync::Arc<[std::sync::atomic::AtomicU64]> =
        (0..bytes_for(8) / 8).map(|_| 0.into()).collect();
    let key = undercroft_base::PageKey::new([7; undercroft_base::PageKey::BYTES]);
    let ledger = FlatLedger::create(memory.clone(), 8, &key).expect("room");
    let policies = || {
        (
            reclaim::by_name("lru"),
            undercroft_policy::prefetch::by_name("none"),
        )
    };
    let config = || common::config(16 * LARGE, false);
    let (lru, none) = policies();
    let mut engine = Engine::new(ledger, lru.expect("lru"), none.expect("none"), config());
    let small = engine.layout().add_space();
    let large = (engine.layout().new_space(PageSize::Large, |_| false)).expect("a number");
    for space in [small, large] {
        engine
            .layout()
            .attached(space, VirtRange::new(VirtPage(0), VirtPage(9)));
        for page in 0..3 {
            let mut plan = LoadPlan::default();
            let fault = common::fault(space, VirtPage(page), true);
            engine.faults().answer(fault, &mut plan);
            plan.items[0].install = Install::Done;
            engine.faults().finish(fault, &mut plan.items);
        }
    }
    let (child, _) = engine.forks().forked(large, &[]).expect("room");
    assert_eq!(engine.books().page_size(child), PageSize::Large);
    engine.forks().own_frame(child, VirtPage(0));
    let counted = engine.books().resident();
    assert_eq!(counted, PageCount(3 + 4 * LARGE));
    engine.books().audit();
    drop(engine);
    let ledger = FlatLedger::open(memory).expect("the ledger it left");
    let (lru, none) = policies();
    let sizes = [
        (small, PageSize::Base),
        (large, PageSize::Large),
        (child, PageSize::Large),
    ];
    let found = Engine::recover(
        ledger,
        lru.expect("lru"),
        none.expect("none"),
        config(),
        &sizes,
    );
    let (engine, _) = found.expect("whole");
    assert_eq!(engine.books().resident(), counted);
    engine.books().audit();
    let state = engine.books().entry(large, VirtPage(2)).state;
    assert_eq!(
        (state, engine.books().page_size(child)),
        (PageState::Resident, PageSize::Large)
    );
}
