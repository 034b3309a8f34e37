//! New mappings that the kernel has told of, until the books have them. The watch threads put them
//! in, and one thread takes them out ([`crate::space::watch`]).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use undercroft_base::VirtRange;

use super::process::Process;
use crate::sync::lock;

/// Most mappings that wait. A watch thread with one more does the work itself, so that the program
/// cannot make mappings faster than the books take them.
const WAITING_MAX: usize = 256;

/// Mappings that are this many pages apart are joined: there is no room for many others in between.
const NEAR: u64 = 16;

/// A new mapping of a process.
pub(crate) struct Arrival {
    pub process: Arc<Process>,
    pub range: VirtRange,
}

/// The new mappings of one run, oldest first.
#[derive(Default)]
pub(crate) struct Arrivals {
    waiting: Mutex<VecDeque<Arrival>>,
    came: Condvar,
}

impl Arrivals {
    /// Adds a mapping. It is joined to one that is near: a heap grows in small steps, and the
    /// stacks of threads lie beside each other.
    ///
    /// Errors: too many wait; the mapping is given back.
    pub(crate) fn add(&self, new: Arrival) -> Result<(), Arrival> {
        let mut waiting = lock(&self.waiting);
        let is_near = |old: &&mut Arrival| {
            Arc::ptr_eq(&old.process, &new.process)
                && old.range.start <= new.range.end.plus(NEAR)
                && new.range.start <= old.range.end.plus(NEAR)
        };
        if let Some(old) = waiting.iter_mut().rev().find(is_near) {
            let start = old.range.start.min(new.range.start);
            old.range = VirtRange::new(start, old.range.end.max(new.range.end));
            return Ok(());
        }
        if waiting.len() >= WAITING_MAX {
            return Err(new);
        }
        waiting.push_back(new);
        drop(waiting);
        self.came.notify_one();
        Ok(())
    }

    /// Takes the oldest mapping; waits up to `nap` for one.
    pub(crate) fn take(&self, nap: Duration) -> Option<Arrival> {
        let waiting = lock(&self.waiting);
        let none = |waiting: &mut VecDeque<Arrival>| waiting.is_empty();
        let waited = self.came.wait_timeout_while(waiting, nap, none);
        let (mut waiting, _) = waited.unwrap_or_else(PoisonError::into_inner);
        waiting.pop_front()
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

    #[test]
    fn steps_of_a_heap_are_one_arrival() {
        let (arrivals, process) = (Arrivals::default(), process());
        let add = |range| {
            let process = process.clone();
            arrivals.add(Arrival { process, range }).is_ok()
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
            assert!(arrivals.add(Arrival { process, range }).is_ok());
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
            let room = arrivals.add(Arrival { process, range }).is_ok();
            assert_eq!(room, at < WAITING_MAX as u64);
        }
    }
}
