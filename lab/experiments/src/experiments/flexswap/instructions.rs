//! `flexswap-fig11` (FlexSwap §6.5, figure 11): SYS-R, which learns for each instruction when its
//! pages are needed again, on a product of matrices in four fifths of its memory.
//!
//! The paper's program runs in a virtual machine; ours is a process, whose instructions are known
//! without a look at a virtual CPU.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying, skip};
use super::{lacks, over_file, program, record, run, unreadable};
use crate::policy_file;
use crate::results::{Better, Results, Target};
use crate::rig::{CommandLine, Finished, Rig, RigError, Stdout, SwapFile, swap};

const PRODUCT: &str = include_str!("../../../../../crates/tests/programs/matmul.c");
const CASE: &str = "product of matrices";
/// Memory of the program beside its second matrix: two rows, its code and its stack.
const REST: u64 = 1 << 20;

pub(crate) fn fig11(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let columns: u64 = lab.pick(1024, 2048);
    let rows: u64 = lab.pick(20, 40);
    let rounds = lab.rounds(1, 5);
    let limit = Bytes(columns * columns * 4 / 5 * 4 + REST);
    results.parameters = BTreeMap::from([
        ("columns".into(), columns.to_string()),
        ("rows".into(), rows.to_string()),
        ("limit_bytes".into(), limit.0.to_string()),
        ("rounds".into(), rounds.to_string()),
    ]);
    if let Some(why) = lacks(lab) {
        skip(results, &format!("flexswap-fig11: {why}"));
        return Ok(());
    }
    let folder = &lab.options.out;
    let product = program(folder, "matmul", PRODUCT)?;
    let file = policy_file::build(folder, "sys_r", &[])?;
    let rigs = rigs(lab, limit, &file);
    let _read_ahead = swap::without_read_ahead();
    if let Err(why) = &_read_ahead {
        let why = format!("flexswap-fig11: the kernel reads ahead: {why}");
        skip(results, &why);
    }
    for round in 0..rounds {
        for rig in &rigs {
            let turn = format!("round {} of {rounds}, {}", round + 1, rig.name());
            progress(&format!("flexswap-fig11: {turn}"));
            let mut words = vec![product.clone().into_os_string()];
            words.extend([columns, rows].map(|of| of.to_string().into()));
            let command = CommandLine {
                words,
                stdout: Stdout::Lines,
            };
            let done = retrying(results, || one(rig.as_ref(), limit, &command))?;
            if let Some((values, outcome)) = done {
                record(results, round, rig.name(), CASE, values, outcome);
            }
        }
    }
    compare(results);
    std::fs::remove_file(product).context("remove the program")
}

/// Our policies over a file, none of which reads ahead, and a swap file.
fn rigs(lab: &Lab, limit: Bytes, sys_r: &Path) -> Vec<Box<dyn Rig>> {
    let size = Bytes(limit.0 * 4);
    let ours = |name, policy: &str| {
        let options = [
            "--access-scan",
            "never",
            "--prefetch",
            "none",
            "--policy",
            policy,
        ];
        let options = options.map(str::to_owned);
        let binary = lab.options.undercroft_binary.as_ref()?;
        Some(Box::new(over_file(lab, binary, name, size, options)) as Box<dyn Rig>)
    };
    let file = sys_r.display().to_string();
    let rigs = [("lru", "lru"), ("auto", "auto"), ("sys-r", &file)];
    let mut rigs: Vec<_> = rigs.into_iter().filter_map(|of| ours(of.0, of.1)).collect();
    let directory = lab.swap_directory();
    rigs.push(Box::new(SwapFile {
        swap: size,
        directory,
    }));
    rigs
}

/// A run, with the seconds of the product and the faults of the whole run.
fn one(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
) -> Result<(BTreeMap<String, f64>, Finished), RigError> {
    let what = "the product";
    let (line, outcome) = run(rig, limit, command, what)?;
    let seconds = line
        .split_once(' ')
        .and_then(|(took, _)| took.parse::<f64>().ok());
    let seconds =
        seconds.ok_or_else(|| unreadable(rig, what, format!("no seconds in `{line}`")))?;
    let mut values = BTreeMap::from([("seconds".to_owned(), seconds)]);
    let faults = outcome.report.as_ref();
    let faults = faults.and_then(|of| of["faults"]["swap_in"].as_f64());
    values.extend(faults.map(|faults| ("faults".to_owned(), faults)));
    Ok((values, outcome))
}

fn compare(results: &mut Results) {
    // At least half of the paper's effect.
    for (metric, must, aim) in [("seconds", 0.85, 0.70), ("faults", 0.78, 0.56)] {
        let target = Some(Target::new(must, Some(aim)));
        results.compare(CASE, metric, ("sys-r", "lru"), Better::Lower, target);
    }
    for metric in ["seconds", "faults"] {
        results.compare(CASE, metric, ("sys-r", "auto"), Better::Lower, None);
    }
    results.compare(CASE, "seconds", ("sys-r", "swapfile"), Better::Lower, None);
    let note = "FlexSwap, figure 11: SYS-R saves 44 % of the faults and 30 % of the time of a \
                product of matrices in four fifths of its memory";
    results.notes.push(note.to_owned());
}
