//! The command line: every subcommand and its help.

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand};
use undercroft_base::Bytes;
use undercroft_experiments::touch;

use crate::sim::args::SimArgs;
use crate::storm::StormArgs;
use crate::trace::args::TraceCommand;

/// Most threads of the workload.
const THREADS_MAX: i64 = touch::THREADS_MAX as i64;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(AnsiColor::Cyan.on_default());

/// Measures undercroft beside kernel swap, replays traces of memory references over models of
/// devices, and repeats the experiments of papers.
#[derive(Debug, Parser)]
#[command(
    name = "undercroft-lab",
    version,
    styles = STYLES,
    max_term_width = 100,
    disable_help_subcommand = true,
    after_help = "Start with `undercroft-lab list`.\n\
                  The binary under test is the `undercroft` beside this one, or --undercroft PATH."
)]
pub(crate) struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Every command of `undercroft-lab`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the experiments
    List(JsonArgs),
    /// Run one experiment, or all, beside kernel swap (needs root)
    Run(RunArgs),
    /// Set performance against cost: what each run costs at its peak, and what it does for that
    Cost(CostArgs),
    /// Draw the plots of existing results again
    Plot {
        /// results.json of a run.
        results: PathBuf,
        /// Directory for the plots.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Replay a trace of memory references over models of devices
    Sim(SimArgs),
    /// Run the engine through random programs and failures, and check every byte
    Storm(StormArgs),
    /// Record, generate, convert and show traces of memory references
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Touch memory in patterns: the workload of the experiments
    #[command(after_help = undercroft_experiments::touch::USAGE)]
    Touch {
        /// Its own arguments, below
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Commands that print a table or JSON.
#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// `undercroft-lab cost`.
#[derive(Debug, Args)]
#[command(after_help = COST_EXAMPLES)]
pub(crate) struct CostArgs {
    /// Reports of runs with prices (`run --report`). The first is what the others are compared
    /// with: give a run that has all in DRAM. No report: a small set of simulated runs
    #[arg(value_name = "REPORT")]
    pub reports: Vec<PathBuf>,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

const COST_EXAMPLES: &str = "Examples:
  undercroft-lab cost
  undercroft run -m max --memory-price 4.5 --report all.json -- python3 job.py
  undercroft run -m 1G --memory-price 4.5 -t file:/ssd,size=9G,price=0.1,tbw=600T --report ssd.json -- python3 job.py
  undercroft-lab cost all.json ssd.json

Without reports everything is simulated, with the prices of the simulator's models: round ones of 2021.
Cost: peak use of DRAM and of each tier, times its price (RapidSwap, section 4.3). Performance a cost:
section 4.4. The performance of a report is 1 / its run time, so all must be of the same work.";

const RUN_EXAMPLES: &str = "Examples:
  undercroft-lab run patterns --out results/patterns
  undercroft-lab run all --small --out results
  undercroft-lab run scale --out scale
  undercroft-lab run scale --quick --out scale
  undercroft-lab run scale --footprint 2G --threads 1,4,8,16 --operations 1000000 --out scale
  undercroft-lab run scale --swap-dir /mnt/nvme --out scale -- --policy lru

`scale` has 1, 2, 4, ... threads, up to twice the CPUs. Its limit is three eighths of the
footprint: 768 MiB of 2 GiB. Undercroft's RAM tier gets what zram used besides.";

/// `undercroft-lab run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// Name from `undercroft-lab list`
    pub name: String,

    /// Directory for results.json, results.md and plots
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// Seconds instead of minutes: checks that everything works; the numbers mean little
    #[arg(long, visible_alias = "quick")]
    pub small: bool,

    /// How often each setting is measured; default: the experiment's own number
    #[arg(long, value_name = "COUNT")]
    pub rounds: Option<usize>,

    /// Only the programs whose name contains one of these, by commas (experiment `programs`)
    #[arg(long, value_name = "TEXT,..", value_delimiter = ',')]
    pub only: Vec<String>,

    /// Only these settings, by commas: undercroft (the defaults), swapfile, zram, undercroft-lru or
    /// another fixed one (experiment `programs`)
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub settings: Vec<String>,

    /// Numbers of threads, by commas (experiment `scale`)
    #[arg(long, value_name = "COUNT,..", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX))]
    pub threads: Vec<u16>,

    /// Operations of each phase, of all threads together; a file gets a quarter of them (experiment
    /// `scale`)
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub operations: Option<u64>,

    /// Memory of the workload; default: the experiment's own
    #[arg(long, value_name = "SIZE", value_parser = footprint)]
    pub footprint: Option<Bytes>,

    /// Where swap files and file tiers go, on a disk; default: the --out directory
    #[arg(long, value_name = "DIR")]
    pub swap_dir: Option<PathBuf>,

    /// The binary under test; default: `undercroft` beside this one
    #[arg(long, value_name = "PATH", conflicts_with = "kernel_only")]
    pub undercroft: Option<PathBuf>,

    /// Measure only the kernel's settings
    #[arg(long)]
    pub kernel_only: bool,

    /// More options for `undercroft run`, after --
    #[arg(last = true, value_name = "OPTION")]
    pub undercroft_options: Vec<String>,
}

/// `run --footprint`: whole MiB.
fn footprint(text: &str) -> Result<Bytes, String> {
    let size = text.parse::<Bytes>().map_err(|error| error.to_string())?;
    match size.0 >> 20 {
        0 => Err("it is measured in whole MiB; give at least 1M".to_owned()),
        mib => Ok(Bytes(mib << 20)),
    }
}
