//! Starts and stops the store of one setting: without a limit, under undercroft, or under kernel
//! swap.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::Bytes;
use undercroft_lab::rig::{self, Rig, RigError, Running};
use undercroft_manager::report::Report;

use crate::failure::{Failure, status};
use undercroft_resp::{Client, Reply};

const START_PATIENCE: Duration = Duration::from_secs(20);
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// One way to run the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// As it is.
    NoLimit,
    /// Under `undercroft run` with this limit.
    Undercroft(Bytes),
    /// In a memory cgroup of this size with compressed swap (zram). The compressed pages come on
    /// top.
    Zram(Bytes),
    /// In a memory cgroup of this size with a swap file.
    SwapFile(Bytes),
}

/// A running store, and what ends it. Dropping it ends the store and restores the machine.
pub(super) struct Server {
    run: Run,
    log: PathBuf,
    report: Option<PathBuf>,
    socket: PathBuf,
}

enum Run {
    Child(Guard),
    Rig(Box<Running>),
}

/// A child that is ended when this is dropped: asked first, killed later.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            // A keeper that is asked ends its program; a killed one cannot.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let until = Instant::now() + STOP_PATIENCE;
        while Instant::now() < until {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The memory that a stopped store has used.
pub(super) struct Used {
    /// DRAM at its peak: resident plus compressed pages.
    pub dram: Bytes,
    /// Undercroft's own report.
    pub report: Option<Report>,
}

/// Why a setting could not be run.
pub(super) enum NoServer {
    /// This machine does not allow it. The other settings still run.
    Unavailable(String),
    /// It should have worked.
    Failed(Failure),
}

/// Where the store's files go, and which store.
pub(super) struct Place<'a> {
    /// Directory for sockets, logs and reports; gone after the demo.
    pub directory: &'a Path,
    /// redis-server, or `None` for the bundled store.
    pub redis: Option<&'a Path>,
    /// Bytes of values: sizes the swap of the kernel's settings.
    pub size: Bytes,
}

impl Server {
    /// Starts the store and waits until it answers.
    pub(super) fn start(
        setting: Setting,
        place: &Place<'_>,
        stop: &AtomicBool,
    ) -> Result<(Server, Client), NoServer> {
        let name = match setting {
            Setting::NoLimit => "plain",
            Setting::Undercroft(_) => "undercroft",
            Setting::Zram(_) => "zram",
            Setting::SwapFile(_) => "swapfile",
        };
        let socket = place.directory.join(format!("{name}.sock"));
        // The store of the round before has left it.
        let _ = fs::remove_file(&socket);
        let log = place.directory.join(format!("{name}.log"));
        let mut words = Vec::new();
        let mut report = None;
        if let Setting::Undercroft(limit) = setting {
            let path = place.directory.join(format!("{name}.json"));
            words.extend(undercroft_words(limit, &path).map_err(NoServer::Failed)?);
            report = Some(path);
        }
        words.extend(store_words(place, &socket).map_err(NoServer::Failed)?);
        let swap = Bytes(2 * place.size.0 + (256 << 20));
        let run = match setting {
            Setting::NoLimit | Setting::Undercroft(_) => {
                Run::Child(spawn(&words, &log).map_err(NoServer::Failed)?)
            }
            Setting::Zram(limit) => stage(&rig::Zram { swap }, limit, words, &log)?,
            Setting::SwapFile(limit) => {
                let directory = swap_directory(place.directory)?;
                stage(&rig::SwapFile { swap, directory }, limit, words, &log)?
            }
        };
        let mut server = Server {
            run,
            log,
            report,
            socket,
        };
        let client = server.wait_until_ready(stop).map_err(NoServer::Failed)?;
        Ok((server, client))
    }

    fn wait_until_ready(&mut self, stop: &AtomicBool) -> Result<Client, Failure> {
        let until = Instant::now() + START_PATIENCE;
        while Instant::now() < until && !stop.load(Ordering::Relaxed) {
            if let Ok(mut client) = Client::connect(&self.socket)
                && let Ok(Reply::Status(_)) = client.call(&[b"PING"])
            {
                return Ok(client);
            }
            if !self.is_running() {
                return Err(self.failure("the store ended at once"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(self.failure(if stop.load(Ordering::Relaxed) {
            "interrupted"
        } else {
            "the store does not answer"
        }))
    }

    /// `first` and as many more connections as make `count`.
    pub(super) fn more(&self, first: Client, count: usize) -> io::Result<Vec<Client>> {
        let mut clients = vec![first];
        while clients.len() < count {
            clients.push(Client::connect(&self.socket)?);
        }
        Ok(clients)
    }

    fn is_running(&mut self) -> bool {
        match &mut self.run {
            Run::Child(guard) => matches!(guard.0.try_wait(), Ok(None)),
            Run::Rig(running) => running.is_running(),
        }
    }

    /// A failure of this store, with the end of what it printed.
    pub(super) fn failure(&self, what: &str) -> Failure {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(12)..].join("\n       ");
        let why = if tail.is_empty() {
            "it printed nothing".to_owned()
        } else {
            format!("it printed\n       {tail}")
        };
        Failure::new(
            status::FAILED,
            what,
            why,
            "run `undercroft doctor` to see what this machine allows",
        )
    }

    /// Most memory the store's own process had resident so far.
    pub(super) fn resident_peak(&self) -> Option<Bytes> {
        let Run::Child(guard) = &self.run else {
            return None;
        };
        let text = fs::read_to_string(format!("/proc/{}/status", guard.0.id())).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(Bytes(kib * 1024))
    }

    /// Shuts the store down. Returns what it used.
    pub(super) fn finish(mut self, mut client: Client) -> Result<Used, Failure> {
        let resident = self.resident_peak();
        // The store closes the connection instead of answering.
        let _ = client.call(&[b"SHUTDOWN", b"NOSAVE"]);
        drop(client);
        let until = Instant::now() + STOP_PATIENCE;
        while self.is_running() {
            if Instant::now() > until {
                return Err(self.failure("the store does not end"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let ended_well = match &mut self.run {
            Run::Child(guard) => matches!(guard.0.wait(), Ok(status) if status.success()),
            Run::Rig(_) => true,
        };
        if !ended_well {
            return Err(self.failure("the store did not end well"));
        }
        let report = match &self.report {
            Some(path) => Some(read_report(path)?),
            None => None,
        };
        let dram = match (self.run, &report) {
            (Run::Rig(running), _) => {
                let outcome = running.finish().map_err(rig_failure)?;
                Bytes(outcome.memory.total_peak_bytes)
            }
            (_, Some(report)) => Bytes(report.dram_bytes_peak),
            (..) => resident.unwrap_or_default(),
        };
        Ok(Used { dram, report })
    }
}

fn read_report(path: &Path) -> Result<Report, Failure> {
    let bad = |why: String| {
        Failure::new(
            status::FAILED,
            "the run left no usable report",
            why,
            "please report this; it is a bug",
        )
    };
    let text = fs::read_to_string(path).map_err(|error| bad(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| bad(error.to_string()))
}

fn own_binary() -> Result<OsString, Failure> {
    std::env::current_exe()
        .map(PathBuf::into_os_string)
        .map_err(|error| {
            Failure::new(
                status::FAILED,
                "cannot find undercroft's own program file",
                error.to_string(),
                "mount /proc",
            )
        })
}

fn undercroft_words(limit: Bytes, report: &Path) -> Result<Vec<OsString>, Failure> {
    let limit = limit.0.to_string();
    Ok(vec![
        own_binary()?,
        "run".into(),
        "--memory-max".into(),
        limit.into(),
        "--report".into(),
        report.into(),
        "--quiet".into(),
        "--".into(),
    ])
}

fn store_words(place: &Place<'_>, socket: &Path) -> Result<Vec<OsString>, Failure> {
    let Some(redis) = place.redis else {
        return Ok(vec![
            own_binary()?,
            "demo-kv".into(),
            "--socket".into(),
            socket.into(),
        ]);
    };
    let mut words = vec![redis.as_os_str().to_owned()];
    // Everything in memory: no port, no snapshots, no log of writes.
    for word in [
        "--port",
        "0",
        "--save",
        "",
        "--appendonly",
        "no",
        "--unixsocket",
    ] {
        words.push(word.into());
    }
    words.extend([socket.into(), "--dir".into(), place.directory.into()]);
    Ok(words)
}

fn spawn(words: &[OsString], log: &Path) -> Result<Guard, Failure> {
    let child = File::create(log).and_then(|out| {
        let errors = out.try_clone()?;
        Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(errors)
            .spawn()
    });
    child.map(Guard).map_err(|error| {
        let program = words[0].to_string_lossy();
        Failure::new(
            status::FAILED,
            format!("cannot start {program}"),
            error.to_string(),
            "check that it can be run",
        )
    })
}

fn stage(rig: &dyn Rig, limit: Bytes, words: Vec<OsString>, log: &Path) -> Result<Run, NoServer> {
    let stage = rig.set_up(limit).map_err(|error| match error {
        RigError::Unavailable { .. } | RigError::OtherSwap(_) => {
            NoServer::Unavailable(error.to_string())
        }
        other => NoServer::Failed(rig_failure(other)),
    })?;
    let command = rig::CommandLine {
        words,
        stdout: rig::Stdout::File(log.to_owned()),
    };
    stage
        .spawn(&command)
        .map(|running| Run::Rig(Box::new(running)))
        .map_err(|error| NoServer::Failed(rig_failure(error)))
}

fn rig_failure(error: RigError) -> Failure {
    Failure::new(
        status::FAILED,
        "the comparison with kernel swap failed",
        error.to_string(),
        "leave it out with --no-kernel-swap",
    )
}

/// A swap file needs a file system on a disk; the temporary directory may be in memory.
fn swap_directory(temporary: &Path) -> Result<PathBuf, NoServer> {
    let tier = crate::run::tier_directory(None, temporary.to_owned()).map_err(NoServer::Failed)?;
    if tier == temporary {
        Ok(temporary.to_owned())
    } else {
        Ok(tier)
    }
}

/// The first redis-server on `PATH`.
pub(super) fn find_redis() -> Option<PathBuf> {
    crate::preflight::check("redis-server".as_ref()).ok()
}

/// The bundled store, as its own process.
pub(super) fn serve_bundled(socket: &Path) -> io::Result<()> {
    super::bundled::serve(socket)
}
