//! Tables, plots and predictions of the experiment `scale`, from its samples and counts.

use super::model::{self, Demands};
use crate::results::{
    Figure, Modelled, Panel, Results, Scaling, ScalingCounts, ScalingPhase, Table, median, number,
};

/// Patterns that are shown, by their names in samples.
const PATTERNS: [&str; 5] = [
    "fill",
    "random read",
    "random write",
    "zipf read",
    "seq read",
];
/// Rigs in pairs: ours, and the kernel's beside it.
const PAIRS: [(&str, &str); 2] = [("undercroft-ram", "zram"), ("undercroft-file", "swapfile")];
/// The rig that is modelled: a file waits for its disk, of which the model knows nothing.
const MODELLED: &str = PAIRS[0].0;
/// CPUs of the machine that is predicted, and its largest number of threads.
const CPUS: usize = 16;

/// Assumptions of the model.
const MODEL: [&str; 5] = [
    "Modelled, not measured: throughput <= min(threads / time of an operation of a lone thread, servers / demand of \
     each station). Asymptotic bounds of a closed queueing network: an upper limit, without waiting below saturation.",
    "Demands are CPU time of each kind of manager threads in a phase, divided by its operations, in the run with \
     most threads up to the number of CPUs (at least two). The lone thread is of the run with one thread. Pages \
     that were in memory count as operations, too.",
    "Threads with a number (`-N`): as many for each CPU as here, at most 8. Of others, as many as here. `uc-evict` \
     waits while `uc-agent` moves pages out, so the time of both counts for it.",
    "The lock's demand is the share of its locks that found it taken, divided by the throughput. It is of the whole \
     run, not of the phase.",
    "A CPU of the modelled machine is one of this machine. Costs that grow with the number of CPUs are left out: \
     caches, the memory bus, locks of the kernel, interrupts of CPUs that have a page in their TLB. So is other work \
     here. Where manager and program shared a CPU, the time of a lone thread is too long.",
];

/// The samples, and what is needed to look them up.
struct Found<'a> {
    results: &'a Results,
    /// Numbers of threads that were measured, ascending.
    threads: &'a [usize],
}

/// Makes the predictions, tables and figures.
pub(super) fn fill(scaling: &mut Scaling, results: &Results, threads: &[usize]) {
    let found = Found { results, threads };
    scaling.modelled = predictions(scaling, &found);
    if !scaling.modelled.is_empty() {
        scaling.model = MODEL.map(str::to_owned).to_vec();
    }
    scaling.tables = vec![
        throughput(scaling, &found),
        latency(&found),
        busiest(scaling),
        counts(scaling),
        demands_table(scaling, &found),
    ];
    scaling.tables.retain(|table| !table.rows.is_empty());
    scaling.figures = vec![throughput_figure(scaling, &found), latency_figure(&found)];
}

impl Found<'_> {
    /// A median over the rounds, if it was measured.
    fn value(&self, rig: &str, pattern: &str, threads: usize, metric: &str) -> Option<f64> {
        let values = self
            .results
            .values(rig, &format!("{pattern} {threads}t"), metric);
        Some(median(&values)).filter(|value| value.is_finite())
    }

    fn rigs(&self) -> Vec<&'static str> {
        let names = self.results.rig_names();
        let all = PAIRS.iter().flat_map(|(ours, kernel)| [*ours, *kernel]);
        all.filter(|rig| names.iter().any(|name| name == rig))
            .collect()
    }

    /// The measured numbers of threads, and those up to the largest that is predicted.
    fn places(&self) -> Vec<usize> {
        let measured = self.threads.last().copied().unwrap_or(0);
        let more = super::doubling(CPUS)
            .into_iter()
            .filter(|count| *count > measured);
        self.threads.iter().copied().chain(more).collect()
    }

    /// The largest number of threads up to that of CPUs, but at least two; if there is none, the
    /// smallest.
    fn busy_threads(&self) -> Option<usize> {
        let most = self.results.machine.cpus.max(2);
        let fit = self.threads.iter().filter(|count| **count <= most);
        fit.max().or(self.threads.first()).copied()
    }
}

/// Every prediction: of a machine with [`CPUS`] CPUs, and of this one, to judge the model by.
fn predictions(scaling: &Scaling, found: &Found<'_>) -> Vec<Modelled> {
    let mut all = Vec::new();
    for pattern in PATTERNS {
        let Some(demands) = demands(scaling, found, pattern) else {
            continue;
        };
        for cpus in [CPUS, found.results.machine.cpus] {
            for threads in found.places() {
                let bound = model::bound(&demands, threads, cpus);
                all.push(Modelled {
                    rig: MODELLED.to_owned(),
                    pattern: pattern.to_owned(),
                    threads,
                    cpus,
                    ops_per_second: bound.ops_per_second,
                    by: bound.by,
                });
            }
        }
        if found.results.machine.cpus == CPUS {
            all.truncate(all.len() - found.places().len());
        }
    }
    all
}

/// Demands of a pattern, of the last round; `None` if no thread ran alone.
fn demands(scaling: &Scaling, found: &Found<'_>, pattern: &str) -> Option<Demands> {
    let busy = found.busy_threads()?;
    let with = |threads: usize| {
        let of = move |phase: &&ScalingPhase| {
            phase.rig == MODELLED && phase.pattern == pattern && phase.threads == threads
        };
        let phase = scaling.phases.iter().rev().find(of)?;
        Some((phase, phase.ops as f64 / phase.seconds.max(1e-9)))
    };
    let ((_, alone), (phase, rate)) = (with(1)?, with(busy)?);
    let of = |counts: &&ScalingCounts| counts.rig == MODELLED && counts.threads == busy;
    let counts = scaling.counts.iter().rev().find(of)?;
    Some(Demands {
        solo_ns: 1e9 / alone,
        kinds: phase.kinds.clone(),
        cpus: found.results.machine.cpus,
        lock_ns: model::lock_demand(counts.engine_locks, counts.engine_waits, rate),
        cpu_ns: phase.undercroft_ns_per_op + phase.program_ns_per_op,
    })
}

/// The prediction, if there is one.
fn modelled<'a>(
    scaling: &'a Scaling,
    pattern: &str,
    threads: usize,
    cpus: usize,
) -> Option<&'a Modelled> {
    let of = |one: &&Modelled| one.pattern == pattern && one.threads == threads && one.cpus == cpus;
    scaling.modelled.iter().find(of)
}

/// A number, or `-`.
fn cell(value: Option<f64>) -> String {
    value
        .filter(|value| value.is_finite())
        .map_or("-".to_owned(), number)
}

/// Three digits after the point, or `-`.
fn fixed(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.3}"))
}

fn throughput(scaling: &Scaling, found: &Found<'_>) -> Table {
    let mut columns = vec!["pattern".to_owned(), "threads".to_owned()];
    for (ours, kernel) in PAIRS {
        columns.extend([ours, kernel, "ratio"].map(str::to_owned));
    }
    columns.push(format!("{MODELLED}, **modelled**, {CPUS} CPUs"));
    columns.push("bound by (modelled)".to_owned());
    let mut rows = Vec::new();
    for pattern in PATTERNS {
        for threads in found.places() {
            let mut row = vec![pattern.to_owned(), threads.to_string()];
            for (ours, kernel) in PAIRS {
                let value = |rig| found.value(rig, pattern, threads, "ops_per_second");
                let (ours, kernel) = (value(ours), value(kernel));
                row.extend([ours, kernel].map(|rate| fixed(rate.map(|rate| rate / 1e6))));
                row.push(fixed(ours.zip(kernel).map(|(ours, kernel)| ours / kernel)));
            }
            let model = modelled(scaling, pattern, threads, CPUS);
            row.push(fixed(model.map(|one| one.ops_per_second / 1e6)));
            row.push(model.map_or("-".to_owned(), |one| one.by.clone()));
            if row[2..].iter().any(|cell| cell != "-") {
                rows.push(row);
            }
        }
    }
    Table {
        title: "Throughput, million pages/s".to_owned(),
        text: "All threads together; the median of the rounds. Ratio: undercroft to the kernel, above 1 is faster. \
               Threads without a measurement are modelled only."
            .to_owned(),
        columns,
        rows,
    }
}

fn latency(found: &Found<'_>) -> Table {
    let rigs = found.rigs();
    let mut rows = Vec::new();
    for pattern in PATTERNS {
        for &threads in found.threads {
            let mut row = vec![pattern.to_owned(), threads.to_string()];
            for rig in &rigs {
                let of = |metric| {
                    let ns = found.value(rig, pattern, threads, metric);
                    cell(ns.map(|ns| ns / 1e3))
                };
                row.push(["p50_ns", "p99_ns", "p999_ns"].map(of).join(" / "));
            }
            rows.push(row);
        }
    }
    Table {
        title: "Latency of an operation, p50 / p99 / p99.9, microseconds".to_owned(),
        text: String::new(),
        columns: ["pattern", "threads"]
            .into_iter()
            .chain(rigs)
            .map(str::to_owned)
            .collect(),
        rows,
    }
}

/// The last round of what has rounds.
fn last_round<T>(all: &[T], round: impl Fn(&T) -> usize) -> impl Iterator<Item = &T> {
    let last = all.iter().map(&round).max();
    all.iter().filter(move |one| Some(round(one)) == last)
}

fn busiest(scaling: &Scaling) -> Table {
    let row = |phase: &ScalingPhase| {
        vec![
            phase.rig.clone(),
            phase.pattern.clone(),
            phase.threads.to_string(),
            phase.busiest.clone(),
            format!("{:.0} %", phase.busiest_share * 100.0),
            cell(Some(phase.busiest_ns_per_op / 1e3)),
            phase.busiest_voluntary_switches.to_string(),
            phase.busiest_involuntary_switches.to_string(),
            cell(Some(phase.undercroft_ns_per_op / 1e3)),
            cell(Some(phase.program_ns_per_op / 1e3)),
        ]
    };
    let shown = last_round(&scaling.phases, |phase| phase.round)
        .filter(|phase| PATTERNS.contains(&&phase.pattern[..]) && !phase.busiest.is_empty());
    let columns = [
        "rig",
        "pattern",
        "threads",
        "busiest thread",
        "of a CPU",
        "us an operation",
        "voluntary switches",
        "involuntary",
        "undercroft, CPU us an operation",
        "program, CPU us an operation",
    ];
    Table {
        title: "The busiest thread of undercroft".to_owned(),
        text: "Of the last round. A thread near 100 % of a CPU bounds the rest. An operation may find its page in \
               memory."
            .to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: shown.map(row).collect(),
    }
}

fn counts(scaling: &Scaling) -> Table {
    let row = |counts: &ScalingCounts| {
        vec![
            counts.rig.clone(),
            counts.threads.to_string(),
            counts.faults.to_string(),
            counts.pages_out.to_string(),
            cell(Some(counts.locks_per_fault())),
            cell(Some(counts.locks_per_page_out())),
            format!("{:.1} %", counts.found_taken() * 100.0),
            counts.waited_for_room.to_string(),
            cell(Some(counts.above_limit_seconds)),
            cell(Some(counts.above_limit_bytes_peak / f64::from(1 << 20))),
        ]
    };
    let columns = [
        "rig",
        "threads",
        "faults",
        "pages out",
        "engine locks a fault",
        "engine locks a page out",
        "found taken",
        "waits for room",
        "s above the limit",
        "MiB above it, most",
    ];
    Table {
        title: "Counts of undercroft".to_owned(),
        text: "Of whole runs in the last round: the fill, all phases, the check at the end. Locks that are not for a \
               batch of pages that leave count as a fault's."
            .to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: last_round(&scaling.counts, |counts| counts.round).map(row).collect(),
    }
}

fn demands_table(scaling: &Scaling, found: &Found<'_>) -> Table {
    let cpus = found.results.machine.cpus;
    let mut rows = Vec::new();
    for pattern in PATTERNS {
        let Some(demands) = demands(scaling, found, pattern) else {
            continue;
        };
        let mut kinds = demands.kinds.clone();
        kinds.sort_by(|a, b| b.2.total_cmp(&a.2));
        let kinds = kinds
            .iter()
            .take(3)
            .map(|(name, count, ns)| format!("{name} x{count}: {}", number(ns / 1e3)));
        let here = found.busy_threads();
        let measured =
            here.and_then(|threads| found.value(MODELLED, pattern, threads, "ops_per_second"));
        let model = here.and_then(|threads| modelled(scaling, pattern, threads, cpus));
        rows.push(vec![
            pattern.to_owned(),
            number(demands.solo_ns / 1e3),
            kinds.collect::<Vec<_>>().join(", "),
            number(demands.lock_ns / 1e3),
            number(demands.cpu_ns / 1e3),
            fixed(measured.map(|rate| rate / 1e6)),
            fixed(model.map(|one| one.ops_per_second / 1e6)),
            model.map_or("-".to_owned(), |one| one.by.clone()),
        ]);
    }
    let threads = found.busy_threads().unwrap_or(0);
    let columns = [
        "pattern".to_owned(),
        "lone thread".to_owned(),
        "busiest kinds of threads".to_owned(),
        "lock".to_owned(),
        "CPU".to_owned(),
        format!("{threads} threads, measured"),
        format!("{threads} threads, **modelled**, {cpus} CPUs"),
        "bound by (modelled)".to_owned(),
    ];
    Table {
        title: "Demands of the model, microseconds an operation".to_owned(),
        text: "On this machine the model can be judged: the last columns have its bound beside what was measured, in \
               million pages/s."
            .to_owned(),
        columns: columns.to_vec(),
        rows,
    }
}

/// A panel for each pattern, with `series` of it.
fn panels(places: &[usize], series: impl Fn(&str) -> Vec<(String, Vec<f64>)>) -> Vec<Panel> {
    let panel = |pattern: &&str| Panel {
        title: (*pattern).to_owned(),
        places: places.iter().map(usize::to_string).collect(),
        series: series(pattern),
    };
    let all = PATTERNS.iter().map(panel);
    all.filter(|panel| !panel.series.is_empty()).collect()
}

/// A line of each rig, up to the first number of threads that it lacks.
fn measured(found: &Found<'_>, pattern: &str, metric: &str, scale: f64) -> Vec<(String, Vec<f64>)> {
    let line = |rig: &str| {
        let values = found.threads.iter();
        let values = values.map_while(|count| found.value(rig, pattern, *count, metric));
        (
            rig.to_owned(),
            values.map(|value| value * scale).collect::<Vec<_>>(),
        )
    };
    let lines = found.rigs().into_iter().map(line);
    lines.filter(|(_, values)| !values.is_empty()).collect()
}

fn throughput_figure(scaling: &Scaling, found: &Found<'_>) -> Figure {
    let places = if scaling.modelled.is_empty() {
        found.threads.to_vec()
    } else {
        found.places()
    };
    let series = |pattern: &str| {
        let mut lines = measured(found, pattern, "ops_per_second", 1e-6);
        let predicted = places
            .iter()
            .filter_map(|count| modelled(scaling, pattern, *count, CPUS));
        let predicted: Vec<f64> = predicted.map(|one| one.ops_per_second * 1e-6).collect();
        if !predicted.is_empty() {
            lines.push((format!("{MODELLED}, modelled, {CPUS} CPUs"), predicted));
        }
        lines
    };
    Figure {
        name: "throughput".to_owned(),
        title: "Throughput by threads".to_owned(),
        x_label: "threads of the program".to_owned(),
        y_label: "million pages/s".to_owned(),
        bars: false,
        log: true,
        panels: panels(&places, series),
    }
}

fn latency_figure(found: &Found<'_>) -> Figure {
    Figure {
        name: "latency".to_owned(),
        title: "p99 of an operation by threads".to_owned(),
        x_label: "threads of the program".to_owned(),
        y_label: "microseconds".to_owned(),
        bars: false,
        log: true,
        panels: panels(found.threads, |pattern| {
            measured(found, pattern, "p99_ns", 1e-3)
        }),
    }
}
