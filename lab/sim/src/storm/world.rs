//! The engine in the model world: a driver that does what the live manager does, one small step at
//! a time, with anything else happening between the steps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use undercroft_base::{
    Bytes, Nanos, PageNo, PageSize, Slot, SpaceId, Tier, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{Config, Effect, Engine};
use undercroft_model::{Content, FakeTier, Memory, Mm, Oracle, oracle::Expect};
use undercroft_policy::place::{TierState, pool_percent};
use undercroft_seeded::{Random, mix};

use super::evictor::{Evictor, step_time};
use super::heard::Heard;
use super::ledger::StormLedger;
use super::meddler::{MakePolicy, Plugin, meddler};
use super::setup::{Sabotage, StormSetup};
use super::work::{Demotion, Eviction, Flight, SpaceRates};

const HISTORY: usize = 60;

/// Steps after which all failures stop, and everything in progress must end.
pub const CALM_EVERY: u64 = 2048;

/// Steps after which all pages and slots are checked, not only those touched.
pub const CHECK_EVERY: u64 = 128;

/// The weights of all kinds of step add up to this.
const STEP_PARTS: u64 = 1000;

/// A fault message that no fault thread has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The page of the fault.
    pub page: VirtPage,
    /// Whether the access was a write.
    pub write: bool,
    /// Index of the thread.
    pub thread: usize,
}

/// A layout change that the kernel has made (or, for `Remove`, is about to make). Its event is
/// unread.
#[derive(Clone, Debug)]
pub enum LayoutEvent {
    /// The contents are about to be dropped.
    Remove(VirtRange),
    /// The mapping is gone.
    Unmap(VirtRange),
    /// The mapping moved.
    Remap {
        /// From where.
        from: VirtRange,
        /// To where.
        to: VirtPage,
        /// The old place stays mapped (`MREMAP_DONTUNMAP`).
        keep_old: bool,
    },
    /// The process forked.
    Fork {
        /// The child's memory.
        child: Mm,
        /// The ranges that it sees as zeros.
        wiped: Vec<VirtRange>,
        /// The ranges that it does not have.
        dropped: Vec<VirtRange>,
    },
}

/// An event that was read.
#[derive(Clone, Debug)]
pub struct Intake {
    /// The event.
    pub event: LayoutEvent,
    /// For a move: the pages at the new place have been forgotten, and must not be forgotten again.
    pub target_cleared: bool,
}

/// A REMOVE that was acknowledged: the kernel drops the pages some time later.
#[derive(Clone, Debug)]
pub struct Zap {
    /// The range that will be dropped.
    pub range: VirtRange,
    /// The contents that present pages had to have at the acknowledgement.
    pub saved: Vec<(VirtPage, Expect)>,
}

/// A process of the client.
pub struct Proc {
    /// Its memory.
    pub mm: Mm,
    /// Its number in the engine.
    pub space: SpaceId,
    /// Size of its pages.
    pub size: PageSize,
    /// False when it has exited.
    pub alive: bool,
    /// Unread messages in its userfaultfd.
    pub messages: VecDeque<Message>,
    /// Unread layout events in its userfaultfd.
    pub events: VecDeque<LayoutEvent>,
    /// The event that was read last and may not be in the books yet. It is in memory that survives
    /// the manager, because reading an event acknowledges it.
    pub intake: Option<Intake>,
    /// Ranges that the kernel is about to drop.
    pub zap: Option<Zap>,
    /// Pages may be present that the engine does not know.
    pub unmanaged_ok: bool,
    /// The ledger had no room for some of its pages, and they could not be poisoned: missing pages
    /// that the books do not know are refused.
    pub short: bool,
    /// The process that had the agent has ended, and others share its memory.
    pub agentless: bool,
}

/// State of a thread of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// The thread can run.
    Running,
    /// Stopped in a fault; the message is queued or was read.
    Stopped {
        /// The page of the fault.
        page: VirtPage,
        /// Whether it writes.
        write: bool,
    },
}

/// A thread of the program.
pub struct Thread {
    /// Index of its process.
    pub proc: usize,
    /// Its state.
    pub doing: Doing,
    /// The page it touched last.
    pub cursor: VirtPage,
    /// The distance to the next one.
    pub stride: i64,
}

/// A client, its kernel, its tiers and its manager.
pub struct World {
    /// The setup that it was made from.
    pub setup: StormSetup,
    /// The manager's engine; while the manager is dead, the dead one's.
    pub engine: Engine<StormLedger>,
    /// The manager's plugin, if it has one.
    pub plugin: Option<Plugin>,
    /// Listens to the engine.
    pub heard: Arc<Heard>,
    /// The ledger's memory, which survives the manager.
    pub ledger: StormLedger,
    /// The kernel.
    pub memory: Memory,
    /// Contents that every page must read as.
    pub oracle: Oracle,
    /// Storage, which survives the manager.
    pub tiers: Vec<FakeTier>,
    /// This step's random numbers.
    pub random: Random,
    /// Processes, including those that have exited.
    pub procs: Vec<Proc>,
    /// Threads of all processes.
    pub threads: Vec<Thread>,
    /// The work in progress of each fault thread of the manager.
    pub flights: Vec<Option<Flight>>,
    /// The evictor's work in progress.
    pub batch: Option<Eviction>,
    /// Other batches in flight, with other spaces.
    pub others: Vec<Eviction>,
    /// Groups of earlier batches, each of one space, whose agents have not answered.
    pub aside: Vec<Eviction>,
    /// Bytes the agents have moved out: (whose agent, place in its holding area). Survives the
    /// manager.
    pub holding: BTreeMap<(SpaceId, usize), Content>,
    /// A demotion under way.
    pub demotion: Option<Demotion>,
    /// The tier that is being emptied, and where its drain goes on.
    pub drain: Option<(TierId, PageNo)>,
    /// The tier that was taken out of use.
    pub removed: Option<TierId>,
    /// Drains that ended with the tier empty.
    pub drained: u64,
    /// Another one. The two change places.
    pub second_demotion: Option<Demotion>,
    /// Slots taken from the engine and not yet given back to the tiers.
    pub freed: Vec<(TierId, Slot)>,
    /// Wake-ups decided and not yet sent.
    pub wakes: Vec<(SpaceId, VirtPage)>,
    /// When reclaim runs, and how much it takes.
    pub evictor: Evictor,
    /// Virtual time.
    pub clock: Nanos,
    /// For each tier: the step until which it does nothing that it is asked for.
    pub hung_until: Vec<u64>,
    /// How the space fails.
    pub space_rates: SpaceRates,
    /// While the manager is dead: steps until its successor takes over.
    pub down_for: Option<u64>,
    /// Commands that a dead manager gave to agents: (whose agent, place, page).
    pub(super) commands: Vec<(SpaceId, usize, VirtPage)>,
    /// The last events, for the history of a failure.
    pub history: VecDeque<String>,
    /// Number of the step.
    pub steps: u64,
    /// Pages touched by the program.
    pub accesses: u64,
    /// Operations outside calm phases: accesses, decisions, pages installed, taken, stored and
    /// published, events.
    pub operations: u64,
    /// Nothing fails, no thread starts anything new.
    pub calm: bool,
    /// Only numbered contents are written: no page is clean or filled by chance.
    pub plain: bool,
    /// How often each case was met. A run that never meets a case proves nothing about it.
    pub seen: BTreeMap<&'static str, u64>,
    /// Pages whose bytes this step may have changed.
    pub(super) touched: Vec<(Mm, VirtPage)>,
    next_content: u64,
}

impl World {
    /// An empty world: no process, nothing fails.
    pub fn new(setup: StormSetup) -> World {
        World::with_policy(setup, meddler)
    }

    /// As [`World::new`].
    /// * `policy`: makes the plugin's policy, if the setup has one.
    pub(super) fn with_policy(setup: StormSetup, policy: MakePolicy) -> World {
        let ledger = StormLedger::new(setup.ledger_chunks);
        let mut engine = Engine::new(
            ledger.clone(),
            policies::reclaim(&setup),
            policies::prefetch(&setup),
            config_of(&setup),
        );
        policies::link(&setup, &mut engine);
        policies::number_spaces(&setup, &mut engine);
        let heard = Arc::new(Heard::default());
        engine.add_journal(heard.clone());
        let plugin = (setup.plugin).then(|| Plugin::start(policy, setup.seed, &mut engine));
        let tiers: Vec<FakeTier> = setup
            .tiers
            .iter()
            .enumerate()
            .map(|(at, tier)| {
                let seed = setup.seed ^ (at as u64) << 32;
                let capacity = Bytes(tier.pages * tier.page.bytes() as u64);
                let fake = FakeTier::new(&format!("tier{at}"), tier.facts, capacity, seed);
                let fake = fake.of_pages(tier.page);
                fake.set_reads(tier.reads);
                fake.set_packs(tier.packs);
                fake
            })
            .collect();
        World {
            engine,
            plugin,
            heard,
            ledger,
            memory: Memory::default(),
            oracle: Oracle::default(),
            hung_until: vec![0; tiers.len()],
            tiers,
            random: Random::new(setup.seed),
            procs: Vec::new(),
            threads: Vec::new(),
            flights: (0..setup.fault_threads).map(|_| None).collect(),
            batch: None,
            others: Vec::new(),
            aside: Vec::new(),
            holding: BTreeMap::new(),
            demotion: None,
            second_demotion: None,
            drain: None,
            removed: None,
            drained: 0,
            freed: Vec::new(),
            wakes: Vec::new(),
            evictor: Evictor::new(setup.seed),
            clock: Nanos(0),
            space_rates: SpaceRates::default(),
            down_for: None,
            commands: Vec::new(),
            history: VecDeque::new(),
            steps: 0,
            accesses: 0,
            operations: 0,
            calm: false,
            plain: false,
            seen: BTreeMap::new(),
            touched: Vec::new(),
            next_content: 0,
            setup,
        }
    }

    /// Whether the runtime has this bug on purpose.
    pub(super) fn sabotaged(&self, how: Sabotage) -> bool {
        self.setup.sabotage == Some(how)
    }

    /// Counts a case.
    pub fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Notes an operation for the history of a failure.
    pub fn log(&mut self, text: impl FnOnce() -> String) {
        self.operations += u64::from(!self.calm);
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history
            .push_back(format!("{:8} {}", self.steps, text()));
    }

    /// A new process with nothing mapped.
    pub fn spawn(&mut self) -> usize {
        let mm = self.memory.add();
        let size = if self.setup.large && self.random.chance(1, 2) {
            PageSize::Large
        } else {
            PageSize::Base
        };
        let space = self.engine.layout().new_space(size, |_| false);
        self.adopt(mm, space.expect("a number that is free"))
    }

    /// A process that the kernel and the engine already know.
    pub fn adopt(&mut self, mm: Mm, space: SpaceId) -> usize {
        let size = self.engine.books().page_size(space);
        if self.procs.iter().any(|proc| proc.space == space) {
            self.saw("a space number came again");
        }
        self.procs.push(Proc {
            mm,
            space,
            size,
            alive: true,
            messages: VecDeque::new(),
            events: VecDeque::new(),
            intake: None,
            zap: None,
            unmanaged_ok: false,
            short: false,
            agentless: false,
        });
        self.procs.len() - 1
    }

    /// The live process of a space.
    pub fn proc_of(&self, space: SpaceId) -> Option<usize> {
        self.procs
            .iter()
            .position(|proc| proc.space == space && proc.alive)
    }

    /// A random live process.
    pub fn a_proc(&mut self) -> Option<usize> {
        let alive: Vec<usize> = (0..self.procs.len())
            .filter(|at| self.procs[*at].alive)
            .collect();
        (!alive.is_empty()).then(|| alive[self.random.index(alive.len())])
    }

    /// Contents to write.
    pub fn new_content(&mut self) -> Content {
        self.next_content += 1;
        match self.random.below(16) {
            _ if self.plain => Content::numbered(self.next_content),
            0 => Content::ZERO,
            1 => Content::fill(self.next_content as u32),
            _ => Content::numbered(self.next_content),
        }
    }

    /// Carries out the engine's answer to a layout event.
    pub fn effect(&mut self, effect: Effect) {
        if effect.cancel_batch && self.evictions().next().is_some() {
            self.cancel_batches();
            self.saw("batch cancelled");
        }
    }

    /// Reports to the engine what each tier holds. As in the live run, a tier in memory may take
    /// only a part of the limit.
    pub fn update_pool(&mut self) {
        let limit = self.engine.books().limit().0;
        let last = self.tiers.len() - 1;
        let states = self.tiers.iter().enumerate().map(|(at, tier)| {
            let (info, held) = (tier.info(), tier.usage().held);
            let share = Bytes(limit / 100 * u64::from(pool_percent(at == last)));
            let (capacity, dram) = if info.facts.charged_to_limit {
                (info.capacity.min(share), held)
            } else {
                (tier.capacity(), Bytes(0))
            };
            TierState {
                page: info.page,
                capacity,
                held,
                dram,
                copies: tier.usage().logical.pages_floor(),
                packed: tier.usage().stored,
                load_ns: info.facts.first_load.0,
                latency: info.facts.class,
                demotes: false, // the engine knows
            }
        });
        self.engine.migrations().set_tiers(states);
    }

    /// Frees slots that no page refers to.
    pub fn give_back_freed(&mut self) {
        self.engine.take_freed(&mut self.freed);
        for (tier, slot) in std::mem::take(&mut self.freed) {
            assert!(
                !self.is_loading(tier, slot),
                "{tier:?} {slot:?} freed while a plan loads it"
            );
            let early = self.sabotaged(Sabotage::FreeEarly);
            if !early || self.tiers[tier.0 as usize].is_live(slot) {
                self.tiers[tier.0 as usize].free(&[slot]);
            }
        }
        self.update_pool();
    }

    /// Gives room to threads that waited for it; false when there was none.
    pub fn take_waiters(&mut self) -> bool {
        let mut out = Vec::new();
        self.engine.faults().take_waiters(&mut out);
        let any = !out.is_empty();
        if !self.sabotaged(Sabotage::ForgetWake) {
            self.wake_all(out);
        }
        any
    }

    /// Takes step `number`, then checks the pages it touched. At intervals checks everything.
    ///
    /// Panics with the difference: every assertion that fails here is a bug of the engine, of a
    /// policy, or of this runtime.
    pub fn take_step(&mut self, number: u64) {
        self.begin(number);
        self.maybe_kill();
        let calm = number % CALM_EVERY == CALM_EVERY - 1;
        self.survive(|world| {
            if calm {
                world.calm_down()
            } else {
                world.step()
            }
        });
        self.check_touched();
        if number.is_multiple_of(CHECK_EVERY) {
            self.check_slots();
            self.check_bytes();
        }
    }

    /// From here on, random numbers are those of step `number`.
    pub(super) fn begin(&mut self, number: u64) {
        let passed = number.saturating_sub(self.steps);
        self.clock.0 += passed * step_time(&self.setup).0;
        self.steps = number;
        let seed = mix(self.setup.seed ^ mix(number));
        self.random = Random::new(seed);
        for (at, tier) in self.tiers.iter().enumerate() {
            tier.reseed(seed ^ (1 + at as u64));
        }
    }

    /// Takes one random step.
    fn step(&mut self) {
        if let Some(left) = self.down_for {
            return self.step_without_manager(left);
        }
        // A drain is short, so that other steps meet an empty tier, too.
        if self.drain.is_some() && self.random.chance(1, 3) {
            self.demotion_step();
            return;
        }
        let layout = self.setup.layout;
        match self.random.below(STEP_PARTS) {
            0..400 => {
                if !self.program_step() && !self.fault_step() {
                    self.evict_step();
                }
            }
            400..640 => _ = self.fault_step(),
            640..850 => _ = self.evict_step(),
            850..880 => _ = self.demotion_step(),
            880..910 => _ = self.event_step(),
            910..925 => _ = self.zap_step(),
            925..945 => self.give_back_freed(),
            945..965 => _ = self.send_a_wake(),
            965..975 => self.fail_some(),
            975..980 => self.own_frames(),
            980..982 => self.attach_some(),
            982..984 => self.lock_some(),
            984..986 => self.pin_or_swap_some(),
            986..988 => self.guard_some(),
            988 => self.repeat_message(),
            989 => self.leader_step(),
            990 => self.change_limit(),
            991 => self.turn_knobs(),
            _ => {
                if self.random.chance(layout, 10) {
                    self.layout_step();
                }
            }
        }
    }
}

/// The configuration of the engine for a setup.
pub(super) fn config_of(setup: &StormSetup) -> Config {
    Config {
        limit: setup.limit(setup.limit_pages),
        retain: setup.tiers.iter().map(|tier| tier.retain).collect(),
        demotes: setup.tiers.iter().map(|tier| tier.demotes).collect(),
        room: undercroft_engine::Room::Ahead,
    }
}

/// The policies of a setup, which holds names that are known.
pub(super) mod policies {
    use undercroft_engine::{Engine, Ledger};
    use undercroft_policy::prefetch;
    use undercroft_policy::reclaim::Reclaim;

    use crate::reclaim;

    use super::super::beside::Beside;
    use super::super::tangle::Tangle;
    use super::StormSetup;

    pub(crate) fn reclaim(setup: &StormSetup) -> Box<dyn Reclaim> {
        reclaim::by_name(setup.reclaim).expect("a policy of the list")
    }

    /// Has the engine load pages together, if the setup says so.
    pub(crate) fn link<L>(setup: &StormSetup, engine: &mut Engine<L>)
    where
        L: Ledger,
    {
        if setup.links {
            engine.set_place(Box::new(Tangle::new(setup.seed)));
        }
    }

    /// A tenth of the storms come to the last number of a space soon. Another tenth have few
    /// numbers, which come again soon.
    pub(crate) fn number_spaces<L: Ledger>(setup: &StormSetup, engine: &mut Engine<L>) {
        match setup.seed % 10 {
            0 => engine.number_spaces((1 << 24) - 3, u32::MAX),
            5 => engine.number_spaces(1, 8),
            _ => {}
        }
    }

    pub(crate) fn prefetch(setup: &StormSetup) -> Option<Box<dyn prefetch::Prefetch>> {
        let named = prefetch::by_name(setup.prefetch).expect("a policy of the list");
        if setup.beside {
            Some(Box::new(Beside::new(named, setup.seed)))
        } else {
            named
        }
    }
}
