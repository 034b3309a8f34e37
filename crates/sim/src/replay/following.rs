//! The miss-ratio curve of a client: scans as in a live run, and what they found.
//!
//! The trace has every use, but a live run does not know of most. So the estimator gets what it
//! would get there: faults, and which pages a scan finds used, one each time that an eighth of the
//! resident pages has left. A page counts as used from the second scan on.

use undercroft_base::{Bytes, PageCount, PageNo};
use undercroft_engine::limits;
use undercroft_policy::mrc::{Curve, Estimator, Event, Pool, pool_ratio};
use undercroft_policy::place::LatencyClass;
use undercroft_policy::reclaim::ReclaimName;

use super::client::{Client, SCANNED, USED};
use super::host::Host;
use crate::setup::SimRoom;

/// A scan is due when this fraction of the resident pages has left.
const TURNOVER: u64 = 8;

/// The estimator of one client.
pub(super) struct Following {
    estimator: Estimator,
    events: Vec<Event>,
    /// Pages evicted until the last scan.
    left: u64,
}

impl Following {
    /// For a client with `frames` pages.
    pub(super) fn new(reclaim: &ReclaimName, frames: u64, room: SimRoom) -> Following {
        let free: fn(PageCount) -> PageCount = match room {
            SimRoom::AfterPlan => |_| PageCount(0),
            SimRoom::Ahead | SimRoom::Traced => |limit| PageCount(limits::reserve(limit).0 * 5 / 4),
        };
        Following {
            estimator: Estimator::new(reclaim, PageCount(frames), free),
            events: Vec::new(),
            left: 0,
        }
    }
}

impl Client<'_> {
    /// Tells the engine which pages to follow. Before the first.
    pub(super) fn begin_following(&mut self) {
        if let Some(following) = &self.following {
            self.engine.uses().follow(following.estimator.sampling());
        }
    }

    /// Whether pages are followed, and a scan is due.
    #[inline]
    pub(super) fn is_scan_due(&self) -> bool {
        self.following.as_ref().is_some_and(|following| {
            let books = self.engine.books();
            let left = books.stats().pages_swapped_out - following.left;
            left > 0 && left >= books.resident().0 / TURNOVER
        })
    }

    fn scan(&mut self) {
        for number in 0..self.marks.len() {
            let no = PageNo(number as u32);
            if !self.engine.books().is_resident(no) {
                continue;
            }
            let mark = self.marks[number];
            if mark & (USED | SCANNED) == USED | SCANNED {
                self.engine.uses().used(no);
            }
            self.marks[number] = (mark & !USED) | SCANNED;
        }
    }

    /// The curve so far; `None` if no page is followed.
    pub fn curve(&self) -> Option<Curve> {
        let following = self.following.as_ref()?;
        let faults = self.engine.books().stats().swap_in - self.before.swap_in;
        Some(following.estimator.curve(faults))
    }
}

impl Host {
    /// Scans, and gives the estimator all that happened since the last time.
    #[inline(never)]
    pub(super) fn follow_pages(&self, client: &mut Client<'_>) {
        if client.following.is_none() {
            return;
        }
        client.scan();
        let pool = self.pool(client);
        let left = client.engine.books().stats().pages_swapped_out;
        let Some(following) = &mut client.following else {
            return;
        };
        following.left = left;
        client.engine.uses().take_seen(&mut following.events);
        following.estimator.feed(&following.events, pool);
        following.events.clear();
        client.engine.uses().follow(following.estimator.sampling());
    }

    fn pool(&self, client: &Client<'_>) -> Pool {
        let (mut capacity, mut dram, mut copies) = (0, 0, PageCount(0));
        for place in 0..self.tiers.len() {
            let tier = self.state(client, place);
            if tier.latency == LatencyClass::Memory {
                capacity += tier.capacity.0;
                dram += tier.dram.0;
                copies.0 += tier.copies.0;
            }
        }
        let books = client.engine.books();
        let target = books.share().map_or(capacity, |share| share.target.0);
        Pool {
            share: target.min(capacity) as f64 / books.limit().0 as f64,
            ratio: pool_ratio(copies, Bytes(dram)).unwrap_or(Pool::NONE.ratio),
        }
    }
}
