//! Counts of a file tier's writes and of the space that it gave back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// How often writes failed and space was freed, since the tier was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileCounts {
    /// Pages not stored because it was full.
    pub pages_no_space: u64,
    /// Pages not stored because of another I/O error.
    pub pages_failed: u64,
    /// Pages that were not tried, because a write had failed shortly before.
    pub pages_paused: u64,
    /// Slabs (1 MiB) whose space was given back.
    pub slabs_discarded: u64,
    /// Slabs whose space could not be given back.
    pub discards_failed: u64,
    /// Write operations, each of one page or more.
    pub writes: u64,
    /// Bytes that they wrote. Reports have it as the tier's.
    #[serde(skip)]
    pub bytes_written: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) pages_no_space: AtomicU64,
    pub(super) pages_failed: AtomicU64,
    pub(super) pages_paused: AtomicU64,
    pub(super) slabs_discarded: AtomicU64,
    pub(super) discards_failed: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) bytes_written: AtomicU64,
}

/// Reads the counts of a tier, which is behind its port by then.
#[derive(Clone, Debug)]
pub struct FileMeter(Arc<Counters>);

impl FileMeter {
    pub(super) fn of(counters: &Arc<Counters>) -> FileMeter {
        FileMeter(counters.clone())
    }

    /// The counts now.
    pub fn read(&self) -> FileCounts {
        let counters = &self.0;
        FileCounts {
            pages_no_space: counters.pages_no_space.load(Relaxed),
            pages_failed: counters.pages_failed.load(Relaxed),
            pages_paused: counters.pages_paused.load(Relaxed),
            slabs_discarded: counters.slabs_discarded.load(Relaxed),
            discards_failed: counters.discards_failed.load(Relaxed),
            writes: counters.writes.load(Relaxed),
            bytes_written: counters.bytes_written.load(Relaxed),
        }
    }
}
