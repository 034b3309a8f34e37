//! A group of chosen pages of one process: taken out of it, stored, and published; or back where they came from.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use undercroft_base::{
    PAGE_BYTES, SpaceId, Store, StoreError, TierId, VirtPage, fill_word, page_checksum,
};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{EvictItem, Outcome, Taken};
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::uffd::UffdError;
use undercroft_sys::{process, procfs};
use undercroft_trace::Movement;
use undercroft_wire::protocol::{OP_MOVE, next_run};

use super::Evictor;
use crate::process::{Agent, Process};
use crate::shared::page_of;

impl Evictor {
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

    /// Evicts items `start..end` of the batch, all of one address space.
    pub(super) fn evict_group(&mut self, items: &[EvictItem], start: usize, end: usize) {
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
}

/// Reads the moved pages out of the staging area, each to its own place; runs in one call each. False when the process
/// is gone.
fn read_staging(agent: &Agent, moved: u64, count: usize, buffer: &mut PageBuf) -> bool {
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
