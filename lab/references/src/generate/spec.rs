//! The description of a trace to generate, as text and as types:
//! `zipf:pages=10000,refs=1000000,theta=0.99,writes=0.3,seed=1`.
//!
//! `A+B` mixes two or more patterns, interleaved at random in proportion to their references. Each
//! has its own range of addresses.

use std::fmt;
use std::str::FromStr;

use undercroft_base::Bytes;

/// Most pages of one pattern: 2^40 of them, and every address stays below 2^62.
const PAGES_MAX: u64 = 1 << 40;
/// Most patterns of a mixture.
const PATTERNS_MAX: usize = 64;

/// The order in which pages are visited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Each page several times in a row, then never again.
    Sequential,
    /// Every `stride`-th page, then again from one page further: a matrix read by columns.
    Strided {
        /// Pages between two references.
        stride: u64,
    },
    /// All pages in order, cyclically: the worst case of LRU.
    Loop,
    /// Every page as likely as any other.
    Uniform,
    /// Zipf's law over pages scattered at random.
    Zipf {
        /// Exponent, from 0 (uniform); 0.99 is that of YCSB.
        theta: f64,
    },
    /// Objects of `size` pages, chosen by Zipf's law; all pages of one in order, then the next.
    Objects {
        /// Pages of each.
        size: u64,
        /// Exponent, from 0 (uniform).
        theta: f64,
    },
    /// Laps that each begin `step` pages later than the last: the elimination of a matrix.
    Shrink {
        /// Pages by which a lap is shorter.
        step: u64,
    },
    /// Sets of pages one after the other, uniform inside each.
    Phases {
        /// How many.
        phases: u64,
        /// Pages of each; a run of them from a random place.
        set: u64,
    },
    /// A hot set, uniform, while a scan visits all other pages in order, cyclically.
    ScanHot {
        /// Pages of the hot set.
        hot: u64,
        /// Share of the references that go to it.
        share: f64,
    },
}

/// A pattern with its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// The order in which its pages are visited.
    pub pattern: Pattern,
    /// Pages it may touch.
    pub pages: u64,
    /// References it makes.
    pub refs: u64,
    /// Share of references that write.
    pub writes: f64,
    /// Share of pages that are ever written; the other pages are only read.
    pub dirty: f64,
    /// Seed of its random numbers.
    pub seed: u64,
    /// Client of its references.
    pub client: u16,
}

/// A whole trace to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Patterns mixed; at least one.
    pub parts: Vec<Part>,
    /// log2 of the bytes of a page.
    pub page_shift: u8,
    /// Nanoseconds from one reference to the next.
    pub gap: u64,
}

/// Why a specification is invalid; names the option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No such pattern.
    #[error(
        "`{0}` is no pattern; use sequential, strided, loop, uniform, zipf, objects, shrink, phases or \
         scan_hot"
    )]
    Pattern(String),
    /// Not `key=value`.
    #[error("`{0}` is not key=value")]
    NoValue(String),
    /// The pattern has no such option.
    #[error("`{pattern}` has no option `{key}`; it has {known}")]
    Key {
        /// The pattern.
        pattern: String,
        /// The option.
        key: String,
        /// The names that there are.
        known: String,
    },
    /// An option is given twice.
    #[error("`{0}` is given twice")]
    Twice(String),
    /// The value of an option is impossible.
    #[error("`{key}={value}`: {why}")]
    Value {
        /// The option.
        key: String,
        /// Its value.
        value: String,
        /// Why it is.
        why: String,
    },
    /// Too many patterns in a mixture.
    #[error("a mixture has at most 64 patterns")]
    TooMany,
}

const COMMON: [&str; 6] = ["pages", "refs", "writes", "dirty", "seed", "client"];
/// Options of the whole trace; the first part gives them.
const WHOLE: [&str; 2] = ["page", "gap"];

/// Options of one pattern, taken out one by one.
struct Options<'a> {
    given: Vec<(&'a str, &'a str)>,
}

impl<'a> Options<'a> {
    /// Splits `key=value,key=value`. Errors: no value, a key that is not known here, one that is
    /// there twice.
    ///
    /// * `own`: options of this pattern alone.
    fn parse(text: &'a str, pattern: &str, own: &[&str]) -> Result<Self, SpecError> {
        let mut options = Options { given: Vec::new() };
        let words = text.split(',').map(str::trim);
        for word in words.filter(|word| !word.is_empty()) {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| SpecError::NoValue(word.to_owned()))?;
            if ![&COMMON[..], &WHOLE, own].concat().contains(&key) {
                return Err(SpecError::Key {
                    pattern: pattern.to_owned(),
                    key: key.to_owned(),
                    known: [own, &COMMON, &WHOLE].concat().join(", "),
                });
            }
            if options.given.iter().any(|(known, _)| *known == key) {
                return Err(SpecError::Twice(key.to_owned()));
            }
            options.given.push((key, value));
        }
        Ok(options)
    }

    /// Takes one option; `default` if it was not given.
    fn take<T>(
        &mut self,
        key: &'static str,
        default: T,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        let Some(at) = self.given.iter().position(|(known, _)| *known == key) else {
            return Ok(default);
        };
        let (_, value) = self.given.remove(at);
        parse(value).map_err(|why| SpecError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            why,
        })
    }
}

fn wrong(key: &str, value: impl fmt::Display, why: impl Into<String>) -> SpecError {
    SpecError::Value {
        key: key.to_owned(),
        value: value.to_string(),
        why: why.into(),
    }
}

/// A count: digits, with `_` between them, or as `1e6`.
fn number(text: &str) -> Result<u64, String> {
    let digits = text.replace('_', "");
    if let Some((head, zeros)) = digits.split_once('e') {
        let parsed = head.parse::<u64>().ok().zip(zeros.parse::<u32>().ok());
        return parsed
            .and_then(|(head, zeros)| head.checked_mul(10u64.checked_pow(zeros)?))
            .ok_or_else(|| "not a number below 2^64, as in 1e6".to_owned());
    }
    digits
        .parse()
        .map_err(|_| "not a whole number below 2^64, as in 10000 or 1e6".to_owned())
}

fn count(text: &str) -> Result<u64, String> {
    match number(text)? {
        0 => Err("it must be at least 1".to_owned()),
        number => Ok(number),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("not a share from 0 to 1, as in 0.3".to_owned()),
    }
}

fn theta(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(theta) if (0.0..=10.0).contains(&theta) => Ok(theta),
        _ => Err("not an exponent from 0 to 10, as in 0.99".to_owned()),
    }
}

fn page_shift(text: &str) -> Result<u8, String> {
    let bytes = text.parse::<Bytes>().map_err(|error| error.to_string())?.0;
    if bytes.is_power_of_two() && (64..=1 << 22).contains(&bytes) {
        Ok(bytes.trailing_zeros() as u8)
    } else {
        Err("not a power of two from 64 to 4M".to_owned())
    }
}

/// Parses one pattern. The first one (`index` 0) also sets what holds for the whole trace.
fn part(text: &str, index: usize, whole: &mut Spec) -> Result<Part, SpecError> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let own: &[&str] = match name {
        "sequential" | "loop" | "uniform" => &[],
        "strided" => &["stride"],
        "zipf" => &["theta"],
        "objects" => &["size", "theta"],
        "shrink" => &["step"],
        "phases" => &["phases", "set"],
        "scan_hot" => &["hot", "share"],
        _ => return Err(SpecError::Pattern(name.to_owned())),
    };
    let mut options = Options::parse(rest, name, own)?;
    take_whole(&mut options, index, whole)?;
    let pages = options.take("pages", 10_000, count)?;
    if pages > PAGES_MAX {
        return Err(wrong("pages", pages, "at most 2^40 pages"));
    }
    let pattern = pattern(name, pages, &mut options)?;
    let refs_default = match pattern {
        Pattern::Sequential => pages,
        _ => pages.saturating_mul(10),
    };
    let part = Part {
        pattern,
        pages,
        refs: options.take("refs", refs_default, count)?,
        writes: options.take("writes", 0.0, share)?,
        dirty: options.take("dirty", 1.0, share)?,
        seed: options.take("seed", 1 + index as u64, number)?,
        client: options.take("client", 0, |text| {
            text.parse()
                .map_err(|_| "not a number up to 65535".to_owned())
        })?,
    };
    check(&part)?;
    Ok(part)
}

/// Takes the options of the whole trace. Errors: a later part has others than the first.
fn take_whole(options: &mut Options<'_>, index: usize, whole: &mut Spec) -> Result<(), SpecError> {
    const WHY: &str = "not that of the first pattern; give it there only";
    let page = options.take("page", whole.page_shift, page_shift)?;
    let gap = options.take("gap", whole.gap, number)?;
    if index > 0 && page != whole.page_shift {
        return Err(wrong("page", 1u64 << page, WHY));
    }
    if index > 0 && gap != whole.gap {
        return Err(wrong("gap", gap, WHY));
    }
    (whole.page_shift, whole.gap) = (page, gap);
    Ok(())
}

/// Takes the options of the pattern `name` over `pages` pages.
fn pattern(name: &str, pages: u64, options: &mut Options<'_>) -> Result<Pattern, SpecError> {
    Ok(match name {
        "strided" => Pattern::Strided {
            stride: options.take("stride", 16.min(pages), count)?,
        },
        "loop" => Pattern::Loop,
        "uniform" => Pattern::Uniform,
        "zipf" => Pattern::Zipf {
            theta: options.take("theta", 0.99, theta)?,
        },
        "objects" => Pattern::Objects {
            size: options.take("size", 16.min(pages), count)?,
            theta: options.take("theta", 0.99, theta)?,
        },
        "shrink" => Pattern::Shrink {
            step: options.take("step", pages.div_ceil(100), count)?,
        },
        "phases" => Pattern::Phases {
            phases: options.take("phases", 10, count)?,
            set: options.take("set", pages.div_ceil(10), count)?,
        },
        "scan_hot" => Pattern::ScanHot {
            hot: options.take("hot", pages.div_ceil(10), count)?,
            share: options.take("share", 0.8, share)?,
        },
        _ => Pattern::Sequential,
    })
}

/// Checks that the options of a pattern fit each other.
fn check(part: &Part) -> Result<(), SpecError> {
    let pages = part.pages;
    match part.pattern {
        Pattern::Sequential if part.refs < pages => Err(wrong(
            "refs",
            part.refs,
            format!(
                "sequential touches each of its {pages} pages; give at least as many, or fewer pages"
            ),
        )),
        Pattern::Strided { stride } if stride > pages => Err(wrong(
            "stride",
            stride,
            format!("more than the {pages} pages"),
        )),
        Pattern::Objects { size, .. } if size > pages => {
            Err(wrong("size", size, format!("more than the {pages} pages")))
        }
        Pattern::Shrink { step } if step > pages => {
            Err(wrong("step", step, format!("more than the {pages} pages")))
        }
        Pattern::Phases { set, .. } if set > pages => {
            Err(wrong("set", set, format!("more than the {pages} pages")))
        }
        Pattern::Phases { phases, .. } if phases > part.refs => Err(wrong(
            "phases",
            phases,
            format!("more than the {} references", part.refs),
        )),
        Pattern::ScanHot { hot, .. } if hot >= pages => Err(wrong(
            "hot",
            hot,
            format!("none of the {pages} pages is left for the scan"),
        )),
        _ => Ok(()),
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Spec, SpecError> {
        let mut spec = Spec {
            parts: Vec::new(),
            page_shift: 12,
            gap: 100,
        };
        for (index, word) in text.split('+').enumerate() {
            if index == PATTERNS_MAX {
                return Err(SpecError::TooMany);
            }
            let part = part(word.trim(), index, &mut spec)?;
            spec.parts.push(part);
        }
        let refs: u128 = spec.parts.iter().map(|part| u128::from(part.refs)).sum();
        if refs * u128::from(spec.gap.max(1)) > u128::from(u64::MAX) {
            return Err(wrong(
                "refs",
                refs,
                "the time of the last reference is past 2^64 ns",
            ));
        }
        Ok(spec)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.parts.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "+" })?;
            match part.pattern {
                Pattern::Sequential => f.write_str("sequential:")?,
                Pattern::Strided { stride } => write!(f, "strided:stride={stride},")?,
                Pattern::Loop => f.write_str("loop:")?,
                Pattern::Uniform => f.write_str("uniform:")?,
                Pattern::Zipf { theta } => write!(f, "zipf:theta={theta},")?,
                Pattern::Objects { size, theta } => {
                    write!(f, "objects:size={size},theta={theta},")?
                }
                Pattern::Shrink { step } => write!(f, "shrink:step={step},")?,
                Pattern::Phases { phases, set } => write!(f, "phases:phases={phases},set={set},")?,
                Pattern::ScanHot { hot, share } => write!(f, "scan_hot:hot={hot},share={share},")?,
            }
            let Part {
                pages,
                refs,
                writes,
                dirty,
                seed,
                client,
                ..
            } = part;
            write!(
                f,
                "pages={pages},refs={refs},writes={writes},dirty={dirty},seed={seed},client={client}"
            )?;
            if index == 0 {
                write!(f, ",page={},gap={}", 1u64 << self.page_shift, self.gap)?;
            }
        }
        Ok(())
    }
}
