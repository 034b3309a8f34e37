//! A live run, recorded and replayed in the simulator: the same engine must fault and evict as
//! often.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use undercroft_tests::{
    Job, MIB, Outcome, build, find, one_at_a_time, plain_only, say, skip, undercroft,
};

const LIMIT: u64 = 32 * MIB;

/// How far the simulation may be off, in percent: if it makes room as the live manager does (seen:
/// 1.3; once 2.8 beside two builds, which fails), and if it makes room at the recorded times (seen:
/// 0.0; 0.1 on a machine with four busy loops).
const APART_MAX: [(&str, f64); 2] = [("ahead", 2.0), ("traced", 0.5)];

/// The same with prefetch (seen: 1.1 and 0.0).
const AHEAD_APART_MAX: [(&str, f64); 2] = [("ahead", 3.0), ("traced", 0.5)];

/// In a loop larger than memory, at the recorded times (seen: 0.0). One page in another order makes
/// it 8 or more.
const LOOP_APART_MAX: f64 = 1.0;

/// For processes that share a limit, and for a program that drops memory, at the recorded times
/// (seen: 0.0 to 0.2).
const SHARED_APART_MAX: f64 = 0.5;

/// For fork children that write what they share (seen: 0.0 in 36 of 40 runs, else -0.2 to -0.9).
const FORKED_APART_MAX: f64 = 2.0;

/// The same, if the manager gave up commands (seen: 0.0 to -1.3, with 1 to 5 of them). It does so
/// when an agent has no CPU for 25 ms. The trace does not have all that decides which pages leave
/// then, and when.
const GIVEN_UP_APART_MAX: f64 = 3.0;

/// Pages that may be on their way out together.
const EVICTION_BATCH: f64 = 64.0;

/// Fills twice its memory, reads it at random, writes some of it often and loops over it, under
/// `policy` with `more` options. Then the simulator replays the recorded run.
fn recorded_and_replayed(policy: &str, more: &[&str]) {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (live, trace) = recorded(
        folder.path(),
        &[
            "random:read:1:20000",
            "zipf:write:1:60000",
            "seq:read:1:40000",
        ],
        &[&["--policy", policy, "--prefetch", "none"], more].concat(),
    );
    let number = |name: &str| live.number(name).expect("a number in the report");
    let faults = faults(&live);
    assert!(faults > 20_000.0, "{faults} faults prove nothing");

    let info = json(["trace", "info", &trace, "--json"]);
    let recorded = float(&info["references"]["total"]);
    let evicted = float(&info["movements"]["evicted"]);
    // A page that could not be installed at once is faulted on again, and the report counts it
    // again.
    assert!(
        (recorded / faults - 1.0).abs() < 0.001,
        "{recorded} of {faults} faults were recorded"
    );
    let recalled = float(&info["movements"]["evicted_recalled"]);
    assert_eq!(recalled, number("counters.recalled"));
    let returned = float(&info["movements"]["returned"]) + recalled;
    // The last batch of the program may be in one of the two counts only.
    let swapped_out = number("pages.swapped_out");
    assert!(
        (evicted - returned - swapped_out).abs() <= EVICTION_BATCH,
        "{evicted} evictions recorded, {returned} of them returned; {swapped_out} in the report"
    );

    for (room, most) in APART_MAX {
        let outcome = simulated(&trace, policy, Some("none"), room);
        let apart = |live: f64, simulated: &str| {
            let simulated = float(&outcome[simulated]);
            (simulated, 100.0 * (simulated / live - 1.0))
        };
        let (misses, by) = apart(faults, "misses");
        let left = evicted - returned;
        let (evictions, evictions_by) = apart(left, "evictions");
        say(&format!(
            "{policy} {more:?}, room {room}: {faults} faults live, {misses} simulated ({by:+.2} %); \
             {left} evictions, {evictions} ({evictions_by:+.2} %)"
        ));
        assert!(by.abs() < most, "{misses} simulated, {faults} live");
        assert!(
            evictions_by.abs() < most,
            "{evictions} simulated, {left} live"
        );
    }
    check_defaults_replay_the_run(&trace, policy);
    check_turns(&trace, 10_000);
}

/// Options that are not given come from the trace, so the simulator replays the run. Under another
/// policy it decides for itself.
fn check_defaults_replay_the_run(trace: &str, policy: &str) {
    let plain = ["sim", "--json", "--tier", "nvme", "--trace", trace];
    let as_it_was = json(plain)["outcomes"][0].take();
    let asked = simulated(trace, policy, None, "traced");
    assert_eq!(as_it_was["setting"]["room"], "traced");
    assert_eq!(as_it_was["setting"]["reclaim"], policy);
    for name in ["misses", "evictions", "prefetched"] {
        assert_eq!(as_it_was[name], asked[name], "{name}");
    }
    let other = json(plain.into_iter().chain(["--reclaim", "random"]));
    assert_eq!(other["outcomes"][0]["setting"]["room"], "after");
}

/// A live run of `phases` under the limit with `options`, and its trace in `folder`.
fn recorded(folder: &Path, phases: &[&str], options: &[&str]) -> (Outcome, String) {
    let path = |name: &str| folder.join(name).display().to_string();
    let (spill, trace) = (path("spill"), path("live.uct"));
    let phases = phases.iter().flat_map(|phase| ["--phase", phase]);
    let live = Job::new(undercroft())
        .args(["lab-touch", "--mode", "patterns", "--footprint-mib", "64"])
        .args(phases)
        .options(["--trace", &trace])
        .options(options)
        .limit(LIMIT)
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .run()
        .expect(0);
    (live, trace)
}

/// Faults of the program. A page that is wanted back before it is stored is one, too.
fn faults(live: &Outcome) -> f64 {
    ["faults.first_touch", "faults.swap_in", "counters.recalled"]
        .map(|name| live.number(name).expect("a number in the report"))
        .iter()
        .sum()
}

/// The simulator's result for a trace under the limit of the run, less a 64th, in which pages
/// waited to be written.
fn simulated(trace: &str, policy: &str, prefetch: Option<&str>, room: &str) -> Value {
    let limit = (LIMIT - LIMIT / 64).to_string();
    let mut words = vec!["sim", "--json", "--tier", "nvme", "--trace", trace];
    words.extend(["--memory", &limit, "--reclaim", policy, "--room", room]);
    words.extend(prefetch.iter().flat_map(|name| ["--prefetch", name]));
    json(words)["outcomes"][0].take()
}

/// Pages that were prefetched live raise no fault when they are used. If the simulation prefetches
/// the same pages, its faults, evictions and prefetched pages are those of the run. If it
/// prefetches none, they are not.
fn recorded_with_prefetch(recorded_with: &str, policies: &[&str]) {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    for policy in policies {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (live, trace) = recorded(
            folder.path(),
            &[
                "zipf:write:1:20000",
                "seq:read:1:30000",
                "random:read:1:5000",
                "seq:read:1:10000",
            ],
            &["--policy", policy, "--prefetch", recorded_with],
        );
        let number = |name: &str| live.number(name).expect("a number in the report");
        let came = number("pages.prefetched");
        assert!(came > 10_000.0, "{came} prefetched pages prove nothing");
        let expected = [faults(&live), number("pages.swapped_out"), came];
        let apart = |prefetch: Option<&str>, room: &str| {
            let outcome = simulated(&trace, policy, prefetch, room);
            let of = ["misses", "evictions", "prefetched"].map(|name| float(&outcome[name]));
            let by = std::array::from_fn(|at| 100.0 * (of[at] / expected[at] - 1.0));
            let [misses, evictions, came]: [f64; 3] = by;
            say(&format!(
                "{policy}, recorded with {recorded_with}, {prefetch:?}, room {room}: of \
                 {expected:?} faults, evictions, prefetched pages {misses:+.2} %, {evictions:+.2} %, {came:+.2} %"
            ));
            by
        };
        for (room, most) in AHEAD_APART_MAX {
            let by = apart(None, room);
            assert!(by.iter().all(|by| by.abs() < most), "{by:?}");
        }
        // The check can fail: without the prefetched pages the replay is another run. A prefetcher
        // that is asked anew may come near by chance.
        let by = apart(Some("none"), "ahead");
        assert!(by.iter().all(|by| *by < -10.0), "none: {by:?}");
        apart(Some(recorded_with), "ahead");
        check_defaults_replay_the_run(&trace, policy);
        check_turns(&trace, 3_000);
    }
}

/// The place of a client's page, by the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    In,
    Out,
    /// In memory, and a fork relative is charged for it.
    Shared,
    /// At the fork, the parent's page was out or on its way out.
    OutAtFork,
}

/// The places of every client's pages, by the lines of the trace so far.
#[derive(Default)]
struct Places<'a> {
    clients: HashMap<&'a str, HashMap<&'a str, Place>>,
    parents: HashMap<&'a str, &'a str>,
    /// A recalled page: its fault must come next.
    recalled: Option<(&'a str, &'a str)>,
    faults_after_eviction: u64,
}

impl<'a> Places<'a> {
    /// Follows one line. Panics if it contradicts the lines before.
    fn follow(&mut self, line: &'a str) {
        use Place::{In, Out, OutAtFork, Shared};
        let words: Vec<&str> = line.split(',').collect();
        let [_, page, what, client, thread] = words[..] else {
            panic!("{line}");
        };
        let before = self.clients.entry(client).or_default().get(page).copied();
        let was = |any: &[Option<Place>]| {
            assert!(any.contains(&before), "{line}: it was {before:?}");
        };
        if let Some(recalled) = self.recalled.take() {
            let fault = matches!(what, "R" | "W") && (client, page) == recalled;
            assert!(fault, "{line}: {recalled:?} was recalled");
        }
        let now = match what {
            "R" | "W" => {
                was(&[None, Some(Out), Some(OutAtFork)]);
                self.faults_after_eviction += u64::from(before.is_some());
                In
            }
            "locked" => return,
            // A use in memory moves nothing.
            "accessed" => return was(&[Some(In), Some(Shared)]),
            "found" => {
                was(&[None, Some(Shared), Some(OutAtFork)]);
                In
            }
            "shared" => {
                was(&[None]);
                Shared
            }
            "ahead" => {
                was(&[None, Some(Out), Some(OutAtFork)]);
                In
            }
            "returned" => {
                was(&[Some(Out)]);
                self.share_with_children(client, page);
                In
            }
            "recalled" => {
                was(&[Some(Out)]);
                self.recalled = Some((client, page));
                return;
            }
            "clean" => {
                was(&[Some(Out)]);
                Out
            }
            "evicted" | "named" => {
                was(&[Some(In)]);
                Out
            }
            "dropped" => {
                assert!(before.is_some(), "{line}: the page is unknown");
                self.clients.entry(client).or_default().remove(page);
                return;
            }
            "forked" => return self.fork(line, client, thread),
            "ended" => {
                self.parents.remove(client);
                let had = self.clients.remove(client).unwrap_or_default();
                assert!(!had.is_empty(), "{line}: the client is unknown");
                return;
            }
            other => panic!("{line}: {other}"),
        };
        self.clients.entry(client).or_default().insert(page, now);
    }

    /// A page of `client` never left. So children that were forked meanwhile have it, too.
    fn share_with_children(&mut self, client: &str, page: &str) {
        let parents = &self.parents;
        let theirs = |of: &str| {
            let mut line = std::iter::successors(Some(of), |of| parents.get(of).copied());
            line.any(|of| of == client)
        };
        for (_, places) in self.clients.iter_mut().filter(|(of, _)| theirs(of)) {
            if let Some(place @ Place::OutAtFork) = places.get_mut(page) {
                *place = Place::Shared;
            }
        }
    }

    fn fork(&mut self, line: &str, child: &'a str, parent: &'a str) {
        use Place::{In, Out, OutAtFork, Shared};
        let had = self.clients.get(parent).cloned().unwrap_or_default();
        assert!(!had.is_empty(), "{line}: the parent is unknown");
        self.parents.insert(child, parent);
        let theirs = had.into_iter().map(|(page, place)| match place {
            In | Shared => (page, Shared),
            Out | OutAtFork => (page, OutAtFork),
        });
        let empty = self.clients.insert(child, theirs.collect());
        let empty = empty.is_none_or(|places| places.is_empty());
        assert!(empty, "{line}: the child is there already");
    }
}

/// Each page comes and leaves in turn. A page that fork relatives share leaves only when it counts
/// as its owner's.
///
/// * `least`: pages that come back after they left; fewer prove nothing.
fn check_turns(trace: &str, least: u64) {
    let cat = Job::new(undercroft())
        .args(["trace", "cat", "--movements", trace])
        .run()
        .expect(0);
    let text = cat.text();
    let mut places = Places::default();
    text.lines().skip(1).for_each(|line| places.follow(line));
    let faults = places.faults_after_eviction;
    assert!(faults > least, "{faults}");
}

/// Faults and evictions that a replay of `trace` must have.
///
/// Evictions are those of the trace. The replay takes the same record, so it does not matter when a
/// process ended. The report may differ by the batch that each process had in hand when it ended;
/// how often that happens depends on how busy the machine is.
fn expected(live: &Outcome, trace: &str) -> [f64; 2] {
    let info = json(["trace", "info", "--json", trace]);
    let of = |what: &str| float(&info["movements"][what]);
    let left = of("evicted") - of("returned") - of("evicted_recalled");
    let reported = live
        .number("pages.swapped_out")
        .expect("a number in the report");
    let in_hand = EVICTION_BATCH * (1.0 + of("ended"));
    assert!(
        (left - reported).abs() <= in_hand,
        "{left} pages left by the trace, {reported} by the report"
    );
    [faults(live), left]
}

/// How far the replay of a run of fork children may be off, in percent.
fn forked_apart_max(live: &Outcome) -> f64 {
    let given_up = live.number("manager.commands_given_up").expect("a report");
    if given_up == 0.0 {
        return FORKED_APART_MAX;
    }
    say(&format!(
        "{given_up} commands were given up: the replay may be {GIVEN_UP_APART_MAX} % off"
    ));
    GIVEN_UP_APART_MAX
}

fn json<'a>(words: impl IntoIterator<Item = &'a str>) -> Value {
    let text = Job::new(undercroft()).args(words).run().expect(0).text();
    serde_json::from_str(&text).expect("JSON")
}

fn float(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn clock_faults_as_often_in_the_simulator_and_pages_come_and_leave_in_turn() {
    recorded_and_replayed("clock", &[]);
}

/// The policy also weighs how long a page was away. So the pages in memory at the start matter.
#[test]
fn active_inactive_faults_as_often_in_the_simulator_and_pages_come_and_leave_in_turn() {
    recorded_and_replayed("active_inactive", &[]);
}

/// The policies learn of the same uses live and simulated.
#[test]
fn policies_with_access_bits_fault_as_often_in_the_simulator() {
    if !undercroft_tests::has_access_bits(
        "policies_with_access_bits_fault_as_often_in_the_simulator",
    ) {
        return;
    }
    for policy in ["clock", "lru", "active_inactive"] {
        recorded_and_replayed(policy, &["--access-scan", "20ms"]);
    }
}

/// The policy keeps a part of a loop that is larger than memory. Every page decides which part, and
/// the trace has them all.
#[test]
fn the_part_of_a_loop_that_is_kept_is_the_same_in_the_simulator() {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let policy = "active_inactive";
    for prefetch in ["none", "readahead:8"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (live, trace) = recorded(
            folder.path(),
            &["seq:write:1:40000", "seq:read:1:80000"],
            &["--policy", policy, "--prefetch", prefetch],
        );
        let expected = expected(&live, &trace);
        let apart = |room: &str| {
            let outcome = simulated(&trace, policy, None, room);
            let of = ["misses", "evictions"].map(|name| float(&outcome[name]));
            let by: [f64; 2] = std::array::from_fn(|at| 100.0 * (of[at] / expected[at] - 1.0));
            say(&format!(
                "loop, {prefetch}, room {room}: of {expected:?} faults and evictions {:+.2} %, {:+.2} %",
                by[0], by[1]
            ));
            by
        };
        let by = apart("traced");
        assert!(by.iter().all(|by| by.abs() < LOOP_APART_MAX), "{by:?}");
        apart("ahead"); // pages leave at other moments, so another part is kept
        check_defaults_replay_the_run(&trace, policy);
        check_turns(&trace, 10_000);
    }
}

/// Processes that share a limit share a policy, live and simulated.
#[test]
fn processes_that_share_a_limit_fault_as_often_in_the_simulator() {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let binary = undercroft().display().to_string();
    let one = |mib: u64, phase: &str| {
        format!("'{binary}' lab-touch --footprint-mib {mib} --phase {phase} >/dev/null")
    };
    let both = format!(
        "{} & {}; wait",
        one(24, "random:read:1:60000"),
        one(48, "zipf:write:1:60000")
    );
    for policy in ["clock", "active_inactive"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (spill, trace) = (path("spill"), path("live.uct"));
        let live = Job::new("sh")
            .args(["-c", &both])
            .options(["--trace", &trace, "--prefetch", "none", "--policy", policy])
            .limit(LIMIT)
            .tier(&format!("file:{spill},size=1G"))
            .timeout(100)
            .run()
            .expect(0);
        let expected = expected(&live, &trace);
        let outcome = json(["sim", "--json", "--trace", &trace])["outcomes"][0].take();
        assert_eq!(outcome["setting"]["room"], "traced");
        let of = ["misses", "evictions"].map(|name| float(&outcome[name]));
        let by: [f64; 2] = std::array::from_fn(|at| 100.0 * (of[at] / expected[at] - 1.0));
        say(&format!(
            "{policy}, two processes: of {expected:?} faults, evictions {:+.2} %, {:+.2} %",
            by[0], by[1]
        ));
        assert!(expected[0] > 5_000.0, "{expected:?} prove nothing");
        assert!(by.iter().all(|by| by.abs() < SHARED_APART_MAX), "{by:?}");
    }
}

/// Fork children inherit pages. They get frames of their own when their parents write or drop a
/// page, or when it leaves the parents.
#[test]
fn fork_children_fault_as_often_in_the_simulator() {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip("live_and_simulated", "a plain run has no faults of ours");
    }
    let loads: [(&str, &[&str], u64); 2] = [
        ("heirs", &["40", "6"], 24),
        ("forks", &["40", "2", "2"], 64),
    ];
    let policies = ["clock", "active_inactive"].into_iter();
    let all = policies.flat_map(|policy| loads.map(|load| (policy, load)));
    for (policy, (program, args, limit)) in all {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (spill, trace) = (path("spill"), path("live.uct"));
        let live = Job::new(build(program))
            .args(args)
            .options(["--trace", &trace, "--prefetch", "none", "--policy", policy])
            .limit(limit * MIB)
            .tier(&format!("file:{spill},size=1G"))
            .timeout(100)
            .run()
            .expect(0);
        assert_eq!(live.text().trim(), "right");
        let expected = expected(&live, &trace);
        let info = json(["trace", "info", "--json", &trace]);
        let of = |what: &str| float(&info["movements"][what]);
        // The trace has two forks of each program: the first children of `forks` exist before
        // anything is managed.
        assert!(of("forks") >= 2.0 && of("ended") >= 3.0, "{info}");
        let outcome = json(["sim", "--json", "--trace", &trace])["outcomes"][0].take();
        let of = ["misses", "evictions"].map(|name| float(&outcome[name]));
        let by: [f64; 2] = std::array::from_fn(|at| 100.0 * (of[at] / expected[at] - 1.0));
        say(&format!(
            "{policy}, {program}: of {expected:?} faults, evictions {:+.2} %, {:+.2} %",
            by[0], by[1]
        ));
        check_turns(&trace, 10_000);
        assert!(expected[0] > 10_000.0, "{expected:?} prove nothing");
        assert!(
            by.iter().all(|by| by.abs() < forked_apart_max(&live)),
            "{by:?}"
        );
    }
}

/// Lookups at random in a dictionary, between walks over it and a list.
const PYTHON: &str = "
import random
random.seed(1)
words = {'key%d' % n: n for n in range(400000)}
numbers = list(range(1000, 1001000))
for turn in range(3):
    found = sum(words['key%d' % random.randrange(400000)] for _ in range(60000))
    length = sum(len(word) for word in words)
    total = sum(numbers)
";

/// A program that grows by copying. It drops the memory that it copied from, evicted pages
/// included. A new touch there gives zeros, not the evicted bytes.
#[test]
fn a_program_that_drops_memory_faults_as_often_in_the_simulator() {
    let name = "a_program_that_drops_memory_faults_as_often_in_the_simulator";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no faults of ours");
    }
    let Some(python) = find("python3") else {
        return skip(name, "no python3; on Debian: apt-get install python3");
    };
    for policy in ["clock", "active_inactive"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (spill, trace) = (path("spill"), path("live.uct"));
        let live = Job::new(&python)
            .args(["-c", PYTHON])
            .options([
                "--trace",
                &trace,
                "--prefetch",
                "readahead:8",
                "--policy",
                policy,
            ])
            .limit(48 * MIB)
            .tier(&format!("file:{spill},size=1G"))
            .timeout(100)
            .run()
            .expect(0);
        let number = |name: &str| live.number(name).expect("a number in the report");
        let [faults, left] = expected(&live, &trace);
        let expected = [faults, left, number("pages.prefetched")];
        let outcome = json(["sim", "--json", "--trace", &trace])["outcomes"][0].take();
        let of = ["misses", "evictions", "prefetched"].map(|name| float(&outcome[name]));
        let by: [f64; 3] = std::array::from_fn(|at| 100.0 * (of[at] / expected[at] - 1.0));
        say(&format!(
            "{policy}, python: of {expected:?} faults, evictions, prefetched pages {:+.2} %, {:+.2} %, {:+.2} %",
            by[0], by[1], by[2]
        ));
        assert!(expected[0] > 20_000.0, "{expected:?} prove nothing");
        assert!(by.iter().all(|by| by.abs() < SHARED_APART_MAX), "{by:?}");
    }
}

#[test]
fn prefetches_of_majority_are_repeated_in_the_simulator() {
    recorded_with_prefetch("majority", &["clock", "active_inactive"]);
}

#[test]
fn prefetches_of_readahead_are_repeated_in_the_simulator() {
    recorded_with_prefetch("readahead:8", &["lru", "active_inactive"]);
}
