//! References a second through the engine, beside the cost of numbering the pages.
//!
//! `cargo bench -p undercroft-sim --bench sim_speed --
//! [REFERENCES [PAGES [ROUNDS [POLICY]]]]`: a Zipf 0.8 trace in memory, one core.

use std::time::Instant;

use undercroft_seeded::Random;
use undercroft_sim::setup::Memory;
use undercroft_sim::{PageStream, Setup, simulate};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // Cargo adds `--bench`, but not when it tests: then a small size is enough.
    let is_test = words.iter().all(|word| word != "--bench");
    let mut arguments = words
        .into_iter()
        .filter(|word| !is_test && word != "--bench");
    let mut number = |default: u64, small: u64| -> u64 {
        let default = if is_test { small } else { default };
        let text = arguments.next();
        text.map_or(default, |text| text.parse().expect("a number"))
    };
    let references = number(20_000_000, 50_000);
    let (pages, rounds) = (number(1 << 18, 1 << 12), number(3, 1));
    let only = arguments.next();
    let mut random = Random::new(42);
    let packed: Vec<u64> = (0..references)
        .map(|_| {
            let uniform = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
            let rank = (uniform.powi(5) * pages as f64) as u64;
            ((rank * 7919 % pages) * 4096) << 1
        })
        .collect();
    let started = Instant::now();
    let stream = PageStream::build("zipf", &packed, 4096).expect("few pages");
    let numbering = started.elapsed();
    let rate = |time: std::time::Duration| references as f64 / time.as_secs_f64() / 1e6;
    println!("numbering {:.1} M references/s", rate(numbering));
    let streams = [stream];
    let all = ["clock", "clock_w", "lru", "active_inactive"].map(str::to_owned);
    for reclaim in only.map_or(all.to_vec(), |only| vec![only]) {
        for percent in [1.0, 10.0, 50.0] {
            let setup = Setup {
                memory: Memory::Percent(percent),
                reclaim: reclaim.clone(),
                ..Setup::default()
            };
            let mut best = 0.0f64;
            let mut miss_ratio = 0.0;
            for _ in 0..rounds {
                let started = Instant::now();
                let outcome = simulate(&streams, &setup, &mut |_| ()).expect("it runs");
                best = best.max(rate(started.elapsed()));
                miss_ratio = outcome.miss_ratio;
            }
            println!(
                "{reclaim:<16} {percent:>3} % memory: {best:>6.1} M references/s, {:.2} % misses",
                miss_ratio * 100.0
            );
        }
    }
}
