//! Behaviour at the bounds of what the books can name, and where a program chooses what they are
//! asked: numbers of address spaces, room of the page table, contents of pages.

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, beside_others, build, plain_only, say, skip, turn};

/// Forks and new programs from a few numbers before the last one on.
fn near_the_last_number(program: impl AsRef<std::ffi::OsStr>) -> Job {
    Job::new(program)
        .env(
            "UNDERCROFT_TEST_FIRST_SPACE",
            ((1u32 << 24) - 4).to_string(),
        )
        .limit(12 * MIB)
}

#[test]
fn forks_and_new_programs_go_on_after_the_last_number_of_a_space() {
    let _turn = beside_others();
    let forks = near_the_last_number(build("forks")).args(["16", "3", "3"]);
    let outcome = forks.run().expect(0);
    assert_eq!(outcome.text().trim(), "right", "{outcome}");
    let script = "i=0; while [ $i -lt 30 ]; do /bin/true || exit 3; i=$((i+1)); done; echo $i";
    let shell = near_the_last_number("/bin/sh").args(["-c", script]);
    assert_eq!(shell.run().expect(0).text().trim(), "30");
}

#[test]
fn a_successor_goes_on_after_the_last_number_of_a_space() {
    turn!(beside_others, "a plain run has no manager");
    let mut run = near_the_last_number(build("forks"))
        .args(["16", "4", "3"])
        .start();
    for _ in 0..2 {
        let manager = run.until("manager process", 60, |run| {
            let tree = run.tree().into_iter();
            let mut managers = tree.filter(|of| of.pid != run.pid());
            managers.find(|of| of.command.contains("undercroft: manager of"))
        });
        std::thread::sleep(std::time::Duration::from_millis(700));
        let pid = Pid::from_raw(manager.pid).expect("a process id");
        let _ = kill_process(pid, Signal::KILL); // the program may have ended
    }
    let outcome = run.wait().expect(0);
    assert_eq!(outcome.text().trim(), "right", "{outcome}");
}

/// The page table has room for the parent and some of its children.
#[test]
fn a_full_page_table_refuses_pages_to_a_child_and_the_others_live() {
    let name = "a_full_page_table_refuses_pages_to_a_child_and_the_others_live";
    let _turn = beside_others();
    let job = Job::new(build("refused")).args(["48", "4"]).limit(12 * MIB);
    let job = job.env("UNDERCROFT_TEST_LEDGER_CHUNKS", "90");
    let outcome = job.run().expect(0);
    let [
        ended,
        read,
        refused,
        moved,
        moved_refused,
        last,
        last_refused,
    ] = outcome.numbers();
    println!("{outcome}");
    let pages = 48.0 * 256.0;
    assert!(read + refused >= (4.0 - ended) * pages, "{outcome}");
    assert_eq!(moved + moved_refused, pages / 2.0, "{outcome}");
    assert_eq!(
        [last, last_refused],
        [pages / 2.0, 0.0],
        "room comes back: {outcome}"
    );
    if plain_only() {
        return skip("a plain run has no page table of ours");
    }
    assert!(read > pages && refused + ended > 0.0, "{outcome}");
    assert!(
        outcome.errors.contains("the page table is full"),
        "{outcome}"
    );
    let told = outcome
        .number("manager.scale.pages_refused")
        .expect("a count");
    assert!(told >= refused, "{outcome}");
    say(&format!(
        "{name}: of the children's pages {read} read, {refused} refused"
    ));
}

/// A program that knows how pages are compared makes pairs that look alike.
#[test]
fn crafted_pages_lose_no_write() {
    let _turn = beside_others();
    for spread in ["1", "2500"] {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let tier = format!("file:{},size=256M", folder.path().join("spill").display());
        let job = Job::new(build("crafted"))
            .arg(spread)
            .limit(8 * MIB)
            .tier(&tier);
        let outcome = job.run().expect(0).expect_swapping(1000.0);
        assert_eq!(outcome.text().trim(), "0", "{outcome}");
    }
}
