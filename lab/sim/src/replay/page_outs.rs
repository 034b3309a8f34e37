//! How long page-outs take: from the moment at which a page is handed to its tier until the tier
//! has it. Moves between tiers and copies that are still right are no page-outs.

use hdrhistogram::Histogram;
use undercroft_device::Time;

/// Longest latency that is counted exactly: 1000 s.
const LATENCY_NS_MAX: u64 = 1_000_000_000_000;

/// Of nanoseconds, empty.
pub(super) fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("valid bounds")
}

/// The page-outs to one tier, of each client.
#[derive(Clone, Debug, Default)]
pub struct PageOuts {
    /// Nanoseconds. `None`: no page-out yet.
    clients: Vec<Option<Histogram<u64>>>,
}

impl PageOuts {
    /// A page of a client has left.
    pub(super) fn add(&mut self, client: usize, took: Time) {
        if client >= self.clients.len() {
            self.clients.resize(client + 1, None);
        }
        let nanos = (took.0 / 1000).max(1);
        let of = self.clients[client].get_or_insert_with(new_histogram);
        of.saturating_record(nanos);
    }

    /// Figures of a client. `None`: there are none.
    pub fn of(&self, client: usize) -> Option<&Histogram<u64>> {
        self.clients.get(client)?.as_ref()
    }
}
