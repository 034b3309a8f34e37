//! The state that the manager's threads share, in groups. A function that needs one or two groups
//! takes only those.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use undercroft_base::{Nanos, SpaceId};
use undercroft_proto::options::ClientOptions;
use undercroft_sys::access::vcpu::VirtualCpus;
use undercroft_sys::object::MemoryObject;

use super::arrivals::Arrivals;
use super::graves::Graves;
use super::locks::Locks;
use super::process::Process;
use super::processes::Processes;
use crate::books::Books;
use crate::cpus::CpuPlan;
use crate::gauges::Gauges;
use crate::signals::Signals;

/// Of a virtual machine.
#[derive(Default)]
pub(crate) struct Inside {
    /// The number of its memory, once that is managed.
    pub space: OnceLock<SpaceId>,
    /// A way to look at registers, if a plugin asked for them.
    pub cpus: OnceLock<VirtualCpus>,
}

/// The groups of one run.
pub(crate) struct Shared {
    /// The engine and the tiers.
    pub books: Books,
    /// The address spaces.
    pub processes: Processes,
    /// The memory of the run's virtual machine, if it has one.
    pub guest: Option<Arc<MemoryObject>>,
    /// The locks of its pages.
    pub locks: Option<Arc<Locks>>,
    /// The inside of that machine, for a plugin that asks about it.
    pub inside: Inside,
    /// New mappings that the books do not have yet.
    pub arrivals: Arrivals,
    /// Books that are still to be forgotten.
    pub graves: Graves,
    /// The measurements for the report.
    pub gauges: Gauges,
    /// How threads wake each other, and stop.
    pub signals: Signals,
    /// The CPUs on which threads run.
    pub cpu_plan: CpuPlan,
    /// The user's options.
    pub options: ClientOptions,
    pub started: Instant,
}

impl Shared {
    /// Adds an address space, or notes that its process has announced itself.
    pub(crate) fn add_process(&self, process: &Arc<Process>) {
        if process.hosted.is_some() {
            let _ = self.inside.space.set(process.space);
        }
        let is_active = |thread| self.cpu_plan.is_active(thread);
        if self.processes.add(process, is_active) {
            self.gauges.spaces_seen.fetch_add(1, Ordering::Relaxed);
            self.signals.wake_followers(is_active);
        }
    }

    /// Has fault threads look at the views of guests again.
    pub(crate) fn follow_again(&self) {
        self.processes.touch();
        (self.signals).wake_followers(|thread| self.cpu_plan.is_active(thread));
    }

    /// Has a fault thread load pages that the user's policy wants in memory: one on a CPU where no
    /// client thread faults, if there is one.
    pub(crate) fn wake_loader(&self) {
        let mut threads = (0..self.signals.fault_threads()).rev();
        let loader = threads.find(|thread| !self.cpu_plan.is_active(*thread));
        self.signals
            .wake_followers(|thread| thread == loader.unwrap_or(0));
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.elapsed_at(Instant::now())
    }

    /// As [`Shared::elapsed`], for a machine without a clock.
    pub(crate) fn now(&self) -> Nanos {
        Nanos(self.elapsed().as_nanos() as u64)
    }

    /// As [`Shared::elapsed`], at another moment.
    pub(crate) fn elapsed_at(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.started)
    }
}
