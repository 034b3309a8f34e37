//! Placement by policy files: pages go where the file says, and move there, and every byte is kept.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Running, build, has_access_bits, say, turn};

use crate::flexswap::{count, parameter, policy, set, text};

/// Logical bytes in a tier.
fn held(run: &Running, tier: usize) -> Option<u64> {
    run.status()?["tiers"][tier]["logical_bytes"].as_u64()
}

/// A walk round 64 MiB whose words are checked, in 24 MiB, over two files that both have room. The
/// second is as slow as a disk.
fn walk(folder: &Path, file: &Path) -> Running {
    let at = |name: &str| folder.join(name).display().to_string();
    Job::new(build("touch"))
        .args(["64", "--rounds", "1000000", "--pace", "20"])
        .options(["--policy", text(file), "--placement", "waterfall"])
        .options(["--prefetch", "none", "--access-scan", "never"])
        .limit(24 * MIB)
        .tier(&format!("file:{},size=1G", at("fast")))
        .tier(&format!("file:{},size=1G,shape=sata-ssd", at("slow")))
        .timeout(150)
        .start()
}

/// Stops the program of a run, and returns it.
fn stop(run: &Running) -> Pid {
    let client = run.status().expect("it runs")["client_pid"].as_u64();
    let client = Pid::from_raw(client.expect("a process") as i32).expect("a process");
    kill_process(client, Signal::STOP).expect("it is stopped");
    client
}

/// Ends a walk. A word that was wrong would have ended it with 1.
fn end(run: Running) {
    run.signal(Signal::TERM);
    let outcome = run.wait().expect(128 + 15);
    println!("{outcome}");
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    let tiers = &outcome.report.as_ref().expect("a report")["tiers"];
    assert!((0..2).all(|at| tiers[at]["errors"] == 0), "{outcome}");
}

#[test]
fn slabs_move_by_the_temperature_as_a_file() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let Some(file) = policy("temperature", folder.path()) else {
        return;
    };
    let mut run = walk(folder.path(), &file);
    run.until("all pages in the first file", 60, |run| {
        let begun = parameter(&run.status()?, "step_ms")? == 5000;
        (begun && held(run, 0)? > 56 * MIB).then_some(())
    });
    // Nothing of the engine moves them down: both files have room.
    let client = stop(&run);
    set(&run, "policy.step_ms=500");
    let status = run.until("cold slabs in the second file", 60, |run| {
        // What is in memory again, and has a copy in the first, stays there.
        let status = run.status()?;
        let cold = parameter(&status, "hot")? == 0 && held(run, 1)? > 36 * MIB;
        cold.then_some(status)
    });
    assert!(
        count(&status, "/policies/plugin/moves_done") > 5000,
        "{status}"
    );
    set(&run, "policy.step_ms=5000");
    kill_process(client, Signal::CONT).expect("it goes on");
    run.until("slabs that were lifted", 60, |run| {
        let status = run.status()?;
        (count(&status, "/counters/lifted") > 1000).then_some(())
    });
    end(run);
}

/// A buffer that is too small, above a file. While the program stands still, whole groups go down
/// until an eighth of the buffer is free: no eviction is there to move them. When it goes on, the
/// groups that it needs come up.
#[test]
fn groups_leave_a_full_buffer_and_come_back_by_a_file() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let Some(file) = policy("latency_group", folder.path()) else {
        return;
    };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let mut run = Job::new(build("touch"))
        .args(["48", "--rounds", "1000000", "--random-data", "--pace", "30"])
        .limit(12 * MIB)
        .options(["--placement", "waterfall", "--prefetch", "none"])
        .tier(&format!("nvm:{},size=16M", at("buffer")))
        .tier(&format!("file:{},size=1G", at("zone")))
        .timeout(150)
        .start();
    // No thread moves copies in the background until there is a file that may.
    run.until("pages in the buffer", 60, |run| {
        (held(run, 0)? > MIB).then_some(())
    });
    set(&run, &format!("policy={}", text(&file)));
    let begun = |run: &Running| {
        let status = run.status()?;
        let heard = parameter(&status, "groups")? > 100;
        (heard && held(run, 1)? > 8 * MIB).then_some(())
    };
    run.until("groups, and pages in the file", 60, |run| begun(run));
    let client = stop(&run);
    run.until("an eighth of the buffer is free", 60, |run| {
        (held(run, 0)? <= 14 * MIB).then_some(())
    });
    kill_process(client, Signal::CONT).expect("it goes on");
    let status = run.until("groups that came up, and went down", 60, |run| {
        let status = run.status()?;
        let [up, all] = ["lifted", "demoted"].map(|of| count(&status, &format!("/counters/{of}")));
        (up > 500 && all > up + 500).then_some(status)
    });
    assert!(
        count(&status, "/policies/plugin/moves_done") > 500,
        "{status}"
    );
    assert_eq!(parameter(&status, "pages_left_out"), Some(0), "{status}");
    end(run);
}

/// A slow program goes round its memory in one order. Pages whose order was seen twice go to the
/// slow file together and come back together. No other page comes along.
#[test]
fn sequences_go_to_the_disk_and_come_back_together_by_a_file() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let Some(file) = policy("locality", folder.path()).filter(|_| has_access_bits()) else {
        return;
    };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let outcome = Job::new(build("touch"))
        .args(["10", "--rounds", "7", "--pace", "250", "--random-data"])
        .limit(5 * MIB)
        .options(["--policy", text(&file), "--placement", "waterfall"])
        .options(["--prefetch", "none", "--access-scan", "10ms"])
        .tier(&format!("file:{},size=1G", at("ssd")))
        .tier(&format!("file:{},size=1G,shape=hdd-7200", at("disk")))
        .run()
        .expect(0);
    println!("{outcome}");
    let report = outcome.report.as_ref().expect("a report");
    for what in ["reads", "writes"] {
        assert!(report["tiers"][1][what].as_u64() > Some(200), "{outcome}");
    }
    let along = count(report, "/pages/swapped_in") - count(report, "/faults/swap_in");
    assert!(along > 200, "{along} pages came along: {outcome}");
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    assert!(
        (0..2).all(|at| report["tiers"][at]["errors"] == 0),
        "{outcome}"
    );
}

/// Seconds since the run began, and in which a thread of it waited for a page.
fn waited(run: &Running) -> Option<[f64; 2]> {
    let status = run.status()?;
    let seconds = |path| status.pointer(path).and_then(serde_json::Value::as_f64);
    Some([seconds("/uptime_seconds")?, seconds("/stall_seconds")?])
}

/// Waits until `seconds` of the run have passed. Returns in which part of them it waited.
fn part_waited(run: &mut Running, seconds: f64) -> f64 {
    let [began, before] = waited(run).expect("it runs");
    let over = |[now, after]: &[f64; 2]| (*now >= began + seconds).then_some([*now, *after]);
    let [now, after] = run.until("time to pass", 90, |run| over(&waited(run)?));
    (after - before) / (now - began)
}

/// HybridSwap's bound, live: sequences still go to the disk, and the program waits no more than it
/// shall. Without a bound it waits twice as long.
#[test]
fn a_stall_bound_of_a_file_is_kept_while_the_disk_is_in_use() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let fast = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let Some(file) = policy("locality", folder.path()).filter(|_| has_access_bits()) else {
        return;
    };
    let mut run = Job::new(build("touch"))
        .args(["10", "--rounds", "1000000", "--pace", "200"])
        .arg("--random-data")
        .limit(4 * MIB)
        .options(["--policy", text(&file), "--placement", "waterfall"])
        .options(["--prefetch", "none", "--access-scan", "10ms"])
        .tier(&format!("nvm:{},size=64M", fast.path().display()))
        .tier(&format!(
            "file:{}/disk,size=1G,shape=hdd-7200",
            folder.path().display()
        ))
        .timeout(150)
        .start();
    let told = |run: &Running, name: &str| parameter(&run.status()?, name);
    run.until("sequences", 60, |run| {
        told(run, "sequences").filter(|all| *all > 50)
    });
    let free = part_waited(&mut run, 8.0);
    set(&run, "policy.stall_max_percent=5");
    // The law looks each second, and shrinks what is on the disk after three.
    part_waited(&mut run, 4.0);
    let before = told(&run, "sequences").expect("it runs");
    let bounded = part_waited(&mut run, 16.0);
    let more = told(&run, "sequences").expect("it runs") - before;
    say(&format!(
        "waits {free:.3} of its time, with a bound of 0.05 {bounded:.3}; {more} more sequences"
    ));
    assert!(free > 0.085 && bounded < 0.07 && more > 20);
    end(run);
}

/// Odd pages shall go to the second file.
const ODD: &str = r#"(module
    (import "undercroft" "place" (func $place (param i32 i64 i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "abi_version") (result i32) (i32.const 1))
    (func (export "on_event") (param $kind i32) (param $space i32) (param $page i64) (param i64 i64)
        (if (i32.le_u (local.get $kind) (i32.const 2)) (then
            (drop (call $place (local.get $space) (local.get $page)
                (i32.wrap_i64 (i64.and (local.get $page) (i64.const 1)))))))))"#;

#[test]
fn pages_leave_for_the_tier_that_a_policy_file_names() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let file = folder.path().join("odd.wasm");
    std::fs::write(&file, wat::parse_str(ODD).expect("right text")).expect("a scratch file");
    let mut run = walk(folder.path(), &file);
    let status = run.until("pages in both files", 60, |run| {
        // What left before the file was heard is in the first one.
        let both = held(run, 1)? > 12 * MIB && held(run, 0)? > 12 * MIB;
        both.then(|| run.status())?
    });
    let placed = count(&status, "/policies/plugin/places_wished");
    assert!(placed > 6000, "{status}");
    end(run);
}

/// A page shall leave when the walk is 128 pages behind it, to the second file.
const SECOND: &str = r#"(module
    (import "undercroft" "place" (func $place (param i32 i64 i32) (result i32)))
    (import "undercroft" "reclaim_now" (func $leave (param i32 i64) (result i32)))
    (memory (export "memory") 1)
    (func (export "abi_version") (result i32) (i32.const 1))
    (func (export "on_event") (param $kind i32) (param $space i32) (param $page i64) (param i64 i64)
        (local.set $page (i64.sub (local.get $page) (i64.const 128)))
        (if (i32.le_u (local.get $kind) (i32.const 2)) (then
            (drop (call $place (local.get $space) (local.get $page) (i32.const 1)))
            (drop (call $leave (local.get $space) (local.get $page)))))))"#;

#[test]
fn pages_that_leave_although_there_is_room_go_where_the_file_says() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let file = folder.path().join("second.wasm");
    std::fs::write(&file, wat::parse_str(SECOND).expect("right text")).expect("a scratch file");
    let mut run = walk(folder.path(), &file);
    let written = |run: &Running, tier: usize| run.status()?["tiers"][tier]["writes"].as_u64();
    let heard = |run: &Running| written(run, 1).filter(|pages| *pages > 1000);
    run.until("pages in the second file", 60, heard);
    set(&run, "memory-max=256M");
    let begun = [0, 1].map(|tier| written(&run, tier).expect("it runs"));
    let later = run.until("pages that leave although there is room", 60, |run| {
        let now = [written(run, 0)?, written(run, 1)?];
        (now[0] + now[1] > begun[0] + begun[1] + 20_000).then_some(now)
    });
    let [first, second] = [0, 1].map(|tier| later[tier] - begun[tier]);
    assert!(first < second / 10, "{first} {second}");
    end(run);
}
