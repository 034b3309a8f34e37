//! Evicts a group of chosen pages of one process. The pages are taken out, stored and published, or
//! put back where they came from. If the process does not answer in time, `aside.rs` goes on with
//! the group.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{
    Slot, SpaceId, Store, StoreError, TierId, VirtPage, VirtRange, fill_word, page_checksum,
};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{BatchIndex, EvictItem, Outcome, Taken};
use undercroft_sys::uffd::UffdError;
use undercroft_sys::{process, procfs};
use undercroft_wire::protocol::OP_MOVE;

use super::Evictor;
use super::aside::{GivenUp, Waits, all_of};
use crate::books::page_of;
use crate::space::agent::{Agent, Readiness};
use crate::space::command::{Done, NotDone};
use crate::space::discover::apply_events_without_agent;
use crate::space::port::Wake;
use crate::space::process::Process;

/// Longest wait for an answer, which takes some 50 us if the agent has a CPU. The second is for an
/// agent that was late before.
const COMMAND_MAX: Duration = Duration::from_millis(25);
const LATE_COMMAND_MAX: Duration = Duration::from_millis(1);

/// An agent that takes longer than this may have no CPU.
const AGENT_LATE: Duration = Duration::from_millis(4);

const _: () = assert!(LATE_COMMAND_MAX.as_nanos() < AGENT_LATE.as_nanos());
const _: () = assert!(AGENT_LATE.as_nanos() < COMMAND_MAX.as_nanos());

/// Longest time for attempts to put a page back at once. A pending event prevents it, and is read
/// within some 20 us.
const PUT_BACK_MAX: Duration = Duration::from_millis(2);
const PUT_BACK_PAUSE: Duration = Duration::from_micros(20);

const _: () = assert!(PUT_BACK_PAUSE.as_nanos() < PUT_BACK_MAX.as_nanos());

/// After this time a page's place counts as gone, if nothing is mapped there and no event says so.
const PLACE_GONE: Duration = Duration::from_millis(50);

/// What becomes of a page that was taken out.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// A tier is to take it. If none does, it is put back.
    ToStore,
    /// This outcome is to be published.
    Is(Outcome),
}

/// The next step for the pages in the buffer, as sets of places in the group.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Pages to put back: a thread waits for them, or no tier took them.
    back: u64,
    /// Pages to store.
    next: u64,
    /// Pages that an address space still has.
    alive: u64,
}

impl Evictor {
    /// Finishes items of the batch that stay, each where it is, or where the program has moved it.
    fn stay(&mut self, items: impl Iterator<Item = (BatchIndex, Taken)>) {
        let mut engine = self.shared.books.engine_for_many();
        for (index, taken) in items {
            engine.evictions().settle(index, taken, &mut self.wakes);
        }
    }

    /// Wakes the threads that wait for pages of the batch.
    pub(super) fn wake(&mut self) {
        let now = self.shared.elapsed();
        for (space, page) in &self.wakes {
            (self.shared.gauges).woken(*space, VirtRange::one(*page), now);
        }
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    /// Evicts items of the batch, all of one address space.
    pub(super) fn evict_group(&mut self, group: &[EvictItem]) {
        let process = self.shared.processes.get(group[0].space);
        // From here on fork() in the program waits, until the last page is published.
        let claimed = process.as_ref().and_then(|process| {
            let agent = process.agent.get()?;
            // A stopped process (SIGSTOP, a debugger) has a stopped agent: no page can leave until
            // it goes on.
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
        self.wake();
    }

    /// Stores and publishes the pages `moved` of the group. Those that cannot be put back are set
    /// aside.
    fn finish(&mut self, process: &Arc<Process>, group: &[EvictItem], moved: u64) {
        match (self.store_all(group, moved), process.agent.get()) {
            (Some(waits), _) => self.set_aside(process, group, waits),
            (None, Some(agent)) => agent.ends_group(),
            (None, None) => {}
        }
    }

    /// Stores and publishes the pages `left` of the group, which are in `buffer`. Returns those
    /// that cannot be put back at once.
    pub(super) fn store_all(&mut self, group: &[EvictItem], mut left: u64) -> Option<Waits> {
        let (mut refused, mut stuck) = (0, 0);
        while left != 0 {
            let turn = self.publish(group, left, refused);
            // Pages that a thread waits for are put back before the next ones are stored.
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

    /// Publishes the pages that were stored last, and wakes the threads that wait for them. Returns
    /// the next step for the pages that are `left`. No tier has taken those `refused`. Locks the
    /// engine once.
    fn publish(&mut self, group: &[EvictItem], left: u64, refused: u64) -> Turn {
        let turn = {
            let mut engine = self.shared.books.engine_for_many();
            engine
                .evictions()
                .publish_all(&self.stored, &mut self.wakes);
            let back = left & engine.evictions().wanted_mask(group) | refused;
            let alive = engine.evictions().alive_mask(group);
            let (mut next, mut most) = (0u64, EVICT_PAGES_MAX);
            for at in places(left & !back) {
                if next.count_ones() as usize == most {
                    break;
                }
                next |= 1 << at;
                if alive >> at & 1 == 1 {
                    let order = engine.evictions().tiers_for(group[at].at);
                    self.orders[at] = self.order_now(order);
                    most = most.min(self.store_pages(self.orders[at].get(0)));
                }
            }
            Turn { back, next, alive }
        };
        self.stored.clear();
        self.wake();
        turn
    }

    /// True if the agent can be given a command. The first time, the agent is also moved to its
    /// CPUs.
    fn is_ready(&self, agent: &Agent) -> bool {
        let known = agent.tid() != 0;
        let ready = agent.readiness() == Readiness::Ready;
        if !known && agent.tid() != 0 {
            crate::space::layout::place_agents(&self.shared.processes, &self.shared.placement);
        }
        ready
    }

    /// Has the agent move the pages out, and reads them. Bit i of the result: page i of the group
    /// is in `buffer`, and only there. The other pages are finished. Error: the group has to wait.
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
            // An event that was acknowledged before this is in the books. One that is acknowledged
            // later cancels the command.
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
            agent.begins_group();
            agent.commands.post(OP_MOVE, pages)
        };
        let began = Instant::now();
        let most = if process.is_late.load(Ordering::Relaxed) {
            LATE_COMMAND_MAX
        } else {
            COMMAND_MAX
        };
        let brought = Cell::new(false);
        let patient = || {
            let waited = began.elapsed();
            if waited > AGENT_LATE.min(most) && !brought.replace(true) {
                bring_here(agent);
            }
            waited < most
        };
        let answer = agent.commands.wait(seq, || !agent.has_ended(), patient);
        let late = matches!(answer, Err(NotDone::GivenUp));
        process.is_late.store(late, Ordering::Relaxed);
        match answer {
            Ok(done) => self.taken(process, agent, group, (done, sharing)),
            // The agent died during the command: the pages that it had moved are gone with it.
            Err(NotDone::Gone) => Err(Waits::Gone(all_of(group))),
            Err(NotDone::GivenUp) => {
                self.shared
                    .gauges
                    .eviction
                    .commands_given_up
                    .fetch_add(1, Ordering::Relaxed);
                Err(Waits::Answer(GivenUp::new(agent, seq, sharing)))
            }
        }
    }

    /// Handles the agent's answer: reads the pages that it moved, and finishes the others. Bit i of
    /// the result: page i is in `buffer`, and only there.
    /// * `sharing`: pages that shared their frames with relatives.
    pub(super) fn taken(
        &mut self,
        process: &Arc<Process>,
        agent: &Agent,
        group: &[EvictItem],
        (done, sharing): (Done, u64),
    ) -> Result<u64, Waits> {
        // The client wrote these sets: they may have places outside the group.
        let (moved, refused) = (done.moved & all_of(group), done.refused);
        let readable = agent.read_moved(Done { moved, ..done }, group.len(), &mut self.buffer);
        if moved & sharing != 0 {
            let copied = places(moved & sharing).map(|at| group[at].at);
            crate::space::cow::left(&self.shared.books, &self.shared.processes, process, copied);
        }
        let stays = all_of(group) & !moved; // the moved ones are finished when they are published
        if stays != 0 {
            self.stay(places(stays).map(|at| match refused >> at & 1 {
                1 => (group[at].at, Taken::Busy),
                _ => (group[at].at, Taken::Unsure),
            }));
        }
        if readable {
            Ok(moved)
        } else {
            // The process died meanwhile, or unmapped its holding area.
            Err(Waits::End(moved))
        }
    }

    /// Applies the events that waited for a late one, if none is pending.
    fn apply_events(&self, process: &Process) {
        if process.has_applied_all() {
            return;
        }
        let _layout = process.layout.write();
        let _held = self.shared.gauges.layout_holds.hold();
        match process.agent.get() {
            Some(agent) => _ = apply_events_without_agent(&self.shared, process, agent),
            None => _ = crate::space::layout::apply_events(&self.shared, process),
        }
    }

    /// Finishes a group of which no page was taken out: the pages stay where they are.
    fn leave(&mut self, group: &[EvictItem]) {
        self.stay(group.iter().map(|item| (item.at, Taken::NotTried)));
    }

    /// Gives up `pages` of the group: they may have been moved out, and cannot be read. If their
    /// address space is gone, no process misses them. Otherwise it lives on in a process that
    /// shares it, or in a fork child that bypassed the C library. A touch of a page that is missing
    /// there fails; it never reads zeros.
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

    /// True if a page of the batch is missing in an address space that still has it. It is poisoned
    /// there.
    fn is_missed(&mut self, index: BatchIndex) -> bool {
        let mut missed = false;
        for (space, page) in self.places_of(index) {
            let Some(process) = self.shared.processes.get(space) else {
                continue;
            };
            let _layout = process.layout.read();
            if !self.places_of(index).contains(&(space, page)) {
                missed = true; // it moved or was dropped: the books answer the next fault
                continue;
            }
            match process.memory.poison(VirtRange::one(page)) {
                Err(UffdError::Exists { .. } | UffdError::ClientGone) => {}
                // Also if the layout is changing: the books then answer a fault.
                _ => missed = true,
            }
        }
        missed
    }

    /// Stores the next pages of the group; they are published later. Returns those that no tier
    /// took.
    fn store(&mut self, group: &[EvictItem], turn: &Turn) -> u64 {
        let (pages, alive) = (turn.next, turn.alive);
        let mut fates = [Fate::ToStore; EVICT_PAGES_MAX];
        let mut sums = [0u64; EVICT_PAGES_MAX];
        let mut left = pages;
        for at in places(pages) {
            match alive >> at & 1 {
                0 => fates[at] = Fate::Is(Outcome::Fill(0)), // no process will read it
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

    /// Changes the copies that a tier keeps of `pages` in place, if it can. Returns which of them.
    fn update(
        &self,
        group: &[EvictItem],
        tier: TierId,
        pages: u64,
        sums: &[u64; EVICT_PAGES_MAX],
        fates: &mut [Fate; EVICT_PAGES_MAX],
    ) -> u64 {
        let metered = &self.shared.books.tiers[usize::from(tier.0)];
        let keeps = |at: &usize| group[*at].retained.is_some_and(|(of, ..)| of == tier);
        if !metered.updates_copies() || !places(pages).any(|at| keeps(&at)) {
            return 0;
        }
        let copies: Vec<(usize, Slot)> = {
            let mut engine = self.shared.books.engine();
            let mut evictions = engine.evictions();
            let mut take = |at: usize| evictions.take_retained(group[at].at);
            let owned = places(pages).filter(keeps);
            owned.filter_map(|at| Some((at, take(at)?.1))).collect()
        };
        let mut done = 0;
        for (at, slot) in copies {
            let item = Store {
                page: page_of(&self.buffer, at),
                stamp: group[at].stamp,
                checksum: sums[at],
                result: Err(StoreError::Full),
            };
            if metered.update(slot, &item) {
                fates[at] = Fate::Is(Outcome::Stored(tier, slot));
                done |= 1 << at;
            } else {
                metered.tier.free(&[slot]);
            }
        }
        done
    }

    /// Offers `pages` of the group to a tier. Returns those that it took.
    fn offer(
        &mut self,
        group: &[EvictItem],
        tier: TierId,
        pages: u64,
        sums: &[u64; EVICT_PAGES_MAX],
        fates: &mut [Fate; EVICT_PAGES_MAX],
    ) -> u64 {
        let mut taken = self.update(group, tier, pages, sums, fates);
        let pages = pages & !taken;
        let mut batch: Vec<Store<'_>> = places(pages)
            .map(|at| Store {
                page: page_of(&self.buffer, at),
                stamp: group[at].stamp,
                checksum: sums[at],
                result: Err(StoreError::Full),
            })
            .collect();
        let metered = &self.shared.books.tiers[usize::from(tier.0)];
        if !batch.is_empty() {
            metered.tier.store(&mut batch);
        }
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

    /// The fate of a page that may need no new copy: its bytes are one word repeated, or equal to
    /// the retained copy.
    fn known_already(&self, item: &EvictItem, bytes: &[u8]) -> Fate {
        if let Some(word) = fill_word(bytes) {
            return Fate::Is(Outcome::Fill(word));
        }
        if let Some((tier, copy, stamp)) = item.retained {
            let kept = self.shared.books.tiers[tier.0 as usize]
                .tier
                .checksum(copy, stamp);
            if kept == Some(page_checksum(bytes, stamp)) && !self.leaves_copy_behind(tier) {
                return Fate::Is(Outcome::Clean);
            }
        }
        Fate::ToStore
    }

    /// Installs one page in one process. The caller holds the layout lock.
    /// * `age`: time since the first attempt.
    fn put_at(&self, process: &Process, page: VirtPage, bytes: &[u8], age: Duration) -> Put {
        match process.memory.install(page, bytes, Wake::Now) {
            Ok(()) | Err(UffdError::Exists { .. } | UffdError::ClientGone) => Put::There,
            // The mapping went away. Its event is pending, and says that it moved or was dropped.
            // If there is no event (shmat with SHM_REMAP), it was dropped.
            Err(UffdError::NotMapped { .. }) if age >= PLACE_GONE && !process.event_pending() => {
                Put::Nowhere
            }
            Err(_) => Put::NotYet,
        }
    }

    /// Removes a place of a page of the batch where nothing is mapped, as if the program had
    /// dropped it.
    fn forget_place(&self, space: SpaceId, page: VirtPage) {
        let range = VirtRange::one(page);
        let mut engine = self.shared.books.engine();
        engine.layout().removed(space, range);
    }

    /// As [`Evictor::put_back`], repeated for up to [`PUT_BACK_MAX`].
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
    /// False: a process that has the page does not allow it now.
    /// * `age`: time since the first attempt.
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
                continue; // the address space is gone
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

/// Binds an agent that waits for its CPU to the caller's, where it will run: the caller waits for
/// it.
#[cold]
fn bring_here(agent: &Agent) {
    let tid = agent.tid();
    if !agent.has_ended() && procfs::process_state(tid) == Some('R') {
        let _ = process::set_affinity(tid, &[process::current_cpu()]);
    }
}

/// The result of an attempt to put a page back.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_its_members() {
        for set in [0, 1, 1 << 63, 0b1011_0100, u64::MAX] {
            let members: Vec<usize> = places(set).collect();
            let slow: Vec<usize> = (0..64).filter(|at| set >> at & 1 == 1).collect();
            assert_eq!(members, slow);
        }
    }
}
