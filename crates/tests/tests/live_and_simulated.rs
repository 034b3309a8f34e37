//! A live run's page faults, recorded and replayed in the simulator: the same engine must fault as often.

use serde_json::Value;
use undercroft_tests::{Job, MIB, one_at_a_time, plain_only, say, skip, undercroft};

/// Pages that fit the limit live: all but the reserve (a 64th) and half of it again, which reclaim keeps free.
fn live_pages(limit: u64) -> u64 {
    let pages = limit / 4096;
    pages - pages / 64 * 5 / 4
}

/// CLOCK without access bits decides by arrivals alone, and the recorded faults are all arrivals: each of them should be a
/// miss again. (`active_inactive` also weighs how long a page was away, which a trace that begins in the middle does not tell.)
#[test]
fn recorded_faults_are_faults_again_in_the_simulator() {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let limit = 32 * MIB;
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (spill, trace) = (path("spill"), path("live.uct"));
    let live = Job::new(undercroft())
        .args(["lab-touch", "--mode", "patterns", "--footprint-mib", "64"])
        .args(["--phase", "random:read:1:40000"])
        .options(["--policy", "clock", "--prefetch", "none"])
        .options(["--trace", &trace])
        .limit(limit)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .run()
        .expect(0);
    let number = |name: &str| live.number(name).expect("a number in the report");
    let faults = number("faults.first_touch") + number("faults.swap_in");

    let pages = format!("{}p", live_pages(limit));
    let simulated = Job::new(undercroft())
        .args(["sim", "--trace", &trace, "--memory", &pages])
        .args(["--reclaim", "clock", "--prefetch", "none"])
        .args(["--tier", "nvme", "--json"])
        .run()
        .expect(0);
    let json: Value = serde_json::from_str(&simulated.text()).expect("JSON");
    let outcome = &json["outcomes"][0];
    let recorded = outcome["references"].as_f64().expect("a count");
    let misses = outcome["misses"].as_f64().expect("a count");
    say(&format!(
        "{faults} faults live, {recorded} recorded, {misses} simulated: {:.2} % apart",
        100.0 * (misses / faults - 1.0).abs()
    ));
    assert!(faults > 20_000.0, "{faults} faults prove nothing");
    assert!(
        (recorded / faults - 1.0).abs() < 0.001,
        "{recorded} of {faults} faults were recorded"
    );
    assert!(
        (misses / faults - 1.0).abs() < 0.05,
        "{misses} simulated, {faults} live"
    );
}
