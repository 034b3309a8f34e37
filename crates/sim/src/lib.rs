//! The engine in virtual time: traces replayed against models of devices, and storms of failures.
//!
//! Runs the engine and the policies that run live. Neither knows of this crate.
#![forbid(unsafe_code)]

pub mod bound;
pub mod kernel_swap;
pub mod memory_trace;
pub mod open;
pub mod outcome;
pub mod page_stream;
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
