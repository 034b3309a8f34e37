//! What happens when no tier has room and the limit is reached.

use undercroft_base::PageCount;

use super::Evictor;
use crate::options::WhenFull;
use crate::signals::Doom;

/// Pages by which the limit may be exceeded further, each time that no page could be evicted. If a
/// quarter of the present excess is more, that is taken.
const OVER_LIMIT_STEP: u64 = 256;

impl Evictor {
    /// Handles a limit that is reached while no tier has room: tells the user once, and does what
    /// the user chose.
    pub(super) fn everything_full(&mut self) {
        let options = &self.shared.options;
        if !std::mem::replace(&mut self.warned, true) {
            crate::log::say(&format!(
                "every tier is full and the memory limit of {} is reached; {}",
                self.shared.gauges.memory_max(),
                match options.when_full {
                    WhenFull::Stay =>
                        "pages stay in memory above the limit. \
                        Add room with `--tier file:PATH,size=SIZE` or raise --memory-max",
                    WhenFull::Kill => "ending the program (--when-full kill)",
                }
            ));
        }
        match options.when_full {
            WhenFull::Stay => {
                let mut engine = self.shared.books.engine();
                let allowed = allowed_over(engine.books().room());
                engine.faults().set_over_limit(allowed);
            }
            WhenFull::Kill => self.shared.signals.doom(Doom::TiersFull),
        }
    }
}

/// How far the limit may be exceeded, given the present `room`: by the present excess and one step.
/// Repeated calls do not make it grow.
fn allowed_over(room: i64) -> PageCount {
    let over = room.min(0).unsigned_abs();
    PageCount(over.saturating_add(OVER_LIMIT_STEP.max(over / 4)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_above_the_limit_follows_what_is() {
        for room in [1, 0] {
            assert_eq!(allowed_over(room), PageCount(OVER_LIMIT_STEP));
        }
        assert_eq!(allowed_over(-100), PageCount(100 + OVER_LIMIT_STEP));
        assert_eq!(allowed_over(-40_000), PageCount(50_000));
        assert_eq!(allowed_over(i64::MIN).0, (1 << 63) + (1 << 61));
    }
}
