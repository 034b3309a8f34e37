//! The engine against a byte oracle: random programs, failures and interleavings in the model world.
//!
//! `ORACLE_SEED=n` runs one seed, `ORACLE_SEEDS=n` the first n seeds, `ORACLE_STEPS=n` sets the length of each.

use std::collections::BTreeMap;

use undercroft_base::{TierKind, VirtPage, VirtRange};
use undercroft_model::Random;
use undercroft_sim::storm::{Setup, TierSetup, World};

/// Seeds that fail when a bug that was found here and fixed is put back. They run first, whatever the number of seeds.
const REGRESSIONS: [(u64, &str); 3] = [
    (
        7,
        "a fork that found the ledger full left the child's claims on slots behind",
    ),
    (
        23,
        "a page put back for a fork child freed slot 0 instead of what the child retained",
    ),
    (
        0,
        "minimum residency protected every page that could leave; waiting threads waited for ever",
    ),
];

const SEEDS: u64 = 200;
const STEPS: u64 = 30_000;
const OPERATIONS_MIN: u64 = 1_000_000;

/// What the default run must have met, or it proves nothing about it.
const MUST_SEE: [&str; 33] = [
    "batch cancelled",
    "demotion: copy gone or damaged",
    "demotion: done",
    "demotion: too late",
    "dropped while loading",
    "event: fork",
    "event: remap",
    "event: remove",
    "event: unmap",
    "fault finds no room",
    "fault loads",
    "fault of a lost page",
    "fault of a resident page",
    "fault waits",
    "fault with a full ledger",
    "frame of its own",
    "install: done",
    "install: lost",
    "install: not yet",
    "ledger full at fork",
    "ledger full at remap",
    "not taken, shared by a fork",
    "not taken: busy",
    "not taken: cancelled",
    "published: clean",
    "published: clean, shared",
    "published: dropped",
    "published: fill",
    "published: moved since selected",
    "published: only a fork child has it",
    "published: put back",
    "published: put back, shared",
    "published: stored",
];

fn setup(seed: u64) -> Setup {
    let mut random = Random::new(seed ^ 0x5eed);
    let limit_pages = [24, 48, 100, 200][random.index(4)];
    let mut tiers = Vec::new();
    for at in 0..1 + random.index(3) {
        let kind = match at {
            0 => TierKind::Ram,
            _ => TierKind::File,
        };
        let pages = match random.chance(1, 4) {
            true => 20 + random.below(60),
            false => 100 + random.below(4000),
        };
        tiers.push(TierSetup {
            kind,
            pages: if kind == TierKind::Ram {
                pages.min(limit_pages)
            } else {
                pages
            },
            retain: random.chance(1, 2),
            demotes: random.chance(2, 3),
        });
    }
    if random.chance(1, 4) {
        tiers[0].kind = TierKind::File;
    }
    Setup {
        seed,
        reclaim: undercroft_policy::reclaim::NAMES[random.index(4)],
        prefetch: undercroft_policy::prefetch::NAMES[random.index(3)],
        limit_pages,
        tiers,
        ledger_chunks: [64, 64, 64, 8][random.index(4)],
        layout: random.below(11),
        failures: random.chance(2, 3),
        fault_threads: 1 + random.index(3),
        program_threads: 2 + random.index(6),
    }
}

fn run(seed: u64, steps: u64) -> World {
    let mut world = World::new(setup(seed));
    let proc = world.spawn();
    for _ in 0..world.setup.program_threads {
        world.add_thread(proc);
    }
    world.map_attached(proc, VirtRange::new(VirtPage(100), VirtPage(400)));
    world.set_failures(true);
    while world.steps < steps {
        world.step();
        if world.steps.is_multiple_of(256) {
            world.check_slots();
        }
        if world.steps.is_multiple_of(4096) {
            world.calm_down();
        }
    }
    world.end();
    world
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_access_reads_what_the_oracle_expects() {
    let steps = number("ORACLE_STEPS").unwrap_or(STEPS);
    let chosen: Option<Vec<u64>> = match (number("ORACLE_SEED"), number("ORACLE_SEEDS")) {
        (Some(seed), _) => Some(vec![seed]),
        (None, Some(count)) => Some((0..count).collect()),
        (None, None) => None,
    };
    let whole = chosen.is_none() && steps == STEPS;
    let kept = || REGRESSIONS.iter().map(|(seed, _)| *seed);
    let others = (0..SEEDS).filter(|seed| kept().all(|kept| kept != *seed));
    let seeds = chosen.unwrap_or_else(|| kept().chain(others).collect());
    println!("seeds {seeds:?}, {steps} steps each");
    let (mut accesses, mut total) = (0, 0);
    let mut failed = Vec::new();
    let mut seen = BTreeMap::<&str, u64>::new();
    for seed in seeds {
        let Ok(world) = std::panic::catch_unwind(|| run(seed, steps)) else {
            failed.push(seed);
            continue;
        };
        accesses += world.accesses;
        total += world.operations;
        for (what, times) in &world.seen {
            *seen.entry(*what).or_default() += times;
        }
    }
    println!("{seen:#?}");
    assert!(failed.is_empty(), "failing seeds: {failed:?}");
    if whole {
        let missed: Vec<_> = MUST_SEE
            .iter()
            .filter(|what| !seen.contains_key(*what))
            .collect();
        assert!(missed.is_empty(), "never met: {missed:?}");
        assert!(total >= OPERATIONS_MIN, "only {total} operations");
    }
    println!("{total} operations, {accesses} accesses, all bytes as expected");
}
