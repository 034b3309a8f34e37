//! The agent is no thread of the program and no child of it. It ends with the program's memory, and
//! a program goes on without it.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    AGENT, Job, MIB, Running, beside_others, build, find, plain_only, processes, rounds, say, skip,
    turn,
};

use crate::takeover::manager_of;

const LIMIT: u64 = 24 * MIB;

/// The agents of a run.
fn agents(run: &Running) -> Vec<i32> {
    let tree = run.tree().into_iter();
    let live = tree.filter(|process| process.command == AGENT && process.state != 'Z');
    live.map(|process| process.pid).collect()
}

/// Refusals and notices for a process with two threads, or with a child that it does not know.
#[test]
fn a_program_has_one_thread_and_no_child() {
    let _turn = beside_others();
    for what in ["threads", "unshare", "children", "priority", "tsync"] {
        let outcome = Job::new(build("solo")).arg(what).limit(LIMIT).run();
        if outcome.code() == Some(77) {
            skip(what);
            continue;
        }
        outcome.expect(0).expect_swapping(1000.0);
    }
}

/// A thread may end without its process: by the system call `exit`, or by a seccomp filter. With
/// the last one, the process ends.
#[test]
fn a_process_ends_with_its_last_thread() {
    let _turn = beside_others();
    for limit in [LIMIT, 400 * MIB] {
        for (what, code) in [("exit", 7), ("strict", 7), ("killed", 128 + 31)] {
            let job = Job::new(build("solo")).arg(what).limit(limit);
            job.run().expect(code);
        }
    }
}

/// Signals and priorities of the program's process group are not for its agent. Another session
/// would be another group to the scheduler, and the agent would wait for its turn behind all
/// others.
#[test]
fn an_agent_has_the_session_of_its_program_and_a_group_of_its_own() {
    turn!(beside_others, "a plain run has no agent");
    let mut run = Job::new("sleep").arg("60").limit(LIMIT).start();
    run.until("an agent", 20, |run| agents(run).first().copied());
    let tree = run.tree();
    let find = |command: &str| tree.iter().find(|of| of.command == command);
    let agent = find(AGENT).expect("the agent runs");
    let program = find("sleep 60").expect("the program runs");
    assert_eq!(agent.session, program.session);
    assert_ne!(agent.group, program.group);
    run.signal(Signal::TERM);
    run.wait();
}

/// After `unshare(CLONE_NEWPID)` the next child is process 1 of another namespace. That is the
/// program's child, and no process of ours.
#[test]
fn a_program_whose_children_enter_a_pid_namespace_makes_the_first_process_there() {
    let _turn = beside_others();
    if find("unshare").is_none() || !rustix::process::geteuid().is_root() {
        return skip("it needs root and unshare");
    }
    let touch = build("touch").display().to_string();
    let run = |script: &str| {
        let job = Job::new("unshare").args(["--pid", "sh", "-c", script]);
        job.limit(LIMIT).run().expect(0)
    };
    run(&format!("exec {touch} 16 --rounds 3"));
    let outcome = run(&format!(
        "sh -c 'echo $$; exec {touch} 48 --rounds 3'; exit $?"
    ));
    assert!(outcome.text().starts_with("1\n"), "{outcome}");
}

/// The first thread may end before the others, and may be joined. The agent stays.
#[test]
fn the_agent_stays_when_the_first_thread_ends() {
    let _turn = beside_others();
    for what in ["leaves", "is_joined"] {
        let outcome = Job::new(build("solo")).arg(what).limit(LIMIT).run();
        let outcome = outcome.expect(0).expect_swapping(1000.0);
        assert_eq!(outcome.text(), "went on\n");
        let peak = outcome.number("peak_resident_bytes");
        say(&format!("{what}: peak {peak:?}"));
    }
}

/// A program that calls exec has a new agent, and the old one ends.
#[test]
fn no_agent_outlives_its_program() {
    if plain_only() {
        return;
    }
    let _turn = beside_others();
    let script = "
import os, sys, time
left = int(sys.argv[1])
if left: os.execv(sys.executable, [sys.executable, '-S', '-E', '-c', os.environ['AGAIN'], str(left - 1)])
for _ in range(200):
    if os.fork() == 0: os.kill(os.getpid(), 9) if _ % 2 else os._exit(0)
for _ in range(200): os.wait()
print('ready', flush=True)
time.sleep(60)
";
    let job = Job::new("/usr/bin/python3").args(["-c", script, rounds("100", "300")]);
    let mut run = job.env("AGAIN", script).limit(200 * MIB).start();
    let output = run.scratch().join("output");
    run.until("program that is ready", 100, |_| {
        fs::read_to_string(&output)
            .ok()
            .filter(|text| text == "ready\n")
    });
    run.until("end of the old agents", 2, |run| {
        (agents(run).len() == 1).then_some(())
    });
    let zombies = run.tree().iter().filter(|of| of.state == 'Z').count();
    assert!(zombies <= 1, "{zombies} are not reaped");
    let all = agents(&run);
    let program = run
        .tree()
        .into_iter()
        .find(|of| of.command.contains("python3 -S"));
    let program = program
        .and_then(|of| Pid::from_raw(of.pid))
        .expect("the program");
    kill_process(program, Signal::KILL).expect("it runs");
    run.wait().expect(128 + 9);
    let left = processes().into_iter().filter(|of| all.contains(&of.pid));
    assert_eq!(left.count(), 0);
}

/// The agent is killed in the middle of a command, as a rule, and its manager at the same moment.
/// The next manager finds where the pages of that command are.
#[test]
fn a_program_goes_on_when_its_agent_and_its_manager_are_killed() {
    turn!(beside_others, "a plain run has no agent");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    for round in 0..rounds(1, 3) {
        let evidence = |at: u64| scratch.path().join(format!("evidence-{round}-{at}"));
        let runs = [0, 1, 2, 3].map(|at: u64| {
            let job = Job::new(build("holdcheck"))
                .args(["12", &evidence(at).display().to_string(), "6"])
                .limit(6 * MIB)
                .tier("ram");
            let mut run = job.start();
            run.until("its memory", 30, |run| {
                let said = fs::read_to_string(run.scratch().join("output"));
                said.is_ok_and(|said| said.contains("ready")).then_some(())
            });
            std::thread::sleep(Duration::from_micros(7300 * (round + 1) + 911 * at));
            let kill = |pid: i32| {
                let pid = Pid::from_raw(pid).expect("a process id");
                kill_process(pid, Signal::KILL).expect("it runs");
            };
            let (agent, manager) = (agents(&run)[0], manager_of(run.keeper()));
            kill(agent);
            kill(manager.expect("a manager"));
            run
        });
        for (at, run) in (0..).zip(runs) {
            let outcome = run.wait().expect(0);
            let seen = fs::read_to_string(evidence(at)).unwrap_or_default();
            assert!(seen.is_empty(), "{seen}\n{outcome}");
        }
    }
}

/// A reader of messages goes before the agent. If it is dead, or the program says falsely that one
/// is there, the agent still ends with its program.
#[test]
fn an_agent_that_waits_for_a_reader_ends_with_its_program() {
    turn!(beside_others, "a plain run has no agent");
    let script = "
import ctypes, os, time
at = next(int(l.split('-')[0], 16) for l in open('/proc/self/maps') if 'uc-command' in l)
word = lambda place: ctypes.c_uint32.from_address(at + 4 * place)
seq, done, wants = word(0), word(1), word(4)
held = [os.urandom(4096) for _ in range(10000)]
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent: more = [os.urandom(4096) for _ in range(25000)]
    os._exit(0)
stuck, until, at = 0, time.time() + 20, 0
kill = ctypes.CDLL(None).kill
kill(parent, 0)
# A child that shares the memory, for which the program waits.
if ctypes.CDLL(None).syscall(58): os._exit(4)
while time.time() < until:
    at = (at + 1) % len(held)
    held[at][2000]
    for _ in range(200): wants.value = 1
    if seq.value == done.value: stuck = 0
    stuck = stuck or time.time()
    if time.time() - stuck > 0.06:
        for _ in range(400): wants.value = 1
        kill(parent, 9)
        until = time.time() + 2
        while time.time() < until: wants.value = 1
        os._exit(0)
os._exit(3)
";
    let job = Job::new("/usr/bin/python3").args(["-S", "-E", "-c", script]);
    let mut run = job.limit(64 * MIB).start();
    let agent = run.until("an agent", 20, |run| agents(run).first().copied());
    let begun = Instant::now();
    while run.is_alive() || processes().into_iter().any(|of| of.pid == agent) {
        assert!(begun.elapsed() < Duration::from_secs(30), "it stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    run.wait().expect(128 + 9);
}

/// Memory that only the agent still has is not freed, so the agent of a program that ends in order
/// ends first: the program's files are free when its end is known.
#[test]
fn the_memory_of_a_program_that_ends_is_gone_when_its_end_is_known() {
    let _turn = beside_others();
    let script = "
import os, shutil, subprocess, sys
shutil.copy('/bin/true', './program')
busy = 0
for _ in range(200):
    subprocess.run(['./program'], check=True)
    try: os.close(os.open('./program', os.O_WRONLY))
    except OSError: busy += 1
print(busy)
";
    for limit in [200 * MIB, 8 * MIB] {
        let folder = tempfile::tempdir().expect("a folder");
        let job = Job::new("/usr/bin/python3").args(["-c", script]);
        let outcome = job.folder(folder.path()).limit(limit).run().expect(0);
        let [busy] = outcome.numbers::<1>();
        assert!(
            busy == 0.0,
            "{busy} of 200 times the program's file was in use, limit {limit}"
        );
    }
}

/// A fork child that ends at once, is killed or calls exec leaves no agent that nothing wakes.
/// Nothing is evicted: that would take the processes so long that a late look ends their agents.
#[test]
fn no_agent_of_a_fork_child_is_left_behind() {
    let _turn = beside_others();
    for way in ["end", "kill", "x"] {
        let job = Job::new(build("lingers")).arg(way).limit(40 * MIB);
        job.run().expect(0);
    }
}

/// Someone kills the agent alone, in the middle of a command or not. No byte is lost, and the
/// program goes on.
#[test]
fn a_program_goes_on_when_its_agent_is_killed() {
    if plain_only() {
        return;
    }
    let _turn = beside_others();
    let left = |run: &Running| run.status()?["pages"]["swapped_out"].as_u64();
    for after in [3u64, 40, 90, 150, 200] {
        let job = Job::new(build("touch")).args(["48", "--rounds", "1000000"]);
        let mut run = job.limit(LIMIT).start();
        run.until("eviction", 20, |run| left(run).filter(|pages| *pages > 0));
        // Only now: what makes the agent has its name, and ends.
        let agent = run.until("agent", 20, |run| agents(run).first().copied());
        std::thread::sleep(Duration::from_millis(after));
        kill_process(Pid::from_raw(agent).expect("a number"), Signal::KILL).expect("it lives");
        let began = Instant::now();
        // Memory without an agent cannot leave, and raises the limit.
        run.until("memory that stays", 60, |run| {
            let immovable = run.status()?["immovable"]["bytes"].as_u64()?;
            (immovable > 40 * MIB).then_some(())
        });
        // Its words are checked, round by round.
        std::thread::sleep(Duration::from_millis(300));
        say(&format!(
            "killed after {after} ms; on in {:?}",
            began.elapsed()
        ));
        run.signal(Signal::TERM);
        let outcome = run.wait().expect(128 + 15);
        assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    }
}

/// A debugger of the program sees its thread alone, and its breakpoints do not reach the agent.
#[test]
fn a_debugger_sees_one_thread() {
    let _turn = beside_others();
    if find("gdb").is_none() {
        return skip("no gdb");
    }
    let breaks = ["memcpy", "memset", "madvise", "pthread_create", "mremap"];
    let mut words: Vec<String> = ["-batch", "-nx", "-ex", "set breakpoint pending on"]
        .map(String::from)
        .into();
    words.extend([
        "-ex".into(),
        "break main".into(),
        "-ex".into(),
        "run".into(),
    ]);
    words.extend(
        breaks
            .iter()
            .flat_map(|of| ["-ex".into(), format!("break {of}")]),
    );
    words.extend([
        "-ex".into(),
        "info threads".into(),
        "-ex".into(),
        "delete".into(),
    ]);
    words.extend(["-ex".into(), "continue".into(), "--args".into()]);
    words.extend([
        build("solo").display().to_string(),
        "threads".into(),
        "40".into(),
    ]);
    let job = Job::new("gdb").args(words).limit(LIMIT);
    let outcome = job.run().expect(0).expect_swapping(1000.0);
    let text = outcome.text();
    assert!(text.contains("exited normally"), "{outcome}");
    assert!(!text.contains("uc-agent"), "{outcome}");
}
