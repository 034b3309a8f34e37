//! The workload program `undercroft-touch`: touches memory in a chosen order, verifies every read,
//! times every operation.
//!
//! Modes: `patterns` fills a footprint and then runs phases over it; `shared` does so with threads
//! that all visit the whole of it; `first-touch` writes fresh memory each round; `compute` works
//! below any limit. One JSON line for each phase goes to stdout ([`PhaseLine`]). Exit status: 0; 2
//! for bad arguments; 3 if a read was wrong. No `unsafe` is needed: each thread owns an equal share
//! of the pages, or each page has a lock.

mod args;
mod data;
mod modes;
mod shared;
mod walk;

use serde::{Deserialize, Serialize};
use std::process::ExitCode;

use args::Mode;
pub use args::{Access, Phase, THREADS_MAX, USAGE};
pub use walk::Pattern;

/// Exit status if a read gave other bytes than were written.
pub const EXIT_MISMATCH: u8 = 3;

/// The figures of one phase. Latencies are of single operations (one page each), in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct PhaseLine {
    /// `fill`, `verify`, `sleep`, `first-touch`, `compute`, or a pattern's name.
    pub pattern: String,
    /// `read`, `write`, or empty.
    pub rw: String,
    pub threads: usize,
    pub ops: u64,
    pub mean_ns: f64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
    pub ops_per_second: f64,
    pub seconds: f64,
    /// Reads that gave wrong bytes.
    pub errors: u64,
}

/// Runs the program with `arguments` (without the program's name). Prints the usage if one is bad.
pub fn main(arguments: impl Iterator<Item = String>) -> ExitCode {
    let args = match args::parse(arguments) {
        Ok(args) => args,
        Err(message) => {
            eprintln!("undercroft-touch: {message}\n{}", args::USAGE);
            return ExitCode::from(2);
        }
    };
    let errors = match args.mode {
        Mode::Patterns => modes::patterns(&args),
        Mode::Shared => shared::run(&args),
        Mode::FirstTouch => modes::first_touch(&args),
        Mode::Compute => modes::compute(&args),
    };
    if errors == 0 {
        ExitCode::SUCCESS
    } else {
        eprintln!("undercroft-touch: {errors} reads gave WRONG BYTES");
        ExitCode::from(EXIT_MISMATCH)
    }
}
