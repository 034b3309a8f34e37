//! Answer of `status --json`: one running client at one moment.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_engine::Stats;
use undercroft_qos::pressure::Pressure;
use undercroft_tier::profile::Profile;

use super::{
    Ages, BoundReport, CostReport, Counters, Faults, GuestMemory, Immovable, LatencyHistogram,
    LimitExceeded, MissRatioCurve, Pages, Policies, Quantiles, TakenOver, TierFigures,
    command_line,
};

/// A running client, as `status --json` gives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Snapshot {
    /// Version of the format of the writer.
    pub schema_version: u32,
    /// Version of Undercroft.
    pub version: String,
    /// Process id of the keeper.
    pub pid: u32,
    /// Process id of `undercroft run`, which ends with its program; null: it has ended, and
    /// processes that it left behind go on.
    #[serde(default)]
    pub run_pid: Option<u32>,
    /// Process id of the program.
    pub client_pid: u32,
    /// Process id of the manager.
    pub manager_pid: u32,
    /// Program and arguments, at most 4 KiB of them; the last word may be cut, and ends with "..."
    /// then.
    pub command: Vec<String>,
    /// How many arguments the program was given.
    #[serde(default)]
    pub arguments: u64,
    /// The name that a person gave to it (`run --name`); null: none.
    #[serde(default)]
    pub name: Option<String>,
    /// Number of the user whose run it is; null: the user who asks.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Since the program started.
    pub uptime_seconds: f64,
    /// The class in which the daemon gives it memory; null when no daemon does.
    #[serde(default)]
    pub class: Option<String>,
    /// The limit; null when there is none.
    pub memory_max_bytes: Option<u64>,
    /// True while a user has paused it, or kernel swap is on that would lose pages: no page is
    /// evicted or moved, and the limit is not kept.
    #[serde(default)]
    pub paused: bool,
    /// Anonymous memory of the program now, in memory and out of it, managed or not.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Most of it at once, as seen some ten times a second.
    #[serde(default)]
    pub memory_bytes_peak: u64,
    /// The part of it that is in memory, without processes that have not loaded the shim.
    pub resident_bytes: u64,
    /// The same plus what tiers hold in memory, now.
    pub dram_bytes: u64,
    /// Each tier now, fastest first.
    pub tiers: Vec<TierSnapshot>,
    /// Faults since the start.
    pub faults: Faults,
    /// Distribution since the start; null when there was no fault.
    pub fault_latency_seconds: Option<Quantiles>,
    /// The same as counts; no buckets: the run is of a version that does not tell them.
    #[serde(default)]
    pub fault_latency_histogram: LatencyHistogram,
    /// The sum of all fault times since the start. Faults of several threads add up.
    #[serde(default)]
    pub stall_seconds: f64,
    /// Time since the start in which at least one thread waited for a page.
    #[serde(default)]
    pub stall_some_seconds: f64,
    /// The same as parts of the time, lately.
    #[serde(default)]
    pub pressure: PressureReport,
    /// How the latency bound is kept; null when there is none.
    #[serde(default)]
    pub latency_bound: Option<BoundReport>,
    /// Pages moved since the start.
    pub pages: Pages,
    /// Over the time since the previous snapshot was taken.
    pub rates: Rates,
    /// Time above the limit so far, as it was raised for what cannot leave.
    pub limit_exceeded: LimitExceeded,
    /// Memory that cannot leave, and the limit that was raised for it.
    #[serde(default)]
    pub immovable: Immovable,
    /// The memory of its virtual machine; null if it has none.
    #[serde(default)]
    pub guest: Option<GuestMemory>,
    /// Managers that took over from one that had died, or was replaced.
    #[serde(default)]
    pub takeovers: TakenOver,
    /// How long its memory has not been used; null without scans at an interval.
    #[serde(default)]
    pub ages: Option<Ages>,
    /// Names in force.
    pub policies: Policies,
    /// The engine's counters.
    pub counters: Counters,
    /// Cost of other limits so far. Null without a limit, or while no page has left
    /// memory.
    #[serde(default)]
    pub mrc: Option<MissRatioCurve>,
    /// Cost of DRAM and tiers at their peaks so far. Null if DRAM, or a tier that was used, has
    /// no price, and while the program is so far below its limit that no page is counted.
    #[serde(default)]
    pub cost: Option<CostReport>,
}

impl Snapshot {
    /// Whether a process id is one of this run that it names: the keeper's, that of `undercroft
    /// run`, or the program's.
    pub fn is_of(&self, pid: u32) -> bool {
        self.pid == pid || self.run_pid == Some(pid) || (pid != 0 && self.client_pid == pid)
    }

    /// Why a user cannot change the limit of this run; `None`: a user can.
    pub fn limit_is_kept_by(&self) -> Option<String> {
        let class = self.class.as_ref()?;
        Some(format!(
            "the daemon gives it memory, as one of class {class}, and would change the limit back"
        ))
    }

    /// The program as it was given.
    pub fn program_path(&self) -> &str {
        self.command.first().map_or("", String::as_str)
    }

    /// The program's name, without its folder.
    pub fn program(&self) -> &str {
        self.program_path().rsplit('/').next().unwrap_or_default()
    }

    /// The command on one line, for people.
    pub fn command_line(&self) -> String {
        command_line(&self.command, self.arguments)
    }

    /// Leaves only the program's name of its command: arguments may be secrets.
    pub fn hide_arguments(&mut self) {
        self.command.truncate(1);
    }

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

/// The part of the time in which at least one thread waited for a page, lately: percent, as the
/// kernel's pressure files give it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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

/// A tier at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TierSnapshot {
    /// Figures that the report has, too.
    #[serde(flatten)]
    pub figures: TierFigures,
    /// 1 = the fastest in use; null if it was removed.
    #[serde(default)]
    pub rank: Option<u64>,
    /// Time of a load, as measured lately; for `ram` and `nvm` an estimate.
    #[serde(default)]
    pub load_seconds: f64,
    /// Page bytes held, before compression.
    pub logical_bytes: u64,
    /// Copy bytes held, after compression.
    pub stored_bytes: u64,
    /// Bytes taken from the memory or device below.
    pub held_bytes: u64,
    /// Figures measured of its device before (`undercroft tiers --measure`); null if nothing was.
    #[serde(default)]
    pub profile: Option<Profile>,
}

/// Events in one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
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
