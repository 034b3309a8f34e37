//! Policies that others wrote, in WebAssembly files: what they name leaves first, and whatever they
//! do, no byte is wrong, the limit is kept, and the program notices nothing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use undercroft_tests::{
    Job, MIB, Outcome, Running, build, find, policy_alone, rounds, say, skip, turn, undercroft,
    undercroft_lab,
};

use crate::daemon::Daemon;
use crate::takeover::{manager_of, successor};
use crate::vm::guest;

/// Functions that a policy may import, as text.
const IMPORTS: &str = r#"
    (import "undercroft" "reclaim" (func $reclaim (param i32 i64) (result i32)))
    (import "undercroft" "reclaim_now" (func $reclaim_now (param i32 i64) (result i32)))
    (import "undercroft" "prefetch" (func $prefetch (param i32 i64) (result i32)))
    (import "undercroft" "get_page_state" (func $state (param i32 i64) (result i32)))
    (import "undercroft" "register_parameter"
        (func $register (param i32 i32 i64) (result i32)))
    (import "undercroft" "get_parameter" (func $parameter (param i32) (result i64)))"#;

/// Functions of tiers. A policy that imports them hears more.
const OF_TIERS: &str = r#"
    (import "undercroft" "place" (func $place (param i32 i64 i32) (result i32)))
    (import "undercroft" "move_pages" (func $move (param i32 i64 i32 i32 i32) (result i32)))"#;

/// Writes a policy with this `on_event` into a folder, and returns its path.
fn policy(folder: &Path, name: &str, version: u32, on_event: &str, more: &str) -> PathBuf {
    let tiers = if on_event.contains("$move") {
        OF_TIERS
    } else {
        ""
    };
    let text = format!(
        r#"(module {IMPORTS} {tiers} (memory (export "memory") 1)
            (func (export "abi_version") (result i32) (i32.const {version}))
            (func (export "on_event")
                (param $kind i32) (param $space i32) (param $page i64) (param $pages i64)
                (param $detail i64) (local $n i64) {on_event}) {more})"#
    );
    let path = folder.join(name);
    let bytes = wat::parse_str(text).expect("right text");
    std::fs::write(&path, bytes).expect("a scratch file");
    path
}

/// Pages that a walk loaded leave first, when it is `behind` pages further: the rest of its memory
/// stays, and is there in the next round.
const BEHIND: &str = r#"
    (if (i32.eqz (i32.or (i32.eq (local.get $kind) (i32.const 1))
                         (i32.eq (local.get $kind) (i32.const 2)))) (then (return)))
    (local.set $n (i64.sub (local.get $page) (call $parameter (i32.const 0))))
    (if (i32.eq (call $state (local.get $space) (local.get $n)) (i32.const 1)) (then
        (drop (call $reclaim (local.get $space) (local.get $n)))))"#;

const BEHIND_MORE: &str = r#"(data (i32.const 0) "behind") (func (export "init")
    (drop (call $register (i32.const 0) (i32.const 6) (i64.const 96))))"#;

/// Goes round memory whose words are checked.
fn walk(policy: &str, times: &str) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let walk = walk_over(folder.path(), policy, times);
    walk.run().expect(0).expect_swapping(10_000.0)
}

fn walk_over(folder: &Path, policy: &str, times: &str) -> Job {
    let spill = folder.join("spill").display().to_string();
    Job::new(build("touch"))
        .args(["96", "--rounds", times])
        .limit(48 * MIB)
        .options(policy_alone(policy))
        .tier("ram,max=3M")
        .tier(&format!("file:{spill},size=1G"))
}

/// The same until the policy has been heard: on a busy machine its thread, which has the idle
/// class, may get no CPU for seconds. Ends when `counted` of the policy is that many, and as many
/// pages have come back.
fn walk_until(policy: &str, counted: &str, least: u64, pages: u64) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut run = walk_over(folder.path(), policy, "1000000").start();
    run.until(counted, 90, |run| {
        let status = run.status()?;
        let heard = status["policies"]["plugin"][counted].as_u64()? >= least;
        (heard && status["pages"]["swapped_in"].as_u64()? >= pages).then_some(())
    });
    run.signal(Signal::TERM);
    // A word that is wrong ends the program with 1.
    run.wait().expect(128 + 15)
}

fn count(outcome: &Outcome, path: &str) -> f64 {
    let number = outcome.number(path);
    number.unwrap_or_else(|| panic!("no number `{path}` in the report: {outcome}"))
}

/// A pipe, from which nothing comes.
fn pipe(path: &Path) -> PathBuf {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.expect("mkfifo").success());
    path.to_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A walk with a policy needs fewer pages back than with `lru`.
fn expect_savings(with: &Outcome) {
    let without = walk("lru", "5");
    let swap_ins = [with, &without].map(|outcome| count(outcome, "faults.swap_in"));
    let chosen = count(with, "policies.plugin.pages_chosen");
    assert!(chosen > 10_000.0, "{with}");
    assert!(
        swap_ins[0] < 0.8 * swap_ins[1],
        "{swap_ins:?} pages came back: {with} {without}"
    );
}

/// The template, built and checked; `None` without a compiler.
fn template(folder: &Path) -> Option<PathBuf> {
    if find("wasm-ld").is_none() || find("clang").is_none() {
        skip("no clang or no wasm-ld: no policy can be built from C");
        return None;
    }
    let dir = folder.join("mine");
    let file = dir.join("policy.wasm");
    let succeeds = |command: &mut Command| {
        let ended = command.output().expect("a command");
        assert!(ended.status.success(), "{command:?}: {ended:?}");
        String::from_utf8_lossy(&ended.stdout).into_owned()
    };
    succeeds(Command::new(undercroft()).args(["policy", "new", text(&dir)]));
    succeeds(Command::new("make").args(["-C", text(&dir)]));
    let said = succeeds(Command::new(undercroft()).args(["policy", "check", text(&file)]));
    assert!(
        said.contains("behind = 96") && said.contains("0 failed"),
        "{said}"
    );
    Some(file)
}

#[test]
fn the_template_of_the_command_builds_and_is_heard() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    if let Some(file) = template(folder.path()) {
        walk_until(text(&file), "pages_chosen", 1000, 0);
    }
}

#[test]
fn the_template_of_the_command_saves_faults() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    if let Some(file) = template(folder.path()) {
        expect_savings(&walk(text(&file), "5"));
    }
}

#[test]
fn a_template_without_a_compiler_or_a_linker_says_what_to_install() {
    turn!(beside_others, "a plain run has no policy");
    let (Some(make), Some(clang)) = (find("make"), find("clang")) else {
        return skip("no make or no clang: there is no build to fail");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (dir, tools) = (folder.path().join("mine"), folder.path().join("tools"));
    let new = ["policy", "new", text(&dir)];
    let written = Command::new(undercroft()).args(new).output();
    assert!(written.expect("undercroft").status.success());
    std::fs::create_dir(&tools).expect("a scratch folder");
    let fails_for_want_of = |what: &str| {
        let mut command = Command::new(&make);
        command.args(["-C", text(&dir)]).env("PATH", &tools);
        let ended = command.output().expect("make");
        let said = String::from_utf8_lossy(&ended.stderr);
        let missing = format!("{what} is missing; install clang and lld: apt install clang lld");
        assert!(!ended.status.success() && said.contains(&missing), "{said}");
    };
    fails_for_want_of("clang");
    std::os::unix::fs::symlink(&clang, tools.join("clang")).expect("a link");
    fails_for_want_of("wasm-ld, the linker of WebAssembly,");
}

#[test]
fn a_policy_file_that_lets_a_walk_leave_behind_itself_saves_faults() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy(folder.path(), "behind.wasm", 1, BEHIND, BEHIND_MORE);
    let with = walk(text(&file), "5");
    let report = with.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["reclaim"], "auto", "{with}");
    let plugin = &report["policies"]["plugin"];
    assert_eq!(plugin["file"], text(&file), "{with}");
    assert_eq!(plugin["parameters"][0]["name"], "behind", "{with}");
    assert_eq!(plugin["dismissed"], false, "{with}");
    expect_savings(&with);
}

/// FlexSwap's LinearPF (§6.6): the pages after a fault come along. As many as the walk needs until
/// the policy is heard again.
const LINEAR: &str = r#"
    (if (i32.ne (local.get $kind) (i32.const 1)) (then (return)))
    (loop
        (local.set $n (i64.add (local.get $n) (i64.const 1)))
        (local.set $page (i64.add (local.get $page) (i64.const 1)))
        (if (i32.eq (call $state (local.get $space) (local.get $page)) (i32.const 2)) (then
            (drop (call $prefetch (local.get $space) (local.get $page)))))
        (br_if 0 (i64.lt_u (local.get $n) (call $parameter (i32.const 0)))))"#;

const LINEAR_MORE: &str = r#"(data (i32.const 0) "ahead") (func (export "init")
    (drop (call $register (i32.const 0) (i32.const 5) (i64.const 256))))"#;

/// Goes once through memory of which a half is out, with a pause before each page, after the limit
/// was raised. Every word is checked.
fn slow_walk(policy: &str) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    let job = Job::new(build("touch"))
        .args(["48", "--rounds", "1", "--pace", "250"])
        .limit(24 * MIB)
        .options(policy_alone(policy))
        .tier(&format!("file:{spill},size=1G"));
    let mut run = job.timeout(100).start();
    run.until("memory that is filled", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output")).ok()?;
        said.contains("ready").then_some(())
    });
    set(&run, "memory-max=64M").expect(0);
    run.wait().expect(0)
}

#[test]
fn a_linear_prefetch_as_a_policy_file_halves_the_waits_of_a_walk() {
    turn!(one_at_a_time, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy(folder.path(), "linear.wasm", 1, LINEAR, LINEAR_MORE);
    let (with, without) = (slow_walk(text(&file)), slow_walk("auto"));
    // Also those that find their page on its way.
    let waits = |of: &Outcome| count(of, "faults.total") - count(of, "faults.first_touch");
    let [with_waits, without_waits] = [&with, &without].map(waits);
    assert!(without_waits > 5000.0, "{without}");
    assert!(
        2.0 * with_waits < without_waits,
        "{with_waits} of {without_waits}: {with}"
    );
    let of = |what: &str| count(&with, &format!("policies.plugin.{what}"));
    let (wished, done) = (of("prefetches_wished"), of("prefetches_done"));
    let prefetched = count(&with, "pages.prefetched");
    assert!(without_waits / 2.0 < prefetched, "{with}");
    assert!(prefetched <= done && done <= wished, "{with}");
    println!("{with_waits} of {without_waits} waits, {done} pages of {wished} wishes");
}

/// Policies that do harm as far as they can, by name, with what the report must say.
const HOSTILE: [(&str, &str, &str); 10] = [
    ("loop", "(loop (br 0))", "failures"),
    ("trap", "(unreachable)", "failures"),
    (
        "flood",
        "(loop (drop (call $reclaim (local.get $space) (i64.add (local.get $page) (local.get $n))))
            (local.set $n (i64.add (local.get $n) (i64.const 1)))
            (br_if 0 (i64.lt_u (local.get $n) (i64.const 5000))))",
        "wishes_refused",
    ),
    // The page that was just loaded, pages of no space, and numbers of no page.
    (
        "wrong",
        "(drop (call $reclaim (local.get $space) (local.get $page)))
         (drop (call $reclaim (i32.const -1) (local.get $page)))
         (drop (call $reclaim (local.get $space) (i64.const -1)))
         (drop (call $reclaim (local.get $space) (i64.mul (local.get $page) (i64.const 4096))))",
        "pages_wished",
    ),
    // Half of the memory leaves, whatever the program needs.
    (
        "empties memory",
        "(loop (local.set $n (i64.add (local.get $n) (i64.const 1)))
            (drop (call $reclaim_now (local.get $space)
                (i64.sub (local.get $page) (i64.mul (local.get $n) (i64.const 12)))))
            (br_if 0 (i64.lt_u (local.get $n) (i64.const 1000))))",
        "pages_chosen",
    ),
    // Pages that cannot leave: no batch is begun for them.
    (
        "wrong pages now",
        "(drop (call $reclaim_now (local.get $space) (local.get $page)))
         (drop (call $reclaim_now (i32.const -1) (local.get $page)))
         (drop (call $reclaim_now (local.get $space) (i64.const -1)))
         (drop (call $reclaim_now (local.get $space)
            (i64.mul (local.get $page) (i64.const 4096))))",
        "pages_wished",
    ),
    (
        "flood of loads",
        "(loop (local.set $n (i64.add (local.get $n) (i64.const 1)))
            (drop (call $prefetch (local.get $space)
                (i64.add (local.get $page) (local.get $n))))
            (br_if 0 (i64.lt_u (local.get $n) (i64.const 5000))))",
        "wishes_refused",
    ),
    // Also the page that was just loaded, or has just left.
    (
        "wrong loads",
        "(drop (call $prefetch (local.get $space) (local.get $page)))
         (drop (call $prefetch (i32.const -1) (local.get $page)))
         (drop (call $prefetch (local.get $space) (i64.const -1)))
         (drop (call $prefetch (local.get $space)
            (i64.mul (local.get $page) (i64.const 4096))))",
        "prefetches_wished",
    ),
    // To and fro, into compressed memory, and between tiers of which there are none.
    (
        "moves",
        "(drop (call $place (local.get $space) (local.get $page)
            (i32.wrap_i64 (i64.rem_u (local.get $page) (i64.const 3)))))
         (drop (call $move (local.get $space) (i64.sub (local.get $page) (i64.const 128))
            (i32.const 256) (i32.const 0) (i32.const 1)))
         (drop (call $move (local.get $space) (i64.sub (local.get $page) (i64.const 300))
            (i32.const 256) (i32.const 1) (i32.const 0)))
         (drop (call $move (local.get $space) (local.get $page) (i32.const 9)
            (local.get $kind) (i32.const -1)))",
        "moves_done",
    ),
    // Below the fuel of an event, so it is never dismissed, and is always late.
    (
        "slow",
        "(local.set $n (i64.const 100000)) (loop
            (local.set $n (i64.sub (local.get $n) (i64.const 1)))
            (br_if 0 (i64.ne (local.get $n) (i64.const 0))))",
        "events_late",
    ),
];

#[test]
fn a_hostile_policy_file_changes_no_byte_and_keeps_the_limit() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    for (name, on_event, counted) in HOSTILE {
        let file = policy(folder.path(), &format!("{name}.wasm"), 1, on_event, "");
        // A policy that fails is dismissed after eight failures.
        let least = if counted == "failures" { 8 } else { 1 };
        let pages = rounds(10_000, 100_000);
        let outcome = walk_until(text(&file), counted, least, pages);
        let report = outcome.report.as_ref().expect("a report");
        let dismissed = &report["policies"]["plugin"]["dismissed"];
        assert_eq!(dismissed, &(counted == "failures"), "{name}: {outcome}");
        let dram = count(&outcome, "dram_bytes_peak");
        // As without a plugin, where it is passed by half a hundredth for some milliseconds.
        let most = 1.02 * (48 * MIB) as f64;
        assert!(dram <= most, "{name}: {dram} bytes: {outcome}");
    }
}

/// CPU time of the policy's thread, in seconds.
fn policy_seconds(run: &Running) -> f64 {
    let manager = run.status().expect("it runs")["manager_pid"].as_u64();
    let tasks = format!("/proc/{}/task", manager.expect("a manager"));
    let tasks = std::fs::read_dir(tasks).expect("its threads").flatten();
    let stat = tasks.filter_map(|of| std::fs::read_to_string(of.path().join("stat")).ok());
    let is_policy = |stat: &String| stat.contains("(uc-plugin)");
    let stat = stat
        .into_iter()
        .find(is_policy)
        .expect("the policy's thread");
    let (_, rest) = stat.rsplit_once(')').expect("a name");
    // User and system time, in hundredths.
    let times = rest.split_whitespace().skip(11).take(2);
    times
        .map(|of| of.parse::<f64>().expect("ticks"))
        .sum::<f64>()
        / 100.0
}

#[test]
fn a_policy_that_works_without_end_gets_a_quarter_of_a_cpu() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (_, slow, counted) = HOSTILE[HOSTILE.len() - 1];
    let file = policy(folder.path(), "slow.wasm", 1, slow, "");
    let mut run = walk_over(folder.path(), text(&file), "1000000").start();
    run.until(counted, 90, |run| {
        let late = &run.status()?["policies"]["plugin"][counted];
        (late.as_u64()? > 0 && policy_seconds(run) > 0.1).then_some(())
    });
    let (used, begun) = (policy_seconds(&run), Instant::now());
    std::thread::sleep(Duration::from_secs(4));
    let (used, passed) = (policy_seconds(&run) - used, begun.elapsed().as_secs_f64());
    say(&format!("{used} of {passed} s"));
    run.signal(Signal::TERM);
    run.wait().expect(128 + 15);
    // What it has ahead, and the hundredths in which it is counted.
    assert!(used <= passed / 4.0 + 0.35, "{used} of {passed}");
}

#[test]
fn a_file_that_is_no_policy_is_refused_before_the_program_starts() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("a scratch file");
        path
    };
    let module = |text: &str| wat::parse_str(text).expect("right text");
    let cases = [
        (
            policy(folder.path(), "two.wasm", 2, "", ""),
            "version 2 of the interface",
        ),
        (
            write("none.wasm", &module("(module)")),
            "does not export `memory`",
        ),
        (
            write("large.wasm", &vec![0; (2 << 20) + 1]),
            "more than 1048576",
        ),
        (write("text.wasm", b"#!/bin/sh\n"), "not a WebAssembly file"),
        (
            write(
                "foreign.wasm",
                &module(r#"(module (import "wasi" "fd_write" (func)))"#),
            ),
            "imports `wasi` `fd_write`",
        ),
        (folder.path().join("absent.wasm"), "No such file"),
        (pipe(&folder.path().join("pipe.wasm")), "it is no file"),
    ];
    for (path, what) in cases {
        let started = folder.path().join("started");
        let mut command = Command::new(undercroft());
        command.args(["run", "-m", "64M", "--policy", text(&path), "--", "touch"]);
        let ended = command.arg(&started).output().expect("undercroft");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{said}");
        assert!(
            said.contains(what) && said.contains(text(&path)),
            "{what}: {said}"
        );
        assert!(!started.exists(), "{said}");
    }
}

/// The guest's memory is a space whose pages are offsets. Pages of processes have larger numbers.
#[test]
fn a_policy_file_names_pages_of_a_guest_by_their_offset_in_its_memory() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let of_guest = "(if (i64.ge_u (local.get $page) (i64.const 16384)) (then (return)))";
    let on_event = format!("{of_guest} {BEHIND}");
    let file = policy(folder.path(), "guest.wasm", 1, &on_event, BEHIND_MORE);
    let job = guest("guest", 64 * MIB, &["3", rounds("6", "10"), "7"]).limit(17 * MIB);
    let outcome = job.options(["--policy", text(&file)]).run().expect(0);
    let [increments, _, _, _, wrong] = outcome.numbers();
    assert!(increments > 1000.0 && wrong == 0.0, "{outcome}");
    let chosen = count(&outcome, "policies.plugin.pages_chosen");
    assert!(chosen > 100.0, "{outcome}");
}

/// A run that goes round its memory until it is ended, and checks each word.
fn endless() -> Running {
    let job = Job::new(build("touch"))
        .args(["48", "--rounds", "1000000"])
        .limit(24 * MIB)
        .tier("ram");
    let mut run = job.timeout(200).start();
    run.until("pages that come back", 60, |run| {
        run.status()?["pages"]["swapped_in"]
            .as_u64()
            .filter(|pages| *pages > 0)
    });
    run
}

/// The answer to a change of a run.
fn set(run: &Running, change: &str) -> Outcome {
    let pid = run.keeper().to_string();
    Job::new(undercroft()).args(["set", &pid, change]).run()
}

/// Waits until the figures of the run's policy file are as they should be.
fn until_plugin(run: &mut Running, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    run.until(what, 60, |run| {
        let plugin = run.status()?["policies"]["plugin"].clone();
        is(&plugin).then_some(plugin)
    })
}

fn over(count: &Value, least: u64) -> bool {
    count.as_u64().is_some_and(|count| count > least)
}

#[test]
fn a_policy_file_is_set_replaced_and_dropped_while_the_program_runs() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy(folder.path(), "behind.wasm", 1, BEHIND, BEHIND_MORE);
    let mut run = endless();
    assert!(run.status().expect("a status")["policies"]["plugin"].is_null());
    set(&run, &format!("policy={}", text(&file))).expect(0);
    let begun = until_plugin(&mut run, "pages that it named", |plugin| {
        over(&plugin["pages_chosen"], 1000)
    });
    assert_eq!(begun["file"], text(&file), "{begun}");
    std::fs::remove_file(&file).expect("the run keeps its bytes");
    let wrong = [
        (
            policy(folder.path(), "two.wasm", 2, "", ""),
            "version 2 of the interface",
        ),
        (folder.path().join("absent.wasm"), "No such file"),
        (folder.path().join("folder.wasm"), "it is no file"),
        (folder.path().join("pipe.wasm"), "it is no file"),
        (folder.path().join("text.wasm"), "not a WebAssembly file"),
        (folder.path().join("large.wasm"), "more than 1048576"),
    ];
    std::fs::create_dir(&wrong[2].0).expect("a folder");
    pipe(&wrong[3].0);
    std::fs::write(&wrong[4].0, "#!/bin/sh").expect("a file");
    std::fs::write(&wrong[5].0, vec![0; 3 << 20]).expect("a file");
    for (path, what) in wrong {
        let refused = set(&run, &format!("policy={}", text(&path))).expect(1);
        assert!(refused.errors.contains(what), "{refused}");
    }
    let events = begun["events"].as_u64().expect("a count");
    let goes_on = until_plugin(&mut run, "more events", |it| over(&it["events"], events));
    assert_eq!(goes_on["file"], text(&file), "{goes_on}");
    // Another one begins anew, and fails.
    let trap = policy(folder.path(), "trap.wasm", 1, "(unreachable)", "");
    set(&run, &format!("policy={}", text(&trap))).expect(0);
    let failed = until_plugin(&mut run, "failures", |it| it["dismissed"] == true);
    assert_eq!(
        (&failed["events"], &failed["pages_chosen"]),
        (&8.into(), &0.into())
    );
    set(&run, "policy=none").expect(0);
    assert!(run.status().expect("a status")["policies"]["plugin"].is_null());
    let refused = set(&run, "policy.behind=1").expect(1);
    assert!(refused.errors.contains("has no policy file"), "{refused}");
    set(&run, "policy=auto").expect(0);
    run.signal(Signal::TERM);
    run.wait().expect(143);
}

/// Fails as soon as its parameter is not 0.
const FUSE: &str =
    "(if (i64.ne (call $parameter (i32.const 0)) (i64.const 0)) (then (unreachable)))";

#[test]
fn a_parameter_is_set_and_the_next_manager_goes_on_with_file_and_value() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let more = r#"(data (i32.const 0) "fuserate") (func (export "init")
        (drop (call $register (i32.const 0) (i32.const 4) (i64.const 0)))
        (drop (call $register (i32.const 4) (i32.const 4) (i64.const 5))))"#;
    let file = policy(folder.path(), "fuse.wasm", 1, FUSE, more);
    let mut run = endless();
    set(&run, &format!("policy={}", text(&file))).expect(0);
    until_plugin(&mut run, "events", |plugin| over(&plugin["events"], 100));
    let refused = set(&run, "policy.fuze=1").expect(1);
    assert!(refused.errors.contains("it has: fuse, rate"), "{refused}");
    set(&run, "policy.rate=1.5").expect(2);
    set(&run, "policy.rate=-9").expect(0);
    let (keeper, dead) = (run.keeper(), manager_of(run.keeper()).expect("a manager"));
    kill_process(Pid::from_raw(dead).expect("an id"), Signal::KILL).expect("it lives");
    run.until("another manager", 60, |_| successor(keeper, dead));
    let next = until_plugin(&mut run, "events", |plugin| over(&plugin["events"], 100));
    assert_eq!(next["file"], text(&file), "{next}");
    let values = [0, 1].map(|at| next["parameters"][at]["value"].as_i64());
    assert_eq!(values, [Some(0), Some(-9)], "{next}");
    assert_eq!(next["failures"], 0, "{next}");
    set(&run, "policy.fuse=1").expect(0);
    until_plugin(&mut run, "failures", |plugin| plugin["dismissed"] == true);
    run.signal(Signal::TERM);
    run.wait().expect(143);
}

#[test]
fn runs_of_a_class_have_its_policy_file_and_a_bad_one_is_refused_with_the_configuration() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let bytes = |name: &str, version, on_event: &str| {
        let path = policy(folder.path(), name, version, on_event, BEHIND_MORE);
        std::fs::read(path).expect("a file")
    };
    let (good, two) = (bytes("good.wasm", 1, BEHIND), bytes("two.wasm", 2, ""));
    let daemon = Daemon::start_with(&[], |folder| {
        let write = |name, bytes| std::fs::write(Path::new(folder).join(name), bytes);
        write("class.wasm", &good).expect("a file");
        write("two.wasm", &two).expect("a file");
        "memory = \"64M\"\n[[tier]]\nspec = \"ram\"\n[class.web]\npolicy = \"class.wasm\"\n"
            .to_owned()
    });
    let file = daemon.folder.path().join("class.wasm");
    std::fs::remove_file(&file).expect("the daemon has read it");
    let run = |class: &str, options: &[&str]| {
        Job::new(build("touch"))
            .args(["72", "--rounds", "1"])
            .options([class])
            .options(options)
            .env("UNDERCROFT_DIR", daemon.folder.path())
            .run()
            .expect(0)
    };
    let outcome = run("--daemon=web", &[]);
    let plugin = outcome.report.as_ref().expect("a report")["policies"]["plugin"].clone();
    assert_eq!(plugin["file"], text(&file), "{outcome}");
    assert!(over(&plugin["events"], 1000), "{outcome}");
    let own = folder.path().join("good.wasm");
    let outcome = run("--daemon=web", &["--policy", text(&own)]);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(
        report["policies"]["plugin"]["file"],
        text(&own),
        "{outcome}"
    );
    let outcome = run("--daemon", &[]);
    let report = outcome.report.as_ref().expect("a report");
    assert!(report["policies"]["plugin"].is_null(), "{outcome}");
    let config = daemon.folder.path().join("u.toml");
    let read = std::fs::read_to_string(&config).expect("the configuration");
    std::fs::write(&config, read.replace("class.wasm", "two.wasm")).expect("a file");
    let refused = daemon
        .ask(&["daemon", "check", "--config", text(&config)])
        .expect(78);
    for part in [
        "u.toml:5:10: class web: ",
        "two.wasm is no policy: it is for version 2",
    ] {
        assert!(refused.errors.contains(part), "{refused}");
    }
}

#[test]
fn the_command_that_bench_prints_compares_a_file_with_the_best_there_can_be() {
    turn!(beside_others, "a plain run has no policy");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = policy(folder.path(), "it's.wasm", 1, BEHIND, BEHIND_MORE);
    let bench = Job::new(undercroft()).args(["policy", "bench", text(&file)]);
    let lab = undercroft_lab().parent().expect("its folder").display();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &bench.run().expect(0).text()])
        .env("PATH", format!("{lab}:{path}"));
    let ended = shell.current_dir(folder.path()).output().expect("a shell");
    assert!(ended.status.success(), "{ended:?}");
    let out = folder.path().join("bench");
    let plot = std::fs::read_to_string(out.join("misses.svg")).expect("a plot");
    assert!(plot.contains("belady"), "{plot}");
    let results = std::fs::read(out.join("results.json")).expect("results");
    let results: Value = serde_json::from_slice(&results).expect("JSON");
    let outcomes = results["outcomes"].as_array().expect("a list");
    let misses = |name: &str| {
        let of = outcomes
            .iter()
            .filter(|of| of["setting"]["reclaim"] == name);
        of.filter_map(|of| of["miss_ratio"].as_f64()).sum::<f64>()
    };
    let [best, mine, lru] = ["belady", text(&file), "lru"].map(misses);
    assert!(
        0.0 < best && best <= mine && mine < lru,
        "{best} {mine} {lru}"
    );
    let absent = Job::new(undercroft())
        .args(["policy", "bench", "absent.wasm"])
        .run();
    assert!(absent.expect(2).errors.contains("No such file"));
}
