//! FlexSwap's experiments on live guests and programs. The programs and the policy files are those
//! of the live tests, and are compiled here.

mod cold;
mod fault;
mod instructions;
mod linear;
mod phases;
mod recovery;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use undercroft_base::Bytes;

use super::redis_server::installed;
use super::{Lab, skip};
use crate::policy_file;
use crate::results::{Figure, Panel, Results, Sample};
use crate::rig::{
    CommandLine, Finished, Rig, RigError, Running, Stdout, TierChoice, Undercroft, UndercroftGuest,
};

pub(crate) use cold::fig9;
pub(crate) use fault::fig6;
pub(crate) use instructions::fig11;
pub(crate) use linear::linear;
pub(crate) use phases::fig12;
pub(crate) use recovery::fig13;

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

/// Why no program can be made here, or no policy, or neither can be run.
fn lacks(lab: &Lab) -> Option<String> {
    let no_cc = || (!installed("cc")).then(|| "cc is missing: it makes the program".to_owned());
    let missing = lab.options.undercroft_binary.is_none();
    let no_binary = || missing.then(|| "no binary of undercroft".to_owned());
    policy_file::lacks().or_else(no_cc).or_else(no_binary)
}

/// Our rig over a file, with more options.
fn over_file(
    lab: &Lab,
    binary: &Path,
    name: &'static str,
    swap: Bytes,
    options: impl IntoIterator<Item = String>,
) -> Undercroft {
    let mut extra = lab.options.undercroft_arguments.clone();
    extra.extend(options);
    Undercroft {
        binary: binary.to_owned(),
        name: Some(name),
        tier: TierChoice::File(lab.swap_directory()),
        swap,
        directory: lab.options.out.clone(),
        extra,
        alone: true,
    }
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

/// Binary and monitor of runs of our own guests under policy files.
struct Guests<'a> {
    lab: &'a Lab,
    binary: PathBuf,
    monitor: PathBuf,
}

impl Guests<'_> {
    /// Makes the monitor. `None`: something is missing here, and `results` say so for `experiment`.
    fn new<'a>(
        lab: &'a Lab,
        experiment: &str,
        results: &mut Results,
    ) -> anyhow::Result<Option<Guests<'a>>> {
        if let Some(why) = lacks_kvm().or_else(|| lacks(lab)) {
            skip(results, &format!("{experiment}: {why}"));
            return Ok(None);
        }
        let monitor = monitor(&lab.options.out)?;
        let binary = lab.options.undercroft_binary.clone();
        let binary = binary.context("a binary of undercroft")?;
        Ok(Some(Guests {
            lab,
            binary,
            monitor,
        }))
    }

    /// The path of a policy file, built with other first values of its parameters.
    fn policy(&self, name: &str, values: &[(&str, u32)]) -> anyhow::Result<String> {
        let file = policy_file::build(&self.lab.options.out, name, values)?;
        Ok(file.display().to_string())
    }

    /// A rig for machines of this memory over a file, with more options.
    fn rig(
        &self,
        name: &'static str,
        memory: Bytes,
        options: impl IntoIterator<Item = String>,
    ) -> Box<dyn Rig> {
        let run = over_file(self.lab, &self.binary, name, Bytes(memory.0 * 2), options);
        Box::new(UndercroftGuest { run, memory })
    }

    /// A run of the monitor.
    fn command(&self, words: impl IntoIterator<Item = String>) -> CommandLine {
        let monitor = self.monitor.clone().into_os_string();
        let words = words.into_iter().map(Into::into);
        CommandLine {
            words: std::iter::once(monitor).chain(words).collect(),
            stdout: Stdout::Lines,
        }
    }

    fn end(self) -> anyhow::Result<()> {
        std::fs::remove_file(self.monitor).context("remove the monitor")
    }
}

/// Values over time.
type Line = Vec<f64>;

/// A picture of lines, with a number at each `step`th place of the axis.
fn curves(
    name: &str,
    title: &str,
    labels: [&str; 2],
    case: &str,
    step: usize,
    mut lines: Vec<(String, Line)>,
) -> Figure {
    let places = lines.iter().map(|(_, line)| line.len()).min().unwrap_or(0);
    lines.iter_mut().for_each(|(_, line)| line.truncate(places));
    let place = |at: usize| match at % step {
        0 => (at / step).to_string(),
        _ => String::new(),
    };
    let panel = Panel {
        title: case.to_owned(),
        places: (0..places).map(place).collect(),
        series: lines,
    };
    Figure::lines(name, title, labels, [panel])
}

/// Waits until a program has said a line.
fn said(
    running: &mut Running,
    rig: &dyn Rig,
    line: &str,
    patience: Duration,
) -> Result<(), RigError> {
    let began = Instant::now();
    while !running.lines_so_far().iter().any(|said| said == line) {
        if !running.is_running() || began.elapsed() > patience {
            return Err(unreadable(rig, "the program", format!("no line `{line}`")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// A number of a report; 0: it has none there.
fn number(report: &serde_json::Value, path: &str) -> f64 {
    report
        .pointer(path)
        .and_then(serde_json::Value::as_f64)
        .unwrap_or(0.0)
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
