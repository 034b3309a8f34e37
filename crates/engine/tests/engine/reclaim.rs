//! When reclaim runs and how much it takes, step by step. The caller here is a client whose pages
//! leave as each test says.

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, Nanos, PageCount, SpaceId, TierId, VirtPage, VirtRange,
};
use undercroft_engine::reclaim::{Ended, Goes, Now, Reclaimer, Step, Turned};
use undercroft_engine::{Engine, Outcome, Taken, VecLedger};
use undercroft_policy::place::{LatencyClass, TierState};

use crate::common;

const LIMIT: u64 = 16_384;
const MS: u64 = 1_000_000;

/// A client at its limit, and its machine.
struct Client {
    engine: Engine<VecLedger>,
    space: SpaceId,
    machine: Reclaimer,
    now: Now,
    touched: u64,
}

impl Client {
    fn new(batches_max: usize) -> Client {
        let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
        let mut engine = common::engine(4 * LIMIT as usize / 512, LIMIT, reclaim);
        let space = engine.layout().add_space();
        let all = VirtRange::new(VirtPage(0), VirtPage(4 * LIMIT));
        engine.layout().attached(space, all);
        engine
            .migrations()
            .set_tiers([TierState::empty(LatencyClass::Device)]);
        Client {
            engine,
            space,
            machine: Reclaimer::new(batches_max),
            now: Now {
                time: Nanos(0),
                limit: Bytes(LIMIT * BASE_PAGE_BYTES as u64),
                paused: false,
                calm: false,
                reads: false,
                named: false,
            },
            touched: 0,
        }
    }

    /// As many pages come as leave room for `room`.
    fn fill(&mut self, room: i64) {
        let allowed = self.engine.faults().set_over_limit(PageCount(1 << 40));
        while self.engine.books().room() > room {
            common::touch(&mut self.engine, self.space, VirtPage(self.touched));
            self.touched += 1;
        }
        self.engine.faults().set_over_limit(allowed);
    }

    fn step(&mut self) -> Step {
        self.machine.step(&mut self.engine, self.now)
    }

    fn steps(&mut self, count: usize) -> Vec<Step> {
        (0..count).map(|_| self.step()).collect()
    }

    fn wait(&mut self, nanos: u64) {
        self.now.time.0 += nanos;
    }

    /// Up to `pages` leave.
    fn evict(&mut self, pages: usize) -> u64 {
        let (mut items, mut wake) = (Vec::new(), Vec::new());
        self.engine.evictions().select(pages, &mut items);
        for item in &items {
            let mut evictions = self.engine.evictions();
            evictions.settle(item.at, Taken::Moved, &mut wake);
            evictions.publish(item.at, Outcome::Fill(0), &mut wake);
        }
        items.len() as u64
    }

    fn ended(&mut self, asked: usize, freed: u64, refused: bool) {
        self.ended_as(Ended {
            asked,
            freed,
            refused,
            unfit: false,
            answer_due: false,
        });
    }

    fn ended_as(&mut self, ended: Ended) {
        self.machine.ended(&mut self.engine, self.now.time, ended);
    }

    /// A batch of `asked` pages leaves.
    fn leaves(&mut self, asked: usize) {
        let freed = self.evict(asked);
        self.ended(asked, freed, false);
    }

    /// By how many pages faults may exceed the limit.
    fn allowed(&mut self) -> u64 {
        let allowed = self.engine.faults().set_over_limit(PageCount(0));
        self.engine.faults().set_over_limit(allowed);
        allowed.0
    }
}

fn rest(ms: u64) -> Step {
    Step::Rest(Nanos(ms * MS))
}

#[test]
fn it_sleeps_until_the_reserve_is_used_and_works_until_half_more_is_free() {
    let mut client = Client::new(1);
    client.fill(64);
    assert_eq!(client.step(), Step::Sleep(Nanos(100 * MS)));
    client.fill(63);
    assert_eq!(client.step(), Step::Choose(64));
    client.leaves(64);
    assert_eq!(client.step(), Step::Enough, "more than 96 pages are free");
    assert_eq!(client.step(), Step::Sleep(Nanos(100 * MS)));
    client.fill(80);
    assert_eq!(client.step(), Step::Sleep(Nanos(100 * MS)));
    client.fill(63);
    client.now.paused = true;
    assert_eq!(client.step(), Step::Sleep(Nanos(100 * MS)));
    client.now.paused = false;
    assert_eq!(client.step(), Step::Choose(64));
    client.now.paused = true;
    client.ended(64, 0, false);
    assert_eq!(client.steps(2), [rest(1), Step::Enough]);
}

#[test]
fn pages_that_are_named_leave_although_there_is_room_and_no_others_do() {
    for batches in [1, 2] {
        let most = [64, 32][batches - 1];
        let mut client = Client::new(batches);
        client.fill(1000);
        assert_eq!(client.step(), Step::Sleep(Nanos(100 * MS)));
        client.now.named = true;
        for _ in 0..batches {
            assert_eq!(client.step(), Step::Named(most));
        }
        for _ in 1..batches {
            assert_eq!(client.step(), Step::Wait);
            client.leaves(most);
        }
        client.leaves(most);
        // None of those that are named can leave: nothing is lent, because there is room.
        assert_eq!(client.step(), Step::Named(most));
        client.ended(most, 0, false);
        assert_eq!(client.allowed(), 0);
        assert_eq!(client.steps(2), [rest(1), Step::Named(most)]);
        // Too little room: others leave, too.
        client.ended(most, 0, false);
        client.fill(63);
        assert_eq!(client.steps(2), [rest(1), Step::Choose(most)]);
        client.ended(most, 0, false);
        client.now.paused = true;
        assert_eq!(
            client.steps(3)[1..],
            [Step::Enough, Step::Sleep(Nanos(100 * MS))]
        );
        client.now.paused = false;
        client.now.named = false;
        client.fill(200);
    }
}

#[test]
fn without_a_limit_there_is_always_room() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(4, u64::MAX >> 12, reclaim);
    for limit in [Bytes(u64::MAX), Bytes(1 << 63)] {
        assert!(engine.books().room() > 1 << 50 && !engine.books().reclaim_wanted());
        engine.set_limit(limit);
    }
}

#[test]
fn sleeps_grow_while_nothing_happens() {
    let mut client = Client::new(1);
    let nap = |client: &mut Client, stirred| {
        let step = client.step();
        client.machine.slept(stirred);
        step
    };
    for _ in 0..50 {
        assert_eq!(nap(&mut client, false), Step::Sleep(Nanos(100 * MS)));
    }
    assert_eq!(nap(&mut client, false), Step::Sleep(Nanos(1000 * MS)));
    client.now.calm = true;
    assert_eq!(nap(&mut client, false), Step::Sleep(Nanos(4000 * MS)));
    assert_eq!(nap(&mut client, true), Step::Sleep(Nanos(4000 * MS)));
    assert_eq!(nap(&mut client, true), Step::Sleep(Nanos(100 * MS)));
}

#[test]
fn pages_are_lent_while_none_can_leave_and_paid_back() {
    let mut client = Client::new(1);
    client.fill(0);
    let late = Ended {
        asked: 64,
        freed: 0,
        refused: false,
        unfit: false,
        answer_due: true,
    };
    assert_eq!(client.step(), Step::Choose(64));
    client.ended_as(late);
    assert_eq!((client.step(), client.allowed()), (rest(1), 0));
    for lent in [16, 32, 48] {
        for _ in 0..2 {
            assert_eq!(client.step(), Step::Choose(64));
            client.ended(64, 0, false);
            let allowed = (client.step(), client.allowed());
            assert_eq!(allowed, (rest(1), lent), "no more while it is not used");
            client.wait(MS);
        }
        client.fill(-(lent as i64));
    }
    // Pages that are about to be found take up what is lent.
    client.engine.discovery().expect_found(PageCount(16));
    for lent in [64, 80] {
        assert_eq!(client.step(), Step::Choose(64));
        client.ended(64, 0, false);
        assert_eq!((client.step(), client.allowed()), (rest(1), lent));
        client.wait(MS);
    }
    client.engine.discovery().expect_found(PageCount(0));
    // The allowance of others stays.
    client.engine.faults().set_over_limit(PageCount(1048));
    assert_eq!(client.step(), Step::Choose(64));
    let freed = client.evict(64);
    client.ended(64, freed, false);
    assert_eq!(client.allowed(), 1048 - freed / 2);
    while client.step() != Step::Enough {
        client.leaves(64);
    }
    assert_eq!(client.allowed(), 0);
}

#[test]
fn full_tiers_are_tried_seldom_and_the_limit_is_exceeded() {
    let mut client = Client::new(1);
    client.fill(0);
    for _ in 0..8 {
        assert_eq!(client.step(), Step::Choose(64));
        client.ended(64, 0, true);
    }
    assert_eq!(client.step(), Step::Full(Nanos(MS)));
    client.machine.exceed(&mut client.engine);
    assert_eq!(client.allowed(), 256);
    client.wait(MS);
    assert_eq!(client.step(), Step::Full(Nanos(0)), "the rest is over");
    for ms in [2, 4, 8, 16, 32, 32] {
        assert_eq!(client.step(), Step::Choose(4), "a trial");
        client.ended(4, 0, true);
        for _ in 0..ms {
            assert_eq!(client.step(), Step::Full(Nanos(MS)));
            client.wait(MS);
        }
        assert_eq!(client.step(), Step::Full(Nanos(0)));
    }
    // The program makes room in the middle of a rest.
    assert_eq!(client.step(), Step::Choose(4));
    client.ended(4, 0, true);
    assert_eq!(client.step(), Step::Full(Nanos(MS)));
    client.evict(64);
    assert_eq!(client.step(), rest(1), "there is room, and not enough");
    client.evict(64);
    assert_eq!(client.step(), Step::Enough);
    assert_eq!(client.allowed(), 0);
    client.fill(0);
    assert_eq!(client.step(), Step::Choose(64), "nothing is remembered");
}

#[test]
fn pages_that_do_not_compress_are_passed_over_after_a_rest() {
    let mut client = Client::new(1);
    client.fill(1);
    let unfit = Ended {
        asked: 64,
        freed: 0,
        refused: true,
        unfit: true,
        answer_due: false,
    };
    for ms in [1, 2, 4] {
        for _ in 0..8 {
            assert_eq!(client.step(), Step::Choose(64));
            client.ended_as(unfit);
        }
        assert_eq!(client.step(), rest(ms));
    }
    client.fill(0);
    for _ in 0..8 {
        assert_eq!(client.step(), Step::Choose(64));
        client.ended_as(unfit);
    }
    assert_eq!(client.step(), Step::Full(Nanos(8 * MS)), "no room either");
}

#[test]
fn several_batches_are_in_flight_as_far_as_they_are_needed() {
    let mut client = Client::new(4);
    client.fill(63);
    let two = [Step::Choose(32), Step::Choose(32), Step::Wait];
    assert_eq!(client.steps(3), two, "33 lack");
    client.fill(31);
    assert_eq!(
        client.steps(2),
        [Step::Choose(32), Step::Wait],
        "65 lack, and 64 come"
    );
    client.fill(-600);
    assert_eq!(
        client.steps(2),
        [Step::Choose(32), Step::Wait],
        "four are all"
    );
    // They end in any order. One that brings nothing does not stop the others.
    client.leaves(32);
    client.ended(32, 0, false);
    assert_eq!(
        client.step(),
        Step::Wait,
        "it would pause: batches are under way"
    );
    client.leaves(32);
    assert_eq!(client.step(), Step::Choose(32));
    client.leaves(32);
    client.leaves(32);
    while client.step() != Step::Enough {
        client.leaves(32);
    }
}

/// A batch that finds no page beside another hides nothing of what the other says, and nothing is
/// lent for it.
#[test]
fn a_batch_without_a_page_beside_one_that_no_tier_takes_changes_nothing() {
    let mut client = Client::new(2);
    client.fill(-600);
    for _ in 0..8 {
        assert_eq!(client.steps(2), [Step::Choose(32); 2]);
        client.ended(32, 0, false);
        assert_eq!(client.allowed(), 0, "the other may bring room");
        assert_eq!(client.step(), Step::Wait);
        client.ended(32, 0, true);
    }
    assert_eq!(client.step(), Step::Full(Nanos(MS)));
}

/// Batches in flight that bring nothing do not wait for each other: the last one lends. Where a
/// fork child shares all pages with its parent, none leaves before the child has its first page.
#[test]
fn batches_that_all_bring_nothing_lend_as_one_does() {
    for batches in 1..=3 {
        let mut client = Client::new(batches);
        client.fill(-600);
        client.engine.faults().set_over_limit(PageCount(600));
        let mut before = 600;
        for _ in 0..3 {
            let all = client.steps(batches);
            assert!(all.iter().all(|step| *step == all[0]), "{all:?}");
            let Step::Choose(asked) = all[0] else {
                panic!("{all:?}")
            };
            for _ in 0..batches {
                assert_eq!(client.allowed(), before, "another may bring room");
                client.ended(asked, 0, false);
            }
            assert_eq!(client.allowed(), before + 16);
            assert_eq!(client.step(), rest(1));
            before = client.allowed();
            client.fill(-(before as i64));
            client.wait(MS);
        }
    }
}

#[test]
fn a_trial_is_alone_and_a_late_success_ends_the_rest() {
    let mut client = Client::new(3);
    client.fill(-600);
    assert_eq!(client.steps(3), [Step::Choose(32); 3]);
    for _ in 0..7 {
        client.ended(32, 0, true);
        assert_eq!(client.step(), Step::Choose(32));
    }
    client.ended(32, 0, true);
    assert_eq!(client.step(), Step::Full(Nanos(MS)));
    client.ended(32, 0, true);
    client.wait(MS);
    assert_eq!(client.step(), Step::Full(Nanos(0)));
    assert_eq!(
        client.step(),
        Step::Wait,
        "a trial waits for the last batch"
    );
    client.ended(32, 0, true);
    client.wait(2 * MS);
    assert_eq!(
        client.step(),
        Step::Full(Nanos(0)),
        "which was another failure"
    );
    assert_eq!(client.steps(2), [Step::Choose(4), Step::Wait]);
    client.leaves(4);
    assert_eq!(
        client.steps(2),
        [Step::Choose(8), Step::Wait],
        "it grows alone"
    );
    client.leaves(8);
    for pages in [16, 32] {
        assert_eq!(client.step(), Step::Choose(pages));
        client.leaves(pages);
    }
    assert_eq!(client.steps(3), [Step::Choose(32); 3]);
}

#[test]
fn latency_control_takes_fewer_pages_and_lets_reads_go_first() {
    let mut client = Client::new(1);
    client.fill(10);
    client.now.reads = true;
    client.engine.turn(Some(Turned {
        batch: 8,
        goes: Goes::ToDevice,
    }));
    let yields = Step::Yield(Nanos(MS));
    assert_eq!(client.steps(2), [yields, Step::Choose(8)], "once a batch");
    client.leaves(8);
    assert_eq!(client.step(), yields);
    client.now.reads = false;
    assert_eq!(client.step(), Step::Choose(8));
    client.leaves(8);
    client.now.reads = true;
    client.fill(0);
    assert_eq!(client.step(), Step::Choose(8), "a fault waits for room");
    client.leaves(8);
    let buffer = TierState::empty(LatencyClass::Nvm);
    client.engine.migrations().set_tiers([buffer]);
    assert_eq!(client.step(), Step::Choose(8), "the pages go to memory");
}

#[test]
fn pages_leave_when_none_moves_down() {
    let (fast, slow) = (LatencyClass::Memory, LatencyClass::Device);
    let mut client = Client::new(1);
    client.engine.migrations().add(TierId(1), slow, 1);
    let full = TierState {
        capacity: Bytes(1 << 20),
        held: Bytes(1 << 20),
        packed: Bytes(1 << 20),
        ..TierState::empty(fast)
    };
    let states = [
        full,
        TierState {
            capacity: Bytes(1 << 30),
            ..TierState::empty(slow)
        },
    ];
    client.engine.migrations().set_tiers(states);
    client.fill(0);
    let step = client.step();
    let down = |step| matches!(step, Step::Demote(of) if of.from == TierId(0));
    assert!(down(step), "{step:?}");
    client.machine.moved_none();
    assert_eq!(client.step(), Step::Choose(64));
    client.leaves(64);
    let step = client.step();
    assert!(down(step), "asked again: {step:?}");
    client.engine.turn(Some(Turned {
        batch: 64,
        goes: Goes::ToBuffer,
    }));
    assert_eq!(
        client.step(),
        Step::Choose(64),
        "none while a bound is in danger"
    );
}
