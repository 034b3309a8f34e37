//! The seam to the live system: starting a run, being its manager, and asking running managers how they are.

use std::ffi::OsString;

use undercroft_manager::options::RunOptions;
use undercroft_manager::report::Snapshot;

use crate::failure::{Failure, status};

fn not_built_in() -> Failure {
    Failure::new(
        status::RUN_FAILED,
        "this build cannot manage programs",
        "it was made before the live manager was connected to the command line",
        "build a newer commit",
    )
}

/// Runs a program to its end; its exit status.
pub fn run(_options: RunOptions) -> Result<u8, Failure> {
    Err(not_built_in())
}

/// The hidden `manager` subcommand.
pub fn serve(_arguments: Vec<OsString>) -> Result<u8, Failure> {
    Err(not_built_in())
}

/// Every client running now that this user may see.
pub fn snapshots() -> Result<Vec<Snapshot>, Failure> {
    Err(not_built_in())
}
