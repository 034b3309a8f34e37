//! The demo's second program: GNU sort in parts of its memory, with the defaults and with the
//! kernel's swap.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use undercroft_base::Bytes;
use undercroft_rig::script::{self, SORT_COMMAND, SORT_LINES, SORT_PREPARE};
use undercroft_rig::{Attempt, CommandLine, Plain, Rig, RigError, attempt, calibrate_with};
use undercroft_terminal::{Failure, status};

use super::Narrator;
use crate::args::DemoArgs;

/// Limits, in percent of the peak without one.
pub(super) const SHARES: [u64; 3] = [75, 50, 35];

/// The ways to sort.
const WAYS: [&str; 3] = [
    "undercroft",
    "kernel zram, the same DRAM in all",
    "kernel swap file",
];

/// A sort may take this multiple of its time without a limit, and at least [`PATIENCE`].
const TIMES_MAX: u32 = 12;
const PATIENCE: Duration = Duration::from_secs(30);

/// Without a limit it may take this long.
const UNLIMITED_MAX: Duration = Duration::from_secs(600);

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

/// A setting and its times.
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
    let folder = directory.join("sort");
    std::fs::create_dir_all(&folder).map_err(|error| failed(&error.to_string()))?;
    let made = script::prepare(SORT_PREPARE, SORT_LINES, &folder);
    if !made.map_err(|error| failed(&error.to_string()))? {
        return Err(failed("its input cannot be made: python3 is missing"));
    }
    let command = script::command(SORT_COMMAND, SORT_LINES, &folder);
    let plain = attempt(&Plain, Bytes(0), &command, UNLIMITED_MAX);
    let plain = plain.map_err(|error| failed(&error.to_string()))?;
    if plain.stopped {
        return Err(failed("it does not end in ten minutes without a limit"));
    }
    let bench = Bench {
        rounds: args.rounds,
        most: PATIENCE.max(plain.outcome.wall * TIMES_MAX),
        expected: plain.outcome.lines,
        command,
    };
    let rigs = super::rigs(args, directory, Bytes(plain.peak.0 * 3 + (64 << 20)))?;
    let row = |(name, rig): (&'static str, &Option<Box<dyn Rig>>)| {
        let mut seconds = [None; 3];
        for (share, seconds) in SHARES.iter().zip(&mut seconds) {
            let limit = Bytes((plain.peak.0 * share / 100) & !0xfff);
            if let Some(rig) = rig {
                *seconds = bench.median(rig.as_ref(), limit)?;
            }
        }
        Ok(SortRow { name, seconds })
    };
    Ok(Sorted {
        unlimited_seconds: Some(plain.outcome.wall.as_secs_f64()),
        limits_percent: SHARES,
        rows: (WAYS.into_iter().zip(&rigs).map(row)).collect::<Result<_, Failure>>()?,
    })
}

fn failed(why: &str) -> Failure {
    Failure::new(
        status::FAILED,
        "the sort cannot be measured",
        why,
        "leave --sort out",
    )
}

/// The sort, and what each run of it is judged by.
struct Bench {
    rounds: u16,
    /// A run may take this long.
    most: Duration,
    /// The lines that it prints.
    expected: Vec<String>,
    command: CommandLine,
}

impl Bench {
    /// The median time on `rig` in `limit`, its compressed pages included. `None` if it cannot run
    /// here in that memory, or is not done in time.
    ///
    /// Errors: it printed something else.
    fn median(&self, rig: &dyn Rig, limit: Bytes) -> Result<Option<f64>, Failure> {
        let Some(own) = usable(self.own_limit(rig, limit))? else {
            return Ok(None);
        };
        let mut seconds = Vec::new();
        for _ in 0..self.rounds {
            let Some(ran) = usable(self.attempt(rig, own))? else {
                continue;
            };
            if ran.stopped {
                continue;
            }
            if ran.outcome.lines != self.expected {
                return Err(failed(&format!("another output on {}", rig.name())));
            }
            seconds.push(ran.outcome.wall.as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds.get(seconds.len() / 2).copied())
    }

    fn attempt(&self, rig: &dyn Rig, limit: Bytes) -> Result<Attempt, RigError> {
        attempt(rig, limit, &self.command, self.most)
    }

    /// The rig's own limit with which it uses `limit` in all.
    fn own_limit(&self, rig: &dyn Rig, limit: Bytes) -> Result<Bytes, RigError> {
        if !rig.stores_outside_limit() {
            return Ok(limit);
        }
        let probe = |limit| Ok(self.attempt(rig, limit)?.outcome.memory);
        Ok(Bytes(calibrate_with(rig, limit, probe)?.limit_bytes))
    }
}

/// `None` where the machine does not allow it, or where the kernel cannot keep the limit.
fn usable<T>(tried: Result<T, RigError>) -> Result<Option<T>, Failure> {
    match tried {
        Ok(value) => Ok(Some(value)),
        Err(
            RigError::Unavailable { .. }
            | RigError::OtherSwap(_)
            | RigError::BudgetTooSmall { .. }
            | RigError::Killed { .. },
        ) => Ok(None),
        Err(error) => Err(failed(&error.to_string())),
    }
}
