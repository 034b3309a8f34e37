//! Reclaim policies of simulations: those of runs, and rules of papers, which see each use here. A
//! run has these as policy files, which hear of uses by scans (`policies/clock.c`).

mod clock;
mod clock_w;

use undercroft_policy::reclaim::{self, Reclaim};

const OF_RUNS: &[&str] = reclaim::NAMES;

/// The names of all; those of runs are first.
pub const NAMES: [&str; OF_RUNS.len() + 2] = {
    let mut all = ["clock"; OF_RUNS.len() + 2];
    let mut at = 0;
    while at < OF_RUNS.len() {
        all[at] = OF_RUNS[at];
        at += 1;
    }
    all[at + 1] = "clock_w";
    all
};

/// Makes a policy without history; `None`: there is none of this name.
pub fn by_name(name: &str) -> Option<Box<dyn Reclaim>> {
    match name {
        "clock" => Some(Box::new(clock::Clock::default())),
        "clock_w" => Some(Box::new(clock_w::ClockW::default())),
        name => reclaim::by_name(name).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_makes_a_policy_and_stands_once() {
        for name in NAMES {
            assert!(by_name(name).is_some(), "{name}");
            assert_eq!(NAMES.iter().filter(|of| **of == name).count(), 1, "{name}");
        }
        assert!(by_name("fifo").is_none());
    }
}
