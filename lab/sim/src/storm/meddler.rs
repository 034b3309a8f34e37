//! A plugin that names any pages at all: those it has heard of, their neighbours, pages of other
//! spaces and of none, in half of its storms also to be loaded, in a third also to go to any tier
//! or to move there. Now and then it fails. It asks for scans, which find any pages at all. The
//! world asks it as the manager does.

use std::collections::VecDeque;
use std::sync::Arc;

use undercroft_base::{SpaceId, TierId, VirtPage};
use undercroft_engine::{Engine, Ledger, Placing, WishedMove};
use undercroft_plugin::{
    Desk, Ears, Event, Failure, Found, Host, Memory, Policy, Tier, What, Wish, Wishes,
};
use undercroft_seeded::Random;

/// Pages that it remembers.
const REMEMBERED: usize = 64;
/// Wishes that wait, and that are tried for one batch.
const WISHES_MAX: usize = 256;
const WISHES_A_BATCH: usize = 16;
const LOADS_A_TURN: usize = 8;
/// Pages that a scan finds at most, and scans that are told.
const FOUND_MAX: u64 = 40;

/// Makes a policy of a seed.
pub type MakePolicy = fn(u64) -> Box<dyn Policy>;

/// The plugin of a storm's manager.
pub struct Plugin {
    make: MakePolicy,
    seed: u64,
    ears: Arc<Ears>,
    desk: Desk,
    wishes: VecDeque<(SpaceId, VirtPage)>,
    /// Pages to leave although there may be room.
    now: VecDeque<(SpaceId, VirtPage)>,
    /// Pages to load.
    loads: VecDeque<(SpaceId, VirtPage)>,
    /// Places of pages, and moves of copies.
    places: Wishes,
    /// Of scans.
    random: Random,
    scanned_ms: u64,
    /// Scans that it was told of.
    pub(super) scans: u64,
}

impl Plugin {
    /// Has a new one hear of every change of this engine.
    pub(super) fn start<L>(make: MakePolicy, seed: u64, engine: &mut Engine<L>) -> Plugin {
        let ears = Arc::new(Ears::default());
        engine.add_journal(ears.clone());
        ears.ask_tiers();
        Plugin {
            make,
            seed,
            ears,
            desk: Desk::new(make(seed)),
            wishes: VecDeque::new(),
            now: VecDeque::new(),
            loads: VecDeque::new(),
            places: Wishes::default(),
            random: Random::new(seed ^ 0x5ca7),
            scanned_ms: 0,
            scans: 0,
        }
    }

    /// The one of a successor: it knows nothing of what was before.
    pub(super) fn again<L>(&self, engine: &mut Engine<L>) -> Plugin {
        Plugin::start(self.make, self.seed + 1, engine)
    }

    /// Tells it what has happened.
    fn hear<L: Ledger>(&mut self, engine: &Engine<L>, now_ms: u64) {
        let (wishes, now, loads) = (&mut self.wishes, &mut self.now, &mut self.loads);
        let places = &self.places;
        let mut wish = |wish: Wish| {
            let list = match wish.what {
                What::Reclaim => &mut *wishes,
                What::ReclaimNow => &mut *now,
                What::Prefetch => &mut *loads,
                What::Place(_) | What::Link(_) | What::Move { .. } => {
                    places.add(wish);
                    return;
                }
            };
            if list.len() < WISHES_MAX {
                list.push_back((wish.space, wish.page));
            }
        };
        let books = engine.books();
        let memory = Memory {
            limit: books.limit().0,
            used: books.dram_used().0,
            faults: books.stats().faults,
            waited_ms: now_ms / 2,
        };
        let tiers = books.ranked_tiers().iter().map(Tier::of);
        self.desk.tiers(tiers, places.moves_free());
        self.desk.at(memory, now_ms, &mut wish);
        let mut any = None;
        while let Some(event) = self.ears.next() {
            self.desk.hear(&event, &mut wish);
            any = Some(event);
        }
        if let Some(of) = any
            && self.desk.scan_ms() > 0
            && now_ms >= self.scanned_ms + self.desk.scan_ms()
        {
            (self.scanned_ms, self.scans) = (now_ms, self.scans + 1);
            found_around(of, &mut self.random, now_ms).for_each(|event| self.ears.put(&event));
        }
    }

    /// Tells it what has happened, and takes its oldest wishes.
    pub(super) fn wishes<L: Ledger>(
        &mut self,
        engine: &Engine<L>,
        now_ms: u64,
    ) -> Vec<(SpaceId, VirtPage)> {
        self.hear(engine, now_ms);
        let some = self.wishes.len().min(WISHES_A_BATCH);
        self.wishes.drain(..some).collect()
    }

    /// Takes the oldest page for which it wishes a tier or a companion.
    pub(super) fn take_place(&mut self) -> Option<(SpaceId, VirtPage, Placing)> {
        self.places.next_place()
    }

    /// Takes the next moves that it wishes: those that are made together.
    pub(super) fn take_moves(&mut self) -> Vec<WishedMove> {
        let mut moves = Vec::new();
        self.places.next_moves(&mut moves);
        moves
    }

    /// Whether it wants pages to leave although there may be room.
    pub(super) fn wants_now(&self) -> bool {
        !self.now.is_empty()
    }

    /// Takes the oldest of these.
    pub(super) fn take_now(&mut self) -> Vec<(SpaceId, VirtPage)> {
        let some = self.now.len().min(WISHES_A_BATCH);
        self.now.drain(..some).collect()
    }

    /// The oldest pages that it wants in memory, of one space.
    pub(super) fn loads(&self) -> Option<(SpaceId, Vec<VirtPage>)> {
        let (space, _) = *self.loads.front()?;
        let same = self.loads.iter().take_while(|(of, _)| *of == space);
        let pages = same.map(|(_, page)| *page);
        Some((space, pages.take(LOADS_A_TURN).collect()))
    }

    /// The oldest `done` of these were dealt with.
    pub(super) fn loaded(&mut self, done: usize) {
        self.loads.drain(..done);
    }
}

/// A scan that found pages around that of an event, and some of another space.
fn found_around(of: Event, random: &mut Random, now_ms: u64) -> impl Iterator<Item = Event> {
    let mut found = Found::default();
    for _ in 0..random.below(FOUND_MAX) {
        let page = of.page.wrapping_add(random.below(200)).wrapping_sub(100);
        found.add(of.space, VirtPage(page));
        found.add(SpaceId(random.below(9) as u32), VirtPage(random.below(500)));
    }
    for space in 0..random.below(9) {
        found.scanned(SpaceId(space as u32));
    }
    found.take(now_ms).into_iter()
}

/// The policy.
struct Meddler {
    random: Random,
    /// For pages to load.
    loads: Option<Random>,
    /// For tiers of pages.
    tiers: Option<Random>,
    heard: VecDeque<(SpaceId, u64)>,
}

/// A policy with random answers.
pub(super) fn meddler(seed: u64) -> Box<dyn Policy> {
    Box::new(Meddler {
        random: Random::new(seed ^ 0x3edd),
        loads: seed.is_multiple_of(2).then(|| Random::new(seed ^ 0x10ad)),
        tiers: seed.is_multiple_of(3).then(|| Random::new(seed ^ 0x71e5)),
        heard: VecDeque::new(),
    })
}

/// Any page: mostly one of those heard of, or beside it.
fn any_page(random: &mut Random, heard: &VecDeque<(SpaceId, u64)>) -> (SpaceId, VirtPage) {
    let (space, page) = heard[random.index(heard.len())];
    let (space, page) = match random.below(16) {
        0 => (SpaceId(random.bits() as u32), page),
        1 => (space, random.bits()),
        2..6 => (space, page.wrapping_add(random.below(9)).wrapping_sub(4)),
        _ => (space, page),
    };
    (space, VirtPage(page))
}

impl Policy for Meddler {
    fn hear(&mut self, event: &Event, host: &mut Host) -> Result<(), Failure> {
        if self.heard.len() == REMEMBERED {
            self.heard.pop_front();
        }
        self.heard.push_back((event.space, event.page));
        let mut wish = |what, random: &mut Random| {
            let (space, page) = any_page(random, &self.heard);
            host.wish(Wish { what, space, page });
        };
        for _ in 0..self.random.below(4) {
            wish(What::Reclaim, &mut self.random);
        }
        if self.random.chance(1, 8) {
            wish(What::ReclaimNow, &mut self.random);
        }
        if let Some(random) = &mut self.loads {
            for _ in 0..random.below(4) {
                wish(What::Prefetch, random);
            }
        }
        if let Some(random) = &mut self.tiers {
            // Mostly one that there is.
            let mut tier = || TierId(random.below(host.tiers().len() as u64 + 1) as u8);
            let (from, to) = (tier(), tier());
            let pages = random.below(40);
            let (space, page) = any_page(random, &self.heard);
            let what = match random.below(4) {
                0 => What::Place(to),
                1 => What::Link(any_page(random, &self.heard).1),
                _ => What::Move { pages, from, to },
            };
            host.wish(Wish { what, space, page });
        }
        if self.random.chance(1, 100) {
            host.scan(10 + self.random.below(40));
        }
        if self.random.chance(1, 5000) {
            return Err(Failure::Trap("it failed".to_owned()));
        }
        Ok(())
    }
}
