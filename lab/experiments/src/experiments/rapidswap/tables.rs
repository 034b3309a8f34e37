//! The tables and pictures of the RapidSwap experiments.

use super::study::{Found, Scheme};
use super::{PERCENTS, SCHEMES, TABLE_3, beside};
use crate::results::{Figure, Panel, Table};

/// A row for each workload and amount of memory, one column for each scheme.
pub(super) fn of_schemes(title: &str, runs: &[Found], cell: impl Fn(&Found) -> String) -> Table {
    let rows = runs.chunks(SCHEMES.len()).map(|case| {
        let name = format!("{}, {} %", case[0].workload, case[0].percent);
        [name].into_iter().chain(case.iter().map(&cell)).collect()
    });
    Table::new(title, "", &columns(&SCHEMES), rows)
}

fn columns(schemes: &[Scheme]) -> String {
    let names: Vec<_> = schemes.iter().map(|scheme| scheme.name()).collect();
    format!("workload, local memory | {}", names.join(" | "))
}

/// Lines over local memory, a panel for each workload that the paper shows: C, D, E.
pub(super) fn figure(
    name: &str,
    title: &str,
    unit: &str,
    runs: &[Found],
    value: impl Fn(&Found) -> f64,
) -> Figure {
    let panel = |workload: &str| {
        let here: Vec<_> = runs.iter().filter(|of| of.workload == workload).collect();
        let of = |scheme: Scheme| here.iter().filter(move |of| of.scheme == scheme);
        Panel::new(
            format!("workload {workload}"),
            of(Scheme::Rapid).map(|of| format!("{} %", of.percent)),
            (SCHEMES.iter()).map(|scheme| {
                let values = of(*scheme).map(|of| value(of)).collect();
                (scheme.name().to_owned(), values)
            }),
        )
    };
    let panels = ["C", "D", "E"].map(panel).into_iter();
    Figure::bars(
        name,
        title,
        ["local memory", unit],
        panels.filter(|panel| !panel.places.is_empty()),
    )
}

/// The paper's number of slabs.
pub(super) fn paper_slabs(workload: &str, percent: f64) -> Option<f64> {
    let (_, row) = TABLE_3.iter().find(|(name, _)| *name == workload)?;
    let at = PERCENTS.iter().position(|of| *of == percent)?;
    Some(row[at])
}

/// Most slabs on the fast device: the paper's, and ours in both cases.
pub(super) fn slabs(most: &[Found], all: &[Found]) -> Table {
    let rows = most.iter().zip(all).map(|(most, all)| {
        let slabs = |of: &Found| of.report.tiers[0].slabs_peak.to_string();
        let paper = paper_slabs(most.workload, most.percent);
        vec![
            format!("{}, {} %", most.workload, most.percent),
            paper.map_or("-".to_owned(), |slabs| format!("{slabs:.0}")),
            slabs(most),
            (most.peaks[0] / 256).to_string(),
            slabs(all),
            (all.peaks[0] / 256).to_string(),
        ]
    });
    Table::new(
        "Most slabs of 1 MiB on the fast device",
        "A slab counts if a page of it is there. Ours keeps pages, not slabs, so it takes up \
               fewer MiB, the column after it.",
        "workload, local memory | paper | ours | MiB | all records used | MiB",
        rows,
    )
}

/// Cost, performance and performance by cost, percent of all in DRAM.
pub(super) fn costs(title: &str, runs: &[Found]) -> Table {
    let mut rows = Vec::new();
    let kernel = beside(runs, Scheme::Kernel);
    for ((one, kernel), (_, compressed)) in kernel.zip(beside(runs, Scheme::Compressed)) {
        let cell = |of: &Found| {
            format!(
                "{:.1} / {:.1} / {:.1}",
                100.0 * of.cost(),
                100.0 * of.throughput,
                100.0 * of.effectiveness()
            )
        };
        rows.push(vec![
            format!("{}, {} %", one.workload, one.percent),
            cell(one),
            cell(kernel),
            cell(compressed),
        ]);
    }
    let text = "Cost / throughput / throughput by cost, percent of all in DRAM.";
    let columns = columns(&[Scheme::Rapid, Scheme::Kernel, Scheme::Compressed]);
    Table::new(title, text, &columns, rows)
}
