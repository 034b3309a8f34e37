//! Which pages a virtual machine uses: what is used stays in memory, though no fault shows it, and
//! what is not leaves if it is asked to. Scans cost no byte.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use undercroft_tests::{
    Job, MIB, Outcome, build, has_access_bits, rounds, say, setting, turn, undercroft,
};

use crate::access_bits::undercroft_without;
use crate::flexswap::{count, parameter, policy, set, text};
use crate::takeover::{under_kills, wait_for_end};
use crate::vm::guest;
use crate::vm_kvm::{check, has_kvm, race};

const BYTES: u64 = 64 * MIB;
const HOT_MIB: u64 = 12;
/// Filled by the machine, and not used: all but that, its page tables and what is below.
const COLD: u64 = BYTES - HOT_MIB * MIB - 9 * MIB / 4;
const SCANS: [&str; 2] = ["--access-scan", "20ms"];

/// A virtual CPU that uses 12 MiB every 2 ms, `times` times, and `cold` pages of the rest.
fn hot(times: u64, cold: u64) -> Job {
    let words = [64, 1, 1, HOT_MIB, times, cold, 2000].map(|word| word.to_string());
    let words: Vec<&str> = (["hot"].into_iter())
        .chain(words.iter().map(String::as_str))
        .collect();
    let job = guest("kvm_guest", BYTES, &words).timeout(120);
    job.options(["--prefetch", "none"])
}

fn file_tier(folder: &Path) -> String {
    format!("file:{},size=1G", folder.join("spill").display())
}

/// Panics unless the guest was scanned so often, and uses were found. A scan that others wait for
/// takes long, and then scans are rare.
fn scanned(outcome: &Outcome, least: u64) {
    let report = outcome.report.as_ref().expect("a report");
    let scans = &report["access_scans"];
    say(&format!("scans: {scans}"));
    assert!(scans["count"].as_u64() >= Some(least), "{report}");
    assert!(scans["pages_used"].as_u64() > Some(0), "{report}");
    assert_eq!(report["guest"]["access"], "scanned", "{report}");
}

/// Threads write to a guest's memory and compare it, give pages back, pages leave, managers die,
/// and scans take its pages out of page tables all the time.
#[test]
fn no_byte_of_a_guest_is_wrong_while_it_is_scanned_and_managers_die() {
    turn!(beside_others, "it is about guest memory");
    let most = setting("UNDERCROFT_TEST_KILLS", 24) / 3;
    for (seed, kills) in [(1, 0), (2, most)] {
        let arguments = ["3", rounds("6", "10"), &seed.to_string()];
        let job = guest("guest", BYTES, &arguments).limit(17 * MIB);
        let run = job.options(SCANS).timeout(60 + kills).start();
        let pid = run.keeper();
        let killed = under_kills(&run, seed, kills, |_| wait_for_end(pid, kills));
        let outcome = run.wait().expect(0);
        let [increments, checks, given, empty, wrong] = outcome.numbers();
        say(&format!(
            "scanned guest: {killed} kills, {increments} increments, {checks} pages compared, \
             {given} given back, {empty} of them zeros"
        ));
        assert_eq!(wrong, 0.0, "{outcome}");
        assert!(increments > 1000.0 && checks > 1000.0, "{outcome}");
        if kills == 0 {
            scanned(&outcome.expect_swapped(2000.0), 5);
        }
    }
}

#[test]
fn increments_of_virtual_cpus_that_are_scanned_are_all_there() {
    turn!(beside_others, "it is about guest memory");
    if !has_kvm() {
        return;
    }
    for how in ["none", "balloon"] {
        let visits = rounds((30_000, 16), (400_000, 16));
        let outcome = race(2, 7, visits, how).options(SCANS).run().expect(0);
        check(&outcome, &format!("scanned, {how}"));
        scanned(&outcome, 2);
    }
}

/// Pages that came back though the program uses them all the time.
fn hot_faults(folder: &Path, scans: &str) -> f64 {
    let (times, cold) = (1000, 32);
    let outcome = hot(times, cold)
        .options(["--policy", "lru", "--access-scan", scans])
        .limit(32 * MIB)
        .tier(&file_tier(folder))
        .run()
        .expect(0);
    if scans != "never" {
        scanned(&outcome, 5);
    }
    let came = outcome.number("pages.swapped_in").expect("a number");
    (came - (times * cold + BYTES / 4096) as f64).max(0.0)
}

/// With the control: without scans, what is used leaves as what is not.
#[test]
fn a_hot_set_of_a_guest_stays_in_memory_where_its_uses_are_seen() {
    turn!(beside_others, "it is about guest memory");
    if !has_kvm() {
        return;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [without, with] = ["never", "50ms"].map(|scans| hot_faults(folder.path(), scans));
    say(&format!(
        "a guest under lru: {without} faults of the hot set without scans, {with} with"
    ));
    assert!(without > 2.0 * (HOT_MIB * 256) as f64, "{without}");
    assert!(with < without / 2.0, "{with} of {without}");
}

/// Scans tell what a guest does not use, and that leaves when a user asks: no more, and no less.
#[test]
fn memory_that_a_guest_does_not_use_is_known_and_leaves_when_a_user_asks() {
    turn!(beside_others, "it is about guest memory");
    if !has_kvm() {
        return;
    }
    let mut run = hot(1 << 40, 0)
        .options(["--access-scan", "200ms"])
        .limit(512 * MIB)
        .start();
    let near = COLD - MIB..COLD + 4 * MIB;
    let found = run.until("the memory that is not used", 30, |run| {
        let status = run.status()?;
        let all = status["ages"]["unused"].as_array()?;
        let second = all.iter().find(|of| of["seconds"] == 1)?;
        second["bytes"]
            .as_u64()
            .filter(|bytes| near.contains(bytes))
    });
    let pid = run.keeper().to_string();
    let demote = ["demote", &pid, "--older-than", "1s", "--json"];
    let told = Job::new(undercroft()).args(demote).run().expect(0);
    let told: Value = serde_json::from_str(&told.text()).expect("JSON");
    let [named, left] =
        ["/demotion/named_bytes", "/demotion/left_bytes"].map(|of| count(&told, of));
    say(&format!(
        "a guest: {found} bytes were not used for a second, where {COLD} are; {left} of {named} left"
    ));
    assert!(near.contains(&named), "{named} were named");
    assert!(left > named * 95 / 100, "{left} of {named} left");
    let status = run.status().expect("it runs");
    let stays = count(&status, "/guest/resident_bytes");
    assert!(
        (HOT_MIB * MIB..(HOT_MIB + 4) * MIB).contains(&stays),
        "{status}"
    );
    assert!(count(&status, "/faults/swap_in") < 64, "{status}");
    run.signal(Signal::TERM); // it ends its sweeps, and compares everything
    let [sweeps, wrong] = last_numbers(&run.wait().expect(0));
    assert!(sweeps > 10.0 && wrong == 0.0, "{sweeps} sweeps, {wrong}");
}

/// The numbers after the word `filled`.
fn last_numbers(outcome: &Outcome) -> [f64; 2] {
    let text = outcome.text();
    let mut words = text.split_whitespace().skip(1);
    [(); 2].map(|()| {
        words
            .next()
            .and_then(|word| word.parse().ok())
            .expect("a number")
    })
}

#[test]
fn what_a_guest_does_not_use_leaves_by_the_dt_reclaimer_as_a_file() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy("dt_reclaimer", folder.path()).filter(|_| has_access_bits());
    let Some(file) = file.filter(|_| has_kvm()) else {
        return;
    };
    let mut run = hot(1 << 40, 0)
        .options(["--policy", text(&file)])
        .limit(128 * MIB)
        .tier(&file_tier(folder.path()))
        .start();
    run.until("events", 30, |run| {
        (parameter(&run.status()?, "interval_ms")? == 60_000).then_some(())
    });
    set(&run, "policy.interval_ms=200");
    let stays = |status: &Value| count(status, "/guest/resident_bytes");
    let (scans, loads) = ("/policies/plugin/scans", "/faults/swap_in");
    let status = run.until("cold memory that leaves", 60, |run| {
        let status = run.status()?;
        (count(&status, scans) > 30 && stays(&status) < (HOT_MIB + 3) * MIB).then_some(status)
    });
    let cold = parameter(&status, "cold_pages").expect("a parameter") * 4096;
    let (began, before) = (count(&status, scans), count(&status, loads));
    let status = run.until("20 more scans of the guest and of its monitor", 60, |run| {
        let status = run.status()?;
        (count(&status, scans) >= began + 40).then_some(status)
    });
    let passed = (count(&status, scans) - began) / 2;
    let came_back = count(&status, loads) - before;
    say(&format!(
        "a guest: {cold} bytes were cold, where {COLD} are; {} stayed, of which {} are used; in \
         {passed} scans {came_back} pages came back",
        stays(&status),
        HOT_MIB * MIB
    ));
    // The target: 2 % of what is in use, a scan.
    assert!(came_back <= passed * HOT_MIB * 256 * 2 / 100, "{status}");
    assert!(stays(&status) >= HOT_MIB * MIB, "{status}");
    run.signal(Signal::TERM);
    let [sweeps, wrong] = last_numbers(&run.wait().expect(0));
    assert!(sweeps > 100.0 && wrong == 0.0);
}

/// A user hears that it cannot be known.
#[test]
fn without_the_right_to_advise_a_guest_is_not_scanned_and_that_is_said() {
    turn!(beside_others, "it is about guest memory");
    let Some(job) = undercroft_without("-sys_nice") else {
        return;
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let report = folder.path().join("report");
    let outcome = job
        .args(["vm", "--memory", "32M", "--memory-max", "12M"])
        .args(SCANS)
        .args([
            "--tier",
            &file_tier(folder.path()),
            "--report",
            text(&report),
            "--",
        ])
        .arg(build("guest"))
        .args(["2", "3", "1"])
        .run()
        .expect(0);
    let report = std::fs::read_to_string(&report).expect("a report");
    let report: Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(
        report["guest"]["access"], "not_permitted",
        "{outcome}: {report}"
    );
    assert!(
        report["pages"]["swapped_out"].as_u64() > Some(1000),
        "{report}"
    );
    let doctor = undercroft_without("-sys_nice").expect("as before");
    let doctor = doctor.args(["doctor", "--json"]).run();
    let told: Value = serde_json::from_str(&doctor.text()).expect("JSON");
    let checks = told["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["name"] == "guest access");
    let check = check.unwrap_or_else(|| panic!("doctor does not name it: {doctor}"));
    assert!(
        check["detail"]
            .as_str()
            .is_some_and(|why| why.contains("CAP_SYS_NICE")),
        "{check}"
    );
}
