//! Keeps a thread that is alone in faulting on its CPU for the time being.
//!
//! The kernel wakes a thread whose page has come on a CPU that is idle, because the fault thread is
//! still at work on the old one. The next fault then begins with waking a fault thread there, and
//! the evictor and the agent, which work beside, are in the way. One thread that faults gains
//! nothing by moving; several are left alone.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use undercroft_sys::process;

use crate::sync::lock;

/// A thread is alone when no other was seen to fault for this long. Looked at every millisecond at
/// most.
const ALONE_NS: u64 = 10_000_000;

/// How long a thread stays bound after its last fault that was looked at.
const KEPT_NS: u64 = 20_000_000;

/// The program of a thread, which is told that it is bound: it is to see the CPUs that it may use.
pub(crate) trait Program: Send + Sync {
    /// Thread `tid`, which may use `cpus`, is about to be bound to one of them.
    fn binds(&self, tid: u32, cpus: &[usize]);
    /// False when the program has chosen its CPUs itself meanwhile.
    fn is_bound(&self, tid: u32) -> bool;
    /// The thread is free again.
    fn lets_go(&self, tid: u32);
}

#[derive(Default)]
pub(crate) struct Pin {
    lone: Mutex<Lone>,
    /// The thread that is bound; 0 = none.
    held: AtomicU32,
}

/// The thread seen to fault last.
#[derive(Default)]
struct Lone {
    tid: u32,
    /// When it was first and last seen, no other between.
    since: u64,
    last: u64,
    bound: Option<Bound>,
}

/// A thread bound to one CPU, and where it might run before.
struct Bound {
    tid: u32,
    cpu: usize,
    before: Vec<usize>,
    program: Option<Arc<dyn Program>>,
}

impl Bound {
    /// The thread, or one that has its CPUs from it, may run where it might before; unless it chose
    /// otherwise meanwhile.
    fn release(&self, tid: u32) {
        let chose = |program: &Arc<dyn Program>| tid == self.tid && !program.is_bound(tid);
        if self.program.as_ref().is_some_and(chose) {
            return;
        }
        if process::allowed_cpus(tid).is_ok_and(|now| now == [self.cpu]) {
            let _ = process::set_affinity(tid, &self.before);
        }
    }
}

impl Pin {
    /// Thread `tid` was seen to fault on `cpu` at `now` (ns); it would be bound to `better`, where
    /// it may run there.
    pub fn seen(
        &self,
        tid: u32,
        cpu: usize,
        better: Option<usize>,
        now: u64,
        program: impl FnOnce() -> Option<Arc<dyn Program>>,
    ) {
        let mut lone = lock(&self.lone);
        let paused = now.saturating_sub(lone.last) > KEPT_NS;
        lone.last = now;
        if lone.tid != tid || paused {
            lone.tid = tid;
            lone.since = now;
            self.let_go(&mut lone);
            return;
        }
        if lone.bound.is_some() || now.saturating_sub(lone.since) < ALONE_NS {
            return;
        }
        let Ok(before) = process::allowed_cpus(tid) else {
            return;
        };
        let cpu = better.filter(|cpu| before.contains(cpu)).unwrap_or(cpu);
        if before.len() < 2 || !before.contains(&cpu) {
            return;
        }
        let program = program();
        if let Some(program) = &program {
            program.binds(tid, &before);
        }
        if process::set_affinity(tid, &[cpu]).is_ok() {
            lone.bound = Some(Bound {
                tid,
                cpu,
                before,
                program,
            });
            self.held.store(tid, Relaxed);
        } else if let Some(program) = &program {
            program.lets_go(tid);
        }
    }

    /// Lets a thread go that has not faulted for a while.
    pub fn expire(&self, now: u64) {
        let mut lone = lock(&self.lone);
        if now.saturating_sub(lone.last) > KEPT_NS {
            self.let_go(&mut lone);
        }
    }

    /// Whether `tid` is bound. Cost: one load.
    pub fn holds(&self, tid: u32) -> bool {
        tid != 0 && self.held.load(Relaxed) == tid
    }

    fn let_go(&self, lone: &mut Lone) {
        self.held.store(0, Relaxed);
        if let Some(bound) = lone.bound.take() {
            // Free first, then told: what is asked between the two has its answer from either.
            bound.release(bound.tid);
            if let Some(program) = &bound.program {
                program.lets_go(bound.tid);
            }
        }
    }

    /// The process `pid` runs a new program: its one thread is free.
    pub fn restarted(&self, pid: u32) {
        let mut lone = lock(&self.lone);
        if lone.bound.as_ref().is_some_and(|bound| bound.tid == pid) {
            self.let_go(&mut lone);
        }
    }

    /// Thread `parent` started `tid`, which has inherited its CPUs.
    pub fn started(&self, parent: u32, tid: u32) {
        let lone = lock(&self.lone);
        if let Some(bound) = lone.bound.as_ref().filter(|bound| bound.tid == parent) {
            bound.release(tid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `body` beside a thread that waits; passes its id and a CPU it may use. Skips on one
    /// CPU.
    fn beside_a_thread(body: impl FnOnce(u32, usize)) {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let _ = tell.send(process::thread_id());
            let _ = ended.recv();
        });
        let tid = told.recv().expect("the thread has started");
        let cpus = process::allowed_cpus(tid).expect("a live thread");
        match cpus.len() {
            0 | 1 => println!("SKIPPED: one CPU"),
            _ => body(tid, cpus[1]),
        }
        drop(end);
        thread.join().expect("it only waits");
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn a_lone_thread_is_bound_and_let_go_when_it_stops() {
        beside_a_thread(|tid, cpu| {
            let before = process::allowed_cpus(tid).unwrap();
            let pin = Pin::default();
            (0..=9).for_each(|ms| pin.seen(tid, cpu, None, ms * MS, || None));
            assert_eq!(process::allowed_cpus(tid).unwrap(), before, "not yet");
            (10..12).for_each(|ms| pin.seen(tid, cpu, None, ms * MS, || None));
            assert_eq!(process::allowed_cpus(tid).unwrap(), [cpu]);
            pin.expire(30 * MS);
            assert_eq!(process::allowed_cpus(tid).unwrap(), [cpu]);
            pin.expire(40 * MS);
            assert_eq!(process::allowed_cpus(tid).unwrap(), before);
        });
    }

    #[test]
    fn a_second_thread_frees_the_first_and_children_are_free_at_once() {
        beside_a_thread(|tid, cpu| {
            let before = process::allowed_cpus(tid).unwrap();
            let pin = Pin::default();
            (0..12).for_each(|ms| pin.seen(tid, cpu, None, ms * MS, || None));
            assert_eq!(process::allowed_cpus(tid).unwrap(), [cpu]);
            beside_a_thread(|child, _| {
                process::set_affinity(child, &[cpu]).unwrap(); // as inherited
                pin.started(tid, child);
                assert_eq!(process::allowed_cpus(child).unwrap(), before);
                pin.seen(child, cpu, None, 12 * MS, || None);
            });
            assert_eq!(process::allowed_cpus(tid).unwrap(), before);
        });
    }

    #[test]
    fn a_thread_is_bound_to_the_better_cpu_where_it_may_run_there() {
        beside_a_thread(|tid, cpu| {
            let other = process::allowed_cpus(tid).unwrap()[0];
            for (better, bound) in [(Some(other), other), (Some(4096), cpu), (None, cpu)] {
                let pin = Pin::default();
                (0..12).for_each(|ms| pin.seen(tid, cpu, better, ms * MS, || None));
                assert_eq!(process::allowed_cpus(tid).unwrap(), [bound]);
                pin.expire(100 * MS);
            }
        });
    }

    #[test]
    fn a_thread_that_chose_its_cpus_keeps_them() {
        beside_a_thread(|tid, cpu| {
            let pin = Pin::default();
            (0..12).for_each(|ms| pin.seen(tid, cpu, None, ms * MS, || None));
            let own = process::allowed_cpus(0).unwrap();
            process::set_affinity(tid, &own[..1]).unwrap();
            pin.expire(100 * MS);
            assert_eq!(process::allowed_cpus(tid).unwrap(), own[..1]);
        });
    }
}
