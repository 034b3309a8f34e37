//! `cargo xtask test`: builds everything and runs the tests, those that only compute beside the
//! others.
//!
//! Tests of running programs wait for devices, for signals and for each other. What only computes
//! takes the time that is left: it has the idle class, so the others hardly notice it.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ring;
use crate::tidy::root;

/// Where tests are that start no program (but this one's own short ones) and measure no time.
const COMPUTE: [&str; 13] = [
    "lab/sim/",
    "crates/policy/",
    "crates/policy-core/",
    "crates/engine/",
    "crates/model/",
    "crates/device/",
    "crates/qos/",
    "crates/trace/",
    "lab/references/",
    "crates/wire/",
    "crates/xtask/",
    "lab/experiments/tests/simulated/",
    "crates/manager/tests/command_model/",
];

/// Tests of running programs, which wait for their turns (`crates/tests/src/turn.rs`).
const LIVE: &str = "crates/tests/tests/live/";
/// As many of them wait or run at once: more than there are that run alone. These wait until the
/// others have had their turns, and would leave no thread to them.
const LIVE_THREADS: &str = "--test-threads=96";

/// Parts that the summary names: those that took longest.
const NAMED: usize = 12;

/// A process of the suite.
struct Part {
    name: String,
    program: PathBuf,
    arguments: Vec<String>,
    /// Set beside what is there.
    environment: Vec<(&'static str, &'static str)>,
    folder: PathBuf,
}

/// How a part ended.
struct Ended {
    name: String,
    took: Duration,
    passed: bool,
}

/// The processes that run beside the others.
#[derive(Default)]
struct Beside {
    /// The one that runs now. Zero: none.
    pid: AtomicU32,
    /// Nothing else runs any more, so they need not stand back.
    alone: AtomicBool,
    /// They may have the idle class, because they can leave it again.
    may_be_idle: bool,
}

/// Whether a process may take the idle class and leave it again. Not every user may.
fn may_be_idle() -> bool {
    let mut command = Command::new("chrt");
    command.args(["--idle", "0", "sh", "-c", "chrt --other --pid 0 $$"]);
    command.output().is_ok_and(|output| output.status.success())
}

/// Builds everything and runs the tests of a change, or `all`; with `lints` also Clippy, where a
/// warning is an error. Prints as it goes. Returns what took longest.
///
/// Errors: what failed, by name. Every part runs, also after a failure.
pub(crate) fn run(lints: bool, all: bool) -> Result<String, String> {
    let words = "build --release --locked -p undercroft-cli -p undercroft-lab --features \
                 undercroft-cli/redis,undercroft-cli/wasm";
    let release = cargo("the release builds", &words.split(' ').collect::<Vec<_>>());
    if !release.run().passed {
        return Err(format!("{} failed", release.name));
    }
    let computes = |part: &Part| COMPUTE.iter().any(|place| part.name.starts_with(place));
    let (mut quiet, mut programs): (Vec<Part>, Vec<Part>) =
        tests()?.into_iter().partition(computes);
    let live = programs.iter_mut().find(|part| part.name.starts_with(LIVE));
    let live = live.ok_or("cargo names no live tests")?;
    if !all {
        live.leave_for_later()?;
    }
    for part in programs.iter_mut().filter(|_| all) {
        part.environment.push((ring::ALL, "1"));
    }
    if lints {
        let words = "clippy --workspace --all-targets --locked --features \
                     undercroft-cli/redis,undercroft-cli/wasm -- -D warnings";
        quiet.insert(0, cargo("clippy", &words.split(' ').collect::<Vec<_>>()));
    }
    let beside = Beside {
        may_be_idle: may_be_idle(),
        ..Beside::default()
    };
    let words = ["test", "--workspace", "--locked", "--doc", "--quiet"];
    quiet.push(cargo("examples in the documentation", &words));
    let ended: Vec<Ended> = thread::scope(|scope| {
        let others = scope.spawn(|| quiet.iter().map(|part| beside.run(part)).collect());
        let mut ended: Vec<Ended> = programs.iter().map(Part::run).collect();
        beside.alone.store(true, Ordering::SeqCst);
        while !others.is_finished() {
            beside.raise();
            thread::sleep(Duration::from_millis(200));
        }
        let others: Vec<Ended> = others.join().expect("it ends with its parts");
        ended.extend(others);
        ended
    });
    summary(ended)
}

fn summary(mut ended: Vec<Ended>) -> Result<String, String> {
    let failed: Vec<&str> = ended
        .iter()
        .filter(|part| !part.passed)
        .map(|part| part.name.as_str())
        .collect();
    if !failed.is_empty() {
        return Err(format!("xtask: failed: {}", failed.join(", ")));
    }
    ended.sort_by_key(|part| std::cmp::Reverse(part.took));
    let mut text = String::from("xtask: all passed; seconds of the longest:\n");
    for part in ended.iter().take(NAMED) {
        text.push_str(&format!("{:>6}  {}\n", part.took.as_secs(), part.name));
    }
    Ok(text)
}

/// Builds the tests. Returns them in the order of their names.
fn tests() -> Result<Vec<Part>, String> {
    let build = cargo(
        "the build of the tests",
        &[
            "test",
            "--workspace",
            "--locked",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ],
    );
    let output = build
        .command()
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{}: {error}", build.name))?;
    if !output.status.success() {
        return Err(format!("{} failed", build.name));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let found: Result<Vec<_>, _> = text.lines().filter_map(test).collect();
    let mut found = found?;
    if found.is_empty() {
        return Err("cargo names no test".to_owned());
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The test that can run, as a message of cargo names it. Errors: it is not understood.
fn test(line: &str) -> Option<Result<Part, String>> {
    let message: Value = serde_json::from_str(line).ok()?;
    let program = PathBuf::from(message["executable"].as_str()?);
    if message["profile"]["test"] != true {
        return None;
    }
    let found = part_of(&message, program);
    Some(found.ok_or_else(|| format!("what cargo says of a test is not understood: {line}")))
}

fn part_of(message: &Value, program: PathBuf) -> Option<Part> {
    let manifest = PathBuf::from(message["manifest_path"].as_str()?);
    let folder = manifest.parent()?.to_owned();
    let source = PathBuf::from(message["target"]["src_path"].as_str()?);
    let name = source.strip_prefix(root()).ok()?.display().to_string();
    Some(Part {
        arguments: if name.starts_with(LIVE) {
            vec![LIVE_THREADS.to_owned()]
        } else {
            Vec::new()
        },
        name,
        program,
        environment: Vec::new(),
        folder,
    })
}

fn cargo(name: &str, arguments: &[&str]) -> Part {
    Part {
        name: name.to_owned(),
        program: std::env::var_os("CARGO").map_or("cargo".into(), PathBuf::from),
        arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
        environment: Vec::new(),
        folder: root(),
    }
}

/// The name of the commit that is checked out; empty if git does not tell.
fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["rev-parse", "HEAD"]).current_dir(root());
    let told = git.output().map(|told| told.stdout).unwrap_or_default();
    String::from_utf8_lossy(&told).trim().to_owned()
}

impl Part {
    /// Leaves out the live tests that a change does not run, and says which.
    fn leave_for_later(&mut self) -> Result<(), String> {
        let list = self.command().arg("--list").output();
        let list = list.map_err(|error| format!("{}: {error}", self.name))?;
        let stale = ring::unknown(&String::from_utf8_lossy(&list.stdout));
        if !stale.is_empty() {
            return Err(format!(
                "no live test has these names: {}",
                stale.join(", ")
            ));
        }
        let later = ring::later(&commit());
        println!(
            "      Later, by `cargo xtask test --all`: {}",
            later.join(", ")
        );
        let words = later.iter().flat_map(|name| ["--skip", name]);
        self.arguments.extend(words.map(str::to_owned));
        Ok(())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        self.prepare(command)
    }

    /// The same in the idle class, where there is a command for that.
    fn idle(&self) -> Command {
        let mut command = Command::new("chrt");
        command.args(["--idle", "0"]).arg(&self.program);
        command.args(&self.arguments);
        self.prepare(command)
    }

    fn prepare(&self, mut command: Command) -> Command {
        command.current_dir(&self.folder).stdin(Stdio::null());
        command.envs(self.environment.iter().copied());
        // Build scripts that look at what cargo says of this package would run again, and all that
        // depends on them would be compiled again.
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "OUT_DIR"];
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if of_package.iter().any(|start| text.starts_with(start)) {
                command.env_remove(&name);
            }
        }
        command
    }

    /// Runs it; what it prints is seen at once.
    fn run(&self) -> Ended {
        println!("     Running {}", self.name);
        let began = Instant::now();
        let status = self.command().status();
        if let Err(error) = &status {
            println!("xtask: {}: {error}", self.program.display());
        }
        Ended {
            name: self.name.clone(),
            took: began.elapsed(),
            passed: status.is_ok_and(|status| status.success()),
        }
    }
}

impl Beside {
    /// Runs `part` beside others. Of what it prints, only what was skipped is seen, or everything
    /// if it failed.
    fn run(&self, part: &Part) -> Ended {
        let began = Instant::now();
        let output = self.output(part);
        self.pid.store(0, Ordering::SeqCst);
        let passed = output.as_ref().is_ok_and(|output| output.status.success());
        let text = match output {
            Ok(output) => String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into(),
            Err(error) => format!("xtask: {}: {error}\n", part.program.display()),
        };
        let seen: String = text
            .split_inclusive('\n')
            .filter(|line| !passed || line.contains("SKIPPED:"))
            .collect();
        let (took, word) = (began.elapsed(), if passed { "ok" } else { "FAILED" });
        println!(
            "      Beside {}: {word} in {} s\n{seen}",
            part.name,
            took.as_secs()
        );
        Ended {
            name: part.name.clone(),
            took,
            passed,
        }
    }

    fn output(&self, part: &Part) -> std::io::Result<Output> {
        let start = |mut command: Command| {
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
        };
        let child = if self.may_be_idle && !self.alone.load(Ordering::SeqCst) {
            start(part.idle())?
        } else {
            start(part.command())?
        };
        self.pid.store(child.id(), Ordering::SeqCst);
        child.wait_with_output()
    }

    /// Gives what runs now, with all that it started, the class of other programs.
    fn raise(&self) {
        let first = self.pid.load(Ordering::SeqCst);
        if first == 0 {
            return;
        }
        let all = parents();
        let mut family = vec![first];
        let mut at = 0;
        while at < family.len() {
            let children = all.iter().filter(|(_, parent)| *parent == family[at]);
            let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
            family.extend(children);
            at += 1;
        }
        for pid in family {
            // It may have ended.
            let _ = Command::new("chrt")
                .args(["--all-tasks", "--other", "--pid", "0"])
                .arg(pid.to_string())
                .output();
        }
    }
}

/// Each process with its parent.
fn parents() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parent = |pid: u32| -> Option<(u32, u32)> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent = text.rsplit(')').next()?.split_whitespace().nth(1)?;
        Some((pid, parent.parse().ok()?))
    };
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(parent)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &'static str) -> Part {
        Part {
            name: script.to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            environment: Vec::new(),
            folder: root(),
        }
    }

    #[test]
    fn a_failure_is_named_and_every_part_runs() {
        let ended = [shell("exit 0"), shell("exit 3"), shell("kill $$")].map(|part| part.run());
        assert_eq!(
            ended.each_ref().map(|part| part.passed),
            [true, false, false]
        );
        let failed = summary(ended.into()).expect_err("two failed");
        assert_eq!(failed, "xtask: failed: exit 3, kill $$");
    }

    #[test]
    fn what_runs_beside_is_raised_with_what_it_started() {
        if !may_be_idle() {
            eprintln!("SKIPPED: the idle class: this user cannot leave it again");
            return;
        }
        let beside = Beside {
            may_be_idle: true,
            ..Beside::default()
        };
        // The 41st field is the class: 5 is idle.
        let script = "for i in $(seq 2000); do
            [ $(awk '{print $41}' /proc/self/stat) = 0 ] && exit; sleep 0.01; done; exit 1";
        let part = shell(script);
        let ended = thread::scope(|scope| {
            let one = scope.spawn(|| beside.run(&part));
            let began = Instant::now();
            while !one.is_finished() && began.elapsed() < Duration::from_secs(20) {
                thread::sleep(Duration::from_millis(50));
                beside.raise();
            }
            one.join().expect("it ends")
        });
        assert!(ended.passed, "its children had another class");
    }

    #[test]
    fn tests_are_found_in_what_cargo_says() {
        let manifest = root().join("crates/xtask/Cargo.toml").display().to_string();
        let source = root()
            .join("crates/xtask/src/main.rs")
            .display()
            .to_string();
        let message = |test: bool| {
            serde_json::json!({
                "executable": "/there/xtask-1",
                "profile": { "test": test },
                "manifest_path": manifest,
                "target": { "src_path": source },
            })
            .to_string()
        };
        let part = test(&message(true)).expect("a test").expect("a part");
        assert_eq!(part.name, "crates/xtask/src/main.rs");
        assert!(test(&message(false)).is_none());
        let elsewhere = message(true).replace("main.rs", "../../../../elsewhere.rs");
        let elsewhere = elsewhere.replace(&root().display().to_string(), "/nowhere");
        assert!(test(&elsewhere).is_some_and(|found| found.is_err()));
        assert!(test("{\"reason\":\"build-finished\"}").is_none());
        assert!(test("no JSON").is_none());
    }
}
