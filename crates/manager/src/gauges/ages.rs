//! How long memory has not been used, and requests that what is old leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_base::PageCount;
use undercroft_proto::report::{Ages, Demotion};

use crate::sync::lock;

/// The findings of the last scan, and what users asked.
#[derive(Debug, Default)]
pub(crate) struct AgeGauge {
    last: Mutex<Option<(Instant, Ages)>>,
    /// A request that the scanner has not begun with.
    wanted: Mutex<Option<Duration>>,
    came: Condvar,
    requests: AtomicU64,
    named: AtomicU64,
    left: AtomicU64,
    under_way: AtomicBool,
}

impl AgeGauge {
    /// The findings of a scan that has just ended.
    pub(crate) fn set(&self, ages: Ages) {
        *lock(&self.last) = Some((Instant::now(), ages));
    }

    /// For status. `None`: there was no scan, and no request.
    pub(crate) fn now(&self) -> Option<Ages> {
        let last = lock(&self.last).clone();
        let asked = self.requests.load(Ordering::Relaxed) > 0;
        let none = || asked.then(|| (Instant::now(), Ages::default()));
        let (at, ages) = last.or_else(none)?;
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let demotion = Demotion {
            asked: count(&self.requests),
            named_bytes: PageCount(count(&self.named)).bytes().0,
            left_bytes: PageCount(count(&self.left)).bytes().0,
            under_way: self.under_way.load(Ordering::Relaxed),
        };
        Some(Ages {
            scanned_seconds_ago: at.elapsed().as_secs_f64(),
            demotion: (demotion.asked > 0).then_some(demotion),
            ..ages
        })
    }

    /// Pages that have not been used for `older` are to leave. Errors: the last request is still
    /// being carried out.
    pub(crate) fn ask(&self, older: Duration) -> Result<(), &'static str> {
        if self.under_way.swap(true, Ordering::Relaxed) {
            return Err("pages of the last request are still leaving");
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        *lock(&self.wanted) = Some(older);
        self.came.notify_all();
        Ok(())
    }

    /// Waits for a request, at most until `until`.
    pub(crate) fn wait(&self, until: Instant) -> Option<Duration> {
        let mut wanted = lock(&self.wanted);
        while wanted.is_none() {
            let left = until.checked_duration_since(Instant::now())?;
            let waited = self.came.wait_timeout(wanted, left);
            (wanted, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        wanted.take()
    }

    /// Takes a request back that [`AgeGauge::wait`] has given: the next call gives it again.
    pub(crate) fn later(&self, older: Duration) {
        *lock(&self.wanted) = Some(older);
    }

    /// More pages were found old enough.
    pub(crate) fn note_named(&self, pages: u64) {
        self.named.fetch_add(pages, Ordering::Relaxed);
    }

    /// Named pages have left.
    pub(crate) fn note_left(&self, pages: u64) {
        self.left.fetch_add(pages, Ordering::Relaxed);
    }

    /// All pages of the request have left, or stay.
    pub(crate) fn done(&self) {
        self.under_way.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_is_carried_out_at_a_time() {
        let gauge = AgeGauge::default();
        let soon = Instant::now() + Duration::from_millis(1);
        assert_eq!((gauge.now(), gauge.wait(soon)), (None, None));
        gauge.set(Ages::default());
        assert_eq!(gauge.now().and_then(|ages| ages.demotion), None);
        gauge.ask(Duration::from_secs(7)).expect("the first");
        assert_eq!(gauge.wait(soon), Some(Duration::from_secs(7)));
        gauge.later(Duration::from_secs(7));
        assert!(gauge.ask(Duration::from_secs(8)).is_err());
        assert_eq!(gauge.wait(soon), Some(Duration::from_secs(7)));
        assert!(
            gauge.ask(Duration::from_secs(8)).is_err(),
            "it is under way"
        );
        gauge.note_named(3);
        gauge.note_left(2);
        gauge.done();
        let told = gauge.now().and_then(|ages| ages.demotion).expect("asked");
        let bytes = (told.named_bytes, told.left_bytes);
        assert_eq!(
            (told.asked, bytes, told.under_way),
            (1, (12_288, 8192), false)
        );
        gauge.ask(Duration::from_secs(8)).expect("the second");
    }
}
