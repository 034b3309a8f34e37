//! How long faults and reads take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;
use undercroft_base::Nanos;
use undercroft_proto::report::FaultBreakdown;
use undercroft_qos::pressure::Waits;

/// Nanoseconds, 1 ns to 60 s, two digits; never grows.
pub(crate) fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("constant bounds are valid")
}

/// How long threads waited for the pages that they touched.
#[derive(Clone)]
pub(crate) struct FaultLatency {
    histogram: Histogram<u64>,
    /// From reading a fault to answering it.
    served: Nanos,
    /// Waits for room, too.
    waited: Nanos,
    waits: Waits,
}

impl FaultLatency {
    pub(crate) fn new() -> FaultLatency {
        FaultLatency {
            histogram: new_histogram(),
            served: Nanos(0),
            waited: Nanos(0),
            waits: Waits::default(),
        }
    }

    /// Adds one fault that took `nanos`, after it had waited for room, and ended at `end`, since
    /// the start of the run.
    pub(crate) fn note(&mut self, nanos: u64, for_room: Nanos, end: Nanos) {
        self.histogram.saturating_record(nanos);
        self.served.0 += nanos;
        self.note_wait(Nanos(nanos + for_room.0), end);
    }

    /// Adds a wait that ended at `end`, of a fault that is not counted, or is counted elsewhere.
    pub(crate) fn note_wait(&mut self, waited: Nanos, end: Nanos) {
        self.waited.0 += waited.0;
        self.waits.add(Nanos(end.0.saturating_sub(waited.0)), end);
    }

    pub(crate) fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// The mean time from reading a fault to answering it; 0 without faults.
    pub(crate) fn mean(&self) -> Nanos {
        Nanos(self.served.0 / self.histogram.len().max(1))
    }

    /// The sum over all faults from reading them to answering them.
    pub(crate) fn served(&self) -> Nanos {
        self.served
    }

    /// The sum over all faults, waits for room included.
    pub(crate) fn waited(&self) -> Nanos {
        self.waited
    }

    /// The time in which at least one thread waited.
    pub(crate) fn some_waited(&self) -> Nanos {
        self.waits.total()
    }
}

/// Times of the parts of a fault, in nanoseconds, summed over `count` faults that loaded one page
/// from a memory tier.
#[derive(Debug, Default)]
pub(crate) struct Breakdown {
    count: AtomicU64,
    parts: [AtomicU64; 4],
}

impl Breakdown {
    /// Adds one fault: when it arrived, was read, decided, loaded and installed.
    pub(crate) fn add(&self, times: [Instant; 5]) {
        self.count.fetch_add(1, Ordering::Relaxed);
        for (part, pair) in self.parts.iter().zip(times.windows(2)) {
            let took = pair[1].saturating_duration_since(pair[0]).as_nanos() as u64;
            part.fetch_add(took, Ordering::Relaxed);
        }
    }

    /// The means. `None` if there was no such fault.
    pub(crate) fn mean(&self) -> Option<FaultBreakdown> {
        let faults = self.count.load(Ordering::Relaxed);
        let mean = |at: usize| self.parts[at].load(Ordering::Relaxed) as f64 / faults as f64 / 1e9;
        (faults > 0).then(|| FaultBreakdown {
            faults,
            intake: mean(0),
            decide: mean(1),
            load: mean(2),
            install: mean(3),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_room_is_waited_but_no_time_of_the_fault() {
        let mut of = FaultLatency::new();
        // 3 ms for room, then 1 ms; meanwhile another thread waits for room alone.
        of.note(1_000_000, Nanos(3_000_000), Nanos(10_000_000));
        of.note_wait(Nanos(2_000_000), Nanos(8_000_000));
        assert_eq!(of.waited(), Nanos(6_000_000));
        assert_eq!(of.some_waited(), Nanos(4_000_000));
        assert_eq!(
            (of.served(), of.mean()),
            (Nanos(1_000_000), Nanos(1_000_000))
        );
    }
}
