//! Loads that are upset, while another plan loads the same page by then.

use undercroft_base::{PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{Engine, FaultAnswer, Install, LoadPlan, Outcome, VecLedger};
use undercroft_policy::reclaim::lru::Lru;

use crate::common::{engine, fault, touch};

const PAGE: VirtPage = VirtPage(7);

fn made() -> (Engine<VecLedger>, SpaceId) {
    let mut engine = engine(4, 100, Box::new(Lru::new()));
    let space = engine.layout().add_space();
    let range = VirtRange::new(VirtPage(0), VirtPage(100));
    engine.layout().attached(space, range);
    (engine, space)
}

/// A plan for a write to [`PAGE`].
fn plan(engine: &mut Engine<VecLedger>, space: SpaceId) -> LoadPlan {
    let fault = fault(space, PAGE, true);
    let mut plan = LoadPlan::default();
    assert_eq!(engine.faults().answer(fault, &mut plan), FaultAnswer::Load);
    assert!(engine.upsets().spare(&plan));
    plan
}

/// Installs what may be installed. True if the page was.
fn commit(engine: &mut Engine<VecLedger>, mut plan: LoadPlan) -> bool {
    if !engine.upsets().spare(&plan) {
        engine.faults().validate(&mut plan.items);
    }
    let may = plan.items[0].valid;
    if may {
        plan.items[0].install = Install::Done;
    }
    engine.faults().finish(plan.fault, &mut plan.items);
    assert_eq!(plan.items[0].valid, may, "nothing happened meanwhile");
    may
}

fn state(engine: &Engine<VecLedger>, space: SpaceId) -> PageState {
    engine.books().entry(space, PAGE).state
}

/// The first plan may be so late that the page has been written and has left again, or the second
/// one. Only one of them may put something there.
#[test]
fn of_two_plans_for_a_page_only_that_after_the_drop_installs_it() {
    for first_of_all in [true, false] {
        let (mut engine, space) = made();
        let before = plan(&mut engine, space);
        engine.layout().removed(space, VirtRange::one(PAGE));
        let after = plan(&mut engine, space);
        assert!(!engine.upsets().spare(&before) && engine.upsets().spare(&after));
        if first_of_all {
            assert!(!commit(&mut engine, before));
            assert_eq!(state(&engine, space), PageState::Loading);
            assert!(commit(&mut engine, after));
        } else {
            assert!(commit(&mut engine, after));
            assert!(!commit(&mut engine, before));
        }
        assert_eq!(state(&engine, space), PageState::Resident);
        assert_eq!(engine.books().resident().0, 1);
        assert_eq!(engine.books().unfinished_loads(), 0);
    }
}

/// Two upset loads of one page, ended in any order, leave nothing behind.
#[test]
fn each_upset_load_ends_once() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]] {
        let (mut engine, space) = made();
        let mut plans = Vec::new();
        for round in 0..3 {
            plans.push(Some(plan(&mut engine, space)));
            if round < 2 {
                engine.layout().removed(space, VirtRange::one(PAGE));
            }
        }
        for at in order {
            let plan = plans[at].take().expect("each once");
            assert_eq!(commit(&mut engine, plan), at == 2, "{order:?}");
        }
        engine.layout().removed(space, VirtRange::one(PAGE));
        let again = plan(&mut engine, space);
        assert!(commit(&mut engine, again));
        assert_eq!(engine.books().unfinished_loads(), 0);
    }
}

/// A page that was moved away and back has the same copy and the same place as before.
#[test]
fn a_plan_of_before_the_move_does_not_install_a_page_that_came_back() {
    let (mut engine, space) = made();
    touch(&mut engine, space, PAGE);
    let (mut items, mut wakes) = (Vec::new(), Vec::new());
    for page in 50..70 {
        touch(&mut engine, space, VirtPage(page)); // the last ones are protected
    }
    assert!(engine.evictions().select(1, &mut items));
    assert_eq!(items[0].page, PAGE);
    let stored = Outcome::Stored(TierId(0), Slot(3));
    engine.evictions().publish(items[0].at, stored, &mut wakes);
    let before = plan(&mut engine, space);
    let (here, there) = (VirtRange::one(PAGE), VirtRange::one(VirtPage(90)));
    for (from, to) in [(here, there), (there, here)] {
        let moved = engine.layout().remapped(space, from, to.start);
        moved.expect("room");
    }
    let after = plan(&mut engine, space);
    assert!(!commit(&mut engine, before));
    assert!(commit(&mut engine, after));
    assert_eq!(state(&engine, space), PageState::Resident);
    let mut freed = Vec::new();
    engine.take_freed(&mut freed);
    assert_eq!(freed, [(TierId(0), Slot(3))], "once");
}

/// A page that is loading in a chunk that was given away: its plan ends it there.
#[test]
fn a_load_in_a_buried_chunk_ends_there() {
    let (mut engine, space) = made();
    let chunk = VirtRange::new(VirtPage(0), VirtPage(512));
    engine.layout().attached(space, chunk);
    let before = plan(&mut engine, space);
    let grave = engine.layout().add_space();
    engine.layout().bury(space, &[chunk], grave);
    assert!(!commit(&mut engine, before));
    assert_eq!(engine.books().resident().0, 0);
    let after = plan(&mut engine, space);
    engine.layout().removed(grave, chunk);
    assert!(commit(&mut engine, after));
    assert_eq!(engine.books().resident().0, 1);
    assert_eq!(engine.books().unfinished_loads(), 0);
}
