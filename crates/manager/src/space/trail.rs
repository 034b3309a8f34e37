//! Guesses how many pages a fork child will write in a row: its next write is charged for that many
//! copies.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_engine::limits::COPY_PAGES_MAX;

/// The last write of a process. Several fault threads may use it at once: a wrong guess costs a
/// fault.
#[derive(Default)]
pub(crate) struct Trail {
    next: AtomicU64,
    copies: AtomicU64,
}

impl Trail {
    /// Copies to charge for a write at `page`: twice as many as the last time if it continues the
    /// last write, else one.
    pub(crate) fn guess(&self, page: u64) -> u64 {
        if self.next.load(Ordering::Relaxed) == page {
            (2 * self.copies.load(Ordering::Relaxed)).clamp(1, COPY_PAGES_MAX)
        } else {
            1
        }
    }

    /// Notes a write at `page`, for which `granted` pages lost their protection and `copies` were
    /// charged.
    pub(crate) fn went(&self, page: u64, granted: u64, copies: u64) {
        self.next.store(page + granted, Ordering::Relaxed);
        self.copies.store(copies, Ordering::Relaxed);
    }
}
