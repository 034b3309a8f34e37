//! Finds processes that share an address space (`CLONE_VM`) and are no threads of its process.
//!
//! No file of /proc shows them. A partner is the process's child, as a rule. If it is not
//! (`CLONE_PARENT`), the perf watch shows its start, or a fault of its own shows it. Once one was
//! found beside the running process, there may be more: the answer stays. A vfork child is never
//! found so: its parent does not run.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use undercroft_proto::legacy::{Flag, Row};
use undercroft_sys::process;
use undercroft_sys::procfs::Tasks;

use crate::space::command::Commands;
use crate::sync::lock;

/// Processes that are asked about. If there are more, one may be a partner.
const ASKED_MAX: usize = 16;

/// Time after which a vfork child runs another program, or has ended. One that takes longer counts
/// as a partner; that costs little.
const VFORK_MAX: Duration = Duration::from_millis(100);

/// The partners of one address space.
#[derive(Default)]
pub(crate) struct Partners {
    /// Whether a partner was found.
    pub found: AtomicBool,
    /// The last thread that faulted here and is not the process's first; 0: there was none.
    stranger: AtomicU32,
    /// Processes that were started from here with this memory, and when.
    started: Mutex<Vec<(u32, Instant)>>,
}

impl Partners {
    /// Thread `thread` of this address space, whose process is `pid`, has faulted.
    #[inline]
    pub(crate) fn faulted(&self, thread: u32, pid: u32) {
        if thread != pid {
            self.stranger.store(thread, Ordering::Relaxed);
        }
    }

    /// Process `pid` has started process `other`. If that has this memory, the agent stays from now
    /// on: `pid` may end before the next look. What the shim starts to make the agent is no
    /// partner, and gone when the agent is there. Cost: one system call.
    pub(crate) fn started(&self, other: u32, pid: u32, agent: Option<&Commands>) {
        if agent.is_some_and(Commands::is_starting) || shares(pid, other) == Some(false) {
            return;
        }
        let mut started = lock(&self.started);
        if started.len() == ASKED_MAX {
            started.retain(|(one, _)| shares(pid, *one) != Some(false));
        }
        if started.len() < ASKED_MAX {
            started.push((other, Instant::now()));
        } else {
            self.found.store(true, Ordering::Relaxed);
        }
        if let Some(agent) = agent {
            agent.stay();
        }
    }

    /// Looks whether a process that was started a while ago still has this memory: then it is a
    /// partner, and the agent stays for good. Cost: one system call for each that was started.
    pub(crate) fn look(&self, pid: u32, row: &Row, agent: Option<&Commands>) {
        let mut started = lock(&self.started);
        let mut is_there = self.found.load(Ordering::Relaxed);
        started.retain(|(other, since)| {
            if is_there || since.elapsed() < VFORK_MAX {
                return !is_there;
            }
            let shares = shares(pid, *other);
            is_there = shares == Some(true);
            shares != Some(false)
        });
        if is_there && !self.found.swap(true, Ordering::Relaxed) {
            row.set(Flag::Partners);
        }
        match agent {
            Some(agent) if is_there || !started.is_empty() => agent.stay(),
            Some(agent) => agent.stay_no_more(),
            None => {}
        }
    }

    /// Whether process `pid`, whose only thread waits for a fault, may have a partner. `agent` is
    /// none. Cost: three system calls, and one for each child.
    pub(crate) fn may_be(&self, pid: u32, agent: u32, tasks: &Tasks, row: &Row) -> bool {
        if self.found.load(Ordering::Relaxed) {
            return true;
        }
        let Ok(mut others) = tasks.children(pid) else {
            return true;
        };
        if others.len() > ASKED_MAX {
            return true;
        }
        let mut started = lock(&self.started);
        others.extend(started.iter().map(|(other, _)| *other));
        others.push(self.stranger.load(Ordering::Relaxed));
        others.retain(|&other| other != 0 && other != agent);
        let mut unsure = false;
        for other in others {
            match shares(pid, other) {
                Some(false) => started.retain(|(one, _)| *one != other),
                Some(true) => {
                    self.found.store(true, Ordering::Relaxed);
                    row.set(Flag::Partners);
                    return true;
                }
                None => unsure = true,
            }
        }
        unsure
    }
}

/// Whether process `other`, if there is one, has the memory of `pid`. `None`: it cannot be told.
fn shares(pid: u32, other: u32) -> Option<bool> {
    match process::share_memory(pid, other) {
        Ok(shares) => Some(shares),
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> (u32, Tasks) {
        let pid = std::process::id();
        (pid, Tasks::open(pid).expect("this process"))
    }

    /// A thread of this process stands for a partner: it has the same memory.
    #[test]
    fn what_shares_the_memory_is_found_and_stays_found() {
        let (pid, tasks) = own();
        for way in 0..2 {
            let partners = Partners::default();
            let may_be = |agent| partners.may_be(pid, agent, &tasks, &Row::default());
            let (end, ends) = std::sync::mpsc::channel::<()>();
            let (tell, told) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(move || {
                let _ = tell.send(process::thread_id());
                let _ = ends.recv();
            });
            let thread_id = told.recv().expect("its number");
            match way {
                0 => partners.faulted(thread_id, pid),
                _ => partners.started(thread_id, pid, None),
            }
            assert!(!may_be(thread_id), "it is the agent");
            assert!(may_be(1 << 30));
            drop(end);
            thread.join().expect("it ends");
            assert!(may_be(1 << 30), "there may be more");
        }
    }

    #[test]
    fn other_processes_are_no_partners_and_make_no_room_for_doubt() {
        let (pid, tasks) = own();
        let partners = Partners::default();
        let parent = std::os::unix::process::parent_id();
        for _ in 0..3 * ASKED_MAX {
            partners.started(parent, pid, None);
            partners.started(1 << 30, pid, None); // no such process
        }
        assert!(!partners.found.load(Ordering::Relaxed));
        assert!(!partners.may_be(pid, 0, &tasks, &Row::default()));
    }
}
