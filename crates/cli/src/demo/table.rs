//! The demo's result: a small table for people, or JSON.

use hdrhistogram::Histogram;
use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_proto::report::{Quantiles, Report, SCHEMA_VERSION};

use super::scenes::Scenes;
use super::sort::Sorted;
use super::workload::{CONNECTIONS, Measured, Plan, VALUE_BYTES};
use crate::show;
use undercroft_terminal::Failure;

/// A setting and its rounds.
pub(super) struct Rounds {
    /// As printed.
    name: &'static str,
    /// Of each round, until it turned out that it cannot run here.
    runs: Vec<Round>,
}

/// A round of a setting.
pub(super) enum Round {
    /// The round ran.
    Measured {
        /// Speed and verification.
        measured: Box<Measured>,
        /// DRAM at its peak.
        dram: Bytes,
        /// Undercroft's own report.
        report: Option<Box<Report>>,
    },
    /// The round did not run, for this reason.
    Absent(String),
}

impl Round {
    /// DRAM at its peak; 0 if it did not run.
    pub(super) fn dram(&self) -> Bytes {
        match self {
            Round::Measured { dram, .. } => *dram,
            Round::Absent(_) => Bytes(0),
        }
    }

    fn measured(&self) -> Option<&Measured> {
        match self {
            Round::Measured { measured, .. } => Some(measured),
            Round::Absent(_) => None,
        }
    }

    fn report(&self) -> Option<&Report> {
        match self {
            Round::Measured { report, .. } => report.as_deref(),
            Round::Absent(_) => None,
        }
    }
}

#[derive(Serialize)]
struct Document<'a> {
    schema_version: u32,
    store: &'a str,
    values: u64,
    value_bytes: usize,
    requests: u64,
    connections: usize,
    memory_max_bytes: u64,
    rows: Vec<DocumentRow<'a>>,
    sort: Option<&'a Sorted>,
    scenes: Option<&'a Scenes>,
}

#[derive(Serialize)]
struct DocumentRow<'a> {
    name: &'a str,
    absent_because: Option<&'a str>,
    rounds: usize,
    ops_per_second: Option<f64>,
    ops_per_second_range: Option<[f64; 2]>,
    latency_seconds: Option<Quantiles>,
    load_seconds: Option<f64>,
    verify_seconds: Option<f64>,
    dram_bytes_peak: Option<u64>,
    values_verified: Option<u64>,
    values_wrong: Option<u64>,
    report: Option<&'a Report>,
}

impl Rounds {
    /// A setting that has not run.
    pub(super) fn new(name: &'static str) -> Rounds {
        Rounds {
            name,
            runs: Vec::new(),
        }
    }

    /// Adds a round.
    pub(super) fn add(&mut self, run: Round) {
        self.runs.push(run);
    }

    /// True if it cannot run here.
    pub(super) fn is_absent(&self) -> bool {
        self.absent().is_some()
    }

    /// True if no value was wrong in any round.
    pub(super) fn is_right(&self) -> bool {
        self.rounds().all(|measured| measured.wrong == 0)
    }

    fn absent(&self) -> Option<&str> {
        self.runs.iter().find_map(|run| match run {
            Round::Absent(why) => Some(why.as_str()),
            Round::Measured { .. } => None,
        })
    }

    fn rounds(&self) -> impl Iterator<Item = &Measured> {
        self.runs.iter().filter_map(Round::measured)
    }

    /// A figure of each round, ascending.
    fn sorted(&self, of: impl Fn(&Measured) -> f64) -> Vec<f64> {
        let mut all: Vec<f64> = self.rounds().map(of).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    fn median(&self, of: impl Fn(&Measured) -> f64) -> Option<f64> {
        let all = self.sorted(of);
        all.get(all.len() / 2).copied()
    }

    fn range(&self, of: impl Fn(&Measured) -> f64) -> Option<[f64; 2]> {
        let all = self.sorted(of);
        Some([*all.first()?, *all.last()?])
    }

    /// The latencies of all rounds.
    fn latency(&self) -> Option<Histogram<u64>> {
        let mut rounds = self.rounds().map(|measured| measured.latency.clone());
        let first = rounds.next()?;
        Some(rounds.fold(first, |mut all, round| {
            all += round;
            all
        }))
    }

    fn document(&self) -> DocumentRow<'_> {
        DocumentRow {
            name: self.name,
            absent_because: self.absent(),
            rounds: self.rounds().count(),
            ops_per_second: self.median(|m| m.ops_per_second),
            ops_per_second_range: self.range(|m| m.ops_per_second),
            latency_seconds: self.latency().and_then(|all| Quantiles::of(&all)),
            load_seconds: self.median(|m| m.load_seconds),
            verify_seconds: self.median(|m| m.verify_seconds),
            dram_bytes_peak: self.runs.iter().map(|run| run.dram().0).max(),
            values_verified: self.rounds().map(|m| m.verified).min(),
            values_wrong: self.rounds().map(|m| m.wrong).max(),
            report: self.report(),
        }
    }

    fn report(&self) -> Option<&Report> {
        self.runs.iter().rev().find_map(Round::report)
    }

    fn text(&self) -> String {
        let (Some(ops), Some([least, most]), Some(latency)) = (
            self.median(|m| m.ops_per_second),
            self.range(|m| m.ops_per_second),
            self.latency(),
        ) else {
            let why = self.absent().unwrap_or_default();
            return format!("{:<32}  absent: {why}", self.name);
        };
        let at = |quantile| Nanos(latency.value_at_quantile(quantile)).to_string();
        let dram = Bytes(self.runs.iter().map(|run| run.dram().0).max().unwrap_or(0));
        let wrong: u64 = self.rounds().map(|measured| measured.wrong).sum();
        let verdict = match wrong {
            0 => {
                let all: u64 = self.rounds().map(|measured| measured.verified).sum();
                format!("all {all}")
            }
            wrong => format!("WRONG: {wrong}"),
        };
        let range = format!("{least:.0}-{most:.0}");
        format!(
            "{:<32} {ops:>9.0} {range:>14} {:>10} {:>10} {:>11}  {verdict}",
            self.name,
            at(0.5),
            at(0.99),
            dram.to_string(),
        )
    }
}

/// Who was faster, in a sentence. `None`: `ours` or all others did not run.
fn verdict(rows: &[Rounds], ours: usize) -> Option<String> {
    let speed = |row: &Rounds| row.median(|measured| measured.ops_per_second);
    let mine = speed(&rows[ours])?;
    let others = rows.iter().enumerate().filter(|(at, _)| *at != ours);
    let told = others.filter_map(|(_, row)| {
        let factor = speed(row)? / mine;
        Some(format!("{factor:.1} times as many with {}", row.name))
    });
    let told: Vec<String> = told.collect();
    let told = (!told.is_empty()).then(|| told.join("; "))?;
    Some(format!("Requests a second, beside undercroft's: {told}."))
}

/// Prints every row on standard output.
pub(super) fn print(
    rows: &[Rounds],
    sort: Option<&Sorted>,
    scenes: Option<&Scenes>,
    (plan, limit): (Plan, Bytes),
    json: bool,
) -> Result<(), Failure> {
    if json {
        return show::json(&Document {
            schema_version: SCHEMA_VERSION,
            store: "bundled",
            values: plan.keys,
            value_bytes: VALUE_BYTES,
            requests: plan.ops,
            connections: CONNECTIONS,
            memory_max_bytes: limit.0,
            rows: rows.iter().map(Rounds::document).collect(),
            sort,
            scenes,
        });
    }
    show::line(&format!(
        "\n{} values of {VALUE_BYTES} bytes, {} requests over {CONNECTIONS} connections, limit {limit}\n",
        plan.keys, plan.ops
    ))?;
    show::line(&format!(
        "{:<32} {:>9} {:>14} {:>10} {:>10} {:>11}  values verified",
        "", "ops/s", "range", "p50", "p99", "DRAM"
    ))?;
    for row in rows {
        show::line(&row.text())?;
    }
    for tier in rows
        .iter()
        .filter_map(Rounds::report)
        .flat_map(|report| &report.tiers)
    {
        let ratio = tier.figures.ratio_text();
        show::line(&format!(
            "  tier {}: logical {}, stored {}, ratio {ratio}",
            tier.figures.name,
            Bytes(tier.logical_bytes_peak),
            Bytes(tier.stored_bytes_peak)
        ))?;
    }
    show::line(
        "\nMedians and ranges of the rounds. DRAM = most at once, compressed pages included; zram keeps\n\
         those on top of its limit, so it has more memory than the others.",
    )?;
    if let Some(verdict) = verdict(rows, super::OURS) {
        show::line(&verdict)?;
    }
    sort.map_or(Ok(()), print_sort)
}

fn print_sort(sort: &Sorted) -> Result<(), Failure> {
    let whole = sort.unlimited_seconds.unwrap_or_default();
    show::line(&format!(
        "\nsort of random lines, seconds; {whole:.2} without a limit\n"
    ))?;
    let cells = |cells: [String; 3]| cells.map(|cell| format!("{cell:>9}")).concat();
    let limits = cells(sort.limits_percent.map(|share| format!("{share} %")));
    show::line(&format!("{:<36}{limits}", "of its memory"))?;
    for row in &sort.rows {
        let seconds = row.seconds.map(|cell| match cell {
            Some(seconds) => format!("{seconds:.2}"),
            None => "-".to_owned(),
        });
        show::line(&format!("{:<36}{}", row.name, cells(seconds)))?;
    }
    show::line("\n-: cannot run here in that memory, or is not done in time.")
}
