//! Numbers that look random and are the same for the same seed, for ever: SplitMix64, and a
//! permutation.
//!
//! Own code, because a trace must come out of its seed unchanged whatever a library does to its
//! generators.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins the sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`; 0 when `end` is 0. Bias below 2^-32 for `end` < 2^32.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// A number of [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Mixes 64 bits so that each depends on all; one to one.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A permutation of 0..count without a table: four Feistel rounds on the next even number of bits,
/// walked until inside.
#[derive(Clone, Debug)]
pub(crate) struct Permutation {
    count: u64,
    half: u32,
    seed: u64,
}

impl Permutation {
    /// Of 0..`count`, `count` at most 2^62.
    pub fn new(count: u64, seed: u64) -> Permutation {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        Permutation {
            count,
            half: bits.div_ceil(2).max(1),
            seed,
        }
    }

    /// Where `index` (< count) goes. Fewer than 4 walks on average.
    pub fn of(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> self.half, value & mask);
            for round in 0..4u64 {
                let next = left
                    ^ (mix(right ^ self.seed.rotate_left(16 * round as u32) ^ round << 60) & mask);
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

    #[test]
    fn numbers_are_those_of_the_published_algorithm() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }
}
