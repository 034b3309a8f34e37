//! What the manager's threads share: the engine, the tiers, the processes, and the counters.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use undercroft_base::{
    Bytes, LoadError, Loaded, PAGE_BYTES, PageCount, Slot, SpaceId, Stamp, Tier, TierId, TierKind,
    TierUsage, VirtPage, VirtRange,
};
use undercroft_engine::Engine;
use undercroft_policy::place::{LatencyClass, TierState};
use undercroft_sys::futex;
use undercroft_trace::Movement;

pub(crate) use crate::sync::lock;

use crate::books::ledger::MemfdLedger;
use crate::options::{ClientOptions, WhenFull};
use crate::placement::Placement;
use crate::record::Record;
use crate::report::{FaultBreakdown, LimitExceeded};
use crate::scale::{Holds, Shortages};
use crate::space::access::Looks;
use crate::space::parts::{self, Dead};
use crate::space::process::Process;
use crate::space::processes::Processes;

/// Tries before a thread sleeps for the engine: some 20 us.
const ENGINE_SPINS: u32 = 1000;

/// Runs of pages remembered that should leave before others: 256 MiB of them where each is of 64
/// pages.
const RUNS_MAX: usize = 1024;

/// A run does not grow beyond this, a batch of the evictor.
const RUN_PAGES: u64 = 64;

/// Fork relatives asked whether they share a page.
const RELATIVES_MAX: usize = 32;

/// Pages by which the limit may be exceeded more each time that nothing could be evicted (or a
/// quarter of what it is exceeded by already, if that is more).
const OVER_LIMIT_STEP: u64 = 256;

thread_local! {
    /// How often this thread has locked the engine. One instruction a lock.
    static ENGINE_LOCKS: Cell<u64> = const { Cell::new(0) };
}

/// How often the calling thread has locked the engine.
pub(crate) fn engine_locks() -> u64 {
    ENGINE_LOCKS.with(Cell::get)
}

/// One tier with what is measured around it.
pub(crate) struct MeteredTier {
    pub tier: Box<dyn Tier>,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub errors: AtomicU64,
    pub read_latency: Mutex<Histogram<u64>>,
    peaks: Mutex<(TierUsage, TierUsage)>,
}

impl MeteredTier {
    pub fn new(tier: Box<dyn Tier>) -> MeteredTier {
        MeteredTier {
            tier,
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            read_latency: Mutex::new(new_histogram()),
            peaks: Mutex::default(),
        }
    }

    pub fn is_ram(&self) -> bool {
        self.tier.info().kind == TierKind::Ram
    }

    /// What the engine is told of it before a decision.
    pub fn state(&self) -> TierState {
        TierState {
            capacity: self.tier.info().capacity,
            held: self.tier.usage().held,
            dram: self.tier.dram(),
            latency: if self.is_ram() {
                LatencyClass::Memory
            } else {
                LatencyClass::Device
            },
            demotes: false, // the engine knows
        }
    }

    /// Loads, counting; the latency of a `Read` answer is recorded by whoever reads.
    pub fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let result = self.tier.load(slot, stamp, dst);
        if result.is_err() {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Notes the usage now; returns (peak of each field, usage at the logical peak).
    pub fn note_usage(&self) -> (TierUsage, TierUsage) {
        let now = self.tier.usage();
        let mut peaks = lock(&self.peaks);
        if now.logical >= peaks.0.logical {
            peaks.1 = now;
        }
        peaks.0 = TierUsage {
            logical: peaks.0.logical.max(now.logical),
            stored: peaks.0.stored.max(now.stored),
            held: peaks.0.held.max(now.held),
        };
        *peaks
    }
}

/// Nanoseconds, 1 ns to 60 s, two digits; never grows.
pub(crate) fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("constant bounds are valid")
}

/// Times of the parts of a fault, in nanoseconds, summed over `count` faults that loaded one page
/// from a memory tier.
#[derive(Debug, Default)]
pub(crate) struct Breakdown {
    count: AtomicU64,
    parts: [AtomicU64; 4],
}

impl Breakdown {
    /// Adds one fault: when it was heard of, read, decided, loaded and installed.
    pub fn add(&self, times: [Instant; 5]) {
        self.count.fetch_add(1, Ordering::Relaxed);
        for (part, pair) in self.parts.iter().zip(times.windows(2)) {
            let took = pair[1].saturating_duration_since(pair[0]).as_nanos() as u64;
            part.fetch_add(took, Ordering::Relaxed);
        }
    }

    /// The means; `None` when there was no such fault.
    pub fn mean(&self) -> Option<FaultBreakdown> {
        let faults = self.count.load(Ordering::Relaxed);
        let mean = |at: usize| self.parts[at].load(Ordering::Relaxed) as f64 / faults as f64 / 1e9;
        (faults > 0).then(|| FaultBreakdown {
            faults,
            intake: mean(0),
            decide: mean(1),
            load: mean(2),
            install: mean(3),
        })
    }
}

/// What the evictor's work came to.
#[derive(Debug, Default)]
pub(crate) struct EvictionCost {
    pub batches: AtomicU64,
    /// Times the engine was locked for them.
    pub engine_locks: AtomicU64,
}

impl EvictionCost {
    /// A batch has left, for which the engine was locked so many times.
    pub fn note(&self, locks: u64) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.engine_locks.fetch_add(locks, Ordering::Relaxed);
    }
}

/// Everything shared.
pub(crate) struct Shared {
    pub engine: Mutex<Engine<MemfdLedger>>,
    pub tiers: Vec<MeteredTier>,
    pub processes: Processes,
    /// What is gone, and not forgotten whole.
    pub dead: Mutex<VecDeque<Dead>>,
    /// Eventfd of the control thread: there is something to forget.
    pub control_kick: OwnedFd,
    pub options: ClientOptions,
    pub placement: Placement,
    /// Futex: the evictor sleeps on it.
    pub evict_kick: AtomicU32,
    pub evictor_sleeps: AtomicBool,
    /// Eventfds of the fault threads.
    pub wakeups: Vec<OwnedFd>,
    pub stop: AtomicBool,
    pub record: Option<Record>,
    pub looks: Looks,
    pub shortages: Shortages,
    pub holds: Holds,
    pub fault_latency: Mutex<Histogram<u64>>,
    pub breakdown: Breakdown,
    pub exceeded: Mutex<Exceeded>,
    pub eviction: EvictionCost,
    /// Runs of zero pages mapped for reads, oldest first: counted in full, worth nothing while
    /// unwritten.
    pub zero_runs: Mutex<VecDeque<(SpaceId, VirtRange)>>,
    /// Pages charged for frames that fork relatives' evictions left behind.
    pub leave_next: Mutex<VecDeque<(SpaceId, VirtRange)>>,
    pub spaces_seen: AtomicU64,
    /// Most mappings that one process was seen to have.
    pub mappings_peak: AtomicU64,
    /// Mappings of one process from which on the user is warned: 80 % of what the kernel allows.
    pub mappings_warn: u64,
    pub managed_pages_peak: AtomicU64,
    /// Records of new mappings were lost: the control thread looks at everything anew.
    pub look_again: AtomicBool,
    /// Pages that fault threads are to bring in though nobody waits for them.
    pub to_bring: Mutex<Vec<(SpaceId, VirtPage)>>,
    /// Orders that an agent did not answer in time.
    pub orders_given_up: AtomicU64,
    pub started: Instant,
    /// Why the client must be ended, once something decided so.
    pub doom: Mutex<Option<String>>,
}

/// Time spent above the limit.
#[derive(Debug, Default)]
pub(crate) struct Exceeded {
    /// Of the times that have ended.
    ended: LimitExceeded,
    /// Since when it has been above it.
    since: Option<Instant>,
    warned: bool,
}

impl Exceeded {
    /// It is so many bytes above the limit at `now`.
    fn note(&mut self, over: u64, now: Instant) {
        match (over > 0, self.since) {
            (true, None) => {
                self.since = Some(now);
                self.ended.events += 1;
            }
            (false, Some(_)) => {
                self.ended.seconds = self.until(now).seconds;
                self.since = None;
            }
            _ => {}
        }
        self.ended.bytes_peak = self.ended.bytes_peak.max(over);
    }

    /// All of it, with the time since the limit was crossed last if it has not come down since.
    pub fn until(&self, now: Instant) -> LimitExceeded {
        let going_on = self
            .since
            .map_or(0.0, |since| now.duration_since(since).as_secs_f64());
        LimitExceeded {
            seconds: self.ended.seconds + going_on,
            ..self.ended
        }
    }
}

impl Shared {
    /// Locks the engine. Its holders work for microseconds on another CPU, and a sleep costs two
    /// wake-ups of an idle CPU: so it is waited for awake first.
    pub fn engine(&self) -> MutexGuard<'_, Engine<MemfdLedger>> {
        ENGINE_LOCKS.with(|locks| locks.set(locks.get() + 1));
        for _ in 0..ENGINE_SPINS {
            if let Ok(guard) = self.engine.try_lock() {
                return guard;
            }
            std::hint::spin_loop();
        }
        lock(&self.engine)
    }

    /// DRAM that tiers hold now.
    pub fn pool_held(&self) -> Bytes {
        Bytes(self.tiers.iter().map(|t| t.tier.dram().0).sum())
    }

    pub fn process(&self, space: SpaceId) -> Option<Arc<Process>> {
        self.processes.get(space)
    }

    /// Oldest first. O(all).
    pub fn all_processes(&self) -> Vec<Arc<Process>> {
        self.processes.all()
    }

    /// Address spaces that may share frames with this one by fork and can be evicted from: the
    /// oldest few.
    pub fn relatives(&self, process: &Process) -> Vec<SpaceId> {
        let has_agent = |other: &Process| other.agent.get().is_some();
        self.processes.relatives(process, RELATIVES_MAX, has_agent)
    }

    /// An address space came, or its process has announced itself.
    pub fn add_process(&self, process: &Arc<Process>) {
        if self.processes.add(process) {
            self.spaces_seen.fetch_add(1, Ordering::Relaxed);
            self.wake_fault_threads();
        }
    }

    /// A process was seen to have that many mappings.
    pub fn note_mappings(&self, pid: u32, count: u64) {
        let before = self.mappings_peak.fetch_max(count, Ordering::Relaxed);
        // Once: when the peak passes the threshold.
        let most = self.mappings_warn;
        if before < most && count >= most {
            crate::log::warn(&format!(
                "process {pid} has {count} mappings, of {} that the kernel allows one process; \
                 raise vm.max_map_count (sysctl)",
                most / 4 * 5
            ));
        }
    }

    /// Tells the trace of a page that counts from now on. With the engine locked.
    pub fn tell_found(&self, space: SpaceId, page: VirtPage) {
        if let Some(record) = &self.record {
            record.moved(space, page, Movement::Found);
        }
    }

    /// The address space is gone: its pages are forgotten and its slots freed.
    pub fn remove_process(&self, process: &Arc<Process>) {
        process.gone.store(true, Ordering::Relaxed);
        if self.processes.remove(process) {
            self.wake_fault_threads();
            parts::ended(self, process.clone());
        }
    }

    /// It is forgotten a few chunks at a time.
    pub fn forget_later(&self, dead: Dead) {
        lock(&self.dead).push_back(dead);
        let _ = rustix::io::write(&self.control_kick, &1u64.to_ne_bytes());
    }

    pub fn wake_fault_threads(&self) {
        for wakeup in &self.wakeups {
            let _ = rustix::io::write(wakeup, &1u64.to_ne_bytes());
        }
    }

    /// Wakes the evictor if it sleeps. Cost when it does not: one load.
    /// Has pages brought in, some time later: nobody waits for them, who may not be kept waiting.
    pub fn bring_in(&self, space: SpaceId, pages: impl Iterator<Item = VirtPage>) {
        lock(&self.to_bring).extend(pages.map(|page| (space, page)));
        self.wake_fault_threads();
    }

    pub fn kick_evictor(&self) {
        if self.evictor_sleeps.load(Ordering::SeqCst) {
            self.evict_kick.fetch_add(1, Ordering::SeqCst);
            futex::wake(&self.evict_kick, 1);
        }
    }

    /// Gives slots that nothing refers to back to their tiers. Not called with the engine locked.
    pub fn free_released(&self) {
        let mut freed = Vec::new();
        self.engine().take_freed(&mut freed);
        self.free_slots(&mut freed);
    }

    /// Frees `slots` (any order), leaving the vector empty.
    pub fn free_slots(&self, slots: &mut Vec<(TierId, Slot)>) {
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

    /// Wakes the threads that wait on these pages.
    pub fn wake_pages(&self, pages: &mut Vec<(SpaceId, VirtPage)>) {
        for (space, page) in pages.drain(..) {
            if let Some(process) = self.process(space) {
                let _ = process.uffd.wake(VirtRange::new(page, page.plus(1)));
            }
        }
    }

    /// Keeps the books of time above the limit; called by the control thread on each tick and by
    /// the evictor.
    pub fn note_limit(&self, dram: Bytes, limit: Bytes) {
        let over = dram.0.saturating_sub(limit.0);
        lock(&self.exceeded).note(over, Instant::now());
    }

    /// No tier has room and the limit is reached: says so once, and decides as the user chose.
    pub fn everything_full(&self) {
        // The lock is not held while it is told.
        let first = !std::mem::replace(&mut lock(&self.exceeded).warned, true);
        if first {
            crate::log::say(&format!(
                "every tier is full and the memory limit of {} is reached; {}",
                Bytes(self.options.memory_max),
                match self.options.when_full {
                    WhenFull::Stay =>
                        "pages stay in memory above the limit. \
                        Add room with `--tier file:PATH,size=SIZE` or raise --memory-max",
                    WhenFull::Kill => "ending the program (--when-full kill)",
                }
            ));
        }
        match self.options.when_full {
            WhenFull::Stay => {
                let mut engine = self.engine();
                let allowed = allowed_over(engine.room());
                engine.set_over_limit(allowed);
            }
            WhenFull::Kill => self.doom("every tier is full (--when-full kill)"),
        }
    }

    /// The client cannot go on: the control thread ends it and says why.
    pub fn doom(&self, why: &str) {
        lock(&self.doom).get_or_insert_with(|| why.to_owned());
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

/// How far the limit may be exceeded where pages have nowhere to go and there is `room` below it:
/// as far as it is, and a step. Asked again and again, it does not grow by itself.
fn allowed_over(room: i64) -> PageCount {
    let over = room.min(0).unsigned_abs();
    PageCount(over.saturating_add(OVER_LIMIT_STEP.max(over / 4)))
}

/// Adds pages to a queue of runs. The oldest run is forgotten when there are too many: its pages
/// then leave in their turn.
pub(crate) fn note_run(
    runs: &Mutex<VecDeque<(SpaceId, VirtRange)>>,
    space: SpaceId,
    range: VirtRange,
) {
    let mut runs = lock(runs);
    if let Some((last, run)) = runs.back_mut()
        && *last == space
        && run.end == range.start
        && run.count().0 + range.count().0 <= RUN_PAGES
    {
        run.end = range.end;
        return;
    }
    while runs.len() >= RUNS_MAX {
        runs.pop_front();
    }
    runs.push_back((space, range));
}

/// One whole page of a buffer.
pub(crate) fn page_of(buffer: &[u8], index: usize) -> &[u8] {
    &buffer[index * PAGE_BYTES..(index + 1) * PAGE_BYTES]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_above_the_limit_follows_what_is() {
        for room in [1, 0] {
            assert_eq!(allowed_over(room), PageCount(OVER_LIMIT_STEP));
        }
        assert_eq!(allowed_over(-100), PageCount(100 + OVER_LIMIT_STEP));
        assert_eq!(allowed_over(-40_000), PageCount(50_000));
        assert_eq!(allowed_over(i64::MIN).0, (1 << 63) + (1 << 61));
    }

    #[test]
    fn time_above_the_limit_counts_while_it_lasts() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut exceeded = Exceeded::default();
        exceeded.note(0, at(0));
        assert_eq!(exceeded.until(at(1)), LimitExceeded::default());
        exceeded.note(5, at(1));
        exceeded.note(9, at(2));
        let seen = |events, seconds| LimitExceeded {
            events,
            bytes_peak: 9,
            seconds,
        };
        assert_eq!(exceeded.until(at(4)), seen(1, 3.0));
        exceeded.note(0, at(5));
        assert_eq!(exceeded.until(at(100)), seen(1, 4.0));
        exceeded.note(1, at(100));
        assert_eq!(exceeded.until(at(101)), seen(2, 5.0));
    }
}
