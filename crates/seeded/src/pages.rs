//! Pages with made-up contents that compress like those of real heaps.

use crate::Random;

/// Bytes of a page.
pub const BASE_PAGE_BYTES: usize = 4096;

/// A page of bytes.
pub type Page = [u8; BASE_PAGE_BYTES];

/// A source of random pages.
pub struct Pages(Random);

impl Pages {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Pages {
        Pages(Random::new(seed))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `limit`; 0 when `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.below(limit)
    }

    /// A page as C and Python heaps have them: pointers into a few regions, small integers, short
    /// texts, zeros, floats. LZ4 compresses it to 30-45 %, like the heaps of redis and CPython.
    pub fn heap_like(&mut self) -> Page {
        let mut page = [0; BASE_PAGE_BYTES];
        let region = 0x7f00_0000_0000 + (self.below(64) << 24);
        let mut at = 0;
        while at < BASE_PAGE_BYTES {
            let fields = 4 + self.below(5) as usize;
            for field in 0..fields {
                let word = match (field + self.below(4) as usize) % 7 {
                    0 | 1 => region + (self.below(1 << 20) << 4),
                    2 => self.below(200),
                    3 => u64::from_le_bytes(*b"user:000") + (self.below(1000) << 40),
                    4 if self.below(3) == 0 => (self.number() as f64 / 1e19).to_bits(),
                    _ => 0,
                };
                if at < BASE_PAGE_BYTES {
                    page[at..at + 8].copy_from_slice(&word.to_le_bytes());
                    at += 8;
                }
            }
        }
        page
    }

    /// A page of random bytes, which does not compress.
    pub fn noise(&mut self) -> Page {
        let mut page = [0; BASE_PAGE_BYTES];
        for word in page.as_chunks_mut::<8>().0 {
            *word = self.number().to_le_bytes();
        }
        page
    }

    /// Mostly heap-like pages; some of noise, some nearly empty, some half noise.
    pub fn mixed(&mut self) -> Page {
        match self.below(10) {
            0 => self.noise(),
            1 => {
                let mut page = [0; BASE_PAGE_BYTES];
                page[self.below(BASE_PAGE_BYTES as u64) as usize] = self.number() as u8 | 1;
                page
            }
            2 => {
                let mut page = self.heap_like();
                let cut = self.below(BASE_PAGE_BYTES as u64) as usize;
                page[..cut].copy_from_slice(&self.noise()[..cut]);
                page
            }
            _ => self.heap_like(),
        }
    }
}
