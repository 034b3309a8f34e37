//! The result of a simulation: counts, times, energy, wear and cost, as plain numbers with their
//! units in the names.

use hdrhistogram::Histogram;
use serde::Serialize;
use undercroft_base::Nanos;
use undercroft_device::{Counters, profiles};
use undercroft_policy::mrc::Point;
use undercroft_qos::Monitor;

use crate::place::StallControl;
pub use crate::replay::WindowOutcome;
use crate::replay::tiers::ReplayTier;
use crate::replay::{Replay, Spent, Wait};
use crate::setup::{Setup, TierModel};
use crate::sharing::SharedOutcome;

const GIB: f64 = (1u64 << 30) as f64;
const YEAR_SECONDS: f64 = 365.25 * 86_400.0;

/// The setting of a result, as the user wrote it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// DRAM asked for.
    pub memory: String,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Reclaim policy or bound.
    pub reclaim: String,
    /// Prefetch policy.
    pub prefetch: String,
    /// Tiers, fastest first.
    pub tiers: Vec<String>,
    /// When pages leave to make room: `after` or `ahead`.
    pub room: String,
    /// Policy that chooses the tier of a page.
    pub placement: String,
}

/// How virtual time was spent, summed over clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Processor and DRAM.
    pub reference_seconds: f64,
    /// The kernel's path of faults.
    pub software_seconds: f64,
    /// Context switches.
    pub context_switch_seconds: f64,
    /// Waiting for demanded pages.
    pub read_wait_seconds: f64,
    /// Waiting for prefetched pages.
    pub prefetch_wait_seconds: f64,
    /// Waiting for write-outs.
    pub write_wait_seconds: f64,
    /// Compressing and decompressing.
    pub compression_seconds: f64,
}

/// Energy of memory and tiers over the elapsed time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct EnergyUsed {
    /// Refresh and standby of the DRAM.
    pub dram_static_joules: f64,
    /// References, and pages copied in and out.
    pub dram_dynamic_joules: f64,
    /// Transfers of the devices.
    pub device_dynamic_joules: f64,
    /// Idle power of the devices, for the share of them that is used.
    pub device_idle_share_joules: f64,
    /// Idle power of the whole devices; not in the total.
    pub device_idle_whole_joules: f64,
    /// DRAM, transfers, and the share of idle power.
    pub total_joules: f64,
}

/// Price of what is used, by each kind's price a GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CostUsed {
    /// The memory.
    pub dram_dollars: f64,
    /// Each device's peak.
    pub device_dollars: f64,
    /// Both.
    pub total_dollars: f64,
}

/// A tier's part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierOutcome {
    /// As the user wrote it.
    pub name: String,
    /// Pages read.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Read requests of the device.
    pub read_requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes written in whole units of the device.
    pub worn_bytes: u64,
    /// Most bytes of pages held at once.
    pub logical_bytes_peak: u64,
    /// Most slabs, of 256 neighbouring places, that had a page at once. Where each page has its own
    /// place, a slab is 256 neighbouring pages.
    pub slabs_peak: u64,
    /// Device time of reads and writes, summed over channels.
    pub busy_seconds: f64,
    /// Time reads waited for a channel.
    pub read_queued_seconds: f64,
    /// Reads slowed by a write in progress.
    pub interfered_reads: u64,
    /// Head movements of a disk.
    pub seeks: u64,
    /// Energy of transfers.
    pub dynamic_joules: f64,
    /// Idle energy of the whole device.
    pub idle_joules: f64,
    /// Writes to the slot that was written most.
    pub place_writes_max: u32,
    /// How many writes each byte endures; absent if there is no such limit.
    pub endurance_writes: Option<f64>,
    /// Years until the device is worn out at this rate, with perfect levelling; absent without
    /// limit, writes or time.
    pub lifetime_years: Option<f64>,
    /// The same for a device that is only as large as what was stored.
    pub lifetime_years_if_just_large_enough: Option<f64>,
}

/// A client's part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClientOutcome {
    /// Its name.
    pub name: String,
    /// Its references.
    pub references: u64,
    /// Pages it touches.
    pub footprint_pages: u64,
    /// Pages of memory it has.
    pub memory_pages: u64,
    /// References that found no page in memory.
    pub misses: u64,
    /// Its own elapsed time.
    pub elapsed_seconds: f64,
    /// The share of that time in which it waited for pages, write-outs and their overhead.
    pub stall_ratio: f64,
    /// How its stall bound was kept; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall_bound: Option<StallOutcome>,
    /// Time of a fault that read from a tier.
    pub fault_latency: Latency,
    /// Time of a page-out: from when a page is handed to a tier until the tier has it.
    pub page_out_latency: Latency,
    /// How its latency bound was kept; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_bound: Option<BoundOutcome>,
    /// Its fate under a shared budget; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<SharedOutcome>,
    /// The wait of each fault, in the order of its references; empty unless asked for.
    #[serde(skip)]
    pub waits: Vec<Wait>,
    /// Cost of other limits, by the estimate of a live run; absent unless asked for.
    pub mrc: Option<Vec<CurvePoint>>,
}

/// How a stall bound was kept.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StallOutcome {
    /// As the user wrote it: `70%`.
    pub bound: String,
    /// Windows at whose end it was kept.
    pub windows_kept: u64,
    /// Windows at whose end it was not.
    pub windows_missed: u64,
    /// By how much SSD segments were longer than their default at the end.
    pub shift: f64,
}

impl StallOutcome {
    fn of(control: &StallControl) -> StallOutcome {
        let (windows_kept, windows_missed) = control.windows();
        StallOutcome {
            bound: control.bound().to_string(),
            windows_kept,
            windows_missed,
            shift: control.shift(),
        }
    }
}

/// How a latency bound was kept; of one that was changed, since the last change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BoundOutcome {
    /// As the user wrote it: `p99=200us`.
    pub bound: String,
    /// Windows that kept it.
    pub windows_kept: u64,
    /// Windows that missed it.
    pub windows_missed: u64,
    /// Page-ins in these windows.
    pub page_ins: u64,
    /// Page-ins above the limit.
    pub page_ins_over: u64,
    /// The percentile of all windows together; absent without windows.
    pub tail_seconds: Option<f64>,
    /// The percentile of the worst window.
    pub worst_window_seconds: Option<f64>,
    /// The windows of this bound and of those before it, in order.
    #[serde(skip)]
    pub windows: Vec<WindowOutcome>,
}

impl BoundOutcome {
    fn of(monitor: &Monitor, windows: &[WindowOutcome]) -> BoundOutcome {
        let (windows_kept, windows_missed) = monitor.windows();
        let (page_ins, page_ins_over) = monitor.page_ins();
        BoundOutcome {
            bound: monitor.bound().to_string(),
            windows_kept,
            windows_missed,
            page_ins,
            page_ins_over,
            tail_seconds: monitor.whole().map(Nanos::seconds),
            worst_window_seconds: monitor.worst().map(Nanos::seconds),
            windows: windows.to_vec(),
        }
    }

    /// Windows that kept it, in percent of all; NaN without windows.
    pub fn kept_percent(&self) -> f64 {
        let windows = self.windows_kept + self.windows_missed;
        100.0 * self.windows_kept as f64 / windows as f64
    }
}

/// The faults of one limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// The limit.
    pub memory_pages: u64,
    /// Estimated misses of pages that have left, or were stored at first.
    pub swap_ins: f64,
    /// They should hardly be fewer than this,
    pub swap_ins_least: f64,
    /// and hardly more than this; absent if they may be far more.
    pub swap_ins_most: Option<f64>,
    /// The same of a replay under this limit; absent if there are several clients.
    pub swap_ins_replayed: Option<u64>,
}

/// Percentiles in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Samples.
    pub count: u64,
    /// Half are below.
    pub p50_seconds: f64,
    /// 95 % are below.
    pub p95_seconds: f64,
    /// 99 % are below.
    pub p99_seconds: f64,
    /// 99.9 % are below.
    pub p999_seconds: f64,
    /// The longest.
    pub max_seconds: f64,
}

impl Latency {
    fn of(nanos: &Histogram<u64>) -> Latency {
        let at = |quantile| nanos.value_at_quantile(quantile) as f64 / 1e9;
        Latency {
            count: nanos.len(),
            p50_seconds: at(0.5),
            p95_seconds: at(0.95),
            p99_seconds: at(0.99),
            p999_seconds: at(0.999),
            max_seconds: nanos.max() as f64 / 1e9,
        }
    }

    /// Of a client's page-outs to any tier.
    fn of_page_outs(tiers: &[ReplayTier], client: usize) -> Latency {
        let mut all: Option<Histogram<u64>> = None;
        for of in tiers.iter().filter_map(|tier| tier.page_outs.of(client)) {
            match &mut all {
                None => all = Some(of.clone()),
                Some(all) => all.add(of).expect("histograms of one shape"),
            }
        }
        all.as_ref().map_or_else(Latency::default, Latency::of)
    }
}

/// The result of one simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SimReport {
    /// The setting.
    pub setting: Setting,
    /// References replayed.
    pub references: u64,
    /// References that write.
    pub writes: u64,
    /// Pages touched; of a live trace also those found in memory or prefetched.
    pub footprint_pages: u64,
    /// Pages of memory.
    pub memory_pages: u64,
    /// References that found no page in memory: faults.
    pub misses: u64,
    /// Misses on a page's first use.
    pub first_touches: u64,
    /// Misses that read from a tier.
    pub swap_ins: u64,
    /// Misses divided by references.
    pub miss_ratio: f64,
    /// Pages prefetched from a tier.
    pub prefetched: u64,
    /// Prefetched pages that were used before they left.
    pub prefetch_hits: u64,
    /// Pages that left memory.
    pub evictions: u64,
    /// Evictions of a page whose stored copy was still right: nothing was written.
    pub clean_evictions: u64,
    /// Evictions of a page of zeros: nothing was written.
    pub zero_evictions: u64,
    /// Pages moved from one tier to the next.
    pub demotions: u64,
    /// The longest of the clients' times.
    pub elapsed_seconds: f64,
    /// The same, until the devices had finished as well.
    pub settled_seconds: f64,
    /// Where the time went.
    pub times: Times,
    /// Energy.
    pub energy: EnergyUsed,
    /// Cost.
    pub cost: CostUsed,
    /// Each tier.
    pub tiers: Vec<TierOutcome>,
    /// Each client.
    pub clients: Vec<ClientOutcome>,
}

impl SimReport {
    /// Adds up a finished replay.
    pub fn of(mut replay: Replay<'_>, setup: &Setup) -> SimReport {
        let (elapsed, settled) = replay.finish();
        let clients: Vec<_> = replay
            .clients
            .iter()
            .map(|client| client_outcome(client, &replay))
            .collect();
        let seconds = elapsed.seconds();
        let tiers: Vec<_> = replay
            .tiers()
            .iter()
            .map(|tier| tier_outcome(tier, seconds, setup.page_bytes))
            .collect();
        let sum = |of: &dyn Fn(&crate::replay::Client<'_>) -> u64| -> u64 {
            replay.clients.iter().map(of).sum()
        };
        let references = sum(&|c| c.at as u64);
        let misses = sum(&|c| c.seen.misses);
        let mut outcome = SimReport {
            setting: Setting {
                memory: setup.memory.to_string(),
                page_bytes: setup.page_bytes,
                reclaim: setup.reclaim.clone(),
                prefetch: setup.prefetch.clone(),
                tiers: setup.tiers.iter().map(|tier| tier.text.clone()).collect(),
                room: setup.room.to_string(),
                placement: match setup.kernel_swap {
                    Some(kernel) => kernel.to_string(),
                    None => setup.placement.to_string(),
                },
            },
            references,
            // A client that was refused has done nothing.
            writes: sum(&|c| if c.at == 0 { 0 } else { c.stream.writes }),
            footprint_pages: sum(&|c| c.stream.footprint()),
            memory_pages: sum(&|c| c.frames),
            misses,
            first_touches: sum(&|c| c.seen.first_touches),
            swap_ins: sum(&|c| c.seen.loads),
            miss_ratio: misses as f64 / references.max(1) as f64,
            prefetched: sum(&|c| c.engine.books().stats().prefetched - c.before.prefetched),
            prefetch_hits: sum(&|c| c.seen.ahead_used),
            evictions: sum(&|c| {
                c.engine.books().stats().pages_swapped_out - c.before.pages_swapped_out
            }),
            clean_evictions: sum(&|c| {
                c.engine.books().stats().clean_dropped - c.before.clean_dropped
            }),
            zero_evictions: sum(&|c| c.engine.books().stats().same_filled - c.before.same_filled),
            demotions: sum(&|c| c.engine.books().stats().demoted - c.before.demoted),
            elapsed_seconds: seconds,
            settled_seconds: settled.seconds(),
            times: times(replay.clients.iter().map(|client| client.spent)),
            energy: EnergyUsed::default(),
            cost: CostUsed::default(),
            tiers,
            clients,
        };
        outcome.energy = outcome.energy_used(replay.tiers());
        outcome.cost = outcome.cost_used(replay.tiers());
        outcome
    }

    fn energy_used(&self, tiers: &[ReplayTier]) -> EnergyUsed {
        let dram = profiles::DRAM_ENERGY;
        let page = self.setting.page_bytes as f64;
        let line = dram.line_bytes as f64;
        let memory_bytes = self.memory_pages as f64 * page;
        // A page read from a tier is written to memory, and the other way round.
        let pages_in: u64 = self.tiers.iter().map(|tier| tier.pages_read).sum();
        let pages_out: u64 = self.tiers.iter().map(|tier| tier.pages_written).sum();
        let written = self.writes as f64 * line + pages_in as f64 * page;
        let read = (self.references - self.writes) as f64 * line + pages_out as f64 * page;
        let dram_static_joules =
            dram.static_watts_per_gib * memory_bytes / GIB * self.elapsed_seconds;
        let dram_dynamic_joules = read * dram.read_j_per_byte + written * dram.write_j_per_byte;
        let device_dynamic_joules: f64 = self.tiers.iter().map(|tier| tier.dynamic_joules).sum();
        let device_idle_whole_joules: f64 = self.tiers.iter().map(|tier| tier.idle_joules).sum();
        let device_idle_share_joules: f64 = self
            .tiers
            .iter()
            .zip(tiers)
            .filter_map(|(outcome, tier)| {
                let capacity = tier.device()?.profile().capacity_bytes as f64;
                let share = outcome.logical_bytes_peak as f64 / capacity;
                Some(outcome.idle_joules * share.min(1.0))
            })
            .sum();
        EnergyUsed {
            dram_static_joules,
            dram_dynamic_joules,
            device_dynamic_joules,
            device_idle_share_joules,
            device_idle_whole_joules,
            total_joules: dram_static_joules
                + dram_dynamic_joules
                + device_dynamic_joules
                + device_idle_share_joules,
        }
    }

    fn cost_used(&self, tiers: &[ReplayTier]) -> CostUsed {
        let bytes = self.memory_pages as f64 * self.setting.page_bytes as f64;
        let dram_dollars = bytes / GIB * profiles::DRAM_DOLLARS_PER_GIB;
        let device_dollars: f64 = tiers
            .iter()
            .filter_map(|tier| {
                let price = tier.device()?.profile().dollars_per_gib;
                Some(tier.peak().0 as f64 / GIB * price)
            })
            .sum();
        CostUsed {
            dram_dollars,
            device_dollars,
            total_dollars: dram_dollars + device_dollars,
        }
    }
}

fn times(clients: impl Iterator<Item = Spent>) -> Times {
    let mut sum = Times::default();
    for spent in clients {
        sum.reference_seconds += spent.reference.seconds();
        sum.software_seconds += spent.software.seconds();
        sum.context_switch_seconds += spent.context_switch.seconds();
        sum.read_wait_seconds += spent.read.seconds();
        sum.prefetch_wait_seconds += spent.ahead.seconds();
        sum.write_wait_seconds += spent.write.seconds();
        sum.compression_seconds += spent.compression.seconds();
    }
    sum
}

fn client_outcome(client: &crate::replay::Client<'_>, replay: &Replay<'_>) -> ClientOutcome {
    let elapsed = (client.clock - client.came).seconds();
    ClientOutcome {
        name: client.stream.name.clone(),
        references: client.at as u64,
        footprint_pages: client.stream.footprint(),
        memory_pages: client.frames,
        misses: client.seen.misses,
        elapsed_seconds: elapsed,
        stall_ratio: client.stall_ratio(),
        stall_bound: (client.stall.as_ref()).map(|stall| StallOutcome::of(&stall.control)),
        fault_latency: Latency::of(&client.latency),
        page_out_latency: Latency::of_page_outs(replay.tiers(), client.index),
        latency_bound: (replay.monitor(client.index))
            .map(|monitor| BoundOutcome::of(monitor, replay.windows(client.index))),
        shared: replay.shared(client.index),
        waits: client.waits.clone().unwrap_or_default(),
        mrc: client.curve().map(|curve| {
            let point = |point: &Point| CurvePoint {
                memory_pages: point.limit.pages_floor().0,
                swap_ins: point.faults,
                swap_ins_least: point.least,
                swap_ins_most: point.most,
                swap_ins_replayed: None,
            };
            curve.points.iter().map(point).collect()
        }),
    }
}

fn tier_outcome(tier: &ReplayTier, seconds: f64, page_bytes: u64) -> TierOutcome {
    let device = tier.device();
    let done = device.map_or_else(Counters::default, |device| *device.counters());
    let profile = device.map(|device| device.profile());
    let busy = (done.read_busy + done.write_busy).seconds();
    let energy = profile.map(|profile| profile.energy);
    let dynamic = energy.map_or(0.0, |energy| {
        done.read_bytes as f64 * energy.read_j_per_byte
            + done.worn_bytes as f64 * energy.write_j_per_byte
            + busy * energy.busy_watts
    });
    let is_pool = matches!(tier.spec.kind, TierModel::Pool { .. });
    let pages = |pages: u64| if is_pool { pages * page_bytes } else { 0 };
    let endurance = profile.and_then(|profile| profile.endurance_writes);
    let lifetime = |capacity: f64| {
        let rate = done.worn_bytes as f64 / seconds;
        (rate.is_finite() && rate > 0.0).then_some(endurance? * capacity / rate / YEAR_SECONDS)
    };
    TierOutcome {
        name: tier.spec.text.clone(),
        pages_read: tier.counters.pages_read,
        pages_written: tier.counters.pages_written,
        read_requests: done.reads,
        read_bytes: done.read_bytes + pages(tier.counters.pages_read),
        written_bytes: done.written_bytes + pages(tier.counters.pages_written),
        worn_bytes: done.worn_bytes,
        logical_bytes_peak: tier.peak().0,
        slabs_peak: tier.counters.slabs_peak,
        busy_seconds: busy,
        read_queued_seconds: done.read_queued.seconds(),
        interfered_reads: done.interfered,
        seeks: done.seeks,
        dynamic_joules: dynamic,
        idle_joules: energy.map_or(0.0, |energy| energy.idle_watts * seconds),
        place_writes_max: tier.counters.slot_writes_max,
        endurance_writes: endurance,
        lifetime_years: profile.and_then(|profile| lifetime(profile.capacity_bytes as f64)),
        lifetime_years_if_just_large_enough: lifetime(tier.peak().0 as f64),
    }
}
