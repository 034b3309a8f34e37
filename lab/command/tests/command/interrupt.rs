//! Ctrl-C while an experiment has the machine's swap.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use undercroft_experiments::rig::{groups_of, swap};

/// True, with a message, if kernel rigs cannot be tested: no root, no memory cgroups, or another
/// swap stays on.
fn kernel_rigs_unavailable() -> bool {
    let error = swap::check("zram").err();
    if let Some(error) = &error {
        println!("SKIPPED: {error}");
    }
    error.is_some()
}

#[test]
fn interrupt_puts_the_machine_back() {
    if kernel_rigs_unavailable() {
        return;
    }
    let out = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory under target");
    let mut lab = Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .args([
            "run",
            "patterns",
            "--rounds",
            "1",
            "--kernel-only",
            "--footprint",
            "64M",
            "--out",
        ])
        .arg(out.path())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the lab starts");
    let until = Instant::now() + Duration::from_secs(20);
    while swap::active().is_empty() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let was_on = !swap::active().is_empty();
    let sent = Command::new("kill")
        .arg("-INT")
        .arg(lab.id().to_string())
        .status()
        .expect("kill");
    let status = lab.wait().expect("the lab ends");
    assert!(was_on && sent.success(), "the lab never turned swap on");
    assert_eq!(status.code(), Some(1));
    assert!(
        swap::active().is_empty(),
        "swap stays on: {:?}",
        swap::active()
    );
    let left = groups_of(lab.id());
    assert!(left.is_empty(), "cgroups stay: {left:?}");
}
