//! The lab without the rest of undercroft: `undercroft-lab list | run NAME --out DIR [...] | plot
//! results.json DIR`.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: undercroft-lab list
       undercroft-lab run NAME --out DIR [--small] [--rounds N] [--footprint-mib N]
                      [--undercroft BINARY] [--swap-dir DIR]
       undercroft-lab plot RESULTS.json DIR";

fn main() -> ExitCode {
    match command(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("undercroft-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn command(words: Vec<String>) -> anyhow::Result<()> {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["list"] => undercroft_lab::list()
            .iter()
            .for_each(|info| println!("{:16} {}", info.name, info.about)),
        ["plot", results, out] => undercroft_lab::plot(Path::new(results), Path::new(out))?,
        ["run", name, ..] => {
            let mut options = undercroft_lab::RunOptions::default();
            let mut rest = words[2..].iter();
            while let Some(word) = rest.next() {
                let mut value = || {
                    rest.next()
                        .with_context(|| format!("`{word}` needs a value"))
                };
                match word.as_str() {
                    "--out" => options.out = value()?.into(),
                    "--small" => options.small = true,
                    "--rounds" => options.rounds = Some(value()?.parse().context("--rounds")?),
                    "--footprint-mib" => {
                        options.footprint_mib = Some(value()?.parse().context("--footprint-mib")?)
                    }
                    "--undercroft" => options.undercroft_binary = Some(value()?.into()),
                    "--swap-dir" => options.swap_directory = Some(value()?.into()),
                    other => bail!("unknown argument `{other}`\n{USAGE}"),
                }
            }
            if options.out == PathBuf::new() {
                bail!("--out DIR is missing\n{USAGE}");
            }
            undercroft_lab::run(name, &options)?;
            println!("{}", options.out.join("results.md").display());
        }
        _ => bail!("{USAGE}"),
    }
    Ok(())
}
