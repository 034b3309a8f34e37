//! New mappings that the kernel has told of, until the books have them. The watch threads put them
//! in, and one thread takes them out ([`crate::space::watch`]).
//!
//! The C library grows the heap of a thread by a change of protection for each page or two. The
//! books have that memory already. So a mapping that was registered before waits for some
//! milliseconds: many changes of it are looked at together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_base::VirtRange;

use super::process::Process;
use crate::sync::lock;

/// Most mappings that wait. A watch thread with one more does the work itself, so that the program
/// cannot make mappings faster than the books take them.
const WAITING_MAX: usize = 256;

/// Mappings that are this many pages apart are joined: there is no room for many others in between.
const NEAR: u64 = 16;

/// How long a mapping waits that was registered before.
const REST: Duration = Duration::from_millis(2);

/// A new mapping of a process.
pub(crate) struct Arrival {
    pub process: Arc<Process>,
    pub range: VirtRange,
    /// Whether it was registered before, if nothing is out of date.
    pub is_old: bool,
}

/// The new mappings of one run.
#[derive(Default)]
pub(crate) struct Arrivals {
    waiting: Mutex<Vec<Waiting>>,
    came: Condvar,
}

struct Waiting {
    arrival: Arrival,
    due: Instant,
}

impl Arrivals {
    /// Adds a mapping. It is joined to one that is near: a heap grows in small steps, and the
    /// stacks of threads lie beside each other.
    ///
    /// Errors: too many wait; the mapping is given back.
    pub(crate) fn add(&self, new: Arrival) -> Result<(), Arrival> {
        let due = Instant::now() + if new.is_old { REST } else { Duration::ZERO };
        let mut waiting = lock(&self.waiting);
        let is_near = |old: &&mut Waiting| {
            let old = &old.arrival;
            Arc::ptr_eq(&old.process, &new.process)
                && old.range.start <= new.range.end.plus(NEAR)
                && new.range.start <= old.range.end.plus(NEAR)
        };
        // With one that waits, the taker wakes in time for all that were registered before.
        let wakes = !new.is_old || waiting.is_empty();
        if let Some(old) = waiting.iter_mut().rev().find(is_near) {
            let range = &mut old.arrival.range;
            let start = range.start.min(new.range.start);
            *range = VirtRange::new(start, range.end.max(new.range.end));
            old.arrival.is_old &= new.is_old;
            old.due = old.due.min(due);
        } else if waiting.len() >= WAITING_MAX {
            return Err(new);
        } else {
            waiting.push(Waiting { arrival: new, due });
        }
        drop(waiting);
        if wakes {
            self.came.notify_one();
        }
        Ok(())
    }

    /// Takes the mapping that is due first, once it is due; waits up to `nap` for one.
    pub(crate) fn take(&self, nap: Duration) -> Option<Arrival> {
        let until = Instant::now() + nap;
        let mut waiting = lock(&self.waiting);
        loop {
            let now = Instant::now();
            let first = (0..waiting.len()).min_by_key(|at| waiting[*at].due);
            let due = match first {
                Some(at) if waiting[at].due <= now => return Some(waiting.remove(at).arrival),
                Some(at) => waiting[at].due.min(until),
                None => until,
            };
            if now >= until {
                return None;
            }
            let woken = self.came.wait_timeout(waiting, due - now);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::{SpaceId, VirtPage};

    use super::*;
    use crate::space::model::ModelMemory;
    use undercroft_proto::legacy::Row;

    fn process() -> Arc<Process> {
        let memory = Arc::new(ModelMemory::new(pages(0, 1)));
        Arc::new(Process::new(
            SpaceId(1),
            memory,
            VirtPage(1),
            None,
            None,
            Row::default(),
        ))
    }

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    fn new(process: Arc<Process>, range: VirtRange) -> Arrival {
        let is_old = false;
        Arrival {
            process,
            range,
            is_old,
        }
    }

    /// A thread's heap that grows page by page must not wake the taker for each page, and a new
    /// mapping must not wait behind it.
    #[test]
    fn a_mapping_that_was_registered_before_waits_and_a_new_one_does_not() {
        let (arrivals, process) = (Arrivals::default(), process());
        let old = |range| Arrival {
            is_old: true,
            ..new(process.clone(), range)
        };
        let began = Instant::now();
        for end in 1..100 {
            assert!(arrivals.add(old(pages(0, end))).is_ok());
        }
        assert!(arrivals.add(new(process.clone(), pages(500, 501))).is_ok());
        let first = arrivals.take(Duration::ZERO).map(|it| it.range);
        assert_eq!(first, Some(pages(500, 501)));
        let grown = arrivals.take(Duration::from_secs(9)).map(|it| it.range);
        assert_eq!(grown, Some(pages(0, 99)));
        assert!(began.elapsed() >= REST);
        // A new mapping beside an old one makes it urgent.
        assert!(arrivals.add(old(pages(0, 100))).is_ok());
        assert!(arrivals.add(new(process.clone(), pages(100, 133))).is_ok());
        let both = arrivals.take(Duration::ZERO).map(|it| it.range);
        assert_eq!(both, Some(pages(0, 133)));
    }

    #[test]
    fn steps_of_a_heap_are_one_arrival() {
        let (arrivals, process) = (Arrivals::default(), process());
        let add = |range| {
            let process = process.clone();
            arrivals.add(new(process, range)).is_ok()
        };
        assert!(add(pages(10, 20)) && add(pages(20, 30)) && add(pages(47, 50)));
        assert!(add(pages(66, 70)));
        let mut taken = std::iter::from_fn(|| arrivals.take(Duration::ZERO));
        assert_eq!(taken.next().map(|new| new.range), Some(pages(10, 30)));
        assert_eq!(taken.next().map(|new| new.range), Some(pages(47, 70)));
        assert!(taken.next().is_none());
    }

    #[test]
    fn neighbours_in_two_processes_are_two_arrivals() {
        let arrivals = Arrivals::default();
        for range in [pages(10, 20), pages(20, 30)] {
            let process = process();
            assert!(arrivals.add(new(process, range)).is_ok());
        }
        let taken = std::iter::from_fn(|| arrivals.take(Duration::ZERO));
        assert_eq!(taken.count(), 2);
    }

    #[test]
    fn too_many_arrivals_are_given_back() {
        let (arrivals, process) = (Arrivals::default(), process());
        for at in 0..=WAITING_MAX as u64 {
            let range = pages(100 * at, 100 * at + 1);
            let process = process.clone();
            let room = arrivals.add(new(process, range)).is_ok();
            assert_eq!(room, at < WAITING_MAX as u64);
        }
    }
}
