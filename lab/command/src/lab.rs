//! The experiments: gives them the binary under test, and this program as the workload.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::Serialize;
use undercroft_terminal::{self as show, Failure, status};

use crate::args::{CostArgs, RunArgs};

/// Name that runs every experiment.
const ALL: &str = "all";

/// Draws the plots of existing results again.
pub(crate) fn plot(results: &Path, out: &Path) -> Result<(), Failure> {
    undercroft_experiments::plot(results, out).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("cannot draw the plots of {}", results.display()),
            format!("{error:#}"),
            "give the results.json that `undercroft-lab run` wrote, and a directory that can be written",
        )
    })
}

/// Prints the experiments.
pub(crate) fn list(as_json: bool) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Entry {
        name: &'static str,
        about: &'static str,
    }
    #[derive(Serialize)]
    struct List {
        schema_version: u32,
        experiments: Vec<Entry>,
    }
    let infos = undercroft_experiments::list();
    if as_json {
        let experiments = infos
            .iter()
            .map(|info| Entry {
                name: info.name,
                about: info.about,
            })
            .collect();
        return show::json(&List {
            schema_version: 1,
            experiments,
        });
    }
    for info in infos {
        show::line(&format!("{:<16} {}", info.name, info.about))?;
    }
    Ok(())
}

/// Prints performance by cost.
pub(crate) fn cost(args: &CostArgs) -> Result<(), Failure> {
    let table = if args.reports.is_empty() {
        undercroft_experiments::cost::simulated(false)
    } else {
        undercroft_experiments::cost::of_reports(&args.reports)
    };
    let table = table.map_err(|error| {
        Failure::new(
            status::FAILED,
            "cannot set performance against cost",
            format!("{error:#}"),
            "give reports of runs of the same work, all with --memory-price and a price= of each tier",
        )
    })?;
    if args.json {
        return show::json(&table);
    }
    show::line(table.to_string().trim_end())
}

/// Runs one experiment, or all.
pub(crate) fn run(args: RunArgs) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(|error| {
        Failure::new(
            status::FAILED,
            "cannot find this program's own file",
            error.to_string(),
            "mount /proc",
        )
    })?;
    let tested = match (&args.undercroft, args.kernel_only) {
        (_, true) => None,
        (Some(path), _) => Some(there(path.clone())?),
        (None, _) => Some(there(own.with_file_name("undercroft"))?),
    };
    let names: Vec<String> = match args.name.as_str() {
        ALL => undercroft_experiments::list()
            .iter()
            .map(|info| info.name.to_owned())
            .collect(),
        _ => vec![args.name.clone()],
    };
    for name in names {
        let out = match args.name.as_str() {
            ALL => args.out.join(&name),
            _ => args.out.clone(),
        };
        let options = undercroft_experiments::RunOptions {
            out: out.clone(),
            small: args.small,
            undercroft_binary: tested.clone(),
            recorder: Some(own.clone()),
            undercroft_arguments: args.undercroft_options.clone(),
            touch_command: Some(vec![own.clone().into_os_string(), OsString::from("touch")]),
            rounds: args.rounds,
            only: args.only.clone(),
            settings: args.settings.clone(),
            threads: args.threads.iter().map(|count| (*count).into()).collect(),
            operations: args.operations,
            footprint_mib: args.footprint.map(|size| size.0 >> 20),
            swap_directory: args.swap_dir.clone(),
        };
        undercroft_experiments::run(&name, &options).map_err(|error| {
            Failure::new(
                status::FAILED,
                format!("experiment `{name}` failed"),
                format!("{error:#}"),
                "see `undercroft-lab list` for the names and `undercroft doctor` for what this machine allows",
            )
        })?;
        show::line(&out.join("results.md").display().to_string())?;
    }
    Ok(())
}

/// The binary to measure, if it is there: known before the machine's swap is waited for.
fn there(path: PathBuf) -> Result<PathBuf, Failure> {
    if path.is_file() {
        return Ok(path);
    }
    Err(Failure::new(
        status::FAILED,
        "there is nothing to measure",
        format!("{} is not there", path.display()),
        "build it (`cargo build --release`), name another binary with --undercroft PATH, or use --kernel-only",
    ))
}
