//! Manual pages, made from the definitions of `--help`.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};

use clap::Command;
use undercroft_terminal::{Failure, status};

/// Shows `undercroft(1)`, or the page of a subcommand: by `man` on a terminal. Elsewhere its
/// source is printed.
///
/// * `sub`: its words, such as `tiers add`.
pub(crate) fn show(mut command: Command, sub: &[String]) -> Result<u8, Failure> {
    command.build();
    let name = sub.join("-");
    let page = if sub.is_empty() {
        render(command)
    } else {
        match pages(&command, "").into_iter().find(|page| page.0 == name) {
            Some((_, sub)) => render(versioned(sub)),
            None => {
                let names: Vec<_> = subcommands(&command).map(Command::get_name).collect();
                return Err(Failure::new(
                    status::FAILED,
                    "cannot show the manual page",
                    format!("there is no subcommand `{}`", sub.join(" ")),
                    format!(
                        "name one of: {}; `--out DIR` writes all pages",
                        names.join(", ")
                    ),
                ));
            }
        }
    };
    let shown = page.and_then(|page| match viewer() {
        Some(viewer) => view(viewer, &page),
        None => io::stdout().write_all(&page),
    });
    shown.map(|()| 0).map_err(|error| {
        let what = "cannot show the manual page";
        Failure::new(
            status::FAILED,
            what,
            error.to_string(),
            "write it: `--out DIR`",
        )
    })
}

/// Writes `undercroft(1)` and one page for each subcommand into `directory`.
pub(crate) fn write(mut command: Command, directory: &Path) -> Result<u8, Failure> {
    command.build();
    let put = |name: String, page: io::Result<Vec<u8>>| fs::write(directory.join(name), page?);
    let written = fs::create_dir_all(directory).and_then(|()| {
        for (name, sub) in pages(&command, "") {
            let name = format!("undercroft-{name}.1");
            put(name, render(versioned(sub)))?;
        }
        put("undercroft.1".to_owned(), render(command.clone()))
    });
    written.map(|()| 0).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("cannot write manual pages into {}", directory.display()),
            error.to_string(),
            "choose a directory that can be written",
        )
    })
}

/// The pages below a command, with their names: `tiers`, `tiers-add`.
fn pages<'a>(command: &'a Command, above: &str) -> Vec<(String, &'a Command)> {
    let below = subcommands(command).flat_map(|sub| {
        let name = format!("{above}{}", sub.get_name());
        let inner = pages(sub, &format!("{name}-"));
        std::iter::once((name, sub)).chain(inner)
    });
    below.collect()
}

/// The subcommands that have a page.
fn subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    let all = command.get_subcommands();
    all.filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
}

fn versioned(sub: &Command) -> Command {
    sub.clone().version(env!("CARGO_PKG_VERSION"))
}

fn render(command: Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(page)
}

/// `man`, on a terminal where it is installed.
fn viewer() -> Option<Child> {
    let mut man = Process::new("man");
    man.args(["--local-file", "-"]).stdin(Stdio::piped());
    let started = io::stdout().is_terminal().then(|| man.spawn());
    started.and_then(Result::ok)
}

fn view(mut viewer: Child, page: &[u8]) -> io::Result<()> {
    if let Some(mut to) = viewer.stdin.take() {
        // Who leaves the page early does not read all of it.
        let _ = to.write_all(page);
    }
    viewer.wait().map(drop)
}
