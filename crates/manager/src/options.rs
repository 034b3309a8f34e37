//! What a run is asked for: parsed by the command line, carried to the manager unchanged.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What to do when no tier has room and the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// Pages stay in memory; the limit is exceeded, with a warning and a counter.
    #[default]
    Stay,
    /// The client is ended with status 125.
    Kill,
}

/// How often the pages in memory are looked at for use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessScan {
    /// Now and then while pages leave memory, where the machine allows it.
    #[default]
    Auto,
    /// At this interval; refused where the machine does not allow it.
    Every(Duration),
    /// Not at all.
    Never,
}

/// Options of one client, validated by whoever builds it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientOptions {
    /// DRAM for the client in bytes; `u64::MAX` = no limit.
    pub memory_max: u64,
    /// Tier specifications in the user's syntax, fastest first; never empty.
    pub tiers: Vec<String>,
    /// Reclaim policy name.
    pub reclaim: String,
    /// Prefetch policy name.
    pub prefetch: String,
    /// When every tier is full.
    pub when_full: WhenFull,
    /// Suppress everything but errors on stderr.
    pub quiet: bool,
    /// Where to record the page faults; `None` = nowhere.
    pub trace: Option<PathBuf>,
    /// Looks at which pages in memory were used.
    pub access_scan: AccessScan,
}

/// One `undercroft run`.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The client's options.
    pub client: ClientOptions,
    /// Program and arguments; never empty.
    pub command: Vec<std::ffi::OsString>,
    /// Where to write the report.
    pub report: Option<PathBuf>,
}
