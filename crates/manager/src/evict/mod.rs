//! The evictor keeps the reserve free. It decides when pages leave, and which are next. `group.rs`
//! takes them out, and `demote.rs` makes room in a full tier that the processor reads.

mod adopt;
mod aside;
mod backoff;
mod demote;
mod full;
mod group;
mod loan;
mod urgency;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use undercroft_base::{PAGE_BYTES, PageCount, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};
use undercroft_engine::{BatchIndex, DemoteItem, EvictItem, Mover, Outcome};
use undercroft_policy::place::{TIERS_MAX, TierOrder, TierState};
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::pagemap::Category;
use undercroft_sys::process;
use undercroft_wire::protocol::STAGING_PAGES;

use self::aside::Aside;
use crate::books::engine_locks;
use crate::books::metered::MeteredTier;
use crate::evict::backoff::{Backoff, Next};
use crate::evict::loan::Loan;
use crate::gauges::knobs::Turned;
use crate::space::parts;
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::sync::read;

/// Pages that are compressed and published at a time. Bounds how long a page that is touched
/// meanwhile waits.
const COMPRESS_PAGES: usize = 8;

/// Pages that are written and published at a time if the first tier is a device: one write of all
/// takes little longer than a write of one page.
const WRITE_PAGES: usize = EVICT_PAGES_MAX;

/// Most runs of zero pages that are scanned for one batch, and the fewest zero pages that make a
/// batch.
const ZERO_RUNS_A_BATCH: usize = 64;
const ZERO_PAGES_MIN: u64 = 16;

/// Times that the policy is asked for one batch, while it names only pages of processes that are
/// passed over.
const ASKS_MAX: usize = 64;

/// Pause when no page can leave for the moment, and between checks for threads that wait for room.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest sleep: threads may be waiting for room that the program itself makes.
const NAP: Duration = Duration::from_millis(100);

/// The same after [`NAPS`] naps in a row: nothing happens. Tiers have tidied up by then.
const LONG_NAP: Duration = Duration::from_secs(1);
const NAPS: u32 = 50;

/// The same in a calm run where no thread waits for room.
const CALM_NAP: Duration = Duration::from_secs(4);

// One command takes a whole batch, and a set of its pages is one word.
const _: () = assert!(EVICT_PAGES_MAX == STAGING_PAGES && EVICT_PAGES_MAX <= 64);
const _: () = assert!(COMPRESS_PAGES <= EVICT_PAGES_MAX && WRITE_PAGES <= EVICT_PAGES_MAX);
const _: () = assert!(ZERO_PAGES_MIN <= EVICT_PAGES_MAX as u64);
const _: () = assert!(PAUSE.as_nanos() < NAP.as_nanos());

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    items: Vec<EvictItem>,
    buffer: PageBuf,
    wakes: Vec<(SpaceId, VirtPage)>,
    zeros: Vec<(VirtRange, Category)>,
    /// The last batch of zero pages freed nothing.
    zeros_in_vain: bool,
    /// Pages that are stored and still to be published.
    stored: Vec<(BatchIndex, Outcome)>,
    /// The tiers to try for each page that is stored next, by the page's place in the group.
    orders: [TierOrder; EVICT_PAGES_MAX],
    /// The state of the tiers, as the engine was told last.
    states: Vec<TierState>,
    demotions: Vec<DemoteItem>,
    demote_buffer: PageBuf,
    backoff: Backoff,
    /// A page of the last batch did not compress; others may.
    unfit: bool,
    /// The user was told that every tier is full.
    warned: bool,
    loan: Loan,
    /// The loan, as the engine was told last.
    lent: u64,
    /// Processes that cannot give pages at the moment.
    aside: VecDeque<Aside>,
    /// When those are visited next.
    revisit_at: Duration,
    /// Pages of these processes that the policy has forgotten.
    kept: PageCount,
    /// What latency control says for the batch in hand; none without control.
    turned: Option<Turned>,
}

impl Evictor {
    pub(crate) fn new(shared: Arc<Shared>) -> std::io::Result<Evictor> {
        Ok(Evictor {
            shared,
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
            loan: Loan::default(),
            lent: 0,
            aside: VecDeque::new(),
            revisit_at: Duration::ZERO,
            kept: PageCount(0),
            turned: None,
        })
    }

    /// Pages that are stored at a time if `first` is tried first.
    fn store_pages(&self, first: Option<TierId>) -> usize {
        match first.map(|tier| self.shared.books.tiers[usize::from(tier.0)].is_memory()) {
            Some(false) => WRITE_PAGES,
            _ => COMPRESS_PAGES,
        }
    }

    /// Works until the run ends.
    pub(crate) fn run(mut self) {
        self.shared.placement.set_evictor(process::thread_id());
        while !self.shared.signals.stopped() {
            self.sleep_until_wanted();
            self.reclaim();
        }
    }

    fn sleep_until_wanted(&mut self) {
        let shared = self.shared.clone();
        let mut naps = 0;
        loop {
            let kick = shared.signals.evictor_rests();
            let paused = shared.gauges.is_paused();
            let wanted = !paused && shared.books.engine().books().reclaim_wanted();
            if wanted || shared.signals.stopped() {
                break;
            }
            // The program may have given memory back: only the evictor admits threads that wait for
            // room.
            self.admit_waiters();
            self.revisit();
            shared.books.follow_pages();
            let nap = match self.aside.is_empty() {
                true if naps >= NAPS && self.none_waits() => CALM_NAP,
                true if naps >= NAPS => LONG_NAP,
                true => NAP,
                false => self.revisit_at.saturating_sub(shared.elapsed()).min(NAP),
            };
            naps += 1;
            if shared.signals.evictor_sleep(kick, nap) {
                naps = 0;
                shared.signals.stir();
            } else {
                shared
                    .books
                    .tiers
                    .ranked()
                    .for_each(|metered| metered.tier.tidy());
            }
        }
        shared.signals.evictor_works();
    }

    /// Evicts until the reserve is free again.
    fn reclaim(&mut self) {
        let shared = self.shared.clone();
        loop {
            if self.shared.signals.stopped() {
                return;
            }
            if self.shared.gauges.is_paused() {
                break;
            }
            if self.forgets_some() {
                continue;
            }
            self.revisit();
            let locks = engine_locks();
            self.states.clear();
            self.states
                .extend(self.shared.books.tiers.iter().map(MeteredTier::state));
            let storing = read(&shared.books.storing);
            let (migration, before) = {
                let mut engine = self.shared.books.engine();
                engine.migrations().set_tiers(self.states.iter().copied());
                engine.approach_limit(self.shared.gauges.limit_now());
                let stats = engine.books().stats();
                let evicted = (stats.pages_swapped_out, stats.refused_store);
                let unfinished = engine.books().reclaim_unfinished().then_some(evicted);
                (engine.migrations().wanted(Mover::Evictor), unfinished)
            };
            self.turned = self.shared.gauges.knobs.get();
            if let Some(migration) = self.demotion_now(migration)
                && self.demote(migration)
            {
                continue;
            }
            drop(storing);
            let Some(before) = before else { break };
            let any = self.evict_batch();
            self.shared.books.follow_pages();
            let after = self.progress();
            let freed = after.0 - before.0;
            if freed > 0 {
                self.loan.pay_back(freed);
                self.lend();
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
                // No page left, and not for lack of room below. A fork is in progress, or the pages
                // are pinned, or all were just touched.
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
        self.reserve_is_free();
    }

    /// Ends a round of reclaim: nothing is lent or allowed above the limit any more.
    fn reserve_is_free(&mut self) {
        self.backoff = Backoff::default();
        self.loan_ends();
        self.shared
            .books
            .engine()
            .faults()
            .set_over_limit(PageCount(0));
        self.admit_waiters();
        for tier in self.shared.books.tiers.iter() {
            tier.note_usage();
        }
    }

    /// Tells the books what the tiers hold, and notes time above the limit. Returns the pages that
    /// have left so far, and those that no tier took.
    fn progress(&self) -> (u64, u64) {
        let held = self.shared.books.pool_held();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_pool_held(held);
        let dram = engine.books().dram_used();
        let stats = engine.books().stats();
        let so_far = (stats.pages_swapped_out, stats.refused_store);
        drop(engine);
        self.shared.gauges.note_memory(dram);
        so_far
    }

    /// Forgets books that are gone, before any page is evicted. False if there are none.
    fn forgets_some(&mut self) -> bool {
        let left = !parts::forget_some(&self.shared);
        if left {
            self.admit_waiters();
        }
        left
    }

    /// Rests for `time`, because the pages that were tried did not compress. Then other pages are
    /// tried. Threads that wait for room are admitted.
    fn rest(&mut self, time: Duration) {
        if self.shared.books.engine().books().room() < 1 {
            self.everything_full();
            self.loan_ends();
            self.admit_waiters();
        }
        std::thread::sleep(time);
    }

    /// Every tier is full: evicts nothing for `time`, unless the program makes room. Threads that
    /// find no room meanwhile wait for a millisecond.
    fn stay_full(&mut self, time: Duration) {
        let until = self.shared.elapsed() + time;
        loop {
            let (dram, room, wanted) = {
                let held = self.shared.books.pool_held();
                let mut engine = self.shared.books.engine();
                engine.migrations().set_pool_held(held);
                let wanted = engine.books().reclaim_unfinished();
                (engine.books().dram_used(), engine.books().room(), wanted)
            };
            self.shared.gauges.note_memory(dram);
            if room < 1 {
                self.everything_full();
                self.loan_ends();
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

    /// Tells the engine of the loan. It adds to what [`Evictor::everything_full`] allows.
    fn lend(&mut self) {
        let pages = self.loan.pages();
        if pages != self.lent {
            let mut engine = self.shared.books.engine();
            let allowed = engine.faults().set_over_limit(PageCount(0)).0;
            engine
                .faults()
                .set_over_limit(PageCount(allowed.saturating_sub(self.lent) + pages));
            self.lent = pages;
        }
    }

    /// Lends some more, unless a late answer may still give room.
    fn lend_more(&mut self) {
        if !self.answer_is_due() {
            let limit = self.shared.gauges.memory_max().0 / PAGE_BYTES as u64;
            self.loan.grow(self.shared.elapsed(), limit);
            self.lend();
        }
    }

    /// The allowance above the limit includes the loan, or has ended.
    fn loan_ends(&mut self) {
        self.loan.end();
        self.lent = 0;
    }

    /// Wakes the threads that wait for room, so that they fault again.
    fn admit_waiters(&mut self) {
        self.shared
            .books
            .engine()
            .faults()
            .take_waiters(&mut self.wakes);
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    /// Whether nothing happens, and no thread waits for room.
    fn none_waits(&self) -> bool {
        let shared = &self.shared;
        shared.signals.is_calm() && !shared.books.engine().faults().any_waits()
    }

    /// Chooses and evicts one batch. False if no page could be chosen.
    fn evict_batch(&mut self) -> bool {
        let shared = self.shared.clone();
        let _storing = read(&shared.books.storing);
        let mut items = std::mem::take(&mut self.items);
        self.unfit = false;
        // Zero pages are not tried twice in a row in vain: their process may be stopped, or in
        // fork().
        let zeros = !self.zeros_in_vain && self.select_zeros(&mut items);
        let before = self.shared.books.engine().books().stats().pages_swapped_out;
        self.yield_to_reads();
        let most = self.batch_pages(self.backoff.pages());
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

    /// Chooses the policy's next victims. The policy may first name pages of processes that are
    /// passed over, and forgets those. It does so a few at a time, because the books are locked
    /// meanwhile.
    fn choose_next(&mut self, most: usize, items: &mut Vec<EvictItem>) -> bool {
        for _ in 0..ASKS_MAX {
            let kept = self.kept;
            let mut engine = self.shared.books.engine_for_many();
            if engine.evictions().select(most, items) {
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

    /// Chooses the copies of fork relatives: the eviction of a shared page frees its frame only
    /// when those leave too.
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
        let pressed = self.shared.books.engine().books().room() < 1;
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
