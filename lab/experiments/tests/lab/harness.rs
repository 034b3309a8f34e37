//! The harness at small sizes: results parse and recompute, plots exist, and the machine is as it
//! was, also after Ctrl-C.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use undercroft_experiments::RunOptions;
use undercroft_experiments::results::{Comparison, Results};
use undercroft_experiments::rig::{groups_of, swap};

/// These tests check the machine's swap, so they run one after another.
static MACHINE: Mutex<()> = Mutex::new(());

fn options(out: &Path) -> RunOptions {
    RunOptions {
        out: out.to_owned(),
        small: true,
        touch_command: Some(vec![env!("CARGO_BIN_EXE_undercroft-touch").into()]),
        ..RunOptions::default()
    }
}

/// A directory on the disk: swap files cannot live on tmpfs.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory under target")
}

/// True, with a message, if kernel rigs cannot be tested: no root, no memory cgroups, or another
/// swap stays on.
fn kernel_rigs_unavailable() -> bool {
    let error = swap::check("zram").err();
    if let Some(error) = &error {
        println!("SKIPPED: {error}");
    }
    error.is_some()
}

fn assert_machine_is_clean(out: &Path) {
    let ours = |line: &String| line.contains("/dev/zram0") || line.contains("undercroft-lab");
    assert!(
        !swap::active().iter().any(ours),
        "swap stays on: {:?}",
        swap::active()
    );
    let left = groups_of(std::process::id());
    assert!(left.is_empty(), "cgroups stay: {left:?}");
    if let Ok(size) = fs::read_to_string("/sys/block/zram0/disksize") {
        assert_eq!(size.trim(), "0", "zram0 is not reset");
    }
    if let Ok(enabled) = fs::read_to_string("/sys/module/zswap/parameters/enabled") {
        assert_eq!(enabled.trim(), "N", "zswap stays enabled");
    }
    let files = fs::read_dir(out)
        .expect("out")
        .flatten()
        .map(|entry| entry.path());
    assert_eq!(
        files
            .filter(|path| path
                .extension()
                .is_some_and(|extension| extension == "swap"))
            .count(),
        0
    );
}

fn assert_results(out: &Path) -> Results {
    let results = Results::read(&out.join("results.json")).expect("results.json parses");
    assert!(
        results.rows.iter().all(Comparison::recomputes),
        "a ratio does not follow from its values"
    );
    let text = fs::read_to_string(out.join("results.md")).expect("results.md");
    results
        .rigs
        .keys()
        .for_each(|rig| assert!(text.contains(rig.as_str()), "{rig} is not in results.md"));
    results
}

fn assert_plot(out: &Path, name: &str) {
    let svg = fs::read_to_string(out.join(format!("{name}.svg"))).expect("svg");
    assert!(
        svg.contains("<svg") && svg.contains("</svg>") && svg.contains("<rect"),
        "{name}.svg"
    );
}

#[test]
fn patterns_compare_kernel_rigs_and_clean_up() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    let out = directory();
    undercroft_experiments::run("patterns", &options(out.path())).expect("the experiment runs");
    let results = assert_results(out.path());
    assert_machine_is_clean(out.path());
    for rig in ["plain", "swapfile"] {
        assert!(
            results.rig_names().iter().any(|name| name == rig),
            "{rig} has no samples: {:?}",
            results.notes
        );
    }
    results.notes.iter().for_each(|note| println!("{note}"));
    let slow = results.values("swapfile", "random read 1t", "max_ns");
    assert!(
        slow.iter().all(|max| *max > 10_000.0),
        "no swap-in happened under the limit: {slow:?}"
    );
    assert_plot(out.path(), "latency");
    assert_plot(out.path(), "throughput");
    let again = directory();
    undercroft_experiments::plot(&out.path().join("results.json"), again.path()).expect("redraw");
    assert_plot(again.path(), "latency");
    assert_results(again.path());
}

#[test]
fn threads_share_one_memory_under_kernel_rigs() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    let out = directory();
    let options = RunOptions {
        threads: vec![3, 1],
        operations: Some(1500),
        ..options(out.path())
    };
    let results = undercroft_experiments::run("scale", &options).expect("the experiment runs");
    assert_results(out.path());
    assert_machine_is_clean(out.path());
    results.notes.iter().for_each(|note| println!("{note}"));
    for case in ["fill 1t", "random write 3t", "seq read 3t", "verify 3t"] {
        let found = results.values("swapfile", case, "p999_ns");
        assert_eq!(found.len(), 1, "{case}: {:?}", results.notes);
    }
    let scaling = results.scaling.expect("its own part");
    assert!(scaling.phases.iter().any(|phase| phase.seconds > 0.0));
    assert!(
        scaling.modelled.is_empty(),
        "nothing is known of undercroft"
    );
    assert_plot(out.path(), "throughput");
    assert_plot(out.path(), "latency");
}

#[test]
fn first_touch_and_below_limit_run_without_a_binary() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    for name in ["first-touch", "below-limit"] {
        let out = directory();
        undercroft_experiments::run(name, &options(out.path())).expect("the experiment runs");
        assert!(!assert_results(out.path()).samples.is_empty());
    }
}

#[test]
fn tiny_ycsb_loads_runs_and_verifies() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    let out = directory();
    let results = undercroft_experiments::run("redis-ycsb", &options(out.path()))
        .expect("the experiment runs");
    assert_results(out.path());
    assert_machine_is_clean(out.path());
    if let Some(skipped) = results
        .notes
        .iter()
        .find(|note| note.starts_with("SKIPPED: redis-ycsb"))
    {
        println!("{skipped}");
        return;
    }
    for workload in ["load", "A", "B", "C", "F"] {
        assert!(
            !results
                .values("plain", workload, "ops_per_second")
                .is_empty(),
            "no {workload} on plain"
        );
    }
    assert_plot(out.path(), "read-latency");
}

#[test]
fn unknown_experiment_is_refused_with_the_list() {
    let out = directory();
    let error = undercroft_experiments::run("nonsense", &options(out.path()))
        .expect_err("refused")
        .to_string();
    undercroft_experiments::list()
        .iter()
        .for_each(|info| assert!(error.contains(info.name), "{error}"));
}
