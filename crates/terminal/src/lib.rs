//! How a command speaks to a person: an error with its fix, and what it prints.
#![forbid(unsafe_code)]

mod command;
mod failure;
mod log;

use std::io::{self, Write};

use serde::Serialize;

pub use command::{command_line, is_obeyed};
pub use failure::{Failure, status};
pub use log::{LogFormat, log_failure, log_message, log_object, log_time};

/// Prints `value` as indented JSON on standard output.
pub fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| cannot_print(&error.to_string()))?;
    line(&text)
}

/// Prints one line on standard output. A closed pipe is no error.
pub fn line(text: &str) -> Result<(), Failure> {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(cannot_print(&error.to_string()))
        }
        _ => Ok(()),
    }
}

/// Whether colours are allowed (`NO_COLOR`). The caller also checks for a terminal.
pub fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn cannot_print(why: &str) -> Failure {
    Failure::new(
        status::FAILED,
        "cannot print the result",
        why,
        "check where standard output goes",
    )
}
