//! How long memory has not been used, as scans of Accessed bits show it.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, Nanos};

/// Ages that are told apart, in seconds.
pub const AGES_SECONDS: [u64; 6] = [1, 10, 60, 600, 3_600, 86_400];

/// The working set is the memory that was used within this many seconds, one of
/// [`AGES_SECONDS`].
pub const WORKING_SET_SECONDS: u64 = 60;

/// How long pages in memory have not been used. Known if `--access-scan` has an interval. A page is
/// as old as its last scan that saw it used, or its arrival; so it is younger here than it is, by
/// up to an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Ages {
    /// Time since the last scan.
    pub scanned_seconds_ago: f64,
    /// Pages in memory that it saw.
    pub bytes: u64,
    /// The part of them that was used in the last minute: an estimate of the working set.
    pub working_set_bytes: u64,
    /// How much of them has not been used for how long, the shortest time first.
    pub unused: Vec<Unused>,
    /// Pages that left by `undercroft demote` so far; null: no user asked.
    #[serde(default)]
    pub demotion: Option<Demotion>,
}

/// Memory that has not been used for a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unused {
    /// For at least this long.
    pub seconds: u64,
    /// Bytes of its pages.
    pub bytes: u64,
}

/// Pages that left because a user asked, although there was room. Of all requests together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Demotion {
    /// Requests so far.
    pub asked: u64,
    /// Pages that were old enough.
    pub named_bytes: u64,
    /// The part of them that left memory. Others stay: locked pages, say, and those that no tier
    /// takes.
    pub left_bytes: u64,
    /// Pages are still to leave.
    pub under_way: bool,
}

impl Ages {
    /// Counts a page of `bytes` bytes that was last used `age` ago.
    pub fn add(&mut self, age: Nanos, bytes: u64) {
        if self.unused.is_empty() {
            let none = |seconds| Unused { seconds, bytes: 0 };
            self.unused = AGES_SECONDS.map(none).to_vec();
        }
        self.bytes += bytes;
        for of in &mut self.unused {
            if age.0 / 1_000_000_000 >= of.seconds {
                of.bytes += bytes;
            } else if of.seconds == WORKING_SET_SECONDS {
                self.working_set_bytes += bytes;
            }
        }
    }
}

impl fmt::Display for Ages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, used) = (Bytes(self.bytes), Bytes(self.working_set_bytes));
        write!(f, "{used} of {all} used in the last minute")?;
        for (at, of) in self.unused.iter().filter(|of| of.bytes > 0).enumerate() {
            let (number, unit) = match of.seconds {
                seconds if seconds % 86_400 == 0 => (seconds / 86_400, "d"),
                seconds if seconds % 3_600 == 0 => (seconds / 3_600, "h"),
                seconds if seconds % 60 == 0 => (seconds / 60, "min"),
                seconds => (seconds, "s"),
            };
            let begins = ["; not used for", ","][usize::from(at > 0)];
            write!(f, "{begins} {number} {unit}: {}", Bytes(of.bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_by_each_age_that_they_have() {
        let mut ages = Ages::default();
        for seconds in [0, 9, 10, 59, 60, 100_000] {
            ages.add(Nanos(seconds * 1_000_000_000 + 999_999_999), 4096);
        }
        let unused: Vec<_> = (ages.unused.iter())
            .map(|of| (of.seconds, of.bytes / 4096))
            .collect();
        let expected = [(1, 5), (10, 4), (60, 2), (600, 1), (3600, 1), (86_400, 1)];
        assert_eq!((unused, ages.bytes), (expected.to_vec(), 6 * 4096));
        assert_eq!(ages.working_set_bytes, 4 * 4096);
        let text = ages.to_string();
        assert_eq!(
            text,
            "16.0 KiB of 24.0 KiB used in the last minute; not used for 1 s: 20.0 KiB, 10 s: \
             16.0 KiB, 1 min: 8.0 KiB, 10 min: 4.0 KiB, 1 h: 4.0 KiB, 1 d: 4.0 KiB"
        );
    }
}
