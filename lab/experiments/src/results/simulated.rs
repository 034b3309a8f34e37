//! The findings of a simulated experiment: every run, the judged claims, and the tables and
//! pictures made from them.

use super::Better;
use serde::{Deserialize, Serialize};
use undercroft_sim::SimReport;
use undercroft_sim::outcome::TierOutcome;

/// All findings of one simulated experiment. None of them was measured on a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Simulated {
    /// The traces that were simulated.
    pub traces: Vec<TraceFacts>,
    /// Assumptions of the model, one sentence each.
    pub model: Vec<String>,
    /// The judged claims.
    pub verdicts: Vec<Verdict>,
    /// The tables.
    pub tables: Vec<Table>,
    /// Pictures, drawn as `NAME.svg`.
    pub figures: Vec<Figure>,
    /// Every simulation.
    pub runs: Vec<SimulatedRun>,
}

impl Simulated {
    /// No findings yet, under these assumptions.
    pub fn of(model: Vec<String>) -> Simulated {
        Simulated {
            model,
            ..Simulated::default()
        }
    }
}

/// Facts of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceFacts {
    /// Its name; `freecell-like` and so on.
    pub name: String,
    /// XXH3-64 of the file, or the description from which it was generated.
    pub identity: String,
    /// The program, or the generator.
    pub command: String,
    /// Recorder and cache.
    pub source: String,
    /// Instruction lines read from memory.
    pub instruction_reads: u64,
    /// Data lines read from memory.
    pub data_reads: u64,
    /// Data lines written back.
    pub data_writes: u64,
    /// Memory touched, in pages of 4 KiB.
    pub footprint_4k_bytes: u64,
    /// Memory touched, in pages of 512 bytes.
    pub footprint_512_bytes: u64,
    /// References of the program before the cache.
    pub program_references: u64,
}

impl TraceFacts {
    /// The facts of generated references. `spec`: what they were generated from.
    pub fn generated(name: &str, spec: &str, report: &SimReport) -> TraceFacts {
        TraceFacts {
            name: name.to_owned(),
            identity: spec.to_owned(),
            command: spec.to_owned(),
            source: "generated".to_owned(),
            data_reads: report.references - report.writes,
            data_writes: report.writes,
            footprint_4k_bytes: report.footprint_pages * 4096,
            program_references: report.references,
            ..TraceFacts::default()
        }
    }

    /// References below the cache.
    pub fn references(&self) -> u64 {
        self.instruction_reads + self.data_reads + self.data_writes
    }

    /// As the PCM paper writes the mix: `1 : 5.13` or `7.16 : 1`.
    pub fn mix(&self) -> String {
        let reads = (self.instruction_reads + self.data_reads) as f64;
        let writes = self.data_writes as f64;
        if reads >= writes {
            format!("{:.2} : 1", reads / writes)
        } else {
            format!("1 : {:.2}", writes / reads)
        }
    }
}

/// A simulation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SimulatedRun {
    /// The trace's name.
    pub trace: String,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// DRAM, percent of the footprint in pages of this size.
    pub memory_percent: f64,
    /// DRAM in pages.
    pub memory_pages: u64,
    /// Reclaim policy.
    pub reclaim: String,
    /// Prefetch policy.
    pub prefetch: String,
    /// The device.
    pub tier: String,
    /// Faults that read from the device.
    pub faults: u64,
    /// Pages read from the device.
    pub pages_read: u64,
    /// Pages written to the device.
    pub pages_written: u64,
    /// Virtual time.
    pub elapsed_seconds: f64,
    /// Energy in all, if the experiment is about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_joules: Option<f64>,
}

impl SimulatedRun {
    /// The run that `report` is of. Counts are those of all tiers.
    /// * `memory_percent`: DRAM, of the footprint.
    pub fn of(trace: String, memory_percent: f64, report: &SimReport) -> SimulatedRun {
        let sum = |of: fn(&TierOutcome) -> u64| report.tiers.iter().map(of).sum();
        SimulatedRun {
            trace,
            page_bytes: report.setting.page_bytes,
            memory_percent,
            memory_pages: report.memory_pages,
            reclaim: without_folder(&report.setting.reclaim),
            prefetch: report.setting.prefetch.clone(),
            tier: report.setting.tiers.join(" > "),
            faults: report.swap_ins,
            pages_read: sum(|tier| tier.pages_read),
            pages_written: sum(|tier| tier.pages_written),
            elapsed_seconds: report.elapsed_seconds,
            energy_joules: None,
        }
    }
}

/// The name of a reclaim policy, and of a file no more than its own: `RULE+FILE.wasm`.
fn without_folder(reclaim: &str) -> String {
    let Some((before, file)) = reclaim.rsplit_once('/') else {
        return reclaim.to_owned();
    };
    match before.split_once('+') {
        Some((rule, _)) => format!("{rule}+{file}"),
        None => file.to_owned(),
    }
}

/// A claim: the paper's figure, the bound, our figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The quantity that was measured.
    pub measure: String,
    /// The paper's value, if its text gives one.
    pub paper: Option<f64>,
    /// Our value.
    pub ours: f64,
    /// Unit of all values.
    pub unit: String,
    /// Which direction is good.
    pub better: Better,
    /// The bound that must be reached; absent if there is none.
    pub must: Option<f64>,
    /// The aim.
    pub aim: Option<f64>,
    /// Whether the bound was reached.
    pub must_reached: Option<bool>,
    /// Whether the aim was reached.
    pub aim_reached: Option<bool>,
    /// Why our value differs from the paper's.
    pub difference: String,
}

impl Verdict {
    /// A figure of ours of which less is better.
    pub fn lower(measure: impl Into<String>, unit: &str, ours: f64) -> Verdict {
        Verdict::new(measure.into(), unit, Better::Lower, ours)
    }

    /// A figure of ours of which more is better.
    pub fn higher(measure: impl Into<String>, unit: &str, ours: f64) -> Verdict {
        Verdict::new(measure.into(), unit, Better::Higher, ours)
    }

    fn new(measure: String, unit: &str, better: Better, ours: f64) -> Verdict {
        Verdict {
            measure,
            paper: None,
            ours,
            unit: unit.to_owned(),
            better,
            must: None,
            aim: None,
            must_reached: None,
            aim_reached: None,
            difference: String::new(),
        }
    }

    /// The paper's value.
    pub fn paper(mut self, value: f64) -> Verdict {
        self.paper = Some(value);
        self
    }

    /// Sets the bound and the aim, and judges.
    pub fn target(mut self, must: f64, aim: Option<f64>) -> Verdict {
        self.must = Some(must);
        self.aim = aim;
        self.must_reached = Some(self.reaches(must));
        self.aim_reached = aim.map(|aim| self.reaches(aim));
        self
    }

    /// Why our value differs from the paper's.
    pub fn difference(mut self, why: impl Into<String>) -> Verdict {
        self.difference = why.into();
        self
    }

    fn reaches(&self, limit: f64) -> bool {
        super::reaches(self.better, self.ours, limit)
    }

    /// Whether the verdicts follow from the values.
    pub fn recomputes(&self) -> bool {
        self.must_reached == self.must.map(|must| self.reaches(must))
            && self.aim_reached == self.aim.map(|aim| self.reaches(aim))
    }
}

/// A table with a heading and an explanation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Heading.
    pub title: String,
    /// The text below the heading.
    pub text: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// * `columns`: their names, with bars between them.
    pub fn new(
        title: impl Into<String>,
        text: impl Into<String>,
        columns: &str,
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Table {
        Table {
            title: title.into(),
            text: text.into(),
            columns: columns.split(" | ").map(str::to_owned).collect(),
            rows: rows.into_iter().collect(),
        }
    }
}

/// A picture: panels side by side, a common horizontal axis of named places.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// File name without ending.
    pub name: String,
    /// First line.
    pub title: String,
    /// Meaning of the horizontal axis.
    pub x_label: String,
    /// Meaning of the vertical axes.
    pub y_label: String,
    /// Bars instead of lines.
    pub bars: bool,
    /// Logarithmic vertical axes.
    pub log: bool,
    /// The panels.
    pub panels: Vec<Panel>,
}

impl Figure {
    /// Bars. `labels`: of the horizontal axis, and of the vertical ones.
    pub fn bars(
        name: impl Into<String>,
        title: impl Into<String>,
        labels: [&str; 2],
        panels: impl IntoIterator<Item = Panel>,
    ) -> Figure {
        Figure {
            bars: true,
            ..Figure::lines(name, title, labels, panels)
        }
    }

    /// Lines. `labels`: of the horizontal axis, and of the vertical ones.
    pub fn lines(
        name: impl Into<String>,
        title: impl Into<String>,
        labels: [&str; 2],
        panels: impl IntoIterator<Item = Panel>,
    ) -> Figure {
        let [x_label, y_label] = labels.map(str::to_owned);
        Figure {
            name: name.into(),
            title: title.into(),
            x_label,
            y_label,
            bars: false,
            log: false,
            panels: panels.into_iter().collect(),
        }
    }

    /// With logarithmic vertical axes.
    pub fn log(self) -> Figure {
        Figure { log: true, ..self }
    }
}

/// A panel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Panel {
    /// Above it.
    pub title: String,
    /// Names of the places on the horizontal axis.
    pub places: Vec<String>,
    /// Name and values of each line: a value for each place.
    pub series: Vec<(String, Vec<f64>)>,
}

impl Panel {
    /// * `places`: their names.
    /// * `series`: name of each line, and its values.
    pub fn new<Place: Into<String>, Name: Into<String>>(
        title: impl Into<String>,
        places: impl IntoIterator<Item = Place>,
        series: impl IntoIterator<Item = (Name, Vec<f64>)>,
    ) -> Panel {
        let series = series.into_iter();
        Panel {
            title: title.into(),
            places: places.into_iter().map(Into::into).collect(),
            series: series.map(|(name, values)| (name.into(), values)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_is_judged_by_its_direction() {
        let gain = |ours| Verdict::higher("gain", "%", ours).target(40.0, Some(55.0));
        assert_eq!(gain(39.0).must_reached, Some(false));
        assert_eq!(
            (gain(41.0).must_reached, gain(41.0).aim_reached),
            (Some(true), Some(false))
        );
        assert_eq!(gain(60.0).aim_reached, Some(true));
        let mut changed = gain(60.0);
        assert!(changed.recomputes());
        changed.ours = 1.0;
        assert!(!changed.recomputes());
        let worst = Verdict::lower("worst", "", 1.01).target(1.0, None);
        assert_eq!(worst.must_reached, Some(false));
    }

    #[test]
    fn mix_is_written_as_the_paper_does() {
        let facts = |reads, writes| TraceFacts {
            data_reads: reads,
            data_writes: writes,
            ..TraceFacts::default()
        };
        assert_eq!(facts(716, 100).mix(), "7.16 : 1");
        assert_eq!(facts(100, 513).mix(), "1 : 5.13");
    }
}
