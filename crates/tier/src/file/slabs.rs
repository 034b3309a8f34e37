//! Which slots of the file are in use, and in what order they are given out: slab by slab, so that
//! a batch is one write.
//!
//! The bitmap lives in the slot table's memory. The counts here are rebuilt from it. Callers hold
//! the tier's mutex.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::SLAB_SLOTS;

/// Bitmap words of one slab.
pub(super) const SLAB_WORDS: usize = SLAB_SLOTS as usize / 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Takes no space: never written, or discarded.
    Clean,
    /// No slot in use, but space still allocated; listed in `dirty`.
    Dirty,
    /// Being filled.
    Current,
    /// Has slots in use (or had just now), and is not being filled.
    Used,
    /// Empty, and in no list until its space is discarded.
    Discarding,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    state: State,
    live: u16,
}

/// Counts and lists over the bitmap.
#[derive(Debug)]
pub(super) struct Slabs {
    slabs: Vec<Slab>,
    /// The slab being filled, and the next slot to try.
    current: Option<(u32, u32)>,
    /// Empty slabs, oldest first. They are reused before clean ones, because their space is
    /// allocated already.
    dirty: VecDeque<u32>,
    /// Clean slabs before this one are in `clean`; those from it on are not.
    fresh: u32,
    clean: Vec<u32>,
    free_slots: u64,
    occupied: u64,
}

/// The bitmap words.
#[derive(Clone, Copy)]
pub(super) struct Bitmap<'a>(pub(super) &'a [AtomicU64]);

impl Bitmap<'_> {
    pub(super) fn is_taken(&self, slot: u64) -> bool {
        self.0[slot as usize / 64].load(Relaxed) >> (slot % 64) & 1 == 1
    }

    fn set(&self, slot: u64, taken: bool) {
        let word = &self.0[slot as usize / 64];
        let bit = 1 << (slot % 64);
        let old = word.load(Relaxed);
        word.store(if taken { old | bit } else { old & !bit }, Relaxed);
    }

    /// The first free slot of `slab` at or after `index`.
    fn first_free(&self, slab: u32, index: u32) -> Option<u32> {
        let mut index = index;
        while index < SLAB_SLOTS {
            let word = self.0[slab as usize * SLAB_WORDS + index as usize / 64].load(Relaxed);
            let skipped = (word >> (index % 64)).trailing_ones();
            if index % 64 + skipped < 64 {
                return Some(index + skipped);
            }
            index = (index / 64 + 1) * 64;
        }
        None
    }
}

impl Slabs {
    /// Counts from the bitmap. Slabs without a used slot count as clean: the caller discards what
    /// it cannot know of.
    pub(super) fn from_bitmap(bitmap: Bitmap<'_>, slabs: u32) -> Slabs {
        let mut this = Slabs {
            slabs: Vec::with_capacity(slabs as usize),
            current: None,
            dirty: VecDeque::with_capacity(slabs as usize),
            fresh: 0,
            clean: Vec::with_capacity(slabs as usize),
            free_slots: u64::from(slabs) * u64::from(SLAB_SLOTS),
            occupied: 0,
        };
        for words in bitmap.0.chunks_exact(SLAB_WORDS).take(slabs as usize) {
            let live: u32 = words
                .iter()
                .map(|word| word.load(Relaxed).count_ones())
                .sum();
            let state = if live == 0 { State::Clean } else { State::Used };
            this.occupied += u64::from(live != 0);
            this.free_slots -= u64::from(live);
            this.slabs.push(Slab {
                state,
                live: live as u16,
            });
        }
        this
    }

    /// Slots that are free.
    pub(super) fn free_slots(&self) -> u64 {
        self.free_slots
    }

    /// Slabs whose space is allocated, or may be.
    pub(super) fn occupied(&self) -> u64 {
        self.occupied
    }

    /// All slabs from this one on are clean. Cost: O(slabs).
    pub(super) fn end(&self) -> u64 {
        let last = self
            .slabs
            .iter()
            .rposition(|slab| slab.state != State::Clean);
        last.map_or(0, |slab| slab as u64 + 1)
    }

    /// Slabs with used slots, and the one being filled.
    pub(super) fn in_use(&self) -> usize {
        self.occupied as usize - self.dirty.len()
    }

    /// Appends up to `want` slots to `slots`, ascending inside a slab; fewer when the file is full.
    /// Cost: O(1) a slot while there are empty slabs. After that a scan of the slab counts for each
    /// slab that is reused.
    pub(super) fn alloc(&mut self, bitmap: Bitmap<'_>, want: usize, slots: &mut Vec<u64>) {
        let want = want.min(usize::try_from(self.free_slots).unwrap_or(usize::MAX));
        for _ in 0..want {
            let Some(slot) = self.next_slot(bitmap) else {
                return;
            };
            bitmap.set(slot, true);
            self.slabs[(slot / u64::from(SLAB_SLOTS)) as usize].live += 1;
            self.free_slots -= 1;
            slots.push(slot);
        }
    }

    /// Frees a slot. Panics if it is free already: the caller's books are wrong.
    pub(super) fn free(&mut self, bitmap: Bitmap<'_>, slot: u64) {
        let known = slot < self.slabs.len() as u64 * u64::from(SLAB_SLOTS);
        assert!(
            known && bitmap.is_taken(slot),
            "slot {slot} of the file tier is free already"
        );
        bitmap.set(slot, false);
        self.free_slots += 1;
        let number = (slot / u64::from(SLAB_SLOTS)) as u32;
        let slab = &mut self.slabs[number as usize];
        slab.live -= 1;
        if slab.live == 0 && slab.state == State::Used {
            slab.state = State::Dirty;
            self.dirty.push_back(number);
        }
    }

    /// If more than `keep` slabs are empty, takes the one that has been empty longest out of the
    /// lists, to be discarded.
    pub(super) fn take_surplus(&mut self, keep: usize) -> Option<u32> {
        let current = self.current.map(|(slab, _)| self.slabs[slab as usize].live);
        if keep == 0 && current == Some(0) {
            self.retire_current();
        }
        if self.dirty.len() <= keep {
            return None;
        }
        let slab = self.dirty.pop_front()?;
        self.slabs[slab as usize].state = State::Discarding;
        Some(slab)
    }

    /// The space of a slab from `take_surplus` was discarded.
    pub(super) fn discarded(&mut self, slab: u32) {
        self.slabs[slab as usize].state = State::Clean;
        self.occupied -= 1;
        if slab < self.fresh {
            self.clean.push(slab); // otherwise `fresh_slab` finds it
        }
    }

    fn next_slot(&mut self, bitmap: Bitmap<'_>) -> Option<u64> {
        loop {
            let (slab, index) = match self.current {
                Some(current) => current,
                None => (self.next_slab()?, 0),
            };
            match bitmap.first_free(slab, index) {
                Some(free) => {
                    self.current = Some((slab, free + 1));
                    return Some(u64::from(slab) * u64::from(SLAB_SLOTS) + u64::from(free));
                }
                None => {
                    self.current = Some((slab, SLAB_SLOTS));
                    self.retire_current();
                }
            }
        }
    }

    fn retire_current(&mut self) {
        let Some((number, _)) = self.current.take() else {
            return;
        };
        let slab = &mut self.slabs[number as usize];
        if slab.live == 0 {
            slab.state = State::Dirty;
            self.dirty.push_back(number);
        } else {
            slab.state = State::Used;
        }
    }

    fn next_slab(&mut self) -> Option<u32> {
        let slab = self
            .dirty
            .pop_front()
            .or_else(|| self.clean.pop())
            .or_else(|| self.fresh_slab())
            .or_else(|| self.emptiest())?;
        let state = &mut self.slabs[slab as usize].state;
        self.occupied += u64::from(*state == State::Clean);
        *state = State::Current;
        self.current = Some((slab, 0));
        Some(slab)
    }

    fn fresh_slab(&mut self) -> Option<u32> {
        while (self.fresh as usize) < self.slabs.len() {
            self.fresh += 1;
            if self.slabs[self.fresh as usize - 1].state == State::Clean {
                return Some(self.fresh - 1);
            }
        }
        None
    }

    fn emptiest(&self) -> Option<u32> {
        let used = |(_, slab): &(usize, &Slab)| {
            slab.state == State::Used && u32::from(slab.live) < SLAB_SLOTS
        };
        let slabs = self.slabs.iter().enumerate().filter(used);
        slabs
            .min_by_key(|(_, slab)| slab.live)
            .map(|(number, _)| number as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Pages;

    #[test]
    fn slabs_batches_are_consecutive_then_reuse_the_emptiest() {
        let words: Vec<_> = (0..3 * SLAB_WORDS).map(|_| AtomicU64::new(0)).collect();
        let bitmap = Bitmap(&words);
        let mut slabs = Slabs::from_bitmap(bitmap, 3);
        let mut slots = Vec::new();
        slabs.alloc(bitmap, 300, &mut slots);
        assert_eq!(slots, (0..300).collect::<Vec<_>>());
        slabs.alloc(bitmap, 1000, &mut slots);
        assert_eq!(slots, (0..768).collect::<Vec<_>>());
        for slot in [3, 4, 300, 301, 302, 700] {
            slabs.free(bitmap, slot);
        }
        let mut again = Vec::new();
        slabs.alloc(bitmap, 10, &mut again);
        assert_eq!(again, [300, 301, 302, 3, 4, 700]);
        assert_eq!(slabs.occupied(), 3);
    }

    #[test]
    fn slabs_random_use_never_gives_a_slot_twice_and_discards_all() {
        let seed = 21;
        println!("seed {seed}");
        let words: Vec<_> = (0..16 * SLAB_WORDS).map(|_| AtomicU64::new(0)).collect();
        let bitmap = Bitmap(&words);
        let mut slabs = Slabs::from_bitmap(bitmap, 16);
        let mut random = Pages::new(seed);
        let mut live = Vec::new();
        for _ in 0..20_000 {
            let before = live.len();
            slabs.alloc(bitmap, random.below(70) as usize, &mut live);
            assert!(live[before..].iter().all(|&slot| bitmap.is_taken(slot)));
            let drop = random.below(72).min(live.len() as u64);
            for _ in 0..drop {
                let at = random.below(live.len() as u64) as usize;
                slabs.free(bitmap, live.swap_remove(at));
            }
            if let Some(slab) = slabs.take_surplus(2) {
                slabs.discarded(slab);
            }
            let taken: u32 = words
                .iter()
                .map(|word| word.load(Relaxed).count_ones())
                .sum();
            assert_eq!(taken as usize, live.len());
            assert_eq!(slabs.free_slots, 16 * 256 - live.len() as u64);
        }
        for slot in live.drain(..) {
            slabs.free(bitmap, slot);
        }
        while let Some(slab) = slabs.take_surplus(0) {
            slabs.discarded(slab);
        }
        assert_eq!(slabs.occupied(), 0);
        slabs.alloc(bitmap, 100_000, &mut live);
        assert_eq!(live.len(), 16 * 256);
    }
}
