//! First touch of fresh memory, below and beyond the limit: undercroft against plain, in turn.

use super::{Lab, or_skip, phase_sample, progress, run_touch};
use crate::results::{Better, Results, Target};
use crate::rig::{Plain, Rig, TierChoice};
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
    rigs.push(Box::new(crate::rig::Zram { swap }));
    let cases = [("below the limit", above), ("beyond the limit", below)];
    for round in 0..rounds {
        for (case, limit) in cases {
            for rig in &rigs {
                progress(&format!(
                    "first-touch: round {} of {rounds}, {}, {case}",
                    round + 1,
                    rig.name()
                ));
                let Some((lines, outcome)) =
                    or_skip(results, run_touch(rig.as_ref(), limit, &command))?
                else {
                    continue;
                };
                for line in lines.iter().skip(1) {
                    // The first is warm-up: the host allocates guest memory lazily.
                    results.samples.push(phase_sample(
                        round,
                        rig.name(),
                        case.to_owned(),
                        line,
                        &outcome,
                    ));
                }
                results.keep(
                    rig.name(),
                    format!("{} {case}", rig.name()),
                    outcome.facts,
                    outcome.report,
                );
            }
        }
    }
    let target = Some(Target {
        must: 1.3,
        aim: Some(1.1),
    });
    results.compare(
        "below the limit",
        "mean_ns",
        ("undercroft-ram", "plain"),
        Better::Lower,
        target,
    );
    results.compare(
        "beyond the limit",
        "mean_ns",
        ("undercroft-ram", "zram"),
        Better::Lower,
        None,
    );
    results.compare(
        "below the limit",
        "mean_ns",
        ("zram", "plain"),
        Better::Lower,
        None,
    );
    Ok(())
}
