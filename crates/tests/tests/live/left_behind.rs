//! `run` ends with its program, as a plain start does. What the program leaves behind stays
//! managed, by a keeper in the background.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    Job, MIB, Running, beside_others, build, plain_only, processes, turn, undercroft,
};

/// `run` ends within this time where a plain start ends at once.
const SOON: Duration = Duration::from_secs(4);

/// Time that `run` allows the keeper before it ends by itself, and more for a busy machine.
const LINGER: Duration = Duration::from_secs(5 + 8);

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "no {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lives(pid: i32) -> bool {
    let mut all = processes().into_iter();
    all.any(|process| process.pid == pid && process.state != 'Z')
}

fn send(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("a process id"), signal).expect("it lives");
}

/// `holdcheck`, left behind by a shell, and where it says what is wrong.
struct Left {
    run: Running,
    keeper: i32,
    evidence: PathBuf,
    report: PathBuf,
    _folder: tempfile::TempDir,
}

impl Left {
    /// Waits until `run` has ended.
    fn behind(status: i32) -> Left {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (evidence, said) = (folder.path().join("evidence"), folder.path().join("said"));
        let script = format!(
            "setsid {} 48 {} 600 >{said} 2>&1 </dev/null & \
             until grep -qs ready {said}; do sleep 0.1; done; exit {status}",
            build("holdcheck").display(),
            evidence.display(),
            said = said.display()
        );
        let mut run = Job::new("sh").args(["-c", &script]).limit(24 * MIB).start();
        let keeper = run.keeper();
        let begin = Instant::now();
        while run.is_alive() {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "{}",
                run.errors()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let report = run.scratch().join("report.json");
        Left {
            run,
            keeper,
            evidence,
            report,
            _folder: folder,
        }
    }

    fn status(&self) -> Option<serde_json::Value> {
        let pid = self.keeper.to_string();
        let asked = Job::new(undercroft())
            .args(["status", "--json", &pid])
            .run();
        let json: serde_json::Value = serde_json::from_str(&asked.text()).ok()?;
        Some(json["clients"][0].clone()).filter(|client| client["pid"] == self.keeper)
    }

    fn pages_in(&self) -> Option<u64> {
        self.status()?["pages"]["swapped_in"].as_u64()
    }

    /// Waits until pages have come back since, and no byte was wrong.
    fn goes_on(&self) {
        let before = until("status", || self.pages_in());
        until("pages that come back", || {
            self.pages_in().filter(|now| *now > before + 500)
        });
        let wrong = std::fs::read_to_string(&self.evidence).unwrap_or_default();
        assert!(wrong.is_empty(), "{wrong}");
    }
}

#[test]
fn what_a_program_leaves_behind_stays_managed_through_deaths_and_upgrades() {
    turn!(beside_others, "a plain run manages nothing");
    let left = Left::behind(3);
    assert_eq!(left.run.outcome().code(), Some(3));
    let early = std::fs::read(&left.report).expect("the file is made first");
    assert!(early.is_empty(), "before the last process ends");
    left.goes_on();
    let status = left.status().expect("a status");
    assert!(status["run_pid"].is_null(), "{status}");
    // The manager dies, and another takes over.
    let manager = |status: &serde_json::Value| status["manager_pid"].as_i64().expect("an id");
    send(manager(&status) as i32, Signal::KILL);
    let next = until("successor", || {
        let next = left.status()?;
        (manager(&next) != manager(&status)).then_some(next)
    });
    assert!(next["run_pid"].is_null(), "{next}");
    left.goes_on();
    let upgrade = Job::new(undercroft()).args(["upgrade", "--binary"]);
    let upgrade = upgrade.arg(undercroft()).arg(left.keeper.to_string());
    upgrade.run().expect(0);
    left.goes_on();
    // It holds nothing that others wait for.
    let cwd = std::fs::read_link(format!("/proc/{}/cwd", left.keeper)).expect("it lives");
    assert_eq!(cwd, Path::new("/"));
    // A signal to the keeper is for what it manages.
    send(left.keeper, Signal::TERM);
    until("end", || (!lives(left.keeper)).then_some(()));
    let bytes = std::fs::read(&left.report).expect("a report");
    let report: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(report["exit_status"], 3, "{report}");
    assert_eq!(report["takeovers"]["count"], 2, "{report}");
    assert_eq!(report["counters"]["lost"], 0, "{report}");
    until("end of all", || left.run.left().is_empty().then_some(()));
}

/// A shell that reads all that `run` writes waits for nothing else.
#[test]
fn a_program_that_leaves_a_process_behind_ends_as_without_us() {
    let _turn = beside_others();
    let script = "setsid sleep 20 >/dev/null 2>&1 </dev/null & echo $!; exit 3";
    for options in [None, Some("--quiet"), Some("")] {
        if options.is_some() && plain_only() {
            continue;
        }
        let mut command = match options {
            None => Command::new("sh"),
            Some(option) => {
                let mut command = Command::new(undercroft());
                command.arg("run");
                command.args(Some(option).filter(|option| !option.is_empty()));
                command.args(["--", "sh"]);
                command
            }
        };
        let begin = Instant::now();
        let command = command.args(["-c", script]).stdin(Stdio::null());
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let (mut said, mut errors) = (String::new(), String::new());
        let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
        let out = out.as_mut().expect("a pipe");
        out.read_to_string(&mut said).expect("its output");
        let err = err.as_mut().expect("a pipe");
        err.read_to_string(&mut errors).expect("its messages");
        let status = child.wait().expect("our child");
        assert_eq!(status.code(), Some(3), "{errors}");
        assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
        let left: i32 = said.trim().parse().expect("a process id");
        assert!(lives(left), "it goes on");
        let told = errors.contains("1 process that it started goes on, managed by process");
        assert_eq!(told, options == Some(""), "{errors}");
        send(left, Signal::TERM);
    }
}

/// A kill ends the program as it would without us, and nothing more.
#[test]
fn run_killed_ends_the_program_and_not_what_it_has_started() {
    let _turn = beside_others();
    let script = "setsid sleep 20 >/dev/null 2>&1 </dev/null & echo $! $$; wait";
    let job = Job::new("sh").args(["-c", script]);
    for job in [job.clone(), job.limit(64 * MIB)] {
        let mut run = job.start();
        let [left, program] = run.until("its processes", 60, |run| {
            let said = std::fs::read_to_string(run.scratch().join("output")).ok()?;
            let mut ids = said.split_whitespace().map(|id| id.parse().ok());
            Some([ids.next()??, ids.next()??])
        });
        run.signal(Signal::KILL);
        until("end of the program", || (!lives(program)).then_some(()));
        assert!(lives(left), "killed");
        until("end of run", || (!run.is_alive()).then_some(()));
        assert_eq!(run.outcome().code(), Some(137));
        send(left, Signal::TERM);
        until("end of all", || run.left().is_empty().then_some(()));
    }
}

/// The program has ended, or would have, and something holds `run`.
#[test]
fn run_ends_on_a_signal_whatever_holds_it() {
    turn!(beside_others, "a plain run is held by nothing");
    let deaf = "trap '' TERM; sleep 40 >/dev/null 2>&1 </dev/null & echo ready; exit 7";
    let deaf = Job::new("sh").args(["-c", deaf]).options(["--wait-all"]);
    for job in [Job::new(build("halts")), deaf] {
        let run = job.limit(64 * MIB).start();
        std::thread::sleep(Duration::from_secs(1));
        let begin = Instant::now();
        run.signal(Signal::TERM);
        let outcome = run.wait().expect(7);
        assert!(begin.elapsed() < LINGER, "{outcome}");
    }
}
