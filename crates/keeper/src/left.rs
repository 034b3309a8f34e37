//! The processes of the program beside its first, and those that it leaves behind: passes signals
//! to them, reaps them, ends them.

use std::process::Child;
use std::time::Instant;

use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs;
use undercroft_sys::signal::{self, Received, SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::passing::{self, Scene};
use super::voice::Voice;
use super::{ENDING, Killed, Manager};

/// Passes a signal to the processes that the program has left behind. Without us no process would
/// wait for them, so a signal that ends us ends them. A terminal has told its foreground group
/// itself.
/// * `group`: the process group of the run.
pub(super) fn pass_to_leftovers(received: &Received, group: Option<u32>, manager: &Manager) {
    let number = received.number;
    if ![SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&number)
        && !passing::is_for_program(received, Scene::default())
    {
        return;
    }
    for pid in leftovers(manager) {
        if received.sender.is_some() || process::group_of(pid) != group {
            signal::pass_on(received, pid);
        }
    }
}

/// Reaps our children that have ended: orphans of the program, holders. Those in `handled` are
/// reaped by their handles.
pub(super) fn reap(handled: &[u32]) {
    // Agents are many, so the ended one is not looked for among all.
    loop {
        match process::ended_child() {
            None => return,
            Some(pid) if handled.contains(&pid) || !reap_one(pid) => break,
            Some(_) => {}
        }
    }
    for pid in procfs::children(std::process::id()) {
        if !handled.contains(&pid) && procfs::process_state(pid) == Some('Z') {
            reap_one(pid);
        }
    }
}

/// True if it had ended and was our child.
pub(super) fn reap_one(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid as i32);
    let reaped = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
    pid.is_some() && matches!(reaped, Ok(Some(_)))
}

/// Processes of the program that still run: all our descendants but the manager and its holder. An
/// empty answer is final: the children of an ended process become ours before it shows as ended.
pub(super) fn leftovers(manager: &Manager) -> Vec<u32> {
    loop {
        let (mut found, mut reaped) = (Vec::new(), false);
        let mut open = procfs::children(std::process::id());
        while let Some(pid) = open.pop() {
            if pid == manager.child.id() || pid == manager.holder.0 {
                continue;
            }
            if !process::is_running(pid) {
                reaped |= reap_one(pid);
                continue;
            }
            found.push(pid);
            open.extend(procfs::children(pid));
        }
        if !found.is_empty() || !reaped {
            return found;
        }
    }
}

/// Ends the program's processes and the manager, in [`KILLED`] and [`ENDING`] at most. Meanwhile
/// the holder keeps the program's memory from reading as zeros. It ends by itself when no address
/// space is left. A process that the kernel does not end in time (in an uninterruptible system
/// call) is left to the holder.
pub(super) fn end_tree(program: &mut Child, manager: &mut Manager, voice: &Voice) {
    manager.handover = None;
    let held = !manager.holder.1.has_exited();
    let killed = if held {
        manager.end(voice)
    } else {
        Killed::Stays
    };
    let deadline = Instant::now() + ENDING;
    let left = kill_all(program, manager, deadline);
    let rest = deadline.saturating_duration_since(Instant::now());
    if !held && !left {
        // The holder is dead, so only the manager had the descriptors: it had to live until now.
        manager.end(voice);
    } else if !held {
        voice.say(&format!(
            "some of the program's processes have not ended after {ENDING:?}. The manager (process {}) \
             stays until it has ended them: without it, their memory would read as zeros",
            manager.child.id()
        ));
    } else if killed == Killed::Ended && !manager.holder.1.wait_exit(rest) {
        voice.say(&format!(
            "some of the program's memory is still in use after {ENDING:?}: the kernel has not ended all \
             its processes yet. The process named uc-fds ends them as soon as it can"
        ));
    }
    reap(&[manager.child.id()]);
}

/// Kills the program's processes until none is left, or until `deadline`. True if some are left.
fn kill_all(program: &mut Child, manager: &Manager, deadline: Instant) -> bool {
    let _ = program.kill();
    loop {
        let _ = program.try_wait();
        let left = leftovers(manager);
        if left.is_empty() || Instant::now() > deadline {
            let _ = program.try_wait();
            return !left.is_empty();
        }
        let left: Vec<PidFd> = left
            .into_iter()
            .filter_map(|pid| PidFd::open(pid).ok())
            .collect();
        for process in &left {
            let _ = process.kill();
        }
        for process in &left {
            process.wait_exit(deadline.saturating_duration_since(Instant::now()));
        }
    }
}
