//! Explains the cases in which CLOCK-W is slower than CLOCK: which pages it reads back, what it
//! writes out, which laps were useless. Tries other readings of the paper, too.

use super::laps::{self, Laps, Rule};
use super::load::Loaded;
use super::pairs::Pair;
use super::study::{Constants, MEMORY_PERCENT, PCM, Pages, mean};
use crate::results::{Figure, Panel, SimulatedRun, Table};
use anyhow::ensure;

/// Evidence in a case: the runs of the engine, and the laps that explain them.
pub(super) struct Case {
    trace: String,
    memory_percent: f64,
    clock: Laps,
    clock_w: Laps,
    /// CLOCK's time, and the times of reading and of writing a page, in nanoseconds.
    clock_ns: f64,
    read_ns: f64,
    write_ns: f64,
}

impl Case {
    /// How many more events CLOCK-W has, times `each` nanoseconds, in percent of CLOCK's time.
    fn percent(&self, of: impl Fn(&Laps) -> u64, each: f64) -> f64 {
        (of(&self.clock_w) as f64 - of(&self.clock) as f64) * each / self.clock_ns * 100.0
    }

    /// Never-written pages read back; written pages read back; pages written out; the sum of the
    /// three.
    fn parts(&self) -> [f64; 4] {
        let clean = self.percent(|laps| laps.read_clean, self.read_ns);
        let written = self.percent(|laps| laps.read_written, self.read_ns);
        let out = self.percent(|laps| laps.write_outs, self.write_ns);
        [clean, written, out, clean + written + out]
    }
}

/// Explains every pair of `trace` in pages of `page_bytes`. Errors: the laps differ from those of
/// the engine's runs.
pub(super) fn explain(
    trace: &Loaded,
    page_bytes: u64,
    pairs: &[Pair<'_>],
) -> anyhow::Result<Vec<Case>> {
    let constants = Constants::of(PCM);
    let each = |law: [f64; 2]| law[0] + law[1] * page_bytes as f64;
    let pages = Pages::of(trace, page_bytes)?;
    let [stream] = pages.streams.as_slice() else {
        anyhow::bail!("{} has more than one client", trace.facts.name);
    };
    let own = pairs
        .iter()
        .filter(|pair| pair.clock.trace == trace.facts.name && pair.clock.page_bytes == page_bytes);
    let mut cases = Vec::new();
    for pair in own {
        let of = |run: &SimulatedRun, rule| {
            let laps = laps::replay(stream, run.memory_pages, rule);
            ensure!(
                (laps.reads(), laps.write_outs) == (run.pages_read, run.pages_written),
                "the second replay of {} at {} % reads {} and writes {} pages, the engine {} and {}",
                run.trace,
                run.memory_percent,
                laps.reads(),
                laps.write_outs,
                run.pages_read,
                run.pages_written
            );
            Ok(laps)
        };
        cases.push(Case {
            trace: trace.facts.name.clone(),
            memory_percent: pair.clock.memory_percent,
            clock: of(pair.clock, Rule::Clock)?,
            clock_w: of(pair.clock_w, Rule::ClockW)?,
            clock_ns: pair.clock.elapsed_seconds * 1e9,
            read_ns: each(constants.read),
            write_ns: each(constants.write),
        });
    }
    Ok(cases)
}

const PARTS: [&str; 4] = [
    "reads of pages never written",
    "reads of pages written at some time",
    "pages written out",
    "time",
];

pub(super) fn causes_figure(loaded: &[Loaded], cases: &[Case]) -> Figure {
    let panels = loaded.iter().map(|trace| {
        let own: Vec<&Case> = cases
            .iter()
            .filter(|case| case.trace == trace.facts.name)
            .collect();
        let line = |part: usize| own.iter().map(|case| case.parts()[part]).collect();
        Panel::new(
            trace.facts.name.clone(),
            own.iter().map(|case| format!("{}", case.memory_percent)),
            PARTS
                .iter()
                .enumerate()
                .map(|(at, name)| ((*name).to_owned(), line(at))),
        )
    });
    Figure::lines(
        "fig5-why",
        "What CLOCK-W costs (above 0) and saves (below), 512 B pages",
        [
            "memory, percent of the footprint",
            "percent of CLOCK's time",
        ],
        panels,
    )
}

/// Counts the worse cases by the part that weighs most: reads of pages never written, reads of
/// pages written at some time, pages written out.
pub(super) fn classes(cases: &[Case]) -> [usize; 3] {
    let mut counts = [0; 3];
    for case in cases {
        let parts = case.parts();
        if parts[3] > 1e-7 {
            let most = (0..3).max_by(|a, b| parts[*a].total_cmp(&parts[*b]));
            counts[most.unwrap_or(0)] += 1;
        }
    }
    counts
}

pub(super) fn causes(cases: &[Case]) -> Table {
    let mut order: Vec<&Case> = cases.iter().filter(|case| case.parts()[3] > 1e-7).collect();
    order.sort_by(|a, b| b.parts()[3].total_cmp(&a.parts()[3]));
    let rows = order.into_iter().map(|case| {
        let more = |of: fn(&Laps) -> u64| of(&case.clock_w) as i64 - of(&case.clock) as i64;
        let parts = case.parts();
        let wasted = |laps: &Laps| match laps.laps {
            0 => "-".to_owned(),
            given => format!("{:.0}", 100.0 * laps.laps_wasted as f64 / given as f64),
        };
        vec![
            case.trace.clone(),
            format!("{} %", case.memory_percent),
            format!("{:+} ({:+.1})", more(|laps| laps.read_clean), parts[0]),
            format!("{:+} ({:+.1})", more(|laps| laps.read_written), parts[1]),
            format!("{:+} ({:+.1})", more(|laps| laps.write_outs), parts[2]),
            format!("{:+.2}", parts[3]),
            format!(
                "{} ({})",
                case.clock_w.read_forgotten, case.clock_w.written_forgotten
            ),
            format!("{} / {}", case.clock.laps, case.clock_w.laps),
            format!("{} / {}", wasted(&case.clock), wasted(&case.clock_w)),
        ]
    });
    Table::new(
        "Where CLOCK-W is worse, and why: every such case with 512 B pages",
        "Pages more or fewer than under CLOCK. In brackets: their cost in percent of CLOCK's time, a page \
         read at the cost of a read and a page written out at that of a write; the three add up to the column \
         `time`. Forgotten: pages read back that had left although they were used since the hand last passed; \
         CLOCK would have kept them for a lap. In brackets: those of them that were written out when they \
         left. Laps: pages that the hand passed because of their bit, CLOCK / CLOCK-W. Wasted: the percentage \
         of these that left without being used again. A second replay in plain code (`laps.rs`) counted them; \
         its reads and writes equal the engine's in every case.",
        "trace | memory | reads, never written | reads, written at some time | written \
             out | time % | forgotten | laps | wasted %",
        rows,
    )
}

/// Other ways to read the paper's paragraph, over our four programs.
pub(super) fn readings(loaded: &[Loaded]) -> anyhow::Result<Table> {
    let constants = Constants::of(PCM);
    let each = |law: [f64; 2]| law[0] + law[1] * 512.0;
    let nanos = |laps: &Laps| {
        laps.reads() as f64 * each(constants.read) + laps.write_outs as f64 * each(constants.write)
    };
    let rules = [
        (
            "as built: a written page is passed once, its write remembered",
            Rule::ClockW,
        ),
        (
            "the page is written out when its bit is cleared, and not again unless it is written again",
            Rule::CleanedInPassing,
        ),
        (
            "the reference bit counts as well: a used page gets a lap, a written one a second",
            Rule::ReadsCount,
        ),
    ];
    let mut ratios = vec![Vec::new(); rules.len()];
    for trace in loaded {
        let pages = Pages::of(trace, 512)?;
        for percent in MEMORY_PERCENT {
            let frames = pages.frames(percent);
            let of = |rule| nanos(&laps::replay(&pages.streams[0], frames, rule));
            let clock = of(Rule::Clock);
            for (at, (_, rule)) in rules.iter().enumerate() {
                ratios[at].push(of(*rule) / clock);
            }
        }
    }
    let rows = rules.iter().zip(&ratios).map(|((name, _), own)| {
        let worse = own.iter().filter(|ratio| **ratio > 1.0 + 1e-9).count();
        vec![
            (*name).to_owned(),
            format!("{worse} of {}", own.len()),
            format!("{:.4}", own.iter().copied().fold(0.0, f64::max)),
            format!("{:.4}", mean(own)),
        ]
    });
    Ok(Table::new(
        "How it depends on how the paper is read",
        "512 B pages, our four programs, against CLOCK. The paper: the dirty bit is used \
               *instead of* the reference bit; the hand clears \
               it and backs it up, so that the page is still written out when it leaves.",
        "reading | cases worse | worst ratio | mean ratio",
        rows,
    ))
}
