//! The configuration of a simulation: parsed once from the user's text, into types that cannot be
//! wrong.

use std::fmt;
use std::str::FromStr;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Nanos, Price, PriceError, TierId, WriteBudget};
use undercroft_device::{Attach, Law, Profile, Time, profiles};
use undercroft_policy::place::LatencyClass;
use undercroft_policy::reclaim::ReclaimName;
use undercroft_qos::LatencyBound;

use crate::bound;
use crate::kernel_swap::KernelSwap;
use crate::place::{Placement, StallMax};
use crate::plugin::Plugin;
use crate::reclaim;
use crate::sharing::Sharing;

/// How much DRAM the clients have together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// A size in bytes.
    Bytes(Bytes),
    /// A number of pages of the page size in force.
    Pages(u64),
    /// A part of the footprint (all pages touched), in percent.
    Percent(f64),
}

impl FromStr for Memory {
    type Err = SetupError;

    fn from_str(text: &str) -> Result<Memory, SetupError> {
        let wrong = |why: &str| SetupError::option("--memory", text, why, MEMORY_FIX);
        if let Some(number) = text.strip_suffix('%') {
            let percent: f64 = number.trim().parse().map_err(|_| wrong("not a number"))?;
            if !percent.is_finite() || percent <= 0.0 || percent > 1000.0 {
                return Err(wrong("the part must be above 0 %"));
            }
            return Ok(Memory::Percent(percent));
        }
        if let Some(number) = text.strip_suffix('p') {
            let pages = number.trim().parse().map_err(|_| wrong("not a number"))?;
            return match pages {
                0 => Err(wrong("no page")),
                pages => Ok(Memory::Pages(pages)),
            };
        }
        let bytes: Bytes = text.parse().map_err(|error| wrong(&format!("{error}")))?;
        match bytes.0 {
            0 => Err(wrong("no memory")),
            _ => Ok(Memory::Bytes(bytes)),
        }
    }
}

const MEMORY_FIX: &str = "give a part of the footprint (10%), a size (64M) or pages (1000p)";

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Bytes(bytes) => write!(f, "{bytes}"),
            Memory::Pages(pages) => write!(f, "{pages}p"),
            Memory::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Smallest page, as in the PCM paper.
pub const PAGE_BYTES_MIN: u64 = 512;
/// Largest page: a huge page of 2 MiB.
pub const PAGE_BYTES_MAX: u64 = 2 << 20;

/// A page size. Errors: not a power of two from 512 to 2M.
pub fn page_bytes(text: &str) -> Result<u64, SetupError> {
    let wrong = |why: &str| {
        SetupError::option(
            "--page-size",
            text,
            why,
            "use a power of two from 512 to 2M",
        )
    };
    let bytes: Bytes = text.parse().map_err(|error| wrong(&format!("{error}")))?;
    if !bytes.0.is_power_of_two() || !(PAGE_BYTES_MIN..=PAGE_BYTES_MAX).contains(&bytes.0) {
        return Err(wrong("not a page size"));
    }
    Ok(bytes.0)
}

/// A policy file of the user's: its name ends so.
const FILE_END: &str = ".wasm";

/// The reclaim policy that chooses what a policy file does not name, and the path of the file:
/// `FILE.wasm`, or `NAME+FILE.wasm`. `None`: this names no file.
pub(crate) fn file_of(text: &str) -> Option<(ReclaimName, &str)> {
    if !text.ends_with(FILE_END) {
        return None;
    }
    let named = text.split_once('+');
    let named = named.and_then(|(name, path)| Some((name.parse().ok()?, path)));
    Some(named.unwrap_or((ReclaimName::default(), text)))
}

/// The policy of a file. Errors: it cannot be read, or is no policy.
pub(crate) fn plugin(path: &str) -> Result<Plugin, SetupError> {
    let fix = "docs/guide/policies.md says what a policy file must have";
    Plugin::open(path).map_err(|why| SetupError::option("--policy", path, why, fix))
}

/// A reclaim policy, a policy file or a bound. Errors: an unknown name, with the valid ones; a file
/// that is no policy, with why.
pub fn reclaim(text: &str) -> Result<String, SetupError> {
    if let Some((_, path)) = file_of(text) {
        return plugin(path).map(|_| text.to_owned());
    }
    let known = names().contains(&text);
    known
        .then(|| text.to_owned())
        .ok_or_else(|| no_reclaim(text))
}

/// The names of reclaim policies and bounds.
fn names() -> Vec<&'static str> {
    [&reclaim::NAMES[..], &bound::NAMES].concat()
}

pub(crate) fn no_reclaim(text: &str) -> SetupError {
    let fix = format!("use one of: {}", names().join(", "));
    SetupError::option("--reclaim", text, "there is no such policy", fix)
}

/// A prefetch policy. Errors: an unknown name or window; the fix lists the valid ones.
pub fn prefetch(text: &str) -> Result<String, SetupError> {
    if text == "traced" {
        return Err(SetupError::option(
            "--prefetch",
            text,
            "recorded prefetches are not repeated any more",
            "use --prefetch none with a trace of `undercroft run --prefetch none`, or a policy",
        ));
    }
    match undercroft_policy::prefetch::by_name(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(SetupError::option(
            "--prefetch",
            text,
            error.to_string(),
            "example: readahead:8, window:8, none",
        )),
    }
}

/// Where a page is kept on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceLayout {
    /// Each page has its own place, in the order of addresses, so neighbours stay neighbours.
    Home,
    /// The next free place, cyclically: pages written together are stored together.
    Log,
}

/// Who waits for a write-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOut {
    /// The fault that needs the frame.
    Wait,
    /// No fault, while the device keeps up.
    Behind,
}

/// A tier of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct SimTier {
    /// As the user wrote it.
    pub text: String,
    /// Its kind.
    pub kind: TierModel,
    /// Most bytes of pages it holds. `None`: no limit.
    pub size: Option<Bytes>,
    /// Most pages that wait to be written behind; `None`: as many as the device's own queue holds.
    pub queue: Option<u32>,
}

/// How a tier is modelled.
#[derive(Clone, Debug, PartialEq)]
pub enum TierModel {
    /// Compressed DRAM, inside the memory limit.
    Pool {
        /// Bytes of pages in a byte of memory.
        ratio: f64,
        /// Most of the limit it may take, in percent.
        max_percent: Option<f64>,
    },
    /// A device.
    Device {
        /// Its constants.
        profile: Box<Profile>,
        /// Where pages are kept.
        layout: DeviceLayout,
        /// Who waits for write-outs.
        write_out: WriteOut,
    },
}

impl TierModel {
    /// How fast it is.
    pub fn latency(&self) -> LatencyClass {
        match self {
            TierModel::Pool { .. } => LatencyClass::Memory,
            TierModel::Device { profile, .. } => match profile.attach {
                Attach::Memory => LatencyClass::Nvm,
                Attach::Block => LatencyClass::Device,
            },
        }
    }
}

/// Default ratio of a compressed pool: LZ4's on the demo's data, and the usual figure for zswap.
const RATIO_DEFAULT: f64 = 3.0;

impl FromStr for SimTier {
    type Err = SetupError;

    fn from_str(text: &str) -> Result<SimTier, SetupError> {
        let wrong =
            |why: String, fix: &str| SetupError::option("--tier", text, why, fix.to_owned());
        let mut parts = text.split(',').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let mut spec = SimTier {
            text: text.to_owned(),
            kind: kind(name).ok_or_else(|| {
                let fix = format!("use one of: ram, {}", profiles::NAMES.join(", "));
                wrong(format!("there is no device `{name}`"), &fix)
            })?,
            size: None,
            queue: None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            spec.set(key, value)
                .map_err(|why| wrong(format!("`{part}`: {why}"), &spec.keys()))?;
        }
        Ok(spec)
    }
}

fn kind(name: &str) -> Option<TierModel> {
    if name == "ram" {
        return Some(TierModel::Pool {
            ratio: RATIO_DEFAULT,
            max_percent: None,
        });
    }
    let profile = profiles::by_name(name)?;
    let write_out = match profile.attach {
        Attach::Memory => WriteOut::Wait,
        Attach::Block => WriteOut::Behind,
    };
    Some(TierModel::Device {
        profile: Box::new(profile),
        layout: DeviceLayout::Home,
        write_out,
    })
}

impl SimTier {
    fn keys(&self) -> String {
        match self.kind {
            TierModel::Pool { .. } => "keys of ram: ratio=3, max=50%, size=64M".to_owned(),
            TierModel::Device { .. } => {
                "keys: size=1G, layout=home|log, write=wait|behind, queue=PAGES, channels=N, endurance=1e7 or \
                 tbw=600T, price=DOLLARS, read=ACCESS_NS+NS_PER_BYTE, write_time=ACCESS_NS+NS_PER_BYTE"
                    .to_owned()
            }
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let number = |least: f64| -> Result<f64, String> {
            let number: f64 = value.parse().map_err(|_| "not a number".to_owned())?;
            if number.is_finite() && number >= least {
                Ok(number)
            } else {
                Err(format!("must be at least {least}"))
            }
        };
        if key == "size" {
            let size: Bytes = value.parse().map_err(|error| format!("{error}"))?;
            self.size = Some(size);
            return Ok(());
        }
        match (&mut self.kind, key) {
            (TierModel::Pool { ratio, .. }, "ratio") => *ratio = number(1.01)?,
            (TierModel::Pool { max_percent, .. }, "max") => {
                let percent = value.strip_suffix('%').unwrap_or(value);
                let percent: f64 = percent.parse().map_err(|_| "not a percentage")?;
                if !(percent > 0.0 && percent <= 95.0) {
                    return Err("must be above 0 and at most 95 %".to_owned());
                }
                *max_percent = Some(percent);
            }
            (TierModel::Device { layout, .. }, "layout") => {
                *layout = match value {
                    "home" => DeviceLayout::Home,
                    "log" => DeviceLayout::Log,
                    _ => return Err("no such layout".to_owned()),
                }
            }
            (TierModel::Device { write_out, .. }, "write") => {
                *write_out = match value {
                    "wait" => WriteOut::Wait,
                    "behind" => WriteOut::Behind,
                    _ => return Err("no such way to write".to_owned()),
                }
            }
            (TierModel::Device { .. }, "queue") => self.queue = Some(number(1.0)? as u32),
            (TierModel::Device { profile, .. }, key) => match key {
                "channels" => profile.channels = number(1.0)? as u32,
                "endurance" => profile.endurance_writes = Some(number(1.0)?),
                "price" => {
                    let price: Price = value.parse().map_err(|e: PriceError| e.to_string())?;
                    profile.dollars_per_gib = price.dollars_per_gib();
                }
                "tbw" => {
                    let budget: WriteBudget =
                        value.parse().map_err(|e: PriceError| e.to_string())?;
                    let each = budget.bytes() / profile.capacity_bytes as f64;
                    profile.endurance_writes = Some(each);
                }
                "read" => profile.read = law(value)?,
                "write_time" => profile.write = law(value)?,
                _ => return Err("unknown key".to_owned()),
            },
            _ => return Err("unknown key".to_owned()),
        }
        Ok(())
    }

    /// The kind's name: `ram`, `pcm`, ...
    pub fn name(&self) -> &str {
        match &self.kind {
            TierModel::Pool { .. } => "ram",
            TierModel::Device { profile, .. } => profile.name,
        }
    }
}

fn law(text: &str) -> Result<Law, String> {
    let wrong = || "must be two numbers, as 55+0.86".to_owned();
    let (access, per_byte) = text.split_once('+').ok_or_else(wrong)?;
    let parse = |text: &str| text.trim().parse::<f64>().map_err(|_| wrong());
    let law = Law {
        access_ns: parse(access)?,
        per_byte_ns: parse(per_byte)?,
    };
    if law.access_ns >= 0.0 && law.per_byte_ns >= 0.0 && law.time(PAGE_BYTES_MAX).0 < 1 << 60 {
        Ok(law)
    } else {
        Err(wrong())
    }
}

/// A cost that can be switched on and off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cost {
    /// Charged for devices behind a controller, not for those on the memory bus (as in the PCM
    /// paper).
    Auto,
    /// Never charged.
    Off,
    /// Charged at every fault that reads from a tier: the usual amount.
    On,
    /// Charged at every fault that reads from a tier: this amount.
    Is(Nanos),
}

impl Cost {
    /// The cost of a fault that reads from a device attached like this. `usual_ns`: the usual
    /// amount.
    pub fn of(self, attach: Attach, usual_ns: f64) -> Time {
        match (self, attach) {
            (Cost::Off, _) | (Cost::Auto, Attach::Memory) => Time::default(),
            (Cost::Auto, Attach::Block) | (Cost::On, _) => Time::from_ns(usual_ns),
            (Cost::Is(nanos), _) => Time::from_ns(nanos.0 as f64),
        }
    }
}

impl FromStr for Cost {
    type Err = String;

    fn from_str(text: &str) -> Result<Cost, String> {
        Ok(match text {
            "auto" => Cost::Auto,
            "off" => Cost::Off,
            "on" => Cost::On,
            text => Cost::Is(
                text.parse()
                    .map_err(|error| format!("{error}; or auto, off, on"))?,
            ),
        })
    }
}

/// Contents of the pages before the first reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Nothing: a first touch makes a page of zeros, without a transfer, as for memory that a
    /// program asks for.
    Zero,
    /// Content that is in the last tier. A first touch reads it, as for code, files, or a program
    /// that was swapped out whole. The PCM paper counts so.
    Stored,
}

/// Whether the access that faulted counts as a use of its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultTouch {
    /// No: a new page starts with clear bits, as CLOCK is defined and as in libCacheSim.
    None,
    /// Only a write; it sets the bits of a write.
    Write,
    /// Always, like a processor that repeats the access.
    All,
}

/// When pages leave to make room for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimRoom {
    /// When a fault finds no room: memory is used to the last page.
    AfterPlan,
    /// As in the live manager: in batches that keep a reserve free.
    Ahead,
}

/// When pages leave. Errors: an unknown word, or one that is not followed any more.
pub fn room(text: &str) -> Result<SimRoom, SetupError> {
    let why = match text {
        "after" => return Ok(SimRoom::AfterPlan),
        "ahead" => return Ok(SimRoom::Ahead),
        "traced" => "recorded evictions are not repeated any more",
        _ => "there is no such rule",
    };
    let fix = "use --room ahead to make room as the live manager does, or after";
    Err(SetupError::option("--room", text, why, fix))
}

impl fmt::Display for SimRoom {
    /// As the user writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimRoom::AfterPlan => "after",
            SimRoom::Ahead => "ahead",
        })
    }
}

/// A simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// DRAM, divided among the clients by footprint.
    pub memory: Memory,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Policy or bound, valid for [`reclaim`].
    pub reclaim: String,
    /// Policy, valid for [`prefetch`].
    pub prefetch: String,
    /// Placement policy.
    pub placement: Placement,
    /// The kernel's choice of a swap device, in place of the placement policy.
    pub kernel_swap: Option<KernelSwap>,
    /// Fastest first; at least one, at most [`TierId::MAX`].
    pub tiers: Vec<SimTier>,
    /// Contents of pages at first.
    pub initial: Initial,
    /// Whether a faulting access is a use.
    pub fault_touch: FaultTouch,
    /// Processor and DRAM time of each reference.
    pub reference_time: Nanos,
    /// The kernel's path of a fault.
    pub software: Cost,
    /// Context switches of a fault.
    pub context_switch: Cost,
    /// When room for a fault is made: at the last moment, or ahead of it as in the live manager.
    pub room: SimRoom,
    /// Latency bounds of the clients.
    pub latency: Latencies,
    /// Stall bounds: one for all clients, or one for each; `None` = it has none. Empty: none has.
    pub stall: Vec<Option<StallMax>>,
    /// Estimate the miss-ratio curve, as in a live run.
    pub curve: bool,
    /// Devices serve requests by their times, and reads before writes, also without a common
    /// budget. False: in the order in which clients are simulated, so one may wait for another's
    /// later requests.
    pub unordered: bool,
    /// Keep the wait of each fault: 16 bytes each.
    pub waits: bool,
    /// Clients come and go under one budget; `None`: memory is divided once, by footprint.
    pub sharing: Option<Sharing>,
    /// For `random`.
    pub seed: u64,
}

/// Shortest window of a latency bound: a page-in takes about as long.
const WINDOW_MIN: Nanos = Nanos(1_000_000);

/// Latency bounds of the clients, and what is done to keep them.
#[derive(Clone, Debug, PartialEq)]
pub struct Latencies {
    /// Bound for all clients, or for each. Empty: none has a bound.
    pub bounds: Vec<LatencyBound>,
    /// Bounds that are set later, while the clients run.
    pub changes: Vec<BoundChange>,
    /// Least virtual time of a window.
    pub window: Nanos,
    /// Whether the bounds are kept (NVSwap), or only measured.
    pub control: bool,
}

/// A client gets another bound while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundChange {
    /// Virtual time. Page-ins that end then or later count for it.
    pub at: Nanos,
    /// The client, in the order of the trace. It has a bound before.
    pub client: usize,
    /// Its bound from then on.
    pub bound: LatencyBound,
}

impl Default for Latencies {
    /// No bound.
    fn default() -> Latencies {
        Latencies {
            bounds: Vec::new(),
            changes: Vec::new(),
            window: Nanos(1_000_000_000),
            control: true,
        }
    }
}

impl Default for Setup {
    /// CLOCK without prefetch in a tenth of the footprint, over PCM.
    fn default() -> Setup {
        Setup {
            memory: Memory::Percent(10.0),
            page_bytes: 4096,
            reclaim: "clock".to_owned(),
            prefetch: "none".to_owned(),
            placement: Placement::default(),
            kernel_swap: None,
            tiers: vec![SimTier {
                text: "pcm".to_owned(),
                kind: kind("pcm").expect("a known profile"),
                queue: None,
                size: None,
            }],
            initial: Initial::Zero,
            fault_touch: FaultTouch::None,
            reference_time: Nanos(0),
            software: Cost::Auto,
            context_switch: Cost::Auto,
            room: SimRoom::AfterPlan,
            latency: Latencies::default(),
            stall: Vec::new(),
            curve: false,
            unordered: false,
            waits: false,
            sharing: None,
            seed: 1,
        }
    }
}

impl Setup {
    /// Errors: the sharing does not fit the other options.
    pub(crate) fn check_sharing(&self, clients: usize) -> Result<(), SetupError> {
        let Some(sharing) = &self.sharing else {
            return Ok(());
        };
        let wrong = |why: String, fix: &str| {
            SetupError::option("sharing", &format!("{clients} clients"), why, fix)
        };
        if sharing.terms.len() != clients {
            let why = format!("there are terms for {}", sharing.terms.len());
            return Err(wrong(why, "give terms for each client"));
        }
        if self.page_bytes != BASE_PAGE_BYTES as u64 || !matches!(self.memory, Memory::Bytes(_)) {
            let why = "memory is divided in bytes, and in pages of 4 KiB".to_owned();
            return Err(wrong(why, "give a size of memory, and no other page size"));
        }
        if !self.latency.bounds.is_empty() || sharing.every.0 == 0 {
            let why = "bounds are among the terms, and time passes between divisions".to_owned();
            return Err(wrong(why, "give no other bounds, and a time above 0"));
        }
        Ok(())
    }

    /// Checks whether it can run, for any trace.
    pub fn check(&self) -> Result<(), SetupError> {
        if self.tiers.is_empty() {
            return Err(SetupError::option(
                "--tier",
                "",
                "there is no tier to swap to",
                "name at least one, for example --tier pcm",
            ));
        }
        if self.tiers.len() > TierId::MAX {
            return Err(SetupError::option(
                "--tier",
                &format!("{} tiers", self.tiers.len()),
                "too many tiers",
                format!("use at most {}", TierId::MAX),
            ));
        }
        if let Memory::Bytes(bytes) = self.memory
            && bytes.0 < self.page_bytes
        {
            return Err(SetupError::option(
                "--page-size",
                &self.page_bytes.to_string(),
                format!("a page is larger than the memory, {bytes}"),
                "use smaller pages, or more --memory",
            ));
        }
        if let (Some(change), true) = (self.latency.changes.first(), self.latency.bounds.is_empty())
        {
            return Err(SetupError::option(
                "--latency",
                &change.bound.to_string(),
                "a bound is changed, and no client has one",
                "give the bounds at the start",
            ));
        }
        let stall = self.stall.iter().flatten().next();
        if let (Some(bound), false) = (stall, self.latency.bounds.is_empty())
            && self.latency.control
        {
            return Err(SetupError::option(
                "--stall-max",
                &bound.to_string(),
                "it and --latency would both decide which pages go to the last tier",
                "leave one of them out",
            ));
        }
        if self.latency.window.0 < WINDOW_MIN.0 {
            return Err(SetupError::option(
                "--latency-window",
                &self.latency.window.to_string(),
                format!("a window takes at least {WINDOW_MIN}"),
                "give a longer one, such as 1s",
            ));
        }
        page_bytes(&self.page_bytes.to_string())?;
        reclaim(&self.reclaim)?;
        prefetch(&self.prefetch).map(drop)
    }
}

/// Why a simulation cannot run or continue: option, reason, fix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SetupError {
    /// An option's value is wrong or does not fit the others.
    #[error("{option} {value}: {why}; {fix}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// As written.
        value: String,
        /// The reason.
        why: String,
        /// The remedy.
        fix: String,
    },
    /// The trace has no reference.
    #[error("the trace {0} holds no reference; record or generate one that does")]
    EmptyTrace(String),
    /// Pages left DRAM and no tier had room.
    #[error(
        "--tier: every tier is full after {references} references; make one larger (size=), or give more --memory"
    )]
    TiersFull {
        /// References replayed until then.
        references: u64,
    },
}

impl SetupError {
    /// An option's value is wrong.
    pub fn option(
        option: &'static str,
        value: &str,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> SetupError {
        SetupError::Option {
            option,
            value: value.to_owned(),
            why: why.into(),
            fix: fix.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_a_part_a_size_or_pages() {
        assert_eq!("12.5%".parse(), Ok(Memory::Percent(12.5)));
        assert_eq!("64M".parse(), Ok(Memory::Bytes(Bytes(64 << 20))));
        assert_eq!("100p".parse(), Ok(Memory::Pages(100)));
        for text in ["0%", "-1%", "0", "0p", "x", "%", "nan%", "1e9%"] {
            let error = text.parse::<Memory>().expect_err(text).to_string();
            assert!(error.contains("--memory"), "{error}");
        }
    }

    #[test]
    fn tier_keys_change_the_profile_and_unknown_ones_are_named() {
        let spec: SimTier = "pcm,size=1M,read=10+0.5,channels=4,layout=log,write=behind,queue=9"
            .parse()
            .expect("valid");
        let TierModel::Device {
            profile,
            layout,
            write_out,
        } = &spec.kind
        else {
            panic!("a device");
        };
        assert_eq!(
            (profile.channels, *layout, *write_out),
            (4, DeviceLayout::Log, WriteOut::Behind)
        );
        assert_eq!(profile.read.time(100), Time::from_ns(60.0));
        assert_eq!((spec.size, spec.queue), (Some(Bytes(1 << 20)), Some(9)));
        let rated: SimTier = "nvme,price=0.25,tbw=3.84P".parse().expect("valid");
        let TierModel::Device { profile, .. } = &rated.kind else {
            panic!("a device");
        };
        assert_eq!(profile.dollars_per_gib, 0.25);
        assert_eq!(profile.endurance_writes, Some(1000.0));
        for (text, part) in [
            ("floppy", "hdd-7200"),
            ("pcm,colour=red", "colour=red"),
            ("pcm,read=fast", "55+0.86"),
            ("ram,ratio=0.5", "at least"),
            ("pcm,price=-1", "dollars a GiB"),
            ("pcm,tbw=600", "600T"),
            ("ram,layout=log", "unknown key"),
            ("", "no device"),
        ] {
            let error = text.parse::<SimTier>().expect_err(text).to_string();
            assert!(error.contains(part) && error.contains("--tier"), "{error}");
        }
    }

    #[test]
    fn impossible_setups_name_their_option() {
        let error = |change: fn(&mut Setup)| {
            let mut setup = Setup::default();
            change(&mut setup);
            setup.check().expect_err("impossible").to_string()
        };
        assert!(error(|s| s.tiers.clear()).starts_with("--tier"));
        assert!(error(|s| s.tiers = vec![s.tiers[0].clone(); 8]).starts_with("--tier"));
        assert!(error(|s| s.memory = Memory::Bytes(Bytes(100))).contains("larger than the memory"));
        assert!(error(|s| s.page_bytes = 1000).starts_with("--page-size"));
        assert!(error(|s| s.reclaim = "mru".to_owned()).contains("belady"));
        assert!(error(|s| s.prefetch = "x".to_owned()).starts_with("--prefetch"));
        let change = |s: &mut Setup| {
            let bound = "p99=1ms".parse().expect("a bound");
            let (at, client) = (Nanos(0), 0);
            s.latency.changes = vec![BoundChange { at, client, bound }];
        };
        assert!(error(change).contains("no client has one"));
        assert_eq!(Setup::default().check(), Ok(()));
    }
}
