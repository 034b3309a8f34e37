//! `undercroft demo`: scenes that show what undercroft is for. Then one store, one workload, and
//! several ways to give it memory, in turn; every value is verified in each. Then a sort, for which
//! no setting was tuned.

mod bundled;
mod scenes;
mod server;
mod sort;
mod table;
mod workload;

use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use undercroft_base::Bytes;
use undercroft_rig::{Plain, Rig, SwapFile, TierChoice, Undercroft, Zram, interrupt};

use crate::args::DemoArgs;
use server::{NoServer, Server};
use table::{Round, Rounds};
use undercroft_terminal::{Failure, status};
use workload::{CONNECTIONS, Phase, Plan, VALUE_BYTES};

/// Undercroft and kernel swap get the measured footprint divided by this.
const SHARE: u64 = 4;

/// The ways to give the store memory. The first has no limit.
const SETTINGS: [&str; 4] = [
    "no limit",
    "undercroft, 25 %",
    "kernel zram, 25 % + compressed",
    "kernel swap file, 25 %",
];

/// Which of them is ours.
const OURS: usize = 1;

/// Runs the demo. Status 0 only if every value of every setting was right.
pub(crate) fn demo(args: &DemoArgs) -> Result<u8, Failure> {
    interrupt::install();
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
    let plan = Plan {
        keys: args.size.0.div_ceil(VALUE_BYTES as u64),
        ops: args.ops,
    };
    let narrator = Narrator { loud: !args.json };
    narrator.say(&format!(
        "a key-value store: {} values of {VALUE_BYTES} bytes, then {} requests over {CONNECTIONS} \
         connections (zipfian, 10 % writes), then all values again",
        plan.keys, plan.ops
    ));

    let scenes = (!args.no_scenes).then(|| scenes::Scenes::play(args, directory.path(), plan));
    let scenes = scenes.transpose()?;
    if let (Some(scenes), false) = (&scenes, args.json) {
        scenes.print(plan)?;
    }
    let first = measure(0, &Plain, Bytes(0), directory.path(), plan)?;
    let footprint = first.dram();
    let limit = Bytes((footprint.0 / SHARE).max(crate::values::MEMORY_MAX_MIN.0));
    narrator.say(&format!(
        "footprint {footprint}; a quarter of it is {limit}"
    ));
    let rows = take_turns(args, first, limit, directory.path(), plan)?;
    let sort = (args.sort).then(|| sort::measure(args, directory.path(), &narrator));
    let sort = sort.transpose()?;
    table::print(
        &rows,
        sort.as_ref(),
        scenes.as_ref(),
        (plan, limit),
        args.json,
    )?;
    let right = scenes.as_ref().is_none_or(scenes::Scenes::is_right);
    if right && rows.iter().all(Rounds::is_right) {
        Ok(0)
    } else {
        Ok(status::FAILED)
    }
}

/// Undercroft with these further options.
fn ours(args: &DemoArgs, directory: &Path, extra: &[&str]) -> Result<Undercroft, Failure> {
    let place = crate::run::tier_directory(None, directory.to_owned())?;
    Ok(Undercroft {
        binary: server::own_binary()?,
        name: None,
        tier: TierChoice::RamThenFile(place),
        swap: room(args),
        directory: directory.to_owned(),
        extra: extra.iter().map(|word| (*word).to_owned()).collect(),
        alone: false,
    })
}

/// Room for what leaves memory.
fn room(args: &DemoArgs) -> Bytes {
    Bytes(2 * args.size.0 + (256 << 20))
}

/// Undercroft, zram and a swap file, each with this room for what leaves memory. `None`: the user
/// leaves it out.
fn rigs(
    args: &DemoArgs,
    directory: &Path,
    swap: Bytes,
) -> Result<[Option<Box<dyn Rig>>; 3], Failure> {
    // A swap file needs a file system on a disk; the temporary directory may be in memory.
    let place = crate::run::tier_directory(None, directory.to_owned())?;
    let ours = Undercroft {
        swap,
        ..ours(args, directory, &[])?
    };
    let file = SwapFile {
        swap,
        directory: place,
    };
    let kernel = |rig: Box<dyn Rig>| (!args.no_kernel_swap).then_some(rig);
    Ok([
        Some(Box::new(ours)),
        kernel(Box::new(Zram { swap })),
        kernel(Box::new(file)),
    ])
}

/// Measures all settings, `args.rounds` times in turn.
///
/// * `first`: the first round without a limit.
fn take_turns(
    args: &DemoArgs,
    first: Round,
    limit: Bytes,
    directory: &Path,
    plan: Plan,
) -> Result<Vec<Rounds>, Failure> {
    let [ours, zram, file] = rigs(args, directory, room(args))?;
    let rigs = [Some(Box::new(Plain) as Box<dyn Rig>), ours, zram, file];
    let mut rows: Vec<Rounds> = SETTINGS.iter().map(|name| Rounds::new(name)).collect();
    rows[0].add(first);
    for round in 0..usize::from(args.rounds) {
        // Each round begins with another setting, so that none always follows the same one.
        for turn in 0..SETTINGS.len() {
            let at = (round + turn) % SETTINGS.len();
            if (round == 0 && at == 0) || rows[at].is_absent() {
                continue;
            }
            rows[at].add(match &rigs[at] {
                None => Round::Absent("left out by --no-kernel-swap".to_owned()),
                Some(rig) => measure(at, rig.as_ref(), limit, directory, plan)?,
            });
        }
    }
    Ok(rows)
}

/// The hidden `demo-kv`.
pub(crate) fn serve_bundled(socket: &Path) -> Result<u8, Failure> {
    bundled::serve(socket).map(|()| 0).map_err(|error| {
        Failure::new(
            status::FAILED,
            format!("the demo's store cannot listen on {}", socket.display()),
            error.to_string(),
            "choose a path that does not exist yet",
        )
    })
}

/// Runs a setting from start to end. `at`: its place in [`SETTINGS`].
fn measure(
    at: usize,
    rig: &dyn Rig,
    limit: Bytes,
    directory: &Path,
    plan: Plan,
) -> Result<Round, Failure> {
    let (server, client) = match Server::start(rig, limit, directory) {
        Ok(started) => started,
        Err(NoServer::Unavailable(why)) => return Ok(Round::Absent(why)),
        Err(NoServer::Failed(failure)) => return Err(interrupted_or(failure)),
    };
    let name = SETTINGS[at];
    let bar = Bar::new(name);
    let measured = server.more(client, CONNECTIONS).and_then(|mut clients| {
        let mut show = |phase, done| bar.show(phase, done, plan);
        let measured = workload::run(&mut clients, plan, &mut show)?;
        Ok((measured, clients.swap_remove(0)))
    });
    bar.end();
    let (measured, client) = measured.map_err(|error| {
        let what = format!("{name}: the store broke off ({error})");
        interrupted_or(server.failure(&what))
    })?;
    let used = server.finish(client, at == 0).map_err(interrupted_or)?;
    Ok(Round::Measured {
        measured: Box::new(measured),
        dram: used.dram,
        report: used.report.map(Box::new),
    })
}

fn interrupted_or(failure: Failure) -> Failure {
    if interrupt::requested() {
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
