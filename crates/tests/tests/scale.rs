//! Many processes, threads and pages: nothing of the manager grows where it should not. A tenth of
//! the size; all of it with `UNDERCROFT_TEST_FULL_SIZE=1`.

use std::time::Duration;

use undercroft_tests::{
    Job, MIB, Outcome, Running, build, descendants, one_at_a_time, plain_only, processes, say, skip,
};

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

/// A program over its limit, and beside it one fork and exec after the other. Looks at the
/// descriptors of the manager meanwhile.
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
    let most = seen.iter().max().copied().unwrap_or(0);
    say(&format!(
        "descriptors of the manager: {most} at most, {} looks",
        seen.len()
    ));
    assert!(seen.len() > 10, "too few looks: {seen:?}");
    assert!(most < 150, "{most} descriptors at most: {outcome}");
}
