//! First touch of fresh memory, below and beyond the limit: undercroft against plain, in turn.

use super::{Lab, or_skip, phase_sample, progress, run_touch};
use crate::results::{Better, Results, Target};
use crate::rig::{Finished, Plain, Rig, TierChoice, Zram};
use crate::touch::PhaseLine;
use std::collections::BTreeMap;
use undercroft_base::Bytes;

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let footprint_mib = lab.options.footprint_mib.unwrap_or(lab.pick(8, 256));
    let rounds = lab.rounds(2, 9);
    // Two limits. One is far above the footprint, so that nothing need be managed. One is below it,
    // so that pages are managed while they are touched.
    let above = Bytes(footprint_mib << 22);
    let below = Bytes((footprint_mib << 20) / 2 + (4 << 20));
    results.parameters = BTreeMap::from([
        ("footprint_mib".into(), footprint_mib.to_string()),
        ("limit_above_bytes".into(), above.0.to_string()),
        ("limit_below_bytes".into(), below.0.to_string()),
        ("rounds".into(), rounds.to_string()),
    ]);
    let arguments = [
        "--mode",
        "first-touch",
        "--rounds",
        "3",
        "--footprint-mib",
        &footprint_mib.to_string(),
    ];
    let command = lab.touch(arguments);
    let swap = Bytes(footprint_mib << 22);
    let mut rigs: Vec<Box<dyn Rig>> = vec![Box::new(Plain)];
    rigs.extend(lab.undercroft(TierChoice::Ram, swap));
    rigs.push(Box::new(Zram { swap }));
    let cases = [("below the limit", above), ("beyond the limit", below)];
    for round in 0..rounds {
        for (case, limit) in cases {
            for rig in &rigs {
                let name = rig.name();
                progress(&format!(
                    "first-touch: round {} of {rounds}, {name}, {case}",
                    round + 1
                ));
                let done = run_touch(rig.as_ref(), limit, &command);
                if let Some((lines, outcome)) = or_skip(results, done)? {
                    record(results, round, name, case, &lines, outcome);
                }
            }
        }
    }
    compare(results);
    Ok(())
}

fn record(
    results: &mut Results,
    round: usize,
    rig: &str,
    case: &str,
    lines: &[PhaseLine],
    outcome: Finished,
) {
    // The first is warm-up: the host allocates guest memory lazily.
    for line in lines.iter().skip(1) {
        let sample = phase_sample(round, rig, case.to_owned(), line, &outcome);
        results.samples.push(sample);
    }
    let label = format!("{rig} {case}");
    results.keep(rig, label, outcome.facts, outcome.report);
}

fn compare(results: &mut Results) {
    let target = Some(Target::new(1.3, Some(1.1)));
    for (case, pair, target) in [
        ("below the limit", ("undercroft-ram", "plain"), target),
        ("beyond the limit", ("undercroft-ram", "zram"), None),
        ("below the limit", ("zram", "plain"), None),
    ] {
        results.compare(case, "mean_ns", pair, Better::Lower, target);
    }
}
