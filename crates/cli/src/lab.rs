//! `undercroft lab`: gives the benchmarks this program, both to measure and as the workload.

use std::ffi::OsString;

use serde::Serialize;

use crate::args::{LabCommand, LabCostArgs, LabRunArgs};
use crate::failure::{Failure, status};
use crate::show;

/// Name that runs every experiment.
const ALL: &str = "all";

/// Runs one lab command.
pub(crate) fn lab(command: LabCommand) -> Result<u8, Failure> {
    match command {
        LabCommand::List(args) => list(args.json)?,
        LabCommand::Run(args) => run(args)?,
        LabCommand::Cost(args) => cost(&args)?,
        LabCommand::Plot { results, out } => undercroft_lab::plot(&results, &out).map_err(|error| {
            Failure::new(
                status::FAILED,
                format!("cannot draw the plots of {}", results.display()),
                format!("{error:#}"),
                "give the results.json that `undercroft lab run` wrote, and a directory that can be written",
            )
        })?,
    }
    Ok(0)
}

fn list(as_json: bool) -> Result<(), Failure> {
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
    let infos = undercroft_lab::list();
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

fn cost(args: &LabCostArgs) -> Result<(), Failure> {
    let table = if args.reports.is_empty() {
        undercroft_lab::cost::simulated(false)
    } else {
        undercroft_lab::cost::of_reports(&args.reports)
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

fn run(args: LabRunArgs) -> Result<(), Failure> {
    let own = std::env::current_exe().map_err(|error| {
        Failure::new(
            status::FAILED,
            "cannot find undercroft's own program file",
            error.to_string(),
            "mount /proc",
        )
    })?;
    let names: Vec<String> = match args.name.as_str() {
        ALL => undercroft_lab::list()
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
        let options = undercroft_lab::RunOptions {
            out: out.clone(),
            small: args.small,
            undercroft_binary: (!args.kernel_only).then(|| own.clone()),
            undercroft_arguments: args.undercroft_options.clone(),
            touch_command: Some(vec![
                own.clone().into_os_string(),
                OsString::from("lab-touch"),
            ]),
            rounds: args.rounds,
            only: args.only.clone(),
            settings: args.settings.clone(),
            footprint_mib: args.footprint.map(|size| size.0 >> 20),
            swap_directory: args.swap_dir.clone(),
        };
        undercroft_lab::run(&name, &options).map_err(|error| {
            Failure::new(
                status::FAILED,
                format!("experiment `{name}` failed"),
                format!("{error:#}"),
                "see `undercroft lab list` for the names and `undercroft doctor` for what this machine allows",
            )
        })?;
        show::line(&out.join("results.md").display().to_string())?;
    }
    Ok(())
}
