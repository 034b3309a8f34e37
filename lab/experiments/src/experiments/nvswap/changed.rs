//! `nvswap-fig6`: the bound of one client is changed while it runs beside another (NVSwap §VI-C).

use super::super::{Lab, progress};
use super::{
    BUFFER_IN_WORDS, CONTROL_IN_WORDS, MEMORY_PERCENT, NOT_MODELLED, PAGING_IN_WORDS, SSD_IN_WORDS,
    TIERS, clients_in_words, micros, setup, spec_of,
};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};
use undercroft_base::Nanos;
use undercroft_sim::outcome::{ClientOutcome, WindowOutcome};
use undercroft_sim::setup::BoundChange;
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{SimReport, open, simulate};

/// The clients, and the bound of the first.
const NAMES: [&str; 2] = ["A", "C"];
const BOUND_OF_A: &str = "p99=100us";

/// A bound of C, and the window with which it begins. The paper's windows take a second.
struct Step {
    from: u64,
    bound: &'static str,
}

const STEPS: [Step; 3] = [
    Step {
        from: 0,
        bound: "p99=1000us",
    },
    Step {
        from: 200,
        bound: "p99=800us",
    },
    Step {
        from: 450,
        bound: "p99=600us",
    },
];

/// The paper's p99 of C's page-ins over the whole run, in microseconds.
const PAPER_C: f64 = 748.0;

/// The part of C's page-ins that the paper's buffer serves at last, in percent: "up to".
const PAPER_FROM_BUFFER: f64 = 90.0;

/// Windows of a bound that must keep it, in percent.
const KEPT_MUST: f64 = 95.0;

/// Of windows, the first must keep a new bound, or the second. A small run has 25 times fewer pages
/// to move and 50 times shorter windows, so twice as many.
const UNTIL_KEPT_MUST: [f64; 2] = [4.0, 2.0];

/// Operations of A and of C: for 650 windows of a second.
const OPERATIONS: [u64; 2] = [18_500_000, 11_500_000];

/// Windows of a small run are shorter by this much.
const SMALL: u64 = 50;

/// A simulation.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// The bound of C is changed.
    Changed,
    /// C keeps the bound that it begins with.
    Same,
    /// The bound is changed, and C's pages stay clean.
    Clean,
}

impl Case {
    const ALL: [Case; 3] = [Case::Changed, Case::Same, Case::Clean];

    fn name(self) -> &'static str {
        match self {
            Case::Changed => "the bound of C is changed",
            Case::Same => "the bound of C stays",
            Case::Clean => "it is changed, C's pages are clean",
        }
    }

    /// The trace: what A and C write of their operations.
    fn spec(self, lab: &Lab) -> String {
        let writes = if self == Case::Clean { 0.0 } else { 1.0 };
        let operations = OPERATIONS.map(|count| lab.pick(count / SMALL, count));
        let clients = [0.5, writes].into_iter().zip(operations);
        spec_of(clients, lab.pick(4_000, 100_000))
    }
}

/// A simulation that is done.
struct Trial {
    case: Case,
    report: SimReport,
    window: Nanos,
}

/// The windows of a client while C has one bound.
struct Span<'a> {
    windows: Vec<&'a WindowOutcome>,
}

impl Trial {
    fn of(case: Case, lab: &Lab, found: &mut Simulated) -> anyhow::Result<Trial> {
        progress(case.name());
        let text = case.spec(lab);
        let trace = open::open(&text)?;
        let streams = streams_of(&trace, 4096)?;
        let mut setup = setup(lab, &TIERS, &[BOUND_OF_A, STEPS[0].bound], true)?;
        let second = Nanos(1_000_000_000);
        let window = lab.pick(Nanos(second.0 / SMALL), second);
        setup.latency.window = window;
        setup.unordered = true;
        if case != Case::Same {
            for step in &STEPS[1..] {
                setup.latency.changes.push(BoundChange {
                    at: Nanos(step.from * window.0),
                    client: 1,
                    bound: step.bound.parse()?,
                });
            }
        }
        let report = simulate(&streams, &setup, &mut |_| ())?;
        let facts = TraceFacts::generated("zipfian pages", &text, &report);
        found.traces.push(facts);
        let name = format!("fig6, {}", case.name());
        found
            .runs
            .push(SimulatedRun::of(name, MEMORY_PERCENT, &report));
        Ok(Trial {
            case,
            report,
            window,
        })
    }

    fn client(&self, client: usize) -> &ClientOutcome {
        &self.report.clients[client]
    }

    /// The windows of a client until the first of both has come to its end.
    fn windows(&self, client: usize) -> impl Iterator<Item = &WindowOutcome> {
        let ends = self.report.clients.iter().map(|of| of.elapsed_seconds);
        let end = ends.fold(f64::MAX, f64::min);
        let bound = self.client(client).latency_bound.iter();
        let windows = bound.flat_map(|bound| &bound.windows);
        windows.filter(move |window| window.end_seconds <= end)
    }

    /// Windows of the client in a step of [`STEPS`].
    fn span(&self, client: usize, step: usize) -> Span<'_> {
        let ends = |step: &Step| (step.from as f64 + 0.5) * self.window.seconds();
        let from = ends(&STEPS[step]);
        let to = STEPS.get(step + 1).map_or(f64::MAX, ends);
        let windows = self.windows(client);
        let within = windows.filter(|of| (from..to).contains(&of.end_seconds));
        Span {
            windows: within.collect(),
        }
    }
}

impl Span<'_> {
    fn kept(&self) -> usize {
        self.windows.iter().filter(|of| of.is_kept()).count()
    }

    fn kept_percent(&self) -> f64 {
        100.0 * self.kept() as f64 / self.windows.len() as f64
    }

    /// Windows until the first that kept the bound, with it. One more than all if none did.
    fn until_kept(&self) -> usize {
        let mut windows = self.windows.iter();
        let first = windows.position(|of| of.is_kept());
        first.unwrap_or(self.windows.len()) + 1
    }

    /// Microseconds of p99 of the windows: the median one, and the worst.
    fn tails(&self) -> [f64; 2] {
        let tails = self.windows.iter().map(|of| of.window.tail);
        let mut tails: Vec<_> = tails.collect();
        tails.sort_unstable();
        let at = |at: usize| tails.get(at).map_or(f64::NAN, |tail| tail.seconds() * 1e6);
        [at(tails.len() / 2), at(tails.len().saturating_sub(1))]
    }

    /// `part` of a window's page-ins, in percent of all of them.
    fn percent(&self, part: impl Fn(&WindowOutcome) -> u64) -> f64 {
        let all = self.windows.iter().map(|of| of.window.page_ins);
        let some = self.windows.iter().map(|of| part(of));
        100.0 * some.sum::<u64>() as f64 / all.sum::<u64>() as f64
    }

    fn buffered_percent(&self) -> f64 {
        self.percent(|of| of.window.page_ins - of.from_last_tier)
    }
}

pub(in crate::experiments) fn fig6(lab: &Lab) -> anyhow::Result<Simulated> {
    let mut found = Simulated::of(model());
    let runs = Case::ALL.map(|case| Trial::of(case, lab, &mut found));
    let runs: Vec<_> = runs.into_iter().collect::<Result<_, _>>()?;
    let [small, real] = UNTIL_KEPT_MUST;
    verdicts(&runs, lab.pick(small, real), &mut found);
    found.tables.push(table(&runs));
    found.figures.push(figure(&runs[..2]));
    Ok(found)
}

fn model() -> Vec<String> {
    vec![
        clients_in_words(),
        "Half of A's operations write. All of C's do: memcached counts references in the header of an \
         item that it reads, which makes the page dirty. A third simulation leaves C's pages clean, as \
         those of figure 5 are."
            .to_owned(),
        SSD_IN_WORDS.to_owned(),
        BUFFER_IN_WORDS.to_owned(),
        PAGING_IN_WORDS.to_owned(),
        "Devices serve requests by their times, and reads before writes that have not begun. In figures \
         1, 4, 5 and 7 they serve them in the order in which clients are simulated."
            .to_owned(),
        CONTROL_IN_WORDS.to_owned(),
        "A bound is changed as in the daemon (`undercroft set`): the client's windows begin anew, at the \
         SSD. Admission is not asked."
            .to_owned(),
        NOT_MODELLED.to_owned(),
    ]
}

fn verdicts(runs: &[Trial], until_kept_must: f64, found: &mut Simulated) {
    let all = [
        changed_bound(&runs[0], until_kept_must),
        neighbour(runs),
        clean(&runs[2]),
    ];
    found.verdicts.extend(all.into_iter().flatten());
}

/// A percentage of windows, or of page-ins.
fn percent(measure: String, ours: f64) -> Verdict {
    Verdict::higher(measure, "%", ours)
}

/// Verdicts on C.
fn changed_bound(run: &Trial, until_kept_must: f64) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (at, step) in STEPS.iter().enumerate() {
        let (span, bound) = (run.span(1, at), step.bound);
        let kept = percent(
            format!("C, {bound}: windows that kept it"),
            span.kept_percent(),
        );
        verdicts.push(kept.target(KEPT_MUST, Some(100.0)));
        if at > 0 {
            let measure = format!("C, {bound}: windows until it is kept");
            let until = span.until_kept() as f64;
            let until = Verdict::lower(measure, "windows", until);
            verdicts.push(until.target(until_kept_must, Some(1.0)));
        }
    }
    let last = STEPS.len() - 1;
    let measure = format!("C, {}: page-ins that the buffer serves", STEPS[last].bound);
    verdicts.push(
        percent(measure, run.span(1, last).buffered_percent())
            .paper(PAPER_FROM_BUFFER)
            .difference("the paper says: up to 90 % of the paging requests."),
    );
    let whole = run.client(1).fault_latency.p99_seconds * 1e6;
    verdicts.push(
        Verdict::lower("C: p99 of all page-ins", "us", whole)
            .paper(PAPER_C)
            .difference(
                "in the buffer C is faster, so it has more page-ins after the last change than before, and \
                 nearly all are from the buffer. In the paper C stays near its bound.",
            ),
    );
    verdicts
}

/// Verdicts on A meanwhile.
fn neighbour(runs: &[Trial]) -> Vec<Verdict> {
    let (run, same) = (&runs[0], &runs[1]);
    let mut verdicts = Vec::new();
    for (at, step) in STEPS.iter().enumerate() {
        let measure = format!("A, while C has {}: windows that kept its bound", step.bound);
        let kept = percent(measure, run.span(0, at).kept_percent());
        verdicts.push(kept.target(KEPT_MUST, Some(100.0)));
    }
    let median = |run: &Trial, at: usize| run.span(0, at).tails()[0];
    let last = STEPS.len() - 1;
    for (measure, before) in [
        ("by that before", median(run, 0)),
        ("by that without the changes", median(same, last)),
    ] {
        let measure = format!("A, after the last change: median p99 of a window, {measure}");
        let ours = median(run, last) / before;
        let verdict = Verdict::lower(measure, "times", ours).paper(1.0);
        verdicts.push(verdict.difference(
            "the paper says: not affected. Ours is a microsecond or two on both sides: A shares the \
             module, which serves one request at a time, with C's page-outs now.",
        ));
    }
    let whole = run.client(0).fault_latency.p99_seconds * 1e6;
    verdicts.push(
        Verdict::lower("A: p99 of all page-ins", "us", whole)
            .target(100.0, None)
            .difference("the paper says: smaller than 100 us."),
    );
    verdicts
}

/// C whose pages are clean.
fn clean(run: &Trial) -> Vec<Verdict> {
    let whole = run.client(1).fault_latency.p99_seconds * 1e6;
    let verdict = Verdict::lower("C with clean pages: p99 of all page-ins", "us", whole);
    let why = "A leaves to the buffer and C leaves without a write, so the SSD has nothing but reads: no \
               bound of C asks anything of control.";
    vec![verdict.paper(PAPER_C).difference(why)]
}

fn table(runs: &[Trial]) -> Table {
    let mut rows = Vec::new();
    for run in runs {
        for (at, step) in STEPS.iter().enumerate() {
            for (client, name) in NAMES.iter().enumerate() {
                let span = run.span(client, at);
                let bound = span.windows.first().map(|of| of.bound.to_string());
                let [median, worst] = span.tails().map(|micros| format!("{micros:.1}"));
                rows.push(vec![
                    run.case.name().to_owned(),
                    step.from.to_string(),
                    (*name).to_owned(),
                    bound.unwrap_or_default(),
                    format!("{} of {}", span.kept(), span.windows.len()),
                    span.until_kept().to_string(),
                    median,
                    worst,
                    format!("{:.2}", span.percent(|of| of.window.over)),
                    format!("{:.1}", span.buffered_percent()),
                ]);
            }
        }
    }
    for run in runs {
        for (client, name) in NAMES.iter().enumerate() {
            let of = run.client(client).fault_latency;
            let mut row = vec![
                run.case.name().to_owned(),
                "all".to_owned(),
                (*name).to_owned(),
            ];
            row.extend([const { String::new() }; 3]);
            row.extend([of.p99_seconds, of.max_seconds].map(micros));
            row.extend([const { String::new() }; 2]);
            rows.push(row);
        }
    }
    Table::new(
        "Page-ins, by the bound of C",
        "Microseconds. p99 of a window: the median of the windows, and the worst; for all, p99 of \
               all page-ins, and the longest. Windows after the end of the first client are left out, \
               but for `all`.",
        " | from window | client | bound | windows kept | until kept | p99 | worst | % \
             above the bound | % from the buffer",
        rows,
    )
}

/// A panel for each client of each run: p99 of each window, and the bound.
fn figure(runs: &[Trial]) -> Figure {
    let panel = |run: &Trial, client: usize| {
        let micros = |nanos: Nanos| nanos.seconds() * 1e6;
        let windows = || run.windows(client);
        let named = |at: usize| {
            if at.is_multiple_of(100) {
                at.to_string()
            } else {
                String::new()
            }
        };
        Panel::new(
            format!("{}: {}", NAMES[client], run.case.name()),
            windows().enumerate().map(|(at, _)| named(at)),
            [
                ("p99", windows().map(|of| micros(of.window.tail)).collect()),
                (
                    "bound",
                    windows().map(|of| micros(of.bound.limit)).collect(),
                ),
            ],
        )
    };
    let panels = runs
        .iter()
        .flat_map(|run| [1, 0].map(|client| panel(run, client)));
    Figure::lines(
        "fig6",
        "p99 of page-ins in each window, and the bound",
        ["window", "microseconds"],
        panels,
    )
    .log()
}
