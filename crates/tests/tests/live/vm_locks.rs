//! Page locks: a device of a virtual machine writes to guest memory past page tables while pages
//! leave, and loses no write to a page that it has locked. The device is `programs/device.c`; its
//! locks are those of `include/uc_page_lock.h`.

use std::process::Command;

use undercroft_tests::{Job, MIB, Outcome, rounds, say, setting, skip, turn};

use crate::takeover::{under_kills, wait_for_end};
use crate::vm::guest;

const LIMIT: u64 = 17 * MIB;

fn device(seed: u64, kind: &str, how: &str) -> Job {
    let seed = seed.to_string();
    let arguments = [rounds("6", "15"), &seed, kind, how];
    guest("device", 64 * MIB, &arguments).limit(LIMIT)
}

/// Writes of the device, and pages with lost ones: the device's, and those of threads. `None`: the
/// test is skipped.
fn counts(outcome: &Outcome, told: &str) -> Option<[f64; 2]> {
    if outcome.code() == Some(77) {
        skip("no io_uring");
        return None;
    }
    assert_eq!(outcome.code(), Some(0), "{outcome}");
    let [writes, checks, wrong, others] = outcome.numbers();
    let refused = outcome.number("counters.refused_busy");
    say(&format!(
        "{told}: {writes} writes past page tables, lost in {wrong} pages; {checks} pages compared, \
         {others} of threads wrong; {refused:?} locked pages were to leave"
    ));
    assert!(writes > 1000.0 && checks > 5000.0, "{outcome}");
    Some([wrong, others])
}

/// As the guide has it: in a program that defines nothing else.
#[test]
fn the_header_of_page_locks_needs_nothing_else() {
    turn!(beside_others, "it is about a header");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let source = folder.path().join("locks.c");
    let text = "#define UC_PAGE_LOCK_IMPLEMENTATION\n#include \"uc_page_lock.h\"\n
        int main(void) { return uc_page_locks_open(0) || uc_page_lock(0, 1); }\n";
    std::fs::write(&source, text).expect("a scratch file");
    let program = folder.path().join("locks");
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../../include");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-I", include, "-o"]);
    let made = compiler.args([&program, &source]).output().expect("cc");
    assert!(made.status.success(), "{made:?}");
    let ended = Command::new(&program).status().expect("it starts");
    assert!(
        ended.success(),
        "outside of `undercroft vm` it does nothing"
    );
}

/// Each page is locked for most of a second, in which many times the limit comes and goes.
#[test]
fn a_device_loses_no_write_to_pages_that_are_locked() {
    turn!(one_at_a_time, "it is about guest memory");
    let most = setting("UNDERCROFT_TEST_KILLS", 24) / 6;
    for (kind, kills) in [("uring", 0), ("peer", 0), ("uring", most)] {
        let mut run = device(1, kind, "lock").timeout(60 + kills).start();
        // A run whose first manager dies before it has begun is refused.
        run.until("a manager that has begun", 30, |run| run.status().map(drop));
        let pid = run.keeper();
        let killed = under_kills(&run, 1, kills, |_| wait_for_end(pid, kills));
        let outcome = run.wait();
        let told = format!("{kind}, locked, {killed} managers killed");
        let Some(lost) = counts(&outcome, &told) else {
            continue;
        };
        assert_eq!(lost, [0.0; 2], "{outcome}");
        if killed == 0 {
            let refused = outcome.number("counters.refused_busy");
            assert!(
                refused > Some(100.0),
                "no locked page was to leave: {outcome}"
            );
            assert_eq!(
                outcome.number("guest.locks_ignored"),
                Some(0.0),
                "{outcome}"
            );
            outcome.expect_swapped(5000.0);
        }
    }
}

/// The control of the test above.
#[test]
fn a_device_loses_writes_to_pages_that_are_not_locked() {
    turn!(one_at_a_time, "it is about guest memory");
    for kind in ["uring", "peer"] {
        let outcome = device(2, kind, "none").run();
        let Some([wrong, others]) = counts(&outcome, &format!("{kind}, not locked")) else {
            continue;
        };
        assert!(wrong > 10.0, "{outcome}");
        assert_eq!(others, 0.0, "{outcome}");
    }
}

/// A program that locks all of its memory is held to the limit all the same, and told.
#[test]
fn a_program_that_locks_every_page_is_held_to_its_limit() {
    turn!(one_at_a_time, "it is about guest memory");
    let mut run = device(3, "uring", "all").start();
    let seen = run.until("locks that are not kept", 30, |run| {
        let guest = run.status()?["guest"].clone();
        let ignored = guest["locks_ignored"].as_u64()?;
        let resident = guest["resident_bytes"].as_u64()?;
        (ignored > 1000 && resident < LIMIT + MIB).then_some(guest)
    });
    // Twice what one program may lock, a sixteenth of the limit.
    let locked = seen["locked_bytes"].as_u64();
    assert!(locked > Some(MIB) && locked <= Some(LIMIT / 8), "{seen}");
    let outcome = run.wait();
    let Some([_, others]) = counts(&outcome, "all pages are locked") else {
        return;
    };
    assert_eq!(others, 0.0, "{outcome}");
    let told = "has locked more pages of the machine than it may";
    assert!(outcome.errors.contains(told), "{outcome}");
    outcome.expect_swapped(5000.0);
}
