//! A real-time thread of the program that keeps a CPU to itself does not keep faults from being
//! served: the threads that serve them go elsewhere.

use undercroft_tests::{Job, MIB, build, one_at_a_time, plain_only, say, skip};

/// Most of the time that may go into accesses of more than 400 ms. If no thread went elsewhere, it
/// would be nine tenths: the kernel gives ordinary threads some time of each second. Other programs
/// on the machine cost some, too.
const STALLED_MAX: f64 = 0.5;

/// Runs the program `spins`: one thread spins in this `way`, and another needs memory.
fn is_served_beside(name: &str, way: &str) {
    let _turn = one_at_a_time();
    let mut job = Job::new(build("spins")).args([way, "48", "3"]).timeout(60);
    if !plain_only() {
        job = job.limit(16 * MIB).tier("ram");
    }
    let outcome = job.run();
    if outcome.code() == Some(77) {
        return skip(name, "no real-time priority, or one CPU");
    }
    let outcome = outcome.expect(0);
    let [longest, accesses, late, stalled] = outcome.numbers();
    let moved = outcome.number("manager.threads_moved").unwrap_or(0.0);
    say(&format!(
        "{name}: longest access {longest} ms of {accesses}, {late} longer than 1 ms, {stalled} of \
         the time stalled; {moved} threads moved"
    ));
    assert!(stalled <= STALLED_MAX, "{outcome}");
    if !plain_only() {
        outcome.expect_swapping(1000.0);
    }
}

/// One test for each way to spin.
macro_rules! is_served_beside {
    ($($test:ident: $way:literal,)*) => {
        $(#[test]
        fn $test() {
            is_served_beside(stringify!($test), $way);
        })*
    };
}

is_served_beside! {
    a_thread_that_spins_where_another_faults_keeps_no_fault_waiting: "fifo",
    a_thread_that_spins_where_reclaim_works_keeps_no_fault_waiting: "aside",
    a_thread_that_spins_where_a_bound_thread_runs_does_not_keep_it: "follow",
    a_real_time_fault_with_signals_pending_is_served: "kernel",
}
