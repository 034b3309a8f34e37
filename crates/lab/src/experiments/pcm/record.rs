//! `pcm-traces`: makes the inputs, records each program under valgrind, keeps the traces outside the repository.
//!
//! They go to `$UNDERCROFT_TRACES`, or `undercroft/traces` in the user's cache directory. One that is there already, of the same
//! command behind the same cache, is kept: recording takes minutes. Remove the file to record it again.

use super::recipes::{RECIPES, Recipe};
use super::study;
use super::walkers::WALKERS;
use crate::experiments::{Lab, progress, skip};
use crate::results::{Results, Simulated, TraceFacts};
use anyhow::{Context, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use undercroft_trace::CacheSpec;

/// Where recorded traces are. Errors: no home directory is known.
pub(super) fn directory() -> anyhow::Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(directory) = set("UNDERCROFT_TRACES") {
        return Ok(directory.into());
    }
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")));
    let cache = cache.context(
        "where traces go is unknown: HOME is not set; set UNDERCROFT_TRACES to a directory",
    )?;
    Ok(cache.join("undercroft/traces"))
}

/// Records all of them; in small runs one tiny program, into the results' directory.
pub(in crate::experiments) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let Some(binary) = &lab.options.undercroft_binary else {
        skip(
            results,
            "no undercroft binary was given, and it does the recording; run `undercroft lab run pcm-traces`",
        );
        return Ok(());
    };
    let mut found = Simulated::default();
    if lab.options.small {
        let missing = ["valgrind", "sort"].into_iter().find(|name| !exists(name));
        if let Some(missing) = missing {
            let why =
                format!("{missing} is missing; install it (Debian: apt-get install valgrind)");
            skip(results, &why);
            return Ok(());
        }
        let lines: Vec<String> = (0..2000u64)
            .map(|at| format!("{}\n", undercroft_trace::random::mix(at)))
            .collect();
        std::fs::write(lab.options.out.join("lines"), lines.concat())?;
        let command = ["sort", "lines"].map(str::to_owned);
        record(
            binary,
            &lab.options.out,
            &command,
            None,
            "16K,8,64",
            &lab.options.out.join("sort.trace"),
        )?;
        found
            .traces
            .push(study::recorded_at(&lab.options.out, "sort")?.facts);
        results.simulated = Some(found);
        return Ok(());
    }
    let directory = directory()?;
    std::fs::create_dir_all(&directory)
        .with_context(|| format!("create {}", directory.display()))?;
    ensure!(
        exists("valgrind"),
        "valgrind does the recording and is missing; install it (Debian: apt-get install valgrind)"
    );
    for recipe in RECIPES.iter().chain(&WALKERS) {
        if !exists(recipe.needs) {
            bail!(
                "{} is missing, which is traced as {}; install it (Debian: apt-get install {})",
                recipe.needs,
                recipe.name,
                recipe.package
            );
        }
    }
    for recipe in RECIPES.iter().chain(&WALKERS) {
        let kept = study::recorded_at(&directory, recipe.name).ok();
        let command = (recipe.command)()?;
        let same = |facts: &TraceFacts| {
            let cache = recipe.cache.parse::<CacheSpec>();
            let behind = cache.is_ok_and(|cache| facts.source.ends_with(&format!("cache {cache}")));
            facts.command == command.join(" ") && behind
        };
        let loaded = match kept.filter(|loaded| same(&loaded.facts)) {
            Some(loaded) => {
                let note = format!("{} was there already and is kept", recipe.name);
                results.notes.push(note);
                loaded
            }
            None => {
                progress(&format!("recording {}: {}", recipe.name, recipe.about));
                one(binary, recipe, &command, &directory)?;
                study::recorded_at(&directory, recipe.name)?
            }
        };
        found.traces.push(loaded.facts);
    }
    results.simulated = Some(found);
    Ok(())
}

fn one(binary: &Path, recipe: &Recipe, command: &[String], directory: &Path) -> anyhow::Result<()> {
    let inputs = directory.join(format!("{}.inputs", recipe.name));
    let _ = std::fs::remove_dir_all(&inputs);
    std::fs::create_dir_all(&inputs).with_context(|| format!("create {}", inputs.display()))?;
    (recipe.inputs)(&inputs)?;
    let trace = directory.join(format!("{}.trace", recipe.name));
    let recorded = record(binary, &inputs, command, recipe.stdin, recipe.cache, &trace);
    let _ = std::fs::remove_dir_all(&inputs);
    if recorded.is_err() {
        // A part of a recording would be kept as a whole one next time.
        let _ = std::fs::remove_file(&trace);
    }
    recorded
}

/// Where the programs are looked for; games have a place of their own.
const PROGRAMS: &str = "/usr/local/bin:/usr/bin:/bin:/usr/games";

/// In an environment of its own, so that addresses and locales do not depend on who calls.
fn record(
    binary: &Path,
    inputs: &Path,
    command: &[String],
    stdin: Option<&str>,
    cache: &str,
    trace: &Path,
) -> anyhow::Result<()> {
    let trace = std::path::absolute(trace)?;
    let input = match stdin {
        Some(name) => Stdio::from(std::fs::File::open(inputs.join(name))?),
        None => Stdio::null(),
    };
    let output = Command::new(binary)
        .args(["trace", "record", "--quiet", "--cache", cache, "--out"])
        .arg(&trace)
        .arg("--")
        .args(command)
        .current_dir(inputs)
        .env_clear()
        .env("PATH", PROGRAMS)
        .env("LC_ALL", "C")
        .stdin(input)
        .stdout(Stdio::null())
        .output()
        .with_context(|| format!("run {}", binary.display()))?;
    ensure!(
        output.status.success(),
        "recording `{}` failed: {}",
        command.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

fn exists(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories = std::env::split_paths(&path).chain(std::env::split_paths(PROGRAMS));
    directories.any(|directory| directory.join(program).is_file())
}
