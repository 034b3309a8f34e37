//! The keeper, the manager, both, or all three processes of a run are killed with `kill -9` at
//! random moments under load. The program is ended, or waits. It never reads a zero or a wrong
//! byte, and nothing of the run stays.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    Job, MIB, Running, beside_others, build, build_musl, mix, plain_only, say, setting, skip,
};

const FOOTPRINT_MIB: u64 = 24;
const LIMIT: u64 = 12 * MIB;

/// Longest time until nothing of a run is left. On an idle machine it takes milliseconds.
const GONE: Duration = Duration::from_secs(20);

/// Time in which a process that was killed frees its memory.
const FREED: Duration = Duration::from_secs(5);

/// How the program makes its children (`programs/orphans.c`). The last two are linked to musl,
/// where no child announces itself.
const KINDS: [&str; 9] = [
    "alone",
    "fork",
    "clone",
    "vm",
    "_Fork",
    "vfork",
    "sysfork",
    "fork musl",
    "vfork musl",
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Role {
    Keeper,
    Manager,
    Holder,
}

/// The processes of a run, when all of them exist.
fn cast(run: &Running) -> Option<[i32; 3]> {
    let tree = run.tree();
    let manager = tree.iter().find(|process| {
        process.command.contains("undercroft manager") && process.parent == run.pid()
    })?;
    let holder = tree.iter().find(|process| process.parent == manager.pid)?;
    Some([run.pid(), manager.pid, holder.pid])
}

/// Words verified so far: by parents and by children.
fn verified(evidence: &Path) -> Option<[u64; 2]> {
    let bytes = std::fs::read(evidence.with_extension("count")).ok()?;
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    Some([word(0)?, word(8)?])
}

struct Death {
    run: Running,
    evidence: std::path::PathBuf,
    _scratch: tempfile::TempDir,
    story: String,
}

/// Starts a run under verified load and kills `victims`, in that order.
fn kill(seed: u64, kind: &str, victims: &[Role]) -> Death {
    let tier = ["ram", "file:SPILL,size=256M"][usize::from(mix(seed ^ 5).is_multiple_of(4))];
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let spill = scratch.path().join("spill");
    let (kind, program) = match kind.strip_suffix(" musl") {
        Some(kind) => (kind, build_musl("orphans").expect("asked before")),
        None => (kind, build("orphans")),
    };
    // Another manager would take over from one that dies alone.
    let options: &[&str] = match victims {
        [Role::Manager] => &["--takeovers-max", "0"],
        _ => &[],
    };
    let mut run = Job::new(program)
        .arg(kind)
        .arg(FOOTPRINT_MIB.to_string())
        .arg(&evidence)
        .arg("90")
        .limit(LIMIT)
        .options(options)
        .tier(&tier.replace("SPILL", &spill.to_string_lossy()))
        .timeout(60)
        .start();
    let ids = run.until("manager and holder", 60, cast);
    run.until("load", 60, |_| {
        let [parents, children] = verified(&evidence)?;
        (parents > 0 && (children > 0 || kind == "alone")).then_some(())
    });
    std::thread::sleep(Duration::from_micros(mix(seed) % 120_000));
    for role in victims {
        let pid = Pid::from_raw(ids[*role as usize]).expect("a process id");
        kill_process(pid, Signal::KILL).expect("it is ours to kill");
    }
    Death {
        run,
        evidence,
        _scratch: scratch,
        story: format!("seed {seed}, {kind} in {tier}, {victims:?} killed"),
    }
}

impl Death {
    /// The errors that the program has found: there must be none, at any time.
    fn nothing_wrong(&self) {
        let seen = std::fs::read_to_string(&self.evidence).unwrap_or_default();
        assert!(seen.is_empty(), "{}: {seen}", self.story);
    }

    /// Waits until nothing of the run is left. Returns how long that took.
    fn all_gone(&mut self) -> Duration {
        let begin = Instant::now();
        loop {
            let over = !self.run.is_alive();
            let left = self.run.left();
            if over && left.is_empty() {
                break;
            }
            assert!(
                begin.elapsed() < GONE,
                "{}: still there: {left:#?}\n{}",
                self.story,
                self.run.errors()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        self.nothing_wrong();
        begin.elapsed()
    }
}

/// Kinds of children that can be made on this machine.
fn kinds() -> Vec<&'static str> {
    let musl = build_musl("orphans").is_some();
    if !musl {
        skip(
            "deaths, musl",
            "no musl-gcc; on Debian: apt-get install musl-tools",
        );
    }
    let made = |kind: &&str| musl || !kind.ends_with(" musl");
    KINDS.into_iter().filter(made).collect()
}

/// Kills `victims` of as many runs as asked for, and prints the outcome.
fn deaths(name: &str, victims: &[Role]) {
    let _turn = beside_others();
    if plain_only() {
        return skip(name, "a plain run has no process to kill");
    }
    let kinds = kinds();
    let count = setting("UNDERCROFT_TEST_DEATHS", 2 * KINDS.len() as u64);
    let first = setting("UNDERCROFT_TEST_DEATHS_FROM", 0);
    let (begin, mut slowest) = (Instant::now(), Duration::ZERO);
    for seed in first..first + count {
        let kind = kinds[seed as usize % kinds.len()];
        // Chance also decides which of two dies first.
        let mut victims = victims.to_vec();
        let turn = mix(seed ^ 9) as usize % victims.len();
        victims.rotate_left(turn);
        slowest = slowest.max(kill(seed, kind, &victims).all_gone());
    }
    say(&format!(
        "{name}: {count} runs in {:.1?}: 0 zero or wrong bytes, nothing left after {slowest:.1?} at most",
        begin.elapsed()
    ));
}

#[test]
fn keeper_killed_ends_everything_and_shows_no_wrong_byte() {
    deaths("keeper killed", &[Role::Keeper]);
}

#[test]
fn manager_killed_ends_everything_and_shows_no_wrong_byte() {
    deaths("manager killed", &[Role::Manager]);
}

#[test]
fn keeper_and_manager_killed_end_everything_and_show_no_wrong_byte() {
    deaths("keeper and manager killed", &[Role::Keeper, Role::Manager]);
}

#[test]
fn keeper_and_holder_killed_end_everything_and_show_no_wrong_byte() {
    deaths("keeper and holder killed", &[Role::Keeper, Role::Holder]);
}

#[test]
fn holder_killed_ends_the_program() {
    deaths("holder killed", &[Role::Holder]);
}

/// Rounds of `programs/sharers.c`.
const SHARED: u64 = 12;

/// Pages that may be lost with a process: those of a batch, and of a group that was set aside.
const LOST_MAX: u64 = 2 * 64;

/// A process goes away in the middle of its evictions, and a child shares its memory. The child
/// reads its bytes, or SIGBUS for the pages that were lost with the process. It never reads zeros.
fn shares_memory_of_a_process_that(goes: &str) {
    let _turn = beside_others();
    let mut job = Job::new(build("sharers"))
        .args([goes, &FOOTPRINT_MIB.to_string(), &SHARED.to_string()])
        .timeout(180);
    if !plain_only() {
        job = job.limit(LIMIT).tier("ram");
    }
    let outcome = job.run().expect(0);
    let [verified, errors] = outcome.numbers().map(|number| number as u64);
    say(&format!(
        "sharers, {goes}: {verified} pages verified after {SHARED} ends, {errors} times SIGBUS, \
         0 zero or wrong bytes"
    ));
    // Every page is verified twice after each end.
    assert_eq!(verified, SHARED * 2 * FOOTPRINT_MIB * 256, "{outcome}");
    if plain_only() {
        assert_eq!(errors, 0, "{outcome}");
        return;
    }
    assert!(errors <= SHARED * 2 * LOST_MAX, "{outcome}");
    outcome.expect_swapped(5000.0);
}

#[test]
fn a_child_that_shares_memory_reads_no_zeros_after_its_parent_executes() {
    shares_memory_of_a_process_that("exec");
}

#[test]
fn a_process_that_shares_memory_reads_no_zeros_after_the_other_is_killed() {
    shares_memory_of_a_process_that("die");
}

/// A process that announced itself has its userfaultfd open in its own agent. So it waits for ever
/// and reads no zeros. (A child that did not announce itself has none, and would read zeros.)
#[test]
fn keeper_manager_and_holder_killed_leave_an_announced_process_waiting() {
    let name = "keeper, manager and holder killed";
    let _turn = beside_others();
    if plain_only() {
        return skip(name, "a plain run has no process to kill");
    }
    let count = setting("UNDERCROFT_TEST_DEATHS", 6);
    let mut waiting = 0;
    for seed in 0..count {
        let mut victims = vec![Role::Manager, Role::Holder, Role::Keeper];
        victims.rotate_left(seed as usize % 3);
        let mut death = kill(seed, "alone", &victims);
        let mut before = verified(&death.evidence);
        let begin = Instant::now();
        // The program goes on until each of its threads has touched an absent page.
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = verified(&death.evidence);
            if now == before {
                break;
            }
            before = now;
            assert!(begin.elapsed() < GONE, "{}: it does not wait", death.story);
        }
        death.nothing_wrong();
        // A victim may still be on its way out: it frees its memory first.
        let begin = Instant::now();
        let mut waits = death.run.left();
        while waits.len() > 1 && begin.elapsed() < FREED {
            std::thread::sleep(Duration::from_millis(50));
            waits = death.run.left();
        }
        // One process at most is left, and waits. If none is left, the victim that died last had
        // seen another die, and ended the program.
        assert!(waits.len() <= 1, "{}: {waits:#?}", death.story);
        waiting += waits.len();
        assert!(!death.run.is_alive());
    }
    say(&format!(
        "{name}: {count} runs: {waiting} programs wait, the others were ended; 0 zero or wrong bytes"
    ));
}
