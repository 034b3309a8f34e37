//! The part of `results.md` that shows simulated findings.

use super::super::numbers::number;
use super::super::simulated::{Simulated, Table, TraceFacts, Verdict};
use super::wrap::{item, paragraph};
use super::{bound, reached, write_list};
use std::fmt::Write;

/// Everything after the head of the page.
pub(super) fn write(text: &mut String, simulated: &Simulated) -> std::fmt::Result {
    writeln!(
        text,
        "Everything here is **simulated**: the live engine and policies in virtual time, over models of devices.\n"
    )?;
    if !simulated.verdicts.is_empty() {
        write_claims(text, &simulated.verdicts)?;
    }
    for figure in &simulated.figures {
        writeln!(text, "![{}]({}.svg)\n", figure.title, figure.name)?;
    }
    for table in &simulated.tables {
        write_table(text, table)?;
    }
    write_list(text, "Model", &simulated.model)?;
    if !simulated.traces.is_empty() {
        write_traces(text, &simulated.traces)?;
    }
    writeln!(
        text,
        "Simulations: {}, each in `results.json`.\n",
        simulated.runs.len()
    )
}

/// The claims, and why ours differ from the paper's.
fn write_claims(text: &mut String, verdicts: &[Verdict]) -> std::fmt::Result {
    let header = "| measure | paper | must | aim | ours | reached |\n|---|--:|--:|--:|--:|---|";
    writeln!(text, "## Claims\n\n{header}")?;
    for verdict in verdicts {
        let reached = reached(verdict.must_reached, verdict.aim_reached);
        writeln!(
            text,
            "| {} ({}) | {} | {} | {} | {} | {reached} |",
            verdict.measure,
            verdict.unit,
            bound(verdict.paper),
            bound(verdict.must),
            bound(verdict.aim),
            number(verdict.ours)
        )?;
    }
    writeln!(text)?;
    for verdict in verdicts {
        if !verdict.difference.is_empty() {
            let why = format!("{}: {}", verdict.measure, verdict.difference);
            writeln!(text, "{}", item(&why))?;
        }
    }
    writeln!(text)
}

/// Writes a table under its heading.
pub(super) fn write_table(text: &mut String, table: &Table) -> std::fmt::Result {
    writeln!(text, "## {}\n", table.title)?;
    if !table.text.is_empty() {
        writeln!(text, "{}\n", paragraph(&table.text))?;
    }
    writeln!(text, "| {} |", table.columns.join(" | "))?;
    let rest = table.columns.len().saturating_sub(1);
    writeln!(text, "|---|{}", "--:|".repeat(rest))?;
    for row in &table.rows {
        writeln!(text, "| {} |", row.join(" | "))?;
    }
    writeln!(text)
}

fn write_traces(text: &mut String, traces: &[TraceFacts]) -> std::fmt::Result {
    writeln!(
        text,
        "## Traces\n\n| name | identity | program | recorder |\n|---|---|---|---|"
    )?;
    for trace in traces {
        writeln!(
            text,
            "| {} | `{}` | `{}` | {} |",
            trace.name, trace.identity, trace.command, trace.source
        )?;
    }
    writeln!(text)
}
