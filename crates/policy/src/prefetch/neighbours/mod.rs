//! Neighbours of a fault that no trend explains. They come along as far as they pay.
//!
//! A page that comes along is mapped at once, so no fault shows whether it is used. So some faults
//! are *samples*: nothing comes along, and the pages around that could have come are remembered. If
//! such a page faults soon, bringing it would have saved that fault.
//!
//! ```text
//! distance  -15 ... -8 | -7 .. -4 | -3 -2 | -1  fault  +1 | +2 +3 | +4 .. +7 | +8 ... +15
//! ring           3     |    2     |   1   |  0          0 |   1   |     2    |     3
//! ```
//! - For each ring, in each direction: how many pages of samples there were, and how many of them
//!   faulted. Pages on a device and pages in memory are counted apart.
//! - The rings next to the fault come along, as many as gain most. A page that is used gains what
//!   is missing to 1 of the part that must be used ([`PAYS`]), and any other page costs that part.
//! - Where nothing comes along every fault is a sample, as long as there is room for it: that costs
//!   nothing. Where something does, one in [`SAMPLE_EVERY`] is.
//! - Soon means: before a part of memory has left ([`SOON_PART`]). A page that came along would
//!   still be there. Under random faults fewer neighbours fault so soon, so none comes along.
//! - A sample's pages count as tried little by little, until its time is over, and as used at once.
//!   So neighbours that fault within a few faults pay at once, and those of random faults never do.
//!
//! Source: Linux's `swap_vma_readahead` also sizes its window by use, which it sees at the fault
//! that maps a page it had read. Cost: O(1), no allocation after `new` (about 72 KiB).

use std::collections::VecDeque;

use undercroft_base::{PageCount, SpaceId, VirtPage};

use super::FaultSeen;

/// Pages that may come along on each side of a fault.
pub const REACH: u32 = (1 << RINGS) - 1;
const RINGS: usize = 4;

/// Part of the pages brought that must be used, in percent: from memory, from a device.
const PAYS: [i64; 2] = [80, 70];
/// One fault in this many brings nothing, where others bring neighbours.
const SAMPLE_EVERY: u64 = 8;
/// A neighbour counts as used if it faults before this part of the pages in memory has left.
const SOON_PART: u64 = 4;
/// Samples at a time.
const SAMPLES: usize = 1024;
/// Pages of a ring that must have been used before it comes along.
const USED_LEAST: u32 = 8;
/// Pages tried in the nearest ring at which the evidence is halved; twice as many in the next.
const TRIED_MOST: u32 = 64;
/// Places to find a sample by its block.
const PLACES: usize = 16_384;
/// No sample is there. A sample's number in `places` has one bit less.
const EMPTY: u16 = u16::MAX;
const NUMBERS: u16 = u16::MAX >> 1;

/// What is stored around a fault: bit `REACH + d` stands for the page at distance `d`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Around {
    /// Pages that could come along.
    pub stored: u32,
    /// Those of them that a device has. Also the bit of the faulting page, if a device has it.
    pub device: u32,
    /// Evictions so far.
    pub evictions: u64,
    /// Most pages in memory.
    pub resident_max: PageCount,
}

/// Which pages come along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Along {
    /// As [`Around::stored`].
    pub pages: u32,
    /// How many of them are taken to save a fault each.
    pub used: u32,
}

/// The time.
#[derive(Clone, Copy)]
struct Now {
    evictions: u64,
    /// For so many evictions a sample lives.
    soon: u64,
}

/// What samples say of one ring.
#[derive(Clone, Copy, Default)]
struct Evidence {
    /// Pages of samples whose time is over, and those of them that faulted soon.
    tried: u32,
    used: u32,
    /// Pages of living samples, and those of them that have faulted.
    living: u32,
    living_used: u32,
    /// The sum over the pages of living samples: evictions before the sample.
    since: u64,
}

impl Evidence {
    fn begin(&mut self, pages: u32, evictions: u64) {
        self.living += pages;
        self.since += u64::from(pages) * evictions;
    }

    /// * `most`: halves what is known when so many pages were tried.
    fn end(&mut self, pages: u32, used: u32, evictions: u64, most: u32) {
        self.living -= pages;
        self.living_used -= used;
        self.since -= u64::from(pages) * evictions;
        self.tried += pages;
        self.used += used;
        if self.tried >= most {
            self.tried /= 2;
            self.used /= 2;
        }
    }

    fn all_used(&self) -> u32 {
        self.used + self.living_used
    }

    /// The part of the pages that is used, in percent. A living sample counts for the part of its
    /// time that is over.
    fn percent(&self, now: Now) -> i64 {
        let so_far = (now.evictions * u64::from(self.living) - self.since) / now.soon;
        let tried = u64::from(self.tried) + so_far;
        (u64::from(self.all_used()) * 100 / tried.max(1)).min(100) as i64
    }
}

/// How many rings come along.
fn rings(evidence: &[Evidence; RINGS], now: Now, pays: i64) -> usize {
    let (mut gain, mut most, mut count) = (0, 0, 0);
    for (ring, of) in evidence.iter().enumerate() {
        if of.all_used() < USED_LEAST {
            break;
        }
        gain += (of.percent(now) - pays) << ring;
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
    /// The pages that count as tried, and those of them that have not faulted yet.
    tried: u32,
    waits: u32,
    device: u32,
    /// Evictions before it.
    evictions: u64,
}

/// Learns which neighbours pay, and names them.
pub struct Neighbours {
    /// The oldest first.
    samples: VecDeque<Sample>,
    /// How many samples there were before the oldest one.
    ended: u64,
    /// The low bits of the number of the last sample of each block, by the block's hash.
    places: Vec<u16>,
    /// In memory and on a device; ahead and behind; by ring.
    evidence: [[[Evidence; RINGS]; 2]; 2],
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
const fn ring_ahead(ring: usize) -> u32 {
    let pages = 1 << ring;
    ((1 << pages) - 1) << (REACH + pages)
}

const fn ring_behind(ring: usize) -> u32 {
    let pages = 1 << ring;
    ((1 << pages) - 1) << (REACH + 1 - 2 * pages)
}

const RING: [[u32; RINGS]; 2] = [
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
            faults: 0,
            rest: 0,
        }
    }

    /// A stored page faulted, on a trend or off it: it was used, if it is a neighbour in a sample.
    pub fn hear(&mut self, fault: FaultSeen) {
        self.faults += 1;
        let here = block(fault.page);
        for block in [here.wrapping_sub(1), here, here.wrapping_add(1)] {
            let Some(sample) = self.sample(fault.space, block) else {
                continue;
            };
            let distance = fault.page.0.wrapping_sub(sample.page.0) as i64;
            if distance == 0 {
                // It left again, and its neighbours would have.
                self.places[place(fault.space, block)] = EMPTY;
                continue;
            }
            let bit = (i64::from(REACH) + distance) as u64;
            if bit > u64::from(2 * REACH) || sample.waits >> bit & 1 == 0 {
                continue;
            }
            sample.waits &= !(1 << bit);
            let device = usize::from(sample.device >> bit & 1 == 1);
            let ring = distance.unsigned_abs().ilog2() as usize;
            self.evidence[device][usize::from(distance < 0)][ring].living_used += 1;
        }
    }

    /// The living sample of a block.
    fn sample(&mut self, space: SpaceId, of: u64) -> Option<&mut Sample> {
        let low = self.places[place(space, of)];
        if low == EMPTY {
            return None;
        }
        let at = usize::from(low.wrapping_sub(self.ended as u16) & NUMBERS);
        let found = self.samples.get_mut(at)?;
        (found.space == space && block(found.page) == of).then_some(found)
    }

    /// Which neighbours come along with a fault off the trend.
    pub fn on_fault(&mut self, fault: FaultSeen, around: &Around) -> Along {
        let now = Now {
            evictions: around.evictions,
            soon: (around.resident_max.0 / SOON_PART).max(1),
        };
        self.end_samples(now);
        if self.sample(fault.space, block(fault.page)).is_some() {
            return Along::default();
        }
        let along = self.along(around, now);
        if along.pages == 0 || hash(self.faults) >> 32 < (1 << 32) / SAMPLE_EVERY {
            self.begin(fault, around);
            return Along::default();
        }
        along
    }

    /// Takes out the samples whose time is over. Their pages are tried now.
    fn end_samples(&mut self, now: Now) {
        while let Some(sample) = self.samples.front().copied() {
            if now.evictions - sample.evictions <= now.soon {
                break;
            }
            self.samples.pop_front();
            self.ended += 1;
            self.weigh(&sample, |of, ring, mask| {
                let pages = (sample.tried & mask).count_ones();
                let used = (sample.tried & !sample.waits & mask).count_ones();
                of.end(pages, used, sample.evictions, TRIED_MOST << ring);
            });
        }
    }

    fn begin(&mut self, fault: FaultSeen, around: &Around) {
        if self.samples.len() == SAMPLES {
            return;
        }
        let number = (self.ended + self.samples.len() as u64) as u16 & NUMBERS;
        self.places[place(fault.space, block(fault.page))] = number;
        let sample = Sample {
            space: fault.space,
            page: fault.page,
            tried: around.stored,
            waits: around.stored,
            device: around.device,
            evictions: around.evictions,
        };
        self.samples.push_back(sample);
        self.weigh(&sample, |of, _, mask| {
            of.begin((sample.tried & mask).count_ones(), sample.evictions);
        });
    }

    /// Changes the evidence of each ring. `change` gets the ring and its pages.
    fn weigh(&mut self, sample: &Sample, change: impl Fn(&mut Evidence, usize, u32)) {
        let kinds = [!sample.device, sample.device];
        for (sides, kind) in self.evidence.iter_mut().zip(kinds) {
            for (rings, masks) in sides.iter_mut().zip(RING) {
                for (ring, (of, mask)) in rings.iter_mut().zip(masks).enumerate() {
                    change(of, ring, mask & kind);
                }
            }
        }
    }

    /// The neighbours that pay. A page in memory does not wait for one on a device.
    fn along(&mut self, around: &Around, now: Now) -> Along {
        let (mut pages, mut hundredths) = (0, self.rest);
        let kinds = 1 + (around.device >> REACH & 1) as usize;
        for device in 0..kinds {
            let of = [!around.device, around.device][device] & around.stored;
            for (side, evidence) in self.evidence[device].iter().enumerate() {
                let count = rings(evidence, now, PAYS[device]);
                for (ring, mask) in RING[side][..count].iter().enumerate() {
                    let percent = evidence[ring].percent(now) as u32;
                    pages |= of & mask;
                    hundredths += (of & mask).count_ones() * percent;
                }
            }
        }
        self.rest = hundredths % 100;
        Along {
            pages,
            used: hundredths / 100,
        }
    }
}

#[cfg(test)]
mod tests;
