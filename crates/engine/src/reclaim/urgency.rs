//! How latency control bends reclaim and moves between tiers: where pages go, how many leave at a
//! time, and when write-out lets reads go first. Without control each of these is as it would be.

use undercroft_base::{Bytes, Nanos, PageCount};
use undercroft_policy::place::{LatencyClass, Migration, TierOrder};

/// Longest time that a batch waits for reads. The reserve lasts longer.
pub(super) const YIELD_MAX: Nanos = Nanos(1_000_000);

/// Room of the buffer below which a clean page keeps its copy further down.
pub(crate) const BUFFER_ROOM_MIN: Bytes = Bytes(1 << 20);

/// How control has turned the knobs, until its next window ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turned {
    /// Pages of one batch, S(t) of NVSwap: at least 1.
    pub batch: usize,
    /// Where pages go.
    pub goes: Goes,
}

/// Where the pages of a client go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goes {
    /// Where the placement policy says: there is no bound to keep.
    AsPlaced,
    /// To the device. The buffer is spared.
    ToDevice,
    /// To the fastest tier first, and none is demoted.
    ToBuffer,
}

impl Goes {
    /// For the report.
    pub fn name(self) -> &'static str {
        match self {
            Goes::AsPlaced => "placement",
            Goes::ToDevice => "device",
            Goes::ToBuffer => "buffer",
        }
    }
}

impl Turned {
    /// The demotion to carry out: none while the bound is in danger. A full buffer then overflows
    /// into the next tier, which costs one write as a demotion does, and no read.
    pub(crate) fn demotion(self, wanted: Migration) -> Option<Migration> {
        let pages = wanted.pages.min(PageCount(self.batch as u64));
        (self.goes != Goes::ToBuffer).then_some(Migration { pages, ..wanted })
    }

    /// Where a page goes that the policy would offer to `order`.
    ///
    /// * `first`: how fast the fastest tier is.
    pub(crate) fn order(self, order: TierOrder, first: LatencyClass) -> TierOrder {
        match self.goes {
            Goes::ToDevice => order.spares_buffer(first),
            Goes::AsPlaced | Goes::ToBuffer => order,
        }
    }

    /// Whether the client is kept out of the buffer: then nothing moves up.
    pub(crate) fn spares_buffer(self, first: LatencyClass) -> bool {
        self.goes == Goes::ToDevice && first.is_spared()
    }

    /// Whether a clean page is written to the buffer, though the last tier has a copy: its next
    /// page-in is then as fast as the buffer.
    ///
    /// * `has_room`: asked whether the buffer has.
    pub fn leaves_copy_behind(self, has_room: impl FnOnce() -> bool) -> bool {
        self.goes == Goes::ToBuffer && has_room()
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::TierId;

    use super::*;

    #[test]
    fn control_bends_what_moves_and_where_pages_go() {
        let turned = |goes| Turned { batch: 8, goes };
        let wanted = Migration {
            from: TierId(0),
            to: TierId(1),
            pages: PageCount(256),
        };
        let pages = |goes| turned(goes).demotion(wanted).map(|of| of.pages.0);
        assert_eq!(pages(Goes::AsPlaced), Some(8));
        assert_eq!(pages(Goes::ToDevice), Some(8));
        assert_eq!(pages(Goes::ToBuffer), None);
        let first = |goes, class| turned(goes).order(TierOrder::downwards(2), class).get(0);
        assert_eq!(
            first(Goes::ToDevice, LatencyClass::Nvm),
            Some(TierId(1)),
            "the buffer is spared"
        );
        assert_eq!(
            first(Goes::ToDevice, LatencyClass::Memory),
            Some(TierId(0)),
            "a pool is no buffer"
        );
        for goes in [Goes::AsPlaced, Goes::ToBuffer] {
            assert_eq!(first(goes, LatencyClass::Nvm), Some(TierId(0)));
        }
        assert!(turned(Goes::ToBuffer).leaves_copy_behind(|| true));
        assert!(!turned(Goes::ToBuffer).leaves_copy_behind(|| false));
        assert!(!turned(Goes::ToDevice).leaves_copy_behind(|| true));
    }
}
