//! HybridSwap §4: pages that were always used together go to a disk, all others to an SSD. So a
//! disk, which is slow at random, takes writes off the SSD and is read in sequence.
//!
//! ```text
//! pages that leave together
//!   -> history of each known, both times close to those of the others, in the same order?
//!        no  -> SSD
//!        yes -> a sequence, by time of use: [ SSD segment | disk segment ]
//! a fault on one of its pages -> all of it is loaded
//! ```
//! The SSD is the fastest tier below memory, the disk is the last one. Time is counted in pages
//! that were used after they came in. A page has its last two times. Those of a sequence must lie
//! within the mean time that a page stays in memory (§4.2). The SSD segment hides the latency of
//! the disk: as many pages as the program uses meanwhile (§4.3). A page that was loaded along and
//! not used has no history, so a sequence that no longer holds goes to the SSD.
//!
//! Differs: the paper's kernel sees a soft fault for each page that was read ahead. Here such a
//! page is mapped at once, and its time is when a scan of Accessed bits first finds it used. Pages
//! without history go to the SSD by themselves; in the paper they take the whole sequence along. A
//! batch is of one client, so there is nothing to group. The control of §4.4 is in
//! `stall_bound.rs`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use undercroft_base::{Bytes, Nanos, PageNo, TierId};
use undercroft_policy::place::{
    BATCH_PAGES, Event, LatencyClass, Leaving, Loaded, Migration, Place, Shown, TierOrder,
    TierState, waterfall,
};

/// Weight of the newest value in the means of §4.2 and §4.3.
const ALPHA: f64 = 2.0 / 3.0;

/// Shortest sequence worth a request to the disk: 64 KiB.
const SEQUENCE_MIN: usize = 16;

/// Part of a sequence, in quarters, whose order must have been the same twice.
const ORDER_QUARTERS: usize = 3;

/// Latency of a disk that has not been read yet.
const DISK_FIRST: f64 = 12e6;

/// See [`Page::sequence`].
const OF_DISK: u32 = u32::MAX;

/// The record of a page: 12 bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// When it came in last, and the time before; 0 = never.
    last: u32,
    before: u32,
    /// Its sequence while it is away; 0 = none, [`OF_DISK`] = none, but it came from the disk
    /// segment of one.
    sequence: u32,
}

/// Pages that are loaded together, by time of use.
#[derive(Debug, Default)]
struct Sequence {
    pages: Vec<PageNo>,
    /// How many of them, from the first on, are the SSD segment.
    head: usize,
    /// Pages that still belong to it.
    left: usize,
}

/// Access tables (§4.2), and the sequences on the devices.
#[derive(Debug)]
struct Locality {
    pages: Vec<Page>,
    /// Pages that came in and were used so far.
    clock: u32,
    /// Mean time that a page stays, in pages that come in; 0 before the first left.
    lifetime: f64,
    /// Mean nanoseconds between two pages that come in.
    compute: f64,
    /// Time and clock when the mean was brought up to date.
    told: (Nanos, u32),
    sequences: HashMap<u32, Sequence>,
    next: u32,
    /// The pages of the batch that go to the disk, ascending.
    to_disk: Vec<PageNo>,
    /// Kept for its memory.
    strong: Vec<(u32, u32, PageNo)>,
    /// Pages that the program uses while the disk is waited for, lately: the SSD segment. 0 before
    /// the first sequence.
    hides: f64,
    /// By how much SSD segments are longer than that. Infinite: nothing goes to the disk.
    shift: f64,
}

impl Default for Locality {
    fn default() -> Locality {
        Locality {
            pages: Vec::new(),
            clock: 0,
            lifetime: 0.0,
            compute: 0.0,
            told: (Nanos(0), 0),
            sequences: HashMap::new(),
            next: 0,
            to_disk: Vec::new(),
            strong: Vec::new(),
            hides: 0.0,
            shift: 1.0,
        }
    }
}

/// SSD and disk, if there are both.
fn devices(tiers: &[TierState]) -> Option<(usize, usize)> {
    let below = |tier: &TierState| tier.latency != LatencyClass::Memory;
    let ssd = tiers.iter().position(below)?;
    (ssd + 1 < tiers.len()).then(|| (ssd, tiers.len() - 1))
}

fn mean(of: &mut f64, value: f64) {
    *of = if *of == 0.0 {
        value
    } else {
        *of * (1.0 - ALPHA) + value * ALPHA
    };
}

impl Locality {
    fn page(&mut self, no: PageNo) -> &mut Page {
        let at = no.0 as usize;
        if at >= self.pages.len() {
            self.pages.resize(at + 1, Page::default());
        }
        &mut self.pages[at]
    }

    /// The page comes in now.
    fn comes(&mut self, no: PageNo) {
        self.clock = self.clock.wrapping_add(1).max(1);
        let now = self.clock;
        let page = self.page(no);
        (page.before, page.last) = (page.last, now);
    }

    /// The page no longer belongs to its sequence.
    fn leaves_sequence(&mut self, no: PageNo) {
        let of = std::mem::take(&mut self.page(no).sequence);
        let Some(sequence) = self.sequences.get_mut(&of) else {
            return;
        };
        sequence.left -= 1;
        let is_last = sequence.left == 0;
        if sequence.pages[sequence.head..].contains(&no) {
            self.page(no).sequence = OF_DISK;
        }
        if is_last {
            self.sequences.remove(&of);
        }
    }

    /// Whether the pages of `strong`, by their last time, came in close to each other both times,
    /// and in the same order.
    fn is_sequence(&self) -> bool {
        let all = &self.strong;
        let close = |times: &dyn Fn(&(u32, u32, PageNo)) -> u32| {
            let (min, max) = (all.iter().map(times).min(), all.iter().map(times).max());
            f64::from(max.unwrap_or(0) - min.unwrap_or(0)) <= self.lifetime
        };
        let same = all.windows(2).filter(|two| two[0].1 < two[1].1).count();
        all.len() >= SEQUENCE_MIN
            && close(&|page| page.0)
            && close(&|page| page.1)
            && same * 4 >= (all.len() - 1) * ORDER_QUARTERS
    }

    /// Makes the pages of `strong` a sequence, whose first `head` pages go to the SSD.
    fn link(&mut self, head: usize) {
        self.next = self.next.wrapping_add(1).max(1);
        while self.next == OF_DISK || self.sequences.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1).max(1);
        }
        let id = self.next;
        let pages: Vec<PageNo> = self.strong.iter().map(|(.., no)| *no).collect();
        for no in &pages {
            self.page(*no).sequence = id;
        }
        self.to_disk.extend_from_slice(&pages[head..]);
        self.to_disk.sort_unstable();
        let left = pages.len();
        self.sequences.insert(id, Sequence { pages, head, left });
    }

    /// These pages leave together.
    fn leaving(&mut self, pages: &[Leaving], tiers: &[TierState]) {
        self.to_disk.clear();
        self.strong.clear();
        for page in pages {
            self.leaves_sequence(page.no);
            let known = *self.page(page.no);
            if page.unused {
                *self.page(page.no) = Page::default();
            } else if known.last > 0 {
                let stayed = self.clock.wrapping_sub(known.last);
                mean(&mut self.lifetime, f64::from(stayed));
                if known.before > 0 {
                    self.strong.push((known.last, known.before, page.no));
                }
            }
        }
        self.strong.sort_unstable();
        let Some((_, disk)) = devices(tiers) else {
            return;
        };
        if self.compute == 0.0 || !self.is_sequence() {
            return;
        }
        let latency = match tiers[disk].load_ns {
            0 => DISK_FIRST,
            measured => measured as f64,
        };
        self.hides = latency / self.compute;
        let head = (self.hides * self.shift).ceil() as usize;
        if head < self.strong.len() {
            self.link(head);
        }
    }

    /// The least shift at which all pages go to the SSD, as far as it knows by now.
    fn shift_of_all(&self) -> Option<f64> {
        (self.hides > 0.0).then(|| BATCH_PAGES as f64 / self.hides)
    }

    /// Brings the mean time between two pages that come in up to date.
    fn told(&mut self, now: Nanos) {
        let (then, clock) = self.told;
        let came = self.clock.wrapping_sub(clock);
        if came > 0 && now > then {
            mean(&mut self.compute, (now.0 - then.0) as f64 / f64::from(came));
            self.told = (now, self.clock);
        }
    }
}

/// The rule, in the hands of an engine and of its replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held(Arc<Mutex<Locality>>);

impl Held {
    fn rule(&self) -> MutexGuard<'_, Locality> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells it the time since the run began. Told when there is time to move pages.
    pub(crate) fn tell_time(&self, now: Nanos) {
        self.rule().told(now);
    }

    /// Has pages go to the SSD: this many times as many of those that it would divide; 1 = no more,
    /// infinity = all.
    pub(crate) fn set_shift(&self, shift: f64) {
        self.rule().shift = shift;
    }

    /// See [`Locality::shift_of_all`].
    pub(crate) fn shift_of_all(&self) -> Option<f64> {
        self.rule().shift_of_all()
    }
}

impl Place for Held {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        self.rule().order(no, tiers)
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        self.rule().loaded(page)
    }

    fn next_move(&mut self, dram: Bytes, tiers: &[TierState]) -> Option<Migration> {
        self.rule().next_move(dram, tiers)
    }

    fn together(&mut self, no: PageNo, out: &mut Vec<PageNo>) {
        self.rule().together(no, out);
    }

    fn heard(&mut self, event: Event<'_>) {
        self.rule().heard(event);
    }

    fn shown(&self) -> Shown {
        self.rule().shown()
    }
}

impl Place for Locality {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        let order = TierOrder::downwards(tiers.len());
        match devices(tiers) {
            Some((_, disk)) if self.to_disk.binary_search(&no).is_ok() => {
                let mut first = TierOrder::default();
                first.then(TierId(disk as u8));
                (order.iter().filter(|tier| usize::from(tier.0) != disk))
                    .for_each(|tier| first.then(tier));
                first
            }
            _ => order,
        }
    }

    /// No copy of a page of the disk segment is kept: the segment is written as a whole, so that it
    /// can be read as a whole.
    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        self.leaves_sequence(page.no);
        if page.waited > 0 {
            self.comes(page.no);
        }
        self.page(page.no).sequence != OF_DISK && page.tier.keeps_copies()
    }

    /// As `waterfall`, out of memory. What is on the SSD stays there: its order of use is unknown.
    fn next_move(&mut self, _: Bytes, tiers: &[TierState]) -> Option<Migration> {
        let asked = waterfall::relieves(tiers)?;
        (tiers[usize::from(asked.from.0)].latency != LatencyClass::Device).then_some(asked)
    }

    fn together(&mut self, no: PageNo, out: &mut Vec<PageNo>) {
        let of = self.page(no).sequence;
        if let Some(sequence) = self.sequences.get(&of) {
            out.extend_from_slice(&sequence.pages);
        }
    }

    fn heard(&mut self, event: Event<'_>) {
        match event {
            Event::FirstUsed(no) => self.comes(no),
            Event::Leaving(pages, tiers) => self.leaving(pages, tiers),
        }
    }

    fn shown(&self) -> Shown {
        Shown {
            links_pages: true,
            reserve_part: 64, // a sequence is of pages that leave together
            ..Shown::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(latency: LatencyClass, load_ns: u64) -> TierState {
        TierState {
            capacity: Bytes(1 << 30),
            load_ns,
            demotes: true,
            ..TierState::empty(latency)
        }
    }

    /// An SSD of 0.1 ms over a disk of 10 ms.
    fn two() -> [TierState; 2] {
        [
            tier(LatencyClass::Device, 100_000),
            tier(LatencyClass::Device, 10_000_000),
        ]
    }

    fn loaded(place: &mut Locality, no: u32, waited: u64) {
        place.loaded(Loaded {
            no: PageNo(no),
            from: TierId(0),
            tier: &two()[0],
            distance: None,
            waited,
        });
    }

    fn batch(pages: &[u32], unused: bool) -> Vec<Leaving> {
        let of = |no: &u32| Leaving {
            no: PageNo(*no),
            unused,
        };
        pages.iter().map(of).collect()
    }

    /// Pages that came in twice, in these orders, 1 ms each, and leave now; other pages come in
    /// between.
    fn after(first: &[u32], second: &[u32]) -> Locality {
        let mut place = Locality::default();
        let mut now = 0;
        for part in [first, second] {
            for no in part.iter().copied().chain(1000..1100) {
                loaded(&mut place, no, 1);
                now += 1_000_000;
                place.told(Nanos(now));
            }
            // Fifteen of the others stayed for a hundred pages.
            let others: Vec<u32> = (1000..1100).collect();
            place.leaving(&batch(&others[..15], false), &two());
        }
        place
    }

    /// The pages of a batch that go to the disk first.
    fn on_disk(place: &mut Locality, pages: &[u32], unused: bool) -> Vec<u32> {
        place.leaving(&batch(pages, unused), &two());
        let first = |no: &u32| place.order(PageNo(*no), &two()).get(0);
        let mut disk = pages.to_vec();
        let mut first = first;
        disk.retain(|no| first(no) == Some(TierId(1)));
        disk
    }

    #[test]
    fn what_came_twice_in_one_order_is_a_sequence_whose_head_hides_the_disk() {
        let pages: Vec<u32> = (0..40).collect();
        let mut place = after(&pages, &pages);
        assert_eq!(on_disk(&mut place, &pages, false), pages[10..]);
        let mut together = Vec::new();
        place.together(PageNo(5), &mut together);
        assert_eq!(
            together.len(),
            40,
            "all of it is loaded with any of its pages"
        );
        for no in &together {
            loaded(&mut place, no.0, 0);
        }
        assert!(place.sequences.is_empty(), "nothing of it is away");
        together.clear();
        place.together(PageNo(5), &mut together);
        assert_eq!(together, []);
    }

    #[test]
    fn other_orders_new_pages_unused_pages_and_short_sequences_go_to_the_ssd() {
        let pages: Vec<u32> = (0..40).collect();
        let other: Vec<u32> = (0..40).map(|at| at * 17 % 40).collect();
        assert_eq!(on_disk(&mut after(&pages, &other), &pages, false), [0; 0]);
        assert_eq!(on_disk(&mut after(&pages, &[]), &pages, false), [0; 0]);
        assert_eq!(on_disk(&mut after(&pages, &pages), &pages, true), [0; 0]);
        assert_eq!(
            on_disk(&mut after(&pages, &pages), &pages[..12], false),
            [0; 0]
        );
    }

    #[test]
    fn where_the_program_is_faster_than_the_disk_by_a_sequence_nothing_goes_there() {
        let pages: Vec<u32> = (0..40).collect();
        let mut place = after(&pages, &pages);
        place.compute = 100_000.0;
        assert_eq!(on_disk(&mut place, &pages, false), [0; 0]);
    }

    /// A disk that hides behind a tenth of a page: 64 times that are 7 pages.
    #[test]
    fn a_shift_makes_the_ssd_segment_longer_and_an_infinite_one_has_nothing_on_the_disk() {
        let pages: Vec<u32> = (0..40).collect();
        let shifted = |compute: f64, shift: f64| {
            let mut place = after(&pages, &pages);
            place.compute = compute;
            place.shift = shift;
            on_disk(&mut place, &pages, false)
        };
        assert_eq!(shifted(1e6, 2.0), pages[20..]);
        assert_eq!(shifted(1e8, 64.0), pages[7..]);
        assert_eq!(shifted(1e8, f64::INFINITY), [0; 0]);
    }

    /// A batch has 64 pages, and 10 of them hide the disk.
    #[test]
    fn the_shift_of_all_is_that_of_a_sequence_as_long_as_a_batch() {
        let pages: Vec<u32> = (0..40).collect();
        let mut place = after(&pages, &pages);
        assert_eq!(place.shift_of_all(), None, "no sequence has left");
        place.compute = 1e6;
        place.shift = f64::INFINITY;
        on_disk(&mut place, &pages, false);
        assert_eq!(place.shift_of_all(), Some(6.4));
    }

    #[test]
    fn a_sequence_is_forgotten_when_its_pages_leave_again() {
        let pages: Vec<u32> = (0..40).collect();
        let mut place = after(&pages, &pages);
        assert_eq!(on_disk(&mut place, &pages, false).len(), 30);
        for _ in 0..100 {
            on_disk(&mut place, &pages, false);
            assert!(place.sequences.len() <= 1);
        }
    }
}
