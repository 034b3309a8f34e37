//! A live run, recorded and replayed in the simulator: the same engine must fault and evict as often.

use std::collections::HashMap;

use serde_json::Value;
use undercroft_tests::{Job, MIB, one_at_a_time, plain_only, say, skip, undercroft};

const LIMIT: u64 = 32 * MIB;

/// How far the simulation may be off, in percent, when it makes room as the live manager does (seen: 0.9), and when it makes
/// it at the recorded times (seen: 0.4).
const APART_MAX: [(&str, f64); 2] = [("ahead", 2.0), ("traced", 1.0)];

/// Fills twice its memory, reads it at random, writes some of it often and loops over it, under `policy` with `more` options; then
/// the same in the simulator, over what was recorded.
fn recorded_and_replayed(policy: &str, more: &[&str]) {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (spill, trace) = (path("spill"), path("live.uct"));
    let live = Job::new(undercroft())
        .args(["lab-touch", "--mode", "patterns", "--footprint-mib", "64"])
        .args(["--phase", "random:read:1:20000"])
        .args(["--phase", "zipf:write:1:60000"])
        .args(["--phase", "seq:read:1:40000"])
        .options(["--policy", policy, "--prefetch", "none"])
        .options(["--trace", &trace])
        .options(more)
        .limit(LIMIT)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .run()
        .expect(0);
    let number = |name: &str| live.number(name).expect("a number in the report");
    // A page that is wanted back before it is stored is a fault of the program too.
    let faults =
        number("faults.first_touch") + number("faults.swap_in") + number("counters.recalled");
    assert!(faults > 20_000.0, "{faults} faults prove nothing");

    let info = json(["trace", "info", &trace, "--json"]);
    let recorded = float(&info["references"]["total"]);
    let evicted = float(&info["movements"]["evicted"]);
    // A page that could not be installed at first is faulted on again, and counted again in the report.
    assert!(
        (recorded / faults - 1.0).abs() < 0.001,
        "{recorded} of {faults} faults were recorded"
    );
    let returned = float(&info["movements"]["returned"]) + number("counters.recalled");
    // The batch in hand when the program ended may be in one and not in the other.
    let swapped_out = number("pages.swapped_out");
    assert!(
        (evicted - returned - swapped_out).abs() <= 64.0,
        "{evicted} evictions recorded, {returned} of them returned; {swapped_out} in the report"
    );

    // The limit is that of the run.
    let limit = LIMIT.to_string();
    for (room, most) in APART_MAX {
        let simulated = json([
            "sim",
            "--trace",
            &trace,
            "--memory",
            &limit,
            "--room",
            room,
            "--reclaim",
            policy,
            "--prefetch",
            "none",
            "--tier",
            "nvme",
            "--json",
        ]);
        let outcome = &simulated["outcomes"][0];
        let apart = |live: f64, simulated: &str| {
            let simulated = float(&outcome[simulated]);
            (simulated, 100.0 * (simulated / live - 1.0))
        };
        let (misses, by) = apart(faults, "misses");
        let (evictions, evictions_by) = apart(evicted, "evictions");
        say(&format!(
            "{policy} {more:?}, room {room}: {faults} faults live, {misses} simulated ({by:+.2} %); \
             {evicted} evictions, {evictions} ({evictions_by:+.2} %)"
        ));
        assert!(by.abs() < most, "{misses} simulated, {faults} live");
        assert!(
            evictions_by.abs() < most,
            "{evictions} simulated, {evicted} live"
        );
    }
    check_turns(&trace);
}

/// Each page comes and leaves in turn: this program drops nothing, and nobody forks.
fn check_turns(trace: &str) {
    let cat = Job::new(undercroft())
        .args(["trace", "cat", "--movements", trace])
        .run()
        .expect(0);
    let mut present: HashMap<&str, bool> = HashMap::new();
    let mut faults_after_eviction = 0;
    let text = cat.text();
    for (at, line) in text.lines().enumerate().skip(1) {
        let words: Vec<&str> = line.split(',').collect();
        let [_, page, what, ..] = words[..] else {
            panic!("line {at}: {line}");
        };
        let before = present.get(page).copied();
        match what {
            "R" | "W" => {
                assert_ne!(before, Some(true), "line {at}: {line}: it is in memory");
                faults_after_eviction += u64::from(before == Some(false));
            }
            // A use in memory moves nothing.
            "accessed" => {
                assert_eq!(before, Some(true), "line {at}: {line}: it is not in memory");
                continue;
            }
            "found" => assert_ne!(before, Some(true), "line {at}: {line}: it is in memory"),
            "returned" => assert_eq!(before, Some(false), "line {at}: {line}: it was not out"),
            "clean" => assert_eq!(before, Some(false), "line {at}: {line}: it is not out"),
            "evicted" | "dropped" => {
                assert_eq!(before, Some(true), "line {at}: {line}: it is not in memory");
            }
            other => panic!("line {at}: {line}: {other} without prefetch"),
        }
        present.insert(page, !matches!(what, "evicted" | "dropped" | "clean"));
    }
    assert!(faults_after_eviction > 10_000, "{faults_after_eviction}");
}

fn json<'a>(words: impl IntoIterator<Item = &'a str>) -> Value {
    let text = Job::new(undercroft()).args(words).run().expect(0).text();
    serde_json::from_str(&text).expect("JSON")
}

fn float(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn clock_faults_as_often_in_the_simulator_and_pages_come_and_leave_in_turn() {
    recorded_and_replayed("clock", &[]);
}

/// It also weighs how long a page was away, so that what was in memory at first matters.
#[test]
fn active_inactive_faults_as_often_in_the_simulator_and_pages_come_and_leave_in_turn() {
    recorded_and_replayed("active_inactive", &[]);
}

/// The policies are told of the same uses live and simulated.
#[test]
fn policies_with_access_bits_fault_as_often_in_the_simulator() {
    if !undercroft_tests::has_access_bits(
        "policies_with_access_bits_fault_as_often_in_the_simulator",
    ) {
        return;
    }
    for policy in ["clock", "lru", "active_inactive"] {
        recorded_and_replayed(policy, &["--access-scan", "20ms"]);
    }
}
