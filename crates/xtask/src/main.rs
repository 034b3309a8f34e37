//! The project's own commands: `cargo xtask test`, `tidy` and `results`.
//!
//! Every check of `tidy` is also a test of this crate.

mod results;
mod suite;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask test [--lints]          all tests; with --lints also Clippy, without warnings
       cargo xtask tidy                      the rules of the tree
       cargo xtask results                   the figures of docs/results, as its table has them
       cargo xtask results add DIR [NAME]    takes a folder of `undercroft lab run` into docs/results";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["test"] => suite::run(false),
        ["test", "--lints"] => suite::run(true),
        ["tidy"] => tidy::run(),
        ["results"] => results::print(),
        ["results", "add", from] => results::add(from, None),
        ["results", "add", from, name] => results::add(from, Some(name)),
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
