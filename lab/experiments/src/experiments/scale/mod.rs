//! Many threads of one process over one memory: 1, 2, 4, ... up to twice the CPUs. Undercroft with
//! a RAM tier beside kernel zram, with a file tier beside a swap file, in turn.
//!
//! zram keeps its pages outside the memory limit. So undercroft's RAM tier, which is inside, gets
//! what zram used at most in the run before it. A run is one process: it fills its memory, reads
//! and writes it in patterns, and checks every byte at the end. `threads` reads `/proc` between the
//! phases; `model` predicts 16 CPUs; `tables` shows all.

mod model;
mod tables;
mod threads;

use self::threads::{Moment, Processes, Work};
use super::{Lab, or_skip, phase_sample, progress, retrying, touched};
use crate::results::{Better, Results, Scaling, ScalingCounts, ScalingPhase};
use crate::rig::{CommandLine, Finished, Rig, RigError, SwapFile, TierChoice, Zram, interrupt};
use crate::touch::{Access, Pattern, Phase, PhaseLine, THREADS_MAX};
use std::collections::BTreeMap;
use std::time::Duration;
use undercroft_base::Bytes;

/// Phases after the fill.
const PHASES: [(Pattern, Access); 4] = [
    (Pattern::Random, Access::Read),
    (Pattern::Random, Access::Write),
    (Pattern::Zipf, Access::Read),
    (Pattern::Seq, Access::Read),
];
/// Compression of the program's pages by lz4, if no zram says how much DRAM they need.
const RATIO: f64 = 2.9;
/// How often the end of a phase is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(3);
/// A file is slower: it gets this part of the operations.
const FILE_PART: u64 = 4;

/// Sizes of one experiment.
struct Sizes {
    footprint_mib: u64,
    limit: Bytes,
    ops: u64,
    threads: Vec<usize>,
    rounds: usize,
}

impl Sizes {
    fn of(lab: &Lab, cpus: usize) -> Sizes {
        let footprint_mib = lab.options.footprint_mib.unwrap_or(lab.pick(24, 512));
        // The small size has some 6 MiB for the program itself.
        let own = lab.pick(6 << 20, 0);
        Sizes {
            footprint_mib,
            limit: Bytes(((footprint_mib << 20) * 3 / 8 + own) & !0xfff),
            ops: lab.options.operations.unwrap_or(lab.pick(3000, 200_000)),
            threads: match &lab.options.threads[..] {
                [] => doubling(lab.pick(2, 2 * cpus)),
                chosen => chosen.to_vec(),
            },
            rounds: lab.rounds(1, 2),
        }
    }

    /// The program with `threads` threads: fill, every pattern, and a check of every byte.
    fn command(&self, lab: &Lab, threads: usize, ops: u64) -> CommandLine {
        let mut arguments = vec!["--mode".to_owned(), "shared".to_owned()];
        let footprint = self.footprint_mib.to_string();
        arguments.extend([
            "--footprint-mib".to_owned(),
            footprint,
            "--verify".to_owned(),
        ]);
        for (pattern, access) in PHASES {
            let phase = Phase {
                pattern,
                access,
                threads,
                ops,
            };
            arguments.extend(["--phase".to_owned(), phase.to_string()]);
        }
        lab.touch(arguments)
    }
}

/// 1, 2, 4, ... up to `most`.
fn doubling(most: usize) -> Vec<usize> {
    let all = std::iter::successors(Some(1), |count| Some(count * 2));
    all.take_while(|count| *count <= most.clamp(1, THREADS_MAX))
        .collect()
}

/// A kernel rig that this machine has or lacks, and ours beside it.
struct Pair {
    kernel: Option<Box<dyn Rig>>,
    ours: Option<Box<dyn Rig>>,
    ops: u64,
}

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let cpus = results.machine.cpus;
    let mut sizes = Sizes::of(lab, cpus);
    sizes.threads.sort_unstable();
    sizes.threads.dedup();
    let footprint = Bytes(sizes.footprint_mib << 20);
    let swap = Bytes(footprint.0 * 2 + (64 << 20));
    let file_ops = (sizes.ops / FILE_PART).max(1);
    let counts: Vec<String> = sizes.threads.iter().map(usize::to_string).collect();
    results.parameters = BTreeMap::from([
        ("footprint_mib".into(), sizes.footprint_mib.to_string()),
        ("limit_bytes".into(), sizes.limit.0.to_string()),
        ("rounds".into(), sizes.rounds.to_string()),
        ("threads".into(), counts.join(" ")),
        (
            "operations".into(),
            format!("{} (memory), {file_ops} (file)", sizes.ops),
        ),
    ]);
    if results.machine.load > 0.5 {
        let load = results.machine.load;
        results.notes.push(format!(
            "other work ran on the machine: load {load} at the start"
        ));
    }
    let directory = lab.swap_directory();
    let file = TierChoice::File(directory.clone());
    let pairs = [
        Pair {
            kernel: available(Box::new(Zram { swap }), &sizes, results)?,
            ours: lab.undercroft(TierChoice::Ram, swap),
            ops: sizes.ops,
        },
        Pair {
            kernel: available(Box::new(SwapFile { swap, directory }), &sizes, results)?,
            ours: lab.undercroft(file, swap),
            ops: file_ops,
        },
    ];
    if lab.options.undercroft_binary.is_none() {
        super::skip(
            results,
            "scale: undercroft's part needs an undercroft binary",
        );
    }
    if sizes.threads[0] != 1 {
        let note = "nothing is modelled: that needs a run with one thread".to_owned();
        results.notes.push(note);
    }
    let mut scaling = Scaling::default();
    for round in 0..sizes.rounds {
        for &threads in &sizes.threads {
            for pair in &pairs {
                let mut one = OneRun {
                    round,
                    threads,
                    results,
                    scaling: &mut scaling,
                };
                one.pair(&sizes, pair, &sizes.command(lab, threads, pair.ops))?;
            }
        }
    }
    compare(results);
    tables::fill(&mut scaling, results, &sizes.threads);
    results.scaling = Some(scaling);
    Ok(())
}

/// The rig, if this machine has what it needs.
fn available(
    rig: Box<dyn Rig>,
    sizes: &Sizes,
    results: &mut Results,
) -> anyhow::Result<Option<Box<dyn Rig>>> {
    let tried = rig.set_up(sizes.limit).map(drop);
    Ok(or_skip(results, tried)?.map(|()| rig))
}

/// Runs of one number of threads in one round.
struct OneRun<'a> {
    round: usize,
    threads: usize,
    results: &'a mut Results,
    scaling: &'a mut Scaling,
}

impl OneRun<'_> {
    /// Runs the command under the kernel's rig and then under ours.
    fn pair(&mut self, sizes: &Sizes, pair: &Pair, command: &CommandLine) -> anyhow::Result<()> {
        let Sizes { limit, .. } = *sizes;
        let kernel = match &pair.kernel {
            Some(rig) => self.measure(rig.as_ref(), limit, command, false)?,
            None => None,
        };
        let Some(ours) = &pair.ours else {
            return Ok(());
        };
        let outside = match (&kernel, ours.name()) {
            (Some(finished), _) => finished.memory.compressed_peak_bytes,
            (None, "undercroft-ram") => {
                let away = ((sizes.footprint_mib << 20) - limit.0) as f64 / RATIO;
                let note = format!(
                    "no zram beside it: undercroft's RAM tier got {} for compressed pages, as though \
                     they were {RATIO}:1",
                    Bytes(away as u64)
                );
                if !self.results.notes.contains(&note) {
                    self.results.notes.push(note);
                }
                away as u64
            }
            (None, _) => 0,
        };
        let budget = Bytes((limit.0 + outside) & !0xfff);
        self.measure(ours.as_ref(), budget, command, true)?;
        Ok(())
    }

    /// Runs the command once. Adds what it printed, and what undercroft's threads did.
    fn measure(
        &mut self,
        rig: &dyn Rig,
        limit: Bytes,
        command: &CommandLine,
        managed: bool,
    ) -> anyhow::Result<Option<Finished>> {
        let (round, threads, name) = (self.round, self.threads, rig.name());
        progress(&format!(
            "scale: round {}, {threads} threads, {name}",
            round + 1
        ));
        let run = || watched(rig, limit, command, managed);
        let Some((lines, works, finished)) = retrying(self.results, run)? else {
            return Ok(None);
        };
        for (line, work) in lines.iter().zip(&works) {
            let pattern = pattern_of(line);
            let case = format!("{pattern} {threads}t");
            let sample = phase_sample(round, name, case, line, &finished);
            self.results.samples.push(sample);
            let phase = phase_of(line, work);
            self.scaling.phases.push(ScalingPhase {
                round,
                rig: name.to_owned(),
                pattern,
                threads,
                ..phase
            });
        }
        if let Some(report) = &finished.report {
            self.scaling.counts.push(ScalingCounts {
                round,
                rig: name.to_owned(),
                threads,
                ..counts_of(report)
            });
        }
        let (facts, report) = (finished.facts.clone(), finished.report.clone());
        self.results
            .keep(name, format!("{name} {threads}t"), facts, report);
        Ok(Some(finished))
    }
}

type Watched = (Vec<PhaseLine>, Vec<Work>, Finished);

/// Runs the command, and looks at `/proc` at the end of each phase. Returns what was done in each.
fn watched(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
    managed: bool,
) -> Result<Watched, RigError> {
    let mut running = rig.set_up(limit)?.spawn(command)?;
    let root = running.id();
    let first = Processes::of(root, managed).now();
    let (mut works, mut earlier): (Vec<Work>, Moment) = (Vec::new(), first);
    let mut processes = None;
    while running.is_running() && !interrupt::requested() {
        let done = running.lines_so_far().len();
        if done > works.len() {
            // All of them are there when the first phase ends.
            let seen = processes.get_or_insert_with(|| Processes::of(root, managed));
            let now = seen.now();
            works.push(now.since(&earlier));
            works.resize(done, Work::default()); // phases too short to be told apart
            earlier = now;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let (lines, finished) = touched(rig, running.finish()?)?;
    works.resize(lines.len(), Work::default());
    Ok((lines, works, finished))
}

/// A phase's pattern and access: `random read`, `fill`.
fn pattern_of(line: &PhaseLine) -> String {
    match line.pattern.as_str() {
        "fill" | "verify" => line.pattern.clone(),
        pattern => format!("{pattern} {}", line.rw),
    }
}

/// Work of one phase; round, rig and pattern are for the caller.
fn phase_of(line: &PhaseLine, work: &Work) -> ScalingPhase {
    let each = |ns: u64| ns as f64 / line.ops.max(1) as f64;
    let busiest = work.threads.first().cloned().unwrap_or_default();
    let kind = |(name, count, ns)| (name, count, each(ns));
    ScalingPhase {
        ops: line.ops,
        seconds: line.seconds,
        busiest_share: busiest.cpu_ns as f64 / (work.time.as_nanos() as f64).max(1.0),
        busiest_ns_per_op: each(busiest.cpu_ns),
        busiest_voluntary_switches: busiest.voluntary,
        busiest_involuntary_switches: busiest.involuntary,
        busiest: busiest.name,
        kinds: work.kinds().into_iter().map(kind).collect(),
        undercroft_ns_per_op: each(work.ours_ns()),
        program_ns_per_op: each(work.program_ns),
        ..ScalingPhase::default()
    }
}

/// Counts of a report; round, rig and threads are for the caller.
fn counts_of(report: &serde_json::Value) -> ScalingCounts {
    let number = |path: &str| {
        report
            .pointer(path)
            .and_then(|it| it.as_f64())
            .unwrap_or(0.0)
    };
    ScalingCounts {
        faults: number("/faults/total"),
        pages_out: number("/pages/swapped_out"),
        waited_for_room: number("/counters/waited_for_room"),
        above_limit_seconds: number("/limit_exceeded/seconds"),
        above_limit_bytes_peak: number("/limit_exceeded/bytes_peak"),
        engine_locks: number("/manager/scale/engine_locks"),
        engine_waits: number("/manager/scale/engine_waits"),
        evict_locks: number("/manager/evict_locks"),
        ..ScalingCounts::default()
    }
}

/// Adds the ratios to the kernel.
fn compare(results: &mut Results) {
    for pair in [("undercroft-ram", "zram"), ("undercroft-file", "swapfile")] {
        for case in results.cases() {
            results.compare(&case, "ops_per_second", pair, Better::Higher, None);
            results.compare(&case, "p50_ns", pair, Better::Lower, None);
            results.compare(&case, "p99_ns", pair, Better::Lower, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn thread_counts_double_up_to_the_most() {
        assert_eq!(doubling(4), [1, 2, 4]);
        assert_eq!(doubling(12), [1, 2, 4, 8]);
        assert_eq!(doubling(0), [1]);
        assert_eq!(doubling(100_000).last(), Some(&THREADS_MAX));
    }

    #[test]
    fn counts_are_read_from_a_report_and_from_an_older_one() {
        let report = json!({
            "faults": {"total": 1000}, "pages": {"swapped_out": 800},
            "counters": {"waited_for_room": 7},
            "limit_exceeded": {"seconds": 0.5, "bytes_peak": 4096},
            "manager": {"evict_locks": 50, "scale": {"engine_locks": 2050, "engine_waits": 205}},
        });
        let counts = counts_of(&report);
        assert_eq!(counts.waited_for_room, 7.0);
        assert_eq!(
            (counts.above_limit_seconds, counts.above_limit_bytes_peak),
            (0.5, 4096.0)
        );
        assert_eq!(
            (counts.locks_per_fault(), counts.locks_per_page_out()),
            (2.0, 0.0625)
        );
        assert_eq!(counts.found_taken(), 0.1);
        assert!(counts_of(&json!({})).found_taken().is_nan());
    }
}
