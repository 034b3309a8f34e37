//! Reuse (stack) distances: how many other pages were touched since a page was touched last. Exact,
//! or of sampled pages (SHARDS).
//!
//! Olken's method: each page marks the slot of its last touch; the distance is the number of marks
//! behind it, which a Fenwick tree counts in O(log n). Slots are packed when they run out, so that
//! memory is in proportion to the pages.
//!
//! Source of the sampling: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15:
//! fixed rate (§3.1), fixed size (§3.2), and the correction of the first bin (SHARDS-adj, §3.3).
//! Differs: weights are added as 1/rate of their moment instead of rescaling old counts, and the
//! marks are found by page number, 4 bytes a page.

use std::collections::BinaryHeap;

use super::bins::Bins;
use super::curve::MissRatioCurve;
use undercroft_seeded::finish;

/// Sampling draws are below this.
const DRAW_END: u64 = 1 << 24;
const NONE: u32 = u32::MAX;
/// The least number of slots, so that packing stays rare.
const SLOTS_MIN: usize = 1 << 12;

/// Which pages are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sampling {
    /// All of them.
    Exact,
    /// This share of them, above 0 and up to 1.
    Rate(f64),
    /// At most this many pages, at least 1. The rate falls as pages come.
    Pages(u32),
}

/// The outcome of one touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// The page is not sampled.
    Skipped,
    /// Never touched before.
    First,
    /// Other pages touched since, of those that are sampled.
    Distance(u32),
}

/// Collects the distances of a trace. Cost of a touch: O(log pages), nothing for a page that is not
/// sampled.
#[derive(Clone, Debug)]
pub struct ReuseDistances {
    sampling: Sampling,
    /// Pages with a draw below it are sampled.
    draw_end: u64,
    /// Draws of the sampled pages, largest first; for `Sampling::Pages` only.
    draws: BinaryHeap<(u64, u32)>,
    /// By page: the slot of its last touch.
    slot_of: Vec<u32>,
    /// By slot: the page whose last touch it is.
    page_at: Vec<u32>,
    marks: Fenwick,
    next: usize,
    live: usize,
    touches: u64,
    weight: f64,
    first: f64,
    bins: Bins,
    last_page: u32,
}

impl ReuseDistances {
    /// No page was touched yet.
    pub fn new(sampling: Sampling) -> ReuseDistances {
        let draw_end = match sampling {
            Sampling::Rate(rate) => ((rate * DRAW_END as f64).ceil() as u64).clamp(1, DRAW_END),
            Sampling::Exact | Sampling::Pages(_) => DRAW_END,
        };
        ReuseDistances {
            sampling,
            draw_end,
            draws: BinaryHeap::new(),
            slot_of: Vec::new(),
            page_at: vec![NONE; SLOTS_MIN],
            marks: Fenwick::of(&[NONE; SLOTS_MIN]),
            next: 0,
            live: 0,
            touches: 0,
            weight: 0.0,
            first: 0.0,
            bins: match sampling {
                Sampling::Exact => Bins::exact(),
                _ => Bins::rounded(),
            },
            last_page: NONE,
        }
    }

    /// Whether only some pages are sampled, so that all counts are estimates.
    pub fn is_sampled(&self) -> bool {
        self.sampling != Sampling::Exact
    }

    /// Share of pages that are sampled now.
    pub fn rate(&self) -> f64 {
        self.draw_end as f64 / DRAW_END as f64
    }

    /// Touches the page of dense number `page` (see [`crate::pages::PageNumbers`]).
    pub fn touch(&mut self, page: u32) -> Reuse {
        self.touches += 1;
        let draw = match self.sampling {
            Sampling::Exact => 0,
            _ => finish(u64::from(page) ^ 0x5ca1_ab1e_0000_0000) % DRAW_END,
        };
        if draw >= self.draw_end {
            return Reuse::Skipped;
        }
        let weight = 1.0 / self.rate();
        self.weight += weight;
        if page == self.last_page {
            self.bins.add(0, weight);
            return Reuse::Distance(0);
        }
        self.last_page = page;
        if self.slot_of.len() <= page as usize {
            self.slot_of.resize(page as usize + 1, NONE);
        }
        if self.next == self.page_at.len() {
            self.pack();
        }
        let slot = self.slot_of[page as usize];
        let reuse = if slot == NONE {
            self.live += 1;
            self.first += weight;
            Reuse::First
        } else {
            let behind = self.live - self.marks.sum(slot as usize + 1) as usize;
            self.page_at[slot as usize] = NONE;
            self.marks.add(slot as usize, -1);
            self.bins
                .add((behind as f64 * weight).round() as u64, weight);
            Reuse::Distance(behind as u32)
        };
        self.page_at[self.next] = page;
        self.slot_of[page as usize] = self.next as u32;
        self.marks.add(self.next, 1);
        self.next += 1;
        if let (Sampling::Pages(most), Reuse::First) = (self.sampling, reuse) {
            self.draws.push((draw, page));
            while self.draws.len() > most.max(1) as usize {
                self.lower();
            }
        }
        reuse
    }

    /// Lowers the rate until the page with the largest draw is no longer sampled.
    fn lower(&mut self) {
        let Some((draw, _)) = self.draws.peek() else {
            return;
        };
        self.draw_end = (*draw).max(1);
        while let Some((draw, page)) = self.draws.peek().copied() {
            if draw < self.draw_end {
                break;
            }
            self.draws.pop();
            let slot = std::mem::replace(&mut self.slot_of[page as usize], NONE);
            self.page_at[slot as usize] = NONE;
            self.marks.add(slot as usize, -1);
            self.live -= 1;
            if self.last_page == page {
                self.last_page = NONE;
            }
        }
    }

    /// Moves all marks to the beginning, in order, and makes room for as many again.
    fn pack(&mut self) {
        let mut kept: Vec<u32> = self
            .page_at
            .iter()
            .copied()
            .filter(|page| *page != NONE)
            .collect();
        for (slot, page) in kept.iter().enumerate() {
            self.slot_of[*page as usize] = slot as u32;
        }
        self.next = kept.len();
        kept.resize((2 * kept.len()).max(SLOTS_MIN), NONE);
        self.marks = Fenwick::of(&kept);
        self.page_at = kept;
    }

    /// The miss ratio of an LRU cache, by its size in pages. First touches miss.
    pub fn curve(&self) -> MissRatioCurve {
        // SHARDS-adj: the error of the sample in the number of touches is taken as touches at
        // distance 0.
        let adjust = self.touches as f64 - self.weight;
        MissRatioCurve::new(self.touches, self.first, adjust, self.bins.iter())
    }

    /// (least distance, number of touches) in powers of two: [0, 1), [1, 2), [2, 4), ... Estimates
    /// where sampled.
    pub fn histogram(&self) -> Vec<(u64, f64)> {
        let mut octaves: Vec<(u64, f64)> = Vec::new();
        for (distance, weight) in self.bins.iter() {
            let octave = (u64::BITS - distance.leading_zeros()) as usize;
            while octaves.len() <= octave {
                let low = match octaves.len() {
                    0 => 0,
                    length => 1 << (length - 1),
                };
                octaves.push((low, 0.0));
            }
            octaves[octave].1 += weight;
        }
        octaves
    }

    /// Touches of pages never touched before; an estimate if sampled.
    pub fn first_touches(&self) -> f64 {
        self.first
    }
}

/// Sums of prefixes under changes, both in O(log n).
#[derive(Clone, Debug)]
struct Fenwick {
    nodes: Vec<u32>,
}

impl Fenwick {
    /// A mark wherever `pages` is not NONE. Cost: O(n).
    fn of(pages: &[u32]) -> Fenwick {
        let mut nodes: Vec<u32> = pages.iter().map(|page| u32::from(*page != NONE)).collect();
        for index in 0..nodes.len() {
            let parent = index | (index + 1);
            if parent < nodes.len() {
                nodes[parent] += nodes[index];
            }
        }
        Fenwick { nodes }
    }

    fn add(&mut self, mut index: usize, change: i32) {
        while let Some(node) = self.nodes.get_mut(index) {
            *node = node.wrapping_add_signed(change);
            index |= index + 1;
        }
    }

    /// Marks before `end`.
    fn sum(&self, mut end: usize) -> u32 {
        let mut sum = 0;
        while end > 0 {
            sum += self.nodes[end - 1];
            end &= end - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_seeded::Random;

    #[test]
    fn distances_are_those_of_a_plain_stack() {
        for (pages, touches) in [(1u64, 10), (5, 500), (300, 20_000), (3000, 20_000)] {
            let mut random = Random::new(pages);
            let mut distances = ReuseDistances::new(Sampling::Exact);
            let mut stack: Vec<u32> = Vec::new();
            for _ in 0..touches {
                let page = random.scaled(pages).min(random.scaled(pages)) as u32;
                let expected = match stack.iter().rposition(|known| *known == page) {
                    None => Reuse::First,
                    Some(at) => {
                        stack.remove(at);
                        Reuse::Distance((stack.len() - at) as u32)
                    }
                };
                stack.push(page);
                assert_eq!(distances.touch(page), expected);
            }
        }
    }

    #[test]
    fn a_sample_of_fixed_size_keeps_to_it() {
        let mut distances = ReuseDistances::new(Sampling::Pages(100));
        let mut random = Random::new(1);
        for _ in 0..50_000 {
            distances.touch(random.scaled(10_000) as u32);
            assert!(distances.live <= 100);
        }
        assert!(
            (0.005..0.02).contains(&distances.rate()),
            "{}",
            distances.rate()
        );
    }

    #[test]
    fn histogram_has_powers_of_two() {
        let mut distances = ReuseDistances::new(Sampling::Exact);
        for page in [0, 0, 1, 2, 3, 0, 1] {
            distances.touch(page);
        }
        // 0 again at once: 0; 0 after 1 2 3: 3; 1 after 2 3 0: 3.
        assert_eq!(distances.histogram(), [(0, 1.0), (1, 0.0), (2, 2.0)]);
    }
}
