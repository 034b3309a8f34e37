//! How many faults took how long, as a monitoring system adds it up.

use hdrhistogram::Histogram;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::Nanos;

/// How many faults took how long since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LatencyHistogram {
    /// Fixed times, the shortest first.
    pub buckets: Vec<LatencyBucket>,
    /// All faults, also those longer than the last bucket.
    pub count: u64,
    /// The sum of their times.
    pub sum_seconds: f64,
}

/// Faults that took at most a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LatencyBucket {
    /// The time.
    pub seconds_max: f64,
    /// How many; those of the buckets before are among them.
    pub count: u64,
}

impl LatencyHistogram {
    /// Times of the buckets: three for each power of ten.
    const NANOS_MAX: [u64; 22] = [
        1_000,
        2_500,
        5_000,
        10_000,
        25_000,
        50_000,
        100_000,
        250_000,
        500_000,
        1_000_000,
        2_500_000,
        5_000_000,
        10_000_000,
        25_000_000,
        50_000_000,
        100_000_000,
        250_000_000,
        500_000_000,
        1_000_000_000,
        2_500_000_000,
        5_000_000_000,
        10_000_000_000,
    ];

    /// The distribution of a histogram of nanoseconds, as exact as that is.
    pub fn of(nanos: &Histogram<u64>, sum: Nanos) -> LatencyHistogram {
        let mut counts = [0; Self::NANOS_MAX.len()];
        for of in nanos.iter_recorded() {
            let took = nanos.lowest_equivalent(of.value_iterated_to());
            let bucket = Self::NANOS_MAX.partition_point(|&most| most < took);
            if let Some(count) = counts.get_mut(bucket) {
                *count += of.count_at_value();
            }
        }
        let mut before = 0;
        let buckets = Self::NANOS_MAX.iter().zip(counts).map(|(&most, count)| {
            before += count;
            LatencyBucket {
                seconds_max: Nanos(most).seconds(),
                count: before,
            }
        });
        LatencyHistogram {
            buckets: buckets.collect(),
            count: nanos.len(),
            sum_seconds: sum.seconds(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_up_and_faults_longer_than_the_last_are_in_the_count_alone() {
        let mut nanos = Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("bounds");
        for took in [900, 1_000, 30_000, 30_000, 20_000_000_000] {
            nanos.saturating_record(took);
        }
        let of = LatencyHistogram::of(&nanos, Nanos(2_000_000_000));
        let within = |seconds: f64| {
            let bucket = of.buckets.iter().find(|of| of.seconds_max == seconds);
            bucket.expect("a bucket").count
        };
        assert_eq!((within(1e-6), within(2.5e-5)), (2, 2));
        assert_eq!((within(5e-5), within(10.0)), (4, 4));
        assert_eq!((of.count, of.sum_seconds), (5, 2.0));
        let empty = Histogram::new(2).expect("digits");
        let of = LatencyHistogram::of(&empty, Nanos(0));
        assert!(of.buckets.iter().all(|of| of.count == 0) && of.buckets.len() == 22);
    }
}
