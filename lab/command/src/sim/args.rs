//! The command line of `undercroft-lab sim`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use undercroft_base::Nanos;
use undercroft_qos::LatencyBound;
use undercroft_sim::place::{Placement, StallMax};
use undercroft_sim::setup::{self, Cost, FaultTouch, Initial, Memory, SimRoom, SimTier};

/// A bound, or that a client has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StallOrNone(pub Option<StallMax>);

fn stall_or_none(text: &str) -> Result<StallOrNone, String> {
    match text {
        "none" => Ok(StallOrNone(None)),
        _ => match text.parse() {
            Ok(bound) => Ok(StallOrNone(Some(bound))),
            Err(error) => Err(format!("{error}, or none")),
        },
    }
}

/// `undercroft-lab sim`: one replay, or a sweep of them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimArgs {
    /// A trace file, or the description of one to generate: zipf:pages=10000,refs=1000000,theta=0.9
    #[arg(long, value_name = "FILE|SPEC")]
    pub trace: Option<String>,

    /// DRAM of all clients together: a share of the footprint (10%), a size (64M) or pages (1000p);
    /// several by commas [default: the limit of a recorded live run, otherwise 10%]
    #[arg(long, short = 'm', value_name = "SIZE,..", value_delimiter = ',', value_parser = parsed::<Memory>)]
    pub memory: Vec<Memory>,

    /// Bytes of a page, 512 to 2M; several by commas
    #[arg(long, value_name = "SIZE,..", default_value = "4K", value_delimiter = ',', value_parser = page_size)]
    pub page_size: Vec<u64>,

    /// Policy that chooses the pages to evict (see `run --policy`), a policy file as FILE.wasm or
    /// NAME+FILE.wasm (auto, or this policy, chooses the others), or a bound: belady, random;
    /// several by commas [default: the policy of a recorded live run, otherwise clock]
    #[arg(long, alias = "policy", value_name = "NAME,..", value_delimiter = ',', value_parser = reclaim)]
    pub reclaim: Vec<String>,

    /// Policy that chooses the pages to load along with a fault: none, readahead[:PAGES],
    /// window[:PAGES], majority; several by commas [default: as recorded if a live run is replayed,
    /// otherwise none]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = prefetch)]
    pub prefetch: Vec<String>,

    /// Where pages go, fastest first; repeat for more. ram, or a device: pcm, optane-dimm,
    /// optane-ssd, nvme, sata-ssd, ssd-2010, hdd-7200, cxl-dram, dram, redis-lan; with key=value
    /// after commas. A/B tries one after the other
    #[arg(long = "tier", short = 't', value_name = "SPEC", value_parser = tiers)]
    pub tiers: Vec<TierChoice>,

    /// Content of pages before the first reference: zeros (a first touch reads nothing), or bytes
    /// stored in the last tier
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = InitialArg::Zero)]
    pub initial: InitialArg,

    /// Whether the access that faulted counts as a use of its page
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = FaultTouchArg::None)]
    pub fault_touch: FaultTouchArg,

    /// Processor and DRAM time of each reference
    #[arg(long, value_name = "TIME", default_value = "0ns", value_parser = parsed::<Nanos>)]
    pub reference_time: Nanos,

    /// The kernel's path of a fault: auto (charged for block devices, not on the memory bus), off,
    /// on, or a time
    #[arg(long, value_name = "COST", default_value = "auto", value_parser = parsed::<Cost>)]
    pub software: Cost,

    /// Context switches of a fault: auto, off, on, or a time
    #[arg(long, value_name = "COST", default_value = "auto", value_parser = parsed::<Cost>)]
    pub context_switch: Cost,

    /// Policies that choose the tier of a page (see `run --placement`); several by commas
    /// [default: as recorded if a live run is replayed, otherwise that of `run`]
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub placement: Vec<Placement>,

    /// When pages leave to make room: after (when a page is about to come: memory is used to the
    /// last page) or ahead (as in `run`: a reserve of a 256th is kept free; locality has a 64th)
    /// [default: ahead if a live run is replayed under its own limit and policies, otherwise after]
    #[arg(long, value_name = "WHEN", value_parser = room)]
    pub room: Option<SimRoom>,

    /// Bounds of the time of page-ins, as p99=200us: one for all clients, or one for each; several
    /// by commas. Pages of a client whose bound the last tier cannot keep go to the first (NVSwap)
    #[arg(long, value_name = "BOUND,..", value_delimiter = ',', value_parser = parsed::<LatencyBound>)]
    pub latency: Vec<LatencyBound>,

    /// Most of its time that a client may wait for pages, as 70%, or none: one for all clients, or
    /// one for each; several by commas. With --placement locality, its sequences of pages go to
    /// the SSD instead of the disk as far as that is needed (HybridSwap)
    #[arg(long, value_name = "BOUND,..", value_delimiter = ',', value_parser = stall_or_none)]
    pub stall_max: Vec<StallOrNone>,

    /// Virtual time of a window in which --latency is judged
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parsed::<Nanos>)]
    pub latency_window: Nanos,

    /// Also estimate the swap-ins of other limits from what `run` would know, and replay under each
    /// to compare
    #[arg(long)]
    pub mrc: bool,

    /// Seed of `random`
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,

    /// How results are printed
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = FormatArg::Table)]
    pub format: FormatArg,

    /// Print JSON: the same as --format json
    #[arg(long)]
    pub json: bool,

    /// Also write results.json, results.csv and results.md into this directory, and plots if memory
    /// or page size varies
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

const EXAMPLES: &str = "Examples:
  undercroft-lab sim --trace app.uct --memory 5%,10%,20% --page-size 512,4K --tier pcm
  undercroft-lab sim --trace zipf:pages=20000,refs=2000000 --reclaim clock,lru,belady,random --out sweep
  undercroft-lab sim --trace app.uct --tier ram,ratio=3 --tier nvme --prefetch none,readahead:8
  undercroft-lab sim --trace app.uct --tier pcm/hdd-7200 --initial stored --json
  undercroft-lab sim --trace app.uct --room ahead --tier optane-dimm --tier sata-ssd --latency p99=200us
  undercroft-lab sim --trace live.uct         what `run --trace live.uct` recorded, under its limit and policy again

Several values of an option make a sweep: every combination runs. Everything is simulated: the engine and the
policies are those of `undercroft run`, the devices are models.
Exit status: 0; 1 the trace cannot be read or the tiers are full; 2 wrong usage.";

/// Tiers that take the same place in the hierarchy, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct TierChoice(pub Vec<SimTier>);

/// `--initial` as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InitialArg {
    /// Memory that a program asks for: zeros
    Zero,
    /// Code, files, or a program that is swapped out whole; as in the PCM paper
    Stored,
}

impl From<InitialArg> for Initial {
    fn from(arg: InitialArg) -> Initial {
        match arg {
            InitialArg::Zero => Initial::Zero,
            InitialArg::Stored => Initial::Stored,
        }
    }
}

/// `--fault-touch` as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FaultTouchArg {
    /// No: bits are clear at first, as in the books and in libCacheSim
    None,
    /// A write does
    Write,
    /// Always, as a processor sets its bits
    All,
}

impl From<FaultTouchArg> for FaultTouch {
    fn from(arg: FaultTouchArg) -> FaultTouch {
        match arg {
            FaultTouchArg::None => FaultTouch::None,
            FaultTouchArg::Write => FaultTouch::Write,
            FaultTouchArg::All => FaultTouch::All,
        }
    }
}

/// `--format` as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Columns for people
    Table,
    /// Everything, one object
    Json,
    /// A line for each simulation
    Csv,
    /// A table to paste
    Markdown,
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, String> {
    text.trim()
        .parse()
        .map_err(|error: T::Err| error.to_string())
}

fn page_size(text: &str) -> Result<u64, String> {
    setup::page_bytes(text.trim()).map_err(|error| error.to_string())
}

fn reclaim(text: &str) -> Result<String, String> {
    setup::reclaim(text.trim()).map_err(|error| error.to_string())
}

fn prefetch(text: &str) -> Result<String, String> {
    setup::prefetch(text.trim()).map_err(|error| error.to_string())
}

fn room(text: &str) -> Result<SimRoom, String> {
    setup::room(text).map_err(|error| error.to_string())
}

fn tiers(text: &str) -> Result<TierChoice, String> {
    let specs: Result<_, _> = text.split('/').map(parsed).collect();
    specs.map(TierChoice)
}
