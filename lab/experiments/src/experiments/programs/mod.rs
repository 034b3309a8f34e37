//! Real programs, none of which the settings were tuned for. Each runs in parts of its own peak:
//! with the default settings, with fixed ones, with a swap file in the same DRAM, and with zram in
//! the same total DRAM.

mod list;
mod settings;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use undercroft_base::Bytes;

use super::redis_server::installed;
use super::{Lab, or_skip, progress, retrying, skip};
use crate::policy_file;
use crate::results::{Better, Results, Sample, Target};
use crate::rig::{Attempt, CommandLine, Plain, Rig, attempt, calibrate_with, script};
use list::PROGRAMS;
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
    if let Some(why) = policy_file::lacks() {
        skip(results, &format!("programs, clock and clock_w: {why}"));
    }
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
        if !script::prepare(program.prepare, size, folder.path())? {
            skip(
                results,
                &format!("programs: {}: its input cannot be made here", program.name),
            );
            continue;
        }
        let command = script::command(program.command, size, folder.path());
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
            for rig in &rigs(lab, Bytes(peak.0 * 3 + (64 << 20)))? {
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
        let target = Target::new(must, Some(aim));
        let pair = (DEFAULT, kernel);
        results.compare(case, "wall_seconds", pair, Better::Lower, Some(target));
    }
    let against_fixed = Target::new(1.15, Some(1.0));
    for fixed in fixed() {
        let pair = (DEFAULT, fixed);
        let target = Some(against_fixed);
        results.compare(case, "faults_that_read", pair, Better::Lower, target);
        results.compare(case, "wall_seconds", pair, Better::Lower, None);
    }
}

fn record(results: &mut Results, round: usize, rig: &str, case: &str, ran: Attempt) {
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
