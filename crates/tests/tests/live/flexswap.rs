//! FlexSwap's policies as files (`policies`): what they do to a program, and in the
//! lab from the same file.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use undercroft_tests::{
    Job, MIB, Running, build, find, has_access_bits, policy_alone, say, skip, turn, undercroft,
    undercroft_lab,
};

/// Builds a policy of the folder `policies`. `None`: the compiler is missing, and that was said.
pub(crate) fn policy(name: &str, folder: &Path) -> Option<PathBuf> {
    if find("wasm-ld").is_none() || find("clang").is_none() {
        skip("no clang or no wasm-ld: no policy can be built from C");
        return None;
    }
    let file = folder.join(format!("{name}.wasm"));
    let built = Command::new("make")
        .args(["-C", concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies")])
        .args(["DEFINE=-Werror", &format!("OUT={}", folder.display())])
        .arg(&file)
        .output()
        .expect("make");
    assert!(built.status.success(), "{built:?}");
    let check = ["policy", "check", text(&file)];
    Job::new(undercroft()).args(check).run().expect(0);
    Some(file)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

pub(crate) fn set(run: &Running, change: &str) {
    let pid = run.keeper().to_string();
    Job::new(undercroft())
        .args(["set", &pid, change])
        .run()
        .expect(0);
}

pub(crate) fn count(status: &Value, path: &str) -> u64 {
    let found = status.pointer(path).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no number {path}: {status}"))
}

/// A parameter of the run's policy.
pub(crate) fn parameter(status: &Value, name: &str) -> Option<u64> {
    let all = status.pointer("/policies/plugin/parameters")?.as_array()?;
    all.iter().find(|of| of["name"] == name)?["value"].as_u64()
}

const HOT_MIB: u64 = 12;
const COLD_MIB: u64 = 32;

#[test]
fn what_is_cold_leaves_by_the_dt_reclaimer_as_a_file_and_what_is_used_stays() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("dt_reclaimer", folder.path()).filter(|_| has_access_bits()) else {
        return;
    };
    let spill = folder.path().join("spill").display().to_string();
    let mut run = Job::new(build("hot_and_cold"))
        .args([HOT_MIB, COLD_MIB, 1 << 40, 0, 2000].map(|of| of.to_string()))
        .options(["--policy", text(&file), "--prefetch", "none"])
        .limit(128 * MIB)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .start();
    run.until("events", 30, |run| {
        (parameter(&run.status()?, "interval_ms")? == 60_000).then_some(())
    });
    set(&run, "policy.interval_ms=200");
    // The program, its libraries and the hot set are in use.
    let most = (HOT_MIB + 4) * MIB;
    let status = run.until("cold memory that leaves", 60, |run| {
        let status = run.status()?;
        let scans = count(&status, "/policies/plugin/scans");
        (scans > 15 && count(&status, "/resident_bytes") < most).then_some(status)
    });
    let cold = parameter(&status, "cold_pages").expect("a parameter") * 4096;
    let near = (COLD_MIB - 2) * MIB..(COLD_MIB + 6) * MIB;
    assert!(near.contains(&cold), "{cold} bytes are cold: {status}");
    let (scans, loads) = ("/policies/plugin/scans", "/faults/swap_in");
    let (began, before) = (count(&status, scans), count(&status, loads));
    let status = run.until("20 more scans", 60, |run| {
        let status = run.status()?;
        (count(&status, scans) >= began + 20).then_some(status)
    });
    let passed = count(&status, scans) - began;
    let came_back = count(&status, loads) - before;
    say(&format!(
        "{cold} bytes were cold, where {} are; in {passed} scans {came_back} pages came back",
        COLD_MIB * MIB
    ));
    // The target: 2 % of what is in use, a scan.
    let used = HOT_MIB * 256;
    assert!(
        came_back <= passed * used * 2 / 100,
        "{came_back}: {status}"
    );
    assert!(
        count(&status, "/resident_bytes") > HOT_MIB * MIB,
        "{status}"
    );
    assert_eq!(parameter(&status, "groups_left_out"), Some(0), "{status}");
    run.signal(Signal::TERM); // it ends its steps, and compares everything
    let outcome = run.wait().expect(0);
    assert!(outcome.text().contains("0 wrong"), "{outcome}");
}

/// Figures of a simulation: pages that left, that came back, and that were prefetched and used.
fn simulated(folder: &Path, policy: &str, trace: &str, options: &[&str]) -> [u64; 3] {
    let out = folder.join("out");
    let ended = Command::new(undercroft_lab())
        .args(["sim", "--trace", trace, "--policy", policy])
        .args(["--prefetch", "none", "--out", text(&out)])
        .args(options)
        .output()
        .expect("the lab");
    assert!(ended.status.success(), "{ended:?}");
    let results = std::fs::read(out.join("results.json")).expect("results");
    let results: Value = serde_json::from_slice(&results).expect("JSON");
    ["evictions", "swap_ins", "prefetch_hits"]
        .map(|of| count(&results["outcomes"][0], &format!("/{of}")))
}

#[test]
fn the_same_dt_reclaimer_has_cold_pages_leave_in_the_lab() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("dt_reclaimer", folder.path()) else {
        return;
    };
    // A scan each 60,000 references; in each such time, 18 pages more of the walk are used.
    let trace = "scan_hot:pages=2000,hot=1000,share=0.9997,refs=2000000";
    let all = ["--memory", "100%", "--reference-time", "1ms"];
    let [left, came_back, _] = simulated(folder.path(), text(&file), trace, &all);
    say(&format!("{left} pages left, {came_back} came back"));
    assert!((450..=620).contains(&left), "{left} of some 600 pages left");
    // 2 % of the hot set a scan, in 33 scans.
    assert!(came_back <= 660, "{came_back}");
    assert_eq!(
        simulated(folder.path(), "auto", trace, &all),
        [0, 0, 0],
        "all of it fits"
    );
}

/// SYS-R and LinearPF on walks round 16 MiB, whose pages are stored in the beginning.
#[test]
fn the_same_sys_r_and_linear_pf_save_faults_in_the_lab() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let files = ["sys_r", "linear_pf"].map(|name| policy(name, folder.path()));
    let [Some(sys_r), Some(linear)] = files else {
        return;
    };
    let trace = "loop:pages=4096,refs=80000,writes=0";
    let common = ["--initial", "stored", "--tier", "sata-ssd"];
    let part = [&common[..], &["--memory", "80%"]].concat();
    let [_, by_lru, _] = simulated(folder.path(), "lru", trace, &part);
    let [_, by_file, _] = simulated(folder.path(), text(&sys_r), trace, &part);
    say(&format!(
        "{by_file} pages came back by SYS-R, {by_lru} by lru"
    ));
    assert!(by_file * 100 < by_lru * 56, "{by_file} of {by_lru}");
    let ahead = ["--memory", "75%", "--room", "ahead"];
    let slowly = ["--reference-time", "500us"];
    let part = [&common[..], &ahead, &slowly].concat();
    let [_, waits, before] = simulated(folder.path(), text(&linear), trace, &part);
    say(&format!(
        "by LinearPF {before} pages came before they were used, {waits} did not"
    ));
    assert!(waits * 49 < before, "98 % in time: {waits}, {before}");
}

/// SYS-Agg on ten phases of 20 s. Each uses a quarter of the pages; a quarter of these was used by
/// the phase before.
#[test]
fn the_same_sys_agg_has_past_phases_leave_in_the_lab() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("sys_agg", folder.path()) else {
        return;
    };
    let trace = "phases:pages=12000,set=3000,refs=4000000,writes=0.5";
    let all = ["--memory", "100%", "--reference-time", "50us"];
    let [left, came_back, _] = simulated(folder.path(), text(&file), trace, &all);
    say(&format!("{left} pages left, {came_back} came back"));
    let past = 9 * 2250;
    assert!((past * 9 / 10..=past * 11 / 10).contains(&left), "{left}");
    assert!(came_back < left, "{came_back} of {left}");
}

/// Columns of the matrices: the second one has 16 MiB.
const COLUMNS: u64 = 2048;
const ROWS: u64 = 40;

/// A product of matrices in four fifths of what a row of it goes through. Returns the seconds of
/// the product, the pages that came back, and the report.
fn product(policy: &str) -> (f64, u64, Value) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    let outcome = Job::new(build("matmul"))
        .args([COLUMNS, ROWS].map(|of| of.to_string()))
        .options(policy_alone(policy))
        .limit(COLUMNS * COLUMNS * 4 * 4 / 5 + MIB)
        .tier(&format!("file:{spill},size=1G"))
        .run()
        .expect(0);
    assert!(outcome.text().contains(" 0 wrong"), "{outcome}");
    let text = outcome.text();
    let took = text.split(' ').next().and_then(|of| of.parse().ok());
    let report = outcome.report.expect("a report");
    let loads = count(&report, "/faults/swap_in");
    (took.expect("seconds"), loads, report)
}

/// The paper has 44 % fewer faults, and 30 % less time: at least half of that.
#[test]
fn sys_r_as_a_file_saves_faults_and_time_of_a_product_of_matrices() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("sys_r", folder.path()) else {
        return;
    };
    let (lru_took, lru_loads, _) = product("lru");
    let (took, loads, report) = product(text(&file));
    say(&format!(
        "{loads} pages came back instead of {lru_loads}, in {took} s instead of {lru_took}"
    ));
    let instructions = parameter(&report, "instructions");
    assert!(instructions > Some(2), "{report}");
    assert!(
        loads * 100 < lru_loads * 78,
        "{loads} of {lru_loads}: {report}"
    );
    assert!(took < lru_took * 0.85, "{took} of {lru_took}: {report}");
}

/// Uses some memory again and again, in a limit that is lowered and raised. Returns for how many
/// pages it waited after that, and how many came before they were needed.
fn raised(policy: Option<&str>, folder: &Path) -> [u64; 2] {
    let spill = folder.join("spill").display().to_string();
    let mut options = vec!["--policy", policy.unwrap_or("auto"), "--prefetch", "none"];
    options.extend(["--access-scan", "200ms"]);
    let mut run = Job::new(build("hot_and_cold"))
        .args([HOT_MIB, COLD_MIB, 1 << 40, 0, 1_000_000].map(|of| of.to_string()))
        .options(options)
        .limit(128 * MIB)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .start();
    run.until("memory that is filled and used", 60, |run| {
        let status = run.status()?;
        let filled = count(&status, "/resident_bytes") > (HOT_MIB + COLD_MIB) * MIB;
        (filled && status["uptime_seconds"].as_f64()? > 4.0).then_some(())
    });
    if policy.is_some() {
        set(&run, "policy.interval_ms=200");
        run.until("scans that the policy hears of", 30, |run| {
            (count(&run.status()?, "/policies/plugin/scans") > 10).then_some(())
        });
    }
    set(&run, &format!("memory-max={}", 8 * MIB));
    run.until("memory that has left", 60, |run| {
        (count(&run.status()?, "/resident_bytes") <= 8 * MIB).then_some(())
    });
    let before = run.status().expect("it runs");
    set(&run, &format!("memory-max={}", 24 * MIB));
    let was = |of| count(&before, of);
    let uptime = |status: &Value| status["uptime_seconds"].as_f64().expect("a number");
    let began = uptime(&before);
    let status = run.until("some steps", 30, |run| {
        let status = run.status()?;
        (uptime(&status) > began + 4.0).then_some(status)
    });
    let found = ["/faults/swap_in", "/pages/prefetched"].map(|of| count(&status, of) - was(of));
    run.signal(Signal::TERM); // it ends its steps, and compares everything
    let outcome = run.wait().expect(0);
    assert!(outcome.text().contains("0 wrong"), "{outcome}");
    found
}

/// FlexSwap's WSR. Not all that left finds room: what was used last comes first.
#[test]
fn a_working_set_comes_back_by_wsr_as_a_file_when_the_limit_is_raised() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("wsr", folder.path()).filter(|_| has_access_bits()) else {
        return;
    };
    let [without, _] = raised(None, folder.path());
    let [with, came] = raised(Some(text(&file)), folder.path());
    say(&format!(
        "after the limit was raised the program waited for {with} pages instead of {without}; \
         {came} came before"
    ));
    assert!(without > 1000, "{without}");
    assert!(with < without / 2, "{with} of {without}");
    assert!(came > 1000, "{came}");
}

/// FlexSwap's SYS-Agg: the memory of a past phase leaves, and that of the present one stays.
#[test]
fn what_a_past_phase_used_leaves_by_sys_agg_as_a_file() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let Some(file) = policy("sys_agg", folder.path()).filter(|_| has_access_bits()) else {
        return;
    };
    let (parts, mib, seconds) = (3, 16, 3);
    let spill = folder.path().join("spill").display().to_string();
    let mut run = Job::new(build("phases"))
        .args([parts, mib, seconds, 2].map(|of| of.to_string()))
        .options(["--policy", text(&file), "--prefetch", "none"])
        .limit(128 * MIB)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .start();
    run.until("the policy", 30, |run| parameter(&run.status()?, "phases"));
    set(&run, "policy.interval_ms=200");
    // The program and its libraries are in use, too.
    let most = (mib + 6) * MIB;
    let mut came = 0;
    for phase in 3..=4 {
        came = run.until(
            "memory of the last phase but one that has left",
            30,
            |run| {
                let status = run.status()?;
                let begun = parameter(&status, "phases")? >= phase;
                let left = begun && count(&status, "/resident_bytes") < most;
                left.then(|| count(&status, "/faults/swap_in"))
            },
        );
    }
    let outcome = run.wait().expect(0);
    assert!(outcome.text().contains("0 wrong"), "{outcome}");
    let part = mib * 256;
    say(&format!(
        "a phase uses {part} pages; in the first four, of which the last uses what the first did, \
         {came} came back"
    ));
    // What is used stays.
    assert!(came < part * 5 / 4, "{came}: {outcome}");
}

/// Scans of a virtual machine are so far apart that a phase may begin before one was heard of the
/// last. Here the file's code runs as a program, so that each scan comes when the test wants it.
#[test]
fn a_phase_that_begins_before_a_scan_of_the_last_one_is_seen_by_sys_agg() {
    let hears = Command::new(build("sys_agg_hears"))
        .output()
        .expect("it runs");
    assert!(hears.status.success(), "{hears:?}");
    let heard = String::from_utf8_lossy(&hears.stdout);
    let must = "3 phases, 0 early, 2000 past, 0 present, scans each 0 ms";
    assert_eq!(heard.trim(), must);
}
