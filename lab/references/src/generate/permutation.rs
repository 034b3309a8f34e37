//! A permutation of numbers without a table.

use undercroft_seeded::finish;

/// A permutation of 0..count without a table: four Feistel rounds on the next even number of bits,
/// repeated until the result is below `count`.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    count: u64,
    half: u32,
    seed: u64,
}

impl Permutation {
    /// Of 0..`count`, `count` at most 2^62.
    pub(super) fn new(count: u64, seed: u64) -> Permutation {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        Permutation {
            count,
            half: bits.div_ceil(2).max(1),
            seed,
        }
    }

    /// The place of `index` (< count). Fewer than 4 repetitions on average.
    pub(super) fn of(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> self.half, value & mask);
            for round in 0..4u64 {
                let next = left
                    ^ (finish(right ^ self.seed.rotate_left(16 * round as u32) ^ round << 60)
                        & mask);
                (left, right) = (right, next);
            }
            value = left << self.half | right;
            if value < self.count {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_hits_every_number_once() {
        for count in [1, 2, 3, 17, 256, 1000, 4097] {
            let permutation = Permutation::new(count, 7);
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                assert!(!std::mem::replace(
                    &mut seen[permutation.of(index) as usize],
                    true
                ));
            }
        }
    }
}
