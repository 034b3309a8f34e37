//! Fault threads as they run, on a model of the kernel's memory: threads of a pretend program touch
//! and drop pages at random while others are taken out. Each page reads as its program wrote it.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, Fetched, Inbox, LoadError, Loaded, PageKey, Slot, SpaceId, Stamp,
    Store, StoreError, Tier, TierId, TierInfo, TierUsage, VirtPage, VirtRange,
};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{Config, Engine, EvictItem, Outcome, Room, Taken};
use undercroft_model::content::Content;
use undercroft_model::memory::Touch;
use undercroft_model::tier::{CLUSTER, FakeTier};
use undercroft_proto::legacy::{Legacy, fresh};
use undercroft_proto::options::{AccessScan, ClientOptions, Rights, WhenFull};
use undercroft_seeded::Random;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::maps::Maps;
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::Tasks;

use super::FaultThread;
use crate::books::metered::MeteredTier;
use crate::books::{Books, ledger, tiers};
use crate::cpus::CpuPlan;
use crate::gauges::Gauges;
use crate::signals::Signals;
use crate::space::arrivals::Arrivals;
use crate::space::graves::Graves;
use crate::space::identity::Identity;
use crate::space::model::ModelMemory;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::{Inside, Shared};
use crate::sync::lock;

const FIRST: VirtPage = VirtPage(512);
/// Pages of the program, and those that it may keep.
const PAGES: u64 = 1536;
const KEPT: u64 = 384;
/// Threads of the program. Each has every third page for its own.
const THREADS: u64 = 3;
const CHUNKS: usize = 16;

/// A manager without control thread, evictor and keeper, and its one address space.
struct Bed {
    shared: Arc<Shared>,
    memory: Arc<ModelMemory>,
    process: Arc<Process>,
    threads: Vec<JoinHandle<()>>,
    /// Where a page is about to be dropped.
    drops: AtomicU64,
}

pub(crate) fn options(tier: &str) -> ClientOptions {
    ClientOptions {
        memory_max: Bytes(KEPT * BASE_PAGE_BYTES as u64),
        tiers: vec![tier.parse().expect("a tier")],
        reclaim: "active_inactive".parse().expect("a policy"),
        placement: "worth".parse().expect("a policy"),
        prefetch: "readahead".parse().expect("a policy"),
        when_full: WhenFull::Stay,
        quiet: true,
        trace: None,
        access_scan: AccessScan::Never,
        latency: None,
        latency_control: true,
        class: None,
        takeovers_max: 0,
        memory_price: None,
        rights: Rights::default(),
        name: None,
        compressors: None,
        page_size: undercroft_base::PageSize::Base,
        plugin: None,
    }
}

/// The tiers that the keeper opens and the manager inherits.
fn inherited(options: &ClientOptions) -> Vec<tiers::Inherited> {
    let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");
    let opened = undercroft_proto::tiers::open(options)
        .expect("tiers")
        .into_iter();
    let inherited = opened.map(|tier| {
        let memory = SharedMemory::from_fd(own(tier.memory())).expect("memory");
        let below = tier.below();
        let below = below.map(|(fd, name, bytes)| (own(fd), name, bytes));
        tiers::Inherited {
            memory,
            below,
            device: None,
            bell: None,
            profile: None,
        }
    });
    inherited.collect()
}

pub(crate) fn shared(options: ClientOptions) -> Arc<Shared> {
    let tiers = tiers::build(&options, inherited(&options), &PageKey::KNOWN).expect("tiers");
    shared_over(options, tiers)
}

fn shared_over(options: ClientOptions, tiers: Vec<MeteredTier>) -> Arc<Shared> {
    let latencies: Vec<_> = tiers.iter().map(MeteredTier::latency).collect();
    let config = Config::for_tiers(options.memory_max, Room::Ahead, &latencies);
    let memory = fresh(true).expect("memory");
    let legacy = Arc::new(Legacy::create(memory).expect("fresh memory"));
    let memory =
        SharedMemory::create("ledger", undercroft_engine::bytes_for(CHUNKS)).expect("memory");
    let ledger = ledger::create(memory, CHUNKS, &PageKey::KNOWN, legacy.clone()).expect("a ledger");
    let reclaim = options.reclaim.make();
    let prefetch = options.prefetch.make();
    let engine = Engine::new(ledger, reclaim, prefetch, config);
    let cpu_plan = CpuPlan::new(None, true);
    let fault_threads = cpu_plan.cpus.len();
    Arc::new(Shared {
        books: Books::new(engine, tiers, PageKey::KNOWN, legacy, None),
        processes: Processes::new(fault_threads),
        guest: None,
        locks: None,
        inside: Inside::default(),
        arrivals: Arrivals::default(),
        graves: Graves::default(),
        gauges: Gauges::new(None, Bytes(u64::MAX)),
        signals: Signals::new(fault_threads).expect("eventfds"),
        cpu_plan,
        options,
        started: Instant::now(),
    })
}

/// The program's threads are those of the test: the manager looks up where they run.
pub(crate) fn this_process() -> Identity {
    let pid = std::process::id();
    Identity {
        pid,
        is_below: false,
        pidfd: PidFd::open(pid).expect("a pidfd"),
        pagemap: Pagemap::open(pid).expect("a pagemap"),
        maps: Maps::open(pid).expect("maps"),
        tasks: Tasks::open(pid).expect("threads"),
    }
}

impl Bed {
    fn new(tier: &str) -> Bed {
        Bed::over(shared(options(tier)))
    }

    fn over(shared: Arc<Shared>) -> Bed {
        let range = VirtRange::new(FIRST, FIRST.plus(PAGES));
        let memory = Arc::new(ModelMemory::new(range));
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            engine.layout().attached(space, range);
            space
        };
        let beacon = VirtPage(1 << 20);
        let row = shared.books.row(space);
        let process = Process::new(space, memory.clone(), beacon, None, None, row);
        let process = Arc::new(process);
        let _ = process.identity.set(this_process());
        shared.add_process(&process);
        let start = |index| {
            let thread = FaultThread::new(shared.clone(), index).expect("a fault thread");
            std::thread::spawn(move || thread.run())
        };
        let threads = (0..shared.signals.fault_threads()).map(start).collect();
        Bed {
            shared,
            memory,
            process,
            threads,
            drops: AtomicU64::new(FIRST.0),
        }
    }

    /// Takes pages out until told to stop, as an evictor does, without the agent's protocol.
    fn evict(&self, over: &AtomicBool) {
        let mut batch = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let chosen = {
                let mut engine = self.shared.books.engine();
                let wanted = engine.books().reclaim_wanted();
                wanted && engine.evictions().select(EVICT_PAGES_MAX, &mut batch)
            };
            if chosen {
                self.evict_batch(&batch)
            } else {
                std::thread::sleep(Duration::from_micros(20))
            }
            let mut waiters = Vec::new();
            (self.shared.books.engine().faults()).take_waiters(&mut waiters);
            self.shared.processes.wake_pages(&mut waiters);
        }
    }

    fn evict_batch(&self, batch: &[EvictItem]) {
        let mut wake = Vec::new();
        let taken = self.take_out(batch, &mut wake);
        let contents: Vec<_> = taken.iter().map(|(_, content)| content.bytes()).collect();
        let mut stores: Vec<Store<'_>> = taken
            .iter()
            .zip(&contents)
            .map(|((item, _), page)| Store {
                page,
                stamp: item.stamp,
                checksum: PageKey::KNOWN.checksum(page, item.stamp),
                result: Err(StoreError::Full),
            })
            .collect();
        self.shared.books.tiers[0].tier.store(&mut stores);
        let stored = taken.iter().zip(&stores).map(|((item, _), store)| {
            let slot = store.result.expect("room in the tier");
            (item.at, Outcome::Stored(TierId(0), slot))
        });
        let stored: Vec<_> = stored.collect();
        let mut engine = self.shared.books.engine();
        engine.evictions().publish_all(&stored, &mut wake);
        drop(engine);
        self.shared.processes.wake_pages(&mut wake);
        self.shared.books.free_released();
    }

    /// The pages of the batch that could be taken; the others stay. No event is read meanwhile.
    fn take_out<'a>(
        &self,
        batch: &'a [EvictItem],
        wake: &mut Vec<(SpaceId, VirtPage)>,
    ) -> Vec<(&'a EvictItem, Content)> {
        let _layout = self.process.layout.read();
        let mut taken = Vec::new();
        for item in batch {
            let is_at = |item: &EvictItem| {
                let mut engine = self.shared.books.engine();
                engine.evictions().is_at(item.at, item.page)
            };
            match is_at(item).then(|| self.memory.move_out(item.page)) {
                Some(Ok(content)) => taken.push((item, content)),
                _ => {
                    let mut engine = self.shared.books.engine();
                    engine.evictions().settle(item.at, Taken::NotTried, wake);
                }
            }
        }
        taken
    }

    /// Pages for a RAM tier are compressible, and most of those for others.
    fn content(&self, number: u64) -> Content {
        if self.shared.books.tiers[0].is_memory() {
            Content::fill(number as u32)
        } else if (number >> 8).is_multiple_of(5) {
            Content::numbered(number)
        } else {
            Content::short(number)
        }
    }

    /// Keeps the calling thread on one CPU, so that fault threads of all CPUs are at work. Returns
    /// its number.
    fn stay_on_a_cpu(&self, thread: u64) -> u32 {
        let cpus = &self.shared.cpu_plan.cpus;
        let cpu = cpus[thread as usize % cpus.len()];
        process::set_affinity(0, &[cpu]).expect("a CPU of its own");
        process::thread_id()
    }

    /// Acts as a thread of the program on its pages, `steps` times; it knows what they hold.
    fn use_pages(&self, own: u64, steps: u64) {
        let tid = self.stay_on_a_cpu(own);
        let mut random = Random::new(own);
        let mut holds = vec![Content::ZERO; (PAGES / THREADS) as usize];
        let page = |at: usize| FIRST.plus(at as u64 * THREADS + own);
        for step in 0..steps {
            let at = random.index(holds.len());
            let expected = Touch::Done(holds[at]);
            match random.below(20) {
                0 => {
                    self.drops.store(page(at).0, Ordering::Relaxed);
                    self.memory.discard(VirtRange::one(page(at)));
                    holds[at] = Content::ZERO;
                }
                1..8 => {
                    let new = self.content(step << 8 | own);
                    let before = self.memory.touch(page(at), Some(new), tid);
                    assert_eq!(before, expected, "{:?}, step {step}", page(at));
                    holds[at] = new;
                }
                _ => {
                    let read = self.memory.touch(page(at), None, tid);
                    assert_eq!(read, expected, "{:?}, step {step}", page(at));
                }
            }
        }
        for (at, held) in holds.iter().enumerate() {
            let read = self.memory.touch(page(at), None, tid);
            assert_eq!(read, Touch::Done(*held), "{:?} in the end", page(at));
        }
    }

    /// Reads pages of all threads, mostly those that are being dropped.
    fn read_along(&self, goes_on: &AtomicBool) {
        let tid = self.stay_on_a_cpu(THREADS);
        let mut random = Random::new(THREADS);
        while goes_on.load(Ordering::Relaxed) {
            let page = if random.chance(1, 8) {
                FIRST.plus(random.below(PAGES))
            } else {
                VirtPage(self.drops.load(Ordering::Relaxed))
            };
            let read = self.memory.touch(page, None, tid);
            assert!(matches!(read, Touch::Done(_)), "{read:?}");
        }
    }

    /// Runs the program to its end. Returns how many pages came in from the tier.
    fn run(mut self, steps: u64) -> u64 {
        let (reads, over) = (AtomicBool::new(true), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| self.evict(&over));
            let reader = scope.spawn(|| self.read_along(&reads));
            let this = &self;
            let threads = (0..THREADS).map(|own| scope.spawn(move || this.use_pages(own, steps)));
            let threads: Vec<_> = threads.collect();
            let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            reads.store(false, Ordering::Relaxed);
            let read = reader.join(); // it may wait for room
            over.store(true, Ordering::Relaxed);
            read.expect("right pages");
            ends.into_iter().for_each(|end| end.expect("right pages"));
        });
        assert_eq!(self.shared.signals.doomed(), None);
        self.stop();
        let engine = self.shared.books.engine();
        engine.books().stats().pages_swapped_in
    }

    fn stop(&mut self) {
        self.shared.signals.stop();
        for thread in self.threads.drain(..) {
            thread.join().expect("a fault thread that ends");
        }
    }
}

#[test]
fn each_page_reads_as_it_was_written_from_memory() {
    let came = Bed::new("ram").run(20_000);
    assert!(came > 10_000, "{came} pages came back");
}

#[test]
fn each_page_reads_as_it_was_written_from_a_file() {
    for compress in ["no", "yes"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("spill");
        let spec = format!("file:{},size=16M,compress={compress}", path.display());
        let bed = Bed::new(&spec);
        let shared = bed.shared.clone();
        let came = bed.run(10_000);
        assert!(came > 5_000, "{came} pages came back");
        let tier = &shared.books.tiers[0];
        assert_eq!(
            tier.errors.load(Ordering::Relaxed),
            0,
            "a page was read twice"
        );
    }
}

/// A page to fetch.
type Wanted = (Slot, Stamp, u64, Arc<dyn Inbox>);

/// A tier that is elsewhere: copies come later, in another order, and some of them too late.
struct Elsewhere {
    tier: Arc<FakeTier>,
    to: Mutex<Sender<Wanted>>,
}

impl Elsewhere {
    fn new() -> Elsewhere {
        let tier = FakeTier::new("elsewhere", &CLUSTER, Bytes(16 << 20), 1);
        let (tier, (to, from)) = (Arc::new(tier), channel());
        let of = tier.clone();
        std::thread::spawn(move || Elsewhere::answer(&of, &from));
        let to = Mutex::new(to);
        Elsewhere { tier, to }
    }

    fn answer(tier: &FakeTier, from: &Receiver<Wanted>) {
        let (mut random, mut waiting) = (Random::new(3), Vec::new());
        while let Ok(first) = from.recv() {
            waiting.push(first);
            std::thread::sleep(Duration::from_micros(random.below(200)));
            waiting.extend(from.try_iter());
            while !waiting.is_empty() {
                let at = random.index(waiting.len());
                let (slot, stamp, token, inbox) = waiting.swap_remove(at);
                if random.chance(1, 10) {
                    let page = Err(LoadError::Late);
                    inbox.deliver(Fetched { token, page });
                } else {
                    tier.fetch(slot, stamp, token, &inbox);
                }
            }
        }
    }
}

impl Tier for Elsewhere {
    fn info(&self) -> &TierInfo {
        self.tier.info()
    }

    fn usage(&self) -> TierUsage {
        self.tier.usage()
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        self.tier.store(batch);
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        self.tier.load(slot, stamp, dst)
    }

    fn fetch(&self, slot: Slot, stamp: Stamp, token: u64, inbox: &Arc<dyn Inbox>) {
        let to = self.to.lock().expect("no thread panicked");
        let sent = to.send((slot, stamp, token, inbox.clone()));
        sent.expect("the thread lives as long as the tier");
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        self.tier.checksum(slot, stamp)
    }

    fn free(&self, slots: &[Slot]) {
        self.tier.free(slots);
    }
}

#[test]
fn each_page_reads_as_it_was_written_from_another_machine() {
    let tiers = vec![MeteredTier::new(Box::new(Elsewhere::new()), None)];
    let bed = Bed::over(shared_over(options("ram"), tiers));
    let came = bed.run(5_000);
    assert!(came > 2_500, "{came} pages came back");
}

/// A thread waits for its page, and another for the same page, which is on its way by then.
#[test]
fn a_thread_whose_page_another_one_loads_waits_too() {
    let tier = FakeTier::new("elsewhere", &CLUSTER, Bytes(16 << 20), 1);
    let (tier, (to, from)) = (Arc::new(tier), channel());
    let elsewhere = Elsewhere {
        tier: tier.clone(),
        to: Mutex::new(to),
    };
    let tiers = vec![MeteredTier::new(Box::new(elsewhere), None)];
    let mut bed = Bed::over(shared_over(options("ram"), tiers));
    let content = Content::numbered(1 << 8);
    for page in 0..KEPT / 2 {
        // The first is no longer among the newest.
        (bed.memory).touch(FIRST.plus(page), Some(content), process::thread_id());
    }
    let mut batch = Vec::new();
    let one = [VirtRange::one(FIRST)];
    let mut engine = bed.shared.books.engine();
    let chosen = (engine.evictions()).select_these(bed.process.space, &one, &mut batch);
    drop(engine);
    assert!(chosen);
    bed.evict_batch(&batch);
    let before = lock(&bed.shared.gauges.fault_latency).waited();
    let held = Duration::from_millis(50);
    std::thread::scope(|scope| {
        let touch = || bed.memory.touch(FIRST, None, process::thread_id());
        let first = scope.spawn(touch);
        let (slot, stamp, token, inbox) = from.recv().expect("the page is asked for");
        let second = scope.spawn(touch);
        let repeated = || bed.shared.books.engine().books().stats().repeated;
        while repeated() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(held);
        tier.fetch(slot, stamp, token, &inbox);
        for thread in [first, second] {
            assert_eq!(thread.join().expect("a page"), Touch::Done(content));
        }
    });
    bed.stop();
    let of = lock(&bed.shared.gauges.fault_latency);
    let waited = of.waited().since(before).seconds();
    assert!(waited >= 2.0 * held.as_secs_f64(), "{waited} s");
    assert!(of.some_waited() < of.waited(), "they waited at once");
}

#[test]
fn a_page_whose_bytes_are_lost_is_poisoned() {
    let mut bed = Bed::new("ram");
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let content = Content::fill(1);
    for page in 0..KEPT / 2 {
        // The first is no longer among the newest.
        bed.memory.touch(FIRST.plus(page), Some(content), tid);
    }
    {
        let mut engine = bed.shared.books.engine();
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        let one = [VirtRange::one(FIRST)];
        assert!(
            engine
                .evictions()
                .select_these(bed.process.space, &one, &mut batch)
        );
        assert_eq!(bed.memory.move_out(FIRST), Ok(content));
        engine
            .evictions()
            .publish(batch[0].at, Outcome::Lost, &mut wake);
    }
    // The kernel has no memory for a moment: not to give the message, and not to poison the page.
    bed.memory.short_reads.store(3, Ordering::Relaxed);
    bed.memory.short_poisons.store(2, Ordering::Relaxed);
    assert_eq!(bed.memory.touch(FIRST, None, tid), Touch::Poisoned);
    assert_eq!(bed.shared.signals.doomed(), None);
    let counted = bed.shared.gauges.shortages.memory.load(Ordering::Relaxed);
    assert_eq!(counted, 5);
    bed.stop();
}

/// A page that vanishes without an event reads as zeros if it has not left since it came. If it was
/// out and is back, its bytes may be lost: it is poisoned.
#[test]
fn a_page_that_vanishes_is_zeros_or_poisoned() {
    let mut bed = Bed::new("ram");
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let content = Content::fill(1);
    for page in 0..KEPT / 2 {
        bed.memory.touch(FIRST.plus(page), Some(content), tid);
    }
    let (fresh, back) = (FIRST, FIRST.plus(1));
    {
        let mut engine = bed.shared.books.engine();
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        let one = [VirtRange::one(back)];
        let mut evictions = engine.evictions();
        assert!(evictions.select_these(bed.process.space, &one, &mut batch));
        evictions.settle(batch[0].at, Taken::Moved, &mut wake);
        evictions.publish(batch[0].at, Outcome::PutBack, &mut wake);
    }
    for page in [fresh, back] {
        assert_eq!(bed.memory.move_out(page), Ok(content));
    }
    let zeros = Touch::Done(Content::ZERO);
    assert_eq!(bed.memory.touch(fresh, None, tid), zeros);
    assert_eq!(bed.memory.touch(back, None, tid), Touch::Poisoned);
    let engine = bed.shared.books.engine();
    let stats = engine.books().stats();
    assert_eq!((stats.vanished, stats.lost), (1, 1));
    drop(engine);
    bed.stop();
}

/// A page whose place another mapping took while no fault thread runs: a thread that waits for it
/// gets its bytes, from memory or a device. One that was dropped without an event reads as zeros.
#[test]
fn a_thread_gets_its_page_without_fault_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = format!("file:{},size=16M", folder.path().join("spill").display());
    let packed = format!(
        "file:{},size=16M,compress=yes",
        folder.path().join("packed").display()
    );
    for tier in ["ram", &file, &packed] {
        let mut bed = Bed::new(tier);
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        let (stored, dropped) = (FIRST, FIRST.plus(1));
        for page in 0..KEPT / 2 {
            bed.memory
                .touch(FIRST.plus(page), Some(bed.content((page + 1) << 8)), tid);
        }
        bed.stop();
        let mut batch = Vec::new();
        let one = [VirtRange::one(stored)];
        let mut engine = bed.shared.books.engine();
        let chosen = (engine.evictions()).select_these(bed.process.space, &one, &mut batch);
        drop(engine);
        assert!(chosen);
        bed.evict_batch(&batch);
        assert!(bed.memory.move_out(dropped).is_ok());
        for (page, content) in [(stored, bed.content(1 << 8)), (dropped, Content::ZERO)] {
            assert_eq!(bed.memory.peek(page), None);
            let _layout = bed.process.layout.write();
            super::relief::give(&bed.shared, &bed.process, page);
            assert_eq!(bed.memory.peek(page), Some(content), "{page:?} on {tier}");
        }
    }
}
