//! Placement policies. They decide which tier takes an evicted page, and what is demoted, when and
//! how much.
//!
//! The live manager, the replay and the storms ask this and carry out the answer. Manager and
//! replay choose no tier themselves. Storms also demote unasked: the engine must be right all the
//! same.

#[cfg(test)]
mod contract;
pub mod latency_group;
pub mod locality;
pub mod temperature;
pub mod waterfall;
pub mod worth;

use crate::UnknownPolicy;
pub use undercroft_base::LatencyClass;
use undercroft_base::{Bytes, Nanos, PageCount, PageNo, PageSize, TierId};

/// Most tiers of one client.
pub const TIERS_MAX: usize = 8;

/// Pages that are evicted together.
pub const BATCH_PAGES: u64 = 64;

/// Most pages of one migration: 1 MiB, one slab of a block tier.
pub const MIGRATE_PAGES_MAX: u64 = 256;

/// Part of the limit, in percent, that tiers in memory may take if there is a tier below them.
const POOL_PERCENT_ABOVE: u32 = 50;

/// The same if there is no tier below.
const POOL_PERCENT_ALONE: u32 = 95;

/// The part of the memory limit, in percent, that a tier in memory may take.
///
/// * `last`: there is no tier below it.
pub fn pool_percent(last: bool) -> u32 {
    if last {
        POOL_PERCENT_ALONE
    } else {
        POOL_PERCENT_ABOVE
    }
}

/// A tier at the moment of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierState {
    /// Size of the pages of its copies. The engine asks for no other.
    pub page: PageSize,
    /// Most bytes it may hold.
    pub capacity: Bytes,
    /// Bytes in use.
    pub held: Bytes,
    /// DRAM that it uses now. It counts towards the client's limit.
    pub dram: Bytes,
    /// Copies that it holds.
    pub copies: PageCount,
    /// Bytes of these copies; `held` has free places too.
    pub packed: Bytes,
    /// Nanoseconds to load one page, as measured lately.
    pub load_ns: u64,
    /// How fast it is.
    pub latency: LatencyClass,
    /// Whether pages may be demoted from it.
    pub demotes: bool,
}

impl TierState {
    /// A tier without room, which holds nothing.
    pub const fn empty(latency: LatencyClass) -> TierState {
        TierState {
            page: PageSize::Base,
            capacity: Bytes(0),
            held: Bytes(0),
            dram: Bytes(0),
            copies: PageCount(0),
            packed: Bytes(0),
            load_ns: 0,
            latency,
            demotes: false,
        }
    }

    /// Bytes that are free. Free places of a device count, wherever they are: it fills them.
    pub fn headroom(&self) -> Bytes {
        let used = match self.latency {
            LatencyClass::Device => self.packed,
            LatencyClass::Memory | LatencyClass::Nvm => self.held,
        };
        Bytes(self.capacity.0.saturating_sub(used.0))
    }

    /// Whether it has a quarter of its room left. A copy of a page that is in memory again is
    /// worth its place there.
    pub fn has_room_to_spare(&self) -> bool {
        self.headroom().0 >= self.capacity.0 / 4
    }

    /// Its capacity in pages that do not compress.
    pub fn capacity_pages(&self) -> PageCount {
        self.capacity.pages_floor()
    }
}

/// Facts of a page that needs a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFacts {
    /// Its entry.
    pub no: PageNo,
}

/// A page that is about to leave memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Its entry.
    pub no: PageNo,
    /// The page was loaded along with another, and no use of it was seen.
    pub unused: bool,
}

/// Tiers to try in order, each at most once. If none takes the page, it stays in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct TierOrder {
    tiers: [u8; TIERS_MAX],
    count: u8,
}

impl TierOrder {
    /// All of `count` tiers, the fastest first.
    #[inline]
    pub fn downwards(count: usize) -> TierOrder {
        TierOrder {
            tiers: std::array::from_fn(|at| at as u8),
            count: count.min(TIERS_MAX) as u8,
        }
    }

    /// Adds `tier` as the last to try. Panics if there are [`TIERS_MAX`] already.
    pub fn then(&mut self, tier: TierId) {
        self.tiers[usize::from(self.count)] = tier.0;
        self.count += 1;
    }

    /// The tier to try after `rank` others failed.
    #[inline]
    pub fn get(&self, rank: usize) -> Option<TierId> {
        (rank < usize::from(self.count)).then(|| TierId(self.tiers[rank]))
    }

    /// Its last tier first, then the others: where the pages of a client go that keeps its latency
    /// bound without a buffer (NVSwap §III).
    ///
    /// * `first`: how fast the fastest tier is. If it is not spared, the order stays.
    pub fn spares_buffer(self, first: LatencyClass) -> TierOrder {
        let count = usize::from(self.count);
        let mut order = self;
        if first.is_spared() && count > 1 {
            order.tiers[..count].rotate_right(1);
        }
        order
    }

    /// The tiers, in order.
    pub fn iter(&self) -> impl Iterator<Item = TierId> + use<> {
        let order = *self;
        (0..usize::from(self.count)).map(move |rank| TierId(order.tiers[rank]))
    }
}

/// Pages to be moved from one tier to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Where they are.
    pub from: TierId,
    /// Where they go.
    pub to: TierId,
    /// At most this many, the oldest first.
    pub pages: PageCount,
}

/// A move of a group of pages: of those that are in one tier, to another. Which pages those are is
/// said beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMove {
    /// Where they are.
    pub from: TierId,
    /// Where they go: below or above.
    pub to: TierId,
}

/// How much DRAM copies in memory should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Bytes of all tiers in memory together.
    pub target: Bytes,
    /// Decisions so far.
    pub decisions: u64,
}

/// How many slabs of consecutive pages, of those that were ever stored, are hot, warm and cold
/// (RapidSwap §3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Temperatures {
    /// Used in the last 5 s.
    pub hot: u64,
    /// In the last 10 s, or moved one tier down in the last 5 s.
    pub warm: u64,
    /// Not for longer.
    pub cold: u64,
}

/// Decides where pages are kept. `tiers` are all tiers of the client, fastest first.
pub trait Place: Send {
    /// The tiers to offer a page to. Called once for each page that needs a new copy, with the
    /// engine locked: O(tiers), no allocation.
    fn order(&mut self, page: PageFacts, tiers: &[TierState]) -> TierOrder;

    /// Names what should be demoted, if anything. The caller carries it out and asks again, until
    /// the answer is nothing or nothing could be moved. Asked before each batch that leaves memory,
    /// and again in the background: devices demote only there, other tiers only before a batch. The
    /// others have `demotes` false then. With the engine locked: O(tiers), apart from rare
    /// decisions of some 10 us.
    ///
    /// * `limit`: DRAM of the client, for resident pages and for what tiers hold there.
    fn migrate(&mut self, limit: Bytes, tiers: &[TierState]) -> Option<Migration>;

    /// Whether it moves groups of pages. If so, it is asked in the background, even if no tier is
    /// full.
    fn moves_groups(&self) -> bool {
        false
    }

    /// The next group to move in the background. Asked at least ten times a second, until the
    /// answer is nothing. With the engine locked: some microseconds.
    ///
    /// * `now`: time since the run began.
    /// * `pages`: gets the group's pages, each once, at most [`MIGRATE_PAGES_MAX`], in the order in
    ///   which they are to be read and written. Some of them may be elsewhere by now, or be gone.
    fn group_to_move(
        &mut self,
        _now: Nanos,
        _tiers: &[TierState],
        _pages: &mut Vec<PageNo>,
    ) -> Option<GroupMove> {
        None
    }

    /// A thread waited for page `no`, which came from `tier`. On the fault path, with the engine
    /// locked: O(1).
    fn came_back(&mut self, _no: PageNo, _tier: TierId) {}

    /// Page `no` was loaded along with another. As [`Place::came_back`].
    fn came_along(&mut self, _no: PageNo) {}

    /// Page `no`, which came along, is used for the first time, as far as that is seen: at a scan
    /// of Accessed bits, or at once in a simulation. O(1).
    fn first_used(&mut self, _no: PageNo) {}

    /// These pages are about to leave together; [`Place::order`] is asked for those that need a new
    /// copy. Called if [`Place::links_pages`]. O(pages log pages).
    fn leaving(&mut self, _pages: &[Leaving], _tiers: &[TierState]) {}

    /// How many slabs of a part of all have which temperature now. Parts count from 0; `None`:
    /// there is no such part. Of a placement that keeps temperatures there always is part 0. With
    /// the engine locked: some microseconds.
    fn temperatures(&self, _part: usize) -> Option<Temperatures> {
        None
    }

    /// Whether it says which pages are loaded together.
    fn links_pages(&self) -> bool {
        false
    }

    /// Pages of the limit for each one that is kept free for faults. Half as many pages leave at a
    /// time (docs/design/0040). Asked once, before the first page.
    fn reserve_part(&self) -> u64 {
        256
    }

    /// Appends the pages to load when a thread waits for page `no`; `no` may be among them. Called
    /// if [`Place::links_pages`]. On the fault path, with the engine locked: O(pages).
    fn together(&mut self, _no: PageNo, _out: &mut Vec<PageNo>) {}

    /// A thread waited for a page that had left `distance` evictions ago. On the fault path, with
    /// the engine locked: O(1).
    fn refaulted(&mut self, _distance: PageCount) {}

    /// Whether `tier` keeps the copy of page `no`, which came back from it a moment ago, after
    /// `distance` evictions if that is known. If not, the page gets a new copy when it leaves,
    /// which may go to a faster tier. Asked only of tiers whose copies cost no DRAM. O(1).
    ///
    /// A tier whose pages move on keeps no second copies when it is nearly full: they would drive
    /// pages that have no other copy to a slower tier.
    fn keeps(&self, _no: PageNo, _distance: Option<PageCount>, tier: &TierState) -> bool {
        !tier.demotes || tier.has_room_to_spare()
    }

    /// Pages are to go to faster tiers than it would choose: `shift` times as many of those that
    /// it would divide between two tiers; 1 = no more, infinity = all (HybridSwap §4.4). O(1).
    fn set_shift(&mut self, _shift: f64) {}

    /// The least shift at which all of them go to the faster tier, as far as it knows by now;
    /// `None` if it does not. O(1).
    fn shift_of_all(&self) -> Option<f64> {
        None
    }

    /// The policy's decision about DRAM; `None` if it decides nothing, or has not yet.
    fn share(&self) -> Option<Share> {
        None
    }

    /// The name the user knows it by.
    fn name(&self) -> &'static str;
}

/// The placement policies; the first is the default.
pub const NAMES: [&str; 5] = [
    "worth",
    "waterfall",
    "temperature",
    "locality",
    "latency_group",
];

/// Makes a policy without history.
///
/// Errors: an unknown name; the message lists the valid ones.
pub fn by_name(name: &str) -> Result<Box<dyn Place>, UnknownPolicy> {
    match name {
        "worth" => Ok(Box::new(worth::Worth::default())),
        "waterfall" => Ok(Box::new(waterfall::Waterfall)),
        "temperature" => Ok(Box::new(temperature::Temperature::default())),
        "locality" => Ok(Box::new(locality::Locality::default())),
        "latency_group" => Ok(Box::new(latency_group::LatencyGroup::default())),
        _ => Err(UnknownPolicy::new("placement", name, &NAMES)),
    }
}

policy_name! {
    /// The name of a placement policy that there is.
    PlacementName makes Place
}
