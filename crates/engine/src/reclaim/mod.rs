//! When reclaim runs, and how much it takes at a time: when it sleeps, backs off, lends pages above
//! the limit, rests, and lets reads go first. The policy says which pages, the placement policy
//! which tier.
//!
//! Sans-I/O, as the engine: the caller asks for the next [`Step`], carries it out, and reports.
//! ```text
//! Asleep --wanted--> Works --Choose--> a batch --ended--> Works     pages left
//!    ^                 |                            `--> Pauses     none left; a loan grows
//!    `---Enough--------'                            `--> Unfit      they did not compress
//!                                                   `--> Full       no tier has room
//! ```
//! Several batches may be in flight ([`Reclaimer::new`]). Each is one [`Step::Choose`] and one
//! [`Reclaimer::ended`], in any order.

mod backoff;
mod loan;
mod pace;
mod urgency;

use undercroft_base::{Bytes, Nanos, PageCount};
use undercroft_policy::place::{LatencyClass, Migration, TierOrder};

use self::backoff::{Backoff, Next};
use self::loan::Loan;
pub use self::pace::{DRAINS_A_SECOND, GROUPS_ASKED, MOVES_A_SECOND, MOVES_NAP, Mover, Pace};
pub(crate) use self::urgency::BUFFER_ROOM_MIN;
pub use self::urgency::{Goes, Turned};
use crate::Engine;
use crate::batch::HALF_PAGES;
use crate::ledger::Ledger;

/// Pause when no page can leave for the moment, and between checks for threads that wait for room.
const PAUSE: Nanos = Nanos(1_000_000);

/// Longest sleep: threads may be waiting for room that the program itself makes.
const NAP: Nanos = Nanos(100_000_000);

/// The same after [`NAPS`] naps in a row: nothing happens. Tiers have tidied up by then.
const LONG_NAP: Nanos = Nanos(1_000_000_000);
const NAPS: u32 = 50;

/// The same in a calm run where no thread waits for room.
const CALM_NAP: Nanos = Nanos(4_000_000_000);

const _: () = assert!(PAUSE.0 < NAP.0 && NAP.0 < LONG_NAP.0 && LONG_NAP.0 < CALM_NAP.0);

/// Pages by which the limit may be exceeded further, each time that no page could be evicted. If a
/// quarter of the present excess is more, that is taken.
const OVER_LIMIT_STEP: u64 = 256;

/// Facts that the engine does not know.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Since the start of the run.
    pub time: Nanos,
    /// The limit that the user asks for. A lower one is approached as pages leave.
    pub limit: Bytes,
    /// Nothing may leave.
    pub paused: bool,
    /// Nothing happens in the client.
    pub calm: bool,
    /// A fault waits for a read of a device.
    pub reads: bool,
    /// A user or a plugin has named pages that are to leave, although there is room.
    pub named: bool,
}

/// The next thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sleep for this long, or until a fault has used the reserve. Then [`Reclaimer::slept`].
    Sleep(Nanos),
    /// Move pages between tiers. If none moved: [`Reclaimer::moved_none`].
    Demote(Migration),
    /// Wait until no fault waits for a read of a device, at most for this long.
    Yield(Nanos),
    /// Begin a batch of up to this many pages. When the last of them is published:
    /// [`Reclaimer::ended`].
    Choose(usize),
    /// There is room: as `Choose`, but only of pages that a user or a plugin has named.
    Named(usize),
    /// Nothing can be begun before a batch in flight ends.
    Wait,
    /// Begin nothing for this long. Batches in flight go on.
    Rest(Nanos),
    /// As `Rest`, but the limit is reached and no tier has room. The caller ends the client, or
    /// lets it exceed the limit: [`Reclaimer::exceed`].
    Full(Nanos),
    /// The reserve is free, and nothing is lent any more. The next step is `Sleep`, as a rule.
    Enough,
}

/// How a batch ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// The number in its [`Step::Choose`] or [`Step::Named`].
    pub asked: usize,
    /// Base pages that were freed. 0 also if no page could be chosen.
    pub freed: u64,
    /// No tier took one of its pages.
    pub refused: bool,
    /// A page of it did not compress. Others may.
    pub unfit: bool,
    /// Pages may still leave whose process is late to answer: nothing is lent for lack of it.
    pub answer_due: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asleep,
    Works,
    /// No page could leave for the moment.
    Pauses,
    /// Pages did not compress: a rest of this length comes.
    Unfit(Nanos),
    /// No tier has room: no batch is begun before this time.
    Full(Nanos),
}

/// The state of a client's reclaim. It begins asleep.
#[derive(Debug)]
pub struct Reclaimer {
    batches_max: usize,
    phase: Phase,
    /// Sleeps in a row in which nothing happened.
    naps: u32,
    backoff: Backoff,
    loan: Loan,
    /// The loan, as the engine was told last.
    lent: PageCount,
    /// Batches in flight, and the pages that were asked for.
    batches: usize,
    pages: usize,
    moved_none: bool,
    yielded: bool,
}

impl Reclaimer {
    /// * `batches_max`: batches that may be in flight at once, at least 1.
    pub fn new(batches_max: usize) -> Reclaimer {
        assert!(batches_max > 0, "no batch may begin");
        Reclaimer {
            batches_max,
            phase: Phase::Asleep,
            naps: 0,
            backoff: Backoff::default(),
            loan: Loan::default(),
            lent: PageCount(0),
            batches: 0,
            pages: 0,
            moved_none: false,
            yielded: false,
        }
    }

    /// Whether it sleeps until the reserve is used.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.phase == Phase::Asleep
    }

    /// The next thing to do. The engine knows what the tiers hold now. Cost: O(tiers), no
    /// allocation.
    pub fn step<L: Ledger>(&mut self, engine: &mut Engine<L>, now: Now) -> Step {
        if self.is_asleep() {
            if now.paused || !(now.named || engine.books().reclaim_wanted()) {
                return Step::Sleep(self.nap(engine, now.calm));
            }
            (self.phase, self.naps) = (Phase::Works, 0);
        }
        if let Some(step) = self.stays(engine, now.time) {
            return step;
        }
        if now.paused {
            return self.ends(engine);
        }
        engine.approach_limit(now.limit);
        if let Some(migration) = self.demotion(engine) {
            return Step::Demote(migration);
        }
        let needed = engine.books().reclaim_unfinished();
        if !needed && !now.named {
            return self.ends(engine);
        }
        if self.may_not_begin(engine, needed) {
            return Step::Wait;
        }
        let yielded = std::mem::replace(&mut self.yielded, false);
        if !yielded && now.reads && goes_to_device(engine) {
            self.yielded = true;
            return Step::Yield(urgency::YIELD_MAX);
        }
        let most = match self.batches_max {
            1 => self.backoff.pages(),
            _ => self.backoff.pages().min(HALF_PAGES), // of one space, beside another batch
        };
        let pages = engine.turned.map_or(most, |turned| most.min(turned.batch));
        self.batches += 1;
        self.pages += pages;
        if needed {
            Step::Choose(pages)
        } else {
            Step::Named(pages)
        }
    }

    /// A sleep is over.
    ///
    /// * `stirred`: a fault has used the reserve, or the caller had something to do.
    pub fn slept(&mut self, stirred: bool) {
        self.naps = if stirred { 0 } else { self.naps + 1 };
    }

    /// A demotion moved no page. Pages leave before the next one.
    pub fn moved_none(&mut self) {
        self.moved_none = true;
    }

    /// A batch has ended. The engine knows what the tiers hold now.
    pub fn ended<L: Ledger>(&mut self, engine: &mut Engine<L>, time: Nanos, ended: Ended) {
        assert!(self.batches > 0, "a batch ended that had not begun");
        self.batches -= 1;
        self.pages -= ended.asked;
        if ended.freed > 0 {
            self.loan.pay_back(ended.freed);
            self.lend(engine);
            self.backoff.freed();
            // One that was in flight when the rest began: there is room again.
            self.phase = Phase::Works;
            return;
        }
        // A rest has begun since it was chosen.
        if !matches!(self.phase, Phase::Works | Phase::Pauses) {
            return;
        }
        if !ended.refused {
            // No page left, and not for lack of room below. A fork is in progress, or the pages are
            // pinned, or all were just touched. The last batch in flight lends: another may free
            // some, and of several that free none each would wait for the others.
            if !ended.answer_due && self.batches == 0 && !loan::is_unused(engine) {
                let limit = engine.books().limit().pages_floor();
                self.loan.grow(time, limit.0, engine.table.large());
                self.lend(engine);
            }
            self.phase = Phase::Pauses;
            return;
        }
        self.phase = match self.backoff.refused(ended.unfit) {
            Next::AtOnce => Phase::Works,
            Next::Unfit(rest) => Phase::Unfit(rest),
            Next::Full(rest) => Phase::Full(Nanos(time.0.saturating_add(rest.0))),
        };
    }

    /// Lets the client exceed the limit further. What was lent is part of that from now on.
    pub fn exceed<L: Ledger>(&mut self, engine: &mut Engine<L>) {
        engine.over_limit = allowed_over(engine.books().room(), engine.table.large());
        self.loan_ends();
    }

    fn nap<L: Ledger>(&self, engine: &Engine<L>, calm: bool) -> Nanos {
        match self.naps >= NAPS {
            true if calm && engine.waiters.is_empty() => CALM_NAP,
            true => LONG_NAP,
            false => NAP,
        }
    }

    /// The step of a pause or a rest; `None`: there is none, or it is over.
    fn stays<L: Ledger>(&mut self, engine: &Engine<L>, time: Nanos) -> Option<Step> {
        let books = engine.books();
        let (rest, next) = match self.phase {
            Phase::Asleep | Phase::Works => return None,
            Phase::Pauses if self.batches > 0 => return Some(Step::Wait),
            Phase::Pauses => {
                self.phase = Phase::Works;
                return Some(Step::Rest(PAUSE));
            }
            Phase::Unfit(rest) => (rest, Phase::Works),
            Phase::Full(until) if time >= until || !books.reclaim_unfinished() => {
                (Nanos(0), Phase::Works)
            }
            Phase::Full(_) => (PAUSE, self.phase),
        };
        self.phase = next;
        match rest {
            _ if books.is_full() => Some(Step::Full(rest)),
            Nanos(0) => None,
            _ => Some(Step::Rest(rest)),
        }
    }

    /// Ends a round: nothing is lent or allowed above the limit any more.
    fn ends<L: Ledger>(&mut self, engine: &mut Engine<L>) -> Step {
        if self.batches > 0 {
            return Step::Wait;
        }
        self.backoff = Backoff::default();
        self.loan_ends();
        engine.over_limit = PageCount(0);
        self.phase = Phase::Asleep;
        Step::Enough
    }

    /// The move to make first; `None`: nothing, or the last move was in vain.
    fn demotion<L: Ledger>(&mut self, engine: &mut Engine<L>) -> Option<Migration> {
        if std::mem::replace(&mut self.moved_none, false) {
            return None;
        }
        engine.migrations().wanted(Mover::Evictor)
    }

    /// Whether what is in flight is all that there may be, or suffices. A trial is alone.
    ///
    /// * `needed`: there is too little room.
    fn may_not_begin<L: Ledger>(&self, engine: &Engine<L>, needed: bool) -> bool {
        let most = if self.backoff.tries() {
            1
        } else {
            self.batches_max
        };
        let suffices = || needed && engine.books().reclaim_lacks() <= self.pages as i64;
        self.batches > 0 && (self.batches >= most || suffices())
    }

    /// Tells the engine of the loan. It adds to what [`Reclaimer::exceed`] allows.
    fn lend<L: Ledger>(&mut self, engine: &mut Engine<L>) {
        let pages = self.loan.pages();
        let others = engine.over_limit.0.saturating_sub(self.lent.0);
        (engine.over_limit, self.lent) = (PageCount(others + pages), PageCount(pages));
    }

    /// The allowance above the limit includes the loan, or has ended.
    fn loan_ends(&mut self) {
        self.loan.end();
        self.lent = PageCount(0);
    }
}

/// How far the limit may be exceeded, given the present `room`: by the present excess and one step,
/// in which `large` pages fit. Repeated calls do not make it grow.
fn allowed_over(room: i64, large: u64) -> PageCount {
    let over = room.min(0).unsigned_abs();
    PageCount(over.saturating_add(OVER_LIMIT_STEP.max(over / 4).max(large)))
}

/// Whether control is on, the next pages go to a device first, and nothing waits for room.
fn goes_to_device<L: Ledger>(engine: &Engine<L>) -> bool {
    if engine.turned.is_none() {
        return false;
    }
    let order = engine.turned_order(TierOrder::downwards(engine.ranked.len()));
    let rank = order.get(0).map(|rank| usize::from(rank.0));
    let latency = rank.map(|rank| engine.ranked[rank].latency);
    latency == Some(LatencyClass::Device) && !engine.books().is_full()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_above_the_limit_follows_what_is() {
        for room in [1, 0] {
            assert_eq!(allowed_over(room, 0), PageCount(OVER_LIMIT_STEP));
        }
        assert_eq!(allowed_over(-100, 0), PageCount(100 + OVER_LIMIT_STEP));
        assert_eq!(allowed_over(-100, 512), PageCount(612));
        assert_eq!(allowed_over(-40_000, 0), PageCount(50_000));
        assert_eq!(allowed_over(i64::MIN, 0).0, (1 << 63) + (1 << 61));
    }
}
