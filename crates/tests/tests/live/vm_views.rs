//! Views of a machine's memory: processes other than the monitor map it, and are served as the
//! monitor is. The programs are `programs/views.c`, under `undercroft vm` and `undercroft view`.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Outcome, Running, build, say, setting, turn, undercroft};

use crate::takeover::{under_kills, wait_for_end};
use crate::vm::guest;

const LIMIT: u64 = 17 * MIB;

/// A monitor, and the folder with its counts.
struct Machine {
    run: Running,
    folder: tempfile::TempDir,
}

impl Machine {
    fn start(seconds: u64, views: usize) -> Machine {
        Machine::start_within(LIMIT, seconds, views)
    }

    fn start_within(limit: u64, seconds: u64, views: usize) -> Machine {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let counts = folder.path().join("counts").display().to_string();
        let (seconds, views) = (seconds.to_string(), views.to_string());
        let job = guest(
            "views",
            64 * MIB,
            &["monitor", &counts, &seconds, "1", &views],
        );
        let run = job.limit(limit).timeout(180).start();
        Machine { run, folder }
    }

    /// Waits until this many views of it are known.
    fn has_views(&mut self, most: u64) {
        self.run.until("views", 30, |run| {
            let views = run.status()?["guest"]["views"].as_u64()?;
            (views >= most).then_some(())
        });
    }

    /// Starts a view of it.
    fn view(&self, seed: u64, how: &str) -> Running {
        view(self.run.keeper(), self.folder.path(), seed, how).start()
    }

    /// Waits until some of its memory has left.
    fn leaves(&mut self) {
        self.run.until("guest memory in tiers", 60, |run| {
            let stored = run.status()?["guest"]["stored_bytes"].as_u64()?;
            (stored > 8 * MIB).then_some(())
        });
    }

    /// Its end: additions of monitor and views, pages compared, and the outcome.
    #[track_caller]
    fn end(self, killed: f64) -> ([f64; 3], Outcome) {
        let outcome = self.run.wait();
        assert_eq!(outcome.code(), Some(0), "{outcome}");
        let [own, others, missing, too_many, compared, wrong] = outcome.numbers();
        assert_eq!([missing, wrong], [0.0; 2], "{outcome}");
        // Two threads of each view that was killed.
        assert!(too_many <= 2.0 * killed, "{outcome}");
        assert!(compared > 10_000.0, "{outcome}");
        ([own, others, compared], outcome)
    }
}

fn view(run: i32, folder: &Path, seed: u64, how: &str) -> Job {
    let counts = folder.join("counts").display().to_string();
    let (run, seed) = (run.to_string(), seed.to_string());
    let program = build("views").display().to_string();
    let words = [
        "view", "--vm", &run, "--", &program, "view", &counts, &seed, how,
    ];
    Job::new(undercroft()).args(words)
}

/// The thinnest: a back end reads all of the memory, most of which is in tiers.
#[test]
fn a_view_reads_every_page_of_a_machine_whose_pages_are_out() {
    turn!(one_at_a_time, "it is about guest memory");
    let mut machine = Machine::start(2, 1);
    machine.leaves();
    let before = machine.run.status().expect("it runs")["faults"]["total"].as_f64();
    let read = machine.view(3, "read").wait().expect(0);
    assert_eq!(read.errors, "", "{read}");
    let ([own, others, compared], outcome) = machine.end(0.0);
    let faults = outcome.number("faults.total");
    say(&format!(
        "a view has read {compared} pages; {own} and {others} additions; {faults:?} faults, {before:?} \
         of them before"
    ));
    outcome.expect_swapped(5000.0);
}

/// Without the protection in each view, writes of the second process are lost.
#[test]
fn views_that_write_beside_eviction_lose_no_write() {
    turn!(one_at_a_time, "it is about guest memory");
    for how in [vec!["work"], vec!["lock"], vec!["work", "parts"]] {
        let mut machine = Machine::start(8, how.len());
        machine.leaves();
        let started = how.iter().enumerate();
        let views: Vec<Running> = started
            .map(|(at, how)| machine.view(10 + at as u64, how))
            .collect();
        machine.has_views(how.len() as u64);
        for view in views {
            view.wait().expect(0);
        }
        let ([own, others, compared], outcome) = machine.end(0.0);
        say(&format!(
            "{how:?}: {own} additions of the monitor, {others} of the views, {compared} \
             pages compared"
        ));
        assert!(own > 1000.0 && others > 1000.0, "{outcome}");
        outcome.expect_swapped(5000.0);
    }
}

/// The limit was lowered before there was any pressure: memory that several map is managed then.
#[test]
fn a_limit_that_is_lowered_holds_for_a_machine_with_views() {
    turn!(one_at_a_time, "it is about guest memory");
    let mut machine = Machine::start_within(300 * MIB, 6, 2);
    let views = [10, 11].map(|seed| {
        let mut view = machine.view(seed, "work");
        view.until("its memory", 30, |view| {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", view.pid())).ok()?;
            maps.contains("undercroft-guest").then_some(())
        });
        view
    });
    let pid = machine.run.keeper().to_string();
    let limit = format!("memory-max={LIMIT}");
    Job::new(undercroft())
        .args(["set", &pid, &limit])
        .run()
        .expect(0);
    machine.leaves();
    for view in views {
        view.wait().expect(0);
    }
    machine.end(0.0);
}

/// Views and managers are killed; what goes on is right.
#[test]
fn a_machine_outlives_its_views_and_views_their_manager() {
    turn!(one_at_a_time, "it is about guest memory");
    let most = setting("UNDERCROFT_TEST_KILLS", 24) / 4;
    let mut machine = Machine::start(10, 2);
    machine.leaves();
    let (killed_view, stays) = (machine.view(20, "work"), machine.view(21, "work"));
    machine.has_views(2);
    let pid = machine.run.keeper();
    let killed = under_kills(&machine.run, 4, most, |all_done| {
        let begin = Instant::now();
        while !all_done() && begin.elapsed().as_secs() < 5 {
            std::thread::sleep(Duration::from_millis(20));
        }
        killed_view.signal(Signal::KILL);
        wait_for_end(pid, most);
    });
    stays.wait().expect(0);
    let ([own, others, _], outcome) = machine.end(1.0);
    say(&format!(
        "{killed} managers and a view killed: {own} additions of the monitor, {others} of the views"
    ));
    assert!(killed > 0 && own > 1000.0 && others > 1000.0, "{outcome}");
    outcome.expect_swapped(5000.0);
}

/// No thread of a view is served once its machine has ended, so it does not stay.
#[test]
fn a_view_ends_after_its_machine() {
    turn!(one_at_a_time, "it is about guest memory");
    let mut machine = Machine::start(60, 1);
    machine.leaves();
    let view = machine.view(40, "work");
    machine.run.until("a view", 30, |run| {
        (run.status()?["guest"]["views"].as_u64()? == 1).then_some(())
    });
    let program = build("views").display().to_string();
    let tree = machine.run.tree();
    let monitor = tree.iter().find(|of| of.command.starts_with(&program));
    let monitor = Pid::from_raw(monitor.expect("it runs").pid).expect("a process");
    kill_process(monitor, Signal::KILL).expect("it runs");
    let began = Instant::now();
    let outcome = machine.run.wait();
    let ended = view.wait();
    assert!(began.elapsed() < Duration::from_secs(20), "{outcome}");
    assert_ne!(ended.code(), Some(0), "{ended}");
    let told = "the machine whose memory it";
    assert!(outcome.errors.contains(told), "{outcome}");
}

/// Calls that would read zeros where pages are away fail, or end the run.
#[test]
fn what_a_view_may_not_do_is_refused() {
    turn!(one_at_a_time, "it is about guest memory");
    let mut machine = Machine::start(4, 1);
    machine.leaves();
    machine.view(30, "hostile").wait().expect(0);
    machine.end(0.0);
    // Past the C library it is not registered: it reads zeros, and puts them in place of pages.
    let mut machine = Machine::start(4, 1);
    machine.leaves();
    machine.view(31, "past").wait();
    let outcome = machine.run.wait().expect(125);
    assert!(
        outcome.errors.contains("was not heard when it did"),
        "{outcome}"
    );
}

/// A run that has no machine, or is no run, or is another user's.
#[test]
fn a_view_of_what_has_no_machine_is_refused_with_the_reason() {
    turn!(beside_others, "it is about guest memory");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut plain = Job::new("sleep").arg("60").limit(64 * MIB).start();
    plain.until("the run", 20, Running::status);
    let pid = plain.keeper();
    let refused = view(pid, folder.path(), 1, "read").run().expect(125);
    assert!(
        refused.errors.contains("the run has no machine"),
        "{refused}"
    );
    plain.signal(Signal::KILL);
    let refused = view(1, folder.path(), 1, "read").run().expect(1);
    assert!(refused.errors.contains("belongs to no run"), "{refused}");
}
