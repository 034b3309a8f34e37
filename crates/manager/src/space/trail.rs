//! Where the writes of a fork child have got to: how many copies the next one is charged for.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_engine::limits::COPY_PAGES_MAX;

/// Where the writes of a process have got to. Several fault threads may use it at once: a wrong
/// guess costs a fault.
#[derive(Default)]
pub(crate) struct Trail {
    next: AtomicU64,
    copies: AtomicU64,
}

impl Trail {
    /// Copies worth charging for a write at `page`: twice as many as the last time if it goes on
    /// from there, else one.
    pub fn guess(&self, page: u64) -> u64 {
        if self.next.load(Ordering::Relaxed) == page {
            (2 * self.copies.load(Ordering::Relaxed)).clamp(1, COPY_PAGES_MAX)
        } else {
            1
        }
    }

    pub fn went(&self, page: u64, granted: u64, copies: u64) {
        self.next.store(page + granted, Ordering::Relaxed);
        self.copies.store(copies, Ordering::Relaxed);
    }
}
