//! Tiers under live load: the file tier's large transfers beside what the disk can do, and faults
//! while the pages of a tier move to another.

use super::fio;
use super::redis_server::installed;
use super::{Lab, or_skip, phase_sample, progress, skip};
use crate::results::{Better, Results, Sample, Target};
use crate::rig::{Finished, Rig, RigError, TierChoice};
use crate::touch::PhaseLine;
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use undercroft_base::Bytes;

/// (case, fio's arguments, the field of `undercroft tiers --measure --json`)
const TRANSFERS: [(&str, &str, &str); 2] = [
    (
        "seq read",
        "--rw=read --bs=256k --iodepth=4",
        "read_bytes_per_second",
    ),
    (
        "seq write",
        "--rw=write --bs=256k --iodepth=4",
        "write_bytes_per_second",
    ),
];

/// The file tier's transfers in sequence, with checksums, in turn with those of fio.
pub(crate) fn bandwidth(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let Some(binary) = lab.options.undercroft_binary.clone() else {
        skip(results, "tier-bandwidth: needs an undercroft binary");
        return Ok(());
    };
    if !installed("fio") {
        skip(results, "tier-bandwidth: fio is not installed");
        return Ok(());
    }
    let (size_mib, seconds) = (lab.pick(32, 1024), lab.pick(1, 4));
    let rounds = lab.rounds(1, 5);
    results.parameters = BTreeMap::from([
        ("size_mib".into(), size_mib.to_string()),
        ("fio_seconds_each".into(), seconds.to_string()),
        ("fio".into(), "io_uring, direct, 256 KiB, depth 4".into()),
    ]);
    let file = lab
        .swap_directory()
        .join(format!("undercroft-lab-{}.fio", std::process::id()));
    let spec = format!(
        "file:{},size={size_mib}M",
        file.with_extension("tier").display()
    );
    let measured = (|| -> anyhow::Result<()> {
        for round in 0..rounds {
            progress(&format!("tier-bandwidth: round {} of {rounds}", round + 1));
            let mut keep = |rig: &str, case: &str, speed: f64| {
                results.samples.push(Sample {
                    round,
                    rig: rig.to_owned(),
                    case: case.to_owned(),
                    values: BTreeMap::from([("bytes_per_second".to_owned(), speed)]),
                    memory: Default::default(),
                });
            };
            for (case, job, _) in TRANSFERS {
                let found = fio::one_job(&file, job, size_mib, seconds).context(case)?;
                keep("fio", case, found["bytes_per_second"]);
            }
            let mut command = Command::new(&binary);
            command.args(["tiers", "--json", "--measure", &spec]);
            let output = said(&mut command)?;
            let found: serde_json::Value = serde_json::from_slice(&output.stdout)?;
            for (case, _, field) in TRANSFERS {
                let speed = found["measured"][0][field].as_f64();
                keep("undercroft-file", case, speed.context("a speed")?);
            }
        }
        Ok(())
    })();
    let _ = std::fs::remove_file(&file);
    measured?;
    let target = Target::new(0.85, Some(0.95));
    for (case, ..) in TRANSFERS {
        let pair = ("undercroft-file", "fio");
        results.compare(case, "bytes_per_second", pair, Better::Higher, Some(target));
    }
    Ok(())
}

/// The output of a command that must succeed.
fn said(command: &mut Command) -> anyhow::Result<Output> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.context("start undercroft")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "undercroft failed: {}",
        errors.trim()
    );
    Ok(output)
}

/// Random reads of memory four times the limit, from a tier that is drained meanwhile into another
/// one, and from one that is not. Both tiers are on one disk, or have equal devices that are
/// emulated.
pub(crate) fn migration(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let footprint_mib = lab.options.footprint_mib.unwrap_or(lab.pick(16, 512));
    let (phases, operations) = (40, lab.pick(200, 2_000));
    let limit = Bytes(footprint_mib << 18);
    let rounds = lab.rounds(1, 5);
    let command = lab.touch(
        [
            "--footprint-mib".to_owned(),
            footprint_mib.to_string(),
            "--verify".into(),
        ]
        .into_iter()
        .chain((0..phases).flat_map(|_| ["--phase".into(), format!("random:read:1:{operations}")])),
    );
    results.parameters = BTreeMap::from([
        ("footprint_mib".into(), footprint_mib.to_string()),
        ("limit_bytes".into(), limit.0.to_string()),
        ("reads_of_a_phase".into(), operations.to_string()),
    ]);
    let place = |name: &str| {
        let name = format!("undercroft-lab-{}.{name}", std::process::id());
        lab.swap_directory().join(name).display().to_string()
    };
    for (case, more) in [("on a disk", ""), ("sata-ssd, emulated", ",shape=sata-ssd")] {
        let size = footprint_mib * 2;
        let specs = ["from", "to"].map(|name| format!("file:{},size={size}M{more}", place(name)));
        for round in 0..rounds {
            // At rest, as many phases count as in the run before.
            let mut phases = usize::MAX;
            for name in ["while it is drained", "at rest"] {
                let tiers = TierChoice::Named(name, specs.to_vec());
                let Some(rig) = lab.undercroft(tiers, Bytes(0)) else {
                    skip(results, "migration: needs an undercroft binary");
                    return Ok(());
                };
                progress(&format!(
                    "migration: round {} of {rounds}, {case}, {name}",
                    round + 1
                ));
                let drained = name != "at rest";
                let done = one_run(lab, rig.as_ref(), (limit, drained), &command);
                let Some((mut lines, outcome)) = or_skip(results, done)? else {
                    continue;
                };
                lines.truncate(phases);
                phases = lines.len();
                for line in &lines {
                    let sample = phase_sample(round, name, case.into(), line, &outcome);
                    results.samples.push(sample);
                }
                results.keep(
                    name,
                    format!("{name} {case}"),
                    outcome.facts,
                    outcome.report,
                );
            }
        }
        let pair = ("while it is drained", "at rest");
        let target = Target::new(1.2, Some(1.0));
        results.compare(case, "p99_ns", pair, Better::Lower, Some(target));
        results.compare(case, "p50_ns", pair, Better::Lower, None);
        results.compare(case, "mean_ns", pair, Better::Lower, None);
    }
    Ok(())
}

/// The phases of one run that pages were on the move in, from the first to the last. All of a run
/// that is not drained.
fn one_run(
    lab: &Lab,
    rig: &dyn Rig,
    (limit, drained): (Bytes, bool),
    command: &crate::rig::CommandLine,
) -> Result<(Vec<PhaseLine>, Finished), RigError> {
    let mut running = rig.set_up(limit)?.spawn(command)?;
    let unreadable = |why: String| RigError::Unreadable {
        what: format!("the phases of rig {}", rig.name()),
        why,
    };
    while running.lines_so_far().is_empty() && running.is_running() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let from = running.lines_so_far().len();
    let mut to = None;
    if drained {
        let binary = lab.options.undercroft_binary.as_ref();
        let mut drain = Command::new(binary.expect("the rig has one"));
        drain.args(["tiers", "drain", &running.id().to_string(), "1"]);
        said(&mut drain).map_err(|error| unreadable(format!("{error:#}")))?;
        to = Some(running.lines_so_far().len());
    }
    let outcome = running
        .finish()?
        .successful(rig.name(), "undercroft-touch")?;
    let lines: Result<Vec<PhaseLine>, _> = outcome
        .lines
        .iter()
        .map(|line| serde_json::from_str(line))
        .collect();
    let mut lines = lines.map_err(|error| unreadable(error.to_string()))?;
    lines.truncate(to.unwrap_or(lines.len()));
    let lines: Vec<_> = lines.into_iter().skip(from).collect();
    let lines: Vec<_> = lines
        .into_iter()
        .filter(|it| it.pattern == "random")
        .collect();
    if lines.is_empty() {
        return Err(unreadable("the drain ended before a phase did".into()));
    }
    Ok((lines, outcome))
}
