//! Words of a description: sizes and limits, and why one is refused.

use std::fmt;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Exact, ParseUnitError};

/// The smallest useful sizes: a file or mapping of 1 MiB, a pool of a few blocks.
pub(super) const FILE_BYTES_MIN: u64 = 1 << 20;
const RAM_BYTES_MIN: u64 = 64 * BASE_PAGE_BYTES as u64;

/// A description, apart from the name of its kind.
pub(super) struct Words<'a> {
    /// Text behind the colon.
    pub(super) first: Option<&'a str>,
    /// Text behind each comma: key, value.
    pub(super) settings: Vec<(&'a str, Option<&'a str>)>,
}

impl Words<'_> {
    /// The name of the kind, and the rest.
    pub(super) fn of(text: &str) -> (&str, Words<'_>) {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        let (kind, first) = match head.split_once(':') {
            Some((kind, first)) => (kind.trim(), Some(first)),
            None => (head.trim(), None),
        };
        let settings = parts.map(|part| match part.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim())),
            None => (part.trim(), None),
        });
        let settings = settings.collect();
        (kind, Words { first, settings })
    }
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A size in bytes.
    Bytes(Bytes),
    /// A part of the client's `--memory-max`, above 0 and at most 100.
    PercentOfMemoryMax(f64),
}

/// Why a tier description was refused; the text names the fix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// An unknown kind.
    #[error("unknown tier kind `{kind}`; use {known} (example: ram, file:/var/swap,size=20G)")]
    UnknownKind {
        /// As written.
        kind: String,
        /// The kinds that there are.
        known: String,
    },
    /// A kind that this build was made without.
    #[error(
        "this build has no tier kind `{kind}`; build undercroft with it: cargo build --release \
         --features {kind}"
    )]
    NotBuilt {
        /// The kind, and the feature that brings it.
        kind: &'static str,
    },
    /// A key that this kind does not have.
    #[error("tier `{kind}` has no setting `{key}`; it has: {valid}")]
    UnknownKey {
        /// The kind.
        kind: &'static str,
        /// The key as written.
        key: String,
        /// The keys that there are.
        valid: String,
    },
    /// A setting, or the compressor, was given twice.
    #[error("tier `{kind}`: `{key}` is given twice; keep one")]
    Twice {
        /// The kind.
        kind: &'static str,
        /// The setting.
        key: String,
    },
    /// A kind that needs a path or a node, without one.
    #[error("tier `{kind}` needs a {what}: {example}")]
    Missing {
        /// The kind.
        kind: &'static str,
        /// Path or node.
        what: &'static str,
        /// How it is written.
        example: &'static str,
    },
    /// `ram` with a path.
    #[error("tier `ram` takes no path (`{0}`); for a file write file:{0}")]
    PathUnwanted(String),
    /// A size or percentage that is not valid.
    #[error("tier setting `{key}`: {why}")]
    Value {
        /// The setting.
        key: &'static str,
        /// Reason of the refusal.
        why: String,
    },
}

pub(super) fn parse_size(key: &'static str, text: &str, min: u64) -> Result<Bytes, SpecError> {
    let bytes: Bytes = text
        .parse()
        .map_err(|error: ParseUnitError| SpecError::Value {
            key,
            why: error.to_string(),
        })?;
    if bytes.0 < min {
        return Err(SpecError::Value {
            key,
            why: format!("`{text}` is too small; the least is {}", Bytes(min)),
        });
    }
    Ok(bytes)
}

pub(super) fn parse_yes(key: &'static str, text: &str) -> Result<bool, SpecError> {
    match text {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(SpecError::Value {
            key,
            why: format!("`{text}` is not yes or no"),
        }),
    }
}

pub(super) fn parse_limit(text: &str) -> Result<Limit, SpecError> {
    let Some(percent) = text.strip_suffix('%') else {
        return parse_size("max", text, RAM_BYTES_MIN).map(Limit::Bytes);
    };
    match percent.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Limit::PercentOfMemoryMax(percent)),
        _ => Err(SpecError::Value {
            key: "max",
            why: format!("`{text}` is not a percentage above 0 and up to 100 (example: 30%)"),
        }),
    }
}

impl Limit {
    /// The bytes it stands for if the client's memory limit is `memory_max`; at most that.
    pub fn resolve(self, memory_max: Bytes) -> Bytes {
        match self {
            Limit::Bytes(bytes) => bytes.min(memory_max),
            Limit::PercentOfMemoryMax(percent) => {
                // Large numbers are rounded, and may be rounded up.
                Bytes((memory_max.0 as f64 * percent / 100.0) as u64).min(memory_max)
            }
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Bytes(bytes) => Exact(*bytes).fmt(f),
            Limit::PercentOfMemoryMax(percent) => write!(f, "{percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_resolve_within_the_memory_limit() {
        let limit = |text: &str| parse_limit(text).unwrap().resolve(Bytes(1 << 30));
        assert_eq!(limit("25%"), Bytes(1 << 28));
        assert_eq!(limit("64M"), Bytes(64 << 20));
        assert_eq!(limit("4G"), Bytes(1 << 30));
    }
}
