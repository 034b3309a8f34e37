//! The engine decides, for one client, what is loaded, what is evicted and what state each page is
//! in.
//!
//! Sans-I/O: no clock, no threads, no system calls, no `unsafe`. The caller reports events: faults,
//! layout changes, the results of installations and stores. It then carries out the answers. The
//! live manager and the simulator run this same code.
//!
//! The walks:
//! * Fault: [`Engine::fault`] -> the caller loads -> [`Engine::validate`] -> the caller installs ->
//!   [`Engine::finish`].
//! * Eviction: [`Engine::select`] -> the caller takes the pages out -> [`Engine::settle`] -> the
//!   caller stores -> [`Engine::publish`].
//! * Choice of a tier: [`Engine::set_tiers`] -> [`Engine::place`] for a page, [`Engine::migration`]
//!   for a demotion.
//! * Demotion: [`Engine::select_demotions`] -> [`Engine::demoted`].
//! * Recovery: [`Engine::recover`] -> the layout events that were read or are queued ->
//!   [`Engine::reconcile`].

mod batch;
mod cow;
mod evict;
mod fault;
#[doc(hidden)]
pub mod fuzz;
mod kept;
mod layout;
mod ledger;
pub mod limits;
mod migrate;
mod notes;
mod page_table;
mod recover;
mod stats;

use std::collections::VecDeque;

use rustc_hash::FxHashMap;
use undercroft_base::{
    Bytes, Entry, Flags, PAGE_BYTES, PageCount, PageNo, PageState, Slot, SpaceId, Stamp, TierId,
    VirtPage, VirtRange,
};
use undercroft_policy::place::{Place, TierState, waterfall::Waterfall};
use undercroft_policy::prefetch::Prefetch;
use undercroft_policy::reclaim::Reclaim;

pub use batch::{BatchIndex, EvictItem, Outcome, Taken};
pub use fault::{Fault, FaultAnswer, Install, LoadItem, LoadPlan};
pub use layout::{EVERYTHING, Effect};
pub use ledger::{FlatLedger, Ledger, LedgerError, NOTE_WORDS, VecLedger, bytes_for};
pub use migrate::DemoteItem;
pub use page_table::LedgerFull;
pub use recover::{Found, Held, Here, InHand, Recovered};
pub use stats::Stats;

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

/// When room for a fault is made, and by whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// Before the fault. Reclaim keeps a reserve free below the limit. A window takes at most half
    /// of the free room. The newest pages may not leave yet. So no fault waits for eviction, and
    /// many threads may fault at once.
    #[default]
    Ahead,
    /// After the fault is planned: the caller evicts until [`Engine::room`] is not negative, then
    /// installs. There is no reserve, so memory is used to the last page. No page is protected, so
    /// the policy's order alone decides. A window takes at most half of the limit. For a caller
    /// that serves one fault at a time.
    AfterPlan,
}

/// One client's engine. One thread at a time calls its methods.
pub struct Engine<L> {
    table: page_table::PageTable<L>,
    reclaim: Box<dyn Reclaim>,
    /// `None` if the policy never prefetches.
    prefetch: Option<Box<dyn Prefetch>>,
    /// Decides which tier keeps a page.
    place: Box<dyn Place>,
    /// The tiers as last reported, fastest first.
    tiers: Vec<TierState>,
    config: Config,
    /// Pages that cost the client DRAM: resident (not inherited), evicting, loading.
    resident: u64,
    /// Resident pages that `found_resident` will report. They use room, but are not in `resident`
    /// yet.
    expected_found: u64,
    /// DRAM held by tiers, as last reported.
    pool_held: Bytes,
    /// Pages selected for eviction so far, recalled ones included: the clock of refault distances.
    evictions: u64,
    /// For each slot that several pages refer to (after a fork): how many.
    refs: FxHashMap<(TierId, Slot), u32>,
    /// Slots that no page refers to, for the caller to free.
    freed: Vec<(TierId, Slot)>,
    batch: batch::Batch,
    kept: kept::Kept,
    /// How many followers of the batch are noted in the ledger.
    followers_noted: usize,
    recent: Recent,
    /// Pages whose threads wait for room.
    waiters: VecDeque<(SpaceId, VirtPage)>,
    ages: Vec<migrate::AgeQueue>,
    expected: fault::Expected,
    over_limit: PageCount,
    victims: Vec<PageNo>,
    stats: Stats,
}

/// The pages installed last. They may not leave yet; they are at most half of what is resident.
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

impl<L: Ledger> Engine<L> {
    /// An engine over an empty ledger.
    pub fn new(
        ledger: L,
        reclaim: Box<dyn Reclaim>,
        prefetch: Box<dyn Prefetch>,
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
        prefetch: Box<dyn Prefetch>,
        config: Config,
    ) -> Engine<L> {
        Engine {
            table,
            reclaim,
            prefetch: (!prefetch.is_none()).then_some(prefetch),
            place: Box::new(Waterfall),
            tiers: Vec::with_capacity(config.demotes.len()),
            ages: config
                .demotes
                .iter()
                .map(|_| migrate::AgeQueue::default())
                .collect(),
            config,
            resident: 0,
            expected_found: 0,
            pool_held: Bytes(0),
            evictions: 0,
            refs: FxHashMap::default(),
            freed: Vec::with_capacity(4 * limits::LOAD_PAGES_MAX),
            batch: batch::Batch::default(),
            kept: kept::Kept::default(),
            followers_noted: 0,
            recent: Recent {
                pages: [PageNo(u32::MAX); limits::RECENT_PAGES],
                next: 0,
            },
            waiters: VecDeque::with_capacity(limits::WAITERS_MAX),
            expected: fault::Expected::default(),
            over_limit: PageCount(0),
            victims: Vec::with_capacity(limits::EVICT_PAGES_MAX),
            stats: Stats::default(),
        }
    }

    /// A new address space of the client.
    pub fn add_space(&mut self) -> SpaceId {
        self.table.add_space()
    }

    /// Changes the limit. The caller then reclaims as [`Engine::reclaim_wanted`] says.
    pub fn set_limit(&mut self, limit: Bytes) {
        self.config.limit = limit;
    }

    /// Reports how much DRAM the tiers hold now.
    pub fn set_pool_held(&mut self, held: Bytes) {
        self.pool_held = held;
        let dram = self.dram_used();
        self.stats.dram_peak = self.stats.dram_peak.max(dram);
    }

    /// Announces resident pages that [`Engine::found_resident`] will report. Until then they use up
    /// room for faults, but nothing is reclaimed for them. 0 when all are reported.
    pub fn expect_found(&mut self, pages: PageCount) {
        self.expected_found = pages.0;
    }

    /// Sets by how many pages faults may exceed the limit, and returns the value before. The
    /// manager raises it step by step while no tier has room and the client is to stay alive.
    pub fn set_over_limit(&mut self, pages: PageCount) -> PageCount {
        std::mem::replace(&mut self.over_limit, pages)
    }

    /// DRAM the client costs now: resident managed pages plus what tiers hold.
    pub fn dram_used(&self) -> Bytes {
        Bytes(self.resident * PAGE_BYTES as u64 + self.pool_held.0)
    }

    /// Resident managed pages, and pages in flight.
    pub fn resident(&self) -> PageCount {
        PageCount(self.resident)
    }

    /// The limit in force.
    pub fn limit(&self) -> Bytes {
        self.config.limit
    }

    /// Counters since the start.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Bytes of metadata: the ledger's words, the maps that find them, and the policy's peak.
    pub fn metadata_bytes(&self) -> u64 {
        self.table.metadata_bytes() + self.reclaim.metadata_bytes().0
    }

    /// Appends the slots to free to `out`. The caller returns them to their tiers.
    #[inline]
    pub fn take_freed(&mut self, out: &mut Vec<(TierId, Slot)>) {
        if !self.freed.is_empty() {
            out.append(&mut self.freed);
        }
    }

    /// How many pages fit below the limit. Negative when the limit is exceeded.
    #[inline]
    pub fn room(&self) -> i64 {
        let limit = self.config.limit.0 as i64;
        (limit - self.dram_used().0 as i64) >> PAGE_BYTES.trailing_zeros()
    }

    /// Room for new pages, after the resident ones that are still to be reported.
    #[inline]
    fn room_to_come(&self) -> i64 {
        self.room() - self.expected_found as i64
    }

    fn reserve(&self) -> i64 {
        match self.config.room {
            Room::Ahead => limits::reserve(self.config.limit.pages_floor()).0 as i64,
            Room::AfterPlan => 0,
        }
    }

    /// True when less room than the reserve is left: reclaim should start.
    pub fn reclaim_wanted(&self) -> bool {
        self.room() < self.reserve()
    }

    /// True while reclaim, once started, should continue: until one and a half reserves are free.
    pub fn reclaim_unfinished(&self) -> bool {
        self.room() < self.reserve() * 3 / 2
    }

    fn stamp(&self) -> Stamp {
        Stamp((self.evictions / limits::STAMP_EVICTIONS) as u16)
    }

    /// One page fewer refers to the slot.
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

    /// One more page refers to the slot.
    fn share(&mut self, tier: TierId, slot: Slot) {
        if tier != TierId::FILL {
            *self.refs.entry((tier, slot)).or_insert(1) += 1;
        }
    }

    /// The page no longer costs DRAM.
    #[inline]
    fn uncount(&mut self) {
        assert!(self.resident > 0, "more pages left memory than came");
        self.resident -= 1;
    }

    #[inline]
    fn count(&mut self) {
        self.resident += 1;
        self.stats.resident_peak = self.stats.resident_peak.max(PageCount(self.resident));
        let dram = self.dram_used();
        self.stats.dram_peak = self.stats.dram_peak.max(dram);
    }

    /// Locks the pages of `range`, so that they are never evicted, or unlocks them. Returns how
    /// many are not in memory now: the caller must bring those in, by touching them through the
    /// client.
    pub fn lock(&mut self, space: SpaceId, range: VirtRange, on: bool) -> PageCount {
        let mut absent = 0;
        for page in range.pages() {
            let Ok(no) = self.table.find_or_add(space, page) else {
                continue;
            };
            let mut entry = self.table.entry(no);
            absent += u64::from(matches!(
                entry.state,
                PageState::Stored | PageState::Evicting | PageState::Loading
            ));
            entry.flags = match on {
                true => entry.flags.with(Flags::LOCKED),
                false => entry.flags.without(Flags::LOCKED),
            };
            self.table.set(no, entry);
        }
        PageCount(absent)
    }

    /// The page's number, for [`Engine::touch`]. It is the same until the page is dropped. A chunk
    /// that has no numbers yet takes the lowest free ones.
    ///
    /// Errors: the ledger is full. Panics: when the space is not there.
    pub fn number(&mut self, space: SpaceId, page: VirtPage) -> Result<PageNo, LedgerFull> {
        self.table.find_or_add(space, page)
    }

    /// The program used the page, or wrote to it (`write`), as access bits or a trace tell. True if
    /// the page is in memory; the policy then knows of the use. False if this use is a fault. Cost:
    /// O(1), no search.
    #[inline]
    pub fn touch(&mut self, no: PageNo, write: bool) -> bool {
        let entry = self.table.entry(no);
        let resident = entry.state == PageState::Resident;
        // The frame of an inherited page is charged to a relative, so the policy does not know it.
        if resident && !entry.flags.has(Flags::INHERITED) && self.is_listed(no) {
            self.reclaim.touch(no, write);
        }
        resident
    }

    /// As [`Engine::touch`], by address. For a caller whose knowledge is old: the page may have
    /// left meanwhile. Reserves no entries.
    #[inline]
    pub fn touch_at(&mut self, space: SpaceId, page: VirtPage, write: bool) -> bool {
        match self.table.find(space, page) {
            Some(no) => self.touch(no, write),
            None => false,
        }
    }

    /// Whether the page is in memory. O(1).
    #[inline]
    pub fn is_resident(&self, no: PageNo) -> bool {
        self.table.entry(no).state == PageState::Resident
    }

    /// Whether the page has ever been touched. O(1).
    #[inline]
    pub fn is_known(&self, no: PageNo) -> bool {
        self.table.entry(no) != Entry::UNTOUCHED
    }

    /// Whether several pages refer to the slot. O(1).
    pub fn is_shared_slot(&self, tier: TierId, slot: Slot) -> bool {
        self.refs
            .get(&(tier, slot))
            .is_some_and(|claims| *claims > 1)
    }

    /// The entry of a page, for status, takeover and tests.
    pub fn entry(&self, space: SpaceId, page: VirtPage) -> Entry {
        self.table
            .find(space, page)
            .map_or(Entry::UNTOUCHED, |no| self.table.entry(no))
    }

    /// The managed ranges of a space, sorted.
    pub fn regions(&self, space: SpaceId) -> &[VirtRange] {
        self.table.regions(space)
    }

    /// The number of pages in all managed ranges, touched or not.
    pub fn managed_pages(&self) -> PageCount {
        let spaces = self.table.spaces();
        PageCount(
            spaces
                .flat_map(|s| self.table.regions(s))
                .map(|r| r.count().0)
                .sum(),
        )
    }

    /// Every space of the client.
    pub fn spaces(&self) -> Vec<SpaceId> {
        self.table.spaces().collect()
    }

    /// Appends to `out` the threads that may fault again, as many as there is room for.
    pub fn take_waiters(&mut self, out: &mut Vec<(SpaceId, VirtPage)>) {
        let room = self
            .room_to_come()
            .saturating_add_unsigned(self.over_limit.0)
            .max(0) as usize;
        let count = self.waiters.len().min(room);
        out.extend(self.waiters.drain(..count));
    }

    /// Checks the books against the ledger; panics with the difference. For tests: O(all entries).
    pub fn audit(&self) {
        let census = self.table.census();
        let of = |state: PageState| census.get(&(state as u8)).copied().unwrap_or(0);
        let (inherited, inherited_leaving) = self.table.count_inherited();
        let resident = of(PageState::Resident) - inherited;
        let evicting = of(PageState::Evicting) - inherited_leaving;
        let counted = resident + evicting + of(PageState::Loading);
        assert_eq!(
            self.resident, counted,
            "resident count differs from the ledger: {census:?}"
        );
        assert_eq!(
            self.reclaim.len().0 + self.kept_pages().0,
            resident,
            "policy length differs from the ledger"
        );
    }
}
