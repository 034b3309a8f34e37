//! Prints what each policy costs per call, in ns: `cargo run --release -p undercroft-policy
//! --example policy_cost`.
//!
//! `select` takes pages out; they come back as `Returned` before they are touched. Argument: pages
//! (default 65536, at least 64; larger numbers show cache misses). Compare figures of one run only:
//! absolute times of a shared machine say little.

use std::hint::black_box;
use std::time::Instant;

use undercroft_base::{PageCount, PageNo, SpaceId, ThreadId, VirtPage};
use undercroft_policy::prefetch::{self, FaultSeen};
use undercroft_policy::reclaim::{self, Arrival, Verdict};

const BATCH: usize = 64;
const ROUNDS: u32 = 5;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// ns per call in the fastest of several rounds. `work` returns how many calls it made.
fn fastest(mut work: impl FnMut() -> usize) -> f64 {
    let round = |_| {
        let start = Instant::now();
        let calls = work();
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn main() {
    let argument = std::env::args().nth(1);
    let pages: Option<u32> = argument.and_then(|text| text.parse().ok());
    let pages = pages.unwrap_or(65536).max(BATCH as u32);
    let mut order: Vec<u32> = (0..pages).collect();
    let mut random = Random(88172645463325252);
    for index in (1..pages as usize).rev() {
        order.swap(index, (random.next() % (index as u64 + 1)) as usize);
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
        let mut times = [f64::INFINITY; 4];
        for _ in 0..ROUNDS {
            let mut number = 0;
            let mut once = |index: usize, work: &mut dyn FnMut() -> usize| {
                let start = Instant::now();
                let calls = work();
                let time = start.elapsed().as_nanos() as f64 / calls as f64;
                times[index] = times[index].min(time);
            };
            once(0, &mut || {
                for &page in &order {
                    number += 1;
                    let distance = PageCount(number % 7 * u64::from(pages) / 4);
                    policy.insert(PageNo(page), Arrival::SwapIn { distance });
                }
                order.len()
            });
            let mut victims = Vec::with_capacity(order.len());
            once(2, &mut || {
                for _ in 0..order.len() / BATCH {
                    let mut verdict = |_| Verdict::Take;
                    policy.select(BATCH, 8 * BATCH, &mut verdict, &mut victims);
                }
                victims.len()
            });
            for &page in &victims {
                policy.insert(page, Arrival::Returned);
            }
            once(1, &mut || {
                for &page in order.iter().rev() {
                    policy.touch(PageNo(page), true);
                }
                order.len()
            });
            once(3, &mut || {
                for &page in &order {
                    policy.remove(PageNo(page));
                }
                order.len()
            });
        }
        let [insert, touch, select, remove] = times;
        println!("{name:<16} {insert:>7.1} {touch:>7.1} {select:>7.1} {remove:>7.1}");
    }
    println!(
        "\n{:<16} {:>7} {:>7} {:>7} {:>7}",
        "on_fault", "scan", "4 scans", "random", "8 thr."
    );
    for name in prefetch::NAMES {
        let scan = |streams: u64, threads: u32| {
            fastest(|| {
                let Ok(mut prefetch) = prefetch::by_name(name) else {
                    return 1;
                };
                let mut at: Vec<u64> = (1..=streams).map(|stream| stream << 20).collect();
                for number in 0..200_000u32 {
                    let stream = number as usize % at.len();
                    let window = prefetch.on_fault(FaultSeen {
                        space: SpaceId(1),
                        page: VirtPage(at[stream]),
                        thread: ThreadId(number % threads),
                        first_touch: false,
                    });
                    at[stream] += 1 + u64::from(window.count);
                }
                200_000
            })
        };
        let at_random = fastest(|| {
            let Ok(mut prefetch) = prefetch::by_name(name) else {
                return 1;
            };
            for _ in 0..200_000 {
                black_box(prefetch.on_fault(FaultSeen {
                    space: SpaceId(1),
                    page: VirtPage(random.next() >> 40),
                    thread: ThreadId(1),
                    first_touch: false,
                }));
            }
            200_000
        });
        let (one, four, threads) = (scan(1, 1), scan(4, 1), scan(8, 8));
        println!("{name:<16} {one:>7.1} {four:>7.1} {at_random:>7.1} {threads:>7.1}");
    }
}
