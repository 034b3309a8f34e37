//! Starts and stops the store of one setting, on a rig of its own.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use undercroft_base::Bytes;
use undercroft_proto::report::Report;
use undercroft_resp::{Client, Reply};
use undercroft_rig::{CommandLine, Rig, RigError, Running, Stdout, interrupt};
use undercroft_terminal::{Failure, status};

const START_PATIENCE: Duration = Duration::from_secs(20);
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// A running store. Dropping it ends the store and restores the machine.
pub(super) struct Server {
    running: Running,
    log: PathBuf,
    socket: PathBuf,
}

/// The memory that a stopped store has used.
pub(super) struct Used {
    /// DRAM at its peak: resident plus compressed pages.
    pub dram: Bytes,
    /// Memory of its group at its peak, all processes of the rig and pages of files included.
    pub group: Bytes,
    /// Undercroft's own report.
    pub report: Option<Report>,
}

/// Why a setting could not be run.
pub(super) enum NoServer {
    /// This machine does not allow it. The other settings still run.
    Unavailable(String),
    /// The setting should have worked.
    Failed(Failure),
}

impl Server {
    /// Starts the store in `limit` and waits until it answers.
    ///
    /// * `directory`: for its socket and its log.
    pub(super) fn start(
        rig: &dyn Rig,
        limit: Bytes,
        directory: &Path,
    ) -> Result<(Server, Client), NoServer> {
        let socket = directory.join(format!("{}.sock", rig.name()));
        // The store of the round before has left it.
        let _ = std::fs::remove_file(&socket);
        let log = directory.join(format!("{}.log", rig.name()));
        let own = own_binary().map_err(NoServer::Failed)?;
        let command = CommandLine {
            words: vec![
                own.into(),
                "demo-kv".into(),
                "--socket".into(),
                socket.clone().into(),
            ],
            stdout: Stdout::File(log.clone()),
        };
        let stage = rig.set_up(limit).map_err(|error| match error {
            RigError::Unavailable { .. } | RigError::OtherSwap(_) => {
                NoServer::Unavailable(error.to_string())
            }
            other => NoServer::Failed(rig_failure(other)),
        })?;
        let running = stage.spawn(&command);
        let running = running.map_err(|error| NoServer::Failed(rig_failure(error)))?;
        let mut server = Server {
            running,
            log,
            socket,
        };
        let client = server.wait_until_ready().map_err(NoServer::Failed)?;
        Ok((server, client))
    }

    fn wait_until_ready(&mut self) -> Result<Client, Failure> {
        let until = Instant::now() + START_PATIENCE;
        while Instant::now() < until && !interrupt::requested() {
            if let Ok(mut client) = Client::connect(&self.socket)
                && let Ok(Reply::Status(_)) = client.call(&[b"PING"])
            {
                return Ok(client);
            }
            if !self.running.is_running() {
                return Err(self.failure("the store ended at once"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(self.failure("the store does not answer"))
    }

    /// `first` and as many more connections as make `count`.
    pub(super) fn more(&self, first: Client, count: usize) -> io::Result<Vec<Client>> {
        let mut clients = vec![first];
        while clients.len() < count {
            clients.push(Client::connect(&self.socket)?);
        }
        Ok(clients)
    }

    /// A failure of this store, with the end of what it printed.
    pub(super) fn failure(&self, what: &str) -> Failure {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
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

    /// Most memory that the started process had resident so far.
    fn resident_peak(&self) -> Option<Bytes> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.running.id())).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(Bytes(kib * 1024))
    }

    /// Process id of what the rig has started.
    pub(super) fn pid(&self) -> u32 {
        self.running.id()
    }

    /// Waits for the end of a store that broke off. True if SIGKILL ended it.
    pub(super) fn was_killed(self) -> Result<bool, Failure> {
        let outcome = self.running.finish().map_err(rig_failure)?;
        Ok(outcome.status.signal() == Some(9))
    }

    /// Shuts the store down. Returns what it used.
    ///
    /// * `plain`: it ran without a limit, so that its own process has all of it.
    pub(super) fn finish(mut self, mut client: Client, plain: bool) -> Result<Used, Failure> {
        let resident = self.resident_peak().filter(|_| plain);
        // The store closes the connection instead of answering.
        let _ = client.call(&[b"SHUTDOWN"]);
        drop(client);
        let until = Instant::now() + STOP_PATIENCE;
        while self.running.is_running() {
            if Instant::now() > until {
                return Err(self.failure("the store does not end"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let badly = self.failure("the store did not end well");
        let outcome = self.running.finish().map_err(rig_failure)?;
        if !outcome.status.success() {
            return Err(badly);
        }
        let report = outcome.report.map(serde_json::from_value).transpose();
        let report = report.map_err(|error| {
            Failure::new(
                status::FAILED,
                "the run left no usable report",
                error.to_string(),
                "please report this; it is a bug",
            )
        })?;
        Ok(Used {
            group: Bytes(outcome.memory.cgroup_peak_bytes),
            dram: resident.unwrap_or(Bytes(outcome.memory.total_peak_bytes)),
            report,
        })
    }
}

/// The program file of this process.
pub(super) fn own_binary() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| {
        Failure::new(
            status::FAILED,
            "cannot find undercroft's own program file",
            error.to_string(),
            "mount /proc",
        )
    })
}

fn rig_failure(error: RigError) -> Failure {
    Failure::new(
        status::FAILED,
        "a setting of the demo failed",
        error.to_string(),
        "run `undercroft doctor`; --no-kernel-swap leaves the kernel's settings out",
    )
}
