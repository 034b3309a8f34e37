//! A placement that links pages at random: what the engine must bear of one that links the wrong
//! pages, or pages that are long gone.

use undercroft_base::{Bytes, PageNo};
use undercroft_policy::place::waterfall::Waterfall;
use undercroft_policy::place::{BATCH_PAGES, Event, Migration, Place, Shown, TierOrder, TierState};
use undercroft_seeded::Random;

/// Pages that are remembered.
const KNOWN_MAX: usize = 256;

/// Tiers as `waterfall` has them; pages that left at some time are loaded together.
pub(super) struct Tangle {
    random: Random,
    known: Vec<PageNo>,
}

impl Tangle {
    pub(super) fn new(seed: u64) -> Tangle {
        Tangle {
            random: Random::new(seed ^ 0x7a9),
            known: Vec::new(),
        }
    }
}

impl Place for Tangle {
    fn order(&mut self, _: PageNo, tiers: &[TierState]) -> TierOrder {
        TierOrder::downwards(tiers.len())
    }

    fn next_move(&mut self, dram: Bytes, tiers: &[TierState]) -> Option<Migration> {
        Waterfall.next_move(dram, tiers)
    }

    fn together(&mut self, _: PageNo, out: &mut Vec<PageNo>) {
        if self.known.is_empty() || self.random.chance(1, 3) {
            return;
        }
        // More than a plan holds, and some of them twice.
        for _ in 0..self.random.below(2 * BATCH_PAGES) {
            out.push(self.known[self.random.index(self.known.len())]);
        }
    }

    fn heard(&mut self, event: Event<'_>) {
        let Event::Leaving(pages, _) = event else {
            return;
        };
        for page in pages {
            if self.known.len() < KNOWN_MAX {
                self.known.push(page.no);
            } else {
                let at = self.random.index(KNOWN_MAX);
                self.known[at] = page.no;
            }
        }
    }

    fn shown(&self) -> Shown {
        Shown {
            links_pages: true,
            ..Shown::default()
        }
    }
}
