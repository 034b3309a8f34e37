//! Costs and run times of real runs, from the reports that `undercroft run --report` writes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::{CostTable, Facts};

/// A report is some tens of KiB.
const REPORT_BYTES_MAX: u64 = 16 << 20;
/// The version of reports that is understood.
const REPORT_VERSION: u32 = 1;

/// The fields of a report that are read.
#[derive(Debug, Deserialize)]
struct ReportedRun {
    schema_version: u32,
    command: Vec<String>,
    exit_status: i32,
    wall_seconds: f64,
    managed: bool,
    pages: Moved,
    tiers: Vec<Tier>,
    #[serde(default)]
    cost: Option<Cost>,
}

#[derive(Debug, Deserialize)]
struct Moved {
    swapped_out: u64,
}

#[derive(Debug, Deserialize)]
struct Tier {
    emulated: bool,
    logical_bytes_peak: u64,
    #[serde(default)]
    wear: Option<Wear>,
}

#[derive(Debug, Deserialize)]
struct Wear {
    tbw_years: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct Cost {
    dram_dollars_per_gib: f64,
    dram_dollars: f64,
    tiers_dollars: f64,
    all_in_dram_dollars: f64,
}

/// Compares runs of the same work; the performance of each is 1 / its run time.
///
/// * `paths`: reports; the first is what the others are compared with. At least one. If it was
///   below its limit all the time, it has no cost of its own: then it costs what all pages of the
///   others cost in DRAM.
///
/// Errors: a file is no report, the run failed or has no prices, or DRAM has several prices.
pub fn of_reports(paths: &[PathBuf]) -> anyhow::Result<CostTable> {
    let runs: Vec<(String, ReportedRun)> = paths
        .iter()
        .map(|path| Ok((path.display().to_string(), read(path)?)))
        .collect::<anyhow::Result<_>>()?;
    let (name, first) = runs.first().context("no report is given")?;
    let mut notes = vec!["Cost at peak: RapidSwap 4.3. Performance by cost: 4.4.".to_owned()];
    if first.pages.swapped_out > 0 {
        notes.push(format!(
            "Note: {name} is not all in DRAM; {} pages left memory.",
            first.pages.swapped_out
        ));
    }
    if runs.iter().any(|(_, run)| run.command != first.command) {
        notes.push(
            "Note: the commands differ. Run times compare only if the work is the same.".to_owned(),
        );
    }
    let priced: Vec<(&String, &Cost)> = runs
        .iter()
        .filter_map(|(name, run)| Some((name, run.cost.as_ref()?)))
        .collect();
    for (name, cost) in &priced {
        let (price, other) = (priced[0].1.dram_dollars_per_gib, cost.dram_dollars_per_gib);
        ensure!(
            other == price,
            "{name}: a GiB of DRAM costs {other}, and {price} in {}; give all runs the same \
             --memory-price",
            priced[0].0
        );
    }
    let pages = priced.iter().map(|(_, cost)| cost.all_in_dram_dollars);
    let all_in_dram = pages.reduce(f64::max);
    let work = first.command.join(" ");
    let mut facts = Vec::with_capacity(runs.len());
    for (at, (name, run)) in runs.iter().enumerate() {
        let dollars = match (&run.cost, all_in_dram) {
            (Some(cost), _) => [cost.dram_dollars, cost.tiers_dollars],
            (None, Some(dollars)) if at == 0 && run.pages.swapped_out == 0 => {
                notes.push(format!(
                    "{name} was below its limit, so its DRAM was not counted. It costs what all pages \
                     of the others cost in DRAM."
                ));
                [dollars, 0.0]
            }
            (None, _) => bail!(
                "{name}: the report has no cost; run with --memory-price, price= of each tier, and \
                 a limit that the program reaches"
            ),
        };
        facts.push(
            run.facts(&work, name, dollars)
                .with_context(|| name.clone())?,
        );
    }
    Ok(CostTable::new(false, "runs", notes, facts))
}

fn read(path: &Path) -> anyhow::Result<ReportedRun> {
    let mut text = String::new();
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    file.take(REPORT_BYTES_MAX)
        .read_to_string(&mut text)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let run: ReportedRun = serde_json::from_str(&text)
        .with_context(|| format!("{} is no report of `undercroft run`", path.display()))?;
    ensure!(
        run.schema_version == REPORT_VERSION,
        "{} has version {}; only {REPORT_VERSION} is known",
        path.display(),
        run.schema_version
    );
    Ok(run)
}

impl ReportedRun {
    fn facts(&self, work: &str, name: &str, dollars: [f64; 2]) -> anyhow::Result<Facts> {
        if self.exit_status != 0 {
            bail!("the run ended with status {}", self.exit_status);
        }
        ensure!(
            self.managed,
            "the program was not managed; the limit did not hold"
        );
        let numbers = [self.wall_seconds, dollars[0], dollars[1]];
        ensure!(
            numbers.iter().all(|of| of.is_finite() && *of >= 0.0) && self.wall_seconds > 0.0,
            "the report has impossible figures"
        );
        let years = self
            .tiers
            .iter()
            .filter_map(|of| of.wear.as_ref()?.tbw_years);
        Ok(Facts {
            work: work.to_owned(),
            name: name.to_owned(),
            emulated: (self.tiers.iter()).any(|of| of.emulated && of.logical_bytes_peak > 0),
            dollars,
            seconds: self.wall_seconds,
            units: 1.0,
            years: years.reduce(f64::min),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(seconds: f64, cost: &str) -> String {
        format!(
            r#"{{"schema_version":1,"command":["job"],"exit_status":0,"wall_seconds":{seconds},
            "managed":true,"pages":{{"swapped_out":0}},"cost":{cost},
            "tiers":[{{"emulated":true,"logical_bytes_peak":1,"wear":{{"tbw_years":3.5}}}}]}}"#
        )
    }

    fn cost(dram: f64, tiers: f64) -> String {
        format!(
            r#"{{"dram_dollars_per_gib":4.5,"dram_dollars":{dram},"tiers_dollars":{tiers},
            "all_in_dram_dollars":12}}"#
        )
    }

    fn table(reports: &[String]) -> anyhow::Result<CostTable> {
        let here = tempfile::tempdir().expect("a directory");
        let write = |(at, text): (usize, &String)| {
            let path = here.path().join(format!("{at}.json"));
            std::fs::write(&path, text).expect("write");
            path
        };
        let paths: Vec<PathBuf> = reports.iter().enumerate().map(write).collect();
        of_reports(&paths)
    }

    #[test]
    fn runs_are_compared_with_the_first_report() {
        let found = table(&[report(10.0, &cost(8.0, 0.0)), report(20.0, &cost(2.0, 1.0))]);
        let found = found.expect("two reports");
        let relative = found.rows[1].relative.expect("both cost something");
        assert_eq!((relative.cost, relative.performance), (0.375, 0.5));
        assert_eq!(
            (found.rows[1].years, found.rows[1].emulated),
            (Some(3.5), true)
        );
        assert!(!found.simulated);
        // The first was below its limit: it costs what the pages of the other cost in DRAM.
        let found = table(&[report(10.0, "null"), report(20.0, &cost(2.0, 1.0))]);
        let found = found.expect("two reports");
        assert_eq!(found.rows[0].total_dollars, 12.0);
        assert_eq!(found.rows[1].relative.map(|of| of.cost), Some(0.25));
    }

    #[test]
    fn reports_that_cannot_be_compared_are_refused_with_the_reason() {
        let good = report(10.0, &cost(8.0, 0.0));
        for (bad, why) in [
            (report(10.0, "null"), "--memory-price"),
            (report(0.0, &cost(1.0, 0.0)), "impossible"),
            (report(1.0, &cost(-1.0, 0.0)), "impossible"),
            (good.replace("4.5", "5.5"), "same --memory-price"),
            (good.replace("_status\":0", "_status\":1"), "status 1"),
            (good.replace("version\":1", "version\":2"), "version 2"),
            (good.replace("true,\"pages", "false,\"pages"), "not managed"),
            ("[]".to_owned(), "no report"),
        ] {
            let error = table(&[good.clone(), bad]).expect_err(why);
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
        assert!(of_reports(&[]).is_err());
        assert!(table(&[report(1.0, "null")]).is_err(), "nothing to go by");
    }
}
