//! The order in which a phase visits its pages: sequential, strided, uniform random, or zipfian.

use undercroft_seeded::{Random, Zipf, mix};

/// Pages between two visits of the strided walk: 64 KiB, beyond the kernel's default swap
/// read-ahead of 8 pages.
pub(crate) const STRIDE_PAGES: usize = 16;
/// YCSB's constant.
const ZIPF_THETA: f64 = 0.99;

/// Which pages a phase visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Every page in address order, then again from the start.
    Seq,
    /// Every 16th page. The next pass starts one page later, so that all pages are visited.
    Stride,
    /// Uniform random.
    Random,
    /// Zipfian with YCSB's constant 0.99; popularity is scattered over the memory by a hash.
    Zipf,
}

impl Pattern {
    /// The word used on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Seq => "seq",
            Pattern::Stride => "stride",
            Pattern::Random => "random",
            Pattern::Zipf => "zipf",
        }
    }

    /// The inverse of `name`.
    pub fn from_name(name: &str) -> Option<Pattern> {
        [
            Pattern::Seq,
            Pattern::Stride,
            Pattern::Random,
            Pattern::Zipf,
        ]
        .into_iter()
        .find(|pattern| pattern.name() == name)
    }
}

/// An endless sequence of page indices below `pages`.
pub(crate) struct Walk {
    pattern: Pattern,
    pages: usize,
    at: u64,
    random: Random,
    zipf: Zipf,
}

impl Walk {
    /// `pages` must not be 0. Cost: O(1).
    pub(crate) fn new(pattern: Pattern, pages: usize, seed: u64) -> Walk {
        assert!(pages > 0, "a walk needs pages");
        // A scan starts anywhere, so that a short one does not find the pages that the previous
        // scan loaded.
        Walk {
            pattern,
            pages,
            at: mix(seed ^ 1) % pages as u64,
            random: Random::new(mix(seed)),
            zipf: Zipf::new(pages as u64, ZIPF_THETA),
        }
    }

    /// A walk that begins at the visit with this number; a scan, at this page.
    pub(crate) fn starting_at(self, visit: u64) -> Walk {
        Walk { at: visit, ..self }
    }

    pub(crate) fn next(&mut self) -> usize {
        let at = self.at;
        self.at += 1;
        let pages = self.pages as u64;
        let page = match self.pattern {
            Pattern::Seq => at % pages,
            Pattern::Stride => {
                let stride = (STRIDE_PAGES as u64).min(pages);
                let visits_a_pass = pages / stride;
                (at % visits_a_pass) * stride + (at / visits_a_pass) % stride
            }
            Pattern::Random => self.random.below(pages),
            Pattern::Zipf => mix(self.zipf.rank(&mut self.random)) % pages,
        };
        page as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seq_and_stride_visit_every_page() {
        for (pattern, pages) in [
            (Pattern::Seq, 100),
            (Pattern::Stride, 160),
            (Pattern::Stride, 5),
        ] {
            let mut walk = Walk::new(pattern, pages, 1);
            let mut seen = vec![false; pages];
            (0..pages).for_each(|_| seen[walk.next()] = true);
            assert!(seen.iter().all(|seen| *seen), "{pattern:?} over {pages}");
        }
    }

    #[test]
    fn zipf_is_skewed_and_random_is_not() {
        let top_share = |pattern| {
            let mut walk = Walk::new(pattern, 10_000, 3);
            let mut counts = vec![0u32; 10_000];
            (0..100_000).for_each(|_| counts[walk.next()] += 1);
            counts.sort_unstable_by(|a, b| b.cmp(a));
            f64::from(counts[..1000].iter().sum::<u32>()) / 1e5
        };
        assert!(
            top_share(Pattern::Zipf) > 0.6,
            "{}",
            top_share(Pattern::Zipf)
        );
        assert!(
            top_share(Pattern::Random) < 0.25,
            "{}",
            top_share(Pattern::Random)
        );
    }
}
