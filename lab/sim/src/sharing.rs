//! A budget of DRAM for many clients: what each is promised, and what became of it.

use std::fmt;

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_qos::LatencyBound;
pub use undercroft_qos::Load;

/// How the clients of a simulation share its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharing {
    /// Of each client, in the order of the trace.
    pub terms: Vec<Terms>,
    /// Memory goes where it saves most waiting (`auto`). False: by weights alone.
    pub by_curves: bool,
    /// Virtual time between two divisions by curves.
    pub every: Nanos,
    /// Whether bounds that cannot be kept are refused. False: to see what becomes of them.
    pub admission: bool,
}

/// Memory that one client is promised, and when it comes. It leaves at the end of its trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
    /// Its weight, 1 at least.
    pub weight: u32,
    /// Its protection.
    pub least: Bytes,
    /// Most that it ever gets.
    pub most: Bytes,
    /// Its latency bound.
    pub bound: Option<LatencyBound>,
    /// Load that it says it will ask for. `None`: with a bound, as much as the bound allows
    /// ([`Load::of_bound`]); without one, nothing. What is measured counts once it is here.
    pub demand: Option<Load>,
    /// When it asks to be admitted.
    pub comes: Nanos,
    /// Processor and DRAM time of each of its references.
    pub reference_time: Nanos,
}

/// Why a client was not admitted, and what could be given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum NotAdmitted {
    /// No combination of the tiers that are left keeps its bound.
    Bound {
        /// The least limit that could be kept.
        could: Nanos,
    },
    /// Its load breaks what others are promised, or no limit can be kept beside it.
    Load {
        /// This many page-ins a second could be served.
        could: u64,
    },
    /// The protection of the others leaves less than its own.
    Protection {
        /// As much could be protected.
        could: Bytes,
    },
    /// As much memory is free.
    Memory {
        /// As much could be given.
        could: Bytes,
    },
}

impl fmt::Display for NotAdmitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAdmitted::Bound { could } => write!(f, "its bound; {could} could be kept"),
            NotAdmitted::Load { could } => {
                write!(f, "its load; {could} page-ins a second could be served")
            }
            NotAdmitted::Protection { could } => {
                write!(f, "its protection; {could} could be protected")
            }
            NotAdmitted::Memory { could } => write!(f, "no memory; {could} is free"),
        }
    }
}

impl From<NotAdmitted> for String {
    fn from(refusal: NotAdmitted) -> String {
        refusal.to_string()
    }
}

/// Fate of a client that shares memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SharedOutcome {
    /// Why it was not admitted; absent if it was.
    pub refused: Option<NotAdmitted>,
    /// Its limit, over the time that it was here.
    pub mean_limit_bytes: u64,
    /// Seconds that it waited for its pages.
    pub stall_seconds: f64,
}
