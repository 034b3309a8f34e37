//! Processor time that undercroft uses while its client sleeps with most of its memory evicted.

use super::{Lab, progress, skip};
use crate::results::{Better, Results, Sample};
use crate::rig::TierChoice;
use anyhow::ensure;
use std::collections::BTreeMap;
use std::fs;
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
        let sleep = (seconds + 4).to_string();
        let command = lab.touch([
            "--footprint-mib",
            &footprint_mib.to_string(),
            "--sleep-seconds",
            &sleep,
        ]);
        let mut running = rig.set_up(limit)?.spawn(&command)?;
        while running.lines_so_far().is_empty() {
            ensure!(
                running.is_running() && !crate::interrupt::requested(),
                "the client ended before it had filled its memory"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(1)); // eviction that the fill began comes to its end
        let managers = family(running.id());
        ensure!(
            !managers.is_empty(),
            "no process of undercroft was found below process {}",
            running.id()
        );
        let (before, began) = (ticks(&managers), Instant::now());
        std::thread::sleep(Duration::from_secs(seconds));
        let used = (ticks(&managers) - before) as f64 / TICKS_PER_SECOND;
        let percent = 100.0 * used / began.elapsed().as_secs_f64();
        let outcome = running
            .finish()?
            .successful(rig.name(), "sleeping client")?;
        let values = BTreeMap::from([
            ("cpu_percent".to_owned(), percent),
            ("must_cpu_percent".to_owned(), CPU_PERCENT_MUST),
        ]);
        results.samples.push(Sample {
            round,
            rig: rig.name().into(),
            case: "asleep".into(),
            values: values.clone(),
            memory: outcome.memory.clone(),
        });
        // The bound is a rig of its own, so that the row is a ratio like every other.
        let values = BTreeMap::from([("cpu_percent".to_owned(), CPU_PERCENT_MUST)]);
        results.samples.push(Sample {
            round,
            rig: "bound".into(),
            case: "asleep".into(),
            values,
            memory: Default::default(),
        });
    }
    let target = crate::results::Target {
        must: 1.0,
        aim: Some(0.0),
    };
    results.compare(
        "asleep",
        "cpu_percent",
        (rig.name(), "bound"),
        Better::Lower,
        Some(target),
    );
    Ok(())
}

/// Processes of undercroft itself: `root` and its descendants whose executable is the same file.
pub(crate) fn family(root: u32) -> Vec<u32> {
    let executable = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let Some(program) = executable(root) else {
        return Vec::new();
    };
    let mut members = vec![root];
    let parents: Vec<(u32, u32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, stat_field(pid, 3)? as u32))
        })
        .collect();
    let mut index = 0;
    while index < members.len() {
        let parent = members[index];
        members.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(pid, _)| *pid),
        );
        index += 1;
    }
    members.retain(|pid| executable(*pid).as_ref() == Some(&program) && !is_workload(*pid));
    members
}

/// True for the workload if undercroft's own file plays it (`undercroft lab-touch`).
fn is_workload(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).nth(1) == Some(b"lab-touch")
}

/// utime + stime of all threads of these processes, in ticks.
fn ticks(processes: &[u32]) -> u64 {
    processes
        .iter()
        .map(|pid| stat_field(*pid, 13).unwrap_or(0) + stat_field(*pid, 14).unwrap_or(0))
        .sum()
}

/// Field `index` (from 0) of `/proc/PID/stat`. The name in parentheses may hold spaces, so it is
/// cut off first.
fn stat_field(pid: u32, index: usize) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace()
        .nth(index.checked_sub(2)?)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_field_reads_the_parent_of_this_process() {
        let pid = std::process::id();
        assert_eq!(
            stat_field(pid, 3),
            Some(u64::from(std::os::unix::process::parent_id()))
        );
        assert!(family(pid).contains(&pid));
    }
}
