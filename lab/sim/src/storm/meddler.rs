//! A plugin that names any pages at all: those it has heard of, their neighbours, pages of other
//! spaces and of none. Now and then it fails. The world asks it as the manager does.

use std::collections::VecDeque;
use std::sync::Arc;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::{Engine, Ledger};
use undercroft_plugin::{Desk, Ears, Event, Failure, Host, Memory, Policy, Wish};
use undercroft_seeded::Random;

/// Pages that it remembers.
const REMEMBERED: usize = 64;
/// Wishes that wait, and that are tried for one batch.
const WISHES_MAX: usize = 256;
const WISHES_A_BATCH: usize = 16;

/// Makes a policy of a seed.
pub type MakePolicy = fn(u64) -> Box<dyn Policy>;

/// The plugin of a storm's manager.
pub struct Plugin {
    make: MakePolicy,
    seed: u64,
    ears: Arc<Ears>,
    desk: Desk,
    wishes: VecDeque<Wish>,
}

impl Plugin {
    /// Has a new one hear of every change of this engine.
    pub(super) fn start<L>(make: MakePolicy, seed: u64, engine: &mut Engine<L>) -> Plugin {
        let ears = Arc::new(Ears::default());
        engine.add_journal(ears.clone());
        Plugin {
            make,
            seed,
            ears,
            desk: Desk::new(make(seed)),
            wishes: VecDeque::new(),
        }
    }

    /// The one of a successor: it knows nothing of what was before.
    pub(super) fn again<L>(&self, engine: &mut Engine<L>) -> Plugin {
        Plugin::start(self.make, self.seed + 1, engine)
    }

    /// Tells it what has happened.
    fn hear<L: Ledger>(&mut self, engine: &Engine<L>, now_ms: u64) {
        let wishes = &mut self.wishes;
        let mut wish = |wish| {
            if wishes.len() < WISHES_MAX {
                wishes.push_back(wish);
            }
        };
        let books = engine.books();
        let memory = Memory {
            limit: books.limit().0,
            used: books.dram_used().0,
            faults: books.stats().faults,
        };
        self.desk.at(memory, now_ms, &mut wish);
        while let Some(event) = self.ears.next() {
            self.desk.hear(&event, &mut wish);
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
        let wishes = self.wishes.drain(..some);
        wishes.map(|wish| (wish.space, wish.page)).collect()
    }
}

/// The policy.
struct Meddler {
    random: Random,
    heard: VecDeque<(SpaceId, u64)>,
}

/// A policy with random answers.
pub(super) fn meddler(seed: u64) -> Box<dyn Policy> {
    Box::new(Meddler {
        random: Random::new(seed ^ 0x3edd),
        heard: VecDeque::new(),
    })
}

impl Policy for Meddler {
    fn hear(&mut self, event: &Event, host: &mut Host) -> Result<(), Failure> {
        if self.heard.len() == REMEMBERED {
            self.heard.pop_front();
        }
        self.heard.push_back((event.space, event.page));
        for _ in 0..self.random.below(4) {
            let (space, page) = self.heard[self.random.index(self.heard.len())];
            let (space, page) = match self.random.below(16) {
                0 => (SpaceId(self.random.bits() as u32), page),
                1 => (space, self.random.bits()),
                2..6 => (
                    space,
                    page.wrapping_add(self.random.below(9)).wrapping_sub(4),
                ),
                _ => (space, page),
            };
            let page = VirtPage(page);
            host.reclaim(Wish { space, page });
        }
        if self.random.chance(1, 5000) {
            return Err(Failure::Trap("it failed".to_owned()));
        }
        Ok(())
    }
}
