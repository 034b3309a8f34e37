//! Predicts throughput from what one operation costs: asymptotic bounds of a closed queueing
//! network.
//!
//! ```text
//! throughput(N threads) <= min(N / solo, servers / demand of each station)
//! ```
//! `solo` is the time of an operation when one thread runs alone. A station is what operations
//! queue for: threads of the manager, the engine's lock, CPUs. Its demand is its busy time divided
//! by the operations done meanwhile (the utilization law), so pages that were in memory count, too.
//! Source: Denning and Buzen, The Operational Analysis of Queueing Network Models, 1978. The bounds
//! know no waiting below saturation, no cache that threads share, and no memory bus.

/// Most threads of a kind that has some a CPU (`manager/src/lib.rs`).
const NUMBERED_MAX: usize = 8;

/// The evictor sleeps while an agent moves pages out for it: they are one station.
const EVICTOR: &str = "uc-evict";
const AGENT: &str = "uc-agent";

/// A program's operations on one machine, by what they cost.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Demands {
    /// Nanoseconds of an operation of a lone thread.
    pub(super) solo_ns: f64,
    /// Kinds of threads of the manager: name, how many there are, nanoseconds of all an operation.
    /// A name that ends in `-N` is of a kind that has more threads with more CPUs.
    pub(super) kinds: Vec<(String, usize, f64)>,
    /// CPUs of the machine with that many threads.
    pub(super) cpus: usize,
    /// Nanoseconds for which an operation holds the engine's lock.
    pub(super) lock_ns: f64,
    /// CPU nanoseconds of an operation, of the program and the manager.
    pub(super) cpu_ns: f64,
}

/// A prediction, and what bounds it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ceiling {
    pub(super) ops_per_second: f64,
    pub(super) by: String,
}

/// Throughput of `threads` threads on a machine with `cpus` CPUs.
pub(super) fn bound(demands: &Demands, threads: usize, cpus: usize) -> Ceiling {
    let rate = |servers: usize, demand_ns: f64, by: String| Ceiling {
        ops_per_second: servers as f64 * 1e9 / demand_ns,
        by,
    };
    let agents = demands.kinds.iter().find(|(name, ..)| name == AGENT);
    let agents_ns = agents.map_or(0.0, |(_, _, demand)| *demand);
    let kinds = demands.kinds.iter().map(|(name, seen, demand)| {
        if name.ends_with("-N") {
            let servers = seen * cpus / demands.cpus.max(1);
            rate(servers.clamp(1, NUMBERED_MAX), *demand, name.clone())
        } else if name == EVICTOR {
            let by = format!("{EVICTOR}, which waits for {AGENT}");
            rate(*seen, demand + agents_ns, by)
        } else {
            rate(*seen, *demand, name.clone())
        }
    });
    let rest = [
        rate(1, demands.lock_ns, "engine's lock".to_owned()),
        rate(cpus, demands.cpu_ns, "CPUs".to_owned()),
    ];
    let alone = rate(threads, demands.solo_ns, "its own threads".to_owned());
    kinds
        .chain(rest)
        .filter(|station| station.ops_per_second.is_finite())
        .fold(alone, |least, station| {
            if station.ops_per_second < least.ops_per_second {
                station
            } else {
                least
            }
        })
}

/// Nanoseconds for which an operation holds a lock, from how often threads found it taken: that
/// share of the time it is held, by others. 0 if nothing is known.
pub(super) fn lock_demand(locks: f64, found_taken: f64, ops_per_second: f64) -> f64 {
    let demand = found_taken / locks * 1e9 / ops_per_second;
    if demand.is_finite() { demand } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demands() -> Demands {
        Demands {
            solo_ns: 14_000.0,
            kinds: vec![
                ("uc-agent".into(), 1, 2_000.0),
                ("uc-fault-N".into(), 2, 8_000.0),
                ("uc-evict".into(), 1, 4_000.0),
            ],
            cpus: 2,
            lock_ns: 1_500.0,
            cpu_ns: 20_000.0,
        }
    }

    #[test]
    fn few_threads_are_bound_by_themselves_many_by_the_busiest_station() {
        let check = |threads, cpus, rate: f64, by| {
            let bound = bound(&demands(), threads, cpus);
            assert_eq!((bound.ops_per_second.round(), &bound.by[..]), (rate, by));
        };
        check(1, 16, 71_429.0, "its own threads");
        check(2, 16, 142_857.0, "its own threads");
        check(3, 16, 166_667.0, "uc-evict, which waits for uc-agent");
        check(32, 16, 166_667.0, "uc-evict, which waits for uc-agent");
        check(32, 2, 100_000.0, "CPUs");
    }

    #[test]
    fn more_evictors_leave_the_lock_and_a_free_station_bounds_nothing() {
        let mut many = demands();
        many.kinds[0].2 = 500.0;
        many.kinds[2] = ("uc-evict".into(), 8, 6_000.0);
        assert_eq!(bound(&many, 16, 64).by, "engine's lock");
        many.lock_ns = 0.0;
        assert_eq!(bound(&many, 16, 64).by, "uc-fault-N");
        many.kinds[1].2 = 0.0;
        assert_eq!(bound(&many, 16, 64).by, "its own threads");
    }

    #[test]
    fn a_lock_that_a_third_finds_taken_is_held_a_third_of_the_time() {
        assert_eq!(lock_demand(3000.0, 1000.0, 100_000.0).round(), 3333.0);
        assert_eq!(lock_demand(0.0, 0.0, 100_000.0), 0.0);
        assert_eq!(lock_demand(10.0, 1.0, 0.0), 0.0);
    }
}
