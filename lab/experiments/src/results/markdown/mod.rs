//! `results.md`: the comparisons, the medians of every rig, and the memory that each used, as
//! tables. Text is wrapped, so that a page reads and compares well as it is.

mod scaling;
mod simulated;
mod wrap;

use super::numbers::{human, mib};
use super::{Comparison, Results, median};
use crate::rig::{Calibration, Facts};
use std::collections::BTreeSet;
use std::fmt::Write;
use wrap::{item, paragraph};

/// The whole file.
pub(crate) fn page(results: &Results) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = write_all(&mut text, results);
    text
}

fn write_all(text: &mut String, results: &Results) -> std::fmt::Result {
    write_head(text, results)?;
    if !results.rows.is_empty() && results.scaling.is_none() {
        write_comparisons(text, &results.rows)?;
    }
    match (&results.simulated, &results.scaling) {
        (Some(simulated), _) => simulated::write(text, simulated)?,
        (None, Some(scaling)) => {
            scaling::write(text, scaling)?;
            write_memory(text, results)?;
        }
        (None, None) => {
            write_medians(text, results)?;
            write_memory(text, results)?;
        }
    }
    let limits: Vec<_> = results.calibrations.iter().map(limit_found).collect();
    write_list(text, "Limits chosen for equal total DRAM", &limits)?;
    let rigs: Vec<_> = results.rigs.iter().map(rig_facts).collect();
    write_list(text, "Rigs", &rigs)?;
    write_list(text, "FAILED", &results.failures)?;
    write_list(text, "Notes", &results.notes)?;
    text.truncate(text.trim_end().len());
    writeln!(text)
}

/// Writes what was run, when, where and how.
fn write_head(text: &mut String, results: &Results) -> std::fmt::Result {
    let machine = &results.machine;
    let origin = format!(
        "{}, commit {}, {}, {}, {} CPUs.",
        results.date, results.commit, machine.kernel, machine.processor, machine.cpus
    );
    let command = format!("Command: `{}`", results.command.join(" "));
    writeln!(text, "# {} ({})\n", results.experiment, results.size)?;
    writeln!(text, "{}\n", paragraph(&origin))?;
    writeln!(text, "{}\n", paragraph(&command))?;
    if results.parameters.is_empty() {
        return Ok(());
    }
    let parameters = results
        .parameters
        .iter()
        .map(|(name, value)| format!("{name} = {value}"));
    let parameters = parameters.collect::<Vec<_>>().join(", ");
    writeln!(
        text,
        "{}\n",
        paragraph(&format!("Parameters: {parameters}."))
    )
}

fn write_comparisons(text: &mut String, rows: &[Comparison]) -> std::fmt::Result {
    writeln!(
        text,
        "## Comparisons\n\nRatio of the medians over the rounds; the range is of single rounds.\n"
    )?;
    writeln!(
        text,
        "| case | metric | subject | baseline | subject | baseline | ratio | range | must | aim | reached |"
    )?;
    writeln!(text, "|---|---|---|---|--:|--:|--:|--:|--:|--:|---|")?;
    for row in rows {
        write_row(text, row)?;
    }
    writeln!(text)
}

/// A heading and its items; nothing if there are none.
fn write_list(text: &mut String, title: &str, items: &[String]) -> std::fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(text, "## {title}\n")?;
    for each in items {
        writeln!(text, "{}", item(each))?;
    }
    writeln!(text)
}

/// How a rig's limit was found.
fn limit_found((rig, found): (&String, &Calibration)) -> String {
    let trials = found
        .trials
        .iter()
        .map(|(limit, stored)| format!("{} + {}", mib(*limit), mib(*stored)));
    format!(
        "{rig}: limit {} MiB (trials, limit + compressed, MiB: {})",
        mib(found.limit_bytes),
        trials.collect::<Vec<_>>().join("; ")
    )
}

/// The parts of a rig.
fn rig_facts((rig, facts): (&String, &Facts)) -> String {
    if facts.is_empty() {
        return format!("{rig}: no changes to the machine");
    }
    let facts = facts
        .iter()
        .map(|(name, value)| format!("{name}: `{value}`"));
    format!("{rig}: {}", facts.collect::<Vec<_>>().join(", "))
}

/// The word for a target: the best one reached, or "no"; `-` if there is no target.
fn reached(must: Option<bool>, aim: Option<bool>) -> &'static str {
    match (must, aim) {
        (_, Some(true)) => "aim",
        (Some(true), _) => "must",
        (Some(false), _) => "**no**",
        (None, _) => "-",
    }
}

/// A bound as it was given; `-` if there is none.
fn bound(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value}"))
}

fn write_row(text: &mut String, row: &Comparison) -> std::fmt::Result {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    #[test]
    fn kept_pages_are_those_of_their_values() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
        let runs = fs::read_dir(folder).expect("the results").flatten();
        let runs = runs.filter(|run| run.path().join("results.json").is_file());
        let mut seen = 0;
        for run in runs {
            let results = Results::read(&run.path().join("results.json")).expect("results");
            let kept = fs::read_to_string(run.path().join("results.md")).expect("a page");
            let name = run.file_name().display().to_string();
            assert!(
                page(&results) == kept,
                "{name}: draw it with `undercroft-lab plot`"
            );
            seen += 1;
        }
        assert!(seen > 10, "{seen}");
    }
}
