//! `nvswap-fig7`: a page-in that copies the page, against one that maps it where it lies ("Dr.
//! swap"), for two servers above memory that is not DRAM (NVSwap §VI-D).
//!
//! No page is mapped in place here, and the engine knows nothing of it. The three simulations
//! differ in what a page-in moves: the law of the device's reads is changed.

use super::super::{Lab, progress};
use super::{BUFFER, MEMORY_PERCENT, Operations, clients_in_words, micros, setup, spec};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};
use undercroft_sim::setup::{Cost, TierModel};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{PageStream, Setup, SimReport, open, simulate};

/// Share of writes: YCSB's workload A, for both servers.
const WRITES: [f64; 2] = [0.5, 0.5];

/// Part of a page that an operation reads: a record.
const RECORD_PART: f64 = 0.25;

/// By how many percent the paper's p99 of operations is above that of direct mapping.
const PAPER_PERCENT: f64 = 0.8;

/// The act of a page-in.
#[derive(Clone, Copy, PartialEq)]
enum PageIn {
    /// Map the page; the operation reads its record there.
    Map,
    /// Copy it within the device, and read the record there: NVSwap.
    CopyWithin,
    /// Copy it to DRAM: Undercroft.
    CopyOut,
}

impl PageIn {
    const ALL: [PageIn; 3] = [PageIn::Map, PageIn::CopyWithin, PageIn::CopyOut];

    fn name(self) -> &'static str {
        match self {
            PageIn::Map => "mapped where it lies (Dr. swap)",
            PageIn::CopyWithin => "copied within the device (NVSwap)",
            PageIn::CopyOut => "copied to DRAM (ours)",
        }
    }

    /// The setup whose page-ins do this.
    fn change(self, setup: &mut Setup) {
        for tier in &mut setup.tiers {
            let TierModel::Device { profile, .. } = &mut tier.kind else {
                continue;
            };
            let (read, write) = (&mut profile.read, profile.write);
            match self {
                PageIn::Map => read.per_byte_ns *= RECORD_PART,
                PageIn::CopyWithin => {
                    read.access_ns = 2.0 * read.access_ns + write.access_ns;
                    read.per_byte_ns = read.per_byte_ns * (1.0 + RECORD_PART) + write.per_byte_ns;
                }
                PageIn::CopyOut => {}
            }
        }
    }
}

/// A simulation.
struct Trial {
    page_in: PageIn,
    report: SimReport,
    /// Of both servers.
    operations: Operations,
}

impl Trial {
    fn of(page_in: PageIn, streams: &[PageStream], setup: &Setup) -> anyhow::Result<Trial> {
        progress(page_in.name());
        let mut setup = setup.clone();
        page_in.change(&mut setup);
        let report = simulate(streams, &setup, &mut |_| ())?;
        let all = [false, true].into_iter().flat_map(|write| {
            let clients = streams.iter().zip(&report.clients);
            clients.map(move |(stream, client)| Operations::of(stream, client, write))
        });
        let operations = all.reduce(Operations::join);
        Ok(Trial {
            page_in,
            operations: operations.expect("two servers"),
            report,
        })
    }

    fn p99(&self) -> f64 {
        self.operations.within(0.99)
    }
}

pub(in crate::experiments) fn fig7(lab: &Lab) -> anyhow::Result<Simulated> {
    let text = spec(WRITES.into_iter(), lab.options.small);
    let trace = open::open(&text)?;
    let streams = streams_of(&trace, 4096)?;
    let setup = Setup {
        waits: true,
        software: Cost::On,
        ..setup(lab, &[BUFFER], &[], false)?
    };
    let runs = PageIn::ALL.map(|page_in| Trial::of(page_in, &streams, &setup));
    let runs: Vec<_> = runs.into_iter().collect::<Result<_, _>>()?;
    let mut found = Simulated::of(model());
    let facts = TraceFacts::generated("zipfian pages", &text, &runs[0].report);
    found.traces.push(facts);
    for run in &runs {
        let name = format!("fig7, {}", run.page_in.name());
        let run = SimulatedRun::of(name, MEMORY_PERCENT, &run.report);
        found.runs.push(run);
    }
    verdicts(&runs, &mut found);
    found.tables.push(table(&runs));
    found.figures.push(figure(&runs));
    Ok(found)
}

fn model() -> Vec<String> {
    vec![
        clients_in_words(),
        "One Optane module is the only tier, as in the paper, and no latency is controlled. It serves \
         one request at a time. Sources: `device/src/profiles.rs`."
            .to_owned(),
        "A page-in is 4 us of the kernel, the wait for the module, and what it moves. One that maps reads \
         one record of 1 KB from the module. One that copies within it reads and writes the page, and then \
         reads the record. One that copies to DRAM reads the page."
            .to_owned(),
        "Not modelled: later reads of a page that is mapped in place, which are slower than DRAM; \
         writes to it; the DRAM that such a page leaves free. The first two favour mapping."
            .to_owned(),
    ]
}

fn verdicts(runs: &[Trial], found: &mut Simulated) {
    let above = |run: &Trial| 100.0 * (run.p99() / runs[0].p99() - 1.0);
    let verdict = |run: &Trial| {
        let name = format!(
            "p99 of operations above direct mapping, page {}",
            run.page_in.name()
        );
        Verdict::lower(name, "%", above(run)).paper(PAPER_PERCENT)
    };
    found.verdicts.push(verdict(&runs[1]).difference(
        "the module's copy takes 3 us of 41. The paper's operations also pass memcached and its network, \
         so a copy is a smaller part of them.",
    ));
    found.verdicts.push(
        verdict(&runs[2])
            .difference("the paper copies to a frame of the slow memory, ours to DRAM."),
    );
}

fn table(runs: &[Trial]) -> Table {
    let rows = runs.iter().map(|run| {
        let client = &run.report.clients[0];
        vec![
            run.page_in.name().to_owned(),
            micros(run.operations.within(0.5)),
            micros(run.operations.within(0.95)),
            micros(run.p99()),
            micros(client.fault_latency.p50_seconds),
            micros(client.fault_latency.p99_seconds),
        ]
    });
    Table::new(
        "Operations of both servers, and page-ins of the first",
        "Microseconds.",
        "page | operations p50 | p95 | p99 | page-ins p50 | p99",
        rows,
    )
}

fn figure(runs: &[Trial]) -> Figure {
    let parts = [("p50", 0.5), ("p95", 0.95), ("p99", 0.99)];
    let series = runs.iter().map(|run| {
        let values = parts.map(|(_, part)| run.operations.within(part) * 1e6);
        (run.page_in.name().to_owned(), values.to_vec())
    });
    Figure::bars(
        "fig7",
        "Latency of operations: a page is mapped in place, or copied",
        ["percentile", "microseconds"],
        vec![Panel::new(
            "two servers, workload A",
            parts.map(|(name, _)| name.to_owned()).to_vec(),
            series,
        )],
    )
}
