//! Costs of memory and devices, as their users state them: a price a GiB, and the bytes that a
//! device is rated to take in its life.

use std::fmt;
use std::str::FromStr;

use crate::units::Bytes;

const GIB: f64 = (1u64 << 30) as f64;
const GB: f64 = 1e9;
const YEAR_SECONDS: f64 = 365.25 * 86_400.0;

/// Dollars a GiB: from 0 to a million. Text form: a decimal number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price(f64);

/// Bytes that may be written to a device in all (TBW, total bytes written), in steps of a GB. Text
/// form: as data sheets give it, base 1000, suffix `G T P` with optional `B`: `600T`, `1.2PB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteBudget {
    gigabytes: u64,
}

/// Why a price or a write budget is not understood; the text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PriceError {
    /// No price.
    #[error("`{0}` is no price: give dollars a GiB, from 0 to 1000000 (example: 4.5)")]
    Price(String),
    /// No write budget.
    #[error(
        "`{0}` is no amount of writes: give the TBW of the data sheet, from 1G to 1000000P, base 1000 \
         (examples: 600T, 1.2P)"
    )]
    Budget(String),
}

impl Price {
    const MAX: f64 = 1e6;

    /// Dollars a GiB.
    pub fn dollars_per_gib(self) -> f64 {
        self.0
    }

    /// Cost of `bytes`, in dollars: a fraction of a device costs that fraction of its price.
    /// Source: RapidSwap §4.3.
    pub fn of(self, bytes: Bytes) -> f64 {
        bytes.0 as f64 / GIB * self.0
    }
}

impl FromStr for Price {
    type Err = PriceError;

    fn from_str(text: &str) -> Result<Price, PriceError> {
        match decimal(text.trim()) {
            Some(dollars) if dollars <= Price::MAX => Ok(Price(dollars)),
            _ => Err(PriceError::Price(text.to_owned())),
        }
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl WriteBudget {
    const GB_MAX: f64 = 1e12;

    /// The budget in bytes.
    pub fn bytes(self) -> f64 {
        self.gigabytes as f64 * GB
    }

    /// The part of the budget that `written` is: 1 = all of it.
    pub fn share(self, written: Bytes) -> f64 {
        written.0 as f64 / self.bytes()
    }

    /// Years in which the whole budget would be used, if it went on as in these `seconds`. `None`:
    /// nothing was written, or no time has passed.
    pub fn years(self, written: Bytes, seconds: f64) -> Option<f64> {
        let rate = written.0 as f64 / seconds;
        let writes = seconds > 0.0 && rate.is_finite() && rate > 0.0;
        writes.then(|| self.bytes() / rate / YEAR_SECONDS)
    }
}

impl FromStr for WriteBudget {
    type Err = PriceError;

    fn from_str(text: &str) -> Result<WriteBudget, PriceError> {
        let wrong = || PriceError::Budget(text.to_owned());
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| c.is_ascii_alphabetic());
        let (number, unit) = trimmed.split_at(end.unwrap_or(trimmed.len()));
        let gigabytes = match unit.to_ascii_lowercase().as_str() {
            "g" | "gb" => 1.0,
            "t" | "tb" => 1e3,
            "p" | "pb" => 1e6,
            _ => return Err(wrong()),
        };
        let gigabytes = decimal(number.trim()).ok_or_else(wrong)? * gigabytes;
        if !(1.0..=WriteBudget::GB_MAX).contains(&gigabytes) {
            return Err(wrong());
        }
        Ok(WriteBudget {
            gigabytes: gigabytes.round() as u64,
        })
    }
}

impl fmt::Display for WriteBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (each, unit) in [(1_000_000, "P"), (1_000, "T")] {
            if self.gigabytes.is_multiple_of(each) {
                return write!(f, "{}{unit}", self.gigabytes / each);
            }
        }
        write!(f, "{}G", self.gigabytes)
    }
}

/// Digits with at most one point: no sign, exponent, or name such as `nan`.
fn decimal(text: &str) -> Option<f64> {
    let plain = text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number: f64 = plain.then(|| text.parse().ok())??;
    number.is_finite().then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_and_budgets_print_what_they_parse_from() {
        for (text, canonical) in [("4.5", "4.5"), (" 0 ", "0"), ("0.10", "0.1"), ("7.", "7")] {
            let price: Price = text.parse().expect(text);
            assert_eq!(price.to_string(), canonical);
            assert_eq!(canonical.parse(), Ok(price));
        }
        for (text, canonical) in [
            ("600T", "600T"),
            ("1200 tb", "1200T"),
            ("1.2P", "1200T"),
            ("292PB", "292P"),
            ("1500G", "1500G"),
            ("0.0014999T", "1G"),
        ] {
            let budget: WriteBudget = text.parse().expect(text);
            assert_eq!(budget.to_string(), canonical);
            assert_eq!(canonical.parse(), Ok(budget));
        }
    }

    #[test]
    fn what_is_no_price_or_budget_is_refused_with_an_example() {
        for text in [
            "", "-1", "+1", "nan", "inf", "1e3", "$4", "1000001", "1.2.3",
        ] {
            let error = text.parse::<Price>().expect_err(text).to_string();
            assert!(error.contains("4.5") && error.contains(text), "{error}");
        }
        for text in ["", "600", "0T", "0.9G", "-1T", "600TiB", "2000000P", "T"] {
            let error = text.parse::<WriteBudget>().expect_err(text).to_string();
            assert!(error.contains("600T") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_fraction_costs_a_fraction_and_a_rate_gives_years() {
        let price: Price = "4".parse().expect("a price");
        assert_eq!(price.of(Bytes(3 << 29)), 6.0);
        let budget: WriteBudget = "1T".parse().expect("a budget");
        assert_eq!(budget.share(Bytes(250_000_000_000)), 0.25);
        // 1 GB in 3,155.76 s: 1,000 times that is a tenth of a year.
        let years = budget.years(Bytes(1_000_000_000), 3_155.76);
        assert!((years.expect("a rate") - 0.1).abs() < 1e-12, "{years:?}");
        assert_eq!(budget.years(Bytes(0), 10.0), None);
        assert_eq!(budget.years(Bytes(5), 0.0), None);
        assert_eq!(budget.years(Bytes(5), f64::NAN), None);
    }
}
