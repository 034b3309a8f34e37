//! What the manager's threads share, grouped by what a function may touch. A function that needs
//! one or two of the groups takes those.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::graves::Graves;
use super::process::Process;
use super::processes::Processes;
use crate::books::Books;
use crate::gauges::Gauges;
use crate::options::ClientOptions;
use crate::placement::Placement;
use crate::signals::Signals;

/// The groups of one run.
pub(crate) struct Shared {
    /// The engine and the tiers.
    pub books: Books,
    /// The address spaces.
    pub processes: Processes,
    /// What is gone, and not forgotten whole.
    pub graves: Graves,
    /// What is measured.
    pub gauges: Gauges,
    /// How threads wake each other, and end.
    pub signals: Signals,
    /// Where threads run.
    pub placement: Placement,
    /// What the user asked for.
    pub options: ClientOptions,
    pub started: Instant,
}

impl Shared {
    /// An address space came, or its process has announced itself.
    pub fn add_process(&self, process: &Arc<Process>) {
        if self.processes.add(process) {
            self.gauges.spaces_seen.fetch_add(1, Ordering::Relaxed);
            self.signals.wake_fault_threads();
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
