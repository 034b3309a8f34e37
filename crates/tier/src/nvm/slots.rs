//! Which slots are in use, and which is given out next: the next free one, all the way round. So
//! each place is written as often as the others, and a batch is mostly one run.
//!
//! The bitmap lives in the slot table's memory. Callers hold the tier's mutex.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts over the bitmap, and the word where the search goes on.
#[derive(Debug)]
pub(super) struct Slots {
    at: usize,
    free: u64,
}

impl Slots {
    /// Counts from the bitmap.
    pub(super) fn from_bitmap(bitmap: &[AtomicU64]) -> Slots {
        let zeros = |word: &AtomicU64| u64::from(word.load(Relaxed).count_zeros());
        Slots {
            at: 0,
            free: bitmap.iter().map(zeros).sum(),
        }
    }

    /// Slots that are free.
    pub(super) fn free_slots(&self) -> u64 {
        self.free
    }

    /// Appends up to `want` slots to `slots`; fewer when the tier is full. Cost: a look at each
    /// word of 64 slots between the last slot given out and the next ones.
    pub(super) fn alloc(&mut self, bitmap: &[AtomicU64], want: usize, slots: &mut Vec<u64>) {
        let mut want = want.min(usize::try_from(self.free).unwrap_or(usize::MAX));
        self.free -= want as u64;
        while want > 0 {
            let word = &bitmap[self.at];
            let mut bits = word.load(Relaxed);
            while want > 0 && bits != u64::MAX {
                let bit = bits.trailing_ones();
                bits |= 1 << bit;
                slots.push(self.at as u64 * 64 + u64::from(bit));
                want -= 1;
            }
            word.store(bits, Relaxed);
            if want > 0 {
                self.at = (self.at + 1) % bitmap.len();
            }
        }
    }

    /// Frees a slot. Panics if it is free already: the caller's books are wrong.
    pub(super) fn free(&mut self, bitmap: &[AtomicU64], slot: u64) {
        assert!(
            is_taken(bitmap, slot),
            "slot {slot} of the nvm tier is free already"
        );
        let word = &bitmap[slot as usize / 64];
        word.store(word.load(Relaxed) & !(1 << (slot % 64)), Relaxed);
        self.free += 1;
    }
}

/// Whether the slot exists and is in use.
pub(super) fn is_taken(bitmap: &[AtomicU64], slot: u64) -> bool {
    let word = usize::try_from(slot / 64)
        .ok()
        .and_then(|at| bitmap.get(at));
    word.is_some_and(|word| word.load(Relaxed) >> (slot % 64) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_model::contract::Pages;

    #[test]
    fn slots_are_given_out_in_turn_and_never_twice() {
        let seed = 61;
        println!("seed {seed}");
        let bitmap: Vec<_> = (0..32).map(|_| AtomicU64::new(0)).collect();
        let mut slots = Slots::from_bitmap(&bitmap);
        let mut random = Pages::new(seed);
        let mut live = Vec::new();
        slots.alloc(&bitmap, 100, &mut live);
        assert_eq!(live, (0..100).collect::<Vec<_>>());
        slots.free(&bitmap, live.remove(0));
        slots.alloc(&bitmap, 1, &mut live);
        assert_eq!(live[99], 100, "the next one, not the one that was freed");
        for _ in 0..20_000 {
            let before = live.len();
            slots.alloc(&bitmap, random.below(70) as usize, &mut live);
            assert!(live[before..].iter().all(|&slot| is_taken(&bitmap, slot)));
            for _ in 0..random.below(72).min(live.len() as u64) {
                let at = random.below(live.len() as u64) as usize;
                slots.free(&bitmap, live.swap_remove(at));
            }
            assert_eq!(slots.free_slots(), 32 * 64 - live.len() as u64);
            assert_eq!(Slots::from_bitmap(&bitmap).free_slots(), slots.free_slots());
        }
        slots.alloc(&bitmap, 100_000, &mut live);
        live.sort_unstable();
        assert_eq!(live, (0..32 * 64).collect::<Vec<_>>());
        assert!(!is_taken(&bitmap, 32 * 64) && !is_taken(&bitmap, u64::MAX));
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn slot_that_is_free_is_not_freed_again() {
        let bitmap = [AtomicU64::new(0)];
        Slots::from_bitmap(&bitmap).free(&bitmap, 3);
    }
}
