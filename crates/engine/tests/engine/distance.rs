//! The refault distance that a policy gets: pages selected since this one was, however long storing
//! takes.

use std::sync::{Arc, Mutex};

use undercroft_base::{Bytes, Flags, PageCount, PageNo, Slot, TierId, VirtPage, VirtRange};
use undercroft_engine::{Engine, Outcome, Taken, VecLedger};
use undercroft_policy::place::{LatencyClass, Loaded, Migration, Place, TierOrder, TierState};
use undercroft_policy::reclaim::lru::Lru;
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};

use crate::common;

/// `lru` that notes the last arrival.
struct Noting(Lru, Arc<Mutex<Option<Arrival>>>);

impl Reclaim for Noting {
    fn insert(&mut self, page: PageNo, arrival: Arrival) {
        *self.1.lock().expect("one thread") = Some(arrival);
        self.0.insert(page, arrival);
    }

    fn remove(&mut self, page: PageNo) {
        self.0.remove(page);
    }

    fn touch(&mut self, page: PageNo, write: bool) {
        self.0.touch(page, write);
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        self.0.select(want, scan_max, verdict, out);
    }

    fn shown(&self) -> Shown {
        self.0.shown()
    }
}

#[test]
fn distance_counts_pages_chosen_whether_they_are_published_or_not() {
    for published in [1, 17, 64] {
        let last = Arc::new(Mutex::new(None));
        let reclaim = Box::new(Noting(Lru::new(), last.clone()));
        let mut engine = common::engine(2, 1000, reclaim);
        let space = engine.layout().add_space();
        engine
            .layout()
            .attached(space, VirtRange::new(VirtPage(0), VirtPage(512)));
        for page in 0..200 {
            common::touch(&mut engine, space, VirtPage(page));
        }
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        assert!(engine.evictions().select(64, &mut batch));
        for item in &batch[..published] {
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            engine
                .evictions()
                .publish(item.at, Outcome::Fill(7), &mut wake);
        }
        common::touch(&mut engine, space, batch[0].page);
        let distance = PageCount(64);
        let arrival = *last.lock().expect("one thread");
        assert_eq!(arrival, Some(Arrival::SwapIn { distance }), "{published}");
        engine.books().audit();
    }
}

/// A page that leaves clean keeps its old copy, and with it the copy's stamp.
#[test]
fn distance_of_a_page_that_left_clean_counts_from_when_it_left() {
    distance_of_a_clean_page(false);
}

#[test]
fn distance_of_a_clean_page_is_the_same_after_a_move() {
    distance_of_a_clean_page(true);
}

fn distance_of_a_clean_page(moved: bool) {
    let last = Arc::new(Mutex::new(None));
    let reclaim = Box::new(Noting(Lru::new(), last.clone()));
    let mut engine = common::engine_with(4, 2000, reclaim, true);
    let space = engine.layout().add_space();
    let pages = VirtRange::new(VirtPage(0), VirtPage(1024));
    engine.layout().attached(space, pages);
    for page in 0..960 {
        common::touch(&mut engine, space, VirtPage(page));
    }
    leave(&mut engine, 64); // page 0 among them
    leave(&mut engine, 640);
    common::touch(&mut engine, space, VirtPage(0));
    let clean = leave(&mut engine, 960 - 704 + 1);
    assert_eq!(clean, 1, "page 0, last of all");
    for page in 960..1024 {
        common::touch(&mut engine, space, VirtPage(page));
    }
    leave(&mut engine, 64);
    let (from, to) = (VirtRange::one(VirtPage(0)), VirtPage(4096));
    if moved {
        let target = VirtRange::new(to, to.plus(512));
        engine.layout().attached(space, target);
        let result = engine.layout().remap_pages(space, from, to);
        assert!(result.is_ok(), "the ledger has room");
    }
    common::touch(&mut engine, space, if moved { to } else { from.start });
    let Some(Arrival::SwapIn { distance }) = *last.lock().expect("one thread") else {
        panic!("the page was loaded");
    };
    let near = PageCount(64)..=PageCount(64 + 16);
    assert!(near.contains(&distance), "{distance:?}");
    engine.books().audit();
}

/// Evicts `count` pages. Returns how many were clean.
fn leave(engine: &mut Engine<VecLedger>, count: usize) -> u64 {
    let before = engine.books().stats().clean_dropped;
    let (mut batch, mut wake, mut left) = (Vec::new(), Vec::new(), 0);
    while left < count {
        assert!(
            engine
                .evictions()
                .select((count - left).min(64), &mut batch)
        );
        for item in &batch {
            left += 1;
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            let outcome = match item.retained {
                Some(_) => Outcome::Clean,
                None => Outcome::Stored(TierId(0), Slot(item.no.0.into())),
            };
            engine.evictions().publish(item.at, outcome, &mut wake);
        }
    }
    engine.books().stats().clean_dropped - before
}

/// News of a page for a placement: its tier, its distance, and the faults that waited.
type Heard = Vec<(PageNo, TierId, Option<PageCount>, u64)>;

/// Notes the pages that were loaded, and has their copies kept or not.
struct Keeps(bool, Arc<Mutex<Heard>>);

impl Place for Keeps {
    fn order(&mut self, _: PageNo, tiers: &[TierState]) -> TierOrder {
        TierOrder::downwards(tiers.len())
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        let heard = (page.no, page.from, page.distance, page.waited);
        self.1.lock().expect("one thread").push(heard);
        self.0
    }

    fn next_move(&mut self, _: Bytes, _: &[TierState]) -> Option<Migration> {
        None
    }
}

/// A page that is one repeated word comes from no tier.
#[test]
fn a_placement_hears_once_of_a_page_that_was_loaded_and_says_whether_the_copy_stays() {
    for keeps in [true, false] {
        let heard = Arc::new(Mutex::new(Heard::new()));
        let mut engine = common::engine_with(2, 1000, Box::new(Lru::new()), true);
        engine.set_place(Box::new(Keeps(keeps, heard.clone())));
        let tier = TierState::empty(LatencyClass::Device);
        engine.migrations().set_tiers([tier]);
        let space = engine.layout().add_space();
        let all = VirtRange::new(VirtPage(0), VirtPage(512));
        engine.layout().attached(space, all);
        for page in 0..200 {
            common::touch(&mut engine, space, VirtPage(page));
        }
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        assert!(engine.evictions().select(64, &mut batch));
        let outcomes = [Outcome::Stored(TierId(0), Slot(7)), Outcome::Fill(7)];
        for (item, outcome) in batch.iter().zip(outcomes) {
            engine.evictions().settle(item.at, Taken::Moved, &mut wake);
            engine.evictions().publish(item.at, outcome, &mut wake);
        }
        for item in &batch[..2] {
            common::touch(&mut engine, space, item.page);
        }
        let expected = [(batch[0].no, TierId(0), Some(PageCount(64)), 1)];
        assert_eq!(*heard.lock().expect("one thread"), expected);
        let entry = engine.books().entry(space, batch[0].page);
        assert_eq!(entry.flags.has(Flags::RETAINED), keeps);
    }
}
