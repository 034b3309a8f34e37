//! `flexswap-fig12` (FlexSwap §6.7, figures 10 and 12): memory over time of a program that works in
//! phases, each of which uses other memory, by SYS-Agg and by the dt-reclaimer. There is room for
//! all of it.
//!
//! The program is one of the live tests, as a process and as a guest under KVM. It uses four parts
//! of its memory in turn, twice over. Time is shorter than in the paper, whose dt-reclaimer scans
//! once a minute, and whose program is graph500. Both policies have the scans of the dt-reclaimer;
//! SYS-Agg asks for more when a phase begins. A run has one policy file, so it is not beside the
//! dt-reclaimer itself, as in the paper.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying, skip};
use super::{Guests, Line, curves, lacks, number, over_file, program, record, run, unreadable};
use crate::policy_file;
use crate::results::{Better, Results, Target};
use crate::rig::{CommandLine, Finished, Rig, RigError, Stdout};

const PROGRAM: &str = include_str!("../../../../../crates/tests/programs/phases.c");
const CASES: [&str; 2] = ["process", "guest"];
const NONE: &str = "none";
const DT: &str = "dt-reclaimer";
const AGG: &str = "sys-agg";
/// Parts of the memory, and how often each is used.
const PARTS: u64 = 4;
const TIMES: u64 = 2;
/// Places of the picture's axis in a second.
const PLACES: f64 = 10.0;

struct Sizes {
    memory: Bytes,
    seconds: f64,
    /// Milliseconds between two scans of the dt-reclaimer, and of SYS-Agg when a phase begins.
    scans_ms: [u32; 2],
}

pub(crate) fn fig12(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let sizes = Sizes {
        memory: Bytes(lab.options.footprint_mib.unwrap_or(32) << 20),
        seconds: lab.pick(1.5, 4.5),
        scans_ms: lab.pick([300, 200], [1500, 500]),
    };
    let rounds = lab.rounds(1, 3);
    let [dt_ms, agg_ms] = sizes.scans_ms;
    results.parameters = BTreeMap::from([
        ("memory_bytes".into(), sizes.memory.0.to_string()),
        ("parts".into(), PARTS.to_string()),
        ("phases".into(), (PARTS * TIMES).to_string()),
        ("seconds_of_a_phase".into(), sizes.seconds.to_string()),
        ("dt_reclaimer_scan_ms".into(), dt_ms.to_string()),
        ("sys_agg_scan_ms".into(), agg_ms.to_string()),
        ("rounds".into(), rounds.to_string()),
    ]);
    if let Some(why) = lacks(lab) {
        skip(results, &format!("flexswap-fig12: {why}"));
        return Ok(());
    }
    let folder = &lab.options.out;
    let file = |name, ms| policy_file::build(folder, name, &[("INTERVAL_MS", ms)]);
    let policies = [
        (NONE, None),
        (DT, Some(file("dt_reclaimer", dt_ms)?)),
        (AGG, Some(file("sys_agg", agg_ms)?)),
    ];
    let options = |file: Option<&Path>| {
        let file = file.map(|file| {
            let scans = ["--access-scan".to_owned(), format!("{dt_ms}ms")];
            let file = ["--policy".to_owned(), file.display().to_string()];
            scans.into_iter().chain(file)
        });
        let plain = ["--prefetch".to_owned(), "none".to_owned()];
        plain.into_iter().chain(file.into_iter().flatten())
    };

    let process = program(folder, "phases", PROGRAM)?;
    let binary = (lab.options.undercroft_binary.as_ref()).context("a binary of undercroft")?;
    let swap = Bytes(sizes.memory.0 * 2);
    let rigs = policies.each_ref().map(|(name, file)| {
        let options = options(file.as_deref());
        Box::new(over_file(lab, binary, name, swap, options)) as Box<dyn Rig>
    });
    let part = (sizes.memory.0 / PARTS) >> 20;
    let numbers = [PARTS as f64, part as f64, sizes.seconds, TIMES as f64];
    let words = numbers.map(|of| of.to_string().into());
    let command = CommandLine {
        words: [&[process.clone().into_os_string()][..], &words].concat(),
        stdout: Stdout::Lines,
    };
    case(results, CASES[0], rounds, &rigs, &sizes, &command)?;
    std::fs::remove_file(process).context("remove the program")?;

    if let Some(guests) = Guests::new(lab, "flexswap-fig12", results)? {
        let rigs = policies
            .each_ref()
            .map(|(name, file)| guests.rig(name, sizes.memory, options(file.as_deref())));
        let numbers = [sizes.memory.0 >> 20, 1, 1, PARTS, TIMES].map(|of| of.to_string());
        let words = std::iter::once("phases".to_owned()).chain(numbers);
        let command = guests.command(words.chain([sizes.seconds.to_string()]));
        case(results, CASES[1], rounds, &rigs, &sizes, &command)?;
        guests.end()?;
    }
    compare(results);
    Ok(())
}

/// All runs of a case, and the picture of the first of each.
fn case(
    results: &mut Results,
    case: &str,
    rounds: usize,
    rigs: &[Box<dyn Rig>],
    sizes: &Sizes,
    command: &CommandLine,
) -> anyhow::Result<()> {
    let limit = Bytes(sizes.memory.0 * 2);
    let mut lines = Vec::new();
    for round in 0..rounds {
        for rig in rigs {
            let turn = format!("round {} of {rounds}, {case}, {}", round + 1, rig.name());
            progress(&format!("flexswap-fig12: {turn}"));
            let done = retrying(results, || one(rig.as_ref(), limit, command))?;
            if let Some((values, line, outcome)) = done {
                if round == 0 {
                    lines.push((rig.name().to_owned(), line));
                }
                record(results, round, rig.name(), case, values, outcome);
            }
        }
    }
    let title = "a program in phases, each of which uses another quarter of its memory";
    let labels = ["seconds", "MiB in memory"];
    let name = format!("memory-{case}");
    let figure = curves(&name, title, labels, case, 10 * PLACES as usize, lines);
    results.figures.push(figure);
    Ok(())
}

/// A run: its values, and MiB in memory over time.
fn one(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
) -> Result<(BTreeMap<String, f64>, Line, Finished), RigError> {
    let what = "the program";
    let (line, outcome) = run(rig, limit, command, what)?;
    if line != "0 wrong" {
        return Err(unreadable(rig, what, format!("`{line}`")));
    }
    let points = points(&outcome.lines);
    let [seconds, _, visits] = points.last().copied().unwrap_or_default();
    let (Some(all), Some(later)) = (mean(&points, 0.0), mean(&points, seconds / 2.0)) else {
        let why = format!("only {} lines of memory", points.len());
        return Err(unreadable(rig, what, why));
    };
    let mut values = BTreeMap::from([
        ("visits_per_second".to_owned(), visits / seconds),
        ("resident_bytes".to_owned(), all),
        ("resident_bytes_second_half".to_owned(), later),
    ]);
    if let Some(report) = &outcome.report {
        let came_back = number(report, "/faults/swap_in");
        values.insert("pages_that_came_back".to_owned(), came_back);
        let phases = report["policies"]["plugin"]["parameters"].as_array();
        let phases = phases.and_then(|all| all.iter().find(|of| of["name"] == "phases"));
        let phases = phases.and_then(|of| of["value"].as_f64());
        values.extend(phases.map(|seen| ("phases_seen".to_owned(), seen)));
    }
    Ok((values, over_time(&points), outcome))
}

/// Seconds, bytes in memory and visits of pages so far, of the lines that have them.
fn points(lines: &[String]) -> Vec<[f64; 3]> {
    let point = |line: &String| {
        let words = line
            .split(' ')
            .map(str::parse)
            .collect::<Result<Vec<f64>, _>>();
        words.ok()?.try_into().ok()
    };
    lines.iter().filter_map(point).collect()
}

/// The mean over the time after `from`: what a line says is so since the line before.
fn mean(points: &[[f64; 3]], from: f64) -> Option<f64> {
    let later = points.windows(2).filter(|pair| pair[0][0] >= from);
    let (mut sum, mut time) = (0.0, 0.0);
    for pair in later {
        let passed = pair[1][0] - pair[0][0];
        (sum, time) = (sum + passed * pair[1][1], time + passed);
    }
    (time > 0.0).then(|| sum / time)
}

/// MiB at each place of the axis.
fn over_time(points: &[[f64; 3]]) -> Line {
    let mut line = Line::new();
    for [seconds, bytes, _] in points {
        while (line.len() as f64) < seconds * PLACES {
            line.push(bytes / f64::from(1 << 20));
        }
    }
    line
}

fn compare(results: &mut Results) {
    for case in CASES {
        for metric in ["resident_bytes", "resident_bytes_second_half"] {
            // At least half of the paper's effect, and the paper's.
            let target = Some(Target::new(0.95, Some(0.9)));
            results.compare(case, metric, (AGG, DT), Better::Lower, target);
            results.compare(case, metric, (AGG, NONE), Better::Lower, None);
            results.compare(case, metric, (DT, NONE), Better::Lower, None);
        }
        for rig in [AGG, DT] {
            results.compare(case, "visits_per_second", (rig, NONE), Better::Higher, None);
        }
        let pages = "pages_that_came_back";
        results.compare(case, pages, (AGG, DT), Better::Lower, None);
    }
    for note in [
        "FlexSwap, figures 10 and 12 (graph500): SYS-Agg saves 10 % more memory than the default \
         dt-reclaimer, and reclaims it sooner; the dt-reclaimer cannot save as much by another \
         setting without a far slower program",
        "phases_seen: times that SYS-Agg saw a phase begin; the start is one",
    ] {
        results.notes.push(note.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_is_by_time_and_lines_without_numbers_do_not_count() {
        let said = [
            "begin",
            "0.0 0 0",
            "1.0 1048576 5",
            "4.0 2097152 9",
            "0 wrong",
        ];
        let points = points(&said.map(str::to_owned));
        assert_eq!(points.len(), 3);
        assert_eq!(mean(&points, 0.0), Some(1.75 * f64::from(1 << 20)));
        assert_eq!(mean(&points, 1.0), Some(2.0 * f64::from(1 << 20)));
        assert_eq!(mean(&points, 4.0), None);
        let line = over_time(&points);
        assert_eq!(
            (line.len(), line[0], line[9], line[10]),
            (40, 1.0, 1.0, 2.0)
        );
    }
}
