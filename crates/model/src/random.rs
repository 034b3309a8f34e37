//! A small seeded generator (SplitMix64): the same seed gives the same run on every machine.

/// A seeded random generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One step of SplitMix64, as a hash.
pub fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    /// A generator for `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        let out = mix(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        out
    }

    /// In `0..limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        match limit {
            0 => 0,
            limit => self.bits() % limit,
        }
    }

    /// An index of a collection of `len` things.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True `times` times in `of`.
    pub fn chance(&mut self, times: u64, of: u64) -> bool {
        self.below(of) < times
    }
}
