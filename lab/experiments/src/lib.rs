//! The benchmarks: workloads, rigs (plain, kernel swap, undercroft), experiments, results and
//! plots.
//!
//! `undercroft-lab list|run NAME --out DIR`, `plot` and `cost` are thin wrappers around [`list`],
//! [`run`], [`plot()`] and [`cost`]. Walk: experiment -> for each
//! round, for each rig: `Rig::set_up` -> `Stage::spawn` -> workload -> `Running::finish` -> samples
//! -> ratios of medians -> `results.json`, `results.md`, SVG.
#![forbid(unsafe_code)]

pub mod cost;
mod experiments;
mod plot;
mod policy_file;
pub mod results;
pub mod touch;

pub use undercroft_rig as rig;

pub use plot::{Curve, Curves, draw_curves};

use anyhow::Context;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its measurement, in one line.
    pub about: &'static str,
    run: experiments::Run,
}

/// How to run an experiment.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Directory for `results.json`, `results.md` and plots; created if missing.
    pub out: PathBuf,
    /// Seconds instead of minutes: checks that everything works. The numbers mean little.
    pub small: bool,
    /// The program under test; None = only the kernel's rigs are measured.
    pub undercroft_binary: Option<PathBuf>,
    /// The program that records traces: `undercroft-lab`. None = none is recorded.
    pub recorder: Option<PathBuf>,
    /// More arguments for `undercroft run`, e.g. a policy.
    pub undercroft_arguments: Vec<String>,
    /// The workload program; None = `undercroft-touch` beside this executable.
    pub touch_command: Option<Vec<OsString>>,
    /// Rounds; None = the experiment's own number.
    pub rounds: Option<usize>,
    /// Only the parts of an experiment whose name contains one of these; empty = all. `programs`
    /// alone has such parts.
    pub only: Vec<String>,
    /// Only the settings whose whole name is one of these; empty = all. `programs` alone has
    /// settings to leave out.
    pub settings: Vec<String>,
    /// Numbers of threads; empty = the experiment's own. `scale` alone has them to choose.
    pub threads: Vec<usize>,
    /// Operations of a phase, of all threads together; None = the experiment's own number. `scale`
    /// alone has them to choose.
    pub operations: Option<u64>,
    /// Footprint of the workload; None = the experiment's own.
    pub footprint_mib: Option<u64>,
    /// Where swap files and file tiers go; None = `out`. Must be a disk file system, not tmpfs.
    pub swap_directory: Option<PathBuf>,
}

/// Every experiment, in the order to run them.
pub fn list() -> &'static [Experiment] {
    &experiments::EXPERIMENTS
}

/// Runs experiment `name` and writes its files into `options.out`.
///
/// Takes the machine's swap while it runs and restores it, also on error and Ctrl-C. If something
/// cannot be measured here, it is skipped with a message (stderr and `notes`). Errors: unknown
/// name; a run failed, read wrong bytes, or was interrupted. Cost: `small` takes seconds, real
/// sizes take minutes.
pub fn run(name: &str, options: &RunOptions) -> anyhow::Result<results::Results> {
    let Some(experiment) = list().iter().find(|experiment| experiment.name == name) else {
        let names: Vec<_> = list().iter().map(|experiment| experiment.name).collect();
        anyhow::bail!(
            "there is no experiment `{name}`; choose one of: {}",
            names.join(", ")
        );
    };
    let lab = experiments::Lab::new(options.clone())?;
    let mut results = lab.results(name);
    let ended = match experiment.run {
        experiments::Run::Measured(run) => run(&lab, &mut results),
        experiments::Run::Simulated(run) => run(&lab).map(|found| results.simulated = Some(found)),
    };
    if let Err(error) = &ended {
        results.failures.push(format!("ended early: {error:#}"));
    }
    publish(&results, &options.out)?;
    ended?;
    if let Some(first) = results.failures.first() {
        anyhow::bail!(
            "{} of the runs failed, the first: {first}; the others are in {}",
            results.failures.len(),
            options.out.join("results.md").display()
        );
    }
    Ok(results)
}

/// Draws the plots of an existing results file again, and writes `results.md`, into `out`.
pub fn plot(results: &Path, out: &Path) -> anyhow::Result<()> {
    publish(&results::Results::read(results)?, out)
}

/// Writes the results and their plots into `out`.
fn publish(results: &results::Results, out: &Path) -> anyhow::Result<()> {
    results.write(out)?;
    plot::draw(results, out).context("draw the plots")
}
