//! Common parts of the figures: the paper's rules, one simulation after the other, time by the
//! paper's formula.
//!
//! The paper's rules (§III-1): every page lies on the device before the program starts, so a first
//! touch reads it. PCM is on the memory bus, so a fault pays neither kernel path nor context
//! switch. A fault that needs a frame waits for the write-out. The repeated access after a fault
//! sets the page's bits, as a processor does.

use super::load::Loaded;
use crate::results::{SimulatedRun, TraceFacts};
use anyhow::Context;
use undercroft_base::Nanos;
use undercroft_sim::setup::{FaultTouch, Initial, Memory, Setup, SimTier, TierModel};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{PageStream, SimReport, simulate};

/// DRAM in percent of the footprint, as the paper's axis.
pub(super) const MEMORY_PERCENT: [f64; 11] = [
    5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0,
];

/// The columns of a table over that axis.
pub(super) fn memory_columns() -> String {
    MEMORY_PERCENT
        .map(|percent| format!("{percent} %"))
        .join(" | ")
}

/// Page sizes of the paper's axis.
pub(super) const PAGE_BYTES: [u64; 9] = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131_072];

/// `512`, `4K`: the names of places on an axis.
pub(super) fn size_name(bytes: u64) -> String {
    if bytes < 1024 {
        bytes.to_string()
    } else {
        format!("{}K", bytes >> 10)
    }
}

/// The paper's rules with CLOCK over PCM, 512-byte pages and a tenth of the footprint.
pub(super) fn base() -> Setup {
    Setup {
        page_bytes: 512,
        initial: Initial::Stored,
        fault_touch: FaultTouch::All,
        ..Setup::default()
    }
}

/// The rules of [`base`] in words, for the results.
pub(super) fn model() -> Vec<String> {
    vec![
        "Every page lies on the device before the first reference, so a first touch reads it; a \
         page that was written is \
         written back when it leaves memory, one that was not is dropped. Nothing is written back at the end."
            .to_owned(),
        format!(
            "PCM: a read takes {} ns, a write {} ns (bytes in the page); no kernel path, no context \
             switch. The paper leaves \
             these constants to its reference 24; ours are those of Lee et al., ISCA 2009, see \
             `device/src/profiles.rs`.",
            law(PCM, false),
            law(PCM, true)
        ),
        "DRAM is a share of the footprint in pages of the size at hand; 100 % holds every page.".to_owned(),
        "The access that faulted is repeated and sets the page's bits, as a processor does.".to_owned(),
    ]
}

/// PCM with the constants of the model.
pub(super) const PCM: &str = "pcm";
/// A disk whose write-outs are waited for, as the formula adds them up.
pub(super) const HDD: &str = "hdd-7200,write=wait";

/// A tier by its description.
pub(super) fn tier(text: &str) -> anyhow::Result<SimTier> {
    Ok(text.parse()?)
}

fn law(name: &str, write: bool) -> String {
    let constants = Constants::of(name);
    if write {
        format!("{} + {:.3} x bytes", constants.write[0], constants.write[1])
    } else {
        format!("{} + {:.3} x bytes", constants.read[0], constants.read[1])
    }
}

/// T_access in nanoseconds and T_transfer in nanoseconds a byte, of reads and of writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Constants {
    pub(super) read: [f64; 2],
    pub(super) write: [f64; 2],
}

impl Constants {
    /// The constants of a profile on the memory bus; zeros for any other device.
    pub(super) fn of(name: &str) -> Constants {
        let mut constants = Constants {
            read: [0.0; 2],
            write: [0.0; 2],
        };
        if let Ok(SimTier {
            kind: TierModel::Device { profile, .. },
            ..
        }) = name.parse()
        {
            constants.read = [profile.read.access_ns, profile.read.per_byte_ns];
            constants.write = [profile.write.access_ns, profile.write.per_byte_ns];
        }
        constants
    }

    /// T_access times `access`, T_transfer times `transfer`, and writes times `write` on top.
    pub(super) fn scaled(self, access: f64, transfer: f64, write: f64) -> Constants {
        Constants {
            read: [self.read[0] * access, self.read[1] * transfer],
            write: [
                self.write[0] * access * write,
                self.write[1] * transfer * write,
            ],
        }
    }

    /// T_total of the paper, in seconds: the time that `run` would have taken with these constants.
    pub(super) fn total_seconds(self, run: &SimulatedRun) -> f64 {
        let bytes = run.page_bytes as f64;
        let each = |law: [f64; 2]| law[0] + law[1] * bytes;
        (run.pages_read as f64 * each(self.read) + run.pages_written as f64 * each(self.write))
            / 1e9
    }
}

/// A trace in pages of one size.
pub(super) struct Pages<'a> {
    name: &'a str,
    page_bytes: u64,
    pub(super) streams: Vec<PageStream>,
    footprint: u64,
}

impl<'a> Pages<'a> {
    pub(super) fn of(loaded: &'a Loaded, page_bytes: u64) -> anyhow::Result<Pages<'a>> {
        let streams = streams_of(&loaded.trace, page_bytes)?;
        let footprint = streams.iter().map(PageStream::footprint).sum();
        Ok(Pages {
            name: &loaded.facts.name,
            page_bytes,
            streams,
            footprint,
        })
    }

    /// Pages of memory that are `percent` of the footprint.
    pub(super) fn frames(&self, percent: f64) -> u64 {
        (self.footprint as f64 * percent / 100.0).round().max(1.0) as u64
    }

    /// Runs one simulation. Returns its outcome, and its line in the results.
    pub(super) fn simulate(
        &self,
        percent: f64,
        base: &Setup,
    ) -> anyhow::Result<(SimReport, SimulatedRun)> {
        let pages = self.frames(percent);
        let setup = Setup {
            page_bytes: self.page_bytes,
            memory: Memory::Pages(pages),
            ..base.clone()
        };
        let outcome = simulate(&self.streams, &setup, &mut |_| ())?;
        let tier = &outcome.tiers[0];
        let run = SimulatedRun {
            trace: self.name.to_owned(),
            page_bytes: self.page_bytes,
            memory_percent: percent,
            memory_pages: pages,
            reclaim: setup.reclaim.clone(),
            prefetch: setup.prefetch.clone(),
            tier: setup.tiers[0].text.clone(),
            faults: outcome.swap_ins,
            pages_read: tier.pages_read,
            pages_written: tier.pages_written,
            elapsed_seconds: outcome.elapsed_seconds,
            energy_joules: None,
        };
        Ok((outcome, run))
    }
}

/// The program's own time between two references below the cache, if a reference before the cache
/// takes `nanos`.
pub(super) fn reference_time(facts: &TraceFacts, nanos: f64) -> Nanos {
    let each = facts.program_references as f64 / facts.references().max(1) as f64;
    Nanos((each * nanos).round() as u64)
}

/// The run of `runs` that `wanted` accepts.
pub(super) fn find(
    runs: &[SimulatedRun],
    wanted: impl Fn(&SimulatedRun) -> bool,
) -> anyhow::Result<&SimulatedRun> {
    runs.iter()
        .find(|run| wanted(run))
        .context("a simulation that was to run is missing")
}

/// The mean; NaN if there are no values.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::super::load::generated;
    use super::*;

    #[test]
    fn elapsed_time_is_the_papers_formula() {
        let loaded = generated("t", "zipf:page=512,pages=500,refs=20000,writes=0.4,seed=3")
            .expect("a trace");
        for page_bytes in [512, 4096] {
            let pages = Pages::of(&loaded, page_bytes).expect("pages");
            for prefetch in ["none", "window:4"] {
                let setup = Setup {
                    prefetch: prefetch.to_owned(),
                    ..base()
                };
                let (_, run) = pages.simulate(20.0, &setup).expect("a run");
                let formula = Constants::of(PCM).total_seconds(&run);
                assert!(run.pages_written > 0 && run.pages_read >= run.faults);
                assert!((formula / run.elapsed_seconds - 1.0).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn full_memory_reads_each_page_once_and_writes_none() {
        let loaded =
            generated("t", "uniform:page=512,pages=300,refs=20000,writes=0.5").expect("a trace");
        let pages = Pages::of(&loaded, 512).expect("pages");
        let (_, run) = pages.simulate(100.0, &base()).expect("a run");
        assert_eq!((run.pages_read, run.pages_written), (300, 0));
        assert_eq!(loaded.facts.footprint_512_bytes, 300 * 512);
    }
}
