//! The engine decides, for one client, what is loaded, what is evicted and what state each page is
//! in.
//!
//! Sans-I/O: no clock, no threads, no system calls, no `unsafe`. The caller reports events: faults,
//! layout changes, the results of installations and stores. It then carries out the answers. The
//! live manager and the simulator run this same code.
//!
//! A caller works through views, one for each thing it does (`views.rs`). The walks:
//! * Fault: [`Faults::answer`] -> the caller loads -> [`Faults::validate`] -> the caller installs
//!   -> [`Faults::finish`].
//! * Eviction: [`Evictions::select`] -> the caller takes the pages out -> [`Evictions::settle`] ->
//!   the caller stores -> [`Evictions::publish`].
//! * Choice of a tier: [`Migrations::set_tiers`] -> [`Evictions::tiers_for`] for a page,
//!   [`Migrations::wanted`] for a demotion.
//! * Moves between tiers: [`Migrations::select`] or [`Migrations::select_wished`] ->
//!   [`Migrations::demoted`].
//! * A tier goes: [`Migrations::close`] -> [`Migrations::select_all`], until it is empty ->
//!   [`Migrations::remove`]. A tier comes: [`Migrations::add`].
//! * Pace of all this: [`reclaim::Reclaimer::step`] -> the caller does what it says ->
//!   [`reclaim::Reclaimer::ended`] for each batch.
//! * Recovery: [`Engine::recover`] -> the layout events that were read or are queued ->
//!   [`Engine::reconcile`].

mod ages;
mod ahead;
mod batch;
mod books;
mod claims;
mod cow;
mod departures;
mod discovery;
mod evict;
mod fault;
mod fork;
mod journal;
mod kept;
mod layout;
mod ledger;
pub mod limits;
mod migrate;
mod notes;
mod page_table;
pub mod reclaim;
mod recover;
mod seen;
mod source;
mod stamps;
mod stats;
mod upsets;
mod uses;
mod views;
mod wished;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use undercroft_base::{Bytes, PageCount, PageNo, Slot, SpaceId, Stamp, ThreadId, TierId, VirtPage};
use undercroft_policy::place::{
    LatencyClass, Place, Shown, TIERS_MAX, TierState, waterfall::Waterfall,
};
use undercroft_policy::prefetch::Prefetch;
use undercroft_policy::reclaim::Reclaim;

pub use batch::{BatchIndex, EvictItem, HALF_PAGES, Outcome, Taken};
pub use claims::Claims;
pub use discovery::Missing;
pub use fault::{FaultAnswer, Install, LoadItem, LoadPlan};
pub use journal::{BookEvent, Journal, PageEvent};
pub use layout::{EVERYTHING, Effect};
pub use ledger::VERSION as LEDGER_VERSION;
pub use ledger::{FlatLedger, Ledger, LedgerError, NOTE_WORDS, VecLedger, bytes_for};
pub use migrate::DemoteItem;
pub use notes::GROUPS;
pub use page_table::LedgerFull;
pub use reclaim::Mover;
pub use recover::{Found, HeldPage, Here, InHand, Recovered};
pub use stats::Stats;
pub use upsets::Upsets;
pub use views::{BooksView, Discovery, Evictions, Faults, Forks, Layout, Migrations, Uses};
pub use wished::{Placing, WishedMove};

/// The engine's configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// DRAM for the client: resident managed pages plus what the tiers hold in memory.
    pub limit: Bytes,
    /// For each tier: whether a loaded page keeps its copy there until the page changes. A page
    /// that is still clean is then evicted without a write.
    pub retain: Vec<bool>,
    /// For each tier: whether its pages may be demoted later. The engine then remembers their ages.
    pub demotes: Vec<bool>,
    /// When room for a fault is made.
    pub room: Room,
}

impl Config {
    /// The configuration for these tiers, fastest first, live and in a replay. Tests and storms
    /// also run others.
    ///
    /// A tier that costs no DRAM keeps the copy of a page that is loaded, if the placement policy
    /// agrees ([`Place::keeps`]). Memory does not. Every copy may be demoted, if a tier is below:
    /// [`Mover`] says by whom.
    pub fn for_tiers(limit: Bytes, room: Room, tiers: &[LatencyClass]) -> Config {
        let count = tiers.len();
        Config {
            limit,
            retain: (tiers.iter().map(|tier| *tier != LatencyClass::Memory)).collect(),
            demotes: (0..count).map(|at| at + 1 < count).collect(),
            room,
        }
    }

    /// Whether a tier's copies are read from a device: it keeps them while their pages are loaded.
    fn is_device(&self, tier: TierId) -> bool {
        self.retain.get(usize::from(tier.0)) == Some(&true)
    }
}

/// Steps of one approach to a lower limit. The reserve follows the limit, so from far away a single
/// step ends where no page is reclaimed. Three steps reach a reserve that stays.
const APPROACH_STEPS: usize = 4;

/// When room for a fault is made, and by whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// Before the fault. Reclaim keeps a reserve free below the limit. A window takes at most
    /// three quarters of the free room. The newest pages may not leave yet. So no fault waits for
    /// eviction, and many threads may fault at once.
    #[default]
    Ahead,
    /// After the fault is planned: the caller evicts until [`BooksView::room`] is not negative,
    /// then installs. There is no reserve, so memory is used to the last page. No page is
    /// protected, so the policy's order alone decides. A window takes at most half of the limit.
    /// For a caller that serves one fault at a time.
    AfterPlan,
}

/// A client's engine. One thread at a time calls its methods.
pub struct Engine<L> {
    table: page_table::PageTable<L>,
    reclaim: Box<dyn Reclaim>,
    /// `None` if the policy never prefetches.
    prefetch: Option<Box<dyn Prefetch>>,
    /// Decides which tier keeps a page.
    place: Box<dyn Place>,
    /// Tiers that a plugin wants pages to go to.
    places: wished::Places,
    /// The placement policy links pages.
    links_pages: bool,
    /// Pages to load together. Kept for its memory.
    linked: Vec<PageNo>,
    /// Pages that a plugin wants to come together.
    links: wished::Links,
    /// The placement policy's part of the limit that is kept free.
    reserve_part: u64,
    /// The tiers as last reported, by number.
    tiers: Vec<TierState>,
    /// The numbers of the tiers that are in use, fastest first. A policy sees only these, and a
    /// tier's number there is its rank.
    ranks: Vec<TierId>,
    /// The states of `ranks`.
    ranked: Vec<TierState>,
    /// Each rank is the tier's number.
    in_order: bool,
    /// The tiers as a mover sees them; kept for its memory.
    asked_of: Vec<TierState>,
    config: Config,
    /// Pages that cost the client DRAM: resident (not inherited), evicting, loading. In base pages.
    resident: u64,
    /// Resident pages that `found_resident` will report. They use room, but are not in `resident`
    /// yet. In base pages.
    expected_found: u64,
    /// DRAM held by tiers, as last reported.
    pool_held: Bytes,
    /// Pages selected for eviction so far, recalled ones included: the clock of refault distances.
    evictions: u64,
    departures: departures::Departures,
    /// For each slot that several pages refer to (after a fork): how many. A tree, because a fork
    /// adds very many, and a table that grows moves all of them in one moment.
    refs: BTreeMap<(TierId, Slot), u32>,
    /// Slots that no page refers to, for the caller to free.
    freed: Vec<(TierId, Slot)>,
    batch: batch::Batch,
    kept: kept::Kept,
    /// Memory that the pages that can move shall have at least, if others cannot.
    floor: PageCount,
    /// Pages are on their way out of which no note of a dead manager says where their bytes are.
    stranded: bool,
    /// How many followers of the batch are noted in the ledger.
    followers_noted: usize,
    recent: Recent,
    upsets: upsets::Upsets,
    orphans: upsets::Orphans,
    /// Pages whose threads wait for room.
    waiters: VecDeque<(SpaceId, VirtPage)>,
    ages: ages::Ages,
    /// Bit i: tier i is closed. It gets no new copy, and its copies are moved away.
    closed: u8,
    expected: fault::Expected,
    /// The file that memory begins as, if the run serves one.
    source: Option<source::Source>,
    over_limit: PageCount,
    /// How latency control has turned the knobs; `None`: it is off.
    turned: Option<reclaim::Turned>,
    victims: Vec<PageNo>,
    stats: Stats,
    /// Events of the pages that are followed, if any are.
    seen: Option<Box<seen::Seen>>,
    /// These hear of every change.
    journals: Vec<Arc<dyn Journal>>,
}

/// A fault message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The address space.
    pub space: SpaceId,
    /// The page.
    pub page: VirtPage,
    /// True when the access was a write.
    pub write: bool,
    /// The faulting thread; 0 if unknown.
    pub thread: ThreadId,
    /// The thread must not wait for room, because it is the one that makes room.
    pub urgent: bool,
}

/// The pages installed last. They may not leave yet. They are at most half of the resident pages.
struct Recent {
    pages: [PageNo; limits::RECENT_PAGES],
    next: usize,
}

impl Recent {
    #[inline]
    fn push(&mut self, page: PageNo) {
        self.pages[self.next] = page;
        self.next = (self.next + 1) % limits::RECENT_PAGES;
    }

    /// Whether `page` is one of the newest `count`.
    #[inline]
    fn holds(&self, page: PageNo, count: usize) -> bool {
        let size = limits::RECENT_PAGES;
        (1..=count.min(size)).any(|back| self.pages[(self.next + size - back) % size] == page)
    }
}

/// A higher limit is none: what is free is counted with a sign.
const LIMIT_MAX: Bytes = Bytes(i64::MAX as u64);

impl<L: Ledger> Engine<L> {
    /// An engine over an empty ledger.
    pub fn new(
        ledger: L,
        reclaim: Box<dyn Reclaim>,
        prefetch: Option<Box<dyn Prefetch>>,
        config: Config,
    ) -> Engine<L> {
        Engine::over(
            page_table::PageTable::new(ledger),
            reclaim,
            prefetch,
            config,
        )
    }

    fn over(
        table: page_table::PageTable<L>,
        reclaim: Box<dyn Reclaim>,
        prefetch: Option<Box<dyn Prefetch>>,
        config: Config,
    ) -> Engine<L> {
        let config = Config {
            limit: config.limit.min(LIMIT_MAX),
            ..config
        };
        Engine {
            table,
            reclaim,
            prefetch,
            place: Box::new(Waterfall),
            places: wished::Places::default(),
            links_pages: false,
            linked: Vec::new(),
            links: wished::Links::default(),
            reserve_part: Shown::default().reserve_part,
            tiers: Vec::with_capacity(TIERS_MAX),
            ranks: (0..config.demotes.len())
                .map(|at| TierId(at as u8))
                .collect(),
            ranked: Vec::with_capacity(TIERS_MAX),
            in_order: true,
            asked_of: Vec::with_capacity(TIERS_MAX),
            ages: ages::Ages::new(TIERS_MAX),
            closed: 0,
            config,
            resident: 0,
            expected_found: 0,
            pool_held: Bytes(0),
            evictions: 0,
            departures: departures::Departures::default(),
            refs: BTreeMap::new(),
            freed: Vec::with_capacity(4 * limits::LOAD_PAGES_MAX),
            batch: batch::Batch::default(),
            kept: kept::Kept::default(),
            floor: limits::FLOOR_MIN,
            stranded: false,
            followers_noted: 0,
            recent: Recent {
                pages: [PageNo(u32::MAX); limits::RECENT_PAGES],
                next: 0,
            },
            upsets: upsets::Upsets::default(),
            orphans: upsets::Orphans::default(),
            waiters: VecDeque::with_capacity(limits::WAITERS_MAX),
            expected: fault::Expected::default(),
            source: None,
            over_limit: PageCount(0),
            turned: None,
            victims: Vec::with_capacity(limits::EVICT_PAGES_MAX),
            stats: Stats::default(),
            seen: None,
            journals: Vec::new(),
        }
    }

    /// Has `place` decide which tier keeps a page, in place of `waterfall`. Before the first page.
    pub fn set_place(&mut self, place: Box<dyn Place>) {
        let shown = place.shown();
        self.links_pages = shown.links_pages;
        self.reserve_part = shown.reserve_part;
        self.place = place;
    }

    /// Latency control turns its knobs; `None`: it is off. O(1).
    pub fn turn(&mut self, turned: Option<reclaim::Turned>) {
        self.turned = turned;
    }

    /// Changes the limit at once. The caller then reclaims as [`BooksView::reclaim_wanted`] says.
    /// Until that is done, a lower limit leaves no room for faults: see
    /// [`Engine::approach_limit`].
    pub fn set_limit(&mut self, limit: Bytes) {
        // Room is counted with a sign.
        self.config.limit = limit.min(LIMIT_MAX);
    }

    /// Lowers the limit towards `asked` as far as half of the reserve stays free, so that faults
    /// find room while memory shrinks. The caller reclaims, and calls this again. O(1).
    pub fn approach_limit(&mut self, asked: Bytes) {
        for _ in 0..APPROACH_STEPS {
            let spare = (self.room_to_come() - self.reserve() / 2).max(0) as u64;
            let lowered = (self.config.limit.0).saturating_sub(PageCount(spare).bytes().0);
            let lowered = self.config.limit.min(Bytes(lowered).max(asked));
            if self.config.limit == lowered {
                break;
            }
            self.config.limit = lowered;
        }
    }

    /// The count of upset loads, for threads that install plans without the engine's lock.
    pub fn upsets(&self) -> Upsets {
        self.upsets.clone()
    }

    /// Appends the slots to free to `out`. The caller returns them to their tiers.
    #[inline]
    pub fn take_freed(&mut self, out: &mut Vec<(TierId, Slot)>) {
        if !self.freed.is_empty() {
            out.append(&mut self.freed);
        }
    }

    /// Room for new pages, after the resident ones that are still to be reported.
    #[inline]
    fn room_to_come(&self) -> i64 {
        self.books().room() - self.expected_found as i64
    }

    fn reserve(&self) -> i64 {
        let limit = self.config.limit.pages_floor();
        match self.config.room {
            // A large page must fit, however small the limit is.
            Room::Ahead => {
                let part = limits::reserve(limit, self.reserve_part).0;
                part.max(self.table.large()) as i64
            }
            Room::AfterPlan => 0,
        }
    }

    fn is_closed(&self, tier: TierId) -> bool {
        self.closed.checked_shr(u32::from(tier.0)).unwrap_or(0) & 1 == 1
    }

    /// The rank of a tier among those in use.
    fn rank_of(&self, tier: TierId) -> Option<usize> {
        self.ranks.iter().position(|other| *other == tier)
    }

    fn stamp(&self) -> Stamp {
        Stamp((self.evictions / limits::STAMP_EVICTIONS) as u16)
    }

    /// A page fewer refers to the slot.
    #[inline]
    fn release(&mut self, tier: TierId, slot: Slot) {
        if tier != TierId::FILL {
            self.release_slot(tier, slot);
        }
    }

    #[inline(never)]
    fn release_slot(&mut self, tier: TierId, slot: Slot) {
        if let Some(count) = self.refs.get_mut(&(tier, slot)) {
            *count -= 1;
            if *count == 1 {
                self.refs.remove(&(tier, slot));
            }
            return;
        }
        self.freed.push((tier, slot));
    }

    /// A more page refers to the slot.
    fn share(&mut self, tier: TierId, slot: Slot) {
        if tier != TierId::FILL {
            *self.refs.entry((tier, slot)).or_insert(1) += 1;
        }
    }

    /// The page no longer costs DRAM.
    #[inline]
    fn uncount(&mut self, no: PageNo) {
        let pages = self.table.base_pages(no);
        assert!(self.resident >= pages, "more pages left memory than came");
        self.resident -= pages;
    }

    #[inline]
    fn count(&mut self, no: PageNo) {
        self.resident += self.table.base_pages(no);
        self.stats.resident_peak = self.stats.resident_peak.max(PageCount(self.resident));
        let pages = PageCount(self.resident + self.table.stored());
        self.stats.pages_peak = self.stats.pages_peak.max(pages);
        let dram = self.books().dram_used();
        self.stats.dram_peak = self.stats.dram_peak.max(dram);
    }
}
