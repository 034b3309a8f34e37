//! The content of a page as one number, and the 4096 bytes that it stands for.
//!
//! `0` = zeros. Top bit set = the low 32 bits repeated. Anything else = 512 words: the first is the
//! number, and the others follow from it. So every byte can be checked, and a page mixed from two
//! contents is no content. With the second bit set, 16 words are the same: it compresses.

use undercroft_base::{BASE_PAGE_BYTES, fill_word};

use undercroft_seeded::mix;

/// The content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Content(pub u64);

const FILL: u64 = 1 << 63;
const SHORT: u64 = 1 << 62;

/// Word `at` of a numbered content, but the first.
fn word_of(number: u64, at: usize) -> u64 {
    let at = if number & SHORT == 0 { at } else { at / 16 };
    mix(number ^ (at as u64) << 48)
}

impl Content {
    /// A page of zeros.
    pub const ZERO: Content = Content(0);

    /// A page of one repeated word.
    pub fn fill(word: u32) -> Content {
        match word {
            0 => Content::ZERO,
            word => Content(FILL | u64::from(word)),
        }
    }

    /// A page whose bytes follow from `number` (1 to 2^63 - 1). No other content has them.
    pub fn numbered(number: u64) -> Content {
        assert!(
            number != 0 && number < FILL,
            "contents are numbered from 1 to 2^63 - 1"
        );
        Content(number)
    }

    /// As [`Content::numbered`], of a page that compresses to a fifth.
    pub fn short(number: u64) -> Content {
        Content::numbered(number | SHORT)
    }

    /// Writes the page's bytes.
    pub fn write_to(self, page: &mut [u8]) {
        let (words, _) = page.as_chunks_mut::<8>();
        let same = (self.0 & 0xffff_ffff) * 0x1_0000_0001;
        for (at, word) in words.iter_mut().enumerate() {
            let value = match (self.0 == 0 || self.0 & FILL != 0, at) {
                (true, _) => same,
                (false, 0) => self.0,
                (false, at) => word_of(self.0, at),
            };
            *word = value.to_ne_bytes();
        }
    }

    /// The page's bytes.
    pub fn bytes(self) -> Box<[u8]> {
        let mut page = vec![0; BASE_PAGE_BYTES].into_boxed_slice();
        self.write_to(&mut page);
        page
    }

    /// The content of these bytes. `None` if they are no content at all (torn, mixed, flipped).
    pub fn of(page: &[u8]) -> Option<Content> {
        if let Some(word) = fill_word(page) {
            return Some(Content::fill(word));
        }
        let (words, rest) = page.as_chunks::<8>();
        let number = u64::from_ne_bytes(*words.first()?);
        let whole =
            rest.is_empty() && page.len() == BASE_PAGE_BYTES && number & FILL == 0 && number != 0;
        let follows = |(at, found): (usize, &[u8; 8])| {
            at == 0 || u64::from_ne_bytes(*found) == word_of(number, at)
        };
        (whole && words.iter().enumerate().all(follows)).then_some(Content(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_bytes_read_back_and_mixtures_are_none() {
        for content in [
            Content::ZERO,
            Content::fill(7),
            Content::numbered(99),
            Content::short(99),
        ] {
            assert_eq!(Content::of(&content.bytes()), Some(content));
        }
        let mut torn = Content::numbered(1).bytes();
        torn[2048..].copy_from_slice(&Content::numbered(2).bytes()[2048..]);
        assert_eq!(Content::of(&torn), None);
        let mut flipped = Content::numbered(3).bytes();
        flipped[4095] ^= 1;
        assert_eq!(Content::of(&flipped), None);
    }
}
