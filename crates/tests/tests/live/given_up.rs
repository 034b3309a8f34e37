//! Memory that the program hands to the kernel in ways that exclude ours: its own userfaultfd, and
//! pins that cannot wait for one. Pages of it have left before.

use undercroft_tests::{Job, MIB, beside_others, build, skip};

/// Runs the program plain and under a limit, which three quarters of its memory exceed.
fn is_right_plain_and_limited(program: &str) {
    let _turn = beside_others();
    let job = |limit: u64| {
        let job = Job::new(build(program)).args(["8", "40"]);
        if limit == 0 { job } else { job.limit(limit) }
    };
    let plain = job(0).run();
    if plain.code() == Some(77) {
        return skip("the kernel or a right is missing: the program says so");
    }
    assert_eq!(plain.expect(0).text().trim(), "right");
    let limited = job(24 * MIB).run().expect(0).expect_swapping(1000.0);
    assert_eq!(limited.text().trim(), "right");
}

#[test]
fn a_userfaultfd_of_the_programs_own_gets_memory_with_all_its_pages() {
    is_right_plain_and_limited("own_uffd");
}

#[test]
fn memory_for_af_xdp_is_pinned_with_all_its_pages() {
    is_right_plain_and_limited("umem");
}
