//! `undercroft-lab cost`: what a run costs at its peak, what it does in a second, and one by the
//! other.
//!
//! Source: RapidSwap. §4.3: the cost is the peak use of each tier times its price, and that of the
//! DRAM; a fraction of a device costs that fraction. §4.4: cost effectiveness is performance by
//! cost, relative to all in DRAM.

mod reports;
mod simulated;

use std::fmt::{self, Write};

use serde::Serialize;

pub use reports::of_reports;
pub use simulated::simulated;

/// Version of the JSON.
const SCHEMA_VERSION: u32 = 1;

/// Costs beside performances.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostTable {
    /// Version of this object.
    pub schema_version: u32,
    /// True if no run was a real one.
    pub simulated: bool,
    /// Things that `performance` counts, in a second.
    pub performance_unit: String,
    /// How it was made, and what to mind.
    pub notes: Vec<String>,
    /// The runs. The first of each work is what the others of it are compared with.
    pub rows: Vec<CostRow>,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostRow {
    /// The work that is done. Rows of the same work are compared.
    pub work: String,
    /// How it is done: the setting, or the report.
    pub name: String,
    /// True if the speed of a tier was emulated.
    pub emulated: bool,
    /// DRAM.
    pub dram_dollars: f64,
    /// Tiers, each at its peak.
    pub tiers_dollars: f64,
    /// Both.
    pub total_dollars: f64,
    /// How long it took.
    pub seconds: f64,
    /// Work in a second.
    pub performance: f64,
    /// Work in a second for each dollar; null if it costs nothing.
    pub performance_per_dollar: Option<f64>,
    /// The shortest life of a tier at this rate of writes; null without a limit or writes.
    pub years: Option<f64>,
    /// Against the first row of its work.
    pub relative: Option<Relative>,
}

/// A row as parts of the first: 1 = equal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Relative {
    /// Cost.
    pub cost: f64,
    /// Performance.
    pub performance: f64,
    /// Performance by cost.
    pub effectiveness: f64,
}

/// Facts from which a row is made.
struct Facts {
    work: String,
    name: String,
    emulated: bool,
    /// DRAM, tiers.
    dollars: [f64; 2],
    seconds: f64,
    units: f64,
    years: Option<f64>,
}

impl CostTable {
    fn new(simulated: bool, unit: &str, notes: Vec<String>, facts: Vec<Facts>) -> CostTable {
        let mut rows: Vec<CostRow> = Vec::with_capacity(facts.len());
        for of in facts {
            let mut row = CostRow::of(of);
            let first = rows.iter().find(|other| other.work == row.work);
            row.relative = row.against(first.unwrap_or(&row));
            rows.push(row);
        }
        CostTable {
            schema_version: SCHEMA_VERSION,
            simulated,
            performance_unit: unit.to_owned(),
            notes,
            rows,
        }
    }
}

impl CostRow {
    /// * `of.seconds`: above 0.
    fn of(of: Facts) -> CostRow {
        let [dram_dollars, tiers_dollars] = of.dollars;
        let total_dollars = dram_dollars + tiers_dollars;
        let performance = of.units / of.seconds;
        CostRow {
            work: of.work,
            name: of.name,
            emulated: of.emulated,
            dram_dollars,
            tiers_dollars,
            total_dollars,
            seconds: of.seconds,
            performance,
            performance_per_dollar: (total_dollars > 0.0).then(|| performance / total_dollars),
            years: of.years,
            relative: None,
        }
    }

    /// As parts of another row; `None` if one of them costs nothing.
    fn against(&self, first: &CostRow) -> Option<Relative> {
        let effectiveness = self.performance_per_dollar? / first.performance_per_dollar?;
        Some(Relative {
            cost: self.total_dollars / first.total_dollars,
            performance: self.performance / first.performance,
            effectiveness,
        })
    }

    fn cells(&self) -> [String; 8] {
        let percent = |of: fn(&Relative) -> f64| match &self.relative {
            Some(relative) => format!("{:.1}", of(relative) * 100.0),
            None => "-".to_owned(),
        };
        let emulated = if self.emulated { " (emulated)" } else { "" };
        [
            format!("{}{emulated}", self.name),
            format!("{:.4}", self.dram_dollars),
            format!("{:.4}", self.tiers_dollars),
            percent(|of| of.cost),
            rate(self.performance),
            percent(|of| of.performance),
            percent(|of| of.effectiveness),
            self.years
                .map_or("-".to_owned(), |years| format!("{years:.1}")),
        ]
    }
}

/// Four digits and more.
fn rate(rate: f64) -> String {
    match rate {
        1000.0.. => format!("{rate:.0}"),
        1.0.. => format!("{rate:.3}"),
        _ => format!("{rate:.6}"),
    }
}

const COLUMNS: [&str; 8] = [
    "",
    "DRAM $",
    "tiers $",
    "cost %",
    "perf/s",
    "perf %",
    "perf/cost %",
    "years",
];

/// A table for each work. Percentages are of its first row.
impl fmt::Display for CostTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells: Vec<_> = self.rows.iter().map(CostRow::cells).collect();
        let width = |at: usize| {
            let all = cells.iter().map(|row| row[at].chars().count());
            all.chain([COLUMNS[at].len()]).max().unwrap_or(0)
        };
        let widths: [usize; 8] = std::array::from_fn(width);
        let line = |cells: [&str; 8]| {
            let mut line = format!("  {:<width$}", cells[0], width = widths[0]);
            for (cell, width) in cells.iter().zip(widths).skip(1) {
                let _ = write!(line, "  {cell:>width$}");
            }
            line
        };
        let mut work = "";
        for (row, cells) in self.rows.iter().zip(&cells) {
            if row.work != work {
                work = &row.work;
                writeln!(f, "{work}\n{}", line(COLUMNS))?;
            }
            writeln!(f, "{}", line(std::array::from_fn(|at| &*cells[at])))?;
        }
        writeln!(f, "perf/s: {}", self.performance_unit)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: &str, dollars: [f64; 2], seconds: f64) -> Facts {
        Facts {
            work: "w".to_owned(),
            name: name.to_owned(),
            emulated: false,
            dollars,
            seconds,
            units: 100.0,
            years: None,
        }
    }

    #[test]
    fn effectiveness_is_performance_by_cost_against_the_first() {
        let all = facts("all", [10.0, 0.0], 10.0);
        let half = facts("half", [5.0, 1.0], 12.5);
        let table = CostTable::new(true, "u", Vec::new(), vec![all, half]);
        let of = table.rows[1].relative.expect("both cost something");
        assert_eq!(table.rows[1].performance, 8.0);
        assert!((of.cost - 0.6).abs() < 1e-12 && (of.performance - 0.8).abs() < 1e-12);
        assert!((of.effectiveness - 0.8 / 0.6).abs() < 1e-12);
        assert_eq!(table.rows[0].relative.map(|of| of.effectiveness), Some(1.0));
        assert!(table.to_string().contains("133.3"), "{table}");
        let free = CostTable::new(true, "u", Vec::new(), vec![facts("free", [0.0; 2], 1.0)]);
        assert_eq!(free.rows[0].relative, None);
    }
}
