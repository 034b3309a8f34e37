//! Neighbours of a fault that no trend explains. They come along from a device where they pay.
//!
//! A page that comes along is mapped at once, so no fault shows whether it is used. So some faults
//! are *samples*: nothing comes along, and the stored pages around are remembered. If such a page
//! faults soon, bringing it would have saved that fault.
//!
//! ```text
//! distance  -15 ... -8 | -7 .. -4 | -3 -2 | -1  fault  +1 | +2 +3 | +4 .. +7 | +8 ... +15
//! ring           3     |    2     |   1   |  0          0 |   1   |     2    |     3
//! ```
//! - For each ring, in each direction: how many pages of samples there were, and how many of them
//!   faulted.
//! - The rings next to the fault come along, as many as gain most. A page that is used gains what
//!   is missing to 1 of the part that must be used ([`PAYS`]), and any other page costs that part.
//! - Where nothing comes along every fault is a sample: that costs nothing. Where something does,
//!   one in [`SAMPLE_EVERY`] is. Meanwhile nothing comes along in the sample's block of 16 pages.
//! - The time is counted in pages that came into memory. Soon means: before a 16th of memory has
//!   come, or a quarter of what is out, if that is less. Under random faults at most 22 % of the
//!   neighbours fault so soon, so none comes along, however much of the program fits.
//! - A sample counts when its time is over. If it counted before, pages that are used at once would
//!   outweigh those that never are.
//! - A pool is no device: there a page costs about as much as it saves, so neither it nor its
//!   neighbours take part.
//!
//! Source: Linux's `swap_vma_readahead` also sizes its window by use, which it sees at the fault
//! that maps a page it had read. Cost: O(1), no allocation after `new` (about 40 KiB).

use std::collections::VecDeque;

use undercroft_base::{PageCount, SpaceId, VirtPage};

use super::FaultSeen;

/// Pages that may come along on each side of a fault.
pub const REACH: u32 = (1 << RINGS) - 1;
const RINGS: usize = 4;

/// Part of the pages brought that must be used, in percent. A page more in a request costs some
/// third of a fault: it is read, it takes a place, and another page leaves for it.
const PAYS: i64 = 35;
/// Faults for each one that brings nothing, where others bring neighbours.
const SAMPLE_EVERY: u64 = 8;
/// Soon: before this part of the pages that memory holds has come, and this part of those that are
/// out of it.
const SOON_PART: u64 = 16;
const OUT_PART: u64 = 4;
/// Samples at a time, and the most pages that come soon.
const SAMPLES: usize = 1024;
/// Pages tried in the nearest ring before it comes along; twice as many in the next.
const TRIED_LEAST: u32 = 32;
/// Pages tried in the nearest ring at which the evidence is halved; twice as many in the next.
const TRIED_MOST: u32 = 128;
/// Places to find a sample by its block.
const PLACES: usize = 4096;
/// No sample is there. A sample's number in `places` has one bit less.
const EMPTY: u16 = u16::MAX;
const NUMBERS: u16 = u16::MAX >> 1;

/// Pages around a fault: bit `REACH + d` stands for the page at distance `d`.
pub type Around = u32;

/// The time, and how long a moment is.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Pages that came into memory so far.
    pub arrivals: u64,
    /// Most pages in memory.
    pub resident_max: PageCount,
    /// Pages out of memory.
    pub stored: PageCount,
}

impl Now {
    /// Pages that come soon.
    fn soon(self) -> u64 {
        let of_memory = self.resident_max.0 / SOON_PART;
        let of_stored = self.stored.0 / OUT_PART;
        of_memory.min(of_stored).clamp(1, SAMPLES as u64)
    }
}

/// Which pages come along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Along {
    /// The pages.
    pub pages: Around,
    /// How many of them are taken to save a fault each.
    pub used: u32,
}

/// Samples of a ring: pages tried, and those of them that faulted soon.
#[derive(Clone, Copy, Default)]
struct Evidence {
    tried: u32,
    used: u32,
}

impl Evidence {
    /// * `most`: halves what is known when this many pages were tried.
    fn add(&mut self, tried: u32, used: u32, most: u32) {
        self.tried += tried;
        self.used += used;
        if self.tried >= most {
            self.tried /= 2;
            self.used /= 2;
        }
    }

    /// The part of the pages that is used, in percent.
    fn percent(self) -> i64 {
        i64::from(self.used * 100 / self.tried.max(1))
    }
}

/// How many rings come along.
fn rings(evidence: &[Evidence; RINGS]) -> usize {
    let (mut gain, mut most, mut count) = (0, 0, 0);
    for (ring, of) in evidence.iter().enumerate() {
        if of.tried < TRIED_LEAST << ring {
            break;
        }
        gain += (of.percent() - PAYS) << ring;
        if gain > most {
            (most, count) = (gain, ring + 1);
        }
    }
    count
}

/// A fault without neighbours.
#[derive(Clone, Copy)]
struct Sample {
    space: SpaceId,
    page: VirtPage,
    /// The stored pages around it, and those of them that have not faulted yet.
    tried: Around,
    waits: Around,
    /// Arrivals before it.
    arrivals: u64,
}

/// Learns which neighbours pay, and names them.
pub struct Neighbours {
    /// The oldest first.
    samples: VecDeque<Sample>,
    /// How many samples there were before the oldest one.
    ended: u64,
    /// The low bits of the number of the last sample of each block, by the block's hash.
    places: Vec<u16>,
    /// Ahead and behind; by ring.
    evidence: [[Evidence; RINGS]; 2],
    /// The pages that come along, and the part of them that is used, in percent.
    brings: Around,
    percent: u32,
    faults: u64,
    /// Hundredths of a used page that were not counted yet.
    rest: u32,
}

fn block(page: VirtPage) -> u64 {
    page.0 >> RINGS
}

fn hash(value: u64) -> u64 {
    value.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn place(space: SpaceId, block: u64) -> usize {
    (hash(block ^ (u64::from(space.0) << 40)) >> 32) as usize % PLACES
}

/// The pages of a ring: the lowest bit is that of the smallest distance.
const fn ring_ahead(ring: usize) -> Around {
    let pages = 1 << ring;
    ((1 << pages) - 1) << (REACH + pages)
}

const fn ring_behind(ring: usize) -> Around {
    let pages = 1 << ring;
    ((1 << pages) - 1) << (REACH + 1 - 2 * pages)
}

const RING: [[Around; RINGS]; 2] = [
    [ring_ahead(0), ring_ahead(1), ring_ahead(2), ring_ahead(3)],
    [
        ring_behind(0),
        ring_behind(1),
        ring_behind(2),
        ring_behind(3),
    ],
];

impl Default for Neighbours {
    fn default() -> Self {
        Neighbours::new()
    }
}

impl Neighbours {
    /// Without history. Allocates all that it will ever use.
    pub fn new() -> Neighbours {
        Neighbours {
            samples: VecDeque::with_capacity(SAMPLES),
            ended: 0,
            places: vec![EMPTY; PLACES],
            evidence: Default::default(),
            brings: 0,
            percent: 0,
            faults: 0,
            rest: 0,
        }
    }

    /// A stored page faulted, on a trend or off it: it was used, if it is a neighbour in a sample.
    pub fn hear(&mut self, fault: FaultSeen) {
        self.faults += 1;
        if self.samples.is_empty() {
            return;
        }
        let here = block(fault.page);
        for block in [here.wrapping_sub(1), here, here.wrapping_add(1)] {
            let at = place(fault.space, block);
            let Some(sample) = self.living(at).filter(|of| of.space == fault.space) else {
                continue;
            };
            let distance = fault.page.0.wrapping_sub(sample.page.0) as i64;
            if distance == 0 {
                // It left again, and its neighbours would have.
                self.places[at] = EMPTY;
            } else if distance.unsigned_abs() <= u64::from(REACH) {
                sample.waits &= !(1 << (i64::from(REACH) + distance));
            }
        }
    }

    /// The living sample of a place.
    fn living(&mut self, place: usize) -> Option<&mut Sample> {
        let low = self.places[place];
        if low == EMPTY {
            return None;
        }
        let at = usize::from(low.wrapping_sub(self.ended as u16) & NUMBERS);
        self.samples.get_mut(at)
    }

    /// Which neighbours come along with a fault off the trend. `look` is called at most once.
    pub fn on_fault(
        &mut self,
        fault: FaultSeen,
        now: Now,
        look: &mut dyn FnMut() -> Around,
    ) -> Along {
        self.end_samples(now);
        let here = block(fault.page);
        let at = place(fault.space, here);
        let holder = self.living(at);
        if let Some(sample) = &holder
            && (sample.space, block(sample.page)) == (fault.space, here)
        {
            return Along::default();
        }
        let free = holder.is_none() && self.samples.len() < SAMPLES;
        let brings = self.brings != 0;
        let samples = !brings || hash(self.faults) >> 32 < (1 << 32) / SAMPLE_EVERY;
        if samples && free {
            self.begin(fault, look(), now, at);
        } else if brings {
            return self.along(look());
        }
        Along::default()
    }

    /// Takes out the samples whose time is over. They count now.
    fn end_samples(&mut self, now: Now) {
        let (soon, ended) = (now.soon(), self.ended);
        while let Some(sample) = self.samples.front().copied() {
            if now.arrivals - sample.arrivals <= soon {
                break;
            }
            self.samples.pop_front();
            self.ended += 1;
            self.learn(&sample);
        }
        if self.ended > ended {
            self.choose();
        }
    }

    fn begin(&mut self, fault: FaultSeen, stored: Around, now: Now, place: usize) {
        if stored == 0 {
            return;
        }
        self.places[place] = (self.ended + self.samples.len() as u64) as u16 & NUMBERS;
        self.samples.push_back(Sample {
            space: fault.space,
            page: fault.page,
            tried: stored,
            waits: stored,
            arrivals: now.arrivals,
        });
    }

    fn learn(&mut self, sample: &Sample) {
        let used = sample.tried & !sample.waits;
        for (rings, masks) in self.evidence.iter_mut().zip(RING) {
            for (ring, (of, mask)) in rings.iter_mut().zip(masks).enumerate() {
                let (tried, used) = (sample.tried & mask, used & mask);
                of.add(tried.count_ones(), used.count_ones(), TRIED_MOST << ring);
            }
        }
    }

    /// Decides anew what comes along.
    fn choose(&mut self) {
        let (mut tried, mut used) = (0, 0);
        self.brings = 0;
        for (evidence, masks) in self.evidence.iter().zip(RING) {
            for (of, mask) in evidence.iter().zip(masks).take(rings(evidence)) {
                self.brings |= mask;
                tried += of.tried;
                used += of.used;
            }
        }
        self.percent = used * 100 / tried.max(1);
    }

    fn along(&mut self, stored: Around) -> Along {
        let pages = self.brings & stored;
        let hundredths = self.rest + pages.count_ones() * self.percent;
        self.rest = hundredths % 100;
        Along {
            pages,
            used: hundredths / 100,
        }
    }
}

#[cfg(test)]
mod tests;
