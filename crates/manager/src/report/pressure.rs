//! Memory pressure, in the format of `/proc/pressure/memory`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How much of the time threads waited for pages. Averages in percent.
///
/// Threads that wait at once count each, up to all of the time; the kernel counts them once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// Over 10 seconds.
    pub avg10: f64,
    /// Over 60 seconds.
    pub avg60: f64,
    /// Over 300 seconds.
    pub avg300: f64,
    /// Microseconds since the start.
    pub total_micros: u64,
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "some avg10={:.2} avg60={:.2} avg300={:.2} total={}",
            self.avg10, self.avg60, self.avg300, self.total_micros
        )
    }
}
