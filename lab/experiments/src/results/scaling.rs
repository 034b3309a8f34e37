//! The findings of the experiment `scale` besides its samples: what undercroft's threads did, what
//! it counted, and what a model predicts.

use super::{Figure, Table};
use serde::{Deserialize, Serialize};

/// All of them. Tables and figures are made from them and the samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scaling {
    /// Work of undercroft's threads, for each phase of each run.
    pub phases: Vec<ScalingPhase>,
    /// Counts of undercroft, for each run.
    pub counts: Vec<ScalingCounts>,
    /// Predictions. None of them was measured.
    pub modelled: Vec<Modelled>,
    /// Assumptions of the model, one sentence each.
    pub model: Vec<String>,
    /// The tables.
    pub tables: Vec<Table>,
    /// Pictures, drawn as `NAME.svg`.
    pub figures: Vec<Figure>,
}

/// Work of undercroft's threads in one phase.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ScalingPhase {
    pub round: usize,
    pub rig: String,
    pub pattern: String,
    /// Threads of the program.
    pub threads: usize,
    pub ops: u64,
    pub seconds: f64,
    /// The thread with most CPU time.
    pub busiest: String,
    /// Its CPU time, of the time of the phase.
    pub busiest_share: f64,
    pub busiest_ns_per_op: f64,
    pub busiest_voluntary_switches: u64,
    pub busiest_involuntary_switches: u64,
    /// Threads by kind, `-N` for numbers: name, how many there are, CPU nanoseconds of all for an
    /// operation.
    pub kinds: Vec<(String, usize, f64)>,
    /// CPU time of undercroft, its agents included.
    pub undercroft_ns_per_op: f64,
    /// CPU time of the program, in ticks of 10 ms; in kernel swap it has most of the work.
    pub program_ns_per_op: f64,
}

/// Counts of one run under undercroft, from its report: the fill, all phases and the check.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ScalingCounts {
    pub round: usize,
    pub rig: String,
    /// Threads of the program.
    pub threads: usize,
    pub faults: f64,
    pub pages_out: f64,
    pub waited_for_room: f64,
    pub above_limit_seconds: f64,
    pub above_limit_bytes_peak: f64,
    pub engine_locks: f64,
    pub engine_waits: f64,
    /// Locks for batches of pages that leave.
    pub evict_locks: f64,
}

impl ScalingCounts {
    /// Engine locks for a fault: all that were not for batches.
    pub fn locks_per_fault(&self) -> f64 {
        (self.engine_locks - self.evict_locks).max(0.0) / self.faults
    }

    /// Engine locks for a page that leaves.
    pub fn locks_per_page_out(&self) -> f64 {
        self.evict_locks / self.pages_out
    }

    /// The part of the locks that found another thread inside.
    pub fn found_taken(&self) -> f64 {
        self.engine_waits / self.engine_locks
    }
}

/// A prediction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Modelled {
    pub rig: String,
    pub pattern: String,
    /// Threads of the program.
    pub threads: usize,
    pub cpus: usize,
    pub ops_per_second: f64,
    /// The station that bounds it.
    pub by: String,
}
