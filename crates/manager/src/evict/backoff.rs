//! How the evictor backs off when batches free nothing for lack of room below: when it rests, for
//! how long, and how many pages it tries then.

use std::time::Duration;

use undercroft_engine::limits::EVICT_PAGES_MAX;

/// Batches in a row that free nothing before a rest.
const FRUITLESS_MAX: u32 = 8;

/// The first rest. Each further one is twice as long, up to these maxima.
const REST: Duration = Duration::from_millis(1);
const REST_MAX_FULL: Duration = Duration::from_millis(32);
const REST_MAX_UNFIT: Duration = Duration::from_millis(16);

/// Pages of a trial while every tier is full. Each is moved out and back in vain.
const TRIAL_PAGES: usize = 4;

const _: () = assert!(TRIAL_PAGES < EVICT_PAGES_MAX);
const _: () = assert!(REST.as_nanos() <= REST_MAX_UNFIT.as_nanos());
const _: () = assert!(REST.as_nanos() <= REST_MAX_FULL.as_nanos());

/// The state of the back-off.
#[derive(Debug)]
pub(crate) struct Backoff {
    fruitless: u32,
    /// Fewer than [`EVICT_PAGES_MAX`] while every tier is full, or was a moment ago.
    pages: usize,
    rest: Duration,
}

/// What comes before the next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing.
    AtOnce,
    /// The pages that were tried did not compress: a rest of this length, then other pages.
    Unfit(Duration),
    /// Every tier is full: a rest of this length, then a trial.
    Full(Duration),
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
        let trial = self.pages < EVICT_PAGES_MAX && !unfit;
        if !trial && self.fruitless < FRUITLESS_MAX {
            return Next::AtOnce;
        }
        self.fruitless = 0;
        let rest = self.rest;
        if unfit {
            self.pages = EVICT_PAGES_MAX;
            self.rest = (2 * rest).min(REST_MAX_UNFIT);
            Next::Unfit(rest)
        } else {
            self.pages = TRIAL_PAGES;
            self.rest = (2 * rest).min(REST_MAX_FULL);
            Next::Full(rest)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
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
