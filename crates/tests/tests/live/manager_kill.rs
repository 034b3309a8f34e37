//! The manager is killed with `kill -9` at random moments. The client must end, and never see a
//! zero or stale byte.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Process, Running, beside_others, build, mix, say, setting, turn};

const FOOTPRINT_MIB: u64 = 48;
const LIMIT: u64 = 12 * MIB;

fn manager_of(run: &Running) -> Option<Process> {
    run.tree().into_iter().find(|process| {
        process.pid != run.pid() && process.command.contains("undercroft: manager of")
    })
}

/// Starts a run, killed `delay` after its manager appears. Returns how long `undercroft run` took
/// to end.
fn kill_once(seed: u64, tier: &str) -> Duration {
    let mut job = Job::new(build("holdcheck"))
        .limit(LIMIT)
        .options(["--no-takeover"]);
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let spill = scratch.path().join("spill");
    job = job
        .tier(&tier.replace("SPILL", &spill.to_string_lossy()))
        .arg(FOOTPRINT_MIB.to_string())
        .arg(&evidence)
        .arg("30");
    let mut run = job.start();
    let manager = run.until("manager process", 60, manager_of);
    // The delays go from "just started" through "filling under pressure" to "steady swapping".
    std::thread::sleep(Duration::from_micros(mix(seed) % 400_000));
    let pid = Pid::from_raw(manager.pid).expect("a process id");
    let killed = Instant::now();
    kill_process(pid, Signal::KILL).expect("the manager is ours to kill");
    let outcome = run.wait();
    let took = killed.elapsed();
    let seen = std::fs::read_to_string(&evidence).unwrap_or_default();
    assert!(
        seen.is_empty(),
        "seed {seed}: the program read wrong bytes: {seen}\n{outcome}"
    );
    assert_eq!(
        outcome.code(),
        Some(125),
        "seed {seed}, tier {tier}: a dead manager ends the run with 125: {outcome}"
    );
    assert!(
        outcome.errors.contains("manager"),
        "seed {seed}: the message says what died: {outcome}"
    );
    took
}

#[test]
fn manager_killed_never_shows_zeros_or_stale_bytes() {
    turn!(beside_others, "a plain run has no manager");
    let kills = setting("UNDERCROFT_TEST_KILLS", 50);
    let begin = Instant::now();
    let mut slowest = Duration::ZERO;
    for seed in 0..kills {
        let tier = ["ram", "file:SPILL,size=256M"][usize::from(seed % 4 == 3)];
        slowest = slowest.max(kill_once(seed, tier));
    }
    say(&format!(
        "manager killed {kills} times in {:.1?}: 0 zero or stale reads, the run ended within {slowest:.1?}",
        begin.elapsed()
    ));
}

/// The checker itself: with all its memory it ends with 0 and leaves no evidence, and the pager
/// does not kill it.
#[test]
fn checker_passes_while_the_manager_lives() {
    let _turn = beside_others();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let outcome = Job::new(build("holdcheck"))
        .arg(FOOTPRINT_MIB.to_string())
        .arg(&evidence)
        .arg("2")
        .limit(LIMIT)
        .tier("ram")
        .run()
        .expect(0);
    assert!(!evidence.exists(), "{outcome}");
    outcome.expect_swapping(1000.0);
}
