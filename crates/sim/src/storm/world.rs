//! The engine in the model world: a driver that does what the live manager does, one small step at a time, with
//! anything else happening between the steps.

use std::collections::{BTreeMap, VecDeque};

use undercroft_base::{Bytes, Slot, SpaceId, Tier, TierId, TierKind, VirtPage, VirtRange};
use undercroft_engine::{Config, Effect, Engine, Room, VecLedger};
use undercroft_model::{Content, FailRates, FakeTier, Memory, Mm, Oracle, Random, oracle::Expect};

use super::evict::{Batch, Demotion};
use super::faults::Flight;

pub const PAGE: u64 = 4096;
const HISTORY: usize = 60;

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub reclaim: &'static str,
    pub prefetch: &'static str,
    pub limit_pages: u64,
    pub tiers: Vec<TierSetup>,
    pub ledger_chunks: usize,
    /// Layout changes in 1000 steps.
    pub layout: u64,
    pub failures: bool,
    pub fault_threads: usize,
    pub program_threads: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct TierSetup {
    pub kind: TierKind,
    pub pages: u64,
    pub retain: bool,
    pub demotes: bool,
}

/// A fault message that no fault thread has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub page: VirtPage,
    pub write: bool,
    pub thread: usize,
}

/// A layout change the kernel has made (or, for `Remove`, is about to), whose event no one has read.
#[derive(Clone, Debug)]
pub enum Event {
    Remove(VirtRange),
    Unmap(VirtRange),
    Remap {
        from: VirtRange,
        to: VirtPage,
        keep_old: bool,
    },
    Fork {
        child: Mm,
        wiped: Vec<VirtRange>,
        dropped: Vec<VirtRange>,
    },
}

/// A REMOVE that was acknowledged: the kernel drops the pages some time later.
#[derive(Clone, Debug)]
pub struct Zap {
    pub range: VirtRange,
    /// What the pages that were present at the acknowledgement had to read as.
    pub saved: Vec<(VirtPage, Expect)>,
}

pub struct Proc {
    pub mm: Mm,
    pub space: SpaceId,
    pub alive: bool,
    pub messages: VecDeque<Message>,
    pub events: VecDeque<Event>,
    pub zap: Option<Zap>,
    /// Pages may be present that the engine knows nothing of.
    pub unmanaged_ok: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    Running,
    /// Stopped in a fault; the message is queued or was read.
    Stopped {
        page: VirtPage,
        write: bool,
    },
}

pub struct Thread {
    pub proc: usize,
    pub doing: Doing,
    pub cursor: VirtPage,
    pub stride: i64,
}

pub struct World {
    pub setup: Setup,
    pub engine: Engine<VecLedger>,
    pub memory: Memory,
    pub oracle: Oracle,
    pub tiers: Vec<FakeTier>,
    pub random: Random,
    pub procs: Vec<Proc>,
    pub threads: Vec<Thread>,
    pub flights: Vec<Option<Flight>>,
    pub batch: Option<Batch>,
    pub demotion: Option<Demotion>,
    /// Taken from the engine, not yet given back to the tiers.
    pub freed: Vec<(TierId, Slot)>,
    pub history: VecDeque<String>,
    pub steps: u64,
    pub accesses: u64,
    /// Things that happened, but in calm phases: accesses, decisions, pages installed, taken, stored, published; events.
    pub operations: u64,
    pub calm: bool,
    pub over_limit: bool,
    /// Only numbered contents are written: no page is clean or filled by chance.
    pub plain: bool,
    /// How often what was seen: a run that never meets a case proves nothing about it.
    pub seen: BTreeMap<&'static str, u64>,
    next_content: u64,
}

impl World {
    pub fn new(setup: Setup) -> World {
        let config = Config {
            limit: Bytes(setup.limit_pages * PAGE),
            retain: setup.tiers.iter().map(|tier| tier.retain).collect(),
            demotes: setup.tiers.iter().map(|tier| tier.demotes).collect(),
            room: Room::Ahead,
        };
        let engine = Engine::new(
            VecLedger::new(setup.ledger_chunks),
            undercroft_policy::reclaim::by_name(setup.reclaim).expect("a policy"),
            undercroft_policy::prefetch::by_name(setup.prefetch).expect("a policy"),
            config,
        );
        let tiers = setup
            .tiers
            .iter()
            .enumerate()
            .map(|(at, tier)| {
                let seed = setup.seed ^ (at as u64) << 32;
                FakeTier::new(
                    &format!("tier{at}"),
                    tier.kind,
                    Bytes(tier.pages * PAGE),
                    seed,
                )
            })
            .collect();
        World {
            engine,
            memory: Memory::default(),
            oracle: Oracle::default(),
            tiers,
            random: Random::new(setup.seed),
            procs: Vec::new(),
            threads: Vec::new(),
            flights: (0..setup.fault_threads).map(|_| None).collect(),
            batch: None,
            demotion: None,
            freed: Vec::new(),
            history: VecDeque::new(),
            steps: 0,
            accesses: 0,
            operations: 0,
            calm: false,
            over_limit: false,
            plain: false,
            seen: BTreeMap::new(),
            next_content: 0,
            setup,
        }
    }

    pub fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub fn log(&mut self, text: impl FnOnce() -> String) {
        self.operations += u64::from(!self.calm);
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history
            .push_back(format!("{:8} {}", self.steps, text()));
    }

    /// A new process with nothing mapped and one thread.
    pub fn spawn(&mut self) -> usize {
        let mm = self.memory.add();
        let space = self.engine.add_space();
        self.adopt(mm, space)
    }

    pub fn adopt(&mut self, mm: Mm, space: SpaceId) -> usize {
        self.procs.push(Proc {
            mm,
            space,
            alive: true,
            messages: VecDeque::new(),
            events: VecDeque::new(),
            zap: None,
            unmanaged_ok: false,
        });
        self.procs.len() - 1
    }

    pub fn proc_of(&self, space: SpaceId) -> Option<usize> {
        self.procs
            .iter()
            .position(|proc| proc.space == space && proc.alive)
    }

    pub fn a_proc(&mut self) -> Option<usize> {
        let alive: Vec<usize> = (0..self.procs.len())
            .filter(|at| self.procs[*at].alive)
            .collect();
        (!alive.is_empty()).then(|| alive[self.random.index(alive.len())])
    }

    pub fn new_content(&mut self) -> Content {
        self.next_content += 1;
        match self.random.below(16) {
            _ if self.plain => Content::numbered(self.next_content),
            0 => Content::ZERO,
            1 => Content::fill(self.next_content as u32),
            _ => Content::numbered(self.next_content),
        }
    }

    pub fn effect(&mut self, effect: Effect) {
        if let (true, Some(batch)) = (effect.cancel_batch, &mut self.batch) {
            batch.cancelled = true;
            self.saw("batch cancelled");
        }
    }

    /// UFFDIO_WAKE, or what COPY does: threads stopped at the page try again.
    pub fn wake(&mut self, proc: usize, page: VirtPage) {
        self.procs[proc].messages.retain(|m| m.page != page);
        for at in 0..self.threads.len() {
            if self.threads[at].proc != proc {
                continue;
            }
            if let Doing::Stopped { page: of, write } = self.threads[at].doing
                && of == page
            {
                self.threads[at].doing = Doing::Running;
                self.access(at, page, write);
            }
        }
    }

    pub fn wake_range(&mut self, proc: usize, range: VirtRange) {
        for at in 0..self.threads.len() {
            if let Doing::Stopped { page, .. } = self.threads[at].doing
                && self.threads[at].proc == proc
                && range.contains(page)
            {
                self.wake(proc, page);
            }
        }
    }

    pub fn wake_all(&mut self, wake: Vec<(SpaceId, VirtPage)>) {
        for (space, page) in wake {
            if let Some(proc) = self.proc_of(space) {
                self.wake(proc, page);
            }
        }
    }

    pub fn update_pool(&mut self) {
        let held = self
            .tiers
            .iter()
            .filter(|tier| tier.info().kind == TierKind::Ram)
            .map(|tier| tier.usage().held.0)
            .sum();
        self.engine.set_pool_held(Bytes(held));
    }

    pub fn give_back_freed(&mut self) {
        self.engine.take_freed(&mut self.freed);
        for (tier, slot) in std::mem::take(&mut self.freed) {
            assert!(
                !self.is_loading(tier, slot),
                "{tier:?} {slot:?} freed while a plan loads it"
            );
            self.tiers[tier.0 as usize].free(&[slot]);
        }
        self.update_pool();
    }

    pub fn take_waiters(&mut self) -> bool {
        let mut out = Vec::new();
        self.engine.take_waiters(&mut out);
        let any = !out.is_empty();
        self.wake_all(out);
        any
    }

    pub fn set_failures(&mut self, on: bool) {
        let mut rates = FailRates::NONE;
        if on && self.setup.failures {
            let random = &mut self.random;
            let mut rate = |most: u64| match random.chance(1, 2) {
                true => random.below(most),
                false => 0,
            };
            rates = FailRates {
                full: rate(300),
                incompressible: rate(200),
                no_space: rate(100),
                store_io: rate(100),
                load_io: rate(200),
                stale: rate(100),
                flip: rate(10),
            };
        }
        for tier in &self.tiers {
            tier.set_rates(rates);
        }
    }

    /// One random step of anything.
    pub fn step(&mut self) {
        self.steps += 1;
        let layout = self.setup.layout;
        match self.random.below(1000) {
            0..400 => {
                if !self.program_step() && !self.fault_step() {
                    self.evict_step();
                }
            }
            400..650 => _ = self.fault_step(),
            650..860 => _ = self.evict_step(),
            860..890 => _ = self.demotion_step(),
            890..920 => _ = self.event_step(),
            920..935 => _ = self.zap_step(),
            935..960 => self.give_back_freed(),
            960..975 => _ = self.take_waiters(),
            975..980 => self.own_frames(),
            980..982 => self.attach_some(),
            982..984 => self.lock_some(),
            984..986 => self.pin_some(),
            986..988 => self.guard_some(),
            988..990 => self.repeat_message(),
            990 => self.change_limit(),
            991 => self.set_failures(true),
            992 => {
                let on = self.random.chance(1, 4);
                self.over_limit = on;
                let pages = if on { 1 << 40 } else { 0 };
                self.engine
                    .set_over_limit(undercroft_base::PageCount(pages));
            }
            _ => {
                if self.random.chance(layout, 10) {
                    self.layout_step();
                }
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:#?}\nlast steps:", self.setup);
            for line in &self.history {
                eprintln!("{line}");
            }
            eprintln!("replay: ORACLE_SEED={}", self.setup.seed);
        }
    }
}
