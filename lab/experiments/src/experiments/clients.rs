//! `clients-100`: a hundred clients that come and go under one budget of DRAM, above one emulated
//! SSD and one emulated buffer (the devices of NVSwap §VI), simulated.

use super::{Lab, progress};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};
use undercroft_base::{Bytes, Nanos};
use undercroft_sim::outcome::ClientOutcome;
use undercroft_sim::setup::{Initial, Latencies, Memory, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{Load, PageStream, Setup, Sharing, SimReport, Terms, open, simulate};

/// Work of the clients of one kind, and the promises to them.
struct Class {
    name: &'static str,
    /// Clients of ten.
    of_ten: usize,
    work: &'static str,
    /// Empty: it has none.
    bound: &'static str,
    weight: u32,
    /// Protection, in percent of the footprint.
    least_percent: u64,
    reference_time: Nanos,
    /// References that write.
    writes_percent: f64,
}

impl Class {
    /// The demand that it declares: the most that it can ask for, as if no page were in memory.
    fn demand(&self) -> Load {
        let reads = 1e9 / self.reference_time.0 as f64;
        Load {
            reads,
            writes: reads * self.writes_percent / 100.0,
        }
    }
}

/// The bounds are those of NVSwap's figures, and one that the SSD cannot keep.
const CLASSES: [Class; 6] = [
    Class {
        name: "50us",
        of_ten: 1,
        work: "zipf:theta=0.99,writes=0.05",
        bound: "p99=50us",
        weight: 2,
        least_percent: 25,
        reference_time: Nanos(2_000_000),
        writes_percent: 5.0,
    },
    Class {
        name: "300us",
        of_ten: 1,
        work: "zipf:theta=0.8,writes=0.05",
        bound: "p99=300us",
        weight: 2,
        least_percent: 15,
        reference_time: Nanos(2_000_000),
        writes_percent: 5.0,
    },
    Class {
        name: "1000us",
        of_ten: 2,
        work: "zipf:theta=0.6,writes=0.5",
        bound: "p99=1000us",
        weight: 1,
        least_percent: 10,
        reference_time: Nanos(2_000_000),
        writes_percent: 50.0,
    },
    Class {
        name: "phases",
        of_ten: 2,
        work: "phases:phases=4,writes=0.3",
        bound: "",
        weight: 1,
        least_percent: 5,
        reference_time: Nanos(2_000_000),
        writes_percent: 30.0,
    },
    Class {
        name: "small",
        of_ten: 2,
        work: "scan_hot:share=0.995,writes=0.1",
        bound: "",
        weight: 1,
        least_percent: 5,
        reference_time: Nanos(2_000_000),
        writes_percent: 10.0,
    },
    Class {
        name: "writer",
        of_ten: 2,
        work: "uniform:writes=1",
        bound: "",
        weight: 1,
        least_percent: 5,
        reference_time: Nanos(4_000_000),
        writes_percent: 100.0,
    },
];

/// DRAM, of all footprints together.
const MEMORY_PERCENT: u64 = 40;
/// The buffer, of all footprints together.
const BUFFER_PERCENT: u64 = 15;

/// The sizes of one run.
struct Sizes {
    clients: usize,
    pages: u64,
    refs: u64,
    /// Time between two arrivals.
    gap: Nanos,
}

impl Sizes {
    fn of(lab: &Lab) -> Sizes {
        let real = Sizes {
            clients: 100,
            pages: 4096,
            refs: 60_000,
            gap: Nanos(500_000_000),
        };
        let small = Sizes {
            clients: 10,
            pages: 2048,
            refs: 20_000,
            gap: Nanos(500_000_000),
        };
        lab.pick(small, real)
    }

    fn bytes(&self, percent: u64) -> Bytes {
        Bytes(self.clients as u64 * self.pages * 4096 * percent / 100)
    }
}

/// The class of each client: ten in turn.
fn class_of(client: usize) -> &'static Class {
    let mut at = client % 10;
    for class in &CLASSES {
        if at < class.of_ten {
            return class;
        }
        at -= class.of_ten;
    }
    &CLASSES[0]
}

/// The work of each client. A description may have 64 patterns at most, so each is one of its own.
fn streams(sizes: &Sizes) -> anyhow::Result<Vec<PageStream>> {
    let mut all = Vec::new();
    for client in 0..sizes.clients {
        let work = class_of(client).work;
        let (pages, refs, seed) = (sizes.pages, sizes.refs, client + 1);
        let text = format!("{work},pages={pages},refs={refs},seed={seed}");
        all.extend(streams_of(&open::open(&text)?, 4096)?);
    }
    Ok(all)
}

fn terms(sizes: &Sizes, client: usize) -> anyhow::Result<Terms> {
    let class = class_of(client);
    let bytes = sizes.pages * 4096;
    Ok(Terms {
        weight: class.weight,
        least: Bytes(bytes * class.least_percent / 100),
        most: Bytes(bytes * 2),
        bound: match class.bound {
            "" => None,
            text => Some(text.parse()?),
        },
        demand: Some(class.demand()),
        comes: Nanos(sizes.gap.0 * client as u64),
        reference_time: class.reference_time,
    })
}

fn simulate_once(
    sizes: &Sizes,
    streams: &[PageStream],
    by_curves: bool,
    control: bool,
) -> anyhow::Result<SimReport> {
    let terms: anyhow::Result<Vec<Terms>> = (0..sizes.clients).map(|at| terms(sizes, at)).collect();
    let buffer = format!("optane-dimm,size={}", sizes.bytes(BUFFER_PERCENT).0);
    let setup = Setup {
        memory: Memory::Bytes(sizes.bytes(MEMORY_PERCENT)),
        tiers: vec![buffer.parse()?, "sata-ssd".parse()?],
        reclaim: "active_inactive".to_owned(),
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        latency: Latencies {
            window: Nanos(1_000_000_000),
            control,
            ..Latencies::default()
        },
        curve: true,
        sharing: Some(Sharing {
            terms: terms?,
            by_curves,
            every: Nanos(6_000_000_000),
            admission: true,
        }),
        ..Setup::default()
    };
    Ok(simulate(streams, &setup, &mut |_| ())?)
}

/// The clients of a class.
fn members<'a>(report: &'a SimReport, class: &'a Class) -> impl Iterator<Item = &'a ClientOutcome> {
    let clients = report.clients.iter().enumerate();
    clients
        .filter(|(at, _)| class_of(*at).name == class.name)
        .map(|(_, client)| client)
}

/// Windows of a class that kept the bound, and all of them.
fn windows(report: &SimReport, class: &Class) -> (u64, u64) {
    let bounds = members(report, class).filter_map(|of| of.latency_bound.as_ref());
    bounds.fold((0, 0), |(kept, all), of| {
        (
            kept + of.windows_kept,
            all + of.windows_kept + of.windows_missed,
        )
    })
}

fn kept_percent(report: &SimReport, class: &Class) -> f64 {
    let (kept, all) = windows(report, class);
    100.0 * kept as f64 / all.max(1) as f64
}

fn stall(report: &SimReport, class: &Class) -> f64 {
    let shared = members(report, class).filter_map(|of| of.shared.as_ref());
    shared.map(|of| of.stall_seconds).sum()
}

fn stall_of_all(report: &SimReport) -> f64 {
    CLASSES.iter().map(|class| stall(report, class)).sum()
}

/// Mean DRAM of an admitted client of a class, MiB.
fn dram_mib(report: &SimReport, class: &Class) -> f64 {
    let admitted: Vec<f64> = members(report, class)
        .filter_map(|of| of.shared.as_ref())
        .filter(|of| of.refused.is_none())
        .map(|of| of.mean_limit_bytes as f64 / f64::from(1 << 20))
        .collect();
    admitted.iter().sum::<f64>() / admitted.len().max(1) as f64
}

/// The runs, and how the tables call them.
type Runs = [(&'static str, SimReport); 3];

pub(super) fn run(lab: &Lab) -> anyhow::Result<Simulated> {
    let sizes = Sizes::of(lab);
    let streams = streams(&sizes)?;
    let run = |name, by_curves, control| -> anyhow::Result<(&'static str, SimReport)> {
        progress(name);
        Ok((name, simulate_once(&sizes, &streams, by_curves, control)?))
    };
    let runs: Runs = [
        run("auto", true, true)?,
        run("by weights", false, true)?,
        run("auto, no control", true, false)?,
    ];
    let mut found = Simulated {
        model: model(&sizes),
        tables: vec![classes(&runs), refusals(&runs[0].1)],
        figures: vec![figure(&runs)],
        ..Simulated::default()
    };
    let name = format!("{} clients", sizes.clients);
    let work = CLASSES.map(|class| class.work).join(" + ");
    found.traces.push(TraceFacts {
        identity: "ten in turn".to_owned(),
        ..TraceFacts::generated(&name, &work, &runs[0].1)
    });
    let line = |(name, report): &(&'static str, SimReport)| SimulatedRun {
        memory_pages: sizes.bytes(MEMORY_PERCENT).0 / 4096, // the budget
        ..SimulatedRun::of((*name).to_owned(), MEMORY_PERCENT as f64, report)
    };
    found.runs.extend(runs.iter().map(line));
    for class in CLASSES.iter().filter(|class| !class.bound.is_empty()) {
        let measure = format!("windows that kept {}, of admitted clients", class.bound);
        let kept = kept_percent(&runs[0].1, class);
        let verdict = Verdict::higher(measure, "%", kept);
        found.verdicts.push(verdict.target(95.0, None));
    }
    let measure = "stall of all clients, shares `auto` against by weights";
    let ratio = stall_of_all(&runs[0].1) / stall_of_all(&runs[1].1);
    let verdict = Verdict::lower(measure, "times", ratio);
    found.verdicts.push(verdict.target(1.0, None));
    Ok(found)
}

fn model(sizes: &Sizes) -> Vec<String> {
    vec![
        format!(
            "{} clients of {} pages and {} references each, one every {}; a client leaves at the end of its \
             trace. All its pages lie on the SSD when it comes. DRAM is {MEMORY_PERCENT} % of all footprints, the \
             buffer {BUFFER_PERCENT} %.",
            sizes.clients, sizes.pages, sizes.refs, sizes.gap
        ),
        "Devices are emulated: one Optane module (the buffer) and one SATA SSD, as in NVSwap, by their data \
         sheets (`device/src/profiles.rs`). All clients share them."
            .to_owned(),
        "Latency control and division of DRAM are the code of `undercroft-qos` that runs live. Admission weighs \
         the load of all clients, as declared and then as measured. Clients whose bound the SSD cannot keep \
         beside that load have the buffer, and begin when their pages are there. Memory that one client gives \
         is there for another at once."
            .to_owned(),
    ]
}

fn classes(runs: &Runs) -> Table {
    let mut rows = Vec::new();
    for class in &CLASSES {
        for (name, report) in runs {
            let all = members(report, class).count();
            let refused = members(report, class)
                .filter(|of| of.shared.as_ref().is_some_and(|of| of.refused.is_some()))
                .count();
            let (kept, windows) = windows(report, class);
            let kept = match class.bound {
                "" => "-".to_owned(),
                _ => format!("{kept} of {windows}"),
            };
            rows.push(vec![
                class.name.to_owned(),
                (*name).to_owned(),
                format!("{} of {all}", all - refused),
                kept,
                format!("{:.1}", dram_mib(report, class)),
                format!("{:.1}", stall(report, class)),
            ]);
        }
    }
    for (name, report) in runs {
        let stall = format!("{:.1}", stall_of_all(report));
        let cells = ["all", name, "", "", "", stall.as_str()];
        rows.push(cells.map(str::to_owned).to_vec());
    }
    Table::new(
        "Classes",
        "DRAM is the mean limit of an admitted client while it is there. Stall is the sum of all its \
         clients.",
        "class | run | admitted | windows kept | DRAM, MiB | stall, s",
        rows,
    )
}

fn refusals(report: &SimReport) -> Table {
    let clients = report.clients.iter().enumerate();
    let rows = clients.filter_map(|(at, client)| {
        let refused = client.shared.as_ref()?.refused.as_ref()?;
        let class = class_of(at).name;
        Some(vec![at.to_string(), class.to_owned(), refused.to_string()])
    });
    Table::new(
        "Refused by admission, with `auto`",
        "",
        "client | class | why",
        rows,
    )
}

fn figure(runs: &Runs) -> Figure {
    let panel = |title: &str, bounded: bool, value: fn(&SimReport, &Class) -> f64| {
        let shown = |class: &&Class| !bounded || !class.bound.is_empty();
        Panel::new(
            title,
            (CLASSES.iter().filter(shown)).map(|class| class.name.to_owned()),
            runs.iter().map(|(name, report)| {
                let values = CLASSES.iter().filter(shown);
                let values = values.map(|class| value(report, class)).collect();
                ((*name).to_owned(), values)
            }),
        )
    };
    Figure::bars(
        "clients-100",
        "Clients under one budget, emulated devices",
        ["class", "%, MiB, s"],
        vec![
            panel("windows kept, %", true, kept_percent),
            panel("DRAM a client, MiB", false, dram_mib),
            panel("stall, s", false, stall),
        ],
    )
}
