//! A bound of the part of its time that a program waits for its pages (`--stall-max`): kept over an
//! emulated SSD and disk, as the program itself times its waits.

use undercroft_tests::{Job, MIB, Outcome, build, find, has_access_bits, one_at_a_time, say, skip};

/// Points by which a bound may be missed, on either side.
const MUST: f64 = 5.0;

/// Points that there must be between what the SSD alone gives and what there is without a bound.
/// The bound is in the middle: how long a fault takes depends on what else the machine does.
const APART_MIN: f64 = 10.0;

/// Points by which the report may differ from what the program measured. The way from a fault to
/// the manager and back is not in the report: some 10 us a fault, three times that beside others.
const APART: f64 = 5.0;

/// A real-time priority, the lowest. On a busy machine program and manager would wait for a
/// processor longer than for a device, and what is measured from outside is no longer the bound's.
const PRIORITY: [&str; 3] = ["chrt", "--rr", "1"];

/// Whether [`PRIORITY`] is there.
fn has_priority() -> bool {
    let tried = |chrt| Job::new(chrt).args(&PRIORITY[1..]).arg("true").run();
    find(PRIORITY[0]).is_some_and(|chrt| tried(chrt).code() == Some(0))
}

/// Percent of its time that the program waited, as the report says. That is near what the program
/// says itself ([`APART`]).
/// * `tiers`: 1: the SSD alone; 2: with the disk.
fn waited(seconds: &str, tiers: usize, options: &[&str]) -> (f64, Outcome) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = |name: &str, shape: &str| {
        let path = folder.path().join(name).display().to_string();
        format!("file:{path},size=64M,shape={shape}")
    };
    let mut job = Job::new(build("waits"))
        .before(PRIORITY)
        .args(["5", "50", seconds])
        .limit(5 * MIB / 2)
        .options(["--placement", "locality", "--prefetch", "none"])
        .options(["--policy", "lru", "--access-scan", "10ms"])
        .options(options);
    for (name, shape) in [("ssd", "optane-ssd"), ("disk", "hdd-7200")]
        .iter()
        .take(tiers)
    {
        job = job.tier(&file(name, shape));
    }
    let outcome = job.run().expect(0);
    let [waited, passed] = outcome.numbers();
    let told = outcome.number("stall_some_seconds").expect("a report");
    let percent = |of: f64| 100.0 * of / passed;
    let (waited, told) = (percent(waited), percent(told));
    say(&format!(
        "{tiers} tiers, {options:?}: waited {waited:.1} %, told {told:.1} %"
    ));
    assert!((told - waited).abs() < APART, "{waited}: {outcome}");
    (told, outcome)
}

/// Pages written to the disk.
fn on_disk(outcome: &Outcome) -> u64 {
    let report = outcome.report.as_ref().expect("a report");
    report["tiers"][1]["writes"].as_u64().expect("a count")
}

#[test]
fn a_stall_bound_is_kept_by_pages_that_stay_off_the_disk_and_broken_without() {
    let _turn = one_at_a_time();
    if !has_access_bits() {
        return;
    }
    if !has_priority() {
        return skip("no real-time priority by `chrt` here");
    }
    let (least, alone) = waited("4", 1, &[]);
    let (most, free) = waited("6", 2, &[]);
    if most - least < APART_MIN {
        return skip(&format!(
            "faults are too slow here: {least} % on the SSD, {most} % without a bound"
        ));
    }
    let bound = ((least + most) / 2.0).round();
    let (waits, bounded) = waited("14", 2, &["--stall-max", &format!("{bound}%")]);
    assert!(
        (waits - bound).abs() < MUST,
        "{waits} of {bound}: {alone} {free} {bounded}"
    );
    // The bound is used, too: some pages still go to the disk.
    assert!(on_disk(&bounded) > 1000, "{bounded}");
}
