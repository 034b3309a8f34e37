//! `undercroft demo`: one store, one workload, several ways to give it memory, in turn. Every value
//! is verified in each. Then a sort, for which no setting was tuned.

mod bundled;
mod server;
mod sort;
mod table;
mod workload;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use undercroft_base::Bytes;

use crate::args::{DemoArgs, StoreArg};
use crate::failure::{Failure, status};
use server::{NoServer, Place, Server, Setting};
use table::{Row, Run};
use workload::{CONNECTIONS, Phase, Plan, VALUE_BYTES};

/// Undercroft and kernel swap get the measured footprint divided by this.
const SHARE: u64 = 4;

/// Runs the demo. Status 0 only if every value of every setting was right.
pub(crate) fn demo(args: &DemoArgs) -> Result<u8, Failure> {
    let stop = interrupt_flag()?;
    let redis = choose_store(args.store)?;
    let directory = tempfile::Builder::new()
        .prefix("undercroft-demo-")
        .tempdir()
        .map_err(|error| {
            Failure::new(
                status::FAILED,
                "cannot make a temporary directory",
                error.to_string(),
                "set TMPDIR to a directory that can be written",
            )
        })?;
    let place = Place {
        directory: directory.path(),
        redis: redis.as_deref(),
        size: args.size,
    };
    let plan = Plan {
        keys: args.size.0.div_ceil(VALUE_BYTES as u64),
        ops: args.ops,
    };
    let store = if redis.is_some() {
        "redis-server"
    } else {
        "the bundled key-value store"
    };
    let narrator = Narrator { loud: !args.json };
    narrator.say(&format!(
        "{store}: {} values of {VALUE_BYTES} bytes, then {} requests over {CONNECTIONS} connections \
         (zipfian, 10 % writes), then all values again",
        plan.keys, plan.ops
    ));

    let first = measure("no limit", Setting::NoLimit, &place, plan, &stop)?;
    let footprint = first.dram();
    let limit = Bytes((footprint.0 / SHARE).max(crate::values::MEMORY_MAX_MIN.0));
    narrator.say(&format!(
        "footprint {footprint}; a quarter of it is {limit}"
    ));
    let rows = take_turns(args, first, limit, &place, plan, &stop)?;
    let sort = if args.no_sort {
        None
    } else {
        Some(sort::measure(args, directory.path(), &narrator)?)
    };
    table::print(&rows, sort.as_ref(), store, plan, limit, args.json)?;
    if rows.iter().all(Row::is_right) {
        Ok(0)
    } else {
        Ok(status::FAILED)
    }
}

/// Measures all settings, `args.rounds` times in turn.
///
/// * `first`: the first round without a limit.
fn take_turns(
    args: &DemoArgs,
    first: Run,
    limit: Bytes,
    place: &Place<'_>,
    plan: Plan,
    stop: &AtomicBool,
) -> Result<Vec<Row>, Failure> {
    let settings = [
        ("no limit", Setting::NoLimit),
        ("undercroft, 25 %", Setting::Undercroft(limit)),
        ("kernel zram, 25 % + compressed", Setting::Zram(limit)),
        ("kernel swap file, 25 %", Setting::SwapFile(limit)),
    ];
    let mut rows: Vec<Row> = settings.iter().map(|(name, _)| Row::new(name)).collect();
    rows[0].add(first);
    for round in 0..usize::from(args.rounds) {
        // Each round begins with another setting, so that none always follows the same one.
        for turn in 0..settings.len() {
            let at = (round + turn) % settings.len();
            let (name, setting) = settings[at];
            let is_kernel = matches!(setting, Setting::Zram(_) | Setting::SwapFile(_));
            if (round == 0 && at == 0) || rows[at].is_absent() {
                continue;
            }
            rows[at].add(if is_kernel && args.no_kernel_swap {
                Run::Absent("left out by --no-kernel-swap".to_owned())
            } else {
                measure(name, setting, place, plan, stop)?
            });
        }
    }
    Ok(rows)
}

/// The hidden `demo-kv`.
pub(crate) fn serve_bundled(socket: &Path) -> Result<u8, Failure> {
    server::serve_bundled(socket).map(|()| 0).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("the demo's store cannot listen on {}", socket.display()),
            error.to_string(),
            "choose a path that does not exist yet",
        )
    })
}

fn choose_store(wanted: StoreArg) -> Result<Option<PathBuf>, Failure> {
    match (wanted, server::find_redis()) {
        (StoreArg::Bundled, _) => Ok(None),
        (StoreArg::Auto, found) => Ok(found),
        (StoreArg::Redis, Some(found)) => Ok(Some(found)),
        (StoreArg::Redis, None) => Err(Failure::new(
            status::FAILED,
            "redis-server cannot be used",
            "no directory of PATH has one that can be managed",
            "install it (apt install redis-server), or use --store bundled",
        )),
    }
}

fn interrupt_flag() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).map_err(|error| {
            Failure::new(
                status::FAILED,
                "cannot handle Ctrl-C",
                error.to_string(),
                "please report this; it is a bug",
            )
        })?;
    }
    Ok(stop)
}

/// Runs one setting from start to end.
fn measure(
    name: &'static str,
    setting: Setting,
    place: &Place<'_>,
    plan: Plan,
    stop: &AtomicBool,
) -> Result<Run, Failure> {
    let (server, client) = match Server::start(setting, place, stop) {
        Ok(started) => started,
        Err(NoServer::Unavailable(why)) => return Ok(Run::Absent(why)),
        Err(NoServer::Failed(failure)) => return Err(interrupted_or(failure, stop)),
    };
    let bar = Bar::new(name);
    let measured = server.more(client, CONNECTIONS).and_then(|mut clients| {
        let mut show = |phase, done| bar.show(phase, done, plan);
        let measured = workload::run(&mut clients, plan, stop, &mut show)?;
        Ok((measured, clients.swap_remove(0)))
    });
    bar.end();
    let (measured, client) = measured.map_err(|error| {
        let what = format!("{name}: the store broke off ({error})");
        interrupted_or(server.failure(&what), stop)
    })?;
    let used = server
        .finish(client)
        .map_err(|failure| interrupted_or(failure, stop))?;
    Ok(Run::Measured {
        measured: Box::new(measured),
        dram: used.dram,
        report: used.report.map(Box::new),
    })
}

fn interrupted_or(failure: Failure, stop: &AtomicBool) -> Failure {
    if stop.load(Ordering::Relaxed) {
        Failure::new(
            130,
            "interrupted",
            "a signal asked the demo to stop",
            "nothing to do: the store was stopped and the machine put back",
        )
    } else {
        failure
    }
}

struct Narrator {
    loud: bool,
}

impl Narrator {
    fn say(&self, text: &str) {
        if self.loud && std::io::stderr().is_terminal() {
            eprintln!("{text}");
        }
    }
}

/// A progress bar on stderr, and only on a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new(name: &'static str) -> Bar {
        if !std::io::stderr().is_terminal() {
            return Bar(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(1);
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:<32} {msg:<8} [{bar:30}] {pos}/{len}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name);
        Bar(bar)
    }

    fn show(&self, phase: Phase, done: u64, plan: Plan) {
        let (text, total) = match phase {
            Phase::Load => ("load", plan.keys),
            Phase::Measure => ("measure", plan.ops),
            Phase::Verify => ("verify", plan.keys),
        };
        if self.0.is_hidden() {
            return;
        }
        self.0.set_length(total);
        self.0.set_message(text);
        self.0.set_position(done);
    }

    fn end(&self) {
        self.0.finish_and_clear();
    }
}
