//! An inbox for threads that wait for all that they fetched.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_base::{Fetched, Inbox};

/// Arrivals that no thread has taken yet.
#[derive(Debug, Default)]
pub struct Mailbox {
    arrivals: Mutex<Vec<Fetched>>,
    ready: Condvar,
}

impl Inbox for Mailbox {
    fn deliver(&self, arrival: Fetched) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.push(arrival);
        drop(arrivals);
        self.ready.notify_one();
    }
}

impl Mailbox {
    /// Waits until there is something, and takes it all; nothing after `limit`.
    pub fn wait(&self, limit: Duration) -> Vec<Fetched> {
        let until = Instant::now() + limit;
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if !arrivals.is_empty() || left.is_zero() {
                return std::mem::take(&mut *arrivals);
            }
            let waited = self.ready.wait_timeout(arrivals, left);
            arrivals = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
