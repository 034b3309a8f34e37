//! Latency control's last decision. The control thread sets it after each window, and the evictor
//! follows it. Without control nothing is set, and fault threads add nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::reclaim::{Goes, Turned};

/// A word of the knobs: control is on, where pages go, and the pages of a batch above.
const ON: u32 = 1;
const GOES_SHIFT: u32 = 1;
const GOES_MASK: u32 = 3;
const BATCH_SHIFT: u32 = 3;

/// The knobs of a run.
#[derive(Debug, Default)]
pub(crate) struct Knobs {
    word: AtomicU32,
    /// Plans that wait for a read of a device.
    reads: AtomicU32,
    /// Times that write-out waited for reads.
    yields: AtomicU64,
}

impl Knobs {
    /// Sets them; `None`: control is off.
    pub(crate) fn set(&self, turned: Option<Turned>) {
        let word = turned.map_or(0, |turned| {
            let batch = turned.batch.clamp(1, EVICT_PAGES_MAX) as u32;
            batch << BATCH_SHIFT | (turned.goes as u32) << GOES_SHIFT | ON
        });
        self.word.store(word, Ordering::Relaxed);
    }

    /// As they were set last.
    pub(crate) fn get(&self) -> Option<Turned> {
        let word = self.word.load(Ordering::Relaxed);
        (word & ON != 0).then_some(Turned {
            batch: (word >> BATCH_SHIFT) as usize,
            goes: match word >> GOES_SHIFT & GOES_MASK {
                0 => Goes::AsPlaced,
                1 => Goes::ToDevice,
                _ => Goes::ToBuffer,
            },
        })
    }

    /// A plan begins to wait for a device, if control is on. The caller calls
    /// [`Knobs::read_ended`] if this is true. Cost: one load without control.
    pub(crate) fn read_begins(&self) -> bool {
        let on = self.word.load(Ordering::Relaxed) & ON != 0;
        if on {
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
        on
    }

    /// The plan has its pages.
    pub(crate) fn read_ended(&self) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether a plan waits for a device.
    pub(crate) fn reads_in_flight(&self) -> bool {
        self.reads.load(Ordering::Relaxed) > 0
    }

    /// Write-out waited for reads.
    pub(crate) fn note_yield(&self) {
        self.yields.fetch_add(1, Ordering::Relaxed);
    }

    /// How often it did.
    pub(crate) fn yields(&self) -> u64 {
        self.yields.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_are_read_as_they_were_set_and_a_batch_has_a_page() {
        let knobs = Knobs::default();
        assert_eq!((knobs.get(), knobs.read_begins()), (None, false));
        for (set, batch) in [(0, 1), (1, 1), (17, 17), (1024, EVICT_PAGES_MAX)] {
            for goes in [Goes::AsPlaced, Goes::ToDevice, Goes::ToBuffer] {
                knobs.set(Some(Turned { batch: set, goes }));
                assert_eq!(knobs.get(), Some(Turned { batch, goes }));
            }
        }
        assert!(knobs.read_begins() && knobs.reads_in_flight());
        knobs.set(None);
        // A read that was counted ends as one, though control is off by then.
        knobs.read_ended();
        assert!(!knobs.reads_in_flight() && knobs.get().is_none());
    }
}
