//! Reports of a run: status while it lasts, and the report at its end.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;
use undercroft_base::{Bytes, Nanos, TierId, TierUsage};
use undercroft_engine::Stats;
use undercroft_proto::legacy::ASKS;
use undercroft_proto::messages::{Answered, Ask, Word};
use undercroft_proto::options::AccessScan;
use undercroft_proto::report::{
    AccessScans, BoundReport, CostReport, CurveBegan, Drain, Faults, LatencyHistogram, ManagerCost,
    MissRatioCurve, Policies, PolicyChoice, PressureReport, Quantiles, Rates, RemoteReport, Report,
    SCHEMA_VERSION, Scale, Snapshot, Takeovers, TierFigures, TierReport, TierSnapshot, TierUse,
    kernel_release, limit, peaks, ratio,
};
use undercroft_sys::nvm::MappedAs;
use undercroft_sys::{fdpass, procfs};
use undercroft_tier::file::FileMeter;

use super::handed;
use super::handshake::HANDSHAKE;
use super::toll::Toll;
use super::{Control, add};
use crate::books::metered::MeteredTier;
use crate::gauges::Hold;
use crate::log;
use crate::migrate::Migrator;
use crate::space::shared::Shared;
use crate::sync::lock;

/// How long a peer may take to say what it asks for; it gets the status then, and may ask again.
/// Short, because this thread also keeps the limit, and the program itself may be the peer.
const ASKING: Duration = Duration::from_millis(5);

/// Longest request: the description of a tier, with its path.
const ASK_BYTES_MAX: usize = 8 << 10;

/// Counts that figures are told since.
pub(super) struct Since {
    last_snapshot: (Instant, Stats),
    /// When the miss-ratio curve began, with what, and the counts then.
    pub(super) curve: (Stats, Nanos, CurveBegan),
    /// After a takeover: the curve begins when this many pages have left.
    pub(super) curve_from: Option<u64>,
    /// The cost of faults to the program since then.
    pub(super) toll: Toll,
}

impl Since {
    pub(super) fn new(now: Instant) -> Since {
        Since {
            last_snapshot: (now, Stats::default()),
            curve: (Stats::default(), Nanos(0), CurveBegan::Start),
            curve_from: None,
            toll: Toll::default(),
        }
    }
}

/// Questions over the status socket.
#[derive(Deserialize)]
#[serde(untagged)]
enum Question {
    User(Ask),
    Daemon(Word),
}

/// Figures of a tier for the status and for the report.
///
/// * `usage`: gives its ratio.
fn figures(metered: &MeteredTier, usage: TierUsage, in_use: &TierUse, time: Nanos) -> TierFigures {
    let info = metered.tier.info();
    TierFigures {
        name: info.name.clone(),
        kind: info.facts.kind.to_owned(),
        emulated: info.emulated,
        ratio: ratio(usage),
        reads: metered.reads.load(Ordering::Relaxed),
        writes: metered.writes.load(Ordering::Relaxed),
        written_bytes: in_use.written.0,
        updates: metered.updates.load(Ordering::Relaxed),
        cost: in_use.cost(),
        wear: in_use.wear(time.seconds()),
        remote: metered.tier.remote_counts().map(RemoteReport::of),
        drain: None,
    }
}

/// A tier over the whole run.
fn tier_report(metered: &MeteredTier, drain: Option<Drain>, wall: Nanos) -> TierReport {
    let (peak, at_logical_peak) = metered.note_usage();
    let mapping = metered.mapped_as.map(|how| match how {
        MappedAs::Sync => "sync",
        MappedAs::Shared => "shared",
    });
    TierReport {
        figures: TierFigures {
            drain,
            ..figures(metered, at_logical_peak, &use_of(metered), wall)
        },
        shape: metered.shape.map(|name| name.to_string()),
        mapping: mapping.map(str::to_owned),
        capacity_bytes: metered.tier.capacity().0,
        logical_bytes_peak: peak.logical.0,
        stored_bytes_peak: peak.stored.0,
        held_bytes_peak: peak.held.0,
        errors: metered.errors.load(Ordering::Relaxed),
        read_latency_seconds: Quantiles::of(&lock(&metered.read_latency)),
        file: metered.file.as_ref().map(FileMeter::read),
    }
}

/// Figures of a tier's cost.
fn use_of(metered: &MeteredTier) -> TierUse {
    TierUse {
        charged_to_limit: metered.facts().charged_to_limit,
        rated: metered.rated,
        held_peak: metered.note_usage().0.held,
        written: metered.bytes_written(),
    }
}

/// The status of the tiers of which the use is known.
fn tiers_now(shared: &Shared, in_use: &[TierUse]) -> Vec<TierSnapshot> {
    let ranks: Vec<TierId> = shared.books.tiers.ranks().collect();
    let uptime = Nanos(shared.elapsed().as_nanos() as u64);
    let all = shared.books.tiers.iter().zip(in_use).enumerate();
    let tier = |(at, (metered, in_use)): (usize, (&MeteredTier, &TierUse))| {
        let usage = metered.tier.usage();
        let rank = ranks.iter().position(|id| usize::from(id.0) == at);
        TierSnapshot {
            figures: TierFigures {
                drain: shared.books.drain_of(at),
                ..figures(metered, usage, in_use, uptime)
            },
            rank: rank.map(|rank| rank as u64 + 1),
            load_seconds: Nanos(metered.state().load_ns).seconds(),
            logical_bytes: usage.logical.0,
            stored_bytes: usage.stored.0,
            // A tier that was removed has given it back.
            held_bytes: metered.removed.get().map_or(usage.held.0, |_| 0),
            profile: metered.profile.clone(),
        }
    };
    all.map(tier).collect()
}

const PAUSED: &str = "it is paused, and moves no page; `undercroft set PID paused=no` first";

const UNKNOWN_AGES: &str = "it does not know how long pages have not been used; start it with \
                            `--access-scan 10s`, for example";

/// The kind of a request in the legacy: of each kind the last counts. Drains come first, because a
/// limit may need a tier's pages elsewhere.
fn kind_of(ask: &Ask) -> usize {
    match ask {
        Ask::Drain(tier) | Ask::Remove(tier) | Ask::Reopen(tier) => {
            usize::from(*tier).min(TierId::MAX)
        }
        // Never kept here: see `Control::carry_out` and `policy.rs`.
        Ask::Add(_) | Ask::Core(_) | Ask::Demote(_) => TierId::MAX,
        Ask::Policy { .. } | Ask::Parameter { .. } => TierId::MAX,
        Ask::Latency { .. } => TierId::MAX + 1,
        Ask::MemoryMax(_) => TierId::MAX + 2,
        Ask::Pause(_) | Ask::Keep(_) => TierId::MAX + 3,
    }
}

const _: () = assert!(TierId::MAX + 3 < ASKS);

/// Pauses a run again that was paused under a dead manager: before any thread evicts a page.
pub(super) fn pause_again(shared: &Shared) {
    let asks = shared.books.legacy.asks();
    let paused = |text: &Vec<u8>| {
        let ask = serde_json::from_slice(text);
        matches!(ask, Ok(Ask::Pause(true) | Ask::Keep(true)))
    };
    if asks.iter().any(paused) {
        pause_first(shared, Hold::User);
    }
}

/// Pauses a run before any thread evicts a page.
pub(super) fn pause_first(shared: &Shared, why: Hold) {
    shared.gauges.pause(why, true);
    let limit = shared.gauges.limit_now();
    shared.books.engine().set_limit(limit);
}

impl Control {
    /// Answers one request for the status, or does what it asks. Waits for the peer for [`ASKING`]
    /// and [`HANDSHAKE`] at most.
    pub(super) fn tell_status(&mut self) {
        let Ok(socket) =
            rustix::net::accept_with(&self.doors.status, rustix::net::SocketFlags::CLOEXEC)
        else {
            return;
        };
        let timeout = Some(HANDSHAKE);
        let send = rustix::net::sockopt::Timeout::Send;
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, send, timeout);
        let receive = rustix::net::sockopt::Timeout::Recv;
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, receive, Some(ASKING));
        let mut asked = [0; ASK_BYTES_MAX];
        let (got, along) = fdpass::receive(socket.as_fd(), &mut asked).unwrap_or_default();
        let mut peer = File::from(socket);
        let answer = match serde_json::from_slice::<Question>(&asked[..got]) {
            Ok(Question::Daemon(word)) => serde_json::to_vec(&self.hear_daemon(&word)),
            Ok(Question::User(Ask::Add(spec))) => match self.begin_add(&spec, peer) {
                Ok(()) => return, // another thread answers
                Err((why, back)) => {
                    peer = back;
                    serde_json::to_vec(&Answered::Refused(why))
                }
            },
            Ok(Question::User(ask @ (Ask::Policy { .. } | Ask::Parameter { .. }))) => {
                match self.begin_policy(ask, along, peer) {
                    Ok(()) => return, // another thread answers
                    Err((why, back)) => {
                        peer = back;
                        serde_json::to_vec(&Answered::Refused(why))
                    }
                }
            }
            Ok(Question::User(Ask::Core(pid))) => match self.begin_core(pid, &peer) {
                Ok(()) => return, // another thread answers
                Err(why) => serde_json::to_vec(&Answered::Refused(why)),
            },
            Ok(Question::User(Ask::Demote(older))) => serde_json::to_vec(&self.demote(older)),
            Ok(Question::User(ask)) => serde_json::to_vec(&self.obey(&ask)),
            Err(_) => serde_json::to_vec(&self.snapshot()),
        };
        if let Ok(bytes) = answer {
            let _ = peer.write_all(&bytes);
        }
    }

    /// Does what a user asks, and keeps it for a successor.
    fn obey(&mut self, ask: &Ask) -> Answered {
        let moves = matches!(ask, Ask::Drain(_) | Ask::Remove(_));
        if moves && self.shared.gauges.is_paused() {
            return Answered::Refused(PAUSED.to_owned());
        }
        let answered = self.carry_out(ask);
        if answered == Answered::Yes
            && let Ok(text) = serde_json::to_vec(ask)
        {
            self.shared.books.legacy.asked(kind_of(ask), &text);
        }
        answered
    }

    /// Does what users asked of managers that have died.
    pub(super) fn obey_again(&mut self) {
        for text in self.shared.books.legacy.asks() {
            let Ok(ask) = serde_json::from_slice(&text) else {
                continue;
            };
            if let Answered::Refused(why) = self.carry_out(&ask) {
                log::warn(&format!("after a takeover, {ask:?} is not in force: {why}"));
            }
        }
    }

    fn carry_out(&mut self, ask: &Ask) -> Answered {
        let books = &self.shared.books;
        let done = match ask {
            Ask::Drain(tier) => books.drain(TierId(*tier)),
            Ask::Remove(tier) => books.remove(TierId(*tier)),
            Ask::Reopen(tier) => books.reopen(TierId(*tier)),
            Ask::Add(_) => Err("a successor does not know its file".to_owned()),
            Ask::Core(_) | Ask::Policy { .. } | Ask::Parameter { .. } => {
                Err("a successor does not know who asked".to_owned())
            }
            Ask::Demote(_) => Err("it is asked again by whoever wants it".to_owned()),
            Ask::Latency { bound } => return self.change_bound(*bound),
            Ask::MemoryMax(asked) => return self.change_limit(Bytes(*asked)),
            Ask::Pause(paused) => return self.pause(*paused),
            Ask::Keep(keep) => return self.keep(*keep),
        };
        match done.and_then(|()| self.have_migrator()) {
            Ok(()) => Answered::Yes,
            Err(why) => Answered::Refused(why),
        }
    }

    /// Has the scanner name pages that have not been used for `older` milliseconds.
    fn demote(&mut self, older: u64) -> Answered {
        let scans = matches!(self.shared.options.access_scan, AccessScan::Every(_));
        let why = if !scans {
            UNKNOWN_AGES
        } else if self.shared.gauges.is_paused() {
            PAUSED
        } else {
            match self.shared.gauges.ages.ask(Duration::from_millis(older)) {
                Ok(()) => return Answered::Yes,
                Err(why) => why,
            }
        };
        Answered::Refused(why.to_owned())
    }

    /// Has a thread add a tier, and answer `peer`. Error: why not, at once.
    fn begin_add(&mut self, spec: &str, peer: File) -> Result<(), (String, File)> {
        if let Err(why) = self.have_migrator() {
            return Err((why, peer));
        }
        add::begin(&self.shared, spec, peer)
    }

    /// Has a thread change the policy file, and answer `peer`. Error: why not, at once.
    fn begin_policy(
        &mut self,
        ask: Ask,
        along: Vec<OwnedFd>,
        peer: File,
    ) -> Result<(), (String, File)> {
        if self.shared.books.tiers.ranks().count() > 1
            && let Err(why) = self.have_migrator()
        {
            return Err((why, peer)); // a file may move copies
        }
        self.policies.begin(&self.shared, ask, along, peer)
    }

    /// Starts `uc-migrate`, if it does not run.
    pub(super) fn have_migrator(&mut self) -> Result<(), String> {
        if !self.migrates {
            let started = Migrator::start(&self.shared);
            started.map_err(|error| format!("no thread for it: {error}"))?;
            self.migrates = true;
        }
        Ok(())
    }

    fn scale(&self) -> Scale {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let seconds = |of: &AtomicU64| Nanos(count(of)).seconds();
        let books = &self.shared.books;
        let engine = &books.holds;
        let (layout, shortages) = (
            &self.shared.gauges.layout_holds,
            &self.shared.gauges.shortages,
        );
        Scale {
            engine_hold_seconds_max: seconds(&engine.wall),
            engine_hold_cpu_seconds_max: seconds(&engine.cpu),
            engine_locks: count(&books.locks.locks),
            engine_waits: count(&books.locks.waits),
            layout_hold_seconds_max: seconds(&layout.wall),
            layout_hold_cpu_seconds_max: seconds(&layout.cpu),
            descriptors_short: count(&shortages.descriptors),
            memory_short: count(&shortages.memory),
            table_full: count(&shortages.table),
            pages_refused: count(&shortages.refused),
        }
    }

    fn policies(&self) -> Policies {
        let (choice, share) = {
            let engine = self.shared.books.engine();
            let books = engine.books();
            (books.reclaim_choice(), books.placement().share)
        };
        Policies {
            reclaim: self.launch.options.reclaim.to_string(),
            prefetch: self.launch.options.prefetch.to_string(),
            placement: self.launch.options.placement.to_string(),
            compressed_bytes_target: share.map(|share| share.target.0),
            placement_decisions: share.map_or(0, |share| share.decisions),
            choice: choice.map(|choice| PolicyChoice {
                rule: choice.name.to_owned(),
                changes: choice.changes,
                pages_since_change: choice.pages_since_change,
                lru_sample_faults: choice.sample_faults[0],
                active_inactive_sample_faults: choice.sample_faults[1],
            }),
            plugin: (self.shared.books.advice()).map(|advice| advice.report()),
        }
    }

    fn bound_report(&self) -> Option<BoundReport> {
        let bound = self.bounds.latency.as_ref();
        bound.and_then(|bound| bound.report(&self.shared.gauges.knobs))
    }

    fn access_scans(&self) -> Option<AccessScans> {
        let scans = &self.shared.gauges.scans;
        let count = scans.count.load(Ordering::Relaxed);
        let asked_for = matches!(self.shared.options.access_scan, AccessScan::Every(_));
        (count > 0 || asked_for).then(|| AccessScans {
            count,
            seconds: scans.nanos.load(Ordering::Relaxed) as f64 / 1e9,
            pages_used: scans.pages_used.load(Ordering::Relaxed),
        })
    }

    /// The engine's counts, and the DRAM that the run takes.
    pub(super) fn memory_now(&self) -> (Stats, Bytes) {
        let held = self.shared.books.pool_held();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_pool_held(held);
        (*engine.books().stats(), engine.books().dram_used())
    }

    /// Costs that other limits would have had until now.
    pub(super) fn curve(&self, stats: &Stats, wall: Nanos) -> Option<MissRatioCurve> {
        let shared = &self.shared;
        if self.since.curve_from.is_some() {
            return None;
        }
        let (before, since, began) = &self.since.curve;
        let mut stats = *stats;
        let faults = stats.faults - before.faults;
        stats.swap_in -= before.swap_in;
        stats.first_touch -= before.first_touch;
        shared.books.follow_pages();
        let curve = shared.books.curve(stats.swap_in)?;
        let limit = shared.gauges.memory_max();
        // `since` is in this manager's time, which began later than the run if it took over.
        let until = match began {
            CurveBegan::Start => wall,
            CurveBegan::Limit | CurveBegan::Manager => shared.now(),
        };
        let wall = (until.since(*since), *since, *began);
        MissRatioCurve::of(&curve, limit.0, &stats, wall, self.since.toll.each(faults))
    }

    fn name(&self) -> Option<String> {
        self.shared.options.name.as_ref().map(ToString::to_string)
    }

    fn snapshot(&mut self) -> Snapshot {
        let shared = &self.shared;
        let (stats, dram) = self.memory_now();
        let (resident, stored) = {
            let engine = shared.books.engine();
            let books = engine.books();
            (books.resident().bytes().0, books.stored().bytes().0)
        };
        let unmanaged = self.unmanaged_pages().bytes().0;
        let footprint = &shared.gauges.footprint;
        let memory = resident + stored + unmanaged + footprint.strays().0;
        let memory_peak = footprint.note(Bytes(memory)).max(stats.pages_peak.bytes());
        let rates = Rates::between(
            &self.since.last_snapshot.1,
            &stats,
            self.since.last_snapshot.0.elapsed().as_secs_f64(),
        );
        let uptime = shared.elapsed();
        let in_use: Vec<TierUse> = shared.books.tiers.iter().map(use_of).collect();
        let tiers = tiers_now(shared, &in_use);
        let faults = lock(&shared.gauges.fault_latency).clone();
        let mrc = self.curve(&stats, Nanos(shared.elapsed().as_nanos() as u64));
        let own = std::process::id();
        let snapshot = Snapshot {
            schema_version: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: self.launch.keeper,
            run_pid: self.launch.front,
            client_pid: self.program().unwrap_or(0),
            manager_pid: own,
            command: self.launch.command.words.clone(),
            arguments: self.launch.command.arguments,
            name: self.name(),
            uid: None,
            uptime_seconds: uptime.as_secs_f64(),
            class: shared.options.class.clone(),
            memory_max_bytes: limit(shared.gauges.memory_max().0),
            paused: shared.gauges.is_paused(),
            memory_bytes: memory,
            memory_bytes_peak: memory_peak.0,
            resident_bytes: resident + unmanaged,
            dram_bytes: dram.0 + unmanaged,
            tiers,
            faults: Faults::of(&stats),
            fault_latency_seconds: Quantiles::of(faults.histogram()),
            fault_latency_histogram: LatencyHistogram::of(faults.histogram(), faults.served()),
            stall_seconds: faults.waited().seconds(),
            stall_some_seconds: faults.some_waited().seconds(),
            pressure: PressureReport::of(&self.bounds.pressure),
            latency_bound: self.bound_report(),
            pages: (&stats).into(),
            rates,
            limit_exceeded: lock(&shared.gauges.exceeded).until(Instant::now()),
            immovable: lock(&shared.gauges.fixed).until(Instant::now()),
            guest: handed::now(shared).or_else(|| self.guest.now(shared)),
            takeovers: shared.books.legacy.takeovers(),
            ages: shared.gauges.ages.now(),
            policies: self.policies(),
            counters: (&stats).into(),
            mrc,
            cost: CostReport::of(self.launch.options.memory_price, peaks(&stats), &in_use),
        };
        self.since.last_snapshot = (Instant::now(), stats);
        snapshot
    }

    /// Resources that the manager used. `metadata`: bytes.
    fn own_cost(&self, metadata: u64) -> ManagerCost {
        let gauges = &self.shared.gauges;
        let eviction = &gauges.eviction;
        let pages = gauges.managed_pages_peak.load(Ordering::Relaxed);
        let ticks = procfs::cpu_ticks(std::process::id()).unwrap_or(0);
        ManagerCost {
            cpu_seconds: Nanos(ticks * 10_000_000).seconds(),
            metadata_bytes: metadata,
            metadata_bytes_per_page: (pages > 0).then(|| metadata as f64 / pages as f64),
            scale: self.scale(),
            evict_batches: eviction.batches.load(Ordering::Relaxed),
            evict_locks: eviction.engine_locks.load(Ordering::Relaxed),
            commands_given_up: eviction.commands_given_up.load(Ordering::Relaxed),
            threads_moved: self.shared.cpu_plan.threads_moved(),
        }
    }

    pub(super) fn report(&self, exit_status: i32, wall_ns: u64) -> Report {
        let shared = &self.shared;
        let (stats, metadata) = {
            let engine = shared.books.engine();
            (*engine.books().stats(), engine.books().metadata_bytes())
        };
        let scans = &shared.gauges.scans;
        let metadata =
            metadata + scans.metadata.load(Ordering::Relaxed) + shared.books.curve_bytes();
        let all: Vec<(&MeteredTier, Option<Drain>)> = {
            let tiers = &shared.books.tiers;
            let current = tiers.iter().enumerate();
            let current = current.map(|(at, tier)| (tier, shared.books.drain_of(at)));
            let earlier = tiers.earlier();
            let earlier = earlier.map(|tier| (tier, tier.removed.get().copied()));
            current.chain(earlier).collect()
        };
        let wall = Nanos(wall_ns);
        let in_use: Vec<TierUse> = all.iter().map(|(tier, _)| use_of(tier)).collect();
        let tiers = all.into_iter();
        let tiers = tiers.map(|(tier, drain)| tier_report(tier, drain, wall));
        let latency = lock(&shared.gauges.fault_latency).clone();
        let footprint = &shared.gauges.footprint;
        let unmanaged = footprint.unmanaged_peak();
        let spaces = shared.gauges.spaces_seen.load(Ordering::Relaxed);
        Report {
            schema_version: SCHEMA_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: kernel_release(),
            command: self.launch.command.words.clone(),
            name: self.name(),
            exit_status,
            // The keeper knows these three.
            signal: None,
            pid: 0,
            started_unix_seconds: 0.0,
            wall_seconds: wall.seconds(),
            memory_max_bytes: limit(shared.gauges.memory_max().0),
            memory_bytes_peak: footprint.note(stats.pages_peak.bytes()).0,
            resident_bytes_peak: stats.resident_peak.bytes().max(unmanaged).0,
            dram_bytes_peak: stats.dram_peak.max(unmanaged).0,
            faults: Faults::of(&stats),
            fault_latency_seconds: Quantiles::of(latency.histogram()),
            fault_breakdown_seconds: shared.gauges.breakdown.mean(),
            latency_bound: self.bound_report(),
            stall_seconds: latency.waited().seconds(),
            stall_some_seconds: latency.some_waited().seconds(),
            pages: (&stats).into(),
            tiers: tiers.collect(),
            limit_exceeded: lock(&shared.gauges.exceeded).until(Instant::now()),
            immovable: lock(&shared.gauges.fixed).until(Instant::now()),
            pauses: lock(&shared.gauges.pauses).until(Instant::now()),
            manager: self.own_cost(metadata),
            spaces,
            mappings_peak: shared.gauges.mappings_peak.load(Ordering::Relaxed),
            managed: spaces > 0 && !self.presence.missed,
            unmanaged_processes_peak: shared.gauges.strays_peak.load(Ordering::Relaxed),
            guest: handed::now(shared).or_else(|| self.guest.now(shared)),
            policies: self.policies(),
            counters: (&stats).into(),
            access_scans: self.access_scans(),
            mrc: self.curve(&stats, wall),
            cost: CostReport::of(self.launch.options.memory_price, peaks(&stats), &in_use),
            takeovers: Takeovers::default(), // the keeper knows
        }
    }
}
