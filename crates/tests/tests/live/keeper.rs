//! A program's view of the run around it, compared with a plain start: signals, terminals,
//! descriptors, the end. And the user's view when something is in the way.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    Job, MIB, Outcome, Process, Running, beside_others, build, build_static, build_with, find,
    plain_only, processes, skip, turn, undercroft,
};

const SIGNALS: [Signal; 9] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::ALARM,
    Signal::CONT,
];

fn output(run: &Running) -> String {
    std::fs::read_to_string(run.scratch().join("output")).unwrap_or_default()
}

fn is_ready(run: &Running) -> Option<()> {
    output(run).contains("ready").then_some(())
}

/// Runs `told` and sends it one signal. Returns what it printed, and how it ended.
fn sent(job: &Job, signal: Signal) -> (String, Option<i32>) {
    let mut run = job.start();
    run.until("told", 60, is_ready);
    run.signal(signal);
    let outcome = run.wait();
    (outcome.text(), outcome.code())
}

#[test]
fn signals_arrive_as_they_were_sent() {
    let _turn = beside_others();
    let job = Job::new(build("told")).arg("5");
    for signal in SIGNALS {
        let limited = job.clone().limit(64 * MIB);
        let (plain, mut under) = std::thread::scope(|scope| {
            let plain = scope.spawn(|| sent(&job, signal));
            let under = sent(&limited, signal);
            (plain.join().expect("no panic"), under)
        });
        if signal == Signal::CONT {
            // Not passed on to a program that is not stopped: `run` cannot tell it from a signal to
            // the whole group, which the program has already.
            under.0 = plain.0.clone();
        }
        assert_eq!(under, plain, "{signal:?}");
    }
    if plain_only() {
        return;
    }
    // Stopped and continued by their own numbers.
    let mut run = job.limit(64 * MIB).start();
    run.until("told", 60, is_ready);
    run.signal(Signal::TSTP);
    std::thread::sleep(Duration::from_millis(300));
    run.signal(Signal::CONT);
    let outcome = run.wait().expect(7);
    assert!(outcome.text().contains("got 18"), "{outcome}");
}

#[test]
fn ignored_signals_stay_ignored() {
    let _turn = beside_others();
    let job =
        Job::new(build("told"))
            .arg("5")
            .before(["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh"]);
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT] {
        let plain = sent(&job, signal);
        assert!(plain.0.contains("ignored 1\n"), "{plain:?}");
        let under = sent(&job.clone().limit(64 * MIB), signal);
        assert_eq!(under, plain, "{signal:?}");
    }
    let sleep = Job::new("sleep").arg("1").before(["nohup"]);
    for job in [sleep.clone(), sleep.limit(64 * MIB)] {
        let mut run = job.start();
        std::thread::sleep(Duration::from_millis(400));
        assert!(run.is_alive());
        run.signal(Signal::HUP);
        run.wait().expect(0);
    }
}

#[test]
fn pipes_and_children_are_as_the_parent_left_them() {
    let _turn = beside_others();
    let show = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"];
    let shown = |job: Job| {
        let outcome = job.run().expect(0);
        let text = outcome.text();
        let words = text.split_whitespace().skip(1).step_by(2);
        let words = words.map(|word| u64::from_str_radix(word, 16).expect("a number"));
        // Without 32 and 33, which the C library keeps to itself.
        words.map(|word| word & !(3 << 31)).collect::<Vec<_>>()
    };
    let job = Job::new(show[0]).args(&show[1..]);
    assert_eq!(shown(job.clone().limit(64 * MIB)), shown(job.clone()));
    let ignoring = ["bash", "-c", "trap '' PIPE CHLD; exec \"$@\"", "bash"];
    let job = job.before(ignoring);
    let plain = shown(job.clone());
    assert_eq!(plain[1] & (1 << 12), 1 << 12, "SIGPIPE is ignored");
    assert_eq!(shown(job.limit(64 * MIB)), plain);
}

/// `tty STEPS -- [undercroft run] COMMAND`.
fn on_terminal(steps: &[&str], under: bool, command: &[&str]) -> Outcome {
    let mut job = Job::new(build("tty")).args(steps).arg("--");
    if under {
        job = job.arg(undercroft()).args(["run", "-q", "--"]);
    }
    job.args(command).run().expect(0)
}

#[test]
fn a_key_reaches_the_program_once() {
    let _turn = beside_others();
    let told = build("told").display().to_string();
    for (keys, got) in [("^C", "got 2"), ("^\\", "got 3")] {
        let steps = ["wait", "ready", "send", keys, "wait", got];
        let mut seen = Vec::new();
        for under in [false, true] {
            if under && plain_only() {
                continue;
            }
            let outcome = on_terminal(&steps, under, &[&told, "20"]);
            assert_eq!(outcome.text().matches("got").count(), 1, "{outcome}");
            seen.push(outcome.text());
        }
        assert!(seen.iter().all(|text| *text == seen[0]), "{seen:?}");
    }
}

#[test]
fn a_program_without_handlers_ends_by_the_key_and_so_does_its_shell() {
    let _turn = beside_others();
    // A shell goes on with its script if its child ends with 130 and not by the signal.
    let script = "printf ready; \"$@\"; echo went on";
    for under in [false, true] {
        if under && plain_only() {
            continue;
        }
        let mut command = vec!["bash", "-c", script, "bash"];
        let binary = undercroft().to_str().expect("UTF-8");
        if under {
            command.extend([binary, "run", "-q", "--"]);
        }
        command.extend(["sh", "-c", "printf ready; exec sleep 20"]);
        let steps = ["wait", "readyready", "send", "^C"];
        let outcome = on_terminal(&steps, false, &command);
        assert!(outcome.text().contains("[signal 2]"), "{outcome}");
        assert!(!outcome.text().contains("went on"), "{outcome}");
    }
}

#[test]
fn a_job_stops_and_goes_on_with_its_shell() {
    let _turn = beside_others();
    let told = build("told").display().to_string();
    let mut line = format!("{told} 600 15");
    if !plain_only() {
        line = format!("{} run -q -- {line}", undercroft().display());
    }
    let command = format!("{line}^M");
    let stopped = ["send", "^Z", "wait", "Stopped", "wait", "$ "];
    let goes_on = [
        "send", "fg^M", "wait", "got 18", "send", "^C", "wait", "got 2",
    ];
    let mut steps = vec!["wait", "$ ", "send", &command, "wait", "ready"];
    // Quickly, so that a stop comes while the keeper still handles the continuation before it.
    for _ in 0..10 {
        steps.extend(stopped.iter().chain(&goes_on));
    }
    steps.extend(stopped);
    steps.extend(["send", "kill -CONT %1^M", "wait", "got 18"]);
    steps.extend(["send", "kill -TERM %1; wait; echo over^M"]);
    steps.extend(["wait", "got 15", "wait", "over", "send", "exit^M"]);
    let shell = ["env", "PS1=$ ", "bash", "--norc", "--noprofile", "-i"];
    let outcome = on_terminal(&steps, false, &shell);
    assert!(outcome.text().contains("[exit 0]"), "{outcome}");
}

#[test]
fn a_hangup_of_the_terminal_reaches_the_program() {
    let _turn = beside_others();
    let told = build("told").display().to_string();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    for under in [false, true] {
        if under && plain_only() {
            continue;
        }
        let file = scratch.path().join(format!("said-{under}"));
        let script = format!("exec {told} 8 > {}", file.display());
        let steps = ["wait", "on", "hangup"];
        let script = format!("echo on; sleep 0.3; {script}");
        let _ = on_terminal(&steps, under, &["sh", "-c", &script]);
        // `hangup` may come while the shell still sleeps. The shell then dies of it.
        let said = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            !said.contains("ready") || said.contains("got 1\n"),
            "{under}: {said}"
        );
    }
}

#[test]
fn a_program_ended_by_a_signal_is_seen_so_by_the_parent() {
    let _turn = beside_others();
    for (name, number) in [("TERM", 15), ("KILL", 9), ("USR1", 10), ("ABRT", 6)] {
        let job = Job::new("sh").args(["-c", &format!("kill -{name} $$")]);
        for job in [job.clone(), job.limit(64 * MIB)] {
            let outcome = job.run();
            let signal = outcome.status.and_then(|status| status.signal());
            assert_eq!(signal, Some(number), "{outcome}");
        }
    }
}

/// Standard output, and a descriptor that was handed down, end when the program closes them.
#[test]
fn nobody_else_keeps_the_programs_descriptors() {
    let _turn = beside_others();
    let Some(bash) = find("bash") else {
        return skip("no bash");
    };
    for under in [false, true] {
        if under && plain_only() {
            continue;
        }
        let (read, write) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
        let number = std::os::fd::AsRawFd::as_raw_fd(&write);
        rustix::io::fcntl_setfd(&write, rustix::io::FdFlags::empty()).expect("an open pipe");
        let script = format!("exec >&- {number}>&-; sleep 3");
        let mut command = if under {
            Command::new(undercroft())
        } else {
            Command::new(&bash)
        };
        if under {
            command.args(["run", "-q", "--"]).arg(&bash);
        }
        command.args(["-c", &script]).stdin(Stdio::null());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        drop(write);
        let began = Instant::now();
        let mut rest = Vec::new();
        let mut out = child.stdout.take().expect("a pipe");
        out.read_to_end(&mut rest).expect("the end of its output");
        std::fs::File::from(read)
            .read_to_end(&mut rest)
            .expect("the end of the other");
        let took = began.elapsed();
        let lives = child.try_wait().expect("our child").is_none();
        let _ = child.wait();
        assert!(
            lives && rest.is_empty(),
            "{under}: the ends came after {took:?}"
        );
    }
}

/// A run that prints messages while its standard error is full, or gone.
#[test]
fn standard_error_in_the_way_changes_nothing() {
    turn!(beside_others, "it tests our messages");
    let shout = build("shout");
    for reader in ["slow", "none", "stopped"] {
        let mut child = Command::new(undercroft())
            .args(["run", "-m", "24M", "--tier", "ram,max=4M", "--"])
            .arg(&shout)
            .args(["40", "4"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut errors = child.stderr.take();
        if reader == "none" {
            errors = None;
        }
        let began = Instant::now();
        let mut bytes = vec![0u8; 65536];
        let status = loop {
            if let Some(status) = child.try_wait().expect("our child") {
                break status;
            }
            if reader == "slow"
                && let Some(errors) = &mut errors
            {
                let _ = errors.read(&mut bytes);
            }
            if began.elapsed() > Duration::from_secs(60) {
                let _ = child.kill();
                let _ = child.wait();
                panic!("{reader}: it hangs");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(6), "{reader}: {status:?}");
    }
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let status = Command::new(undercroft())
        .args(["run", "-m", "24M", "--tier", "ram,max=4M", "--"])
        .arg(&shout)
        .args(["40", "1"])
        .stderr(full)
        .status()
        .expect("it starts");
    assert_eq!(status.code(), Some(6));
}

fn manager_of(run: &Running) -> Option<Process> {
    run.tree().into_iter().find(|process| {
        process.pid != run.pid() && process.command.contains("undercroft: manager of")
    })
}

#[test]
fn a_process_whose_main_thread_has_ended_is_waited_for_and_ended() {
    let _turn = beside_others();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let program = build("leaderless").display().to_string();
    let file = scratch.path().join("said");
    let said = || std::fs::read_to_string(&file).unwrap_or_default();
    let script = |seconds: u32| format!("{program} {} {seconds} & exit 0", file.display());
    let job = Job::new("sh").args(["-c", &script(2)]).limit(64 * MIB);
    job.options(["--wait-all"]).run().expect(0);
    if plain_only() {
        return;
    }
    assert!(said().ends_with("done"), "`run` waits: {}", said());
    std::fs::remove_file(&file).expect("a file");
    let mut run = Job::new("sh")
        .args(["-c", &script(20)])
        .limit(64 * MIB)
        .options(["--no-takeover", "--wait-all"])
        .start();
    run.until("worker", 60, |_| (!said().is_empty()).then_some(()));
    let manager = manager_of(&run).and_then(|found| Pid::from_raw(found.pid));
    kill_process(manager.expect("a manager"), Signal::KILL).expect("ours to kill");
    run.wait().expect(125);
    let then = said();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(said(), then, "nothing of it runs on");
}

/// The keeper is the parent of the program's orphans, in place of process 1.
#[test]
fn orphans_that_have_ended_do_not_stay_while_the_program_runs() {
    turn!(beside_others, "a plain run has no keeper");
    let script = "for i in 1 2 3; do (sleep 0.3 &); done; exec sleep 20";
    let mut run = Job::new("sh").args(["-c", script]).limit(64 * MIB).start();
    let keeper = run.keeper();
    let orphans = move || {
        let is = |process: &Process| {
            process.parent == keeper && (process.state == 'Z' || process.command == "sleep 0.3")
        };
        processes().into_iter().filter(is).count()
    };
    run.until("orphans", 60, |_| (orphans() == 3).then_some(()));
    run.until("end of its orphans", 60, |_| (orphans() == 0).then_some(()));
    run.signal(Signal::TERM);
    run.wait();
}

#[test]
fn the_manager_is_not_the_first_to_be_ended_for_memory() {
    turn!(beside_others, "a plain run has no manager");
    let may = Command::new("sh")
        .args(["-c", "echo -900 > /proc/self/oom_score_adj"])
        .stderr(Stdio::null())
        .status();
    let managers = if may.expect("sh runs").success() {
        "-900"
    } else {
        "0"
    };
    let show = "cat /proc/self/oom_score_adj; echo ready; sleep 1";
    let job = Job::new("sh").args(["-c", show]).limit(64 * MIB);
    let raised = "echo 300 > /proc/self/oom_score_adj; exec \"$@\"";
    let mut run = job.before(["sh", "-c", raised, "sh"]).start();
    run.until("program", 60, is_ready);
    let pid = manager_of(&run).expect("a manager").pid;
    let score = |pid| std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
    assert_eq!(score(pid).expect("/proc").trim(), managers);
    assert_eq!(
        score(run.keeper()).expect("/proc").trim(),
        managers,
        "the keeper"
    );
    assert_eq!(run.wait().expect(0).text(), "300\nready\n");
}

#[test]
fn sanitizers_start_and_run() {
    let _turn = beside_others();
    let cases: [(&str, &str, &[&str]); 5] = [
        ("asan-shared", "gcc", &["-fsanitize=address"]),
        (
            "asan-static",
            "gcc",
            &["-fsanitize=address", "-static-libasan"],
        ),
        ("asan-clang", "clang", &["-fsanitize=address"]),
        (
            "asan-clang-shared",
            "clang",
            &["-fsanitize=address", "-shared-libasan"],
        ),
        ("ubsan", "gcc", &["-fsanitize=undefined"]),
    ];
    for (kind, compiler, flags) in cases {
        let Some(program) = build_with("sanitized", kind, compiler, flags) else {
            skip(&format!("{kind}: it does not compile here"));
            continue;
        };
        let job = Job::new(&program);
        if job.run().code() != Some(0) {
            skip(&format!("{kind}: it does not start here"));
            continue;
        }
        let outcome = job.limit(64 * MIB).run().expect(0);
        assert_eq!(outcome.text(), "sanitized\n");
        is_managed(&outcome, true);
    }
    // After the libraries that the user preloads.
    let shown = Job::new("sh").args(["-c", "echo $LD_PRELOAD"]);
    let shown = shown
        .env("LD_PRELOAD", "libm.so.6")
        .limit(64 * MIB)
        .run()
        .expect(0);
    assert!(
        plain_only() || shown.text().starts_with("libm.so.6:"),
        "{shown}"
    );
}

#[track_caller]
fn is_managed(outcome: &Outcome, expected: bool) {
    if plain_only() {
        return;
    }
    let managed = outcome
        .report
        .as_ref()
        .and_then(|report| report["managed"].as_bool());
    assert_eq!(managed, Some(expected), "{outcome}");
}

#[test]
fn names_that_the_loader_would_split_do_no_harm() {
    let _turn = beside_others();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    for name in ["with blank", "with:colon", &"long".repeat(40)] {
        let dir = scratch.path().join(name);
        std::fs::create_dir(&dir).expect("a folder");
        for variable in ["UNDERCROFT_DIR", "TMPDIR"] {
            let job = Job::new("true").env(variable, &dir).limit(64 * MIB);
            let outcome = job.run().expect(0);
            is_managed(&outcome, true);
            assert!(!outcome.errors.contains("preload"), "{outcome}");
        }
    }
}

#[test]
fn a_directory_that_others_can_change_is_refused() {
    turn!(beside_others, "it tests the keeper");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let dir = scratch.path().join("undercroft-0");
    std::fs::create_dir(&dir).expect("a folder");
    let refused = |word: &str| {
        let outcome = Job::new("true")
            .env("UNDERCROFT_DIR", &dir)
            .limit(64 * MIB)
            .run();
        assert!(outcome.errors.contains(word), "{word}: {outcome}");
        assert!(
            outcome.errors.contains("UNDERCROFT_DIR"),
            "the fix: {outcome}"
        );
        outcome.expect(125);
    };
    let mode = |bits| {
        let bits = std::os::unix::fs::PermissionsExt::from_mode(bits);
        std::fs::set_permissions(&dir, bits).expect("chmod");
    };
    mode(0o777);
    refused("others may write");
    mode(0o755);
    if std::os::unix::fs::chown(&dir, Some(65534), None).is_err() {
        return skip("only root can give one away");
    }
    refused("belongs to user 65534");
}

#[test]
fn a_program_that_is_not_managed_is_reported() {
    // Takes no turn: it waits, beside the others.
    if plain_only() {
        return skip("it tests our messages");
    }
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let report = scratch.path().join("report.json");
    let run = |options: &[&str], command: &[&str], managed: bool| {
        let job = Job::new(undercroft())
            .args(["run", "--report"])
            .arg(&report);
        let outcome = job.args(options).arg("--").args(command).run().expect(7);
        let bytes = std::fs::read(&report).expect("a report");
        let found: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
        assert_eq!(found["managed"], managed, "{outcome}");
        outcome.errors
    };
    let what = "no process of the program is managed";
    let dynamic = build("told").display().to_string();
    let alone = build_static("told").display().to_string();
    let exec = format!("exec {alone} 30");
    let (cleared, exec) = (["env", "-i", &dynamic, "30"], ["sh", "-c", &exec]);
    for (command, why) in [(&cleared[..], "LD_PRELOAD"), (&exec, "statically")] {
        let errors = run(&[], command, false);
        assert_eq!(errors.matches(what).count(), 1, "{errors}");
        assert!(errors.contains(why), "{errors}");
    }
    assert!(!run(&["--quiet"], &cleared, false).contains(what));
    assert!(!run(&[], &[&dynamic, "25"], true).contains(what));
    // Some of several.
    let one = "is not managed, so its memory";
    let strays = || {
        let bytes = std::fs::read(&report).expect("a report");
        let found: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
        found["unmanaged_processes_peak"].as_u64()
    };
    let beside = format!("{alone} 90 & LD_PRELOAD= {dynamic} 90 & {dynamic} 90; wait; exit 7");
    let errors = run(&[], &["sh", "-c", &beside], true);
    assert!(!errors.contains(what), "{errors}");
    assert_eq!(errors.matches(one).count(), 1, "{errors}");
    assert!(
        errors.contains("statically") || errors.contains("LD_PRELOAD was replaced"),
        "{errors}"
    );
    assert_eq!(strays(), Some(2), "{errors}");
    // Forked past the C library: it has the shim, which does not know.
    if find("python3").is_some() {
        let script = "import ctypes, os, sys, time\nc = ctypes.CDLL(None).syscall(57)\n\
                      time.sleep(9)\nif c == 0: os._exit(0)\nos.wait(); sys.exit(7)";
        let errors = run(&[], &["python3", "-c", script], true);
        assert_eq!(errors.matches(one).count(), 1, "{errors}");
        assert!(errors.contains("does not see"), "{errors}");
        assert_eq!(strays(), Some(1), "{errors}");
    }
    // None: all are managed, some by a run of their own.
    let undercroft = undercroft().display().to_string();
    let inner = format!("{undercroft} run --quiet -- {dynamic} 90 & {dynamic} 90; wait; exit 7");
    let errors = run(&[], &["sh", "-c", &inner], true);
    assert!(!errors.contains(one), "{errors}");
    assert_eq!(strays(), Some(0), "{errors}");
}

#[test]
fn a_run_inside_a_run_manages_what_it_starts() {
    turn!(beside_others, "a plain run has none");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let report = scratch.path().join("inner.json");
    let touch = build("touch");
    let job = Job::new(undercroft())
        .args(["run", "-m", "24M", "--report"])
        .arg(&report)
        .arg("--")
        .arg(&touch)
        .args(["60", "--rounds", "2"]);
    let outer = job.limit(64 * MIB).run().expect(0);
    let inner: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&report).expect("the inner report")).expect("JSON");
    assert_eq!(inner["counters"]["lost"], 0);
    assert_eq!(inner["spaces"], 1, "one shim in one process: {inner}");
    assert!(
        inner["pages"]["swapped_out"].as_u64() > Some(1000),
        "{inner}"
    );
    // Of the inner run, the outer one manages all processes but the program.
    assert_eq!(outer.number("spaces"), Some(4.0), "{outer}");
}

/// A killed keeper leaves its directory; the next run removes it.
#[test]
fn what_a_killed_keeper_left_is_cleaned_up() {
    turn!(beside_others, "a plain run has none");
    let dir = tempfile::tempdir().expect("a scratch folder");
    let runs = |dir: &Path| std::fs::read_dir(dir).expect("a folder").count();
    let job = Job::new(build("told"))
        .arg("50")
        .env("UNDERCROFT_DIR", dir.path());
    let mut run = job.limit(64 * MIB).start();
    run.until("told", 60, is_ready);
    let keeper = Pid::from_raw(run.keeper()).expect("a process id");
    kill_process(keeper, Signal::KILL).expect("ours to kill");
    let _ = run.wait();
    assert_eq!(runs(dir.path()), 1, "left behind");
    let next = Job::new("true").env("UNDERCROFT_DIR", dir.path());
    next.limit(64 * MIB).run().expect(0);
    assert_eq!(runs(dir.path()), 0);
}

/// A freezer cgroup (version 1), in which a frozen process does not even die. Thawed and removed
/// with this value.
struct Freezer(std::path::PathBuf);

impl Freezer {
    /// `None` if this machine has none.
    fn make() -> Option<Freezer> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let is = words[2] == "cgroup" && words[3].split(',').any(|word| word == "freezer");
            is.then(|| words[1].to_owned())
        })?;
        let name = format!("undercroft-tests-{}", std::process::id());
        let folder = Path::new(&mount).join(name);
        std::fs::create_dir(&folder).ok()?;
        Some(Freezer(folder))
    }

    fn freeze(&self, pid: i32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("it moves");
        std::fs::write(self.0.join("freezer.state"), "FROZEN").expect("it freezes");
        let state = || std::fs::read_to_string(self.0.join("freezer.state")).expect("a state");
        let began = Instant::now();
        while state().trim() != "FROZEN" {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "it does not freeze"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("freezer.state"), "THAWED");
        let began = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && began.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Cuts the keeper's link to its manager, as the manager's death would: each connected socket of
/// the keeper.
fn cut_link(keeper: i32) {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let pid = Pid::from_raw(keeper).expect("a process id");
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
    let open = std::fs::read_dir(format!("/proc/{keeper}/fd")).expect("/proc");
    let numbers = open.flatten().filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let is = target.to_string_lossy().starts_with("socket:");
        is.then(|| entry.file_name().to_string_lossy().parse().ok())?
    });
    let mut cut = 0;
    for number in numbers {
        let socket = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()).expect("a descriptor");
        let kind = rustix::net::sockopt::socket_type(&socket).expect("a socket");
        if kind != rustix::net::SocketType::STREAM {
            continue; // to `run`, which hears the end by it
        }
        cut += u32::from(rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).is_ok());
    }
    assert!(cut > 0, "the link is a socket");
}

/// Starts `told` and waits until it and its manager run, which no other is to replace.
fn told_with_manager(seconds: u32) -> (Running, i32) {
    let mut run = Job::new(build("told"))
        .arg((10 * seconds).to_string())
        .limit(64 * MIB)
        .options(["--no-takeover"])
        .start();
    run.until("told", 60, is_ready);
    let manager = run.until("a manager", 60, manager_of).pid;
    (run, manager)
}

/// The keeper's waits: for the report, and for the end of the manager that it killed.
const REPORT: Duration = Duration::from_secs(10);
const KILLED: Duration = Duration::from_secs(5);
/// Added for a busy machine. Less than another `REPORT`, which one more wait would take.
const BUSY: Duration = Duration::from_secs(8);

#[test]
fn a_stopped_manager_holds_the_keeper_for_one_wait() {
    // Takes no turn: it waits, beside the others.
    if plain_only() {
        return skip("a plain run has no manager");
    }
    let (run, manager) = told_with_manager(2);
    let pid = Pid::from_raw(manager).expect("a process id");
    kill_process(pid, Signal::STOP).expect("ours to stop");
    let began = Instant::now();
    let outcome = run.wait().expect(7);
    let took = began.elapsed();
    assert!(outcome.errors.contains("without a report"), "{outcome}");
    assert!(took < Duration::from_secs(2) + REPORT + BUSY, "{took:?}");
}

#[test]
fn a_manager_that_cannot_die_holds_the_keeper_for_a_bounded_time() {
    // Takes no turn: it waits, beside the others.
    if plain_only() {
        return skip("a plain run has no manager");
    }
    for cut in [false, true] {
        let Some(freezer) = Freezer::make() else {
            return skip("no freezer cgroup of version 1 can be made");
        };
        let (mut run, manager) = told_with_manager(if cut { 60 } else { 2 });
        freezer.freeze(manager);
        let (status, bound) = if cut {
            // The manager looks dead, so the program is ended.
            cut_link(run.keeper());
            (125, KILLED + BUSY)
        } else {
            // The program ends, and the manager sends no report.
            (7, Duration::from_secs(2) + REPORT + KILLED + BUSY)
        };
        let began = Instant::now();
        // Thawed when it is too late, so that a keeper without a bound fails this test, too.
        while run.is_alive() && began.elapsed() < 2 * bound {
            std::thread::sleep(Duration::from_millis(10));
        }
        let took = began.elapsed();
        drop(freezer);
        let outcome = run.wait().expect(status);
        assert!(took < bound, "link cut {cut}: {took:?}\n{outcome}");
        let said = format!("the manager (process {manager}) has not ended");
        assert!(outcome.errors.contains(&said), "link cut {cut}: {outcome}");
    }
}
