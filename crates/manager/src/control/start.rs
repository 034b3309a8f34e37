//! Starts a manager: rights, holder, engine, tiers, threads. Then the control thread serves.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use undercroft_base::{Bytes, Cpus, PageCount, PageKey, PageSize, TierId};
use undercroft_engine::{Config, Engine, InHand, LedgerError, Room};
use undercroft_policy::prefetch::first_touch::FirstTouches;
use undercroft_proto::kept::Kept;
use undercroft_proto::legacy::Legacy;
use undercroft_proto::messages::{Launch, Notice, tell};
use undercroft_proto::options::{AccessScan, Rights};
use undercroft_sys::access::{AccessError, AccessScanner};
use undercroft_sys::inherit;
use undercroft_sys::interrupts;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::MemoryObject;
use undercroft_sys::page_locks::PageLocks;
use undercroft_sys::probe::{State, Swaps};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::restrict;
use undercroft_sys::ring;
use undercroft_sys::title;
use undercroft_sys::uffd::{Features, UffdError};
use undercroft_sys::uffd_source::UffdSource;
use undercroft_tier::measure::RUN_PAGES;
use undercroft_tier::open::OpenError;

use super::Control;
use super::beside::Presence;
use super::bound::Bounds;
use super::check::{Checks, Sizes};
use super::doors::Doors;
use super::ending::{self, Mark};
use super::guest::GuestWatch;
use super::handshake::Greetings;
use super::parting::Parting;
use super::policy::{self, Policies};
use super::swap::SwapWatch;
use super::takeover::{Inheritance, TakeoverError};
use super::tell::{Since, pause_again};
use crate::advice::{Advice, PLUGIN_THREAD};
use crate::books::curve::Follower;
use crate::books::ledger::MemfdLedger;
use crate::books::metered::MeteredTier;
use crate::books::{Books, ledger, tiers};
use crate::cpus::{CpuPlan, FAULT_THREAD, fault_cpus};
use crate::evict::Evictor;
use crate::evict::advised::{self, ReadPlugin};
use crate::fault::{FaultThread, RING_ENTRIES};
use crate::gauges::Gauges;
use crate::migrate::{Migrator, READS_AT_ONCE};
use crate::record::{Record, RecordError};
use crate::signals::Signals;
use crate::space::access::Accesses;
use crate::space::arrivals::Arrivals;
use crate::space::graves::Graves;
use crate::space::locks::Locks;
use crate::space::processes::Processes;
use crate::space::shared::{Inside, Shared};
use crate::space::watch::{self, Watch};

/// Serves one client until the keeper says that it has ended. The body of `undercroft manager`.
///
/// * `read`: makes a plugin of a policy file.
///
/// Errors: set-up failed; nothing was registered yet.
pub fn serve(launch: Launch, read: ReadPlugin) -> io::Result<()> {
    // A panic of any thread but the plugin's ends the manager. The keeper then ends the program, so
    // that it never runs on without a part of its manager.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        if std::thread::current().name() != Some(PLUGIN_THREAD) {
            std::process::abort();
        }
    }));
    // It was started by a descriptor, which gives it the number as a name.
    let _ = rustix::thread::set_name(c"undercroft");
    inherit::leave_streams()?; // the description, which the process has read
    let link = process::take_inherited(launch.link)?;
    if let Err(error) = serve_over(launch, link.try_clone()?, read) {
        // The keeper tells the user.
        tell(&link, &Notice::Failed(error.to_string()))?;
    }
    Ok(())
}

/// Why a manager cannot serve. Nothing is registered then. The text has the fix.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(
        "there is no /dev/userfaultfd, and the system call userfaultfd is refused. In a container add the device \
         (--device /dev/userfaultfd), or CAP_SYS_PTRACE (--cap-add SYS_PTRACE); the kernel has it since Linux 6.1, if \
         it was built with CONFIG_USERFAULTFD"
    )]
    NoDevice,
    #[error(
        "/dev/userfaultfd: {0}, and the system call userfaultfd is refused: run as root, or give this user the device \
         or CAP_SYS_PTRACE"
    )]
    Device(io::Error),
    #[error(
        "userfaultfd fork events: {0}; without them a fork child would read zeros. Run as root, but not that of a user \
         namespace, or with CAP_SYS_PTRACE (setpriv --ambient-caps; --cap-add SYS_PTRACE in a container)"
    )]
    NoForkEvents(UffdError),
    #[error("this kernel cannot move pages out of a program; Linux 6.8 or newer is needed")]
    NoMoves,
    #[error("{detail}; {fix}")]
    SwapIsOn { detail: String, fix: String },
    #[error("--access-scan: {0}; or leave the option out: policies then learn from faults alone")]
    NoAccessBits(AccessError),
    #[error("the class's cpus = \"{0}\": {1}; name CPUs that this run may use")]
    Cpus(Cpus, io::Error),
    #[error(transparent)]
    Tier(#[from] OpenError),
    #[error("--latency: {0}")]
    Bound(#[from] undercroft_qos::Refused),
    #[error(transparent)]
    Trace(#[from] RecordError),
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A system call of the set-up.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Checks that this process may make userfaultfds that see all faults and events, that pages can be
/// moved out, and that no swap is on that would lose them.
fn check_permissions(launch: &Launch) -> Result<(UffdSource, SwapWatch), StartError> {
    let device = UffdSource::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => StartError::NoDevice,
        _ => StartError::Device(error),
    })?;
    let features = Features::EVENTS.with(Features::THREAD_ID);
    let has = device
        .create()?
        .api(features)
        .map_err(StartError::NoForkEvents)?;
    if !has.has(Features::MOVE) {
        return Err(StartError::NoMoves);
    }
    let swaps = (launch.swaps.as_deref()).map_or_else(Swaps::open, |file| Swaps::of(file, "6.15"));
    Ok((device, watch_swap(launch.predecessor.is_some(), swaps)?))
}

/// Watches the kernel's swap. A run does not start beside swap that would lose its pages. A
/// successor has to: it takes none out while such swap is on.
fn watch_swap(successor: bool, swaps: Swaps) -> Result<SwapWatch, StartError> {
    let found = swaps.check();
    if found.state == State::Missing && !successor {
        return Err(StartError::SwapIsOn {
            detail: found.detail,
            fix: found.fix,
        });
    }
    Ok(SwapWatch::new(swaps))
}

/// The name that the holder has in place of its arguments, before the number of its run.
const HOLDER_TITLE: &str = "undercroft: holder of ";

/// Makes the rings that this manager may ever want: it gives up the right to make one. Two are for
/// later, if they are wanted: to move pages between tiers, and to measure a tier that is added.
fn reserve_rings() -> io::Result<()> {
    const { assert!(READS_AT_ONCE <= RUN_PAGES) };
    ring::reserve(2, RUN_PAGES as u32)?;
    ring::reserve(fault_cpus().len(), RING_ENTRIES as u32)
}

/// Starts the holder, which keeps our descriptors open after our death.
///
/// * `run`: the process id of the keeper.
fn start_holder(run: u32, keeper: &PidFd, handover: OwnedFd, mark: &Mark) -> io::Result<u32> {
    let this = PidFd::open(std::process::id())?;
    let holder = process::spawn_fd_holder(|| {
        let _ = title::set(&format!("{HOLDER_TITLE}{run}"));
        ending::hold(&this, keeper, &handover, mark);
    })?;
    // The holder shares the table: the descriptors stay open for it.
    std::mem::forget((this, handover));
    Ok(holder)
}

/// The memory that the manager inherits: of ledger, legacy, tiers, guest and policy file.
struct Memories {
    ledger: MemfdLedger,
    legacy: Arc<Legacy>,
    tiers: Vec<tiers::Inherited>,
    guest: Option<Arc<MemoryObject>>,
    /// The locks of its pages.
    locks: Option<Arc<Locks>>,
    /// The policy file that users have set.
    kept: Option<Kept>,
}

impl Memories {
    fn take(launch: &Launch) -> Result<Memories, StartError> {
        let ledger = SharedMemory::from_fd(process::take_inherited(launch.ledger)?)?;
        let legacy = SharedMemory::from_fd(process::take_inherited(launch.legacy)?)?;
        let legacy = match launch.predecessor {
            None => Legacy::create(legacy),
            Some(_) => Legacy::open(legacy),
        };
        let legacy = Arc::new(legacy.map_err(TakeoverError::from)?);
        let ledger = match launch.predecessor {
            None => {
                let key = PageKey::new(process::random_bytes()?);
                ledger::create(ledger, launch.ledger_chunks, &key, legacy.clone())?
            }
            Some(_) => ledger::open(ledger, legacy.clone())?,
        };
        let mut tiers = Vec::new();
        for tier in &launch.tiers {
            let memory = SharedMemory::from_fd(process::take_inherited(tier.memory)?)?;
            let backing = match &tier.backing {
                Some((fd, name, bytes)) => {
                    Some((process::take_inherited(*fd)?, name.clone(), Bytes(*bytes)))
                }
                None => None,
            };
            let device = tier.device.map(process::take_inherited).transpose()?;
            let bell = tier.bell.map(process::take_inherited).transpose()?;
            tiers.push(tiers::Inherited {
                memory,
                below: backing,
                device,
                bell,
                profile: tier.profile.clone(),
            });
        }
        let kept = launch.policy.map(process::take_inherited).transpose()?;
        let kept = kept.map(|memfd| Kept::over(SharedMemory::from_fd(memfd)?));
        let guest = launch.guest.map(process::take_inherited).transpose()?;
        let guest = guest
            .map(|memfd| MemoryObject::of(memfd.as_fd()))
            .transpose()?;
        let locks = match (&guest, launch.locks) {
            (Some(guest), Some(locks)) => {
                let memfd = process::take_inherited(locks.memfd)?;
                let memory = PageLocks::of(memfd.as_fd(), guest.whole().count())?;
                Some(Arc::new(Locks::new(memory, PageCount(locks.each_max))))
            }
            _ => None,
        };
        Ok(Memories {
            ledger,
            legacy,
            tiers,
            guest: guest.map(Arc::new),
            locks,
            kept: kept.transpose()?,
        })
    }
}

/// How often pages are looked at, if the user wants that, and by what. A guest needs no scanner.
type Scans = (Option<AccessScanner>, Duration);

/// The scanner that reads Accessed bits all the time, if the user wants that.
fn scanner(launch: &Launch) -> Result<Option<Scans>, StartError> {
    match launch.options.access_scan {
        AccessScan::Every(interval) => match AccessScanner::open() {
            Ok(scanner) => Ok(Some((Some(scanner), interval))),
            Err(why) if launch.guest.is_some() => {
                crate::log::warn(&format!(
                    "the uses of the machine's memory are looked at, those of the monitor's own \
                     are not: {why}"
                ));
                Ok(Some((None, interval)))
            }
            Err(why) => Err(StartError::NoAccessBits(why)),
        },
        AccessScan::Auto | AccessScan::Never => Ok(None),
    }
}

/// Takes what the kernel and the user allow this process: descriptors, and CPUs. Before any thread
/// starts, as each has the CPUs of the one that starts it.
fn take_rights(rights: &Rights) -> Result<(), StartError> {
    process::raise_open_files_limit();
    process::spare_from_oom();
    match &rights.cpus {
        Some(cpus) => process::set_affinity(0, cpus.numbers())
            .map_err(|error| StartError::Cpus(cpus.clone(), error)),
        None => Ok(()),
    }
}

fn serve_over(mut launch: Launch, link: OwnedFd, read: ReadPlugin) -> Result<(), StartError> {
    take_rights(&launch.options.rights)?;
    let (device, mut swap) = check_permissions(&launch)?;
    let keeper = PidFd::open(launch.keeper)?;
    let mark = Mark::new(&launch.shim.0, &launch.shim.1).with(launch.legacy);
    let handover = process::take_inherited(launch.handover)?;
    let holder = start_holder(launch.keeper, &keeper, handover, &mark)?;
    // At once: if this process dies later, the keeper asks the holder.
    tell(&link, &Notice::Holder(holder))?;
    reserve_rings()?;
    // Before any thread starts, and before any message of a client is read.
    restrict::give_up_rights(tiers::network(&launch.options))?;
    let mut memories = Memories::take(&launch)?;
    let kept = memories.kept.take();
    if let Some(set) = kept.as_ref().and_then(Kept::read) {
        launch.options.plugin = set;
    }
    let scanner = scanner(&launch)?;
    let (shared, inheritance) = share(&launch, memories, &mut swap)?;
    let _ = process::lock_all_memory();
    let watch = watch::new();
    let mut settled = inheritance.map(|of| of.settle(&shared)).transpose()?;
    let in_hand = settled.as_mut().map(|of| std::mem::take(&mut of.in_hand));
    let mut threads = start_threads(&shared, &watch, scanner, in_hand)?;
    if let (Some(advice), Some(plugin)) = (shared.books.advice(), shared.options.plugin.clone()) {
        // On its thread, not here: a successor is waited for.
        let begin = move || policy::begun(&plugin, read);
        threads.push(advised::start(&shared, &advice, begin)?);
    }
    let now = Instant::now();
    let mut control = Control {
        doors: Doors {
            link,
            listener: process::take_inherited(launch.listener)?,
            status: process::take_inherited(launch.status)?,
            keeper,
            holder: (holder, PidFd::open(holder)?),
            ends: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?,
        },
        greetings: Greetings::new(device),
        watch,
        sizes: Sizes::default(),
        managing: false,
        checks: Checks::new(now),
        parting: Parting::default(),
        presence: Presence::new(now),
        migrates: Migrator::begins(&shared),
        bounds: Bounds::default(),
        guest: GuestWatch::new(&shared)?,
        swap,
        policies: Policies::new(read, kept),
        since: Since::new(now),
        shared,
        launch,
        mark,
    };
    control.begin_bounds(settled.is_some())?;
    if let Some(settled) = settled {
        control.go_on(settled);
        control.obey_again();
    }
    control.notify(&Notice::Ready)?;
    control.run_to_the_end();
    control.shared.signals.stop();
    close_remote(&control.shared);
    // The client has ended or was killed. The threads end with the process.
    drop(threads);
    control.let_holder_go();
    Ok(())
}

/// Gives back what the run has in clusters. The kernel gives back the rest, and threads may be at
/// work there yet.
fn close_remote(shared: &Shared) {
    let tiers = shared.books.tiers.iter().map(|of| &of.tier);
    let remote = tiers.filter(|tier| tier.info().facts.remote);
    remote.for_each(|tier| tier.close());
}

/// Starts every thread but the control thread.
fn start_threads(
    shared: &Arc<Shared>,
    watch: &Watch,
    scanner: Option<Scans>,
    in_hand: Option<Vec<InHand>>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    for index in 0..shared.signals.fault_threads() {
        let worker = FaultThread::new(shared.clone(), index)?;
        let thread = Builder::new().name(format!("{FAULT_THREAD}-{index}"));
        threads.push(thread.spawn(move || worker.run())?);
    }
    let mut evictor = Evictor::new(shared.clone())?;
    let thread = Builder::new().name("uc-evict".into());
    threads.push(thread.spawn(move || {
        if let Some(pages) = in_hand {
            evictor.adopt(&pages);
        }
        evictor.run();
    })?);
    if Migrator::begins(shared) {
        threads.push(Migrator::start(shared)?);
    }
    for (index, share) in watch::shares(watch)?.into_iter().enumerate() {
        let of = shared.clone();
        let thread = Builder::new().name(format!("uc-layout-{index}"));
        threads.push(thread.spawn(move || watch::run(&of, &share))?);
    }
    let of = shared.clone();
    let thread = Builder::new().name("uc-arrivals".into());
    threads.push(thread.spawn(move || watch::attend(&of))?);
    if let Some((scanner, interval)) = scanner {
        let of = shared.clone();
        let thread = Builder::new().name("uc-access".into());
        threads.push(thread.spawn(move || Accesses::every(of, scanner, interval))?);
    }
    Ok(threads)
}

/// The engine that a dead manager left, and its tiers. Slots that nothing refers to are free again.
fn recover(
    launch: &Launch,
    memories: Memories,
) -> Result<(Engine<MemfdLedger>, Vec<MeteredTier>, Inheritance), StartError> {
    let (options, legacy) = (&launch.options, memories.legacy);
    let ledger = memories.ledger;
    let holder = process::take_inherited(launch.predecessor.unwrap_or(-1))?;
    let inheritance = Inheritance::of(&legacy, &holder)?;
    let (tiers, slots) = tiers::recover(options, memories.tiers, &ledger.key())?;
    let latencies: Vec<_> = tiers.iter().map(MeteredTier::latency).collect();
    let config = Config::for_tiers(options.memory_max, Room::Ahead, &latencies);
    let prefetch = FirstTouches::beside(&options.prefetch);
    let reclaim = options.reclaim.make();
    let sizes = inheritance.spaces(options.page_size);
    let (mut engine, claims) = Engine::recover(ledger, reclaim, prefetch, config, &sizes)?;
    for (space, regions) in inheritance.regions() {
        engine.restore_regions(space, regions);
    }
    // The dead manager died between storing and publishing, or before it freed them.
    for (at, slots) in slots.iter().enumerate() {
        for unclaimed in slots.without(claims.of(TierId(at as u8))) {
            tiers[at].tier.free(&[unclaimed]);
        }
    }
    Ok((engine, tiers, inheritance))
}

/// A new engine over an empty ledger, and empty tiers.
fn begin(
    launch: &Launch,
    memories: Memories,
) -> Result<(Engine<MemfdLedger>, Vec<MeteredTier>), StartError> {
    let options = &launch.options;
    let tiers = tiers::build(options, memories.tiers, &memories.ledger.key())?;
    let latencies: Vec<_> = tiers.iter().map(MeteredTier::latency).collect();
    let config = Config::for_tiers(options.memory_max, Room::Ahead, &latencies);
    let prefetch = FirstTouches::beside(&options.prefetch);
    let mut engine = Engine::new(memories.ledger, options.reclaim.make(), prefetch, config);
    if let Some(first) = launch.first_space {
        engine.number_spaces(first, u32::MAX);
    }
    Ok((engine, tiers))
}

/// Builds the state that the threads share.
fn share(
    launch: &Launch,
    memories: Memories,
    swap: &mut SwapWatch,
) -> Result<(Arc<Shared>, Option<Inheritance>), StartError> {
    let options = &launch.options;
    let files = memories.tiers.iter();
    let disk_cpu = files
        .filter_map(|tier| tier.below.as_ref())
        .filter_map(|(file, _, _)| interrupts::completion_cpu(file))
        .next();
    let record = record(launch)?;
    let cpu_plan = CpuPlan::new(disk_cpu, options.rights.realtime);
    let fault_threads = cpu_plan.cpus.len();
    let (legacy, key) = (memories.legacy.clone(), memories.ledger.key());
    let (guest, locks) = (memories.guest.clone(), memories.locks.clone());
    let (mut engine, tiers, inheritance) = match launch.predecessor {
        None => {
            let (engine, tiers) = begin(launch, memories)?;
            (engine, tiers, None)
        }
        Some(_) => {
            let (engine, tiers, inheritance) = recover(launch, memories)?;
            (engine, tiers, Some(inheritance))
        }
    };
    engine.set_place(options.placement.make());
    let mut books = Books::new(engine, tiers, key, legacy, record);
    let limit = undercroft_proto::report::limit(options.memory_max.0);
    // The curve knows base pages alone.
    if let Some(limit) = limit.filter(|_| options.page_size == PageSize::Base) {
        let pages = Bytes(limit).pages_floor();
        books = books.with_curve(Follower::new(&options.reclaim, &options.placement, pages));
    }
    if let Some(plugin) = &options.plugin {
        books.advise(Some(Arc::new(Advice::new(&plugin.file))));
    }
    let shared = Arc::new(Shared {
        books,
        processes: Processes::new(fault_threads),
        guest,
        locks,
        inside: Inside::default(),
        arrivals: Arrivals::default(),
        graves: Graves::default(),
        gauges: Gauges::new(options.latency, options.memory_max),
        signals: Signals::new(fault_threads)?,
        cpu_plan,
        options: options.clone(),
        started: Instant::now(),
    });
    if shared.books.source().is_some() {
        shared.cpu_plan.serve_everywhere();
    }
    if inheritance.is_some() {
        pause_again(&shared);
    }
    swap.pause_first(&shared);
    Ok((shared, inheritance))
}

/// Opens the trace of `--trace`, if the user wants one.
fn record(launch: &Launch) -> Result<Option<Record>, StartError> {
    let options = &launch.options;
    let Some(path) = &options.trace else {
        return Ok(None);
    };
    let mut settings = format!(
        "--memory-max {} --policy {} --prefetch {} --placement {}",
        options.memory_max.0, options.reclaim, options.prefetch, options.placement
    );
    match tiers::write_behind(options) {
        Bytes(0) => {}
        Bytes(waiting) => settings.push_str(&format!(" --write-behind {waiting}")),
    }
    match options.access_scan {
        AccessScan::Auto => settings.push_str(" --access-scan auto"),
        AccessScan::Every(interval) => {
            settings.push_str(&format!(" --access-scan {interval:?}"));
        }
        AccessScan::Never => {}
    }
    let accesses = options.access_scan != AccessScan::Never;
    let record = Record::create(path, &launch.command.words, &settings, accesses)?;
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::swap::Change;

    #[test]
    fn a_run_does_not_start_beside_unsafe_swap_and_a_successor_goes_on() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let on = "Filename Type Size Used Priority\n/swap file 1 0 -2\n";
        std::fs::write(file.path(), on).expect("written");
        let swaps = |release| Swaps::of(file.path(), release);
        let refused = watch_swap(false, swaps("6.12.3"));
        assert!(matches!(refused, Err(StartError::SwapIsOn { .. })));
        let mut watch = watch_swap(true, swaps("6.12.3")).expect("it goes on");
        let found = watch.look(true, Instant::now());
        assert!(
            matches!(found, Some(Change::On(_))),
            "before any page leaves"
        );
        let mut watch = watch_swap(false, swaps("6.18.0")).expect("it starts");
        assert!(watch.look(true, Instant::now()).is_none());
    }
}
