//! Memory patterns under equal total DRAM: RAM tier against zram and zswap, file tier against a
//! swap file, plain beside them.
//!
//! Each round runs every rig once, one after another, so that drift of the machine affects all
//! alike. One run is: fill, all phases, and a check of every byte at the end.

use super::{Lab, check_total, or_skip, phase_sample, progress, retrying, run_touch};
use crate::results::{Better, Results, Target};
use crate::rig::{CommandLine, Plain, Rig, calibrate};
use crate::touch::{Access, Pattern, Phase};
use std::collections::BTreeMap;
use undercroft_base::Bytes;

const PATTERNS: [Pattern; 4] = [
    Pattern::Seq,
    Pattern::Stride,
    Pattern::Random,
    Pattern::Zipf,
];

struct Group {
    rigs: Vec<Box<dyn Rig>>,
    /// A process for each number of threads, so that a run killed by the kernel costs one of them.
    commands: Vec<CommandLine>,
    /// A shorter run with the same memory use, to find the limits.
    probe: CommandLine,
    /// Total DRAM.
    budget: Bytes,
}

/// Sizes of one experiment.
struct Sizes {
    footprint_mib: u64,
    rounds: usize,
    threads: &'static [usize],
    /// Most operations of a phase.
    ops_max: u64,
}

impl Sizes {
    fn of(lab: &Lab) -> Sizes {
        Sizes {
            footprint_mib: lab.options.footprint_mib.unwrap_or(lab.pick(24, 512)),
            rounds: lab.rounds(1, 5),
            threads: lab.pick(&[1, 2][..], &[1, 2, 4][..]),
            ops_max: lab.pick(1500, u64::MAX),
        }
    }

    fn footprint(&self) -> Bytes {
        Bytes(self.footprint_mib << 20)
    }

    fn pages(&self) -> u64 {
        self.footprint().0 / 4096
    }

    /// A run of `lab-touch`: fill, `phases`, and a check of every byte.
    fn touch(&self, lab: &Lab, phases: &[Phase]) -> CommandLine {
        let mut arguments = vec![
            "--footprint-mib".to_owned(),
            self.footprint_mib.to_string(),
            "--verify".to_owned(),
        ];
        phases
            .iter()
            .for_each(|phase| arguments.extend(["--phase".to_owned(), phase.to_string()]));
        lab.touch(arguments)
    }

    /// Every pattern, reading and writing: one command for each number of threads.
    fn matrix(&self, lab: &Lab, random_ops: u64) -> Vec<CommandLine> {
        let command = |&threads: &usize| {
            let mut phases = Vec::new();
            for pattern in PATTERNS {
                for access in [Access::Read, Access::Write] {
                    let whole_scan = matches!(pattern, Pattern::Seq | Pattern::Stride);
                    let ops = if whole_scan { self.pages() } else { random_ops };
                    phases.push(Phase {
                        pattern,
                        access,
                        threads,
                        ops: ops.min(self.ops_max),
                    });
                }
            }
            self.touch(lab, &phases)
        };
        self.threads.iter().map(command).collect()
    }

    fn probe(&self, lab: &Lab) -> CommandLine {
        let phase = |pattern, access| Phase {
            pattern,
            access,
            threads: 1,
            ops: self.pages() / 4,
        };
        let phases = [
            phase(Pattern::Seq, Access::Read),
            phase(Pattern::Random, Access::Write),
        ];
        self.touch(lab, &phases)
    }

    fn group(&self, lab: &Lab, rigs: Vec<Box<dyn Rig>>, random_ops: u64, budget: Bytes) -> Group {
        Group {
            rigs,
            commands: self.matrix(lab, random_ops),
            probe: self.probe(lab),
            budget,
        }
    }
}

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let sizes = Sizes::of(lab);
    let footprint = sizes.footprint();
    // 55 % of the footprint. With data at 2.9:1 a quarter of the pages is then resident; with less,
    // the kernel kills the run under zram. The small size adds some 6 MiB for the workload itself.
    let budget = Bytes((footprint.0 * 55 / 100 + lab.pick(6 << 20, 0)) & !0xfff);
    // On disk nothing is compressed: a quarter, so that the median random read is a swap-in.
    let file_budget = Bytes((footprint.0 / 4 + lab.pick(6 << 20, 0)) & !0xfff);
    let swap = Bytes(footprint.0 * 2 + (64 << 20));
    let groups = [
        sizes.group(lab, lab.memory_rigs(swap), 60_000, budget),
        sizes.group(lab, lab.file_rigs(swap), 20_000, file_budget),
        sizes.group(lab, vec![Box::new(Plain)], 60_000, budget),
    ];
    results.parameters = BTreeMap::from([
        ("footprint_mib".into(), sizes.footprint_mib.to_string()),
        (
            "total_dram_budget_bytes".into(),
            format!("{} (memory), {} (file)", budget.0, file_budget.0),
        ),
        ("rounds".into(), sizes.rounds.to_string()),
        ("random_ops".into(), "60000 (memory), 20000 (file)".into()),
        ("stride_pages".into(), "16".into()),
    ]);
    let limits = find_limits(&groups, results)?;
    for round in 0..sizes.rounds {
        for group in &groups {
            one_round(&sizes, group, &limits, round, results)?;
        }
    }
    for group in &groups {
        for rig in &group.rigs {
            check_total(results, rig.name(), group.budget);
        }
    }
    compare(results);
    Ok(())
}

type Limits = BTreeMap<&'static str, Bytes>;

/// The limit of each rig under which it uses its group's budget.
fn find_limits(groups: &[Group], results: &mut Results) -> anyhow::Result<Limits> {
    let mut limits = Limits::new();
    for group in groups {
        for rig in &group.rigs {
            let name = rig.name();
            progress(&format!(
                "patterns: limit of {name} for {} of DRAM",
                group.budget
            ));
            let found = calibrate(rig.as_ref(), group.budget, &group.probe);
            if let Some(found) = or_skip(results, found)? {
                limits.insert(name, Bytes(found.limit_bytes));
                if !found.trials.is_empty() {
                    results.calibrations.insert(name.to_owned(), found);
                }
            }
        }
    }
    Ok(limits)
}

/// Runs every command of a group once under each of its rigs.
fn one_round(
    sizes: &Sizes,
    group: &Group,
    limits: &Limits,
    round: usize,
    results: &mut Results,
) -> anyhow::Result<()> {
    for (command, threads) in group.commands.iter().zip(sizes.threads) {
        for rig in &group.rigs {
            let name = rig.name();
            let Some(limit) = limits.get(name).copied() else {
                continue;
            };
            progress(&format!(
                "patterns: round {} of {}, {threads} threads, {name}",
                round + 1,
                sizes.rounds,
            ));
            let run = || run_touch(rig.as_ref(), limit, command);
            let Some((lines, outcome)) = retrying(results, run)? else {
                continue;
            };
            for line in lines {
                let case = match line.rw.as_str() {
                    _ if line.pattern == "fill" || line.pattern == "verify" => line.pattern.clone(),
                    rw => format!("{} {rw} {}t", line.pattern, line.threads),
                };
                let sample = phase_sample(round, name, case, &line, &outcome);
                results.samples.push(sample);
            }
            let label = format!("{name} {threads}t");
            results.keep(name, label, outcome.facts, outcome.report);
        }
    }
    Ok(())
}

fn compare(results: &mut Results) {
    let target = |must, aim| Some(Target::new(must, aim));
    let pairs = [
        ("undercroft-ram", "zram"),
        ("undercroft-ram", "zswap"),
        ("undercroft-file", "swapfile"),
        ("zswap", "zram"),
    ];
    for (subject, baseline) in pairs {
        for case in results.cases() {
            let (speed, mean, p50, p99) = match (subject, baseline, case.as_str()) {
                ("undercroft-ram", "zram", "seq read 1t") => {
                    (target(3.0, Some(6.0)), None, None, None)
                }
                ("undercroft-ram", "zram", "random read 1t" | "random write 1t") => {
                    (None, target(0.8, Some(0.6)), None, target(0.15, Some(0.05)))
                }
                ("undercroft-file", "swapfile", "seq read 1t") => {
                    (target(2.0, None), None, None, None)
                }
                ("undercroft-file", "swapfile", "random read 1t") => {
                    (None, None, target(1.15, Some(1.0)), target(0.7, Some(0.3)))
                }
                _ => (None, None, None, None),
            };
            let pair = (subject, baseline);
            results.compare(&case, "ops_per_second", pair, Better::Higher, speed);
            results.compare(&case, "mean_ns", pair, Better::Lower, mean);
            results.compare(&case, "p50_ns", pair, Better::Lower, p50);
            results.compare(&case, "p99_ns", pair, Better::Lower, p99);
        }
    }
}
