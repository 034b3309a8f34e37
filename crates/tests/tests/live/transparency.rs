//! A program's work on its address space and its CPUs gives the same results as in a plain run.

use undercroft_tests::{
    HugePages, Job, MIB, beside_others, build, find, is_full_size, plain_only, rounds, say, skip,
    undercroft,
};

/// A slot that one mmap made is one mapping, and mremap moves it: registration never splits it.
#[test]
fn slots_stay_in_one_mapping() {
    let _turn = beside_others();
    for threads in ["1", "2", "4"] {
        let job = Job::new(build("slots")).args([threads, "60", rounds("1000", "2500")]);
        job.limit(40 * MIB).run().expect(0).expect_swapping(1000.0);
    }
}

/// A mapping that grew while it was managed may be in two pieces for good. mremap moves both, and
/// moves nothing if the kernel refuses one. In a plain run there is one mapping.
#[test]
fn mremap_across_two_pieces_does_what_it_does_to_one_mapping() {
    let name = "mremap_across_two_pieces_does_what_it_does_to_one_mapping";
    let _turn = beside_others();
    let mut job = Job::new(build("pieces")).args(["48", "12"]);
    if !plain_only() {
        job = job.limit(24 * MIB);
    }
    let outcome = job.run();
    if outcome.code() == Some(77) {
        return skip("no real-time priority");
    }
    let outcome = outcome.expect(0).expect_swapping(1000.0);
    let [tries, split, moves] = outcome.numbers();
    say(&format!("{name}: {split} splits in {tries} tries"));
    assert_eq!(moves, tries, "{outcome}");
    // Each try makes a split, unless the machine takes a CPU away meanwhile.
    let least = if plain_only() { 0.0 } else { tries / 2.0 };
    assert!(
        split >= least,
        "no move of two pieces was tested: {outcome}"
    );
}

/// valgrind cannot run the agent, so its program is not managed. It runs all the same.
#[test]
fn valgrind_runs_and_its_program_is_not_managed() {
    let _turn = beside_others();
    if find("valgrind").is_none() {
        return skip("no valgrind");
    }
    let words = ["-q", "--error-exitcode=9", "sh", "-c", "echo $((6 * 7))"];
    let mut job = Job::new("valgrind").args(words);
    if !plain_only() {
        job = job.limit(16 * MIB);
    }
    assert_eq!(job.run().expect(0).text(), "42\n");
}

/// Threads whose allocators grow under pressure have hardly more mappings than in a plain run.
#[test]
fn arenas_of_threads_stay_in_few_mappings() {
    let _turn = beside_others();
    let mappings = |text: &str| -> u64 {
        let line = text.trim().strip_prefix("mappings ");
        line.and_then(|n| n.parse().ok())
            .expect("a number of mappings")
    };
    // The full size: 200,000 blocks each.
    let full = is_full_size();
    let sizes = rounds(
        &[(4u64, 50_000u64), (32, 10_000)][..],
        &[(4, 100_000), (16, 30_000), (32, 15_000)],
    );
    for &(threads, few) in sizes {
        let blocks = if full { 200_000 } else { few };
        let args = [threads.to_string(), blocks.to_string()];
        let plain = Job::new(build("arenas")).args(&args).run().expect(0);
        let limit = threads * blocks * 1000 / 4;
        let limited = Job::new(build("arenas"))
            .args(&args)
            .limit(limit)
            .run()
            .expect(0);
        let (plain, ours) = (mappings(&plain.text()), mappings(&limited.text()));
        // In a shorter run, the shim's mappings and those of each thread are a larger part.
        let fixed = if full { 0 } else { 12 + 2 * threads };
        assert!(
            2 * ours <= 3 * plain + 2 * fixed,
            "{threads} threads: {ours} mappings, {plain} without us"
        );
        say(&format!(
            "{threads} threads: {ours} mappings, {plain} without us"
        ));
        assert!(
            limited.number("mappings_peak") > Some(plain as f64 / 2.0),
            "{limited}"
        );
    }
}

#[test]
fn guard_pages_are_kept() {
    let _turn = beside_others();
    for way in ["library", "raw"] {
        let outcome = Job::new(build("guards"))
            .args([way, rounds("15", "60")])
            .limit(40 * MIB)
            .run();
        if outcome.code() == Some(77) {
            return skip("this kernel has no guard pages");
        }
        outcome.expect(0).expect_swapping(1000.0);
    }
}

/// Nothing tells of a guard that is put by a system call where a page has left. The page does not
/// come along with its neighbours.
#[test]
fn guards_in_the_place_of_pages_that_have_left_are_kept() {
    let _turn = beside_others();
    for prefetch in ["window:8", "majority"] {
        let job = Job::new(build("guarded")).limit(24 * MIB);
        let outcome = job.options(["--prefetch", prefetch]).run();
        if outcome.code() == Some(77) {
            return skip("this kernel has no guard pages");
        }
        let outcome = outcome.expect(0).expect_swapped(2000.0);
        let [kept, lost, wrong] = outcome.numbers();
        assert!(kept > 1300.0 && lost + wrong == 0.0, "{outcome}");
    }
}

/// Nor does it come when a user wants all pages in memory. It counts as dropped.
#[test]
fn guards_are_kept_where_all_pages_are_brought_back() {
    let _turn = beside_others();
    if plain_only() {
        return skip("a plain run brings no pages back");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let go = folder.path().join("go");
    let mut run = Job::new(build("guarded")).arg(&go).limit(24 * MIB).start();
    run.until("its guards", 30, |run| {
        let outcome = run.outcome();
        (outcome.code() == Some(77) || outcome.text().contains("ready")).then_some(())
    });
    let pid = run.keeper().to_string();
    let keep = ["set", &pid, "keep=yes"];
    Job::new(undercroft()).args(keep).run().expect(0);
    let all = 16384 - 4096_u64.div_ceil(3); // pages without guards
    run.until("all of its memory", 30, |run| {
        let pages = run.status()?["resident_bytes"].as_u64()? / 4096;
        (pages >= all).then_some(())
    });
    std::fs::write(&go, "").expect("a file");
    let outcome = run.wait();
    if outcome.code() == Some(77) {
        return skip("this kernel has no guard pages");
    }
    let text = outcome.expect(0).text();
    assert!(text.ends_with("1366 0 0\n"), "{text}");
}

/// Another process that shares the memory is no thread of the process, and may be no child.
#[test]
fn guard_pages_of_a_process_that_shares_the_memory_are_kept() {
    let _turn = beside_others();
    for way in [&["5"][..], &["5", "brother"]] {
        let outcome = Job::new(build("beside")).args(way).limit(40 * MIB).run();
        if outcome.code() == Some(77) {
            return skip("this kernel has no guard pages");
        }
        let outcome = outcome.expect(0).expect_swapped(1000.0);
        let [kept, _lost] = outcome.numbers();
        assert!(kept > 500.0, "{outcome}");
    }
}

/// All between two mappings that cannot be managed is registered in one call. What the program maps
/// there meanwhile may be another such mapping, and the kernel does not refuse it.
#[test]
fn huge_pages_and_shared_memory_beside_new_mappings_are_left_alone() {
    let _turn = beside_others();
    let Some(_pool) = HugePages::more(4) else {
        return skip("no pool of huge pages can be made here");
    };
    let job = Job::new(build("hugetlb")).args(["60", "1500"]);
    let outcome = job.limit(24 * MIB).run();
    if outcome.code() == Some(77) {
        return skip("another program has the huge pages");
    }
    let outcome = outcome.expect(0).expect_swapping(1000.0);
    let [rounds] = outcome.numbers::<1>();
    assert!(rounds > 1000.0, "{outcome}");
}

/// A page that vanishes without an event never reads as zeros if it may be the manager who lost it.
/// A page that no eviction has touched is the program's own doing, and reads as without us.
#[test]
fn a_page_that_vanishes_is_an_error_if_it_was_ever_out() {
    let _turn = beside_others();
    for way in ["moved", "guarded", "asleep"] {
        let job = Job::new(build("vanish")).args([way, "60", "24"]);
        let outcome = job.limit(40 * MIB).run();
        if outcome.code() == Some(77) {
            skip("the kernel neither guards nor moves pages");
            continue;
        }
        let outcome = outcome.expect(0);
        let read = outcome.numbers::<8>().map(|number| number as u64);
        let [
            taken,
            errors,
            zeros,
            old,
            new,
            new_errors,
            new_zeros,
            new_old,
        ] = read;
        if plain_only() {
            assert_eq!((zeros, new_zeros), (taken, new), "{outcome}");
            continue;
        }
        // Of the fresh pages, a few may have been about to leave.
        assert!(new == 24 && new_zeros >= 20 && new_old == 0, "{outcome}");
        let count = |name: &str| outcome.number(name).map(|number| number as u64);
        assert_eq!(
            count("counters.lost"),
            Some(errors + new_errors),
            "{outcome}"
        );
        // A fresh page that is not counted yet when it vanishes is a first touch.
        assert!(
            count("counters.vanished").is_some_and(|vanished| vanished <= zeros + new_zeros),
            "{outcome}"
        );
        // A guard that is put on an evicted page by a raw call is not heard of: see
        // docs/guide/memory.md.
        let expected = if way == "asleep" {
            errors + old
        } else {
            errors
        };
        assert!(taken >= 20 && expected == taken, "{way}: {outcome}");
    }
}

/// Pages that are mapped ahead while another thread drops them may vanish, and are zeros then. A
/// program that does this gets no error.
#[test]
fn pages_that_are_dropped_while_they_come_are_no_error() {
    let _turn = beside_others();
    let outcome = Job::new(build("drops")).arg("3").limit(40 * MIB).run();
    let outcome = outcome.expect(0);
    let vanished = outcome.number("counters.vanished");
    let [rounds] = outcome.numbers::<1>();
    say(&format!("{rounds} rounds, {vanished:?} pages vanished"));
    assert!(rounds > 100.0, "{outcome}");
    if !plain_only() {
        assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    }
}

/// A thread that waits for a fault is not idle: a signal handler runs meanwhile.
#[test]
fn guard_pages_of_a_signal_handler_are_kept() {
    let _turn = beside_others();
    let outcome = Job::new(build("alarms")).arg("3").limit(40 * MIB).run();
    if outcome.code() == Some(77) {
        return skip("this kernel has no guard pages");
    }
    outcome.expect(0).expect_swapping(1000.0);
}

/// Locking or reading every mapping also reaches the shim's own.
#[test]
fn a_program_may_lock_or_read_all_its_mappings() {
    let _turn = beside_others();
    for how in ["now", "ever", "mlock", "read"] {
        for limit in [200 * MIB, 30 * MIB] {
            Job::new(build("everything"))
                .args([how, "40"])
                .limit(limit)
                .run()
                .expect(0);
        }
    }
}

/// A thread that is alone in faulting is bound to a CPU for a while. The program's questions about
/// its CPUs do not show that.
#[test]
fn a_faulting_program_sees_all_its_cpus() {
    let _turn = beside_others();
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skip("one CPU");
    }
    let script = "
import os, subprocess, sys, threading, time
want = os.sched_getaffinity(0)
b, wrong, began = bytearray(64 << 20), 0, time.time()
while time.time() - began < 2:
    for at in range(0, len(b), 1 << 18): b[at] = b[at] + 1 & 255
    wrong += os.sched_getaffinity(0) != want
seen = subprocess.run(['nproc'], capture_output=True, text=True).stdout.split()
wrong += seen != [str(len(want))]
other = []
thread = threading.Thread(target=lambda: other.append(os.sched_getaffinity(0)))
for at in range(0, len(b), 4096): b[at] = 1
thread.start(); thread.join()
wrong += other != [want]
one = {min(want)}
os.sched_setaffinity(0, one)
for at in range(0, len(b), 4096): b[at] = 2
time.sleep(0.1)
wrong += os.sched_getaffinity(0) != one
sys.exit(wrong != 0)
";
    let job = Job::new("/usr/bin/python3").args(["-c", script]);
    job.limit(32 * MIB).run().expect(0).expect_swapping(1000.0);
}

/// A process that shares its root and working directory with another thread may not enter a mount
/// namespace.
#[test]
fn a_program_may_enter_a_mount_namespace() {
    let _turn = beside_others();
    let script = "
import ctypes, os, sys
b = bytearray(48 << 20)
for at in range(0, len(b), 4096): b[at] = 1
os.chdir('/tmp')
library, mine = ctypes.CDLL(None, use_errno=True), os.open('/proc/self/ns/mnt', os.O_RDONLY)
if library.setns(mine, 0x20000) != 0: sys.exit(77 if ctypes.get_errno() == 1 else ctypes.get_errno())
sys.exit(sum(b[at] for at in range(0, len(b), 4096)) != 12288)
";
    let job = Job::new("/usr/bin/python3").args(["-c", script]);
    let outcome = job.limit(24 * MIB).run();
    if outcome.code() == Some(77) {
        return skip("not permitted here");
    }
    outcome.expect(0).expect_swapping(1000.0);
}
