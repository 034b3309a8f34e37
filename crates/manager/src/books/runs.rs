//! Pages that are to leave before others, as runs.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use undercroft_base::{SpaceId, VirtRange};
use undercroft_engine::limits::EVICT_PAGES_MAX;

use crate::sync::lock;

/// Runs that are remembered: 256 MiB of pages if each run has 64.
pub(crate) const RUNS_MAX: usize = 1024;

/// Most pages of a run: one batch of the evictor.
const RUN_PAGES: u64 = EVICT_PAGES_MAX as u64;

/// Runs of pages, the oldest first.
#[derive(Default)]
pub(crate) struct Runs(Mutex<VecDeque<(SpaceId, VirtRange)>>);

impl Runs {
    /// Adds pages. If there are too many runs, the oldest is forgotten: its pages leave in their
    /// turn.
    pub(crate) fn note(&self, space: SpaceId, range: VirtRange) {
        let mut runs = self.queue();
        if let Some((last, run)) = runs.back_mut()
            && *last == space
            && run.end == range.start
            && run.count().0 + range.count().0 <= RUN_PAGES
        {
            run.end = range.end;
            return;
        }
        while runs.len() >= RUNS_MAX {
            runs.pop_front();
        }
        runs.push_back((space, range));
    }

    /// The queue, locked.
    pub(crate) fn queue(&self) -> MutexGuard<'_, VecDeque<(SpaceId, VirtRange)>> {
        lock(&self.0)
    }
}
