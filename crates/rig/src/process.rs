//! A command on a stage: starts it in its cgroup, meters it every 10 ms, stops it and accounts for
//! it.

use super::{Facts, MemoryUse, RigError, Stage, StoreMeter};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

const SAMPLE_EVERY: Duration = Duration::from_millis(10);
/// How long a command may take after an interrupt or `stop` before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// How long the kernel may refuse another limit.
const LIMIT_PATIENCE: Duration = Duration::from_secs(5);

fn is_busy(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::ResourceBusy
}

/// A program and its arguments.
#[derive(Clone, Debug)]
pub struct CommandLine {
    /// Words, the program first.
    pub words: Vec<OsString>,
    /// Where its standard output goes.
    pub stdout: Stdout,
}

/// Uses of a command's standard output.
#[derive(Clone, Debug)]
pub enum Stdout {
    /// Kept in memory line by line, and returned in the outcome.
    Lines,
    /// Standard output and error both go to this file.
    File(PathBuf),
}

/// The outcome of one run.
#[derive(Debug)]
pub struct Finished {
    /// Lines of standard output (with `Stdout::Lines`).
    pub lines: Vec<String>,
    /// Its exit status.
    pub status: ExitStatus,
    /// Time from start to end.
    pub wall: Duration,
    /// DRAM used.
    pub memory: MemoryUse,
    /// The rig's facts.
    pub facts: Facts,
    /// Undercroft's own report, if the rig writes one.
    pub report: Option<serde_json::Value>,
}

/// A started command. Dropping it kills the command before the stage is taken down.
pub struct Running {
    child: Child,
    began: Instant,
    lines: Arc<Mutex<Vec<String>>>,
    reader: Option<JoinHandle<()>>,
    sampler: Option<JoinHandle<()>>,
    done: Arc<AtomicBool>,
    stored_peak: Arc<AtomicU64>,
    stage: Stage,
}

impl Stage {
    /// Starts `command` on this stage.
    pub fn spawn(self, command: &CommandLine) -> Result<Running, RigError> {
        let words: Vec<OsString> = self.prefix.iter().chain(&command.words).cloned().collect();
        let mut process = self.process(&words);
        process.stdin(Stdio::null());
        command.stdout.connect(&mut process)?;
        let program = words[0].to_string_lossy().into_owned();
        let mut child = process
            .spawn()
            .map_err(RigError::failed(format!("start {program}")))?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        let reader = child
            .stdout
            .take()
            .map(|stdout| keep_lines(stdout, lines.clone()));
        let done = Arc::new(AtomicBool::new(false));
        let stored_peak = Arc::new(AtomicU64::new(0));
        let sampler = self.meter.start(&done, &stored_peak);
        Ok(Running {
            child,
            began: Instant::now(),
            lines,
            reader,
            sampler,
            done,
            stored_peak,
            stage: self,
        })
    }

    /// The command that runs `words`, inside the stage's cgroup if it has one.
    fn process(&self, words: &[OsString]) -> Command {
        let Some(cgroup) = &self.cgroup else {
            let mut direct = Command::new(&words[0]);
            direct.args(&words[1..]);
            return direct;
        };
        // The shell puts itself into the group and becomes the command, so no page is charged
        // elsewhere.
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(cgroup.procs())
            .args(words);
        shell
    }
}

impl Stdout {
    /// Connects the output of `process` to its destination.
    fn connect(&self, process: &mut Command) -> Result<(), RigError> {
        match self {
            Stdout::Lines => process.stdout(Stdio::piped()),
            Stdout::File(path) => {
                let what = || RigError::failed(format!("write {}", path.display()));
                let file = File::create(path).map_err(what())?;
                let twin = file.try_clone().map_err(what())?;
                process.stderr(twin).stdout(file)
            }
        };
        Ok(())
    }
}

/// Starts the thread that keeps the lines of `stdout`.
fn keep_lines(stdout: ChildStdout, lines: Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            lines
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    })
}

impl StoreMeter {
    /// Starts the thread that keeps the largest stored size in `peak` until `done`; `None` if there
    /// is nothing to read.
    fn start(&self, done: &Arc<AtomicBool>, peak: &Arc<AtomicU64>) -> Option<JoinHandle<()>> {
        let path = self.path()?;
        let zram = matches!(self, StoreMeter::Zram(_));
        let (done, peak) = (done.clone(), peak.clone());
        Some(std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let text = fs::read_to_string(&path).unwrap_or_default();
                peak.fetch_max(stored_bytes(&text, zram).unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(SAMPLE_EVERY);
            }
        }))
    }

    fn path(&self) -> Option<PathBuf> {
        match self {
            StoreMeter::None => None,
            StoreMeter::Zram(path) => Some(path.clone()),
            StoreMeter::Zswap => Some(PathBuf::from("/proc/meminfo")),
        }
    }
}

/// zram: the fifth field of `mm_stat` is the most memory ever used. meminfo: the `Zswap:` line, in
/// kB.
fn stored_bytes(text: &str, zram: bool) -> Option<u64> {
    if zram {
        let mut fields = text.split_whitespace();
        return fields.nth(4)?.parse().ok();
    }
    let line = text.lines().find_map(|line| line.strip_prefix("Zswap:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

impl Running {
    /// The process id of the started command (the keeper for undercroft).
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Lines printed so far.
    pub fn lines_so_far(&self) -> Vec<String> {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether the command has not ended yet.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sets another limit of a kernel rig. Errors: the kernel refuses it for long.
    pub fn set_limit(&self, limit: Bytes) -> Result<(), RigError> {
        let Some(group) = &self.stage.cgroup else {
            return Ok(());
        };
        let until = Instant::now() + LIMIT_PATIENCE;
        loop {
            // The first version of groups refuses a limit until enough was reclaimed for it.
            let busy = match group.limit(limit) {
                Err(RigError::Failed { what, source }) if is_busy(&source) => (what, source),
                other => return other,
            };
            if Instant::now() > until {
                let (what, source) = busy;
                return Err(RigError::Failed { what, source });
            }
        }
    }

    /// Asks the command to end (SIGTERM); `finish` then waits for it.
    pub fn stop(&mut self) {
        if self.is_running() {
            let _ = Command::new("kill")
                .arg("-TERM")
                .arg(self.child.id().to_string())
                .status();
        }
    }

    /// Waits for the end, takes the stage down and returns what was measured. Errors: `Interrupted`
    /// if the user asked for the end; the command has then been killed.
    pub fn finish(mut self) -> Result<Finished, RigError> {
        let status = loop {
            match self
                .child
                .try_wait()
                .map_err(RigError::failed("wait for the command"))?
            {
                Some(status) => break status,
                None if crate::interrupt::requested() => return Err(RigError::Interrupted),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        };
        let wall = self.began.elapsed();
        let reader = self.reader.take();
        if reader.is_some_and(|reader| reader.join().is_err()) {
            return Err(RigError::Unreadable {
                what: "read the command's output".into(),
                why: "the reader thread panicked".into(),
            });
        }
        self.stop_sampler();
        let report = match &self.stage.report {
            Some(path) if status.success() => Some(read_report(path)?),
            Some(path) => {
                let _ = fs::remove_file(path); // of a run that failed or was stopped
                None
            }
            None => None,
        };
        let memory = self.memory(report.as_ref());
        let lines = std::mem::take(&mut *self.lines.lock().unwrap_or_else(PoisonError::into_inner));
        let facts = self.stage.facts.clone();
        Ok(Finished {
            lines,
            status,
            wall,
            memory,
            facts,
            report,
        })
    }

    fn memory(&self, report: Option<&serde_json::Value>) -> MemoryUse {
        let cgroup_peak = self
            .stage
            .cgroup
            .as_ref()
            .map_or(Bytes(0), |cgroup| cgroup.peak());
        let stored = self.stored_peak.load(Ordering::Relaxed);
        let of_report = |name: &str| {
            report
                .and_then(|report| report.get(name))
                .and_then(|value| value.as_u64())
        };
        let pool = report.and_then(|report| {
            let tiers = report.get("tiers")?.as_array()?;
            let ram = tiers
                .iter()
                .find(|tier| tier.get("kind").and_then(|kind| kind.as_str()) == Some("ram"))?;
            ram.get("held_bytes_peak")
                .or(ram.get("stored_bytes_peak"))?
                .as_u64()
        });
        MemoryUse {
            limit_bytes: self.stage.limit.0,
            cgroup_peak_bytes: cgroup_peak.0,
            compressed_peak_bytes: pool.unwrap_or(stored),
            total_peak_bytes: of_report("dram_bytes_peak").unwrap_or(cgroup_peak.0 + stored),
        }
    }

    fn stop_sampler(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            let _ = sampler.join();
        }
    }
}

/// Reads and removes the report of a run. Errors: absent or not JSON, which no successful run
/// leaves.
fn read_report(path: &std::path::Path) -> Result<serde_json::Value, RigError> {
    let what = format!("read undercroft's report {}", path.display());
    let text = fs::read_to_string(path).map_err(RigError::failed(&what))?;
    let report = serde_json::from_str(&text).map_err(|error| RigError::Unreadable {
        what: what.clone(),
        why: error.to_string(),
    })?;
    fs::remove_file(path).map_err(RigError::failed(&what))?;
    Ok(report)
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        let until = Instant::now() + STOP_PATIENCE;
        while self.is_running() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if self.is_running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        self.stop_sampler();
        if let Some(cgroup) = &self.stage.cgroup
            && !cgroup.empty()
        {
            eprintln!("lab: some processes of the run do not end");
        }
    }
}

impl Finished {
    /// The outcome, or an error with the status if the command failed.
    pub fn successful(self, rig: &'static str, what: &str) -> Result<Finished, RigError> {
        let how = match (self.status.code(), self.status.signal()) {
            (Some(0), _) => return Ok(self),
            (None, Some(9)) | (Some(137), _) => {
                return Err(RigError::Killed {
                    rig,
                    what: what.to_owned(),
                    limit: Bytes(self.memory.limit_bytes),
                });
            }
            (Some(3), _) => "exit status 3: it read wrong bytes".to_owned(),
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("killed by signal {}", signal.unwrap_or(0)),
        };
        Err(RigError::CommandFailed {
            what: format!("{what} under {rig}"),
            how,
        })
    }
}
