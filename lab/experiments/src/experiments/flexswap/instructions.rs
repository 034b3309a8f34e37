//! `flexswap-fig11` (FlexSwap §6.5, figure 11): SYS-R, which learns for each instruction when its
//! pages are needed again, on a product of matrices in four fifths of its memory.
//!
//! The paper's program runs in a virtual machine. Ours does so, too, in the machine of the live
//! tests, and runs as a process besides.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying, skip};
use super::{Guests, lacks, over_file, program, record, run, unreadable};
use crate::policy_file;
use crate::results::{Better, Results, Target};
use crate::rig::{CommandLine, Finished, Rig, RigError, Stdout, SwapFile, swap};

const PRODUCT: &str = include_str!("../../../../../crates/tests/programs/matmul.c");
const PROCESS: &str = "product of matrices";
const GUEST: &str = "the same in a virtual machine";
/// Memory of the machine.
const MEMORY: Bytes = Bytes(64 << 20);
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
    let numbers = [columns, rows].map(|of| of.to_string());
    let words = [product.display().to_string()].into_iter();
    let command = CommandLine {
        words: words.chain(numbers.clone()).map(Into::into).collect(),
        stdout: Stdout::Lines,
    };
    turns(results, rounds, &rigs, PROCESS, limit, &command)?;
    let guests = Guests::new(lab, "flexswap-fig11, of a virtual machine", results)?;
    if let Some(guests) = &guests {
        let rigs = guest_rigs(lab, guests, limit, &file);
        let words = ["product", "64", "1", "1"].map(str::to_owned).into_iter();
        let command = guests.command(words.chain(numbers));
        turns(results, rounds, &rigs, GUEST, limit, &command)?;
    }
    let cases = [Some(PROCESS), guests.is_some().then_some(GUEST)];
    compare(results, cases.into_iter().flatten());
    std::fs::remove_file(product).context("remove the program")?;
    guests.map_or(Ok(()), Guests::end)
}

/// Runs of all in turn.
fn turns(
    results: &mut Results,
    rounds: usize,
    rigs: &[Box<dyn Rig>],
    case: &str,
    limit: Bytes,
    command: &CommandLine,
) -> anyhow::Result<()> {
    for round in 0..rounds {
        for rig in rigs {
            let turn = format!("round {} of {rounds}, {}", round + 1, rig.name());
            progress(&format!("flexswap-fig11, {case}: {turn}"));
            let done = retrying(results, || one(rig.as_ref(), limit, command))?;
            if let Some((values, outcome)) = done {
                record(results, round, rig.name(), case, values, outcome);
            }
        }
    }
    Ok(())
}

/// Our policies over a file, none of which reads ahead, and a swap file.
fn rigs(lab: &Lab, limit: Bytes, sys_r: &Path) -> Vec<Box<dyn Rig>> {
    let size = Bytes(limit.0 * 4);
    let ours = |(name, policy)| {
        let binary = lab.options.undercroft_binary.as_ref()?;
        let rig = over_file(lab, binary, name, size, options(policy));
        Some(Box::new(rig) as Box<dyn Rig>)
    };
    let mut rigs: Vec<_> = policies(sys_r).into_iter().filter_map(ours).collect();
    rigs.push(swap_file(lab, size));
    rigs
}

/// The same for the machine.
fn guest_rigs(lab: &Lab, guests: &Guests<'_>, limit: Bytes, sys_r: &Path) -> Vec<Box<dyn Rig>> {
    let ours = |(name, policy)| guests.rig(name, MEMORY, options(policy));
    let mut rigs: Vec<_> = policies(sys_r).into_iter().map(ours).collect();
    rigs.push(swap_file(lab, Bytes(limit.0 * 4)));
    rigs
}

fn policies(sys_r: &Path) -> [(&'static str, String); 3] {
    let [lru, auto] = ["lru", "auto"].map(str::to_owned);
    let file = sys_r.display().to_string();
    [("lru", lru), ("auto", auto), ("sys-r", file)]
}

fn options(policy: String) -> impl Iterator<Item = String> {
    let words = ["--access-scan", "never", "--prefetch", "none", "--policy"];
    words.map(str::to_owned).into_iter().chain([policy])
}

fn swap_file(lab: &Lab, swap: Bytes) -> Box<dyn Rig> {
    let directory = lab.swap_directory();
    Box::new(SwapFile { swap, directory })
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

fn compare(results: &mut Results, cases: impl Iterator<Item = &'static str>) {
    for case in cases {
        // At least half of the paper's effect.
        for (metric, must, aim) in [("seconds", 0.85, 0.70), ("faults", 0.78, 0.56)] {
            let target = Some(Target::new(must, Some(aim)));
            results.compare(case, metric, ("sys-r", "lru"), Better::Lower, target);
        }
        for metric in ["seconds", "faults"] {
            results.compare(case, metric, ("sys-r", "auto"), Better::Lower, None);
        }
        results.compare(case, "seconds", ("sys-r", "swapfile"), Better::Lower, None);
    }
    let note = "FlexSwap, figure 11: SYS-R saves 44 % of the faults and 30 % of the time of a \
                product of matrices in four fifths of its memory";
    results.notes.push(note.to_owned());
}
