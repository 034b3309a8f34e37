//! Memory that the kernel does not move, because the program may not write to it. Collectors
//! protect their heaps so, to learn of writes and of reads.

use std::path::Path;
use std::time::{Duration, Instant};

use undercroft_tests::{
    Job, MIB, Outcome, Running, build, build_with, find, plain_only, say, skip, turn, undercroft,
};

/// Memory that may only be read, the limit, and what the other 32 MiB have at least.
const FIXED_MIB: u64 = 40;
/// Of that memory, the pages of the batch that was refused first may count as others.
const FIXED_MIN: u64 = FIXED_MIB * MIB - MIB / 2;
const LIMIT_MIB: u64 = 24;
const FLOOR: u64 = 8 * MIB;

/// A program of which more than the limit may only be read. It writes the rest again and again.
fn mostly_read_only(folder: &Path, report: &Path) -> Running {
    Job::new(undercroft())
        .args(["run", "-m", &format!("{LIMIT_MIB}M"), "--tier"])
        .arg(format!("file:{},size=256M", folder.display()))
        .arg("--report")
        .args([
            report.as_os_str(),
            "--".as_ref(),
            build("touch").as_os_str(),
        ])
        .args(["72", "--rounds", "100000", "--read-only"])
        .arg(FIXED_MIB.to_string())
        .start()
}

/// The status of the run, and what is in memory of the rest, once all that may only be read is.
fn look(run: &Running) -> Option<(u64, serde_json::Value)> {
    let status = run.status()?;
    let fixed = status["immovable"]["bytes"].as_u64()?;
    let rest = status["resident_bytes"].as_u64()?.checked_sub(fixed)?;
    (fixed >= FIXED_MIN).then_some((rest, status))
}

/// The limit is raised, no farther than the rest needs for its floor, and warning, status, report
/// and summary tell of it.
#[test]
fn limit_is_raised_for_what_cannot_leave_and_all_are_told() {
    let name = "limit_is_raised_for_what_cannot_leave_and_all_are_told";
    turn!(one_at_a_time, "a plain run has no limit");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let report = folder.path().join("report");
    let mut run = mostly_read_only(folder.path(), &report);
    let (rest, status) = run.until("the floor of the rest", 60, |run| {
        look(run).filter(|(rest, _)| *rest >= FLOOR - MIB)
    });
    let raised = status["immovable"]["limit_raised_bytes_peak"].as_u64();
    assert!(raised >= Some(FIXED_MIN - LIMIT_MIB * MIB), "{status}");
    // It keeps that, and has no more, but for what was lent on the way there on a busy machine.
    let mut looks = Vec::new();
    let since = Instant::now();
    while looks.len() < 20 {
        let (rest, status) = run.until("a look", 20, look);
        if !(FLOOR - 2 * MIB..=FLOOR + 2 * MIB).contains(&rest) {
            assert!(
                since.elapsed() < Duration::from_secs(5),
                "{rest} B: {status}"
            );
            looks.clear();
            continue;
        }
        looks.push(rest);
    }
    looks.sort_unstable();
    say(&format!(
        "{name}: the rest had {rest} bytes, then {} to {}",
        looks[0], looks[19]
    ));
    assert!(looks[10] >= FLOOR - MIB, "{looks:?}");
    run.signal(rustix::process::Signal::TERM);
    tells_of_the_raised_limit(run.wait().expect(143), &report);
}

fn tells_of_the_raised_limit(outcome: Outcome, report: &Path) {
    for part in [
        "cannot leave memory: the program may not write there",
        &format!("The limit of {LIMIT_MIB}.0 MiB is passed by as much as the rest needs"),
        "MiB could not leave (read-only, locked, pinned, or of a process without an agent); the limit was ",
    ] {
        assert_eq!(outcome.errors.matches(part).count(), 1, "{part}: {outcome}");
    }
    let text = std::fs::read_to_string(report).expect("a report");
    let report = serde_json::from_str(&text).ok();
    let outcome = Outcome { report, ..outcome }.expect_swapping(1000.0);
    let number = |path: &str| outcome.number(path).expect("a number in the report");
    let [fixed, raised] = ["bytes_peak", "limit_raised_bytes_peak"]
        .map(|key| number(&format!("immovable.{key}")) as u64);
    assert!(
        (FIXED_MIN..(FIXED_MIB + 2) * MIB).contains(&fixed),
        "{outcome}"
    );
    assert!(
        raised < (FIXED_MIB - LIMIT_MIB + 2) * MIB + FLOOR,
        "{outcome}"
    );
    assert!(number("immovable.limit_raised_seconds") > 0.0, "{outcome}");
    let over = number("limit_exceeded.bytes_peak") as u64;
    assert!(
        over <= LIMIT_MIB * MIB / 50,
        "above the raised limit: {outcome}"
    );
}

/// Runs it plain and in 64 MiB: status 0, and the same output. Some of its memory could not leave.
fn same_in_64_mib(name: &str, job: &Job) {
    let plain = job.run().expect(0);
    assert!(plain.anonymous_peak > 80 * MIB, "too small: {plain}");
    let ours = job.clone().limit(64 * MIB).run().expect(0);
    assert_eq!(ours.text(), plain.text(), "{ours}");
    if plain_only() {
        return skip("compared plain with plain: UNDERCROFT_TEST_PLAIN is set");
    }
    let fixed = ours.number("immovable.bytes_peak").unwrap_or(0.0);
    say(&format!(
        "{name}: {} MiB, {:.1?} plain, {:.1?} in 64 MiB; {} MiB could not leave",
        plain.anonymous_peak / MIB,
        plain.wall,
        ours.wall,
        fixed as u64 / MIB
    ));
    assert!(fixed > 0.0, "the collector protected nothing: {ours}");
    ours.expect_swapping(1000.0);
}

/// Boehm's collector learns of writes by protecting its heap, and scans the stacks of threads that
/// it stops.
#[test]
fn boehms_incremental_collector_gives_the_plain_output() {
    let _turn = undercroft_tests::beside_others();
    let headers = ["/usr/include/gc.h", "/usr/include/gc/gc.h"];
    if !headers.iter().any(|path| Path::new(path).exists()) {
        return skip("no libgc; on Debian: apt-get install libgc-dev");
    }
    let flags = ["-Wall", "-Wextra", "-Werror", "-Wl,--no-as-needed", "-lgc"];
    let program = build_with("collects", "gc", "cc", &flags).expect("collects.c compiles");
    same_in_64_mib("Boehm's collector", &Job::new(program));
}

/// Ruby's collector moves objects, and protects what it has moved, to learn of who still uses it.
#[test]
fn ruby_with_yjit_and_compaction_gives_the_plain_output() {
    let _turn = undercroft_tests::beside_others();
    let Some(ruby) = find("ruby") else {
        return skip("no ruby; on Debian: apt-get install ruby");
    };
    let job = Job::new(ruby).arg("--yjit");
    if job.clone().args(["-e", "exit"]).run().code() != Some(0) {
        return skip("this ruby has no YJIT");
    }
    let script = include_str!("../../programs/compacts.rb");
    same_in_64_mib("ruby --yjit", &job.args(["-e", script]));
}
