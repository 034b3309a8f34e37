//! The keeper: owns one run. Opens what must survive the manager, starts the manager and the program, waits for both, and never lets a
//! program run on without its manager.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs;
use undercroft_wire::protocol::SOCKET_VARIABLE;

use crate::ledger;
use crate::options::RunOptions;
use crate::report::{Report, human_summary};
use crate::serve::{Launch, Notice, Request};
use crate::tiers::{self, OpenTier};

/// The shim, compiled with this crate.
const SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libundercroft_shim.so"));
/// Its file name.
pub(crate) const SHIM_NAME: &str = "libundercroft_shim.so";

/// Status when Undercroft, not the program, failed.
pub const OUR_FAILURE: i32 = 125;

/// Chunks of the ledger: 2 MiB of address space each, 1 TiB in all. Sparse: only used ones take memory.
const LEDGER_CHUNKS: usize = 1 << 19;

/// How long the manager may take to be ready.
const READY: Duration = Duration::from_secs(10);

/// How often leftover processes of the program are looked for.
const LEFTOVER_TICK: Duration = Duration::from_millis(20);

/// Directory in which every run has its own: `$UNDERCROFT_DIR`, or one in the runtime or temporary directory.
pub fn base_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("UNDERCROFT_DIR") {
        return PathBuf::from(dir);
    }
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_dir() => dir.join("undercroft"),
        _ => {
            std::env::temp_dir().join(format!("undercroft-{}", rustix::process::getuid().as_raw()))
        }
    }
}

/// The run's directory; removed with the run.
struct RunDir(PathBuf);

impl RunDir {
    fn create() -> io::Result<RunDir> {
        use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
        let base = base_dir();
        let explain = |error: io::Error| {
            let text = format!(
                "cannot use {} for the run's files: {error}; set UNDERCROFT_DIR to a directory you may write to",
                base.display()
            );
            io::Error::new(error.kind(), text)
        };
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&base)
            .map_err(explain)?;
        let dir = base.join(std::process::id().to_string());
        let _ = std::fs::remove_dir_all(&dir); // of a dead run with our number
        std::fs::DirBuilder::new()
            .mode(0o755)
            .create(&dir)
            .map_err(explain)?;
        let shim = dir.join(SHIM_NAME);
        std::fs::write(&shim, SHIM).map_err(explain)?;
        std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o755))?;
        Ok(RunDir(dir))
    }

    fn listen(&self, name: &str, kind: SocketType, mode: u32) -> io::Result<OwnedFd> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.0.join(name);
        let address = SocketAddrUnix::new(&path).map_err(|_| {
            io::Error::other(format!(
                "the path {} is too long for a socket; set UNDERCROFT_DIR to a shorter one",
                path.display()
            ))
        })?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, 128)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        Ok(socket)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a program under management; returns the status to exit with. Errors are told on stderr.
pub fn run(options: &RunOptions) -> i32 {
    match try_run(options) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("undercroft: {error}");
            OUR_FAILURE
        }
    }
}

struct Manager {
    child: Child,
    pidfd: PidFd,
    link: UnixStream,
    lines: BufReader<UnixStream>,
}

fn try_run(options: &RunOptions) -> io::Result<i32> {
    process::become_subreaper()?;
    let signals = Signals::new()?;
    let dir = RunDir::create()?;
    let tiers = tiers::open(&options.client)?;
    if tiers.iter().any(OpenTier::is_in_memory) && !options.client.quiet {
        eprintln!(
            "undercroft: warning: a tier's file lies in a memory file system, so it saves no memory"
        );
    }
    let mut manager = start_manager(options, &dir, &tiers)?;
    let started = Instant::now();
    let mut program = match start_program(options, &dir.0) {
        Ok(program) => program,
        Err((status, why)) => {
            eprintln!("undercroft: {why}");
            let _ = finish(&mut manager, status, Duration::ZERO);
            return Ok(status);
        }
    };
    let ended = wait(&mut program, &mut manager, &signals)?;
    let wall = started.elapsed();
    match ended {
        Ended::Program(exit) => {
            let status = exit_code(exit);
            match finish(&mut manager, status, wall) {
                Some(report) => deliver(options, &report),
                None => eprintln!("undercroft: the manager gave no report"),
            }
            Ok(status)
        }
        Ended::Doomed(why) => {
            end_tree(&mut program, &mut manager);
            eprintln!("undercroft: the program was ended: {why}");
            Ok(OUR_FAILURE)
        }
        Ended::ManagerDied => {
            end_tree(&mut program, &mut manager);
            eprintln!(
                "undercroft: the manager died; the program was held and ended, so that it never saw wrong memory"
            );
            Ok(OUR_FAILURE)
        }
    }
}

fn start_manager(options: &RunOptions, dir: &RunDir, tiers: &[OpenTier]) -> io::Result<Manager> {
    let listener = dir.listen("shim.sock", SocketType::SEQPACKET, 0o777)?;
    let status = dir.listen("status.sock", SocketType::STREAM, 0o600)?;
    let ledger = SharedMemory::create("uc-ledger", ledger::bytes_for(LEDGER_CHUNKS))?;
    let (link, theirs) = UnixStream::pair()?;
    let command = options
        .command
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    let launch = Launch {
        options: options.client.clone(),
        command,
        keeper: std::process::id(),
        listener: listener.as_raw_fd(),
        link: theirs.as_raw_fd(),
        status: status.as_raw_fd(),
        ledger: ledger.as_fd().as_raw_fd(),
        ledger_chunks: LEDGER_CHUNKS,
        tiers: tiers.iter().map(OpenTier::launch).collect(),
    };
    let mut inherited: Vec<BorrowedFd<'_>> = vec![
        listener.as_fd(),
        status.as_fd(),
        ledger.as_fd(),
        theirs.as_fd(),
    ];
    inherited.extend(tiers.iter().flat_map(OpenTier::descriptors));
    for fd in &inherited {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
    }
    let program = std::env::current_exe()?;
    let spawned = Command::new(program)
        .arg0("undercroft")
        .arg("manager")
        .arg(serde_json::to_string(&launch)?)
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0) // a Ctrl-C at the terminal is for the program
        .spawn();
    for fd in &inherited {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::CLOEXEC)?;
    }
    let child = spawned?;
    drop(theirs);
    let pidfd = PidFd::open(child.id())?;
    let mut manager = Manager {
        lines: BufReader::new(link.try_clone()?),
        child,
        pidfd,
        link,
    };
    manager.link.set_read_timeout(Some(READY))?;
    match next_notice(&mut manager) {
        Some(Notice::Ready) => {}
        other => {
            let _ = manager.child.kill();
            let _ = manager.child.wait();
            let why = match other {
                Some(Notice::Failed(why)) => why,
                _ => "the manager did not start".to_owned(),
            };
            return Err(io::Error::other(format!(
                "{why} (`undercroft doctor` tells what is missing)"
            )));
        }
    }
    manager.link.set_read_timeout(None)?;
    Ok(manager)
}

fn next_notice(manager: &mut Manager) -> Option<Notice> {
    let mut line = String::new();
    manager
        .lines
        .read_line(&mut line)
        .ok()
        .filter(|got| *got > 0)?;
    serde_json::from_str(&line).ok()
}

/// Starts the program with the shim; the error is (status, text).
fn start_program(options: &RunOptions, dir: &Path) -> Result<Child, (i32, String)> {
    let name = &options.command[0];
    let mut preload = dir.join(SHIM_NAME).into_os_string();
    if let Some(already) = std::env::var_os("LD_PRELOAD").filter(|value| !value.is_empty()) {
        preload.push(":");
        preload.push(already);
    }
    let spawned = Command::new(name)
        .args(&options.command[1..])
        .env("LD_PRELOAD", preload)
        .env(SOCKET_VARIABLE, dir.join("shim.sock"))
        .spawn();
    spawned.map_err(|error| {
        let shown = Path::new(name).display();
        match error.kind() {
            io::ErrorKind::NotFound => (127, format!("{shown}: not found")),
            io::ErrorKind::PermissionDenied => (126, format!("{shown}: not executable")),
            _ => (126, format!("{shown}: cannot be started: {error}")),
        }
    })
}

enum Ended {
    Program(ExitStatus),
    Doomed(String),
    ManagerDied,
}

/// Waits for the program and everything it left behind, passing signals on.
fn wait(program: &mut Child, manager: &mut Manager, signals: &Signals) -> io::Result<Ended> {
    let pidfd = PidFd::open(program.id())?;
    let mut exit = None;
    loop {
        let mut fds = vec![
            PollFd::new(&manager.pidfd, PollFlags::IN),
            PollFd::new(&manager.link, PollFlags::IN),
            PollFd::new(&signals.read, PollFlags::IN),
        ];
        if exit.is_none() {
            fds.push(PollFd::new(&pidfd, PollFlags::IN));
        }
        let tick = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: LEFTOVER_TICK.subsec_nanos().into(),
        };
        let _ = poll(&mut fds, exit.map(|_| &tick));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if ready[1] && !ready[0] {
            match next_notice(manager) {
                Some(Notice::Doomed(why)) => return Ok(Ended::Doomed(why)),
                Some(_) => {}
                None => return Ok(Ended::ManagerDied),
            }
        }
        if ready[0] {
            return Ok(Ended::ManagerDied);
        }
        if ready[2] {
            signals.pass_on(program, exit.is_some(), manager);
        }
        if exit.is_none() {
            exit = program.try_wait()?;
        }
        if let Some(status) = exit {
            reap(manager.child.id());
            if leftovers(manager).is_empty() {
                return Ok(Ended::Program(status));
            }
        }
    }
}

/// Reaps orphans of the program that have ended; the manager is left to its handle.
fn reap(manager: u32) {
    for pid in procfs::children(std::process::id()) {
        if pid != manager && procfs::process_state(pid) == Some('Z') {
            let pid = rustix::process::Pid::from_raw(pid as i32);
            let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
        }
    }
}

/// Processes of the program that still run: all our descendants but the manager's own.
fn leftovers(manager: &Manager) -> Vec<u32> {
    let mut found = Vec::new();
    let mut open = procfs::children(std::process::id());
    while let Some(pid) = open.pop() {
        let own = pid == manager.child.id() || is_holder(pid);
        if own || procfs::process_state(pid).is_none_or(|state| state == 'Z') {
            continue;
        }
        found.push(pid);
        open.extend(procfs::children(pid));
    }
    found
}

/// The manager's descriptor holder: orphaned when the manager dies.
fn is_holder(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "uc-fds")
}

/// Ends everything: the program's processes while the holder keeps their memory from reading as zeros, then the holder.
fn end_tree(program: &mut Child, manager: &mut Manager) {
    let _ = manager.child.kill();
    let _ = manager.child.wait();
    let _ = program.kill();
    loop {
        let left = leftovers(manager);
        if left.is_empty() {
            break;
        }
        for pid in left {
            if let Ok(pidfd) = PidFd::open(pid) {
                let _ = pidfd.kill();
                pidfd.wait_exit(Duration::from_secs(1));
            }
        }
        let _ = program.try_wait();
        reap(manager.child.id());
    }
    let _ = program.wait();
    for pid in procfs::children(std::process::id()) {
        if is_holder(pid)
            && let Ok(pidfd) = PidFd::open(pid)
        {
            let _ = pidfd.kill();
            pidfd.wait_exit(Duration::from_secs(1));
        }
    }
    reap(manager.child.id());
}

/// Asks the manager for the report and lets it end.
fn finish(manager: &mut Manager, exit_status: i32, wall: Duration) -> Option<Report> {
    let request = Request::Finish {
        exit_status,
        wall_ns: wall.as_nanos() as u64,
    };
    let line = serde_json::to_vec(&request).ok()?;
    let _ = manager.link.set_read_timeout(Some(READY));
    manager.link.write_all(&line).ok()?;
    let report = loop {
        match next_notice(manager) {
            Some(Notice::Report(report)) => break Some(*report),
            Some(_) => {}
            None => break None,
        }
    };
    if !manager.pidfd.wait_exit(READY) {
        let _ = manager.child.kill();
    }
    let _ = manager.child.wait();
    report
}

fn deliver(options: &RunOptions, report: &Report) {
    if let Some(path) = &options.report {
        let written = serde_json::to_vec_pretty(report)
            .map_err(io::Error::from)
            .and_then(|bytes| std::fs::write(path, bytes));
        if let Err(error) = written {
            eprintln!(
                "undercroft: the report could not be written to {}: {error}",
                path.display()
            );
        }
    }
    if !options.client.quiet && report.faults.total > 0 {
        use std::io::IsTerminal;
        let color = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        eprint!("{}", human_summary(report, color));
    }
}

/// As a shell gives it: 128 + signal for a program that was killed.
fn exit_code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Signals that end us are the program's to answer: they are passed on.
struct Signals {
    read: UnixStream,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
            signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
        }
        Ok(Signals { read })
    }

    /// SIGTERM to the program (or what is left of it); a terminal sends its signals to the program by itself.
    fn pass_on(&self, program: &Child, ended: bool, manager: &Manager) {
        let mut bytes = [0u8; 64];
        while rustix::io::read(&self.read, &mut bytes).is_ok_and(|got| got > 0) {}
        let pids = match ended {
            true => leftovers(manager),
            false => vec![program.id()],
        };
        for pid in pids {
            if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
    }
}
