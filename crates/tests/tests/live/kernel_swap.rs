//! Kernel swap that loses pages, switched on beside a program. A file of the test tells of the swap
//! and stands for an old kernel: the swap of this machine need not be on, and may be safe.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Running, build, turn};

use crate::takeover::{manager_of, successor};
use crate::vm::guest;

const OFF: &str = "Filename\tType\tSize\tUsed\tPriority\n";
const ON: &str = "Filename\tType\tSize\tUsed\tPriority\n/test/swap file 8 0 -2\n";
const LIMIT: u64 = 24 * MIB;

/// * `folder`: has the file `swaps`.
fn beside(folder: &Path, program: &str) -> Job {
    Job::new(build(program))
        .env("UNDERCROFT_TEST_SWAPS", folder.join("swaps"))
        .limit(LIMIT)
        .tier(&format!("file:{},size=256M", folder.display()))
}

#[test]
fn no_run_starts_beside_swap_that_loses_pages() {
    turn!(beside_others, "a plain run has no tiers");
    let folder = tempfile::tempdir().expect("a scratch folder");
    std::fs::write(folder.path().join("swaps"), ON).expect("written");
    let refused = beside(folder.path(), "touch").args(["8"]).run();
    assert_eq!(refused.code(), Some(125), "{refused}");
    assert!(
        refused.errors.contains("swapoff /test/swap"),
        "the fix is not told: {refused}"
    );
}

/// No page leaves while such swap is on, also under the next manager; then the limit is kept again,
/// and every page is right.
#[test]
fn no_page_leaves_while_swap_that_loses_pages_is_on() {
    turn!(beside_others, "a plain run has no manager");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let swaps = folder.path().join("swaps");
    let evidence = folder.path().join("evidence");
    std::fs::write(&swaps, OFF).expect("written");
    let mut run = beside(folder.path(), "holdcheck")
        .args(["48", &evidence.display().to_string(), "90"])
        .options(["--takeovers-max", "9"])
        .start();
    let left = |run: &Running| run.status()?["pages"]["swapped_out"].as_u64();
    run.until("pages that leave", 60, |run| {
        left(run).filter(|pages| *pages > 1000)
    });
    std::fs::write(&swaps, ON).expect("written");
    run.until("a warning", 60, |run| {
        run.errors().contains("no page leaves").then_some(())
    });
    let stay = |run: &mut Running| {
        // A batch that was under way has ended.
        std::thread::sleep(Duration::from_millis(200));
        let before = run.until("a status", 60, |run| left(run));
        std::thread::sleep(Duration::from_millis(500));
        let after = run.until("a status", 60, |run| left(run));
        assert_eq!(before, after, "pages left");
    };
    stay(&mut run);
    let pid = run.keeper();
    let dead = manager_of(pid).expect("a manager");
    kill_process(Pid::from_raw(dead).expect("an id"), Signal::KILL).expect("it lives");
    run.until("another manager", 60, |_| successor(pid, dead));
    stay(&mut run);
    assert_eq!(left(&run), Some(0), "pages left under the next manager");
    std::fs::write(&swaps, OFF).expect("written");
    run.until("the limit", 60, |run| {
        let dram = run.status()?["dram_bytes"].as_u64()?;
        (dram <= LIMIT).then_some(())
    });
    run.signal(Signal::USR1);
    let outcome = run.wait().expect(0).expect_swapping(1000.0);
    assert!(!evidence.exists(), "a wrong byte");
    assert!(outcome.errors.contains("swap is off"), "{outcome}");
}

/// The same of guest memory: it stays whole in memory meanwhile.
#[test]
fn no_page_of_a_guest_leaves_while_swap_that_loses_pages_is_on() {
    turn!(beside_others, "it is about guest memory");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let swaps = folder.path().join("swaps");
    std::fs::write(&swaps, OFF).expect("written");
    let job = guest("guest", 48 * MIB, &["2", "14", "3"]).limit(LIMIT);
    let mut run = job.env("UNDERCROFT_TEST_SWAPS", &swaps).start();
    let left = |run: &Running| run.status()?["pages"]["swapped_out"].as_u64();
    run.until("pages that leave", 60, |run| {
        left(run).filter(|pages| *pages > 1000)
    });
    std::fs::write(&swaps, ON).expect("written");
    run.until("a warning", 60, |run| {
        run.errors().contains("no page leaves").then_some(())
    });
    std::thread::sleep(Duration::from_millis(200)); // a batch that was under way has ended
    let before = run.until("a status", 60, |run| left(run));
    std::thread::sleep(Duration::from_millis(500));
    let after = run.until("a status", 60, |run| left(run));
    assert_eq!(before, after, "pages left");
    std::fs::write(&swaps, OFF).expect("written");
    run.until("pages that leave again", 60, |run| {
        left(run).filter(|pages| *pages > after)
    });
    let outcome = run.wait().expect(0);
    assert!(outcome.errors.contains("swap is off"), "{outcome}");
}
