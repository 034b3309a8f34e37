//! Processor time that undercroft uses while its client sleeps with most of its memory evicted.

use super::sleeper::{self, stat_field};
use super::{Lab, progress, skip};
use crate::results::{BOUND, Better, Results, Sample, Target};
use crate::rig::{MemoryUse, Rig, TierChoice};
use anyhow::ensure;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

/// The figure must be below this; the aim is 0.
const CPU_PERCENT_MUST: f64 = 0.5;
/// The kernel's unit of the times in `/proc/PID/stat` (USER_HZ), fixed at 100 on x86-64.
const TICKS_PER_SECOND: f64 = 100.0;

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let footprint_mib = lab.options.footprint_mib.unwrap_or(lab.pick(16, 512));
    let seconds = lab.pick(2, 30);
    let limit = Bytes(footprint_mib << 19);
    let rounds = lab.rounds(1, 3);
    results.parameters = BTreeMap::from([
        ("footprint_mib".into(), footprint_mib.to_string()),
        ("limit_bytes".into(), limit.0.to_string()),
        ("seconds".into(), seconds.to_string()),
        ("must_cpu_percent".into(), CPU_PERCENT_MUST.to_string()),
    ]);
    let Some(rig) = lab.undercroft(TierChoice::Ram, limit) else {
        skip(results, "idle: needs an undercroft binary");
        return Ok(());
    };
    for round in 0..rounds {
        progress(&format!("idle: round {} of {rounds}", round + 1));
        let (percent, memory) = one_round(lab, rig.as_ref(), limit, footprint_mib, seconds)?;
        results.samples.push(Sample {
            round,
            rig: rig.name().to_owned(),
            case: "asleep".to_owned(),
            values: BTreeMap::from([
                ("cpu_percent".to_owned(), percent),
                ("must_cpu_percent".to_owned(), CPU_PERCENT_MUST),
            ]),
            memory,
        });
        results.add_bound(round, "asleep", "cpu_percent", CPU_PERCENT_MUST);
    }
    let target = Target::new(1.0, Some(0.0));
    results.compare(
        "asleep",
        "cpu_percent",
        (rig.name(), BOUND),
        Better::Lower,
        Some(target),
    );
    Ok(())
}

/// Processor time of undercroft in percent of `seconds`, while its client sleeps.
fn one_round(
    lab: &Lab,
    rig: &dyn Rig,
    limit: Bytes,
    footprint_mib: u64,
    seconds: u64,
) -> anyhow::Result<(f64, MemoryUse)> {
    let running = sleeper::start(lab, rig, limit, footprint_mib, seconds + 4)?;
    std::thread::sleep(Duration::from_secs(1)); // the eviction that the fill started ends meanwhile
    let managers = sleeper::family(running.id());
    ensure!(
        !managers.is_empty(),
        "no process of undercroft was found below process {}",
        running.id()
    );
    let (before, began) = (ticks(&managers), Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let used = (ticks(&managers) - before) as f64 / TICKS_PER_SECOND;
    let percent = 100.0 * used / began.elapsed().as_secs_f64();
    let outcome = sleeper::finish(running, rig)?;
    Ok((percent, outcome.memory))
}

/// utime + stime of all threads of these processes, in ticks.
fn ticks(processes: &[u32]) -> u64 {
    processes
        .iter()
        .map(|pid| stat_field(*pid, 13).unwrap_or(0) + stat_field(*pid, 14).unwrap_or(0))
        .sum()
}
