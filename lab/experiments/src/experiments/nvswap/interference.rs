//! `nvswap-fig1`: what page-outs do to page-ins and to operations on an SSD without control, for
//! one memcached server and for two (NVSwap §II-A).

use super::super::{Lab, progress};
use super::{
    MEMORY_PERCENT, OPERATION, Operations, PAGING_IN_WORDS, SSD, SSD_IN_WORDS, clients_in_words,
    micros, setup, spec,
};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};
use undercroft_sim::outcome::Latency;
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{PageStream, Setup, SimReport, open, simulate};

/// Share of writes: YCSB's workload A.
const WRITES: f64 = 0.5;

/// The paper's p99 of reads, in microseconds: one server, and two.
const PAPER_READS: [f64; 2] = [840.0, 2143.0];

/// By how much the paper's p99 of page-outs is longer than an operation.
const PAPER_PAGE_OUTS: f64 = 122.0;

/// The figure's values for a setting: p95 and p99 in seconds.
struct Shown {
    name: &'static str,
    page_ins: Latency,
    page_outs: Latency,
    reads: Operations,
    updates: Operations,
}

impl Shown {
    /// Of the first client: there is one, or the two are alike.
    fn of(name: &'static str, streams: &[PageStream], report: &SimReport) -> Shown {
        let client = &report.clients[0];
        Shown {
            name,
            page_ins: client.fault_latency,
            page_outs: client.page_out_latency,
            reads: Operations::of(&streams[0], client, false),
            updates: Operations::of(&streams[0], client, true),
        }
    }

    /// p95 and p99 of page-ins, page-outs, reads and updates.
    fn tails(&self) -> [(&'static str, f64, f64); 4] {
        let of = |name, latency: &Latency| (name, latency.p95_seconds, latency.p99_seconds);
        let done = |name, of: &Operations| (name, of.within(0.95), of.within(0.99));
        [
            of("page-ins", &self.page_ins),
            of("page-outs", &self.page_outs),
            done("reads", &self.reads),
            done("updates", &self.updates),
        ]
    }
}

pub(in crate::experiments) fn fig1(lab: &Lab) -> anyhow::Result<Simulated> {
    let mut found = Simulated::of(vec![
        clients_in_words(),
        SSD_IN_WORDS.to_owned(),
        PAGING_IN_WORDS.to_owned(),
        "An operation is 34 us and what it waits for: its page-in, and room for the page."
            .to_owned(),
    ]);
    let setup = Setup {
        waits: true,
        ..setup(lab, &[SSD], &[], false)?
    };
    let mut shown = Vec::new();
    for (name, clients) in [("one server", 1), ("two servers", 2)] {
        progress(name);
        let text = spec(std::iter::repeat_n(WRITES, clients), lab.options.small);
        let trace = open::open(&text)?;
        let streams = streams_of(&trace, 4096)?;
        let report = simulate(&streams, &setup, &mut |_| ())?;
        let facts = TraceFacts::generated("zipfian pages", &text, &report);
        found.traces.push(facts);
        let run = SimulatedRun::of(format!("fig1, {name}"), MEMORY_PERCENT, &report);
        found.runs.push(run);
        shown.push(Shown::of(name, &streams, &report));
    }
    verdicts(&shown, &mut found);
    found.tables.push(table(&shown));
    found.figures.push(figure(&shown));
    Ok(found)
}

fn verdicts(shown: &[Shown], found: &mut Simulated) {
    for (of, paper) in shown.iter().zip(PAPER_READS) {
        found.verdicts.push(
            Verdict::lower(
                format!("{}: p99 of reads of the database", of.name),
                "us",
                of.reads.within(0.99) * 1e6,
            )
            .paper(paper)
            .difference(
                "the paper's operations also pass memcached, its network, and the kernel's queue, and its \
                 kernel reclaims while a thread waits.",
            ),
        );
    }
    let reads = |at: usize| shown[at].reads.within(0.99);
    found.verdicts.push(
        Verdict::lower(
            "p99 of reads of the database: two servers by one",
            "times",
            reads(1) / reads(0),
        )
        .paper((100.0 * PAPER_READS[1] / PAPER_READS[0]).round() / 100.0),
    );
    for of in shown {
        let ours = of.page_outs.p99_seconds / OPERATION.seconds();
        let verdict = Verdict::lower(
            format!("{}: p99 of page-outs, by the shortest operation", of.name),
            "times",
            ours,
        );
        found.verdicts.push(
            verdict
                .paper(PAPER_PAGE_OUTS)
                .difference("the paper says neither for which setting nor of which operation."),
        );
    }
}

fn table(shown: &[Shown]) -> Table {
    let rows = shown.iter().flat_map(|of| {
        of.tails().map(|(name, p95, p99)| {
            vec![
                of.name.to_owned(),
                name.to_owned(),
                micros(p95),
                micros(p99),
            ]
        })
    });
    Table::new(
        "Without control, on the SSD",
        "Microseconds, of the first server.",
        " | of | p95 | p99",
        rows,
    )
}

fn figure(shown: &[Shown]) -> Figure {
    let panels = [["page-ins", "page-outs"], ["reads", "updates"]].map(|names| {
        let series = shown.iter().map(|of| {
            let tails = of.tails();
            let of_names = tails.iter().filter(|(name, ..)| names.contains(name));
            let values = of_names.flat_map(|(_, p95, p99)| [p95 * 1e6, p99 * 1e6]);
            (of.name.to_owned(), values.collect())
        });
        Panel::new(
            names.join(" and "),
            names
                .iter()
                .flat_map(|name| ["p95", "p99"].map(|tail| format!("{name} {tail}"))),
            series,
        )
    });
    Figure::bars(
        "fig1",
        "Latency without control: one server on the SSD, and two",
        ["percentile", "microseconds"],
        panels.to_vec(),
    )
    .log()
}
