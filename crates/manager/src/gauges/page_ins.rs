//! How long page-ins take, for a latency bound: fault threads add, and the control thread reads.
//! Only if the run has a bound.
//!
//! A page-in counts from when its fault was read to just before its thread is woken. If it found no
//! room before, it counts from when it was read first. Not in it: the way of the fault to the fault
//! thread, the wake-up, and waits for a page that is being evicted or loaded for another thread.
//!
//! Cost on the fault path: two or three additions to memory, no lock, no system call.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use undercroft_base::Nanos;
use undercroft_qos::LatencyBound;
use undercroft_qos::tail::{BUCKETS, bucket};

/// The latencies of one kind of page-in, by bucket of `undercroft_qos::tail`. They only grow, and
/// begin again at 0 after 2^32.
pub(crate) struct Counts([AtomicU32; BUCKETS]);

/// The page-ins of a run.
pub(crate) struct PageIns {
    /// The bound, in nanoseconds. It may change.
    limit_ns: AtomicU64,
    /// All of them.
    pub all: Counts,
    /// Page-ins from a device.
    pub device: Counts,
    over: AtomicU64,
}

impl Counts {
    fn new() -> Counts {
        Counts([const { AtomicU32::new(0) }; BUCKETS])
    }

    /// Calls `more` with the count of each bucket that has grown since `seen`, and sets `seen`.
    pub(crate) fn news(&self, seen: &mut [u32; BUCKETS], mut more: impl FnMut(usize, u32)) {
        for (at, (count, seen)) in self.0.iter().zip(seen).enumerate() {
            let now = count.load(Ordering::Relaxed);
            let grown = now.wrapping_sub(std::mem::replace(seen, now));
            if grown > 0 {
                more(at, grown);
            }
        }
    }
}

impl PageIns {
    pub(crate) fn new(bound: LatencyBound) -> PageIns {
        PageIns {
            limit_ns: AtomicU64::new(bound.limit.0),
            all: Counts::new(),
            device: Counts::new(),
            over: AtomicU64::new(0),
        }
    }

    /// The same on the heap: it is 8 KiB.
    pub(crate) fn boxed(bound: LatencyBound) -> Box<PageIns> {
        Box::new(PageIns::new(bound))
    }

    /// The bound is another one from now on.
    pub(crate) fn set_limit(&self, limit: Nanos) {
        self.limit_ns.store(limit.0, Ordering::Relaxed);
    }

    /// Adds a page-in.
    pub(crate) fn add(&self, took: Nanos, from_device: bool) {
        let at = bucket(took);
        self.all.0[at].fetch_add(1, Ordering::Relaxed);
        if from_device {
            self.device.0[at].fetch_add(1, Ordering::Relaxed);
        }
        if took.0 > self.limit_ns.load(Ordering::Relaxed) {
            // A reader that sees this sees the page-in, too.
            self.over.fetch_add(1, Ordering::Release);
        }
    }

    /// Page-ins above the limit so far. Read before the counts: none of these is missing there.
    pub(crate) fn over(&self) -> u64 {
        self.over.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_once_and_by_kind() {
        let of = PageIns::new("p99=200us".parse().expect("a bound"));
        of.add(Nanos(5_000), false);
        of.add(Nanos(200_000), true);
        of.add(Nanos(200_001), true);
        assert_eq!(of.over(), 1);
        let mut seen = [0; BUCKETS];
        let mut news = |counts: &Counts| {
            let mut sum = 0;
            counts.news(&mut seen, |_, count| sum += count);
            sum
        };
        assert_eq!((news(&of.all), news(&of.all)), (3, 0));
        let mut seen = [0; BUCKETS];
        let mut found = Vec::new();
        of.device
            .news(&mut seen, |at, count| found.push((at, count)));
        assert_eq!(found, [(bucket(Nanos(200_000)), 2)]);
    }

    /// A count that has begun again at 0 is no reason to lose or invent page-ins.
    #[test]
    fn counts_that_begin_again_are_read_right() {
        let counts = Counts::new();
        counts.0[7].store(u32::MAX, Ordering::Relaxed);
        let mut seen = [0; BUCKETS];
        counts.news(&mut seen, |_, _| ());
        counts.0[7].fetch_add(3, Ordering::Relaxed);
        let mut found = Vec::new();
        counts.news(&mut seen, |at, count| found.push((at, count)));
        assert_eq!(found, [(7, 3)]);
    }
}
