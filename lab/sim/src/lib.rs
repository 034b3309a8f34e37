//! The engine in virtual time: traces replayed against models of devices, and storms of failures.
//!
//! Runs the engine and the policies that run live. Neither knows of this crate: a test forbids them
//! to name it. Two things differ, by configuration only:
//!
//! - `Config::room`. A live run keeps a reserve, and its newest pages stay (`Room::Ahead`). Here
//!   the caller may evict after the plan and before the installation (`Room::AfterPlan`): memory is
//!   used to the last page, and the policy alone decides.
//! - `Uses::touch`. A trace has all uses of resident pages, a live run those that a scan finds.
//!
//! A page of any size is one page of the engine, and the limit is a number of pages. In place of
//! the checksum each page has one bit: whether it differs from its copy. Bounds to compare with
//! ([`bound`]: the best possible policy, and a random one) are reclaim policies to the engine.
//!
//! Absent: the manager's threads and locks. Their cost is a given number (`--software`), not a
//! result.
#![forbid(unsafe_code)]

pub mod bound;
pub mod kernel_swap;
pub mod memory_trace;
pub mod open;
pub mod outcome;
pub mod page_stream;
pub mod place;
pub(crate) mod plugin;
pub mod reclaim;
pub mod recorded;
pub mod replay;
pub mod setup;
pub mod sharing;
pub mod spaces;
pub mod storm;
pub mod sweep;
pub mod table;

pub use kernel_swap::KernelSwap;
pub use memory_trace::MemoryTrace;
pub use outcome::SimReport;
pub use page_stream::PageStream;
pub use place::Placement;
pub use setup::{Setup, SetupError};
pub use sharing::{Load, Sharing, Terms};
pub use sweep::{Results, Sweep};

/// Runs one simulation of a numbered trace.
///
/// * `progress`: gets the number of references done, now and then.
///
/// Errors: an impossible setup, or tiers that fill up.
pub fn simulate(
    streams: &[PageStream],
    setup: &Setup,
    progress: &mut dyn FnMut(u64),
) -> Result<SimReport, SetupError> {
    let mut replay = replay::Replay::new(streams, setup)?;
    replay.run(progress)?;
    Ok(SimReport::of(replay, setup))
}
