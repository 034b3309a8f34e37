//! The `undercroft-lab` binary: benchmarks, simulator, storms and traces. `undercroft` itself uses
//! none of it.
#![forbid(unsafe_code)]

mod args;
mod lab;
mod sim;
mod storm;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use undercroft_terminal::Failure;

use args::{Cli, Command};

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
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
        Command::List(args) => lab::list(args.json),
        Command::Run(args) => lab::run(args),
        Command::Cost(args) => lab::cost(&args),
        Command::Plot { results, out } => lab::plot(&results, &out),
        Command::Sim(args) => sim::sim(&args),
        Command::Storm(args) => return storm::storm(&args).map(ExitCode::from),
        Command::Trace(command) => return trace::trace(command).map(ExitCode::from),
        Command::Touch { arguments } => {
            return Ok(undercroft_experiments::touch::main(arguments.into_iter()));
        }
    };
    status.map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Cli;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
