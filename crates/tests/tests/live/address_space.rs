//! `asfuzz` at a quarter of its memory (60 % where RAM is the only tier): random address-space
//! operations against an oracle of every byte. `UNDERCROFT_TEST_OPS`: operations of each case;
//! `UNDERCROFT_TEST_SEEDS`: more cases.

use std::path::{Path, PathBuf};
use std::time::Duration;

use undercroft_tests::{
    Job, MIB, Outcome, beside_others, build, find, has_access_bits, plain_only, programs_folder,
    say, setting, skip,
};

const FOOTPRINT_MIB: u64 = 64;

/// With fewer operations some kind may rightly not come up.
const OPS_FOR_EVERY_KIND: u64 = 2_000;

#[derive(Clone, Copy)]
struct Case<'a> {
    seed: u64,
    ops: u64,
    threads: u64,
    tiers: &'static [&'static str],
    /// Percent of the arenas the program may keep in memory.
    percent: u64,
    more: &'a [&'a str],
}

fn fuzz(case: Case<'_>) {
    fuzz_with(&[], &[], case);
}

/// `before`: words in front of `undercroft`. `options`: more options of `undercroft run`.
fn fuzz_with(before: &[&str], options: &[&str], case: Case<'_>) {
    let _turn = beside_others();
    let folder = programs_folder();
    // 70 to 90 % of the arenas are mapped and mostly touched. Side threads have some more.
    let limit = case.threads * FOOTPRINT_MIB * MIB * case.percent / 100;
    let mut job = Job::new(build("asfuzz"))
        .args(["--seed", &case.seed.to_string()])
        .args(["--ops", &case.ops.to_string()])
        .args(["--threads", &case.threads.to_string()])
        .args(["--footprint-mib", &FOOTPRINT_MIB.to_string()])
        .arg("--dir")
        .arg(&folder)
        .args(case.more)
        .before(before)
        .options(options)
        .limit(limit)
        .timeout(120 + case.ops / 100);
    let spill = tempfile::tempdir_in(&folder).expect("a folder for the file tier");
    for tier in case.tiers {
        job = job.tier(&tier.replace("SPILL", &spill.path().join("spill").to_string_lossy()));
    }
    let outcome = job.run();
    let text = outcome.text();
    let wall = outcome.wall;
    assert_eq!(outcome.code(), Some(0), "seed {}: {outcome}", case.seed);
    assert!(text.contains("\nmismatches 0\n"), "{outcome}");
    let line = |name: &str| -> String {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or("?").to_owned()
    };
    assert_eq!(
        line("ops"),
        (case.ops / case.threads * case.threads).to_string(),
        "all operations were done"
    );
    say(&format!(
        "asfuzz seed {} tiers {:?} {before:?} {options:?}: {} operations (+ {} in fork children), \
         {} pages checked, {wall:.1?}",
        case.seed,
        case.tiers,
        line("ops"),
        line("child_ops"),
        line("pages_checked"),
    ));
    if case.ops >= OPS_FOR_EVERY_KIND {
        assert_every_kind_was_done(&text, case.more, &outcome);
    }
    if plain_only() {
        let refused = |line: &&str| line.starts_with("peer ") && !line.ends_with(" refused 0");
        assert_eq!(text.lines().find(refused), None, "{outcome}");
    }
    if !case.more.contains(&"--guards") && !plain_only() {
        let vanished = outcome.number("counters.vanished");
        assert_eq!(
            vanished,
            Some(0.0),
            "no page is missing without an event: {outcome}"
        );
    }
    outcome.expect_swapping(10_000.0);
}

/// Every kind of operation that the case does not exclude was carried out, and by each way of the
/// second process at least once with success.
#[track_caller]
fn assert_every_kind_was_done(text: &str, more: &[&str], outcome: &Outcome) {
    let has = |option: &str| more.contains(&option);
    let number = |word: &str| word.parse::<u64>().unwrap_or(0);
    let count = |name: &str| {
        let prefix = format!("{name} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&prefix));
        value.map_or(0, |value| {
            number(value.split(' ').next().unwrap_or_default())
        })
    };
    let mut missing = Vec::new();
    let mut wants = |name: String, done: u64| {
        if done == 0 {
            missing.push(name);
        }
    };
    for name in [
        "pages_checked",
        "segv_seen",
        "vforks",
        "clones",
        "pins",
        "breaks",
    ] {
        wants(name.to_owned(), count(name));
    }
    let mut only_if = |included: bool, names: &[&str]| {
        for name in names.iter().filter(|_| included) {
            wants((*name).to_owned(), count(name));
        }
    };
    only_if(!has("--no-fork"), &["forks", "child_ops", "sharers_done"]);
    only_if(!has("--no-fork"), &CHILDREN);
    only_if(!has("--no-side"), &BESIDE);
    only_if(!has("--no-signals"), &["alarms"]);
    only_if(has("--guards"), &["guards"]);
    only_if(has("--realtime"), &["realtime_threads"]);
    for line in text.lines() {
        if let Some((name, counts)) = line
            .strip_prefix("peer ")
            .and_then(|line| line.split_once(": "))
        {
            let (asked, refused) = counts.split_once(" refused ").unwrap_or(("0", "0"));
            if name != "cgroup freezer" || has("--freezer") {
                wants(format!("peer {name}"), number(asked) - number(refused));
            }
        }
        if let Some((name, chosen)) = line
            .strip_prefix("op ")
            .and_then(|line| line.rsplit_once(' '))
            && (name != "guard" || has("--guards"))
        {
            wants(format!("op {name}"), number(chosen));
        }
    }
    let ways = text.lines().filter(|line| line.starts_with("peer "));
    assert_eq!(
        ways.count(),
        8,
        "the second process tells of its ways: {outcome}"
    );
    assert!(missing.is_empty(), "never done: {missing:?}: {outcome}");
}

/// Work of the threads beside the one that changes the address space.
const BESIDE: [&str; 5] = [
    "increments",
    "futex_rounds",
    "storm_threads",
    "spawned",
    "overs",
];

/// Ways of fork children (`programs/asfuzz_child.h`). Only root changes the user.
const CHILDREN: [&str; 6] = [
    "children plain",
    "children closefrom",
    "children seccomp",
    "children setuid",
    "children exec_by_thread",
    "children outlived",
];

/// As [`fuzz`]. Real-time threads fault, too, and the second process freezes the program.
fn fuzz_frozen(case: Case<'_>) {
    let freezer = Freezer::new();
    let path = freezer.as_ref().map(|freezer| freezer.0.to_string_lossy());
    let mut more = case.more.to_vec();
    more.push("--realtime");
    if let Some(path) = &path {
        more.extend(["--freezer", path]);
    }
    fuzz(Case {
        more: &more,
        ..case
    });
}

/// A cgroup (version 2) of its own, to be frozen in; removed with this value.
struct Freezer(PathBuf);

impl Freezer {
    /// `None`, with a message, if this machine has no such cgroup.
    fn new() -> Option<Freezer> {
        let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let version_2 = |root: &&&str| Path::new(root).join("cgroup.controllers").exists();
        let name = format!("undercroft-test-{}", std::process::id());
        let made = roots.iter().find(version_2).and_then(|root| {
            let path = Path::new(root).join(name);
            std::fs::create_dir(&path).ok().map(|()| Freezer(path))
        });
        if made.is_none() {
            skip("no cgroup of version 2 can be made: nothing is frozen");
        }
        made
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        say(&format!("{} stays behind", self.0.display()));
    }
}

const FILE: &[&str] = &["file:SPILL,size=1G"];
const BOTH: &[&str] = &["ram,max=8M", "file:SPILL,size=1G"];
/// A pool as large as half the limit, over a file that takes what does not compress.
const WIDE: &[&str] = &["ram", "file:SPILL,size=1G"];
const RAM: &[&str] = &["ram"];

fn ops(default: u64) -> u64 {
    setting("UNDERCROFT_TEST_OPS", default)
}

/// RAM as the only tier. Much of what `asfuzz` writes does not compress and can only stay. A
/// quarter of the memory would not hold it, so the program gets 60 %.
#[test]
fn address_space_survives_on_the_ram_tier_alone() {
    fuzz(Case {
        seed: 1,
        ops: ops(3_000),
        threads: 2,
        tiers: RAM,
        percent: 60,
        more: &[],
    });
}

/// Also frozen, and with real-time threads.
#[test]
fn address_space_survives_on_ram_over_file_with_four_workers() {
    fuzz_frozen(Case {
        seed: 2,
        ops: ops(2_600),
        threads: 4,
        tiers: WIDE,
        percent: 25,
        more: &[],
    });
}

/// Also frozen, and with real-time threads.
#[test]
fn address_space_survives_on_the_file_tier() {
    fuzz_frozen(Case {
        seed: 3,
        ops: ops(2_600),
        threads: 2,
        tiers: FILE,
        percent: 25,
        more: &[],
    });
}

#[test]
fn address_space_survives_on_a_small_pool_over_file() {
    fuzz(Case {
        seed: 4,
        ops: ops(2_600),
        threads: 2,
        tiers: BOTH,
        percent: 25,
        more: &[],
    });
}

/// A single worker, its fork children, and nothing beside them: the case to try first when another
/// one fails.
#[test]
fn address_space_survives_with_one_thread() {
    let more = &["--no-side", "--no-signals"];
    fuzz(Case {
        seed: 5,
        ops: ops(3_700),
        threads: 1,
        tiers: WIDE,
        percent: 25,
        more,
    });
}

#[test]
fn address_space_survives_each_policy_and_prefetcher() {
    let cases = [
        ("active_inactive", "none", "waterfall"),
        ("active_inactive", "readahead", "waterfall"),
        ("lru", "majority", "waterfall"),
        ("lru", "none", "waterfall"),
        ("auto", "majority", "worth"),
    ];
    for (number, (policy, prefetch, placement)) in cases.into_iter().enumerate() {
        fuzz_with(
            &[],
            &[
                "--policy",
                policy,
                "--prefetch",
                prefetch,
                "--placement",
                placement,
            ],
            Case {
                seed: 20 + number as u64,
                ops: ops(1_500),
                threads: 2,
                tiers: WIDE,
                percent: 25,
                more: &[],
            },
        );
    }
}

/// As on many CPUs: the agent moves pages while those before are compressed by several threads.
#[test]
fn address_space_survives_groups_that_overlap() {
    fuzz_with(
        &[],
        &["--compressors", "4"],
        Case {
            seed: 30,
            ops: ops(1_500),
            threads: 4,
            tiers: WIDE,
            percent: 25,
            more: &[],
        },
    );
}

/// Pages are scanned while they move, fork, vanish and come back.
#[test]
fn address_space_survives_scans_of_access_bits() {
    if !has_access_bits() {
        return;
    }
    for (seed, policy) in [(24, "lru"), (25, "active_inactive")] {
        fuzz_with(
            &[],
            &["--policy", policy, "--access-scan", "10ms"],
            Case {
                seed,
                ops: ops(1_500),
                threads: 2,
                tiers: WIDE,
                percent: 25,
                more: &[],
            },
        );
    }
}

/// Guard markers raise no event: a pager that trusts events alone would bring discarded bytes back.
#[test]
fn address_space_survives_guard_pages() {
    fuzz(Case {
        seed: 6,
        ops: ops(2_600),
        threads: 2,
        tiers: WIDE,
        percent: 25,
        more: &["--guards"],
    });
}

/// With one CPU the fault threads, the evictor and the program share it: slower, never stuck.
#[test]
fn address_space_survives_on_one_cpu() {
    if find("taskset").is_none() {
        return skip("no taskset");
    }
    fuzz_with(
        &["taskset", "-c", "0"],
        &[],
        Case {
            seed: 7,
            ops: ops(2_200),
            threads: 2,
            tiers: WIDE,
            percent: 25,
            more: &[],
        },
    );
}

/// More seeds, for a long run: `UNDERCROFT_TEST_SEEDS=100`.
#[test]
fn address_space_survives_more_seeds() {
    let seeds = setting("UNDERCROFT_TEST_SEEDS", 0);
    if seeds == 0 {
        skip("UNDERCROFT_TEST_SEEDS is not set");
    }
    for seed in 100..100 + seeds {
        let tiers = [RAM, FILE, BOTH, WIDE][seed as usize % 4];
        fuzz(Case {
            seed,
            ops: ops(20_000),
            threads: 1 + seed % 4,
            tiers,
            percent: if tiers == RAM { 60 } else { 25 },
            more: &[],
        });
    }
}

/// The oracle itself: one page is spoiled without its knowledge. It must notice, whatever the page
/// was replaced by.
#[test]
fn oracle_notices_a_spoiled_page() {
    let _turn = beside_others();
    for kind in ["zero", "stale", "foreign"] {
        let outcome = Job::new(build("asfuzz"))
            .args(["--ops", "2000", "--footprint-mib", "16", "--sabotage", kind])
            .run()
            .expect(3);
        assert!(outcome.errors.contains("MISMATCH"), "{outcome}");
        assert!(
            outcome.errors.to_lowercase().contains(kind),
            "the report names a {kind} page: {outcome}"
        );
    }
    if plain_only() {
        skip("everything ran plain: UNDERCROFT_TEST_PLAIN is set");
    }
}
