//! The program's anonymous memory, managed or not, and its peak: what a limit is chosen by.
//!
//! Pages that no book has are known from the sizes that the kernel gives for each process, which
//! the control thread reads at each check. A page that processes share after a fork is in the size
//! of each of them until it is managed.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::Bytes;

/// Peaks, and the part that only another thread knows.
#[derive(Debug, Default)]
pub(crate) struct Footprint {
    /// Memory of processes without the shim, as of the last look for them.
    strays: AtomicU64,
    /// Most DRAM before managing began.
    unmanaged_peak: AtomicU64,
    /// Most memory, in DRAM and out of it.
    peak: AtomicU64,
}

impl Footprint {
    /// Notes the memory of the processes without the shim.
    pub(crate) fn note_strays(&self, bytes: Bytes) {
        self.strays.store(bytes.0, Ordering::Relaxed);
    }

    pub(crate) fn strays(&self) -> Bytes {
        Bytes(self.strays.load(Ordering::Relaxed))
    }

    /// Notes DRAM in use while no page is managed, or not all that will be.
    pub(crate) fn note_unmanaged(&self, bytes: Bytes) {
        self.unmanaged_peak.fetch_max(bytes.0, Ordering::Relaxed);
    }

    pub(crate) fn unmanaged_peak(&self) -> Bytes {
        Bytes(self.unmanaged_peak.load(Ordering::Relaxed))
    }

    /// Notes memory in use, in DRAM and out of it. Returns the most so far.
    pub(crate) fn note(&self, bytes: Bytes) -> Bytes {
        Bytes(self.peak.fetch_max(bytes.0, Ordering::Relaxed).max(bytes.0))
    }
}
