//! The keeper owns one run. It opens what must survive the manager, starts the manager and the
//! program, waits for both, and never lets a program run on without its manager.
//!
//! The front and the keeper are what the user sees, and the program must not notice them.
//! `front.rs` stands for the program, and `outside.rs` is the keeper's side of that. Descriptors
//! that the keeper was given are closed once the program has them (`sys/src/inherit.rs`). The
//! program's processes are found by their mappings (the run's shim) or their environment, not by
//! parents, which may be dead.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_proto::is_agent;
use undercroft_proto::messages::{Notice, Request};
use undercroft_proto::options::RunOptions;
use undercroft_proto::report::Report;
use undercroft_proto::tiers;
use undercroft_sys::inherit::{self, Given};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs;
use undercroft_sys::signal::{self, Received, Signals};
use undercroft_sys::title;
use undercroft_sys::uffd::UffdDevice;
use undercroft_terminal::log_message;
use undercroft_tier::open::{OpenError, OpenTier};
use undercroft_tier::profile;
pub use undercroft_wire::protocol::SOCKET_VARIABLE;

mod delivery;
mod estate;
mod front;
pub mod held;
mod left;
pub mod others;
mod outside;
mod passing;
pub mod place;
mod said;
pub mod status;
mod stub;
mod succession;
pub mod upgrade;
pub mod view;
mod voice;
pub mod wanted;

use delivery::{Delivery, NoReport};
use estate::Estate;
use front::{Line, Side, Word};
use held::{Held, HeldError, Waiting};
use left::{end_tree, leftovers, reap};
use outside::{Outside, answer_front, answer_signals, leave};
use passing::Scene;
use place::{PlaceError, RunDir, SHIM_LINK, SHIM_SOCKET, SHIM_STEM, STATUS_SOCKET};
use said::{Log, notice_by};
use succession::Succession;
use upgrade::Asking;
use voice::Voice;

/// The variable that tells a program the number of the descriptor of its guest's memory.
pub const GUEST_VARIABLE: &str = "UNDERCROFT_MEMORY_FD";

/// The variable that tells it the number of the descriptor of the locks of its pages.
pub const LOCKS_VARIABLE: &str = "UNDERCROFT_LOCKS_FD";

/// Status when Undercroft, not the program, failed.
pub const OUR_FAILURE: i32 = 125;

/// Chunks of the ledger: 2 MiB of address space each, 16 TiB in all, for all address spaces
/// together. Page numbers end there. The ledger is sparse: only used chunks take memory.
const LEDGER_CHUNKS: usize = (1 << 23) - 1;

/// Chunks if the user's limits bound the address space of a process or the length of a file: 1 TiB.
/// The ledger takes 2 GiB of either then, and 32 GiB otherwise.
const LEDGER_CHUNKS_LIMITED: usize = 1 << 19;

/// How long the first manager may take to be ready. On an overloaded machine it takes more than ten
/// seconds. The program has not begun, so none of its threads waits.
const STARTING: Duration = Duration::from_secs(60);

/// How long a manager may take to send its report; to end after that; and to say its versions.
const READY: Duration = Duration::from_secs(10);

/// How long the program's processes may take to end once they are killed.
const ENDING: Duration = Duration::from_secs(10);

/// How long a killed manager may take to end. It takes longer in a frozen cgroup, or in an
/// uninterruptible system call.
const KILLED: Duration = Duration::from_secs(5);

/// How long a successor may take, besides [`TAKEOVER_PER_GIB`]. The program only waits meanwhile;
/// without one it is ended. What the keeper is to pass on waits as well.
const TAKEOVER: Duration = Duration::from_secs(30);

/// How much longer for each GiB of memory that the books know, and how long it takes: it looks at
/// every page. The figures are in docs/design/0025, "Large runs".
const TAKEOVER_PER_GIB: Duration = Duration::from_millis(500);
const TAKES_PER_GIB: Duration = Duration::from_millis(60);

/// How long any takeover takes, on two CPUs that have little else to do.
const TAKES: Duration = Duration::from_millis(40);

/// How long a killed manager may take to end, for the same reason: it may be in a write to a disk
/// that is busy.
const DYING: Duration = Duration::from_secs(60);

// So the program's end is told after 2 `READY` and `KILLED` at most, and that of a doomed run after
// `KILLED` and `ENDING`. During a takeover it is told later: `succession.rs`.

/// How long agents may take to end once their programs have, before they count as left behind.
const AGENTS_END: Duration = Duration::from_secs(2);

/// Processes whose memories are compared, each with each.
const COMPARED_MAX: usize = 16;

/// How often leftover processes of the program are looked for.
const LEFTOVER_TICK: Duration = Duration::from_millis(20);

/// The same when `run` has ended, perhaps for days.
const LEFTOVER_TICK_ALONE: Duration = Duration::from_secs(1);

/// Runs a program under management; returns the status to exit with. Errors go to standard error.
/// If a signal ended the program, this process ends by the same signal, so that its parent sees the
/// same end.
pub fn run(options: &RunOptions) -> i32 {
    // First of all: descriptors that are opened after this are not the program's.
    let begun = Given::now().and_then(|given| Ok((given, Signals::take()?)));
    let begun = begun.and_then(|(given, signals)| Ok((given, signals, front::split()?)));
    let status = match begun {
        // The front has no thread, and says nothing.
        Ok((given, signals, Side::Front(front))) => front.serve(given, &signals),
        Ok((given, signals, Side::Keeper(line))) => keep(options, given, signals, line),
        Err(error) => {
            complain(options, &error);
            return OUR_FAILURE;
        }
    };
    match status {
        End::Status(status) => status,
        End::Signal(number) => {
            signal::end_by(number);
            128 + number
        }
    }
}

/// Says why nothing begins, without a voice.
fn complain(options: &RunOptions, error: &io::Error) {
    let text = log_message(options.log, &error.to_string());
    let _ = io::stderr().write_all(text.as_bytes());
}

/// The keeper's part of [`run`].
fn keep(options: &RunOptions, given: Given, signals: Signals, line: Line) -> End {
    let mut voice = match Voice::new(options.log, options.client.name.clone()) {
        Ok(voice) => voice,
        Err(error) => {
            complain(options, &error);
            return End::Status(OUR_FAILURE);
        }
    };
    let mut outside = Outside {
        signals,
        line,
        quiet: options.client.quiet,
        wait_all: options.wait_all,
        started: Instant::now(),
        began_unix: 0.0,
    };
    let ended = try_run(options, given, &mut outside, &mut voice);
    let status = ended.unwrap_or_else(|error| match error {
        RunError::Held(HeldError::Stopped(number)) => End::Signal(number),
        error => {
            voice.say(&error.to_string());
            End::Status(OUR_FAILURE)
        }
    });
    voice.end();
    status
}

/// How a process of ours ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Status(i32),
    /// This signal ended the program.
    Signal(i32),
}

impl End {
    fn of(status: ExitStatus) -> End {
        match status.signal() {
            Some(number) => End::Signal(number),
            None => End::Status(status.code().unwrap_or(OUR_FAILURE)),
        }
    }

    /// The status as a shell gives it: 128 + signal for a program that was killed.
    fn code(&self) -> i32 {
        match self {
            End::Status(status) => *status,
            End::Signal(number) => 128 + number,
        }
    }
}

/// Why a run did not take place, or broke off. The text has the fix where there is one.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Tier(#[from] OpenError),
    #[error(transparent)]
    Report(#[from] NoReport),
    /// The manager says why it cannot serve.
    #[error("{0} (`undercroft doctor` tells what is missing)")]
    CannotServe(String),
    /// The manager ended, or said nothing in time; its log says more.
    #[error("the manager did not start: {0} (`undercroft doctor` tells what is missing)")]
    NoManager(String),
    /// A daemon gives it nothing.
    #[error(transparent)]
    Held(#[from] HeldError),
    /// A system call of the keeper.
    #[error("the run failed: {0}")]
    System(#[from] io::Error),
}

struct Manager {
    child: Child,
    pidfd: PidFd,
    /// The holder of its descriptors. When the manager dies, the holder becomes our child.
    holder: (u32, PidFd),
    /// The socket by which a successor asks the holder for descriptors. While it is open, the
    /// holder waits.
    handover: Option<OwnedFd>,
    /// Which manager of the run this is, or of which one the holder is.
    generation: u64,
    link: UnixStream,
    lines: BufReader<UnixStream>,
    /// Its standard error.
    log: Log,
    /// Whether it did not end in time once it was killed.
    stays: bool,
    ready: Instant,
}

impl Manager {
    /// Kills it. Waits for its end for [`KILLED`] at most; if that is too short, says what stays.
    fn end(&mut self, voice: &Voice) -> Killed {
        if self.stays && !self.pidfd.has_exited() {
            return Killed::Stays; // it was waited for
        }
        let killed = end_child(&mut self.child, &self.pidfd);
        self.stays = killed == Killed::Stays;
        if killed == Killed::Stays {
            voice.say(&stays(self.child.id()));
        }
        killed
    }

    /// The same. Waits for `most` first: the program only waits meanwhile.
    fn end_within(&mut self, most: Duration, voice: &Voice) -> Killed {
        let _ = self.pidfd.kill();
        self.pidfd.wait_exit(most);
        self.end(voice)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Ended,
    /// The kernel has not ended it yet.
    Stays,
}

fn end_child(child: &mut Child, pidfd: &PidFd) -> Killed {
    let _ = child.kill();
    // A tracer can keep an ended process from us, so this does not wait for it either.
    if pidfd.wait_exit(KILLED) && matches!(child.try_wait(), Ok(Some(_))) {
        Killed::Ended
    } else {
        Killed::Stays
    }
}

/// The message to the user on a manager that does not end.
fn stays(pid: u32) -> String {
    format!(
        "the manager (process {pid}) has not ended since it was killed: a frozen cgroup or a system \
         call holds it. Until it ends, the memory and the files of the tiers stay in use"
    )
}

/// Says what the user should know of the tiers.
fn warn_of(tiers: &[OpenTier], voice: &mut Voice) {
    let mut warnings: Vec<_> = tiers.iter().flat_map(OpenTier::warnings).collect();
    warnings.dedup();
    (warnings.iter()).for_each(|warning| voice.say(&format!("warning: {warning}")));
}

/// Ties the run to its daemon, before there is a program: a failure harms none.
fn tie_to_daemon(
    held: Option<Held>,
    dir: &RunDir,
    manager: &mut Manager,
    voice: &Voice,
) -> Result<(), RunError> {
    let kept = held.map_or(Ok(()), |held| held.keep(dir.path(STATUS_SOCKET)));
    kept.map_err(|why| {
        manager.end(voice);
        why.into()
    })
}

fn try_run(
    options: &RunOptions,
    given: Given,
    outside: &mut Outside,
    voice: &mut Voice,
) -> Result<End, RunError> {
    process::become_subreaper()?;
    let delivery = options.report.as_ref().map(Delivery::open).transpose()?;
    let dir = RunDir::create()?;
    let (options, mut held, mut early) = ask_daemon(options, &outside.signals, voice)?;
    let options = &options;
    let tiers = open_tiers(options, held.as_mut(), voice)?;
    let mut estate = Estate::make(options, &dir, tiers, outside.line.front())?;
    let mut manager = estate.start_manager()?;
    tie_to_daemon(held, &dir, &mut manager, voice)?;
    outside.begin();
    early.extend(std::iter::from_fn(|| outside.signals.next()));
    if outside.line.is_cut() {
        // A signal has ended the front before there was a program to end.
        manager.end(voice);
        return Ok(End::Status(OUR_FAILURE));
    }
    let mut program = match start_program(options, &dir, outside) {
        Ok(program) => program,
        Err(error) => {
            voice.say(&error.to_string());
            let status = error.status();
            let _ = finish(&mut manager, status, Duration::ZERO, voice);
            return Ok(End::Status(status));
        }
    };
    pass_on_early(early, &program);
    outside.line.say(Word::Started(program.id()));
    if !options.client.quiet {
        voice.started(program.id(), options);
    }
    // The program may wipe its arguments, so ours must not have them longer than it does.
    let _ = title::set(&format!("undercroft: keeper of {}", program.id()));
    given.close();
    inherit::leave_streams()?;
    process::spare_from_oom();
    process::trim_heap(); // what reading the command line took
    let mut succession = Succession::new(options);
    let mut ended = wait_on(
        &mut program,
        &mut manager,
        outside,
        voice,
        (&mut estate, &mut succession),
    )?;
    let wall = outside.started.elapsed();
    if let Ended::Program(exit) = ended {
        let end = End::of(exit);
        match finish(&mut manager, end.code(), wall, voice) {
            Finished::Report(mut report) => {
                report.takeovers = succession.summary();
                complete(&mut report, &program, exit, outside);
                deliver(delivery, options, &report, voice);
                return Ok(end);
            }
            Finished::Silent => {
                voice.say("the manager ended without a report, so there is none of this run");
                return Ok(end);
            }
            Finished::Doomed(why) => ended = Ended::Doomed(doomed(&why)),
        }
    }
    Ok(end_with(ended, &mut program, &mut manager, voice))
}

/// Ends the program, if it has not ended, and says why.
fn end_with(ended: Ended, program: &mut Child, manager: &mut Manager, voice: &mut Voice) -> End {
    match ended {
        Ended::Program(exit) => End::of(exit),
        Ended::Doomed(why) | Ended::ManagerDied(why) => {
            end_tree(program, manager, voice);
            manager.log.tell(voice);
            voice.say(&why);
            End::Status(OUR_FAILURE)
        }
    }
}

/// Opens the tiers, and says what the user should know of them.
fn open_tiers(
    options: &RunOptions,
    held: Option<&mut Held>,
    voice: &mut Voice,
) -> Result<Vec<OpenTier>, OpenError> {
    let mut tiers = tiers::open(&options.client)?;
    if let Some(held) = held {
        held.fit(&options.client.tiers, &mut tiers)?;
    }
    for (tier, spec) in tiers.iter_mut().zip(&options.client.tiers) {
        match profile::known(spec) {
            Ok(profile) => tier.profile = profile,
            Err(_) if options.client.quiet => {}
            Err(error) => {
                voice.say(&format!("warning: what was measured is not used: {error}"));
                break;
            }
        }
    }
    if !options.client.quiet {
        warn_of(&tiers, voice);
    }
    Ok(tiers)
}

/// The options with what the daemon grants, if it is to be asked. And signals that came meanwhile.
fn ask_daemon(
    options: &RunOptions,
    signals: &Signals,
    voice: &Voice,
) -> Result<(RunOptions, Option<Held>, Vec<Received>), HeldError> {
    let Some(class) = &options.daemon else {
        return Ok((options.clone(), None, Vec::new()));
    };
    let mut waiting = Waiting {
        signals,
        voice: (!options.client.quiet).then_some(voice),
        early: Vec::new(),
    };
    let held = Held::ask(class, options, &mut waiting)?;
    Ok((held.options(options)?, Some(held), waiting.early))
}

/// Passes on what came before there was a program: its terminal could not send it to it.
fn pass_on_early(early: Vec<Received>, program: &Child) {
    for received in early {
        let received = Received::new(received.number, Some(0));
        if passing::is_for_program(&received, Scene::default()) {
            signal::pass_on(&received, program.id());
        }
    }
}

/// The value of LD_PRELOAD for the program: what the user has there, then the shim. The user's come
/// first, because AddressSanitizer insists on it. The shim of an outer run is left out: a program
/// has one manager.
fn preload(before: Option<&OsStr>, shim: &Path) -> OsString {
    let mut value = OsString::new();
    let before = before.unwrap_or_default().as_bytes();
    for part in before.split(|byte| byte.is_ascii_whitespace() || *byte == b':') {
        let name = part.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if !part.is_empty() && !name.starts_with(SHIM_STEM.as_bytes()) {
            value.push(OsStr::from_bytes(part));
            value.push(":");
        }
    }
    value.push(shim);
    value
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
enum NotStarted {
    #[error("{0}: not found")]
    NotFound(String),
    #[error("{0}: not executable")]
    NotExecutable(String),
    #[error("{0}: cannot be started: {1}")]
    Failed(String, io::Error),
}

impl NotStarted {
    /// The status that a shell would give.
    fn status(&self) -> i32 {
        match self {
            NotStarted::NotFound(_) => 127,
            NotStarted::NotExecutable(_) | NotStarted::Failed(..) => 126,
        }
    }
}

fn doomed(why: &str) -> String {
    format!("the program was ended: {why}")
}

fn died(why: &str) -> String {
    format!(
        "the manager died, so the program was ended (without it, memory would read as zeros){why}"
    )
}

/// Starts the program with the shim.
fn start_program(
    options: &RunOptions,
    dir: &RunDir,
    outside: &Outside,
) -> Result<Child, NotStarted> {
    let (launcher, program) = (&options.launcher, &options.command);
    let name = launcher.first().unwrap_or(&program[0]);
    let before = std::env::var_os("LD_PRELOAD");
    let mut command = Command::new(name);
    command
        .args(launcher.iter().chain(program).skip(1))
        .env(
            "LD_PRELOAD",
            preload(before.as_deref(), &dir.path(SHIM_LINK)),
        )
        .env(SOCKET_VARIABLE, dir.path(SHIM_SOCKET));
    if let Some(guest) = options.guest {
        command.env(GUEST_VARIABLE, guest.to_string());
    }
    if let Some(locks) = options.locks {
        command.env(LOCKS_VARIABLE, locks.memfd.to_string());
    }
    if let Some(group) = outside.line.group {
        command.process_group(group as i32); // a terminal's keys are for it
    }
    outside.signals.put_back_in(&mut command);
    // The user has it for us. Without the device the program's own library needs it.
    if process::passes_ptrace_on() && UffdDevice::open().is_ok() {
        process::keep_ptrace_from(&mut command);
    }
    let spawned = command.spawn();
    spawned.map_err(|error| {
        let shown = Path::new(name).display().to_string();
        match error.kind() {
            io::ErrorKind::NotFound => NotStarted::NotFound(shown),
            io::ErrorKind::PermissionDenied => NotStarted::NotExecutable(shown),
            _ => NotStarted::Failed(shown, error),
        }
    })
}

enum Ended {
    Program(ExitStatus),
    /// With what the user is told, as the next one.
    Doomed(String),
    ManagerDied(String),
}

/// Why [`wait`] returns.
enum Woken {
    Ended(Ended),
    /// A user asks for another binary of the manager.
    Upgrade(Asking),
}

/// As [`wait`]. When the manager dies, another takes over if it may. One that is to be replaced is.
fn wait_on(
    program: &mut Child,
    manager: &mut Manager,
    outside: &mut Outside,
    voice: &mut Voice,
    (estate, succession): (&mut Estate, &mut Succession),
) -> io::Result<Ended> {
    loop {
        let gone_on = match wait(program, manager, outside, voice, estate)? {
            Woken::Ended(Ended::ManagerDied(_)) => succession.go_on(estate, manager, voice),
            Woken::Ended(ended) => return Ok(ended),
            Woken::Upgrade(asking) => succession.upgrade(estate, manager, voice, &asking),
        };
        if let Err(why) = gone_on {
            return Ok(Ended::ManagerDied(died(&why)));
        }
    }
}

/// Waits for the program and for the processes that it leaves behind; passes signals on.
fn wait(
    program: &mut Child,
    manager: &mut Manager,
    outside: &mut Outside,
    voice: &mut Voice,
    estate: &mut Estate,
) -> io::Result<Woken> {
    // After an upgrade or a takeover the program may have ended, and only what it left behind runs.
    let mut exit = program.try_wait()?;
    let mut ended = None;
    let pidfd = match exit {
        None => Some(PidFd::open(program.id())?),
        Some(_) => None,
    };
    loop {
        if let Some(status) = exit {
            reap(&[manager.child.id()]);
            let left = leftovers(manager);
            outside.line.say_end(status);
            if left.is_empty() {
                return Ok(Woken::Ended(Ended::Program(status)));
            }
            let stay = staying(&left, *ended.get_or_insert_with(Instant::now));
            if stay > 0 && outside.line.front().is_some() && !outside.wait_all {
                leave(manager, outside, voice, stay, status);
                estate.forget_front();
            }
        }
        let running = pidfd.as_ref().filter(|_| exit.is_none());
        let ready = look(manager, outside, estate, running);
        if ready.log {
            manager.log.tell(voice);
        }
        if ready.link && !ready.manager {
            // It is written in one piece: if it does not come whole, the manager is of no use.
            let deadline = Instant::now() + READY;
            match notice_by(&mut manager.lines, &manager.pidfd, deadline) {
                Some(Notice::Doomed(why)) => return Ok(Woken::Ended(Ended::Doomed(doomed(&why)))),
                Some(_) => {}
                None => return Ok(Woken::Ended(Ended::ManagerDied(String::new()))),
            }
        }
        if ready.manager {
            return Ok(Woken::Ended(Ended::ManagerDied(String::new())));
        }
        if ready.upgrades
            && let Some(asking) = upgrade::asked(&estate.upgrades)
        {
            return Ok(Woken::Upgrade(asking));
        }
        if ready.signals {
            answer_signals(outside, program, exit.is_some(), manager);
            // Orphans of the program are our children. One that has ended must not stay in the
            // table of processes as long as the program runs.
            reap(&[manager.child.id(), program.id()]);
        }
        if ready.line {
            answer_front(outside, program, manager);
            if outside.line.front().is_none() {
                estate.forget_front();
            }
        }
        if exit.is_none() {
            outside.line.wake(program.id());
            exit = program.try_wait()?;
        }
    }
}

/// How many of those that are left stay. An agent ends a moment after its program, and so does a
/// child that was killed. Those with one memory count as one: one of them may be an agent that has
/// not told its name yet.
/// * `since`: when the program was seen to have ended.
fn staying(left: &[u32], since: Instant) -> usize {
    if since.elapsed() > AGENTS_END {
        return left.len();
    }
    let stays = |pid: &u32| !is_agent(*pid) && !procfs::is_ending(*pid);
    let stay: Vec<u32> = left.iter().copied().filter(stays).collect();
    if stay.len() > COMPARED_MAX {
        return stay.len();
    }
    let is_first = |at: usize| {
        let shares = |other: &u32| process::share_memory(*other, stay[at]).unwrap_or(false);
        !stay[..at].iter().any(shares)
    };
    (0..stay.len()).filter(|at| is_first(*at)).count()
}

/// The parts of [`look`] that have something to say.
struct Ready {
    manager: bool,
    link: bool,
    signals: bool,
    log: bool,
    upgrades: bool,
    line: bool,
}

/// Waits until one of those has something to say, or the program has ended.
/// * `program`: while it runs.
fn look(manager: &Manager, outside: &Outside, estate: &Estate, program: Option<&PidFd>) -> Ready {
    let mut fds = vec![
        PollFd::new(&manager.pidfd, PollFlags::IN),
        PollFd::new(&manager.link, PollFlags::IN),
        PollFd::new(&outside.signals, PollFlags::IN),
        PollFd::new(&manager.log.pipe, PollFlags::IN),
        PollFd::new(&estate.upgrades, PollFlags::IN),
    ];
    let line = outside.line.socket();
    fds.extend(line.map(|socket| PollFd::new(socket, PollFlags::IN)));
    fds.extend(program.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
    // The last of the processes is our child, so its end wakes us.
    let tick = match outside.line.front() {
        Some(_) => LEFTOVER_TICK,
        None => LEFTOVER_TICK_ALONE,
    };
    let tick = rustix::fs::Timespec::try_from(tick).unwrap_or_default();
    let ticks = program.is_none() || outside.line.is_waking();
    let _ = poll(&mut fds, ticks.then_some(&tick));
    let is = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
    Ready {
        manager: is(0),
        link: is(1),
        signals: is(2),
        log: is(3),
        upgrades: is(4),
        line: line.is_some() && is(5),
    }
}

/// Last words of the manager.
enum Finished {
    Report(Box<Report>),
    /// The manager has ended the program, for this reason.
    Doomed(String),
    Silent,
}

/// Asks the manager for the report, and lets it end.
fn finish(manager: &mut Manager, exit_status: i32, wall: Duration, voice: &mut Voice) -> Finished {
    let request = Request::Finish {
        exit_status,
        wall_ns: wall.as_nanos() as u64,
    };
    let deadline = Instant::now() + READY;
    let report = ask_for_report(manager, &request, deadline);
    // One that has not answered in time is not waited for twice.
    let patience = match &report {
        Finished::Report(_) => READY,
        _ => deadline.saturating_duration_since(Instant::now()),
    };
    manager.pidfd.wait_exit(patience);
    manager.end(voice);
    manager.log.tell(voice);
    report
}

/// Asks the manager for the report, as of the end or as of now.
fn ask_for_report(manager: &mut Manager, request: &Request, deadline: Instant) -> Finished {
    let asked = serde_json::to_vec(request).map_err(io::Error::from);
    let asked = asked.and_then(|line| manager.link.write_all(&line));
    loop {
        let notice = notice_by(&mut manager.lines, &manager.pidfd, deadline);
        match notice.filter(|_| asked.is_ok()) {
            Some(Notice::Report(report)) => return Finished::Report(report),
            // The manager ended the program; to the keeper it looked like the program's own end.
            Some(Notice::Doomed(why)) => return Finished::Doomed(why),
            Some(_) => {}
            None => return Finished::Silent,
        }
    }
}

/// Adds to the report what the manager does not know.
fn complete(report: &mut Report, program: &Child, exit: ExitStatus, outside: &Outside) {
    report.pid = program.id();
    report.signal = exit.signal();
    report.started_unix_seconds = outside.began_unix;
}

/// Writes the report and prints the summary, as far as the user wants them.
fn deliver(to: Option<Delivery>, options: &RunOptions, report: &Report, voice: &mut Voice) {
    if let Some(Err(error)) = to.map(|to| to.deliver(report)) {
        voice.say(&error.to_string());
    }
    if !options.client.quiet {
        voice.ended(report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preload_keeps_what_is_there_and_has_one_shim() {
        let shim = Path::new("/run/undercroft/run-2/libundercroft_shim-beside-libasan.so");
        let value = |before: Option<&str>| {
            let value = preload(before.map(OsStr::new), shim);
            value
                .to_str()
                .expect("UTF-8")
                .replace(&shim.display().to_string(), "SHIM")
        };
        assert_eq!(value(None), "SHIM");
        assert_eq!(value(Some("")), "SHIM");
        assert_eq!(value(Some("/lib/a.so b.so")), "/lib/a.so:b.so:SHIM");
        let outer = "/tmp/x/run-1/libundercroft_shim-beside-libasan.so:/lib/a.so";
        assert_eq!(value(Some(outer)), "/lib/a.so:SHIM");
    }
}
