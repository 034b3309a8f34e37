//! The contents of every page of the workload: a function of (seed, page, version), so each read
//! can be verified.
//!
//! ```text
//! page = 512 words = 8 blocks of 64 words
//! word 0  tag(seed, page)
//! word 1  version
//! words 2..512  heap-like objects of 8 words (64 bytes):
//!   +0 random   +1 pointer (20 random bits)   +2 small int 0..=255   +3 type word
//!   +4 0        +5 24                         +6 1                   +7 0
//! ```
//! A write of version `v` (1, 2, ...) rewrites block `v % 8` and the header, so the whole page is a
//! function of (page, v) and needs no log. LZ4 compresses such a page about 2.9:1, like real heaps
//! (a test holds the ratio between 2.4 and 3.2).

/// Words of 8 bytes in one page.
pub(crate) const PAGE_WORDS: usize = 512;
const BLOCK_WORDS: usize = 64;
const BLOCKS: u32 = (PAGE_WORDS / BLOCK_WORDS) as u32;
const HEADER_WORDS: usize = 2;

pub(crate) use undercroft_seeded::mix;

/// The pages of one run: their seed decides all content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content {
    pub(crate) seed: u64,
}

impl Content {
    fn tag(self, page: u64) -> u64 {
        mix(self.seed ^ mix(page)) | 1
    }

    /// The version that last rewrote `block` of a page that is now at `version`. 0 is the fill,
    /// which wrote all blocks.
    fn block_version(block: u32, version: u32) -> u32 {
        version.saturating_sub((version % BLOCKS + BLOCKS - block) % BLOCKS)
    }

    fn word(self, page: u64, block_version: u32, index: usize) -> u64 {
        let random =
            || mix(self.seed ^ (page << 34) ^ (u64::from(block_version) << 9) ^ index as u64);
        match index % 8 {
            0 => random(),
            1 => 0x7f3a_0000_0000 | ((random() & 0xf_ffff) << 4),
            2 => random() & 0xff,
            3 => 0x0000_0101_0000_0007,
            5 => 24,
            6 => 1,
            _ => 0,
        }
    }

    /// Writes the whole page at version 0.
    pub(crate) fn fill(self, words: &mut [u64], page: u64) {
        for (index, word) in words.iter_mut().enumerate().skip(HEADER_WORDS) {
            *word = self.word(page, 0, index);
        }
        words[0] = self.tag(page);
        words[1] = 0;
    }

    /// Does a write operation: brings the page to `version`.
    pub(crate) fn write(self, words: &mut [u64], page: u64, version: u32) {
        let start = (version % BLOCKS) as usize * BLOCK_WORDS;
        for (index, word) in words
            .iter_mut()
            .enumerate()
            .take(start + BLOCK_WORDS)
            .skip(start.max(HEADER_WORDS))
        {
            *word = self.word(page, version, index);
        }
        words[1] = u64::from(version);
    }

    /// Does a read operation: checks the header and four words at places chosen by `salt`. False =
    /// wrong bytes.
    pub(crate) fn check_sample(self, words: &[u64], page: u64, version: u32, salt: u64) -> bool {
        let mut places = mix(salt);
        let mut good = words[0] == self.tag(page) && words[1] == u64::from(version);
        for _ in 0..4 {
            let index = (places % PAGE_WORDS as u64) as usize;
            places >>= 16;
            good &= index < HEADER_WORDS || words[index] == self.expected(page, version, index);
        }
        good
    }

    /// Every word of the page. False = wrong bytes.
    pub(crate) fn check_all(self, words: &[u64], page: u64, version: u32) -> bool {
        words[0] == self.tag(page)
            && words[1] == u64::from(version)
            && words
                .iter()
                .enumerate()
                .skip(HEADER_WORDS)
                .all(|(index, word)| *word == self.expected(page, version, index))
    }

    fn expected(self, page: u64, version: u32, index: usize) -> u64 {
        let block = (index / BLOCK_WORDS) as u32;
        self.word(page, Self::block_version(block, version), index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_accepts_any_version_and_refuses_a_flipped_bit() {
        let content = Content { seed: 7 };
        let mut words = vec![0u64; PAGE_WORDS];
        content.fill(&mut words, 42);
        assert!(content.check_all(&words, 42, 0));
        for version in 1..40 {
            content.write(&mut words, 42, version);
            assert!(content.check_all(&words, 42, version), "version {version}");
            assert!(content.check_sample(&words, 42, version, u64::from(version)));
        }
        assert!(
            !content.check_all(&words, 42, 38),
            "stale version must be refused"
        );
        assert!(
            !content.check_all(&words, 43, 39),
            "another page must be refused"
        );
        words[300] ^= 1;
        assert!(
            !content.check_all(&words, 42, 39),
            "a flipped bit must be refused"
        );
        assert!(
            !content.check_all(&[0; PAGE_WORDS], 42, 0),
            "zeros must be refused"
        );
    }

    #[test]
    fn pages_compress_like_real_heaps() {
        let content = Content { seed: 1 };
        let mut stored = 0;
        for page in 0..256u64 {
            let mut words = vec![0u64; PAGE_WORDS];
            content.fill(&mut words, page);
            for version in 1..=(page % 12) as u32 {
                content.write(&mut words, page, version);
            }
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            stored += lz4_flex::block::compress(&bytes).len();
        }
        let ratio = 256.0 * 4096.0 / stored as f64;
        println!("lz4 ratio {ratio:.2}");
        assert!((2.4..=3.2).contains(&ratio), "ratio {ratio:.2}");
    }
}
