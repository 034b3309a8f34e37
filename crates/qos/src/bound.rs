//! A user's latency bound: `p99=200us`, parsed once.

use std::fmt;
use std::str::FromStr;

use undercroft_base::{Nanos, ParseUnitError};

/// Parts of a whole, as percentiles are counted.
const WHOLE: u64 = 100_000;

/// Shortest and longest bound. Below, the clock itself is most of what is measured.
const LIMIT_MIN: Nanos = Nanos(1_000);
const LIMIT_MAX: Nanos = Nanos(60_000_000_000);

/// A percentile above 0 and below 100, with three decimals at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percentile(u32);

/// A promise: this percentile of page-ins takes no longer than this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatencyBound {
    /// Which page-ins have to keep the limit: 99 of 100, for example.
    pub percentile: Percentile,
    /// How long they may take.
    pub limit: Nanos,
}

/// Why a text is no bound. The text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoundError {
    /// There is no `=`, or no `p` at the start.
    #[error(
        "`{0}` is no latency bound: it has the form pPERCENTILE=TIME; use for example p99=200us"
    )]
    Form(String),
    /// The percentile is no number of that kind.
    #[error(
        "`{0}` is no percentile: a number above 0 and below 100, with at most three decimals; use \
         for example p99 or p99.9"
    )]
    Percentile(String),
    /// The time is no duration.
    #[error("{0}")]
    Time(#[from] ParseUnitError),
    /// The time is too short or too long.
    #[error("a bound of {0} is outside of 1 us to 60 s; use for example p99=200us")]
    Range(Nanos),
}

impl Percentile {
    /// How many of `samples` have to be at or below the bound (the nearest rank): at least one, if
    /// there is any.
    pub fn rank(self, samples: u64) -> u64 {
        let rank = (u128::from(samples) * u128::from(self.0)).div_ceil(u128::from(WHOLE));
        rank as u64
    }

    /// The fewest samples of which one may be slower. With fewer, the percentile is that of the
    /// slowest: 100 for p99.
    pub fn samples_min(self) -> u64 {
        WHOLE.div_ceil(WHOLE - u64::from(self.0))
    }

    /// In percent.
    pub fn percent(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

/// Of the number alone: `99.9`.
impl FromStr for Percentile {
    type Err = BoundError;

    fn from_str(text: &str) -> Result<Percentile, BoundError> {
        let wrong = || BoundError::Percentile(format!("p{text}"));
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || whole.len() > 2 || part.len() > 3 || !digits(whole) || !digits(part)
        {
            return Err(wrong());
        }
        let parts: u32 = format!("{whole}{part:0<3}").parse().map_err(|_| wrong())?;
        if parts == 0 {
            return Err(wrong());
        }
        Ok(Percentile(parts))
    }
}

/// As the user writes it, without `p`.
impl fmt::Display for Percentile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 1000, self.0 % 1000);
        match part {
            0 => write!(out, "{whole}"),
            _ => write!(
                out,
                "{}",
                format!("{whole}.{part:03}").trim_end_matches('0')
            ),
        }
    }
}

impl LatencyBound {
    /// Whether `over` of `samples` above the limit still keep the bound.
    pub fn allows(self, over: u64, samples: u64) -> bool {
        samples.saturating_sub(over) >= self.percentile.rank(samples)
    }

    /// The same percentile with another limit.
    pub fn with_limit(self, limit: Nanos) -> LatencyBound {
        LatencyBound { limit, ..self }
    }

    /// The same percentile with this limit or a little more, so that it has one decimal at most.
    pub fn suggest(self, limit: Nanos) -> LatencyBound {
        let step = unit(limit).0.div_ceil(10);
        self.with_limit(Nanos(limit.0.next_multiple_of(step)))
    }
}

impl FromStr for LatencyBound {
    type Err = BoundError;

    fn from_str(text: &str) -> Result<LatencyBound, BoundError> {
        let form = || BoundError::Form(text.to_owned());
        let (percentile, limit) = text.split_once('=').ok_or_else(form)?;
        let percentile = percentile.trim().strip_prefix('p').ok_or_else(form)?;
        let bound = LatencyBound {
            percentile: percentile.parse()?,
            limit: limit.parse()?,
        };
        if !(LIMIT_MIN..=LIMIT_MAX).contains(&bound.limit) {
            return Err(BoundError::Range(bound.limit));
        }
        Ok(bound)
    }
}

/// The unit in which a reader would write a time: in nanoseconds, its digits, and its name.
fn unit(time: Nanos) -> (u64, usize, &'static str) {
    match time.0 {
        0..1_000 => (1, 0, "ns"),
        1_000..1_000_000 => (1_000, 3, "us"),
        1_000_000..1_000_000_000 => (1_000_000, 6, "ms"),
        _ => (1_000_000_000, 9, "s"),
    }
}

/// Exact: parses to an equal value. `8.1us`, not `8100ns`.
impl fmt::Display for LatencyBound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.limit.0;
        let (unit, digits, name) = unit(self.limit);
        write!(out, "p{}={}", self.percentile, nanos / unit)?;
        if !nanos.is_multiple_of(unit) {
            let part = format!("{:0digits$}", nanos % unit);
            write!(out, ".{}", part.trim_end_matches('0'))?;
        }
        write!(out, "{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bound(text: &str) -> LatencyBound {
        text.parse().expect(text)
    }

    #[test]
    fn bounds_are_read_as_they_are_written() {
        for (text, parts, nanos) in [
            ("p99=200us", 99_000, 200_000),
            ("p99.9=1ms", 99_900, 1_000_000),
            ("p50=1.5ms", 50_000, 1_500_000),
            ("p99=8.1us", 99_000, 8_100),
            ("p99=1.000001ms", 99_000, 1_000_001),
            ("p0.001=2s", 1, 2_000_000_000),
            ("p99.999=1.5us", 99_999, 1_500),
        ] {
            let got = bound(text);
            assert_eq!((got.percentile.0, got.limit.0), (parts, nanos), "{text}");
            assert_eq!(got.to_string(), text);
        }
        assert_eq!(bound(" p99 = 1500us").to_string(), "p99=1.5ms");
        assert_eq!(bound("p99.50=1s"), bound("p99.5=1s"));
    }

    #[test]
    fn suggested_bound_is_short_and_no_less() {
        for (limit, text) in [
            (8_100, "p99=8.1us"),
            (8_101, "p99=8.2us"),
            (92_000, "p99=92us"),
            (999_999, "p99=1ms"),
            (1_230_000, "p99=1.3ms"),
            (2_000_000_001, "p99=2.1s"),
        ] {
            let suggested = bound("p99=1s").suggest(Nanos(limit));
            assert_eq!(suggested.to_string(), text);
            assert!(suggested.limit.0 >= limit);
        }
    }

    #[test]
    fn what_is_no_bound_says_what_one_is() {
        for (text, part) in [
            ("", "pPERCENTILE=TIME"),
            ("200us", "pPERCENTILE=TIME"),
            ("p99:200us", "pPERCENTILE=TIME"),
            ("99=200us", "pPERCENTILE=TIME"),
            ("p100=200us", "below 100"),
            ("p0=200us", "above 0"),
            ("p-1=200us", "above 0"),
            ("p=200us", "above 0"),
            ("pmax=200us", "above 0"),
            ("p99.9999=1s", "three decimals"),
            ("p99=200", "unit"),
            ("p99=fast", "number"),
            ("p99=999ns", "1 us"),
            ("p99=61s", "60 s"),
        ] {
            let error = text.parse::<LatencyBound>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.contains("200us") || error.contains("p99"), "{error}");
        }
    }

    #[test]
    fn rank_is_the_nearest_and_a_few_samples_need_all() {
        let p99 = bound("p99=1ms").percentile;
        let ranks = [0, 1, 99, 100, 101, 199, 200].map(|samples| p99.rank(samples));
        assert_eq!(ranks, [0, 1, 99, 99, 100, 198, 198]);
        assert_eq!(p99.rank(u64::MAX), u64::MAX - u64::MAX / 100);
        let fewest = |text: &str| bound(text).percentile.samples_min();
        assert_eq!(fewest("p99=1s"), 100);
        assert_eq!(fewest("p99.9=1s"), 1000);
        assert_eq!(fewest("p50=1s"), 2);
        assert_eq!(fewest("p0.001=1s"), 2);
        assert_eq!(fewest("p99.999=1s"), 100_000);
    }

    proptest! {
        /// A bound survives its text, and one sample of the fewest may be over, but no sample of
        /// fewer.
        #[test]
        fn bound_and_text_are_the_same(parts in 1u32..100_000, nanos in 1_000u64..60_000_000_001) {
            let bound = LatencyBound { percentile: Percentile(parts), limit: Nanos(nanos) };
            prop_assert_eq!(bound.to_string().parse(), Ok(bound));
            let fewest = bound.percentile.samples_min();
            prop_assert!(bound.allows(1, fewest));
            prop_assert!(!bound.allows(1, fewest - 1));
        }
    }
}
