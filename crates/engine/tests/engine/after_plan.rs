//! Room made after the plan: memory is used to the last page, and the policy's order alone decides.

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, PageCount, PageNo, PageState, Slot, SpaceId, TierId,
};
use undercroft_base::{ThreadId, VirtPage, VirtRange};
use undercroft_engine::{Config, Engine, Fault, FaultAnswer, Install, LoadPlan};
use undercroft_engine::{Outcome, Room, Taken, VecLedger};
use undercroft_policy::reclaim::Arrival;

struct One {
    engine: Engine<VecLedger>,
    space: SpaceId,
    plan: LoadPlan,
    next_slot: u64,
}

impl One {
    fn new(frames: u64, reclaim: &str, prefetch: &str) -> One {
        let config = Config {
            limit: Bytes(frames * BASE_PAGE_BYTES as u64),
            retain: vec![true],
            demotes: vec![false],
            room: Room::AfterPlan,
        };
        let mut engine = Engine::new(
            VecLedger::new(2),
            undercroft_policy::reclaim::by_name(reclaim).expect("a policy"),
            undercroft_policy::prefetch::by_name(prefetch).expect("a policy"),
            config,
        );
        let space = engine.layout().add_space();
        engine
            .layout()
            .attached(space, VirtRange::new(VirtPage(0), VirtPage(512)));
        One {
            engine,
            space,
            plan: LoadPlan::default(),
            next_slot: 0,
        }
    }

    /// An use of a page, served as in the simulator. Returns the pages that left for it.
    fn access(&mut self, page: u64, write: bool) -> Vec<u64> {
        let no = self
            .engine
            .uses()
            .number(self.space, VirtPage(page))
            .expect("room");
        if self.engine.uses().touch(no, write) {
            return Vec::new();
        }
        let fault = Fault {
            space: self.space,
            page: VirtPage(page),
            write,
            thread: ThreadId(1),
            urgent: false,
        };
        assert_eq!(
            self.engine.faults().answer(fault, &mut self.plan),
            FaultAnswer::Load
        );
        let (mut left, mut batch, mut wake) = (Vec::new(), Vec::new(), Vec::new());
        while self.engine.books().room() < 0 {
            assert!(
                self.engine.evictions().select(1, &mut batch),
                "somebody can leave"
            );
            self.engine
                .evictions()
                .settle(batch[0].at, Taken::Moved, &mut wake);
            self.next_slot += 1;
            let outcome = Outcome::Stored(TierId(0), Slot(self.next_slot));
            self.engine
                .evictions()
                .publish(batch[0].at, outcome, &mut wake);
            left.push(batch[0].page.0);
        }
        for item in &mut self.plan.items {
            item.install = Install::Done;
        }
        self.engine
            .faults()
            .finish(self.plan.fault, &mut self.plan.items);
        self.engine.books().audit();
        left
    }
}

#[test]
fn memory_is_used_to_the_last_page_and_the_policy_alone_chooses() {
    for frames in [1, 2, 3, 100] {
        let mut one = One::new(frames, "lru", "none");
        for page in 0..frames {
            assert_eq!(one.access(page, false), [0u64; 0], "{frames} frames");
        }
        assert_eq!(one.engine.books().resident(), PageCount(frames));
        one.access(0, false); // used again: another lap
        let expected = if frames == 1 { 0 } else { 1 };
        assert_eq!(one.access(frames, false), [expected], "{frames} frames");
        assert_eq!(one.engine.books().resident(), PageCount(frames));
    }
}

#[test]
fn a_window_makes_room_for_itself_and_no_page_of_it_leaves_for_the_others() {
    let mut one = One::new(16, "lru", "readahead");
    for page in 0..64 {
        one.access(page, false);
    }
    for page in 0..32 {
        one.access(page, false);
    }
    assert!(
        one.engine.books().stats().prefetched > 8,
        "a scan is read ahead"
    );
    assert_eq!(one.engine.books().stats().resident_peak, PageCount(16 + 8));
    assert_eq!(one.engine.books().resident(), PageCount(16));
}

#[test]
fn touch_tells_a_use_from_a_fault() {
    let mut one = One::new(2, "lru", "none");
    let no = one
        .engine
        .uses()
        .number(one.space, VirtPage(7))
        .expect("room");
    assert_eq!(one.engine.uses().number(one.space, VirtPage(7)), Ok(no));
    assert!(!one.engine.uses().touch(no, true));
    one.access(7, true);
    assert!(one.engine.uses().touch(no, true));
    one.access(8, true);
    one.access(7, false);
    assert_eq!(one.access(9, false), [8], "7 was used later");
    let state = one.engine.books().entry(one.space, VirtPage(8)).state;
    assert_eq!(state, PageState::Stored);
}

#[test]
fn metadata_is_the_ledger_and_what_the_policy_holds() {
    let mut one = One::new(512, "lru", "none");
    let mut policy = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    for page in 0..512u32 {
        one.access(page.into(), false);
        policy.insert(PageNo(page), Arrival::FirstTouch);
    }
    let least = 512 * 8 + policy.shown().metadata.0;
    let metadata = one.engine.books().metadata_bytes();
    assert!((least..least + 512).contains(&metadata), "{metadata}");
}
