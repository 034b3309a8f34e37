//! Registers new mappings as soon as they are made, before the program uses them.
//!
//! One thread for each CPU, at most eight, with real-time priority. The kernel's record of a new
//! mapping wakes the thread on the CPU where the mapping was made, before the program runs on. A
//! mapping with pages of its own never becomes one with its neighbour. So the thread waits for
//! nothing but the kernel: it registers the mapping, and leaves the books to another thread.
//!
//! A hypervisor may stop a CPU for milliseconds. The program's threads move to another CPU, but
//! the thread bound to the stopped one cannot. So the record wakes the next thread too. The thread
//! that looks first gets it. While records of a CPU are many, the next thread reads them by a clock
//! instead ([`Beside`]).
//!
//! Without permission for the records or for the priority, registration is late, but never wrong:
//! pages touched meanwhile are counted when the mapping is registered.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_base::{SpaceId, VirtRange};
use undercroft_sys::sideband::{Record, RecordRing, Sideband, Wake};

use crate::cpus::FAULT_THREADS_MAX;
use crate::space::arrivals::Arrival;
use crate::space::discover;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Longest sleep, so that the thread notices the end of the run.
const NAP: Duration = Duration::from_secs(4);

/// Records that come one so shortly after the other, many times in a row, are read together: each
/// wake-up takes longer than a small mapping.
const CLOSE: Duration = Duration::from_micros(100);

/// Wake-ups in a row after which the thread pauses, and the pause. A program touches less than
/// 0.5 MiB meanwhile.
const CLOSE_ONES: u32 = 8;
const PAUSE: Duration = Duration::from_micros(100);

/// Records of the next CPUs in a [`TICK`] from which on they wake no thread but their own.
const MANY: u64 = 2;
const TICK: Duration = Duration::from_millis(1);

/// The watch, shared with the control thread, which adds processes. `None` if the kernel refuses
/// it.
pub(crate) type Watch = Arc<Mutex<Option<Sideband>>>;

pub(crate) fn new() -> Watch {
    Arc::new(Mutex::new(Sideband::idle(Wake::EachRecord).ok()))
}

/// A ring that two threads read.
struct SharedRing {
    ring: Mutex<RecordRing>,
    /// Readable when there is a record, until one of the threads that poll it has asked.
    news: OwnedFd,
    /// Records that were read.
    heard: AtomicU64,
}

/// The rings that one thread reads.
pub(crate) struct Share {
    /// The CPUs of its own rings; it stays on them.
    cpus: Vec<usize>,
    /// Its own, and the own rings of the next thread.
    rings: Vec<Arc<SharedRing>>,
}

/// The rings of all CPUs, in one share for each thread. Empty if the kernel refuses the watch.
///
/// Errors: there is no descriptor left.
pub(crate) fn shares(watch: &Watch) -> io::Result<Vec<Share>> {
    let rings = lock(watch)
        .as_mut()
        .map(Sideband::take_rings)
        .unwrap_or_default();
    let mut shares: Vec<Share> = Vec::new();
    for (at, ring) in rings.into_iter().enumerate() {
        if at < FAULT_THREADS_MAX {
            shares.push(Share {
                cpus: Vec::new(),
                rings: Vec::new(),
            });
        }
        let share = &mut shares[at % FAULT_THREADS_MAX];
        share.cpus.push(ring.cpu());
        share.rings.push(Arc::new(SharedRing {
            news: ring.as_fd().try_clone_to_owned()?,
            ring: Mutex::new(ring),
            heard: AtomicU64::new(0),
        }));
    }
    let own: Vec<Vec<_>> = shares.iter().map(|share| share.rings.clone()).collect();
    for (at, share) in shares.iter_mut().enumerate() {
        let next = (at + 1) % own.len();
        if next != at {
            share.rings.extend(own[next].iter().cloned());
        }
    }
    Ok(shares)
}

impl Share {
    /// Waits for a record.
    fn wait(&self, beside: &mut Beside) {
        let own = self.rings.len().min(self.cpus.len());
        let heard = (self.rings[own..].iter()).map(|ring| ring.heard.load(Ordering::Relaxed));
        let (rings, nap) = if beside.is_busy(heard.sum(), Instant::now()) {
            (&self.rings[..own], TICK)
        } else {
            (&self.rings[..], NAP)
        };
        let nap = rustix::fs::Timespec {
            tv_sec: nap.as_secs() as i64,
            tv_nsec: nap.subsec_nanos().into(),
        };
        let fds = rings.iter();
        let mut fds: Vec<_> = fds
            .map(|ring| PollFd::new(&ring.news, PollFlags::IN))
            .collect();
        let _ = poll(&mut fds, Some(&nap));
    }
}

/// How many records the rings of the next thread have.
struct Beside {
    is_busy: bool,
    heard: u64,
    since: Instant,
}

impl Beside {
    fn new(now: Instant) -> Beside {
        Beside {
            is_busy: false,
            heard: 0,
            since: now,
        }
    }

    /// True if they had many of late.
    /// * `heard`: records that were read of them until now.
    fn is_busy(&mut self, heard: u64, now: Instant) -> bool {
        let ticks = (now - self.since).as_nanos() / TICK.as_nanos();
        if ticks > 0 {
            self.is_busy = u128::from(heard - self.heard) >= u128::from(MANY) * ticks;
            (self.heard, self.since) = (heard, now);
        }
        self.is_busy
    }
}

/// Body of a thread: it reads the records of its share.
pub(crate) fn run(shared: &Shared, share: &Share) {
    shared.cpu_plan.be_prompt(2);
    shared.cpu_plan.stay_near(&share.cpus);
    shared.cpu_plan.pins.store(true, Ordering::Relaxed);
    let mut mapped: Vec<(u32, VirtRange, bool)> = Vec::new();
    let mut threads: Vec<(u32, u32)> = Vec::new();
    let (mut slept_at, mut close_ones) = (Instant::now(), 0);
    let mut beside = Beside::new(slept_at);
    while !shared.signals.stopped() {
        share.wait(&mut beside);
        close_ones = if slept_at.elapsed() < CLOSE {
            close_ones + 1
        } else {
            0
        };
        mapped.clear();
        threads.clear();
        for shared_ring in &share.rings {
            let count = lock(&shared_ring.ring).drain(|record| match record {
                Record::Mmap {
                    pid,
                    range,
                    anonymous,
                    ..
                } => mapped.push((pid, range, anonymous)),
                Record::Fork {
                    pid,
                    ppid,
                    tid,
                    ptid,
                } => {
                    started(shared, (ppid, ptid), (pid, tid));
                    threads.extend((pid == ppid).then_some((pid, tid)));
                }
                Record::Lost(_) => {
                    shared.signals.discover_again.store(true, Ordering::Relaxed);
                    shared.signals.stir();
                }
                _ => {}
            });
            shared_ring.heard.fetch_add(count as u64, Ordering::Relaxed);
        }
        let mut done = None;
        for (pid, range, anonymous) in &mapped {
            let Some(process) = managed(&shared.processes, *pid) else {
                continue;
            };
            if *anonymous {
                arrived(shared, process, *range, &mut done);
            } else {
                process.ground.fence(*range); // what is mapped beside it is registered without it
            }
        }
        for (pid, tid) in &threads {
            if let Some(process) = managed(&shared.processes, *pid) {
                discover::thread_started(&shared.books, &shared.signals, &process, *tid);
            }
        }
        if close_ones >= CLOSE_ONES {
            std::thread::sleep(PAUSE);
        }
        slept_at = Instant::now();
    }
}

/// Thread `by` has started a thread, of its own process or of a new one. A new process may share
/// its memory. Both are given as process and thread.
fn started(shared: &Shared, by: (u32, u32), (other, tid): (u32, u32)) {
    shared.cpu_plan.pin.started(by.1, tid);
    if other != by.0
        && let Some(process) = shared.processes.of_pid(by.0)
    {
        process.partners.started(other, by.0, process.commands());
    }
}

/// Process `pid`, if it is managed.
fn managed(processes: &Processes, pid: u32) -> Option<Arc<Process>> {
    let process = processes.of_pid(pid)?;
    let managed = process.managed.load(Ordering::Acquire) && process.has_running_identity();
    managed.then_some(process)
}

/// Registers a mapping that the process has made at `range`.
/// * `done`: what was registered last since the records were read.
fn arrived(
    shared: &Shared,
    process: Arc<Process>,
    range: VirtRange,
    done: &mut Option<(SpaceId, VirtRange)>,
) {
    let covers =
        |done: &(SpaceId, VirtRange)| done.0 == process.space && done.1.intersect(range) == range;
    // Its protection has changed, or a neighbour has grown into it.
    let is_old = process.ground.has(range) && !process.event_pending();
    if !is_old && !done.as_ref().is_some_and(covers) {
        let ground = discover::register_ground(&process, range);
        *done = ground.map(|ground| (process.space, ground));
    }
    if done.as_ref().is_some_and(covers) {
        process.ground.registered(range);
    }
    shared.signals.stir();
    // Ground and books may be behind, so the mapping goes to the other thread anyway.
    let new = Arrival {
        process,
        range,
        is_old,
    };
    if let Err(new) = shared.arrivals.add(new) {
        discover::manage_new(shared, &new.process, new.range);
    }
}

/// Body of the thread that brings the books up to date with new mappings.
pub(crate) fn attend(shared: &Shared) {
    shared.cpu_plan.be_prompt(1);
    while !shared.signals.stopped() {
        if let Some(new) = shared.arrivals.take(NAP) {
            discover::manage_new(shared, &new.process, new.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_thread_is_woken_again_once_records_are_few() {
        let start = Instant::now();
        let mut beside = Beside::new(start);
        let at = |ticks: f32| start + TICK.mul_f32(ticks);
        assert!(!beside.is_busy(9, at(0.5)), "too short to tell");
        assert!(beside.is_busy(9, at(1.5)));
        assert!(beside.is_busy(9, at(1.9)), "until the next tick");
        assert!(!beside.is_busy(10, at(3.0)));
        assert!(!beside.is_busy(40, at(33.0)), "many, but in 30 ticks");
        assert!(beside.is_busy(42, at(34.5)));
    }
}
