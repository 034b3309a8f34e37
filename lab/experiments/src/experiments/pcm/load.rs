//! The traces of the figures: where the recorded ones are, and how they come into memory.

use super::recipes::{RECIPES, Recipe};
use super::walkers::WALKERS;
use crate::experiments::{Lab, progress};
use crate::results::{Simulated, TraceFacts};
use anyhow::Context;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use undercroft_references::{Analysis, Generator, Sampling, Spec};
use undercroft_sim::{MemoryTrace, open};
use undercroft_trace::{Header, TraceReader};

/// A trace, ready to be simulated.
pub(super) struct Loaded {
    pub(super) facts: TraceFacts,
    pub(super) trace: MemoryTrace,
}

/// The four traces: recorded ones or, in small runs, generated ones of similar mixes.
pub(super) fn load(lab: &Lab, found: &mut Simulated) -> anyhow::Result<Vec<Loaded>> {
    of_recipes(lab, found, &RECIPES)
}

/// The four traces of programs that walk through their memory in order.
pub(super) fn walkers(lab: &Lab, found: &mut Simulated) -> anyhow::Result<Vec<Loaded>> {
    of_recipes(lab, found, &WALKERS)
}

fn of_recipes(lab: &Lab, found: &mut Simulated, recipes: &[Recipe]) -> anyhow::Result<Vec<Loaded>> {
    let mut all = Vec::new();
    for recipe in recipes {
        progress(&format!("reading {}", recipe.name));
        let loaded = if lab.options.small {
            generated(recipe.name, recipe.small)?
        } else {
            recorded(recipe.name)?
        };
        found.traces.push(loaded.facts.clone());
        all.push(loaded);
    }
    Ok(all)
}

/// A trace generated from its description `text`.
pub(super) fn generated(name: &str, text: &str) -> anyhow::Result<Loaded> {
    let spec: Spec = text
        .parse()
        .with_context(|| format!("the trace `{text}`"))?;
    let mut generator = Generator::new(spec);
    let header = generator.header();
    let time_end = generator.time_end();
    let mut analyses = analyses(&header)?;
    for reference in generator.by_ref() {
        for analysis in &mut analyses {
            analysis.add(reference)?;
        }
    }
    let facts = facts(
        name,
        &analyses,
        text,
        "generated",
        text.to_owned(),
        time_end,
    );
    let trace = open::open(text)?;
    Ok(Loaded { facts, trace })
}

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

fn recorded(name: &str) -> anyhow::Result<Loaded> {
    recorded_at(&directory()?, name)
}

/// The trace `NAME.trace` in `directory`.
pub(super) fn recorded_at(directory: &Path, name: &str) -> anyhow::Result<Loaded> {
    let path = directory.join(format!("{name}.trace"));
    let bytes = std::fs::read(&path).with_context(|| {
        format!(
            "the trace {} is missing; make the set with `undercroft-lab run pcm-traces --out DIR` \
             (valgrind, some minutes), \
             or try --small, which generates its own",
            path.display()
        )
    })?;
    let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
    let mut reader = TraceReader::new(BufReader::new(File::open(&path)?))?;
    let header = reader.header().clone();
    let mut analyses = analyses(&header)?;
    let mut block = Vec::new();
    while reader.next_block(&mut block)? {
        for reference in block.drain(..) {
            for analysis in &mut analyses {
                analysis.add(reference)?;
            }
        }
    }
    let time_end = reader.totals().map_or(0, |totals| totals.time_end);
    let command = header.command.join(" ");
    let identity = format!("{hash:016x}");
    let facts = facts(
        name,
        &analyses,
        &command,
        &header.source,
        identity,
        time_end,
    );
    let mut trace = open::open(&path.display().to_string())?;
    trace.name = name.to_owned();
    Ok(Loaded { facts, trace })
}

/// The footprint in pages of 512 bytes and of 4 KiB.
fn analyses(header: &Header) -> anyhow::Result<[Analysis; 2]> {
    let none = Sampling::Pages(1);
    Ok([
        Analysis::new(header, 9, none)?,
        Analysis::new(header, 12, none)?,
    ])
}

fn facts(
    name: &str,
    [small, large]: &[Analysis; 2],
    command: &str,
    source: &str,
    identity: String,
    program_references: u64,
) -> TraceFacts {
    let counts = small.accesses();
    TraceFacts {
        name: name.to_owned(),
        identity,
        command: command.to_owned(),
        source: source.to_owned(),
        instruction_reads: counts.instructions,
        data_reads: counts.reads,
        data_writes: counts.writes,
        footprint_4k_bytes: large.footprint_pages() * 4096,
        footprint_512_bytes: small.footprint_pages() * 512,
        program_references,
    }
}
