//! The page of all options, `docs/guide/options.md`: made from the definitions of `--help`, and
//! compared with them. `cargo xtask options` writes it.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use clap::{Arg, Command, CommandFactory};

use crate::args::Cli;

/// Set by `cargo xtask options`: the page is written, not compared.
const WRITE: &str = "UNDERCROFT_WRITE_OPTIONS";

const HEAD: &str = "# Options

Every command of `undercroft` and its options, as `--help` has them. `cargo xtask options` makes this page; do not edit
it. The options of tiers are those of `undercroft tiers`, and [tiers.md](tiers.md) explains them.
";

#[test]
fn the_page_of_options_is_that_of_the_command_line() {
    let mut command = Cli::command();
    command.build();
    let mut page = HEAD.to_owned();
    let all = command.get_subcommands();
    for of in all.filter(|of| of.get_name() != "help") {
        section(of, &format!("undercroft {}", of.get_name()), &mut page);
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/options.md");
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, page).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap();
    assert!(
        found == page,
        "docs/guide/options.md is not that of the command line: run `cargo xtask options`"
    );
}

/// The tables of a command, and the sections of what is below it.
fn section(of: &Command, name: &str, page: &mut String) {
    if of.is_hide_set() || of.get_name() == "help" {
        return;
    }
    let about = of.get_about().map(ToString::to_string).unwrap_or_default();
    let _ = writeln!(page, "\n## `{name}`\n\n{}", wrapped(&sentence(&about)));
    let shown: Vec<&Arg> = of.get_arguments().filter(|arg| is_listed(arg)).collect();
    let (hidden, open): (Vec<&Arg>, Vec<&Arg>) = shown.iter().partition(|arg| arg.is_hide_set());
    table(&open, page);
    if !hidden.is_empty() {
        page.push_str(
            "\nFor measurements, and for the policies of papers; `--help` leaves them out:\n",
        );
        table(&hidden, page);
    }
    for below in of.get_subcommands() {
        section(below, &format!("{name} {}", below.get_name()), page);
    }
}

fn is_listed(arg: &Arg) -> bool {
    !matches!(arg.get_id().as_str(), "help" | "version")
}

fn table(args: &[&Arg], page: &mut String) {
    if args.is_empty() {
        return;
    }
    page.push_str("\n| option | default | meaning |\n|---|---|---|\n");
    for arg in args {
        let defaults = arg.get_default_values().iter();
        let default: Vec<String> = defaults
            .filter(|_| arg.get_action().takes_values())
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        let cells = [names(arg), default.join(" "), meaning(arg)];
        let cells = cells.map(|cell| cell.replace('|', "\\|"));
        let _ = writeln!(page, "| {} | {} | {} |", cells[0], cells[1], cells[2]);
    }
}

/// The option as it is typed, such as `-m`, `--memory-max SIZE`.
fn names(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let values: Vec<&str> = values.iter().map(|name| name.as_str()).collect();
    let values = values.join(" ");
    let Some(long) = arg.get_long() else {
        let several = arg.get_num_args().is_some_and(|n| n.max_values() > 1);
        return format!("`{values}`{}", if several { "..." } else { "" });
    };
    let values = match (arg.get_action().takes_values(), arg.is_require_equals_set()) {
        (false, _) => String::new(),
        (true, true) => format!("[={values}]"),
        (true, false) => format!(" {values}"),
    };
    let short = arg.get_short();
    let short = short
        .map(|short| format!("`-{short}`, "))
        .unwrap_or_default();
    format!("{short}`--{long}{values}`")
}

fn meaning(arg: &Arg) -> String {
    let mut text = sentence(&arg.get_help().map(ToString::to_string).unwrap_or_default());
    for value in arg.get_possible_values() {
        if let Some(help) = value.get_help().filter(|_| arg.get_action().takes_values()) {
            let help = sentence(&help.to_string());
            let _ = write!(text, " `{}`: {help}", value.get_name());
        }
    }
    text
}

/// The text on a line that ends with a full stop.
fn sentence(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if !line.is_empty() && !line.ends_with('.') {
        line.push('.');
    }
    line
}

/// The same in lines of at most 120 columns.
fn wrapped(line: &str) -> String {
    let mut text = String::new();
    let mut column = 0;
    for word in line.split(' ') {
        let wide = word.chars().count();
        if column > 0 {
            let fits = column + 1 + wide <= 120;
            text.push(if fits { ' ' } else { '\n' });
            column = if fits { column + 1 } else { 0 };
        }
        text.push_str(word);
        column += wide;
    }
    text
}
