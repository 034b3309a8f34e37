//! A fork child's inherited pages: in memory, but unknown to the policy.

use std::collections::HashSet;

use undercroft_base::{
    Bytes, Flags, PageCount, PageNo, PageState, Slot, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{
    Config, Engine, FaultAnswer, Install, LoadPlan, Outcome, Room, Taken, VecLedger,
};
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict, by_name};

use crate::common;

/// Knows what was inserted, and panics when any other page is touched.
#[derive(Default)]
struct Strict(HashSet<PageNo>);

impl Reclaim for Strict {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        assert!(self.0.insert(page));
    }

    fn remove(&mut self, page: PageNo) {
        assert!(self.0.remove(&page));
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        assert!(self.0.contains(&page), "{page:?} is not the policy's");
    }

    fn select(
        &mut self,
        _want: usize,
        _scan_max: usize,
        _verdict: &mut dyn FnMut(PageNo) -> Verdict,
        _out: &mut Vec<PageNo>,
    ) {
    }

    fn shown(&self) -> Shown {
        Shown {
            len: PageCount(self.0.len() as u64),
            metadata: Bytes(0),
            choice: None,
        }
    }
}

/// An engine without prefetch over one tier.
/// * `retain`: copies there are kept.
fn engine(reclaim: Box<dyn Reclaim>, retain: bool) -> Engine<VecLedger> {
    let config = Config {
        limit: Bytes(1 << 20),
        retain: vec![retain],
        demotes: vec![false],
        room: Room::AfterPlan,
    };
    let prefetch = undercroft_policy::prefetch::by_name("none").expect("a policy");
    Engine::new(VecLedger::new(4), reclaim, prefetch, config)
}

#[test]
fn touch_of_an_inherited_page_leaves_the_policy_alone() {
    let mut engine = engine(Box::new(Strict::default()), false);
    let parent = engine.layout().add_space();
    engine
        .layout()
        .attached(parent, VirtRange::new(VirtPage(0), VirtPage(512)));
    let mut plan = LoadPlan::default();
    let fault = common::fault(parent, VirtPage(3), true);
    assert_eq!(engine.faults().answer(fault, &mut plan), FaultAnswer::Load);
    plan.items[0].install = Install::Done;
    engine.faults().finish(plan.fault, &mut plan.items);
    let (child, _) = engine
        .forks()
        .forked(parent, &[])
        .expect("room in the ledger");
    let theirs = engine.uses().number(child, VirtPage(3)).expect("room");
    assert!(engine.uses().touch(theirs, true), "it is in memory");
    engine.forks().own_frame(child, VirtPage(3));
    assert!(engine.uses().touch(theirs, true), "and now the policy's");
    engine.books().audit();
}

/// A fork child's pages may also be in the same space as the parent's: inheriting does not depend
/// on addresses.
#[test]
fn a_page_is_inherited_from_another_of_the_same_space_wherever_that_is() {
    let mut engine = engine(by_name("lru").expect("a policy"), true);
    let space = engine.layout().add_space();
    engine
        .layout()
        .attached(space, VirtRange::new(VirtPage(0), VirtPage(1024)));
    engine
        .discovery()
        .found_resident(space, VirtRange::new(VirtPage(1), VirtPage(3)));
    let (mut batch, mut wake, mut freed) = (Vec::new(), Vec::new(), Vec::new());
    assert!(engine.evictions().select(1, &mut batch));
    assert_eq!(batch[0].page, VirtPage(1));
    // One page in memory, one on its way out, one that was never there. A page that is known
    // already stays as it is.
    for page in 1..4 {
        let to = VirtPage(600 + page);
        assert_eq!(engine.forks().inherit(space, to, VirtPage(page)), Ok(()));
    }
    assert_eq!(
        engine.forks().inherit(space, VirtPage(602), VirtPage(1)),
        Ok(())
    );
    assert_eq!(
        engine.books().resident(),
        PageCount(2),
        "frames are counted once"
    );
    let state =
        |engine: &Engine<VecLedger>, page| engine.books().entry(space, VirtPage(page)).state;
    assert_eq!(state(&engine, 601), PageState::Evicting);
    assert_eq!(state(&engine, 602), PageState::Resident);
    assert_eq!(state(&engine, 603), PageState::Untouched);
    let stored = Outcome::Stored(TierId(0), Slot(5));
    engine
        .evictions()
        .settle(batch[0].at, Taken::Moved, &mut wake);
    engine.evictions().publish(batch[0].at, stored, &mut wake);
    assert_eq!(state(&engine, 601), PageState::Stored);
    // The frame of page 2 goes with it. The process that still has the page is charged, and keeps
    // the copy.
    assert!(engine.evictions().select(1, &mut batch));
    engine
        .evictions()
        .settle(batch[0].at, Taken::Moved, &mut wake);
    engine
        .evictions()
        .leave_frame_to(batch[0].at, space, VirtPage(602));
    engine
        .evictions()
        .publish(batch[0].at, Outcome::Stored(TierId(0), Slot(6)), &mut wake);
    assert_eq!(engine.books().resident(), PageCount(1));
    let heir = engine.books().entry(space, VirtPage(602));
    assert_eq!((heir.state, heir.slot), (PageState::Resident, Slot(6)));
    assert!(heir.flags.has(Flags::RETAINED) && !heir.flags.has(Flags::INHERITED));
    // A copy is freed when no page refers to it.
    engine
        .layout()
        .removed(space, VirtRange::new(VirtPage(0), VirtPage(512)));
    engine.take_freed(&mut freed);
    assert_eq!(freed, []);
    engine
        .layout()
        .removed(space, VirtRange::new(VirtPage(512), VirtPage(1024)));
    engine.take_freed(&mut freed);
    freed.sort_unstable();
    assert_eq!(freed, [(TierId(0), Slot(5)), (TierId(0), Slot(6))]);
    engine.books().audit();
}

/// A page that the books had elsewhere counts as no newer than it was: `active_inactive` puts it
/// with the pages used twice, which leave last.
#[test]
fn a_page_that_is_found_again_is_not_taken_for_a_new_one() {
    let mut engine = engine(by_name("active_inactive").expect("a policy"), false);
    let space = engine.layout().add_space();
    engine
        .layout()
        .attached(space, VirtRange::new(VirtPage(0), VirtPage(512)));
    engine
        .discovery()
        .found_again(space, VirtRange::new(VirtPage(0), VirtPage(2)));
    engine
        .discovery()
        .found_resident(space, VirtRange::new(VirtPage(2), VirtPage(10)));
    let mut batch = Vec::new();
    assert!(engine.evictions().select(4, &mut batch));
    let pages: Vec<u64> = batch.iter().map(|item| item.page.0).collect();
    // Page 0 had to leave these when page 1 came.
    assert_eq!(pages, [0, 2, 3, 4]);
}
