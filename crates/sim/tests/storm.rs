//! Storms by seed.
//!
//! `STORM_SEED=n` runs one seed, `STORM_SEEDS=n` the first n seeds, `STORM_OPS=n` sets the length of each.

use undercroft_sim::storm::{Setup, minimise, run, run_seeds};

const SEEDS: u64 = 2000;
const OPERATIONS: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_byte_is_what_the_oracle_expects_in_every_storm() {
    let operations = number("STORM_OPS").unwrap_or(OPERATIONS);
    let seeds = match (number("STORM_SEED"), number("STORM_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, count) => 0..count.unwrap_or(SEEDS),
    };
    let start = std::time::Instant::now();
    let mut failed = Vec::new();
    let tally = run_seeds(
        seeds,
        operations,
        2,
        |_| (),
        |ended| {
            if let Some(failure) = &ended.failure {
                println!(
                    "seed {}: {} {} at step {}",
                    ended.recipe.setup.seed, failure.place, failure.message, failure.step
                );
                failed.push(ended.recipe.setup.seed);
            }
            failed.len() < 60
        },
    );
    println!("{:#?}", tally.seen);
    println!(
        "{} operations, {} steps, {:?}",
        tally.operations,
        tally.steps,
        start.elapsed()
    );
    if let Some(seed) = failed.first() {
        let ended = run(&Setup::of_seed(*seed), operations);
        println!("{:#?}", ended.failure);
        if let Some(small) = minimise(&ended, 2000) {
            println!(
                "{}{:#?} after {} replays",
                small.ended.recipe, small.ended.failure, small.replays
            );
        }
        panic!("{failed:?}");
    }
}
