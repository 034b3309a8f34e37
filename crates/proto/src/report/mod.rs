//! The report at the end of a run (a JSON file, version 1), and the snapshot while it lasts.
//!
//! Everything is in base units: seconds, bytes, counts. Field names are a promise to readers: a
//! test compares them. A new field keeps `schema_version`; a field that is renamed or removed
//! raises it.

mod ages;
mod bound;
mod command;
mod cost;
mod curve;
mod latency;
mod now;
mod remote;
mod summary;
#[cfg(test)]
mod tests;

use std::fmt;

use hdrhistogram::Histogram;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, Nanos, TierUsage};
use undercroft_engine::Stats;
use undercroft_tier::file::FileCounts;

pub use ages::{AGES_SECONDS, Ages, Demotion, Unused, WORKING_SET_SECONDS};
pub use bound::{BoundControl, BoundReport};
pub use command::ShownCommand;
pub use cost::{CostReport, TierCost, TierUse, TierWear};
pub use curve::{CurveBegan, LimitPoint, MissRatioCurve};
pub use latency::{LatencyBucket, LatencyHistogram};
pub use now::{PressureReport, Rates, Snapshot, TierSnapshot};
pub use remote::RemoteReport;
pub use summary::{bound as bound_summary, human_summary};
pub use undercroft_terminal::command_line;

/// The version of the report file and of snapshots.
pub const SCHEMA_VERSION: u32 = 1;

/// The whole report of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// Version of Undercroft.
    pub version: String,
    /// Kernel release.
    pub kernel: String,
    /// Program and arguments; bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    /// The name that a person gave to the run; null: none.
    #[serde(default)]
    pub name: Option<String>,
    /// Status that `undercroft run` exits with: the child's status, or 128 + signal.
    pub exit_status: i32,
    /// The signal that ended the program; null if none did.
    #[serde(default)]
    pub signal: Option<i32>,
    /// Process id that the program had.
    #[serde(default)]
    pub pid: u32,
    /// When the program started, in seconds since 1970.
    #[serde(default)]
    pub started_unix_seconds: f64,
    /// Start of the program to its end.
    pub wall_seconds: f64,
    /// The limit; null when there was none.
    pub memory_max_bytes: Option<u64>,
    /// Most anonymous memory of the program at once, in memory and out of it, managed or not.
    #[serde(default)]
    pub memory_bytes_peak: u64,
    /// Most of it in memory at once: managed, or before managing began.
    pub resident_bytes_peak: u64,
    /// Most DRAM at once: the same plus what tiers held in memory.
    pub dram_bytes_peak: u64,
    /// Faults served.
    pub faults: Faults,
    /// From reading the fault to waking the thread; null when there was no fault.
    pub fault_latency_seconds: Option<Quantiles>,
    /// Where the time of a fault goes; null when no fault was of the kind measured.
    pub fault_breakdown_seconds: Option<FaultBreakdown>,
    /// How the latency bound was kept; null when there was none.
    #[serde(default)]
    pub latency_bound: Option<BoundReport>,
    /// Sum over threads of the time they waited for a page.
    pub stall_seconds: f64,
    /// Time in which at least one thread waited for a page.
    #[serde(default)]
    pub stall_some_seconds: f64,
    /// Pages moved.
    pub pages: Pages,
    /// Each tier, fastest first.
    pub tiers: Vec<TierReport>,
    /// Time above the limit, as it was raised for what cannot leave.
    pub limit_exceeded: LimitExceeded,
    /// Memory that cannot leave, and the limit that was raised for it.
    #[serde(default)]
    pub immovable: Immovable,
    /// Time in which a user, or unsafe kernel swap, had paused it.
    #[serde(default)]
    pub pauses: Pauses,
    /// Cost of managing.
    pub manager: ManagerCost,
    /// Address spaces managed, fork children included.
    pub spaces: u64,
    /// Most mappings that were seen in one process; 0 if none was read.
    pub mappings_peak: u64,
    /// False when no process of the program was reached, or none for two seconds and more: the
    /// limit did not hold.
    pub managed: bool,
    /// Most processes at once that had not loaded the shim for two seconds and more, while others
    /// were managed.
    #[serde(default)]
    pub unmanaged_processes_peak: u64,
    /// The choices made.
    pub policies: Policies,
    /// The memory of its virtual machine, as it was at last; null if it had none.
    #[serde(default)]
    pub guest: Option<GuestMemory>,
    /// The engine's counters.
    pub counters: Counters,
    /// Scans of access bits. Null where none was made, and no interval was asked for.
    pub access_scans: Option<AccessScans>,
    /// Cost of other limits. Null without a limit, or if no page left memory.
    #[serde(default)]
    pub mrc: Option<MissRatioCurve>,
    /// Cost of DRAM and tiers at their peaks. Null if DRAM, or a tier that was used, has no
    /// price, and while the program is so far below its limit that no page is counted.
    #[serde(default)]
    pub cost: Option<CostReport>,
    /// Managers that took over from one that died. All other counts are those of the last manager.
    #[serde(default)]
    pub takeovers: Takeovers,
}

/// The memory of a virtual machine (`undercroft vm`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestMemory {
    /// As much as the machine has.
    pub bytes: u64,
    /// The part of it that is in memory.
    pub resident_bytes: u64,
    /// The part of it whose copies are in tiers.
    pub stored_bytes: u64,
    /// As much as was given back by a balloon or by free page reporting so far, and had contents,
    /// in memory or in tiers. Memory that is given back twice counts twice. A manager that takes
    /// over begins anew.
    #[serde(default)]
    pub given_back_bytes: u64,
    /// Times that no huge page was free for a page of it; null: its pages have 4 KiB. A manager
    /// that takes over begins anew.
    #[serde(default)]
    pub huge_pages_short: Option<u64>,
    /// Memory of it that programs have locked, of what was to leave.
    #[serde(default)]
    pub locked_bytes: u64,
    /// Times that a locked page left all the same: its program has locked more than it may. A
    /// manager that takes over begins anew.
    #[serde(default)]
    pub locks_ignored: u64,
    /// Machines whose monitors have handed their memory over, and which run now; null: it is the
    /// memory of the one machine that the program runs. The sizes are of all of them together. What
    /// is in memory cannot leave, and what has its copies in tiers was not read yet.
    #[serde(default)]
    pub handed_over: Option<u64>,
    /// Mappings of it in processes other than the monitor (`undercroft view`) now.
    #[serde(default)]
    pub views: u64,
    /// Whether it is known which pages the machine uses.
    #[serde(default)]
    pub access: GuestAccess,
}

/// Whether it is known which pages of a machine's memory are used (`--access-scan`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuestAccess {
    /// No scan was made.
    #[default]
    NotScanned,
    /// Known, from scans.
    Scanned,
    /// Unknown: undercroft lacks CAP_SYS_NICE.
    NotPermitted,
    /// Unknown as long as kernel swap is on.
    KernelSwap,
    /// Unknown: the kernel does not take the pages out of page tables.
    NoEffect,
}

impl GuestAccess {
    /// Why scans find nothing.
    fn why_not(self) -> Option<&'static str> {
        match self {
            GuestAccess::NotScanned | GuestAccess::Scanned => None,
            GuestAccess::NotPermitted => Some("undercroft lacks CAP_SYS_NICE"),
            GuestAccess::KernelSwap => Some("kernel swap is on"),
            GuestAccess::NoEffect => Some("the kernel leaves its pages mapped"),
        }
    }
}

impl GuestMemory {
    /// A line of its own.
    pub fn line(&self) -> String {
        match self.handed_over {
            Some(_) => self.to_string(),
            None => format!("virtual machine {self}"),
        }
    }
}

impl fmt::Display for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [all, here, away] = [self.bytes, self.resident_bytes, self.stored_bytes].map(Bytes);
        if let Some(machines) = self.handed_over {
            return write!(
                f,
                "{machines} machines handed over, {all}: {here} in memory, which cannot leave; {away} \
                 not read yet"
            );
        }
        write!(f, "{all}: {here} in memory, {away} in tiers")?;
        match self.huge_pages_short {
            None => {}
            Some(0) => f.write_str("; pages of 2 MiB")?,
            Some(times) => write!(
                f,
                "; pages of 2 MiB, and {times} times none was free (sysctl vm.nr_hugepages)"
            )?,
        }
        if self.given_back_bytes > 0 {
            write!(f, "; {} given back so far", Bytes(self.given_back_bytes))?;
        }
        if self.locked_bytes > 0 {
            write!(f, "; {} locked", Bytes(self.locked_bytes))?;
        }
        if self.locks_ignored > 0 {
            write!(f, "; {} locks too many", self.locks_ignored)?;
        }
        if self.views > 0 {
            write!(f, "; mapped {} more times", self.views)?;
        }
        match self.access.why_not() {
            Some(why) => write!(f, "; which pages it uses is not known: {why}"),
            None => Ok(()),
        }
    }
}

/// How often the run was paused (`undercroft set PID paused=yes`, unsafe kernel swap), and for how
/// long. The limit was not kept then, and that is no time above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pauses {
    /// Pauses.
    pub count: u64,
    /// Time in all.
    pub seconds: f64,
}

/// How often a manager took over, and how long the program waited: from the death of one to the
/// readiness of the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Takeovers {
    /// Takeovers.
    pub count: u64,
    /// Of these, those by another binary (`undercroft upgrade`): no manager had died before.
    #[serde(default)]
    pub upgrades: u64,
    /// Median.
    pub pause_seconds_p50: f64,
    /// 99th percentile.
    pub pause_seconds_p99: f64,
    /// Longest.
    pub pause_seconds_max: f64,
}

/// How often a manager took over so far, and how long the program waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TakenOver {
    /// Takeovers.
    pub count: u64,
    /// Of these, those by another binary (`undercroft upgrade`).
    pub upgrades: u64,
    /// Time that the program waited the last time.
    pub pause_seconds_last: f64,
    /// Longest such time.
    pub pause_seconds_max: f64,
}

impl fmt::Display for TakenOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |seconds: f64| Nanos((seconds * 1e9) as u64);
        let [last, max] = [self.pause_seconds_last, self.pause_seconds_max].map(time);
        let count = self.count;
        write!(
            f,
            "{count} took over; the program waited for {last}, {max} at most"
        )
    }
}

/// Results of the scans of Accessed bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AccessScans {
    /// Scans of all processes.
    pub count: u64,
    /// Time that the scans took.
    pub seconds: f64,
    /// Pages found used, once for each scan.
    pub pages_used: u64,
}

/// Faults by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Faults {
    /// All messages.
    pub total: u64,
    /// Pages never touched before.
    pub first_touch: u64,
    /// Pages brought back from a tier.
    pub swap_in: u64,
    /// Writes to protected pages.
    pub write_protect: u64,
    /// Prefetched pages taken to have been used, so faults that did not happen.
    pub prefetch_hits: u64,
}

/// Pages moved, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Pages {
    /// Installed from a tier.
    pub swapped_in: u64,
    /// Evicted, those of the next two lines included.
    pub swapped_out: u64,
    /// Evicted without a write: the copy below was still right.
    pub clean_dropped: u64,
    /// Evicted into the page entry itself: one word repeated.
    pub same_filled: u64,
    /// Prefetched: installed along with a faulting page.
    pub prefetched: u64,
}

/// A latency distribution, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Quantiles {
    /// Median.
    pub p50: f64,
    /// 90 of 100 were faster.
    pub p90: f64,
    /// 99 of 100 were faster.
    pub p99: f64,
    /// 999 of 1000 were faster.
    pub p999: f64,
    /// The slowest.
    pub max: f64,
}

/// Figures of a tier since the start of a run: of all of it, or until now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TierFigures {
    /// As the user gave it.
    pub name: String,
    /// `ram`, `nvm`, `file` or `redis`.
    pub kind: String,
    /// True when its speed is emulated, or when it only stands for such memory.
    pub emulated: bool,
    /// Page bytes per stored byte, now or at the logical peak; null when nothing is stored.
    pub ratio: Option<f64>,
    /// Pages read.
    pub reads: u64,
    /// Pages written.
    pub writes: u64,
    /// Bytes written to the memory or device below; for `ram` and `redis` those of the pages,
    /// before compression.
    #[serde(default)]
    pub written_bytes: u64,
    /// Of `writes`, the pages whose older copy was changed in place: only the parts of 512 bytes
    /// that differ were written.
    #[serde(default)]
    pub updates: u64,
    /// Its cost at its peak; null without a price.
    #[serde(default)]
    pub cost: Option<TierCost>,
    /// How far it is worn by this run; null without a budget of writes.
    #[serde(default)]
    pub wear: Option<TierWear>,
    /// Events in the cluster; null for other kinds.
    #[serde(default)]
    pub remote: Option<RemoteReport>,
    /// How far it is emptied (`undercroft tiers drain`); null if no user asked for it.
    #[serde(default)]
    pub drain: Option<Drain>,
}

impl TierFigures {
    /// Its name, for people: with a mark if its speed is emulated.
    pub fn title(&self) -> String {
        let mark = if self.emulated { " (emulated)" } else { "" };
        format!("{}{mark}", self.name)
    }

    /// Its ratio, for people.
    pub fn ratio_text(&self) -> String {
        self.ratio
            .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
    }
}

/// A tier over the whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TierReport {
    /// Figures that the status has, too.
    #[serde(flatten)]
    pub figures: TierFigures,
    /// The device whose times it was given (`shape=`); null if none.
    pub shape: Option<String>,
    /// How an `nvm` tier was mapped: `sync` (MAP_SYNC, as a DAX device is) or `shared`; null for
    /// other kinds.
    pub mapping: Option<String>,
    /// Most it could hold.
    pub capacity_bytes: u64,
    /// Most page bytes at once, before compression.
    pub logical_bytes_peak: u64,
    /// Most copy bytes at once, after compression.
    pub stored_bytes_peak: u64,
    /// Most bytes taken from the memory or device below, with fragmentation and metadata.
    pub held_bytes_peak: u64,
    /// Reads that failed or did not verify, and writes the device refused.
    pub errors: u64,
    /// Time of one read; null when there was none.
    pub read_latency_seconds: Option<Quantiles>,
    /// Requests to the file or device; null for a tier in memory.
    pub file: Option<FileCounts>,
}

/// The drain of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Drain {
    /// Pages that it held at the start.
    pub pages: u64,
    /// Pages that it holds.
    pub pages_left: u64,
    /// Time since the start, until it was empty.
    pub seconds: f64,
    /// About how long it takes yet; null if unknown.
    pub seconds_left: Option<f64>,
    /// The rest cannot be moved at the moment: no tier has room, or it cannot be read.
    pub stuck: bool,
    /// Pages that could not be read when all others had left: a touch of one ends the program. They
    /// stay where they are until the program drops them.
    #[serde(default)]
    pub pages_unreadable: u64,
    /// The tier is to be removed once it is empty.
    #[serde(default)]
    pub removes: bool,
    /// The tier was removed (`undercroft tiers remove`): its space was given back.
    #[serde(default)]
    pub removed: bool,
}

/// How far and how long DRAM was above the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LimitExceeded {
    /// Times the limit was crossed upwards.
    pub events: u64,
    /// Most bytes above it.
    pub bytes_peak: u64,
    /// Time above it.
    pub seconds: f64,
}

/// Memory that cannot leave: the program may not write there, or has locked or pinned it, or its
/// process has no agent. The limit in force is raised for it, by no more than it takes, and only as
/// far as the rest of the program would have too little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Immovable {
    /// Bytes of it at the end, or now.
    pub bytes: u64,
    /// Most bytes of it.
    pub bytes_peak: u64,
    /// Most bytes by which the limit was raised.
    pub limit_raised_bytes_peak: u64,
    /// Time in which it was raised.
    pub limit_raised_seconds: f64,
}

/// Resources that the manager used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ManagerCost {
    /// CPU time of the manager, all threads.
    pub cpu_seconds: f64,
    /// Page table, policy and ledger bytes in use.
    pub metadata_bytes: u64,
    /// The same for each managed page; null when no page was managed.
    pub metadata_bytes_per_page: Option<f64>,
    /// Cost of the program's size and its processes.
    pub scale: Scale,
    /// Batches of up to 64 pages that were to leave.
    #[serde(default)]
    pub evict_batches: u64,
    /// Times that the books were locked for the batches.
    #[serde(default)]
    pub evict_locks: u64,
    /// Commands that an agent did not answer in time.
    #[serde(default)]
    pub commands_given_up: u64,
    /// Times that a thread of the manager got no CPU and was moved.
    #[serde(default)]
    pub threads_moved: u64,
}

/// Longest holds of locks for work on many pages (the program changes its address space, memory is
/// registered and counted, a process ends, pages leave), and resources that ran short. The times of
/// the clock include time in which the holder did not have its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// The engine's lock: every fault needs it.
    pub engine_hold_seconds_max: f64,
    /// The same, of the holder's CPU time.
    #[serde(default)]
    pub engine_hold_cpu_seconds_max: f64,
    /// Times that the engine was locked. Each thread adds its own 64 at a time.
    #[serde(default)]
    pub engine_locks: u64,
    /// Of these, how often another thread had it.
    #[serde(default)]
    pub engine_waits: u64,
    /// The lock of one address space: its own faults need it.
    pub layout_hold_seconds_max: f64,
    /// The same, of the holder's CPU time.
    #[serde(default)]
    pub layout_hold_cpu_seconds_max: f64,
    /// Times that a descriptor was missing: for a fork child, a new process, or the watch of one.
    pub descriptors_short: u64,
    /// Times that the kernel had no memory for what the manager asked of it: the program waited.
    #[serde(default)]
    pub memory_short: u64,
    /// Times that the page table had no place, so that memory went on outside the limit.
    pub table_full: u64,
    /// Pages that were refused to their process (SIGBUS), because the page table had no place.
    #[serde(default)]
    pub pages_refused: u64,
}

/// Names of the policies in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Policies {
    /// The policy that chooses victims.
    pub reclaim: String,
    /// The policy that chooses pages to prefetch.
    pub prefetch: String,
    /// The policy that chooses the tier of a page.
    #[serde(default)]
    pub placement: String,
    /// DRAM that it gives to compressed copies at the end; absent if it has not decided.
    #[serde(default)]
    pub compressed_bytes_target: Option<u64>,
    /// How often it has decided that.
    #[serde(default)]
    pub placement_decisions: u64,
    /// Choice of the reclaim policy `auto`; null with any other.
    #[serde(default)]
    pub choice: Option<PolicyChoice>,
    /// The policy file that is in force; null without.
    #[serde(default)]
    pub plugin: Option<PluginReport>,
}

/// A policy file at work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PluginReport {
    /// The path that the user gave.
    pub file: String,
    /// Events that it heard.
    pub events: u64,
    /// Events that it did not hear, because it was late.
    pub events_late: u64,
    /// Events at which it trapped, or used all its fuel.
    pub failures: u64,
    /// Whether it failed so often that it is not asked any more.
    pub dismissed: bool,
    /// Pages that it named, and that the evictor looked at.
    pub pages_wished: u64,
    /// Pages of these that were in memory, might leave, and were chosen.
    pub pages_chosen: u64,
    /// Pages that it wanted in memory, and that were looked at.
    #[serde(default)]
    pub prefetches_wished: u64,
    /// Pages of these that were out of memory, had room, and were loaded.
    #[serde(default)]
    pub prefetches_done: u64,
    /// Pages for which it wished a tier, or a page that comes along, and that were looked at.
    #[serde(default)]
    pub places_wished: u64,
    /// Pages of these that were not in memory, or for which there was no such tier or page.
    #[serde(default)]
    pub places_dropped: u64,
    /// Pages in the moves between tiers that it wished, and that were looked at.
    #[serde(default)]
    pub moves_wished: u64,
    /// Pages of these that moved: they were where it said, and might.
    #[serde(default)]
    pub moves_done: u64,
    /// Scans of access bits that it asked for and heard of: one for each space that was scanned.
    #[serde(default)]
    pub scans: u64,
    /// Wishes beyond what an event may have, or of a move for which there was no room: the file was
    /// told so.
    pub wishes_refused: u64,
    /// Wishes that were dropped because too many waited. The file was not told.
    #[serde(default)]
    pub wishes_dropped: u64,
    /// The parameters that it has registered.
    pub parameters: Vec<PluginParameter>,
}

/// A parameter of a policy file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PluginParameter {
    /// The name.
    pub name: String,
    /// The value.
    pub value: i64,
}

/// Choice of the reclaim policy `auto`, and by which figures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyChoice {
    /// The policy whose rule is in force at the end, or now.
    pub rule: String,
    /// Times that the rule changed. The first rule is that of `active_inactive`.
    pub changes: u64,
    /// Pages loaded since the last change, or since the start.
    pub pages_since_change: u64,
    /// Faults in the sample of pages that the rule of `lru` keeps.
    pub lru_sample_faults: u64,
    /// Faults in the sample, as large, that the rule of `active_inactive` keeps.
    pub active_inactive_sample_faults: u64,
}

/// The engine's counters that are not among faults and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Counters {
    /// Faults of pages already on their way or already there.
    pub repeated: u64,
    /// Faults that waited for reclaim.
    pub waited_for_room: u64,
    /// Zero pages mapped besides a first touch.
    pub zero_ahead: u64,
    /// Pages moved from one tier to another.
    pub demoted: u64,
    /// Of these, to a faster tier.
    #[serde(default)]
    pub lifted: u64,
    /// Victims that were pinned or shared.
    pub refused_busy: u64,
    /// Victims no tier would take.
    pub refused_store: u64,
    /// Victims touched while leaving.
    pub recalled: u64,
    /// Pages whose copies failed to verify.
    pub lost: u64,
    /// Pages the kernel had dropped without an event.
    pub vanished: u64,
    /// Faults served above the limit.
    pub over_limit: u64,
}

/// Mean times of the parts of a fault that loads one page from a memory tier. The program also sees
/// the notification (fault to fault thread) and the wake-up (fault thread to program).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultBreakdown {
    /// How many such faults.
    pub faults: u64,
    /// Reading the message, with the agent excluded.
    pub intake: f64,
    /// The engine's decision.
    pub decide: f64,
    /// Decompressing and verifying.
    pub load: f64,
    /// Installing the page, and the books.
    pub install: f64,
}

impl Quantiles {
    /// The distribution of a histogram of nanoseconds; `None` when it is empty.
    pub fn of(nanos: &Histogram<u64>) -> Option<Quantiles> {
        let at = |quantile| Nanos(nanos.value_at_quantile(quantile)).seconds();
        (!nanos.is_empty()).then(|| Quantiles {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: Nanos(nanos.max()).seconds(),
        })
    }
}

impl Faults {
    /// The engine's counts.
    pub fn of(stats: &Stats) -> Faults {
        Faults {
            total: stats.faults,
            first_touch: stats.first_touch,
            swap_in: stats.swap_in,
            write_protect: stats.write_protect,
            prefetch_hits: stats.prefetch_hits,
        }
    }
}

impl From<&Stats> for Pages {
    fn from(stats: &Stats) -> Pages {
        Pages {
            swapped_in: stats.pages_swapped_in,
            swapped_out: stats.pages_swapped_out,
            clean_dropped: stats.clean_dropped,
            same_filled: stats.same_filled,
            prefetched: stats.prefetched,
        }
    }
}

impl From<&Stats> for Counters {
    fn from(stats: &Stats) -> Counters {
        Counters {
            repeated: stats.repeated,
            waited_for_room: stats.waited_for_room,
            zero_ahead: stats.zero_ahead,
            demoted: stats.demoted,
            lifted: stats.lifted,
            refused_busy: stats.refused_busy,
            refused_store: stats.refused_store,
            recalled: stats.recalled,
            lost: stats.lost,
            vanished: stats.vanished,
            over_limit: stats.over_limit,
        }
    }
}

/// Peaks of resident pages, of DRAM, and of all pages.
pub fn peaks(stats: &Stats) -> [Bytes; 3] {
    [
        stats.resident_peak.bytes(),
        stats.dram_peak,
        stats.pages_peak.bytes(),
    ]
}

/// The limit as reports give it: `None` for "no limit".
pub fn limit(memory_max: u64) -> Option<u64> {
    (memory_max != u64::MAX).then_some(memory_max)
}

/// The running kernel's release, or `unknown`.
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// Page bytes per stored byte; `None` where nothing is stored.
pub fn ratio(usage: TierUsage) -> Option<f64> {
    (usage.stored.0 > 0).then(|| usage.logical.0 as f64 / usage.stored.0 as f64)
}
