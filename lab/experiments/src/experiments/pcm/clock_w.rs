//! `pcm-fig5`: CLOCK and CLOCK-W over memory, for every page size and every trace, recorded and
//! generated; and why CLOCK-W is worse in some cases.

use super::causes::{Case, causes, causes_figure, classes, explain, readings};
use super::load::{Loaded, generated, load, walkers};
use super::pairs::{Pair, both, pairs};
use super::study::{Constants, MEMORY_PERCENT, PAGE_BYTES, PCM, mean, memory_columns, model};
use crate::experiments::{Lab, progress};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, Verdict, number};
use undercroft_sim::setup::FaultTouch;

/// Patterns beside the recorded programs, from all reads to nearly all writes.
pub(super) const GENERATORS: [(&str, &str); 8] = [
    (
        "zipf, reads",
        "zipf:page=512,pages=8000,refs=200000,theta=0.9,writes=0,seed=11",
    ),
    (
        "zipf, 10 % writes",
        "zipf:page=512,pages=8000,refs=200000,theta=0.9,writes=0.1,dirty=0.3,seed=12",
    ),
    (
        "zipf, half writes",
        "zipf:page=512,pages=8000,refs=200000,theta=0.9,writes=0.5,seed=13",
    ),
    (
        "zipf, 80 % writes",
        "zipf:page=512,pages=8000,refs=200000,theta=0.9,writes=0.8,dirty=0.6,seed=14",
    ),
    (
        "uniform, half writes",
        "uniform:page=512,pages=8000,refs=200000,writes=0.5,dirty=0.5,seed=15",
    ),
    (
        "loop, half writes",
        "loop:page=512,pages=8000,refs=200000,writes=0.5,dirty=0.5,seed=16",
    ),
    (
        "scan + hot set",
        "scan_hot:page=512,pages=8000,refs=200000,writes=0.3,dirty=0.5,seed=17",
    ),
    (
        "phases",
        "phases:page=512,pages=8000,refs=200000,writes=0.4,dirty=0.5,seed=18",
    ),
];

/// Every recorded program under both policies, with every page size and memory.
fn programs<'a>(
    traces: impl Iterator<Item = &'a Loaded>,
    sizes: &[u64],
) -> anyhow::Result<Vec<SimulatedRun>> {
    let mut runs = Vec::new();
    for trace in traces {
        for page_bytes in sizes {
            progress(&format!("{} in {page_bytes}", trace.facts.name));
            let touches = [FaultTouch::All; 2];
            runs.extend(both(trace, *page_bytes, &MEMORY_PERCENT, touches)?);
        }
    }
    Ok(runs)
}

/// Every generated pattern under both policies. Appends the runs, and returns the traces.
fn generators(
    lab: &Lab,
    found: &mut Simulated,
    runs: &mut Vec<SimulatedRun>,
) -> anyhow::Result<Vec<Loaded>> {
    let mut patterns = Vec::new();
    for (name, text) in GENERATORS {
        progress(name);
        let small = text.replace("refs=200000", "refs=20000");
        let trace = generated(name, lab.pick(small.as_str(), text))?;
        runs.extend(both(&trace, 512, &MEMORY_PERCENT, [FaultTouch::All; 2])?);
        found.traces.push(trace.facts.clone());
        patterns.push(trace);
    }
    Ok(patterns)
}

/// Says why CLOCK-W is worse in some cases: how many of all cases, and how many of the shown ones.
fn reasons(
    cases: &[Case],
    (all, worse): (&[Pair<'_>], usize),
    (shown, worse_shown): (&[Pair<'_>], usize),
) -> String {
    let [reads_clean, reads_written, writes] = classes(cases);
    format!(
        "{worse} of {} cases are worse, {worse_shown} of {} in the paper's setting (512 B, four \
         programs). CLOCK-W forgets reads: a page that is only being read leaves at the hand's \
         next visit, and is read back. Of the {} worse cases with 512 B pages {reads_clean} are \
         worse mostly by reads of pages that are never written, {reads_written} by reads of pages \
         written at other times, and {writes} by write-outs: there pages are written, then only \
         read, then written again (the ring of a decompressor), and leave in between, written out \
         once more. Every one is in the table of causes, with the pages read back that CLOCK \
         would have kept. Our rule is the paper's word for word; writing pages out in passing is \
         far worse, and counting reads as well is better but still not always. The dearer a \
         write, the fewer cases (tables below). That CLOCK-W is never worse holds for the paper's \
         traces, not for ours.",
        all.len(),
        shown.len(),
        reads_clean + reads_written + writes,
    )
}

fn elapsed(run: &SimulatedRun) -> f64 {
    run.elapsed_seconds
}

/// Cases in which CLOCK-W takes longer; the worst ratio; the mean.
fn judge(pairs: &[Pair<'_>], time: impl Fn(&SimulatedRun) -> f64) -> (usize, f64, f64) {
    let ratios: Vec<f64> = pairs.iter().map(|pair| pair.ratio(&time)).collect();
    // A difference below a billionth is rounding.
    let worse = ratios.iter().filter(|ratio| **ratio > 1.0 + 1e-9).count();
    let worst = ratios.iter().copied().fold(0.0, f64::max);
    (worse, worst, mean(&ratios))
}

pub(in crate::experiments) fn run(lab: &Lab) -> anyhow::Result<Simulated> {
    let mut found = Simulated::of(model());
    let loaded = load(lab, &mut found)?;
    let walkers = walkers(lab, &mut found)?;
    let sizes: &[u64] = lab.pick(&[512, 4096], &PAGE_BYTES);
    let mut runs = programs(loaded.iter().chain(&walkers), sizes)?;
    let patterns = generators(lab, &mut found, &mut runs)?;
    let of = |set: &[Loaded]| -> Vec<SimulatedRun> {
        let own = runs.iter().filter(|run| {
            run.page_bytes == 512 && set.iter().any(|trace| trace.facts.name == run.trace)
        });
        own.cloned().collect()
    };
    let (of_paper, of_walkers) = (of(&loaded), of(&walkers));
    let all = pairs(&runs);
    let shown = pairs(&of_paper);
    let mut cases = Vec::new();
    for trace in loaded.iter().chain(&walkers).chain(&patterns) {
        progress(&format!("why, {}", trace.facts.name));
        cases.extend(explain(trace, 512, &all)?);
    }
    found.figures.push(times(&loaded, &shown));
    found.figures.push(causes_figure(&loaded, &cases));
    found.tables.push(ratios(&shown, &pairs(&of_walkers)));
    found.tables.push(by_trace(&all));
    found.tables.push(causes(&cases));
    found.tables.push(readings(&loaded)?);
    found.tables.push(sensitivity(&all));
    found.tables.push(touches(&loaded)?);
    found.verdicts = verdicts(&loaded, &cases, &all, &shown);
    found.runs = runs;
    Ok(found)
}

fn verdicts(
    loaded: &[Loaded],
    cases: &[Case],
    all: &[Pair<'_>],
    shown: &[Pair<'_>],
) -> Vec<Verdict> {
    let (worse, worst, average) = judge(all, elapsed);
    let (worse_shown, worst_shown, average_shown) = judge(shown, elapsed);
    let why = reasons(cases, (all, worse), (shown, worse_shown));
    let mut verdicts = vec![
        Verdict::lower(
            "worst time under CLOCK-W to CLOCK, all traces, page sizes and memory sizes",
            "ratio",
            worst,
        )
        .paper(1.0)
        .target(1.0, None)
        .difference(why),
        Verdict::lower(
            "the same, 512 B pages and our four programs only",
            "ratio",
            worst_shown,
        )
        .paper(1.0)
        .target(1.0, None),
        Verdict::lower("mean of these ratios", "ratio", average_shown),
        Verdict::lower("mean over all cases", "ratio", average),
    ];
    for writer in loaded.iter().filter(|trace| {
        trace.facts.data_writes > trace.facts.instruction_reads + trace.facts.data_reads
    }) {
        let own = shown.iter().filter(|pair| {
            pair.clock.trace == writer.facts.name && pair.clock.memory_percent < 100.0
        });
        let worst = own.map(|pair| pair.ratio(elapsed)).fold(0.0, f64::max);
        let measure = format!(
            "worst ratio below 100 % memory, 512 B, {}",
            writer.facts.name
        );
        verdicts.push(
            // The aim is strictly better than 1: the largest number below 1.
            Verdict::lower(measure, "ratio", worst).target(1.0, Some(1.0 - 1e-9)),
        );
    }
    verdicts
}

fn names<'a>(pairs: &'a [Pair<'_>]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for pair in pairs {
        if !names.contains(&pair.clock.trace.as_str()) {
            names.push(&pair.clock.trace);
        }
    }
    names
}

fn ratios(pairs: &[Pair<'_>], walkers: &[Pair<'_>]) -> Table {
    let row = |name: &str, pairs: &[Pair<'_>]| {
        let own = pairs.iter().filter(|pair| pair.clock.trace == name);
        let mut row = vec![name.to_owned()];
        row.extend(own.map(|pair| format!("{:.4}", pair.ratio(elapsed))));
        row
    };
    let mut rows = Vec::new();
    for set in [pairs, walkers] {
        rows.extend(names(set).into_iter().map(|name| row(name, set)));
    }
    Table::new(
        "Time under CLOCK-W to time under CLOCK, 512 B pages",
        "Below 1, CLOCK-W is better. The four programs are first; the programs that walk through \
         their memory in order follow.",
        &format!("workload | {}", memory_columns()),
        rows,
    )
}

fn times(loaded: &[Loaded], pairs: &[Pair<'_>]) -> Figure {
    let panels = loaded.iter().map(|trace| {
        let line = |clock_w: bool| {
            let own = pairs
                .iter()
                .filter(|pair| pair.clock.trace == trace.facts.name);
            own.map(|pair| {
                if clock_w {
                    elapsed(pair.clock_w)
                } else {
                    elapsed(pair.clock)
                }
            })
            .collect()
        };
        Panel::new(
            trace.facts.name.clone(),
            MEMORY_PERCENT.iter().map(|percent| format!("{percent}")),
            [("CLOCK", line(false)), ("CLOCK-W", line(true))],
        )
    });
    Figure::lines(
        "fig5",
        "Total time on PCM under CLOCK and CLOCK-W over memory, 512 B pages",
        ["memory, percent of the footprint", "seconds"],
        panels,
    )
}

fn by_trace(pairs: &[Pair<'_>]) -> Table {
    let rows = names(pairs).into_iter().map(|name| {
        let own: Vec<f64> = pairs
            .iter()
            .filter(|pair| pair.clock.trace == name)
            .map(|pair| pair.ratio(elapsed))
            .collect();
        let count = |wanted: &dyn Fn(f64) -> bool| {
            own.iter()
                .filter(|ratio| wanted(**ratio))
                .count()
                .to_string()
        };
        vec![
            name.to_owned(),
            own.len().to_string(),
            count(&|ratio| ratio < 1.0 - 1e-9),
            count(&|ratio| (ratio - 1.0).abs() <= 1e-9),
            count(&|ratio| ratio > 1.0 + 1e-9),
            format!("{:.4}", own.iter().copied().fold(f64::INFINITY, f64::min)),
            format!("{:.4}", mean(&own)),
            format!("{:.4}", own.iter().copied().fold(0.0, f64::max)),
        ]
    });
    Table::new(
        "All cases by trace",
        "Every page size for the programs, 512 B for the generators; every size of memory.",
        "trace | cases | better | equal | worse | least ratio | mean | largest",
        rows,
    )
}

fn sensitivity(pairs: &[Pair<'_>]) -> Table {
    let constants = Constants::of(PCM);
    let mut rows = Vec::new();
    for write in [0.5, 1.0, 2.0, 4.0, 8.0, 16.0] {
        let scaled = constants.scaled(1.0, 1.0, write);
        let (worse, worst, average) = judge(pairs, |run| scaled.total_seconds(run));
        rows.push(vec![
            format!("{:.1} x a read", scaled.write[1] / scaled.read[1]),
            worse.to_string(),
            number(worst),
            format!("{average:.4}"),
        ]);
    }
    Table::new(
        "How it depends on the open constants",
        "All cases. The paper's introduction has writes of 4 to 10 times a read; ours take \
               2.7. T_access and T_transfer have the \
               same ratio, so at one page size nothing else matters.",
        "a write takes | cases worse | worst ratio | mean ratio",
        rows,
    )
}

/// Whether the result depends on what a fault does to the bits of the page it brought in.
fn touches(loaded: &[Loaded]) -> anyhow::Result<Table> {
    let mut rows = Vec::new();
    for (name, touches) in [
        (
            "every faulting access sets its bits (a processor)",
            [FaultTouch::All; 2],
        ),
        ("only a faulting write does", [FaultTouch::Write; 2]),
        ("none does", [FaultTouch::None; 2]),
        (
            "none does for CLOCK, a faulting write for CLOCK-W (the paper's words)",
            [FaultTouch::None, FaultTouch::Write],
        ),
    ] {
        let mut runs = Vec::new();
        for trace in loaded {
            runs.extend(both(trace, 512, &MEMORY_PERCENT, touches)?);
        }
        let (worse, worst, average) = judge(&pairs(&runs), elapsed);
        rows.push(vec![
            name.to_owned(),
            format!("{worse} of {}", runs.len() / 2),
            format!("{worst:.4}"),
            format!("{average:.4}"),
        ]);
    }
    Ok(Table::new(
        "How it depends on what a fault sets",
        "512 B pages, our four programs.",
        " | cases worse | worst ratio | mean ratio",
        rows,
    ))
}
