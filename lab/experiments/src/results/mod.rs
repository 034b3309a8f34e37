//! The findings of an experiment, as written to `results.json`: raw values for each round, and the
//! ratios computed from them.

mod machine;
mod markdown;
mod numbers;
mod scaling;
mod simulated;

use crate::rig::{Calibration, Facts, MemoryUse};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

pub use machine::Machine;
pub(crate) use numbers::number;
pub use scaling::{Modelled, Scaling, ScalingCounts, ScalingPhase};
pub use simulated::{Figure, Panel, Simulated, SimulatedRun, Table, TraceFacts, Verdict};

/// Version of the layout of `results.json`.
pub const SCHEMA_VERSION: u32 = 1;

/// The rig that stands for a bound: see [`Results::add_bound`].
pub(crate) const BOUND: &str = "bound";

/// The findings of one `lab run`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// `small` or `real`.
    pub size: String,
    /// The command line of the run.
    pub command: Vec<String>,
    /// UTC, RFC 3339.
    pub date: String,
    /// `git rev-parse HEAD` of the source, or the crate's version if there is no repository.
    pub commit: String,
    /// Kernel, processors, memory.
    pub machine: Machine,
    /// Parameters of the experiment: footprint, budget, operations and so on.
    pub parameters: BTreeMap<String, String>,
    /// Facts of each rig.
    pub rigs: BTreeMap<String, Facts>,
    /// Undercroft's own report of the last run of each kind (`RIG CASE`): counters, tiers, parts of
    /// a fault.
    #[serde(default)]
    pub reports: BTreeMap<String, serde_json::Value>,
    /// How limits were found for the rigs whose compressed memory is outside them.
    pub calibrations: BTreeMap<String, Calibration>,
    /// An entry for each round, rig and case.
    pub samples: Vec<Sample>,
    /// Comparisons. Each ratio can be recomputed from its values.
    pub rows: Vec<Comparison>,
    /// Notes: what was skipped or exceeded, and what limits the meaning of the numbers.
    pub notes: Vec<String>,
    /// Runs that failed or read wrong bytes. If there is one, `lab run` fails.
    #[serde(default)]
    pub failures: Vec<String>,
    /// Simulated findings; none were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated: Option<Simulated>,
    /// How throughput grows with threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// Pictures of what was measured over time, drawn as `NAME.svg`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Figure>,
}

/// Raw values of one case in one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// 0, 1, ...; within a round the rigs follow one another.
    pub round: usize,
    /// The rig's name.
    pub rig: String,
    /// E.g. `random read 1t`.
    pub case: String,
    /// Metric name with its unit, e.g. `p99_ns`.
    pub values: BTreeMap<String, f64>,
    /// DRAM of the run to which the case belongs.
    pub memory: MemoryUse,
}

/// Which direction is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Latencies, times, sizes.
    Lower,
    /// Throughputs.
    Higher,
}

/// The target of a ratio.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Must be reached.
    pub must: f64,
    /// The aim; `None` if the aim is not one number (e.g. the device's limit).
    pub aim: Option<f64>,
}

impl Target {
    pub(crate) fn new(must: f64, aim: Option<f64>) -> Target {
        Target { must, aim }
    }
}

/// A comparison: `ratio` = median of `subject_values` / median of `baseline_values`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Comparison {
    pub case: String,
    pub metric: String,
    pub subject: String,
    pub baseline: String,
    pub better: Better,
    pub subject_values: Vec<f64>,
    pub baseline_values: Vec<f64>,
    pub subject_median: f64,
    pub baseline_median: f64,
    pub ratio: f64,
    /// Smallest and largest ratio of the values of a single round.
    pub ratio_range: [f64; 2],
    pub target: Option<Target>,
    pub must_reached: Option<bool>,
    pub aim_reached: Option<bool>,
}

/// The middle value; for an even count the mean of the two middle ones; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

impl Comparison {
    /// Whether the stored medians, ratio and verdicts follow from the raw values.
    pub fn recomputes(&self) -> bool {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-300);
        let reached = |limit: f64| reaches(self.better, self.ratio, limit);
        close(self.subject_median, median(&self.subject_values))
            && close(self.baseline_median, median(&self.baseline_values))
            && close(self.ratio, self.subject_median / self.baseline_median)
            && self.must_reached == self.target.map(|target| reached(target.must))
            && self.aim_reached == self.target.and_then(|target| target.aim).map(reached)
    }
}

fn reaches(better: Better, ratio: f64, limit: f64) -> bool {
    match better {
        Better::Lower => ratio <= limit,
        Better::Higher => ratio >= limit,
    }
}

impl Results {
    /// An empty record of `experiment`, made now on this machine.
    pub fn new(experiment: &str, size: &str) -> Results {
        Results {
            schema_version: SCHEMA_VERSION,
            experiment: experiment.to_owned(),
            size: size.to_owned(),
            command: command_line(std::env::args()),
            date: machine::now_utc(),
            commit: machine::commit(),
            machine: Machine::here(),
            parameters: BTreeMap::new(),
            rigs: BTreeMap::new(),
            reports: BTreeMap::new(),
            calibrations: BTreeMap::new(),
            samples: Vec::new(),
            rows: Vec::new(),
            notes: Vec::new(),
            failures: Vec::new(),
            simulated: None,
            scaling: None,
            figures: Vec::new(),
        }
    }

    /// Keeps the facts of a run's rig, and undercroft's report under `label`.
    pub(crate) fn keep(
        &mut self,
        rig: &str,
        label: String,
        facts: Facts,
        report: Option<serde_json::Value>,
    ) {
        self.rigs.entry(rig.to_owned()).or_insert(facts);
        self.reports.extend(report.map(|report| (label, report)));
    }

    /// Adds the bound of a metric as a rig of its own, so that its row is a ratio like every other.
    pub(crate) fn add_bound(&mut self, round: usize, case: &str, metric: &str, bound: f64) {
        let values = BTreeMap::from([(metric.to_owned(), bound)]);
        let memory = MemoryUse::default();
        self.samples.push(Sample {
            round,
            rig: BOUND.to_owned(),
            case: case.to_owned(),
            values,
            memory,
        });
    }

    /// All values of a metric, in round order.
    pub fn values(&self, rig: &str, case: &str, metric: &str) -> Vec<f64> {
        let matching = self
            .samples
            .iter()
            .filter(|sample| sample.rig == rig && sample.case == case);
        matching
            .filter_map(|sample| sample.values.get(metric).copied())
            .collect()
    }

    /// Adds the comparison of `subject` with `baseline`; nothing if one of them has no such values.
    pub fn compare(
        &mut self,
        case: &str,
        metric: &str,
        (subject, baseline): (&str, &str),
        better: Better,
        target: Option<Target>,
    ) {
        let subject_values = self.values(subject, case, metric);
        let baseline_values = self.values(baseline, case, metric);
        if subject_values.is_empty() || baseline_values.is_empty() {
            return;
        }
        let (subject_median, baseline_median) = (median(&subject_values), median(&baseline_values));
        let ratio = subject_median / baseline_median;
        let each = subject_values
            .iter()
            .zip(&baseline_values)
            .map(|(subject, baseline)| subject / baseline);
        let range = each.fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], ratio| {
            [low.min(ratio), high.max(ratio)]
        });
        if !ratio.is_finite() || range.iter().any(|bound| !bound.is_finite()) {
            // JSON has no infinity.
            let what = format!("{case}, {metric}: {subject} / {baseline}");
            self.notes.push(format!(
                "{what} is not a number ({subject_median} / {baseline_median})"
            ));
            return;
        }
        self.rows.push(Comparison {
            case: case.to_owned(),
            metric: metric.to_owned(),
            subject: subject.to_owned(),
            baseline: baseline.to_owned(),
            better,
            subject_values,
            baseline_values,
            subject_median,
            baseline_median,
            ratio,
            ratio_range: range,
            target,
            must_reached: target.map(|target| reaches(better, ratio, target.must)),
            aim_reached: target
                .and_then(|target| target.aim)
                .map(|aim| reaches(better, ratio, aim)),
        });
    }

    /// Rig names in order of first appearance.
    pub fn rig_names(&self) -> Vec<String> {
        self.distinct(|sample| &sample.rig)
    }

    /// Case names in order of first appearance.
    pub fn cases(&self) -> Vec<String> {
        self.distinct(|sample| &sample.case)
    }

    fn distinct(&self, of: fn(&Sample) -> &String) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.samples.iter().map(of) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// Reads `results.json`. Errors: unreadable, or another schema.
    pub fn read(path: &Path) -> anyhow::Result<Results> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let results: Results = serde_json::from_str(&text).with_context(|| {
            format!(
                "{} is not a results file of schema version {SCHEMA_VERSION}",
                path.display()
            )
        })?;
        anyhow::ensure!(
            results.schema_version == SCHEMA_VERSION,
            "{} has schema version {}, this program reads {SCHEMA_VERSION}",
            path.display(),
            results.schema_version
        );
        Ok(results)
    }

    /// Writes `results.json` and `results.md` into `out`, which is created if missing.
    pub fn write(&self, out: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
        let json = serde_json::to_string_pretty(self).context("results as JSON")? + "\n";
        std::fs::write(out.join("results.json"), json).context("write results.json")?;
        std::fs::write(out.join("results.md"), markdown::page(self)).context("write results.md")
    }
}

/// A command as it can be typed elsewhere: the program by its name, not by its path.
fn command_line(mut args: impl Iterator<Item = String>) -> Vec<String> {
    let program = args.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(name).chain(args).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rig: &str, value: f64) -> Sample {
        Sample {
            round: 0,
            rig: rig.into(),
            case: "c".into(),
            values: BTreeMap::from([("p99_ns".to_owned(), value)]),
            memory: MemoryUse::default(),
        }
    }

    #[test]
    fn a_command_names_no_place_of_this_machine() {
        let args = ["/somewhere/undercroft", "lab", "run", "--out", "x/y"].map(str::to_owned);
        let line = command_line(args.into_iter());
        assert_eq!(line, ["undercroft", "lab", "run", "--out", "x/y"]);
    }

    #[test]
    fn median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn compare_judges_by_direction_and_recomputes() {
        let mut results = Results::new("t", "small");
        results.samples = vec![
            sample("a", 10.0),
            sample("b", 100.0),
            sample("a", 20.0),
            sample("b", 100.0),
        ];
        let target = Some(Target {
            must: 0.15,
            aim: Some(0.05),
        });
        results.compare("c", "p99_ns", ("a", "b"), Better::Lower, target);
        results.compare("c", "p99_ns", ("a", "b"), Better::Higher, target);
        results.compare("c", "p99_ns", ("a", "absent"), Better::Lower, target);
        assert_eq!(results.rows.len(), 2);
        assert_eq!(
            (results.rows[0].must_reached, results.rows[0].aim_reached),
            (Some(true), Some(false))
        );
        assert_eq!(results.rows[1].must_reached, Some(true));
        assert!(results.rows.iter().all(Comparison::recomputes));
        results.rows[0].ratio = 0.1;
        assert!(!results.rows[0].recomputes());
    }
}
