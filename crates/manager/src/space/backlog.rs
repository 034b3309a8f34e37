//! Places that discovery still has to look at in a process.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use undercroft_base::VirtRange;

use crate::sync::lock;

/// Ranges that are kept apart for another discovery.
const RECHECK_MAX: usize = 64;

/// The part of a process that only discovery needs.
#[derive(Default)]
pub(crate) struct Backlog {
    /// Threads that are counting the pages of new regions. A child that is forked now inherits
    /// books that lack them.
    pub counting: AtomicU32,
    /// The parent was still being counted at the fork, or a count of this process failed: its pages
    /// are to be counted again.
    pub recount: AtomicBool,
    /// Ranges whose mappings went away: new mappings there are to be discovered.
    pub recheck: Recheck,
    /// Ranges that were moved while pages were counted: pages there are to be counted again.
    pub uncounted: Recheck,
    /// All of its memory is set aside, because no agent can move its pages.
    pub all_still: AtomicBool,
    /// The page from which mappings that are set aside are looked up next.
    pub still_looked: AtomicU64,
}

/// Ranges to be looked at again: a few, or one that covers them all.
#[derive(Default)]
pub(crate) struct Recheck(Mutex<Vec<VirtRange>>);

impl Recheck {
    pub(crate) fn add(&self, range: VirtRange) {
        let mut ranges = lock(&self.0);
        ranges.push(range);
        if ranges.len() > RECHECK_MAX {
            let start = ranges.iter().map(|range| range.start).min();
            let end = ranges.iter().map(|range| range.end).max();
            *ranges = start
                .zip(end)
                .map(|(s, e)| VirtRange::new(s, e))
                .into_iter()
                .collect();
        }
    }

    pub(crate) fn take(&self) -> Vec<VirtRange> {
        std::mem::take(&mut *lock(&self.0))
    }
}
