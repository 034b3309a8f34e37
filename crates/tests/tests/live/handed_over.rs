//! Virtual machines that other processes restore from a snapshot (`undercroft vm --socket`): their
//! monitors hand memory over as Firecracker does. The monitor is one of ours
//! (`programs/monitor.c`), static and outside of the run, and it checks every byte that it reads.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use undercroft_tests::{
    Job, MIB, Outcome, Process, Running, build_static, processes, rounds, say, setting, turn,
};

use crate::takeover::{manager_of, under_kills};

/// Bytes of a page.
const PAGE: u64 = 4096;

/// A run that serves a snapshot of `mib` MiB.
struct Served {
    run: Running,
    folder: TempDir,
    monitor: PathBuf,
    mib: String,
}

impl Served {
    fn start(mib: u64) -> Served {
        Served::with(mib, &[])
    }

    fn with(mib: u64, given: &[&str]) -> Served {
        let monitor = build_static("monitor");
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (file, socket) = (folder.path().join("memory"), folder.path().join("socket"));
        let mib = mib.to_string();
        let made = Job::new(&monitor).arg("snapshot").arg(&file).arg(&mib);
        made.run().expect(0);
        let options = [OsStr::new("--socket"), socket.as_os_str()];
        let more = [OsStr::new("--memory-file"), file.as_os_str()];
        let mut run = Job::vm_alone(given)
            .options(options)
            .options(more)
            .timeout(300)
            .start();
        run.until("manager", 30, |run| manager_of(run.keeper()));
        Served {
            run,
            folder,
            monitor,
            mib,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("memory")
    }

    /// A monitor that calls the run.
    fn job(&self, what: &str, words: &[&str]) -> Job {
        let job = Job::new(&self.monitor).arg(what).arg(self.socket());
        job.arg(&self.mib).args(words).timeout(120)
    }

    /// How many machines are served.
    fn machines(&self) -> Option<u64> {
        self.run.status()?["guest"]["handed_over"].as_u64()
    }

    /// Ends the run, and checks that it ends well.
    fn end(self) -> Outcome {
        let socket = self.socket();
        self.run.signal(Signal::TERM);
        let outcome = self.run.wait().expect(0);
        assert!(!socket.exists(), "its socket is removed");
        outcome
    }
}

/// Panics unless no byte was wrong, and pages that were dropped were zeros.
fn check(outcome: &Outcome) {
    let [increments, checks, dropped, zeros, wrong] = outcome.numbers();
    assert_eq!(wrong, 0.0, "{outcome}");
    assert!(increments > 100.0 && checks > 1000.0, "{outcome}");
    assert!(dropped > 10.0 && zeros > 10.0, "{outcome}");
    assert_eq!(outcome.errors, "");
}

/// Several machines at once, whose messages come in pieces or before their descriptors, drop pages
/// while others read them, and the manager dies again and again.
#[test]
fn machines_that_are_handed_over_keep_every_byte_while_managers_die() {
    turn!(beside_others, "it is about memory that is handed over");
    for (seed, kills) in [(1, 0), (2, setting("UNDERCROFT_TEST_KILLS", 24) / 4)] {
        // The first round has a limit, which nothing can keep.
        let limit: &[&str] = if kills == 0 { &["-m", "12M"] } else { &[] };
        let mut served = Served::with(32, limit);
        let seconds = rounds("3", "10");
        let ways: [&[&str]; 3] = [&[], &["pieces"], &["late"]];
        let start = |(at, how): (usize, &&[&str])| {
            let numbers = ["3", seconds, &format!("{seed}{at}")].map(str::to_owned);
            let words: Vec<&str> = numbers.iter().map(String::as_str).collect();
            served.job("run", &[&words[..], how].concat()).start()
        };
        let monitors: Vec<Running> = ways.iter().enumerate().map(start).collect();
        let (monitor, mib) = (served.monitor.clone(), served.mib.clone());
        let socket = served.socket();
        let killed = under_kills(&served.run, seed, kills, |over| {
            // Machines that begin while there is no manager.
            while kills > 0 && !over() {
                let job = Job::new(&monitor).arg("restore").arg(&socket);
                job.args([&mib, "20", "50", "7"]).run().expect(0);
            }
        });
        for monitor in monitors {
            check(&monitor.wait().expect(0));
        }
        served.run.until("end of the machines", 20, |run| {
            let guest = run.status()?["guest"].clone();
            (guest["handed_over"] == 0 && guest["bytes"] == 0).then_some(())
        });
        let outcome = served.end();
        if kills == 0 {
            assert_eq!(outcome.number("guest.handed_over"), Some(0.0), "{outcome}");
            let came = outcome.number("pages.swapped_in");
            assert!(came > Some(8000.0), "{outcome}");
            let cannot_leave = outcome.number("immovable.bytes_peak");
            assert!(cannot_leave > Some(30.0 * MIB as f64), "{outcome}");
        }
        say(&format!(
            "handed over: 3 machines, {killed} kills, 0 wrong bytes"
        ));
    }
}

/// A message that cannot be served is refused with the reason, and a machine that runs meanwhile
/// notices nothing.
#[test]
fn hostile_monitors_are_refused_with_the_reason_and_others_are_untouched() {
    turn!(beside_others, "it is about memory that is handed over");
    let mut served = Served::start(16);
    let other = served.job("run", &["2", "16", "3"]).start();
    served.run.until("machine", 20, |run| {
        (run.status()?["guest"]["handed_over"] == 1).then_some(())
    });
    for (how, why) in [
        ("wrong-descriptor", "is no userfaultfd"),
        ("two-descriptors", "sent 2 descriptors"),
        ("overlap", "two regions have the same pages"),
        ("beyond", "of the snapshot's memory, which has"),
        ("unmapped", "is not mapped or not its own"),
        ("no-api", "UFFDIO_API"),
        ("garbage", "it is no JSON array"),
        ("proposal", "as Cloud Hypervisor's #8657 proposes"),
        ("binary", "its message is no text"),
        ("half", "before its message was whole"),
        ("megabyte", "more than 128.0 KiB"),
        ("no-descriptor", "sent 0 descriptors"),
        ("silent", "not whole after 5 s"),
        ("twice", "has handed its memory over already"),
    ] {
        served.job("hostile", &[how]).run().expect(0);
        served.run.until(why, 10, |run| {
            let errors = run.errors();
            let told = errors.lines().last().is_some_and(|line| line.contains(why));
            told.then_some(())
        });
    }
    let outcome = served.job("hostile", &["forks"]).run();
    let signal = outcome.status.and_then(|status| status.signal());
    assert_eq!(signal, Some(9), "{outcome}");
    // Its child reads a page that was not served, which is an error: no zeros, and no wait.
    let begun = Instant::now();
    let is_child = |of: &Process| of.command.ends_with("forks") && of.state != 'Z';
    while processes().iter().any(is_child) {
        assert!(begun.elapsed() < Duration::from_secs(10), "its child waits");
        std::thread::sleep(Duration::from_millis(20));
    }
    let was_read = served.folder.path().join("socket.read");
    assert!(!was_read.exists(), "its child has read zeros");
    // The keeper passes the manager's words on.
    served.run.until("word", 10, |run| {
        run.errors().contains("it forked").then_some(())
    });
    check(&other.wait().expect(0));
    // One that is refused, and keeps no copy of its userfaultfd, waits until the run ends.
    let waits = served.job("hostile", &["reads"]).start();
    served.run.until("word", 10, |run| {
        run.errors().matches("it is no JSON array").nth(1).map(drop)
    });
    served.end();
    let signal = waits.wait().status.and_then(|status| status.signal());
    assert!(signal == Some(9) && !was_read.exists(), "{signal:?}");
}

/// Pages that the file has no more are errors, not zeros.
#[test]
fn a_page_that_the_snapshot_has_no_more_is_an_error() {
    turn!(beside_others, "it is about memory that is handed over");
    let served = Served::start(16);
    let file = OpenOptions::new().write(true).open(served.file());
    file.and_then(|file| file.set_len(8 * MIB))
        .expect("it is cut");
    let outcome = served.job("restore", &["100", "0", "1"]).run();
    let signal = outcome.status.and_then(|status| status.signal());
    assert_eq!(signal, Some(7), "{outcome}"); // SIGBUS
    served.end();
}

fn is_there(pid: i32) -> bool {
    processes()
        .iter()
        .any(|process| process.pid == pid && process.state != 'Z')
}

/// The first signal lets machines go on, the second ends them. Without keeper and manager they are
/// ended, too: they would wait for ever.
#[test]
fn no_machine_outlives_what_serves_its_memory() {
    turn!(beside_others, "it is about memory that is handed over");
    for how in ["signals", "keeper", "both"] {
        let mut served = Served::start(16);
        let mut machine = served.job("run", &["2", "60", "3"]).start();
        served.run.until("machine", 20, |run| {
            (run.status()?["guest"]["handed_over"] == 1).then_some(())
        });
        let pid = machine.pid();
        let kill = |pid: i32| {
            let pid = Pid::from_raw(pid).expect("a process id");
            kill_process(pid, Signal::KILL).expect("it runs");
        };
        let (keeper, manager) = (served.run.keeper(), manager_of(served.run.keeper()));
        match how {
            "signals" => {
                served.run.signal(Signal::TERM);
                served.run.until("word", 10, |run| {
                    run.errors().contains("still run").then_some(())
                });
                assert!(machine.is_alive() && !served.socket().exists());
                assert!(served.machines() == Some(1));
                served.run.signal(Signal::TERM);
            }
            "keeper" => kill(keeper),
            _ => {
                // Stopped, so that it starts no successor.
                let stopped = Pid::from_raw(keeper).expect("a process id");
                kill_process(stopped, Signal::STOP).expect("it runs");
                kill(manager.expect("a manager"));
                kill(keeper);
            }
        }
        let begun = std::time::Instant::now();
        while machine.is_alive() && begun.elapsed().as_secs() < 20 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(!is_there(pid), "{how}: the machine still runs");
        let outcome = served.run.wait();
        assert_eq!(outcome.code() == Some(0), how == "signals", "{outcome}");
    }
}

/// Has the kernel forget what it has of a file.
fn forget(file: &Path) {
    let name = format!("of={}", file.display());
    let job = Job::new("dd").args([&name, "oflag=nocache", "conv=notrunc,fdatasync", "count=0"]);
    job.run().expect(0);
}

/// Bytes that a process has read from disks.
fn read_bytes(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).expect("a process of ours");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).expect("a number")
}

/// Machines of one snapshot read it once, and without prefetch no more of it than they use.
#[test]
fn many_machines_read_their_snapshot_once() {
    turn!(beside_others, "it is about memory that is handed over");
    let (mib, machines) = rounds((64, 8), (512, 25));
    for (prefetch, most) in [("none", 1.1), ("majority", 2.0)] {
        let served = Served::with(mib, &["--prefetch", prefetch]);
        let manager = manager_of(served.run.keeper()).expect("a manager");
        forget(&served.file());
        let before = read_bytes(manager);
        // The same seed: the same pages.
        let start = |_| served.job("restore", &["25", "30", "5"]).start();
        let all: Vec<Running> = (0..machines).map(start).collect();
        let (mut times, mut used) = (Vec::new(), 0.0);
        for machine in all {
            let [micros, pages, longest] = machine.wait().expect(0).numbers();
            times.push((micros / 1e3, longest / 1e3));
            used = pages * PAGE as f64;
        }
        let read = (read_bytes(manager) - before) as f64;
        times.sort_by(|one, other| one.0.total_cmp(&other.0));
        say(&format!(
            "{machines} machines of one snapshot, prefetch {prefetch}: {:.2} of the {:.0} MiB that \
             each uses were read; ready after {:.0} ms (p95); a page came after {:.1} ms at most",
            read / used,
            used / MIB as f64,
            times[(times.len() * 95).div_ceil(100) - 1].0,
            times.iter().map(|of| of.1).fold(0.0, f64::max),
        ));
        assert!(
            read >= 0.9 * used,
            "the file was in memory: {read} of {used} bytes"
        );
        assert!(read <= most * used, "{prefetch}: {read} of {used} bytes");
        let faults = || {
            let status = served.run.status().expect("it runs");
            status["faults"]["total"].as_u64().expect("a number")
        };
        let before = faults();
        start(0).wait().expect(0);
        let more = (faults() - before) as f64;
        let pages = used / PAGE as f64;
        say(&format!(
            "one more machine, prefetch {prefetch}: {more} faults for {pages} pages"
        ));
        assert_eq!(more < pages / 20.0, prefetch != "none", "{more} of {pages}");
        served.end();
    }
}
