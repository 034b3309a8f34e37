//! Spaces whose memory begins as one file: what one has needed comes to the others in few faults.

use undercroft_base::{PageCount, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{Engine, FaultAnswer, Install, LoadPlan, VecLedger};

use crate::common;

const FILE: TierId = TierId(0);
/// Pages of the file. Each space has the first half from page 2000 on, the second from 100 on.
const PAGES: u64 = 400;
const HALVES: [(u64, u64); 2] = [(2000, 0), (100, PAGES / 2)];

/// An engine with `limit` pages of memory that serves the file.
fn engine(limit: u64, prefetch: &str) -> Engine<VecLedger> {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let prefetch = undercroft_policy::prefetch::by_name(prefetch).expect("a policy");
    let config = common::config(limit, true);
    let mut engine = Engine::new(VecLedger::new(64), reclaim, prefetch, config);
    engine.migrations().only_read(FILE, PageCount(PAGES));
    engine
}

/// A space with slots of its own: the `nth` as many as the file has pages.
fn machine(engine: &mut Engine<VecLedger>, nth: u64) -> SpaceId {
    let space = engine.layout().add_space();
    for (start, at) in HALVES {
        let range = VirtRange::new(VirtPage(start), VirtPage(start + PAGES / 2));
        engine.layout().attached(space, range);
        let first = Slot(nth * PAGES + at);
        let provided = engine.layout().provided(space, range, FILE, first);
        provided.expect("a ledger with room");
    }
    space
}

/// A fault that is served. Returns the pages that came along.
fn needs(engine: &mut Engine<VecLedger>, space: SpaceId, page: u64) -> Vec<u64> {
    let mut plan = LoadPlan::default();
    let fault = common::fault(space, VirtPage(page), false);
    assert_eq!(engine.faults().answer(fault, &mut plan), FaultAnswer::Load);
    let first = plan.items.iter().find(|item| item.demanded);
    assert_eq!(first.map(|item| item.page), Some(VirtPage(page)));
    assert!(plan.items.is_sorted_by_key(|item| item.page));
    for item in &mut plan.items {
        let half = HALVES
            .iter()
            .find(|half| (half.0..half.0 + PAGES / 2).contains(&item.page.0));
        let (start, at) = half.expect("a page of the machine");
        assert_eq!(item.slot.0 % PAGES, at + item.page.0 - start, "{item:?}");
        item.install = Install::Done;
    }
    engine.faults().finish(plan.fault, &mut plan.items);
    engine.books().audit();
    let along = plan.items.iter().filter(|item| !item.demanded);
    along.map(|item| item.page.0).collect()
}

fn is_out(engine: &Engine<VecLedger>, space: SpaceId, page: u64) -> bool {
    engine.books().entry(space, VirtPage(page)).state == PageState::Stored
}

/// The first machine needs these pages, far from each other, so that nothing is guessed.
const NEEDED: [u64; 5] = [2100, 2010, 140, 2050, 180];

fn with_first(limit: u64, prefetch: &str) -> Engine<VecLedger> {
    let mut engine = engine(limit, prefetch);
    let first = machine(&mut engine, 0);
    for page in NEEDED {
        assert_eq!(needs(&mut engine, first, page), []);
    }
    engine
}

#[test]
fn a_known_page_brings_the_other_known_pages_of_its_region_once() {
    let mut engine = with_first(1000, "majority");
    let second = machine(&mut engine, 1);
    assert_eq!(needs(&mut engine, second, 2120), [], "it was not known");
    assert_eq!(needs(&mut engine, second, 2050), [2010, 2100]);
    assert_eq!(needs(&mut engine, second, 180), [140]);
    let third = machine(&mut engine, 2);
    assert_eq!(needs(&mut engine, third, 2010), [2050, 2100, 2120]);
    // Known since, and brought once: what a machine has given back comes no more by itself.
    assert_eq!(needs(&mut engine, third, 2110), []);
    let gone = VirtRange::one(VirtPage(2100));
    engine.layout().removed(third, gone);
    assert_eq!(needs(&mut engine, second, 2110), []);
    let entry = engine.books().entry(third, VirtPage(2100));
    assert_eq!(entry.state, PageState::Untouched);
}

#[test]
fn a_page_that_is_not_the_files_any_more_does_not_come() {
    let mut engine = with_first(1000, "majority");
    let second = machine(&mut engine, 1);
    let gone = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    engine.layout().removed(second, gone(2010, 2011));
    engine.layout().unmapped(second, gone(100, 150));
    assert_eq!(needs(&mut engine, second, 2050), [2100]);
    assert_eq!(needs(&mut engine, second, 180), []);
}

#[test]
fn a_mapping_that_was_cut_gets_the_pages_of_its_part() {
    let mut engine = with_first(1000, "majority");
    let second = machine(&mut engine, 1);
    let hole = VirtRange::new(VirtPage(2020), VirtPage(2040));
    engine.layout().unmapped(second, hole);
    assert_eq!(needs(&mut engine, second, 2050), [2100]);
    assert_eq!(needs(&mut engine, second, 2010), []);
}

#[test]
fn a_quarter_of_the_room_stays_free() {
    let mut engine = engine(200, "majority");
    let first = machine(&mut engine, 0);
    let all: Vec<u64> = (0..70).map(|step| 2000 + step * 37 % 200).collect();
    for page in &all {
        if is_out(&engine, first, *page) {
            needs(&mut engine, first, *page);
        }
    }
    let second = machine(&mut engine, 1);
    let mut most = 0;
    for page in all {
        let room = engine.books().room();
        if !is_out(&engine, second, page) || room < 8 {
            continue;
        }
        let came = needs(&mut engine, second, page).len() as i64;
        assert!(came < 64 && came <= room * 3 / 4, "{came} of {room}");
        most = most.max(came);
    }
    assert!(most >= 20, "{most}");
}

#[test]
fn a_space_that_ended_leaves_nothing_to_the_next_of_its_number() {
    let mut engine = with_first(1000, "majority");
    engine.number_spaces(7, 9);
    let second = machine(&mut engine, 1);
    assert_eq!(needs(&mut engine, second, 2050), [2010, 2100]);
    engine.layout().remove_space(second);
    engine.number_spaces(second.0, 9);
    let third = machine(&mut engine, 1);
    assert_eq!(third, second);
    assert_eq!(needs(&mut engine, third, 2050), [2010, 2100]);
}

#[test]
fn who_wants_no_prefetch_gets_none() {
    let mut engine = with_first(1000, "none");
    let second = machine(&mut engine, 1);
    assert_eq!(needs(&mut engine, second, 2050), []);
}
