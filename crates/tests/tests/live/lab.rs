//! Experiments of the lab that run undercroft itself, at small sizes.

use serde_json::Value;
use undercroft_tests::{
    Job, find, has_access_bits, programs_folder, say, skip, turn, undercroft, undercroft_lab,
};

use crate::vm_kvm::has_kvm;

/// True, with a message, while this machine swaps: the lab measures nothing beside other swap.
fn swap_is_on() -> bool {
    let text = std::fs::read_to_string("/proc/swaps").expect("mounted /proc");
    let on = text.lines().nth(1);
    if let Some(on) = on {
        skip(&format!("other swap is on: {on}"));
    }
    on.is_some()
}

#[test]
fn experiments_with_tiers_have_all_their_rows() {
    let name = "experiments_with_tiers_have_all_their_rows";
    turn!(one_at_a_time, "they run undercroft themselves");
    if swap_is_on() {
        return;
    }
    let has_fio = find("fio").is_some();
    if !has_fio {
        say(&format!("SKIPPED: {name}: tier-bandwidth: no fio"));
    }
    for (experiment, rows) in [("tier-bandwidth", 2), ("migration", 6)] {
        if experiment == "tier-bandwidth" && !has_fio {
            continue;
        }
        let out = tempfile::tempdir_in(programs_folder()).expect("a folder on a disk");
        let path = out.path().display().to_string();
        let tested = undercroft().display().to_string();
        let lab = Job::new(undercroft_lab())
            .args(["run", experiment, "--small", "--out", &path])
            .args(["--undercroft", &tested]);
        let outcome = lab.run().expect(0);
        let text = std::fs::read_to_string(out.path().join("results.json")).expect("results");
        let results: Value = serde_json::from_str(&text).expect("JSON");
        let found = results["rows"].as_array().expect("rows");
        assert_eq!(found.len(), rows, "{experiment}: {outcome}");
        for row in found {
            let ratio = row["ratio"].as_f64();
            assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{row:#}");
        }
        assert_eq!(results["failures"], serde_json::json!([]), "{results:#}");
        let left = std::fs::read_dir(out.path()).expect("the folder").flatten();
        let left = left.filter(|it| it.file_name().to_string_lossy().contains("undercroft-lab"));
        assert_eq!(left.count(), 0, "files of the runs are left");
    }
}

/// FlexSwap's experiments with machines under policy files.
#[test]
fn machines_of_flexswap_have_their_rows_and_pictures() {
    turn!(one_at_a_time, "they run undercroft themselves");
    let lacks = ["clang", "wasm-ld"].iter().find(|of| find(of).is_none());
    if let Some(lacks) = lacks {
        return skip(&format!("no {lacks}: no policy can be built from C"));
    }
    if swap_is_on() || !has_access_bits() || !has_kvm() {
        return;
    }
    for (experiment, rows, picture) in [
        ("flexswap-linearpf", 6, "throughput.svg"),
        ("flexswap-fig13", 2, "recovery.svg"),
        ("flexswap-fig12", 18, "memory-guest.svg"),
    ] {
        let out = tempfile::tempdir_in(programs_folder()).expect("a folder on a disk");
        let path = out.path().display().to_string();
        let tested = undercroft().display().to_string();
        let lab = Job::new(undercroft_lab())
            .args(["run", experiment, "--quick", "--out", &path])
            .args(["--undercroft", &tested]);
        let outcome = lab.timeout(300).run().expect(0);
        let text = std::fs::read_to_string(out.path().join("results.json")).expect("results");
        let results: Value = serde_json::from_str(&text).expect("JSON");
        // Rows beside the kernel's swap are there only where that is.
        let found = results["rows"].as_array().expect("rows");
        assert!(found.len() >= rows, "{experiment}: {outcome}: {found:#?}");
        assert_eq!(results["failures"], serde_json::json!([]), "{results:#}");
        assert!(out.path().join(picture).exists(), "{experiment}");
    }
}

#[test]
fn threads_of_one_memory_are_measured_counted_and_modelled() {
    let name = "threads_of_one_memory_are_measured_counted_and_modelled";
    turn!(one_at_a_time, "they run undercroft themselves");
    if swap_is_on() {
        return;
    }
    let out = tempfile::tempdir_in(programs_folder()).expect("a folder on a disk");
    let path = out.path().display().to_string();
    let tested = undercroft().display().to_string();
    let lab = Job::new(undercroft_lab())
        .args([
            "run",
            "scale",
            "--quick",
            "--threads",
            "1,2",
            "--out",
            &path,
        ])
        .args(["--undercroft", &tested]);
    let outcome = lab.run().expect(0);
    let text = std::fs::read_to_string(out.path().join("results.json")).expect("results");
    let results: Value = serde_json::from_str(&text).expect("JSON");
    for note in results["notes"].as_array().expect("notes") {
        let note = note.as_str().unwrap_or_default();
        if note.starts_with("SKIPPED") {
            say(&format!("{note} ({name})"));
        }
    }
    assert_eq!(results["failures"], serde_json::json!([]), "{outcome}");
    let scaling = &results["scaling"];
    let counts = scaling["counts"].as_array().expect("counts");
    assert_eq!(counts.len(), 4, "two kinds of tier, two numbers of threads");
    for run in counts {
        for field in ["faults", "pages_out", "engine_locks", "evict_locks"] {
            assert!(run[field].as_f64() > Some(0.0), "{field}: {run:#}");
        }
        assert!(run["engine_locks"].as_f64() > run["engine_waits"].as_f64());
    }
    let phases = scaling["phases"].as_array().expect("phases");
    let busy = |phase: &&Value| {
        phase["busiest"]
            .as_str()
            .is_some_and(|it| it.starts_with("uc-"))
    };
    assert!(phases.iter().any(|phase| busy(&phase)), "{phases:#?}");
    let modelled = scaling["modelled"].as_array().expect("predictions");
    assert!(!modelled.is_empty());
    for one in modelled {
        assert!(one["ops_per_second"].as_f64() > Some(0.0), "{one:#}");
    }
}
