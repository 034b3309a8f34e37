//! Binds a client thread to its CPU while it is the only one that faults.
//!
//! The fault thread is still running when it wakes the client thread, so the kernel moves the
//! client thread to an idle CPU. The next fault then begins with the wake-up of a fault thread
//! there, in competition with the evictor and the agent. A lone thread gains nothing by moving.
//! Several threads are left alone.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use undercroft_sys::process;

use crate::sync::lock;

/// A thread is alone if no other was seen to fault for this long. Faults are sampled once a
/// millisecond at most.
const ALONE_NS: u64 = 10_000_000;

/// How long a thread stays bound after its last sampled fault.
const KEPT_NS: u64 = 20_000_000;

const _: () = assert!(ALONE_NS < KEPT_NS);

/// The program of a thread. It is told of the binding, so that it still sees the CPUs that it may
/// use.
pub(crate) trait Program: Send + Sync {
    /// Thread `tid`, which may use `cpus`, is about to be bound to one of them.
    fn binds(&self, tid: u32, cpus: &[usize]);
    /// False if the program has chosen the thread's CPUs itself meanwhile.
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

/// The thread that was seen to fault last.
#[derive(Default)]
struct Lone {
    tid: u32,
    /// When it was first and last seen, without another thread in between.
    since: u64,
    last: u64,
    bound: Option<Pinned>,
}

/// A thread that is bound to one CPU, and its CPUs before.
struct Pinned {
    tid: u32,
    cpu: usize,
    before: Vec<usize>,
    program: Option<Arc<dyn Program>>,
}

impl Pinned {
    /// False if the program has chosen CPUs for its thread.
    fn is_kept(&self) -> bool {
        let program = self.program.as_ref();
        program.is_none_or(|program| program.is_bound(self.tid))
    }

    /// Gives thread `tid` back its CPUs: the bound thread, or one that it started. Not if the
    /// program has chosen CPUs meanwhile.
    fn release(&self, tid: u32) {
        if tid == self.tid && !self.is_kept() {
            return;
        }
        if process::allowed_cpus(tid).is_ok_and(|now| now == [self.cpu]) {
            let _ = process::set_affinity(tid, &self.before);
        }
    }
}

impl Pin {
    /// Notes that thread `tid` was seen to fault on `cpu` at `now` (ns). Binds it if it is alone:
    /// to `better` if it may run there, else to `cpu`.
    pub(crate) fn seen(
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
            lone.bound = Some(Pinned {
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

    /// Frees a bound thread that has not faulted for a while. Later, if another thread is at work
    /// here: it may have no CPU, and the caller must not wait for it.
    pub(crate) fn expire(&self, now: u64) {
        let Ok(mut lone) = self.lone.try_lock() else {
            return;
        };
        if now.saturating_sub(lone.last) > KEPT_NS {
            self.let_go(&mut lone);
        }
    }

    /// The CPUs that the program gave to thread `tid`. `None`: it has ended, or another thread is
    /// at work here.
    pub(crate) fn own_cpus(&self, tid: u32) -> Option<Vec<usize>> {
        let lone = self.lone.try_lock().ok()?;
        match lone.bound.as_ref() {
            Some(bound) if bound.tid == tid && bound.is_kept() => Some(bound.before.clone()),
            _ => process::allowed_cpus(tid).ok(),
        }
    }

    /// The thread that is bound.
    pub(crate) fn bound(&self) -> Option<u32> {
        Some(self.held.load(Relaxed)).filter(|tid| *tid != 0)
    }

    /// Frees thread `tid`, which is bound to CPU `from` and gets no time there; the kernel moves it
    /// to `here` at once. Later, if another thread is at work here: see [`Pin::expire`].
    pub(crate) fn escapes(&self, tid: u32, here: usize, from: usize) {
        let Ok(mut lone) = self.lone.try_lock() else {
            return;
        };
        if let Some(bound) = lone.bound.as_mut().filter(|bound| bound.tid == tid) {
            if bound.before.contains(&here) && here != from && bound.is_kept() {
                let _ = process::set_affinity(tid, &[here]);
                bound.cpu = here;
            }
            self.let_go(&mut lone);
        }
    }

    /// True if `tid` is bound. Cost: one load.
    pub(crate) fn holds(&self, tid: u32) -> bool {
        tid != 0 && self.held.load(Relaxed) == tid
    }

    fn let_go(&self, lone: &mut Lone) {
        self.held.store(0, Relaxed);
        if let Some(bound) = lone.bound.take() {
            // The thread is freed first, then the program is told: a query in between gets a right
            // answer from either.
            bound.release(bound.tid);
            if let Some(program) = &bound.program {
                program.lets_go(bound.tid);
            }
        }
    }

    /// Frees the only thread of process `pid`, which runs a new program.
    pub(crate) fn restarted(&self, pid: u32) {
        let mut lone = lock(&self.lone);
        if lone.bound.as_ref().is_some_and(|bound| bound.tid == pid) {
            self.let_go(&mut lone);
        }
    }

    /// Frees thread `tid`, which inherited the CPU of `parent`.
    pub(crate) fn started(&self, parent: u32, tid: u32) {
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
            assert_eq!(
                pin.own_cpus(tid).as_ref(),
                Some(&before),
                "those of the program"
            );
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
