//! The keeper, the manager, both, or all three processes of a run are killed with `kill -9` at
//! random moments under load. The program is ended, or waits. It never reads a zero or a wrong
//! byte, and nothing of the run stays.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    AGENT, Job, MIB, Process, Running, anonymous_kib, beside_others, build, build_musl, mix,
    plain_only, rounds, say, setting, skip, turn,
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
        process.command.contains("undercroft: manager of") && process.parent == run.keeper()
    })?;
    let holder = tree.iter().find(|process| process.parent == manager.pid)?;
    Some([run.keeper(), manager.pid, holder.pid])
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
        [Role::Manager] => &["--no-takeover"],
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
        skip("no musl-gcc; on Debian: apt-get install musl-tools");
    }
    let made = |kind: &&str| musl || !kind.ends_with(" musl");
    KINDS.into_iter().filter(made).collect()
}

/// Kills `victims` of as many runs as asked for, and prints the outcome.
fn deaths(name: &str, victims: &[Role]) {
    turn!(beside_others, "a plain run has no process to kill");
    let kinds = kinds();
    let count = setting("UNDERCROFT_TEST_DEATHS", rounds(1, 2) * KINDS.len() as u64);
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

/// Pages that may be lost with a process: those of a batch, and of a group that was set aside.
const LOST_MAX: u64 = 2 * 64;

/// Longest time in which the memory of all processes is above the limit. An agent that stays alone
/// in its memory keeps it there for ever.
const ABOVE_MAX: Duration = Duration::from_secs(4);

/// Longest time in which memory has no agent. The last sharer stays for 2 s.
const BARE_MAX: Duration = Duration::from_millis(1500);

/// How long something has been so.
#[derive(Debug, Default)]
struct Spell {
    since: Option<Instant>,
    longest: Duration,
}

impl Spell {
    fn note(&mut self, is_so: bool) {
        if is_so {
            let since = *self.since.get_or_insert_with(Instant::now);
            self.longest = self.longest.max(since.elapsed());
        } else {
            self.since = None;
        }
    }
}

/// Wrong states seen in the processes and agents of a run of `programs/sharers.c`.
#[derive(Debug, Default)]
struct Watch {
    /// All memory together is above the limit.
    above: Spell,
    /// The memory of two processes has one agent.
    bare: Spell,
}

impl Watch {
    /// Each memory has an agent, or should have one; two processes that share it count twice for a
    /// moment. Pages of files do not count.
    fn look(&mut self, run: &Running) {
        let (mut bytes, mut counts) = ([0; 2], [0; 2]);
        let ours = |of: &Process| of.command == AGENT || of.command.contains("sharers");
        for process in run.tree().into_iter().filter(ours) {
            let at = usize::from(process.command == AGENT);
            bytes[at] += anonymous_kib(process.pid) << 10;
            counts[at] += usize::from(process.state != 'Z');
        }
        let counts = counts.map(|count| count.min(2));
        self.bare.note(counts[0] > counts[1]);
        let bytes = bytes[0].max(bytes[1]);
        self.above.note(bytes > LIMIT + LIMIT / 2);
    }
}

/// A process goes away in the middle of its evictions, and a child shares its memory. The child
/// reads its bytes, or SIGBUS for the pages that were lost with the process. It never reads zeros.
fn shares_memory_of_a_process_that(goes: &str) {
    let _turn = beside_others();
    let ends: u64 = rounds(4, 12);
    let mut job = Job::new(build("sharers"))
        .args([goes, &FOOTPRINT_MIB.to_string(), &ends.to_string()])
        .timeout(180);
    if !plain_only() {
        // The report is written when the last agent has ended.
        job = job.limit(LIMIT).tier("ram").options(["--wait-all"]);
    }
    let mut run = job.start();
    let mut watch = Watch::default();
    while run.is_alive() {
        watch.look(&run);
        std::thread::sleep(Duration::from_millis(100));
    }
    let outcome = run.wait().expect(0);
    say(&format!(
        "sharers, {goes}: above the limit for {:?}, without an agent for {:?} at most",
        watch.above.longest, watch.bare.longest
    ));
    if !plain_only() {
        assert!(watch.above.longest < ABOVE_MAX, "{watch:?} {outcome}");
        assert!(watch.bare.longest < BARE_MAX, "{watch:?} {outcome}");
    }
    let [verified, errors] = outcome.numbers().map(|number| number as u64);
    say(&format!(
        "sharers, {goes}: {verified} pages verified after {ends} ends, {errors} times SIGBUS, \
         0 zero or wrong bytes"
    ));
    // Every page is verified twice after each end.
    assert_eq!(verified, ends * 2 * FOOTPRINT_MIB * 256, "{outcome}");
    if plain_only() {
        assert_eq!(errors, 0, "{outcome}");
        return;
    }
    assert!(errors <= ends * 2 * LOST_MAX, "{outcome}");
    outcome.expect_swapped(400.0 * ends as f64);
}

#[test]
fn a_child_that_shares_memory_reads_no_zeros_after_its_parent_executes() {
    shares_memory_of_a_process_that("exec");
}

#[test]
fn a_process_that_shares_memory_reads_no_zeros_after_the_other_is_killed() {
    shares_memory_of_a_process_that("die");
}

/// An agent ends before its process, in order: but not if the memory lives on.
#[test]
fn a_process_that_shares_memory_keeps_its_agent_after_the_other_has_ended() {
    shares_memory_of_a_process_that("exit");
}

/// A process that announced itself has its userfaultfd open in its own agent. So it waits for ever
/// and reads no zeros. (A child that did not announce itself has none, and would read zeros.)
#[test]
fn keeper_manager_and_holder_killed_leave_an_announced_process_waiting() {
    let name = "keeper, manager and holder killed";
    turn!(beside_others, "a plain run has no process to kill");
    let count = setting("UNDERCROFT_TEST_DEATHS", rounds(3, 6));
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
        // Its agent, which is no process of its own to the program, waits with it.
        let left = || {
            let mut left = death.run.left();
            left.retain(|process| process.command != AGENT);
            left
        };
        let mut waits = left();
        while waits.len() > 1 && begin.elapsed() < FREED {
            std::thread::sleep(Duration::from_millis(50));
            waits = left();
        }
        // One process at most is left, and waits. If none is left, the victim that died last had
        // seen another die, and ended the program.
        assert!(waits.len() <= 1, "{}: {waits:#?}", death.story);
        waiting += waits.len();
        while death.run.is_alive() && begin.elapsed() < FREED {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(!death.run.is_alive(), "{}", death.story);
    }
    say(&format!(
        "{name}: {count} runs: {waiting} programs wait, the others were ended; 0 zero or wrong bytes"
    ));
}

/// A debugger, a profiler or a scanner maps the run's library too. It is no process of the run.
#[test]
fn a_bystander_that_maps_the_shim_lives_on() {
    turn!(beside_others, "a plain run has no shim");
    let mut run = Job::new("sleep").arg("60").limit(LIMIT).start();
    let shim = run.until("the shim", 60, |run| {
        run.tree().iter().find_map(|process| {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid)).ok()?;
            let line = maps.lines().find(|line| line.ends_with("_shim.so"))?;
            Some(line.split_whitespace().last()?.to_owned())
        })
    });
    // Python's `mmap` keeps a copy of the descriptor; the mapping is what counts.
    let script = "import mmap, sys; f = open(sys.argv[1], 'rb'); \
                  m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); \
                  print('mapped', flush=True); sys.stdin.read(1)";
    let mut bystander = std::process::Command::new("python3")
        .args(["-c", script, &shim])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("python3");
    let mut said = [0; 6];
    let out = bystander.stdout.as_mut().expect("a pipe");
    std::io::Read::read_exact(out, &mut said).expect("it has mapped the file");
    let [keeper, ..] = run.until("manager and holder", 60, cast);
    let pid = Pid::from_raw(keeper).expect("a process id");
    kill_process(pid, Signal::KILL).expect("it is ours to kill");
    let begin = Instant::now();
    while run.is_alive() || !run.left().is_empty() {
        assert!(begin.elapsed() < GONE, "{:#?}", run.left());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(bystander.try_wait().expect("our child").is_none(), "killed");
    drop(bystander.stdin.take());
    assert!(bystander.wait().expect("our child").success());
}
