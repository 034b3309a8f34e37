//! Pages that are lent above the limit while none can leave for the moment: a fork is in progress,
//! or an agent has no CPU. A thread in fork() may itself wait for room, and no page leaves before
//! the fork is over. A few pages end such a wait, so more are lent slowly at first.

use undercroft_base::Nanos;

use crate::{Engine, Ledger};

/// Pages of a step. Steps are made every millisecond or so.
const STEP: u64 = 16;

/// Up to this part of the limit every step is made. Beyond it, one is made in [`RARE`], until fewer
/// pages than a step have left in [`LONG`].
const FREE_PART: u64 = 128;
const RARE: Nanos = Nanos(25_000_000);
const LONG: Nanos = Nanos(500_000_000);

const _: () = assert!(RARE.0 < LONG.0);

/// Whether a step's worth of what is allowed above the limit is still free: no thread waits for
/// more.
pub(super) fn is_unused<L: Ledger>(engine: &Engine<L>) -> bool {
    let step = STEP.max(engine.table.large()) as i64;
    // As where threads are admitted: pages that are about to be found have their room.
    let room = engine.room_to_come();
    room.saturating_add_unsigned(engine.over_limit.0) >= step
}

/// Pages that are lent, and how the loan grows.
#[derive(Debug, Default)]
pub(super) struct Loan {
    pages: u64,
    /// Since when fewer pages than a step have left; none if none had to be lent since then.
    since: Option<Nanos>,
    /// Pages that have left since.
    left: u64,
    /// When the last step was made.
    stepped: Nanos,
}

impl Loan {
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages have left. Half of them pays back the loan, and the other half admits threads that
    /// wait. Otherwise the threads that were admitted before would find no room, and wait again.
    pub(super) fn pay_back(&mut self, freed: u64) {
        self.pages = self.pages.saturating_sub(freed / 2);
        self.left += freed;
        if self.left >= STEP {
            (self.since, self.left) = (None, 0);
        }
    }

    /// No page could leave.
    /// * `now`: since the start of the run.
    /// * `limit`: in pages.
    /// * `large`: pages that one step must have, because a thread may wait for as many.
    pub(super) fn grow(&mut self, now: Nanos, limit: u64, large: u64) {
        let step = STEP.max(large);
        let since = *self.since.get_or_insert(now);
        let is_rare = self.pages >= (limit / FREE_PART).max(step) && now.since(since) < LONG;
        if !is_rare || now.since(self.stepped) >= RARE {
            self.pages += step;
            self.stepped = now;
        }
    }

    /// The limit's allowance includes it now, or the reserve is free.
    pub(super) fn end(&mut self) {
        *self = Loan::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 16_384;

    fn lent_after(ms: std::ops::Range<u64>, loan: &mut Loan) -> u64 {
        for ms in ms {
            loan.grow(Nanos(ms * 1_000_000), LIMIT, 0);
        }
        loan.pages()
    }

    #[test]
    fn a_wait_that_does_not_end_is_lent_more_and_more() {
        let mut loan = Loan::default();
        assert_eq!(
            lent_after(0..8, &mut loan),
            128,
            "a 128th of the limit at once"
        );
        let brief = lent_after(8..500, &mut loan);
        assert!((400..=480).contains(&brief), "then slowly: {brief}");
        let long = lent_after(500..1500, &mut loan);
        assert_eq!(long - brief, 16_000, "at full speed if nothing helps");
    }

    #[test]
    fn pages_that_leave_pay_back_a_loan_and_end_the_wait() {
        let mut loan = Loan::default();
        let lent = lent_after(0..600, &mut loan);
        loan.pay_back(64);
        assert_eq!(loan.pages(), lent - 32);
        let more = lent_after(600..700, &mut loan);
        assert!(more <= lent - 32 + 5 * STEP, "it is slow again: {more}");
        loan.pay_back(1 << 40);
        assert_eq!(loan.pages(), 0);
    }

    #[test]
    fn a_page_now_and_then_does_not_end_the_wait() {
        let mut loan = Loan::default();
        for tenth in 0..10 {
            lent_after(tenth * 100..(tenth + 1) * 100, &mut loan);
            loan.pay_back(1);
        }
        let before = loan.pages();
        assert_eq!(
            lent_after(1000..1100, &mut loan) - before,
            100 * STEP,
            "at full speed"
        );
    }
}
