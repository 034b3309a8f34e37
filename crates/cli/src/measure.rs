//! `undercroft tiers --measure`: what tiers take, as a table and as JSON, kept for later runs.

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_proto::report::SCHEMA_VERSION;
use undercroft_tier::measure::measure;
use undercroft_tier::profile::{Profile, Profiles, Times};
use undercroft_tier::spec::TierSpec;

use crate::show::{json, line};
use undercroft_terminal::{Failure, status};

/// `undercroft tiers --measure SPEC...`: one after the other.
///
/// Errors: a tier cannot be opened, or loses a page; what was measured cannot be kept.
pub(crate) fn tiers(specs: &[TierSpec], as_json: bool) -> Result<u8, Failure> {
    let unkept = |error: &dyn std::fmt::Display| {
        Failure::new(
            status::FAILED,
            "cannot keep what is measured",
            error.to_string(),
            "set XDG_STATE_HOME to a folder that you may write",
        )
    };
    let profiles = Profiles::of_user().map_err(|error| unkept(&error))?;
    let mut all = Vec::new();
    for spec in specs {
        let found = measure(spec).map_err(|error| {
            Failure::new(
                status::FAILED,
                format!("cannot measure the tier {spec}"),
                error.to_string(),
                "`undercroft tiers` lists kinds and options",
            )
        })?;
        profiles
            .keep(spec, &found)
            .map_err(|error| unkept(&error))?;
        all.push(found);
    }
    if as_json {
        #[derive(Serialize)]
        struct Listed {
            schema_version: u32,
            measured: Vec<Profile>,
        }
        json(&Listed {
            schema_version: SCHEMA_VERSION,
            measured: all,
        })?;
        return Ok(0);
    }
    table(&all)?;
    let path = profiles.path();
    line(&format!(
        "\nKept in {} for later runs on these devices.",
        path.display()
    ))?;
    Ok(0)
}

/// Prints profiles, two lines each.
///
/// Errors: they cannot be written.
pub(crate) fn table(profiles: &[Profile]) -> Result<(), Failure> {
    line(&format!(
        "{:>10}  {:>19}  {:>19}  {:>19}  {:>10}  {:>10}  {:>8}",
        "capacity",
        "read p50 / p99",
        "write p50 / p99",
        "free p50 / p99",
        "read MB/s",
        "write MB/s",
        "channels"
    ))?;
    for found in profiles {
        let mark = if found.emulated { " (emulated)" } else { "" };
        line(&format!("{}{mark}", found.name))?;
        line(&format!(
            "{:>10}  {:>19}  {:>19}  {:>19}  {:>10.0}  {:>10.0}  {:>8}",
            Bytes(found.capacity_bytes).to_string(),
            pair(found.read_seconds),
            pair(found.write_seconds),
            pair(found.free_seconds),
            found.read_bytes_per_second / 1e6,
            found.write_bytes_per_second / 1e6,
            channels(found)
        ))?;
    }
    Ok(())
}

/// A line of what a profile says of a tier of a run.
pub(crate) fn words(of: &Profile) -> String {
    let mark = if of.emulated { ", emulated" } else { "" };
    format!(
        "measured as {}{mark}: a read {}, a write {}; in sequence {:.0} MB/s read, {:.0} MB/s written; \
         channels: {}",
        of.name,
        pair(of.read_seconds),
        pair(of.write_seconds),
        of.read_bytes_per_second / 1e6,
        of.write_bytes_per_second / 1e6,
        channels(of)
    )
}

fn channels(of: &Profile) -> String {
    of.channels
        .map_or("-".to_owned(), |count| count.to_string())
}

fn pair(times: Times) -> String {
    let [p50, p99] = [times.p50, times.p99].map(|seconds| Nanos((seconds * 1e9) as u64));
    format!("{p50} / {p99}")
}
