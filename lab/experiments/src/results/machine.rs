//! Where and when a result was made: kernel, processors, memory, date, commit.

use serde::{Deserialize, Serialize};
use std::fs;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// The machine of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// `uname -sr`.
    pub kernel: String,
    /// Model name of the first processor.
    pub processor: String,
    /// Processors that the lab may use.
    pub cpus: usize,
    /// MemTotal.
    pub memory_bytes: u64,
    /// Load average of the last minute at the start: other work disturbs the numbers.
    pub load: f64,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub huge_pages: String,
}

impl Machine {
    /// This machine now. Unreadable fields are empty or 0.
    pub fn here() -> Machine {
        let read = |path: &str| {
            fs::read_to_string(path)
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
                .unwrap_or_default()
        };
        let kib = field(&read("/proc/meminfo"), "MemTotal");
        Machine {
            kernel: format!(
                "{} {}",
                read("/proc/sys/kernel/ostype"),
                read("/proc/sys/kernel/osrelease")
            ),
            processor: field(&read("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib
                .split_whitespace()
                .next()
                .and_then(|kib| kib.parse().ok())
                .unwrap_or(0u64)
                * 1024,
            load: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or(0.0),
            huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
        }
    }
}

/// The commit of the source tree in which the lab runs; outside one, the crate's version.
pub(crate) fn commit() -> String {
    let git = Command::new("git")
        .args(["rev-parse", "HEAD"])
        .stderr(Stdio::null())
        .output();
    let hash = git.ok().filter(|output| output.status.success());
    let hash = hash.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    hash.filter(|hash| !hash.is_empty())
        .unwrap_or_else(|| format!("version {}", env!("CARGO_PKG_VERSION")))
}

/// Now as `2026-03-01T12:00:00Z`.
pub(crate) fn now_utc() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, rest) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil(days as i64);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// Days since 1970-01-01 as a Gregorian date (Hinnant's algorithm).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn civil_knows_leap_days() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_513), (2026, 3, 1));
    }
}
