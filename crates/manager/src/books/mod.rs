//! The state of all pages, and their copies: the engine with its ledger, and the tiers.

pub(crate) mod curve;
mod drain;
pub(crate) mod ledger;
pub(crate) mod metered;
pub(crate) mod runs;
pub(crate) mod table;
pub(crate) mod tiers;

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use undercroft_base::{Bytes, LatencyClass, PageKey, PageSize, Slot, SpaceId, TierId, VirtRange};
use undercroft_engine::{Engine, Journal, LoadItem, LoadPlan, Upsets};
use undercroft_policy::place::TIERS_MAX;
use undercroft_proto::legacy::{Legacy, Row};
use undercroft_sys::process::own_run_time;

use self::curve::Follower;
use self::drain::Drains;
use self::ledger::MemfdLedger;
use self::metered::MeteredTier;
use self::runs::Runs;
use self::table::Tiers;
use crate::advice::Advice;
use crate::cpus::FAULT_THREADS_MAX;
use crate::gauges::scale::{Hold, Longest};
use crate::record::Record;
use crate::sync::lock;

/// Attempts to lock the engine before a thread sleeps: some 20 us.
const ENGINE_SPINS: u32 = 1000;

// The engine has no more numbers for tiers than the policy.
const _: () = assert!(TierId::MAX <= TIERS_MAX);

thread_local! {
    /// Times that this thread has locked the engine. Cost: one instruction a lock.
    static ENGINE_LOCKS: Cell<u64> = const { Cell::new(0) };
    /// Times that this thread found the engine locked, and [`EngineLocks`] does not know it yet.
    static ENGINE_WAITS: Cell<u64> = const { Cell::new(0) };
}

/// Locks of a thread between two additions to [`EngineLocks`].
const LOCKS_TOLD: u64 = 64;

/// How often the engine was locked by all threads, and how often another thread had it. A thread
/// adds its own once in [`LOCKS_TOLD`] locks, so that no lock writes memory that threads share.
#[derive(Default)]
pub(crate) struct EngineLocks {
    pub locks: AtomicU64,
    pub waits: AtomicU64,
}

/// Times that the calling thread has locked the engine.
pub(crate) fn engine_locks() -> u64 {
    ENGINE_LOCKS.with(Cell::get)
}

/// The books of one run. Lock order: see `ARCHITECTURE.md`. The engine's lock and a tier's are
/// never held together.
pub(crate) struct Books {
    engine: Mutex<Engine<MemfdLedger>>,
    /// Loads that were upset, as the engine counts them.
    pub upsets: Upsets,
    /// Counts of [`Books::engine`].
    pub locks: EngineLocks,
    /// The longest holds of [`Books::engine_for_many`].
    pub holds: Longest,
    pub tiers: Tiers,
    /// Makes the checksums of pages, as the tiers do.
    pub key: PageKey,
    /// Held for reading while the evictor stores copies and publishes them. A thread that has
    /// it for writing knows that no store is under way that began before.
    pub storing: RwLock<()>,
    /// State for a successor besides ledger and tiers.
    pub legacy: Arc<Legacy>,
    /// The trace of `--trace`. The engine tells it each change.
    pub record: Option<Arc<Record>>,
    /// The queues of the run's plugin. The engine tells it each change. Locked for moments: by
    /// fault threads only between faults, to load what it wants.
    advice: Mutex<Option<Arc<Advice>>>,
    /// A plugin of the run has asked which instructions fault.
    pub asked_instructions: AtomicBool,
    /// Estimates the faults of other limits.
    curve: Option<Follower>,
    /// Slots that each fault thread has not freed yet: it frees many at a time. With one of these
    /// locked, only a tier is locked.
    late: [Mutex<Vec<(TierId, Slot)>>; FAULT_THREADS_MAX],
    /// Tiers that are being emptied.
    pub drains: Drains,
    /// Zero pages that were mapped for reads. They count in full, though they hold nothing until
    /// they are written.
    pub zero_runs: Runs,
    /// Pages that are charged for a frame since a fork relative's page left it.
    pub leave_next: Runs,
    /// Pages that are to leave although there is room: a user asked.
    pub named: Runs,
}

/// The engine, locked; the time is taken.
pub(crate) struct HeldEngine<'a> {
    // Above the lock, because fields are dropped in this order: the measured time ends before the
    // hold does.
    _hold: Hold<'a>,
    engine: MutexGuard<'a, Engine<MemfdLedger>>,
}

impl Deref for HeldEngine<'_> {
    type Target = Engine<MemfdLedger>;

    fn deref(&self) -> &Engine<MemfdLedger> {
        &self.engine
    }
}

impl DerefMut for HeldEngine<'_> {
    fn deref_mut(&mut self) -> &mut Engine<MemfdLedger> {
        &mut self.engine
    }
}

impl Books {
    pub(crate) fn new(
        mut engine: Engine<MemfdLedger>,
        tiers: Vec<MeteredTier>,
        key: PageKey,
        legacy: Arc<Legacy>,
        record: Option<Record>,
    ) -> Books {
        let record = record.map(Arc::new);
        if let Some(record) = &record {
            engine.add_journal(record.clone());
        }
        for (at, tier) in tiers.iter().enumerate() {
            if tier.facts().is_source {
                let pages = tier.tier.info().capacity.pages_floor();
                engine.migrations().only_read(TierId(at as u8), pages);
            }
        }
        Books {
            upsets: engine.upsets(),
            engine: Mutex::new(engine),
            locks: EngineLocks::default(),
            holds: Longest::default(),
            tiers: Tiers::new(tiers),
            key,
            storing: RwLock::default(),
            legacy,
            record,
            advice: Mutex::default(),
            asked_instructions: AtomicBool::new(false),
            curve: None,
            late: std::array::from_fn(|_| Mutex::new(Vec::with_capacity(1024))),
            drains: Drains::default(),
            zero_runs: Runs::default(),
            leave_next: Runs::default(),
            named: Runs::default(),
        }
    }

    /// The queues of the run's plugin, if it has one.
    pub(crate) fn advice(&self) -> Option<Arc<Advice>> {
        lock(&self.advice).clone()
    }

    /// The time between two scans that the run's plugin asks for, if it has one that does.
    pub(crate) fn scan_interval(&self) -> Option<Duration> {
        self.advice()?.scan_interval()
    }

    /// Has this plugin hear of every change from now on, and the one before of none.
    pub(crate) fn advise(&self, advice: Option<Arc<Advice>>) {
        let old = std::mem::replace(&mut *lock(&self.advice), advice.clone());
        let mut engine = self.engine();
        if let Some(old) = &old {
            old.end();
            engine.remove_journal(&(old.ears.clone() as Arc<dyn Journal>));
            engine.evictions().forget_places();
        }
        if let Some(new) = advice {
            engine.add_journal(new.ears.clone());
        }
    }

    /// Whether the tiers of all copies of a plan keep them while their pages are in memory.
    pub(crate) fn keeps_copies(&self, plan: &LoadPlan) -> bool {
        let keeps = |item: &LoadItem| {
            let tier = self.tiers.get(usize::from(item.tier.0));
            tier.is_some_and(|tier| tier.facts().class != LatencyClass::Memory)
        };
        plan.items.iter().all(keeps)
    }

    /// Locks the engine. A hold lasts microseconds, and a sleep costs two wake-ups of an idle CPU.
    /// So a thread waits awake first.
    pub(crate) fn engine(&self) -> MutexGuard<'_, Engine<MemfdLedger>> {
        let locks = ENGINE_LOCKS.with(|locks| {
            locks.set(locks.get() + 1);
            locks.get()
        });
        if locks.is_multiple_of(LOCKS_TOLD) {
            self.locks.locks.fetch_add(LOCKS_TOLD, Ordering::Relaxed);
            let waits = ENGINE_WAITS.with(Cell::take);
            self.locks.waits.fetch_add(waits, Ordering::Relaxed);
        }
        if let Some(guard) = self.try_engine() {
            return guard;
        }
        ENGINE_WAITS.with(|waits| waits.set(waits.get() + 1));
        for _ in 1..ENGINE_SPINS {
            std::hint::spin_loop();
            if let Some(guard) = self.try_engine() {
                return guard;
            }
        }
        lock(&self.engine)
    }

    /// As [`Books::engine`], for work on many pages. The length of the hold is noted. The kernel is
    /// asked for CPU time before the lock is taken: no fault waits for that.
    pub(crate) fn engine_for_many(&self) -> HeldEngine<'_> {
        let ran = own_run_time();
        let engine = self.engine();
        HeldEngine {
            _hold: self.holds.hold_after(ran),
            engine,
        }
    }

    /// Locks the engine, unless another thread has it.
    pub(crate) fn try_engine(&self) -> Option<MutexGuard<'_, Engine<MemfdLedger>>> {
        self.engine.try_lock().ok()
    }

    /// A row of the legacy for a new space.
    pub(crate) fn row(&self, space: SpaceId) -> Row {
        let regions = self.regions(space);
        self.legacy.add(space, &regions)
    }

    /// The tier that is only read: the file of a snapshot.
    pub(crate) fn source(&self) -> Option<TierId> {
        let at = self.tiers.iter().position(|tier| tier.facts().is_source);
        at.map(|at| TierId(at as u8))
    }

    /// DRAM that tiers hold now.
    pub(crate) fn pool_held(&self) -> Bytes {
        Bytes(self.tiers.iter().map(|t| t.tier.dram().0).sum())
    }

    /// The managed ranges of a space, as they are now.
    pub(crate) fn regions(&self, space: SpaceId) -> Vec<VirtRange> {
        self.engine().books().regions(space).to_vec()
    }

    /// Takes slots that no entry names, for fault thread `thread` to free later.
    pub(crate) fn free_later(&self, engine: &mut Engine<MemfdLedger>, thread: usize) {
        engine.take_freed(&mut lock(&self.late[thread % FAULT_THREADS_MAX]));
    }

    /// Frees the slots of a fault thread, if there are at least `least`.
    pub(crate) fn free_late(&self, thread: usize, least: usize) {
        let mut late = lock(&self.late[thread % FAULT_THREADS_MAX]);
        if late.len() >= least {
            self.free_slots(&mut late);
        }
    }

    /// Frees the slots of all fault threads: those that sleep do not come to it.
    pub(crate) fn free_all_late(&self) {
        (0..FAULT_THREADS_MAX).for_each(|thread| self.free_late(thread, 1));
    }

    /// Frees slots that no entry names, in their tiers. Never call it with the engine locked.
    pub(crate) fn free_released(&self) {
        let mut freed = Vec::new();
        self.engine().take_freed(&mut freed);
        self.free_slots(&mut freed);
    }

    /// Frees `slots`, in any order, and empties the vector.
    pub(crate) fn free_slots(&self, slots: &mut Vec<(TierId, Slot)>) {
        for (index, metered) in self.tiers.iter().enumerate() {
            let id = TierId(index as u8);
            let mut batch = [Slot(0); 64];
            let mut count = 0;
            for (tier, slot) in slots.iter() {
                if *tier == id {
                    batch[count] = *slot;
                    count += 1;
                    if count == batch.len() {
                        metered.tier.free(&batch);
                        count = 0;
                    }
                }
            }
            if count > 0 {
                metered.tier.free(&batch[..count]);
            }
        }
        slots.clear();
    }
}

/// A whole page of a buffer that has pages of this size.
pub(crate) fn page_of(buffer: &[u8], size: PageSize, index: usize) -> &[u8] {
    &buffer[index * size.bytes()..(index + 1) * size.bytes()]
}
