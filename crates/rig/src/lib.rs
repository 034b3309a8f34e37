//! Rigs: the ways to run one command under a memory budget. A rig is set up and taken down for each
//! run.
//!
//! ```text
//! Rig::set_up(limit) -> Stage { prefix, guards, meters }
//! Stage::spawn(command) -> Running -> finish() -> Finished
//! ```
//! Dropping a `Stage` or `Running` at any point (error, panic, Ctrl-C) kills the command, then
//! takes swap, device and cgroup back. A rig refuses if another swap is active. Kernel rigs need
//! root and memory cgroups. With cgroups of version 2, the memory controller stays switched on.

#![forbid(unsafe_code)]

mod attempt;
mod calibrate;
mod cgroup;
mod container;
pub mod interrupt;
mod kernel;
mod process;
pub mod script;
pub mod swap;
mod undercroft;

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use undercroft_base::Bytes;

pub use attempt::{Attempt, attempt};
pub use calibrate::{Calibration, calibrate, calibrate_with};
pub use cgroup::groups_of;
pub use container::Container;
pub use kernel::{Plain, SwapFile, Zram, Zswap};
pub use process::{CommandLine, Finished, Running, Stdout};
pub use undercroft::{TierChoice, Undercroft, UndercroftGuest};

/// Why a rig could not be used.
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// The machine lacks something. The experiment may go on without this rig, with a message.
    #[error("rig `{rig}` cannot run here: {why}; {fix}")]
    Unavailable {
        /// Name of the rig.
        rig: &'static str,
        /// The thing that is missing.
        why: String,
        /// The remedy.
        fix: &'static str,
    },
    /// Another swap is active and would be part of the measurement.
    #[error(
        "another swap is active ({0}): the measurement would be of both; run `swapoff -a` first"
    )]
    OtherSwap(String),
    /// The data does not compress enough to fit into the budget at all.
    #[error(
        "budget {budget} cannot hold the data: the compressed part alone takes {compressed}; use a \
         larger share or a file"
    )]
    BudgetTooSmall {
        /// Total DRAM asked for.
        budget: Bytes,
        /// Compressed bytes measured.
        compressed: Bytes,
    },
    /// A command ran and failed, or ended too early.
    #[error("{what}: {how}")]
    CommandFailed {
        /// The task of the command.
        what: String,
        /// How it ended, or what it said last.
        how: String,
    },
    /// A command's output or report is not what it should be.
    #[error("{what}: {why}")]
    Unreadable {
        /// The text that was read.
        what: String,
        /// The error in it.
        why: String,
    },
    /// A system call of the set-up failed.
    #[error("{what}: {source}")]
    Failed {
        /// The step, with its path or command.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The kernel killed the command. Under a kernel rig it does so if it cannot keep the limit.
    #[error(
        "rig `{rig}`: {what} was killed by signal 9; the kernel does so when the limit of {limit} cannot be kept"
    )]
    Killed {
        /// Name of the rig.
        rig: &'static str,
        /// The command.
        what: String,
        /// The rig's limit.
        limit: Bytes,
    },
    /// The user interrupted the run.
    #[error("interrupted; swap, device and cgroup were put back")]
    Interrupted,
}

impl RigError {
    /// Makes a [`RigError::Failed`] of a system error.
    pub fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> RigError {
        let what = what.into();
        move |source| RigError::Failed { what, source }
    }
}

/// A way to run a command under a limit. One rig value serves many runs.
pub trait Rig {
    /// Short name used in results and plots, e.g. `zram`.
    fn name(&self) -> &'static str;

    /// True if compressed pages are outside the limit, so that the limit must be calibrated to a
    /// total.
    fn stores_outside_limit(&self) -> bool;

    /// Changes the machine for one run; undone when the stage is dropped.
    /// * `limit`: of the rig's own kind: memcg limit, `--memory-max`, or unused by `plain`.
    ///
    /// Errors: `Unavailable`, `OtherSwap`, `Failed`; nothing is left changed.
    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError>;
}

/// Facts about the machine during a run, for the results: compressor, device, read-ahead and so on.
pub type Facts = BTreeMap<String, String>;

/// How to read the rig's compressed or stored bytes while the command runs.
pub(crate) enum StoreMeter {
    /// Nothing outside the limit.
    None,
    /// `mm_stat` of zram: memory used now and at most (the kernel's own peak).
    Zram(PathBuf),
    /// `/proc/meminfo` Zswap, sampled.
    Zswap,
}

/// DRAM of one run, in bytes. Budgets compare `total_peak`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// The limit given to the rig; 0 = none.
    pub limit_bytes: u64,
    /// Peak charged to the run's cgroup: the command, and for undercroft also its manager, its RAM
    /// tier and page cache.
    pub cgroup_peak_bytes: u64,
    /// Peak of compressed pages outside the limit (zram, zswap) or in the RAM tier (undercroft).
    pub compressed_peak_bytes: u64,
    /// Peak of resident plus compressed. Kernel rigs: the sum of both peaks. Undercroft:
    /// `dram_bytes_peak`.
    pub total_peak_bytes: u64,
}

/// A machine prepared for one run. Fields drop in their order: the swap goes off before its cgroup
/// and lock.
pub struct Stage {
    pub(crate) prefix: Vec<std::ffi::OsString>,
    pub(crate) facts: Facts,
    pub(crate) limit: Bytes,
    pub(crate) meter: StoreMeter,
    pub(crate) report: Option<PathBuf>,
    pub(crate) _swap: Option<swap::SwapGuard>,
    pub(crate) cgroup: Option<cgroup::Cgroup>,
    pub(crate) _lock: Option<std::fs::File>,
}
