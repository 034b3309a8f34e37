//! Scenes of the demo, before its table: a container that is too small, a manager that is killed,
//! and a latency bound beside a neighbour that writes to the same disk.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_proto::report::BoundReport;
use undercroft_rig::{Container, Plain, Rig, TierChoice, Undercroft, interrupt};
use undercroft_terminal::Failure;

use super::server::{NoServer, Server};
use super::workload::{self, CONNECTIONS, Measured, Phase, Plan, VALUE_BYTES};
use super::{Bar, interrupted_or, ours};
use crate::args::DemoArgs;
use crate::{live, show};

/// The bound of the last scene.
const BOUND: &str = "p99=1ms";

/// The container of the first scene has half of what the store needs.
const CONTAINER_SHARE: u64 = 2;

/// A container has at least this: undercroft itself needs some of it.
const CONTAINER_MIN: u64 = 64 << 20;

/// The program's part of the container's memory: the rest is for the manager, and for pages of
/// files.
const LIMIT_PERCENT: u64 = 60;

/// The store of the last scene has this part of the values and requests: each page of its file
/// waits for the neighbour.
const PART: u64 = 4;

/// Bytes that the neighbour writes before it waits for the disk.
const NEIGHBOUR_BYTES: usize = 4 << 20;
const NEIGHBOUR_BLOCKS: usize = 16;

/// Results of all scenes. Null where this machine does not allow one.
#[derive(Debug, Serialize)]
pub(super) struct Scenes {
    /// Memory of the container.
    container_bytes: u64,
    /// The store alone in it: how it ended.
    plain: Option<Plainly>,
    /// The store under undercroft in it, with its manager killed.
    managed: Option<Managed>,
    /// How the bound was kept beside the neighbour: with pages in a file, and in compressed memory.
    bounds: [Option<BoundReport>; 2],
}

/// The end of the store without undercroft.
#[derive(Debug, Serialize)]
struct Plainly {
    /// True if the kernel killed it.
    killed: bool,
    /// Values that it had taken by then.
    values_stored: u64,
}

/// The store under undercroft.
#[derive(Debug, Serialize)]
struct Managed {
    values_verified: u64,
    values_wrong: u64,
    /// Managers killed, and the time until the next one served faults.
    managers_killed: u64,
    pause_seconds: f64,
    /// Most memory of the container that was in use.
    container_bytes_peak: u64,
}

impl Scenes {
    /// True if no value was wrong.
    pub(super) fn is_right(&self) -> bool {
        self.managed
            .as_ref()
            .is_none_or(|managed| managed.values_wrong == 0)
    }

    /// Plays all scenes.
    pub(super) fn play(args: &DemoArgs, directory: &Path, plan: Plan) -> Result<Scenes, Failure> {
        let memory = Bytes((args.size.0 / CONTAINER_SHARE).max(CONTAINER_MIN));
        let plain = plainly(memory, directory, plan)?;
        let managed = match &plain {
            Some(_) => managed(args, memory, directory, plan)?,
            None => None,
        };
        let place = crate::run::tier_directory(None, directory.to_owned())?;
        let [file, ram] = [TierChoice::File(place.clone()), TierChoice::Ram]
            .map(|tier| bounded(args, tier, (directory, &place), plan));
        Ok(Scenes {
            container_bytes: memory.0,
            plain,
            managed,
            bounds: [file?, ram?],
        })
    }

    /// Prints them on standard output.
    pub(super) fn print(&self, plan: Plan) -> Result<(), Failure> {
        let container = Bytes(self.container_bytes);
        show::line(&format!(
            "A container of {container} without swap, and a store of {} in it",
            Bytes(plan.keys * VALUE_BYTES as u64)
        ))?;
        match &self.plain {
            Some(plain) if plain.killed => show::line(&format!(
                "  plain       killed by the kernel after {} of {} values",
                plain.values_stored, plan.keys
            ))?,
            Some(_) => show::line("  plain       not killed: it needs less here")?,
            None => show::line("  left out: memory cgroups cannot be made here")?,
        }
        if let Some(managed) = &self.managed {
            let verdict = match managed.values_wrong {
                0 => format!("all {} values right", managed.values_verified),
                wrong => format!("WRONG: {wrong} values"),
            };
            show::line(&format!(
                "  undercroft  {verdict}; at most {} in the container",
                Bytes(managed.container_bytes_peak)
            ))?;
            show::line(&format!(
                "  meanwhile   its manager was killed {} time(s); the program waited {} at most",
                managed.managers_killed,
                seconds(managed.pause_seconds)
            ))?;
        }
        show::line(&format!(
            "\nA bound of {BOUND} for page-ins, in three quarters of the memory, while a neighbour \
             writes to the same disk"
        ))?;
        for (name, bound) in ["in a file", "compressed"].iter().zip(&self.bounds) {
            let Some(bound) = bound else {
                show::line(&format!("  {name:<16}cannot run here"))?;
                continue;
            };
            let windows = bound.windows_kept + bound.windows_missed;
            show::line(&format!(
                "  {name:<16}p99 {}; kept in {} of {windows} windows",
                bound.tail_seconds.map_or("-".to_owned(), seconds),
                bound.windows_kept
            ))?;
        }
        Ok(())
    }
}

fn seconds(seconds: f64) -> String {
    Nanos((seconds * 1e9) as u64).to_string()
}

/// A store that was started, or `None` where this machine does not allow it.
fn start(rig: &dyn Rig, limit: Bytes, directory: &Path) -> Result<Option<Started>, Failure> {
    match Server::start(rig, limit, directory) {
        Ok((server, client)) => {
            let clients = server.more(client, CONNECTIONS);
            let clients = clients.map_err(|error| server.failure(&error.to_string()))?;
            Ok(Some(Started { server, clients }))
        }
        Err(NoServer::Unavailable(_)) => Ok(None),
        Err(NoServer::Failed(failure)) => Err(interrupted_or(failure)),
    }
}

struct Started {
    server: Server,
    clients: Vec<undercroft_resp::Client>,
}

impl Started {
    /// Runs the workload to its end, or to that of the store.
    fn work(
        &mut self,
        name: &'static str,
        plan: Plan,
        mut at: impl FnMut(&Server, Phase, u64),
    ) -> std::io::Result<Measured> {
        let bar = Bar::new(name);
        let server = &self.server;
        let mut show = |phase, done| {
            bar.show(phase, done, plan);
            at(server, phase, done);
        };
        let worked = workload::run(&mut self.clients, plan, &mut show);
        bar.end();
        worked
    }
}

/// The store in a container that is too small.
fn plainly(memory: Bytes, directory: &Path, plan: Plan) -> Result<Option<Plainly>, Failure> {
    let rig = Container {
        memory,
        inside: &Plain,
    };
    let Some(mut started) = start(&rig, memory, directory)? else {
        return Ok(None);
    };
    let mut values_stored = 0;
    let worked = started.work("a container, plain", plan, |_, phase, done| {
        if phase == Phase::Load {
            values_stored = done;
        }
    });
    if interrupt::requested() {
        return Err(interrupted_or(started.server.failure("interrupted")));
    }
    if worked.is_ok() {
        let client = started.clients.swap_remove(0);
        started.server.finish(client, true)?;
        return Ok(Some(Plainly {
            killed: false,
            values_stored,
        }));
    }
    drop(started.clients);
    let killed = started.server.was_killed()?;
    Ok(Some(Plainly {
        killed,
        values_stored,
    }))
}

/// The same under undercroft, all of which is in the container. Its manager is killed when half of
/// the requests are done.
fn managed(
    args: &DemoArgs,
    memory: Bytes,
    directory: &Path,
    plan: Plan,
) -> Result<Option<Managed>, Failure> {
    let inside = ours(args, directory, &[])?;
    let rig = Container {
        memory,
        inside: &inside,
    };
    let limit = Bytes(memory.0 * LIMIT_PERCENT / 100);
    let Some(mut started) = start(&rig, limit, directory)? else {
        return Ok(None);
    };
    let mut killed = false;
    let worked = started.work("a container, undercroft", plan, |server, phase, done| {
        if phase == Phase::Measure && done > plan.ops / 2 && !killed {
            killed = true;
            kill_manager(server.pid());
        }
    });
    let measured = worked.map_err(|error| {
        let what = format!("the store in a container broke off ({error})");
        interrupted_or(started.server.failure(&what))
    })?;
    let client = started.clients.swap_remove(0);
    let used = started.server.finish(client, false)?;
    let takeovers = used.report.map(|report| report.takeovers);
    Ok(Some(Managed {
        values_verified: measured.verified,
        values_wrong: measured.wrong,
        managers_killed: takeovers.as_ref().map_or(0, |of| of.count),
        pause_seconds: takeovers.map_or(0.0, |of| of.pause_seconds_max),
        container_bytes_peak: used.group.0,
    }))
}

/// Kills the manager of the run that process `run` has started.
fn kill_manager(run: u32) {
    let runs = live::snapshots().unwrap_or_default();
    let own = runs.iter().find(|of| of.run_pid == Some(run));
    let pid = own.and_then(|of| Pid::from_raw(of.manager_pid as i32));
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Page-ins of a smaller store in three quarters of its memory, beside a neighbour.
fn bounded(
    args: &DemoArgs,
    tier: TierChoice,
    (directory, place): (&Path, &Path),
    plan: Plan,
) -> Result<Option<BoundReport>, Failure> {
    let rig = Undercroft {
        tier,
        ..ours(args, directory, &["--latency", BOUND])?
    };
    let plan = Plan {
        keys: (plan.keys / PART).max(1),
        ops: plan.ops / PART,
    };
    let needs = plan.keys * VALUE_BYTES as u64;
    let limit = Bytes((needs * 3 / 4).max(crate::values::MEMORY_MAX_MIN.0));
    let Some(mut started) = start(&rig, limit, directory)? else {
        return Ok(None);
    };
    let ends = AtomicBool::new(false);
    let worked = std::thread::scope(|scope| {
        scope.spawn(|| neighbour(place, &ends));
        let worked = started.work("beside a neighbour", plan, |_, _, _| ());
        ends.store(true, Ordering::Relaxed);
        worked
    });
    worked.map_err(|error| {
        let what = format!("the store beside a neighbour broke off ({error})");
        interrupted_or(started.server.failure(&what))
    })?;
    let client = started.clients.swap_remove(0);
    let used = started.server.finish(client, false)?;
    Ok(used.report.and_then(|report| report.latency_bound))
}

/// Writes to the disk as fast as it takes it, until `ends`. It is no part of the measurement that
/// it fails on a full disk.
fn neighbour(directory: &Path, ends: &AtomicBool) {
    let block = vec![0x5au8; NEIGHBOUR_BYTES];
    let Ok(mut file) = tempfile::tempfile_in(directory) else {
        return;
    };
    let round = |file: &mut File| -> std::io::Result<()> {
        use std::io::Seek;
        file.rewind()?;
        for _ in 0..NEIGHBOUR_BLOCKS {
            file.write_all(&block)?;
        }
        file.sync_data()
    };
    while !ends.load(Ordering::Relaxed) && round(&mut file).is_ok() {}
}
