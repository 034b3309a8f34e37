//! The pages of an address space that a trace has, and whether they are resident. It takes 160
//! bytes for each 2 MiB with such pages, so that a fork child may begin with a copy of its
//! parent's.

use std::collections::BTreeMap;
use std::ops::Range;

use undercroft_base::CHUNK_PAGES;

const PAGES: u64 = CHUNK_PAGES as u64;
const WORDS: usize = CHUNK_PAGES as usize / 64;

/// Pages by chunk: a bit each.
#[derive(Clone, Copy, Default)]
struct Chunk {
    told: [u64; WORDS],
    there: [u64; WORDS],
}

/// The known pages of one address space.
#[derive(Clone, Default)]
pub(super) struct Known(BTreeMap<u64, Chunk>);

/// Word and bit of a page in its chunk.
fn place(page: u64) -> (usize, u64) {
    let at = page % PAGES;
    ((at / 64) as usize, 1 << (at % 64))
}

impl Known {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The trace has a page.
    /// * `there`: it is resident.
    pub(super) fn insert(&mut self, page: u64, there: bool) {
        let chunk = self.0.entry(page / PAGES).or_default();
        let (word, bit) = place(page);
        chunk.told[word] |= bit;
        if there {
            chunk.there[word] |= bit
        } else {
            chunk.there[word] &= !bit
        }
    }

    /// True if the page is resident, by the trace.
    pub(super) fn is_there(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        let chunk = self.0.get(&(page / PAGES));
        chunk.is_some_and(|chunk| chunk.told[word] & chunk.there[word] & bit != 0)
    }

    /// Forgets the pages of a range. Returns those that the trace has, in ascending order, and
    /// whether each was resident.
    pub(super) fn take(&mut self, range: Range<u64>) -> Vec<(u64, bool)> {
        let mut taken = Vec::new();
        let chunks = range.start / PAGES..range.end.div_ceil(PAGES);
        if chunks.is_empty() {
            return taken;
        }
        self.0
            .extract_if(chunks, |at, chunk| {
                let first = at * PAGES;
                let pages = range.start.max(first)..range.end.min(first + PAGES);
                for page in pages {
                    let (word, bit) = place(page);
                    if chunk.told[word] & bit != 0 {
                        taken.push((page, chunk.there[word] & bit != 0));
                        chunk.told[word] &= !bit;
                    }
                }
                chunk.told == [0; WORDS]
            })
            .for_each(drop);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against a map with an entry a page.
    #[test]
    fn it_knows_what_a_plain_map_knows() {
        let (mut known, mut plain) = (Known::default(), BTreeMap::new());
        let mut word = 7u64;
        for _ in 0..20_000 {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1);
            let page = word >> 33 & 0x7ff;
            match word >> 60 {
                0..9 => {
                    known.insert(page, word >> 59 & 1 == 1);
                    plain.insert(page, word >> 59 & 1 == 1);
                }
                9..15 => assert_eq!(known.is_there(page), plain.get(&page) == Some(&true)),
                _ => {
                    let range = page..page + (word >> 50 & 0x3ff);
                    let taken = known.take(range.clone());
                    let of: Vec<_> = plain.extract_if(range, |_, _| true).collect();
                    assert_eq!(taken, of);
                    assert_eq!(known.is_empty(), plain.is_empty());
                }
            }
        }
        assert_eq!(known.clone().take(0..u64::MAX), Vec::from_iter(plain));
    }
}
