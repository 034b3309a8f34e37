//! The project's own commands: `cargo xtask test`, `tidy`, `results` and `options`.
//!
//! Every check of `tidy` is also a test of this crate.

mod results;
mod ring;
mod suite;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask test [--lints] [--all]  the tests of a change, or all; with --lints also Clippy
       cargo xtask tidy                      the rules of the tree
       cargo xtask results                   the figures of docs/results, as its table has them
       cargo xtask results add DIR [NAME]    takes a folder of `undercroft-lab run` into docs/results
       cargo xtask options                   writes docs/guide/options.md anew";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["test", ref more @ ..] if more.iter().all(|word| ["--lints", "--all"].contains(word)) => {
            suite::run(more.contains(&"--lints"), more.contains(&"--all"))
        }
        ["tidy"] => tidy::run(),
        ["results"] => results::print(),
        ["results", "add", from] => results::add(from, None),
        ["results", "add", from, name] => results::add(from, Some(name)),
        ["options"] => options(),
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

/// Has the test that compares the page of options write it.
fn options() -> Result<String, String> {
    let test = "options_page::the_page_of_options_is_that_of_the_command_line";
    let status = std::process::Command::new(env!("CARGO"))
        .current_dir(tidy::root())
        .args([
            "test",
            "--quiet",
            "--package",
            "undercroft-cli",
            "--bin",
            "undercroft",
            test,
        ])
        .env("UNDERCROFT_WRITE_OPTIONS", "1")
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    if status.success() {
        Ok("docs/guide/options.md is written\n".to_owned())
    } else {
        Err("docs/guide/options.md is not written".to_owned())
    }
}
