//! Writes of fork relatives to pages they share: each new frame is counted once, and taken only
//! where there is room.

use crate::common;
use undercroft_base::{Slot, SpaceId, ThreadId, TierId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Engine, Fault, FaultAnswer, Outcome, Taken, VecLedger};

const THREAD: ThreadId = ThreadId(1);

/// A parent with `pages` resident, and its child, under a limit of `limit` pages.
fn family(pages: u64, limit: u64) -> (Engine<VecLedger>, SpaceId, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(4, limit, reclaim);
    let parent = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(pages));
    engine.layout().attached(parent, all);
    engine.discovery().found_resident(parent, all);
    let (child, _) = engine
        .forks()
        .forked(parent, &[])
        .expect("room in the ledger");
    assert_eq!(
        engine.books().resident().0,
        pages,
        "what is shared is counted once"
    );
    (engine, parent, child)
}

fn write(space: SpaceId, page: u64) -> Fault {
    Fault {
        space,
        page: VirtPage(page),
        write: true,
        thread: THREAD,
        urgent: false,
    }
}

#[test]
fn whoever_writes_first_costs_one_frame_and_the_second_none() {
    for child_first in [true, false] {
        let (mut engine, parent, child) = family(8, 1000);
        let (first, second) = if child_first {
            (child, parent)
        } else {
            (parent, child)
        };
        let granted = engine
            .faults()
            .copy_on_write(write(first, 2), &[true; 4], &[second]);
        assert_eq!((granted, engine.books().resident().0), (Ok(4), 12));
        let granted = engine
            .faults()
            .copy_on_write(write(second, 2), &[false; 4], &[first]);
        assert_eq!((granted, engine.books().resident().0), (Ok(4), 12));
        // A scan that finds the same frames changes nothing.
        engine.forks().own_frame(child, VirtPage(3));
        assert_eq!(engine.books().resident().0, 12);
        engine.books().audit();
    }
}

#[test]
fn a_run_ends_where_the_room_or_the_pages_end() {
    let (mut engine, parent, child) = family(8, 11);
    let run = |engine: &mut Engine<VecLedger>, space, other, page, most| {
        engine
            .faults()
            .copy_on_write(write(space, page), &vec![true; most], &[other])
    };
    assert_eq!(run(&mut engine, child, parent, 0, 64), Ok(3));
    assert_eq!(engine.books().room(), 0);
    // No room: the thread waits, and is listed once.
    for _ in 0..3 {
        let answer = run(&mut engine, child, parent, 3, 64);
        assert_eq!(answer, Err(FaultAnswer::NoRoom));
    }
    assert_eq!(engine.books().resident().0, 11);
    // Its own pages have their frames already: no room is needed.
    assert_eq!(run(&mut engine, child, parent, 0, 3), Ok(3));
    assert_eq!(run(&mut engine, parent, child, 0, 3), Ok(3));
    // The thread that makes room does not wait for it.
    let agent = Fault {
        urgent: true,
        ..write(child, 3)
    };
    let urgent = engine.faults().copy_on_write(agent, &[true], &[parent]);
    assert_eq!((urgent, engine.books().resident().0), (Ok(1), 12));
    let mut waiters = Vec::new();
    engine.faults().take_waiters(&mut waiters);
    assert!(waiters.is_empty(), "there is still none");
    engine
        .layout()
        .unmapped(child, VirtRange::new(VirtPage(0), VirtPage(4)));
    engine.faults().take_waiters(&mut waiters);
    assert_eq!(waiters, [(child, VirtPage(3))]);
    // Past the last page nothing is known. The page asked for is let through.
    assert_eq!(run(&mut engine, child, parent, 7, 64), Ok(1));
    assert_eq!(run(&mut engine, child, parent, 8, 64), Ok(1));
    engine.books().audit();
}

/// Pages without a sharer cost nothing and need no room. No copy is made ahead on a guess.
#[test]
fn pages_that_nobody_shares_come_along() {
    let (mut engine, parent, child) = family(8, 8);
    let shared = [false, false, true, false];
    let granted = engine
        .faults()
        .copy_on_write(write(child, 2), &shared, &[parent]);
    assert_eq!(granted, Ok(2));
    assert_eq!(
        engine.books().resident().0,
        10,
        "two inherited pages turn out to be the child's own"
    );
    let waits = engine
        .faults()
        .copy_on_write(write(child, 4), &shared[2..], &[parent]);
    assert_eq!(waits, Err(FaultAnswer::NoRoom));
    engine.books().audit();
}

/// A page that parent and child share is evicted: the child is charged, and finds the parent's copy
/// when its own turn comes. The frame is free when both have left, with one copy for the two.
#[test]
fn a_shared_page_leaves_with_its_heir_s_and_is_stored_once() {
    let (mut engine, parent, child) = family(8, 1000);
    let page = VirtRange::new(VirtPage(5), VirtPage(6));
    let (mut batch, mut wake, mut freed) = (Vec::new(), Vec::new(), Vec::new());
    assert!(engine.evictions().select_these(parent, &[page], &mut batch));
    engine
        .evictions()
        .settle(batch[0].at, Taken::Moved, &mut wake);
    assert_eq!(
        engine.evictions().leave_frame(batch[0].at, &[child]),
        Some((child, VirtPage(5)))
    );
    let stored = Outcome::Stored(TierId(0), Slot(77));
    engine.evictions().publish(batch[0].at, stored, &mut wake);
    assert_eq!(engine.books().resident().0, 8, "the child has the frame");
    assert!(engine.evictions().select_these(child, &[page], &mut batch));
    let (tier, slot, _) = batch[0].retained.expect("the parent's copy");
    assert_eq!((tier, slot), (TierId(0), Slot(77)));
    engine
        .evictions()
        .settle(batch[0].at, Taken::Moved, &mut wake);
    engine
        .evictions()
        .publish(batch[0].at, Outcome::Clean, &mut wake);
    assert_eq!(engine.books().resident().0, 7);
    engine.books().audit();
    // The copy lives as long as one of the two needs it.
    engine.layout().remove_space(parent);
    engine.take_freed(&mut freed);
    assert_eq!(freed, []);
    engine.layout().remove_space(child);
    engine.take_freed(&mut freed);
    assert_eq!(freed, [(TierId(0), Slot(77))]);
}

/// Frames that only an ending process was charged for go to an heir. Frames that another is charged
/// for do not.
#[test]
fn frames_pass_to_an_heir_when_their_owner_ends() {
    let (mut engine, parent, child) = family(8, 1000);
    let granted = engine
        .faults()
        .copy_on_write(write(parent, 0), &[true; 2], &[child]);
    assert_eq!((granted, engine.books().resident().0), (Ok(2), 10));
    engine.forks().bequeath(parent, EVERYTHING, &[child]);
    engine.layout().remove_space(parent);
    assert_eq!(
        engine.books().resident().0,
        8,
        "each of the child's pages once"
    );
    engine.books().audit();
}
