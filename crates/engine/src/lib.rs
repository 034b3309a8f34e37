//! The engine: decides, for one client, what is loaded, what is evicted, and what each page's state is.
//!
//! Sans-I/O: no clock, no threads, no system calls, no `unsafe`. The caller reports events (fault, layout change, what an
//! installation or a store came to) and carries out what the answers say. The live manager and the simulator run this code.
//!
//! Walks: fault: [`Engine::fault`] -> the caller loads -> [`Engine::validate`] -> installs -> [`Engine::finish`].
//! Eviction: [`Engine::select`] -> the caller takes the pages out -> [`Engine::settle`] -> stores -> [`Engine::publish`].
//! Which tier: [`Engine::set_tiers`] -> [`Engine::place`] of a page, [`Engine::migration`].
//! Between tiers: [`Engine::select_demotions`] -> [`Engine::demoted`].
//! After a manager's death: [`Engine::recover`] -> the layout events that were read or wait -> [`Engine::reconcile`].

mod batch;
mod cow;
mod evict;
mod fault;
#[doc(hidden)]
pub mod fuzz;
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
pub use layout::Effect;
pub use ledger::{FlatLedger, Ledger, LedgerError, NOTE_WORDS, VecLedger, bytes_for};
pub use migrate::DemoteItem;
pub use page_table::LedgerFull;
pub use recover::{Found, Held, Here, InHand, Recovered};
pub use stats::Stats;

/// What the engine is told when it starts.
#[derive(Clone, Debug)]
pub struct Config {
    /// DRAM for the client: resident managed pages plus what tiers hold in memory.
    pub limit: Bytes,
    /// For each tier, whether a loaded page keeps its copy there until the page changes (a clean page is then
    /// evicted without a write).
    pub retain: Vec<bool>,
    /// Whether pages stored in a tier may later be demoted from it (its ages are then remembered).
    pub demotes: Vec<bool>,
    /// When room for a fault is made.
    pub room: Room,
}

/// When room for a fault is made, and by whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// Ahead of it: reclaim keeps a reserve free below the limit, a window takes at most half of the room there is, and
    /// pages installed last may not leave yet. A fault then waits for no eviction, and many threads may fault at once.
    #[default]
    Ahead,
    /// After its plan: the caller evicts until [`Engine::room`] is not negative, then installs. No reserve, so memory is used
    /// to the last page; no page is protected, so the policy's order alone decides; a window takes at most half of the
    /// limit. For a caller that serves one fault at a time.
    AfterPlan,
}

/// One client's engine. Every method is called by one thread at a time.
pub struct Engine<L> {
    table: page_table::PageTable<L>,
    reclaim: Box<dyn Reclaim>,
    /// `None`: a policy that never brings anything along.
    prefetch: Option<Box<dyn Prefetch>>,
    /// Decides where pages are kept.
    place: Box<dyn Place>,
    /// The tiers as last told, fastest first.
    tiers: Vec<TierState>,
    config: Config,
    /// Pages that cost the client DRAM: resident (not inherited), evicting, loading.
    resident: u64,
    /// Pages that are in memory and will be found: they take room, and are not `resident` yet.
    expected_found: u64,
    /// DRAM held by tiers, as last reported.
    pool_held: Bytes,
    /// Pages chosen to leave so far, those that came back included: the clock of refault distances.
    evictions: u64,
    /// Slots that more than one page refers to (fork), with how many.
    refs: FxHashMap<(TierId, Slot), u32>,
    /// Slots nothing refers to any more, for the caller to free.
    freed: Vec<(TierId, Slot)>,
    batch: batch::Batch,
    /// Notes of followers of the batch, in the ledger.
    followers_noted: usize,
    recent: Recent,
    /// Pages of threads that wait for room.
    waiters: VecDeque<(SpaceId, VirtPage)>,
    ages: Vec<migrate::AgeQueue>,
    expected: fault::Expected,
    over_limit: PageCount,
    victims: Vec<PageNo>,
    stats: Stats,
}

/// The last pages installed: they may not leave yet, up to half of what is resident.
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

    /// Whether `page` is one of the `count` last.
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

    /// Changes the limit; the caller then reclaims as [`Engine::reclaim_wanted`] says.
    pub fn set_limit(&mut self, limit: Bytes) {
        self.config.limit = limit;
    }

    /// Tells how much DRAM the tiers hold now.
    pub fn set_pool_held(&mut self, held: Bytes) {
        self.pool_held = held;
        let dram = self.dram_used();
        self.stats.dram_peak = self.stats.dram_peak.max(dram);
    }

    /// So many pages are in memory that [`Engine::found_resident`] is going to tell of: until it has, faults have no room for as many.
    /// Nothing is reclaimed for them before. Once all have been told of: 0.
    pub fn expect_found(&mut self, pages: PageCount) {
        self.expected_found = pages.0;
    }

    /// By how many pages faults may exceed the limit: raised step by step while nothing below has room and the client is to
    /// stay alive. Returns what was set before.
    pub fn set_over_limit(&mut self, pages: PageCount) -> PageCount {
        std::mem::replace(&mut self.over_limit, pages)
    }

    /// DRAM the client costs now: resident managed pages plus what tiers hold.
    pub fn dram_used(&self) -> Bytes {
        Bytes(self.resident * PAGE_BYTES as u64 + self.pool_held.0)
    }

    /// Resident managed pages, those in flight included.
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

    /// Bytes of metadata: the ledger's words and the maps that find them, and the most the reclaim policy has held.
    pub fn metadata_bytes(&self) -> u64 {
        self.table.metadata_bytes() + self.reclaim.metadata_bytes().0
    }

    /// Moves the slots to free into `out` (appends). The caller gives them back to their tiers.
    #[inline]
    pub fn take_freed(&mut self, out: &mut Vec<(TierId, Slot)>) {
        if !self.freed.is_empty() {
            out.append(&mut self.freed);
        }
    }

    /// Pages that fit below the limit; negative when it is exceeded.
    #[inline]
    pub fn room(&self) -> i64 {
        let limit = self.config.limit.0 as i64;
        (limit - self.dram_used().0 as i64) >> PAGE_BYTES.trailing_zeros()
    }

    /// Room for pages that come, beside those that are there and will be found.
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

    /// True when the reserve is broken into: reclaim should start.
    pub fn reclaim_wanted(&self) -> bool {
        self.room() < self.reserve()
    }

    /// True while reclaim, once started, should go on (until a reserve and a half is free).
    pub fn reclaim_unfinished(&self) -> bool {
        self.room() < self.reserve() * 3 / 2
    }

    fn stamp(&self) -> Stamp {
        Stamp((self.evictions / limits::STAMP_EVICTIONS) as u16)
    }

    /// One page refers to the slot no more.
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

    /// The page cost DRAM and does no more.
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

    /// Marks pages as never to be evicted (or evictable again). Returns those that are not in memory now and must be
    /// brought in by the caller (by touching them through the client).
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

    /// The page's number, by which [`Engine::touch`] knows it; it stays the same until the page is dropped. A chunk that has
    /// no numbers yet takes the lowest ones free.
    ///
    /// Errors: the ledger is full. Panics: when the space is not there.
    pub fn number(&mut self, space: SpaceId, page: VirtPage) -> Result<PageNo, LedgerFull> {
        self.table.find_or_add(space, page)
    }

    /// The program used the page (`write`: wrote it), as access bits or a trace tell. True when the page is in memory: the
    /// policy knows of the use now. False: such a use is a fault. O(1), no search.
    #[inline]
    pub fn touch(&mut self, no: PageNo, write: bool) -> bool {
        let entry = self.table.entry(no);
        let resident = entry.state == PageState::Resident;
        // A relative is charged for an inherited page's frame: the policy does not know it.
        if resident && !entry.flags.has(Flags::INHERITED) {
            self.reclaim.touch(no, write);
        }
        resident
    }

    /// As [`Engine::touch`], by address: for who looked at the page a while ago, since when it may have left. Reserves nothing.
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

    /// Whether anything is known of the page. O(1).
    #[inline]
    pub fn is_known(&self, no: PageNo) -> bool {
        self.table.entry(no) != Entry::UNTOUCHED
    }

    /// Whether more than one page refers to a slot. O(1).
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

    /// Pages of all managed ranges, touched or not.
    pub fn managed_pages(&self) -> PageCount {
        let spaces = self.table.spaces();
        PageCount(
            spaces
                .flat_map(|s| self.table.regions(s))
                .map(|r| r.count().0)
                .sum(),
        )
    }

    /// Every space that was added and not removed.
    pub fn spaces(&self) -> Vec<SpaceId> {
        self.table.spaces().collect()
    }

    /// Threads that waited for room and may now fault again: appends to `out` as many as there is room for.
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
            self.reclaim.len().0,
            resident,
            "policy length differs from the ledger"
        );
    }
}
