//! The keeper owns one run. It opens what must survive the manager, starts the manager and the
//! program, waits for both, and never lets a program run on without its manager.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_sys::inherit::{self, Given};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs;
use undercroft_sys::signal::{
    self, Received, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, Signals,
};
use undercroft_tier::open::{OpenError, OpenTier};
use undercroft_tier::profile;
use undercroft_wire::protocol::SOCKET_VARIABLE;

use crate::books::tiers;
use crate::control::{Notice, Request};
use crate::options::RunOptions;
use crate::report::{Report, human_summary};

mod estate;
pub mod held;
mod passing;
pub mod place;
mod said;
pub mod status;
mod succession;
pub mod upgrade;
mod voice;

use estate::Estate;
use held::{Held, HeldError, Waiting};
use passing::Scene;
use place::{PlaceError, RunDir, SHIM_LINK, SHIM_SOCKET, SHIM_STEM, STATUS_SOCKET};
use said::{Log, notice_by};
use succession::Succession;
use upgrade::Asking;
use voice::Voice;

/// Status when Undercroft, not the program, failed.
pub const OUR_FAILURE: i32 = 125;

/// Chunks of the ledger: 2 MiB of address space each, 1 TiB in all. It is sparse: only used chunks
/// take memory.
const LEDGER_CHUNKS: usize = 1 << 19;

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

/// How long a successor may take. The program only waits meanwhile; without one it is ended. What
/// the keeper is to pass on waits as well.
const TAKEOVER: Duration = Duration::from_secs(30);

/// How long a killed manager may take to end, for the same reason: it may be in a write to a disk
/// that is busy.
const DYING: Duration = Duration::from_secs(60);

// So the program's end is told after 2 `READY` and `KILLED` at most, and that of a doomed run after
// `KILLED` and `ENDING`. During a takeover it is told later: `succession.rs`.

/// How often leftover processes of the program are looked for.
const LEFTOVER_TICK: Duration = Duration::from_millis(20);

/// Runs a program under management; returns the status to exit with. Errors go to standard error.
/// If a signal ended the program, this process ends by the same signal, so that its parent sees the
/// same end.
pub fn run(options: &RunOptions) -> i32 {
    // First of all: descriptors that are opened after this are not the program's.
    let begun = Given::now().and_then(|given| Ok((given, Signals::take()?)));
    let begun = begun.and_then(|(given, signals)| Ok((given, signals, Voice::new()?)));
    let (given, signals, mut voice) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            let _ = writeln!(io::stderr(), "undercroft: {error}");
            return OUR_FAILURE;
        }
    };
    let ended = try_run(options, given, &signals, &mut voice);
    let status = ended.unwrap_or_else(|error| match error {
        RunError::Held(HeldError::Stopped(number)) => End::Signal(number),
        error => {
            voice.say(&error.to_string());
            End::Status(OUR_FAILURE)
        }
    });
    voice.end();
    match status {
        End::Status(status) => status,
        End::Signal(number) => {
            signal::end_by(number);
            128 + number
        }
    }
}

/// How the keeper itself ends.
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
    /// By which a successor asks the holder for descriptors. While it is open, the holder waits.
    handover: Option<OwnedFd>,
    /// Which manager of the run this is, or of which one the holder is.
    generation: u64,
    link: UnixStream,
    lines: BufReader<UnixStream>,
    /// Its standard error.
    log: Log,
    /// It did not end in time once it was killed.
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

/// What the user is told of a manager that does not end.
fn stays(pid: u32) -> String {
    format!(
        "the manager (process {pid}) has not ended since it was killed: a frozen cgroup or a system \
         call holds it. Until it ends, the memory and the files of the tiers stay in use"
    )
}

/// Says what the user should know of the tiers.
fn warn_of(tiers: &[OpenTier], voice: &mut Voice) {
    let mut warnings: Vec<_> = tiers.iter().filter_map(OpenTier::warning).collect();
    warnings.dedup();
    (warnings.iter()).for_each(|warning| voice.say(&format!("warning: {warning}")));
}

fn try_run(
    options: &RunOptions,
    given: Given,
    signals: &Signals,
    voice: &mut Voice,
) -> Result<End, RunError> {
    process::become_subreaper()?;
    let dir = RunDir::create()?;
    let (options, mut held, mut early) = ask_daemon(options, signals, voice)?;
    let options = &options;
    let tiers = open_tiers(options, held.as_mut(), voice)?;
    let mut estate = Estate::make(options, &dir, tiers)?;
    let mut manager = estate.start_manager()?;
    // Before there is a program: a failure harms none.
    if let Err(why) = held.map_or(Ok(()), |held| held.keep(dir.path(STATUS_SOCKET))) {
        manager.end(voice);
        return Err(why.into());
    }
    let started = Instant::now();
    early.extend(std::iter::from_fn(|| signals.next()));
    let mut program = match start_program(options, &dir, signals) {
        Ok(program) => program,
        Err(error) => {
            voice.say(&error.to_string());
            let status = error.status();
            let _ = finish(&mut manager, status, Duration::ZERO, voice);
            return Ok(End::Status(status));
        }
    };
    pass_on_early(early, &program);
    given.close();
    inherit::leave_streams()?;
    process::spare_from_oom();
    process::trim_heap(); // what reading the command line took
    let mut succession = Succession::new(options);
    let mut ended = wait_on(
        &mut program,
        &mut manager,
        signals,
        voice,
        (&mut estate, &mut succession),
    )?;
    let wall = started.elapsed();
    if let Ended::Program(exit) = ended {
        let end = End::of(exit);
        match finish(&mut manager, end.code(), wall, voice) {
            Finished::Report(mut report) => {
                report.takeovers = succession.summary();
                deliver(options, &report, voice);
                return Ok(end);
            }
            Finished::Silent => {
                voice.say("the manager ended without a report, so there is none of this run");
                return Ok(end);
            }
            Finished::Doomed(why) => ended = Ended::Doomed(doomed(&why)),
        }
    }
    match ended {
        Ended::Program(exit) => Ok(End::of(exit)),
        Ended::Doomed(why) | Ended::ManagerDied(why) => {
            end_tree(&mut program, &mut manager, voice);
            manager.log.tell(voice);
            voice.say(&why);
            Ok(End::Status(OUR_FAILURE))
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
            Ok(profile) => tier.give_profile(profile),
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
    signals: &Signals,
) -> Result<Child, NotStarted> {
    let name = &options.command[0];
    let before = std::env::var_os("LD_PRELOAD");
    let mut command = Command::new(name);
    command
        .args(&options.command[1..])
        .env(
            "LD_PRELOAD",
            preload(before.as_deref(), &dir.path(SHIM_LINK)),
        )
        .env(SOCKET_VARIABLE, dir.path(SHIM_SOCKET));
    signals.put_back_in(&mut command);
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
    signals: &Signals,
    voice: &mut Voice,
    (estate, succession): (&mut Estate, &mut Succession),
) -> io::Result<Ended> {
    loop {
        let gone_on = match wait(program, manager, signals, voice, &estate.upgrades)? {
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
/// * `upgrades`: where users ask for another binary of the manager.
fn wait(
    program: &mut Child,
    manager: &mut Manager,
    signals: &Signals,
    voice: &mut Voice,
    upgrades: &OwnedFd,
) -> io::Result<Woken> {
    // After an upgrade or a takeover the program may have ended, and only what it left behind runs.
    let mut exit = program.try_wait()?;
    let pidfd = match exit {
        None => Some(PidFd::open(program.id())?),
        Some(_) => None,
    };
    loop {
        let mut fds = vec![
            PollFd::new(&manager.pidfd, PollFlags::IN),
            PollFd::new(&manager.link, PollFlags::IN),
            PollFd::new(&signals, PollFlags::IN),
            PollFd::new(&manager.log.pipe, PollFlags::IN),
            PollFd::new(upgrades, PollFlags::IN),
        ];
        if let (None, Some(pidfd)) = (exit, &pidfd) {
            fds.push(PollFd::new(pidfd, PollFlags::IN));
        }
        let tick = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: LEFTOVER_TICK.subsec_nanos().into(),
        };
        let _ = poll(&mut fds, exit.map(|_| &tick));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if ready[3] {
            manager.log.tell(voice);
        }
        if ready[1] && !ready[0] {
            // It is written in one piece: if it does not come whole, the manager is of no use.
            let deadline = Instant::now() + READY;
            match notice_by(&mut manager.lines, &manager.pidfd, deadline) {
                Some(Notice::Doomed(why)) => return Ok(Woken::Ended(Ended::Doomed(doomed(&why)))),
                Some(_) => {}
                None => return Ok(Woken::Ended(Ended::ManagerDied(String::new()))),
            }
        }
        if ready[0] {
            return Ok(Woken::Ended(Ended::ManagerDied(String::new())));
        }
        if ready[4]
            && let Some(asking) = upgrade::asked(upgrades)
        {
            return Ok(Woken::Upgrade(asking));
        }
        if ready[2] {
            answer_signals(signals, program, exit.is_some(), manager);
            // Orphans of the program are our children. One that has ended must not stay in the
            // table of processes as long as the program runs.
            reap(&[manager.child.id(), program.id()]);
        }
        if exit.is_none() {
            exit = program.try_wait()?;
        }
        if let Some(status) = exit {
            reap(&[manager.child.id()]);
            if leftovers(manager).is_empty() {
                return Ok(Woken::Ended(Ended::Program(status)));
            }
        }
    }
}

/// Passes on the signals that are for the program, and stops when it stops. So a shell sees one
/// job.
fn answer_signals(signals: &Signals, program: &Child, ended: bool, manager: &mut Manager) {
    let own = std::process::id();
    let leads_session = process::session_of(own) == Some(own);
    while let Some(received) = signals.next() {
        if ended {
            pass_to_leftovers(&received, manager);
            continue;
        }
        let scene = Scene {
            from_inside: received
                .sender
                .is_some_and(|pid| passing::is_inside(pid, own)),
            leads_session,
            stopped: procfs::is_stopped(program.id()),
            stops_again: signals.is_stop_pending(),
        };
        if passing::is_for_program(&received, scene) {
            signal::pass_on(&received, program.id());
        }
    }
    if !ended && let Some(number) = job_stop(program) {
        pause(signals, program, manager, number);
    }
}

/// Passes a signal to the processes that the program has left behind. Without us no process would
/// wait for them, so a signal that ends us ends them. A terminal has told its foreground group
/// itself.
fn pass_to_leftovers(received: &Received, manager: &Manager) {
    let number = received.number;
    if ![SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&number)
        && !passing::is_for_program(received, Scene::default())
    {
        return;
    }
    let ours = process::group_of(std::process::id());
    for pid in leftovers(manager) {
        if received.sender.is_some() || process::group_of(pid) != ours {
            signal::pass_on(received, pid);
        }
    }
}

/// The job-control signal that has stopped the program since the last call.
fn job_stop(program: &Child) -> Option<i32> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let pid = Pid::from_raw(program.id() as i32)?;
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::Pid(pid), options).ok()??;
    let number = status.stopping_signal()?;
    [SIGTSTP, SIGTTIN, SIGTTOU]
        .contains(&number)
        .then_some(number)
}

/// Stops as the program did. A SIGCONT to us continues the program too. If only the program is
/// continued, the manager wakes us.
fn pause(signals: &Signals, program: &Child, manager: &mut Manager, number: i32) {
    let request = Request::Paused {
        program: program.id(),
    };
    let told = serde_json::to_vec(&request)
        .map_err(io::Error::from)
        .and_then(|line| manager.link.write_all(&line));
    if told.is_ok() && procfs::is_stopped(program.id()) {
        signals.stop_by(number);
    }
}

/// Reaps our children that have ended: orphans of the program, holders. Those in `handled` are
/// reaped by their handles.
fn reap(handled: &[u32]) {
    for pid in procfs::children(std::process::id()) {
        if !handled.contains(&pid) && procfs::process_state(pid) == Some('Z') {
            reap_one(pid);
        }
    }
}

/// True if it had ended and was our child.
fn reap_one(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid as i32);
    let reaped = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
    pid.is_some() && matches!(reaped, Ok(Some(_)))
}

/// Processes of the program that still run: all our descendants but the manager and its holder. An
/// empty answer is final: the children of an ended process become ours before it shows as ended.
fn leftovers(manager: &Manager) -> Vec<u32> {
    loop {
        let (mut found, mut reaped) = (Vec::new(), false);
        let mut open = procfs::children(std::process::id());
        while let Some(pid) = open.pop() {
            if pid == manager.child.id() || pid == manager.holder.0 {
                continue;
            }
            if !process::is_running(pid) {
                reaped |= reap_one(pid);
                continue;
            }
            found.push(pid);
            open.extend(procfs::children(pid));
        }
        if !found.is_empty() || !reaped {
            return found;
        }
    }
}

/// Ends the program's processes and the manager, in [`KILLED`] and [`ENDING`] at most. Meanwhile
/// the holder keeps the program's memory from reading as zeros. It ends by itself when no address
/// space is left. A process that the kernel does not end in time (in an uninterruptible system
/// call) is left to the holder.
fn end_tree(program: &mut Child, manager: &mut Manager, voice: &Voice) {
    manager.handover = None;
    let held = !manager.holder.1.has_exited();
    let killed = if held {
        manager.end(voice)
    } else {
        Killed::Stays
    };
    let deadline = Instant::now() + ENDING;
    let left = kill_all(program, manager, deadline);
    let rest = deadline.saturating_duration_since(Instant::now());
    if !held && !left {
        // The holder is dead, so only the manager had the descriptors: it had to live until now.
        manager.end(voice);
    } else if !held {
        voice.say(&format!(
            "some of the program's processes have not ended after {ENDING:?}. The manager (process {}) \
             stays until it has ended them: without it, their memory would read as zeros",
            manager.child.id()
        ));
    } else if killed == Killed::Ended && !manager.holder.1.wait_exit(rest) {
        voice.say(&format!(
            "some of the program's memory is still in use after {ENDING:?}: the kernel has not ended all \
             its processes yet. The process named uc-fds ends them as soon as it can"
        ));
    }
    reap(&[manager.child.id()]);
}

/// Kills the program's processes until none is left, or until `deadline`. True if some are left.
fn kill_all(program: &mut Child, manager: &Manager, deadline: Instant) -> bool {
    let _ = program.kill();
    loop {
        let _ = program.try_wait();
        let left = leftovers(manager);
        if left.is_empty() || Instant::now() > deadline {
            let _ = program.try_wait();
            return !left.is_empty();
        }
        let left: Vec<PidFd> = left
            .into_iter()
            .filter_map(|pid| PidFd::open(pid).ok())
            .collect();
        for process in &left {
            let _ = process.kill();
        }
        for process in &left {
            process.wait_exit(deadline.saturating_duration_since(Instant::now()));
        }
    }
}

/// What the manager says at the end.
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
    let asked = serde_json::to_vec(&request).map_err(io::Error::from);
    let asked = asked.and_then(|line| manager.link.write_all(&line));
    let report = loop {
        let notice = notice_by(&mut manager.lines, &manager.pidfd, deadline);
        match notice.filter(|_| asked.is_ok()) {
            Some(Notice::Report(report)) => break Finished::Report(report),
            // The manager ended the program; to the keeper it looked like the program's own end.
            Some(Notice::Doomed(why)) => return Finished::Doomed(why),
            Some(_) => {}
            None => break Finished::Silent,
        }
    };
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

/// Writes the report and prints the summary, as far as the user wants them.
fn deliver(options: &RunOptions, report: &Report, voice: &mut Voice) {
    if let Some(path) = &options.report {
        let written = serde_json::to_vec_pretty(report)
            .map_err(io::Error::from)
            .and_then(|bytes| std::fs::write(path, bytes));
        if let Err(error) = written {
            voice.say(&format!(
                "the report could not be written to {}: {error}",
                path.display()
            ));
        }
    }
    if !options.client.quiet && report.faults.total > 0 {
        use std::io::IsTerminal;
        let color = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        voice.print(human_summary(report, color));
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
