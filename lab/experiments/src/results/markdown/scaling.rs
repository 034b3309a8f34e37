//! The part of `results.md` that shows how throughput grows with threads.

use super::super::scaling::Scaling;
use super::simulated::write_table;
use super::write_list;
use std::fmt::Write;

/// Everything after the head of the page, but memory and notes.
pub(super) fn write(text: &mut String, scaling: &Scaling) -> std::fmt::Result {
    for figure in &scaling.figures {
        writeln!(text, "![{}]({}.svg)\n", figure.title, figure.name)?;
    }
    for table in &scaling.tables {
        write_table(text, table)?;
    }
    write_list(text, "Model", &scaling.model)
}
