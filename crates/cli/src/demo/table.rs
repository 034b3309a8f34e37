//! The demo's result: a small table for people, or JSON.

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_manager::report::{Quantiles, Report, SCHEMA_VERSION};

use super::workload::{Measured, Plan, VALUE_BYTES};
use crate::failure::Failure;
use crate::show;

/// One setting and its result.
pub(super) struct Row {
    /// As printed.
    pub name: &'static str,
    /// Its result.
    pub outcome: RowResult,
}

/// The result of one setting.
pub(super) enum RowResult {
    /// It ran.
    Measured {
        /// Speed and verification.
        measured: Box<Measured>,
        /// DRAM at its peak.
        dram: Bytes,
        /// Undercroft's own report.
        report: Option<Box<Report>>,
    },
    /// It did not, for this reason.
    Absent(String),
}

#[derive(Serialize)]
struct Document<'a> {
    schema_version: u32,
    store: &'a str,
    values: u64,
    value_bytes: usize,
    requests: u64,
    memory_max_bytes: u64,
    rows: Vec<DocumentRow<'a>>,
}

#[derive(Serialize)]
struct DocumentRow<'a> {
    name: &'a str,
    absent_because: Option<&'a str>,
    ops_per_second: Option<f64>,
    latency_seconds: Option<Quantiles>,
    load_seconds: Option<f64>,
    verify_seconds: Option<f64>,
    dram_bytes_peak: Option<u64>,
    values_verified: Option<u64>,
    values_wrong: Option<u64>,
    report: Option<&'a Report>,
}

impl Row {
    /// DRAM at its peak; 0 if it did not run.
    pub(super) fn dram(&self) -> Bytes {
        match &self.outcome {
            RowResult::Measured { dram, .. } => *dram,
            RowResult::Absent(_) => Bytes(0),
        }
    }

    /// True if no value was wrong.
    pub(super) fn is_right(&self) -> bool {
        match &self.outcome {
            RowResult::Measured { measured, .. } => measured.wrong == 0,
            RowResult::Absent(_) => true,
        }
    }

    fn document(&self) -> DocumentRow<'_> {
        let (measured, dram, report, absent) = match &self.outcome {
            RowResult::Measured {
                measured,
                dram,
                report,
            } => (
                Some(measured.as_ref()),
                Some(dram.0),
                report.as_deref(),
                None,
            ),
            RowResult::Absent(why) => (None, None, None, Some(why.as_str())),
        };
        DocumentRow {
            name: self.name,
            absent_because: absent,
            ops_per_second: measured.map(|m| m.ops_per_second),
            latency_seconds: measured.and_then(|m| Quantiles::of(&m.latency)),
            load_seconds: measured.map(|m| m.load_seconds),
            verify_seconds: measured.map(|m| m.verify_seconds),
            dram_bytes_peak: dram,
            values_verified: measured.map(|m| m.verified),
            values_wrong: measured.map(|m| m.wrong),
            report,
        }
    }

    fn text(&self) -> String {
        let RowResult::Measured { measured, dram, .. } = &self.outcome else {
            let RowResult::Absent(why) = &self.outcome else {
                return String::new();
            };
            return format!("{:<32}  absent: {why}", self.name);
        };
        let at = |quantile| Nanos(measured.latency.value_at_quantile(quantile)).to_string();
        let verdict = match measured.wrong {
            0 => format!("all {}", measured.verified),
            wrong => format!("WRONG: {wrong}"),
        };
        format!(
            "{:<32} {:>9.0} {:>10} {:>10} {:>11}  {verdict}",
            self.name,
            measured.ops_per_second,
            at(0.5),
            at(0.99),
            dram.to_string(),
        )
    }
}

/// Prints every row on standard output.
pub(super) fn print(
    rows: &[Row],
    store: &str,
    plan: Plan,
    limit: Bytes,
    json: bool,
) -> Result<(), Failure> {
    if json {
        return show::json(&Document {
            schema_version: SCHEMA_VERSION,
            store,
            values: plan.keys,
            value_bytes: VALUE_BYTES,
            requests: plan.ops,
            memory_max_bytes: limit.0,
            rows: rows.iter().map(Row::document).collect(),
        });
    }
    show::line(&format!(
        "\n{store}, {} values of {VALUE_BYTES} bytes, {} requests, limit {limit}\n",
        plan.keys, plan.ops
    ))?;
    show::line(&format!(
        "{:<32} {:>9} {:>10} {:>10} {:>11}  {}",
        "", "ops/s", "p50", "p99", "DRAM", "values verified"
    ))?;
    for row in rows {
        show::line(&row.text())?;
    }
    let reports = rows.iter().filter_map(|row| match &row.outcome {
        RowResult::Measured {
            report: Some(report),
            ..
        } => Some(report),
        _ => None,
    });
    for report in reports {
        for tier in &report.tiers {
            let ratio = tier
                .ratio
                .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            show::line(&format!(
                "  tier {}: logical {}, stored {}, ratio {ratio}",
                tier.name,
                Bytes(tier.logical_bytes_peak),
                Bytes(tier.stored_bytes_peak)
            ))?;
        }
    }
    show::line(
        "\nDRAM = most at once, compressed pages included; zram keeps those on top of its limit.",
    )
}
