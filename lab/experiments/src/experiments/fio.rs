//! The limits of the disk where swap files and file tiers go, as a reference for their rows.

use super::{Lab, progress, redis_server::installed, skip};
use crate::results::{Results, Sample};
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

/// (case, fio's arguments)
const JOBS: [(&str, &str); 4] = [
    ("random read 4K QD1", "--rw=randread --bs=4k --iodepth=1"),
    ("random read 4K QD16", "--rw=randread --bs=4k --iodepth=16"),
    ("seq read 256K QD4", "--rw=read --bs=256k --iodepth=4"),
    ("seq write 256K QD4", "--rw=write --bs=256k --iodepth=4"),
];

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    if !installed("fio") {
        skip(results, "fio is not installed");
        return Ok(());
    }
    let size_mib = lab.pick(16, 1024);
    let seconds = lab.pick(1, 8);
    let rounds = lab.rounds(1, 3);
    results.parameters = BTreeMap::from([
        ("size_mib".into(), size_mib.to_string()),
        ("seconds_each".into(), seconds.to_string()),
        ("engine".into(), "io_uring, direct".into()),
    ]);
    let file = lab
        .swap_directory()
        .join(format!("undercroft-lab-{}.fio", std::process::id()));
    let measured = (|| -> anyhow::Result<()> {
        for round in 0..rounds {
            for (case, job) in JOBS {
                progress(&format!("fio: round {} of {rounds}, {case}", round + 1));
                let values =
                    one_job(&file, job, size_mib, seconds).with_context(|| case.to_owned())?;
                results.samples.push(Sample {
                    round,
                    rig: "fio".to_owned(),
                    case: case.to_owned(),
                    values,
                    memory: Default::default(),
                });
            }
        }
        Ok(())
    })();
    // Remove the file in any case. If the job failed, report that failure.
    let _ = std::fs::remove_file(&file);
    measured
}

pub(super) fn one_job(
    file: &Path,
    job: &str,
    size_mib: u64,
    seconds: u64,
) -> anyhow::Result<BTreeMap<String, f64>> {
    let mut command = Command::new("fio");
    command.args([
        "--name=lab",
        "--ioengine=io_uring",
        "--direct=1",
        "--time_based",
        "--output-format=json",
    ]);
    command
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={size_mib}M"));
    command
        .arg(format!("--runtime={seconds}"))
        .args(job.split(' '));
    let output = command.stdin(Stdio::null()).output().context("start fio")?;
    ensure!(
        output.status.success(),
        "fio failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text
        .find('{')
        .map(|start| &text[start..])
        .context("fio printed no JSON")?;
    let json: serde_json::Value = serde_json::from_str(json).context("fio's JSON")?;
    let side = &json["jobs"][0][if job.contains("--rw=write") {
        "write"
    } else {
        "read"
    }];
    let number = |value: &serde_json::Value| value.as_f64().context("fio's JSON lacks a number");
    let latency = &side["clat_ns"];
    Ok(BTreeMap::from([
        ("ops_per_second".to_owned(), number(&side["iops"])?),
        ("bytes_per_second".to_owned(), number(&side["bw_bytes"])?),
        ("mean_ns".to_owned(), number(&latency["mean"])?),
        (
            "p50_ns".to_owned(),
            number(&latency["percentile"]["50.000000"])?,
        ),
        (
            "p99_ns".to_owned(),
            number(&latency["percentile"]["99.000000"])?,
        ),
    ]))
}
