//! A fork child's inherited pages: in memory, but not the policy's.

use std::collections::HashSet;

use undercroft_base::{Bytes, PageCount, PageNo, ThreadId, VirtPage, VirtRange};
use undercroft_engine::{Config, Engine, Fault, FaultAnswer, Install, LoadPlan, Room, VecLedger};
use undercroft_policy::reclaim::{Arrival, Reclaim, Verdict};

/// Knows what was inserted, and panics at a touch of anything else.
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

    fn len(&self) -> PageCount {
        PageCount(self.0.len() as u64)
    }

    fn metadata_bytes(&self) -> Bytes {
        Bytes(0)
    }

    fn name(&self) -> &'static str {
        "strict"
    }
}

#[test]
fn touch_of_an_inherited_page_leaves_the_policy_alone() {
    let config = Config {
        limit: Bytes(1 << 20),
        retain: vec![false],
        demotes: vec![false],
        room: Room::AfterPlan,
    };
    let prefetch = undercroft_policy::prefetch::by_name("none").expect("a policy");
    let reclaim = Box::new(Strict::default());
    let mut engine = Engine::new(VecLedger::new(4), reclaim, prefetch, config);
    let parent = engine.add_space();
    engine.attached(parent, VirtRange::new(VirtPage(0), VirtPage(512)));
    let mut plan = LoadPlan::default();
    let fault = Fault {
        space: parent,
        page: VirtPage(3),
        write: true,
        thread: ThreadId(1),
    };
    assert_eq!(engine.fault(fault, &mut plan), FaultAnswer::Load);
    plan.items[0].install = Install::Done;
    engine.finish(parent, &mut plan.items);
    let (child, _) = engine.forked(parent, &[]).expect("room in the ledger");
    let theirs = engine.number(child, VirtPage(3)).expect("room");
    assert!(engine.touch(theirs, true), "it is in memory");
    engine.own_frame(child, VirtPage(3));
    assert!(engine.touch(theirs, true), "and now the policy's");
    engine.audit();
}
