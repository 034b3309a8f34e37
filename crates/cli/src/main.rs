//! The `undercroft` binary: reads the command line, calls the module of the subcommand, ends with
//! its status.

mod args;
mod awaits;
mod completions;
mod core;
mod curve;
mod daemon;
mod demo;
mod demote;
mod doctor;
mod door;
mod drain;
mod live;
mod manual;
mod measure;
mod memory;
#[cfg(test)]
mod options_page;
mod plugin;
mod preflight;
mod qemu;
mod restore;
mod run;
mod serve;
mod set;
mod show;
mod tier_kinds;
mod tiers_shown;
mod top;
mod upgrade;
mod values;
mod view;
mod vm;

use std::io::Write;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use undercroft_terminal::{Failure, LogFormat, log_failure, status};

fn main() -> ExitCode {
    // A manager reads no command line: what that takes of its heap it would keep for the run.
    let name = std::env::args_os().next();
    let ended = if live::is_manager(name.as_deref()) {
        live::serve().map(ExitCode::from)
    } else {
        read_command().and_then(dispatch)
    };
    match ended {
        Ok(code) => code,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "{failure}"); // it may be closed
            ExitCode::from(failure.status)
        }
    }
}

/// Commands that were in use once, and what to use instead.
const COMMANDS_GONE: [(&str, &str); 2] = [
    ("pause", "use `undercroft set PID paused=yes`"),
    ("resume", "use `undercroft set PID paused=no`"),
];

/// Options of `run` that were in use once, and what to use instead.
const GONE: [(&str, &str); 4] = [
    ("--class", "use --daemon=CLASS"),
    ("--latency-measure-only", "use --latency p99=200us,measure"),
    (
        "--stall-max",
        "use --placement waterfall --policy locality.wasm, and undercroft set PID \
         policy.stall_max_percent=30: docs/guide/policies.md",
    ),
    (
        "--page-size",
        "leave it out: pages leave a process by UFFDIO_MOVE, which the kernel does not have for huge \
         pages. Memory of virtual machines can have pages of 2 MiB: undercroft vm --page-size 2M",
    ),
];

/// The command line. A wrong one ends the process with status 2, and so does `--help` with 0.
fn read_command() -> Result<Command, Failure> {
    let error = match Cli::try_parse() {
        Ok(cli) => return Ok(cli.command),
        Err(error) => error,
    };
    let (context, all): (_, &[(&str, &str)]) = match error.kind() {
        ErrorKind::InvalidSubcommand => (ContextKind::InvalidSubcommand, &COMMANDS_GONE),
        ErrorKind::UnknownArgument if is_of_run() => (ContextKind::InvalidArg, &GONE),
        _ => error.exit(),
    };
    let Some(ContextValue::String(word)) = error.get(context) else {
        error.exit()
    };
    let name = word.split('=').next().unwrap_or(word);
    match all.iter().find(|(gone, _)| *gone == name) {
        Some((gone, instead)) => Err(Failure::new(
            status::USAGE,
            format!("{gone} is gone"),
            "an earlier version had it",
            *instead,
        )),
        None => error.exit(),
    }
}

fn is_of_run() -> bool {
    std::env::args_os().nth(1).is_some_and(|word| word == "run")
}

/// Runs one subcommand. Returns its status, or why it could not run.
fn dispatch(command: Command) -> Result<ExitCode, Failure> {
    let status = match command {
        Command::Run(args) => {
            let log = args.log.into();
            run::options(*args).map_or_else(|failure| refuse(failure, log), live::run)
        }
        Command::Vm(args) => {
            let log = args.run.log.into();
            vm::options(*args).map_or_else(|failure| refuse(failure, log), live::run)
        }
        Command::View(args) => view::view(&args),
        Command::Restore(args) => restore::restore(&args),
        Command::Status(args) => {
            let runs = live::snapshots_of(args.others.all)?;
            show::status(&runs, args.run.as_ref(), args.form())
        }
        Command::Top(args) => top::top(args.interval, args.sort, args.others.all),
        Command::Serve(args) => serve::serve(&args),
        Command::Daemon(args) => daemon::daemon(args),
        Command::Set(args) => set::set(&args.run, args.change),
        Command::Demote(args) => demote::demote(&args),
        Command::Core(args) => core::core(args.pid),
        Command::Upgrade(args) => upgrade::upgrade(&args),
        Command::Versions => upgrade::versions(),
        Command::Demo(args) => demo::demo(&args),
        Command::Door(args) => door::serve(&args),
        Command::Await(args) => awaits::become_program(&args),
        Command::DemoKv { socket } => demo::serve_bundled(&socket),
        Command::Doctor(args) => doctor::doctor(args.json),
        Command::Tiers(args::TiersArgs {
            command: Some(command),
            ..
        }) => match command {
            args::TiersCommand::Show { run, json } => tiers_shown::print(run.as_ref(), json),
            args::TiersCommand::Change(change) => drain::change(&change),
        },
        Command::Tiers(args) if args.measure.is_empty() => tier_kinds::print(args.json),
        Command::Tiers(args) => measure::tiers(&args.measure, args.json),
        Command::Policy(args::PolicyCommand::New { dir }) => plugin::template::write(&dir),
        Command::Policy(args::PolicyCommand::Check { file }) => plugin::check::check(&file),
        Command::Policy(args::PolicyCommand::Bench { file, trace }) => {
            plugin::bench::bench(&file, &trace)
        }
        Command::Completions { shell } => completions::print(Cli::command(), shell),
        Command::Pids => completions::pids(),
        Command::Man { out: Some(out), .. } => manual::write(Cli::command(), &out),
        Command::Man { command, .. } => manual::show(Cli::command(), &command),
    };
    status.map(ExitCode::from)
}

/// Refuses a run, in the form of its log.
fn refuse(failure: Failure, log: LogFormat) -> Result<u8, Failure> {
    match log {
        LogFormat::Text => Err(failure),
        LogFormat::Json => {
            let line = log_failure(&failure);
            let _ = writeln!(std::io::stderr(), "{line}"); // it may be closed
            Ok(failure.status)
        }
    }
}

/// Prints that a test did not run, past the test harness's capture: `NAME: reason`.
#[cfg(test)]
pub(crate) fn skip(what: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
