//! The `undercroft` binary: reads the command line, calls the module of the subcommand, ends with
//! its status.

mod args;
mod curve;
mod daemon;
mod demo;
mod doctor;
mod drain;
mod failure;
mod lab;
mod live;
mod manual;
mod measure;
mod preflight;
mod run;
mod serve;
mod set;
mod show;
mod sim;
mod storm;
mod tier_kinds;
mod tiers_shown;
mod top;
mod trace;
mod upgrade;
mod values;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    // A manager reads no command line: what that takes of its heap it would keep for the run.
    let words: Vec<OsString> = std::env::args_os().skip(1).take(2).collect();
    let ended = match words.as_slice() {
        [name, launch] if name == "manager" => live::serve(launch).map(ExitCode::from),
        _ => dispatch(Cli::parse().command),
    };
    match ended {
        Ok(code) => code,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "{failure}"); // it may be closed
            ExitCode::from(failure.status)
        }
    }
}

/// Runs one subcommand. Returns its status, or why it could not run.
fn dispatch(command: Command) -> Result<ExitCode, Failure> {
    let status = match command {
        Command::Run(args) => live::run(run::options(args)?),
        Command::Status(args) => show::status(&live::snapshots()?, args.pid, args.form()),
        Command::Top(args) => top::top(args.interval, args.sort),
        Command::Serve(args) => serve::serve(&args),
        Command::Daemon(args) => daemon::daemon(args),
        Command::Set(args) => set::set(args.pid, args.change),
        Command::Pause(args) => set::pause(args.pid, true),
        Command::Resume(args) => set::pause(args.pid, false),
        Command::Upgrade(args) => upgrade::upgrade(&args),
        Command::Versions => upgrade::versions(),
        Command::Demo(args) => demo::demo(&args),
        Command::DemoKv { socket } => demo::serve_bundled(&socket),
        Command::Lab(args) => lab::lab(args.command),
        Command::Trace(args) => trace::trace(args.command),
        Command::LabTouch { arguments } => {
            return Ok(undercroft_lab::touch::main(arguments.into_iter()));
        }
        Command::Sim(args) => sim::sim(args),
        Command::Doctor(args) => doctor::doctor(args.json),
        Command::Tiers(args::TiersArgs {
            command: Some(command),
            ..
        }) => match command {
            args::TiersCommand::Show { pid, json } => tiers_shown::print(pid, json),
            args::TiersCommand::Change(change) => drain::change(&change),
        },
        Command::Tiers(args) if args.measure.is_empty() => tier_kinds::print(args.json),
        Command::Tiers(args) => measure::tiers(&args.measure, args.json),
        Command::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "undercroft",
                &mut std::io::stdout(),
            );
            Ok(0)
        }
        Command::Man { dir } => manual::manual(Cli::command(), dir.as_deref()),
    };
    status.map(ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
