//! Memory that cannot leave: whether it can again, and what the rest of the program needs beside
//! it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::PageCount;
use undercroft_engine::limits::FLOOR_MIN;

use super::Control;
use crate::space::process::Process;
use crate::space::still;

/// Time between two looks.
const EVERY: Duration = Duration::from_secs(1);

/// The findings of the last look.
pub(super) struct Still {
    at: Instant,
    /// Pages that had come in from tiers by then, and those of the time before that.
    came: u64,
    lately: u64,
}

impl Still {
    pub(super) fn new(now: Instant) -> Still {
        Still {
            at: now,
            came: 0,
            lately: 0,
        }
    }

    /// The floor for pages that can move: a quarter of those that were used in the last two looks.
    /// Those are in memory, or came in.
    /// * `movable`, `stored`: pages that are in memory and can move, and those in tiers.
    /// * `came`: pages that have come in from tiers so far.
    fn floor(&mut self, movable: u64, stored: u64, came: u64) -> PageCount {
        let now = came.saturating_sub(self.came);
        let used = movable + (now + self.lately).min(stored);
        (self.came, self.lately) = (came, now);
        PageCount(used / 4).max(FLOOR_MIN)
    }
}

impl Control {
    /// Looks whether mappings that are set aside are writable again, and how much the rest needs.
    /// Does nothing if the last look was a moment ago.
    pub(super) fn look_at_still(&mut self, processes: &[Arc<Process>]) {
        let now = Instant::now();
        if now.duration_since(self.checks.still.at) < EVERY {
            return;
        }
        self.checks.still.at = now;
        for process in processes {
            still::look_around(&self.shared, process);
        }
        let mut engine = self.shared.books.engine();
        let books = engine.books();
        let movable = books
            .resident()
            .0
            .saturating_sub(books.immovable().pages_floor().0);
        let came = books.stats().pages_swapped_in;
        let floor = self.checks.still.floor(movable, books.stored().0, came);
        engine.evictions().set_floor(floor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_a_quarter_of_what_was_used_lately() {
        let mut still = Still::new(Instant::now());
        assert_eq!(still.floor(100, 100, 0), FLOOR_MIN);
        assert_eq!(still.floor(10_000, 0, 0).0, 2500);
        // A page that is in a tier now may have come in often.
        assert_eq!(still.floor(10_000, 30_000, 8000).0, 4500);
        assert_eq!(still.floor(10_000, 30_000, 12_000).0, 5500);
        assert_eq!(still.floor(10_000, 30_000, 90_000).0, 10_000);
        assert_eq!(still.floor(0, 30_000, 90_000).0, 7500);
        assert_eq!(still.floor(0, 30_000, 90_000), FLOOR_MIN);
    }
}
