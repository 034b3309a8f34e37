//! A command, plain or under Undercroft, with a time limit. At the limit its whole tree is ended.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::processes::{Process, anonymous_kib, descendants, processes, with_environment};
use crate::programs::undercroft;

/// True when every command runs without Undercroft (`UNDERCROFT_TEST_PLAIN=1`).
pub fn plain_only() -> bool {
    std::env::var("UNDERCROFT_TEST_PLAIN").is_ok_and(|value| value == "1")
}

/// A command to run. Plain unless a limit, a tier or an option of `undercroft run` is given.
#[derive(Clone, Debug)]
pub struct Job {
    command: Vec<OsString>,
    before: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    removed: Vec<OsString>,
    folder: Option<PathBuf>,
    input: Vec<u8>,
    limit: Option<u64>,
    options: Vec<OsString>,
    under: bool,
    mode: &'static str,
    timeout: Duration,
}

/// The outcome of a command.
#[derive(Debug)]
pub struct Outcome {
    /// The command line, for messages.
    pub line: String,
    /// How it ended; `None` if its time was up and it was killed.
    pub status: Option<ExitStatus>,
    /// Standard output.
    pub output: Vec<u8>,
    /// Standard error.
    pub errors: String,
    /// The report file of `undercroft run`, if there is one.
    pub report: Option<Value>,
    /// Time from start to end.
    pub wall: Duration,
    /// Most anonymous memory of its tree, in bytes; sampled, so a little low. Only of plain runs.
    pub anonymous_peak: u64,
}

/// A running command. Dropping it ends its whole tree.
#[derive(Debug)]
pub struct Running {
    child: Child,
    line: String,
    tag: String,
    scratch: TempDir,
    begin: Instant,
    timeout: Duration,
    is_plain: bool,
    anonymous_peak: u64,
    ended: Option<ExitStatus>,
    keeper: OnceLock<i32>,
}

impl Job {
    /// A command, still without arguments.
    pub fn new(program: impl AsRef<OsStr>) -> Job {
        Job {
            command: vec![program.as_ref().to_owned()],
            before: Vec::new(),
            environment: Vec::new(),
            removed: Vec::new(),
            folder: None,
            input: Vec::new(),
            limit: None,
            options: Vec::new(),
            under: false,
            mode: "run",
            timeout: Duration::from_secs(180),
        }
    }

    /// `undercroft vm` with these options and no program of the user's.
    pub fn vm_alone<S: AsRef<OsStr>>(options: impl IntoIterator<Item = S>) -> Job {
        let none = Job {
            command: Vec::new(),
            ..Job::new("")
        };
        none.vm().options(options)
    }

    /// Adds arguments.
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Job {
        self.command
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Adds one argument.
    pub fn arg(self, arg: impl AsRef<OsStr>) -> Job {
        self.args([arg])
    }

    /// Puts a command in front of everything, `undercroft` too (`unshare -m`, `setpriv ...`).
    pub fn before<S: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = S>) -> Job {
        self.before
            .extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Job {
        self.environment
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Removes an environment variable.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Job {
        self.removed.push(name.as_ref().to_owned());
        self
    }

    /// Runs the command in this folder.
    pub fn folder(mut self, folder: impl AsRef<Path>) -> Job {
        self.folder = Some(folder.as_ref().to_owned());
        self
    }

    /// Bytes for standard input. Without them it is empty.
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Job {
        self.input = bytes.into();
        self
    }

    /// Runs the command under `undercroft run --memory-max`, in bytes.
    pub fn limit(mut self, bytes: u64) -> Job {
        self.limit = Some(bytes);
        self.under = true;
        self
    }

    /// Runs the command under `undercroft vm` in place of `run`.
    pub fn vm(mut self) -> Job {
        self.mode = "vm";
        self.under = true;
        self
    }

    /// Adds a `--tier`.
    pub fn tier(self, spec: &str) -> Job {
        self.options(["--tier", spec])
    }

    /// Adds options of `undercroft run`.
    pub fn options<S: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = S>) -> Job {
        self.options
            .extend(words.into_iter().map(|word| word.as_ref().to_owned()));
        self.under = true;
        self
    }

    /// Sets the time after which the tree is ended; three minutes by default. It ends what hangs: a
    /// busy disk alone can stop a program for a minute.
    pub fn timeout(mut self, seconds: u64) -> Job {
        self.timeout = Duration::from_secs(seconds);
        self
    }

    /// Starts it. Panics: if it cannot be started at all.
    pub fn start(&self) -> Running {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let tag = format!(
            "UNDERCROFT_TESTS_TAG={}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let scratch = tempfile::Builder::new()
            .prefix("undercroft-tests-")
            .tempdir()
            .expect("a scratch folder");
        let mut words = self.before.clone();
        let is_plain = !self.under || plain_only();
        if !is_plain {
            words.extend([undercroft().into(), self.mode.into(), "--quiet".into()]);
            if let Some(limit) = self.limit {
                words.extend(["--memory-max".into(), limit.to_string().into()]);
            }
            words.extend(self.options.iter().cloned());
            words.extend(["--report".into(), scratch.path().join("report.json").into()]);
            words.extend((!self.command.is_empty()).then(|| "--".into()));
        }
        words.extend(self.command.iter().cloned());

        let file = |name: &str| File::create(scratch.path().join(name)).expect("a scratch file");
        fs::write(scratch.path().join("input"), &self.input).expect("a scratch file");
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .stdin(File::open(scratch.path().join("input")).expect("a scratch file"))
            .stdout(Stdio::from(file("output")))
            .stderr(Stdio::from(file("errors")))
            .process_group(0)
            // What somebody has measured on this machine changes no test.
            .env("XDG_STATE_HOME", scratch.path());
        for (name, value) in &self.environment {
            command.env(name, value);
        }
        for name in &self.removed {
            command.env_remove(name);
        }
        let (name, value) = tag.split_once('=').expect("the tag has two parts");
        command.env(name, value);
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        let line = words
            .iter()
            .map(|word| word.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ");
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("`{line}` does not start: {error}"));
        Running {
            child,
            line,
            tag,
            scratch,
            begin: Instant::now(),
            timeout: self.timeout,
            is_plain,
            anonymous_peak: 0,
            ended: None,
            keeper: OnceLock::new(),
        }
    }

    /// Starts it and waits for its end.
    pub fn run(&self) -> Outcome {
        self.start().wait()
    }
}

impl Running {
    /// The process id of the command; under Undercroft that of `undercroft run`.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The process id of the keeper, which is the only child of `undercroft run`. Waits until there
    /// is one, and knows it after its end.
    pub fn keeper(&self) -> i32 {
        *self.keeper.get_or_init(|| self.find_keeper())
    }

    fn find_keeper(&self) -> i32 {
        let begin = Instant::now();
        loop {
            let children = format!("/proc/{0}/task/{0}/children", self.pid());
            let children = fs::read_to_string(children).unwrap_or_default();
            let mut children = children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok());
            let is_ours = |pid: &i32| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                name.trim() == "undercroft"
            };
            match children.find(is_ours) {
                Some(keeper) => return keeper,
                None if plain_only() => return self.pid(),
                None => assert!(begin.elapsed() < Duration::from_secs(20), "no keeper"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether it has not ended yet.
    pub fn is_alive(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("waiting for our child");
        }
        self.ended.is_none()
    }

    /// Waits until `look` finds something. Panics: if it ends before, or `seconds` have passed.
    pub fn until<T>(
        &mut self,
        what: &str,
        seconds: u64,
        mut look: impl FnMut(&Running) -> Option<T>,
    ) -> T {
        let begin = Instant::now();
        loop {
            let looked = Instant::now();
            if let Some(found) = look(self) {
                return found;
            }
            let took = looked.elapsed();
            assert!(
                self.is_alive() && begin.elapsed() < Duration::from_secs(seconds),
                "no {what}; standard error: {}",
                self.errors()
            );
            // A look may start a process. Two thirds of the time are the program's.
            std::thread::sleep((2 * took).max(Duration::from_millis(1)));
        }
    }

    /// Its entry in `undercroft status`; `None` if there is none.
    pub fn status(&self) -> Option<serde_json::Value> {
        let outcome = Job::new(undercroft()).args(["status", "--json"]).run();
        let all: serde_json::Value = serde_json::from_str(&outcome.text()).ok()?;
        let clients = all["clients"].as_array()?.clone();
        (clients.into_iter()).find(|client| client["run_pid"] == self.pid())
    }

    /// The processes of its tree now, itself too.
    pub fn tree(&self) -> Vec<Process> {
        descendants(&processes(), self.pid())
    }

    /// Every process that was started and still runs, orphans too. Not those that overwrote their
    /// environment.
    pub fn left(&self) -> Vec<Process> {
        let mut all = processes();
        let pids = with_environment(&self.tag);
        all.retain(|process| pids.contains(&process.pid) && process.state != 'Z');
        all
    }

    /// The scratch folder, which lives as long as this value.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// Its standard error so far.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.scratch.path().join("errors")).unwrap_or_default())
            .into_owned()
    }

    /// Sends a signal to the command itself.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.pid()) {
            // It may have ended meanwhile; `wait` finds that.
            let _ = kill_process(pid, signal);
        }
    }

    /// Waits for the end, for at most the job's time limit. Then ends everything that it started.
    pub fn wait(mut self) -> Outcome {
        let mut next_sample = Instant::now();
        while self.is_alive() && self.begin.elapsed() < self.timeout {
            // To look at the whole machine's processes takes a sixth of a CPU.
            if self.is_plain && Instant::now() >= next_sample {
                let kib: u64 = self
                    .tree()
                    .iter()
                    .map(|process| anonymous_kib(process.pid))
                    .sum();
                self.anonymous_peak = self.anonymous_peak.max(kib * 1024);
                next_sample = Instant::now() + Duration::from_millis(25);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let wall = self.begin.elapsed();
        let mut errors = String::new();
        if self.is_alive() {
            errors = format!("TIMED OUT after {:?}; its tree was:\n", self.timeout);
            for process in self.tree() {
                errors.push_str(&describe(&process));
            }
            crate::say(&format!("TIMED OUT: {}\n{errors}", self.line));
        }
        let status = self.ended; // before it is ended because its time is up
        self.end_tree();
        let outcome = self.outcome();
        Outcome {
            status,
            errors: errors + &outcome.errors,
            wall,
            ..outcome
        }
    }

    /// The outcome of a command that has ended. What it started may still run.
    pub fn outcome(&self) -> Outcome {
        let read = |name: &str| fs::read(self.scratch.path().join(name)).unwrap_or_default();
        Outcome {
            line: self.line.clone(),
            status: self.ended,
            output: read("output"),
            errors: String::from_utf8_lossy(&read("errors")).into_owned(),
            report: serde_json::from_slice(&read("report.json")).ok(),
            wall: self.begin.elapsed(),
            anonymous_peak: self.anonymous_peak,
        }
    }

    // By process id: the processes that descend from our child, and those that carry our tag in
    // their environment.
    fn end_tree(&mut self) {
        for _ in 0..20 {
            let mut pids: Vec<i32> = with_environment(&self.tag);
            if self.ended.is_none() {
                pids.extend(self.tree().iter().map(|process| process.pid));
            }
            if pids.is_empty() {
                break;
            }
            for pid in pids.into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL); // if it is gone already, that is fine
            }
            let _ = self.is_alive(); // reaps our child
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    /// A test that fails while a program runs shows what the program and the run have said.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let now = self.child.try_wait();
            let said = self.errors();
            let output = fs::read(self.scratch.path().join("output")).unwrap_or_default();
            let output = String::from_utf8_lossy(&output[output.len().saturating_sub(2000)..]);
            println!("{}: {now:?}; {said}\n{output}", self.child.id());
        }
        self.end_tree();
        if self.ended.is_none() {
            let _ = self.child.wait();
        }
    }
}

// One process and what its threads wait for: a hang can be understood only while it lasts.
fn describe(process: &Process) -> String {
    let mut text = format!(
        "  {} (parent {}) {} {}\n",
        process.pid, process.parent, process.state, process.command
    );
    let threads = fs::read_dir(format!("/proc/{}/task", process.pid))
        .into_iter()
        .flatten();
    for thread in threads.filter_map(|entry| entry.ok()).take(40) {
        let field = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        text.push_str(&format!(
            "    thread {} {} wchan {} syscall {}\n",
            thread.file_name().to_string_lossy(),
            field("comm").trim(),
            field("wchan").trim(),
            field("syscall").trim()
        ));
        for line in field("stack").lines().take(6) {
            text.push_str(&format!("      {line}\n"));
        }
    }
    text
}

impl Outcome {
    /// The exit status as a shell gives it: 128 + n for a signal. `None` if its time was up.
    pub fn code(&self) -> Option<i32> {
        let status = self.status?;
        status.code().or(status.signal().map(|signal| 128 + signal))
    }

    /// Panics, with everything known, unless it ended with `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Outcome {
        assert!(self.code() == Some(code), "expected status {code}: {self}");
        self
    }

    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// The numbers that standard output consists of. Panics if there are not `N` of them.
    pub fn numbers<const N: usize>(&self) -> [f64; N] {
        let text = self.text();
        let numbers: Option<Vec<f64>> = text
            .split_whitespace()
            .map(|word| word.parse().ok())
            .collect();
        match numbers.and_then(|numbers| numbers.try_into().ok()) {
            Some(numbers) => numbers,
            None => panic!("{N} numbers were expected: {self}"),
        }
    }

    /// A number in the report by its path (`"pages.swapped_out"`).
    pub fn number(&self, path: &str) -> Option<f64> {
        path.split('.')
            .try_fold(self.report.as_ref()?, |value, key| value.get(key))?
            .as_f64()
    }

    /// Fails if fewer than `pages` pages were swapped out, or none came back, or the copy of one
    /// was lost. Otherwise a test of correctness would prove nothing. Checks nothing in plain mode.
    #[track_caller]
    pub fn expect_swapping(self, pages: f64) -> Outcome {
        if !plain_only() {
            let lost = self.number("counters.lost");
            assert_eq!(lost, Some(0.0), "copies were lost: {self}");
        }
        self.expect_swapped(pages)
    }

    /// As [`Outcome::expect_swapping`], where a process lies about its own pages, and may lose
    /// them.
    #[track_caller]
    pub fn expect_swapped(self, pages: f64) -> Outcome {
        if plain_only() {
            return self;
        }
        let count = |path: &str| {
            self.number(path)
                .unwrap_or_else(|| panic!("no number `{path}` in the report: {self}"))
        };
        let out = count("pages.swapped_out");
        assert!(
            out >= pages && count("faults.swap_in") > 0.0,
            "too little was swapped to prove anything ({out} pages out): {self}"
        );
        self
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tail = |text: &str| {
            let from = text.len().saturating_sub(6000);
            let from = (from..text.len())
                .find(|&at| text.is_char_boundary(at))
                .unwrap_or(0);
            text[from..].to_owned()
        };
        writeln!(f, "`{}`", self.line)?;
        writeln!(f, "  status {:?} after {:.2?}", self.code(), self.wall)?;
        writeln!(f, "  output: {}", tail(&self.text()))?;
        writeln!(f, "  errors: {}", tail(&self.errors))?;
        match &self.report {
            Some(report) => writeln!(f, "  report: {report}"),
            None => writeln!(f, "  report: none"),
        }
    }
}
