//! Tiers by their kind, under real programs that check every word they read.

use undercroft_tests::{Job, MIB, Outcome, Running, build, rounds, turn, undercroft};

use crate::takeover::{allowed, kills, start_ready, told, under_kills, wait_for_end};

/// Goes round 96 MiB of words that are checked, in 24 MiB of memory.
fn loop_over(tiers: &[&str], options: &[&str]) -> Outcome {
    touches(&["96", "--rounds", "5"], tiers, options)
}

fn touches(program: &[&str], tiers: &[&str], options: &[&str]) -> Outcome {
    let mut job = Job::new(build("touch"))
        .args(program)
        .limit(24 * MIB)
        .options(options);
    for tier in tiers {
        job = job.tier(tier);
    }
    let outcome = job.run().expect(0).expect_swapping(10_000.0);
    println!("{tiers:?}: {outcome}");
    outcome
}

fn tier(outcome: &Outcome, at: usize) -> &serde_json::Value {
    &outcome.report.as_ref().expect("a report")["tiers"][at]
}

/// The report has the cost at the peaks of a tier at $0.5 and of DRAM at $4, against 96 MiB in
/// DRAM.
fn is_paid_for(outcome: &Outcome, tier: &serde_json::Value) {
    let of = |name: &str| outcome.number(name).expect(name);
    let gib = f64::from(1 << 30);
    let held = tier["held_bytes_peak"].as_f64().expect("a size");
    let parts = (of("dram_bytes_peak") * 4.0 + held * 0.5) / gib;
    assert!((of("cost.total_dollars") - parts).abs() < 1e-9, "{outcome}");
    let all = of("cost.all_in_dram_bytes") / f64::from(1 << 20);
    assert!((96.0..112.0).contains(&all), "{all}: {outcome}");
    assert!(of("cost.part_of_all_in_dram") < 0.6, "{outcome}");
    // Most copies are changed in place, and the program changes every word.
    let stored = tier["writes"].as_f64().expect("a count") * 4096.0;
    let written = tier["written_bytes"].as_f64().expect("a size");
    assert!(written > 0.5 * stored && written <= stored, "{outcome}");
    assert!(tier["updates"].as_f64() > Some(1000.0), "{outcome}");
    let part = tier["wear"]["tbw_part"].as_f64().expect("a part");
    assert!((part - written / 600e12).abs() < 1e-12, "{outcome}");
    assert!(tier["wear"]["tbw_years"].as_f64() > Some(0.0), "{outcome}");
}

/// On a disk and in tmpfs, which stand for such memory: the report says that they do.
#[test]
fn nvm_alone_keeps_every_byte_and_is_reported_as_emulated() {
    turn!(beside_others, "a plain run has no tiers");
    for place in ["/var/tmp", "/dev/shm"] {
        let folder = tempfile::tempdir_in(place).expect("a scratch folder");
        let path = folder.path().join("nvm");
        let rated = format!("nvm:{},size=160M,price=0.5,tbw=600T", path.display());
        let outcome = loop_over(&[&rated], &["--memory-price", "4"]);
        let tier = tier(&outcome, 0);
        is_paid_for(&outcome, tier);
        assert_eq!(tier["kind"], "nvm", "{outcome}");
        assert_eq!(tier["emulated"], true, "{outcome}");
        assert_eq!(tier["mapping"], "shared", "{outcome}");
        assert_eq!(tier["errors"], 0, "{outcome}");
        assert!(tier["reads"].as_u64() > Some(10_000), "{outcome}");
        assert_eq!(tier["stored_bytes_peak"], tier["logical_bytes_peak"]);
        let left = std::fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(left, 0, "something is left behind");
    }
}

/// The same program over a file that packs its pages and one that does not: every word is right,
/// and the first is written much less, and counts what its blocks take.
#[test]
fn packed_files_keep_every_byte_in_fewer_blocks() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let path = folder.path().join("spill").display().to_string();
    let bytes = |compress: &str, data: &[&str]| {
        let program = [&["96", "--rounds", "3"], data].concat();
        let file = format!("file:{path},size=1G,compress={compress}");
        let outcome = touches(&program, &[&file], &[]);
        let tier = tier(&outcome, 0);
        assert_eq!(tier["errors"], 0, "{outcome}");
        assert!(tier["reads"].as_u64() > Some(10_000), "{outcome}");
        let of = |name: &str| tier[name].as_u64().expect("a size");
        (
            of("logical_bytes_peak"),
            of("stored_bytes_peak"),
            of("written_bytes"),
        )
    };
    let plain = bytes("no", &[]);
    assert_eq!(plain.0, plain.1, "{plain:?}");
    let packed = bytes("yes", &[]);
    assert!(packed.1 * 3 < packed.0, "{packed:?}");
    assert!(packed.2 * 3 < plain.2, "{packed:?} beside {plain:?}");
    // Pages that do not compress are in blocks of their own; the program has a few others.
    let noise = bytes("yes", &["--random-data"]);
    assert!(noise.1 * 100 >= noise.0 * 99, "{noise:?}");
}

/// Several pages in one block of a file, of which each successor finds those that are in use.
#[test]
fn packed_copies_are_right_whenever_the_manager_is_killed() {
    turn!(beside_others, "a plain run has no manager");
    let most = kills(20);
    let scratch = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let spill = scratch.path().join("spill");
    let job = Job::new(build("holdcheck"))
        .arg("48")
        .arg(&evidence)
        .arg((3 + most / 7).to_string())
        .limit(16 * MIB)
        .options(allowed(most))
        .tier(&format!("file:{},size=2G,compress=yes", spill.display()))
        .timeout(60 + most);
    let run = start_ready(&job);
    let pid = run.keeper();
    let killed = under_kills(&run, 3, most, |_| wait_for_end(pid, most));
    let outcome = run.wait();
    let seen = std::fs::read_to_string(&evidence).unwrap_or_default();
    assert!(seen.is_empty(), "{seen}\n{outcome}");
    let outcome = outcome.expect(0);
    if let Some(report) = &outcome.report {
        let of = |name: &str| report["tiers"][0][name].as_u64().expect("a size");
        let (logical, stored) = (of("logical_bytes_peak"), of("stored_bytes_peak"));
        assert!(stored * 10 < logical * 9, "{outcome}"); // half of its pages do not compress
    }
    told("holdcheck on a packed file", killed, &outcome);
}

/// Memory, nvm and a file are each too small for all of it, so pages move through all three.
#[test]
fn three_tiers_are_all_used_and_lose_no_byte() {
    turn!(beside_others, "a plain run has no tiers");
    for placement in ["waterfall", "worth"] {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let tiers = [
            "ram,max=3M",
            &format!("nvm:{},size=24M", at("nvm")),
            &format!("file:{},size=1G", at("spill")),
        ];
        // A loop finds nothing in a small pool; pages that have just left are still there.
        let program = ["96", "--rounds", "2", "--back", "25"];
        let outcome = touches(&program, &tiers, &["--placement", placement]);
        for (index, kind) in ["ram", "nvm", "file"].iter().enumerate() {
            let tier = tier(&outcome, index);
            assert_eq!(tier["kind"], *kind, "{outcome}");
            assert!(tier["reads"].as_u64() > Some(100), "{kind}: {outcome}");
            assert!(tier["writes"].as_u64() > Some(100), "{kind}: {outcome}");
            let held = tier["held_bytes_peak"].as_u64();
            assert!(held <= tier["capacity_bytes"].as_u64(), "{outcome}");
        }
        let demoted = outcome.number("counters.demoted").expect("a number");
        assert!(demoted > 1000.0, "{placement}: {outcome}");
        // A full tier is relieved, so nothing stays in memory for want of room.
        assert_eq!(outcome.number("counters.refused_store"), Some(0.0));
    }
}

/// Two files under a pool. The first is too small, so its oldest pages go to the second in the
/// background: nothing else moves pages out of a file.
#[test]
fn the_oldest_pages_of_a_small_file_go_down_in_the_background() {
    turn!(beside_others, "a plain run has no tiers");
    for (placement, pool) in [("waterfall", true), ("worth", true), ("worth", false)] {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let files = [
            format!("file:{},size=24M", at("small")),
            format!("file:{},size=1G", at("large")),
        ];
        let mut tiers: Vec<&str> = files.iter().map(String::as_str).collect();
        if pool {
            tiers.insert(0, "ram,max=3M");
        }
        let outcome = loop_over(&tiers, &["--placement", placement]);
        let small = tier(&outcome, tiers.len() - 2);
        let large = tier(&outcome, tiers.len() - 1);
        for (tier, of) in [(small, "small"), (large, "large")] {
            assert!(tier["reads"].as_u64() > Some(100), "{of}: {outcome}");
            assert!(tier["writes"].as_u64() > Some(100), "{of}: {outcome}");
            assert_eq!(tier["errors"], 0, "{of}: {outcome}");
        }
        let demoted = outcome.number("counters.demoted").expect("a number");
        assert!(demoted > 500.0, "{placement}: {outcome}");
        assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    }
}

/// Measurements of a disk by `--measure` are kept, and a run on another file of that disk knows
/// them.
#[test]
fn what_was_measured_is_known_to_later_runs() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let state = folder.path().join("state");
    let ask = |words: &[&str]| {
        let job = Job::new(undercroft()).arg("tiers").args(words);
        job.env("XDG_STATE_HOME", &state).run()
    };
    let file = |name: &str| format!("file:{},size=64M", folder.path().join(name).display());
    assert!(
        ask(&[])
            .expect(0)
            .text()
            .contains("Nothing is measured yet")
    );
    let measured = ask(&["--measure", &file("one")]).expect(0).text();
    assert!(measured.contains("Kept in "), "{measured}");
    let listed = ask(&["--json"]).expect(0).text();
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let kept = &listed["profiles"][0];
    assert!(kept["channels"].as_u64() >= Some(1), "{listed}");
    assert!(ask(&[]).expect(0).text().contains("Measured before"));

    let mut run = Job::new(build("touch"))
        .args(["16", "--rounds", "400", "--pace", "10"])
        .limit(8 * MIB)
        .tier("ram")
        .tier(&file("two"))
        .env("XDG_STATE_HOME", &state)
        .start();
    let known = run.until("its status", 60, |run| Some(run.status()?["tiers"].clone()));
    assert_eq!(&known[1]["profile"], kept, "{known}");
    assert!(known[0]["profile"].is_null(), "{known}");
    let shown = ask(&["show", &run.pid().to_string()]).expect(0).text();
    assert!(shown.contains("tier 2: measured as file:"), "{shown}");

    // Damage loses no run: it is told.
    let path = state.join("undercroft/profiles.json");
    std::fs::write(&path, "{").expect("a file");
    let refused = ask(&[]).expect(1);
    assert!(
        refused.errors.contains("remove it and measure again"),
        "{refused}"
    );
    let other = Job::new(undercroft())
        .args(["run", "-m", "64M", "--tier", &file("three"), "--", "true"])
        .env("XDG_STATE_HOME", &state);
    let outcome = other.run().expect(0);
    assert!(outcome.errors.contains("is not used"), "{outcome}");
    run.signal(rustix::process::Signal::TERM);
    run.wait();
}

/// A tier is emptied while its program goes round its memory and checks every word. It stays empty.
#[test]
fn a_tier_is_drained_under_a_program_that_uses_it() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let drain = |pid: i32, tier: &str| change_tiers(pid, "drain", tier);
    let mut run = Job::new(build("touch"))
        .args(["96", "--rounds", rounds("12", "24"), "--fork", "2"])
        .limit(24 * MIB)
        .tier("ram,max=4M")
        .tier(&format!("file:{},size=1G", at("old")))
        .tier(&format!("file:{},size=1G", at("new")))
        .timeout(200)
        .start();
    let pid = run.keeper();
    run.until("pages in the file", 60, |run| {
        let held = run.status()?["tiers"][1]["logical_bytes"].as_u64()?;
        (held > 16 * MIB).then_some(())
    });
    let drained = drain(pid, "2").expect(0);
    assert!(drained.text().contains("drained"), "{drained}");
    let status = run.status().expect("it runs");
    assert_eq!(status["tiers"][1]["drain"]["pages_left"], 0, "{status}");
    // Its pages have to go to the only other file, so that one cannot be drained now.
    let refused = drain(pid, "3");
    assert_eq!(refused.code(), Some(1), "{refused}");
    assert!(refused.errors.contains("have room for"), "{refused}");
    let outcome = run.wait().expect(0);
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    let old = tier(&outcome, 1);
    assert_eq!(old["drain"]["pages_left"], 0, "{outcome}");
    assert_eq!(old["errors"], 0, "{outcome}");
}

/// `undercroft tiers VERB PID TIER`.
fn change_tiers(pid: i32, verb: &str, tier: &str) -> Outcome {
    let job = Job::new(undercroft()).args(["tiers", verb, &pid.to_string(), tier]);
    job.run()
}

/// Ends a program that goes on for ever. It found no wrong word, and no page was lost.
fn end(run: Running) -> Outcome {
    run.signal(rustix::process::Signal::TERM);
    let outcome = run.wait();
    assert_eq!(
        outcome.code(),
        Some(128 + 15),
        "86 is a wrong word: {outcome}"
    );
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    outcome
}

/// The file of a tier, open in the keeper, which has no name any more.
fn open_file(keeper: i32, path: &str) -> Option<std::path::PathBuf> {
    let all = std::fs::read_dir(format!("/proc/{keeper}/fd")).ok()?;
    let of_tier = |link: &std::path::PathBuf| {
        std::fs::read_link(link).is_ok_and(|to| to.display().to_string().starts_with(path))
    };
    all.filter_map(|entry| Some(entry.ok()?.path()))
        .find(of_tier)
}

/// Tiers come and go under a program that checks every word. A faster tier that comes late is used
/// before the slow ones; a removed one has no byte left, and its number is given again.
#[test]
fn tiers_are_added_and_removed_under_a_program_that_uses_them() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let mut run = Job::new(build("touch"))
        .args(["96", "--rounds", "100000"])
        .limit(24 * MIB)
        .tier("ram,max=4M")
        .tier(&format!("file:{},size=1G", at("old")))
        .start();
    let pid = run.keeper();
    let tiers = |verb: &str, tier: &str| change_tiers(pid, verb, tier);
    let holds = |run: &mut Running, at: usize| {
        run.until("pages in a tier", 60, |run| {
            let held = run.status()?["tiers"][at]["logical_bytes"].as_u64()?;
            (held > 8 * MIB).then_some(())
        });
    };
    holds(&mut run, 1);
    let refused = |outcome: &Outcome, why: &str| {
        assert_eq!(outcome.code(), Some(1), "{outcome}");
        assert!(outcome.errors.contains(why), "{outcome}");
    };
    refused(&tiers("remove", "2"), "have room for");
    let cluster = tiers("add", "redis:127.0.0.1:7000,size=1G");
    refused(&cluster, "may not use the network");
    refused(&tiers("add", "ram"), "has compressed memory already");
    std::fs::write(at("there"), "a user's file").expect("a file");
    refused(
        &tiers("add", &format!("file:{},size=1G", at("there"))),
        "exists already",
    );
    let added = tiers("add", &format!("nvm:{},size=256M", at("fast"))).expect(0);
    assert!(added.text().contains("number 2 by speed"), "{added}");
    holds(&mut run, 2);
    let removed = tiers("remove", "2").expect(0);
    assert!(removed.text().contains("given back"), "{removed}");
    let file = open_file(pid, &at("old")).expect("the keeper has it open");
    assert_eq!(std::fs::metadata(file).expect("its size").len(), 0);
    refused(&tiers("remove", "2"), "was removed");
    refused(&tiers("drain", "3"), "have room for");
    let last = tiers("add", &format!("file:{},size=1G", at("new"))).expect(0);
    assert!(last.text().contains("tier 2"), "the number is free: {last}");
    assert!(last.text().contains("number 3 by speed"), "{last}");
    tiers("drain", "3").expect(0);
    holds(&mut run, 1);
    let again = tiers("add", "3").expect(0);
    assert!(again.text().contains("in use, number 2"), "{again}");
    holds(&mut run, 2);
    let outcome = end(run);
    let old = tier(&outcome, 3);
    assert_eq!(old["drain"]["removed"], true, "{outcome}");
    for at in 0..4 {
        assert_eq!(tier(&outcome, at)["errors"], 0, "{outcome}");
    }
}

/// Compressed memory joins a run that has a file alone, holds pages within the limit, also after
/// that was lowered, and leaves it again. The program checks every word.
#[test]
fn compressed_memory_joins_a_run_and_leaves_it() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let path = folder.path().join("spill").display().to_string();
    let mut run = Job::new(build("touch"))
        .args(["96", "--rounds", "100000", "--back", "25"])
        .limit(24 * MIB)
        .options(["--placement", "waterfall"])
        .tier(&format!("file:{path},size=1G"))
        .start();
    let pid = run.keeper();
    let number = |run: &Running, at: usize, field: &str| {
        let status = run.status()?;
        status["tiers"].get(at)?[field].as_u64()
    };
    run.until("pages in the file", 60, |run| {
        (number(run, 0, "logical_bytes")? > 8 * MIB).then_some(())
    });
    let added = change_tiers(pid, "add", "ram,zstd").expect(0);
    assert!(added.text().contains("number 1 by speed"), "{added}");
    let read = |run: &Running| number(run, 1, "reads");
    run.until("pages that come back from it", 60, |run| {
        (read(run)? > 500 && number(run, 1, "logical_bytes")? > 8 * MIB).then_some(())
    });
    let set = Job::new(undercroft()).args(["set", &pid.to_string(), "memory-max=16M"]);
    set.run().expect(0);
    run.until("less memory", 60, |run| {
        let dram = run.status()?["dram_bytes"].as_u64()?;
        (dram <= 16 * MIB && number(run, 1, "held_bytes")? <= 8 * MIB).then_some(())
    });
    let removed = change_tiers(pid, "remove", "2").expect(0);
    assert!(removed.text().contains("given back"), "{removed}");
    assert_eq!(number(&run, 1, "held_bytes"), Some(0), "its own books, too");
    let before = number(&run, 0, "reads").expect("it runs");
    run.until("pages that come back from the file", 60, |run| {
        (number(run, 0, "reads")? > before + 500).then_some(())
    });
    let outcome = end(run);
    let pool = tier(&outcome, 1);
    assert_eq!(pool["kind"], "ram", "{outcome}");
    assert_eq!(pool["drain"]["removed"], true, "{outcome}");
    for at in 0..2 {
        assert_eq!(tier(&outcome, at)["errors"], 0, "{outcome}");
    }
    let most = outcome.number("dram_bytes_peak").expect("a size");
    assert!(most <= 1.02 * (24 * MIB) as f64, "{most}: {outcome}");
}

/// Waits until `run` writes nothing to its first tier any more, which would mend the damage. Then
/// damages a page in each MiB of it, and says how many. A page in memory needs no copy: one that is
/// damaged is dropped, and the page is stored anew.
fn damage_once_at_rest(run: &mut Running, path: &str) -> u64 {
    let (mut before, mut same) = ((0, 0), 0);
    run.until("the program and the tier to rest", 60, |run| {
        let status = run.status()?;
        let tier = &status["tiers"][0];
        let held = tier["logical_bytes"].as_u64()?;
        let faults = status["faults"]["total"].as_u64()?;
        let now = (faults, tier["written_bytes"].as_u64()?);
        same = if std::mem::replace(&mut before, now) == now {
            same + 1
        } else {
            0
        };
        (held > 38 * MIB && same >= 5).then_some(())
    });
    let file = open_file(run.keeper(), path).expect("the keeper has it open");
    let file = std::fs::File::options()
        .write(true)
        .open(file)
        .expect("root may");
    let slabs = 1..61;
    for slab in slabs.clone() {
        let offset = slab * MIB + 8 * 4096;
        std::os::unix::fs::FileExt::write_at(&file, &[0xee; 512], offset).expect("damage");
    }
    file.sync_all().expect("it is on the disk");
    slabs.end - slabs.start
}

/// Pages that cannot be read keep a tier from being empty. The drain ends and names them, and the
/// tier is not removed; the program lives, and reads them never.
#[test]
fn a_drain_ends_with_the_pages_that_cannot_be_read() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let mut run = Job::new(build("touch"))
        .args(["64", "--hold", "60"])
        .limit(24 * MIB)
        .tier(&format!("file:{},size=1G", at("old")))
        .tier(&format!("file:{},size=1G", at("new")))
        .start();
    let pid = run.keeper();
    let damaged = damage_once_at_rest(&mut run, &at("old"));
    let ended = change_tiers(pid, "drain", "1");
    assert_eq!(ended.code(), Some(1), "{ended}");
    let status = run.status().expect("the manager lives");
    let lost = status["tiers"][0]["drain"]["pages_unreadable"]
        .as_u64()
        .expect("a count");
    assert!(
        10 <= lost && lost <= damaged,
        "{lost} of {damaged}: {status}"
    );
    let held = |at: usize| {
        status["tiers"][at]["logical_bytes"]
            .as_u64()
            .expect("bytes")
    };
    assert_eq!(held(0), lost * 4096, "nothing else is left: {status}");
    let resident = status["resident_bytes"].as_u64().expect("bytes");
    assert!(
        resident + held(0) + held(1) >= 64 * MIB,
        "each page is somewhere: {status}"
    );
    let says = format!("{lost} pages cannot be read");
    assert!(ended.errors.contains(&says), "{ended}");
    let refused = change_tiers(pid, "remove", "1");
    assert_eq!(refused.code(), Some(1), "{refused}");
    let says = format!("{lost} pages there cannot");
    assert!(refused.errors.contains(&says), "{refused}");
    run.signal(rustix::process::Signal::TERM);
    let outcome = run.wait();
    assert_eq!(outcome.code(), Some(128 + 15), "{outcome}");
    let old = tier(&outcome, 0);
    assert_eq!(old["drain"]["pages_unreadable"], lost, "{outcome}");
    assert_eq!(old["errors"], lost, "{outcome}");
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
}

/// A process with root's rights cuts the file short under a running program, and later makes it
/// long again. The program gets SIGBUS, never wrong bytes, and the manager lives to report it.
#[test]
fn nvm_file_that_is_cut_short_costs_its_pages_and_no_manager() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let path = folder.path().join("nvm").display().to_string();
    let job = Job::new(build("touch"))
        .args(["64", "--rounds", "100000"])
        .limit(24 * MIB)
        .tier(&format!("nvm:{path},size=96M"));
    let mut run = job.start();
    let keeper = run.keeper();
    let file = run.until("the tier's file, full of pages", 60, |_| {
        open_file(keeper, &path)
    });
    std::thread::sleep(std::time::Duration::from_secs(1));
    let file = std::fs::File::options()
        .write(true)
        .open(file)
        .expect("root may");
    let bytes = file.metadata().expect("its size").len();
    file.set_len(4096).expect("cut short");
    file.set_len(bytes).expect("long again");
    let outcome = run.wait();
    assert_eq!(outcome.code(), Some(128 + 7), "SIGBUS, not 86: {outcome}");
    assert!(outcome.number("counters.lost") > Some(0.0), "{outcome}");
    assert!(tier(&outcome, 0)["errors"].as_u64() > Some(0), "{outcome}");
    assert!(!outcome.errors.contains("the manager died"), "{outcome}");
}

/// Reads take at least as long as the device's, and the manager sleeps meanwhile.
#[test]
fn a_shape_makes_every_kind_of_tier_as_slow_as_its_device() {
    turn!(one_at_a_time, "a plain run has no tiers");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let path = folder.path().display();
    let run = |spec: &str, pages: &str| {
        Job::new(build("touch"))
            .args([pages, "--rounds", "1"])
            .limit(16 * MIB)
            .options(["--prefetch", "none"])
            .tier(spec)
            .run()
            .expect(0)
            .expect_swapping(100.0)
    };
    let times = |of: &Outcome| {
        let cpu = of.number("manager.cpu_seconds").expect("a number");
        (cpu, of.wall.as_secs_f64())
    };
    let (unshaped_cpu, unshaped_wall) = times(&run(&format!("nvm:{path},size=64M"), "32"));
    // A disk reads pages that follow each other without a seek, so only the slowest reads show it.
    for (spec, shape, quantile, least) in [
        (
            "ram,max=12M,shape=optane-ssd".to_owned(),
            "optane-ssd",
            "p50",
            9.9e-6,
        ),
        (
            format!("nvm:{path},size=64M,shape=sata-ssd"),
            "sata-ssd",
            "p50",
            89e-6,
        ),
        (
            format!("file:{path},size=64M,shape=nvme"),
            "nvme",
            "p50",
            81e-6,
        ),
        (
            format!("file:{path},size=64M,shape=hdd-7200"),
            "hdd-7200",
            "p99",
            1e-3,
        ),
    ] {
        let pages = if shape == "hdd-7200" { "18" } else { "32" };
        let outcome = run(&spec, pages);
        println!("{spec}: {outcome}");
        let tier = tier(&outcome, 0);
        assert_eq!(tier["emulated"], true, "{outcome}");
        assert_eq!(tier["shape"], shape, "{outcome}");
        let latency = tier["read_latency_seconds"][quantile].as_f64();
        assert!(latency >= Some(least), "{spec}: {outcome}");
        // Asleep: what the shape adds to the run's time adds little to that on a processor.
        if shape == "sata-ssd" {
            let (cpu, wall) = times(&outcome);
            let (cpu, wall) = (cpu - unshaped_cpu, wall - unshaped_wall);
            println!("{wall:.2} s of waits, {cpu:.2} s of them on a processor");
            assert!(cpu < wall / 2.0, "{cpu} s of {wall} s: {outcome}");
        }
    }
}

/// NVM that cannot be used is refused before the program starts, with the reason.
#[test]
fn nvm_that_cannot_be_used_is_refused_before_the_program_starts() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("mine");
    std::fs::write(&file, "precious").expect("a file");
    for (spec, why) in [
        (format!("nvm:{},size=16M", file.display()), "exists already"),
        (format!("nvm:{}", folder.path().display()), "needs a size"),
        (
            format!("nvm:{},size=8000T", folder.path().display()),
            "no room for",
        ),
        ("nvm:/dev/null,size=16M".to_owned(), "DAX device"),
    ] {
        let outcome = Job::new("/bin/true").limit(64 * MIB).tier(&spec).run();
        assert_eq!(outcome.code(), Some(125), "{outcome}");
        assert!(outcome.errors.contains(why), "{outcome}");
    }
    assert_eq!(std::fs::read(&file).expect("a file"), b"precious");
}
