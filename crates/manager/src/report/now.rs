//! What `status --json` gives: one running client at one moment.

use std::fmt;

use serde::{Deserialize, Serialize};
use undercroft_base::{TierInfo, TierUsage};
use undercroft_engine::Stats;
use undercroft_policy::place::Temperatures;
use undercroft_qos::pressure::Pressure;
use undercroft_tier::profile::Profile;

use super::{
    BoundReport, CostReport, Counters, Drain, Faults, LimitExceeded, MissRatioCurve, Pages,
    Policies, Quantiles, RemoteReport, TierCost, TierWear, kind_name, ratio,
};

/// One running client, as `status --json` gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Version of Undercroft.
    pub version: String,
    /// Process id of the keeper (`undercroft run`).
    pub pid: u32,
    /// Process id of the program.
    pub client_pid: u32,
    /// Process id of the manager.
    pub manager_pid: u32,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Since the program started.
    pub uptime_seconds: f64,
    /// The class in which the daemon gives it memory; null when no daemon does.
    #[serde(default)]
    pub class: Option<String>,
    /// The limit; null when there is none.
    pub memory_max_bytes: Option<u64>,
    /// True while a user has paused it: no page is evicted or moved, and the limit is not kept.
    #[serde(default)]
    pub paused: bool,
    /// Resident managed pages now.
    pub resident_bytes: u64,
    /// Resident managed pages plus what tiers hold in memory, now.
    pub dram_bytes: u64,
    /// Each tier now, fastest first.
    pub tiers: Vec<TierSnapshot>,
    /// Temperatures of its slabs; null for placements that keep none.
    #[serde(default)]
    pub slabs: Option<Slabs>,
    /// Faults since the start.
    pub faults: Faults,
    /// Distribution since the start; null when there was no fault.
    pub fault_latency_seconds: Option<Quantiles>,
    /// The sum of all fault times since the start. Faults of several threads add up.
    #[serde(default)]
    pub stall_seconds: f64,
    /// Time since the start in which at least one thread waited for a page.
    #[serde(default)]
    pub stall_some_seconds: f64,
    /// The same as parts of the time, lately.
    #[serde(default)]
    pub pressure: PressureReport,
    /// How the stall bound is kept; null when there is none.
    #[serde(default)]
    pub stall_bound: Option<StallBoundReport>,
    /// How the latency bound is kept; null when there is none.
    #[serde(default)]
    pub latency_bound: Option<BoundReport>,
    /// Pages moved since the start.
    pub pages: Pages,
    /// Over the time since the previous snapshot was taken.
    pub rates: Rates,
    /// Time above the limit so far.
    pub limit_exceeded: LimitExceeded,
    /// Names in force.
    pub policies: Policies,
    /// The engine's counters.
    pub counters: Counters,
    /// What other limits would have cost so far. Null without a limit, or while no page has left
    /// memory.
    #[serde(default)]
    pub mrc: Option<MissRatioCurve>,
    /// What DRAM and tiers cost at their peaks so far. Null if DRAM, or a tier that was used, has
    /// no price, and while the program is so far below its limit that no page is counted.
    #[serde(default)]
    pub cost: Option<CostReport>,
}

impl Snapshot {
    /// A line as in the kernel's pressure files: percent, and microseconds in all. There is no line
    /// `full`: whether every thread waits is not known.
    pub fn pressure_line(&self) -> String {
        let now = &self.pressure;
        format!(
            "some avg10={:.2} avg60={:.2} avg300={:.2} total={}",
            now.some_avg10,
            now.some_avg60,
            now.some_avg300,
            (self.stall_some_seconds * 1e6) as u64
        )
    }
}

/// How many slabs of 256 consecutive pages, of those that were ever stored, have which temperature
/// (RapidSwap §3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slabs {
    /// Used in the last 5 s.
    pub hot: u64,
    /// In the last 10 s, or moved one tier down in the last 5 s.
    pub warm: u64,
    /// Not for longer.
    pub cold: u64,
}

impl Slabs {
    pub(crate) fn add(&mut self, more: Temperatures) {
        self.hot += more.hot;
        self.warm += more.warm;
        self.cold += more.cold;
    }
}

/// How a stall bound is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StallBoundReport {
    /// As the user wrote it: `30%`.
    pub bound: String,
    /// The part of the time in which some thread waited, since the bound is in force.
    pub ratio: f64,
    /// Windows of a second at whose end it was kept,
    pub windows_kept: u64,
    /// and was not.
    pub windows_missed: u64,
    /// By how much SSD segments are longer than their default; 64 = the most.
    pub shift: f64,
}

impl fmt::Display for StallBoundReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "stall {}: waits {:.1}% of the time; kept in {} of {} windows",
            self.bound,
            self.ratio * 100.0,
            self.windows_kept,
            self.windows_kept + self.windows_missed
        )
    }
}

/// The part of the time in which at least one thread waited for a page, lately: percent, as the
/// kernel's pressure files give it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PressureReport {
    /// Over about ten seconds.
    pub some_avg10: f64,
    /// Over about a minute.
    pub some_avg60: f64,
    /// Over about five minutes.
    pub some_avg300: f64,
}

impl PressureReport {
    /// As it is now.
    pub fn of(pressure: &Pressure) -> PressureReport {
        let [some_avg10, some_avg60, some_avg300] =
            (pressure.averages()).map(|part| (part * 1e4).round() / 1e2);
        PressureReport {
            some_avg10,
            some_avg60,
            some_avg300,
        }
    }
}

/// One tier at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierSnapshot {
    /// As the user gave it.
    pub name: String,
    /// 1 = the fastest in use; null if it was removed.
    #[serde(default)]
    pub rank: Option<u64>,
    /// Time of a load, as measured lately; for `ram` and `nvm` an estimate.
    #[serde(default)]
    pub load_seconds: f64,
    /// `ram`, `nvm`, `file` or `redis`.
    pub kind: String,
    /// True when its speed is emulated.
    pub emulated: bool,
    /// Page bytes held, before compression.
    pub logical_bytes: u64,
    /// Copy bytes held, after compression.
    pub stored_bytes: u64,
    /// Bytes taken from the memory or device below.
    pub held_bytes: u64,
    /// Page bytes per stored byte; null when it is empty.
    pub ratio: Option<f64>,
    /// Pages read since the start.
    pub reads: u64,
    /// Pages written since the start.
    pub writes: u64,
    /// Bytes written to the memory or device below since the start; for `ram` and `redis` those of
    /// the pages, before compression.
    #[serde(default)]
    pub written_bytes: u64,
    /// Of `writes`, the pages whose older copy was changed in place: only the parts of 512 bytes
    /// that differ were written.
    #[serde(default)]
    pub updates: u64,
    /// What it costs at its peak so far; null without a price.
    #[serde(default)]
    pub cost: Option<TierCost>,
    /// How far it is worn by this run; null without a budget of writes.
    #[serde(default)]
    pub wear: Option<TierWear>,
    /// What happens in the cluster; null for other kinds.
    #[serde(default)]
    pub remote: Option<RemoteReport>,
    /// How far it is emptied (`undercroft tiers drain`); null if no user asked for it.
    #[serde(default)]
    pub drain: Option<Drain>,
    /// What was measured of its device before (`undercroft tiers --measure`); null if nothing was.
    #[serde(default)]
    pub profile: Option<Profile>,
}

/// Events in one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Faults.
    pub faults_per_second: f64,
    /// Pages installed from a tier.
    pub swapped_in_per_second: f64,
    /// Pages evicted.
    pub swapped_out_per_second: f64,
}

impl Rates {
    /// From two readings `seconds` apart; zero when no time has passed.
    pub fn between(before: &Stats, after: &Stats, seconds: f64) -> Rates {
        let rate = |before: u64, after: u64| {
            if seconds > 0.0 {
                after.saturating_sub(before) as f64 / seconds
            } else {
                0.0
            }
        };
        Rates {
            faults_per_second: rate(before.faults, after.faults),
            swapped_in_per_second: rate(before.pages_swapped_in, after.pages_swapped_in),
            swapped_out_per_second: rate(before.pages_swapped_out, after.pages_swapped_out),
        }
    }
}

impl TierSnapshot {
    /// What the tier holds now.
    pub fn of(info: &TierInfo, usage: TierUsage, reads: u64, writes: u64) -> TierSnapshot {
        TierSnapshot {
            name: info.name.clone(),
            rank: None,
            load_seconds: 0.0,
            kind: kind_name(info.kind).to_owned(),
            emulated: info.emulated,
            logical_bytes: usage.logical.0,
            stored_bytes: usage.stored.0,
            held_bytes: usage.held.0,
            ratio: ratio(usage),
            reads,
            writes,
            written_bytes: 0,
            updates: 0,
            cost: None,
            wear: None,
            remote: None,
            drain: None,
            profile: None,
        }
    }
}
