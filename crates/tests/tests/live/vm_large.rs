//! Virtual machines with pages of 2 MiB: none is split, and no byte is lost. Each test makes its
//! own pool of huge pages.

use std::fs::File;
use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use undercroft_tests::{
    HugePages, Job, MIB, Outcome, build, find, rounds, say, setting, skip, turn,
};

use crate::takeover::{told, under_kills, wait_for_end};
use crate::vm::{NO_MACHINE, guest, machine, qemu, said};
use crate::vm_kvm::{check, has_kvm, race};

const NO_POOL: &str = "no pool of huge pages can be made here (vm.nr_hugepages)";
const LARGE: u64 = 2 * MIB;

/// A pool for this much memory, and some more pages.
fn pool(bytes: u64) -> Option<HugePages> {
    let pool = HugePages::more(bytes / LARGE + 4);
    if pool.is_none() {
        skip(NO_POOL);
    }
    pool
}

fn large(job: Job) -> Job {
    job.options(["--page-size", "2M"])
}

/// At the end no more of the guest is in memory than the limit allows, and no page was lost.
fn is_below(outcome: &Outcome, limit: u64) {
    let left = outcome.number("guest.resident_bytes");
    assert!(left <= Some(limit as f64), "{outcome}");
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
}

/// Several threads have parts of each page, write to them and give them back, or whole pages, while
/// the pages leave and managers die.
#[test]
fn a_guest_of_large_pages_keeps_every_byte_while_managers_die() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(64 * MIB) else { return };
    let most = setting("UNDERCROFT_TEST_KILLS", 24) / 3;
    for (seed, kills, tiers) in [
        (1, 0, &["ram", "file:/var/tmp"][..]),
        (2, 0, &["file:/var/tmp"]),
        (3, 0, &["ram"]),
        (4, most, &["ram", "file:/var/tmp"]),
        (5, most, &["file:/var/tmp"]),
    ] {
        let arguments = ["3", rounds("5", "20"), &seed.to_string()];
        // Half of the words do not compress: compressed memory alone is full at times, as is told.
        let limit = if tiers == ["ram"] { 48 } else { 26 } * MIB;
        let job = large(guest("guest", 64 * MIB, &arguments)).limit(limit);
        let job = tiers.iter().fold(job, |job, tier| job.tier(tier));
        let run = job.timeout(90 + kills).start();
        let pid = run.keeper();
        let killed = under_kills(&run, seed, kills, |_| wait_for_end(pid, kills));
        let outcome = run.wait().expect(0);
        let [increments, checks, given, empty, wrong] = outcome.numbers();
        assert_eq!(wrong, 0.0, "{outcome}");
        assert!(
            increments > 100.0 && checks > 100.0 && given > 0.0,
            "{outcome}"
        );
        if killed > 0 {
            told("a guest of large pages", killed, &outcome);
        } else {
            let outcome = outcome.expect_swapped(30.0);
            if tiers != ["ram"] {
                is_below(&outcome, limit);
            }
        }
        say(&format!(
            "large pages in {tiers:?}: {killed} kills, {increments} increments, {checks} pages \
             compared, {given} given back, {empty} of them zeros"
        ));
    }
}

/// Pages that are only read leave as they came: they are neither read nor written again.
#[test]
fn large_pages_that_were_not_written_are_not_stored_again() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(64 * MIB) else { return };
    let job = large(guest("guest", 64 * MIB, &["2", "4", "7", "clean"]));
    let outcome = job.limit(26 * MIB).tier("file:/var/tmp").run().expect(0);
    let [_, checks, _, _, wrong] = outcome.numbers();
    assert!(wrong == 0.0 && checks > 50.0, "{outcome}");
    let of = |name: &str| outcome.number(&format!("pages.{name}")).unwrap_or(0.0);
    let [out, clean] = ["swapped_out", "clean_dropped"].map(of);
    // At first each was written once.
    assert!(
        out > 96.0 && out - clean <= 48.0,
        "{out} left, {clean} clean: {outcome}"
    );
    say(&format!(
        "large pages that are read: {out} left, {clean} as they came"
    ));
}

/// Words that follow each other are of different virtual CPUs, beside eviction of the whole page.
#[test]
fn increments_of_virtual_cpus_in_large_pages_are_all_there() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(64 * MIB) else { return };
    if !has_kvm() {
        return;
    }
    for how in ["none", "balloon"] {
        let visits = rounds((1_500, 1024), (20_000, 4096));
        let outcome = large(race(2, 1, visits, how)).run().expect(0);
        check(&outcome, &format!("large pages, {how}"));
        outcome.expect_swapped(20.0);
    }
}

/// The control of the test above: whole pages leave that are not protected.
#[test]
fn increments_are_lost_if_large_pages_leave_unprotected() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(64 * MIB) else { return };
    if !has_kvm() {
        return;
    }
    let unprotected = ["1", "2", "3", "4"].map(|seed| ("none", seed));
    for (how, seed) in [("protect", "1")].into_iter().chain(unprotected) {
        let words = ["control", "64", "2", seed, "3000", "1024", how, "huge"];
        let outcome = Job::new(build("kvm_guest")).args(words).run().expect(0);
        let [increments, wrong, missing, evicted, faults] = outcome.numbers();
        say(&format!(
            "kvm, large pages, a pager of its own, {how}: {increments} increments, {missing} missing \
             in {wrong} words; {evicted} pages left, {faults} faults"
        ));
        assert!(evicted > 512.0 * 20.0 && faults > 20.0, "{outcome}");
        if wrong > 0.0 {
            assert_eq!(how, "none", "{outcome}");
            return;
        }
    }
    panic!("nothing was lost without protection");
}

/// Takes huge pages that are free, for as long as the guest runs with fewer.
fn take_pages(most: u64, until: Instant) -> u64 {
    let memfd = memfd_create("other", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).expect("a memfd");
    ftruncate(&memfd, most * LARGE).expect("its size");
    let file = File::from(memfd);
    let mut taken = 0;
    while Instant::now() < until {
        let at = taken * LARGE;
        if taken < most && fallocate(file.as_fd(), FallocateFlags::empty(), at, LARGE).is_ok() {
            taken += 1;
        } else {
            sleep(Duration::from_millis(1));
        }
    }
    taken
}

/// Another program takes huge pages that the limit allows. The guest is held to what is left, is
/// told so, and has all of its bytes; afterwards it has its limit again.
#[test]
fn a_guest_goes_on_with_the_huge_pages_that_others_leave() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(40 * MIB) else { return };
    let job = large(guest("guest", 64 * MIB, &["2", "12", "9"])).limit(40 * MIB);
    let mut run = job.tier("ram").tier("file:/var/tmp").timeout(90).start();
    run.until("a full guest", 30, |run| {
        let guest = run.status()?["guest"].clone();
        (guest["stored_bytes"].as_u64()? > 8 * MIB).then_some(())
    });
    let taken = take_pages(14, Instant::now() + Duration::from_secs(4));
    run.until("its limit again", 8, |run| {
        let resident = run.status()?["guest"]["resident_bytes"].as_u64()?;
        (resident > 40 * MIB - 14 * LARGE + 4 * LARGE).then_some(())
    });
    let outcome = run.wait().expect(0);
    let [increments, .., wrong]: [f64; 5] = outcome.numbers();
    assert!(wrong == 0.0 && increments > 100.0, "{outcome}");
    assert!(taken > 8, "{taken} pages were taken: {outcome}");
    let short = outcome.number("guest.huge_pages_short");
    assert!(short > Some(0.0), "{outcome}");
    assert!(outcome.errors.contains("no huge page is free"), "{outcome}");
    is_below(&outcome, 40 * MIB);
    say(&format!(
        "{taken} huge pages were taken, and none was free {short:?} times"
    ));
}

/// Each refusal says what to do.
#[test]
fn large_pages_are_refused_where_there_are_none() {
    turn!(beside_others, "it is about guest memory");
    let few = HugePages::more(0);
    let job = large(guest("guest", 8 << 30, &["1", "1", "1"])).limit(4 << 30);
    let outcome = job.run().expect(125);
    for word in ["huge pages", "sysctl vm.nr_hugepages="] {
        assert!(outcome.errors.contains(word), "{outcome}");
    }
    drop(few);
    let outcome = large(guest("guest", 63 * MIB, &["1", "1", "1"])).limit(40 * MIB);
    let outcome = outcome.run().expect(2);
    assert!(outcome.errors.contains("multiple of 2M"), "{outcome}");
    let outcome = large(guest("guest", 64 * MIB, &["1", "1", "1"])).limit(15 * MIB);
    let outcome = outcome.run().expect(2);
    assert!(
        outcome.errors.contains("too small for pages of 2 MiB"),
        "{outcome}"
    );
    let outcome = large(Job::new("true")).limit(64 * MIB).run().expect(2);
    assert!(
        outcome.errors.contains("undercroft vm --page-size 2M"),
        "{outcome}"
    );
}

/// An unmodified QEMU boots Linux in two thirds of the machine's memory, in pages of 2 MiB. Some 66
/// MiB of QEMU's own are within the limit, and stay.
#[test]
fn a_machine_boots_in_large_pages_and_finds_every_word() {
    turn!(beside_others, "it is about guest memory");
    let Some(_pool) = pool(176 * MIB) else { return };
    if find("qemu-system-x86_64").is_none() {
        return skip("no qemu-system-x86_64");
    }
    let scratch = tempfile::tempdir().expect("a folder");
    let Some(machine) = machine(scratch.path(), &[]) else {
        return skip(NO_MACHINE);
    };
    let job = large(qemu(&machine, "160", "").vm()).limit(176 * MIB);
    let outcome = job.run().expect(0);
    let lines = said(&outcome);
    assert!(
        lines.len() == 4 && lines[3].contains(" 0 words wrong"),
        "{outcome}"
    );
    is_below(&outcome, 120 * MIB);
    say(&format!("a machine in large pages: {:?}", outcome.wall));
    outcome.expect_swapped(30.0);
}
