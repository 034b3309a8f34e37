//! Random replacement: any page may leave next. A policy must do better.

use undercroft_base::{Bytes, PageCount, PageNo};
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};
use undercroft_seeded::Random;

const NOWHERE: u32 = u32::MAX;

/// Evicts a page at random.
pub struct RandomReclaim {
    pages: Vec<PageNo>,
    /// Place of each page in `pages`.
    places: Vec<u32>,
    random: Random,
}

impl RandomReclaim {
    /// Empty; the same seed makes the same choices.
    pub fn new(seed: u64) -> RandomReclaim {
        RandomReclaim {
            pages: Vec::new(),
            places: Vec::new(),
            random: Random::new(seed),
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.pages.swap(a, b);
        self.places[self.pages[a].0 as usize] = a as u32;
        self.places[self.pages[b].0 as usize] = b as u32;
    }
}

impl Reclaim for RandomReclaim {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        let at = page.0 as usize;
        if at >= self.places.len() {
            self.places.resize(at + 1, NOWHERE);
        }
        assert_eq!(self.places[at], NOWHERE, "{page:?} is inserted twice");
        self.places[at] = self.pages.len() as u32;
        self.pages.push(page);
    }

    fn remove(&mut self, page: PageNo) {
        let place = self.places[page.0 as usize];
        assert_ne!(place, NOWHERE, "{page:?} is not there");
        self.swap(place as usize, self.pages.len() - 1);
        self.pages.pop();
        self.places[page.0 as usize] = NOWHERE;
    }

    fn touch(&mut self, _page: PageNo, _write: bool) {}

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let mut wanted = want;
        // Skipped pages go to the end, out of the draw.
        let mut skipped = 0;
        for _ in 0..scan_max.min(self.pages.len()) {
            if wanted == 0 {
                break;
            }
            let left = self.pages.len() - skipped;
            let drawn = self.random.index(left);
            self.swap(drawn, left - 1);
            let page = self.pages[left - 1];
            match verdict(page) {
                Verdict::Take => {
                    self.remove(page);
                    out.push(page);
                    wanted -= 1;
                }
                Verdict::Skip => skipped += 1,
            }
        }
    }

    fn shown(&self) -> Shown {
        let numbers = self.pages.capacity() + self.places.capacity();
        Shown {
            len: PageCount(self.pages.len() as u64),
            metadata: Bytes((size_of::<u32>() * numbers) as u64),
            choice: None,
        }
    }
}
