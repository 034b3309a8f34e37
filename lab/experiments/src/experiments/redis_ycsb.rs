//! YCSB workloads A, B, C and F on redis at half of its memory: throughput, tails, and a check of
//! every value.
//!
//! For each round and rig: start the server, load, run A, B, C, F, read all values back and
//! compare, shut down. YCSB's data integrity mode and the binding's envelope verify the reads. The
//! client runs outside the limit.

use super::redis_server::{Server, installed};
use super::{Lab, check_total, or_skip, progress, skip};
use crate::results::{Better, Results, Sample, Target, median};
use crate::rig::{Finished, Plain, Rig, RigError, SwapFile, TierChoice, Zram};
use anyhow::{Context, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use undercroft_base::Bytes;

const FIELDS: u32 = 10;
const FIELD_BYTES: u32 = 100;
/// (name, read, update, read-modify-write): the proportions of YCSB's own files. All are zipfian.
type Workload = (&'static str, &'static str, &'static str, &'static str);
const WORKLOADS: [Workload; 4] = [
    ("A", "0.5", "0.5", "0"),
    ("B", "0.95", "0.05", "0"),
    ("C", "1", "0", "0"),
    ("F", "0.5", "0", "0.5"),
];

struct Client {
    jar: PathBuf,
    records: u64,
    operations: u64,
    threads: u64,
    /// The workloads that a trial run does after the load.
    trial: &'static [Workload],
    out: PathBuf,
}

/// A line of YCSB's JSON array export.
#[derive(Deserialize)]
struct Measurement {
    metric: String,
    measurement: String,
    value: f64,
}

/// A comparison of rigs.
struct Study {
    name: &'static str,
    /// The footprint is this many times the DRAM.
    times: u64,
    rigs: fn(&Lab, u64) -> Vec<Box<dyn Rig>>,
    compare: fn(&mut Results),
}

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let study = Study {
        name: "redis-ycsb",
        times: 2,
        rigs,
        compare,
    };
    study.run(lab, results)
}

/// Three tiers, the second an emulated one, beside two.
pub(crate) fn three_tiers(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let study = Study {
        name: "three-tiers",
        times: 4,
        rigs: two_and_three_tiers,
        compare: |results| {
            let target = Target::new(1.0, Some(1.3));
            for (workload, ..) in WORKLOADS {
                let pair = ("three tiers", "two tiers");
                let (higher, lower) = (Better::Higher, Better::Lower);
                results.compare(workload, "ops_per_second", pair, higher, Some(target));
                results.compare(workload, "read_p99_ns", pair, lower, None);
            }
        },
    };
    study.run(lab, results)
}

impl Study {
    fn run(&self, lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
        let name = self.name;
        let Some(client) = client(lab, results)? else {
            return Ok(());
        };
        let rounds = lab.rounds(1, 3);
        progress(&format!("{name}: footprint without a limit"));
        let (_, outcome) = one_run(&client, &Plain, Bytes(0), client.trial)?;
        let footprint = outcome.memory.cgroup_peak_bytes;
        if footprint == 0 {
            let why = "no memory cgroup to measure the footprint with; run as root";
            skip(results, &format!("{name}: {why}"));
            return Ok(());
        }
        // The server of the small size needs a few MiB for itself; otherwise the kernel kills it
        // under zram.
        let budget = Bytes((footprint / self.times + lab.pick(4 << 20, 0)) & !0xfff);
        results.parameters = BTreeMap::from([
            ("records".into(), client.records.to_string()),
            (
                "operations_per_workload".into(),
                client.operations.to_string(),
            ),
            ("client_threads".into(), client.threads.to_string()),
            ("footprint_bytes".into(), footprint.to_string()),
            ("total_dram_budget_bytes".into(), budget.0.to_string()),
            ("rounds".into(), rounds.to_string()),
            (
                "value".into(),
                format!("{FIELDS} fields of {FIELD_BYTES} bytes (dataintegrity) in JSON envelopes"),
            ),
        ]);
        let rigs = (self.rigs)(lab, footprint);
        let mut limits = Limits::new();
        for rig in &rigs {
            progress(&format!(
                "{name}: limit of {} for {budget} of DRAM",
                rig.name()
            ));
            let limit = fit(&client, rig.as_ref(), budget, results);
            if let Some(limit) = or_skip(results, limit)? {
                limits.insert(rig.name(), limit);
            }
        }
        for round in 0..rounds {
            let told = format!("{name}: round {} of {rounds}", round + 1);
            one_round(&client, &rigs, &limits, (round, &told), results)?;
        }
        for rig in &rigs {
            check_total(results, rig.name(), budget);
        }
        (self.compare)(results);
        Ok(())
    }
}

type Limits = BTreeMap<&'static str, Bytes>;

/// The client. `None`, with the reason in `results`, if something that it needs is missing.
fn client(lab: &Lab, results: &mut Results) -> anyhow::Result<Option<Client>> {
    for (program, package) in [
        ("redis-server", "redis-server"),
        ("java", "default-jre-headless"),
    ] {
        if !(installed(program) || program == "java" && java_installed()) {
            let why = format!("redis-ycsb: {program} is missing; install {package}");
            skip(results, &why);
            return Ok(None);
        }
    }
    let jar = match find_or_build_jar() {
        Ok(jar) => jar,
        Err(error) => {
            skip(results, &format!("redis-ycsb: {error:#}"));
            return Ok(None);
        }
    };
    let out = lab.options.out.canonicalize();
    let given = lab.options.footprint_mib;
    Ok(Some(Client {
        jar,
        records: given.map_or(lab.pick(2_000, 100_000), |mib| mib * 1024 / 5),
        operations: lab.pick(2_000, 200_000),
        threads: 2,
        trial: lab.pick(&WORKLOADS[..0], &WORKLOADS[..1]),
        out: out.context("find the output directory")?,
    }))
}

fn rigs(lab: &Lab, footprint: u64) -> Vec<Box<dyn Rig>> {
    let swap = Bytes(footprint * 2 + (64 << 20));
    let directory = lab.swap_directory();
    let mut rigs: Vec<Box<dyn Rig>> = vec![Box::new(Plain)];
    rigs.extend(lab.undercroft(TierChoice::RamThenFile(directory.clone()), swap));
    rigs.push(Box::new(Zram { swap }));
    rigs.push(Box::new(SwapFile { swap, directory }));
    rigs
}

/// A compressed pool over a file, and the same with memory between them that is emulated: as fast
/// as an Optane module, a quarter of the footprint. That stands for other memory, so no budget
/// counts it.
fn two_and_three_tiers(lab: &Lab, footprint: u64) -> Vec<Box<dyn Rig>> {
    let swap = Bytes(footprint * 2 + (64 << 20));
    let place = |folder: PathBuf, kind: &str| {
        let number = std::process::id();
        let path = folder.join(format!("undercroft-lab-{number}.{kind}"));
        path.display().to_string()
    };
    let file = place(lab.swap_directory(), "tier");
    let file = format!("file:{file},size={}", swap.0);
    // Not on the disk of the file, which it must not write to.
    let nvm = place("/dev/shm".into(), "nvm");
    let size = (footprint / 4) & !0xf_ffff;
    let between = format!("nvm:{nvm},size={size},shape=optane-dimm");
    let ram = || "ram".to_owned();
    let two = TierChoice::Named("two tiers", vec![ram(), file.clone()]);
    let three = TierChoice::Named("three tiers", vec![ram(), between, file]);
    [two, three]
        .into_iter()
        .filter_map(|tiers| lab.undercroft(tiers, swap))
        .collect()
}

/// Runs a server session under each rig. `round`: its number, and its name for the user.
fn one_round(
    client: &Client,
    rigs: &[Box<dyn Rig>],
    limits: &Limits,
    round: (usize, &str),
    results: &mut Results,
) -> anyhow::Result<()> {
    for rig in rigs {
        let name = rig.name();
        let Some(limit) = limits.get(name).copied() else {
            continue;
        };
        progress(&format!("{}, {name}", round.1));
        let done = one_run(client, rig.as_ref(), limit, &WORKLOADS);
        let Some((cases, outcome)) = or_skip(results, done)? else {
            continue;
        };
        for (case, values) in cases {
            results.samples.push(Sample {
                round: round.0,
                rig: name.to_owned(),
                case: case.to_owned(),
                values,
                memory: outcome.memory.clone(),
            });
        }
        results.keep(name, name.to_owned(), outcome.facts, outcome.report);
    }
    Ok(())
}

fn compare(results: &mut Results) {
    for baseline in ["zram", "swapfile", "plain"] {
        for (workload, ..) in WORKLOADS {
            let judged = matches!(workload, "A" | "C");
            let speed = match baseline {
                "zram" => Some(Target::new(1.0, Some(1.25))),
                "swapfile" => Some(Target::new(1.5, Some(3.0))),
                _ => None,
            };
            let tail = (baseline != "plain").then_some(Target::new(0.7, Some(0.3)));
            let pair = ("undercroft", baseline);
            results.compare(
                workload,
                "ops_per_second",
                pair,
                Better::Higher,
                speed.filter(|_| judged),
            );
            results.compare(
                workload,
                "read_p99_ns",
                pair,
                Better::Lower,
                tail.filter(|_| judged),
            );
            results.compare(workload, "update_p99_ns", pair, Better::Lower, None);
        }
    }
    for (workload, ..) in WORKLOADS {
        results.compare(
            workload,
            "ops_per_second",
            ("swapfile", "zram"),
            Better::Higher,
            None,
        );
        results.compare(
            workload,
            "read_p99_ns",
            ("swapfile", "zram"),
            Better::Lower,
            None,
        );
    }
    let missing: Vec<_> = results
        .rig_names()
        .into_iter()
        .filter(|rig| median(&results.values(rig, "A", "ops_per_second")).is_nan())
        .collect();
    missing.iter().for_each(|rig| {
        results
            .notes
            .push(format!("{rig}: no value for workload A"))
    });
}

/// The limit at which resident plus compressed memory is the budget, found by trial runs (load and
/// workload A).
fn fit(
    client: &Client,
    rig: &dyn Rig,
    budget: Bytes,
    results: &mut Results,
) -> Result<Bytes, RigError> {
    if !rig.stores_outside_limit() {
        return Ok(budget);
    }
    let found = crate::rig::calibrate_with(rig, budget, |limit| {
        Ok(one_run(client, rig, limit, client.trial)?.1.memory)
    })?;
    let limit = Bytes(found.limit_bytes);
    results.calibrations.insert(rig.name().to_owned(), found);
    Ok(limit)
}

type Cases = Vec<(String, BTreeMap<String, f64>)>;

/// Runs a server session: load, the workloads, the check of every value.
fn one_run(
    client: &Client,
    rig: &dyn Rig,
    limit: Bytes,
    workloads: &[Workload],
) -> Result<(Cases, Finished), RigError> {
    let server = Server::start(
        rig,
        limit,
        &client.out.join(format!("redis-{}.log", rig.name())),
    )?;
    let mut cases = Cases::new();
    let steps = || -> Result<Cases, RigError> {
        cases.push((
            "load".to_owned(),
            client.ycsb(server.port, &["-load"], &[])?,
        ));
        for (name, read, update, modify) in workloads {
            let proportions = [
                ("readproportion", *read),
                ("updateproportion", *update),
                ("readmodifywriteproportion", *modify),
            ];
            cases.push((
                (*name).to_owned(),
                client.ycsb(server.port, &["-t"], &proportions)?,
            ));
        }
        if !workloads.is_empty() {
            client.verify(server.port)?;
        }
        Ok(cases)
    };
    let done = steps();
    // The server's result first: if the server was killed, that is why the client failed.
    let outcome = server.shut_down(rig.name())?;
    Ok((done?, outcome))
}

impl Client {
    /// Runs YCSB once. Returns its throughput and percentiles. Errors: a failed run, or any failed
    /// or wrong operation.
    fn ycsb(
        &self,
        port: u16,
        mode: &[&str],
        more: &[(&str, &str)],
    ) -> Result<BTreeMap<String, f64>, RigError> {
        let export = self.out.join("ycsb.json");
        let what = format!("ycsb {} {more:?}", mode.join(" "));
        let failed = |how: String| RigError::CommandFailed {
            what: what.clone(),
            how,
        };
        let mut command = Command::new("java");
        command
            .args(["-Xmx512m", "-XX:+UseSerialGC", "-jar"])
            .arg(&self.jar)
            .args(mode);
        command.args([
            "-db",
            "undercroft.ycsb.RedisClient",
            "-threads",
            &self.threads.to_string(),
        ]);
        let own = [
            ("workload", "site.ycsb.workloads.CoreWorkload".to_owned()),
            ("recordcount", self.records.to_string()),
            ("operationcount", self.operations.to_string()),
            ("requestdistribution", "zipfian".to_owned()),
            ("scanproportion", "0".to_owned()),
            ("insertproportion", "0".to_owned()),
            ("dataintegrity", "true".to_owned()),
            ("fieldcount", FIELDS.to_string()),
            ("fieldlength", FIELD_BYTES.to_string()),
            ("measurementtype", "hdrhistogram".to_owned()),
            ("hdrhistogram.percentiles", "50,95,99,99.9".to_owned()),
            (
                "exporter",
                "site.ycsb.measurements.exporter.JSONArrayMeasurementsExporter".to_owned(),
            ),
            ("exportfile", export.display().to_string()),
            ("redis.port", port.to_string()),
        ];
        let more = more
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()));
        for (name, value) in own.into_iter().chain(more) {
            command.args(["-p", &format!("{name}={value}")]);
        }
        let output = command.stdin(Stdio::null()).stdout(Stdio::null()).output();
        let output = output.map_err(RigError::failed("start java"))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() || errors.contains("WRONG BYTES") {
            let last = errors.lines().rev().take(3).collect::<Vec<_>>().join(" | ");
            return Err(failed(format!("{}: {last}", output.status)));
        }
        let text =
            std::fs::read_to_string(&export).map_err(RigError::failed("read YCSB's export"))?;
        let measured: Vec<Measurement> =
            serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
        digest(&measured).map_err(failed)
    }

    /// Reads every value back. Errors: a missing or wrong one.
    fn verify(&self, port: u16) -> Result<(), RigError> {
        let numbers = [
            u64::from(port),
            self.records,
            u64::from(FIELDS),
            u64::from(FIELD_BYTES),
        ];
        let mut command = Command::new("java");
        command
            .arg("-jar")
            .arg(&self.jar)
            .arg("verify")
            .args(numbers.map(|number| number.to_string()));
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(RigError::failed("start java"))?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let what = "check every value".to_owned();
        Err(RigError::CommandFailed {
            what,
            how: format!("{} {}", output.status, text.trim()),
        })
    }
}

/// Translates YCSB's metric names into ours. Refuses if an operation failed or a verification did
/// not say OK.
fn digest(measured: &[Measurement]) -> Result<BTreeMap<String, f64>, String> {
    let mut values = BTreeMap::new();
    for Measurement {
        metric,
        measurement,
        value,
    } in measured
    {
        if let Some(status) = measurement.strip_prefix("Return=")
            && status != "OK"
            && *value > 0.0
        {
            return Err(format!("{value} operations of {metric} returned {status}"));
        }
        if metric.ends_with("FAILED") {
            return Err(format!("operations failed: {metric}"));
        }
        let name = metric.to_lowercase().replace('-', "_");
        let (name, value) = match (name.as_str(), measurement.as_str()) {
            ("overall", "Throughput(ops/sec)") => ("ops_per_second".to_owned(), *value),
            ("read" | "update" | "insert" | "read_modify_write", "50thPercentileLatency(us)") => {
                (format!("{name}_p50_ns"), value * 1e3)
            }
            ("read" | "update" | "insert" | "read_modify_write", "99thPercentileLatency(us)") => {
                (format!("{name}_p99_ns"), value * 1e3)
            }
            ("read" | "update" | "insert" | "read_modify_write", "AverageLatency(us)") => {
                (format!("{name}_mean_ns"), value * 1e3)
            }
            _ => continue,
        };
        values.insert(name, value);
    }
    if values.contains_key("ops_per_second") {
        Ok(values)
    } else {
        Err("YCSB exported no throughput".to_owned())
    }
}

fn java_installed() -> bool {
    let mut command = Command::new("java");
    command
        .arg("-version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The client's jar, built by Maven if it does not exist yet. Its source is searched for in
/// `bench/ycsb` of the current directory and of those above. Errors say what to install.
fn find_or_build_jar() -> anyhow::Result<PathBuf> {
    let here = std::env::current_dir().context("find the current directory")?;
    let mut places = here.ancestors().map(|above| above.join("bench/ycsb"));
    let project = places.find(|project| project.join("pom.xml").exists());
    let project = project.context("bench/ycsb is not here; run inside the source tree")?;
    let jar = project.join("target/undercroft-ycsb.jar");
    if !jar.exists() {
        progress("redis-ycsb: building the client with Maven");
        let mut maven = Command::new("mvn");
        maven.args(["-q", "-B", "package"]).current_dir(&project);
        let status = maven
            .status()
            .context("mvn cannot be started; install maven")?;
        ensure!(
            status.success(),
            "`mvn -q package` in bench/ycsb failed: {status}"
        );
    }
    Ok(jar)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(metric: &str, measurement: &str, value: f64) -> Measurement {
        Measurement {
            metric: metric.into(),
            measurement: measurement.into(),
            value,
        }
    }

    #[test]
    fn digest_refuses_failed_and_wrong_operations() {
        let good = || {
            vec![
                line("OVERALL", "Throughput(ops/sec)", 10.0),
                line("READ", "99thPercentileLatency(us)", 3.0),
            ]
        };
        assert_eq!(
            digest(&good()).expect("good").get("read_p99_ns"),
            Some(&3000.0)
        );
        for bad in [
            line("VERIFY", "Return=UNEXPECTED_STATE", 1.0),
            line("READ-FAILED", "Operations", 1.0),
        ] {
            let mut lines = good();
            lines.push(bad);
            assert!(digest(&lines).is_err());
        }
        assert!(digest(&[]).is_err());
    }
}
