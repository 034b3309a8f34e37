//! A group of chosen pages of one process: taken out of it, stored, and published; or back where
//! they came from. What its process does not do in time is left to `aside.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{
    SpaceId, Store, StoreError, TierId, VirtPage, VirtRange, fill_word, page_checksum,
};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{BatchIndex, EvictItem, Outcome, Taken};
use undercroft_sys::uffd::UffdError;
use undercroft_wire::protocol::OP_MOVE;

use super::Evictor;
use super::aside::{GivenUp, Waits, all_of};
use crate::books::page_of;
use crate::space::agent::{Agent, Readiness};
use crate::space::command::{Done, NotDone};
use crate::space::discover::apply_events_without_agent;
use crate::space::port::Wake;
use crate::space::process::Process;

/// Longest wait for an answer, which takes some 50 us where the agent has a CPU; and for that of an
/// agent that was late before.
const ORDER_MAX: Duration = Duration::from_millis(25);
const LATE_ORDER_MAX: Duration = Duration::from_millis(1);

/// Longest that a page is tried to be put back at once: an event that is in the way is read within
/// some 20 us.
const PUT_BACK_MAX: Duration = Duration::from_millis(2);
const PUT_BACK_PAUSE: Duration = Duration::from_micros(20);

/// When a page's place counts as gone, where nothing is mapped and no event says so.
const PLACE_GONE: Duration = Duration::from_millis(50);

/// What becomes of a page that was taken out.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// A tier is to take it; where none does, it is put back.
    ToStore,
    /// It is decided, and to be published.
    Is(Outcome),
}

/// What is next with the pages in hand, by their places in the group.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// To be put back: a thread waits for them, or no tier took them.
    back: u64,
    /// To be stored.
    next: u64,
    /// Still somebody's.
    alive: u64,
}

impl Evictor {
    /// Settles items of the batch that stay: each where it is, or where the program has moved it.
    fn stay(&mut self, items: impl Iterator<Item = (BatchIndex, Taken)>) {
        let mut engine = self.shared.books.engine();
        for (index, taken) in items {
            engine.evictions().settle(index, taken, &mut self.wakes);
        }
    }

    /// Evicts items of the batch, all of one address space.
    pub(super) fn evict_group(&mut self, group: &[EvictItem]) {
        let process = self.shared.processes.get(group[0].space);
        // From here to the last page published, fork() in the program waits.
        let claimed = process.as_ref().and_then(|process| {
            let agent = process.agent.get()?;
            // A stopped process (SIGSTOP, a debugger) has a stopped agent: nothing can leave it
            // until it goes on.
            if !self.is_ready(agent) {
                self.pass_over(process);
                return None;
            }
            agent.commands.claim().then_some((process, agent))
        });
        match claimed {
            None => self.leave(group),
            Some((process, agent)) => match self.take_out(process, agent, group) {
                Ok(moved) => self.finish(process, group, moved),
                Err(waits) => self.set_aside(process, group, waits),
            },
        }
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    /// Stores and publishes the pages `moved` of the group, or has them wait for their process.
    fn finish(&mut self, process: &Arc<Process>, group: &[EvictItem], moved: u64) {
        match (self.store_all(group, moved), process.agent.get()) {
            (Some(waits), _) => self.set_aside(process, group, waits),
            (None, Some(agent)) => agent.commands.release(),
            (None, None) => {}
        }
    }

    /// Stores and publishes the pages `left` of the group, which are in `buffer`. What cannot be
    /// put back at once has to wait.
    pub(super) fn store_all(&mut self, group: &[EvictItem], mut left: u64) -> Option<Waits> {
        let (mut refused, mut stuck) = (0, 0);
        while left != 0 {
            let turn = self.publish(group, left, refused);
            // What a thread waits for is put back ahead of what is still to be stored.
            for at in places(turn.back) {
                if !self.put_back_at_once(&group[at], at) {
                    stuck |= 1 << at;
                }
            }
            refused = self.store(group, &turn);
            left &= !(turn.back | turn.next) | refused;
        }
        if !self.stored.is_empty() {
            self.publish(group, 0, 0);
        }
        let stuck = places(stuck).map(|at| (at, page_of(&self.buffer, at).to_vec()));
        let stuck: Vec<_> = stuck.collect();
        (!stuck.is_empty()).then_some(Waits::Place(stuck))
    }

    /// Publishes what was stored last, and wakes who waits for it. Returns what is next with the
    /// pages in hand: `left`, of which no tier has taken those `refused`. The engine is locked
    /// once.
    fn publish(&mut self, group: &[EvictItem], left: u64, refused: u64) -> Turn {
        let turn = {
            let mut engine = self.shared.books.engine();
            engine
                .evictions()
                .publish_all(&self.stored, &mut self.wakes);
            let back = left & engine.evictions().wanted_mask(group) | refused;
            let next = first_of(left & !back, self.store_pages);
            let alive = engine.evictions().alive_mask(group);
            for at in places(next & alive) {
                self.orders[at] = engine.evictions().tiers_for(group[at].at);
            }
            Turn { back, next, alive }
        };
        self.stored.clear();
        self.shared.processes.wake_pages(&mut self.wakes);
        turn
    }

    /// Whether the agent can be given an order. The first time it is also put where it is to run.
    fn is_ready(&self, agent: &Agent) -> bool {
        let known = agent.tid() != 0;
        let ready = agent.readiness() == Readiness::Ready;
        if !known && agent.tid() != 0 {
            crate::space::layout::place_agents(&self.shared.processes, &self.shared.placement);
        }
        ready
    }

    /// Has the agent move the pages out and reads them; bit i = page i of the group is in `buffer`,
    /// and only there. The others are settled. Error: the group waits for something.
    fn take_out(
        &mut self,
        process: &Arc<Process>,
        agent: &Agent,
        group: &[EvictItem],
    ) -> Result<u64, Waits> {
        self.apply_events(process);
        let pages = group.iter().map(|item| item.page);
        let sharing = crate::space::cow::leaving(&self.shared.processes, process, pages);
        let seq = {
            // An event acknowledged before this is in the books; one acknowledged after it cancels
            // the command.
            let _layout = process.layout.read();
            if !process.has_applied_all() {
                self.leave(group);
                return Ok(0);
            }
            let mut engine = self.shared.books.engine();
            let pages = group.iter().map(|item| {
                let stays = engine.evictions().is_at(item.at, item.page);
                if stays { item.page.address() } else { 0 }
            });
            agent.commands.post(OP_MOVE, pages)
        };
        let began = Instant::now();
        let most = if process.is_late.load(Ordering::Relaxed) {
            LATE_ORDER_MAX
        } else {
            ORDER_MAX
        };
        let patient = || began.elapsed() < most;
        let answer = agent.commands.wait(seq, || !agent.has_ended(), patient);
        let late = matches!(answer, Err(NotDone::GivenUp));
        process.is_late.store(late, Ordering::Relaxed);
        match answer {
            Ok(done) => self.taken(process, agent, group, (done, sharing)),
            // It died over the command: whatever was moved is gone with it.
            Err(NotDone::Gone) => Err(Waits::Gone(all_of(group))),
            Err(NotDone::GivenUp) => {
                self.shared
                    .gauges
                    .eviction
                    .orders_given_up
                    .fetch_add(1, Ordering::Relaxed);
                Err(Waits::Answer(GivenUp::new(agent, seq, sharing)))
            }
        }
    }

    /// The agent has answered: reads what it moved, settles the rest; bit i = page i is in
    /// `buffer`, and only there. * `sharing`: pages that shared their frames with relatives.
    pub(super) fn taken(
        &mut self,
        process: &Arc<Process>,
        agent: &Agent,
        group: &[EvictItem],
        (done, sharing): (Done, u64),
    ) -> Result<u64, Waits> {
        // The client wrote these: it may name places that were never asked for.
        let (moved, refused) = (done.moved & all_of(group), done.refused);
        let readable = agent.read_moved(Done { moved, ..done }, group.len(), &mut self.buffer);
        if moved & sharing != 0 {
            let copied = places(moved & sharing).map(|at| group[at].at);
            crate::space::cow::left(&self.shared.books, &self.shared.processes, process, copied);
        }
        let stays = all_of(group) & !moved; // the others are settled when they are published
        if stays != 0 {
            self.stay(places(stays).map(|at| match refused >> at & 1 {
                1 => (group[at].at, Taken::Busy),
                _ => (group[at].at, Taken::NotTried),
            }));
        }
        if readable {
            Ok(moved)
        } else {
            // It died meanwhile, or has taken its holding area away.
            Err(Waits::End(moved))
        }
    }

    /// Applies what waited for a late event, if none is on its way.
    fn apply_events(&self, process: &Process) {
        if process.has_applied_all() {
            return;
        }
        let _layout = process.layout.write();
        match process.agent.get() {
            Some(agent) => _ = apply_events_without_agent(&self.shared, process, agent),
            None => _ = crate::space::layout::apply_events(&self.shared, process),
        }
    }

    /// Nothing was taken out: the pages stay where they are.
    fn leave(&mut self, group: &[EvictItem]) {
        self.stay(group.iter().map(|item| (item.at, Taken::NotTried)));
    }

    /// `pages` of the group may have been moved out, and cannot be read. With their address space
    /// they are nobody's. Else it lives on in a process that shares it, or a fork child that
    /// bypassed the C library depends on them: whoever touches one that is missing finds an error
    /// there, never zeros.
    pub(super) fn lose(&mut self, group: &[EvictItem], pages: u64) {
        for at in places(pages) {
            if self.is_missed(group[at].at) {
                self.stored.push((group[at].at, Outcome::Lost))
            } else {
                self.stay(std::iter::once((group[at].at, Taken::NotTried)))
            }
        }
        self.publish(group, 0, 0);
    }

    /// Where an item has to be put back, as of now.
    fn places_of(&self, index: BatchIndex) -> Vec<(SpaceId, VirtPage)> {
        let mut places = Vec::new();
        let mut engine = self.shared.books.engine();
        engine.evictions().places_of(index, &mut places);
        places
    }

    /// Whether a page of the batch is missing anywhere where it can still be seen; it is poisoned
    /// there.
    fn is_missed(&mut self, index: BatchIndex) -> bool {
        let mut missed = false;
        for (space, page) in self.places_of(index) {
            let Some(process) = self.shared.processes.get(space) else {
                continue;
            };
            let _layout = process.layout.read();
            if !self.places_of(index).contains(&(space, page)) {
                missed = true; // it moved, or was dropped: whoever comes to it is told
                continue;
            }
            match process.memory.poison(VirtRange::one(page)) {
                Err(UffdError::Exists { .. } | UffdError::ClientGone) => {}
                // Also where the layout changes: the books say what a fault is told.
                _ => missed = true,
            }
        }
        missed
    }

    /// Stores the next pages of the group. What was stored is to be published; returns what no tier
    /// took.
    fn store(&mut self, group: &[EvictItem], turn: &Turn) -> u64 {
        let (pages, alive) = (turn.next, turn.alive);
        let mut fates = [Fate::ToStore; EVICT_PAGES_MAX];
        let mut sums = [0u64; EVICT_PAGES_MAX];
        let mut left = pages;
        for at in places(pages) {
            match alive >> at & 1 {
                0 => fates[at] = Fate::Is(Outcome::Fill(0)), // nobody will read it
                _ => fates[at] = self.known_already(&group[at], page_of(&self.buffer, at)),
            }
            match fates[at] {
                Fate::ToStore => {
                    sums[at] = page_checksum(page_of(&self.buffer, at), group[at].stamp);
                }
                Fate::Is(_) => left &= !(1 << at),
            }
        }
        let tiers = self.shared.books.tiers.len();
        for (rank, tier) in (0..tiers).flat_map(|rank| (0..tiers).map(move |tier| (rank, tier))) {
            let id = TierId(tier as u8);
            let offered = places(left).filter(|at| self.orders[*at].get(rank) == Some(id));
            let offered = offered.map(|at| 1 << at).sum();
            if offered != 0 {
                left &= !self.offer(group, id, offered, &sums, &mut fates);
            }
        }
        for at in places(pages) {
            if let Fate::Is(outcome) = fates[at] {
                self.stored.push((group[at].at, outcome));
            }
        }
        left
    }

    /// Offers `pages` of the group to a tier; returns those that it took.
    fn offer(
        &mut self,
        group: &[EvictItem],
        tier: TierId,
        pages: u64,
        sums: &[u64; EVICT_PAGES_MAX],
        fates: &mut [Fate; EVICT_PAGES_MAX],
    ) -> u64 {
        let mut batch: Vec<Store<'_>> = places(pages)
            .map(|at| Store {
                page: page_of(&self.buffer, at),
                stamp: group[at].stamp,
                checksum: sums[at],
                result: Err(StoreError::Full),
            })
            .collect();
        let metered = &self.shared.books.tiers[usize::from(tier.0)];
        metered.tier.store(&mut batch);
        let mut taken = 0;
        for (at, store) in places(pages).zip(&batch) {
            match store.result {
                Ok(slot) => {
                    metered.writes.fetch_add(1, Ordering::Relaxed);
                    fates[at] = Fate::Is(Outcome::Stored(tier, slot));
                    taken |= 1 << at;
                }
                Err(StoreError::Failed(_)) => {
                    metered.errors.fetch_add(1, Ordering::Relaxed);
                }
                Err(StoreError::Incompressible) => self.unfit = true,
                Err(StoreError::Full) => {}
            }
        }
        taken
    }

    /// Whether a page needs no new copy: its bytes are one word repeated, or those of the copy
    /// kept below.
    fn known_already(&self, item: &EvictItem, bytes: &[u8]) -> Fate {
        if let Some(word) = fill_word(bytes) {
            return Fate::Is(Outcome::Fill(word));
        }
        if let Some((tier, copy, stamp)) = item.retained {
            let kept = self.shared.books.tiers[tier.0 as usize]
                .tier
                .checksum(copy, stamp);
            if kept == Some(page_checksum(bytes, stamp)) {
                return Fate::Is(Outcome::Clean);
            }
        }
        Fate::ToStore
    }

    /// Installs one page in one process, whose layout is locked. `age`: it has been tried for so
    /// long.
    fn put_at(&self, process: &Process, page: VirtPage, bytes: &[u8], age: Duration) -> Put {
        match process.memory.install(page, bytes, Wake::Now) {
            Ok(()) | Err(UffdError::Exists { .. } | UffdError::ClientGone) => Put::There,
            // The mapping went away: its event is on the way, and tells where to, or that nobody
            // wants it. Where there is none (shmat with SHM_REMAP), nobody does.
            Err(UffdError::NotMapped { .. }) if age >= PLACE_GONE && !process.event_pending() => {
                Put::Nowhere
            }
            Err(_) => Put::NotYet,
        }
    }

    /// Nothing is mapped at this place of a page of the batch: it is as if the program had dropped
    /// it.
    fn forget_place(&self, space: SpaceId, page: VirtPage) {
        let range = VirtRange::one(page);
        let mut engine = self.shared.books.engine();
        engine.layout().removed(space, range);
    }

    /// As [`Evictor::put_back`], again and again for a moment.
    fn put_back_at_once(&mut self, item: &EvictItem, at: usize) -> bool {
        let began = Instant::now();
        while !self.put_back(item, at, Duration::ZERO) {
            if began.elapsed() >= PUT_BACK_MAX {
                return false;
            }
            std::thread::sleep(PUT_BACK_PAUSE);
        }
        true
    }

    /// Installs page `at` of the buffer, which is `item`, where it came from, and publishes that.
    /// False: not now, because of one of the processes that have it. `age`: it has been tried for
    /// so long.
    pub(super) fn put_back(&mut self, item: &EvictItem, at: usize, age: Duration) -> bool {
        let index = item.at;
        let places = self.places_of(index);
        let mut spaces: Vec<SpaceId> = places.iter().map(|(space, _)| *space).collect();
        spaces.sort_unstable();
        spaces.dedup();
        let processes: Vec<Arc<Process>> = spaces
            .iter()
            .filter_map(|space| self.shared.processes.get(*space))
            .collect();
        for process in &processes {
            self.apply_events(process);
        }
        let _layouts: Vec<_> = processes.iter().map(|p| p.layout.read()).collect();
        if self.places_of(index) != places || processes.iter().any(|p| !p.has_applied_all()) {
            return false; // it moved before the locks were held, or the books are behind
        }
        let bytes = page_of(&self.buffer, at);
        let mut there = true;
        for (space, page) in &places {
            let Some(process) = processes.iter().find(|p| p.space == *space) else {
                continue; // gone
            };
            match self.put_at(process, *page, bytes, age) {
                Put::There => {}
                Put::Nowhere => {
                    self.forget_place(*space, *page);
                    there = false;
                }
                Put::NotYet => there = false,
            }
        }
        if !there {
            return false;
        }
        let mut engine = self.shared.books.engine();
        engine
            .evictions()
            .publish(index, Outcome::PutBack, &mut self.wakes);
        true
    }
}

/// What came of putting a page back.
enum Put {
    There,
    /// Its place is gone.
    Nowhere,
    NotYet,
}

/// The places of a set's members, ascending.
fn places(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = set.trailing_zeros() as usize;
        let any = set != 0;
        set &= set.wrapping_sub(1);
        any.then_some(first)
    })
}

/// The first `count` members of a set.
fn first_of(set: u64, count: usize) -> u64 {
    places(set).take(count).map(|at| 1 << at).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_its_members_and_the_first_of_them() {
        for set in [0, 1, 1 << 63, 0b1011_0100, u64::MAX] {
            let members: Vec<usize> = places(set).collect();
            let slow: Vec<usize> = (0..64).filter(|at| set >> at & 1 == 1).collect();
            assert_eq!(members, slow);
            assert_eq!(first_of(set, 64), set);
            let three = places(first_of(set, 3)).collect::<Vec<_>>();
            assert_eq!(three, slow[..slow.len().min(3)]);
        }
    }
}
