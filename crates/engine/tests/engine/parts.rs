//! Changes of many pages, made a chunk at a time with the engine let go of in between, and what
//! happens where the ledger has no place.

use crate::common;
use undercroft_base::{PageState, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Engine, EvictItem, LedgerFull, Outcome, Taken, VecLedger};

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// An engine, and a space with resident pages in `chunks` chunks.
fn engine(chunks: usize, used: u64) -> (Engine<VecLedger>, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(chunks, 1 << 20, reclaim);
    let space = engine.layout().add_space();
    engine.layout().attached(space, range(0, 1 << 20));
    for chunk in 0..used {
        engine
            .discovery()
            .found_resident(space, range(chunk * 512 + 7, chunk * 512 + 27));
    }
    (engine, space)
}

/// Evicts a few pages of the space, into the entry itself.
fn evict_some(engine: &mut Engine<VecLedger>) -> Vec<EvictItem> {
    let mut items = Vec::new();
    engine.evictions().select(8, &mut items);
    let mut wake = Vec::new();
    for item in &items {
        engine.evictions().settle(item.at, Taken::Moved, &mut wake);
        engine
            .evictions()
            .publish(item.at, Outcome::Fill(5), &mut wake);
    }
    items
}

#[test]
fn parts_are_the_known_chunks_and_no_more() {
    let (engine, space) = engine(16, 3);
    let parts = engine.books().parts(space, EVERYTHING);
    assert_eq!(parts, [range(0, 512), range(512, 1024), range(1024, 1536)]);
    assert_eq!(
        engine.books().parts(space, range(100, 600)),
        [range(100, 512), range(512, 600)]
    );
    for most in 1..4 {
        let (mut left, mut all) = (range(100, 4096), Vec::new());
        loop {
            let some = engine.books().some_parts(space, left, most);
            assert!(some.len() <= most);
            let Some(last) = some.last() else { break };
            left.start = last.end;
            all.extend(some);
        }
        assert_eq!(all, engine.books().parts(space, range(100, 4096)));
    }
    assert_eq!(engine.books().parts(space, range(4096, 8192)), []);
    assert_eq!(engine.books().parts(space, range(5, 5)), []);
}

/// Pages leave the parent between the parts of a fork: the child has each page once, there or
/// stored.
#[test]
fn a_fork_in_parts_agrees_with_pages_that_leave_meanwhile() {
    let (mut engine, parent) = engine(32, 8);
    let child = engine.forks().begin_fork(parent).expect("a number");
    let mut gone = Vec::new();
    for part in engine.books().parts(parent, EVERYTHING) {
        engine
            .forks()
            .inherit_range(parent, child, part, &[])
            .expect("room in the ledger");
        gone.extend(evict_some(&mut engine).into_iter().map(|item| item.page));
    }
    engine.books().audit();
    for chunk in 0..8 {
        for page in range(chunk * 512 + 7, chunk * 512 + 27).pages() {
            let (old, new) = (
                engine.books().entry(parent, page),
                engine.books().entry(child, page),
            );
            assert_eq!(old.state == PageState::Stored, gone.contains(&page));
            // What left before its part was copied is stored for both. After it, the child has the
            // frame.
            assert!(matches!(new.state, PageState::Stored | PageState::Resident));
        }
    }
    for space in [parent, child] {
        for part in engine.books().parts(space, EVERYTHING) {
            engine.layout().removed(space, part);
            engine.books().audit();
        }
        engine.layout().remove_space(space);
    }
    assert_eq!(engine.books().resident().0, 0);
}

#[test]
fn a_full_ledger_takes_back_nothing_that_is_there_and_loses_nothing_stored() {
    let (mut engine, parent) = engine(4, 3);
    let child = engine.forks().begin_fork(parent).expect("a number");
    let parts = engine.books().parts(parent, EVERYTHING);
    assert!(
        engine
            .forks()
            .inherit_range(parent, child, parts[0], &[])
            .is_ok()
    );
    let refused = engine.forks().inherit_range(parent, child, parts[1], &[]);
    assert_eq!(refused, Err(LedgerFull));
    let away = engine.books().away(parent, parts[1]);
    assert_eq!(away, [], "all of it is there");
    while engine.books().entry(parent, VirtPage(519)).state != PageState::Stored {
        assert!(!evict_some(&mut engine).is_empty());
    }
    let away = engine.books().away(parent, parts[1]);
    assert!(
        away.iter().any(|range| range.contains(VirtPage(519))),
        "{away:?}"
    );
    engine.books().audit();
}
