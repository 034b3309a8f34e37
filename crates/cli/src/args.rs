//! The command line: every subcommand, option and its help. Values are parsed here once, into types
//! that cannot be wrong.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use undercroft_api::Listen;
use undercroft_base::{Bytes, PageSize, Price};
use undercroft_keeper::wanted::Wanted;
use undercroft_policy::place::PlacementName;
use undercroft_policy::prefetch::PrefetchName;
use undercroft_proto::name::RunName;
use undercroft_proto::options::{AccessScan, WhenFull};
use undercroft_terminal::LogFormat;
use undercroft_tier::spec::TierSpec;

use crate::demote::DemoteArgs;
use crate::plugin::bench;
use crate::set::{self, Change};
use crate::show::StatusForm;
use crate::values::{self, Latency, MemoryMax};
use crate::view::ViewArgs;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(AnsiColor::Cyan.on_default());

/// Runs unmodified programs in less memory than they want: cold pages wait in compressed memory or
/// in a file.
#[derive(Debug, Parser)]
#[command(
    name = "undercroft",
    version = env!("UNDERCROFT_VERSION"),
    styles = STYLES,
    max_term_width = 100,
    after_help = "Start with `undercroft doctor`, then `undercroft demo`.\n\
                  Environment: UNDERCROFT_DIR = where tier files go by default; NO_COLOR = no colours."
)]
pub(crate) struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Every command of `undercroft`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program within a memory limit
    Run(Box<RunArgs>),
    /// Run a virtual machine within a memory limit, or serve those that others restore
    #[command(mut_arg("command", |arg| arg.required(false).required_unless_present("socket")))]
    Vm(Box<VmArgs>),
    /// Start a program that maps the memory of a running virtual machine, too
    View(ViewArgs),
    /// Restore a machine of Cloud Hypervisor, whose memory a run of `vm --socket` fills
    #[command(after_help = RESTORE_EXAMPLES)]
    Restore(RestoreArgs),
    /// Run a real store at a quarter of its memory, verify every value, and compare
    Demo(DemoArgs),
    /// Check what this machine allows, and name the fix for what is missing
    Doctor(JsonArgs),
    /// Divide memory among programs: `run --daemon` asks it for its share
    Daemon(DaemonArgs),
    /// Show the programs running under undercroft
    Status(StatusArgs),
    /// Watch the programs running under undercroft
    Top(TopArgs),
    /// Serve a web page, a REST API and metrics of the running programs
    Serve(ServeArgs),
    /// Change an option of a running program
    Set(SetArgs),
    /// Have pages leave memory that a running program has not used for a time
    Demote(DemoteArgs),
    /// Copy the core of a process from standard input to standard output, whole
    Core(CoreArgs),
    /// Put another binary of undercroft in place under running programs
    Upgrade(UpgradeArgs),
    /// List the kinds of tiers and their options, measure tiers, or empty one of a running program
    Tiers(TiersArgs),
    /// Begin a policy of your own, check one, or compare one
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Show a manual page, or write all of them into a directory
    Man {
        /// Subcommand whose page is shown, such as `tiers add`. Default: undercroft itself.
        command: Vec<String>,
        /// Writes one page a subcommand into this directory, which is made if it is missing
        #[arg(long, value_name = "DIR", conflicts_with = "command")]
        out: Option<PathBuf>,
    },
    /// Print what this binary can continue, as JSON; asked by `upgrade`.
    #[command(hide = true)]
    Versions,
    /// Print process id and command of each run; asked by completion scripts.
    #[command(hide = true)]
    Pids,
    /// The program of `vm --socket`: it listens.
    #[command(hide = true)]
    Door(DoorArgs),
    /// The launcher of a machine whose devices other processes serve: it waits for these.
    #[command(hide = true)]
    Await(AwaitArgs),
    /// The key-value store of `demo`.
    #[command(hide = true)]
    DemoKv {
        /// Unix socket to listen on.
        #[arg(long)]
        socket: PathBuf,
    },
}

const COMPLETIONS_EXAMPLES: &str = "Examples:
  undercroft completions bash > ~/.local/share/bash-completion/completions/undercroft
  undercroft completions zsh > ~/.zfunc/_undercroft         # with fpath+=~/.zfunc before compinit
  undercroft completions fish > ~/.config/fish/completions/undercroft.fish";

/// `undercroft run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// DRAM for the program and its compressed pages: 512M, 1.5GiB, 50% (of this machine's memory,
    /// or of its control group's limit), auto (90%) or max
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "max", value_parser = values::memory_max)]
    pub memory_max: MemoryMax,

    /// Where cold pages go, fastest first; repeat for more. `undercroft tiers` lists the kinds.
    /// Default: ram, then a file in $UNDERCROFT_DIR or the temporary directory
    #[arg(long = "tier", short = 't', value_name = "SPEC", value_parser = values::tier)]
    pub tiers: Vec<TierSpec>,

    /// Price of a GiB of DRAM, in dollars. With it, and price= of each tier that is not DRAM, the
    /// report and `undercroft status` say what the run costs at its peak, and what it would cost
    /// all in DRAM. No price is assumed
    #[arg(long, value_name = "DOLLARS", hide = true)]
    pub memory_price: Option<Price>,

    /// Policy that chooses the pages to evict: auto, lru, or a WebAssembly file whose name ends in
    /// .wasm. Pages that a file names leave first, and auto chooses the others
    #[arg(long = "policy", value_name = "NAME|FILE.wasm")]
    #[arg(default_value = values::RECLAIM_DEFAULT, value_parser = values::reclaim)]
    pub reclaim: values::Policy,

    /// Policy that chooses the pages to load along with a fault: majority, readahead[:PAGES],
    /// window[:PAGES] or none
    #[arg(long, value_name = "NAME", hide = true, default_value = values::PREFETCH_DEFAULT)]
    pub prefetch: PrefetchName,

    /// Policy that chooses the tier of a page, and how much DRAM compressed pages may take: worth
    /// (as much as pays) or waterfall (all that `max=` allows)
    #[arg(long, value_name = "NAME")]
    #[arg(default_value = values::PLACEMENT_DEFAULT, value_parser = values::placement)]
    pub placement: PlacementName,

    /// If every tier is full: keep the pages in memory, or end the program with status 125
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = WhenFullArg::Stay)]
    pub when_full: WhenFullArg,

    /// Write a report (JSON) after the program has ended. `-` is standard output
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,

    /// End when everything that the program started has ended. By default `run` ends with its
    /// program, and what that leaves behind stays managed
    #[arg(long)]
    pub wait_all: bool,

    /// Record page faults and evictions as a trace, for `undercroft-lab trace info` and
    /// `undercroft-lab sim`
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Scan which pages in memory were used, so that the policy keeps those. INTERVAL is a time
    /// from 10ms to 1h, such as 100ms; never; or auto: as often as a 64th of the pages in memory
    /// has left, if the machine allows it. A scan costs some 0.15 us a page in memory, and
    /// interrupts the program's CPUs. It runs on a CPU that serves no faults, if there is one.
    /// Scans take at most a tenth of the time (auto: a twentieth). Needs CAP_BPF and CAP_PERFMON
    #[arg(long, hide = true)]
    #[arg(value_name = "INTERVAL|auto|never", default_value = "auto", value_parser = values::access_scan)]
    pub access_scan: AccessScan,

    /// Threads that compress pages on their way out, the one that takes them out included. By
    /// default half of the CPUs, 8 at most
    #[arg(long, hide = true, value_name = "N", value_parser = values::compressors)]
    pub compressors: Option<usize>,

    /// Print only errors: no summary at the end
    #[arg(long, short)]
    pub quiet: bool,

    /// Form of what is printed on standard error: sentences, or an object of JSON a line with
    /// `time` and `event` (started, message, ended, failed)
    #[arg(long, value_enum, hide = true, value_name = "FORM", default_value_t = Log::Text)]
    pub log: Log,

    /// Bound of the time that page-ins take: pPERCENTILE=TIME, such as p99=200us. Each second,
    /// control decides where pages go and how many leave at a time, so that it is kept. The report
    /// and `undercroft status` say in how many windows it was. With `,measure` it is only measured
    #[arg(long, value_name = "BOUND[,measure]", value_parser = values::latency)]
    pub latency: Option<Latency>,

    /// Name of the run, for every command that takes one, and in figures: a letter, then letters,
    /// digits, `.`, `_` and `-`
    #[arg(long, value_name = "NAME")]
    pub name: Option<RunName>,

    /// End the program when its manager dies. Without it another manager takes over, but not with
    /// --trace or a redis tier
    #[arg(long, hide = true, conflicts_with = "takeovers_max")]
    pub no_takeover: bool,

    /// How often another manager may take over when one dies. 1000 by default, 0 with --trace or a
    /// redis tier
    #[arg(long, value_name = "COUNT", hide = true)]
    pub takeovers_max: Option<u32>,

    /// Take memory, tiers and bound from the daemon (`undercroft daemon`), which may change the
    /// limit while the program runs. CLASS is one of its configuration. --memory-max and --latency
    /// are further bounds. Tiers are the daemon's if it has any
    #[arg(long, value_name = "CLASS", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "default", conflicts_with = "trace")]
    pub daemon: Option<String>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

const RUN_EXAMPLES: &str = "Examples:
  undercroft run --memory-max 256M -- redis-server --port 7001
  undercroft run -m 25% --tier ram --tier file:/var/swap,size=20G -- python3 job.py
  undercroft run -m 1G --policy lru --report run.json -- gcc -O2 -c big.c
  undercroft run -m 1G --trace faults.uct -- gcc -O2 -c big.c
  undercroft run -m 1G -t nvm:/mnt/pmem,size=4G -t file:/var/swap,size=20G --latency p99=200us -- server

More options, for measurements and for the policies of papers, are in docs/guide/options.md.

Exit status: the program's own; 128+n when signal n ended it; 127 not found; 126 not executable;
125 undercroft failed; 2 wrong usage.";

/// `undercroft vm`.
#[derive(Debug, Args)]
#[command(after_help = VM_EXAMPLES)]
pub(crate) struct VmArgs {
    /// Memory of the guest, such as 512M, for a monitor other than QEMU. It finds the number of the
    /// memory's descriptor in UNDERCROFT_MEMORY_FD, maps it whole with MAP_SHARED, and calls
    /// madvise(MADV_DONTFORK). QEMU's own -m says it
    #[arg(long, value_name = "SIZE", value_parser = values::guest_memory)]
    pub memory: Option<Bytes>,

    /// Size of the pages that guest memory is moved in: 4K, or 2M from the kernel's pool of huge
    /// pages (sysctl vm.nr_hugepages). Pages are never split. A monitor other than QEMU maps such
    /// memory with MAP_NORESERVE
    #[arg(long, value_name = "SIZE", default_value = "4K")]
    pub page_size: PageSize,

    /// Listen here for machines that other processes restore from a snapshot, and give them their
    /// pages as they touch them: the backend_path of Firecracker's mem_backend, of type Uffd. Runs
    /// no program
    #[arg(long, value_name = "PATH", requires = "memory_file")]
    #[arg(conflicts_with_all = ["memory", "page_size", "command", "daemon", "trace"])]
    pub socket: Option<PathBuf>,

    /// The file with the memory of the snapshot: Firecracker's mem_file_path, or the memory-0 of
    /// Cloud Hypervisor's offload daemon. It must not change while machines run
    #[arg(long, value_name = "FILE", requires = "socket")]
    pub memory_file: Option<PathBuf>,

    #[command(flatten)]
    pub run: RunArgs,
}

/// `undercroft restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The folder with migration_config.json and state.json of the snapshot, as Cloud Hypervisor's
    /// offload daemon writes it
    #[arg(value_name = "DIR")]
    pub snapshot: PathBuf,

    /// Where Cloud Hypervisor listens: the unix path of receive-migration's receiver_url
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,

    /// Where the run listens that has the memory of the snapshot: its `vm --socket`
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,

    /// Leave the machine paused
    #[arg(long)]
    pub paused: bool,
}

const RESTORE_EXAMPLES: &str = "Examples:
  undercroft vm --socket /run/uffd.sock --memory-file /var/lib/vm/memory-0 &
  ch-remote --api-socket /run/ch.sock \\
    receive-migration receiver_url=unix:/run/ch.restore,memory_mode=postcopy &
  undercroft restore /var/lib/vm --to /run/ch.restore --socket /run/uffd.sock

It lasts until the machine has all of its memory. A machine with several slots of memory has a file
memory-N for each: --memory-file is those files in one, in order of N. Exit status: 0, or 1 if the
machine was not restored.";

/// `undercroft door`.
#[derive(Debug, Args)]
pub(crate) struct AwaitArgs {
    /// Sockets at which other processes are to listen.
    #[arg(long = "socket", required = true)]
    pub sockets: Vec<PathBuf>,
    /// Sockets made before this time are others'. In seconds since 1970.
    #[arg(long)]
    pub since: f64,
    /// Form of what is printed.
    #[arg(long, value_enum)]
    pub log: Log,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct DoorArgs {
    /// The number of the listening descriptor.
    #[arg(long)]
    pub listener: i32,
    /// Its path, removed at the end.
    #[arg(long)]
    pub socket: PathBuf,
    /// Bytes of the snapshot's memory.
    #[arg(long)]
    pub bytes: u64,
    /// Form of what is printed.
    #[arg(long, value_enum)]
    pub log: Log,
}

const VM_EXAMPLES: &str = r#"Examples:
  undercroft vm -m 1G -- qemu-system-x86_64 -accel kvm -m 4G -drive file=disk.qcow2,if=virtio
  undercroft vm -m 200M -t ram -- qemu-system-x86_64 -m 512M -nographic -kernel bzImage
  undercroft vm -m 256M --memory 1G -- my-monitor
  undercroft vm --socket /run/uffd.sock --memory-file /var/lib/vm/snapshot.mem

With the last one running, Firecracker restores any number of machines from the snapshot:
  PUT /snapshot/load {"snapshot_path": "/var/lib/vm/snapshot", "resume_vm": true,
    "mem_backend": {"backend_type": "Uffd", "backend_path": "/run/uffd.sock"}}
Each reads only what it uses, and the file is read once for all. Ctrl-C lets those that run go on,
and ends with the last; a second one ends them.

The limit is of the guest's memory and of the monitor's own together. What cannot be used, and why:
docs/guide/virtual-machines.md. Exit status: as of `undercroft run`."#;

/// `--when-full` as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenFullArg {
    /// Pages stay in memory; the limit is exceeded, and the report says by how much
    Stay,
    /// The program ends with status 125
    Kill,
}

impl From<WhenFullArg> for WhenFull {
    fn from(arg: WhenFullArg) -> WhenFull {
        match arg {
            WhenFullArg::Stay => WhenFull::Stay,
            WhenFullArg::Kill => WhenFull::Kill,
        }
    }
}

/// Commands that print a table or JSON.
#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// Commands that look at runs.
#[derive(Debug, Args)]
pub(crate) struct OthersArgs {
    /// Show the runs of other users, too. For root
    #[arg(long)]
    pub all: bool,
}

/// `undercroft status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// This run alone: any process of it, its name (`run --name`), or its program, such as
    /// redis-server
    #[arg(value_name = "RUN")]
    pub run: Option<Wanted>,

    #[command(flatten)]
    pub others: OthersArgs,

    /// Show what other limits would have cost until now: faults that read a tier, and about how
    /// long the program would have taken
    #[arg(long)]
    pub mrc: bool,

    /// Show how much of the time some thread waited for a page, as /proc/pressure/memory does:
    /// percent over 10, 60 and 300 seconds, and microseconds in all
    #[arg(long, conflicts_with = "mrc")]
    pub pressure: bool,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

impl StatusArgs {
    /// `--json` has the curve and the pressure, too.
    pub(crate) fn form(&self) -> StatusForm {
        match self {
            StatusArgs { json: true, .. } => StatusForm::Json,
            StatusArgs { mrc: true, .. } => StatusForm::Curve,
            StatusArgs { pressure: true, .. } => StatusForm::Pressure,
            _ => StatusForm::Text,
        }
    }
}

/// `undercroft top`.
#[derive(Debug, Args)]
#[command(after_help = TOP_EXAMPLES)]
pub(crate) struct TopArgs {
    /// Time between two looks, from 100ms to 1h
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = values::refresh)]
    pub interval: Duration,

    /// Column to sort by
    #[arg(long, value_name = "COLUMN", default_value = "faults")]
    pub sort: crate::top::Order,

    #[command(flatten)]
    pub others: OthersArgs,
}

const TOP_EXAMPLES: &str = "Examples:
  undercroft top
  undercroft top --interval 200ms --sort stall";

/// `undercroft daemon`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = DAEMON_EXAMPLES)]
pub(crate) struct DaemonArgs {
    /// The configuration, a TOML file; FILE.d/*.toml are read after it
    #[arg(long, value_name = "FILE", default_value = "/etc/undercroft.toml")]
    pub config: PathBuf,

    /// Form of the log on standard error: who is admitted, refused, given another limit, or gone
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Log::Text)]
    pub log: Log,

    /// The command to a running daemon, if any.
    #[command(subcommand)]
    pub command: Option<DaemonCommand>,
}

/// `--log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Log {
    /// Sentences
    Text,
    /// An object a line
    Json,
}

impl From<Log> for LogFormat {
    fn from(log: Log) -> LogFormat {
        match log {
            Log::Text => LogFormat::Text,
            Log::Json => LogFormat::Json,
        }
    }
}

/// Commands of `undercroft policy`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Write a policy to begin with into a directory, which is made: C, built with clang and
    /// wasm-ld
    New {
        /// The directory.
        dir: PathBuf,
    },
    /// Check a policy file: what it needs and exports, and how it takes each kind of event
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print the command of the lab that runs a policy file on a trace beside auto, lru and belady,
    /// the best there can be: a table, and JSON and plots in the folder bench
    Bench {
        /// The file.
        file: PathBuf,
        /// A trace of `run --trace`, or the description of one to generate. Default: a hot set, and
        /// a walk round the rest
        #[arg(long, value_name = "FILE|SPEC", default_value = bench::TRACE)]
        trace: String,
    },
}

/// Commands of `undercroft daemon`.
#[derive(Debug, Subcommand)]
pub(crate) enum DaemonCommand {
    /// Check a configuration and show what it means
    Check {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/undercroft.toml")]
        config: PathBuf,
    },
    /// Show what the daemon has given to which program
    Status(JsonArgs),
}

const DAEMON_EXAMPLES: &str = "Examples:
  undercroft daemon check --config undercroft.toml
  undercroft daemon --config undercroft.toml
  undercroft run --daemon=web -- redis-server
  undercroft daemon status
  systemctl reload undercroft           # SIGHUP: reads the configuration again

A configuration:
  memory = \"8G\"                        # DRAM to divide; or a share of the machine's, \"50%\"
  divide = \"auto\"                      # by what memory saves; or \"weights\"
  [[tier]]                              # none: each run has its own
  spec = \"ram\"
  [[tier]]
  spec = \"file:/var/swap,size=100G\"    # a directory; each client gets a file in it
  grant = \"10G\"                        # and this much from the start; more while others use less
  [class.web]
  weight = 4
  memory_min = \"1G\"
  memory_max = \"6G\"
  latency = \"p99=200us\"
  cpus = \"0-3\"                         # of the manager's threads
  realtime = false                      # none of them has real-time priority
  moves = \"16M\"                        # a second, between tiers in the background
  policy = \"mine.wasm\"                 # names pages that leave first";

/// `undercroft serve`.
#[derive(Debug, Args)]
#[command(after_help = SERVE_EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Where to listen: IP:PORT, localhost:PORT, or unix:PATH for a socket of this user alone
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9750")]
    pub listen: Listen,

    /// Let callers change running programs. Only with unix:PATH
    #[arg(long)]
    pub allow_changes: bool,

    /// Serve the runs of other users, too. For root, and only to look
    #[arg(long, conflicts_with = "allow_changes")]
    pub all: bool,

    /// Allow an address that other machines can reach. What is served is not encrypted, and
    /// without --token-file not protected: names and memory figures of all runs of this user
    #[arg(long)]
    pub allow_remote: bool,

    /// Answer only callers over TCP that send the token in this file: `Authorization: Bearer
    /// TOKEN`, or any user with it as password. Only /healthz needs none
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

const SERVE_EXAMPLES: &str = "Examples:
  undercroft serve
  undercroft serve --listen 127.0.0.1:9751
  undercroft serve --listen unix:/run/undercroft.sock --allow-changes
  curl --unix-socket /run/undercroft.sock http://localhost/v1/clients
  curl http://127.0.0.1:9750/metrics
  undercroft serve --listen 0.0.0.0:9750 --allow-remote --token-file /etc/undercroft.token";

/// `undercroft set`.
#[derive(Debug, Args)]
#[command(after_help = SET_EXAMPLES)]
pub(crate) struct SetArgs {
    /// The run: any process of it, its name (`run --name`), or its program, such as redis-server
    #[arg(value_name = "RUN")]
    pub run: Wanted,

    /// memory-max=SIZE, such as memory-max=512M, 50%, auto or max; latency=BOUND, such as
    /// latency=p99=300us, or latency=none; paused=yes or no: a paused run evicts nothing and moves
    /// nothing; keep=yes or no: the same, and what was evicted comes back; policy=FILE.wasm: pages
    /// that the file names leave first, or policy=none; policy.NAME=NUMBER: a parameter of the file
    #[arg(value_name = "KEY=VALUE", value_parser = set::change)]
    pub change: Change,
}

const SET_EXAMPLES: &str = "Examples:
  undercroft set 4711 memory-max=512M
  undercroft set redis-server latency=p99=300us
  undercroft set 4711 latency=none
  undercroft set 4711 paused=yes
  undercroft set 4711 keep=yes
  undercroft set 4711 policy=mine/policy.wasm
  undercroft set 4711 policy.behind=32

While a run is paused, faults are served as ever, pages come in and none leaves, so the limit is not kept. A pause
outlives its manager. `undercroft status`, `top` and the report show it.";

/// `undercroft core`.
#[derive(Debug, Args)]
#[command(after_help = CORE_EXAMPLES)]
pub(crate) struct CoreArgs {
    /// The process id of the process that dumps core, as the kernel gives it (`%P`)
    pub pid: u32,
}

const CORE_EXAMPLES: &str =
    "The kernel takes pages that have left memory for zeros. This command is for a handler of cores \
(core_pattern):
it has the pages of the process brought in first. The core of a process without undercroft is \
copied as it is.

Example, as root, with the file packaging/core-handler:
  sysctl kernel.core_pipe_limit=16
  sysctl kernel.core_pattern='|/usr/local/lib/undercroft/core-handler %P %e'";

/// `undercroft upgrade`.
#[derive(Debug, Args)]
#[command(after_help = UPGRADE_EXAMPLES)]
pub(crate) struct UpgradeArgs {
    /// The runs: any process of each, its name (`run --name`), or its program; none: all that
    /// `undercroft status` lists
    #[arg(value_name = "RUN")]
    pub runs: Vec<Wanted>,

    /// The binary; this one by default. It must be of this user or of root, and no other user may
    /// write to it
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

const UPGRADE_EXAMPLES: &str =
    "The binary is asked first what it can continue. One that cannot read what the run has \
written is
refused, and nothing is touched. Then the manager is ended, and one of the new binary takes over:
the program's threads wait for some 0.1 s where they need it. If it does not become ready, or dies
within 30 s, the binary before takes over again. `undercroft run` and the library in the program
stay what they are.

Examples:
  undercroft upgrade
  undercroft upgrade 4711 --binary /opt/undercroft/undercroft

Exit status: 0 all are upgraded; 1 one at least is not; 2 the binary cannot be used.";

/// `undercroft tiers`.
#[derive(Debug, Args)]
#[command(after_help = TIERS_EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct TiersArgs {
    /// The command for tiers of running programs, if any.
    #[command(subcommand)]
    pub command: Option<TiersCommand>,

    /// Measure these tiers, and keep what is found for later runs: capacity; reads, writes and
    /// frees of one page; bytes a second in sequence; channels. Takes some seconds and up to
    /// 256 MiB of each, which are given back
    #[arg(long, value_name = "SPEC", num_args = 1.., value_parser = values::tier)]
    pub measure: Vec<TierSpec>,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// Commands of `undercroft tiers` for the tiers of running programs.
#[derive(Debug, Subcommand)]
pub(crate) enum TiersCommand {
    /// Show the tiers of running programs: how fast they are, what they hold, what they cost, and
    /// how far they are worn
    Show {
        /// The run: any process of it, its name (`run --name`), or its program; all without it.
        #[arg(value_name = "RUN")]
        run: Option<Wanted>,

        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Changes one tier.
    #[command(flatten)]
    Change(TiersChange),
}

/// Commands of `undercroft tiers` that change a tier.
#[derive(Debug, Subcommand)]
pub(crate) enum TiersChange {
    /// Empty a tier while its program runs: no new page goes there, and its pages move to the
    /// others. Refused if they have no room. Ends when the tier is empty; if it is interrupted, the
    /// run goes on with it
    Drain {
        /// The run: any process of it, its name (`run --name`), or its program.
        #[arg(value_name = "RUN")]
        run: Wanted,
        /// Which tier: its number, as `undercroft status` shows it, or its name.
        tier: String,

        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Empty a tier while its program runs, and give its space back: a file has none left, and its
    /// number may be given to another tier. Refused as `drain` is. No other manager can take over
    /// the run afterwards
    Remove {
        /// The run: any process of it, its name (`run --name`), or its program.
        #[arg(value_name = "RUN")]
        run: Wanted,
        /// Which tier: its number, as `undercroft status` shows it, or its name.
        tier: String,

        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Use another tier while the program runs: it is opened and measured, and comes in front of
    /// the first tier that is slower. No other manager can take over the run afterwards. Or use a
    /// tier again that is or was drained
    Add {
        /// The run: any process of it, its name (`run --name`), or its program.
        #[arg(value_name = "RUN")]
        run: Wanted,
        /// A file, device or nvm tier, as `run --tier` takes it; or the number of a drained tier.
        #[arg(value_name = "SPEC")]
        tier: String,

        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
}

const TIERS_EXAMPLES: &str = "Examples:
  undercroft tiers
  undercroft tiers --measure ram ram,zstd nvm:/mnt/pmem,size=1G file:/var/tmp,size=1G
  undercroft tiers --json --measure file:/var/tmp,size=1G,shape=nvme
  undercroft tiers show 4711
  undercroft tiers drain 4711 2
  undercroft tiers add 4711 2
  undercroft tiers add 4711 file:/mnt/fast,size=8G
  undercroft tiers add 4711 ram,zstd
  undercroft tiers remove 4711 file:/var/swap";

/// `undercroft demo`.
#[derive(Debug, Args)]
#[command(
    after_help = "The store is redis-server if it is installed, otherwise a small built-in one."
)]
pub(crate) struct DemoArgs {
    /// Bytes of values to store
    #[arg(long, value_name = "SIZE", default_value = "384M", value_parser = values::demo_size)]
    pub size: Bytes,

    /// Requests of the measured part, over four connections; every tenth is a write
    #[arg(long, value_name = "COUNT", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub ops: u64,

    /// How often each setting is measured; the settings take turns
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub rounds: u16,

    /// Skip the scenes before the table: a container, a killed manager, a latency bound
    #[arg(long)]
    pub no_scenes: bool,

    /// Skip the comparison with kernel swap
    #[arg(long)]
    pub no_kernel_swap: bool,

    /// Measure a second program too, a sort in parts of its memory (some minutes)
    #[arg(long)]
    pub sort: bool,

    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}
