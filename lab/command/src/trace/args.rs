//! The command line of `undercroft-lab trace`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use undercroft_base::Bytes;
use undercroft_references::{CacheSpec, Sampling, Spec};
use undercroft_trace::TimeUnit;

/// Every command for traces.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Run a program under valgrind and record what reaches memory behind a cache
    Record(RecordArgs),
    /// Convert another tool's trace
    Import(ImportArgs),
    /// Generate a trace of a known pattern
    Generate(GenerateArgs),
    /// Show a trace: counts, footprint, reuse distances, miss ratios
    Info(InfoArgs),
    /// Print a trace as CSV
    Cat(CatArgs),
}

/// `--cache`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CacheArg {
    /// Every reference is kept.
    None,
    /// Only those that reach memory behind this cache.
    Cache(CacheSpec),
}

impl CacheArg {
    /// The cache, if there is one.
    pub(crate) fn spec(self) -> Option<CacheSpec> {
        match self {
            CacheArg::None => None,
            CacheArg::Cache(spec) => Some(spec),
        }
    }
}

fn cache(text: &str) -> Result<CacheArg, String> {
    match text {
        "none" => Ok(CacheArg::None),
        _ => match text.parse() {
            Ok(spec) => Ok(CacheArg::Cache(spec)),
            Err(error) => Err(format!("{error}, or none")),
        },
    }
}

fn page(text: &str) -> Result<Bytes, String> {
    let size = text.parse::<Bytes>().map_err(|error| error.to_string())?;
    if size.0.is_power_of_two() && size.0 <= 1 << 30 {
        Ok(size)
    } else {
        Err(format!(
            "{size} is not a power of two up to 1G; use e.g. 512 or 4K"
        ))
    }
}

fn spec(text: &str) -> Result<Spec, String> {
    text.parse::<Spec>().map_err(|error| {
        format!("{error} (example: zipf:pages=10000,refs=1e6,theta=0.99,writes=0.3,seed=1)")
    })
}

fn sampling(text: &str) -> Result<Sampling, String> {
    let refuse = || {
        format!(
            "`{text}` is neither rate=SHARE, above 0 and up to 1, nor pages=COUNT; use e.g. rate=0.01 or pages=8192"
        )
    };
    match text.split_once('=') {
        Some(("rate", rate)) => match rate.parse::<f64>() {
            Ok(rate) if rate > 0.0 && rate <= 1.0 => Ok(Sampling::Rate(rate)),
            _ => Err(refuse()),
        },
        Some(("pages", pages)) => match pages.parse::<u32>() {
            Ok(pages) if pages > 0 => Ok(Sampling::Pages(pages)),
            _ => Err(refuse()),
        },
        _ => Err(refuse()),
    }
}

/// `undercroft-lab trace record`.
#[derive(Debug, Args)]
#[command(after_help = RECORD_HELP)]
pub(crate) struct RecordArgs {
    /// The trace to write
    #[arg(long, short, value_name = "FILE")]
    pub out: PathBuf,

    /// Last-level cache between program and memory, write-back, LRU:
    /// SIZE[,WAYS[,LINE[,fetch|validate]]], or none. A store that misses reads its line (fetch), or
    /// does not (validate)
    #[arg(long, value_name = "SPEC", default_value = "1M,16,64", value_parser = cache)]
    pub cache: CacheArg,

    /// Round addresses down to multiples of this; default: the cache's line, or 1 byte without a
    /// cache
    #[arg(long, value_name = "SIZE", value_parser = page)]
    pub granularity: Option<Bytes>,

    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const RECORD_HELP: &str = "Examples:
  undercroft-lab trace record --out sort.uct -- sort -n numbers.txt
  undercroft-lab trace record --out gcc.uct --cache 2M,16,64 -- /usr/lib/gcc/x86_64-linux-gnu/12/cc1 big.i
  undercroft-lab trace record --out all.uct --cache none -- ./prog

Valgrind's lackey does the recording: about two million references a second, so that a second of the program
can take half an hour. It sees the program's own accesses, not those that the kernel makes for it. Threads run
one at a time and are not told apart. Programs that it executes are not followed, so name the program itself,
not a script around it. Time counts references before the cache.

Exit status: the program's own; 128+n when signal n ended it; 125 undercroft failed; 2 wrong usage.";

/// Formats of other tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// valgrind --tool=lackey --trace-mem=yes
    Lackey,
    /// Comma-separated, with names in the first line: address and access; optionally time, bytes,
    /// client, thread
    Csv,
}

/// The unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TimeUnitArg {
    /// Nanoseconds
    Ns,
    /// References of the program
    References,
    /// Instructions of the program
    Instructions,
}

impl From<TimeUnitArg> for TimeUnit {
    fn from(arg: TimeUnitArg) -> TimeUnit {
        match arg {
            TimeUnitArg::Ns => TimeUnit::Nanoseconds,
            TimeUnitArg::References => TimeUnit::References,
            TimeUnitArg::Instructions => TimeUnit::Instructions,
        }
    }
}

/// `undercroft-lab trace import`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  undercroft-lab trace import --format csv blocks.csv --granularity 4K --out blocks.uct
  valgrind --tool=lackey --trace-mem=yes --log-fd=9 ./prog 9>&1 >/dev/null |
      undercroft-lab trace import --format lackey - --cache 1M,16,64 --out prog.uct")]
pub(crate) struct ImportArgs {
    /// The file to read; - = standard input
    pub input: PathBuf,

    /// Its format
    #[arg(long, value_enum, value_name = "NAME")]
    pub format: FormatArg,

    /// The trace to write
    #[arg(long, short, value_name = "FILE")]
    pub out: PathBuf,

    /// Last-level cache to filter through: SIZE[,WAYS[,LINE[,fetch|validate]]], or none
    #[arg(long, value_name = "SPEC", default_value = "none", value_parser = cache)]
    pub cache: CacheArg,

    /// Round addresses down to multiples of this; default: the cache's line, or 1 byte without a
    /// cache
    #[arg(long, value_name = "SIZE", value_parser = page)]
    pub granularity: Option<Bytes>,

    /// How many clients a CSV trace has; they are numbered from 0
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub clients: u16,

    /// Unit of the time column of a CSV trace
    #[arg(long, value_enum, value_name = "UNIT", default_value_t = TimeUnitArg::Ns)]
    pub time_unit: TimeUnitArg,
}

/// `undercroft-lab trace generate`.
#[derive(Debug, Args)]
#[command(after_help = GENERATE_HELP)]
pub(crate) struct GenerateArgs {
    /// PATTERN[:KEY=VALUE,...][+PATTERN...]
    #[arg(value_name = "SPEC", value_parser = spec)]
    pub spec: Spec,

    /// The trace to write
    #[arg(long, short, value_name = "FILE")]
    pub out: PathBuf,
}

const GENERATE_HELP: &str = "Patterns and their own keys (default):
  sequential                          every page in a row, once
  strided   stride=N (16)             every N-th page, then again from one page further
  loop                                all pages in order, round and round
  uniform                             every page as likely
  zipf      theta=X (0.99)            Zipf's law over scattered pages
  objects   size=N (16), theta=X      objects of N pages, chosen by Zipf's law, each read whole
  shrink    step=N                    laps that each begin N pages later: elimination (a hundredth)
  phases    phases=N (10), set=PAGES  one set of pages after the other (a tenth of the pages)
  scan_hot  hot=PAGES, share=X (0.8)  a hot set (a tenth) gets a share of the references, a scan the rest

Keys of all: pages (10000), refs (10 a page; sequential 1), writes=SHARE (0), dirty=SHARE of pages that are
ever written (1), seed, client (0). Of the whole trace, with the first pattern: page=SIZE (4K),
gap=NANOSECONDS between references (100).
Patterns joined by + are mixed in proportion to their references, each in its own range of addresses.

Examples:
  undercroft-lab trace generate zipf:pages=10000,refs=1e6,theta=0.99,writes=0.3,seed=1 --out zipf.uct
  undercroft-lab trace generate scan_hot:hot=500,share=0.9+loop:pages=3000,client=1 --out two.uct";

/// `undercroft-lab trace info`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  undercroft-lab trace info prog.uct
  undercroft-lab trace info prog.uct --page-size 512 --plot curve.svg
  undercroft-lab trace info big.uct --sample rate=0.01 --json")]
pub(crate) struct InfoArgs {
    /// The trace; - = standard input
    pub trace: PathBuf,

    /// Size of the pages to count in; default: 4K, or the trace's granularity if that is larger
    #[arg(long, value_name = "SIZE", value_parser = page)]
    pub page_size: Option<Bytes>,

    /// Compute reuse distances from a sample of the pages (SHARDS): rate=SHARE or pages=COUNT.
    /// Counts and footprint stay exact
    #[arg(long, value_name = "SAMPLE", value_parser = sampling)]
    pub sample: Option<Sampling>,

    /// Draw the miss-ratio curve into FILE (.svg)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// `undercroft-lab trace cat`.
#[derive(Debug, Args)]
pub(crate) struct CatArgs {
    /// The trace; - = standard input
    pub trace: PathBuf,

    /// Stop after this many lines
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<u64>,

    /// Also print what became of pages without a reference, if a live trace says so: evicted,
    /// clean, returned, found, shared, ahead, dropped, accessed, locked, forked, ended. Such lines
    /// cannot be imported
    #[arg(long)]
    pub movements: bool,
}
