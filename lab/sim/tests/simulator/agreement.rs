//! The engine's CLOCK and LRU miss exactly where a textbook's do, and where libCacheSim's do.

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use std::collections::{HashMap, VecDeque};

use undercroft_seeded::Random;
use undercroft_sim::setup::Memory;
use undercroft_sim::{MemoryTrace, PageStream, Setup, simulate};
use undercroft_trace::{Access, Reference};

/// The traces of `bench/libcachesim/compare.py`, page by page. The arithmetic there is the same.
fn pages(name: &str, count: u64, footprint: u64) -> Vec<u64> {
    let mut random = Random::new(42);
    (0..count)
        .map(|at| match name {
            // P(rank < x) = (x / footprint)^(1/5), roughly Zipf 0.8. Multiplied in this order there
            // too.
            "zipf" => {
                let uniform = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
                let skewed = uniform * uniform * uniform * uniform * uniform;
                let rank = (skewed * footprint as f64) as u64;
                rank * 7919 % footprint
            }
            "loop" => at % footprint,
            // A hot tenth, and a scan through everything every fourth reference.
            "scan" => match at % 4 {
                0 => at / 4 % footprint,
                _ => random.below(footprint / 10),
            },
            other => panic!("no trace {other}"),
        })
        .collect()
}

fn trace(pages: &[u64]) -> MemoryTrace {
    let references = pages.iter().enumerate().map(|(at, page)| {
        Ok::<_, ()>(Reference {
            time: at as u64,
            address: page * 4096,
            access: Access::Read,
            client: 0,
            thread: 0,
        })
    });
    MemoryTrace::collect("test", 4096, &[], references).unwrap()
}

fn ours(pages: &[u64], reclaim: &str, frames: u64) -> u64 {
    let trace = trace(pages);
    let stream = PageStream::build("test", &trace.clients[0].1, 4096).unwrap();
    let setup = Setup {
        memory: Memory::Pages(frames),
        reclaim: reclaim.to_owned(),
        ..Setup::default()
    };
    simulate(&[stream], &setup, &mut |_| ()).unwrap().misses
}

/// CLOCK as the PCM paper §III-4 and libCacheSim define it: one bit, clear at insertion, and a hand
/// that goes round.
fn naive_clock(pages: &[u64], frames: usize) -> u64 {
    let mut ring: VecDeque<u64> = VecDeque::new();
    let mut used: HashMap<u64, bool> = HashMap::new();
    let mut misses = 0;
    for page in pages {
        if let Some(bit) = used.get_mut(page) {
            *bit = true;
            continue;
        }
        misses += 1;
        while ring.len() >= frames {
            let front = ring.pop_front().unwrap();
            if std::mem::replace(used.get_mut(&front).unwrap(), false) {
                ring.push_back(front);
            } else {
                used.remove(&front);
            }
        }
        ring.push_back(*page);
        used.insert(*page, false);
    }
    misses
}

fn naive_lru(pages: &[u64], frames: usize) -> u64 {
    let mut order: Vec<u64> = Vec::new();
    let mut misses = 0;
    for page in pages {
        match order.iter().position(|other| other == page) {
            Some(at) => _ = order.remove(at),
            None => {
                misses += 1;
                if order.len() == frames {
                    order.remove(0);
                }
            }
        }
        order.push(*page);
    }
    misses
}

#[test]
fn clock_and_lru_miss_as_a_textbooks_do() {
    for name in ["zipf", "loop", "scan"] {
        let pages = pages(name, 30_000, 600);
        for frames in [1, 2, 7, 60, 300, 599, 600] {
            let clock = naive_clock(&pages, frames);
            assert_eq!(
                ours(&pages, "clock", frames as u64),
                clock,
                "{name} {frames}"
            );
            let lru = naive_lru(&pages, frames);
            assert_eq!(ours(&pages, "lru", frames as u64), lru, "{name} {frames}");
        }
    }
}

#[test]
fn nothing_misses_less_than_belady_and_random_is_worse_on_a_skewed_trace() {
    let pages = pages("zipf", 40_000, 1000);
    for frames in [10, 100, 500] {
        let best = ours(&pages, "belady", frames);
        for reclaim in ["clock", "clock_w", "lru", "active_inactive", "random"] {
            let misses = ours(&pages, reclaim, frames);
            assert!(misses >= best, "{reclaim} {misses} < {best}");
            if reclaim == "random" {
                assert!(misses > ours(&pages, "lru", frames));
            }
        }
    }
}

/// The counts of libCacheSim's package, compared with ours. Its CLOCK has one bit, clear at
/// insertion.
#[test]
fn clock_and_lru_miss_as_libcachesims_do() {
    let counted = include_str!("../data/libcachesim.txt");
    let mut traces: HashMap<&str, Vec<u64>> = HashMap::new();
    let mut rows = 0;
    for line in counted.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, policy, frames, misses] = fields[..] else {
            panic!("not a row: {line}");
        };
        let (frames, theirs): (u64, u64) = (frames.parse().unwrap(), misses.parse().unwrap());
        let pages = traces
            .entry(name)
            .or_insert_with(|| pages(name, 300_000, 10_000));
        let misses = ours(pages, policy, frames);
        let points = misses.abs_diff(theirs) as f64 * 100.0 / pages.len() as f64;
        assert!(
            points <= 0.1,
            "{line}: ours {misses}, {points} points apart"
        );
        rows += 1;
    }
    assert_eq!(rows, 36, "three traces, two policies, six sizes");
}
