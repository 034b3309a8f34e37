//! Threads whose fault was not served when it was read, and since when: there was no room, or the
//! page was on its way in or out.
//!
//! Cost on the fault path: a look at memory for each answer and for each wake-up, no lock, no
//! system call.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use undercroft_base::{Nanos, SpaceId, VirtPage, VirtRange};
use undercroft_engine::Fault;

/// Threads that are known to wait. Two threads of one place may forget a wait of each other.
const PLACES: usize = 64;

const _: () = assert!(PLACES == u64::BITS as usize);

/// A word of a wait: the thread above these bits, the time in microseconds below.
const TIME_BITS: u32 = 42;
const TIME: u64 = (1 << TIME_BITS) - 1;

/// The threads that wait.
pub(crate) struct Unserved {
    /// Bit i: a thread waits in place i.
    taken: AtomicU64,
    places: [Waiter; PLACES],
}

/// A thread that waits.
#[derive(Default)]
struct Waiter {
    thread_and_time: AtomicU64,
    space: AtomicU32,
    page: AtomicU64,
}

impl Default for Unserved {
    fn default() -> Unserved {
        Unserved {
            taken: AtomicU64::new(0),
            places: std::array::from_fn(|_| Waiter::default()),
        }
    }
}

impl Unserved {
    /// Notes how a fault was answered that was read at `now`. Returns how long it has waited
    /// before, if it is served now. Called with the engine locked: who loads or evicts the page
    /// then knows of the wait when the page has arrived.
    pub(crate) fn answered(&self, fault: &Fault, served: bool, now: Duration) -> Nanos {
        let thread = u64::from(fault.thread.0);
        let at = thread as usize % PLACES;
        let (place, taken) = (&self.places[at], self.taken.load(Ordering::Relaxed));
        let found = place.thread_and_time.load(Ordering::Relaxed);
        let is_its = taken >> at & 1 == 1 && found >> TIME_BITS == thread;
        let waits = is_its && place.is_of(fault.space, VirtRange::one(fault.page));
        if !served && !waits && thread != 0 {
            let word = thread << TIME_BITS | now.as_micros() as u64 & TIME;
            place.thread_and_time.store(word, Ordering::Relaxed);
            place.space.store(fault.space.0, Ordering::Relaxed);
            place.page.store(fault.page.0, Ordering::Relaxed);
            self.taken.fetch_or(1 << at, Ordering::Relaxed);
        } else if served && is_its {
            self.taken.fetch_and(!(1 << at), Ordering::Relaxed);
        }
        if served && waits {
            since(found, now)
        } else {
            Nanos(0)
        }
    }

    /// Ends the waits of the threads that wait for pages of `range`, because they are woken at
    /// `now`. Calls `each` with how long each has waited. If a page has not come, its thread faults
    /// again, and waits anew.
    pub(crate) fn woken(
        &self,
        (space, range): (SpaceId, VirtRange),
        now: Duration,
        mut each: impl FnMut(Nanos),
    ) {
        let mut left = self.taken.load(Ordering::Relaxed);
        while left != 0 {
            let at = left.trailing_zeros() as usize;
            let bit = 1 << at;
            left &= !bit;
            let place = &self.places[at];
            let found = place.thread_and_time.load(Ordering::Relaxed);
            // Another thread may end it, too.
            if place.is_of(space, range) && self.taken.fetch_and(!bit, Ordering::Relaxed) & bit != 0
            {
                each(since(found, now));
            }
        }
    }
}

impl Waiter {
    fn is_of(&self, space: SpaceId, range: VirtRange) -> bool {
        let page = VirtPage(self.page.load(Ordering::Relaxed));
        self.space.load(Ordering::Relaxed) == space.0 && range.contains(page)
    }
}

/// The time from that in `word` to `now`.
fn since(word: u64, now: Duration) -> Nanos {
    Nanos((now.as_micros() as u64).saturating_sub(word & TIME) * 1000)
}

#[cfg(test)]
mod tests {
    use undercroft_base::ThreadId;

    use super::*;

    fn fault(thread: u32, page: u64) -> Fault {
        Fault {
            space: SpaceId(1),
            page: VirtPage(page),
            write: false,
            thread: ThreadId(thread),
            urgent: false,
        }
    }

    fn woken(of: &Unserved, space: u32, pages: [u64; 2], now: Duration) -> Vec<Nanos> {
        let range = VirtRange::new(VirtPage(pages[0]), VirtPage(pages[1]));
        let mut waits = Vec::new();
        of.woken((SpaceId(space), range), now, |wait| waits.push(wait));
        waits
    }

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_wait_counts_from_the_first_fault_and_once() {
        let of = Unserved::default();
        assert_eq!(of.answered(&fault(70, 9), true, at(1)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), false, at(10)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), false, at(11)), Nanos(0));
        // Another thread of the same page.
        assert_eq!(of.answered(&fault(71, 9), true, at(12)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), true, at(13)), Nanos(3_000_000));
        assert_eq!(of.answered(&fault(70, 9), true, at(14)), Nanos(0));
    }

    #[test]
    fn a_thread_that_is_woken_has_waited_until_then() {
        let of = Unserved::default();
        of.answered(&fault(70, 9), false, at(10));
        of.answered(&fault(71, 20), false, at(11));
        assert_eq!(woken(&of, 2, [0, 100], at(12)), [], "another address space");
        assert_eq!(woken(&of, 1, [10, 20], at(12)), [], "other pages");
        assert_eq!(woken(&of, 1, [9, 10], at(12)), [Nanos(2_000_000)]);
        assert_eq!(woken(&of, 1, [0, 100], at(13)), [Nanos(2_000_000)]);
        assert_eq!(woken(&of, 1, [0, 100], at(14)), []);
        // It faults later on the page that it has waited for.
        assert_eq!(of.answered(&fault(70, 9), true, at(1000)), Nanos(0));
    }

    /// The thread was woken by another way than those that are noted.
    #[test]
    fn a_thread_that_faults_elsewhere_no_longer_waits() {
        let of = Unserved::default();
        of.answered(&fault(70, 9), false, at(10));
        assert_eq!(of.answered(&fault(70, 8), true, at(12)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), true, at(1000)), Nanos(0));
        of.answered(&fault(70, 9), false, at(1010));
        of.answered(&fault(70, 8), false, at(1020));
        assert_eq!(woken(&of, 1, [0, 100], at(1021)), [Nanos(1_000_000)]);
    }

    #[test]
    fn a_fault_of_no_thread_never_waits() {
        let of = Unserved::default();
        for served in [false, true] {
            let now = Duration::from_secs(1);
            assert_eq!(of.answered(&fault(0, 0), served, now), Nanos(0));
        }
        assert_eq!(woken(&of, 1, [0, 100], at(2000)), []);
    }
}
