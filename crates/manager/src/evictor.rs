//! The evictor: keeps the reserve free. Takes pages out of the client in batches, stores them, and moves the oldest pages of a full
//! RAM tier down.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use undercroft_base::{
    PAGE_BYTES, PageCount, SpaceId, Store, StoreError, TierId, VirtPage, VirtRange, fill_word,
    page_checksum,
};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};
use undercroft_engine::{DemoteItem, Engine, EvictItem, Outcome, Taken};
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::pagemap::Category;
use undercroft_sys::uffd::UffdError;
use undercroft_sys::{futex, process, procfs};
use undercroft_trace::Movement;

use crate::backoff::{Backoff, Next};
use crate::ledger::MemfdLedger;
use crate::process::{Agent, Process};
use crate::protocol::{OP_MOVE, next_run};
use crate::shared::{Shared, lock, page_of};

/// Pages compressed and published at a time: bounds how long a page that is wanted back waits.
const COMPRESS_PAGES: usize = 8;

/// Pages written and published at a time where the first tier is a device: one write for all takes little longer than one for each.
const WRITE_PAGES: usize = EVICT_PAGES_MAX;

/// Runs of zero pages looked at for one batch, and pages found in them that are worth one.
const ZERO_RUNS_A_BATCH: usize = 64;
const ZERO_PAGES_MIN: u64 = 16;

/// Pages lent above the limit each time that nothing can leave for the moment.
const LEND_STEP: u64 = 16;

/// Pause when nothing can leave for the moment, and between looks at whether threads wait for room.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest sleep while threads may be waiting for room that others make.
const NAP: Duration = Duration::from_millis(100);

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    items: Vec<EvictItem>,
    buffer: PageBuf,
    wakes: Vec<(SpaceId, VirtPage)>,
    zeros: Vec<(VirtRange, Category)>,
    /// Of the last batch, of zero pages, nothing left.
    zeros_in_vain: bool,
    places: Vec<(SpaceId, VirtPage)>,
    demotions: Vec<DemoteItem>,
    demote_buffer: PageBuf,
    /// Pages stored at a time.
    store_pages: usize,
    backoff: Backoff,
    /// A page of the last batch did not compress: others may.
    unfit: bool,
    /// Pages lent above the limit while nothing can leave for the moment.
    lent: u64,
}

impl Evictor {
    pub fn new(shared: Arc<Shared>) -> std::io::Result<Evictor> {
        let store_pages = match shared.tiers[0].is_ram() {
            true => COMPRESS_PAGES,
            false => WRITE_PAGES,
        };
        Ok(Evictor {
            shared,
            store_pages,
            items: Vec::with_capacity(EVICT_PAGES_MAX),
            buffer: PageBuf::new(EVICT_PAGES_MAX)?,
            wakes: Vec::with_capacity(EVICT_PAGES_MAX),
            zeros: Vec::new(),
            zeros_in_vain: false,
            places: Vec::new(),
            demotions: Vec::with_capacity(DEMOTE_PAGES_MAX),
            demote_buffer: PageBuf::new(DEMOTE_PAGES_MAX)?,
            backoff: Backoff::default(),
            unfit: false,
            lent: 0,
        })
    }

    /// Works until told to stop.
    pub fn run(mut self) {
        self.shared.placement.set_evictor(process::thread_id());
        while !self.shared.stop.load(Ordering::Acquire) {
            self.sleep_until_wanted();
            self.reclaim();
        }
    }

    fn sleep_until_wanted(&mut self) {
        let shared = self.shared.clone();
        loop {
            let kick = shared.evict_kick.load(Ordering::SeqCst);
            shared.evictor_sleeps.store(true, Ordering::SeqCst);
            let wanted = shared.engine().reclaim_wanted();
            if wanted || shared.stop.load(Ordering::Acquire) {
                break;
            }
            // Room may have come without us (the program gave memory back): nobody else lets the waiting in.
            self.admit_waiters();
            if !futex::wait(&shared.evict_kick, kick, Some(NAP)) {
                shared.tiers.iter().for_each(|metered| metered.tier.tidy());
            }
        }
        shared.evictor_sleeps.store(false, Ordering::SeqCst);
    }

    /// Evicts until the reserve is free again.
    fn reclaim(&mut self) {
        loop {
            if self.shared.stop.load(Ordering::Acquire) {
                return;
            }
            while self.pool_is_full() && self.demote() {}
            let before = {
                let held = self.shared.pool_held();
                let mut engine = self.shared.engine();
                engine.set_pool_held(held);
                if !engine.reclaim_unfinished() {
                    break;
                }
                (
                    engine.stats().pages_swapped_out,
                    engine.stats().refused_store,
                )
            };
            let any = self.evict_batch();
            let after = {
                let held = self.shared.pool_held();
                let mut engine = self.shared.engine();
                engine.set_pool_held(held);
                let (dram, limit) = (engine.dram_used(), engine.limit());
                let evicted = (
                    engine.stats().pages_swapped_out,
                    engine.stats().refused_store,
                );
                drop(engine);
                self.shared.note_limit(dram, limit);
                evicted
            };
            self.admit_waiters();
            if any && after.0 > before.0 {
                self.backoff.freed();
                self.lend(0);
                continue;
            }
            if after.1 == before.1 {
                // Not for lack of room below: a fork in progress, pinned pages, everything just touched. Whoever is in fork()
                // may itself wait for room, and nothing leaves before it is through: it is lent some.
                self.lend(self.lent + LEND_STEP);
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
        self.shared.engine().set_over_limit(PageCount(0));
        self.admit_waiters();
        for tier in &self.shared.tiers {
            tier.note_usage();
        }
    }

    /// What was tried did not compress: threads that wait for room are let in, and after `time` other pages are tried.
    fn rest(&mut self, time: Duration) {
        if self.shared.engine().room() < 1 {
            self.shared.everything_full();
            self.lent = 0; // what is allowed now has it
            self.admit_waiters();
        }
        std::thread::sleep(time);
    }

    /// Every tier is full: for `time` nothing is tried, unless the program makes room. Threads that find none wait for a millisecond.
    fn stay_full(&mut self, time: Duration) {
        let until = self.shared.elapsed() + time;
        loop {
            let (dram, limit, room, wanted) = {
                let held = self.shared.pool_held();
                let mut engine = self.shared.engine();
                engine.set_pool_held(held);
                let wanted = engine.reclaim_unfinished();
                (engine.dram_used(), engine.limit(), engine.room(), wanted)
            };
            self.shared.note_limit(dram, limit);
            if room < 1 {
                self.shared.everything_full();
                self.lent = 0; // what is allowed now has it
            }
            self.admit_waiters();
            let over = self.shared.elapsed() >= until;
            if over || !wanted || self.shared.stop.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Lets faults exceed the limit by `pages`, instead of what was lent before, beside what [`Shared::everything_full`] allows.
    fn lend(&mut self, pages: u64) {
        if pages != self.lent {
            let mut engine = self.shared.engine();
            let allowed = engine.set_over_limit(PageCount(0)).0;
            engine.set_over_limit(PageCount(allowed.saturating_sub(self.lent) + pages));
            self.lent = pages;
        }
    }

    /// Threads that waited for room may fault again.
    fn admit_waiters(&mut self) {
        self.shared.engine().take_waiters(&mut self.wakes);
        self.shared.wake_pages(&mut self.wakes);
    }

    fn evict_batch(&mut self) -> bool {
        let mut items = std::mem::take(&mut self.items);
        self.unfit = false;
        if let Some(record) = &self.shared.record {
            record.nobody_waits(); // every page of the last batch is settled
        }
        // Not twice in a row where nothing came of it: its process may be stopped, or in fork().
        let zeros = !self.zeros_in_vain && self.select_zeros(&mut items);
        let before = self.shared.engine().stats().pages_swapped_out;
        let most = self.backoff.pages();
        let any = zeros
            || self.select_next(&mut items)
            || self.choose(Movement::Evicted, &mut items, |e, i| e.select(most, i));
        let mut start = 0;
        while start < items.len() {
            let space = items[start].space;
            let count = items[start..]
                .iter()
                .take_while(|item| item.space == space)
                .count();
            self.evict_group(&items, start, start + count);
            start += count;
        }
        self.items = items;
        self.zeros_in_vain = zeros && self.shared.engine().stats().pages_swapped_out == before;
        self.shared.free_released();
        any
    }

    /// What a page's eviction has freed is a page's worth only when its fork relatives' copies leave too: they are next.
    fn select_next(&self, items: &mut Vec<EvictItem>) -> bool {
        let (mut of, mut ranges, mut pages) = (None, Vec::new(), 0);
        let mut runs = lock(&self.shared.leave_next);
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
        let select =
            |engine: &mut Engine<_>, items: &mut _| engine.select_these(space, ranges, items);
        self.choose(Movement::Named, items, select)
    }

    /// Starts a batch as `select` says. A trace has the pages as evicted from here on, as `movement`: it is here that the policy
    /// decides.
    fn choose(
        &self,
        movement: Movement,
        items: &mut Vec<EvictItem>,
        select: impl FnOnce(&mut Engine<MemfdLedger>, &mut Vec<EvictItem>) -> bool,
    ) -> bool {
        let mut engine = self.shared.engine();
        let any = select(&mut engine, items);
        if let (Some(record), true) = (&self.shared.record, any) {
            for item in items.iter() {
                record.moved(item.space, item.page, movement);
            }
        }
        any
    }

    /// Settles item `index` of the batch: it stays where it is, or where the program has moved it.
    fn stays(&mut self, index: usize, taken: Taken) {
        let mut engine = self.shared.engine();
        if let Some(record) = &self.shared.record {
            self.places.clear();
            engine.places_of(index, &mut self.places);
            // The first is the page itself, unless the program dropped it; fork children follow.
            if let Some((space, page)) = self.places.first()
                && engine.is_at(index, *page)
            {
                record.moved(*space, *page, Movement::Returned);
            }
        }
        engine.settle(index, taken, &mut self.wakes);
    }

    /// Zero pages that were mapped for reads and are still unwritten go first: they are counted like others, and hold nothing.
    /// What the scan says may have changed when a page is taken out; its bytes decide, as for every page. False when there are
    /// too few for a batch of their own, and there is room: they are then left to the policy.
    fn select_zeros(&mut self, items: &mut Vec<EvictItem>) -> bool {
        let mut chosen: Option<(SpaceId, Arc<Process>)> = None;
        let mut ranges: Vec<VirtRange> = Vec::new();
        let mut pages = 0;
        let pressed = self.shared.engine().room() < 1;
        for _ in 0..ZERO_RUNS_A_BATCH {
            let (space, range) = {
                let mut runs = lock(&self.shared.zero_runs);
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
                let Some(process) = self.shared.process(space) else {
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
                    lock(&self.shared.zero_runs).push_front((space, range)); // for the next batch
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

    /// Evicts items `start..end` of the batch, all of one address space.
    fn evict_group(&mut self, items: &[EvictItem], start: usize, end: usize) {
        let group = &items[start..end];
        let process = self.shared.process(group[0].space);
        // From here to the last page published, fork() in the program waits.
        let claimed = process.as_ref().and_then(|process| {
            let agent = process.agent.get()?;
            // A stopped process (SIGSTOP, a debugger) has a stopped agent: nothing can leave it until it goes on.
            let stopped = matches!(
                procfs::process_state(agent.commands.agent()),
                Some('T' | 't')
            );
            (!stopped && agent.commands.claim()).then_some((process, agent))
        });
        let moved = match claimed {
            Some((process, agent)) => self.take_out(process, agent, group, start),
            None => self.leave(group, start),
        };
        let mut left = moved;
        let mut next = 0;
        while next < group.len() {
            let mut batch = [0usize; EVICT_PAGES_MAX];
            let mut count = 0;
            while next < group.len() && count < self.store_pages {
                if left >> next & 1 == 1 {
                    batch[count] = next;
                    count += 1;
                }
                next += 1;
            }
            self.store(group, start, &batch[..count]);
            left &= !self.recall(start, group, left, next);
        }
        if let Some((_, agent)) = claimed {
            agent.commands.release();
        }
        self.shared.wake_pages(&mut self.wakes);
    }

    /// Has the agent move the pages out and reads them; bit i = page i of the group is in `buffer`, and only there.
    /// The others are settled.
    fn take_out(
        &mut self,
        process: &Arc<Process>,
        agent: &Agent,
        group: &[EvictItem],
        start: usize,
    ) -> u64 {
        self.settle_events(process);
        let pages = group.iter().map(|item| item.page);
        let sharing = crate::cow::leaving(&self.shared, process, pages);
        let seq = {
            // An event acknowledged before this is in the books; one acknowledged after it cancels the command.
            let _layout = process.layout.read();
            if !process.is_settled() {
                return self.leave(group, start);
            }
            let engine = self.shared.engine();
            let pages = group.iter().enumerate().map(|(at, item)| {
                let stays = engine.is_at(start + at, item.page);
                if stays { item.page.address() } else { 0 }
            });
            agent.commands.post(OP_MOVE, pages)
        };
        let done = agent.commands.wait(seq, || process.is_alive());
        let Some(done) = done else {
            // It died over the command: whatever was moved is gone with it, and only a child could miss it.
            self.mourn(group, start, u64::MAX);
            return self.leave(group, start);
        };
        let readable = read_staging(agent, done.moved, group.len(), &mut self.buffer);
        let readable = readable && done.stranded == 0;
        let (moved, refused) = (done.moved, done.refused);
        if moved & sharing != 0 {
            let copied = (0..group.len()).filter(|at| moved & sharing & 1 << at != 0);
            crate::cow::left(&self.shared, process, copied.map(|at| start + at));
        }
        for at in 0..group.len() {
            match (moved >> at & 1, refused >> at & 1) {
                (1, _) => {} // settled when it is published
                (_, 1) => self.stays(start + at, Taken::Busy),
                _ => self.stays(start + at, Taken::NotTried),
            }
        }
        if !readable {
            self.abandon(process, group, start, moved);
            return 0;
        }
        moved
    }

    /// Applies what waited for a late event, if none is on its way. No agent moves pages now: this thread gives the orders.
    fn settle_events(&self, process: &Process) {
        if !process.is_settled() {
            let _layout = process.layout.write();
            crate::layout::settle(&self.shared, process);
        }
    }

    /// The address space went away between selecting and taking out: nothing of it is left to take.
    fn leave(&mut self, group: &[EvictItem], start: usize) -> u64 {
        for at in 0..group.len() {
            self.stays(start + at, Taken::NotTried);
        }
        0
    }

    /// Pages may be lost that a fork child shares, which only a fork that bypassed the C library can bring about: the client is
    /// ended, because the child would read wrong bytes.
    fn mourn(&self, group: &[EvictItem], start: usize, moved: u64) {
        let engine = self.shared.engine();
        let shared =
            (0..group.len()).any(|at| moved >> at & 1 == 1 && engine.is_shared(start + at));
        drop(engine);
        if shared {
            for process in self.shared.all_processes() {
                process.kill();
            }
            self.shared
                .doom("a process died while pages it shared with a fork child were being stored");
        }
    }

    /// Pages were moved out and cannot be read. Either the process died meanwhile, and they are nobody's; or it made itself
    /// unreadable, and is ended before it can see them missing.
    fn abandon(&mut self, process: &Process, group: &[EvictItem], start: usize, moved: u64) {
        // An exit or exec in progress shows as one a moment later.
        let ended = (0..100).any(|_| {
            process.wait_exit(Duration::from_millis(20))
                || process
                    .agent
                    .get()
                    .is_none_or(|agent| agent.commands.agent() == 0)
        });
        if !ended {
            self.shared
                .doom("the program's memory cannot be read any more (did it drop privileges?)");
            process.kill();
            process.wait_exit(Duration::from_secs(5));
        }
        self.mourn(group, start, moved);
        process.gone.store(true, Ordering::Relaxed);
        let mut engine = self.shared.engine();
        for at in (0..group.len()).filter(|at| moved >> at & 1 == 1) {
            engine.publish(start + at, Outcome::Fill(0), &mut self.wakes);
        }
    }

    /// Stores pages (indices into the group) and publishes each.
    fn store(&mut self, group: &[EvictItem], start: usize, pages: &[usize]) {
        let mut outcomes = [None; EVICT_PAGES_MAX];
        let mut sums = [0u64; EVICT_PAGES_MAX];
        for (slot, at) in pages.iter().enumerate() {
            let engine = self.shared.engine();
            let (alive, wanted) = (engine.alive(start + at), engine.wanted(start + at));
            drop(engine);
            if wanted {
                self.put_back(start + at, *at, group[*at].page);
                outcomes[slot] = Some(None);
                continue;
            }
            if !alive {
                outcomes[slot] = Some(Some(Outcome::Fill(0))); // nobody will read it
                continue;
            }
            let bytes = page_of(&self.buffer, *at);
            if let Some(word) = fill_word(bytes) {
                outcomes[slot] = Some(Some(Outcome::Fill(word)));
                continue;
            }
            if let Some((tier, copy, stamp)) = group[*at].retained {
                let kept = self.shared.tiers[tier.0 as usize]
                    .tier
                    .checksum(copy, stamp);
                if kept == Some(page_checksum(bytes, stamp)) {
                    outcomes[slot] = Some(Some(Outcome::Clean));
                    continue;
                }
            }
            sums[slot] = page_checksum(bytes, group[*at].stamp);
        }
        for tier in 0..self.shared.tiers.len() {
            let mut waiting = [0usize; EVICT_PAGES_MAX];
            let mut count = 0;
            for (slot, outcome) in outcomes.iter().enumerate().take(pages.len()) {
                if outcome.is_none() {
                    waiting[count] = slot;
                    count += 1;
                }
            }
            if count == 0 {
                break;
            }
            let mut batch: Vec<Store<'_>> = waiting[..count]
                .iter()
                .map(|slot| Store {
                    page: page_of(&self.buffer, pages[*slot]),
                    stamp: group[pages[*slot]].stamp,
                    checksum: sums[*slot],
                    result: Err(StoreError::Full),
                })
                .collect();
            let metered = &self.shared.tiers[tier];
            metered.tier.store(&mut batch);
            for (slot, store) in waiting[..count].iter().zip(&batch) {
                match store.result {
                    Ok(place) => {
                        metered.writes.fetch_add(1, Ordering::Relaxed);
                        outcomes[*slot] = Some(Some(Outcome::Stored(TierId(tier as u8), place)));
                    }
                    Err(StoreError::Failed(_)) => {
                        metered.errors.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(StoreError::Incompressible) => self.unfit = true,
                    Err(StoreError::Full) => {}
                }
            }
        }
        for (slot, at) in pages.iter().enumerate() {
            match outcomes[slot] {
                Some(None) => {} // put back already
                Some(Some(outcome)) => {
                    let mut engine = self.shared.engine();
                    if let Some(record) = &self.shared.record
                        && outcome == Outcome::Clean
                        && engine.is_at(start + at, group[*at].page)
                    {
                        record.moved(group[*at].space, group[*at].page, Movement::Clean);
                    }
                    engine.publish(start + at, outcome, &mut self.wakes);
                }
                None => self.put_back(start + at, *at, group[*at].page),
            }
        }
        self.shared.wake_pages(&mut self.wakes);
    }

    /// Puts pages back that threads wait for, ahead of those that are still to be stored; returns which.
    fn recall(&mut self, start: usize, group: &[EvictItem], left: u64, from: usize) -> u64 {
        let mut recalled = 0;
        for (at, item) in group.iter().enumerate().skip(from) {
            if left >> at & 1 == 1 && self.shared.engine().wanted(start + at) {
                self.put_back(start + at, at, item.page);
                recalled |= 1 << at;
            }
        }
        recalled
    }

    /// Installs page `at` of the buffer where it came from, and publishes that. * `chosen`: where it was when it was chosen.
    fn put_back(&mut self, index: usize, at: usize, chosen: VirtPage) {
        let bytes = page_of(&self.buffer, at);
        loop {
            self.places.clear();
            self.shared.engine().places_of(index, &mut self.places);
            let mut spaces: Vec<SpaceId> = self.places.iter().map(|(space, _)| *space).collect();
            spaces.sort_unstable();
            spaces.dedup();
            let processes: Vec<Arc<Process>> = spaces
                .iter()
                .filter_map(|space| self.shared.process(*space))
                .collect();
            for process in &processes {
                self.settle_events(process);
            }
            let _layouts: Vec<_> = processes.iter().map(|p| p.layout.read()).collect();
            let mut now = Vec::new();
            self.shared.engine().places_of(index, &mut now);
            if now != self.places || processes.iter().any(|p| !p.is_settled()) {
                continue; // it moved before the locks were held, or the books are behind
            }
            let mut again = false;
            for (space, page) in &self.places {
                let Some(process) = processes.iter().find(|p| p.space == *space) else {
                    continue; // gone
                };
                match process.uffd.copy(*page, bytes, false) {
                    Ok(()) | Err(UffdError::Exists { .. } | UffdError::ClientGone) => {}
                    // Also when the mapping went away: its event is on the way, and tells where to, or that nobody wants it.
                    Err(_) => again = true,
                }
            }
            if again {
                drop(_layouts);
                drop(processes);
                std::thread::sleep(Duration::from_micros(20));
                continue;
            }
            let mut engine = self.shared.engine();
            if let Some(record) = &self.shared.record {
                let own = self.places.first();
                let own = own.is_some_and(|(_, page)| engine.is_at(index, *page));
                for (at, (space, page)) in self.places.iter().enumerate() {
                    match (own && at == 0, *page == chosen) {
                        (true, true) => record.put_back(*space, *page),
                        (true, false) => record.moved(*space, *page, Movement::Returned),
                        (false, _) => record.moved(*space, *page, Movement::Found),
                    }
                }
            }
            engine.publish(index, Outcome::PutBack, &mut self.wakes);
            return;
        }
    }

    /// True when a RAM tier with a tier below it has no room for the next batch.
    fn pool_is_full(&self) -> bool {
        let tiers = &self.shared.tiers;
        let last = tiers.len() - 1;
        tiers[..last]
            .iter()
            .any(|t| t.is_ram() && headroom(t) < wanted_headroom(t))
    }

    /// Moves up to 1 MiB of the oldest pages of the first full RAM tier to the next tier; false when nothing moved.
    fn demote(&mut self) -> bool {
        let tiers = &self.shared.tiers;
        let Some(from) = (0..tiers.len() - 1).find(|at| {
            tiers[*at].is_ram() && headroom(&tiers[*at]) < 2 * wanted_headroom(&tiers[*at])
        }) else {
            return false;
        };
        self.demotions.clear();
        let tier = TierId(from as u8);
        self.shared
            .engine()
            .select_demotions(tier, DEMOTE_PAGES_MAX, &mut self.demotions);
        if self.demotions.is_empty() {
            return false;
        }
        let mut loaded = Vec::with_capacity(self.demotions.len());
        for (at, item) in self.demotions.iter().enumerate() {
            let page = self.demote_buffer.page_mut(at);
            loaded.push(tiers[from].tier.load(item.slot, item.stamp, page).is_ok());
        }
        let mut batch = Vec::with_capacity(self.demotions.len());
        let mut indices = Vec::with_capacity(self.demotions.len());
        for (at, item) in self
            .demotions
            .iter()
            .enumerate()
            .filter(|(at, _)| loaded[*at])
        {
            let page = self.demote_buffer.page(at);
            indices.push(at);
            batch.push(Store {
                page,
                stamp: item.stamp,
                checksum: page_checksum(page, item.stamp),
                result: Err(StoreError::Full),
            });
        }
        let next = &tiers[from + 1];
        next.tier.store(&mut batch);
        let mut moved = 0;
        let mut engine = self.shared.engine();
        for (at, item) in self.demotions.iter().enumerate() {
            if !loaded[at] {
                engine.demotion_failed(*item);
            }
        }
        for (at, store) in indices.iter().zip(&batch) {
            match store.result {
                Ok(slot) => {
                    moved += 1;
                    engine.demoted(self.demotions[*at], TierId(from as u8 + 1), slot);
                }
                Err(_) => engine.demotion_failed(self.demotions[*at]),
            }
        }
        drop(engine);
        next.writes.fetch_add(moved, Ordering::Relaxed);
        self.shared.free_released();
        moved > 0
    }
}

/// Room a RAM tier should have for the next batches; a small tier has a quarter.
fn wanted_headroom(metered: &crate::shared::MeteredTier) -> u64 {
    let batch = (2 * EVICT_PAGES_MAX * PAGE_BYTES) as u64;
    batch.min(metered.tier.info().capacity.0 / 4)
}

fn headroom(metered: &crate::shared::MeteredTier) -> u64 {
    metered
        .tier
        .info()
        .capacity
        .0
        .saturating_sub(metered.tier.usage().held.0)
}

/// Reads the moved pages out of the staging area, each to its own place; runs in one call each. False when the process
/// is gone.
fn read_staging(
    agent: &crate::process::Agent,
    moved: u64,
    count: usize,
    buffer: &mut PageBuf,
) -> bool {
    let tid = agent.commands.agent();
    let mut at = 0;
    while let Some((first, end)) = next_run(moved, at, count) {
        at = first;
        let from = agent.holding + (at * PAGE_BYTES) as u64;
        let bytes = &mut buffer[at * PAGE_BYTES..end * PAGE_BYTES];
        if tid == 0 || process::read_memory(tid, from, bytes).is_err() {
            return false;
        }
        at = end;
    }
    true
}
