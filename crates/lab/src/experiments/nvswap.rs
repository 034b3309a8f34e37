//! `nvswap-fig4` and `nvswap-fig5`: latency bounds of page-ins, simulated (NVSwap §VI-B).
//!
//! The paper's clients are memcached servers under YCSB with a zipfian choice of records of 1 KB.
//! Ours are generated: a zipfian choice of pages. A page has four records, of which few are hot, so
//! pages differ less than records ([`THETA`]).

use super::{Lab, progress};
use crate::results::{
    Better, Figure, Panel, Results, Simulated, SimulatedRun, Table, TraceFacts, Verdict,
};
use anyhow::Context;
use undercroft_base::Nanos;
use undercroft_sim::outcome::ClientOutcome;
use undercroft_sim::setup::{Initial, Latencies, Memory, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{PageStream, Setup, SimReport, open, simulate};

/// DRAM, in percent of the footprint. The paper has 5 GB and does not say how large its server is.
const MEMORY_PERCENT: f64 = 50.0;

/// Skew of the choice of pages. YCSB's of records is 0.99.
const THETA: f64 = 0.6;

/// Time of an operation that finds its page in memory: the paper's shortest (Fig. 1).
const OPERATION: Nanos = Nanos(34_000);

/// Buffer and regular zone: the devices of the paper.
const TIERS: [&str; 2] = ["optane-dimm", "sata-ssd"];

/// One YCSB workload of figure 5 and table I.
struct Workload {
    name: &'static str,
    /// Share of the operations that write.
    writes: f64,
    bound: &'static str,
    /// The paper's bound and p99 of page-ins, in microseconds.
    paper: [f64; 2],
    /// The paper's p99 without control, if it gives one.
    paper_without: Option<f64>,
}

const FIG4: [Workload; 1] = [Workload {
    name: "A",
    writes: 0.5,
    bound: "p99=200us",
    paper: [200.0, 192.0],
    paper_without: Some(345.0),
}];

const FIG5: [Workload; 3] = [
    Workload {
        name: "A",
        writes: 0.5,
        bound: "p99=1000us",
        paper: [1000.0, 737.0],
        paper_without: None,
    },
    Workload {
        name: "B",
        writes: 0.05,
        bound: "p99=500us",
        paper: [500.0, 323.0],
        paper_without: None,
    },
    Workload {
        name: "C",
        writes: 0.0,
        bound: "p99=300us",
        paper: [300.0, 255.0],
        paper_without: None,
    },
];

/// The trace of all workloads, each a client.
fn spec(workloads: &[Workload], small: bool) -> String {
    let (pages, refs) = if small {
        (4_000, 400_000)
    } else {
        (100_000, 3_000_000)
    };
    let parts = workloads.iter().enumerate().map(|(at, workload)| {
        format!(
            "zipf:pages={pages},refs={refs},writes={},theta={THETA},client={at},seed={}",
            workload.writes,
            at + 1
        )
    });
    parts.collect::<Vec<_>>().join("+")
}

/// One simulation of the workloads.
fn run(
    lab: &Lab,
    streams: &[PageStream],
    workloads: &[Workload],
    control: bool,
) -> anyhow::Result<SimReport> {
    let bounds: Result<Vec<_>, _> = workloads.iter().map(|of| of.bound.parse()).collect();
    let tiers: Result<Vec<_>, _> = TIERS.iter().map(|tier| tier.parse()).collect();
    let setup = Setup {
        memory: Memory::Percent(MEMORY_PERCENT),
        tiers: tiers?,
        reclaim: "active_inactive".to_owned(),
        reference_time: OPERATION,
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        latency: Latencies {
            bounds: bounds?,
            window: lab.pick(Nanos(10_000_000), Nanos(1_000_000_000)),
            control,
        },
        ..Setup::default()
    };
    Ok(simulate(streams, &setup, &mut |_| ())?)
}

/// The model in words, for the results.
fn model(memory: f64) -> Vec<String> {
    vec![
        format!(
            "Each client chooses pages of 4 KiB by Zipf's law with {THETA} in memory for {memory} % of \
             them. All pages lie on the SSD at first, as after the server was filled. The paper names \
             neither its share of memory nor how records lie in pages. An operation takes {OPERATION} \
             besides its page-in: the paper's shortest (Fig. 1)."
        ),
        "The regular zone is the SSD that the paper used, by its data sheet: nine channels, a read of \
         90 us, a write of 640 us, and a read beside a write takes twice as long. The buffer is one \
         Optane module, large enough for every page, as in the paper. Sources: \
         `device/src/profiles.rs`."
            .to_owned(),
        "A page-in is the kernel's path (8 us for the SSD), the wait for a channel, and the read. \
         Pages leave in batches once a reserve is used. If the queue of writes is full, the program \
         waits, which is part of the time of the run but of no page-in."
            .to_owned(),
        "Without control pages leave to the SSD, 64 in a batch, with 64 writes in the queue. With \
         control both are S(t), and a client that the SSD cannot serve leaves to the buffer."
            .to_owned(),
        "Not modelled: destaging from the buffer (it never fills), mapping its \
         pages in place, garbage collection of the SSD."
            .to_owned(),
    ]
}

pub(super) fn fig4(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let found = study(lab, &FIG4, "fig4")?;
    results.simulated = Some(found);
    Ok(())
}

pub(super) fn fig5(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let found = study(lab, &FIG5, "fig5")?;
    results.simulated = Some(found);
    Ok(())
}

/// Runs the workloads without control and with it, and compares.
fn study(lab: &Lab, workloads: &[Workload], name: &str) -> anyhow::Result<Simulated> {
    let text = spec(workloads, lab.options.small);
    let trace = open::open(&text)?;
    let streams = streams_of(&trace, 4096)?;
    progress("without control");
    let without = run(lab, &streams, workloads, false)?;
    progress("with control");
    let with = run(lab, &streams, workloads, true)?;
    let mut found = Simulated {
        model: model(MEMORY_PERCENT),
        ..Simulated::default()
    };
    found.traces.push(TraceFacts::generated(
        "zipfian pages",
        &text,
        &text,
        &without,
    ));
    for (report, prefetch) in [(&without, "no control"), (&with, "control")] {
        found.runs.push(SimulatedRun::of(
            format!("{name}, {prefetch}"),
            MEMORY_PERCENT,
            report,
        ));
    }
    for (at, workload) in workloads.iter().enumerate() {
        verdicts(
            workload,
            &without.clients[at],
            &with.clients[at],
            &mut found,
        )?;
    }
    let written = |report: &SimReport, tier: usize| report.tiers[tier].pages_written;
    found.tables.push(table(workloads, &without, &with));
    found.tables.push(Table {
        title: "Pages written and time".to_owned(),
        columns: [
            "",
            "to the buffer",
            "to the SSD",
            "seconds",
            "of these, waits for the queue",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows: [("no control", &without), ("control", &with)]
            .map(|(name, report)| {
                vec![
                    name.to_owned(),
                    written(report, 0).to_string(),
                    written(report, 1).to_string(),
                    format!("{:.2}", report.elapsed_seconds),
                    format!("{:.2}", report.times.write_wait_seconds),
                ]
            })
            .to_vec(),
        ..Table::default()
    });
    found.figures.push(figure(name, workloads, &without, &with));
    Ok(found)
}

/// Microseconds of the percentile of a client's bound, over its windows.
fn tail(of: &ClientOutcome) -> anyhow::Result<f64> {
    let bound = of.latency_bound.as_ref().context("a client has no bound")?;
    let tail = bound
        .tail_seconds
        .context("a client has too few page-ins")?;
    Ok(tail * 1e6)
}

fn verdicts(
    workload: &Workload,
    without: &ClientOutcome,
    with: &ClientOutcome,
    found: &mut Simulated,
) -> anyhow::Result<()> {
    let Workload { name, paper, .. } = workload;
    let [bound, measured] = *paper;
    let none = Verdict::new(
        &format!("workload {name}: p99 of page-ins without control"),
        "us",
        Better::Lower,
        tail(without)?,
    );
    found.verdicts.push(match workload.paper_without {
        Some(value) => none.paper(value).difference(
            "the model of the SSD is its data sheet, without the kernel's queue and without garbage \
             collection; nine writes that start together keep a read waiting.",
        ),
        None => none,
    });
    found.verdicts.push(
        Verdict::new(
            &format!("workload {name}: p99 of page-ins with a bound of {bound} us"),
            "us",
            Better::Lower,
            tail(with)?,
        )
        .paper(measured)
        .target(bound, None)
        .difference(
            "pages that left to the buffer are read in 9 us and less, those still on the SSD without \
             writes beside them.",
        ),
    );
    let kept = with
        .latency_bound
        .as_ref()
        .context("a client has no bound")?;
    found.verdicts.push(
        Verdict::new(
            &format!("workload {name}: windows that kept the bound"),
            "%",
            Better::Higher,
            kept.kept_percent(),
        )
        .target(95.0, Some(100.0)),
    );
    Ok(())
}

fn table(workloads: &[Workload], without: &SimReport, with: &SimReport) -> Table {
    let mut rows = Vec::new();
    for (at, workload) in workloads.iter().enumerate() {
        for (control, report) in [("no", without), ("yes", with)] {
            let client = &report.clients[at];
            let micros = |seconds: f64| format!("{:.1}", seconds * 1e6);
            let mut row = vec![
                workload.name.to_owned(),
                workload.bound.to_owned(),
                control.to_owned(),
                client.fault_latency.count.to_string(),
                micros(client.fault_latency.p50_seconds),
                micros(client.fault_latency.p99_seconds),
                micros(client.fault_latency.p999_seconds),
            ];
            if let Some(bound) = &client.latency_bound {
                let windows = bound.windows_kept + bound.windows_missed;
                row.push(format!("{} of {windows}", bound.windows_kept));
                row.push(micros(bound.worst_window_seconds.unwrap_or_default()));
            }
            rows.push(row);
        }
    }
    Table {
        title: "Page-ins".to_owned(),
        text: "Times in microseconds. The worst is the worst window's percentile.".to_owned(),
        columns: [
            "workload",
            "bound",
            "control",
            "page-ins",
            "p50",
            "p99",
            "p99.9",
            "windows kept",
            "worst",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows,
    }
}

fn figure(name: &str, workloads: &[Workload], without: &SimReport, with: &SimReport) -> Figure {
    let panels = workloads.iter().enumerate().map(|(at, workload)| {
        let values = |report: &SimReport| {
            let of = report.clients[at].fault_latency;
            vec![
                of.p50_seconds * 1e6,
                of.p99_seconds * 1e6,
                of.p999_seconds * 1e6,
            ]
        };
        Panel {
            title: format!("workload {}, {}", workload.name, workload.bound),
            places: ["p50", "p99", "p99.9"].map(str::to_owned).to_vec(),
            series: vec![
                ("no control".to_owned(), values(without)),
                ("bound".to_owned(), values(with)),
            ],
        }
    });
    Figure {
        name: name.to_owned(),
        title: "Latency of page-ins, without control and with a bound".to_owned(),
        x_label: "percentile".to_owned(),
        y_label: "microseconds".to_owned(),
        bars: true,
        log: false,
        panels: panels.collect(),
    }
}
