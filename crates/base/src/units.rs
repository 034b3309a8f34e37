//! Sizes, counts and times as types, with the text forms a user writes (`512M`, `1.5GiB`, `200us`).

use std::fmt;
use std::str::FromStr;

/// Bytes in one base page of the kernel on x86-64: what it maps, protects and charges. The size of
/// a managed page is a [`PageSize`].
pub const BASE_PAGE_BYTES: usize = 4096;

/// Size of the pages of a space, of a tier's copies and of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB.
    #[default]
    Base,
    /// 2 MiB.
    Large,
}

/// A size in bytes. Text form: base 1024, suffix `K M G T` with optional `iB` or `B`, decimals
/// allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A number of base pages. A page of 2 MiB counts as the 512 that it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageCount(pub u64);

/// A time or a duration in nanoseconds. The caller chooses the origin of a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

/// Why a size or duration is not understood; the text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}: {why} (examples: {examples})")]
pub struct ParseUnitError {
    text: String,
    what: &'static str,
    why: &'static str,
    examples: &'static str,
}

impl PageSize {
    /// Every size, the smallest first.
    pub const ALL: [PageSize; 2] = [PageSize::Base, PageSize::Large];

    /// Bytes of one page.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            PageSize::Base => BASE_PAGE_BYTES,
            PageSize::Large => 2 << 20,
        }
    }

    /// Base pages of one page.
    #[inline]
    pub const fn base_pages(self) -> u64 {
        (self.bytes() / BASE_PAGE_BYTES) as u64
    }

    /// How many pages are handled together where `most` base pages are: at least one.
    #[inline]
    pub const fn at_once(self, most: usize) -> usize {
        match most / self.base_pages() as usize {
            0 => 1,
            count => count,
        }
    }
}

impl PageCount {
    /// The pages as bytes; saturates.
    pub fn bytes(self) -> Bytes {
        Bytes(self.0.saturating_mul(BASE_PAGE_BYTES as u64))
    }
}

impl Bytes {
    /// Whole pages that fit into this size.
    pub fn pages_floor(self) -> PageCount {
        PageCount(self.0 / BASE_PAGE_BYTES as u64)
    }
}

impl Nanos {
    /// Time from `earlier` to `self`; zero when the clock went back.
    pub fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }

    /// The duration in seconds, as reports give it.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl FromStr for PageSize {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let bytes: Bytes = text.parse()?;
        let mut sizes = PageSize::ALL.into_iter();
        let found = sizes.find(|size| size.bytes() as u64 == bytes.0);
        found.ok_or_else(|| ParseUnitError {
            text: text.to_owned(),
            what: "page size",
            why: "pages have 4 KiB or 2 MiB",
            examples: "4K, 2M",
        })
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Exact(Bytes(self.bytes() as u64)).fmt(f)
    }
}

fn split_number(text: &str) -> Option<(f64, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let value: f64 = text[..end].parse().ok()?;
    Some((value, text[end..].trim()))
}

impl FromStr for Bytes {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let error = |why| ParseUnitError {
            text: text.to_owned(),
            what: "size",
            why,
            examples: "512M, 1.5GiB, 4096",
        };
        let (value, suffix) =
            split_number(text.trim()).ok_or_else(|| error("it does not start with a number"))?;
        let shift = match suffix.to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "ki" | "kb" | "kib" => 10,
            "m" | "mi" | "mb" | "mib" => 20,
            "g" | "gi" | "gb" | "gib" => 30,
            "t" | "ti" | "tb" | "tib" => 40,
            _ => return Err(error("the unit is unknown; use K, M, G or T")),
        };
        let bytes = value * (1u64 << shift) as f64;
        if bytes > (1u64 << 53) as f64 {
            return Err(error("it is too large"));
        }
        Ok(Bytes(bytes as u64))
    }
}

impl FromStr for Nanos {
    type Err = ParseUnitError;

    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let error = |why| ParseUnitError {
            text: text.to_owned(),
            what: "duration",
            why,
            examples: "200us, 5ms, 1.5s",
        };
        let (value, suffix) =
            split_number(text.trim()).ok_or_else(|| error("it does not start with a number"))?;
        let unit = match suffix {
            "ns" => 1.0,
            "us" | "µs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" | "min" => 60e9,
            "h" => 3600e9,
            "d" => 86_400e9,
            _ => {
                return Err(error(
                    "the unit is missing or unknown; use ns, us, ms, s, m, h or d",
                ));
            }
        };
        let nanos = value * unit;
        if nanos > (1u64 << 53) as f64 {
            return Err(error("it is too long"));
        }
        Ok(Nanos(nanos.round() as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB", "GiB"] {
            if value < 1024.0 {
                return match unit {
                    "B" => write!(f, "{} B", self.0),
                    _ => write!(f, "{value:.1} {unit}"),
                };
            }
            value /= 1024.0;
        }
        write!(f, "{value:.1} TiB")
    }
}

/// A size written so that it parses to the same number of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Exact(pub Bytes);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0;
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if bytes > 0 && bytes.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", bytes >> shift);
            }
        }
        write!(f, "{bytes}")
    }
}

/// In the unit in which it has one to three digits before the point, once it is rounded.
impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..999_950 => write!(f, "{:.1} us", self.0 as f64 / 1e3),
            999_950..999_950_000 => write!(f, "{:.1} ms", self.0 as f64 / 1e6),
            _ => write!(f, "{:.2} s", self.0 as f64 / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("64Mi", 64 << 20),
            ("1gi", 1 << 30),
            ("2 k", 2048),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse::<Bytes>(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_sizes_are_refused_with_examples() {
        for text in ["", "M", "-1", "12Q", "1e99", "999999999T", "1..2"] {
            let error = text.parse::<Bytes>().expect_err(text).to_string();
            assert!(error.contains("512M"), "{error}");
        }
    }

    #[test]
    fn only_the_two_page_sizes_parse_and_they_print_as_they_parse() {
        for size in PageSize::ALL {
            assert_eq!(size.to_string().parse(), Ok(size));
            assert_eq!(
                size.base_pages() * BASE_PAGE_BYTES as u64,
                size.bytes() as u64
            );
        }
        for text in ["0", "4095", "8K", "1G", "4 pages"] {
            let error = text.parse::<PageSize>().expect_err(text).to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_bound_in_base_pages_lets_one_large_page_pass() {
        assert_eq!(PageSize::Base.at_once(64), 64);
        assert_eq!(
            [64, 512, 1535].map(|most| PageSize::Large.at_once(most)),
            [1, 1, 2]
        );
    }

    #[test]
    fn times_are_written_as_one_reads_them() {
        for (nanos, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (8_100, "8.1 us"),
            (999_949, "999.9 us"),
            (999_950, "1.0 ms"),
            (999_949_999, "999.9 ms"),
            (999_950_000, "1.00 s"),
            (90_000_000_000, "90.00 s"),
        ] {
            assert_eq!(Nanos(nanos).to_string(), text);
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!("200us".parse::<Nanos>(), Ok(Nanos(200_000)));
        assert_eq!("1.5s".parse::<Nanos>(), Ok(Nanos(1_500_000_000)));
        assert!("200".parse::<Nanos>().is_err());
    }
}
