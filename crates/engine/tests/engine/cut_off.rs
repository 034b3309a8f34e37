//! A search for victims that ends before it has named a whole batch is told, and no other is.

use std::sync::{Arc, Mutex};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_engine::limits::{EVICT_PAGES_MAX, SELECT_SCAN_MAX};
use undercroft_engine::{BookEvent, Journal, PageEvent, Taken};

use crate::common;

/// What was told of batches: each search that was cut off, and the pages that were chosen.
#[derive(Default)]
struct Told(Mutex<(u32, usize)>);

impl Journal for Told {
    fn note(&self, event: BookEvent) {
        let mut told = self.0.lock().expect("no test thread panicked");
        match event {
            BookEvent::FellShort => told.0 += 1,
            BookEvent::Page(_, _, PageEvent::Chosen) => told.1 += 1,
            _ => {}
        }
    }
}

#[test]
fn a_search_past_used_pages_is_cut_off_and_told_with_what_it_found() {
    let pages = SELECT_SCAN_MAX as u64 + 200;
    let reclaim = undercroft_policy::reclaim::by_name("clock").expect("a policy");
    let mut engine = common::engine(3, 2 * pages, reclaim);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(pages));
    engine.layout().attached(space, all);
    for page in all.pages() {
        common::touch(&mut engine, space, page);
    }
    let told = Arc::new(Told::default());
    engine.set_journal(told.clone());
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    let mut search = |used: u64, want: usize| {
        for page in 0..used {
            let no = engine.uses().number(space, VirtPage(page)).expect("known");
            engine.uses().touch(no, false);
        }
        let before = *told.0.lock().expect("no test thread panicked");
        engine.evictions().select(want, &mut batch);
        for item in &batch {
            let taken = Taken::NotTried;
            engine.evictions().settle(item.at, taken, &mut wake);
        }
        let after = *told.0.lock().expect("no test thread panicked");
        (after.0 - before.0, after.1 - before.1)
    };
    let of_a_batch = 10;
    let used = SELECT_SCAN_MAX as u64 - of_a_batch;
    assert_eq!(search(used, EVICT_PAGES_MAX), (1, of_a_batch as usize));
    assert_eq!(search(0, EVICT_PAGES_MAX), (0, EVICT_PAGES_MAX));
    assert_eq!(search(0, 5), (0, 5));
}
