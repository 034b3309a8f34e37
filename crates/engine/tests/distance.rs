//! The refault distance that a policy gets: pages selected since this one was, however long storing
//! takes.

mod common;

use std::sync::{Arc, Mutex};

use undercroft_base::{Bytes, PageCount, PageNo, VirtPage, VirtRange};
use undercroft_engine::{Outcome, Taken};
use undercroft_policy::reclaim::lru::Lru;
use undercroft_policy::reclaim::{Arrival, Reclaim, Verdict};

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

    fn len(&self) -> PageCount {
        self.0.len()
    }

    fn metadata_bytes(&self) -> Bytes {
        self.0.metadata_bytes()
    }

    fn name(&self) -> &'static str {
        "noting"
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
