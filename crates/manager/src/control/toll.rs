//! The cost of a fault to the program, measured in the run itself. The manager sees a fault from
//! the moment that it reads it until it answers. The program also waits until the manager reads,
//! then until it runs again, and both do work in the kernel.
//!
//! The kernel counts how long each thread ran, waited for a CPU, and how often it gave its CPU
//! up. A fault gives it up once. In a window in which one thread gave its CPU up as often as
//! there were faults, and the others hardly ever, that thread waited for nothing else: all the
//! time in which it did not run was that of faults. Other windows say nothing, and count for
//! nothing. So nothing is known of programs of which several threads fault at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::Nanos;
use undercroft_sys::procfs::{self, ThreadTimes};

use crate::space::process::Process;

/// Least time of a window.
const WINDOW: Duration = Duration::from_millis(200);
/// A longer one may have had rests in it that no check has seen.
const WINDOW_MAX: Duration = Duration::from_secs(1);
/// Fewer faults in a window say too little.
const FAULTS_MIN: u64 = 50;
/// Faults of a window that may have had no wait, because the answer came at once: one in this many.
const AT_ONCE: u64 = 16;
/// Other waits that a window may have, for each of this many faults. Some are the faults' own, for
/// locks of the program's memory.
const OTHERS: u64 = 64;
/// A fault hardly takes longer than this many times what the manager sees of it, and this. A window
/// in which it seems to has a rest in it: one may be as long as all of its faults.
const SERVED_TIMES: u32 = 4;
const WAY: Duration = Duration::from_micros(50);
/// A client of more threads is not measured: reading their times would take too long.
const THREADS_MAX: usize = 64;
/// The faults of windows that count are this many at least, and one in that many of all.
const KNOWN_MIN: u64 = 500;
const KNOWN_PART: u64 = 2;

/// Times of the threads of a client, by process and thread.
type Times = HashMap<(u32, u32), ThreadTimes>;

/// Faults, and the time from reading them to answering them, summed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Served {
    /// Messages of faults.
    pub faults: u64,
    /// The sum.
    pub time: Nanos,
}

/// Measures what faults cost.
#[derive(Default)]
pub(super) struct Toll {
    window: Option<(Instant, Served, Times)>,
    /// The client had too many threads: no look before that.
    rests_until: Option<Instant>,
    /// Faults at the last look.
    faults: u64,
    sum: Sum,
}

/// Sums over the windows that count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    faults: u64,
    /// Threads neither ran nor could run.
    waited: Duration,
    /// They could, and had no CPU.
    queued: Duration,
    /// They ran in the kernel.
    system: Duration,
}

impl Toll {
    /// Ends the window, if it is time. Begins one if there are faults. Cost: some 20 us a thread,
    /// five times a second at most, and nothing while there are no faults.
    ///
    /// * `served`: so far.
    pub(super) fn look(&mut self, now: Instant, served: Served, processes: &[Arc<Process>]) {
        if self.rests_until.is_some_and(|until| now < until) {
            return;
        }
        if self.window.is_none() && served.faults == self.faults {
            return;
        }
        self.faults = served.faults;
        if let Some((began, before, _)) = &self.window {
            let length = now.saturating_duration_since(*began);
            if length < WINDOW {
                return;
            }
            if served.faults < before.faults + FAULTS_MIN {
                if length >= WINDOW_MAX {
                    self.window = None;
                }
                return;
            }
        }
        let Some(times) = times(processes) else {
            self.window = None;
            self.rests_until = Some(now + WINDOW_MAX);
            return;
        };
        if let Some((began, before, then)) = &self.window {
            let length = now.saturating_duration_since(*began);
            let of_it = Served {
                faults: served.faults - before.faults,
                time: served.time.since(before.time),
            };
            self.sum.add(length, of_it, then, &times);
        }
        self.window = Some((now, served, times));
    }

    /// Forgets what it has seen.
    pub(super) fn begin_again(&mut self) {
        *self = Toll::default();
    }

    /// The mean time that one thread loses by a fault. `None`: it is not known.
    ///
    /// * `faults`: all of them.
    pub(super) fn each(&self, faults: u64) -> Option<Nanos> {
        let known = self.sum.faults;
        (known >= KNOWN_MIN && known >= faults / KNOWN_PART).then(|| self.sum.each())
    }
}

impl Sum {
    /// Adds a window, if one thread had its faults, and waited for nothing else.
    fn add(&mut self, length: Duration, served: Served, before: &Times, after: &Times) {
        let faults = served.faults;
        if faults < FAULTS_MIN || length > WINDOW_MAX {
            return;
        }
        let mut waits = 0;
        let mut one = None;
        for (of, now) in after {
            let then = before.get(of).copied().unwrap_or_default();
            let gave_up = now.waits.saturating_sub(then.waits);
            waits += gave_up;
            if gave_up >= faults - faults / AT_ONCE && before.contains_key(of) {
                one = Some((then, now));
            }
        }
        let Some((then, now)) = one.filter(|_| waits <= faults + faults / OTHERS) else {
            return;
        };
        let running = now.running.saturating_sub(then.running);
        let queued = now.queued.saturating_sub(then.queued);
        let waited = length.saturating_sub(running + queued);
        let likely = Duration::from_nanos(served.time.0) * SERVED_TIMES + WAY * faults as u32;
        if waited + queued > likely {
            return;
        }
        self.faults += faults;
        self.queued += queued;
        self.waited += waited;
        self.system += now.system.saturating_sub(then.system);
    }

    /// A fault's work in the kernel is less than the wait for it, in which another process does as
    /// much and more. So a program that makes many system calls is not taken for one with dear
    /// faults.
    fn each(&self) -> Nanos {
        let all = self.waited + self.queued + self.system.min(self.waited);
        Nanos(all.as_nanos() as u64 / self.faults.max(1))
    }
}

/// `None`: there are too many threads, or the kernel does not tell.
fn times(processes: &[Arc<Process>]) -> Option<Times> {
    if processes.len() > THREADS_MAX {
        return None;
    }
    let mut all = Times::new();
    for pid in processes.iter().filter_map(|process| process.pid()) {
        for tid in procfs::thread_ids(pid).unwrap_or_default() {
            if let Some(times) = ThreadTimes::read(pid, tid) {
                all.insert((pid, tid), times);
            }
        }
        if all.len() > THREADS_MAX {
            return None;
        }
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLIS: fn(u64) -> Duration = Duration::from_millis;

    fn thread(running: u64, queued: u64, system: u64, waits: u64) -> ThreadTimes {
        ThreadTimes {
            running: MILLIS(running),
            queued: MILLIS(queued),
            system: MILLIS(system),
            waits,
        }
    }

    /// The result of windows of 200 ms with these faults say, of threads that begin at zero.
    fn each(faults: u64, threads: &[ThreadTimes]) -> Option<Nanos> {
        let of = |at| (1, at as u32);
        let before = (0..threads.len()).map(|at| (of(at), thread(1, 0, 0, 0)));
        let after = threads
            .iter()
            .enumerate()
            .map(|(at, of_it)| (of(at), *of_it));
        let mut toll = Toll::default();
        let served = Served {
            faults,
            time: Nanos(faults * 40_000),
        };
        toll.sum
            .add(MILLIS(200), served, &before.collect(), &after.collect());
        toll.each(faults)
    }

    #[test]
    fn all_that_a_thread_does_not_run_is_the_faults_if_it_waits_for_nothing_else() {
        // 60 ms on a CPU, half of that in the kernel; 20 ms in a queue; 120 ms elsewhere.
        let one = thread(61, 20, 30, 1000);
        assert_eq!(each(1000, &[one]), Some(Nanos(170_000)));
        // A thread that rests adds nothing, nor does one that waited twice for something else.
        let (rests, waits) = (thread(1, 0, 0, 0), thread(2, 0, 0, 2));
        assert_eq!(each(1000, &[one, rests, waits]), Some(Nanos(170_000)));
    }

    #[test]
    fn window_with_other_waits_says_nothing() {
        assert_eq!(each(1000, &[thread(61, 20, 30, 1020)]), None);
        assert_eq!(each(1000, &[thread(61, 20, 30, 900)]), None);
        assert_eq!(
            each(1000, &[thread(61, 20, 30, 1000), thread(2, 0, 0, 90)]),
            None
        );
        let half = thread(61, 20, 30, 500);
        assert_eq!(each(1000, &[half, half]), None, "two threads fault");
        assert_eq!(each(400, &[thread(61, 20, 30, 400)]), None, "too few");
        // Few faults, and a rest of most of the window.
        assert_eq!(each(600, &[thread(31, 0, 10, 601)]), None);
    }

    #[test]
    fn system_calls_of_the_program_are_not_taken_for_faults() {
        // 190 ms in the kernel, and 10 ms of waits.
        assert_eq!(
            each(1000, &[thread(191, 0, 190, 1000)]),
            Some(Nanos(20_000))
        );
    }
}
