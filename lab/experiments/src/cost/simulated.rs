//! The in-built set: generated work in part of its memory, over the devices of RapidSwap §4.1.

use std::convert::Infallible;
use std::path::Path;

use anyhow::Context;
use undercroft_base::Nanos;
use undercroft_references::{Generator, Spec};
use undercroft_sim::setup::{Cost, Memory, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, PageStream, Setup, SimReport, simulate};

use super::{CostTable, Facts};
use crate::policy_file;

/// Pages of each work, and references to them.
const PAGES: u64 = 20_000;
const REFERENCES: u64 = 2_000_000;
/// References of a quick run.
const REFERENCES_SMALL: u64 = 50_000;

/// Between two pages: 100,000 queries a second if each needs one. The whole takes 20 s, twice as
/// long as a slab needs to get cold.
const REFERENCE: Nanos = Nanos(10_000);

/// Size of the first device, by what does not fit into memory: so much more. A tier keeps copies of
/// pages that are in memory again while a quarter of it is free.
const FIRST_ROOM: f64 = 1.3;

/// Local memory, percent of the footprint: RapidSwap, Fig. 2.
const MEMORY: [f64; 4] = [80.0, 70.0, 60.0, 50.0];

/// The paper's workloads by their description in its table 2, as far as pages can follow it.
const WORKS: [(&str, &str); 3] = [
    ("A, Zipf, half of it writes", "zipf:theta=0.99,writes=0.5"),
    ("C, Zipf, read only", "zipf:theta=0.99"),
    ("E, short ranges", "objects:size=16,theta=0.99,writes=0.05"),
];

/// How pages are kept below DRAM.
struct Setting {
    name: &'static str,
    tiers: &'static [&'static str],
    reclaim: &'static str,
    prefetch: &'static str,
    placement: &'static str,
    /// A policy file that decides, too.
    file: Option<&'static str>,
    room: SimRoom,
}

const SETTINGS: [Setting; 3] = [
    Setting {
        name: "kernel, fast device first",
        tiers: &["optane-dimm", "optane-ssd"],
        reclaim: "active_inactive",
        prefetch: "readahead:8",
        placement: "waterfall",
        file: None,
        room: SimRoom::AfterPlan,
    },
    Setting {
        name: "slabs by temperature",
        tiers: &["optane-dimm", "optane-ssd"],
        reclaim: "active_inactive",
        prefetch: "majority",
        placement: "waterfall",
        file: Some("temperature"),
        room: SimRoom::Ahead,
    },
    Setting {
        name: "compressed, then the SSD",
        tiers: &["ram", "optane-ssd"],
        reclaim: "active_inactive",
        prefetch: "majority",
        placement: "worth",
        file: None,
        room: SimRoom::Ahead,
    },
];

impl Setting {
    /// * `folder`: where its policy file is built.
    fn setup(&self, percent: f64, folder: &Path) -> anyhow::Result<Setup> {
        let file = self.file.map(|name| policy_file::build(folder, name, &[]));
        let file = file.transpose()?;
        let rule = self.reclaim;
        let reclaim = file.map_or_else(|| rule.to_owned(), |at| format!("{rule}+{}", at.display()));
        let outside = (PAGES * 4096) as f64 * (1.0 - percent / 100.0);
        let first_bytes = (outside * FIRST_ROOM) as u64 + (1 << 20);
        let first = self.tiers.iter().position(|tier| *tier != "ram");
        let sized = |(at, tier): (usize, &&str)| {
            if Some(at) == first {
                format!("{tier},size={first_bytes}").parse()
            } else {
                tier.parse()
            }
        };
        let tiers: Result<Vec<_>, _> = self.tiers.iter().enumerate().map(sized).collect();
        Ok(Setup {
            memory: Memory::Percent(percent),
            tiers: tiers?,
            reclaim,
            prefetch: self.prefetch.to_owned(),
            placement: self.placement.parse()?,
            room: self.room,
            reference_time: REFERENCE,
            software: Cost::On,
            ..Setup::default()
        })
    }
}

fn notes(references: u64) -> Vec<String> {
    vec![
        "Simulated: the engine and the policies of `run` in virtual time, over models of devices.".to_owned(),
        "Cost: RapidSwap 4.3, peak use of each tier times its price, and the DRAM that is allotted. Performance \
         by cost: 4.4. Prices are round ones of 2021 (`crates/device/src/profiles.rs`); only their ratios count."
            .to_owned(),
        format!(
            "Each work writes its {PAGES} pages first, then makes {references} references, one each 10 us. Every \
             fault of a stored page takes 4 us of software, whoever serves it."
        ),
        "Fast device: optane-dimm, with optane-ssd below. The first device has room for 1.3 times what is outside \
         of memory. Kernel: two lists, read-ahead of 8, all pages to the fast device while it has room."
            .to_owned(),
    ]
}

/// All in DRAM, then each setting in less and less of it, for each work.
///
/// * `small`: a twentieth of the references, to see that it works.
///
/// Cost: some seconds of one processor.
pub fn simulated(small: bool) -> anyhow::Result<CostTable> {
    let references = if small { REFERENCES_SMALL } else { REFERENCES };
    let folder = tempfile::tempdir().context("make a folder")?;
    let mut facts = Vec::new();
    for (work, pattern) in WORKS {
        let streams = streams_of(&trace(pattern, references)?, 4096)?;
        let all = run(&streams, &SETTINGS[0].setup(100.0, folder.path())?)?;
        facts.push(facts_of(work, "all in DRAM".to_owned(), &all));
        for percent in MEMORY {
            for setting in &SETTINGS {
                let report = run(&streams, &setting.setup(percent, folder.path())?)?;
                let name = format!("{percent:.0} %, {}", setting.name);
                facts.push(facts_of(work, name, &report));
            }
        }
    }
    Ok(CostTable::new(true, "references", notes(references), facts))
}

/// The pages are written in order, then the pattern begins.
fn trace(pattern: &str, references: u64) -> anyhow::Result<MemoryTrace> {
    let load: Spec = format!("loop:pages={PAGES},refs={PAGES},writes=1").parse()?;
    let work: Spec = format!("{pattern},pages={PAGES},refs={references},seed=1").parse()?;
    let work = Generator::new(work);
    let header = work.header();
    let all = Generator::new(load).chain(work).map(Ok::<_, Infallible>);
    let trace = MemoryTrace::collect(pattern, header.granule_bytes(), &header.clients, all);
    Ok(trace.unwrap_or_else(|never| match never {}))
}

fn run(streams: &[PageStream], setup: &Setup) -> anyhow::Result<SimReport> {
    Ok(simulate(streams, setup, &mut |_| ())?)
}

fn facts_of(work: &str, name: String, report: &SimReport) -> Facts {
    let years = report.tiers.iter().filter_map(|tier| tier.lifetime_years);
    Facts {
        work: work.to_owned(),
        name,
        emulated: false,
        dollars: [report.cost.dram_dollars, report.cost.device_dollars],
        seconds: report.elapsed_seconds,
        units: report.references as f64,
        years: years.reduce(f64::min),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_memory_costs_less_and_nothing_is_faster_than_all_in_dram() {
        if !policy_file::can_test() {
            return;
        }
        let table = simulated(true).expect("it runs");
        let each = 1 + MEMORY.len() * SETTINGS.len();
        assert_eq!(table.rows.len(), WORKS.len() * each);
        for rows in table.rows.chunks(each) {
            assert_eq!(rows[0].tiers_dollars, 0.0, "all in DRAM: {:?}", rows[0]);
            for row in &rows[1..] {
                let of = row.relative.expect("it costs something");
                assert!(of.cost < 1.0 && of.performance <= 1.0, "{row:?}");
                let again = row.performance
                    / row.total_dollars
                    / (rows[0].performance / rows[0].total_dollars);
                assert!((of.effectiveness - again).abs() < 1e-9, "{row:?}");
            }
        }
    }
}
