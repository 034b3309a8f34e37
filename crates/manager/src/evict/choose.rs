//! Chooses the pages of a batch: zero pages first, then copies of fork relatives, then those that
//! a plugin names, then those that the policy names.

use std::sync::Arc;

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_sys::pagemap::Category;

use super::Evictor;
use crate::advice::Advice;
use crate::books::runs::Runs;
use crate::space::process::Process;

/// Most runs of zero pages that are scanned for one batch, and the fewest zero pages that make a
/// batch.
const ZERO_RUNS_A_BATCH: usize = 64;
const ZERO_PAGES_MIN: u64 = 16;

/// Times that the policy is asked for one batch, while it names only pages of processes that are
/// passed over; and times that pages of a user are tried, while none of them is in memory any more.
const ASKS_MAX: usize = 64;

const _: () = assert!(ZERO_PAGES_MIN <= EVICT_PAGES_MAX as u64);

impl Evictor {
    /// Begins a batch with the next pages. Returns whether there are any, and whether they are zero
    /// pages.
    pub(super) fn choose(&mut self, most: usize, items: &mut Vec<EvictItem>) -> (bool, bool) {
        // Zero pages are not tried twice in a row in vain: their process may be stopped, or in
        // fork().
        let zeros = !self.zeros_in_vain && self.select_zeros(items);
        let next = &self.shared.books.leave_next;
        let any = zeros || self.select_runs(next, EVICT_PAGES_MAX, items);
        let any = any || self.choose_next(most, items);
        (any, zeros)
    }

    /// Begins a batch with pages that a user or a plugin has named. Returns whether any of the next
    /// ones can leave, and whether a user has named them.
    pub(super) fn choose_named(&mut self, most: usize, items: &mut Vec<EvictItem>) -> (bool, bool) {
        // Where both have named some, they take turns.
        let others = !self.leave_now.is_empty();
        let by_user = !others || !self.by_user && !self.shared.books.named.queue().is_empty();
        self.by_user = by_user;
        if !by_user {
            return (self.choose_leave_now(most, items), false);
        }
        let named = &self.shared.books.named;
        let any = (0..ASKS_MAX).any(|_| self.select_runs(named, most, items));
        (any, true)
    }

    /// Chooses the next victims: first what a plugin wants to leave, then by the policy. That may
    /// first name pages of processes that are passed over, and forgets those. It does so a few at a
    /// time, because the books are locked meanwhile.
    fn choose_next(&mut self, most: usize, items: &mut Vec<EvictItem>) -> bool {
        let (advice, others) = self.take_wishes();
        // First those that shall leave in any case. Of these, none is lost if the batch is small.
        let mut wishes = std::mem::take(&mut self.leave_now);
        let now = wishes.len();
        wishes.extend(others);
        let all = wishes.len();
        let any = self.choose_ahead(&mut wishes, advice.as_deref(), most, items);
        wishes.truncate(now.saturating_sub(all - wishes.len()));
        self.leave_now = wishes;
        any
    }

    fn choose_ahead(
        &mut self,
        wishes: &mut Vec<(SpaceId, VirtPage)>,
        advice: Option<&Advice>,
        most: usize,
        items: &mut Vec<EvictItem>,
    ) -> bool {
        for _ in 0..ASKS_MAX {
            let kept = self.kept;
            let mut engine = self.shared.books.engine_for_many();
            let before = engine.books().stats().wished;
            let any = engine.evictions().select_ahead(wishes, most, items);
            if let Some(advice) = advice {
                advice.note_chosen(engine.books().stats().wished - before);
            }
            if any {
                return true;
            }
            drop(engine);
            self.kept = self.shared.books.engine().books().kept_pages();
            if self.kept == kept {
                break;
            }
        }
        false
    }

    /// Chooses the oldest runs of a queue, of one address space, up to `most` pages. Copies of fork
    /// relatives are in one: the eviction of a shared page frees its frame only when those leave
    /// too.
    fn select_runs(&self, of: &Runs, most: usize, items: &mut Vec<EvictItem>) -> bool {
        let (mut first, mut ranges, mut pages) = (None, Vec::new(), 0);
        let mut runs = of.queue();
        while let Some((space, range)) = runs.front().copied()
            && first.is_none_or(|of| of == space)
            && (ranges.is_empty() || pages + range.count().0 <= most as u64)
        {
            runs.pop_front();
            first = Some(space);
            pages += range.count().0;
            ranges.push(range);
        }
        drop(runs);
        items.clear();
        first.is_some_and(|space| self.choose_these(space, &ranges, items))
    }

    /// Starts a batch with the pages of `ranges`.
    fn choose_these(
        &self,
        space: SpaceId,
        ranges: &[VirtRange],
        items: &mut Vec<EvictItem>,
    ) -> bool {
        let mut engine = self.shared.books.engine_for_many();
        engine.evictions().select_these(space, ranges, items)
    }

    /// Chooses zero pages that were mapped for reads and are still unwritten. They leave first,
    /// because they count like others and hold nothing. A page may change after the scan: its bytes
    /// decide when it is taken out, as for every page. False if they are too few for a batch and
    /// there is room: then they are left to the policy.
    fn select_zeros(&mut self, items: &mut Vec<EvictItem>) -> bool {
        let mut chosen: Option<(SpaceId, Arc<Process>)> = None;
        let mut ranges: Vec<VirtRange> = Vec::new();
        let mut pages = 0;
        let pressed = self.before.pressed;
        for _ in 0..ZERO_RUNS_A_BATCH {
            let (space, range) = {
                let mut runs = self.shared.books.zero_runs.queue();
                // The newest run was mapped a moment ago, for a thread that may not have read it
                // yet.
                let may = pressed || runs.len() > 1;
                let of = chosen.as_ref().map(|(space, _)| *space);
                match runs.front() {
                    Some(run) if may && of.is_none_or(|space| space == run.0) => {}
                    _ => break,
                }
                match runs.pop_front() {
                    Some(run) => run,
                    None => break,
                }
            };
            if chosen.is_none() {
                let Some(process) = self.shared.processes.get(space) else {
                    continue; // the address space is gone, and its pages with it
                };
                chosen = Some((space, process));
            }
            let Some((_, process)) = &chosen else { break };
            let Ok(pagemap) = process.pagemap() else {
                continue;
            };
            self.zeros.clear();
            if pagemap
                .scan(range, Category::PFNZERO, &mut self.zeros)
                .is_ok()
            {
                let found = self.zeros.iter().map(|(run, _)| run.count().0).sum::<u64>();
                if pages > 0 && pages + found > EVICT_PAGES_MAX as u64 {
                    self.shared
                        .books
                        .zero_runs
                        .queue()
                        .push_front((space, range)); // for the next batch
                    break;
                }
                pages += found;
                ranges.extend(self.zeros.iter().map(|(run, _)| *run));
            }
            if pages >= EVICT_PAGES_MAX as u64 {
                break;
            }
        }
        match chosen {
            Some((space, _)) if pressed || pages >= ZERO_PAGES_MIN => {
                self.choose_these(space, &ranges, items)
            }
            _ => false,
        }
    }
}
