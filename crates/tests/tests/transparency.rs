//! What a program does with its address space and its CPUs gives the same results as in a plain
//! run.

use undercroft_tests::{Job, MIB, build, one_at_a_time, say, setting, skip};

/// A slot that one mmap made is one mapping, and mremap moves it: registration never splits it.
#[test]
fn slots_stay_in_one_mapping() {
    let _turn = one_at_a_time();
    for threads in ["1", "2", "4"] {
        let job = Job::new(build("slots")).args([threads, "60", "2500"]);
        job.limit(40 * MIB).run().expect(0).expect_swapping(1000.0);
    }
}

/// Threads whose allocators grow under pressure have hardly more mappings than in a plain run.
#[test]
fn arenas_of_threads_stay_in_few_mappings() {
    let _turn = one_at_a_time();
    let mappings = |text: &str| -> u64 {
        let line = text.trim().strip_prefix("mappings ");
        line.and_then(|n| n.parse().ok())
            .expect("a number of mappings")
    };
    // The full size: 200,000 blocks each.
    let full = setting("UNDERCROFT_TEST_FULL", 0) > 0;
    for (threads, few) in [(4u64, 100_000u64), (16, 30_000), (32, 15_000)] {
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
    let _turn = one_at_a_time();
    for way in ["library", "raw"] {
        let outcome = Job::new(build("guards")).arg(way).limit(40 * MIB).run();
        if outcome.code() == Some(77) {
            return skip("guard_pages_are_kept", "this kernel has no guard pages");
        }
        outcome.expect(0).expect_swapping(1000.0);
    }
}

/// A thread that waits for a fault is not idle: a signal handler runs meanwhile.
#[test]
fn guard_pages_of_a_signal_handler_are_kept() {
    let _turn = one_at_a_time();
    let outcome = Job::new(build("alarms")).arg("3").limit(40 * MIB).run();
    if outcome.code() == Some(77) {
        return skip(
            "guard_pages_of_a_signal_handler_are_kept",
            "this kernel has no guard pages",
        );
    }
    outcome.expect(0).expect_swapping(1000.0);
}

/// Locking or reading every mapping also reaches the shim's own.
#[test]
fn a_program_may_lock_or_read_all_its_mappings() {
    let _turn = one_at_a_time();
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
    let _turn = one_at_a_time();
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skip("a_faulting_program_sees_all_its_cpus", "one CPU");
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
