//! Pages that a plugin wants in memory: they come only where nothing has to leave for them.

use crate::common;
use undercroft_base::{PageCount, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{Engine, FaultAnswer, Install, LoadPlan, Outcome, Taken, VecLedger};

/// The newest pages of an engine do not leave.
const NEWEST: u64 = 32;

/// An engine with `limit` pages of memory. Pages 0 to `out` are stored, and the next ones resident.
fn engine(limit: u64, out: u64) -> (Engine<VecLedger>, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(2, limit, reclaim);
    let space = engine.layout().add_space();
    let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    engine.layout().attached(space, range(0, 500));
    engine.layout().attached(space, range(500, 600));
    for page in 0..out + NEWEST {
        common::touch(&mut engine, space, VirtPage(page));
        let Some(old) = page.checked_sub(NEWEST) else {
            continue;
        };
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        let these = [range(old, old + 1)];
        assert!(engine.evictions().select_these(space, &these, &mut batch));
        for item in batch {
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            let fill = Outcome::Fill(item.page.0 as u32);
            engine.evictions().publish(item.at, fill, &mut wake);
        }
    }
    (engine, space)
}

/// Has the engine load those of `pages` that may come. Returns how many it dealt with, and which
/// came.
fn load(engine: &mut Engine<VecLedger>, space: SpaceId, pages: &[u64]) -> (usize, Vec<u64>) {
    let pages: Vec<_> = pages.iter().copied().map(VirtPage).collect();
    let mut plan = LoadPlan::default();
    let done = engine.faults().prefetch(space, &pages, &mut plan);
    for item in &mut plan.items {
        assert!(!item.demanded && !item.fresh);
        assert_eq!(
            engine.books().entry(space, item.page).state,
            PageState::Loading
        );
        item.install = Install::Done;
    }
    engine.faults().finish(plan.fault, &mut plan.items);
    engine.books().audit();
    (done, plan.items.iter().map(|item| item.page.0).collect())
}

#[test]
fn only_pages_that_are_out_come_each_once_and_as_pages_that_came_along() {
    let (mut engine, space) = engine(1000, 100);
    let before = *engine.books().stats();
    let pages = [9, 5, 9, 131, 400, 7, u64::MAX, 1 << 45];
    assert_eq!(load(&mut engine, space, &pages), (8, vec![5, 7, 9]));
    let after = engine.books().stats();
    assert_eq!(after.prefetched - before.prefetched, 3);
    assert_eq!(
        (after.faults, after.swap_in),
        (before.faults, before.swap_in)
    );
    assert_eq!(load(&mut engine, space, &pages), (8, vec![]));
    for nobody in [SpaceId(77), SpaceId(u32::MAX)] {
        assert_eq!(load(&mut engine, nobody, &[10]), (1, vec![]));
    }
    let state = |page| engine.books().entry(space, VirtPage(page)).state;
    assert_eq!(state(400), PageState::Untouched, "no page is made");
}

#[test]
fn a_plan_has_pages_of_one_mapping_and_as_many_as_a_fault() {
    let (mut engine, space) = engine(1000, 528);
    let all: Vec<u64> = (0..100).collect();
    assert_eq!(load(&mut engine, space, &all), (64, all[..64].to_vec()));
    assert_eq!(load(&mut engine, space, &[499, 500, 498]), (1, vec![499]));
    assert_eq!(load(&mut engine, space, &[500, 498]), (1, vec![500]));
}

#[test]
fn none_comes_into_the_reserve_or_before_a_thread_that_waits() {
    let (mut engine, space) = engine(128, 100);
    let room = engine.books().room();
    let all: Vec<u64> = (0..100).collect();
    let (mut came, mut rest) = (Vec::new(), &all[..]);
    while !rest.is_empty() {
        let (done, some) = load(&mut engine, space, rest);
        came.extend(some);
        rest = &rest[done..];
    }
    assert!(!came.is_empty() && came.len() < 100, "{came:?}");
    assert!(!engine.books().reclaim_wanted(), "a page has to leave");
    assert_eq!(engine.books().room(), room - came.len() as i64);
    common::touch(&mut engine, space, VirtPage(300));
    assert!(
        engine.books().reclaim_wanted(),
        "nothing more fits beside the reserve"
    );
    assert_eq!(load(&mut engine, space, &[99]), (1, vec![]));
}

#[test]
fn none_comes_while_the_limit_is_exceeded_or_a_thread_waits_for_room() {
    let (mut engine, space) = engine(200, 100);
    engine.set_limit(PageCount(20).bytes());
    assert_eq!(load(&mut engine, space, &[3]), (1, vec![]));
    let fault = common::answer(&mut engine, space, VirtPage(4));
    assert_eq!(fault, FaultAnswer::NoRoom);
    engine.set_limit(PageCount(200).bytes());
    assert_eq!(
        load(&mut engine, space, &[3]),
        (1, vec![]),
        "before the fault"
    );
    engine.faults().take_waiters(&mut Vec::new());
    assert_eq!(load(&mut engine, space, &[3]), (1, vec![3]));
}
