//! `undercroft tiers --measure`: what tiers take, as a table and as JSON.

use serde::Serialize;
use undercroft_base::TierKind;
use undercroft_manager::report::SCHEMA_VERSION;
use undercroft_tier::measure::{Measured, Times, measure};
use undercroft_tier::spec::TierSpec;

use crate::failure::{Failure, status};
use crate::show::{json, line};

/// Times of one operation, as JSON has them.
#[derive(Debug, Serialize)]
struct Seconds {
    p50: f64,
    p99: f64,
}

impl Seconds {
    fn of(times: Times) -> Seconds {
        Seconds {
            p50: times.p50.seconds(),
            p99: times.p99.seconds(),
        }
    }
}

/// One tier, as JSON has it.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    kind: &'static str,
    emulated: bool,
    capacity_bytes: u64,
    read_seconds: Seconds,
    write_seconds: Seconds,
    free_seconds: Seconds,
    read_bytes_per_second: f64,
    write_bytes_per_second: f64,
}

impl Row {
    fn of(found: &Measured) -> Row {
        Row {
            name: found.name.clone(),
            kind: match found.kind {
                TierKind::Ram => "ram",
                TierKind::Nvm => "nvm",
                TierKind::File => "file",
                TierKind::Remote => "redis",
            },
            emulated: found.emulated,
            capacity_bytes: found.capacity.0,
            read_seconds: Seconds::of(found.read),
            write_seconds: Seconds::of(found.write),
            free_seconds: Seconds::of(found.free),
            read_bytes_per_second: found.read_bytes_per_second,
            write_bytes_per_second: found.write_bytes_per_second,
        }
    }
}

/// `undercroft tiers --measure SPEC...`: one after the other.
///
/// Errors: a tier cannot be opened, or loses a page.
pub(crate) fn tiers(specs: &[TierSpec], as_json: bool) -> Result<u8, Failure> {
    let mut all = Vec::new();
    for spec in specs {
        all.push(measure(spec).map_err(|error| {
            Failure::new(
                status::FAILED,
                format!("cannot measure the tier {spec}"),
                error.to_string(),
                "`undercroft tiers` lists kinds and options",
            )
        })?);
    }
    if as_json {
        #[derive(Serialize)]
        struct Listed {
            schema_version: u32,
            measured: Vec<Row>,
        }
        json(&Listed {
            schema_version: SCHEMA_VERSION,
            measured: all.iter().map(Row::of).collect(),
        })?;
        return Ok(0);
    }
    line(&format!(
        "{:>10}  {:>19}  {:>19}  {:>19}  {:>10}  {:>10}",
        "capacity",
        "read p50 / p99",
        "write p50 / p99",
        "free p50 / p99",
        "read MB/s",
        "write MB/s"
    ))?;
    for found in &all {
        let mark = if found.emulated { " (emulated)" } else { "" };
        line(&format!("{}{mark}", found.name))?;
        line(&format!(
            "{:>10}  {:>19}  {:>19}  {:>19}  {:>10.0}  {:>10.0}",
            found.capacity.to_string(),
            pair(found.read),
            pair(found.write),
            pair(found.free),
            found.read_bytes_per_second / 1e6,
            found.write_bytes_per_second / 1e6
        ))?;
    }
    Ok(0)
}

fn pair(times: Times) -> String {
    format!("{} / {}", times.p50, times.p99)
}
