//! `--access-scan`: pages that are used in memory stay there, though no fault shows their use.

use std::collections::HashSet;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use undercroft_tests::{
    Job, MIB, beside_others, build, find, has_access_bits, one_at_a_time, plain_only, say, skip,
    undercroft, undercroft_lab,
};

const LIMIT: u64 = 32 * MIB;
/// All of it fits, and managing begins.
const ROOMY: u64 = 96 * MIB;
pub(crate) const HOT_MIB: u64 = 18;
const COLD_MIB: u64 = 64;
const STEPS: u64 = 500;
const COLD_A_STEP: u64 = 32;

/// A hot set of more than half the memory, used at each step, beside a walk through cold memory.
/// Every word read is verified.
fn job(policy: &str, folder: &Path) -> Job {
    resting_job(policy, folder, "2000")
}

/// The same, with this many microseconds of rest a step.
pub(crate) fn resting_job(policy: &str, folder: &Path, rest_us: &str) -> Job {
    let spill = folder.join("spill").display().to_string();
    Job::new(build("hot_and_cold"))
        .args([HOT_MIB, COLD_MIB, STEPS, COLD_A_STEP].map(|number| number.to_string()))
        .arg(rest_us)
        .options(["--policy", policy, "--prefetch", "none"])
        .limit(LIMIT)
        .tier(&format!("file:{spill},size=1G"))
}

/// Pages swapped in that the program could have kept: all but those that the cold walk and the
/// final verification read.
pub(crate) fn hot_faults(job: Job) -> (f64, Value) {
    let outcome = job.run().expect(0);
    assert!(outcome.text().contains("0 wrong"), "{outcome}");
    let number = |name: &str| outcome.number(name).expect("a number in the report");
    let cold = (STEPS * COLD_A_STEP + COLD_MIB * 256) as f64;
    let hot = number("pages.swapped_in") - cold;
    let report = outcome.report.expect("a report");
    (hot.max(0.0), report)
}

#[test]
fn a_hot_set_stays_in_memory_where_its_uses_are_seen() {
    if !has_access_bits() {
        return;
    }
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (without, report) =
        hot_faults(job("lru", folder.path()).options(["--access-scan", "never"]));
    assert_eq!(report["access_scans"], Value::Null);
    let (with, report) = hot_faults(job("lru", folder.path()).options(["--access-scan", "50ms"]));
    let scans = &report["access_scans"];
    say(&format!(
        "{without} faults of the hot set without access bits, {with} with; {scans}"
    ));
    assert!(scans["count"].as_u64() > Some(5), "{scans}");
    // FIFO evicts the hot set once in each lap. With scans, the hot set need not leave again once
    // it is in memory.
    assert!(without > 2.0 * (HOT_MIB * 256) as f64, "{without}");
    assert!(with < without / 2.0, "{with} of {without}");
}

/// Scans are on by default: while pages leave, scans find the used ones. Without pressure there is
/// no scan.
#[test]
fn by_default_a_run_scans_while_pages_leave() {
    if !has_access_bits() {
        return;
    }
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let never = ["--access-scan", "never"];
    // The first scan finds nothing, because bits are compared with the scan before. So the run
    // takes 2 s and more, for further scans.
    let job = |rest_us| resting_job("lru", folder.path(), rest_us);
    let (without, _) = hot_faults(job("4000").options(never));
    let (with, report) = hot_faults(job("4000"));
    let scans = &report["access_scans"];
    say(&format!(
        "lru: {without} faults of the hot set without scans, {with} by default; {scans}"
    ));
    let seconds = report["wall_seconds"].as_f64().expect("seconds");
    let count = scans["count"].as_f64().expect("a count");
    // A scan is due after a 64th of the pages, and after half a second.
    let most = turnovers(&report) + 2.0 * seconds + 1.0;
    assert!(count >= 2.0 && count <= most, "{scans}, at most {most}");
    let spent = scans["seconds"].as_f64().expect("seconds");
    assert!(spent < 0.1 * seconds, "{spent} of {seconds} s");
    assert!(with < 0.9 * without, "{with} of {without}");
    // It is managed, and no page leaves.
    let roomy = hot_faults(job("1000").limit(ROOMY)).1;
    assert_eq!(roomy["pages"]["swapped_out"], 0, "{roomy}");
    assert_eq!(roomy["access_scans"], Value::Null, "{roomy}");
}

/// How often a 64th of the resident pages left, at most: copies take up to half of the limit.
fn turnovers(report: &Value) -> f64 {
    let resident = report["resident_bytes_peak"].as_f64().expect("bytes") / 4096.0;
    let left = report["pages"]["swapped_out"].as_f64().expect("pages");
    left / (resident / 2.0 / 64.0)
}

/// Scans by default cost an idle program nothing, and leave out processes with a living fork
/// relative.
#[test]
fn by_default_idle_programs_and_fork_relatives_are_not_scanned() {
    if !has_access_bits() {
        return;
    }
    let _turn = one_at_a_time();
    let scans_with = |hold: &str| {
        let idle = Job::new(build("touch"))
            .args(["48", "--hold", hold])
            .limit(24 * MIB)
            .run()
            .expect(0);
        let scans = &idle.report.expect("a report")["access_scans"];
        say(&format!("idle for {hold} s: {scans}"));
        scans["count"].as_u64().unwrap_or(0)
    };
    // Half a second each would be eight scans more.
    let (short, long) = (scans_with("1"), scans_with("5"));
    assert!(long < short + 4, "{short} and {long} scans");

    if find("python3").is_none() {
        return skip("needs python3");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    let scans = |fork: bool| {
        let script = format!(
            "import ctypes, os, time
parent = os.getpid()
child = os.fork() if {fork} else 1
if child == 0:
    ctypes.CDLL(None).prctl(1, 9)  # it is killed in the moment when its parent ends
while child == 0:
    time.sleep(0.01)
    if os.getppid() != parent:
        os._exit(0)
data = [bytearray(os.urandom(1 << 20)) for _ in range(64)]
end = time.time() + 2
while time.time() < end:
    for block in data:
        block[::4096]
os._exit(0)  # the child lives until then: without it scans are allowed again
",
            fork = if fork { "True" } else { "False" }
        );
        let outcome = Job::new("python3")
            .args(["-c", &script])
            .limit(32 * MIB)
            .tier(&format!("file:{spill},size=1G"))
            .run()
            .expect(0);
        outcome.report.expect("a report")["access_scans"].clone()
    };
    let (alone, related) = (scans(false), scans(true));
    say(&format!("without a relative: {alone}, with one: {related}"));
    assert!(alone["count"].as_u64() > Some(1), "{alone}");
    assert_eq!(related, Value::Null);
}

/// Scans while the program forks: the children share the parent's frames until they write.
#[test]
fn scanning_a_tree_of_processes_costs_no_byte() {
    if !has_access_bits() {
        return;
    }
    let _turn = beside_others();
    for policy in ["lru", "active_inactive"] {
        let outcome = Job::new(build("touch"))
            .args(["48", "--rounds", "3", "--fork", "3", "--exit", "7"])
            .options(["--policy", policy, "--access-scan", "10ms"])
            .limit(24 * MIB)
            .run()
            .expect(7);
        let report = outcome.report.expect("a report");
        say(&format!("{policy}: {}", report["access_scans"]));
        assert!(report["access_scans"]["count"].as_u64() > Some(0));
    }
}

#[test]
fn a_trace_has_the_uses_of_pages_in_memory_and_only_of_those() {
    if !has_access_bits() {
        return;
    }
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let trace = folder.path().join("live.uct").display().to_string();
    let (_, report) =
        hot_faults(job("lru", folder.path()).options(["--access-scan", "50ms", "--trace", &trace]));
    let info = Job::new(undercroft_lab())
        .args(["trace", "info", &trace, "--json"])
        .run()
        .expect(0);
    let info: Value = serde_json::from_str(&info.text()).expect("JSON");
    let recorded = info["movements"]["accessed"].as_u64().expect("a number");
    assert_eq!(
        Some(recorded),
        report["access_scans"]["pages_used"].as_u64()
    );
    assert!(recorded > 10 * HOT_MIB * 256, "{recorded}");
    let cat = Job::new(undercroft_lab())
        .args(["trace", "cat", "--movements", &trace])
        .run()
        .expect(0);
    let (mut present, mut seen) = (HashSet::new(), 0);
    let text = cat.text();
    for line in text.lines().skip(1) {
        let words: Vec<&str> = line.split(',').collect();
        let [_, page, what, ..] = words[..] else {
            panic!("{line}");
        };
        match what {
            "accessed" => {
                seen += 1;
                assert!(present.contains(page), "{line}: it is not in memory");
            }
            "evicted" | "named" | "dropped" | "clean" => {
                present.remove(page);
            }
            _ => {
                present.insert(page);
            }
        }
    }
    assert_eq!(seen, recorded);
}

/// Undercroft without the capabilities `lost`; `None` if this machine cannot take them away.
pub(crate) fn undercroft_without(lost: &str) -> Option<Job> {
    if plain_only() || !rustix::process::geteuid().is_root() || find("setpriv").is_none() {
        skip("needs root, setpriv and undercroft");
        return None;
    }
    let sets = [
        format!("--bounding-set={lost}"),
        format!("--inh-caps={lost}"),
    ];
    Some(Job::new("setpriv").args(sets).arg(undercroft()))
}

/// By default a run goes on without scans if scanning does not work, or if bits cannot be cleared
/// without holding up installations.
#[test]
fn without_the_rights_to_scan_and_clear_the_default_scans_nothing() {
    let _turn = beside_others();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    for lost in ["-bpf,-perfmon,-sys_admin", "-sys_nice"] {
        let Some(job) = undercroft_without(lost) else {
            return;
        };
        let tier = format!("file:{},size=1G", path("spill"));
        let outcome = job
            .args(["run", "--memory-max", "32M", "--tier", &tier, "--report"])
            .args([path("report"), "--".to_owned()])
            .arg(build("hot_and_cold"))
            .args([HOT_MIB, COLD_MIB, STEPS, COLD_A_STEP, 2000].map(|number| number.to_string()))
            .run()
            .expect(0);
        assert!(outcome.text().contains("0 wrong"), "{lost}: {outcome}");
        let report = std::fs::read_to_string(path("report")).expect("a report");
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert!(report["pages"]["swapped_out"].as_u64() > Some(10_000));
        assert_eq!(report["access_scans"], Value::Null, "{lost}");
    }
}

/// Without the right to load programs into the kernel the option is refused, with its name and the
/// fix.
#[test]
fn without_the_right_to_scan_the_option_is_refused() {
    let _turn = beside_others();
    let Some(job) = undercroft_without("-bpf,-perfmon,-sys_admin") else {
        return;
    };
    let outcome = job
        .args(["run", "--access-scan", "100ms", "--", "true"])
        .run();
    assert_eq!(outcome.code(), Some(125), "{outcome}");
    for word in ["--access-scan", "CAP_BPF", "leave the option out"] {
        assert!(outcome.errors.contains(word), "{word}: {outcome}");
    }
}

/// A program has 18 MiB that it uses and 64 that it does not, and a limit far above both. Scans
/// tell the two apart, and what is not used leaves when a user asks: no more, and no less.
#[test]
fn memory_that_is_not_used_is_known_and_leaves_when_a_user_asks() {
    if !has_access_bits() {
        return;
    }
    let _turn = beside_others();
    // The second request comes long after a scan: what was used since then is not known to be old.
    for (limit, interval, since) in [("512M", "200ms", 0.0), ("max", "2s", 1.2)] {
        let mut run = Job::new(build("hot_and_cold"))
            .args([HOT_MIB, COLD_MIB, 100 * STEPS, 0].map(|number| number.to_string()))
            .arg("5000")
            .options(["--memory-max", limit, "--access-scan", interval])
            .start();
        let pid = run.keeper().to_string();
        let demote = |older: &str| {
            let told =
                Job::new(undercroft()).args(["demote", &pid, "--older-than", older, "--json"]);
            let told: Value = serde_json::from_str(&told.run().expect(0).text()).expect("JSON");
            let bytes = |of: &str| told["demotion"][of].as_u64().expect("a number");
            [bytes("named_bytes"), bytes("left_bytes")]
        };
        let unused = |status: &Value, seconds: u64| {
            let all = status["ages"]["unused"].as_array()?;
            let of = all.iter().find(|of| of["seconds"] == seconds)?;
            of["bytes"].as_u64()
        };
        let cold = COLD_MIB * MIB;
        let near = cold - MIB..cold + 3 * MIB;
        let found = run.until("the memory that is not used", 30, |run| {
            let status = run.status()?;
            let scanned = status["ages"]["scanned_seconds_ago"].as_f64()?;
            unused(&status, 1).filter(|bytes| scanned >= since && near.contains(bytes))
        });
        assert_eq!(demote("1h"), [0, 0], "nothing is that old");
        let [named, left] = demote("1s");
        say(&format!(
            "{limit}: {found} bytes were not used for a second, where {cold} are; {left} of {named} left"
        ));
        assert!(near.contains(&named), "{named} were named");
        assert!(left > named * 95 / 100, "{left} of {named} left");
        let status = run.status().expect("it runs");
        let resident = status["resident_bytes"].as_u64().expect("a number");
        assert!(resident < (HOT_MIB + 4) * MIB, "{resident}: {status}");
        // What is used stayed: no page had to come back.
        let faults = status["faults"]["swap_in"].as_u64().expect("a number");
        assert!(faults < 64, "{status}");
        // All of it comes back, though the program does not touch it.
        let keep = ["set", &pid, "keep=yes"];
        Job::new(undercroft()).args(keep).run().expect(0);
        run.until("all of its memory", 30, |run| {
            let resident = run.status()?["resident_bytes"].as_u64()?;
            (resident >= (HOT_MIB + COLD_MIB) * MIB).then_some(())
        });
        run.signal(Signal::TERM); // it ends its steps, and compares everything
        let outcome = run.wait().expect(0);
        assert!(outcome.text().contains("0 wrong"), "{outcome}");
    }
}

#[test]
fn a_run_without_an_interval_of_scans_says_so_when_old_pages_are_to_leave() {
    let _turn = beside_others();
    if plain_only() {
        return skip("a plain run has no pages that leave");
    }
    let mut run = Job::new("sleep").arg("60").limit(ROOMY).start();
    let pid = run.keeper().to_string();
    run.until("a status", 20, |run| run.status());
    let told = Job::new(undercroft())
        .args(["demote", &pid, "--older-than", "10m"])
        .run();
    assert!(
        told.expect(1).errors.contains("--access-scan 10s"),
        "no fix is named"
    );
    run.signal(Signal::TERM);
    run.wait().expect(143);
}
