//! A live trace may say anything about pages, in any order: the simulation ends with an outcome or
//! an error.

use undercroft_base::BASE_PAGE_BYTES;
use undercroft_seeded::Random;
use undercroft_sim::memory_trace::{Becomes, Moved};
use undercroft_sim::setup::{Initial, Memory, Setup, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, bound, reclaim, simulate};

/// Traces tried, and threads that try them.
const TRACES: u64 = 15_000;
const THREADS: u64 = 2;

/// Entries of one.
const ENTRIES: u64 = 400;

/// Chunks of 512 pages. Their first and last pages are used, and some between.
const CHUNKS: u64 = 3;

/// Address spaces that fork each other and end.
const SPACES: u64 = 4;

/// Bytes from one address space's first page to the next one's.
const SPACE_BYTES: u64 = 1 << 47;

/// Numbers of address spaces, which need not follow one another.
const NUMBERS: [u64; SPACES as usize] = [0, 1, 7, 255];

fn page(random: &mut Random) -> u64 {
    let offset = match random.below(4) {
        0 => random.below(3),
        1 => 509 + random.below(3),
        _ => 100 + random.below(40),
    };
    random.below(CHUNKS) * 512 + offset
}

fn becomes(random: &mut Random) -> Becomes {
    match random.below(12) {
        0 => Becomes::Found,
        1 => Becomes::Dropped,
        2 => Becomes::Returned,
        3 if random.below(4) == 0 => Becomes::Locked,
        3 => Becomes::Used,
        4 => Becomes::Written,
        5 => Becomes::Unchanged,
        6 => Becomes::Ahead,
        7 if random.below(4) == 0 => Becomes::Ended,
        7 => Becomes::Forked {
            parent: (NUMBERS[random.below(SPACES) as usize] + random.below(16) / 15) as u16,
        },
        8 => Becomes::Shared,
        9 => Becomes::PassedOver,
        _ => Becomes::TakenBack,
    }
}

/// References and movements in any order. About half of them are runs of neighbours.
fn crafted(random: &mut Random) -> MemoryTrace {
    let (mut references, mut moved) = (Vec::new(), Vec::new());
    let often = 1 + random.below(4);
    let spaces = 1 + random.below(SPACES);
    for _ in 0..ENTRIES {
        let first = page(random);
        let count = match random.below(2) {
            0 => 1,
            _ => 1 + random.below(9),
        };
        let what = (random.below(4) < often).then(|| becomes(random));
        let space = NUMBERS[random.below(spaces) as usize] * SPACE_BYTES;
        if let Some(what @ (Becomes::Forked { .. } | Becomes::Ended)) = what {
            moved.push(Moved {
                after: references.len(),
                address: space,
                what,
            });
            continue;
        }
        for page in first..first + count {
            let address = space + page * BASE_PAGE_BYTES as u64;
            match what {
                Some(what) => moved.push(Moved {
                    after: references.len(),
                    address,
                    what,
                }),
                None => references.push(address << 1 | random.below(2)),
            }
        }
    }
    references.push(0);
    MemoryTrace {
        name: "crafted".to_owned(),
        granule_bytes: BASE_PAGE_BYTES as u64,
        clients: vec![("space 0".to_owned(), references)],
        moved: vec![moved],
        ..MemoryTrace::default()
    }
}

#[test]
fn crafted_live_traces_are_replayed_to_their_end_under_every_rule() {
    std::thread::scope(|scope| {
        for first in 1..=THREADS {
            scope.spawn(move || {
                (first..=TRACES)
                    .step_by(THREADS as usize)
                    .for_each(is_replayed)
            });
        }
    });
}

fn is_replayed(seed: u64) {
    let mut random = Random::new(seed);
    let trace = crafted(&mut random);
    let one_of = |random: &mut Random, names: &[&str]| {
        names[random.below(names.len() as u64) as usize].to_owned()
    };
    let bits = 1 + random.below(10);
    let pages = 1 + random.below(1 << bits);
    let tiers = [
        &["nvme"][..],
        &["nvme,layout=log"],
        &["ram,ratio=2", "nvme"],
    ][random.below(3) as usize];
    let setup = Setup {
        memory: Memory::Pages(pages),
        page_bytes: [4096, 4096, 4096, 512, 16384, 2 << 20][random.below(6) as usize],
        reclaim: one_of(&mut random, &[&reclaim::NAMES[..], &bound::NAMES].concat()),
        prefetch: one_of(&mut random, &["none", "majority"]),
        room: [SimRoom::AfterPlan, SimRoom::Ahead][random.below(2) as usize],
        tiers: tiers
            .iter()
            .map(|tier| tier.parse().expect("a tier"))
            .collect(),
        initial: [Initial::Zero, Initial::Stored][random.below(2) as usize],
        ..Setup::default()
    };
    // Prints the seed, in case the process is killed in it.
    println!("seed {seed}: {setup:?}");
    let streams = streams_of(&trace, setup.page_bytes).expect("few pages");
    let outcome = simulate(&streams, &setup, &mut |_| ()).expect("a tier without end");
    assert_eq!(outcome.references, trace.references(), "seed {seed}");
    assert!(outcome.misses <= outcome.references, "seed {seed}");
}
