//! Real programs, none of which the settings were tuned for. Each runs in parts of its own peak:
//! with the default settings, with fixed ones, and with a swap file in the same DRAM.

mod list;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use undercroft_base::Bytes;

use super::redis_server::installed;
use super::{Lab, or_skip, progress, skip};
use crate::results::{Better, Results, Sample, Target};
use crate::rig::{
    CommandLine, Finished, Plain, Rig, RigError, Stage, Stdout, SwapFile, TierChoice, Undercroft,
};
use list::{PROGRAMS, Program};

/// Limits, in percent of a program's peak without one.
const SHARES: [u64; 3] = [75, 50, 35];

/// A run may take this multiple of its time without a limit, and at least `PATIENCE`. Then it is
/// stopped, and counts as longer than that.
const TIMES_MAX: u32 = 12;
const PATIENCE: Duration = Duration::from_secs(30);

/// The least limit: a shell and a few libraries take more than half of it.
const LEAST: Bytes = Bytes(4 << 20);

/// The settings besides the default: their name, whether there is a RAM tier, and the arguments.
const FIXED: [(&str, bool, &[&str]); 3] = [
    ("undercroft-lru", true, &["--policy", "lru"]),
    ("undercroft-file-only", false, &[]),
    ("undercroft-file-only-lru", false, &["--policy", "lru"]),
];

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
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
    for program in PROGRAMS {
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
    Ok(())
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
    let script = format!("cd \"$2\" && {}", program.command);
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
                let ran = attempt(rig.as_ref(), limit, command, most);
                let Some(ran) = or_skip(results, ran)? else {
                    continue;
                };
                if !ran.stopped && ran.outcome.lines != expected {
                    results
                        .failures
                        .push(format!("{case} on {}: another output", rig.name()));
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

fn compare(results: &mut Results, case: &str) {
    let against_swap = Target {
        must: 1.10,
        aim: Some(0.8),
    };
    let pair = ("undercroft", "swapfile");
    results.compare(
        case,
        "wall_seconds",
        pair,
        Better::Lower,
        Some(against_swap),
    );
    let against_fixed = Target {
        must: 1.15,
        aim: Some(1.0),
    };
    for (fixed, _, _) in FIXED {
        let pair = ("undercroft", fixed);
        results.compare(case, "pages_in", pair, Better::Lower, Some(against_fixed));
        results.compare(case, "wall_seconds", pair, Better::Lower, None);
    }
}

/// The rigs that take turns.
fn rigs(lab: &Lab, swap: Bytes) -> Vec<Box<dyn Rig>> {
    let directory = lab.swap_directory();
    let mut rigs: Vec<Box<dyn Rig>> = Vec::new();
    rigs.extend(lab.undercroft(TierChoice::RamThenFile(directory.clone()), swap));
    for (name, ram, more) in FIXED {
        let Some(binary) = lab.options.undercroft_binary.clone() else {
            break;
        };
        let tier = if ram {
            TierChoice::RamThenFile(directory.clone())
        } else {
            TierChoice::File(directory.clone())
        };
        let extra = lab.options.undercroft_arguments.iter().cloned();
        let ours = Undercroft {
            binary,
            tier,
            swap,
            directory: lab.options.out.clone(),
            extra: extra.chain(more.iter().map(ToString::to_string)).collect(),
        };
        rigs.push(Box::new(Fixed { name, ours }));
    }
    rigs.push(Box::new(SwapFile { swap, directory }));
    rigs
}

/// Undercroft with settings of its own, under a name of its own.
struct Fixed {
    name: &'static str,
    ours: Undercroft,
}

impl Rig for Fixed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn stores_outside_limit(&self) -> bool {
        self.ours.stores_outside_limit()
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        self.ours.set_up(limit)
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
    let stopped = matches!(outcome.status.code(), Some(124 | 137));
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
        None if rig == "swapfile" => values.insert("pages_in".into(), ran.swapped_in as f64),
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
