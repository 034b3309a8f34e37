//! Work of the manager under way in a storm: an eviction, a demotion, faults. `World` has them;
//! `evict.rs` and `faults.rs` go on with them. Also the rates at which the space refuses.

use undercroft_base::{Slot, SpaceId, TierId, VirtPage};
use undercroft_engine::reclaim::Ended;
use undercroft_engine::{BatchIndex, DemoteItem, EvictItem, HALF_PAGES, LoadPlan, Outcome};
use undercroft_model::Content;

/// A page that the evictor has taken out.
#[derive(Clone, Copy, Debug)]
pub struct TakenOut {
    /// Which item of the batch.
    pub at: BatchIndex,
    /// Its bytes.
    pub content: Content,
    /// Its outcome, when it is ready to be published.
    pub outcome: Option<Outcome>,
}

/// The evictor's work in progress.
#[derive(Debug)]
pub struct Eviction {
    /// The selected pages.
    pub items: Vec<EvictItem>,
    /// The next item to take out.
    pub next: usize,
    /// No more may be taken out.
    pub cancelled: bool,
    /// The pages taken out.
    pub held: Vec<TakenOut>,
    /// Where pages were put back that others still have to get back.
    pub back: Vec<(BatchIndex, SpaceId, VirtPage)>,
    /// Turns it misses.
    pub stalled: u64,
    /// Report to the reclaim machine when it ends; `None`: it has not asked for this one.
    pub ended: Option<Ended>,
}

impl Eviction {
    /// The item that has this index.
    pub(super) fn item(&self, at: BatchIndex) -> EvictItem {
        let item = self.items.iter().find(|item| item.at == at);
        *item.expect("an item of the batch")
    }

    /// Items that are still to be taken out or published.
    pub(super) fn unfinished_items(&self) -> impl Iterator<Item = EvictItem> {
        let held = self.held.iter().map(|held| self.item(held.at));
        self.items[self.next..].iter().copied().chain(held)
    }

    /// Their spaces, and the halves of those agents' holding areas.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = (SpaceId, usize)> {
        self.unfinished_items()
            .map(|item| (item.space, half_of(item.place.into())))
    }
}

/// The demoter's work in progress.
#[derive(Debug)]
pub struct Demotion {
    /// Where the pages go.
    pub to: TierId,
    /// Not yet begun.
    pub items: Vec<DemoteItem>,
    /// Being read from a device.
    pub reading: Option<DeviceRead>,
    /// Read from the old tier: the page, its bytes and the checksum that goes along with them.
    pub loaded: Option<(DemoteItem, Box<[u8]>, u64)>,
    /// Written to the new tier.
    pub stored: Option<(DemoteItem, TierId, Slot)>,
    /// Turns it misses.
    pub stalled: u64,
    /// The evictor waits for it: pages that it has moved so far.
    pub for_evictor: Option<u64>,
}

/// A copy that a demotion reads from a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRead {
    /// The page.
    pub item: DemoteItem,
    /// Where, in the tier's device.
    pub offset: u64,
    /// The checksum that the tier had when the read began.
    pub checksum: u64,
    /// Whether the first copy that was read did not verify.
    pub again: bool,
}

/// The result of loading one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// Nothing yet.
    Not,
    /// The tier said where to read. `again`: the first copy that was read did not verify.
    Reading {
        /// Where, in the tier's device.
        offset: u64,
        /// Whether this is the second read.
        again: bool,
    },
    /// Its bytes, verified.
    Content(Content),
    /// Nothing this time. A demanded page is loaded once more.
    Again,
    /// Nothing for good.
    Lost,
}

/// A fault thread's work in progress.
pub struct Flight {
    /// Its process.
    pub proc: usize,
    /// The plan.
    pub plan: LoadPlan,
    /// The result of each item.
    pub got: Vec<Got>,
    /// Turns it misses: some loads are slow.
    pub stalled: u64,
}

/// How often the space refuses, in 1000 calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceRates {
    /// EAGAIN of an installation, though no event waits.
    pub again: u64,
    /// ENOMEM of an installation.
    pub no_memory: u64,
    /// EAGAIN of a move.
    pub move_again: u64,
}

/// The half of its agent's holding area that a place is in.
pub(super) fn half_of(place: usize) -> usize {
    place / HALF_PAGES
}
