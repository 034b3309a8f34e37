//! Threads that found no room for their page, and since when. Only fault threads use it.
//!
//! Cost on the fault path: one look at memory, no lock, no system call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use undercroft_base::Nanos;
use undercroft_engine::Fault;

/// Threads that are known to wait for room. Two threads of one place may forget a wait of each
/// other.
const WAITS: usize = 64;

/// A word of a wait: the thread above these bits, the time in microseconds below.
const TIME_BITS: u32 = 42;

/// The threads that wait for room.
pub(crate) struct RoomWaits([Wait; WAITS]);

/// A thread that waits for room. Zero: none.
#[derive(Default)]
struct Wait {
    thread_and_time: AtomicU64,
    page: AtomicU64,
}

impl Default for RoomWaits {
    fn default() -> RoomWaits {
        RoomWaits(std::array::from_fn(|_| Wait::default()))
    }
}

impl RoomWaits {
    /// Notes how a fault was answered at `now`. Returns how long it has waited for room before; it
    /// does not wait any more then.
    pub(crate) fn answered(&self, fault: &Fault, no_room: bool, now: Duration) -> Nanos {
        let thread = u64::from(fault.thread.0);
        let wait = &self.0[thread as usize % WAITS];
        let found = wait.thread_and_time.load(Ordering::Relaxed);
        let is_ours = found >> TIME_BITS == thread
            && thread != 0
            && wait.page.load(Ordering::Relaxed) == fault.page.0;
        let micros = now.as_micros() as u64;
        if no_room && !is_ours {
            wait.page.store(fault.page.0, Ordering::Relaxed);
            let word = thread << TIME_BITS | (micros & ((1 << TIME_BITS) - 1));
            wait.thread_and_time.store(word, Ordering::Relaxed);
        }
        if no_room || !is_ours {
            return Nanos(0);
        }
        wait.thread_and_time.store(0, Ordering::Relaxed);
        let since = found & ((1 << TIME_BITS) - 1);
        Nanos(micros.saturating_sub(since) * 1000)
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::{SpaceId, ThreadId, VirtPage};

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

    #[test]
    fn a_wait_for_room_counts_from_the_first_fault_and_once() {
        let of = RoomWaits::default();
        let at = Duration::from_millis;
        assert_eq!(of.answered(&fault(70, 9), false, at(1)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), true, at(10)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), true, at(11)), Nanos(0));
        // Another page of the same thread, and another thread of the same page.
        assert_eq!(of.answered(&fault(70, 8), false, at(12)), Nanos(0));
        assert_eq!(of.answered(&fault(71, 9), false, at(12)), Nanos(0));
        assert_eq!(of.answered(&fault(70, 9), false, at(13)), Nanos(3_000_000));
        assert_eq!(of.answered(&fault(70, 9), false, at(14)), Nanos(0));
    }

    #[test]
    fn a_fault_of_no_thread_never_waits() {
        let of = RoomWaits::default();
        for no_room in [true, false] {
            let now = Duration::from_secs(1);
            assert_eq!(of.answered(&fault(0, 0), no_room, now), Nanos(0));
        }
    }
}
