//! Prints what each policy costs per call, in ns: `cargo bench -p undercroft-policy --bench
//! policy_cost -- [PAGES]`.
//!
//! `select` takes pages out; they come back as `Returned` before they are touched. Argument: pages
//! (default 65536, at least 64; larger numbers show cache misses). Compare figures of one run only:
//! absolute times of a shared machine say little.

use std::hint::black_box;
use std::time::Instant;

use undercroft_base::{PageCount, PageNo, SpaceId, ThreadId, VirtPage};
use undercroft_policy::prefetch::neighbours::{Around, Now, REACH};
use undercroft_policy::prefetch::{self, FaultSeen};
use undercroft_policy::reclaim::{self, Arrival, Reclaim, Verdict};
use undercroft_seeded::Random;

const BATCH: usize = 64;
const ROUNDS: u32 = 5;
const FAULTS: u32 = 200_000;

/// ns per call in the fastest of several rounds. `work` returns how many calls it made.
fn fastest(mut work: impl FnMut() -> usize) -> f64 {
    let round = |_| {
        let start = Instant::now();
        let calls = work();
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

/// The best time of each of four steps, in ns per call.
struct Steps([f64; 4]);

impl Steps {
    /// Times one step; `work` returns how many calls it made.
    fn time(&mut self, step: usize, work: impl FnOnce() -> usize) {
        let start = Instant::now();
        let calls = work();
        let time = start.elapsed().as_nanos() as f64 / calls as f64;
        self.0[step] = self.0[step].min(time);
    }
}

/// ns per `insert`, `touch`, `select` (for each victim) and `remove`.
fn reclaim_costs(policy: &mut dyn Reclaim, order: &[u32]) -> [f64; 4] {
    let mut steps = Steps([f64::INFINITY; 4]);
    for _ in 0..ROUNDS {
        let mut number = 0;
        steps.time(0, || {
            for &page in order {
                number += 1;
                let distance = PageCount(number % 7 * order.len() as u64 / 4);
                policy.insert(PageNo(page), Arrival::SwapIn { distance });
            }
            order.len()
        });
        let mut victims = Vec::with_capacity(order.len());
        steps.time(2, || {
            for _ in 0..order.len() / BATCH {
                let mut verdict = |_| Verdict::Take;
                policy.select(BATCH, 8 * BATCH, &mut verdict, &mut victims);
            }
            victims.len()
        });
        for &page in &victims {
            policy.insert(page, Arrival::Returned);
        }
        steps.time(1, || {
            for &page in order.iter().rev() {
                policy.touch(PageNo(page), true);
            }
            order.len()
        });
        steps.time(3, || {
            for &page in order {
                policy.remove(PageNo(page));
            }
            order.len()
        });
    }
    steps.0
}

/// A fault on `page` by `thread`, not a first touch.
fn fault(page: u64, thread: u32) -> FaultSeen {
    FaultSeen {
        space: SpaceId(1),
        page: VirtPage(page),
        thread: ThreadId(thread),
        first_touch: false,
    }
}

/// ns per fault of `streams` scans by `threads` threads.
fn scan_cost(name: &str, streams: u64, threads: u32) -> f64 {
    fastest(|| {
        let Ok(Some(mut prefetch)) = prefetch::by_name(name) else {
            return 1;
        };
        let mut at: Vec<u64> = (1..=streams).map(|stream| stream << 20).collect();
        for number in 0..FAULTS {
            let stream = number as usize % at.len();
            let window = prefetch.on_fault(fault(at[stream], number % threads));
            at[stream] += 1 + u64::from(window.count);
        }
        FAULTS as usize
    })
}

/// ns per fault on random pages.
/// * `stored`: the pages around are stored, so the policy is also asked which of them come along.
fn random_cost(name: &str, stored: bool, random: &mut Random) -> f64 {
    fastest(|| {
        let Ok(Some(mut prefetch)) = prefetch::by_name(name) else {
            return 1;
        };
        for arrivals in 0..u64::from(FAULTS) {
            let fault = fault(random.bits() >> 40, 1);
            let window = black_box(prefetch.on_fault(fault));
            if stored && window.count == 0 {
                let now = Now {
                    arrivals,
                    resident_max: PageCount(1 << 16),
                    stored: PageCount(1 << 24),
                };
                let around: Around = !(1 << REACH) & ((1 << (2 * REACH + 1)) - 1);
                black_box(prefetch.off_trend(fault, now, &mut || around));
            }
        }
        FAULTS as usize
    })
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // Cargo adds `--bench`, but not when it tests: then a small size is enough.
    let pages = if words.iter().any(|word| word == "--bench") {
        let given = words.iter().find_map(|word| word.parse().ok());
        given.unwrap_or(65536).max(BATCH as u32)
    } else {
        BATCH as u32
    };
    let mut order: Vec<u32> = (0..pages).collect();
    let mut random = Random::new(1);
    for index in (1..pages as usize).rev() {
        order.swap(index, random.index(index + 1));
    }
    println!("{pages} pages, ns per call (select: per victim, batches of {BATCH})");
    println!(
        "{:<16} {:>7} {:>7} {:>7} {:>7}",
        "", "insert", "touch", "select", "remove"
    );
    for name in reclaim::NAMES {
        let Ok(mut policy) = reclaim::by_name(name) else {
            continue;
        };
        let [insert, touch, select, remove] = reclaim_costs(&mut *policy, &order);
        println!("{name:<16} {insert:>7.1} {touch:>7.1} {select:>7.1} {remove:>7.1}");
    }
    println!(
        "\n{:<16} {:>7} {:>7} {:>7} {:>7} {:>7}",
        "on_fault", "scan", "4 scans", "8 thr.", "random", "stored"
    );
    for name in prefetch::NAMES {
        let (one, four) = (scan_cost(name, 1, 1), scan_cost(name, 4, 1));
        let threads = scan_cost(name, 8, 8);
        let [alone, stored] = [false, true].map(|stored| random_cost(name, stored, &mut random));
        println!("{name:<16} {one:>7.1} {four:>7.1} {threads:>7.1} {alone:>7.1} {stored:>7.1}");
    }
}
