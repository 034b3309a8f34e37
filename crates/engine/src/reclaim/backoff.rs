//! How reclaim backs off when batches free nothing for lack of room below: when it rests, for how
//! long, and how many pages it tries then.

use undercroft_base::Nanos;

use crate::limits::EVICT_PAGES_MAX;

/// Batches in a row that free nothing before a rest.
const FRUITLESS_MAX: u32 = 8;

/// The first rest. Each further one is twice as long, up to these maxima.
const REST: Nanos = Nanos(1_000_000);
const REST_MAX_FULL: Nanos = Nanos(32_000_000);
const REST_MAX_UNFIT: Nanos = Nanos(16_000_000);

/// Pages of a trial while every tier is full. Each is moved out and back in vain.
const TRIAL_PAGES: usize = 4;

const _: () = assert!(TRIAL_PAGES < EVICT_PAGES_MAX);
const _: () = assert!(REST.0 <= REST_MAX_UNFIT.0);
const _: () = assert!(REST.0 <= REST_MAX_FULL.0);

/// The state of the back-off.
#[derive(Debug)]
pub(super) struct Backoff {
    fruitless: u32,
    /// Fewer than [`EVICT_PAGES_MAX`] while every tier is full, or was a moment ago.
    pages: usize,
    rest: Nanos,
}

/// Rest before the next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing.
    AtOnce,
    /// The pages that were tried did not compress: a rest of this length, then other pages.
    Unfit(Nanos),
    /// Every tier is full: a rest of this length, then a trial.
    Full(Nanos),
}

impl Default for Backoff {
    /// No batch was in vain yet.
    fn default() -> Backoff {
        Backoff {
            fruitless: 0,
            pages: EVICT_PAGES_MAX,
            rest: REST,
        }
    }
}

impl Backoff {
    /// Pages of the next batch.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Whether the next batch is a trial, or one of those that grow after it.
    pub(super) fn tries(&self) -> bool {
        self.pages < EVICT_PAGES_MAX
    }

    /// Notes a batch that freed pages. After a trial the next batches grow step by step: there may
    /// be room for only a few.
    pub(super) fn freed(&mut self) {
        *self = Backoff {
            pages: (2 * self.pages).min(EVICT_PAGES_MAX),
            ..Backoff::default()
        };
    }

    /// Notes a batch that freed nothing.
    /// * `unfit`: a page of it did not compress; others may.
    pub(super) fn refused(&mut self, unfit: bool) -> Next {
        self.fruitless += 1;
        let trial = self.tries() && !unfit;
        if !trial && self.fruitless < FRUITLESS_MAX {
            return Next::AtOnce;
        }
        self.fruitless = 0;
        let rest = self.rest;
        if unfit {
            self.pages = EVICT_PAGES_MAX;
            self.rest = Nanos(2 * rest.0).min(REST_MAX_UNFIT);
            Next::Unfit(rest)
        } else {
            self.pages = TRIAL_PAGES;
            self.rest = Nanos(2 * rest.0).min(REST_MAX_FULL);
            Next::Full(rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Nanos {
        Nanos(count * 1_000_000)
    }

    #[test]
    fn full_tiers_are_tried_with_few_pages_ever_more_seldom_then_with_more_again() {
        let mut backoff = Backoff::default();
        for _ in 1..FRUITLESS_MAX {
            assert_eq!(backoff.refused(false), Next::AtOnce);
            assert_eq!(backoff.pages(), EVICT_PAGES_MAX);
        }
        for rest in [1, 2, 4, 8, 16, 32, 32] {
            assert_eq!(backoff.refused(false), Next::Full(ms(rest)));
            assert_eq!(backoff.pages(), TRIAL_PAGES);
        }
        for pages in [8, 16, 32] {
            backoff.freed();
            assert_eq!(backoff.pages(), pages);
        }
        // One that finds no room on the way up is enough.
        assert_eq!(backoff.refused(false), Next::Full(ms(1)));
        assert_eq!(backoff.pages(), TRIAL_PAGES);
        (0..10).for_each(|_| backoff.freed());
        assert_eq!(backoff.pages(), EVICT_PAGES_MAX);
        assert_eq!(backoff.refused(false), Next::AtOnce);
    }

    #[test]
    fn pages_that_do_not_compress_do_not_make_batches_small() {
        let mut backoff = Backoff::default();
        for rest in [1, 2, 4, 8, 16, 16] {
            for _ in 1..FRUITLESS_MAX {
                assert_eq!(backoff.refused(true), Next::AtOnce);
            }
            assert_eq!(backoff.refused(true), Next::Unfit(ms(rest)));
            assert_eq!(backoff.pages(), EVICT_PAGES_MAX);
        }
        // Nor do they leave them small.
        let mut backoff = Backoff::default();
        while backoff.refused(false) == Next::AtOnce {}
        assert_eq!(backoff.pages(), TRIAL_PAGES);
        while backoff.refused(true) == Next::AtOnce {}
        assert_eq!(backoff.pages(), EVICT_PAGES_MAX);
    }
}
