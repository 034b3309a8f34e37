//! The fault path: what a fault needs, which pages come along, and what became of them.
//!
//! A page that is being brought in is `Loading`, and the plan owns its slot. If the page is dropped
//! meanwhile, its slot stays with the plan until [`Faults::finish`]. So no slot is freed while it
//! is read.

use undercroft_base::{
    Entry, Flags, PageCount, PageNo, PageState, Slot, SpaceId, Stamp, ThreadId, TierId, VirtPage,
};
use undercroft_policy::place::{LatencyClass, Loaded, TierState};
use undercroft_policy::prefetch::neighbours::{Around, Now, REACH};
use undercroft_policy::prefetch::{FaultSeen, Window};
use undercroft_policy::reclaim::Arrival;

use crate::ledger::Ledger;
use crate::limits::{LOAD_PAGES_MAX, RETAIN_AHEAD_PERCENT, STAMP_EVICTIONS, WAITERS_MAX};
use crate::page_table::PageTable;
use crate::{BookEvent, Config, Engine, Fault, Faults, PageEvent, Room};

/// Answer to a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAnswer {
    /// Load and install what the plan lists.
    Load,
    /// The page is in memory: wake the thread.
    Wake,
    /// The page is on its way; the thread is woken when it has arrived.
    Wait,
    /// No room: the thread waits until reclaim has made some ([`Faults::take_waiters`]).
    NoRoom,
    /// No copy of the page could be verified: poison it, or end the client.
    Lost,
    /// The ledger is full: install zeros; the page stays unmanaged.
    Unmanaged,
}

/// Fate of one page of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Install {
    /// Not tried, or refused for now: back to `Stored`.
    NotYet,
    /// Mapped in the client by this plan. A *fresh* page that was found there already (EEXIST) is
    /// `NotYet` instead. A REMOVE may have been acknowledged, and its zap may still come. If the
    /// page were evicted before the zap, it would come back with the bytes that were dropped.
    Done,
    /// Its bytes could not be verified or read.
    Lost,
}

/// A page to bring in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadItem {
    /// The page's entry.
    pub no: PageNo,
    /// Its address space.
    pub space: SpaceId,
    /// Where it is mapped.
    pub page: VirtPage,
    /// Tier of its copy; `FILL` with slot 0 for a fresh zero page.
    pub tier: TierId,
    /// Slot of its copy.
    pub slot: Slot,
    /// Generation of its copy.
    pub stamp: Stamp,
    /// True for the faulting page.
    pub demanded: bool,
    /// True for a page never touched before.
    pub fresh: bool,
    /// Whether it may still be installed: at first yes, later what [`Faults::validate`] says.
    pub valid: bool,
    /// The caller's result, for [`Faults::finish`].
    pub install: Install,
    /// The count of [`Upsets`](crate::Upsets) when it was decided.
    pub(crate) decided: u64,
}

/// The pages of one fault, in ascending address order. The plan is reused and never grows.
#[derive(Debug)]
pub struct LoadPlan {
    /// The fault that it serves. Fresh pages of a write get a frame of their own.
    pub fault: Fault,
    /// At most [`LOAD_PAGES_MAX`].
    pub items: Vec<LoadItem>,
}

impl Default for LoadPlan {
    fn default() -> LoadPlan {
        LoadPlan {
            fault: Fault {
                space: SpaceId(0),
                page: VirtPage(0),
                write: false,
                thread: ThreadId(0),
                urgent: false,
            },
            items: Vec::with_capacity(LOAD_PAGES_MAX),
        }
    }
}

/// Windows that may still turn out to have been used: one for each stream of a few.
const EXPECTED: usize = 8;

/// A tier that has not been reported.
const UNKNOWN: TierState = TierState::empty(LatencyClass::Device);

/// Where the last windows of the program's streams end. A fault there shows that the window was
/// used.
#[derive(Debug, Default)]
pub(crate) struct Expected {
    ends: [Option<(SpaceId, VirtPage)>; EXPECTED],
    pages: [u64; EXPECTED],
    next: usize,
}

impl Expected {
    /// The pages of the window that a fault at `page` shows to have been used.
    fn used(&mut self, space: SpaceId, page: VirtPage) -> u64 {
        let end = Some((space, page));
        match self.ends.iter().position(|other| *other == end) {
            Some(at) => {
                self.ends[at] = None;
                self.pages[at]
            }
            None => 0,
        }
    }

    /// A window of `pages` ends before `page`. It replaces the oldest one.
    fn add(&mut self, space: SpaceId, page: VirtPage, pages: u64) {
        self.ends[self.next] = Some((space, page));
        self.pages[self.next] = pages;
        self.next = (self.next + 1) % EXPECTED;
    }
}

/// The pages of the faulting page's region around it that a device has; `found` gets where they
/// are.
fn stored_around<L: Ledger>(
    table: &PageTable<L>,
    config: &Config,
    seen: FaultSeen,
    found: &mut [(PageNo, VirtPage)],
) -> Around {
    let region = table.region_around(seen.space, seen.page);
    let mut stored = 0;
    for (bit, found) in found.iter_mut().enumerate() {
        let at = (seen.page.0 + bit as u64).checked_sub(u64::from(REACH));
        let Some(page) = at.map(VirtPage).filter(|page| region.contains(*page)) else {
            continue;
        };
        let Some(no) = table.find(seen.space, page) else {
            continue;
        };
        let entry = table.entry(no);
        if entry.state == PageState::Stored && config.is_device(entry.tier) {
            *found = (no, page);
            stored |= 1 << bit;
        }
    }
    stored
}

impl<L: Ledger> Faults<'_, L> {
    /// Sets by how many base pages faults may exceed the limit, and returns the value before. The
    /// manager raises it step by step while no tier has room and the client is to stay alive.
    pub fn set_over_limit(&mut self, pages: PageCount) -> PageCount {
        std::mem::replace(&mut self.engine.over_limit, pages)
    }

    /// Appends to `out` the pages of threads that may fault again, as many as there is room for.
    pub fn take_waiters(&mut self, out: &mut Vec<(SpaceId, VirtPage)>) {
        let mut room = self
            .engine
            .room_to_come()
            .saturating_add_unsigned(self.engine.over_limit.0);
        while let Some((space, page)) = self.engine.waiters.front().copied() {
            room = room.saturating_sub_unsigned(self.engine.table.size_in(space).base_pages());
            if room < 0 {
                break;
            }
            out.push((space, page));
            self.engine.waiters.pop_front();
        }
    }

    /// Decides a fault. On `Load`, the pages are in `plan`, all `Loading` and counted. Cost:
    /// O(window), no allocation once the page's chunk exists.
    #[inline(always)] // on the fault path
    pub fn answer(&mut self, fault: Fault, plan: &mut LoadPlan) -> FaultAnswer {
        plan.items.clear();
        plan.fault = fault;
        self.engine.stats.faults += 1;
        let Some(no) = self
            .engine
            .table
            .find(fault.space, fault.page)
            .or_else(|| self.engine.begin_page(fault))
        else {
            return FaultAnswer::Unmanaged;
        };
        let entry = self.engine.table.entry(no);
        let fresh = entry.state == PageState::Untouched;
        if !fresh && entry.state != PageState::Stored {
            return self.engine.fault_again(fault, no, entry.state);
        }
        let needed = self.engine.table.base_pages(no) as i64;
        if self.engine.config.room == Room::Ahead && self.engine.room_to_come() < needed {
            let room =
                (self.engine.room_to_come()).saturating_add_unsigned(self.engine.over_limit.0);
            if room < needed && !fault.urgent {
                self.engine.stats.waited_for_room += 1;
                return self.engine.wait_for_room(fault);
            }
            self.engine.stats.over_limit += 1;
        }
        if fresh {
            self.engine.stats.first_touch += 1
        } else {
            self.engine.stats.swap_in += 1
        }
        self.engine.plan_page(plan, no, fault.page, entry, true);
        let found = !fresh
            && (self.engine.plan_linked(plan, fault, no)
                || self.engine.source.is_some() && self.engine.plan_known(plan, fault, no));
        if !found {
            self.engine.plan_window(plan, fault, fresh);
        }
        self.engine.see_plan(plan);
        FaultAnswer::Load
    }

    /// Sets `valid` on the items that are still to be installed. The caller installs them while no
    /// layout event of the space can be acknowledged, then calls [`Faults::finish`]. Needed only
    /// where [`Upsets::spare`](crate::Upsets::spare) is false.
    pub fn validate(&self, items: &mut [LoadItem]) {
        for item in items {
            item.valid = self.engine.is_expected(item);
        }
    }

    /// Ends each item of the plan of `fault` as its `install` says. Each item is finished exactly
    /// once.
    #[inline(always)] // on the fault path
    pub fn finish(&mut self, fault: Fault, items: &mut [LoadItem]) {
        for item in items {
            item.valid = self.engine.is_expected(item);
            if !item.valid {
                self.engine.end_upset(item);
                continue;
            }
            let entry = self.engine.table.entry(item.no);
            debug_assert_eq!(item.space, fault.space);
            match item.install {
                Install::Done => self.engine.installed(fault, item, entry),
                Install::NotYet => self.engine.not_installed(item, entry),
                Install::Lost => self.engine.lost(item),
            }
        }
    }
}

impl<L: Ledger> Engine<L> {
    /// The page of a fault in a chunk without entries. `None` where there can be none.
    #[inline(never)]
    fn begin_page(&mut self, fault: Fault) -> Option<PageNo> {
        if self.table.has_space(fault.space) {
            self.table.find_or_add(fault.space, fault.page).ok()
        } else {
            None
        }
    }

    /// Answers a fault on a page that is neither new nor stored: nothing is loaded for it.
    #[inline(never)]
    fn fault_again(&mut self, fault: Fault, no: PageNo, state: PageState) -> FaultAnswer {
        if state == PageState::Lost {
            return FaultAnswer::Lost;
        }
        self.stats.repeated += 1;
        match state {
            PageState::Resident => FaultAnswer::Wake,
            PageState::Evicting => {
                self.batch.want(no);
                self.tell(BookEvent::Waits(fault));
                FaultAnswer::Wait
            }
            _ => FaultAnswer::Wait, // it is loading
        }
    }

    /// Puts the thread on the list of those that wait for room. A page is listed once, however
    /// often it faults, so the list has at most one entry a thread. When the list is full the
    /// thread faults again at once, and so spins.
    pub(crate) fn wait_for_room(&mut self, fault: Fault) -> FaultAnswer {
        let place = (fault.space, fault.page);
        if self.waiters.contains(&place) {
            return FaultAnswer::NoRoom;
        }
        if self.waiters.len() >= WAITERS_MAX {
            return FaultAnswer::Wake;
        }
        self.waiters.push_back(place);
        FaultAnswer::NoRoom
    }

    #[inline(always)] // on the fault path
    pub(crate) fn plan_page(
        &mut self,
        plan: &mut LoadPlan,
        no: PageNo,
        page: VirtPage,
        entry: Entry,
        demanded: bool,
    ) {
        let fresh = entry.state == PageState::Untouched;
        let (tier, slot) = if fresh {
            (TierId::FILL, Slot(0))
        } else {
            (entry.tier, entry.slot)
        };
        let flags = entry.flags.without(Flags::RETAINED);
        let loading = Entry {
            state: PageState::Loading,
            flags,
            tier,
            slot,
            stamp: entry.stamp,
        };
        self.table.set(no, loading);
        self.count(no);
        plan.items.push(LoadItem {
            no,
            space: plan.fault.space,
            page,
            tier,
            slot,
            stamp: entry.stamp,
            demanded,
            fresh,
            valid: true,
            install: Install::NotYet,
            decided: self.upsets.count(),
        });
    }

    /// Adds the pages that the placement policy or a plugin has linked with page `no`, in its
    /// region, as many as leave a quarter of the room free. False if there is none: then the
    /// prefetch policy is asked.
    #[inline]
    fn plan_linked(&mut self, plan: &mut LoadPlan, fault: Fault, no: PageNo) -> bool {
        (self.links_pages || self.links.is_any()) && self.plan_together(plan, fault, no)
    }

    #[inline(never)]
    fn plan_together(&mut self, plan: &mut LoadPlan, fault: Fault, no: PageNo) -> bool {
        let mut linked = std::mem::take(&mut self.linked);
        linked.clear();
        if self.links_pages {
            self.place.together(no, &mut linked);
        }
        self.links.append(no, &mut linked);
        let region = self.table.region_around(fault.space, fault.page);
        let (mut most, mut found) = (self.along_max(no), false);
        for other in &linked {
            // What was linked may have been dropped since.
            let Some((space, page)) = self.table.address_if_used(*other) else {
                continue;
            };
            if *other == no || space != fault.space || !region.contains(page) {
                continue;
            }
            found = true;
            let entry = self.table.entry(*other);
            if entry.state == PageState::Stored && most > 0 {
                most -= 1;
                self.plan_page(plan, *other, page, entry, false);
            }
        }
        if !found {
            self.links.forget(no); // of a page that had this number before
        }
        self.linked = linked;
        plan.items.sort_unstable_by_key(|item| item.page);
        found
    }

    /// Most pages that may come along with a fault on page `no`: none if it is large.
    pub(crate) fn along_max(&self, no: PageNo) -> i64 {
        let most = match self.config.room {
            Room::Ahead => (self.room_to_come() + 1) * 3 / 4, // and the faulting page's own
            Room::AfterPlan => self.config.limit.pages_floor().0 as i64 / 2,
        };
        let at_once = self.table.size(no).at_once(LOAD_PAGES_MAX);
        most.clamp(0, at_once as i64 - 1)
    }

    /// Asks the prefetch policy for a window, and adds it to the plan.
    #[inline]
    fn plan_window(&mut self, plan: &mut LoadPlan, fault: Fault, fresh: bool) {
        let Some(prefetch) = &mut self.prefetch else {
            return;
        };
        let seen = FaultSeen {
            space: fault.space,
            page: fault.page,
            thread: fault.thread,
            first_touch: fresh,
        };
        let Window { stride, count } = prefetch.on_fault(seen);
        if !fresh {
            self.stats.prefetch_hits += self.expected.used(fault.space, fault.page);
        }
        if count > 0 && stride != 0 {
            self.plan_along(plan, fault, fresh, stride, count);
        } else if self.config.is_device(plan.items[0].tier) {
            self.plan_beside(plan, seen);
        }
    }

    /// Adds the neighbours that the prefetch policy names where it sees no trend, as many as leave
    /// a quarter of the room free.
    #[inline(never)]
    fn plan_beside(&mut self, plan: &mut LoadPlan, seen: FaultSeen) {
        let most = self.along_max(plan.items[0].no) as usize;
        let now = Now {
            arrivals: self.stats.arrivals(),
            resident_max: self.config.limit.pages_floor(),
            stored: PageCount(self.table.stored()),
        };
        let Some(prefetch) = self.prefetch.as_mut().filter(|_| most > 0) else {
            return;
        };
        let (table, config) = (&self.table, &self.config);
        let mut found = [(PageNo(0), VirtPage(0)); 2 * REACH as usize + 1];
        let mut stored = 0;
        let along = prefetch.off_trend(seen, now, &mut || {
            stored = stored_around(table, config, seen, &mut found);
            stored
        });
        let bring = along.pages & stored;
        if bring == 0 {
            return;
        }
        self.stats.prefetch_hits += u64::from(along.used);
        // The nearest first, if there is no room for all.
        let by_distance = (1..=REACH).flat_map(|steps| [REACH + steps, REACH - steps]);
        for bit in by_distance.filter(|bit| bring >> bit & 1 == 1).take(most) {
            let (no, page) = found[bit as usize];
            self.plan_page(plan, no, page, self.table.entry(no), false);
        }
        plan.items.sort_unstable_by_key(|item| item.page);
    }

    /// Adds pages of the window to the plan: those of the faulting page's region and state, while
    /// at least a quarter of the room stays free.
    #[inline(never)]
    fn plan_along(
        &mut self,
        plan: &mut LoadPlan,
        fault: Fault,
        fresh: bool,
        stride: i64,
        count: u32,
    ) {
        let count = i64::from(count).min(self.along_max(plan.items[0].no));
        if count == 0 {
            return;
        }
        let wanted = if fresh {
            PageState::Untouched
        } else {
            PageState::Stored
        };
        let region = self.table.region_around(fault.space, fault.page);
        let mut added = 0;
        for step in 1..=count {
            let Some(at) = fault.page.0.checked_add_signed(stride * step).map(VirtPage) else {
                break;
            };
            if !region.contains(at) {
                break;
            }
            let no = if fresh {
                self.table.find_or_add(fault.space, at).ok()
            } else {
                self.table.find(fault.space, at)
            };
            let Some(no) = no else { continue };
            let entry = self.table.entry(no);
            if entry.state == wanted {
                self.plan_page(plan, no, at, entry, false);
                added += 1;
            }
        }
        if !fresh {
            let next = fault.page.0.checked_add_signed(stride * (count + 1));
            if let Some(next) = next.filter(|_| added > 0) {
                self.expected.add(fault.space, VirtPage(next), added);
            }
        }
        if stride < 0 {
            plan.items.sort_unstable_by_key(|item| item.page);
        }
    }

    #[inline(never)]
    fn not_installed(&mut self, item: &LoadItem, entry: Entry) {
        self.uncount(item.no);
        let back = if item.fresh {
            Entry {
                flags: entry.flags,
                ..Entry::UNTOUCHED
            }
        } else {
            Entry {
                state: PageState::Stored,
                ..entry
            }
        };
        self.table.set(item.no, back);
        if !item.fresh {
            self.remember_age(item.no, back); // it may have been selected to move meanwhile
        }
    }

    #[inline(never)]
    fn lost(&mut self, item: &LoadItem) {
        self.uncount(item.no);
        self.stats.lost += 1;
        self.release(item.tier, item.slot);
        let lost = Entry {
            state: PageState::Lost,
            ..Entry::UNTOUCHED
        };
        self.table.set(item.no, lost);
    }

    #[inline(always)] // on the fault path
    fn installed(&mut self, fault: Fault, item: &LoadItem, entry: Entry) {
        let mut flags = entry.flags.without(Flags::PREFETCHED);
        if !item.demanded {
            flags = flags.with(Flags::PREFETCHED);
        }
        let anew = Entry {
            flags,
            state: PageState::Resident,
            ..Entry::UNTOUCHED
        };
        let (arrival, resident) = if item.fresh {
            self.stats.zero_ahead += u64::from(!item.demanded);
            (Arrival::FirstTouch, anew)
        } else {
            self.stats.pages_swapped_in += 1;
            self.stats.prefetched += u64::from(!item.demanded);
            let distance = item.demanded.then(|| self.distance(item));
            let swapped_in = |distance| Arrival::SwapIn { distance };
            let arrival = distance.map_or(Arrival::Prefetch, swapped_in);
            (arrival, self.keep_or_release(item, entry, anew, distance))
        };
        self.table.set(item.no, resident);
        self.reclaim.insert(item.no, arrival);
        self.recent.push(item.no);
        if !self.journals.is_empty() {
            self.tell_installed(fault, item);
        }
    }

    #[inline(never)]
    fn tell_installed(&mut self, fault: Fault, item: &LoadItem) {
        debug_assert!(!item.demanded || item.page == fault.page);
        if item.demanded {
            self.tell(BookEvent::Faulted(fault));
            if !item.fresh {
                self.tell_placed(item.space, item.page, item.tier, BookEvent::Loaded);
            }
        } else {
            self.tell_page(item.space, item.page, PageEvent::CameAlong);
        }
    }

    /// The entry of a page that was loaded from a tier: `anew`, unless the tier keeps the copy.
    /// * `distance`: evictions since the page left, if a thread waited for it.
    #[inline]
    fn keep_or_release(
        &mut self,
        item: &LoadItem,
        entry: Entry,
        anew: Entry,
        distance: Option<PageCount>,
    ) -> Entry {
        let anew = anew.that_left();
        if item.tier == TierId::FILL {
            return anew;
        }
        let at = item.tier.0 as usize;
        let known = self.tiers.get(at);
        let page = |rank| Loaded {
            no: item.no,
            from: TierId(rank as u8),
            tier: known.unwrap_or(&UNKNOWN),
            distance,
            waited: item.demanded.into(),
        };
        let from = self.ranks.iter().position(|tier| *tier == item.tier);
        let keeps = from.is_none_or(|rank| {
            let parts = rank + 1 == self.ranks.len() && self.links.holds(item.no);
            self.place.loaded(page(rank)) && !parts
        });
        let kept = if self.config.retain.get(at) == Some(&true) {
            keeps || known.is_none()
        } else {
            self.retains_ahead(item)
        };
        if kept && !self.is_closed(item.tier) {
            return Entry {
                state: anew.state,
                flags: anew.flags.with(Flags::RETAINED),
                ..entry
            };
        }
        self.release_slot(item.tier, item.slot);
        anew
    }

    /// Whether a prefetched page keeps its copy in a tier that uses memory. A scan evicts what it
    /// read a moment ago, unchanged: with the copy kept, that costs a checksum instead of a
    /// compression. Pages faulted one by one stay longer, so for them the room is worth more.
    fn retains_ahead(&self, item: &LoadItem) -> bool {
        let share = u128::from(self.pool_held.0) * 100;
        !item.demanded && share < u128::from(self.config.limit.0) * RETAIN_AHEAD_PERCENT
    }

    /// Evictions since the page left. Wraps after 2^16 steps.
    #[inline]
    fn distance(&self, item: &LoadItem) -> PageCount {
        let left = self.departures.when(item.no).unwrap_or(item.stamp);
        let steps = self.stamp().0.wrapping_sub(left.0);
        PageCount(u64::from(steps) * STAMP_EVICTIONS)
    }
}
