//! No process of a run can stop another. A process that is stopped, frozen or starved under
//! pressure holds up only itself, and has every byte when it goes on.

use undercroft_tests::{
    Job, MIB, beside_others, build, plain_only, say, skip, target_folder, turn,
};

/// Rounds of 40 ms undisturbed and 40 ms disturbed.
const ROUNDS: &str = "25";

/// A median, and a 99th percentile, below these prove no wait, because other programs run on the
/// machine, too.
const CALM_P50_US: f64 = 20.0;
const CALM_P99_US: f64 = 100.0;

/// Other programs of the machine may spoil a round. A process that holds up others spoils all.
const TRIES: usize = 3;

/// The folder of version 2 cgroups, if they can freeze.
fn second_version() -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
    let mount = mounts
        .lines()
        .find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
    mount.split(' ').nth(1).map(str::to_owned)
}

/// Disturbs a process in this `way` half of the time. The other's median and 99th percentile must
/// be at most twice what they are otherwise, in the best of three runs.
fn holds_up_nobody(name: &str, way: &str) {
    let _turn = beside_others();
    let mut job = Job::new(build("neighbours")).args([way, "48", ROUNDS]);
    if way == "freeze" {
        let Some(folder) = second_version() else {
            return skip("no cgroup of the second version is mounted");
        };
        job = job.env("CGROUP2", folder);
    }
    if !plain_only() {
        job = job.limit(40 * MIB).tier("ram");
    }
    let mut slow = Vec::new();
    for _ in 0..TRIES {
        match is_calm_beside(name, way, &job) {
            None => return skip("no group can be made, or no process put in it"),
            Some(Ok(())) => return,
            Some(Err(why)) => slow.push(why),
        }
    }
    panic!("in each of {TRIES} runs: {slow:#?}");
}

/// Makes a run; `None` if it cannot be made here. Says why if the other process was held up.
fn is_calm_beside(name: &str, way: &str, job: &Job) -> Option<Result<(), String>> {
    let outcome = job.run();
    if outcome.code() == Some(77) {
        return None;
    }
    let outcome = outcome.expect(0);
    let [p50, p99, most, late_p50, late_p99, late_most, other] = outcome.numbers();
    let given_up = if plain_only() {
        0.0
    } else {
        outcome.number("manager.commands_given_up").unwrap_or(0.0)
    };
    say(&format!(
        "{name}: p50 {p50} us, p99 {p99} us, longest {most} us; disturbed {late_p50}, {late_p99}, \
         {late_most} us; {other} accesses of the other process; {given_up} commands given up"
    ));
    let is_calm = |late: f64, calm: f64, least| late <= 2.0 * f64::max(calm, least);
    let calm = is_calm(late_p50, p50, CALM_P50_US) && is_calm(late_p99, p99, CALM_P99_US);
    let figures = format!("p50 {late_p50} us beside {p50}, p99 {late_p99} us beside {p99}");
    let verdict = if calm { Ok(()) } else { Err(figures) };
    if plain_only() {
        return Some(verdict);
    }
    let outcome = match way {
        "scribble" | "garbage" => outcome.expect_swapped(2000.0),
        _ => outcome.expect_swapping(2000.0),
    };
    if ["freeze", "freezer", "quota"].contains(&way) {
        // Otherwise no process was disturbed in the middle of a command, and nothing is proved.
        assert!(given_up > 0.0, "{outcome}");
    }
    Some(verdict)
}

/// A test for each way to disturb a process.
macro_rules! holds_up_nobody {
    ($($test:ident: $way:literal,)*) => {
        $(#[test]
        fn $test() {
            holds_up_nobody(stringify!($test), $way);
        })*
    };
}

holds_up_nobody! {
    a_stopped_process_holds_up_nobody: "stop",
    a_process_frozen_by_the_first_cgroup_version_holds_up_nobody: "freezer",
    a_process_frozen_by_the_second_cgroup_version_holds_up_nobody: "freeze",
    a_process_that_a_debugger_stops_holds_up_nobody: "trace",
    a_process_with_a_hundredth_of_a_processor_and_the_lowest_priority_holds_up_nobody: "quota",
    a_process_that_is_starved_by_others_holds_up_nobody: "nice",
    // In the last two the process is ended, or goes on, and harms only itself.
    a_process_that_lies_about_its_agent_holds_up_nobody: "scribble",
    a_process_that_overwrites_what_it_shares_with_the_manager_holds_up_nobody: "garbage",
}

/// The bytes that are read there are zeros. The manager must not take them for a page of the
/// program.
#[test]
fn whoever_reads_the_pagers_own_memory_loses_nothing() {
    let name = "whoever_reads_the_pagers_own_memory_loses_nothing";
    turn!(beside_others, "a plain run has no pager");
    let folder = tempfile::tempdir_in(target_folder()).expect("a folder");
    let outcome = Job::new(build("strays"))
        .args(["64", "4"])
        .limit(16 * MIB)
        .tier("ram,max=7M")
        .tier(&format!(
            "file:{},size=200M",
            folder.path().join("spill").display()
        ))
        .run()
        .expect(0)
        .expect_swapping(2000.0);
    let zeros = outcome.number("pages.same_filled").expect("a report");
    let looks = outcome.text();
    say(&format!(
        "{name}: {} looks, {zeros} pages of zeros left",
        looks.trim()
    ));
    // The heap and the library's data have a few zero pages.
    assert!(zeros < 200.0, "{outcome}");
}

/// A mapping made there afterwards reads as zeros, though the kernel reports no such change.
#[test]
fn pages_whose_place_is_taken_by_shared_memory_stay_away() {
    remaps("pages_whose_place_is_taken_by_shared_memory_stay_away", &[]);
}

/// By a raw system call, so pages on their way out have no place to return to.
#[test]
fn pages_whose_place_is_taken_by_shared_memory_hold_up_nobody() {
    let name = "pages_whose_place_is_taken_by_shared_memory_hold_up_nobody";
    remaps(name, &["raw"]);
}

fn remaps(name: &str, more: &[&str]) {
    let _turn = beside_others();
    let job = Job::new(build("remaps")).args(["48", "3"]).args(more);
    let mut job = job;
    if !plain_only() {
        // Nearly nothing fits below: what leaves is put back.
        job = job.limit(16 * MIB).tier("ram,max=1M");
    }
    let outcome = job.run();
    if outcome.code() == Some(77) {
        return skip("no System V shared memory");
    }
    let outcome = outcome.expect(0);
    say(&format!("{name}: {} pieces", outcome.text().trim()));
}
