//! Many processes, threads and pages: nothing of the manager grows where it should not. At a tenth
//! of the size; in full with `UNDERCROFT_TEST_FULL_SIZE=1`.

use std::time::Duration;

use undercroft_tests::{
    Job, MIB, Outcome, Running, build, descendants, one_at_a_time, plain_only, processes, say, skip,
};

/// Longest hold of the engine that a test allows. The bound is a millisecond or two, but the holder
/// may lose its CPU meanwhile to other programs.
const HOLD_MAX: f64 = 0.1;

fn is_full_size() -> bool {
    std::env::var("UNDERCROFT_TEST_FULL_SIZE").is_ok_and(|value| value == "1")
}

fn sized(full: u64) -> String {
    let size = if is_full_size() { full } else { full / 10 };
    size.to_string()
}

fn tell(name: &str, outcome: &Outcome) {
    let report = outcome.report.as_ref();
    let manager = report.map(|report| report["manager"].to_string());
    say(&format!(
        "{name}: {:.1} s, {} {}",
        outcome.wall.as_secs_f64(),
        outcome.text().trim(),
        manager.unwrap_or_default()
    ));
}

/// Open descriptors of the manager of a run.
fn descriptors(run: &Running) -> Option<usize> {
    let tree = descendants(&processes(), run.pid());
    let manager = tree
        .iter()
        .find(|process| process.command.contains("undercroft manager"))?;
    let folder = std::fs::read_dir(format!("/proc/{}/fd", manager.pid)).ok()?;
    Some(folder.count())
}

/// A program over its limit, and beside it one fork and exec after the other. Samples the manager's
/// descriptors meanwhile.
fn execs_beside_a_hog(count: &str, job: Job) -> (Outcome, Vec<usize>) {
    let mut run = job.limit(32 * MIB).timeout(900).start();
    let mut seen = Vec::new();
    while run.is_alive() && seen.len() < 8000 {
        seen.extend(descriptors(&run));
        std::thread::sleep(Duration::from_millis(100));
    }
    let outcome = run.wait();
    tell(&format!("{count} forks and execs"), &outcome);
    (outcome.expect(0), seen)
}

fn hog_and_execs(count: &str) -> Job {
    let (touch, scale) = (build("touch"), build("scale"));
    let script = format!(
        "{} 96 --rounds 1000000 & hog=$!; sleep 1; {} execs {count} || exit 9; kill $hog; exit 0",
        touch.display(),
        scale.display()
    );
    Job::new("sh").args(["-c", &script])
}

#[test]
fn descriptors_do_not_grow_with_the_number_of_forks() {
    if plain_only() {
        let name = "descriptors_do_not_grow_with_the_number_of_forks";
        return skip(name, "only plain");
    }
    let _turn = one_at_a_time();
    let count = sized(20_000);
    let (outcome, seen) = execs_beside_a_hog(&count, hog_and_execs(&count));
    // A sample may fall between the end of some processes and the moment when the manager notices.
    let mut last = seen[seen.len() / 2..].to_vec();
    last.sort_unstable();
    let (most, median) = (last.last(), last.get(last.len() / 2));
    say(&format!(
        "descriptors of the manager, second half of {} samples: median {median:?}, most {most:?}",
        seen.len()
    ));
    assert!(seen.len() > 10, "too few samples: {seen:?}");
    assert!(median < Some(&150), "{seen:?}: {outcome}");
    assert!(most < Some(&1000), "{seen:?}: {outcome}");
}

#[test]
fn few_descriptors_end_no_program() {
    if plain_only() {
        return skip("few_descriptors_end_no_program", "only plain");
    }
    let _turn = one_at_a_time();
    let few = [
        "sh",
        "-c",
        "ulimit -Sn 128; ulimit -Hn 128; exec \"$@\"",
        "sh",
    ];
    let count = sized(2_000);
    let (_, seen) = execs_beside_a_hog(&count, hog_and_execs(&count).before(few));
    assert!(seen.iter().all(|open| *open <= 128), "{seen:?}");
}

/// Drops, moves and forks of ranges of many chunks, which the books forget later. Dropped bytes
/// never come back.
#[test]
fn large_ranges_change_and_every_byte_is_right() {
    let _turn = one_at_a_time();
    let rounds = sized(4_000);
    let outcome = Job::new(build("ranges"))
        .args(["2", "256", &rounds, "1"])
        .limit(48 * MIB)
        .timeout(900)
        .run();
    tell("large ranges", &outcome);
    outcome.expect(0);
}

/// Every chunk of the mapping has a page, and a fork child has them all.
#[test]
fn a_wide_and_sparse_mapping_costs_what_is_used() {
    let _turn = one_at_a_time();
    let limit = if is_full_size() { 512 } else { 64 } * MIB;
    let outcome = Job::new(build("scale"))
        .args(["wide", &sized(100 << 10), &sized(1 << 10)])
        .limit(limit)
        .timeout(900)
        .run();
    tell("a wide mapping", &outcome);
    let outcome = outcome.expect(0);
    if let Some(held) = outcome.number("manager.scale.engine_hold_seconds_max") {
        assert!(
            held < HOLD_MAX,
            "the engine was held for {held} s: {outcome}"
        );
    }
}
