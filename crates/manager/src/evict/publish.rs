//! Publishes where each page of a group went, or puts it back where it came from. Step 4 of 4 of an
//! eviction: here the steps of one group come together.

use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{self as engine, BatchIndex, EvictItem, Outcome};
use undercroft_sys::uffd::UffdError;

use super::Evictor;
use super::aside::{Done, Stuck, Waits};
use super::wayout::{Way, all_of, apply_events, places};
use crate::books::page_of;
use crate::space::port::{Late, Read, Taken, Took, Wake, WayOut};
use crate::space::process::Process;
use crate::space::still;

/// Longest time for attempts to put a page back at once. A pending event prevents it, and is read
/// within some 20 us.
const PUT_BACK_MAX: Duration = Duration::from_millis(2);
const PUT_BACK_PAUSE: Duration = Duration::from_micros(20);

const _: () = assert!(PUT_BACK_PAUSE.as_nanos() < PUT_BACK_MAX.as_nanos());

/// After this time a page's place counts as gone, if nothing is mapped there and no event says so.
const PLACE_GONE: Duration = Duration::from_millis(50);

/// The next step for the pages in the buffer, as sets of places in the group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Pages to put back: a thread waits for them, or no tier took them.
    pub back: u64,
    /// Pages to store.
    pub next: u64,
    /// Pages that an address space still has.
    pub alive: u64,
    /// The tier whose copies are not used.
    pub behind: Option<TierId>,
    /// Pages that an address space had until they were published.
    pub had: u64,
}

impl Evictor {
    /// Finishes items of the batch that stay, each where it is, or where the program has moved it.
    fn stay(&mut self, items: impl Iterator<Item = (BatchIndex, engine::Taken)>) {
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

    /// Goes on with a group as far as its pages were taken out. Returns what it waits for.
    pub(super) fn go_on(
        &mut self,
        process: &Process,
        out: &dyn WayOut,
        group: &[EvictItem],
        took: Took,
    ) -> Option<Waits> {
        let Taken {
            moved,
            refused,
            kept,
            read,
        } = match took {
            Took::Later(late) => return Some(Waits::Late(late)),
            Took::Lost(pages) => return self.lose_told(group, pages),
            Took::Pages(taken) => taken,
        };
        let stays = all_of(group) & !moved; // the moved ones are finished when they are published
        if stays != 0 {
            self.stay(places(stays).map(|at| match refused >> at & 1 {
                1 => (group[at].at, engine::Taken::Busy),
                _ => (group[at].at, engine::Taken::Unsure),
            }));
            let pages = places(stays & refused).map(|at| group[at].page);
            still::refused(&self.shared, process, pages);
        }
        match read {
            Read::Yes => self.store_all(out, group, moved, kept),
            Read::NotNow => Some(Waits::Late(Late::End(moved))),
            Read::Never => self.lose_told(group, moved),
        }
    }

    /// Gives up `pages` of the group; returns those that wait.
    pub(super) fn lose_told(&mut self, group: &[EvictItem], pages: u64) -> Option<Waits> {
        let untold = self.lose(group, pages);
        (untold != 0).then_some(Waits::Lost(untold))
    }

    /// Stores and publishes the pages `left` of the group, which are in `buffer`, but for those
    /// that are `kept` by tiers as they are. Returns those that cannot be put back at once.
    pub(super) fn store_all(
        &mut self,
        out: &dyn WayOut,
        group: &[EvictItem],
        mut left: u64,
        kept: u64,
    ) -> Option<Waits> {
        let (mut refused, mut stored, mut stuck) = (0, 0, Vec::new());
        while left != 0 {
            let turn = self.publish_left(out, group, (left, refused), stored);
            self.wake();
            // Pages that a thread waits for are put back before the next ones are stored.
            for at in places(turn.back) {
                let mut done = Done::new();
                if !self.put_back_at_once(&group[at], at, &mut done) {
                    let bytes = page_of(&self.buffer, group[at].size, at).to_vec();
                    stuck.push(Stuck { at, bytes, done });
                }
            }
            refused = self.store(group, &turn, kept);
            stored = turn.next & !refused;
            left &= !(turn.back | turn.next) | refused;
        }
        if !self.stored.is_empty() {
            self.publish_left(out, group, (0, 0), stored);
            self.wake();
        }
        (!stuck.is_empty()).then_some(Waits::Place(stuck))
    }

    /// As [`Evictor::publish`]. The pages that were `stored` last are left to their copies: no page
    /// of a memory that still has them is installed in between. One that the program has dropped
    /// meanwhile has no copy, and may be in use again.
    fn publish_left(
        &mut self,
        out: &dyn WayOut,
        group: &[EvictItem],
        (left, refused): (u64, u64),
        stored: u64,
    ) -> Turn {
        out.leaving(group, stored);
        let turn = self.publish(group, left, refused);
        out.left(group, stored & turn.had);
        turn
    }

    /// Publishes the pages that were stored last. Returns the next step for the pages that are
    /// `left`. No tier has taken those `refused`. Locks the engine once. The caller wakes.
    fn publish(&mut self, group: &[EvictItem], left: u64, refused: u64) -> Turn {
        let turn = {
            let mut engine = self.shared.books.engine_for_many();
            let had = engine.evictions().alive_mask(group);
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
                    self.orders[at] = engine.evictions().tiers_for(group[at].at);
                    most = most.min(self.store_pages(self.orders[at].get(0)));
                }
            }
            let behind = engine.evictions().leaves_copies_in();
            Turn {
                back,
                next,
                alive,
                behind,
                had,
            }
        };
        self.stored.clear();
        turn
    }

    /// Finishes a group of which no page was taken out: the pages stay where they are.
    pub(super) fn leave(&mut self, group: &[EvictItem]) {
        self.stay(group.iter().map(|item| (item.at, engine::Taken::NotTried)));
    }

    /// Gives up `pages` of the group: they may have been moved out, and cannot be read. If their
    /// address space is gone, no process misses them. Otherwise it lives on in a process that
    /// shares it, or in a fork child that bypassed the C library. A touch of a page that is missing
    /// there fails; it never reads zeros. Returns those of which that cannot be told now.
    pub(super) fn lose(&mut self, group: &[EvictItem], pages: u64) -> u64 {
        let mut untold = 0;
        for at in places(pages) {
            match self.is_missed(group[at].at) {
                Missed::Yes => self.stored.push((group[at].at, Outcome::Lost)),
                Missed::No => self.stay(std::iter::once((group[at].at, engine::Taken::NotTried))),
                Missed::Untold => untold |= 1 << at,
            }
        }
        self.publish(group, 0, 0);
        self.wake();
        untold
    }

    /// Where an item has to be put back, as of now.
    pub(super) fn places_of(&self, index: BatchIndex) -> Vec<(SpaceId, VirtPage)> {
        let mut places = Vec::new();
        let mut engine = self.shared.books.engine();
        engine.evictions().places_of(index, &mut places);
        places
    }

    /// Whether a page of the batch is missing in an address space that still has it. It is poisoned
    /// there.
    fn is_missed(&mut self, index: BatchIndex) -> Missed {
        let mut missed = Missed::No;
        for (space, page) in self.places_of(index) {
            let Some(process) = self.shared.processes.get(space) else {
                continue;
            };
            let _layout = process.layout.read();
            if !self.places_of(index).contains(&(space, page)) {
                missed = missed.max(Missed::Untold); // it has moved, or was dropped
                continue;
            }
            match process.memory.poison(VirtRange::one(page)) {
                Err(UffdError::Exists { .. } | UffdError::ClientGone) => {}
                // It may be there: a lost page is not counted, and never leaves.
                Err(
                    UffdError::LayoutChanging { .. }
                    | UffdError::NoMemory { .. }
                    | UffdError::Busy { .. },
                ) => missed = missed.max(Missed::Untold),
                _ => missed = Missed::Yes,
            }
        }
        missed
    }

    /// Installs one page in one process. The caller holds the layout lock.
    /// * `age`: time since the first attempt.
    fn put_at(&self, process: &Arc<Process>, page: VirtPage, bytes: &[u8], age: Duration) -> Put {
        let put = match Way::of(&self.shared, process) {
            Some(way) => way.out().stay(page, bytes),
            None => process.memory.install(page, bytes, Wake::Now),
        };
        match put {
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
    fn put_back_at_once(&mut self, item: &EvictItem, at: usize, done: &mut Done) -> bool {
        let began = Instant::now();
        while !self.put_back(item, at, Duration::ZERO, done) {
            if began.elapsed() >= PUT_BACK_MAX {
                return false;
            }
            std::thread::sleep(PUT_BACK_PAUSE);
        }
        true
    }

    /// Tries once more to put pages of the group back. Returns those that still cannot be.
    /// * `age`: time since the first attempt.
    pub(super) fn put_back_again(
        &mut self,
        group: &[EvictItem],
        mut stuck: Vec<Stuck>,
        age: Duration,
    ) -> Option<Waits> {
        stuck.retain_mut(|of| {
            self.buffer[of.at * of.bytes.len()..][..of.bytes.len()].copy_from_slice(&of.bytes);
            !self.put_back(&group[of.at], of.at, age, &mut of.done)
        });
        (!stuck.is_empty()).then_some(Waits::Place(stuck))
    }

    /// Installs page `at` of the buffer, which is `item`, where it came from, and publishes that.
    /// False: a process that has the page does not allow it now.
    /// * `age`: time since the first attempt.
    fn put_back(&mut self, item: &EvictItem, at: usize, age: Duration, done: &mut Done) -> bool {
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
            apply_events(&self.shared, process);
        }
        let _layouts: Vec<_> = processes.iter().map(|p| p.layout.read()).collect();
        if self.places_of(index) != places || processes.iter().any(|p| !p.has_applied_all()) {
            return false; // it moved before the locks were held, or the books are behind
        }
        let bytes = page_of(&self.buffer, item.size, at);
        let mut there = true;
        for place @ (space, page) in places {
            if done.contains(&place) {
                continue;
            }
            let Some(process) = processes.iter().find(|p| p.space == space) else {
                continue; // the address space is gone
            };
            match self.put_at(process, page, bytes, age) {
                Put::There => done.push(place),
                Put::Nowhere => {
                    self.forget_place(space, page);
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

/// Whether a page that cannot be read is missing somewhere. A later one outweighs an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Missed {
    No,
    /// Its place changes, or the kernel has no memory for a mark.
    Untold,
    Yes,
}

/// The result of an attempt to put a page back.
enum Put {
    There,
    /// Its place is gone.
    Nowhere,
    NotYet,
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use undercroft_base::{BASE_PAGE_BYTES, PageState, ThreadId};
    use undercroft_engine::{Fault, FaultAnswer, LoadPlan};

    use super::*;
    use crate::fault::model_tests::{options, shared};
    use crate::space::model::ModelMemory;
    use crate::space::port::Space;

    /// Two pages that cannot be read: one is in memory, and one is not. While the program changes
    /// its mappings, neither is told.
    #[test]
    fn lose_waits_until_it_is_told_what_is_missing() {
        let mut evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
        let shared = evictor.shared.clone();
        let range = VirtRange::new(VirtPage(0), VirtPage(200));
        let memory = Arc::new(ModelMemory::new(range));
        let mut items = Vec::new();
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            engine.layout().attached(space, range);
            engine.discovery().found_resident(space, range);
            assert!(engine.evictions().select(2, &mut items));
            space
        };
        let row = shared.books.row(space);
        let beacon = VirtPage(1 << 20);
        let process = Process::new(space, memory.clone(), beacon, None, None, row);
        shared.add_process(&Arc::new(process));
        let there = memory.install(items[0].page, &[7; BASE_PAGE_BYTES], Wake::Later);
        there.expect("the page is missing");
        let states = || {
            let engine = shared.books.engine();
            [0, 1].map(|at| engine.books().entry(space, items[at].page).state)
        };
        memory.changes(true);
        assert_eq!(evictor.lose(&items, 0b11), 0b11);
        assert_eq!(states(), [PageState::Evicting; 2]);
        memory.changes(false);
        memory.short_poisons.store(1, Ordering::Relaxed);
        assert_eq!(evictor.lose(&items, 0b11), 0b01);
        assert_eq!(states(), [PageState::Evicting, PageState::Lost]);
        assert_eq!(evictor.lose(&items, 0b01), 0);
        assert_eq!(states(), [PageState::Resident, PageState::Lost]);
    }

    /// A group leaves by the memory's own way out. The page that a thread waits for is put back.
    #[test]
    fn a_group_leaves_by_the_way_out_of_its_memory_and_a_wanted_page_comes_back() {
        let mut evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
        let shared = evictor.shared.clone();
        let range = VirtRange::new(VirtPage(0), VirtPage(200));
        let memory = Arc::new(ModelMemory::new(range));
        for page in range.pages() {
            let put = memory.install(page, &[7; BASE_PAGE_BYTES], Wake::Later);
            put.expect("the page is missing");
        }
        let mut items = Vec::new();
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            engine.layout().attached(space, range);
            engine.discovery().found_resident(space, range);
            assert!(engine.evictions().select(8, &mut items));
            let fault = Fault {
                space,
                page: items[3].page,
                write: false,
                thread: ThreadId(1),
                urgent: false,
            };
            let answer = engine.faults().answer(fault, &mut LoadPlan::default());
            assert_eq!(answer, FaultAnswer::Wait, "the page is on its way out");
            space
        };
        let row = shared.books.row(space);
        let process = Process::new(space, memory.clone(), VirtPage(1 << 20), None, None, row);
        shared.add_process(&Arc::new(process));
        evictor.evict_groups(&items, None);
        let engine = shared.books.engine();
        for (at, item) in items.iter().enumerate() {
            let there = memory.peek(item.page).is_some();
            let state = engine.books().entry(space, item.page).state;
            let back = at == 3;
            assert_eq!((there, state == PageState::Resident), (back, back), "{at}");
            assert!(back || state == PageState::Stored, "{at}: {state:?}");
        }
        assert_eq!(memory.left.load(Ordering::Relaxed), 7);
    }

    /// A parent gets a page back before its fork child can. What the parent does with it meanwhile,
    /// without an event, is not undone: it may have put a guard there.
    #[test]
    fn a_page_is_put_back_once_in_each_process_that_has_it() {
        let mut evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
        let shared = evictor.shared.clone();
        let range = VirtRange::new(VirtPage(0), VirtPage(200));
        let memories = [(); 2].map(|()| Arc::new(ModelMemory::new(range)));
        let mut items = Vec::new();
        let spaces = {
            let mut engine = shared.books.engine();
            let parent = engine.layout().add_space();
            engine.layout().attached(parent, range);
            engine.discovery().found_resident(parent, range);
            assert!(engine.evictions().select(1, &mut items));
            let (child, _) = engine.forks().forked(parent, &[]).expect("room");
            [parent, child]
        };
        assert_eq!(evictor.places_of(items[0].at).len(), 2, "both have it");
        for (space, memory) in spaces.iter().zip(&memories) {
            let row = shared.books.row(*space);
            let beacon = VirtPage(1 << 20);
            let process = Process::new(*space, memory.clone(), beacon, None, None, row);
            shared.add_process(&Arc::new(process));
        }
        let [parent, child] = &memories;
        let (page, mut done) = (items[0].page, Done::new());
        child.changes(true);
        let back = evictor.put_back(&items[0], 0, Duration::ZERO, &mut done);
        assert!(!back && parent.peek(page).is_some() && child.peek(page).is_none());
        parent.move_out(page).expect("it is there");
        child.changes(false);
        assert!(evictor.put_back(&items[0], 0, Duration::ZERO, &mut done));
        assert!(child.peek(page).is_some());
        assert!(parent.peek(page).is_none(), "it is not put there again");
    }
}
