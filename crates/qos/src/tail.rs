//! The percentile of many latencies in little memory: counts by logarithmic buckets.
//!
//! ```text
//! bucket   0 .. 31    0, 1, .. 31 ns: exact
//!         32 .. 63    32 .. 63 ns, in steps of 1
//!         64 .. 95    64 .. 127 ns, in steps of 2
//!            ..       each power of two in 32 steps
//!       1024 .. 1055  69 .. 137 s, in steps of 2 s; all longer times too
//! ```
//!
//! A percentile is the upper end of its bucket: never below the exact value, and at most a 32nd
//! above it.

use undercroft_base::Nanos;

use crate::bound::Percentile;

/// Steps of each power of two.
const STEPS: usize = 32;
const STEP_BITS: u32 = STEPS.trailing_zeros();

/// The exponent of the largest power of two that has buckets of its own.
const EXPONENT_MAX: u32 = 36;

/// How many buckets there are.
pub const BUCKETS: usize = STEPS * (EXPONENT_MAX - STEP_BITS + 2) as usize;

const _: () = assert!(BUCKETS == 1056);

/// The bucket of a latency. O(1).
#[inline]
pub fn bucket(took: Nanos) -> usize {
    if took.0 < STEPS as u64 {
        return took.0 as usize;
    }
    let exponent = took.0.ilog2();
    if exponent > EXPONENT_MAX {
        return BUCKETS - 1;
    }
    let shift = exponent - STEP_BITS;
    (shift as usize + 1) * STEPS + (took.0 >> shift) as usize - STEPS
}

/// The longest latency of a bucket.
pub fn upper_end(bucket: usize) -> Nanos {
    if bucket < STEPS {
        return Nanos(bucket as u64);
    }
    let shift = (bucket / STEPS - 1) as u32;
    Nanos((((STEPS + bucket % STEPS + 1) as u64) << shift) - 1)
}

/// Latencies, counted by bucket. 4 KiB; never grows. A count that is full stays so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    counts: Box<[u32; BUCKETS]>,
    samples: u64,
}

impl Default for Tail {
    fn default() -> Tail {
        Tail {
            counts: Box::new([0; BUCKETS]),
            samples: 0,
        }
    }
}

impl Tail {
    /// Adds one latency. O(1).
    pub fn add(&mut self, took: Nanos) {
        self.add_many(bucket(took), 1);
    }

    /// Adds `count` latencies of a bucket.
    pub fn add_many(&mut self, bucket: usize, count: u32) {
        self.counts[bucket] = self.counts[bucket].saturating_add(count);
        self.samples += u64::from(count);
    }

    /// Adds all latencies of `other`.
    pub fn merge(&mut self, other: &Tail) {
        for (bucket, count) in other.counts.iter().enumerate() {
            self.counts[bucket] = self.counts[bucket].saturating_add(*count);
        }
        self.samples += other.samples;
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        self.samples = 0;
    }

    /// How many latencies there are.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The percentile; `None` of nothing. O(buckets).
    pub fn at(&self, percentile: Percentile) -> Option<Nanos> {
        let rank = percentile.rank(self.samples);
        let mut so_far = 0;
        let found = self.counts.iter().position(|count| {
            so_far += u64::from(*count);
            rank > 0 && so_far >= rank
        });
        found.map(upper_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        let mut next = 0;
        for at in 0..BUCKETS {
            assert_eq!(bucket(Nanos(next)), at, "the first of bucket {at}");
            let end = upper_end(at).0;
            assert_eq!(bucket(Nanos(end)), at, "the last of bucket {at}");
            next = end + 1;
        }
        assert_eq!(next, 1 << (EXPONENT_MAX + 1));
        for longer in [next, u64::MAX] {
            assert_eq!(bucket(Nanos(longer)), BUCKETS - 1);
        }
    }

    #[test]
    fn nothing_has_no_percentile() {
        let mut tail = Tail::default();
        let p99 = "99".parse().expect("a percentile");
        assert_eq!(tail.at(p99), None);
        tail.add(Nanos(7));
        assert_eq!(tail.at(p99), Some(Nanos(7)));
        tail.clear();
        assert_eq!((tail.at(p99), tail.samples()), (None, 0));
    }

    proptest! {
        /// Against the exact percentile of the sorted values, whole and in two parts.
        #[test]
        fn percentile_is_that_of_the_values_and_at_most_a_32nd_more(
            // Of all magnitudes alike.
            parts in prop::collection::vec((0u32..36, 0u64..1 << 36), 1..400),
            percentile in 1u32..100_000,
        ) {
            let mut values: Vec<u64> = parts.iter().map(|(shift, word)| word >> shift).collect();
            let (mut first, mut second) = (Tail::default(), Tail::default());
            for (at, value) in values.iter().enumerate() {
                if at % 3 == 0 { &mut first } else { &mut second }.add(Nanos(*value));
            }
            first.merge(&second);
            values.sort_unstable();
            let text = format!("{}.{:03}", percentile / 1000, percentile % 1000);
            let percentile: Percentile = text.parse().expect("a percentile");
            let exact = values[percentile.rank(values.len() as u64) as usize - 1];
            let got = first.at(percentile).expect("there are values").0;
            prop_assert!(got >= exact && got - exact <= exact / 32, "{} for {}", got, exact);
        }
    }
}
