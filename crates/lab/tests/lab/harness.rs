//! The harness at small sizes: results parse and recompute, plots exist, and the machine is as it
//! was, also after Ctrl-C.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use undercroft_lab::RunOptions;
use undercroft_lab::results::{Results, Row};

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

fn swaps() -> Vec<String> {
    let text = fs::read_to_string("/proc/swaps").unwrap_or_default();
    text.lines().skip(1).map(str::to_owned).collect()
}

/// True, with a message, if kernel rigs cannot be tested: no root, no cgroup v1, or another swap
/// stays on.
fn kernel_rigs_unavailable() -> bool {
    let until = Instant::now() + Duration::from_secs(20);
    while !swaps().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(200));
    }
    let why = if !swaps().is_empty() {
        format!("another swap is active: {:?}", swaps())
    } else if !Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
        "memory cgroup v1 is not mounted".to_owned()
    } else {
        let probe = format!(
            "/sys/fs/cgroup/memory/undercroft-lab-test-{}",
            std::process::id()
        );
        match fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)) {
            Ok(()) => return false,
            Err(error) => format!("cgroups cannot be made ({error}); run as root"),
        }
    };
    println!("SKIPPED: {why}");
    true
}

fn assert_machine_is_clean(out: &Path) {
    let ours = |line: &String| line.contains("/dev/zram0") || line.contains("undercroft-lab");
    assert!(!swaps().iter().any(ours), "swap stays on: {:?}", swaps());
    let groups = fs::read_dir("/sys/fs/cgroup/memory").expect("cgroups");
    let ours = format!("undercroft-lab-{}-", std::process::id());
    let left: Vec<PathBuf> = groups
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.display().to_string().contains(&ours))
        .collect();
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
        results.rows.iter().all(Row::recomputes),
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
    undercroft_lab::run("patterns", &options(out.path())).expect("the experiment runs");
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
    undercroft_lab::plot(&out.path().join("results.json"), again.path()).expect("redraw");
    assert_plot(again.path(), "latency");
    assert_results(again.path());
}

#[test]
fn interrupt_puts_the_machine_back() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    let out = directory();
    let mut lab = Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .args([
            "run",
            "patterns",
            "--rounds",
            "1",
            "--footprint-mib",
            "64",
            "--out",
        ])
        .arg(out.path())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the lab starts");
    let until = Instant::now() + Duration::from_secs(20);
    while swaps().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let was_on = !swaps().is_empty();
    let sent = Command::new("kill")
        .arg("-INT")
        .arg(lab.id().to_string())
        .status()
        .expect("kill");
    let status = lab.wait().expect("the lab ends");
    assert!(was_on && sent.success(), "the lab never turned swap on");
    assert_eq!(status.code(), Some(1));
    assert_machine_is_clean(out.path());
    let group = format!("undercroft-lab-{}-", lab.id());
    let groups = fs::read_dir("/sys/fs/cgroup/memory")
        .expect("cgroups")
        .flatten();
    assert_eq!(
        groups
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&group))
            .count(),
        0
    );
}

#[test]
fn first_touch_and_below_limit_run_without_a_binary() {
    let _one = MACHINE.lock().unwrap_or_else(|poison| poison.into_inner());
    if kernel_rigs_unavailable() {
        return;
    }
    for name in ["first-touch", "below-limit"] {
        let out = directory();
        undercroft_lab::run(name, &options(out.path())).expect("the experiment runs");
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
    let results =
        undercroft_lab::run("redis-ycsb", &options(out.path())).expect("the experiment runs");
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
    let error = undercroft_lab::run("nonsense", &options(out.path()))
        .expect_err("refused")
        .to_string();
    undercroft_lab::list()
        .iter()
        .for_each(|info| assert!(error.contains(info.name), "{error}"));
}
