//! redis-benchmark (SET, then GET, of 1 KiB values on random keys) at half of the memory that the
//! server takes without a limit.

use super::redis_server::{Server, installed};
use super::{Lab, or_skip, progress, skip};
use crate::results::{Better, Results, Sample};
use crate::rig::{Finished, Plain, Rig, RigError, SwapFile, TierChoice};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use undercroft_base::Bytes;

type Cases = Vec<(String, BTreeMap<String, f64>)>;

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    if !installed("redis-server") || !installed("redis-benchmark") {
        skip(
            results,
            "redis-benchmark: install redis-server (it brings redis-benchmark in redis-tools)",
        );
        return Ok(());
    }
    let keys = lab.pick(5_000, 200_000);
    let requests = lab.pick(10_000, 300_000);
    let rounds = lab.rounds(1, 3);
    let (_, outcome) = one_run(lab, &Plain, Bytes(0), keys, requests)?;
    let footprint = outcome.memory.cgroup_peak_bytes;
    if footprint == 0 {
        skip(
            results,
            "redis-benchmark: no memory cgroup to measure the footprint with; run as root",
        );
        return Ok(());
    }
    let budget = Bytes((footprint / 2) & !0xfff);
    results.parameters = BTreeMap::from([
        ("keys".into(), keys.to_string()),
        ("requests".into(), requests.to_string()),
        ("footprint_bytes".into(), footprint.to_string()),
        ("total_dram_budget_bytes".into(), budget.0.to_string()),
        ("rounds".into(), rounds.to_string()),
        ("value".into(), "1024 bytes of redis-benchmark's own".into()),
    ]);
    let swap = Bytes(footprint * 2 + (64 << 20));
    let directory = lab.swap_directory();
    // redis-benchmark's values are one repeated letter, so compressed memory would look too good.
    // So only disks are compared, where contents do not matter. YCSB judges compressed memory.
    let mut rigs: Vec<Box<dyn Rig>> = vec![Box::new(Plain)];
    rigs.extend(lab.undercroft(TierChoice::File(directory.clone()), swap));
    rigs.push(Box::new(SwapFile { swap, directory }));
    for round in 0..rounds {
        for rig in &rigs {
            let name = rig.name();
            progress(&format!(
                "redis-benchmark: round {} of {rounds}, {name}",
                round + 1
            ));
            let done = one_run(lab, rig.as_ref(), budget, keys, requests);
            if let Some((cases, outcome)) = or_skip(results, done)? {
                record(results, round, name, cases, outcome);
            }
        }
    }
    compare(results);
    Ok(())
}

fn record(results: &mut Results, round: usize, rig: &str, cases: Cases, outcome: Finished) {
    for (case, values) in cases {
        results.samples.push(Sample {
            round,
            rig: rig.to_owned(),
            case: case.to_owned(),
            values,
            memory: outcome.memory.clone(),
        });
    }
    results.keep(rig, rig.to_owned(), outcome.facts, outcome.report);
}

fn compare(results: &mut Results) {
    for pair in [
        ("undercroft-file", "swapfile"),
        ("undercroft-file", "plain"),
        ("swapfile", "plain"),
    ] {
        for case in ["SET", "GET"] {
            results.compare(case, "ops_per_second", pair, Better::Higher, None);
            results.compare(case, "p99_ns", pair, Better::Lower, None);
        }
    }
}

/// Starts a server, runs SET over all keys and GET. Then checks the length of every key.
fn one_run(
    lab: &Lab,
    rig: &dyn Rig,
    limit: Bytes,
    keys: u64,
    requests: u64,
) -> Result<(Cases, Finished), RigError> {
    let server = Server::start(
        rig,
        limit,
        &lab.options.out.join(format!("redis-{}.log", rig.name())),
    )?;
    let done = benchmark(&server, keys, requests);
    let outcome = server.shut_down(rig.name())?;
    Ok((done?, outcome))
}

pub(crate) fn benchmark(server: &Server, keys: u64, requests: u64) -> Result<Cases, RigError> {
    let mut cases = Cases::new();
    for test in ["set", "get"] {
        let what = format!("redis-benchmark -t {test}");
        let failed = |how: String| RigError::CommandFailed {
            what: what.clone(),
            how,
        };
        let arguments = format!(
            "-p {} -t {test} -d 1024 -r {keys} -n {requests} -c 4 --csv",
            server.port
        );
        let output = Command::new("redis-benchmark")
            .args(arguments.split(' '))
            .stdin(Stdio::null())
            .output();
        let output = output.map_err(RigError::failed(what.clone()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() || text.contains("Error") {
            return Err(failed(format!("{} {}", output.status, text.trim())));
        }
        cases.push(
            parse_csv(&text)
                .ok_or_else(|| failed(format!("unexpected output: {}", text.trim())))?,
        );
    }
    Ok(cases)
}

/// Columns: test, rps, then latency in ms: avg, min, p50, p95, p99, max. Each name is quoted, as in
/// `"p50_latency_ms"`.
fn parse_csv(text: &str) -> Option<(String, BTreeMap<String, f64>)> {
    let table = &text[text.find("\"test\"")?..];
    let mut reader = csv::Reader::from_reader(table.as_bytes());
    let head = reader.headers().ok()?.clone();
    let row = reader.records().next()?.ok()?;
    let cell = |name: &str| {
        let at = head.iter().position(|cell| cell == name)?;
        row.get(at)?.parse::<f64>().ok()
    };
    let values = [
        ("ops_per_second", cell("rps")?),
        ("mean_ns", cell("avg_latency_ms")? * 1e6),
        ("p50_ns", cell("p50_latency_ms")? * 1e6),
        ("p99_ns", cell("p99_latency_ms")? * 1e6),
    ];
    Some((
        row.get(0)?.to_owned(),
        values.map(|(name, value)| (name.to_owned(), value)).into(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_csv_reads_redis_benchmark() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\
                    \"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
                    \"SET\",\"1000.50\",\"0.5\",\"0.1\",\"0.4\",\"0.6\",\"0.7\",\"1.0\"\n";
        let (case, values) = parse_csv(text).expect("well-formed");
        assert_eq!(
            (case.as_str(), values["ops_per_second"], values["p99_ns"]),
            ("SET", 1000.5, 0.7e6)
        );
        assert!(parse_csv("nonsense").is_none());
    }
}
