//! Programs that fit below their limit: run time under undercroft against a plain run, in pairs.

use super::redis_server::{Server, installed};
use super::{Lab, or_skip, progress, redis_benchmark, skip};
use crate::results::{Better, Results, Sample, Target};
use crate::rig::{CommandLine, Finished, Plain, Rig, RigError, Stdout, TierChoice};
use anyhow::Context;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Instant;
use undercroft_base::Bytes;

pub(crate) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let rounds = lab.rounds(1, 9);
    let limit = Bytes(2 << 30);
    let compute_mib = lab.pick(4, 128);
    let requests = lab.pick(5_000, 300_000);
    results.parameters = BTreeMap::from([
        ("limit_bytes".into(), limit.0.to_string()),
        ("rounds".into(), rounds.to_string()),
        ("compute_mib".into(), compute_mib.to_string()),
        ("redis_requests".into(), requests.to_string()),
    ]);
    let mut rigs: Vec<Box<dyn Rig>> = vec![Box::new(Plain)];
    rigs.extend(lab.undercroft(TierChoice::Ram, limit));

    let source = lab.options.out.join("below-limit.c");
    let programs = programs(lab, compute_mib, &source, results)?;
    let redis = installed("redis-server") && installed("redis-benchmark");
    if !redis {
        skip(results, "below-limit: redis-server is missing");
    }
    for round in 0..rounds {
        let told = format!("below-limit: round {} of {rounds}", round + 1);
        for (case, command) in &programs {
            for rig in &rigs {
                progress(&format!("{told}, {case}, {}", rig.name()));
                let done = one_program(rig.as_ref(), limit, command);
                if let Some(outcome) = or_skip(results, done)? {
                    let seconds = outcome.wall.as_secs_f64();
                    record(results, round, rig.as_ref(), case, seconds, outcome);
                }
            }
        }
        for rig in rigs.iter().filter(|_| redis) {
            let case = "redis-benchmark";
            progress(&format!("{told}, {case}, {}", rig.name()));
            let log = lab.options.out.join("redis-below-limit.log");
            let done = one_redis(rig.as_ref(), limit, &log, requests);
            if let Some((seconds, outcome)) = or_skip(results, done)? {
                record(results, round, rig.as_ref(), case, seconds, outcome);
            }
        }
    }
    for case in ["compute", "gcc", "redis-benchmark"] {
        let target = Some(Target::new(1.02, Some(1.0)));
        results.compare(
            case,
            "wall_seconds",
            ("undercroft-ram", "plain"),
            Better::Lower,
            target,
        );
    }
    // The compiler's input is large, and the next run makes it again.
    let _ = std::fs::remove_file(source);
    Ok(())
}

/// The programs other than redis: (case, command). `source`: where the compiler's input goes.
fn programs(
    lab: &Lab,
    compute_mib: u64,
    source: &Path,
    results: &mut Results,
) -> anyhow::Result<Vec<(&'static str, CommandLine)>> {
    let footprint = compute_mib.to_string();
    let compute = lab.touch([
        "--mode",
        "compute",
        "--rounds",
        "3",
        "--footprint-mib",
        &footprint,
    ]);
    let mut programs = vec![("compute", compute)];
    if !installed("gcc") {
        skip(results, "below-limit: gcc is missing");
        return Ok(programs);
    }
    write_source(source, lab.pick(50, 1_500))?;
    let words = [
        "gcc".into(),
        "-O2".into(),
        "-c".into(),
        source.into(),
        "-o".into(),
        "/dev/null".into(),
    ];
    let gcc = CommandLine {
        words: words.into(),
        stdout: Stdout::Lines,
    };
    programs.push(("gcc", gcc));
    Ok(programs)
}

fn record(
    results: &mut Results,
    round: usize,
    rig: &dyn Rig,
    case: &str,
    seconds: f64,
    outcome: Finished,
) {
    results.samples.push(Sample {
        round,
        rig: rig.name().to_owned(),
        case: case.to_owned(),
        values: BTreeMap::from([("wall_seconds".to_owned(), seconds)]),
        memory: outcome.memory,
    });
    results.keep(
        rig.name(),
        format!("{} {case}", rig.name()),
        outcome.facts,
        outcome.report,
    );
}

fn one_program(rig: &dyn Rig, limit: Bytes, command: &CommandLine) -> Result<Finished, RigError> {
    rig.set_up(limit)?
        .spawn(command)?
        .finish()?
        .successful(rig.name(), "program below its limit")
}

/// The benchmark's own time. Starting and stopping the server is not part of it.
fn one_redis(
    rig: &dyn Rig,
    limit: Bytes,
    log: &Path,
    requests: u64,
) -> Result<(f64, Finished), RigError> {
    let server = Server::start(rig, limit, log)?;
    let began = Instant::now();
    let done = redis_benchmark::benchmark(&server, 50_000, requests);
    let seconds = began.elapsed().as_secs_f64();
    let outcome = server.shut_down(rig.name())?;
    done.map(|_| (seconds, outcome))
}

/// A C file of `functions` functions with loops and calls: enough to keep the optimiser busy.
fn write_source(path: &Path, functions: usize) -> anyhow::Result<()> {
    let mut text = String::new();
    for number in 0..functions {
        let before = number.saturating_sub(1);
        let call = if number == 0 {
            "x".to_owned()
        } else {
            format!("f{before}(x ^ i)")
        };
        writeln!(
            text,
            "__attribute__((noinline)) unsigned f{number}(unsigned x) {{ unsigned s = {number}; for \
             (unsigned i = 0; i < (x & 15); i++) {{ s += (x * {}u) >> (i & 7); if (s & 1) s ^= {call}; }} return s; }}",
            number * 2 + 3
        )
        .context("format C source")?;
    }
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
