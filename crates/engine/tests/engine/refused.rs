//! Pages that the kernel will not move are not chosen again and again.

use std::collections::BTreeSet;

use crate::common;
use undercroft_base::{PageCount, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{Engine, EvictItem, Outcome, Taken, VecLedger};

const PAGES: u64 = 200;
/// They are refused.
const FIXED: u64 = 40;
/// The pages chosen until a page that was refused once may be chosen again.
const ROTATION: u64 = PAGES;

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// An engine with pages 0 to 200 resident and room for `limit`; the oldest leave first.
fn engine(limit: u64) -> (Engine<VecLedger>, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(2, limit, reclaim);
    let space = engine.layout().add_space();
    engine.layout().attached(space, range(0, 512));
    for page in 0..PAGES {
        common::touch(&mut engine, space, VirtPage(page));
    }
    (engine, space)
}

/// Chooses one batch. The first [`FIXED`] pages are refused, and the others are stored and touched
/// again. Returns the pages that were refused, and how many were chosen.
fn choose(engine: &mut Engine<VecLedger>, space: SpaceId, want: usize) -> (Vec<u64>, u64) {
    let (mut batch, mut wake) = (Vec::<EvictItem>::new(), Vec::new());
    engine.evictions().select(want, &mut batch);
    let (refused, moved): (Vec<EvictItem>, Vec<EvictItem>) =
        (batch.iter()).partition(|item| item.page.0 < FIXED);
    for item in &refused {
        engine.evictions().settle(item.at, Taken::Busy, &mut wake);
    }
    for item in &moved {
        let fill = Outcome::Fill(0);
        engine.evictions().publish(item.at, fill, &mut wake);
    }
    engine.books().audit();
    for item in &moved {
        common::touch(engine, space, item.page);
    }
    (
        refused.iter().map(|item| item.page.0).collect(),
        batch.len() as u64,
    )
}

/// Chooses batches until `chosen` pages were. Returns how often page 0 was refused meanwhile.
fn refusals_of_page_0(engine: &mut Engine<VecLedger>, space: SpaceId, chosen: u64) -> usize {
    let (mut sum, mut refused) = (0, 0);
    while sum < chosen {
        let (pages, count) = choose(engine, space, 20);
        refused += pages.iter().filter(|page| **page == 0).count();
        sum += count;
    }
    refused
}

#[test]
fn a_refused_page_waits_twice_as_long_after_each_refusal() {
    let (mut engine, space) = engine(1000);
    assert_eq!(
        choose(&mut engine, space, 64).0,
        (0..FIXED).collect::<Vec<_>>()
    );
    assert_eq!(engine.books().kept_pages().0, FIXED);
    // It is chosen at most a rotation of the policy's list after it was due.
    let often = |engine: &mut _, rotations| refusals_of_page_0(engine, space, rotations * ROTATION);
    assert_eq!(often(&mut engine, 3), 1);
    // The next waits are 2, 4, 8, 16, 32 and 64 rotations, and 64 from then on.
    let long = often(&mut engine, 200);
    assert!(
        (5..=7).contains(&long),
        "page 0 was refused {long} times in 200 rotations"
    );
}

#[test]
fn refused_pages_are_tried_when_nothing_else_can_leave() {
    let (mut engine, space) = engine(PAGES);
    engine.evictions().set_floor(PageCount(0));
    engine.layout().lock(space, range(FIXED, PAGES), true);
    for _ in 0..3 {
        let (refused, chosen) = choose(&mut engine, space, 64);
        assert_eq!((refused.len() as u64, chosen), (FIXED, FIXED));
    }
}

/// The program locks it for a time after it waited, and before it was chosen.
#[test]
fn a_page_that_was_refused_may_leave_after_it_was_locked() {
    let (mut engine, space) = engine(PAGES);
    engine.evictions().set_floor(PageCount(0));
    engine.layout().lock(space, range(FIXED, PAGES), true);
    assert_eq!(choose(&mut engine, space, 64).1, FIXED);
    assert_eq!(choose(&mut engine, space, 1).0, [0], "all are taken back");
    for on in [true, false] {
        engine.layout().lock(space, range(1, FIXED), on);
    }
    // The policy looks at some of its pages for each batch.
    let chosen: BTreeSet<u64> = (0..20)
        .flat_map(|_| choose(&mut engine, space, 64).0)
        .collect();
    assert_eq!(chosen, (0..FIXED).collect());
}

#[test]
fn a_page_that_leaves_after_all_begins_anew() {
    let (mut engine, space) = engine(PAGES);
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    choose(&mut engine, space, 64);
    for _ in 0..2 {
        choose(&mut engine, space, 64); // so that the refused pages are not recent
        let all = [range(0, FIXED)];
        engine.evictions().select_these(space, &all, &mut batch);
        assert_eq!(
            batch.len() as u64,
            FIXED,
            "the caller may name a page that waits"
        );
        for item in &batch {
            let fill = Outcome::Fill(0);
            engine.evictions().publish(item.at, fill, &mut wake);
        }
        engine.books().audit();
        for page in 0..FIXED {
            common::touch(&mut engine, space, VirtPage(page));
        }
        assert_eq!(refusals_of_page_0(&mut engine, space, 2 * ROTATION), 1);
    }
}

#[test]
fn a_refused_page_waits_on_where_it_has_moved() {
    let (mut engine, space) = engine(1000);
    choose(&mut engine, space, 64);
    for turn in 0..1000 {
        let (from, to) = if turn % 2 == 0 { (0, 300) } else { (300, 0) };
        let from = range(from, from + FIXED);
        (engine.layout().remap_pages(space, from, VirtPage(to))).expect("room");
        engine.books().audit();
    }
    assert_eq!(engine.books().kept_pages().0, FIXED);
    assert_eq!(refusals_of_page_0(&mut engine, space, 3 * ROTATION), 1);
}

/// A page may be refused because it is in use for a moment.
#[test]
fn refused_pages_raise_the_limit_from_the_second_time_on() {
    let (mut engine, space) = engine(PAGES);
    let taken = |engine: &Engine<VecLedger>| engine.books().immovable().0 / 4096;
    assert_eq!(choose(&mut engine, space, 64).0.len() as u64, FIXED);
    assert_eq!((taken(&engine), engine.books().raised().0), (0, 0));
    let mut chosen = 0;
    while taken(&engine) == 0 {
        chosen += choose(&mut engine, space, 20).1;
        assert!(chosen <= 3 * ROTATION, "they are refused a second time");
    }
    while taken(&engine) < FIXED {
        choose(&mut engine, space, 20);
    }
    // They are kept by their mapping, and no longer waited for when it is writable again.
    engine.evictions().set_still(space, range(0, FIXED), true);
    engine.evictions().follow_still(space, range(0, FIXED));
    assert_eq!(taken(&engine), FIXED);
    engine.books().audit();
}

/// Memory that cannot leave is not the working set.
#[test]
fn what_cannot_leave_raises_the_limit_as_far_as_the_rest_needs_it() {
    let (mut engine, space) = engine(PAGES);
    let raised = |engine: &Engine<VecLedger>| engine.books().raised().0 / 4096;
    engine.evictions().set_floor(PageCount(30));
    let held = |engine: &mut Engine<VecLedger>, part: VirtRange, on| {
        engine.evictions().set_still(space, part, on);
        engine.evictions().follow_still(space, part);
        engine.books().audit();
    };
    held(&mut engine, range(0, 100), true);
    assert_eq!(
        choose(&mut engine, space, 64),
        (vec![], 64),
        "none of them is chosen"
    );
    held(&mut engine, range(0, 170), true);
    let taken = |engine: &Engine<VecLedger>| engine.books().immovable().0 / 4096;
    assert_eq!((raised(&engine), taken(&engine)), (0, 170));
    held(&mut engine, range(100, 180), true);
    assert_eq!((raised(&engine), engine.books().room()), (10, 10));
    engine.evictions().set_floor(PageCount(u32::MAX.into()));
    assert_eq!(
        raised(&engine),
        80,
        "the floor is half of the limit at most"
    );
    // It moves or goes: it is not known to stay any more.
    engine
        .layout()
        .remapped(space, range(0, 50), VirtPage(300))
        .expect("room");
    engine.layout().unmapped(space, range(150, 160));
    engine.books().audit();
    assert_eq!(taken(&engine), 120);
    assert_eq!(
        engine.evictions().still_parts(space, range(0, 512)),
        [range(50, 100), range(100, 150), range(160, 180)]
    );
    held(&mut engine, range(60, 170), false);
    assert_eq!(taken(&engine), 20);
}
