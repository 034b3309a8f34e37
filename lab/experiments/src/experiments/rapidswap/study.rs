//! Runs the workloads of YCSB under RapidSwap's rule, under the kernel's and over compressed
//! memory, and takes from each run what the paper's figures show.

use super::ycsb::{Generated, Size, Workload, generate};
use crate::experiments::progress;
use crate::results::SimulatedRun;
use undercroft_base::Nanos;
use undercroft_sim::replay::Wait;
use undercroft_sim::setup::{Cost, Memory, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{KernelSwap, PageStream, Setup, SimReport, simulate};

/// Bytes of pages in a byte of compressed memory. *Assumed*; Google's far memory has 3 for most of
/// what it compresses (RapidSwap §2.2).
const RATIO: f64 = 3.0;

/// How pages are kept that have no room in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// RapidSwap's: slabs by temperature, pages leave ahead.
    Rapid,
    /// The kernel's: priorities, read-ahead, pages leave when a fault needs room.
    Kernel,
    /// The same, but pages leave ahead, and nothing is read ahead: the rule of places alone.
    KernelAhead,
    /// Compressed memory for all that leaves, beside the local memory.
    Compressed,
}

impl Scheme {
    pub(super) fn name(self) -> &'static str {
        match self {
            Scheme::Rapid => "by temperature",
            Scheme::Kernel => "kernel, fast first",
            Scheme::KernelAhead => "fast first, ahead",
            Scheme::Compressed => "compressed",
        }
    }

    /// * `first_bytes`: room on the fast device; `None`: more than is needed.
    fn setup(self, case: &Case, percent: f64, first_bytes: Option<u64>) -> anyhow::Result<Setup> {
        let local = (case.size.pages as f64 * percent / 100.0).round();
        let outside = case.size.pages as f64 - local;
        let (kernel, ahead) = match self {
            Scheme::Kernel => (Some(KernelSwap::Priority), false),
            Scheme::KernelAhead => (Some(KernelSwap::Priority), true),
            Scheme::Rapid | Scheme::Compressed => (None, true),
        };
        let size = first_bytes.map_or(String::new(), |bytes| format!(",size={bytes}"));
        let write = if ahead { ",write=behind" } else { "" };
        let (memory, tiers) = match self {
            Scheme::Compressed => {
                let memory = local + outside / RATIO;
                (memory, vec![format!("ram,ratio={RATIO},max=95%")])
            }
            _ => (
                local,
                vec![format!("optane-dimm{write}{size}"), "optane-ssd".to_owned()],
            ),
        };
        let reclaim = match self {
            Scheme::Rapid => format!("active_inactive+{}", case.file),
            _ => "active_inactive".to_owned(),
        };
        let tiers: Result<Vec<_>, _> = tiers.iter().map(|tier| tier.parse()).collect();
        Ok(Setup {
            memory: Memory::Pages(memory as u64),
            tiers: tiers?,
            reclaim,
            prefetch: if self == Scheme::Kernel {
                "readahead:8"
            } else {
                "none"
            }
            .to_owned(),
            placement: "waterfall".parse()?,
            kernel_swap: kernel,
            room: if ahead {
                SimRoom::Ahead
            } else {
                SimRoom::AfterPlan
            },
            reference_time: case.reference,
            software: Cost::On,
            waits: true,
            ..Setup::default()
        })
    }
}

/// Workloads of one size.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) size: Size,
    /// Time of a reference that finds its page.
    pub(super) reference: Nanos,
    /// Local memory, percent of the footprint.
    pub(super) percents: Vec<f64>,
    /// RapidSwap's policy file.
    pub(super) file: String,
}

/// Results of one run.
pub(super) struct Found {
    pub(super) workload: &'static str,
    pub(super) percent: f64,
    pub(super) scheme: Scheme,
    /// Queries in a time, as a part of what all in DRAM makes of them; the load is left out.
    pub(super) throughput: f64,
    /// 99 % of the queries take no longer.
    pub(super) p99: Nanos,
    /// As parts of the cost of all in DRAM: the DRAM, and the tiers at their peaks.
    pub(super) dram_cost: f64,
    pub(super) tiers_cost: f64,
    /// Most pages in each tier.
    pub(super) peaks: Vec<u64>,
    pub(super) run: SimulatedRun,
    pub(super) report: SimReport,
}

impl Found {
    pub(super) fn cost(&self) -> f64 {
        self.dram_cost + self.tiers_cost
    }

    /// Performance by cost, as a part of all in DRAM's.
    pub(super) fn effectiveness(&self) -> f64 {
        self.throughput / self.cost()
    }
}

/// Every workload in each amount of memory, under each scheme.
///
/// * `schemes`: [`Scheme::Rapid`] first. The kernel's fast device is as large as the peak of it.
pub(super) fn run(
    case: &Case,
    workloads: &[Workload],
    schemes: &[Scheme],
) -> anyhow::Result<Vec<Found>> {
    let mut found = Vec::new();
    for workload in workloads {
        let generated = generate(workload, &case.size);
        let streams = streams_of(&generated.trace, 4096)?;
        for percent in &case.percents {
            let mut first = None;
            for scheme in schemes {
                progress(&format!(
                    "{} at {percent} %, {}",
                    workload.name,
                    scheme.name()
                ));
                let setup = scheme.setup(case, *percent, first)?;
                let one = one(
                    case,
                    (workload.name, *percent, *scheme),
                    &streams,
                    &setup,
                    &generated,
                )?;
                if *scheme == Scheme::Rapid {
                    first = Some((one.peaks[0] * 4096).max(1 << 20));
                }
                found.push(one);
            }
        }
    }
    Ok(found)
}

fn one(
    case: &Case,
    (workload, percent, scheme): (&'static str, f64, Scheme),
    streams: &[PageStream],
    setup: &Setup,
    generated: &Generated,
) -> anyhow::Result<Found> {
    let mut report = simulate(streams, setup, &mut |_| ())?;
    let waits = std::mem::take(&mut report.clients[0].waits);
    let queried = waits.partition_point(|wait| wait.reference < generated.loads);
    let waits = &waits[queried..];
    let waited: u64 = waits.iter().map(|wait| wait.time.0).sum();
    let plain = (report.references - generated.loads) * case.reference.0;
    let page_dollars = report.cost.dram_dollars / report.memory_pages as f64;
    let all = page_dollars * report.footprint_pages as f64;
    Ok(Found {
        workload,
        percent,
        scheme,
        throughput: plain as f64 / (plain + waited) as f64,
        p99: p99(case.reference, generated, report.references, waits),
        dram_cost: report.cost.dram_dollars / all,
        tiers_cost: report.cost.device_dollars / all,
        peaks: (report.tiers.iter())
            .map(|tier| tier.logical_bytes_peak / 4096)
            .collect(),
        run: SimulatedRun::of(workload.to_owned(), percent, &report),
        report,
    })
}

/// The 99th percentile of the time of a query.
///
/// * `waits`: those of the queries' references.
fn p99(reference: Nanos, generated: &Generated, references: u64, waits: &[Wait]) -> Nanos {
    let mut times: Vec<u64> = match &generated.queries {
        None => vec![reference.0; (references - generated.loads) as usize],
        Some(lengths) => (lengths.iter())
            .map(|length| length * reference.0)
            .collect(),
    };
    let (mut query, mut end) = (0, 0);
    for wait in waits {
        let at = wait.reference - generated.loads;
        match &generated.queries {
            None => query = at as usize,
            Some(lengths) => {
                while end <= at {
                    end += lengths[query];
                    query += 1;
                }
                times[query - 1] += wait.time.0;
                continue;
            }
        }
        times[query] += wait.time.0;
    }
    let rank = times.len().saturating_sub(1) * 99 / 100;
    Nanos(*times.select_nth_unstable(rank).1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_sim::MemoryTrace;

    #[test]
    fn a_query_waits_for_all_its_references() {
        let generated = |queries| Generated {
            trace: MemoryTrace::default(),
            loads: 10,
            queries,
        };
        let wait = |reference, nanos| Wait {
            reference,
            time: Nanos(nanos),
        };
        // 100 queries of one reference; two of them waited, so one is above the percentile.
        let waits = [wait(15, 7), wait(20, 3)];
        let one = generated(None);
        assert_eq!(p99(Nanos(100), &one, 110, &waits), Nanos(103));
        // Of three references, two of which waited; one of two.
        let scans = generated(Some(vec![3, 2]));
        assert_eq!(
            p99(
                Nanos(100),
                &scans,
                15,
                &[wait(10, 5), wait(12, 5), wait(13, 1)]
            ),
            Nanos(201)
        );
    }
}
