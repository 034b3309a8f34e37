//! `nvswap-fig4` and `nvswap-fig5`: latency bounds of page-ins, and what the buffer does to
//! page-outs (NVSwap §VI-B).

use super::super::{Lab, progress};
use super::{
    BUFFER_IN_WORDS, CONTROL_IN_WORDS, MEMORY_PERCENT, NOT_MODELLED, PAGING_IN_WORDS, SSD_IN_WORDS,
    TIERS, clients_in_words, less_percent, micros, setup, spec, spread,
};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};
use anyhow::Context;
use undercroft_sim::outcome::ClientOutcome;
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{PageStream, SimReport, open, simulate};

/// By how many percent the paper's page-outs are faster with the buffer: p95, p99.
const PAPER_PAGE_OUTS: [f64; 2] = [99.6, 96.7];

/// Ours must be at p99.
const PAGE_OUTS_MUST: f64 = 90.0;

/// A YCSB workload of figure 5 and table I.
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

/// Ways to treat the clients' bounds.
#[derive(Clone, Copy, PartialEq)]
enum Control {
    /// Page-ins are only measured, and the buffer is spared.
    Off,
    /// There are no bounds: pages leave to the buffer.
    Buffer,
    /// The bounds are kept.
    On,
}

impl Control {
    const ALL: [Control; 3] = [Control::Off, Control::Buffer, Control::On];

    fn name(self) -> &'static str {
        match self {
            Control::Off => "no control, SSD alone",
            Control::Buffer => "no control, buffer for all",
            Control::On => "control",
        }
    }

    /// Simulates the workloads once.
    fn run(
        self,
        lab: &Lab,
        streams: &[PageStream],
        workloads: &[Workload],
    ) -> anyhow::Result<SimReport> {
        progress(self.name());
        let bounds: Vec<_> = match self {
            Control::Buffer => Vec::new(),
            _ => workloads.iter().map(|of| of.bound).collect(),
        };
        let setup = setup(lab, &TIERS, &bounds, self == Control::On)?;
        Ok(simulate(streams, &setup, &mut |_| ())?)
    }
}

/// The model in words, for the results.
fn model() -> Vec<String> {
    vec![
        clients_in_words(),
        SSD_IN_WORDS.to_owned(),
        BUFFER_IN_WORDS.to_owned(),
        PAGING_IN_WORDS.to_owned(),
        "Without control pages leave to the SSD, 64 in a batch, with 64 writes in the queue. With the \
         buffer for all, no page-out goes to the SSD."
            .to_owned(),
        CONTROL_IN_WORDS.to_owned(),
        NOT_MODELLED.to_owned(),
    ]
}

pub(in crate::experiments) fn fig4(lab: &Lab) -> anyhow::Result<Simulated> {
    let found = study(lab, &FIG4, "fig4")?;
    Ok(found)
}

pub(in crate::experiments) fn fig5(lab: &Lab) -> anyhow::Result<Simulated> {
    let found = study(lab, &FIG5, "fig5")?;
    Ok(found)
}

/// Runs the workloads without control and with it, and compares.
fn study(lab: &Lab, workloads: &[Workload], name: &str) -> anyhow::Result<Simulated> {
    let text = spec(workloads.iter().map(|of| of.writes), lab.options.small);
    let trace = open::open(&text)?;
    let streams = streams_of(&trace, 4096)?;
    let reports = Control::ALL.map(|control| control.run(lab, &streams, workloads));
    let reports: Vec<_> = reports.into_iter().collect::<Result<_, _>>()?;
    let (without, with) = (&reports[0], &reports[2]);
    let mut found = Simulated::of(model());
    let facts = TraceFacts::generated("zipfian pages", &text, without);
    found.traces.push(facts);
    for (control, report) in Control::ALL.iter().zip(&reports) {
        let name = format!("{name}, {}", control.name());
        let run = SimulatedRun::of(name, MEMORY_PERCENT, report);
        found.runs.push(run);
    }
    for (at, workload) in workloads.iter().enumerate() {
        let (without, with) = (&without.clients[at], &with.clients[at]);
        verdicts(workload, without, with, &mut found)?;
    }
    if let [_] = workloads {
        page_out_verdicts(&reports, &mut found);
    }
    found.tables.push(table(workloads, without, with));
    found.tables.push(page_outs(workloads, &reports));
    found.tables.push(pages_and_time(&reports));
    found.figures.push(figure(name, workloads, without, with));
    Ok(found)
}

/// The figure's page-outs: with the buffer against the SSD alone.
fn page_out_verdicts(reports: &[SimReport], found: &mut Simulated) {
    let of = |at: usize| reports[at].clients[0].page_out_latency;
    let slow = of(0);
    let [paper_p95, paper_p99] = PAPER_PAGE_OUTS;
    let verdict = |what: &str, control: Control, ours: f64, paper: f64| {
        let name = format!("{what} of page-outs, {}: reduction", control.name());
        Verdict::higher(name, "%", ours).paper(paper)
    };
    for (at, control) in [(2, Control::On), (1, Control::Buffer)] {
        let p95 = less_percent(slow.p95_seconds, of(at).p95_seconds);
        let p99 = less_percent(slow.p99_seconds, of(at).p99_seconds);
        let same =
            "a page into the buffer is a copy of 2 us; the SSD's queue of 64 writes takes 5 ms.";
        let tried = "as for p95. Before control begins, and while the SSD is tried again, page-outs go \
             there, where each takes 640 us at least. A try ends once it has failed, so they are few, and \
             p99.9 shows them.";
        let why = if control == Control::On { tried } else { same };
        found
            .verdicts
            .push(verdict("p95", control, p95, paper_p95).difference(same));
        found.verdicts.push(
            verdict("p99", control, p99, paper_p99)
                .target(PAGE_OUTS_MUST, Some(paper_p99))
                .difference(why),
        );
    }
}

fn page_outs(workloads: &[Workload], reports: &[SimReport]) -> Table {
    let mut rows = Vec::new();
    for (at, workload) in workloads.iter().enumerate() {
        for (control, report) in Control::ALL.iter().zip(reports) {
            let mut row = vec![workload.name.to_owned(), control.name().to_owned()];
            row.extend(spread(&report.clients[at].page_out_latency));
            rows.push(row);
        }
    }
    Table::new(
        "Page-outs",
        "Times in microseconds.",
        "workload | control | page-outs | p50 | p95 | p99 | p99.9",
        rows,
    )
}

fn pages_and_time(reports: &[SimReport]) -> Table {
    let rows = Control::ALL.iter().zip(reports).map(|(control, report)| {
        let written = |tier: usize| report.tiers[tier].pages_written.to_string();
        vec![
            control.name().to_owned(),
            written(0),
            written(1),
            format!("{:.2}", report.elapsed_seconds),
            format!("{:.2}", report.times.write_wait_seconds),
        ]
    });
    Table::new(
        "Pages written and time",
        "",
        " | to the buffer | to the SSD | seconds | of these, waits for writes",
        rows,
    )
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
    let none = Verdict::lower(
        format!("workload {name}: p99 of page-ins without control"),
        "us",
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
        Verdict::lower(
            format!("workload {name}: p99 of page-ins with a bound of {bound} us"),
            "us",
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
        Verdict::higher(
            format!("workload {name}: windows that kept the bound"),
            "%",
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
            let mut row = vec![
                workload.name.to_owned(),
                workload.bound.to_owned(),
                control.to_owned(),
            ];
            row.extend(spread(&client.fault_latency));
            if let Some(bound) = &client.latency_bound {
                let windows = bound.windows_kept + bound.windows_missed;
                row.push(format!("{} of {windows}", bound.windows_kept));
                row.push(micros(bound.worst_window_seconds.unwrap_or_default()));
            }
            rows.push(row);
        }
    }
    Table::new(
        "Page-ins",
        "Times in microseconds. The worst is the worst window's percentile.",
        "workload | bound | control | page-ins | p50 | p95 | p99 | p99.9 | windows \
             kept | worst",
        rows,
    )
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
        Panel::new(
            format!("workload {}, {}", workload.name, workload.bound),
            ["p50", "p99", "p99.9"],
            [("no control", values(without)), ("bound", values(with))],
        )
    });
    Figure::bars(
        name,
        "Latency of page-ins, without control and with a bound",
        ["percentile", "microseconds"],
        panels,
    )
}
