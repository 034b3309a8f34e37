//! Placement policies. They decide which tier takes an evicted page, and what is demoted, when and
//! how much.
//!
//! The live manager, the replay and the storms ask this and carry out the answer. Manager and
//! replay choose no tier themselves. Storms also demote unasked: the engine must be right all the
//! same.

pub mod waterfall;
pub mod worth;

pub use undercroft_base::LatencyClass;
use undercroft_base::{Bytes, PageCount, PageNo, PageSize, TierId};

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
    #[inline]
    pub fn headroom(&self) -> Bytes {
        let used = match self.latency {
            LatencyClass::Device => self.packed,
            LatencyClass::Memory | LatencyClass::Nvm => self.held,
        };
        Bytes(self.capacity.0.saturating_sub(used.0))
    }

    /// Whether copies of pages that are in memory again are worth their place there. A tier whose
    /// pages move on keeps none when less than a quarter of it is free: they would drive pages that
    /// have no other copy to a slower tier.
    #[inline]
    pub fn keeps_copies(&self) -> bool {
        !self.demotes || self.headroom().0 >= self.capacity.0 / 4
    }

    /// Its capacity in pages that do not compress.
    pub fn capacity_pages(&self) -> PageCount {
        self.capacity.pages_floor()
    }
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

    /// This tier first, then the others as they are.
    pub fn led_by(self, tier: TierId) -> TierOrder {
        let mut order = TierOrder::default();
        order.then(tier);
        (self.iter().filter(|other| *other != tier)).for_each(|other| order.then(other));
        order
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

/// A page that was loaded a moment ago.
#[derive(Clone, Copy, Debug)]
pub struct Loaded<'a> {
    /// Its entry.
    pub no: PageNo,
    /// Where it came from, and how that tier is.
    pub from: TierId,
    /// See `from`.
    pub tier: &'a TierState,
    /// Evictions since it left, if that is known.
    pub distance: Option<PageCount>,
    /// Faults whose threads waited for it: 0 if it came along with another page, more than one
    /// where it stands for several pages.
    pub waited: u64,
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

/// News for a placement.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// This page, which came along, is used for the first time, as far as that is seen: at a scan
    /// of Accessed bits, or at once in a simulation. O(1).
    FirstUsed(PageNo),
    /// These pages are about to leave together; [`Place::order`] is asked for those that need a new
    /// copy. Told if [`Shown::links_pages`]. O(pages log pages).
    Leaving(&'a [Leaving], &'a [TierState]),
}

/// How a placement is, and what it knows. The first two never change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shown {
    /// Pages are named that are loaded together.
    pub links_pages: bool,
    /// Pages of the limit for each one that is kept free for faults. Half as many pages leave at a
    /// time (docs/design/0040).
    pub reserve_part: u64,
    /// Its decision about DRAM; `None` if it decides nothing, or has not yet.
    pub share: Option<Share>,
}

impl Default for Shown {
    fn default() -> Shown {
        Shown {
            links_pages: false,
            reserve_part: 256,
            share: None,
        }
    }
}

/// How much DRAM copies in memory should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Bytes of all tiers in memory together.
    pub target: Bytes,
    /// Decisions so far.
    pub decisions: u64,
}

/// Decides where pages are kept. `tiers` are all tiers of the client, fastest first. All is asked
/// and told with the engine locked.
pub trait Place: Send {
    /// The tiers to offer page `no` to. Asked once for each page that needs a new copy: O(tiers),
    /// no allocation.
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder;

    /// A page was loaded: whether its tier keeps the copy. If not, the page gets a new copy when it
    /// leaves, which may go to a faster tier. The answer counts for tiers whose copies cost no
    /// DRAM. On the fault path: O(1).
    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        page.tier.keeps_copies()
    }

    /// Names the next move of the oldest pages of a tier, if any. The caller carries it out and
    /// asks again, until the answer is nothing or nothing could be moved. Asked before each batch
    /// that leaves memory, and again in the background: devices demote only there, other tiers only
    /// before a batch. The others have `demotes` false then. O(tiers), apart from rare decisions of
    /// some 10 us.
    ///
    /// * `dram`: that of the client, for resident pages and for what tiers hold there.
    fn next_move(&mut self, dram: Bytes, tiers: &[TierState]) -> Option<Migration>;

    /// Appends the pages to load when a thread waits for page `no`; `no` may be among them. Asked
    /// if [`Shown::links_pages`]. On the fault path: O(pages).
    fn together(&mut self, _no: PageNo, _out: &mut Vec<PageNo>) {}

    /// Something happened.
    fn heard(&mut self, _event: Event<'_>) {}

    /// How it is now. Some microseconds.
    fn shown(&self) -> Shown {
        Shown::default()
    }
}
