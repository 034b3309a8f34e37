//! The demo's second program: GNU sort in parts of its memory, with the defaults and with the
//! kernel's swap. It is the experiment `programs` with this one program.

use std::path::Path;

use serde::Serialize;
use undercroft_lab::RunOptions;

use super::Narrator;
use crate::args::DemoArgs;
use crate::failure::{Failure, status};

/// Limits, in percent of the peak without one.
pub(super) const SHARES: [u64; 3] = [75, 50, 35];

/// Seconds of each setting, the medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sorted {
    /// Without a limit.
    pub unlimited_seconds: Option<f64>,
    /// In percent of the memory used without a limit.
    pub limits_percent: [u64; 3],
    /// The settings.
    pub rows: Vec<SortRow>,
}

/// One setting.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SortRow {
    /// As printed.
    pub name: &'static str,
    /// At each limit; `None` if it was not measured here, or did not end in time.
    pub seconds: [Option<f64>; 3],
}

/// Sorts without a limit, and with parts of that memory in each way.
pub(super) fn measure(
    args: &DemoArgs,
    directory: &Path,
    narrator: &Narrator,
) -> Result<Sorted, Failure> {
    narrator.say("sort of random lines, in parts of its memory");
    let failed = |why: String| {
        Failure::new(
            status::FAILED,
            "the sort cannot be measured",
            why,
            "leave it out with --no-sort",
        )
    };
    let binary = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let settings: &[&str] = if args.no_kernel_swap {
        &["undercroft"]
    } else {
        &["undercroft", "swapfile", "zram"]
    };
    let options = RunOptions {
        out: directory.join("sort"),
        touch_command: Some(vec![binary.clone().into(), "lab-touch".into()]),
        undercroft_binary: Some(binary),
        rounds: Some(usize::from(args.rounds)),
        only: vec!["sort".to_owned()],
        settings: settings.iter().map(|name| (*name).to_owned()).collect(),
        ..RunOptions::default()
    };
    let results =
        undercroft_lab::run("programs", &options).map_err(|error| failed(format!("{error:#}")))?;
    let median = |rig: &str, share: u64| {
        let case = format!("sort {share} %");
        let samples = results.samples.iter();
        let mut seconds: Vec<f64> = samples
            .filter(|sample| sample.rig == rig && sample.case == case)
            .filter(|sample| !sample.values.contains_key("stopped"))
            .filter_map(|sample| sample.values.get("wall_seconds").copied())
            .collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    };
    let row = |name, rig| SortRow {
        name,
        seconds: SHARES.map(|share| median(rig, share)),
    };
    Ok(Sorted {
        unlimited_seconds: median("bound", SHARES[0]),
        limits_percent: SHARES,
        rows: vec![
            row("undercroft", "undercroft"),
            row("kernel zram, the same DRAM in all", "zram"),
            row("kernel swap file", "swapfile"),
        ],
    })
}
