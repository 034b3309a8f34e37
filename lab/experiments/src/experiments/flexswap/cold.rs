//! `flexswap-fig9` (FlexSwap §6.3 and §6.4, figures 9 and 10): how much of a machine's memory the
//! dt-reclaimer saves, and what that costs the machine. There is room for all of it.
//!
//! The policy is a file of `policies`, built for each interval and target. The machine is
//! theirs, too: a guest under KVM that uses a quarter of its memory, all of it but some parts far
//! more often, or all of it in turn. The paper has programs and Linux; a guest of ours can have
//! neither under KVM without nested paging, so its figures are relative only.

use std::collections::BTreeMap;

use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying};
use super::{Guests, one, record};
use crate::results::{Better, Results};
use crate::rig::{Plain, Rig};

/// Ways in which the guest uses its memory.
const CASES: [&str; 3] = ["quarter", "skewed", "walk"];

/// The policies: name, milliseconds between scans, and the part of the pages in use that may come
/// back a scan, in thousandths. The first is the paper's, in a time that is 60 times as fast.
const POLICIES: [(&str, u32, u32); 2] = [("dt-1s-2%", 1000, 20), ("dt-1s-10%", 1000, 100)];

pub(crate) fn fig9(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let memory = Bytes(lab.options.footprint_mib.unwrap_or(lab.pick(16, 32)) << 20);
    let rounds = lab.rounds(1, 3);
    let (visits, burst) = lab.pick((400_000u64, 64u64), (100_000_000, 256));
    results.parameters = BTreeMap::from([
        ("memory_bytes".into(), memory.0.to_string()),
        ("rounds".into(), rounds.to_string()),
        ("visits".into(), visits.to_string()),
        ("words_of_a_visit".into(), burst.to_string()),
    ]);
    let Some(guests) = Guests::new(lab, "flexswap-fig9", results)? else {
        return Ok(());
    };
    let mut rigs: Vec<Box<dyn Rig>> = vec![Box::new(Plain)];
    for (name, interval, target) in POLICIES {
        let values = [("INTERVAL_MS", interval), ("TARGET_PERMILLE", target)];
        let file = guests.policy("dt_reclaimer", &values)?;
        let scans = format!("{interval}ms");
        let extra = ["--access-scan".into(), scans, "--policy".into(), file];
        rigs.push(guests.rig(name, memory, extra));
    }
    for round in 0..rounds {
        for case in CASES {
            for rig in &rigs {
                let turn = format!("round {} of {rounds}, {case}, {}", round + 1, rig.name());
                progress(&format!("flexswap-fig9: {turn}"));
                let numbers = [memory.0 >> 20, 1, 1, visits, burst].map(|of| of.to_string());
                let words = std::iter::once("parts".to_owned()).chain(numbers);
                let command = guests.command(words.chain([case.to_owned()]));
                let limit = Bytes(memory.0 * 2);
                let done = retrying(results, || one(rig.as_ref(), limit, &command))?;
                if let Some((values, outcome)) = done {
                    record(results, round, rig.name(), case, values, outcome);
                }
            }
        }
    }
    compare(results);
    guests.end()
}

fn compare(results: &mut Results) {
    for case in CASES {
        for (name, ..) in POLICIES {
            for metric in ["seconds", "resident_bytes", "resident_bytes_at_last"] {
                results.compare(case, metric, (name, "plain"), Better::Lower, None);
            }
        }
    }
    for note in [
        "FlexSwap, figure 9: up to 71 % of memory is saved (Kafka), pages of 4 KiB and of 2 MiB \
         alike; with 2 MiB the performance is that without swapping, with 4 KiB 85 % of it at \
         worst once the memory of graph500 is made; where pages are used at random and often \
         (Redis), hardly any is reclaimed",
        "FlexSwap, figure 10: no interval and target of the same reclaimer over the kernel's swap \
         reaches performance and saving of theirs (graph500)",
    ] {
        results.notes.push(note.to_owned());
    }
}
