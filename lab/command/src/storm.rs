//! `undercroft-lab storm`: runs storms by seed, with failures. Shrinks and prints what failed, and
//! replays it.

use std::collections::BTreeMap;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use undercroft_sim::storm::{self, Ended, Minimised, Recipe, Sabotage, StormSetup, Tally};

use undercroft_terminal as show;
use undercroft_terminal::{Failure, status};

/// `undercroft-lab storm`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StormArgs {
    /// Storms to run, one a seed
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
    pub seeds: u64,

    /// The first seed; the others follow it
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub first_seed: u64,

    /// Operations of each storm: accesses, decisions, pages loaded, evicted, stored
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub ops: u64,

    /// Storms at a time [default: one a processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Replay the storm of this file instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "first_seed", "ops", "threads"])]
    pub replay: Option<PathBuf>,

    /// Most replays spent on shrinking one failure; 0 shrinks nothing
    #[arg(long, value_name = "N", default_value_t = 5000)]
    pub shrink: u32,

    /// Write each failure into this directory, as a file for --replay
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Put a bug into the runtime, to see that storms find it: free-early, install-unvalidated, ...
    #[arg(long, value_name = "BUG", hide = true, value_parser = sabotage)]
    pub sabotage: Option<Sabotage>,
}

const EXAMPLES: &str = "Examples:
  undercroft-lab storm --seeds 2000
  undercroft-lab storm --first-seed 17 --seeds 1 --out failures
  undercroft-lab storm --replay failures/storm-17.txt

The status is 1 when a storm fails: that is a bug of undercroft, and the lines printed are what to report.";

/// How many failures are shrunk. Of the others only the seed is printed.
const SHRUNK_MAX: usize = 3;

fn sabotage(name: &str) -> Result<Sabotage, String> {
    Sabotage::by_name(name).ok_or_else(|| {
        let names = Sabotage::ALL.map(Sabotage::name).join(", ");
        format!("there is no such bug; there are {names}")
    })
}

#[derive(Serialize)]
struct Report {
    schema_version: u32,
    first_seed: u64,
    seeds: u64,
    operations: u64,
    steps: u64,
    accesses: u64,
    seconds: f64,
    seen: BTreeMap<&'static str, u64>,
    failures: Vec<FailureReport>,
}

#[derive(Serialize)]
struct FailureReport {
    seed: u64,
    place: String,
    message: String,
    step: u64,
    steps_kept: usize,
    replays: u32,
    shrunk: bool,
    replay: String,
    history: Vec<String>,
}

/// Runs `undercroft-lab storm`. The status is 1 if a storm fails.
pub(crate) fn storm(args: &StormArgs) -> Result<u8, Failure> {
    if let Some(out) = &args.out {
        fs::create_dir_all(out).map_err(|error| cannot_write(out, &error))?;
    }
    let started = Instant::now();
    let (tally, failed) = match &args.replay {
        Some(file) => {
            let ended = storm::replay(&read(file)?);
            (ended.tally.clone(), vec![ended])
        }
        None => run(args),
    };
    let failed = failed.iter().filter(|ended| ended.failure.is_some());
    let mut failures = Vec::new();
    for (at, ended) in failed.enumerate() {
        let shrink = at < SHRUNK_MAX && args.shrink > 0 && args.replay.is_none();
        let small = if shrink {
            storm::minimise(ended, args.shrink)
        } else {
            None
        };
        failures.extend(described(ended, small));
    }
    let report = Report {
        schema_version: 1,
        first_seed: args.first_seed,
        seeds: tally.seeds,
        operations: tally.operations,
        steps: tally.steps,
        accesses: tally.accesses,
        seconds: started.elapsed().as_secs_f64(),
        seen: tally.seen,
        failures,
    };
    if let Some(out) = &args.out {
        for failure in &report.failures {
            let path = out.join(format!("storm-{}.txt", failure.seed));
            fs::write(&path, &failure.replay).map_err(|error| cannot_write(&path, &error))?;
        }
    }
    if args.json {
        show::json(&report)?
    } else {
        print(&report, args.out.as_deref())?
    }
    Ok(if report.failures.is_empty() {
        0
    } else {
        status::FAILED
    })
}

fn run(args: &StormArgs) -> (Tally, Vec<Ended>) {
    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        usize::from,
    );
    let bar = bar(args.seeds);
    let mut failed = Vec::new();
    let seeds = args.first_seed..args.first_seed.saturating_add(args.seeds);
    let change = |setup: &mut StormSetup| setup.sabotage = args.sabotage;
    let tally = storm::run_seeds(seeds, args.ops, threads, change, |ended| {
        bar.inc(1);
        if ended.failure.is_some() {
            failed.push(ended.clone());
            bar.set_message(format!("{} failed", failed.len()));
        }
        true
    });
    bar.finish_and_clear();
    failed.sort_by_key(|ended| ended.recipe.setup.seed);
    (tally, failed)
}

/// On standard error, and only on a terminal.
fn bar(seeds: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(seeds);
    match ProgressStyle::with_template("storms [{bar:30}] {pos}/{len}  {eta} left  {msg}") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

fn described(ended: &Ended, small: Option<Minimised>) -> Option<FailureReport> {
    let (replays, shrunk) = small
        .as_ref()
        .map_or((0, false), |small| (small.replays, small.finished));
    // Of the storm that failed. The shortest one that fails alike may have another.
    let seed = ended.recipe.setup.seed;
    let ended = small.map_or_else(|| ended.clone(), |small| small.ended);
    let failure = ended.failure?;
    Some(FailureReport {
        seed,
        place: failure.place,
        message: failure.message,
        step: failure.step,
        steps_kept: ended.recipe.steps.len(),
        replays,
        shrunk,
        replay: ended.recipe.to_string(),
        history: failure.history,
    })
}

fn read(path: &Path) -> Result<Recipe, Failure> {
    let wrong = |why: String| {
        Failure::new(
            status::FAILED,
            format!("cannot replay {}", path.display()),
            why,
            "give a file that `undercroft-lab storm --out DIR` wrote",
        )
    };
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    Recipe::parse(&text).map_err(|error| wrong(error.to_string()))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(
        status::FAILED,
        format!("cannot write {}", path.display()),
        error.to_string(),
        "name a directory that can be written with --out",
    )
}

fn print(report: &Report, out: Option<&Path>) -> Result<(), Failure> {
    show::line(&format!(
        "simulated: {} storms, {} operations, {} accesses in {:.1} s ({:.0} operations/s)",
        report.seeds,
        report.operations,
        report.accesses,
        report.seconds,
        report.operations as f64 / report.seconds.max(1e-9)
    ))?;
    if report.failures.is_empty() {
        return show::line("every byte was right, and no fault waited for ever");
    }
    for failure in &report.failures {
        show::line(&format!(
            "\nseed {} failed at {}\n  {}\n",
            failure.seed,
            failure.place,
            failure.message.replace('\n', "\n  ")
        ))?;
        if failure.replays > 0 {
            let all = if failure.shrunk {
                "no step can be left out"
            } else {
                "more might be left out: --shrink"
            };
            show::line(&format!(
                "shrunk to {} steps by {} replays; {all}. What happened:",
                failure.steps_kept, failure.replays
            ))?;
        }
        for line in &failure.history {
            show::line(line)?;
        }
        match out {
            Some(out) => show::line(&format!(
                "\nreplay: undercroft-lab storm --replay {}",
                out.join(format!("storm-{}.txt", failure.seed)).display()
            ))?,
            None => show::line(&format!(
                "\nto replay it, put these lines into a file for --replay:\n\n{}",
                failure.replay.trim_end()
            ))?,
        }
    }
    show::line(&format!("\n{} storms failed", report.failures.len()))
}
