//! Undercroft's own memory for each managed page: private memory and ledger of its processes, above
//! that of a tiny client.

use super::{Lab, progress, skip, sleeper};
use crate::results::{BOUND, Better, Results, Sample, Target};
use crate::rig::{MemoryUse, Rig, TierChoice};
use anyhow::Context;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;
use undercroft_base::Bytes;

const MUST_BYTES: f64 = 16.0;
const AIM_BYTES: f64 = 8.0;

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let large_mib = lab.options.footprint_mib.unwrap_or(lab.pick(64, 1024));
    let small_mib = large_mib / 4;
    results.parameters = BTreeMap::from([
        (
            "footprints_mib".into(),
            format!("{small_mib} and {large_mib}"),
        ),
        (
            "method".into(),
            "slope of own memory over pages between two footprints, both at half memory, file tier"
                .into(),
        ),
    ]);
    let directory = lab.swap_directory();
    // The file tier: evicted bytes are then on disk. Only metadata grows with the number of pages.
    let Some(rig) = lab.undercroft(TierChoice::File(directory), Bytes(large_mib << 21)) else {
        skip(results, "metadata: needs an undercroft binary");
        return Ok(());
    };
    for round in 0..lab.rounds(1, 3) {
        progress(&format!("metadata: round {}", round + 1));
        let (small, _, _) = own_bytes(lab, rig.as_ref(), small_mib)?;
        let (large, memory, report) = own_bytes(lab, rig.as_ref(), large_mib)?;
        let pages = ((large_mib - small_mib) << 8) as f64;
        let mut values = BTreeMap::from([
            (
                "bytes_per_page".to_owned(),
                (large as f64 - small as f64) / pages,
            ),
            ("own_bytes_at_large".to_owned(), large as f64),
            ("own_bytes_at_small".to_owned(), small as f64),
        ]);
        let reported = report.as_ref().and_then(|report| {
            report
                .get("manager")?
                .get("metadata_bytes_per_page")?
                .as_f64()
        });
        values.extend(reported.map(|bytes| ("reported_bytes_per_page".to_owned(), bytes)));
        results
            .reports
            .extend(report.map(|report| (rig.name().to_owned(), report)));
        results.samples.push(Sample {
            round,
            rig: rig.name().to_owned(),
            case: "own memory".to_owned(),
            values,
            memory,
        });
        results.add_bound(round, "own memory", "bytes_per_page", MUST_BYTES);
    }
    let target = Target::new(1.0, Some(AIM_BYTES / MUST_BYTES));
    results.compare(
        "own memory",
        "bytes_per_page",
        (rig.name(), BOUND),
        Better::Lower,
        Some(target),
    );
    Ok(())
}

/// PSS of undercroft's processes while a client of `footprint_mib` sleeps at half of it. Shared
/// pages (ledger) count once.
fn own_bytes(
    lab: &Lab,
    rig: &dyn Rig,
    footprint_mib: u64,
) -> anyhow::Result<(u64, MemoryUse, Option<serde_json::Value>)> {
    let limit = Bytes(footprint_mib << 19);
    let running = sleeper::start(lab, rig, limit, footprint_mib, 2)?;
    std::thread::sleep(Duration::from_millis(500));
    let mut total = 0;
    for pid in sleeper::family(running.id()) {
        total += pss_bytes(pid)?;
    }
    let outcome = sleeper::finish(running, rig)?;
    Ok((total, outcome.memory, outcome.report))
}

/// The PSS of a process.
fn pss_bytes(pid: u32) -> anyhow::Result<u64> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("read smaps_rollup")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .context("no Pss line")?;
    let kib: u64 = line
        .trim()
        .trim_end_matches("kB")
        .trim()
        .parse()
        .context("Pss is not a number")?;
    Ok(kib * 1024)
}
