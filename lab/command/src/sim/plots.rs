//! Plots of a sweep: misses, time and energy over memory or page size, a curve for each other
//! combination.

use std::collections::BTreeMap;
use std::path::Path;

use undercroft_experiments::{Curve, Curves, draw_curves};
use undercroft_sim::Results;
use undercroft_sim::outcome::{Setting, SimReport};

/// More curves than this in one picture look alike.
const CURVES_MAX: usize = 14;

struct Metric {
    file: &'static str,
    label: &'static str,
    of: fn(&SimReport) -> f64,
}

const METRICS: [Metric; 3] = [
    Metric {
        file: "misses",
        label: "misses, % of references",
        of: |outcome| outcome.miss_ratio * 100.0,
    },
    Metric {
        file: "elapsed",
        label: "elapsed, seconds of virtual time",
        of: |outcome| outcome.elapsed_seconds,
    },
    Metric {
        file: "energy",
        label: "energy, joules (DRAM, transfers, share of idle power)",
        of: |outcome| outcome.energy.total_joules,
    },
];

/// The horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Memory,
    PageSize,
}

impl Axis {
    /// The option with more than one value, memory first. `None`: a plot would be a dot.
    fn of(results: &Results) -> Option<Axis> {
        let several = |of: fn(&Setting) -> String| {
            let mut values: Vec<_> = results.outcomes.iter().map(|o| of(&o.setting)).collect();
            values.sort();
            values.dedup();
            values.len() > 1
        };
        match (
            several(|s| s.memory.clone()),
            several(|s| s.page_bytes.to_string()),
        ) {
            (true, _) => Some(Axis::Memory),
            (false, true) => Some(Axis::PageSize),
            (false, false) => None,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Axis::Memory => "memory, % of the footprint",
            Axis::PageSize => "page size, KiB",
        }
    }

    fn place(self, outcome: &SimReport) -> f64 {
        match self {
            Axis::Memory => outcome.memory_pages as f64 * 100.0 / outcome.footprint_pages as f64,
            Axis::PageSize => outcome.setting.page_bytes as f64 / 1024.0,
        }
    }
}

/// Writes `misses`, `elapsed` and `energy` as SVG into `out`. Returns the files written: none if
/// nothing varies that can go across. Errors: a file cannot be written.
pub(super) fn draw(results: &Results, out: &Path) -> Result<Vec<String>, String> {
    let Some(axis) = Axis::of(results) else {
        return Ok(Vec::new());
    };
    let mut written = Vec::new();
    for metric in &METRICS {
        let (curves, left_out) = curves(results, axis, metric);
        let mut subtitle = format!("{}, {} references", results.trace, results.references);
        if left_out > 0 {
            subtitle += &format!("; {left_out} more curves are in results.csv");
        }
        let picture = Curves {
            title: format!("simulated: {}", metric.label),
            subtitle,
            x_label: axis.label().to_owned(),
            y_label: metric.label.to_owned(),
            curves,
        };
        let name = format!("{}.svg", metric.file);
        draw_curves(&picture, &out.join(&name)).map_err(|error| format!("{name}: {error:#}"))?;
        written.push(name);
    }
    Ok(written)
}

/// A curve for each setting that differs in more than the axis: the first [`CURVES_MAX`]. Also
/// returns how many are left out.
fn curves(results: &Results, axis: Axis, metric: &Metric) -> (Vec<Curve>, usize) {
    let mut by_name: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for outcome in &results.outcomes {
        let s = &outcome.setting;
        let tiers = s.tiers.join(" > ");
        let fixed = match axis {
            Axis::Memory => format!("{} B", s.page_bytes),
            Axis::PageSize => s.memory.clone(),
        };
        let name = format!("{} {} {tiers} {fixed}", s.reclaim, s.prefetch);
        let point = (axis.place(outcome), (metric.of)(outcome));
        by_name.entry(name).or_default().push(point);
    }
    let left_out = by_name.len().saturating_sub(CURVES_MAX);
    let curves = by_name
        .into_iter()
        .take(CURVES_MAX)
        .map(|(name, mut points)| {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Curve { name, points }
        });
    (curves.collect(), left_out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_sim::{MemoryTrace, Setup, Sweep};

    #[test]
    fn plots_are_marked_simulated_and_drawn_only_where_something_varies() {
        let packed: Vec<u64> = (0..3000u64).map(|at| (at * at % 97 * 4096) << 1).collect();
        let trace = MemoryTrace {
            name: "squares".to_owned(),
            granule_bytes: 1,
            clients: vec![("a".to_owned(), packed)],
            ..MemoryTrace::default()
        };
        let mut sweep = Sweep::single(Setup::default());
        let directory = tempfile::tempdir().expect("a directory");
        let results = sweep.run(&trace, &mut |_| ()).expect("it runs");
        assert_eq!(draw(&results, directory.path()), Ok(vec![]));
        sweep.memory = ["10%", "50%"]
            .map(|text| text.parse().expect("valid"))
            .to_vec();
        sweep.reclaim = ["clock", "belady"].map(str::to_owned).to_vec();
        let results = sweep.run(&trace, &mut |_| ()).expect("it runs");
        let written = draw(&results, directory.path()).expect("drawn");
        assert_eq!(written.len(), 3);
        let svg = std::fs::read_to_string(directory.path().join("misses.svg")).expect("written");
        assert!(svg.contains("simulated") && svg.contains("belady"));
    }
}
