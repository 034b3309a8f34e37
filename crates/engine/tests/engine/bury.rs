//! Large ranges that the program drops: their chunks are given to another space and forgotten
//! gradually, while faults, evictions and further drops go on. Every page is compared with what the
//! program last wrote, every slot with who has it.

use std::collections::HashMap;

use undercroft_base::{Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{
    EVERYTHING, Engine, EvictItem, FaultAnswer, Install, LoadPlan, Outcome, Taken, VecLedger,
};
use undercroft_seeded::Random;

use crate::common;

const CHUNK: u64 = 512;
const CHUNKS: u64 = 6;

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// The program, its kernel and its manager, with the engine in the middle.
struct World {
    random: Random,
    engine: Engine<VecLedger>,
    space: SpaceId,
    /// Words that the program last wrote, where that is not zero; what is in memory; what tiers
    /// have.
    written: HashMap<VirtPage, u32>,
    memory: HashMap<VirtPage, u32>,
    slots: HashMap<Slot, u32>,
    next_slot: u64,
    plans: Vec<LoadPlan>,
    /// Chosen, and not moved out yet.
    chosen: Vec<EvictItem>,
    /// Moved out, and not published.
    in_hand: Vec<(EvictItem, u32)>,
    graves: Vec<SpaceId>,
    /// Its process does not run, so no page of the space is chosen.
    passed_over: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
        let mut engine = common::engine(64, 1 << 20, reclaim);
        let space = engine.layout().add_space();
        engine.layout().attached(space, range(0, CHUNKS * CHUNK));
        World {
            random: Random::new(seed),
            engine,
            space,
            written: HashMap::new(),
            memory: HashMap::new(),
            slots: HashMap::new(),
            next_slot: 0,
            plans: Vec::new(),
            chosen: Vec::new(),
            in_hand: Vec::new(),
            graves: Vec::new(),
            passed_over: false,
        }
    }

    /// An of some 30 pages, in all chunks.
    fn page(&mut self) -> VirtPage {
        let chunk = self.random.below(CHUNKS);
        VirtPage(chunk * CHUNK + self.random.below(5) * 127)
    }

    fn touch(&mut self) {
        let page = self.page();
        if let Some(value) = self.memory.get(&page) {
            assert_eq!(
                Some(value),
                self.written.get(&page).or(Some(&0)),
                "{page:?}"
            );
            let value = self.random.below(1 << 20) as u32 + 1;
            self.memory.insert(page, value);
            self.written.insert(page, value);
            return;
        }
        let fault = common::fault(self.space, page, true);
        let mut plan = LoadPlan::default();
        match self.engine.faults().answer(fault, &mut plan) {
            FaultAnswer::Load => self.plans.push(plan),
            FaultAnswer::Wait => {}
            other => panic!("{page:?} is missing, and the books say {other:?}"),
        }
    }

    /// A plan that was made some time ago is installed, as far as it still holds.
    fn finish(&mut self) {
        if self.plans.is_empty() {
            return;
        }
        let at = self.random.below(self.plans.len() as u64) as usize;
        let mut plan = self.plans.swap_remove(at);
        if !self.engine.upsets().spare(&plan) {
            self.engine.faults().validate(&mut plan.items);
        }
        for item in &mut plan.items {
            if !item.valid {
                continue;
            }
            let value = match item.tier {
                TierId::FILL => item.slot.0 as u32,
                _ => self.slots[&item.slot],
            };
            let expected = self.written.get(&item.page).copied().unwrap_or(0);
            assert_eq!(value, expected, "{:?}", item.page);
            assert_eq!(self.memory.insert(item.page, value), None);
            item.install = Install::Done;
        }
        self.engine.faults().finish(plan.fault, &mut plan.items);
    }

    fn evict(&mut self) {
        let mut wake = Vec::new();
        if let Some((item, value)) = self.in_hand.pop() {
            let outcome = match self.random.below(3) {
                0 => Outcome::Fill(value),
                _ => {
                    self.next_slot += 1;
                    self.slots.insert(Slot(self.next_slot), value);
                    Outcome::Stored(TierId(0), Slot(self.next_slot))
                }
            };
            return self.engine.evictions().publish(item.at, outcome, &mut wake);
        }
        if self.chosen.is_empty() {
            self.engine.evictions().select(6, &mut self.chosen);
            return;
        }
        for item in std::mem::take(&mut self.chosen) {
            let here =
                item.space == self.space && self.engine.evictions().is_at(item.at, item.page);
            let taken = here.then(|| self.memory.remove(&item.page)).flatten();
            match taken {
                Some(value) => self.in_hand.push((item, value)),
                None => self
                    .engine
                    .evictions()
                    .settle(item.at, Taken::NotTried, &mut wake),
            }
        }
    }

    fn drop_some(&mut self) {
        let (start, count) = (self.random.below(CHUNKS), 1 + self.random.below(CHUNKS));
        let start = start * CHUNK + self.random.below(2) * 100;
        let dropped = range(start, (start + count * CHUNK).min(CHUNKS * CHUNK));
        self.written.retain(|page, _| !dropped.contains(*page));
        self.memory.retain(|page, _| !dropped.contains(*page));
        let grave = self.engine.layout().add_space();
        let parts = self.engine.books().parts(self.space, dropped);
        // As the manager does: a few at a time, and something else in between.
        for parts in parts.chunks(2) {
            self.engine.layout().bury(self.space, parts, grave);
            self.evict_published();
        }
        let left = dropped
            .pages()
            .map(|page| self.engine.books().entry(self.space, page));
        assert!({ left }.all(|entry| entry == undercroft_base::Entry::UNTOUCHED));
        self.graves.push(grave);
    }

    /// The process does not run, or runs again.
    fn pass_over(&mut self) {
        self.passed_over = !self.passed_over;
        let mut evictions = self.engine.evictions();
        evictions.pass_over(self.space, self.passed_over);
        while !self.passed_over && self.engine.evictions().take_back(self.space, 3) {}
    }

    fn evict_published(&mut self) {
        if !self.in_hand.is_empty() {
            self.evict();
        }
    }

    /// Forgets a part of what was dropped some time ago.
    fn forget(&mut self) {
        let Some(grave) = self.graves.last().copied() else {
            return;
        };
        match self.engine.books().parts(grave, EVERYTHING).first() {
            Some(part) => _ = self.engine.layout().removed(grave, *part),
            None => {
                self.engine.layout().remove_space(grave);
                self.graves.pop();
            }
        }
    }

    fn free(&mut self) {
        let mut freed = Vec::new();
        self.engine.take_freed(&mut freed);
        for (_, slot) in freed {
            assert!(
                self.slots.remove(&slot).is_some(),
                "{slot:?} was freed twice"
            );
        }
    }

    fn step(&mut self) {
        match self.random.below(17) {
            0..=6 => self.touch(),
            7..=9 => self.finish(),
            10..=12 => self.evict(),
            13 => self.drop_some(),
            14 => self.pass_over(),
            _ => self.forget(),
        }
        self.free();
        self.engine.books().audit();
    }

    fn end(mut self) {
        while !self.plans.is_empty() {
            self.finish();
        }
        while !self.in_hand.is_empty() || !self.chosen.is_empty() {
            self.evict();
        }
        if self.passed_over {
            self.pass_over();
        }
        while !self.graves.is_empty() {
            self.forget();
        }
        for page in (0..CHUNKS * CHUNK).map(VirtPage) {
            let known = self.engine.books().entry(self.space, page);
            let wanted = self.written.contains_key(&page) || self.memory.contains_key(&page);
            assert!(
                !wanted || known != undercroft_base::Entry::UNTOUCHED,
                "{page:?} is lost"
            );
        }
        assert_eq!(self.engine.books().unfinished_loads(), 0);
        self.engine.layout().remove_space(self.space);
        self.free();
        self.engine.books().audit();
        assert_eq!((self.engine.books().resident().0, self.slots.len()), (0, 0));
    }
}

#[test]
fn what_is_buried_never_comes_back_and_is_freed_once() {
    for seed in 0..60 {
        let mut world = World::new(seed);
        for _ in 0..1500 {
            world.step();
        }
        world.end();
    }
}

#[test]
fn whole_chunks_are_buried_untouched_and_the_ends_are_dropped() {
    let mut world = World::new(1);
    let space = world.space;
    world
        .engine
        .discovery()
        .found_resident(space, range(0, 4 * CHUNK));
    let grave = world.engine.layout().add_space();
    let parts = world
        .engine
        .books()
        .parts(space, range(100, 3 * CHUNK + 100));
    world.engine.layout().bury(space, &parts, grave);
    assert_eq!(
        world.engine.books().parts(grave, EVERYTHING),
        [range(512, 1024), range(1024, 1536)]
    );
    assert_eq!(
        world.engine.books().resident().0,
        100 + 2 * CHUNK + (CHUNK - 100)
    );
    assert_eq!(world.engine.books().parts(space, range(512, 1536)), []);
    world.engine.books().audit();
    world.engine.layout().remove_space(grave);
    assert_eq!(world.engine.books().resident().0, 100 + CHUNK - 100);
    world.engine.books().audit();
}

/// A fork child shares a page that is in the batch, and drops it in a large range.
#[test]
fn a_fork_child_that_drops_a_page_in_flight_gets_nothing_of_it() {
    let mut world = World::new(2);
    let parent = world.space;
    world.engine.discovery().found_resident(parent, range(0, 8));
    let mut items = Vec::new();
    while !world.engine.evictions().select(4, &mut items) {}
    let (child, effect) = world.engine.forks().forked(parent, &[]).expect("room");
    assert!(effect.cancel_batch);
    let grave = world.engine.layout().add_space();
    let parts = world.engine.books().parts(child, EVERYTHING);
    assert!(
        world
            .engine
            .layout()
            .bury(child, &parts, grave)
            .cancel_batch
    );
    let mut wake = Vec::new();
    for item in &items {
        world
            .engine
            .evictions()
            .settle(item.at, Taken::Moved, &mut wake);
        let slot = Slot(item.page.0 + 1);
        world
            .engine
            .evictions()
            .publish(item.at, Outcome::Stored(TierId(0), slot), &mut wake);
        assert_eq!(
            world.engine.books().entry(child, item.page),
            undercroft_base::Entry::UNTOUCHED
        );
    }
    world.engine.books().audit();
    for space in [grave, child, parent] {
        world.engine.layout().remove_space(space);
    }
    let mut freed = Vec::new();
    world.engine.take_freed(&mut freed);
    assert_eq!(
        (freed.len(), world.engine.books().resident().0),
        (items.len(), 0)
    );
}
