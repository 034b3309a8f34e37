//! What latency control changes of an eviction: where pages go, how many leave at a time, and when
//! write-out lets reads go first. Without control each of these is what it would be.

use std::time::{Duration, Instant};

use undercroft_base::{Bytes, PageCount, TierId};
use undercroft_policy::place::{Migration, TierOrder};

use super::Evictor;
use crate::books::metered::MeteredTier;
use crate::gauges::knobs::Goes;

/// Longest time that a batch waits for reads. The reserve lasts longer.
const YIELD_MAX: Duration = Duration::from_millis(1);
const YIELD_PAUSE: Duration = Duration::from_micros(20);

/// Room of the buffer below which a clean page keeps its copy further down.
const ROOM_MIN: Bytes = Bytes(1 << 20);

const _: () = assert!(YIELD_PAUSE.as_nanos() < YIELD_MAX.as_nanos());

impl Evictor {
    /// Whether control has moved the client to the buffer.
    fn uses_buffer(&self) -> bool {
        self.turned
            .is_some_and(|turned| turned.goes == Goes::ToBuffer)
    }

    /// The demotion to carry out: none while the bound is in danger. A full buffer then overflows
    /// into the next tier, which costs one write as a demotion does, and no read.
    pub(super) fn demotion_now(&self, wanted: Option<Migration>) -> Option<Migration> {
        let Some(turned) = self.turned else {
            return wanted;
        };
        let most = PageCount(turned.batch as u64);
        let bounded = |of: Migration| Migration {
            pages: of.pages.min(most),
            ..of
        };
        wanted.filter(|_| !self.uses_buffer()).map(bounded)
    }

    /// Pages of the next batch.
    pub(super) fn batch_pages(&self, most: usize) -> usize {
        self.turned.map_or(most, |turned| most.min(turned.batch))
    }

    /// Waits while reads of a device are in flight, if the next pages go to a device and nothing
    /// waits for room. No page of a batch is in hand meanwhile.
    pub(super) fn yield_to_reads(&self) {
        let tiers = &self.shared.books.tiers;
        let mut downwards = TierOrder::default();
        tiers.ranks().for_each(|tier| downwards.then(tier));
        let order = self.order_now(downwards);
        let first = order.get(0).and_then(|tier| tiers.get(usize::from(tier.0)));
        let to_device = first.is_some_and(|tier| !tier.is_memory());
        let knobs = &self.shared.gauges.knobs;
        if self.turned.is_none() || !to_device || !knobs.reads_in_flight() {
            return;
        }
        if self.shared.books.engine().books().room() < 1 {
            return;
        }
        knobs.note_yield();
        let began = Instant::now();
        while knobs.reads_in_flight() && began.elapsed() < YIELD_MAX {
            std::thread::sleep(YIELD_PAUSE);
        }
    }

    /// Where a page goes that the policy would offer to `order`.
    pub(super) fn order_now(&self, order: TierOrder) -> TierOrder {
        let first = self
            .shared
            .books
            .tiers
            .ranked()
            .next()
            .map(MeteredTier::latency);
        match (self.turned, first) {
            (Some(turned), Some(first)) if turned.goes == Goes::ToDevice => {
                order.spares_buffer(first)
            }
            _ => order,
        }
    }

    /// Whether a clean page is written to the buffer, though `tier` has a copy: its next page-in is
    /// then as fast as the buffer.
    pub(super) fn leaves_copy_behind(&self, tier: TierId) -> bool {
        let tiers = &self.shared.books.tiers;
        let mut ranked = tiers.ranks();
        let (first, last) = (ranked.next(), ranked.next_back());
        let has_room = |first: &MeteredTier| first.state().headroom() >= ROOM_MIN;
        let first = first.and_then(|first| tiers.get(usize::from(first.0)));
        self.uses_buffer() && last == Some(tier) && first.is_some_and(has_room)
    }
}
