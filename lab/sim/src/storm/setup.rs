//! The configuration of a storm, which follows from its seed, and its text in a replay file.

use std::fmt::{self, Display, Write};

use undercroft_base::{Bytes, PageSize, TierFacts, TierId};
use undercroft_model::tier::{CLUSTER, DEVICE, MAPPED, POOL};
use undercroft_policy::prefetch;
use undercroft_seeded::Random;

use crate::reclaim;

/// Everything that is fixed before the first step. The seed decides the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StormSetup {
    /// Seeds every step and every failure.
    pub seed: u64,
    /// Reclaim policy, by name.
    pub reclaim: &'static str,
    /// Prefetch policy, by name.
    pub prefetch: &'static str,
    /// The client's limit.
    pub limit_pages: u64,
    /// Tiers, fastest first; never empty.
    pub tiers: Vec<TierSetup>,
    /// Room of the ledger.
    pub ledger_chunks: usize,
    /// Layout changes in 1000 steps.
    pub layout: u64,
    /// Tiers, installations and wake-ups fail.
    pub failures: bool,
    /// Managers killed in 10 000 steps.
    pub kills: u64,
    /// Action when nothing below has room.
    pub when_full: FullAction,
    /// Threads of the manager that serve faults.
    pub fault_threads: usize,
    /// Threads of each program.
    pub program_threads: usize,
    /// The placement links pages at random, to be loaded together.
    pub links: bool,
    /// Random neighbours come along where the prefetch policy wants no window.
    pub beside: bool,
    /// The kernel swaps pages out that are in memory by the books.
    pub kernel_swap: bool,
    /// A plugin names pages at random that shall leave first.
    pub plugin: bool,
    /// Half of the programs have large pages, and the limit is as many times higher.
    pub large: bool,
    /// A bug of the runtime, put in on purpose.
    pub sabotage: Option<Sabotage>,
}

/// A tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierSetup {
    /// RAM tiers lose only bits; nvm tiers lose pages for good; file tiers fail in every way.
    pub facts: &'static TierFacts,
    /// Most pages it holds.
    pub pages: u64,
    /// Loaded pages keep their copy.
    pub retain: bool,
    /// Its oldest pages move to the next tier.
    pub demotes: bool,
    /// Mostly says where to read, as a device does.
    pub reads: bool,
    /// Several copies are where it says.
    pub packs: bool,
    /// Size of the pages of its copies.
    pub page: PageSize,
}

/// Action of the storm when the limit is reached and no tier has room, as `--when-full` of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullAction {
    /// The limit is exceeded.
    Stay,
    /// Every process of the client is ended.
    Kill,
}

/// Bugs of the runtime, to show that a storm finds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// The slot of a page is freed when its load begins, not when it is installed.
    FreeEarly,
    /// Pages are installed without asking whether they may still be installed.
    InstallUnvalidated,
    /// Threads that waited for room are not woken.
    ForgetWake,
    /// The evictor forgets which threads it was asked to wake.
    ForgetEvictorWake,
    /// Bytes are taken without a check of their checksum.
    SkipChecksum,
    /// A successor of a killed manager does not wake the threads whose faults its predecessor had
    /// read.
    ForgetWakeAtTakeover,
    /// A successor does not finish the layout events that its predecessor had read.
    ForgetEventsAtTakeover,
    /// A successor ignores bytes in the holding area.
    ForgetHolding,
    /// A successor takes pages in the kernel's swap for absent.
    SwapIsAbsent,
    /// Pages that a late agent was told to move count as not moved.
    SettleAside,
    /// Bytes that a demotion read from a device are hashed again. The checksum that the tier kept
    /// does not go along.
    HashAgain,
}

impl Sabotage {
    /// All of them.
    pub const ALL: [Sabotage; 11] = [
        Sabotage::FreeEarly,
        Sabotage::InstallUnvalidated,
        Sabotage::ForgetWake,
        Sabotage::ForgetEvictorWake,
        Sabotage::SkipChecksum,
        Sabotage::ForgetWakeAtTakeover,
        Sabotage::ForgetEventsAtTakeover,
        Sabotage::ForgetHolding,
        Sabotage::SwapIsAbsent,
        Sabotage::SettleAside,
        Sabotage::HashAgain,
    ];

    /// Its name in a replay file.
    pub fn name(self) -> &'static str {
        match self {
            Sabotage::FreeEarly => "free-early",
            Sabotage::InstallUnvalidated => "install-unvalidated",
            Sabotage::ForgetWake => "forget-wake",
            Sabotage::ForgetEvictorWake => "forget-evictor-wake",
            Sabotage::SkipChecksum => "skip-checksum",
            Sabotage::ForgetWakeAtTakeover => "forget-wake-at-takeover",
            Sabotage::ForgetEventsAtTakeover => "forget-events-at-takeover",
            Sabotage::ForgetHolding => "forget-holding",
            Sabotage::SwapIsAbsent => "swap-is-absent",
            Sabotage::SettleAside => "settle-aside",
            Sabotage::HashAgain => "hash-again",
        }
    }

    /// The one of this name.
    pub fn by_name(name: &str) -> Option<Sabotage> {
        Sabotage::ALL.into_iter().find(|it| it.name() == name)
    }
}

impl StormSetup {
    /// The configuration that `seed` stands for.
    pub fn of_seed(seed: u64) -> StormSetup {
        let mut random = Random::new(seed ^ 0x5eed);
        let limit_pages = [24, 48, 100, 200][random.index(4)];
        let mut tiers = Vec::new();
        for at in 0..1 + random.index(3) {
            let facts = match at {
                0 => &POOL,
                _ => &DEVICE,
            };
            let pages = if random.chance(1, 4) {
                20 + random.below(60)
            } else {
                100 + random.below(4000)
            };
            tiers.push(TierSetup {
                facts,
                pages: if facts.charged_to_limit {
                    pages.min(limit_pages)
                } else {
                    pages
                },
                retain: random.chance(1, 2),
                demotes: random.chance(2, 3),
                reads: false,
                packs: false,
                page: PageSize::Base,
            });
        }
        if random.chance(1, 4) {
            tiers[0].facts = &DEVICE;
        }
        let mut setup = StormSetup {
            seed,
            reclaim: reclaim::NAMES[random.index(reclaim::NAMES.len())],
            prefetch: prefetch::NAMES[random.index(prefetch::NAMES.len())],
            limit_pages,
            tiers,
            ledger_chunks: [64, 64, 64, 8][random.index(4)],
            layout: random.below(11),
            failures: random.chance(2, 3),
            fault_threads: 1 + random.index(3),
            program_threads: 2 + random.index(6),
            kills: [0, 0, 5, 40][random.index(4)],
            when_full: if random.chance(1, 4) {
                FullAction::Kill
            } else {
                FullAction::Stay
            },
            links: false,
            beside: false,
            kernel_swap: false,
            plugin: false,
            large: false,
            sabotage: None,
        };
        // Drawn last: older seeds keep the rest of their configuration.
        add_devices(&mut setup.tiers, &mut random);
        make_nvm(&mut setup.tiers, &mut random);
        setup.links = random.chance(1, 3);
        // Some of the last tiers are a cluster.
        if let [_, .., last] = &mut setup.tiers[..]
            && random.chance(1, 4)
        {
            (last.facts, last.reads) = (&CLUSTER, false);
        }
        setup.disturb(&mut random);
        setup
    }

    /// Draws what disturbs the manager, the size of pages, and which files pack.
    fn disturb(&mut self, random: &mut Random) {
        if !self.links {
            random.bits(); // that was drawn for older seeds
        }
        self.beside = random.chance(1, 3);
        self.kernel_swap = random.chance(1, 3);
        add_large(self, random);
        self.plugin = random.chance(1, 3);
        for tier in &mut self.tiers {
            tier.packs = tier.reads && tier.page == PageSize::Base && random.chance(1, 2);
        }
    }

    /// The client's limit.
    pub fn limit(&self, pages: u64) -> Bytes {
        let each = if self.large { LARGE_FACTOR } else { 1 };
        Bytes(pages * each * PageSize::Base.bytes() as u64)
    }

    /// This setup with something left out, simplest first: the candidates of the minimiser.
    pub(super) fn simpler(&self) -> Vec<StormSetup> {
        let mut out = Vec::new();
        let mut push = |change: &dyn Fn(&mut StormSetup)| {
            let mut setup = self.clone();
            change(&mut setup);
            if setup != *self {
                out.push(setup);
            }
        };
        push(&|s| s.failures = false);
        push(&|s| s.kills = 0);
        push(&|s| s.layout = 0);
        push(&|s| s.tiers.truncate(1));
        push(&|s| {
            if s.tiers.len() > 1 {
                s.tiers.pop();
            }
        });
        push(&|s| {
            let nvm = |tier: &&mut TierSetup| tier.facts.updates_copies;
            let tiers = s.tiers.iter_mut().filter(nvm);
            tiers.for_each(|tier| tier.facts = &DEVICE);
        });
        push(&|s| {
            let remote = |tier: &&mut TierSetup| tier.facts.remote;
            let tiers = s.tiers.iter_mut().filter(remote);
            tiers.for_each(|tier| tier.facts = &DEVICE);
        });
        push(&|s| s.tiers.iter_mut().for_each(|tier| tier.retain = false));
        push(&|s| s.tiers.iter_mut().for_each(|tier| tier.demotes = false));
        push(&|s| s.tiers.iter_mut().for_each(|tier| tier.packs = false));
        push(&|s| {
            let tiers = s.tiers.iter_mut();
            tiers.for_each(|tier| (tier.reads, tier.packs) = (false, false));
        });
        push(&|s| s.links = false);
        push(&|s| s.beside = false);
        push(&|s| s.kernel_swap = false);
        push(&|s| s.plugin = false);
        push(&|s| {
            s.large = false;
            s.tiers.retain(|tier| tier.page == PageSize::Base);
        });
        push(&|s| s.prefetch = "none");
        push(&|s| s.reclaim = "lru");
        push(&|s| s.fault_threads = 1);
        push(&|s| s.program_threads = 1);
        push(&|s| s.when_full = FullAction::Stay);
        push(&|s| s.ledger_chunks = 64);
        push(&|s| s.limit_pages = 24);
        out
    }

    /// Reads one `key = value` of [`StormSetup`]'s text; false when it has no such key.
    pub(super) fn set(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let number = || {
            let parsed = value.parse::<u64>();
            parsed.map_err(|_| format!("`{value}` is not a whole number"))
        };
        let bounded = |range: std::ops::RangeInclusive<u64>| {
            let found = number()?;
            if range.contains(&found) {
                Ok(found)
            } else {
                Err(format!(
                    "{found} is outside {} to {}",
                    range.start(),
                    range.end()
                ))
            }
        };
        let named = |names: &[&'static str]| {
            let found = names.iter().find(|name| **name == value);
            let list = names.join(", ");
            found
                .copied()
                .ok_or_else(|| format!("`{value}` is none of {list}"))
        };
        match key {
            "seed" => self.seed = number()?,
            "reclaim" => self.reclaim = named(&reclaim::NAMES)?,
            "prefetch" => self.prefetch = named(prefetch::NAMES)?,
            "limit_pages" => self.limit_pages = bounded(1..=1 << 20)?,
            "tier" => self.tiers.push(tier(value)?),
            "ledger_chunks" => self.ledger_chunks = bounded(1..=4096)? as usize,
            "layout" => self.layout = bounded(0..=1000)?,
            "failures" => self.failures = named(&["yes", "no"])? == "yes",
            "links" => self.links = named(&["yes", "no"])? == "yes",
            "beside" => self.beside = named(&["yes", "no"])? == "yes",
            "large" => self.large = named(&["yes", "no"])? == "yes",
            "plugin" => self.plugin = named(&["yes", "no"])? == "yes",
            "kernel_swap" => self.kernel_swap = named(&["yes", "no"])? == "yes",
            "kills" => self.kills = bounded(0..=10_000)?,
            "when_full" => {
                self.when_full = match named(&["stay", "kill"])? {
                    "kill" => FullAction::Kill,
                    _ => FullAction::Stay,
                }
            }
            "fault_threads" => self.fault_threads = bounded(1..=64)? as usize,
            "program_threads" => self.program_threads = bounded(1..=64)? as usize,
            "sabotage" => {
                let names = Sabotage::ALL.map(Sabotage::name);
                self.sabotage = Sabotage::by_name(named(&names)?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// With large pages, the limit is this many times higher: some 3 to 25 of them fit.
const LARGE_FACTOR: u64 = 64;

/// A quarter of the setups have tiers for large pages behind the others, as many as there are
/// numbers for.
fn add_large(setup: &mut StormSetup, random: &mut Random) {
    setup.large = random.chance(1, 4);
    if !setup.large {
        return;
    }
    // A pool is no larger than the limit, as of base pages.
    let pool_max = (setup.limit_pages * LARGE_FACTOR / PageSize::Large.base_pages()).max(1);
    for at in 0..setup.tiers.len().min(TierId::MAX - setup.tiers.len()) {
        let tier = setup.tiers[at];
        let most = if tier.facts.charged_to_limit {
            pool_max
        } else {
            u64::MAX
        };
        setup.tiers.push(TierSetup {
            page: PageSize::Large,
            pages: (4 + random.below(60)).min(most),
            ..tier
        });
    }
}

/// Half of the files above another tier are nvm.
fn make_nvm(tiers: &mut [TierSetup], random: &mut Random) {
    let Some((_, above)) = tiers.split_last_mut() else {
        return;
    };
    for tier in above {
        if tier.facts.is_local_device() && random.chance(1, 2) {
            (tier.facts, tier.reads) = (&MAPPED, false);
        }
    }
}

/// Most files say where to read. A third of the setups have one or two more devices.
fn add_devices(tiers: &mut Vec<TierSetup>, random: &mut Random) {
    for tier in &mut *tiers {
        tier.reads = tier.facts.is_local_device() && random.chance(2, 3);
    }
    if random.chance(1, 3) {
        for _ in 0..1 + random.index(2) {
            tiers.push(TierSetup {
                facts: &DEVICE,
                pages: 20 + random.below(400),
                retain: random.chance(1, 2),
                demotes: random.chance(2, 3),
                reads: true,
                packs: false,
                page: PageSize::Base,
            });
        }
    }
}

fn tier(value: &str) -> Result<TierSetup, String> {
    let mut words = value.split_whitespace();
    let kinds = [&POOL, &MAPPED, &DEVICE, &CLUSTER];
    let name = words.next().unwrap_or_default();
    let Some(facts) = kinds.into_iter().find(|facts| facts.kind == name) else {
        let names = kinds.map(|facts| facts.kind).join(", ");
        return Err(format!("`{value}` begins with none of {names}"));
    };
    let pages = words.next().and_then(|word| word.strip_prefix("pages="));
    let pages = pages.and_then(|pages| pages.parse().ok());
    let Some(pages @ 1..=0x10_0000) = pages else {
        return Err(format!("`{value}` has no `pages=N`, 1 to 1048576"));
    };
    let (mut retain, mut demotes, mut reads, mut packs) = (false, false, false, false);
    let mut page = PageSize::Base;
    for word in words {
        match word {
            "retain" => retain = true,
            "demotes" => demotes = true,
            "large" => page = PageSize::Large,
            "reads" if facts.is_local_device() => reads = true,
            "packs" if facts.is_local_device() => packs = true,
            _ => {
                return Err(format!(
                    "`{word}` is none of `retain`, `demotes`, `large` and (of a file) `reads`, \
                     `packs`, which a tier may have"
                ));
            }
        }
    }
    Ok(TierSetup {
        facts,
        pages,
        retain,
        demotes,
        reads,
        packs,
        page,
    })
}

impl Display for StormSetup {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |on: bool| if on { "yes" } else { "no" };
        writeln!(out, "seed = {}", self.seed)?;
        writeln!(out, "reclaim = {}", self.reclaim)?;
        writeln!(out, "prefetch = {}", self.prefetch)?;
        writeln!(out, "limit_pages = {}", self.limit_pages)?;
        for tier in &self.tiers {
            let mut line = tier.facts.kind.to_owned();
            write!(line, " pages={}", tier.pages)?;
            line += if tier.retain { " retain" } else { "" };
            line += if tier.demotes { " demotes" } else { "" };
            line += if tier.reads { " reads" } else { "" };
            line += if tier.packs { " packs" } else { "" };
            line += if tier.page == PageSize::Large {
                " large"
            } else {
                ""
            };
            writeln!(out, "tier = {line}")?;
        }
        writeln!(out, "ledger_chunks = {}", self.ledger_chunks)?;
        writeln!(out, "layout = {}", self.layout)?;
        writeln!(out, "failures = {}", yes(self.failures))?;
        writeln!(out, "kills = {}", self.kills)?;
        let when_full = match self.when_full {
            FullAction::Stay => "stay",
            FullAction::Kill => "kill",
        };
        writeln!(out, "when_full = {when_full}")?;
        writeln!(out, "fault_threads = {}", self.fault_threads)?;
        writeln!(out, "program_threads = {}", self.program_threads)?;
        if self.links {
            writeln!(out, "links = yes")?;
        }
        if self.beside {
            writeln!(out, "beside = yes")?;
        }
        if self.kernel_swap {
            writeln!(out, "kernel_swap = yes")?;
        }
        if self.plugin {
            writeln!(out, "plugin = yes")?;
        }
        if self.large {
            writeln!(out, "large = yes")?;
        }
        match self.sabotage {
            Some(sabotage) => writeln!(out, "sabotage = {}", sabotage.name()),
            None => Ok(()),
        }
    }
}
