//! The evictor: keeps the reserve free. Decides when pages leave and which are next; `group.rs`
//! takes them out, `demote.rs` makes room in a full RAM tier.

mod aside;
mod backoff;
mod demote;
mod full;
mod group;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use undercroft_base::{PageCount, SpaceId, VirtPage, VirtRange};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};
use undercroft_engine::{BatchIndex, DemoteItem, EvictItem, Outcome};
use undercroft_policy::place::{TIERS_MAX, TierOrder, TierState};
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::pagemap::Category;
use undercroft_sys::process;
use undercroft_wire::protocol::STAGING_PAGES;

use self::aside::Aside;
use crate::books::engine_locks;
use crate::books::metered::MeteredTier;
use crate::evict::backoff::{Backoff, Next};
use crate::space::parts;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Pages compressed and published at a time: bounds how long a page that is wanted back waits.
const COMPRESS_PAGES: usize = 8;

/// Pages written and published at a time where the first tier is a device: one write for all takes
/// little longer than one for each.
const WRITE_PAGES: usize = EVICT_PAGES_MAX;

/// Runs of zero pages looked at for one batch, and pages found in them that are worth one.
const ZERO_RUNS_A_BATCH: usize = 64;
const ZERO_PAGES_MIN: u64 = 16;

/// Times that the policy is asked for a batch, while it names pages of processes that are passed
/// over.
const ASKS_MAX: usize = 64;

/// Pages lent above the limit each time that nothing can leave for the moment.
const LEND_STEP: u64 = 16;

/// Pause when nothing can leave for the moment, and between looks at whether threads wait for room.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest sleep while threads may be waiting for room that others make.
const NAP: Duration = Duration::from_millis(100);

// One command takes a whole batch, and a set of its pages is one word.
const _: () = assert!(EVICT_PAGES_MAX == STAGING_PAGES && EVICT_PAGES_MAX <= 64);
const _: () = assert!(COMPRESS_PAGES <= EVICT_PAGES_MAX && WRITE_PAGES <= EVICT_PAGES_MAX);
const _: () = assert!(ZERO_PAGES_MIN <= EVICT_PAGES_MAX as u64);

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    items: Vec<EvictItem>,
    buffer: PageBuf,
    wakes: Vec<(SpaceId, VirtPage)>,
    zeros: Vec<(VirtRange, Category)>,
    /// Of the last batch, of zero pages, nothing left.
    zeros_in_vain: bool,
    /// What is stored, and still to be published.
    stored: Vec<(BatchIndex, Outcome)>,
    /// Tiers to try for each page that is stored next, by its place in the group.
    orders: [TierOrder; EVICT_PAGES_MAX],
    /// The tiers, as the engine was told last.
    states: Vec<TierState>,
    demotions: Vec<DemoteItem>,
    demote_buffer: PageBuf,
    /// Pages stored at a time.
    store_pages: usize,
    backoff: Backoff,
    /// A page of the last batch did not compress: others may.
    unfit: bool,
    /// The user has been told that every tier is full.
    warned: bool,
    /// Pages lent above the limit while nothing can leave for the moment.
    lent: u64,
    /// Processes that give no pages for the time being, and when to visit them next.
    aside: VecDeque<Aside>,
    revisit_at: Duration,
    /// Pages of theirs that the policy has forgotten.
    kept: PageCount,
}

impl Evictor {
    pub fn new(shared: Arc<Shared>) -> std::io::Result<Evictor> {
        let store_pages = if shared.books.tiers[0].is_ram() {
            COMPRESS_PAGES
        } else {
            WRITE_PAGES
        };
        Ok(Evictor {
            shared,
            store_pages,
            items: Vec::with_capacity(EVICT_PAGES_MAX),
            buffer: PageBuf::new(EVICT_PAGES_MAX)?,
            wakes: Vec::with_capacity(EVICT_PAGES_MAX),
            zeros: Vec::new(),
            zeros_in_vain: false,
            stored: Vec::with_capacity(EVICT_PAGES_MAX),
            orders: [TierOrder::default(); EVICT_PAGES_MAX],
            states: Vec::with_capacity(TIERS_MAX),
            demotions: Vec::with_capacity(DEMOTE_PAGES_MAX),
            demote_buffer: PageBuf::new(DEMOTE_PAGES_MAX)?,
            backoff: Backoff::default(),
            unfit: false,
            warned: false,
            lent: 0,
            aside: VecDeque::new(),
            revisit_at: Duration::ZERO,
            kept: PageCount(0),
        })
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        self.shared.placement.set_evictor(process::thread_id());
        while !self.shared.signals.stopped() {
            self.sleep_until_wanted();
            self.reclaim();
        }
    }

    fn sleep_until_wanted(&mut self) {
        let shared = self.shared.clone();
        loop {
            let kick = shared.signals.evictor_rests();
            let wanted = shared.books.engine().books().reclaim_wanted();
            if wanted || shared.signals.stopped() {
                break;
            }
            // Room may have come without us (the program gave memory back): nobody else lets the
            // waiting in.
            self.admit_waiters();
            self.revisit();
            let nap = if self.aside.is_empty() {
                NAP
            } else {
                self.revisit_at.saturating_sub(shared.elapsed()).min(NAP)
            };
            if !shared.signals.evictor_sleep(kick, nap) {
                shared
                    .books
                    .tiers
                    .iter()
                    .for_each(|metered| metered.tier.tidy());
            }
        }
        shared.signals.evictor_works();
    }

    /// Evicts until the reserve is free again.
    fn reclaim(&mut self) {
        loop {
            if self.shared.signals.stopped() {
                return;
            }
            if self.forgets_some() {
                continue;
            }
            self.revisit();
            let locks = engine_locks();
            self.states.clear();
            self.states
                .extend(self.shared.books.tiers.iter().map(MeteredTier::state));
            let (migration, before) = {
                let mut engine = self.shared.books.engine();
                engine.migrations().set_tiers(self.states.iter().copied());
                let stats = engine.books().stats();
                let evicted = (stats.pages_swapped_out, stats.refused_store);
                let unfinished = engine.books().reclaim_unfinished().then_some(evicted);
                (engine.migrations().wanted(), unfinished)
            };
            if let Some(migration) = migration
                && self.demote(migration)
            {
                continue;
            }
            let Some(before) = before else { break };
            let any = self.evict_batch();
            let after = self.progress();
            let freed = after.0 - before.0;
            if freed > 0 {
                // Half of it pays back what was lent; the other half lets in who waits. Else those
                // that were let in before find nothing, and wait again.
                self.lend(self.lent.saturating_sub(freed.div_ceil(2)));
            }
            self.admit_waiters();
            if any {
                self.shared.gauges.eviction.note(engine_locks() - locks);
            }
            if any && freed > 0 {
                self.backoff.freed();
                continue;
            }
            if after.1 == before.1 {
                // Not for lack of room below: a fork in progress, pinned pages, everything just
                // touched. Whoever is in fork() may itself wait for room, and nothing leaves before
                // it is through: it is lent some.
                self.lend_more();
                self.admit_waiters();
                std::thread::sleep(PAUSE);
                continue;
            }
            match self.backoff.refused(self.unfit) {
                Next::AtOnce => {}
                Next::Unfit(time) => self.rest(time),
                Next::Full(time) => self.stay_full(time),
            }
        }
        self.backoff = Backoff::default();
        self.lent = 0;
        self.shared
            .books
            .engine()
            .faults()
            .set_over_limit(PageCount(0));
        self.admit_waiters();
        for tier in &self.shared.books.tiers {
            tier.note_usage();
        }
    }

    /// Tells the books what the tiers hold, and notes the limit. Returns how many pages have left
    /// so far, and how many no tier took.
    fn progress(&self) -> (u64, u64) {
        let held = self.shared.books.pool_held();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_pool_held(held);
        let (dram, limit) = (engine.books().dram_used(), engine.books().limit());
        let stats = engine.books().stats();
        let so_far = (stats.pages_swapped_out, stats.refused_store);
        drop(engine);
        self.shared.gauges.note_limit(dram, limit);
        so_far
    }

    /// What is nobody's any more leaves first. False when there is nothing of it.
    fn forgets_some(&mut self) -> bool {
        let left = !parts::forget_some(&self.shared);
        if left {
            self.admit_waiters();
        }
        left
    }

    /// The pages that were tried did not compress. Threads that wait for room are let in, and after
    /// `time` other pages are tried.
    fn rest(&mut self, time: Duration) {
        if self.shared.books.engine().books().room() < 1 {
            self.everything_full();
            self.lent = 0; // what is allowed now has it
            self.admit_waiters();
        }
        std::thread::sleep(time);
    }

    /// Every tier is full: for `time` nothing is tried, unless the program makes room. Threads that
    /// find none wait for a millisecond.
    fn stay_full(&mut self, time: Duration) {
        let until = self.shared.elapsed() + time;
        loop {
            let (dram, limit, room, wanted) = {
                let held = self.shared.books.pool_held();
                let mut engine = self.shared.books.engine();
                engine.migrations().set_pool_held(held);
                let wanted = engine.books().reclaim_unfinished();
                (
                    engine.books().dram_used(),
                    engine.books().limit(),
                    engine.books().room(),
                    wanted,
                )
            };
            self.shared.gauges.note_limit(dram, limit);
            if room < 1 {
                self.everything_full();
                self.lent = 0; // what is allowed now has it
            }
            self.admit_waiters();
            self.revisit();
            let over = self.shared.elapsed() >= until;
            if over || !wanted || self.shared.signals.stopped() {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Lets faults exceed the limit by `pages`, instead of what was lent before, beside what
    /// [`Evictor::everything_full`] allows.
    fn lend(&mut self, pages: u64) {
        if pages != self.lent {
            let mut engine = self.shared.books.engine();
            let allowed = engine.faults().set_over_limit(PageCount(0)).0;
            engine
                .faults()
                .set_over_limit(PageCount(allowed.saturating_sub(self.lent) + pages));
            self.lent = pages;
        }
    }

    /// Lends some more, where no answer is about to come that gives room.
    fn lend_more(&mut self) {
        if !self.answer_is_due() {
            self.lend(self.lent + LEND_STEP);
        }
    }

    /// Threads that waited for room may fault again.
    fn admit_waiters(&mut self) {
        self.shared
            .books
            .engine()
            .faults()
            .take_waiters(&mut self.wakes);
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    fn evict_batch(&mut self) -> bool {
        let mut items = std::mem::take(&mut self.items);
        self.unfit = false;
        // Not twice in a row where nothing came of it: its process may be stopped, or in fork().
        let zeros = !self.zeros_in_vain && self.select_zeros(&mut items);
        let before = self.shared.books.engine().books().stats().pages_swapped_out;
        let most = self.backoff.pages();
        let any = zeros || self.select_next(&mut items) || self.choose_next(most, &mut items);
        let mut start = 0;
        while start < items.len() {
            let space = items[start].space;
            let count = items[start..]
                .iter()
                .take_while(|item| item.space == space)
                .count();
            self.evict_group(&items[start..start + count]);
            start += count;
        }
        self.items = items;
        self.zeros_in_vain =
            zeros && self.shared.books.engine().books().stats().pages_swapped_out == before;
        self.shared.books.free_released();
        any
    }

    /// The policy's next victims. It may name pages of processes that are passed over first, which
    /// it forgets then: some at a time, because the books are locked meanwhile.
    fn choose_next(&mut self, most: usize, items: &mut Vec<EvictItem>) -> bool {
        for _ in 0..ASKS_MAX {
            let kept = self.kept;
            if self.shared.books.engine().evictions().select(most, items) {
                return true;
            }
            self.kept = self.shared.books.engine().books().kept_pages();
            if self.kept == kept {
                break;
            }
        }
        false
    }

    /// What a page's eviction has freed is a page's worth only when its fork relatives' copies
    /// leave too: they are next.
    fn select_next(&self, items: &mut Vec<EvictItem>) -> bool {
        let (mut of, mut ranges, mut pages) = (None, Vec::new(), 0);
        let mut runs = self.shared.books.leave_next.queue();
        while let Some((space, range)) = runs.front().copied()
            && of.is_none_or(|of| of == space)
            && pages + range.count().0 <= EVICT_PAGES_MAX as u64
        {
            runs.pop_front();
            of = Some(space);
            pages += range.count().0;
            ranges.push(range);
        }
        drop(runs);
        of.is_some_and(|space| self.choose_these(space, &ranges, items))
    }

    /// Starts a batch of pages of `ranges`.
    fn choose_these(
        &self,
        space: SpaceId,
        ranges: &[VirtRange],
        items: &mut Vec<EvictItem>,
    ) -> bool {
        let mut engine = self.shared.books.engine();
        engine.evictions().select_these(space, ranges, items)
    }

    /// Zero pages that were mapped for reads and are still unwritten go first: they are counted
    /// like others, and hold nothing. What the scan says may have changed when a page is taken out;
    /// its bytes decide, as for every page. False when there are too few for a batch of their own,
    /// and there is room: they are then left to the policy.
    fn select_zeros(&mut self, items: &mut Vec<EvictItem>) -> bool {
        let mut chosen: Option<(SpaceId, Arc<Process>)> = None;
        let mut ranges: Vec<VirtRange> = Vec::new();
        let mut pages = 0;
        let pressed = self.shared.books.engine().books().room() < 1;
        for _ in 0..ZERO_RUNS_A_BATCH {
            let (space, range) = {
                let mut runs = self.shared.books.zero_runs.queue();
                // The newest was mapped a moment ago for a thread that may not have looked yet.
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
                    continue; // gone, and its pages with it
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
