//! The manager process: sets everything up, then is its control thread: handshakes, exits, pressure, discovery, status.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, SpaceId};
use undercroft_engine::{Config, Engine, Room, Stats};
use undercroft_sys::interrupts;
use undercroft_sys::mapping::{PageBuf, SharedMemory};
use undercroft_sys::probe::{self, State};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::Statm;
use undercroft_sys::restrict;
use undercroft_sys::uffd::{Features, UffdDevice};

use self::ending::Mark;
use self::handshake::Greetings;
use crate::books::tiers;
use crate::books::tiers::TierLaunch;
use crate::evict::Evictor;
use crate::fault::FaultThread;
use crate::log;
use crate::options::{AccessScan, ClientOptions};
use crate::placement::Placement;
use crate::record::Record;
use crate::report::Report;
use crate::scale::{Holds, Shortages};
use crate::shared::{Breakdown, EvictionCost, Exceeded, MeteredTier, Shared, lock, new_histogram};
use crate::space::access::{Accesses, Looks};
use crate::space::parts;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::watch::{self, Watch};

mod beside;
pub(crate) mod ending;
mod handshake;
mod looks;
mod tell;

use beside::Presence;

/// Exits noted at once.
const ENDS_MAX: usize = 64;

/// Everything the keeper gives its manager: options, and numbers of inherited descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The client's options.
    pub options: ClientOptions,
    /// Program and arguments, for status.
    pub command: Vec<String>,
    /// Process id of the keeper.
    pub keeper: u32,
    /// The shim, without links in its path, and the path of its socket: they mark the program's
    /// processes.
    pub shim: (PathBuf, PathBuf),
    /// Listening socket of the shims.
    pub listener: i32,
    /// Stream to the keeper.
    pub link: i32,
    /// Listening socket for status.
    pub status: i32,
    /// Ledger memfd, and the chunks it is laid out for.
    pub ledger: i32,
    /// Chunks of the ledger.
    pub ledger_chunks: usize,
    /// What each tier keeps its pages in, in order.
    pub tiers: Vec<TierLaunch>,
}

/// What the keeper asks.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The client has ended: report and exit.
    Finish {
        /// What the run exits with.
        exit_status: i32,
        /// Start to end.
        wall_ns: u64,
    },
    /// The keeper stops, because this program has: it is to be woken when the program goes on.
    Paused {
        /// Process id of the program.
        program: u32,
    },
}

/// What the manager says to its keeper, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Notice {
    /// Ready for clients.
    Ready {
        /// Process id of the holder.
        holder: u32,
    },
    /// It cannot serve, and why.
    Failed(String),
    /// The client was ended, and why.
    Doomed(String),
    /// The answer to `Finish`.
    Report(Box<Report>),
}

/// Serves one client until the keeper says that it has ended; the body of `undercroft manager`.
///
/// Errors: set-up failed; nothing was registered yet.
pub fn serve(launch: Launch) -> io::Result<()> {
    // A thread that fails takes the manager with it: the keeper then ends the program, and nothing runs on half served.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
    let link = process::take_inherited(launch.link)?;
    if let Err(error) = serve_over(launch, link.try_clone()?) {
        // The keeper tells the user.
        tell(&link, &Notice::Failed(error.to_string()))?;
    }
    Ok(())
}

/// Whether userfaultfds that see everything may be made here; the error names the fix.
fn check_permissions() -> io::Result<()> {
    let device = UffdDevice::open().map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "the kernel has no /dev/userfaultfd (Linux 6.1 or newer is needed)".to_owned(),
            _ => format!("/dev/userfaultfd: {error}; no permission: run as root, or give this user read and write on it"),
        };
        io::Error::new(error.kind(), why)
    })?;
    device.create()?.api(Features::EVENTS.with(Features::THREAD_ID)).map_err(|error| {
        io::Error::other(format!(
            "userfaultfd fork events: {error}; without them a fork child would read zeros. Run as root or with CAP_SYS_PTRACE"
        ))
    })?;
    let swap = probe::swap_now();
    match swap.state {
        State::Missing => Err(io::Error::other(format!("{}; {}", swap.detail, swap.fix))),
        _ => Ok(()),
    }
}

/// Writes one notice to the keeper.
fn tell(link: &OwnedFd, notice: &Notice) -> io::Result<()> {
    let mut line = serde_json::to_vec(notice)?;
    line.push(b'\n');
    let mut rest = &line[..];
    while !rest.is_empty() {
        let sent = rustix::io::write(link, rest)?;
        rest = &rest[sent..];
    }
    Ok(())
}

/// Starts the process that holds our descriptors open when we are dead.
fn start_holder(keeper: &PidFd, mark: &Mark) -> io::Result<u32> {
    let this = PidFd::open(std::process::id())?;
    let holder = process::spawn_fd_holder(|| ending::hold(&this, keeper, mark))?;
    std::mem::forget(this); // the holder has the same table: it stays open for it
    Ok(holder)
}

fn serve_over(launch: Launch, link: OwnedFd) -> io::Result<()> {
    process::raise_open_files_limit();
    process::spare_from_oom();
    check_permissions()?;
    let keeper = PidFd::open(launch.keeper)?;
    let mark = Mark::new(&launch.shim.0, &launch.shim.1);
    let holder = start_holder(&keeper, &mark)?;
    // Before any thread, and before anything that a client says is read.
    restrict::give_up_rights()?;
    let listener = process::take_inherited(launch.listener)?;
    let status = process::take_inherited(launch.status)?;
    let ledger = SharedMemory::from_fd(process::take_inherited(launch.ledger)?)?;
    let mut memories = Vec::new();
    for tier in &launch.tiers {
        let memory = SharedMemory::from_fd(process::take_inherited(tier.memory)?)?;
        let backing = match &tier.backing {
            Some((fd, name, bytes)) => Some((process::take_inherited(*fd)?, name.clone(), *bytes)),
            None => None,
        };
        memories.push((memory, backing));
    }
    let scanner = match launch.options.access_scan {
        AccessScan::Every(interval) => Some((Accesses::open()?, interval)),
        AccessScan::Auto | AccessScan::Never => None,
    };
    let shared = share(&launch, ledger, memories)?;
    let _ = process::lock_all_memory();
    let device = UffdDevice::open()?;

    let mut threads = Vec::new();
    for index in 0..shared.wakeups.len() {
        let worker = FaultThread::new(shared.clone(), index)?;
        let name = format!("uc-fault-{index}");
        threads.push(
            std::thread::Builder::new()
                .name(name)
                .spawn(move || worker.run())?,
        );
    }
    let evictor = Evictor::new(shared.clone())?;
    threads.push(
        std::thread::Builder::new()
            .name("uc-evict".into())
            .spawn(move || evictor.run())?,
    );

    let watch = watch::new();
    threads.extend(start_listeners(&shared, &watch)?);

    if let Some((scanner, interval)) = scanner {
        let of = shared.clone();
        threads.push(
            std::thread::Builder::new()
                .name("uc-access".into())
                .spawn(move || Accesses::every(of, scanner, interval))?,
        );
    }

    let mut control = Control {
        statm: HashMap::new(),
        virtual_sizes: HashMap::new(),
        watch,
        managing: false,
        maps: String::new(),
        pagemap: vec![0; 4096 * 8],
        last_faults: 0,
        tick: Duration::ZERO,
        look_at: Instant::now(),
        paused: None,
        forgets: false,
        ends: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        presence: Presence::new(Instant::now()),
        rest_until: Instant::now(),
        last_snapshot: (Instant::now(), Stats::default()),
        zeros: PageBuf::new(1)?,
        shared,
        launch,
        listener,
        link,
        status,
        keeper,
        device,
        greetings: Greetings::default(),
        holder: (holder, PidFd::open(holder)?),
    };
    control.notify(&Notice::Ready { holder })?;
    control.run_to_the_end(&mark);
    let shared = control.shared.clone();
    stop_threads(&shared);
    // The client has ended, or been killed: the threads end with the process.
    drop(threads);
    control.let_holder_go();
    Ok(())
}

/// The threads that hear of new mappings.
fn start_listeners(shared: &Arc<Shared>, watch: &Watch) -> io::Result<Vec<JoinHandle<()>>> {
    let mut threads = Vec::new();
    for (index, rings) in watch::shares(watch).into_iter().enumerate() {
        let of = shared.clone();
        let thread = std::thread::Builder::new().name(format!("uc-layout-{index}"));
        threads.push(thread.spawn(move || watch::run(&of, rings))?);
    }
    Ok(threads)
}

/// The fault threads and the evictor are to end.
fn stop_threads(shared: &Shared) {
    shared.stop.store(true, Ordering::Release);
    shared.wake_fault_threads();
    shared.evict_kick.fetch_add(1, Ordering::SeqCst);
    undercroft_sys::futex::wake(&shared.evict_kick, 1);
}

fn share(
    launch: &Launch,
    ledger: SharedMemory,
    memories: Vec<tiers::Inherited>,
) -> io::Result<Arc<Shared>> {
    let invalid = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
    let options = &launch.options;
    let reclaim = undercroft_policy::reclaim::by_name(&options.reclaim).map_err(|e| invalid(&e))?;
    let prefetch =
        undercroft_policy::prefetch::by_name(&options.prefetch).map_err(|e| invalid(&e))?;
    let files = memories.iter().filter_map(|(_, backing)| backing.as_ref());
    let disk_cpu = files
        .filter_map(|(file, _, _)| interrupts::completion_cpu(file))
        .next();
    let tiers: Vec<MeteredTier> = tiers::build(options, memories)?;
    let count = tiers.len();
    let config = Config {
        limit: Bytes(options.memory_max),
        retain: tiers.iter().map(|t| !t.is_ram()).collect(),
        // What has to be read from a device first stays where it is.
        demotes: (0..count)
            .map(|at| tiers[at].is_ram() && at + 1 < count)
            .collect(),
        room: Room::Ahead,
    };
    let record = match &options.trace {
        Some(path) => {
            let mut settings = format!(
                "--memory-max {} --policy {} --prefetch {}",
                options.memory_max, options.reclaim, options.prefetch
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
            let record = Record::create(
                path,
                &launch.command,
                &settings,
                options.access_scan != AccessScan::Never,
            );
            Some(record.map_err(|e| invalid(&e))?)
        }
        None => None,
    };
    let ledger = crate::books::ledger::create(ledger, launch.ledger_chunks)?;
    let placement = Placement::new(disk_cpu);
    let mut wakeups = Vec::new();
    for _ in &placement.cpus {
        wakeups.push(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    }
    Ok(Arc::new(Shared {
        engine: Mutex::new(Engine::new(ledger, reclaim, prefetch, config)),
        tiers,
        options: options.clone(),
        placement,
        evict_kick: AtomicU32::new(0),
        evictor_sleeps: AtomicBool::new(false),
        processes: Processes::new(wakeups.len()),
        dead: Mutex::default(),
        control_kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        wakeups,
        stop: AtomicBool::new(false),
        record,
        looks: Looks::default(),
        shortages: Shortages::default(),
        holds: Holds::default(),
        fault_latency: Mutex::new(new_histogram()),
        breakdown: Breakdown::default(),
        exceeded: Mutex::new(Exceeded::default()),
        eviction: EvictionCost::default(),
        leave_next: Mutex::default(),
        zero_runs: Mutex::default(),
        spaces_seen: AtomicU64::new(0),
        mappings_peak: AtomicU64::new(0),
        mappings_warn: undercroft_sys::procfs::mappings_max() / 5 * 4,
        managed_pages_peak: AtomicU64::new(0),
        look_again: AtomicBool::new(false),
        orders_given_up: AtomicU64::new(0),
        to_bring: Mutex::default(),
        started: Instant::now(),
        doom: Mutex::new(None),
    }))
}

/// Why the manager ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    /// The client has ended; the keeper said so.
    Finished,
    /// The keeper is gone, or does not want the client any more: nobody else will end it.
    Orphaned,
}

struct Control {
    shared: Arc<Shared>,
    launch: Launch,
    listener: OwnedFd,
    link: OwnedFd,
    status: OwnedFd,
    keeper: PidFd,
    device: UffdDevice,
    greetings: Greetings,
    holder: (u32, PidFd),
    statm: HashMap<SpaceId, Statm>,
    virtual_sizes: HashMap<SpaceId, u64>,
    watch: Watch,
    managing: bool,
    maps: String,
    pagemap: Vec<u8>,
    last_faults: u64,
    /// Between two looks while the client is managed.
    tick: Duration,
    look_at: Instant,
    /// The program with which the keeper has stopped.
    paused: Option<u32>,
    /// Something that is gone has not been forgotten whole.
    forgets: bool,
    /// Epoll of the pidfds of all processes that have announced themselves.
    ends: OwnedFd,
    presence: Presence,
    rest_until: Instant,
    last_snapshot: (Instant, Stats),
    zeros: PageBuf,
}

impl Control {
    fn notify(&self, notice: &Notice) -> io::Result<()> {
        tell(&self.link, notice)
    }

    /// Serves until the client has ended, and ends it where nobody else does.
    fn run_to_the_end(&mut self, mark: &Mark) {
        if self.run() == Over::Orphaned {
            let _ = process::set_fair(0);
            mark.end_all();
        }
        self.end_record();
    }

    /// Ends the holder where nothing needs it. Else it stays until the address spaces are gone, and
    /// ends their processes if the keeper does not.
    fn let_holder_go(&self) {
        if ending::nothing_held() {
            let _ = self.holder.1.kill();
        }
    }

    /// Until the keeper says that the client has ended, or is gone itself.
    fn run(&mut self) -> Over {
        // Until the client is managed: every millisecond that a look comes late, it may grow by megabytes.
        let _ = process::set_fifo(0, 1);
        loop {
            let accepts = self.greetings.listens();
            let mut fds: Vec<PollFd<'_>> = vec![
                PollFd::new(&self.link, PollFlags::IN),
                PollFd::new(&self.listener, accepts),
                PollFd::new(&self.status, PollFlags::IN),
                PollFd::new(&self.keeper, PollFlags::IN),
                PollFd::new(&self.holder.1, PollFlags::IN),
                PollFd::new(&self.ends, PollFlags::IN),
                PollFd::new(&self.shared.control_kick, PollFlags::IN),
            ];
            let greeted = fds.len();
            let sockets = self.greetings.sockets();
            fds.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
            let wait = self.until_look();
            let wait = self.greetings.due().map_or(wait, |due| due.min(wait));
            let wait = if self.forgets { Duration::ZERO } else { wait };
            let timeout = rustix::fs::Timespec {
                tv_sec: 0,
                tv_nsec: i64::from(wait.subsec_nanos()),
            };
            let _ = poll(&mut fds, Some(&timeout));
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            let runs = |process: &Process| process.has_running_identity() && process.has_agent();
            self.note_presence(self.shared.processes.any(runs));
            self.forget_some(ready[6]);
            if ready[5] {
                self.note_ends();
            }
            if ready[3] {
                return Over::Orphaned;
            }
            if ready[4] {
                // Without it this process must not die, and nobody can promise that.
                self.shared
                    .doom("the process that holds its descriptors (uc-fds) died");
            }
            self.hear(&ready[greeted..]);
            if ready[1] {
                self.welcome();
            }
            if ready[2] {
                self.tell_status();
            }
            if ready[0]
                && let Some(over) = self.answer_keeper()
            {
                return over;
            }
            if self.is_doomed() {
                return Over::Orphaned;
            }
            self.wake_keeper();
            self.look_if_due();
            self.shared.shortages.news().into_iter().for_each(log::warn);
        }
    }

    /// Processes that have exited.
    fn note_ends(&mut self) {
        let mut events = Vec::with_capacity(ENDS_MAX);
        let none = rustix::fs::Timespec::default();
        let _ = epoll::wait(&self.ends, spare_capacity(&mut events), Some(&none));
        for event in events {
            let space = SpaceId(event.data.u64() as u32);
            if let Some(process) = self.shared.process(space) {
                self.hear_no_end(&process);
                self.part_with(&process);
            }
        }
    }

    /// A little of what is gone is forgotten. * `kicked`: there is more of it since the last time.
    fn forget_some(&mut self, kicked: bool) {
        if kicked {
            let mut word = [0u8; 8];
            let _ = rustix::io::read(&self.shared.control_kick, &mut word);
        }
        self.forgets = !parts::forget_some(&self.shared);
    }

    /// The end of the process is told of from now on.
    fn hear_end(&self, process: &Process) -> io::Result<()> {
        if let Some(identity) = process.identity.get() {
            let data = epoll::EventData::new_u64(process.space.0.into());
            epoll::add(&self.ends, &identity.pidfd, data, epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    fn hear_no_end(&self, process: &Process) {
        if let Some(identity) = process.identity.get() {
            let _ = epoll::delete(&self.ends, &identity.pidfd);
        }
    }

    /// Ends the client and waits for the keeper, where something decided so.
    fn is_doomed(&mut self) -> bool {
        let why = lock(&self.shared.doom).clone();
        let Some(why) = why else {
            return false;
        };
        // Told first: else the keeper takes what we end for the program's own end.
        let _ = self.notify(&Notice::Doomed(why));
        self.end_known();
        self.end_record();
        self.wait_for_keeper();
        true
    }

    /// The process of that number runs another program now, or has ended. Its memory is forgotten
    /// unless it lives on in a process that shares it (`CLONE_VM`, vfork): that one is served, by
    /// the same userfaultfd, until it ends.
    fn part_with(&mut self, process: &Arc<Process>) {
        process.exited.store(true, Ordering::Relaxed);
        if process.has_lost_its_memory(&self.zeros) {
            self.forget(process);
        } else {
            self.statm.remove(&process.space);
        }
    }

    fn forget(&mut self, process: &Arc<Process>) {
        self.statm.remove(&process.space);
        self.virtual_sizes.remove(&process.space);
        self.hear_no_end(process);
        self.shared.remove_process(process);
    }

    /// Forgets the processes whose memory is gone.
    fn forget_ended(&mut self) {
        for process in self.shared.all_processes() {
            if process.has_lost_its_memory(&self.zeros) {
                self.forget(&process);
            }
        }
    }

    /// Ends every process of the client that is known by identity; the keeper ends the rest.
    fn end_known(&self) {
        for process in self.shared.all_processes() {
            process.kill();
        }
    }

    fn wait_for_keeper(&self) {
        let mut byte = [0u8; 1];
        while matches!(rustix::io::read(&self.link, &mut byte), Ok(1..)) {}
    }

    /// The keeper's request; why the manager is to end, if it is.
    fn answer_keeper(&mut self) -> Option<Over> {
        let mut bytes = vec![0u8; 4096];
        let got = match rustix::io::read(&self.link, &mut bytes) {
            Ok(got) if got > 0 => got,
            _ => return Some(Over::Orphaned),
        };
        // One after the other: two may have come at once.
        for request in serde_json::Deserializer::from_slice(&bytes[..got]).into_iter() {
            match request {
                Ok(Request::Finish {
                    exit_status,
                    wall_ns,
                }) => {
                    let report = self.report(exit_status, wall_ns);
                    if self.shared.record.is_some() {
                        self.forget_ended(); // a trace has the end of every process
                    }
                    self.end_record();
                    let _ = self.notify(&Notice::Report(Box::new(report)));
                    return Some(Over::Finished);
                }
                Ok(Request::Paused { program }) => self.paused = Some(program),
                Err(_) => return None,
            }
        }
        None
    }

    /// Ends the trace of `--trace` and tells what it lacks.
    fn end_record(&self) {
        match self.shared.record.as_ref().map(Record::finish) {
            None | Some(Ok(0)) => {}
            Some(Ok(dropped)) => {
                log::warn(&format!(
                    "{dropped} faults and movements of pages are not in the trace"
                ));
            }
            Some(Err(why)) => log::warn(&why),
        }
    }
}
