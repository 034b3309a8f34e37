//! FlexSwap's experiments on live guests and programs. The programs and the policy files are those
//! of the live tests, and are compiled here.

mod cold;
mod fault;
mod instructions;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use undercroft_base::Bytes;

use super::redis_server::installed;
use crate::results::{Results, Sample};
use crate::rig::{CommandLine, Finished, Rig, RigError};

pub(crate) use cold::fig9;
pub(crate) use fault::fig6;
pub(crate) use instructions::fig11;

const MONITOR: &str = include_str!("../../../../../crates/tests/programs/kvm_guest.c");

/// Part of the reads that must be a fault. Otherwise the mean is of something else.
const SLOW_LEAST: f64 = 0.2;

/// Why the monitor cannot be made or run here.
fn lacks_kvm() -> Option<String> {
    if !installed("cc") {
        return Some("cc is missing: it makes the monitor".to_owned());
    }
    let kvm = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    kvm.err().map(|why| format!("no KVM: /dev/kvm: {why}"))
}

/// Runs a compiler, which is to make `what`.
fn compile(what: &str, compiler: &mut Command) -> anyhow::Result<()> {
    let status = compiler
        .status()
        .with_context(|| format!("start the compiler of {what}"))?;
    if !status.success() {
        bail!("the compiler does not make {what}: {status}");
    }
    Ok(())
}

/// A program, compiled from `text` into `folder`.
fn program(folder: &Path, name: &str, text: &str) -> anyhow::Result<PathBuf> {
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, text).with_context(|| format!("write {}", source.display()))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-o"]);
    compile(name, compiler.args([&program, &source]))?;
    std::fs::remove_file(&source).with_context(|| format!("remove {}", source.display()))?;
    Ok(program)
}

/// The monitor of the live tests, compiled into `folder`.
fn monitor(folder: &Path) -> anyhow::Result<PathBuf> {
    program(folder, "kvm_guest", MONITOR)
}

/// A run of a program, which `what` names, and the last line that it says.
fn run(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
    what: &str,
) -> Result<(String, Finished), RigError> {
    let outcome = rig.set_up(limit)?.spawn(command)?.finish()?;
    let outcome = outcome.successful(rig.name(), what)?;
    let line = outcome.lines.last().cloned().unwrap_or_default();
    Ok((line, outcome))
}

fn unreadable(rig: &dyn Rig, what: &str, why: String) -> RigError {
    RigError::Unreadable {
        what: format!("read what {what} says on rig {}", rig.name()),
        why,
    }
}

/// A run of the monitor, and the numbers of its line.
fn one(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
) -> Result<(BTreeMap<String, f64>, Finished), RigError> {
    let what = "the monitor";
    let (line, outcome) = run(rig, limit, command, what)?;
    let unreadable = |why| unreadable(rig, what, why);
    let mut values: BTreeMap<String, f64> =
        serde_json::from_str(&line).map_err(|error| unreadable(error.to_string()))?;
    if let [Some(slow), Some(reads)] = ["slow", "reads"].map(|name| values.get(name).copied()) {
        if slow < SLOW_LEAST * reads {
            return Err(unreadable(format!(
                "only {slow} of {reads} reads were faults"
            )));
        }
        values.insert("share_slow".to_owned(), slow / reads);
    }
    Ok((values, outcome))
}

fn record(
    results: &mut Results,
    round: usize,
    rig: &str,
    case: &str,
    values: BTreeMap<String, f64>,
    outcome: Finished,
) {
    results.samples.push(Sample {
        round,
        rig: rig.to_owned(),
        case: case.to_owned(),
        values,
        memory: outcome.memory,
    });
    results.keep(rig, format!("{rig} {case}"), outcome.facts, outcome.report);
}
