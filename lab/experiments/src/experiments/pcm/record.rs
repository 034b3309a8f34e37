//! `pcm-traces`: makes the inputs, records each program under valgrind, and keeps the traces
//! outside the repository.
//!
//! The traces go to `$UNDERCROFT_TRACES`, or to `undercroft/traces` in the user's cache directory.
//! An existing trace is kept if the same recipe made it from the same inputs, because recording
//! takes minutes. `NAME.made` beside it says what it was made of: a digest of program, command,
//! cache and inputs, and one of the trace. The inputs are made anew each time. Remove either file
//! to record the trace again.

use super::load::{Loaded, directory, recorded_at};
use super::recipes::{RECIPES, Recipe};
use super::walkers::WALKERS;
use crate::experiments::{Lab, progress, skip};
use crate::results::{Results, Simulated};
use anyhow::{Context, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use xxhash_rust::xxh3::Xxh3;

/// Records all of them. In small runs: one tiny program, into the results' directory.
pub(in crate::experiments) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let Some(binary) = &lab.options.recorder else {
        skip(
            results,
            "no recorder was given; run `undercroft-lab run pcm-traces`",
        );
        return Ok(());
    };
    let traces = if lab.options.small {
        let missing = ["valgrind", "sort"].into_iter().find(|name| !exists(name));
        if let Some(missing) = missing {
            let why =
                format!("{missing} is missing; install it (Debian: apt-get install valgrind)");
            skip(results, &why);
            return Ok(());
        }
        vec![record_sort(binary, &lab.options.out)?]
    } else {
        record_all(binary, results)?
    };
    results.simulated = Some(Simulated {
        traces: traces.into_iter().map(|loaded| loaded.facts).collect(),
        ..Simulated::default()
    });
    Ok(())
}

/// Records `sort` over a few lines, in `out`.
fn record_sort(binary: &Path, out: &Path) -> anyhow::Result<Loaded> {
    let lines: Vec<String> = (0..2000u64)
        .map(|at| format!("{}\n", undercroft_seeded::finish(at)))
        .collect();
    fs::write(out.join("lines"), lines.concat())?;
    let command = ["sort", "lines"].map(str::to_owned);
    let trace = out.join("sort.trace");
    record(binary, out, &command, None, "16K,8,64", &trace)?;
    recorded_at(out, "sort")
}

/// Records every program that has no trace of its recipe yet.
fn record_all(binary: &Path, results: &mut Results) -> anyhow::Result<Vec<Loaded>> {
    let directory = directory()?;
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
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
    let recipes = RECIPES.iter().chain(&WALKERS);
    recipes
        .map(|recipe| keep_or_record(binary, &directory, recipe, results))
        .collect()
}

/// Returns the trace of a recipe: the existing one if it was made from the same inputs, else a new
/// one.
fn keep_or_record(
    binary: &Path,
    directory: &Path,
    recipe: &Recipe,
    results: &mut Results,
) -> anyhow::Result<Loaded> {
    let command = (recipe.command)()?;
    let inputs = Inputs::make(directory, recipe)?;
    let made_of = digest(recipe, &command, &inputs.0)?;
    if let Some(loaded) = kept(directory, recipe.name, made_of) {
        let note = format!("{} was there already and is kept", recipe.name);
        results.notes.push(note);
        return Ok(loaded);
    }
    progress(&format!("recording {}: {}", recipe.name, recipe.about));
    let trace = directory.join(format!("{}.trace", recipe.name));
    record(
        binary,
        &inputs.0,
        &command,
        recipe.stdin,
        recipe.cache,
        &trace,
    )?;
    let loaded = recorded_at(directory, recipe.name)?;
    // The note is written last: a recording that breaks off leaves a trace without it.
    keep(directory, recipe.name, made_of, &loaded)?;
    Ok(loaded)
}

/// A directory with the inputs of a recipe. It is removed when this value is dropped.
struct Inputs(PathBuf);

impl Inputs {
    fn make(directory: &Path, recipe: &Recipe) -> anyhow::Result<Inputs> {
        let inputs = Inputs(directory.join(format!("{}.inputs", recipe.name)));
        let _ = fs::remove_dir_all(&inputs.0);
        fs::create_dir_all(&inputs.0).with_context(|| format!("create {}", inputs.0.display()))?;
        progress(&format!("making the inputs of {}", recipe.name));
        (recipe.inputs)(&inputs.0)?;
        Ok(inputs)
    }
}

impl Drop for Inputs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A digest of all that decides a recording: the program, its command, standard input and cache,
/// and every file of `inputs`. The libraries are left out.
fn digest(recipe: &Recipe, command: &[String], inputs: &Path) -> anyhow::Result<u64> {
    let mut hash = Xxh3::new();
    let mut add = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for word in command {
        add(word.as_bytes());
    }
    add(recipe.stdin.unwrap_or_default().as_bytes());
    add(recipe.cache.as_bytes());
    if let Some(program) = command.first().and_then(|name| find(name)) {
        add(&fs::read(&program).with_context(|| format!("read {}", program.display()))?);
    }
    let entries = fs::read_dir(inputs)?.collect::<Result<Vec<_>, _>>()?;
    let mut files: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
    files.sort();
    for file in files {
        add(file.file_name().unwrap_or_default().as_encoded_bytes());
        add(&fs::read(&file).with_context(|| format!("read {}", file.display()))?);
    }
    Ok(hash.digest())
}

/// The file that says what the trace `name` was made of.
fn made(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.made"))
}

/// The contents of that file.
fn made_text(made_of: u64, loaded: &Loaded) -> String {
    format!("recipe {made_of:016x}\ntrace {}\n", loaded.facts.identity)
}

/// The existing trace, if it was made of this and has not changed since.
fn kept(directory: &Path, name: &str, made_of: u64) -> Option<Loaded> {
    let text = fs::read_to_string(made(directory, name)).ok()?;
    let loaded = recorded_at(directory, name).ok()?;
    (text == made_text(made_of, &loaded)).then_some(loaded)
}

/// Notes what a trace was made of.
fn keep(directory: &Path, name: &str, made_of: u64, loaded: &Loaded) -> anyhow::Result<()> {
    let path = made(directory, name);
    fs::write(&path, made_text(made_of, loaded))
        .with_context(|| format!("write {}", path.display()))
}

/// Directories that are searched for the programs. Games have a place of their own.
const PROGRAMS: &str = "/usr/local/bin:/usr/bin:/bin:/usr/games";

/// Runs it in an environment of its own, so that addresses and locales do not depend on the
/// caller's.
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
        Some(name) => Stdio::from(fs::File::open(inputs.join(name))?),
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

/// The program that a recording of `name` runs.
fn find(name: &str) -> Option<PathBuf> {
    // Joining an absolute name gives that name.
    let mut places = std::env::split_paths(PROGRAMS).map(|directory| directory.join(name));
    places.find(|place| place.is_file())
}

#[cfg(test)]
mod tests {
    use super::super::recipes::RECIPES;
    use super::*;
    use undercroft_references::Generator;
    use undercroft_trace::TraceWriter;

    fn write_trace(directory: &Path, seed: u64) {
        let spec = format!("zipf:page=512,pages=50,refs=500,seed={seed}");
        let generator = Generator::new(spec.parse().expect("a pattern"));
        let mut writer = TraceWriter::new(Vec::new(), generator.header()).expect("a trace");
        for reference in generator {
            writer.write(reference).expect("memory");
        }
        let (_, bytes) = writer.finish(0).expect("memory");
        fs::write(directory.join("t.trace"), bytes).expect("a file");
    }

    #[test]
    fn a_trace_is_kept_only_with_the_note_of_its_own_recipe() {
        let place = tempfile::tempdir().expect("a directory");
        let directory = place.path();
        write_trace(directory, 1);
        assert!(kept(directory, "t", 7).is_none(), "it may be part of one");
        let loaded = recorded_at(directory, "t").expect("a trace");
        keep(directory, "t", 7, &loaded).expect("a note");
        assert!(kept(directory, "t", 7).is_some());
        assert!(kept(directory, "t", 8).is_none(), "another recipe");
        write_trace(directory, 2);
        assert!(kept(directory, "t", 7).is_none(), "another trace");
    }

    #[test]
    fn everything_a_recording_depends_on_changes_its_digest() {
        let place = tempfile::tempdir().expect("a directory");
        let inputs = place.path();
        let command = |text: &str| super::super::recipes::words(text);
        let recipe = |cache, stdin| {
            let [first, ..] = RECIPES;
            Recipe {
                cache,
                stdin,
                ..first
            }
        };
        let of = |recipe: Recipe, text: &str| {
            digest(&recipe, &command(text), inputs).expect("readable files")
        };
        fs::write(inputs.join("a"), "one").expect("a file");
        let first = of(recipe("1M,16,64", None), "sh a");
        assert_eq!(of(recipe("1M,16,64", None), "sh a"), first);
        let mut all = vec![
            first,
            of(recipe("2M,16,64", None), "sh a"),
            of(recipe("1M,16,64", Some("a")), "sh a"),
            of(recipe("1M,16,64", None), "sh b"),
            of(recipe("1M,16,64", None), "cat a"),
        ];
        fs::write(inputs.join("a"), "two").expect("a file");
        all.push(of(recipe("1M,16,64", None), "sh a"));
        fs::rename(inputs.join("a"), inputs.join("c")).expect("a file");
        all.push(of(recipe("1M,16,64", None), "sh a"));
        fs::write(inputs.join("b"), "").expect("a file");
        all.push(of(recipe("1M,16,64", None), "sh a"));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn programs_are_found_by_name_and_by_path() {
        let shell = find("sh").expect("every system has one");
        assert_eq!(find(&shell.display().to_string()), Some(shell));
        assert_eq!(find("no-such-program"), None);
    }
}
