//! `flexswap-fig6` (FlexSwap §6.1, figure 6): the price of a fault to a virtual machine, under
//! undercroft and under the kernel's swap, and that of being managed below the limit.
//!
//! The monitor is the one of the live tests: it runs its guest under KVM, and the guest times each
//! of its reads. Every page is read once a round, in random order, so each read of a page that is
//! away is one fault. As in the paper, nothing is read ahead.

use std::collections::BTreeMap;

use anyhow::Context;
use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying, skip};
use super::{lacks_kvm, monitor, one, record};
use crate::results::{Better, Results, Target};
use crate::rig::{
    CommandLine, Plain, Rig, Stdout, SwapFile, TierChoice, Undercroft, UndercroftGuest, Zram, swap,
};

const FAULT: &str = "a fault";
const BELOW: &str = "below the limit";

struct Sizes {
    memory: Bytes,
    limit: Bytes,
    rounds: usize,
    /// Rounds of reads in a run, and pages that are visited below the limit.
    reads: u64,
    visits: u64,
}

/// A case: the words of the monitor, and the limit of all its rigs.
struct Case {
    name: &'static str,
    words: Vec<String>,
    limit: Bytes,
    rigs: Vec<Box<dyn Rig>>,
}

pub(crate) fn fig6(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let memory = Bytes(lab.options.footprint_mib.unwrap_or(lab.pick(48, 256)) << 20);
    let sizes = Sizes {
        memory,
        limit: Bytes(memory.0 / 4 * 3),
        rounds: lab.rounds(1, 5),
        reads: lab.pick(1, 3),
        visits: lab.pick(10_000, 5_000_000),
    };
    results.parameters = BTreeMap::from([
        ("memory_bytes".into(), sizes.memory.0.to_string()),
        ("limit_bytes".into(), sizes.limit.0.to_string()),
        ("rounds".into(), sizes.rounds.to_string()),
        ("reads_of_each_page".into(), sizes.reads.to_string()),
        ("visits_below_the_limit".into(), sizes.visits.to_string()),
    ]);
    if let Some(why) = lacks_kvm() {
        skip(results, &format!("flexswap-fig6: {why}"));
        return Ok(());
    }
    let monitor = monitor(&lab.options.out)?;
    let _read_ahead = swap::without_read_ahead();
    if let Err(why) = &_read_ahead {
        skip(
            results,
            &format!("flexswap-fig6: the kernel reads ahead: {why}"),
        );
    }
    let cases = cases(lab, &sizes);
    for round in 0..sizes.rounds {
        for case in &cases {
            for rig in &case.rigs {
                let of = format!("{}, {}", case.name, rig.name());
                progress(&format!(
                    "flexswap-fig6: round {} of {}, {of}",
                    round + 1,
                    sizes.rounds
                ));
                let mut words = vec![monitor.clone().into_os_string()];
                words.extend(case.words.iter().map(Into::into));
                let command = CommandLine {
                    words,
                    stdout: Stdout::Lines,
                };
                let done = retrying(results, || one(rig.as_ref(), case.limit, &command))?;
                if let Some((values, outcome)) = done {
                    record(results, round, rig.name(), case.name, values, outcome);
                }
            }
        }
    }
    compare(results);
    std::fs::remove_file(monitor).context("remove the monitor")
}

fn cases(lab: &Lab, sizes: &Sizes) -> [Case; 2] {
    let directory = lab.swap_directory();
    let swap = Bytes(sizes.memory.0 * 2);
    let ours = |name: &'static str, tier: TierChoice| {
        let mut extra = lab.options.undercroft_arguments.clone();
        extra.extend(["--prefetch".into(), "none".into()]);
        let binary = lab.options.undercroft_binary.clone()?;
        let run = Undercroft {
            binary,
            name: Some(name),
            tier,
            swap,
            directory: lab.options.out.clone(),
            extra,
            alone: true,
        };
        let memory = sizes.memory;
        Some(Box::new(UndercroftGuest { run, memory }) as Box<dyn Rig>)
    };
    let file = TierChoice::File(directory.clone());
    let mut faults: Vec<Box<dyn Rig>> = Vec::new();
    faults.extend(ours("undercroft-file", file));
    faults.push(Box::new(SwapFile { swap, directory }));
    faults.extend(ours("undercroft-ram", TierChoice::Ram));
    faults.push(Box::new(Zram { swap }));
    let mut below: Vec<Box<dyn Rig>> = Vec::new();
    below.extend(ours("undercroft-ram", TierChoice::Ram));
    below.push(Box::new(Plain));
    let mib = (sizes.memory.0 >> 20).to_string();
    let words = |mode: &str, cpus: u64, rest: &[u64]| {
        let mut words = vec![
            mode.to_owned(),
            mib.clone(),
            cpus.to_string(),
            "1".to_owned(),
        ];
        words.extend(rest.iter().map(u64::to_string));
        words
    };
    [
        Case {
            name: FAULT,
            words: words("faults", 1, &[sizes.reads]),
            limit: sizes.limit,
            rigs: faults,
        },
        Case {
            name: BELOW,
            words: words("work", 2, &[sizes.visits, 16]),
            limit: Bytes(sizes.memory.0 * 2),
            rigs: below,
        },
    ]
}

fn compare(results: &mut Results) {
    let must = Some(Target::new(1.13, Some(1.0)));
    for pair in [("undercroft-file", "swapfile"), ("undercroft-ram", "zram")] {
        for (metric, target) in [("mean_ns", must), ("p50_ns", None), ("p99_ns", None)] {
            results.compare(FAULT, metric, pair, Better::Lower, target);
        }
    }
    for metric in ["increments_seconds", "compare_seconds"] {
        let target = Some(Target::new(1.0 / 0.99, Some(1.0)));
        let pair = ("undercroft-ram", "plain");
        results.compare(BELOW, metric, pair, Better::Lower, target);
    }
    let note = "FlexSwap, figure 6: a fault of 4 KiB takes 13 % longer than one of the kernel (some \
                104 and 92 us, of which 22 and 6 are no I/O; QEMU, an SSD behind PCIe)";
    results.notes.push(note.to_owned());
}
