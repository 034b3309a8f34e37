//! Hears of new mappings the moment they are made, and registers them before they are used.
//!
//! The thread has real-time priority and stays on the CPUs where the client faults: the kernel's record of a mapping wakes it on the
//! CPU of the thread that made it, ahead of that thread's return to its program. Without permission for either it is late,
//! never wrong: what was touched meanwhile is counted when it is registered.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_base::VirtRange;
use undercroft_sys::process;
use undercroft_sys::sideband::{Record, Sideband, Wake};

use crate::discover;
use crate::shared::{Shared, lock};

/// Longest sleep, to notice the end.
const NAP: Duration = Duration::from_millis(100);

/// The watch, shared with whoever adds processes to it; `None` where the kernel refuses it.
pub(crate) type Watch = Arc<Mutex<Option<Sideband>>>;

pub(crate) fn new() -> Watch {
    Arc::new(Mutex::new(Sideband::idle(Wake::EachRecord).ok()))
}

/// Body of the thread.
pub(crate) fn run(shared: &Shared, watch: &Watch) {
    let Some(fd) = lock(watch)
        .as_ref()
        .and_then(|s| s.as_fd().try_clone_to_owned().ok())
    else {
        return;
    };
    let _ = process::set_fifo(0, 2);
    shared.placement.pins.store(true, Ordering::Relaxed);
    let mut cpus = Vec::new();
    let mut mapped: Vec<(u32, VirtRange)> = Vec::new();
    let mut threads: Vec<u32> = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        let now = shared.placement.fault_cpus();
        if now != cpus {
            let _ = process::set_affinity(0, &now);
            cpus = now;
        }
        let nap = rustix::fs::Timespec {
            tv_sec: 0,
            tv_nsec: NAP.subsec_nanos().into(),
        };
        let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&nap));
        mapped.clear();
        threads.clear();
        if let Some(sideband) = lock(watch).as_mut() {
            sideband.drain(|record| match record {
                Record::Mmap {
                    pid,
                    range,
                    anonymous: true,
                    ..
                } => {
                    mapped.push((pid, range));
                }
                Record::Fork {
                    pid,
                    ppid,
                    tid,
                    ptid,
                } => {
                    shared.placement.pin.started(ptid, tid);
                    threads.extend((pid == ppid).then_some(pid));
                }
                Record::Lost(_) => shared.look_again.store(true, Ordering::Relaxed),
                _ => {}
            });
        }
        for (pid, range) in &mapped {
            for process in shared.all_processes() {
                let managed = process.managed.load(Ordering::Acquire);
                let Some(agent) = process.agent.get() else {
                    continue;
                };
                if process.pid() == Some(*pid) && managed {
                    process.counting.fetch_add(1, Ordering::SeqCst);
                    for fresh in discover::register(shared, &process, agent, *range, true) {
                        discover::count_present(shared, &process, agent, fresh);
                    }
                    process.counting.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        threads.dedup();
        for pid in &threads {
            for process in shared.all_processes() {
                if process.pid() == Some(*pid) && process.managed.load(Ordering::Acquire) {
                    discover::lock_threads(shared, &process, *pid);
                }
            }
        }
    }
}
