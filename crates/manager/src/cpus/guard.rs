//! Moves threads of the manager that could run, but get no CPU.
//!
//! Fault threads are bound to CPUs. A real-time thread that spins on such a CPU would keep the
//! fault thread away for as long as the kernel allows: 0.95 s of each second. The same holds for
//! the evictor, and for any thread that is interrupted while it holds a lock.
//!
//! A look costs one clock reading for each thread of the manager. A thread that has not run since
//! the last look also costs a read of its `stat`. In calm runs a look first asks whether any other
//! thread of the machine could run. Nothing is added to the fault path. The guard takes no lock,
//! because a thread without a CPU may hold it.
//!
//! Limit: the threads keep their ordinary priority. If real-time threads spin on all CPUs, only the
//! kernel can help, and it gives ordinary threads some time of each second. A thread that was made
//! real-time would not even get that.

use std::time::{Duration, Instant};

use undercroft_sys::process;
use undercroft_sys::procfs::{self, RunTime, Running, ThreadStat};

use super::{CpuPlan, FAULT_THREAD};
use crate::advice::PLUGIN_THREAD;
use crate::signals::Signals;

/// Time between two looks.
const TICK: Duration = Duration::from_millis(15);

/// The same while no thread but the control thread runs or waits for a CPU. A look costs some 100
/// us, and an idle run should cost next to nothing.
const CALM_TICK: Duration = Duration::from_millis(100);

/// The same once the control thread has seen nothing happen for long. Only the threads that are
/// needed first are looked at then: those that wait for faults, reclaim and control.
const LONG_TICK: Duration = Duration::from_millis(800);

/// A thread that waited for a CPU for this long is moved. Where many programs share a CPU, ordinary
/// waits are shorter.
const WAIT_MAX: Duration = Duration::from_millis(15);

// While faults are served, one is delayed by a tick, the wait and a tick. That must be 50 ms at
// most. The first fault after a calm time may take a calm or a long tick more.
const _: () = assert!(TICK.as_millis() + WAIT_MAX.as_millis() + TICK.as_millis() <= 50);

/// How long a CPU is left to the thread that has it. Twice as long each time that it is still taken
/// when the threads return, up to the maximum.
const LEAVE_MIN: Duration = Duration::from_secs(1);
const LEAVE_MAX: Duration = Duration::from_secs(8);

/// Time between two lists of the manager's threads.
const LIST_EVERY: Duration = Duration::from_secs(1);

/// Below the threads that register new mappings.
const PRIORITY: i32 = 1;

/// A thread that is looked at.
struct Watched {
    tid: u32,
    stat: ThreadStat,
    /// CPU time that it had used at the last look.
    ran: Duration,
    /// When it was first seen to wait for a CPU, without running since.
    waits_since: Option<Instant>,
}

/// A thread of the manager.
struct Ward {
    thread: Watched,
    /// Whether it is needed first after a calm time.
    is_first: bool,
    moved: Option<Moved>,
}

/// A thread that was moved.
struct Moved {
    /// The CPU that it is kept away from.
    from: usize,
    /// Where it may run meanwhile, and where it might before.
    to: Vec<usize>,
    before: Vec<usize>,
}

/// A CPU that is left to the thread that has it.
struct Left {
    cpu: usize,
    until: Instant,
    length: Duration,
}

/// The state of the guard.
struct Guard<'a> {
    placement: &'a CpuPlan,
    wards: Vec<Ward>,
    left: Vec<Left>,
    /// The client thread that is bound to a CPU.
    bound: Option<(Watched, RunTime)>,
    /// How many threads of the machine could run, where the kernel says so.
    running: Option<Running>,
}

/// Body of a thread: it watches the others until the run ends.
pub(crate) fn run(placement: &CpuPlan, signals: &Signals) {
    placement.be_prompt(PRIORITY);
    let mut guard = Guard {
        placement,
        wards: Vec::new(),
        left: Vec::new(),
        bound: None,
        running: Running::open().ok(),
    };
    let mut list_at = Instant::now();
    while !signals.stopped() {
        let now = Instant::now();
        if now >= list_at {
            guard.list();
            list_at = now + LIST_EVERY;
        }
        let busy = guard.move_starved(now, |_| true);
        guard.return_some(now);
        guard.free_bound(now);
        std::thread::sleep(if busy { TICK } else { CALM_TICK });
        let mut unseen = false;
        while signals.is_calm() && !guard.leaves_some() && !signals.stopped() {
            let skips = guard.none_could_run();
            if !skips {
                guard.move_starved(Instant::now(), |ward| ward.is_first);
            }
            // After skipped looks it is not known who has run lately, so the next one is soon.
            let soon = guard.some_wait() || unseen && !skips;
            unseen = skips;
            std::thread::sleep(if soon { TICK } else { LONG_TICK });
        }
    }
}

impl Guard<'_> {
    /// Notes the threads that are new.
    fn list(&mut self) {
        let this = process::thread_id();
        let ids = procfs::thread_ids(std::process::id()).unwrap_or_default();
        for tid in ids {
            let known = self.wards.iter().any(|ward| ward.thread.tid == tid);
            if let (false, Some(thread)) = (known || tid == this, Watched::new(tid)) {
                let name = procfs::thread_name(tid).unwrap_or_default();
                if name == PLUGIN_THREAD {
                    continue; // it gets what others leave
                }
                let serves = name.starts_with(FAULT_THREAD);
                let works = self.placement.is_worker(tid) || tid == std::process::id();
                self.wards.push(Ward {
                    thread,
                    is_first: serves || works,
                    moved: None,
                });
            }
        }
    }

    /// Moves those `of` the threads that have waited too long. True if one has run since the last
    /// look, or waits. The control thread, which runs at all times, does not count.
    fn move_starved(&mut self, now: Instant, of: impl Fn(&Ward) -> bool) -> bool {
        let (placement, left) = (self.placement, &mut self.left);
        let (mut busy, control) = (false, std::process::id());
        self.wards.retain_mut(|ward| {
            if !of(ward) {
                return true;
            }
            let Ok(ran) = process::thread_run_time(ward.thread.tid) else {
                return false; // it has ended
            };
            let has_run = ran != ward.thread.ran;
            let lacks = ward.thread.lacks(ran, now);
            let waits = ward.thread.waits_since.is_some();
            busy |= waits || has_run && ward.thread.tid != control;
            if let Some(cpu) = lacks
                && ward.leaves(cpu, placement)
            {
                leave_to_others(left, cpu, now);
            }
            true
        });
        busy
    }

    /// Whether this thread is the only one of the machine that could run. Then none waits for a
    /// CPU, and that is noted.
    fn none_could_run(&mut self) -> bool {
        let running = self.running.as_ref().and_then(Running::read);
        let none = running == Some(1);
        if none {
            let wards = self.wards.iter_mut();
            wards.for_each(|ward| ward.thread.waits_since = None);
        }
        none
    }

    /// Frees the bound client thread if it waits too long: another CPU may have time for it.
    fn free_bound(&mut self, now: Instant) {
        let bound = self.placement.pin.bound();
        if self.bound.as_ref().map(|(thread, _)| thread.tid) != bound {
            let open = |tid| Watched::new(tid).zip(RunTime::open(tid).ok());
            self.bound = bound.and_then(open);
        }
        if let Some((thread, time)) = &mut self.bound
            && let Some(ran) = time.read()
            && let Some(cpu) = thread.lacks(ran, now)
        {
            let here = process::current_cpu();
            self.placement.pin.escapes(thread.tid, here, cpu);
        }
    }

    /// Whether a thread that is needed first waited for a CPU at the last look.
    fn some_wait(&self) -> bool {
        let mut wards = self.wards.iter().filter(|ward| ward.is_first);
        wards.any(|ward| ward.thread.waits_since.is_some())
    }

    /// Whether a CPU is left to others at the moment.
    fn leaves_some(&self) -> bool {
        let mut left = self.left.iter();
        left.any(|left| self.placement.is_taken(left.cpu))
    }

    /// Lets threads return to CPUs that were left for long enough.
    fn return_some(&mut self, now: Instant) {
        for left in &self.left {
            let over = now >= left.until && self.placement.is_taken(left.cpu);
            if over {
                self.placement.set_taken(left.cpu, false);
                let from = |ward: &&mut Ward| {
                    let moved = ward.moved.as_ref();
                    moved.is_some_and(|moved| moved.from == left.cpu)
                };
                self.wards.iter_mut().filter(from).for_each(Ward::returns);
            }
        }
    }
}

/// Notes that `cpu` is left from `now` on.
fn leave_to_others(left: &mut Vec<Left>, cpu: usize, now: Instant) {
    let Some(known) = left.iter_mut().find(|left| left.cpu == cpu) else {
        left.push(Left {
            cpu,
            until: now + LEAVE_MIN,
            length: LEAVE_MIN,
        });
        return;
    };
    if now < known.until {
        return; // another thread has left it in this time
    }
    let again = now < known.until + 2 * (WAIT_MAX + TICK) + known.length / 8;
    known.length = if again {
        (2 * known.length).min(LEAVE_MAX)
    } else {
        LEAVE_MIN
    };
    known.until = now + known.length;
}

impl Watched {
    /// `None` if the thread has ended.
    fn new(tid: u32) -> Option<Watched> {
        Some(Watched {
            tid,
            stat: ThreadStat::open(tid).ok()?,
            ran: Duration::ZERO,
            waits_since: None,
        })
    }

    /// The CPU that it waits for, if it has waited for [`WAIT_MAX`].
    /// * `ran`: the CPU time that it has used.
    fn lacks(&mut self, ran: Duration, now: Instant) -> Option<usize> {
        if ran != self.ran {
            (self.ran, self.waits_since) = (ran, None);
            return None;
        }
        let Some(('R', cpu)) = self.stat.read() else {
            self.waits_since = None;
            return None;
        };
        let since = *self.waits_since.get_or_insert(now);
        (now - since >= WAIT_MAX).then_some(cpu)
    }
}

impl Ward {
    /// Moves it away from `cpu`. False if there is no other CPU.
    fn leaves(&mut self, cpu: usize, placement: &CpuPlan) -> bool {
        // A real-time thread that spins does not let the guard run on its CPU, so the guard's own
        // CPU is free of those. If the guard runs on `cpu`, ordinary threads have it.
        let here = process::current_cpu();
        let other = |other: &usize| *other != cpu && !placement.is_taken(*other);
        let to = if here == cpu {
            placement.allowed.iter().copied().filter(other).collect()
        } else {
            vec![here]
        };
        let tid = self.thread.tid;
        let before = match self.moved.as_ref() {
            Some(moved) => Ok(moved.before.clone()),
            None => process::allowed_cpus(tid),
        };
        let Ok(before) = before else { return false };
        if to.is_empty() || process::set_affinity(tid, &to).is_err() {
            return false;
        }
        placement.set_taken(cpu, true);
        placement.note_moved();
        self.thread.waits_since = None;
        self.moved = Some(Moved {
            from: cpu,
            to,
            before,
        });
        true
    }

    /// Gives it its CPUs back, unless it was placed anew meanwhile.
    fn returns(&mut self) {
        if let Some(moved) = self.moved.take()
            && process::allowed_cpus(self.thread.tid).is_ok_and(|now| now == moved.to)
        {
            let _ = process::set_affinity(self.thread.tid, &moved.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64, begin: Instant) -> Instant {
        begin + Duration::from_millis(ms)
    }

    #[test]
    fn a_cpu_is_left_for_longer_each_time_that_it_is_still_taken() {
        let (begin, mut left) = (Instant::now(), Vec::new());
        let mut now = begin;
        for length in [1, 2, 4, 8, 8] {
            leave_to_others(&mut left, 3, now);
            leave_to_others(&mut left, 3, now + TICK); // a second thread changes nothing
            assert_eq!(left[0].length, Duration::from_secs(length));
            now = left[0].until + WAIT_MAX + TICK;
        }
        leave_to_others(&mut left, 3, at(5000, now));
        assert_eq!(left[0].length, LEAVE_MIN, "it was free meanwhile");
        leave_to_others(&mut left, 4, now);
        assert_eq!(left.len(), 2);
    }

    #[test]
    fn threads_for_faults_reclaim_and_control_are_needed_first() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = std::sync::Arc::new(std::sync::Mutex::new(ended));
        let (tell, told) = std::sync::mpsc::channel();
        let mut threads = Vec::new();
        for name in ["uc-fault-0", "uc-evict", "uc-access"] {
            let (tell, ended) = (tell.clone(), ended.clone());
            let thread = std::thread::Builder::new().name(name.into());
            let body = move || {
                let _ = tell.send((name, process::thread_id()));
                let _ = ended.lock().map(|ended| ended.recv());
            };
            threads.push(thread.spawn(body).expect("a thread"));
        }
        let ids: Vec<(&str, u32)> = told.iter().take(threads.len()).collect();
        let id = |of: &str| ids.iter().find(|(name, _)| *name == of).expect("it runs").1;
        let placement = CpuPlan::new(None, true);
        placement.set_evictor(id("uc-evict"));
        let mut guard = Guard {
            placement: &placement,
            wards: Vec::new(),
            left: Vec::new(),
            bound: None,
            running: None,
        };
        assert!(!guard.none_could_run(), "nothing is known");
        guard.list();
        let is_first = |tid: u32| {
            let mut wards = guard.wards.iter();
            let ward = wards.find(|ward| ward.thread.tid == tid);
            ward.expect("it is listed").is_first
        };
        assert!(is_first(id("uc-fault-0")) && is_first(id("uc-evict")));
        assert!(is_first(std::process::id()), "control");
        assert!(!is_first(id("uc-access")));
        drop(end);
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("it only waits"));
    }

    #[test]
    fn only_a_thread_that_could_run_and_does_not_lacks_a_cpu() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let _ = tell.send(process::thread_id());
            let _ = ended.recv();
        });
        let tid = told.recv().expect("it has started");
        let (begin, mut watched) = (Instant::now(), Watched::new(tid).expect("it lives"));
        // Asleep: whatever the clock says.
        std::thread::sleep(TICK);
        let ran = process::thread_run_time(tid).expect("it lives");
        for ms in [0, 20, 1000] {
            assert_eq!(watched.lacks(ran, at(ms, begin)), None);
        }
        drop(end);
        thread.join().expect("it only waits");
        // This thread runs; with a clock that stands still it could as well be waiting.
        let mut watched = Watched::new(process::thread_id()).expect("it lives");
        let ran = Duration::from_nanos(1);
        assert_eq!(watched.lacks(ran, begin), None, "the first look");
        assert_eq!(watched.lacks(ran, begin), None, "it waits from now on");
        assert!(watched.lacks(ran, begin + WAIT_MAX).is_some());
        let more = ran + ran;
        assert_eq!(watched.lacks(more, begin + 2 * WAIT_MAX), None, "it ran");
    }
}
