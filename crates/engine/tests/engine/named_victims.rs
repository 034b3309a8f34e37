//! Victims that the caller names: each page once, and none that must stay.

use crate::common;
use undercroft_base::{PageState, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{Engine, EvictItem, Outcome, Taken, VecLedger};

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// An engine with pages 0 to 200 resident; the last 32 of them are recent.
fn engine() -> (Engine<VecLedger>, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(2, 1000, reclaim);
    let space = engine.layout().add_space();
    engine.layout().attached(space, range(0, 512));
    for page in 0..200 {
        common::touch(&mut engine, space, VirtPage(page));
    }
    (engine, space)
}

/// Lets a batch leave. Returns its pages.
fn leave(engine: &mut Engine<VecLedger>, batch: &[EvictItem]) -> Vec<u64> {
    let mut wake = Vec::new();
    for item in batch {
        engine.evictions().settle(item.at, Taken::Moved, &mut wake);
        engine
            .evictions()
            .publish(item.at, Outcome::Fill(0), &mut wake);
    }
    engine.books().audit();
    batch.iter().map(|item| item.page.0).collect()
}

/// Names `ranges` and lets the selected pages leave. Returns them.
fn take(engine: &mut Engine<VecLedger>, space: SpaceId, ranges: &[VirtRange]) -> Vec<u64> {
    let mut batch = Vec::new();
    let any = engine.evictions().select_these(space, ranges, &mut batch);
    assert_eq!(any, !batch.is_empty());
    leave(engine, &batch)
}

#[test]
fn ranges_that_overlap_name_each_page_once() {
    let (mut engine, space) = engine();
    let named = [range(10, 14), range(12, 16), range(10, 11)];
    assert_eq!(take(&mut engine, space, &named), [10, 11, 12, 13, 14, 15]);
    let left = engine.books().entry(space, VirtPage(12));
    assert_eq!(left.state, PageState::Stored);
}

#[test]
fn pages_that_are_gone_locked_recent_or_untouched_stay() {
    let (mut engine, space) = engine();
    assert_eq!(take(&mut engine, space, &[range(0, 3)]), [0, 1, 2]);
    assert_eq!(engine.layout().lock(space, range(5, 6), true).0, 0);
    assert_eq!(take(&mut engine, space, &[range(0, 8)]), [3, 4, 6, 7]);
    assert_eq!(take(&mut engine, space, &[range(166, 300)]), [166, 167]);
}

#[test]
fn a_batch_is_the_most() {
    let (mut engine, space) = engine();
    let taken = take(&mut engine, space, &[range(0, 50), range(50, 100)]);
    assert_eq!(taken, (0..64).collect::<Vec<_>>());
}

/// Wishes lead a batch of `want`; the pages leave. Returns them, and how many were wished.
fn ahead(
    engine: &mut Engine<VecLedger>,
    wishes: &[(SpaceId, u64)],
    want: usize,
) -> (Vec<u64>, u64) {
    let wished = engine.books().stats().wished;
    let mut wishes: Vec<_> = (wishes.iter())
        .map(|(space, page)| (*space, VirtPage(*page)))
        .collect();
    let mut batch = Vec::new();
    assert!(
        engine
            .evictions()
            .select_ahead(&mut wishes, want, &mut batch)
    );
    (
        leave(engine, &batch),
        engine.books().stats().wished - wished,
    )
}

#[test]
fn wishes_lead_the_batch_and_the_policy_fills_it() {
    let (mut engine, space) = engine();
    let wishes = [(space, 100), (space, 90), (space, 100)];
    assert_eq!(ahead(&mut engine, &wishes, 4), (vec![0, 1, 90, 100], 2));
    let many: Vec<_> = (20..60).map(|page| (space, page)).collect();
    assert_eq!(ahead(&mut engine, &many, 3), (vec![20, 21, 22], 3));
}

#[test]
fn wishes_of_no_page_and_of_pages_that_must_stay_change_nothing() {
    let (mut engine, space) = engine();
    assert_eq!(engine.layout().lock(space, range(5, 6), true).0, 0);
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    let mut refused = vec![(space, VirtPage(7))];
    assert!(engine.evictions().select_ahead(&mut refused, 1, &mut batch));
    // It is pinned: it waits until it may be tried again, whatever is wished.
    engine
        .evictions()
        .settle(batch[0].at, Taken::Busy, &mut wake);
    let wishes = [
        (space, 5),
        (space, 7),
        (space, 199),
        (space, 300),
        (SpaceId(77), 8),
    ];
    assert_eq!(ahead(&mut engine, &wishes, 3), (vec![0, 1, 2], 0));
}

#[test]
fn only_wished_pages_leave_although_there_is_room() {
    let (mut engine, space) = engine();
    assert_eq!(engine.layout().lock(space, range(5, 6), true).0, 0);
    let pages = [5, 9, 300, 9, 100];
    let wishes = pages.map(|page| (space, VirtPage(page))).to_vec();
    let mut batch = Vec::new();
    let may =
        |engine: &mut Engine<VecLedger>, page| engine.evictions().may_leave(space, VirtPage(page));
    assert_eq!(
        pages.map(|page| may(&mut engine, page)),
        [false, true, false, true, true]
    );
    let mut left = wishes.clone();
    let mut wished = |engine: &mut Engine<VecLedger>, batch: &mut _| {
        engine.evictions().select_wished(&mut left, 1, batch)
    };
    // A batch of one leaves the others for the next.
    assert!(wished(&mut engine, &mut batch));
    assert_eq!(leave(&mut engine, &batch), [9]);
    assert!(!may(&mut engine, 9), "it has left");
    assert!(wished(&mut engine, &mut batch));
    assert_eq!(leave(&mut engine, &batch), [100]);
    assert!(!wished(&mut engine, &mut batch));
    assert!(left.is_empty());
    let mut again = wishes.clone();
    assert!(!engine.evictions().select_wished(&mut again, 64, &mut batch));
}

/// The ledger has 24 bits for a space, and 36 for a chunk of 512 pages.
#[test]
fn wishes_that_the_ledger_cannot_name_are_passed_over() {
    let (mut engine, space) = engine();
    let numbers = [
        (SpaceId((1 << 24) - 1), 8),
        (SpaceId(1 << 24), 8),
        (SpaceId(u32::MAX), 8),
        (space, (1 << 45) - 1),
        (space, 1 << 45),
        (space, u64::MAX),
        (SpaceId(u32::MAX), u64::MAX),
    ];
    for (at, wish) in (0..).zip(numbers) {
        let wishes = [wish, (space, 100 + at)];
        assert_eq!(
            ahead(&mut engine, &wishes, 2),
            (vec![at, 100 + at], 1),
            "{wish:?}"
        );
    }
}
