//! Manual pages, made from the definitions of `--help`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use undercroft_terminal::{Failure, status};

/// Prints `undercroft(1)`, or writes it and one page for each subcommand into `directory`.
pub(crate) fn manual(command: clap::Command, directory: Option<&Path>) -> Result<u8, Failure> {
    let (what, done) = match directory {
        Some(directory) => (
            format!("write manual pages into {}", directory.display()),
            write_all(command, directory),
        ),
        None => (
            "print the manual page".to_owned(),
            render(command).and_then(|page| io::stdout().write_all(&page)),
        ),
    };
    done.map(|()| 0).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("cannot {what}"),
            error.to_string(),
            "choose a directory that can be written",
        )
    })
}

fn render(command: clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(page)
}

fn write_all(mut command: clap::Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    command.build();
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let page = render(sub.clone().version(env!("CARGO_PKG_VERSION")))?;
        let name = format!("undercroft-{}.1", sub.get_name());
        fs::write(directory.join(name), page)?;
    }
    fs::write(directory.join("undercroft.1"), render(command)?)
}
