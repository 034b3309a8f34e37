//! How fast copies move between tiers in the background, so that devices are mostly free for
//! faults.

use undercroft_base::{Bytes, Nanos};

/// Bytes a second that are read, and written again, if the run's rights say nothing else.
pub const MOVES_A_SECOND: Bytes = Bytes(32 << 20);

/// The same while the user has a tier emptied.
pub const DRAINS_A_SECOND: Bytes = Bytes(128 << 20);

/// Groups that are asked for before a rest, while none has pages to move.
pub const GROUPS_ASKED: usize = 256;

/// Time between two looks while nothing is to move.
pub const MOVES_NAP: Nanos = Nanos(50_000_000);

/// Who carries out a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The evictor, before a batch: it moves what the processor can read.
    Evictor,
    /// A thread for which no other waits: it moves pages out of devices.
    Background,
}

/// The pace of one client's moves.
#[derive(Debug)]
pub struct Pace {
    saved: Nanos,
    next: Nanos,
}

impl Pace {
    /// * `saved`: the budget of this much time may be used at once.
    pub fn new(saved: Nanos) -> Pace {
        Pace {
            saved,
            next: Nanos(0),
        }
    }

    /// When the next move may begin.
    pub fn next(&self) -> Nanos {
        self.next
    }

    /// A move of `bytes` began at `began`.
    pub fn moved(&mut self, began: Nanos, bytes: Bytes, a_second: Bytes) {
        let took = bytes.0 as f64 * 1e9 / a_second.0.max(1) as f64;
        self.rests(began, Nanos(took as u64));
    }

    /// Nothing moves for this long from `began` on.
    pub fn rests(&mut self, began: Nanos, time: Nanos) {
        let from = self.next.0.max(began.0.saturating_sub(self.saved.0));
        self.next = Nanos(from.saturating_add(time.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = Nanos(1_000_000_000);

    #[test]
    fn moves_keep_to_the_rate_and_a_budget_is_saved_for_a_while() {
        let mut pace = Pace::new(Nanos(0));
        pace.moved(SECOND, MOVES_A_SECOND, MOVES_A_SECOND);
        assert_eq!(pace.next(), Nanos(2 * SECOND.0));
        pace.moved(Nanos(9 * SECOND.0), MOVES_A_SECOND, DRAINS_A_SECOND);
        assert_eq!(pace.next(), Nanos(9 * SECOND.0 + SECOND.0 / 4));
        let mut pace = Pace::new(SECOND);
        let mut moved = 0;
        while pace.next() < Nanos(9 * SECOND.0) {
            pace.moved(Nanos(9 * SECOND.0), Bytes(1 << 20), MOVES_A_SECOND);
            moved += 1;
        }
        assert_eq!(moved, 32, "a second's worth, not nine");
    }
}
