//! Real programs, none of which the settings were tuned for. Each runs in parts of its own peak:
//! with the default settings, with fixed ones, with a swap file in the same DRAM, and with zram in
//! the same total DRAM.

mod list;
mod settings;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use undercroft_base::Bytes;

use super::redis_server::installed;
use super::{Lab, or_skip, progress, retrying, skip};
use crate::results::{Better, Results, Sample, Target};
use crate::rig::{CommandLine, Finished, Plain, Rig, RigError, Stdout, calibrate_with};
use list::{PROGRAMS, Program};
use settings::{DEFAULT, check, fixed, rigs};

/// Limits, in percent of a program's peak without one.
const SHARES: [u64; 3] = [75, 50, 35];

/// A run may take this multiple of its time without a limit, and at least `PATIENCE`. Then it is
/// stopped, and counts as longer than that.
const TIMES_MAX: u32 = 12;
const PATIENCE: Duration = Duration::from_secs(30);

/// The least limit: a shell and a few libraries take more than half of it.
const LEAST: Bytes = Bytes(4 << 20);

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    check(&lab.options.settings)?;
    let rounds = lab.rounds(1, 3);
    results.parameters = BTreeMap::from([
        ("rounds".into(), rounds.to_string()),
        (
            "limits".into(),
            "75, 50, 35 % of the peak of anonymous memory".into(),
        ),
        (
            "stopped after".into(),
            format!("{TIMES_MAX} times the time without a limit, at least {PATIENCE:?}"),
        ),
    ]);
    let shares: &[u64] = lab.pick(&SHARES[1..2], &SHARES);
    let only = &lab.options.only;
    let wanted = |name: &str| only.is_empty() || only.iter().any(|part| name.contains(part));
    for program in PROGRAMS.iter().filter(|program| wanted(program.name)) {
        let missing = program.needs.iter().find(|name| !installed(name));
        if let Some(missing) = missing {
            skip(
                results,
                &format!("programs: {}: {missing} is missing", program.name),
            );
            continue;
        }
        let folder = tempfile::tempdir_in(&lab.options.out).context("make a folder")?;
        let size = program.sizes[lab.pick(0, 1)];
        if !prepare(program, size, folder.path())? {
            skip(
                results,
                &format!("programs: {}: its input cannot be made here", program.name),
            );
            continue;
        }
        let command = command(program, size, folder.path());
        one_program(lab, results, program.name, &command, (rounds, shares))?;
    }
    summarize(results);
    Ok(())
}

/// The geometric means of the times against the kernel's, over all programs and limits.
fn summarize(results: &mut Results) {
    for (baseline, must, aim) in [("swapfile", 0.70, 0.5), ("zram", 0.90, 0.7)] {
        let rows = results.rows.iter();
        let ratios: Vec<f64> = rows
            .filter(|row| row.metric == "wall_seconds")
            .filter(|row| row.subject == DEFAULT && row.baseline == baseline)
            .map(|row| row.ratio)
            .collect();
        if ratios.is_empty() {
            continue;
        }
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let reached = if mean <= must {
            "reached"
        } else {
            "not reached"
        };
        results.notes.push(format!(
            "geometric mean of the time against {baseline} over {} cases: {mean:.3} (must {must}: \
             {reached}; aim {aim})",
            ratios.len()
        ));
    }
}

/// Makes the input. False if the program's own step fails.
fn prepare(program: &Program, size: u32, folder: &Path) -> anyhow::Result<bool> {
    let status = Command::new("sh")
        .args(["-ec", program.prepare, "sh", &size.to_string()])
        .current_dir(folder)
        .status()
        .context("run sh")?;
    Ok(status.success())
}

fn command(program: &Program, size: u32, folder: &Path) -> CommandLine {
    let script = format!("cd \"$2\" || exit 1\n{}", program.command);
    CommandLine {
        words: vec![
            "sh".into(),
            "-c".into(),
            script.into(),
            "sh".into(),
            size.to_string().into(),
            folder.into(),
        ],
        stdout: Stdout::Lines,
    }
}

/// All limits and rigs of one program.
fn one_program(
    lab: &Lab,
    results: &mut Results,
    name: &str,
    command: &CommandLine,
    (rounds, shares): (usize, &[u64]),
) -> anyhow::Result<()> {
    progress(&format!("programs: {name} without a limit"));
    let plain = attempt(&Plain, Bytes(0), command, Duration::from_secs(600));
    let Some(plain) = or_skip(results, plain)? else {
        return Ok(());
    };
    ensure!(
        !plain.stopped,
        "{name} does not end in ten minutes without a limit"
    );
    let peak = plain.peak;
    let most = PATIENCE.max(plain.outcome.wall * TIMES_MAX);
    let expected = plain.outcome.lines.clone();
    for share in shares {
        let limit = Bytes((peak.0 * share / 100) & !0xfff);
        let case = format!("{name} {share} %");
        if limit < LEAST {
            skip(
                results,
                &format!("programs: {case} is {limit}, less than {LEAST}"),
            );
            continue;
        }
        for round in 0..rounds {
            for rig in &rigs(lab, Bytes(peak.0 * 3 + (64 << 20))) {
                progress(&format!(
                    "programs: {case}, round {} of {rounds}, {}",
                    round + 1,
                    rig.name()
                ));
                let own = match equal_total(results, rig.as_ref(), &case, limit, command, most)? {
                    Some(own) => own,
                    None => continue,
                };
                let run = || attempt(rig.as_ref(), own, command, most);
                let Some(ran) = retrying(results, run)? else {
                    continue;
                };
                if !ran.stopped && ran.outcome.lines != expected {
                    let name = rig.name();
                    if matches!(name, "swapfile" | "zram") {
                        // The kernel may kill one process of several, and the others go on.
                        let note = format!("{case} on {name}: another output, so not compared");
                        results.notes.push(note);
                        continue;
                    }
                    let failure = format!("{case} on {name}: another output");
                    results.failures.push(failure);
                }
                if ran.stopped {
                    results
                        .notes
                        .push(format!("{case} on {}: stopped after {most:?}", rig.name()));
                }
                record(results, round, rig.name(), &case, ran);
            }
            let wall = plain.outcome.wall.as_secs_f64();
            results.add_bound(round, &case, "wall_seconds", wall);
        }
        compare(results, &case);
    }
    Ok(())
}

/// The rig's own limit with which it uses `limit` in all, found once a case. `None` if there is
/// none: the compressed pages alone may need more.
fn equal_total(
    results: &mut Results,
    rig: &dyn Rig,
    case: &str,
    limit: Bytes,
    command: &CommandLine,
    most: Duration,
) -> anyhow::Result<Option<Bytes>> {
    if !rig.stores_outside_limit() {
        return Ok(Some(limit));
    }
    let name = format!("{} {case}", rig.name());
    if let Some(known) = results.calibrations.get(&name) {
        return Ok(Some(Bytes(known.limit_bytes)));
    }
    let found = calibrate_with(rig, limit, |limit| {
        Ok(attempt(rig, limit, command, most)?.outcome.memory)
    });
    let Some(found) = or_skip(results, found)? else {
        return Ok(None);
    };
    let own = Bytes(found.limit_bytes);
    results.calibrations.insert(name, found);
    Ok(Some(own))
}

fn compare(results: &mut Results, case: &str) {
    for (kernel, must, aim) in [("swapfile", 1.10, 0.8), ("zram", 1.25, 1.0)] {
        let target = Target {
            must,
            aim: Some(aim),
        };
        let pair = (DEFAULT, kernel);
        results.compare(case, "wall_seconds", pair, Better::Lower, Some(target));
    }
    let against_fixed = Target {
        must: 1.15,
        aim: Some(1.0),
    };
    for fixed in fixed() {
        let pair = (DEFAULT, fixed);
        let target = Some(against_fixed);
        results.compare(case, "faults_that_read", pair, Better::Lower, target);
        results.compare(case, "wall_seconds", pair, Better::Lower, None);
    }
}

/// One run.
struct Ran {
    outcome: Finished,
    /// The most anonymous memory of all its processes, sampled.
    peak: Bytes,
    /// Pages that kernel swap read meanwhile.
    swapped_in: u64,
    /// It took too long, and was stopped.
    stopped: bool,
}

/// Runs the program on a rig for at most `most`. timeout(1) ends all of its processes.
fn attempt(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
    most: Duration,
) -> Result<Ran, RigError> {
    let seconds = most.as_secs().max(1).to_string();
    let timed = ["timeout".into(), "-k".into(), "5".into(), seconds.into()];
    let command = CommandLine {
        words: timed.into_iter().chain(command.words.clone()).collect(),
        stdout: command.stdout.clone(),
    };
    let stage = rig.set_up(limit)?;
    let before = swapped_in();
    let mut running = stage.spawn(&command)?;
    let mut peak = 0;
    while running.is_running() && !crate::interrupt::requested() {
        peak = peak.max(anonymous_of_tree(running.id()));
        std::thread::sleep(Duration::from_millis(10));
    }
    let swapped_in = swapped_in().saturating_sub(before);
    let outcome = running.finish()?;
    // 137 is also the shell's status of a program that the kernel killed early.
    let stopped = match outcome.status.code() {
        Some(124) => true,
        Some(137) => outcome.wall >= most,
        _ => false,
    };
    let outcome = if stopped {
        outcome
    } else {
        outcome.successful(rig.name(), "program")?
    };
    Ok(Ran {
        outcome,
        peak: Bytes(peak),
        swapped_in,
        stopped,
    })
}

fn record(results: &mut Results, round: usize, rig: &str, case: &str, ran: Ran) {
    let outcome = ran.outcome;
    let mut values = BTreeMap::from([("wall_seconds".to_owned(), outcome.wall.as_secs_f64())]);
    let report = outcome.report.as_ref();
    let pages = report.and_then(|report| report.pointer("/pages/swapped_in")?.as_f64());
    match pages {
        Some(pages) => values.insert("pages_in".into(), pages),
        None if rig == "swapfile" || rig == "zram" => {
            values.insert("pages_in".into(), ran.swapped_in as f64)
        }
        None => None,
    };
    if let Some(faults) = report.and_then(|report| report.pointer("/faults/swap_in")?.as_f64()) {
        values.insert("faults_that_read".into(), faults);
    }
    if ran.stopped {
        values.insert("stopped".into(), 1.0);
    }
    results.samples.push(Sample {
        round,
        rig: rig.to_owned(),
        case: case.to_owned(),
        values,
        memory: outcome.memory,
    });
    results.keep(rig, format!("{rig} {case}"), outcome.facts, outcome.report);
}

/// Pages that the kernel has read from swap since it started.
fn swapped_in() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix("pswpin "));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Anonymous memory of a process and all its descendants, in bytes.
fn anonymous_of_tree(root: u32) -> u64 {
    let (mut open, mut sum) = (vec![root], 0);
    while let Some(pid) = open.pop() {
        let of = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(of.join("status")).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
        sum += kib.unwrap_or(0u64) * 1024;
        let children = fs::read_to_string(of.join(format!("task/{pid}/children")));
        let children = children.unwrap_or_default();
        open.extend(
            children
                .split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
    }
    sum
}
