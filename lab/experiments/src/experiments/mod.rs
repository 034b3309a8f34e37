//! The experiments by name, and what they share: rigs of a run, progress, skips, the record of one
//! run of the workload.

mod below_limit;
mod clients;
mod fio;
mod first_touch;
mod flexswap;
mod hybridswap;
mod hybridswap_peers;
mod hybridswap_stall;
mod idle;
mod metadata;
mod nvswap;
mod patterns;
mod pcm;
mod programs;
mod rapidswap;
mod redis_benchmark;
mod redis_server;
mod redis_ycsb;
mod scale;
mod sleeper;
mod tiers;

use crate::results::{Results, Sample, Simulated};
use crate::rig::{
    CommandLine, Finished, Rig, RigError, Stdout, SwapFile, TierChoice, Undercroft, Zram, Zswap,
};
use crate::touch::PhaseLine;
use crate::{Experiment, RunOptions};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;
use undercroft_base::Bytes;

/// Runs a part of an experiment's work, and adds or returns what it found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Run {
    /// Adds its findings to the results one by one, so that a later error does not lose them.
    Measured(fn(&Lab, &mut Results) -> anyhow::Result<()>),
    Simulated(fn(&Lab) -> anyhow::Result<Simulated>),
}

/// Every experiment.
pub(crate) static EXPERIMENTS: [Experiment; 42] = [
    Experiment {
        name: "patterns",
        about: "memory patterns under equal total DRAM: RAM tier against zram and zswap, file \
                tier against a swap file",
        run: Run::Measured(patterns::run),
    },
    Experiment {
        name: "scale",
        about: "1, 2, 4, ... threads of one process over one memory: RAM tier against zram, file \
                tier against a swap file; what does not scale, and a model for 16 CPUs",
        run: Run::Measured(scale::run),
    },
    Experiment {
        name: "first-touch",
        about: "first write to fresh memory, against no limit at all",
        run: Run::Measured(first_touch::run),
    },
    Experiment {
        name: "below-limit",
        about: "programs that fit below their limit, against running them plainly",
        run: Run::Measured(below_limit::run),
    },
    Experiment {
        name: "redis-ycsb",
        about: "YCSB workloads A, B, C, F on redis at 50 % of its memory, every value verified",
        run: Run::Measured(redis_ycsb::run),
    },
    Experiment {
        name: "redis-benchmark",
        about: "redis-benchmark SET and GET at 50 % of the memory: file tier against a swap file",
        run: Run::Measured(redis_benchmark::run),
    },
    Experiment {
        name: "programs",
        about: "real programs at 75, 50 and 35 % of their memory, with defaults, against \
                fixed settings, a swap file, and zram in the same total DRAM",
        run: Run::Measured(programs::run),
    },
    Experiment {
        name: "idle",
        about: "processor time of undercroft while its client sleeps",
        run: Run::Measured(idle::run),
    },
    Experiment {
        name: "metadata",
        about: "bytes of undercroft's own memory for each managed page",
        run: Run::Measured(metadata::run),
    },
    Experiment {
        name: "fio",
        about: "what the disk itself can do: 4 KiB random reads and sequential transfers",
        run: Run::Measured(fio::run),
    },
    Experiment {
        name: "tier-bandwidth",
        about: "the file tier's transfers in sequence, beside those of fio",
        run: Run::Measured(tiers::bandwidth),
    },
    Experiment {
        name: "migration",
        about: "random reads of a tier whose pages move to another meanwhile",
        run: Run::Measured(tiers::migration),
    },
    Experiment {
        name: "three-tiers",
        about: "YCSB on redis at a quarter of its memory: three tiers, one emulated, beside two",
        run: Run::Measured(redis_ycsb::three_tiers),
    },
    Experiment {
        name: "pcm-traces",
        about: "records the four programs of the PCM experiments under valgrind, into \
                $UNDERCROFT_TRACES or the user's cache",
        run: Run::Measured(pcm::traces),
    },
    Experiment {
        name: "pcm-table1",
        about: "PCM swap, table 1: our recorded traces beside the paper's",
        run: Run::Measured(pcm::table1),
    },
    Experiment {
        name: "pcm-fig2",
        about: "PCM swap, figure 2, simulated: time over the page size, PCM and disk",
        run: Run::Simulated(pcm::fig2),
    },
    Experiment {
        name: "pcm-fig3",
        about: "PCM swap, figure 3, simulated: time over page size and memory",
        run: Run::Simulated(pcm::fig3),
    },
    Experiment {
        name: "pcm-fig4",
        about: "PCM swap, figure 4, simulated: time over the read-ahead window",
        run: Run::Simulated(pcm::fig4),
    },
    Experiment {
        name: "pcm-fig5",
        about: "PCM swap, figure 5, simulated: CLOCK and CLOCK-W over memory",
        run: Run::Simulated(pcm::fig5),
    },
    Experiment {
        name: "pcm-fig6",
        about: "PCM swap, figure 6, simulated: energy of little DRAM with PCM, all DRAM with a disk",
        run: Run::Simulated(pcm::fig6),
    },
    Experiment {
        name: "nvswap-fig1",
        about: "NVSwap, figure 1, simulated: what page-outs do to page-ins on an SSD, one and \
                two clients",
        run: Run::Simulated(nvswap::fig1),
    },
    Experiment {
        name: "nvswap-fig4",
        about: "NVSwap, figure 4, simulated: one client with a bound of 200 us, an SSD and a buffer",
        run: Run::Simulated(nvswap::fig4),
    },
    Experiment {
        name: "nvswap-fig5",
        about: "NVSwap, figure 5, simulated: three clients with bounds of 1000, 500 and 300 us",
        run: Run::Simulated(nvswap::fig5),
    },
    Experiment {
        name: "nvswap-fig6",
        about: "NVSwap, figure 6, simulated: a bound of 1000 us that is changed to 800 and 600 us",
        run: Run::Simulated(nvswap::fig6),
    },
    Experiment {
        name: "nvswap-fig7",
        about: "NVSwap, figure 7, simulated: pages copied against pages mapped where they lie",
        run: Run::Simulated(nvswap::fig7),
    },
    Experiment {
        name: "rapidswap-fig2",
        about: "RapidSwap, figure 2, simulated: throughput of YCSB A to F in 50 to 80 % of memory",
        run: Run::Simulated(rapidswap::fig2),
    },
    Experiment {
        name: "rapidswap-fig3",
        about: "RapidSwap, figure 3, simulated: p99 of the queries of YCSB in 50 to 80 % of memory",
        run: Run::Simulated(rapidswap::fig3),
    },
    Experiment {
        name: "rapidswap-table3",
        about: "RapidSwap, table 3, simulated: most slabs on the fast device",
        run: Run::Simulated(rapidswap::table3),
    },
    Experiment {
        name: "rapidswap-cost",
        about: "RapidSwap, 4.3 and 4.4, simulated: cost of the hierarchy, performance by cost",
        run: Run::Simulated(rapidswap::cost),
    },
    Experiment {
        name: "hybridswap-table5.2",
        about: "HybridSwap, tables 5.2 and 5.3, simulated: an SSD with a disk beside the SSD alone",
        run: Run::Simulated(hybridswap::table_5_2),
    },
    Experiment {
        name: "hybridswap-fig5.9",
        about: "HybridSwap, figure 5.9, simulated: bounds of the time that three programs wait",
        run: Run::Simulated(hybridswap_stall::fig_5_9),
    },
    Experiment {
        name: "hybridswap-fig5.5",
        about: "HybridSwap, figures 5.5 and 5.7, simulated: major faults, and the head of the disk",
        run: Run::Simulated(hybridswap_peers::fig_5_5),
    },
    Experiment {
        name: "hybridswap-fig5.6",
        about: "HybridSwap, figure 5.6, simulated: memcached by memory, beside two other ways to swap",
        run: Run::Simulated(hybridswap_peers::fig_5_6),
    },
    Experiment {
        name: "hybridswap-fig5.8",
        about: "HybridSwap, figure 5.8, simulated: faults and waits of 4 to 7 programs at once",
        run: Run::Simulated(hybridswap_peers::fig_5_8),
    },
    Experiment {
        name: "hybridswap-fig5.10",
        about: "HybridSwap, figure 5.10: processor time of its work, by the run time, simulated",
        run: Run::Simulated(hybridswap_peers::fig_5_10),
    },
    Experiment {
        name: "flexswap-fig6",
        about: "FlexSwap, figure 6: a fault of a virtual machine against kernel swap, and what it \
                costs to be managed below the limit",
        run: Run::Measured(flexswap::fig6),
    },
    Experiment {
        name: "flexswap-fig9",
        about: "FlexSwap, figures 9 and 10: what the dt-reclaimer saves of a machine's memory, and \
                what that costs, with another target, too",
        run: Run::Measured(flexswap::fig9),
    },
    Experiment {
        name: "flexswap-fig11",
        about: "FlexSwap, figure 11: SYS-R, a policy that knows the instruction of a fault, on a \
                product of matrices in four fifths of its memory",
        run: Run::Measured(flexswap::fig11),
    },
    Experiment {
        name: "flexswap-fig12",
        about: "FlexSwap, figure 12: memory over time of a program that works in phases, by SYS-Agg \
                and by the dt-reclaimer, as a process and in a virtual machine",
        run: Run::Measured(flexswap::fig12),
    },
    Experiment {
        name: "flexswap-linearpf",
        about: "FlexSwap, 6.6: LinearPF in a virtual machine, by its addresses, by the host's, and \
                without",
        run: Run::Measured(flexswap::linear),
    },
    Experiment {
        name: "flexswap-fig13",
        about: "FlexSwap, figure 13: how soon a machine is as fast as before when its limit is \
                raised again, with its working set restored and without",
        run: Run::Measured(flexswap::fig13),
    },
    Experiment {
        name: "clients-100",
        about: "a hundred clients with bounds and weights under one budget of DRAM, simulated",
        run: Run::Simulated(clients::run),
    },
];

/// A `lab run`: its options and its paths.
pub(crate) struct Lab {
    pub(crate) options: RunOptions,
    touch: Vec<OsString>,
}

impl Lab {
    /// Finds the workload program: the given one, one beside this executable, or this executable's
    /// own copy.
    pub(crate) fn new(options: RunOptions) -> anyhow::Result<Lab> {
        std::fs::create_dir_all(&options.out)
            .with_context(|| format!("create {}", options.out.display()))?;
        let touch = match &options.touch_command {
            Some(words) => words.clone(),
            None => {
                let here = std::env::current_exe().context("find this executable")?;
                let beside = here.with_file_name("undercroft-touch");
                if !beside.exists() {
                    bail!(
                        "the workload program {} does not exist; build it with `cargo build \
                         --release -p undercroft-experiments`",
                        beside.display()
                    );
                }
                vec![beside.into()]
            }
        };
        Ok(Lab { options, touch })
    }

    pub(crate) fn results(&self, name: &str) -> Results {
        Results::new(name, if self.options.small { "small" } else { "real" })
    }

    pub(crate) fn pick<T>(&self, small: T, real: T) -> T {
        if self.options.small { small } else { real }
    }

    pub(crate) fn rounds(&self, small: usize, real: usize) -> usize {
        self.options.rounds.unwrap_or(self.pick(small, real))
    }

    /// The workload program with `arguments`.
    pub(crate) fn touch(
        &self,
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> CommandLine {
        let words = self
            .touch
            .iter()
            .cloned()
            .chain(arguments.into_iter().map(Into::into))
            .collect();
        CommandLine {
            words,
            stdout: Stdout::Lines,
        }
    }

    /// Where swap files and file tiers go: one directory, hence one disk, for both.
    pub(crate) fn swap_directory(&self) -> PathBuf {
        self.options
            .swap_directory
            .clone()
            .unwrap_or_else(|| self.options.out.clone())
    }

    /// The undercroft rig with this tier, if there is a binary to test.
    pub(crate) fn undercroft(&self, tier: TierChoice, swap: Bytes) -> Option<Box<dyn Rig>> {
        let binary = self.options.undercroft_binary.clone()?;
        let extra = self.options.undercroft_arguments.clone();
        Some(Box::new(Undercroft {
            binary,
            name: None,
            tier,
            swap,
            directory: self.options.out.clone(),
            extra,
            alone: true,
        }))
    }

    /// Our RAM tier, and the rigs it is compared with.
    pub(crate) fn memory_rigs(&self, swap: Bytes) -> Vec<Box<dyn Rig>> {
        let directory = self.swap_directory();
        let kernel: [Box<dyn Rig>; 2] =
            [Box::new(Zram { swap }), Box::new(Zswap { swap, directory })];
        self.undercroft(TierChoice::Ram, swap)
            .into_iter()
            .chain(kernel)
            .collect()
    }

    /// Our file tier, and the rigs it is compared with.
    pub(crate) fn file_rigs(&self, swap: Bytes) -> Vec<Box<dyn Rig>> {
        let directory = self.swap_directory();
        let ours = self.undercroft(TierChoice::File(directory.clone()), swap);
        ours.into_iter()
            .chain([Box::new(SwapFile { swap, directory }) as Box<dyn Rig>])
            .collect()
    }
}

/// Prints a line on stderr if stderr is a terminal.
pub(crate) fn progress(line: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("lab: {line}");
    }
}

/// Prints that something was left out, and records it.
pub(crate) fn skip(results: &mut Results, why: &str) {
    eprintln!("SKIPPED: {why}");
    results.notes.push(format!("SKIPPED: {why}"));
}

/// Skips, with a message, a rig that this machine cannot have or that the kernel kills under this
/// limit. A failed run (above all one with wrong bytes) is kept as a failure; `lab::run` returns it
/// once the rest is measured and written. Only an interrupt and another active swap end the
/// experiment at once.
pub(crate) fn or_skip<T>(
    results: &mut Results,
    result: Result<T, RigError>,
) -> anyhow::Result<Option<T>> {
    match result {
        Ok(value) => return Ok(Some(value)),
        Err(error @ (RigError::Interrupted | RigError::OtherSwap(_))) => return Err(error.into()),
        Err(
            error @ (RigError::Failed { .. }
            | RigError::CommandFailed { .. }
            | RigError::Unreadable { .. }),
        ) => {
            eprintln!("FAILED: {error}");
            results.failures.push(error.to_string());
        }
        Err(
            error @ (RigError::Unavailable { .. }
            | RigError::BudgetTooSmall { .. }
            | RigError::Killed { .. }),
        ) => skip(results, &error.to_string()),
    }
    Ok(None)
}

/// Notes a rig that used more DRAM than the budget: it had an advantage.
pub(crate) fn check_total(results: &mut Results, rig: &str, budget: Bytes) {
    let uses = results.samples.iter().filter(|sample| sample.rig == rig);
    let most = uses.map(|sample| sample.memory.total_peak_bytes).max();
    if let Some(most) = most.filter(|most| rig != "plain" && *most as f64 > budget.0 as f64 * 1.02)
    {
        let percent = 100.0 * (most as f64 / budget.0 as f64 - 1.0);
        let note = format!("{rig} used up to {percent:.1} % more DRAM than the budget");
        results.notes.push(note);
    }
}

/// Runs the workload on a rig. Returns every line it printed, parsed.
pub(crate) fn run_touch(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
) -> Result<(Vec<PhaseLine>, Finished), RigError> {
    touched(rig, rig.set_up(limit)?.spawn(command)?.finish()?)
}

/// Every line that an ended run of the workload printed, parsed. The run must have succeeded.
pub(crate) fn touched(
    rig: &dyn Rig,
    outcome: Finished,
) -> Result<(Vec<PhaseLine>, Finished), RigError> {
    let outcome = outcome.successful(rig.name(), "undercroft-touch")?;
    let lines: Result<Vec<PhaseLine>, _> = outcome
        .lines
        .iter()
        .map(|line| serde_json::from_str(line))
        .collect();
    let lines = lines.map_err(|error| RigError::Unreadable {
        what: format!("read the output of undercroft-touch on rig {}", rig.name()),
        why: error.to_string(),
    })?;
    Ok((lines, outcome))
}

/// A run, repeated up to twice if the kernel killed it. With memcg v1 the kernel sometimes does
/// that although there is free swap, when every page of a small group is on the active list. Kills
/// and skips are noted.
pub(crate) fn retrying<T>(
    results: &mut Results,
    mut run: impl FnMut() -> Result<T, RigError>,
) -> anyhow::Result<Option<T>> {
    for _ in 0..2 {
        match run() {
            Err(error @ RigError::Killed { .. }) => {
                eprintln!("lab: {error}; trying again");
                results.notes.push(format!("repeated: {error}"));
            }
            other => return or_skip(results, other),
        }
    }
    or_skip(results, run())
}

/// A phase line, as a sample.
pub(crate) fn phase_sample(
    round: usize,
    rig: &str,
    case: String,
    line: &PhaseLine,
    outcome: &Finished,
) -> Sample {
    let values = [
        ("mean_ns", line.mean_ns),
        ("p50_ns", line.p50_ns as f64),
        ("p90_ns", line.p90_ns as f64),
        ("p99_ns", line.p99_ns as f64),
        ("p999_ns", line.p999_ns as f64),
        ("max_ns", line.max_ns as f64),
        ("ops_per_second", line.ops_per_second),
    ];
    let values: BTreeMap<String, f64> = values.map(|(name, value)| (name.to_owned(), value)).into();
    Sample {
        round,
        rig: rig.to_owned(),
        case: case.to_owned(),
        values,
        memory: outcome.memory.clone(),
    }
}
