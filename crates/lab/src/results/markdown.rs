//! `results.md`: the comparisons, the medians of every rig, and the memory that each used, as
//! tables.

use super::{Results, Row, median};
use std::collections::BTreeSet;
use std::fmt::Write;

/// The whole file.
pub(crate) fn table(results: &Results) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = write_all(&mut text, results);
    text
}

fn write_all(text: &mut String, results: &Results) -> std::fmt::Result {
    let machine = &results.machine;
    writeln!(text, "# {} ({})\n", results.experiment, results.size)?;
    writeln!(
        text,
        "{}, commit {}, {}, {}, {} CPUs.\n",
        results.date, results.commit, machine.kernel, machine.processor, machine.cpus
    )?;
    writeln!(text, "Command: `{}`\n", results.command.join(" "))?;
    let parameters = results
        .parameters
        .iter()
        .map(|(name, value)| format!("{name} = {value}"));
    let parameters = parameters.collect::<Vec<_>>().join(", ");
    if !parameters.is_empty() {
        writeln!(text, "Parameters: {parameters}.\n")?;
    }
    if !results.rows.is_empty() {
        writeln!(
            text,
            "## Comparisons\n\nRatio of the medians over the rounds; the range is of single rounds.\n"
        )?;
        writeln!(
            text,
            "| case | metric | subject | baseline | subject | baseline | ratio | range | must | aim | reached |"
        )?;
        writeln!(text, "|---|---|---|---|--:|--:|--:|--:|--:|--:|---|")?;
        for row in &results.rows {
            write_row(text, row)?;
        }
        writeln!(text)?;
    }
    match &results.simulated {
        Some(simulated) => super::simulated::markdown(text, simulated)?,
        None => {
            write_medians(text, results)?;
            write_memory(text, results)?;
        }
    }
    if !results.calibrations.is_empty() {
        writeln!(text, "## Limits chosen for equal total DRAM\n")?;
        for (rig, calibration) in &results.calibrations {
            let trials = calibration
                .trials
                .iter()
                .map(|(limit, stored)| format!("{} + {}", mib(*limit), mib(*stored)));
            let trials: Vec<_> = trials.collect();
            writeln!(
                text,
                "- {rig}: limit {} MiB (trials, limit + compressed, MiB: {})",
                mib(calibration.limit_bytes),
                trials.join("; ")
            )?;
        }
        writeln!(text)?;
    }
    if !results.rigs.is_empty() {
        writeln!(text, "## Rigs\n")?;
        for (rig, facts) in &results.rigs {
            let facts: Vec<_> = facts
                .iter()
                .map(|(name, value)| format!("{name}: `{value}`"))
                .collect();
            writeln!(
                text,
                "- {rig}: {}",
                if facts.is_empty() {
                    "no changes to the machine".to_owned()
                } else {
                    facts.join(", ")
                }
            )?;
        }
        writeln!(text)?;
    }
    if !results.failures.is_empty() {
        writeln!(text, "## FAILED\n")?;
        for failure in &results.failures {
            writeln!(text, "- {failure}")?;
        }
        writeln!(text)?;
    }
    if !results.notes.is_empty() {
        writeln!(text, "## Notes\n")?;
        results
            .notes
            .iter()
            .try_for_each(|note| writeln!(text, "- {note}"))?;
    }
    Ok(())
}

/// The word for a target: the best one reached, or "no"; `-` if there is no target.
pub(super) fn reached(must: Option<bool>, aim: Option<bool>) -> &'static str {
    match (must, aim) {
        (_, Some(true)) => "aim",
        (Some(true), _) => "must",
        (Some(false), _) => "**no**",
        (None, _) => "-",
    }
}

/// A bound as it was given; `-` if there is none.
pub(super) fn bound(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value}"))
}

fn write_row(text: &mut String, row: &Row) -> std::fmt::Result {
    let reached = reached(row.must_reached, row.aim_reached);
    writeln!(
        text,
        "| {} | {} | {} | {} | {} | {} | {:.3} | {:.2}-{:.2} | {} | {} | {reached} |",
        row.case,
        row.metric,
        row.subject,
        row.baseline,
        human(&row.metric, row.subject_median),
        human(&row.metric, row.baseline_median),
        row.ratio,
        row.ratio_range[0],
        row.ratio_range[1],
        bound(row.target.map(|target| target.must)),
        bound(row.target.and_then(|target| target.aim)),
    )
}

fn write_medians(text: &mut String, results: &Results) -> std::fmt::Result {
    let mut metrics: BTreeSet<&str> = BTreeSet::new();
    results
        .samples
        .iter()
        .for_each(|sample| metrics.extend(sample.values.keys().map(String::as_str)));
    writeln!(text, "## Medians\n")?;
    writeln!(
        text,
        "| case | rig | rounds | {} |",
        metrics.iter().copied().collect::<Vec<_>>().join(" | ")
    )?;
    writeln!(text, "|---|---|--:|{}", "--:|".repeat(metrics.len()))?;
    for case in results.cases() {
        for rig in results.rig_names() {
            let rounds = results
                .samples
                .iter()
                .filter(|sample| sample.rig == rig && sample.case == case)
                .count();
            if rounds == 0 {
                continue;
            }
            let cells = metrics.iter().map(|metric| {
                let values = results.values(&rig, &case, metric);
                if values.is_empty() {
                    "-".to_owned()
                } else {
                    human(metric, median(&values))
                }
            });
            writeln!(
                text,
                "| {case} | {rig} | {rounds} | {} |",
                cells.collect::<Vec<_>>().join(" | ")
            )?;
        }
    }
    writeln!(text)
}

fn write_memory(text: &mut String, results: &Results) -> std::fmt::Result {
    writeln!(text, "## DRAM (largest over all runs, MiB)\n")?;
    writeln!(
        text,
        "| rig | limit | cgroup peak | compressed peak | total peak |\n|---|--:|--:|--:|--:|"
    )?;
    for rig in results.rig_names() {
        let uses = || {
            results
                .samples
                .iter()
                .filter(|sample| sample.rig == rig)
                .map(|sample| &sample.memory)
        };
        let largest =
            |value: fn(&crate::rig::MemoryUse) -> u64| mib(uses().map(value).max().unwrap_or(0));
        writeln!(
            text,
            "| {rig} | {} | {} | {} | {} |",
            largest(|memory| memory.limit_bytes),
            largest(|memory| memory.cgroup_peak_bytes),
            largest(|memory| memory.compressed_peak_bytes),
            largest(|memory| memory.total_peak_bytes),
        )?;
    }
    writeln!(text)
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// A value with a fitting unit, chosen by the metric's suffix.
pub(crate) fn human(metric: &str, value: f64) -> String {
    let scaled = |units: [(&str, f64); 3]| {
        let (unit, divisor) = units
            .into_iter()
            .rev()
            .find(|(_, divisor)| value >= *divisor)
            .unwrap_or(units[0]);
        format!("{} {unit}", significant(value / divisor))
    };
    if metric.ends_with("_ns") {
        scaled([("ns", 1.0), ("us", 1e3), ("ms", 1e6)])
    } else if metric.ends_with("_per_second") {
        scaled([("/s", 1.0), ("k/s", 1e3), ("M/s", 1e6)])
    } else {
        format!("{}", significant(value))
    }
}

/// Three significant digits.
fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10f64.powi(2 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}
