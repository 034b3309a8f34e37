//! What large programs cost: how long locks are held while many pages change, and which resources
//! ran short. The counts are in the report. The control thread warns once of each shortage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Longest holds of locks while layout events are applied and processes end, in nanoseconds. They
/// include time in which the holder did not have its CPU.
#[derive(Default)]
pub(crate) struct Holds {
    pub engine: AtomicU64,
    pub layout: AtomicU64,
}

/// Notes a hold that began at `since`.
pub(crate) fn note_hold(longest: &AtomicU64, since: Instant) {
    longest.fetch_max(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
}

/// Shortages of one run.
#[derive(Default)]
pub(crate) struct Shortages {
    /// Descriptors that were missing: for a fork child, a new process, or its watch.
    pub descriptors: AtomicU64,
    /// Places that were missing in the page table.
    pub table: AtomicU64,
    /// Bits of the shortages that the user was warned of.
    told: AtomicU64,
}

const DESCRIPTORS: u64 = 1;
const TABLE: u64 = 2;

impl Shortages {
    /// The ledger had no room for a page, which goes on unmanaged.
    pub(crate) fn no_entry(&self) {
        self.table.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a missing descriptor.
    pub(crate) fn no_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// The warnings that have not been given yet.
    pub(crate) fn news(&self) -> Vec<&'static str> {
        let mut news = Vec::new();
        let mut tell = |count: &AtomicU64, kind: u64, text| {
            let new = count.load(Ordering::Relaxed) > 0;
            if new && self.told.fetch_or(kind, Ordering::Relaxed) & kind == 0 {
                news.push(text);
            }
        };
        tell(
            &self.descriptors,
            DESCRIPTORS,
            "out of file descriptors: new processes of the program wait for one. Raise its hard \
             limit (`ulimit -Hn`)",
        );
        tell(
            &self.table,
            TABLE,
            "the page table is full (1 TiB of address space): some memory of the program is outside the \
             limit",
        );
        news
    }
}

/// True if this process, or the whole machine, has no descriptor left.
pub(crate) fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    errno == Some(Errno::MFILE) || errno == Some(Errno::NFILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shortage_is_told_once() {
        let shortages = Shortages::default();
        assert!(shortages.news().is_empty());
        shortages.table.fetch_add(1, Ordering::Relaxed);
        assert_eq!(shortages.news().len(), 1);
        shortages.table.fetch_add(1, Ordering::Relaxed);
        shortages.descriptors.fetch_add(1, Ordering::Relaxed);
        assert_eq!(shortages.news().len(), 1);
        assert!(shortages.news().is_empty());
    }
}
