//! Clients of one daemon share its emulated devices, and one control keeps their latency bounds.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde_json::Value;
use undercroft_tests::{Job, MIB, Outcome, Running, build, say, turn};

use super::daemon::Daemon;

/// Two threads that use 16 MiB at random, half of it in memory, for some seconds.
fn random(evidence: &str) -> Job {
    Job::new(build("holdcheck"))
        .args(["16", evidence, "6"])
        .limit(8 * MIB)
        .options(["--prefetch", "none"])
}

/// Pages that came back to two programs that ran at the same time.
fn page_ins_of_two(job: impl Fn(usize) -> Job) -> f64 {
    let both: Vec<Running> = (0..2).map(|at| job(at).start()).collect();
    let ended: Vec<Outcome> = both.into_iter().map(|run| run.wait().expect(0)).collect();
    let page_ins = ended.iter().map(|it| it.number("faults.swap_in"));
    page_ins.map(|count| count.expect("a report")).sum()
}

/// A disk serves some 70 pages a second. Two programs with a disk each have twice as many page-ins
/// as two that share one.
#[test]
fn programs_of_a_daemon_slow_each_other_on_one_emulated_device() {
    let name = "programs_of_a_daemon_slow_each_other_on_one_emulated_device";
    turn!(one_at_a_time, "a plain run has no daemon");
    let daemon = Daemon::start_with(&[], |folder| {
        format!(
            "memory = \"64M\"\n[[tier]]\nspec = \"file:{folder},size=256M,shape=hdd-7200\"\n\
             grant = \"64M\"\n"
        )
    });
    let folder = daemon.folder.path();
    let evidence = folder.join("evidence").display().to_string();
    let shared = page_ins_of_two(|_| {
        let job = random(&evidence).options(["--daemon"]);
        job.env("UNDERCROFT_DIR", folder)
    });
    let own = page_ins_of_two(|at| {
        let file = folder.join(format!("own-{at}")).display().to_string();
        random(&evidence).tier(&format!("file:{file},size=64M,shape=hdd-7200"))
    });
    say(&format!(
        "{name}: {shared} page-ins on one disk, {own} on two"
    ));
    assert!(!folder.join("evidence").exists(), "a wrong byte");
    assert!(shared > 50.0, "the disk that is shared serves: {shared}");
    assert!(shared < 0.75 * own, "{shared} on one disk, {own} on two");
}

/// The daemon's figures of the bound of a run: the windows kept, and where its pages go.
fn kept_and_goes(daemon: &Daemon, run: &Running) -> Option<(u64, String)> {
    let status = daemon.status()?;
    let clients = status["clients"].as_array()?;
    let mine = clients.iter().find(|it| it["pid"] == run.keeper())?;
    let latency = &mine["latency"];
    let goes = latency["turn"]["goes"].as_str()?.to_owned();
    Some((latency["windows_kept"].as_u64()?, goes))
}

/// The run's own figures: where its pages go, and how many windows have ended.
fn bound_of(daemon: &Daemon, run: &Running) -> Option<(String, u64)> {
    let status = daemon.ask(&["status", &run.pid().to_string(), "--json"]);
    let status: Value = serde_json::from_str(&status.text()).ok()?;
    let bound = &status["clients"][0]["latency_bound"];
    let goes = bound["control"]["pages_go_to"].as_str()?.to_owned();
    let windows = ["windows_kept", "windows_missed"].map(|name| bound[name].as_u64());
    Some((goes, windows[0]? + windows[1]?))
}

/// The files behind the emulated devices of a run, which have no names.
fn devices_of(daemon: &Daemon, run: &Running) -> Option<BTreeSet<u64>> {
    let status = daemon.ask(&["status", &run.pid().to_string(), "--json"]);
    let status: Value = serde_json::from_str(&status.text()).ok()?;
    let manager = status["clients"][0]["manager_pid"].as_i64()?;
    let open = std::fs::read_dir(format!("/proc/{manager}/fd")).ok()?;
    let open = open.filter_map(|it| Some(it.ok()?.path()));
    let is_device = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("uc-device"))
    };
    let numbers = open
        .filter(is_device)
        .filter_map(|path| Some(std::fs::metadata(path).ok()?.ino()));
    Some(numbers.collect())
}

/// Goes round memory, a page each millisecond or later, until it is ended.
fn looping(daemon: &Daemon, class: &str) -> Running {
    Job::new(build("touch"))
        .args(["12", "--rounds", "1000", "--pace", "1000"])
        .limit(8 * MIB)
        .options(["--prefetch", "none", &*format!("--daemon={class}")])
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .start()
}

/// Three programs use a disk and memory above it. The one whose bound no disk can keep is moved to
/// that memory, and the others stay, until the bound of one of them changes. Then the daemon dies.
#[test]
fn one_control_keeps_the_bounds_of_all_programs_of_a_daemon() {
    turn!(beside_others, "a plain run has no daemon");
    let mut daemon = Daemon::start_with(&[], |folder| {
        format!(
            "memory = \"64M\"\n\
             [[tier]]\nspec = \"nvm:{folder},size=256M,shape=optane-dimm\"\ngrant = \"64M\"\n\
             [[tier]]\nspec = \"file:{folder},size=256M,shape=hdd-7200\"\ngrant = \"64M\"\n\
             [class.strict]\nlatency = \"p90=5ms\"\n[class.loose]\nlatency = \"p90=20s\"\n"
        )
    });
    let mut strict = looping(&daemon, "strict");
    let mut loose = looping(&daemon, "loose");
    let mut other = looping(&daemon, "default");
    let goes = |run: &Running, where_to: &str| {
        let (kept, goes) = kept_and_goes(&daemon, run)?;
        (goes == where_to && kept > 0).then_some(())
    };
    strict.until("buffer", 60, |run| goes(run, "ToBuffer"));
    loose.until("device", 60, |run| goes(run, "ToDevice"));
    let pages_go_to = |run: &Running, where_to: &str| {
        let (goes, windows) = bound_of(&daemon, run)?;
        (goes == where_to).then_some(windows)
    };
    loose.until("word of the daemon", 60, |run| pages_go_to(run, "device"));
    strict.until("word of the daemon", 60, |run| pages_go_to(run, "buffer"));
    let pid = loose.pid().to_string();
    daemon.ask(&["set", &pid, "latency=p90=5ms"]).expect(0);
    loose.until("other bound", 60, |run| goes(run, "ToBuffer"));
    let before = loose.until("word of the daemon", 60, |run| pages_go_to(run, "buffer"));
    let devices = devices_of(&daemon, &loose).expect("a manager");
    assert_eq!(devices.len(), 2, "one for each tier");
    assert_eq!(devices_of(&daemon, &other).as_ref(), Some(&devices));
    daemon.die();
    loose.until("windows without a daemon", 60, |run| {
        let (_, windows) = bound_of(&daemon, run)?;
        (windows > before + 4).then_some(())
    });
    // A run of the next daemon uses the same devices.
    daemon.come_back();
    let mut late = looping(&daemon, "default");
    let theirs = late.until("manager", 60, |run| devices_of(&daemon, run));
    assert_eq!(theirs, devices);
    for run in [&mut strict, &mut loose, &mut other, &mut late] {
        assert!(run.is_alive(), "{}", run.errors());
        run.signal(rustix::process::Signal::TERM);
    }
    for run in [strict, loose, other, late] {
        assert_ne!(run.wait().code(), Some(86), "a wrong byte");
    }
}
