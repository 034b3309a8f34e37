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
mod top;
mod trace;
mod upgrade;
mod values;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
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
        Command::Manager { arguments } => live::serve(arguments),
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
        }) => drain::change(&command),
        Command::Tiers(args) if args.measure.is_empty() => show::tiers(args.json),
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
