//! Random numbers that follow from a seed, and stay the same on every machine and for ever.
//!
//! Level 0: no dependency, no I/O. The code is our own, because a trace, a storm and a test must
//! come out of their seed unchanged, whatever a library does to its generators. The generator is
//! SplitMix64 (Steele, Lea, Flood 2014).

mod pages;
mod zipf;

pub use pages::{BASE_PAGE_BYTES, Page, Pages};
pub use zipf::Zipf;

/// The step that SplitMix64 adds to its state with each number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes 64 bits, one to one, so that each bit depends on all. 0 gives 0.
#[inline]
pub fn finish(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The first number of the sequence that begins at `z`: a good hash of 64 bits. Cost: 1 ns.
#[inline]
pub fn mix(z: u64) -> u64 {
    finish(z.wrapping_add(STEP))
}

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins the sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        finish(self.0)
    }

    /// A number below `limit`, by the remainder; 0 when `limit` is 0.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        match limit {
            0 => 0,
            limit => self.bits() % limit,
        }
    }

    /// A number below `limit`, by the high half of a product; 0 if `limit` is 0. Bias below 2^-32
    /// for `limit` < 2^32. Generated traces use this function, so it cannot replace [`below`], nor
    /// `below` it: either would change what follows from a seed.
    ///
    /// [`below`]: Random::below
    #[inline]
    pub fn scaled(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number of [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An index into a collection of `len` things.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `times` of `of` cases.
    pub fn chance(&mut self, times: u64, of: u64) -> bool {
        self.below(of) < times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_published_algorithm() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.bits(), 6_457_827_717_110_365_317);
        assert_eq!(random.bits(), 3_203_168_211_198_807_973);
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
    }

    #[test]
    fn numbers_stay_below_their_limit() {
        let mut random = Random::new(5);
        for limit in 1..200 {
            assert!(random.below(limit) < limit && random.scaled(limit) < limit);
            assert!(random.index(limit as usize) < limit as usize);
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert_eq!((random.below(0), random.scaled(0)), (0, 0));
    }
}
