//! The CPUs on which threads run: fault threads on those of the threads that fault, reclaim on the
//! others.
//!
//! A hand-over between CPUs costs the wake-up of an idle one: 50 us on a virtual CPU, against 7 us
//! on the same CPU. So one fault thread is bound to each CPU. The threads on CPUs where client
//! threads fault are active, and the others sleep. The evictor and the agents go to CPUs where no
//! thread faults, if there are any.

pub(crate) mod guard;
pub(crate) mod pin;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use undercroft_sys::{process, procfs};

use crate::cpus::pin::{Pin, Program};

/// The names of fault threads begin with this.
pub(crate) const FAULT_THREAD: &str = "uc-fault";

/// Most fault threads of a manager.
pub(crate) const FAULT_THREADS_MAX: usize = 8;

// The active threads are bits of one word.
const _: () = assert!(FAULT_THREADS_MAX <= 64);
const _: () = assert!(SAMPLE_NS < SAMPLE_BOUND_NS && SAMPLE_BOUND_NS < STICKY_NS);

/// Time between two lookups of the CPU of a faulting thread.
const SAMPLE_NS: u64 = 1_000_000;

/// The same for a thread that is bound to its CPU: only the program can have moved it.
const SAMPLE_BOUND_NS: u64 = 8_000_000;

/// How long a CPU counts as one where client threads fault.
const STICKY_NS: u64 = 20_000_000;

/// The CPUs that the caller may use now.
fn allowed_cpus() -> Vec<usize> {
    process::allowed_cpus(0).unwrap_or_else(|_| vec![0])
}

/// The CPUs that get a fault thread: the first of those allowed.
pub(crate) fn fault_cpus() -> Vec<usize> {
    let allowed = allowed_cpus().into_iter();
    allowed.take(FAULT_THREADS_MAX).collect()
}

/// The placement of one manager's threads.
pub(crate) struct CpuPlan {
    /// CPU of each fault thread.
    pub cpus: Vec<usize>,
    allowed: Vec<usize>,
    /// When a faulting thread was last seen on the CPU of each fault thread; 0 = never.
    seen: Vec<AtomicU64>,
    /// Bit i: fault thread i is active. Never 0.
    active: AtomicU64,
    sampled: AtomicU64,
    /// The evictor, and the thread that moves pages between tiers; 0 = none.
    workers: [AtomicU32; 2],
    /// Times that the set of active threads has changed, from 1: workers and agents have to move.
    changes: AtomicU64,
    /// The change that the workers have followed.
    followed: AtomicU64,
    /// For each of `allowed`: a thread of the manager got no time there, so others go elsewhere.
    taken: Vec<AtomicBool>,
    /// Times that a thread was moved for this reason.
    moved: AtomicU64,
    /// Threads may be bound: records of new threads are read. A bound thread passes its CPU on to
    /// the threads that it starts.
    pub pins: AtomicBool,
    pub pin: Pin,
    /// The CPU where the disk's completions arrive: a lone thread is bound there.
    disk_cpu: Option<usize>,
    /// Threads may have real-time priority.
    realtime: bool,
    /// All fault threads are active: it is not known which threads fault.
    all_serve: AtomicBool,
}

impl CpuPlan {
    /// All threads stay on the CPUs that the caller may use now.
    ///
    /// * `disk_cpu`: the only CPU that gets the interrupts of the tiers' disk, if there is one.
    /// * `realtime`: threads may have real-time priority.
    pub(crate) fn new(disk_cpu: Option<usize>, realtime: bool) -> CpuPlan {
        let (allowed, cpus) = (allowed_cpus(), fault_cpus());
        CpuPlan {
            disk_cpu: disk_cpu.filter(|cpu| cpus.contains(cpu)),
            seen: cpus.iter().map(|_| AtomicU64::new(0)).collect(),
            cpus,
            taken: allowed.iter().map(|_| AtomicBool::new(false)).collect(),
            allowed,
            moved: AtomicU64::new(0),
            active: AtomicU64::new(1),
            sampled: AtomicU64::new(0),
            workers: Default::default(),
            changes: AtomicU64::new(1),
            followed: AtomicU64::new(1),
            pins: AtomicBool::new(false),
            pin: Pin::default(),
            realtime,
            all_serve: AtomicBool::new(false),
        }
    }

    /// Has all fault threads serve from now on. A monitor that hands memory over has not asked for
    /// the numbers of threads that fault, so what is known of others says nothing. Call it before
    /// the threads start.
    pub(crate) fn serve_everywhere(&self) {
        self.all_serve.store(true, Ordering::Relaxed);
        let all = (1 << self.cpus.len()) - 1;
        self.active.store(all, Ordering::Release);
    }

    /// Gives the caller real-time priority, if that is granted and the kernel allows it. Without
    /// it, the thread may be late.
    pub(crate) fn be_prompt(&self, priority: i32) {
        if self.realtime {
            let _ = process::set_fifo(0, priority);
        }
    }

    /// Keeps the caller on those of `cpus` that the manager may use, if there is one.
    pub(crate) fn stay_near(&self, cpus: &[usize]) {
        let may = |cpu: &usize| self.allowed.contains(cpu);
        let near: Vec<usize> = cpus.iter().copied().filter(may).collect();
        if !near.is_empty() {
            let _ = process::set_affinity(0, &near);
        }
    }

    pub(crate) fn is_active(&self, thread: usize) -> bool {
        self.active.load(Ordering::Acquire) >> thread & 1 == 1
    }

    /// Whether this thread is the evictor or the migrator.
    pub(crate) fn is_worker(&self, tid: u32) -> bool {
        let mut workers = self.workers.iter();
        workers.any(|worker| worker.load(Ordering::Relaxed) == tid)
    }

    pub(crate) fn set_evictor(&self, tid: u32) {
        self.workers[0].store(tid, Ordering::Relaxed);
        self.place_workers();
    }

    /// Notes the thread that moves pages between tiers. It runs where the evictor does.
    pub(crate) fn set_migrator(&self, tid: u32) {
        self.workers[1].store(tid, Ordering::Relaxed);
        self.place_workers();
    }

    /// Notes that thread `tid` faulted at `now` (ns). True if the set of active fault threads
    /// changed: the caller then wakes them all. Cost: looks up the thread's CPU at most every
    /// millisecond, some 20 us.
    pub(crate) fn fault_seen(
        &self,
        tid: u32,
        now: u64,
        program: impl FnOnce() -> Option<Arc<dyn Program>>,
    ) -> bool {
        let last = self.sampled.load(Ordering::Relaxed);
        let often = if self.pin.holds(tid) {
            SAMPLE_BOUND_NS
        } else {
            SAMPLE_NS
        };
        let is_fixed = self.cpus.len() < 2 || self.all_serve.load(Ordering::Relaxed);
        if tid == 0 || is_fixed || now.saturating_sub(last) < often {
            return false;
        }
        if self
            .sampled
            .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_err()
        {
            return false;
        }
        let Some(cpu) = procfs::thread_cpu(tid) else {
            return false;
        };
        let Some(home) = self.cpus.iter().position(|c| *c == cpu) else {
            return false; // a CPU without a fault thread: any active thread serves it
        };
        if self.pins.load(Ordering::Relaxed) {
            self.pin.seen(tid, cpu, self.disk_cpu, now, program);
        }
        self.seen[home].store(now.max(1), Ordering::Relaxed);
        let recent = |at: &AtomicU64| {
            let at = at.load(Ordering::Relaxed);
            at != 0 && now.saturating_sub(at) < STICKY_NS
        };
        let mut active = 0u64;
        for (thread, at) in self.seen.iter().enumerate() {
            active |= u64::from(recent(at)) << thread;
        }
        let before = self.active.swap(active, Ordering::AcqRel);
        if before != active {
            self.changes.fetch_add(1, Ordering::Release);
        }
        before != active
    }

    /// True if threads of the manager get no time on this CPU.
    fn is_taken(&self, cpu: usize) -> bool {
        let at = self.allowed.iter().position(|allowed| *allowed == cpu);
        at.is_some_and(|at| self.taken[at].load(Ordering::Relaxed))
    }

    fn set_taken(&self, cpu: usize, taken: bool) {
        if let Some(at) = self.allowed.iter().position(|allowed| *allowed == cpu) {
            self.taken[at].store(taken, Ordering::Relaxed);
        }
    }

    fn note_moved(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Times that a thread of the manager was moved because it got no CPU.
    pub(crate) fn threads_moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// CPUs for reclaim: those where no thread faults, or all if there are none. CPUs where threads
    /// of the manager get no time are left out, if there are others.
    pub(crate) fn worker_cpus(&self) -> Vec<usize> {
        let busy = |cpu: &usize| {
            let home = self.cpus.iter().position(|c| c == cpu);
            home.is_some_and(|thread| self.is_active(thread))
        };
        let mut usable = self.allowed.clone();
        usable.retain(|cpu| !self.is_taken(*cpu));
        if usable.is_empty() {
            usable.clone_from(&self.allowed);
        }
        let free: Vec<usize> = usable.iter().copied().filter(|cpu| !busy(cpu)).collect();
        if free.is_empty() { usable } else { free }
    }

    /// Moves the evictor and the migrator to the CPUs for reclaim.
    fn place_workers(&self) {
        let cpus = self.worker_cpus();
        for worker in &self.workers {
            let worker = worker.load(Ordering::Relaxed);
            if worker != 0 {
                let _ = process::set_affinity(worker, &cpus);
            }
        }
    }

    /// Moves the evictor and the migrator to the CPUs for reclaim, if these have changed. A thread
    /// of them calls it before it works. Cost: two loads if not.
    pub(crate) fn follow(&self) {
        let changes = self.changes.load(Ordering::Acquire);
        if self.followed.load(Ordering::Relaxed) != changes {
            self.followed.store(changes, Ordering::Relaxed);
            self.place_workers();
        }
    }

    /// Moves an agent that is about to work, and the workers, to the CPUs for reclaim, if these
    /// have changed. Cost: four loads if not.
    ///
    /// * `followed`: the agent's last change, from 0.
    /// * `pid`: its process, which may be bound to some CPUs.
    pub(crate) fn place_agent(&self, followed: &AtomicU64, agent: u32, pid: u32) {
        self.follow();
        let changes = self.changes.load(Ordering::Acquire);
        if agent != 0 && followed.load(Ordering::Relaxed) != changes {
            followed.store(changes, Ordering::Relaxed);
            let (cpus, own) = (self.worker_cpus(), self.pin.own_cpus(pid));
            let _ = process::set_affinity(agent, &shared_cpus(&cpus, own.as_deref()));
        }
    }
}

/// The CPUs for an agent: those for reclaim that the program may use. If the program has none of
/// them, all of them: on the program's own CPUs its threads fault, or the manager gets no time.
fn shared_cpus(cpus: &[usize], program: Option<&[usize]>) -> Vec<usize> {
    let may = |cpu: &usize| program.is_none_or(|program| program.contains(cpu));
    let both: Vec<usize> = cpus.iter().copied().filter(may).collect();
    if both.is_empty() { cpus.to_vec() } else { both }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_stays_on_the_cpus_of_its_program_if_reclaim_has_one_of_them() {
        assert_eq!(shared_cpus(&[1, 2, 3], Some(&[0, 2])), [2]);
        assert_eq!(shared_cpus(&[1, 2], Some(&[0])), [1, 2]);
        assert_eq!(shared_cpus(&[1, 2], None), [1, 2]);
    }

    #[test]
    fn an_agent_is_moved_once_for_each_change() {
        let placement = CpuPlan::new(None, false);
        let (followed, agent) = (AtomicU64::new(0), process::thread_id());
        let cpus = || process::allowed_cpus(0).unwrap();
        let (all, first) = (cpus(), cpus()[..1].to_vec());
        let own = std::process::id();
        process::set_affinity(0, &first).unwrap();
        placement.place_agent(&followed, agent, own);
        let home = cpus();
        assert_eq!(home, placement.worker_cpus());
        process::set_affinity(0, &all).unwrap();
        placement.place_agent(&followed, agent, own);
        assert_eq!(cpus(), all, "nothing has changed");
        placement.changes.fetch_add(1, Ordering::Release);
        placement.place_agent(&followed, agent, own);
        assert_eq!(cpus(), home);
        process::set_affinity(0, &all).unwrap();
    }

    #[test]
    fn all_threads_serve_where_it_is_not_known_who_faults() {
        let placement = CpuPlan::new(None, false);
        placement.serve_everywhere();
        let tid = process::thread_id();
        assert!(!placement.fault_seen(tid, 1 << 40, || None));
        assert!((0..placement.cpus.len()).all(|thread| placement.is_active(thread)));
    }

    /// A migrator that works while the evictor sleeps.
    #[test]
    fn a_worker_is_moved_once_for_each_change() {
        let placement = CpuPlan::new(None, false);
        let cpus = || process::allowed_cpus(0).unwrap();
        let all = cpus();
        placement.set_migrator(process::thread_id());
        let home = cpus();
        assert_eq!(home, placement.worker_cpus());
        process::set_affinity(0, &all).unwrap();
        placement.follow();
        assert_eq!(cpus(), all, "nothing has changed");
        placement.changes.fetch_add(1, Ordering::Release);
        placement.follow();
        assert_eq!(cpus(), home);
        process::set_affinity(0, &all).unwrap();
    }
}
