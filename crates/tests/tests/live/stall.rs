//! A bound of the part of its time that a program waits for its pages (`--stall-max`): kept over an
//! emulated SSD and disk, as the program itself times its waits.

use undercroft_tests::{Job, MIB, Outcome, build, find, has_access_bits, one_at_a_time, say, skip};

/// In percent. With all pages on the SSD the program waits for some 25 % of its time, and without a
/// bound for 46 to 49 %.
const BOUND: f64 = 35.0;

/// Points by which a bound may be missed, on either side.
const MUST: f64 = 5.0;

/// Points by which the report may differ from what the program measured. The way from a fault to
/// the manager and back is not in the report.
const APART: f64 = 3.0;

/// A real-time priority, the lowest. On a busy machine program and manager would wait for a
/// processor longer than for a device, and what is measured from outside is no longer the bound's.
const PRIORITY: [&str; 3] = ["chrt", "--rr", "1"];

/// Whether [`PRIORITY`] is there.
fn has_priority() -> bool {
    let tried = |chrt| Job::new(chrt).args(&PRIORITY[1..]).arg("true").run();
    find(PRIORITY[0]).is_some_and(|chrt| tried(chrt).code() == Some(0))
}

/// Percent of its time that the program waited, as it says itself.
fn waited(seconds: &str, options: &[&str]) -> (f64, Outcome) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = |name: &str, shape: &str| {
        let path = folder.path().join(name).display().to_string();
        format!("file:{path},size=64M,shape={shape}")
    };
    let outcome = Job::new(build("waits"))
        .before(PRIORITY)
        .args(["5", "50", seconds])
        .limit(5 * MIB / 2)
        .options(["--placement", "locality", "--prefetch", "none"])
        .options(["--policy", "lru", "--access-scan", "10ms"])
        .options(options)
        .tier(&file("ssd", "optane-ssd"))
        .tier(&file("disk", "hdd-7200"))
        .timeout(60)
        .run()
        .expect(0);
    let [waited, passed] = outcome.numbers();
    let told = outcome.number("stall_some_seconds").expect("a report");
    let percent = |of: f64| 100.0 * of / passed;
    let (waited, told) = (percent(waited), percent(told));
    say(&format!(
        "{options:?}: waited {waited:.1} %, told {told:.1} %"
    ));
    assert!((told - waited).abs() < APART, "{waited}: {outcome}");
    (waited, outcome)
}

/// Pages written to the disk.
fn on_disk(outcome: &Outcome) -> u64 {
    let report = outcome.report.as_ref().expect("a report");
    report["tiers"][1]["writes"].as_u64().expect("a count")
}

#[test]
fn a_stall_bound_is_kept_by_pages_that_stay_off_the_disk_and_broken_without() {
    let _turn = one_at_a_time();
    let name = "a_stall_bound_is_kept_by_pages_that_stay_off_the_disk_and_broken_without";
    if !has_access_bits(name) {
        return;
    }
    if !has_priority() {
        return skip(name, "no real-time priority by `chrt` here");
    }
    let (waits, free) = waited("7", &[]);
    assert!(waits > BOUND + MUST, "{waits}: {free}");

    let (waits, bounded) = waited("14", &["--stall-max", &format!("{BOUND}%")]);
    assert!((waits - BOUND).abs() < MUST, "{waits}: {bounded}");
    // The bound is used, too: some pages still go to the disk.
    assert!(on_disk(&bounded) > 1000, "{bounded}");
}
