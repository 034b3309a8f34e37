//! Moves between tiers. The oldest pages of a fast tier move to the next, so new pages do not have
//! to be stored past old ones.

use std::ops::Range;

use undercroft_base::{
    Bytes, Entry, Flags, PageCount, PageNo, PageSize, PageState, Slot, Stamp, TierId,
};

use undercroft_policy::place::{LatencyClass, Migration, TierOrder, TierState};

use crate::ages::Oldest;
use crate::batch::BatchIndex;
use crate::ledger::Ledger;
use crate::limits::{DEMOTE_PAGES_MAX, DEMOTE_SCAN_MAX, DRAIN_SCAN_MAX, STAMP_EVICTIONS};
use crate::reclaim::{BUFFER_ROOM_MIN, Mover};
use crate::source::Source;
use crate::{BookEvent, Engine, Evictions, Migrations};

/// Evictions after which a stamp comes again. The copy of a page that is still on its way then
/// could be taken for another of the same stamp.
const STAMPS_REPEAT: u64 = STAMP_EVICTIONS * u16::MAX as u64;

/// A page to move to the next tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemoteItem {
    /// The page's entry.
    pub no: PageNo,
    /// The tier it is in.
    pub tier: TierId,
    /// Its slot there. The slot may be freed at any time, so its bytes count only if they verify.
    pub slot: Slot,
    /// Its generation, which the new copy keeps.
    pub stamp: Stamp,
    /// Evictions so far when it was selected. `u64::MAX`: it is moved at once, and no page is
    /// evicted meanwhile.
    pub selected: u64,
}

impl<L: Ledger> Migrations<'_, L> {
    /// Reports how much DRAM the tiers hold now.
    pub fn set_pool_held(&mut self, held: Bytes) {
        self.engine.pool_held = held;
        let dram = self.engine.books().dram_used();
        self.engine.stats.dram_peak = self.engine.stats.dram_peak.max(dram);
    }

    /// Sets what each tier holds now, by number. Called before a decision is asked for. The engine
    /// itself knows whether pages may be demoted from a tier: it sets `demotes`.
    pub fn set_tiers(&mut self, tiers: impl IntoIterator<Item = TierState>) {
        self.engine.tiers.clear();
        let mut dram = 0;
        for (at, mut state) in tiers.into_iter().enumerate() {
            state.demotes = self.engine.config.demotes.get(at) == Some(&true);
            dram += state.dram.0;
            self.engine.tiers.push(state);
        }
        self.rank_states();
        self.set_pool_held(Bytes(dram));
    }

    /// Brings the states that the policy sees up to date.
    fn rank_states(&mut self) {
        let engine = &mut *self.engine;
        let none = TierState::empty(LatencyClass::Device);
        let state = |tier: &TierId| *engine.tiers.get(usize::from(tier.0)).unwrap_or(&none);
        engine.ranked.clear();
        engine.ranked.extend(engine.ranks.iter().map(state));
        let mut ranks = engine.ranks.iter().enumerate();
        engine.in_order = ranks.all(|(rank, tier)| usize::from(tier.0) == rank);
        engine.in_order &= (engine.ranked.iter()).all(|tier| tier.page == PageSize::Base);
    }

    /// A new tier is in use from now on, empty, under a number that no tier in use has. Pages that
    /// are in the tier above it, if that was the last, have no age: the caller notes them, with
    /// [`Migrations::note_ages`].
    ///
    /// * `rank`: how many tiers in use are faster.
    ///
    /// Panics if the number is in use, or too large: the caller's bug. Cost: O(tiers).
    pub fn add(&mut self, tier: TierId, latency: LatencyClass, rank: usize) {
        let at = usize::from(tier.0);
        assert!(at < TierId::MAX, "no number for a tier");
        assert!(self.engine.rank_of(tier).is_none(), "the number is in use");
        let config = &mut self.engine.config;
        let count = config.retain.len().max(at + 1);
        config.retain.resize(count, false);
        config.demotes.resize(count, false);
        config.retain[at] = latency != LatencyClass::Memory;
        let ranks = &mut self.engine.ranks;
        let rank = rank.min(ranks.len());
        config.demotes[at] = rank < ranks.len();
        if rank == ranks.len()
            && let Some(last) = ranks.last()
        {
            config.demotes[usize::from(last.0)] = true;
        }
        ranks.insert(rank, tier);
        self.engine.closed &= !(1 << tier.0);
        self.rank_states();
    }

    /// The closed and empty `tier` is used no more. Its number may be given to another.
    ///
    /// Panics if it is not closed: the caller's bug. Cost: O(tiers).
    pub fn remove(&mut self, tier: TierId) {
        assert!(self.engine.is_closed(tier), "a tier in use was removed");
        self.engine.ranks.retain(|other| *other != tier);
        let demotes = &mut self.engine.config.demotes;
        demotes[usize::from(tier.0)] = false;
        if let Some(last) = self.engine.ranks.last() {
            demotes[usize::from(last.0)] = false;
        }
        self.rank_states();
    }

    /// The tiers in use, fastest first.
    pub fn ranks(&self) -> &[TierId] {
        &self.engine.ranks
    }

    /// Notes the ages of pages that are in `tier` since before it demoted, from number `from` on:
    /// in the order of their numbers, because no other is known. Returns where to go on; `None` at
    /// the end. Cost: O([`DRAIN_SCAN_MAX`]).
    pub fn note_ages(&mut self, tier: TierId, from: PageNo) -> Option<PageNo> {
        let end = self.engine.table.end();
        let until = end.0.min(from.0.saturating_add(DRAIN_SCAN_MAX));
        for no in (from.0..until).map(PageNo) {
            let entry = self.engine.table.entry(no);
            if is_in(entry, tier) {
                self.engine.remember_age(no, entry);
            }
        }
        (until < end.0).then_some(PageNo(until))
    }

    /// The move with numbers in place of ranks.
    fn by_number(&self, asked: Migration) -> Migration {
        let number = |rank: TierId| self.engine.ranks[usize::from(rank.0)];
        Migration {
            from: number(asked.from),
            to: number(asked.to),
            ..asked
        }
    }

    /// The move that `mover` should make between tiers: the evictor before the next batch leaves,
    /// another thread when it has time. Latency control bends what the evictor moves. The caller
    /// carries it out with [`Migrations::select`], sets the tiers, and asks again until nothing
    /// moves.
    ///
    /// The policy is told that only the tiers of this mover demote. So a full device does not keep
    /// the evictor from a full tier above it.
    pub fn wanted(&mut self, mover: Mover) -> Option<Migration> {
        let limit = self.engine.config.limit;
        self.ask_of(|tier| (tier.latency == LatencyClass::Device) == (mover == Mover::Background));
        let place = &mut self.engine.place;
        let asked = place.next_move(limit, &self.engine.asked_of);
        let asked = self.by_number(self.among_equals(asked?)?);
        if self.engine.is_closed(asked.to) {
            return None;
        }
        match (mover, self.engine.turned) {
            (Mover::Evictor, Some(turned)) => turned.demotion(asked),
            _ => Some(asked),
        }
    }

    /// The move with the next slower tier of the same page size, if the policy named one of
    /// another. `None`: there is none. Policies do not know of sizes.
    fn among_equals(&self, asked: Migration) -> Option<Migration> {
        let fits = |rank: &TierId| self.size_at(*rank) == self.size_at(asked.from);
        if fits(&asked.to) {
            return Some(asked);
        }
        let mut below = (asked.from.0 + 1..self.engine.ranks.len() as u8).map(TierId);
        let to = below.find(fits)?;
        Some(Migration { to, ..asked })
    }

    /// Notes the tiers as the policy is to see them. A closed tier demotes nothing and has no room.
    fn ask_of(&mut self, demotes: impl Fn(&TierState) -> bool) {
        let mut asked_of = std::mem::take(&mut self.engine.asked_of);
        asked_of.clear();
        for (rank, (tier, id)) in (self.engine.ranked.iter().zip(&self.engine.ranks)).enumerate() {
            let closed = self.engine.is_closed(*id);
            asked_of.push(TierState {
                demotes: tier.demotes && demotes(tier) && !closed && self.has_below(rank),
                capacity: if closed { Bytes(0) } else { tier.capacity },
                ..*tier
            });
        }
        self.engine.asked_of = asked_of;
    }

    /// Whether a slower tier has pages of the same size.
    fn has_below(&self, rank: usize) -> bool {
        let (above, below) = self.engine.ranked.split_at(rank + 1);
        below.iter().any(|tier| tier.page == above[rank].page)
    }

    /// No new copy goes to `tier` from now on, and none is kept there. The caller moves away those
    /// that are there, with [`Migrations::select_all`], until there is none. The policy still
    /// offers pages to the tier; the engine leaves it out.
    pub fn close(&mut self, tier: TierId) {
        self.engine.closed |= 1 << tier.0;
    }

    /// Memory begins as the `pages` pages of `tier`, which is only read: closed for ever. Slot `n`
    /// is page `n` modulo `pages`. One tier is so.
    pub fn only_read(&mut self, tier: TierId, pages: PageCount) {
        self.close(tier);
        self.engine.source = Some(Source::new(tier, pages.0));
    }

    /// The tier is used again.
    pub fn reopen(&mut self, tier: TierId) {
        self.engine.closed &= !(1 << tier.0);
    }

    /// Where copies of the closed `tier` should go: the next slower tier with room for many, or the
    /// one with most room. `None`: no tier has any.
    pub fn refuge_from(&self, tier: TierId) -> Option<TierId> {
        let ranks = &self.engine.ranks[..];
        let room = |rank: &usize| {
            let other = self.engine.ranked[*rank].page != self.engine.size_of(tier);
            if other || self.engine.is_closed(ranks[*rank]) {
                Bytes(0)
            } else {
                self.engine.ranked[*rank].headroom()
            }
        };
        let one = Bytes(self.engine.size_of(tier).bytes() as u64);
        let many = PageCount(DEMOTE_PAGES_MAX as u64).bytes().max(one);
        let below = self.engine.rank_of(tier)? + 1;
        let next = (below..ranks.len()).find(|rank| room(rank) >= many);
        let to = next.or_else(|| (0..ranks.len()).max_by_key(room))?;
        (room(&to) >= one).then_some(ranks[to])
    }

    /// Appends pages that are in `tier`, from number `from` on, those that are shared with fork
    /// relatives too: at most as many as move together. Second copies there of pages in memory are
    /// given up. Returns where to go on; `None` at the end. Pages that are on their way into memory
    /// or out of it are left out, so a caller begins again until nothing is left.
    ///
    /// Cost: O([`DRAIN_SCAN_MAX`]).
    pub fn select_all(
        &mut self,
        tier: TierId,
        from: PageNo,
        out: &mut Vec<DemoteItem>,
    ) -> Option<PageNo> {
        self.select_where(tier, from, |_, _| true, out)
    }

    /// As [`Migrations::select_all`], of the copies in these `slots` alone, to be stored in the
    /// same tier again. Appends none of a closed tier, and none that fork relatives share: they
    /// have one slot together.
    ///
    /// * `slots`: ascending, none twice.
    pub fn select_slots(
        &mut self,
        tier: TierId,
        slots: &[Range<Slot>],
        from: PageNo,
        out: &mut Vec<DemoteItem>,
    ) -> Option<PageNo> {
        if self.engine.is_closed(tier) {
            return None;
        }
        let is_named = |engine: &Engine<L>, slot: Slot| {
            let next = slots.partition_point(|range| range.end <= slot);
            let is_in = slots.get(next).is_some_and(|range| range.start <= slot);
            is_in && !engine.refs.contains_key(&(tier, slot))
        };
        self.select_where(tier, from, is_named, out)
    }

    fn select_where(
        &mut self,
        tier: TierId,
        from: PageNo,
        fits: impl Fn(&Engine<L>, Slot) -> bool,
        out: &mut Vec<DemoteItem>,
    ) -> Option<PageNo> {
        let (selected, end) = (self.engine.evictions, self.engine.table.end());
        let until = end.0.min(from.0.saturating_add(DRAIN_SCAN_MAX));
        let most = self.engine.size_of(tier).at_once(DEMOTE_PAGES_MAX);
        for no in (from.0..until).map(PageNo) {
            if out.len() >= most {
                self.count_selected(out);
                return Some(no);
            }
            let entry = self.engine.table.entry(no);
            let retained = entry.flags.has(Flags::RETAINED);
            if entry.tier != tier || !fits(self.engine, entry.slot) {
                continue;
            }
            if is_in(entry, tier) {
                out.push(DemoteItem {
                    no,
                    tier,
                    slot: entry.slot,
                    stamp: entry.stamp,
                    selected,
                });
            } else if retained && entry.state == PageState::Resident {
                let alone = Entry {
                    state: entry.state,
                    flags: entry.flags.without(Flags::RETAINED),
                    ..Entry::UNTOUCHED
                };
                self.engine.table.set(no, alone.that_left());
                self.engine.release(tier, entry.slot);
            }
        }
        self.count_selected(out);
        (until < end.0).then_some(PageNo(until))
    }

    /// Whether `tier` is faster than `other`. False if one of them is not in use.
    pub fn is_above(&self, tier: TierId, other: TierId) -> bool {
        let ranks = (self.engine.rank_of(tier), self.engine.rank_of(other));
        matches!(ranks, (Some(tier), Some(other)) if tier < other)
    }

    /// Whether a move goes up, and latency control keeps the client out of the buffer.
    pub(crate) fn spares(&self, from: TierId, to: TierId) -> bool {
        let first = self.engine.ranked.first().map(|first| first.latency);
        let spares = self.engine.turned.zip(first);
        let spares = spares.is_some_and(|(turned, first)| turned.spares_buffer(first));
        spares && self.is_above(to, from)
    }

    /// Size of the pages of the tier at this rank.
    fn size_at(&self, rank: TierId) -> Option<PageSize> {
        let state = self.engine.ranked.get(usize::from(rank.0));
        state.map(|tier| tier.page)
    }

    pub(crate) fn select_one(
        &self,
        no: PageNo,
        tier: TierId,
        selected: u64,
        out: &mut Vec<DemoteItem>,
    ) {
        let entry = self.engine.table.entry(no);
        if is_in(entry, tier) && !self.engine.refs.contains_key(&(tier, entry.slot)) {
            out.push(DemoteItem {
                no,
                tier,
                slot: entry.slot,
                stamp: entry.stamp,
                selected,
            });
        }
    }

    /// Later evictions get another stamp. A page may come back, change, and be evicted to the same
    /// slot before the move of its old bytes ends; the stamp tells the two copies apart.
    pub(crate) fn count_selected(&mut self, items: &[DemoteItem]) {
        if !items.is_empty() {
            self.engine.evictions = (self.engine.evictions + 1).next_multiple_of(STAMP_EVICTIONS);
        }
    }

    /// Appends up to `want` base pages, and at least one page, of those that have been longest in
    /// `tier`. They stay stored there, and loadable, until [`Migrations::demoted`]. Appends none
    /// when none is left, or when all that were scanned are shared with a fork relative.
    pub fn select(&mut self, tier: TierId, want: usize, out: &mut Vec<DemoteItem>) {
        let at = usize::from(tier.0);
        let want = self
            .engine
            .size_of(tier)
            .at_once(want.min(DEMOTE_PAGES_MAX));
        let selected = self.engine.evictions;
        let mut looks = self.engine.ages.len(at).min(DEMOTE_SCAN_MAX);
        while out.len() < want && looks > 0 {
            let Some(oldest) = self.engine.ages.pop(at) else {
                break;
            };
            looks -= 1;
            let Oldest::Page(no) = oldest else { continue };
            let entry = self.engine.table.entry(no);
            if !is_in(entry, tier) {
                continue;
            }
            if self.engine.refs.contains_key(&(tier, entry.slot)) {
                self.engine.remember_age(no, entry); // a fork relative shares it, which may end
                continue;
            }
            self.select_one(no, tier, selected, out);
        }
        self.count_selected(out);
    }

    /// The copy of `item` was written to `slot` of `to`, which may be the tier that it is in.
    /// Publishes it and frees the old slot. If the page is no longer at the old slot, frees the new
    /// one. So it does if the copy was under way for so long that another copy may have the same
    /// stamp.
    pub fn demoted(&mut self, item: DemoteItem, to: TierId, slot: Slot) {
        let entry = self.engine.table.entry(item.no);
        let late = self.engine.evictions.saturating_sub(item.selected) >= STAMPS_REPEAT;
        let same = still_there(entry, item.tier, item.stamp) && entry.slot == item.slot;
        // Out of a tier that is closed, each of the relatives gets a copy of its own.
        let shared = self.engine.refs.contains_key(&(item.tier, item.slot));
        let stays = shared && !self.engine.is_closed(item.tier);
        if late || !same || stays {
            self.engine.release(to, slot);
            return;
        }
        let moved = Entry {
            tier: to,
            slot,
            ..entry
        };
        self.engine.table.set(item.no, moved);
        self.engine.release(item.tier, item.slot);
        if to == item.tier {
            return; // its age there is known
        }
        self.engine.remember_age(item.no, moved);
        self.engine.stats.demoted += 1;
        self.engine.stats.lifted += u64::from(self.is_above(to, item.tier));
        if !self.engine.journals.is_empty() {
            let (space, page) = self.engine.table.address(item.no);
            self.engine
                .tell_placed(space, page, to, BookEvent::Migrated);
        }
    }

    /// The page could not be demoted. It counts as the newest now, so that others are tried first.
    /// Returns whether its copy is still where it was.
    pub fn failed(&mut self, item: DemoteItem) -> bool {
        let entry = self.engine.table.entry(item.no);
        let stays = still_there(entry, item.tier, item.stamp) && entry.slot == item.slot;
        if stays {
            self.engine.remember_age(item.no, entry);
        }
        stays
    }
}

impl<L: Ledger> Evictions<'_, L> {
    /// The tiers to offer an item of the batch to, in order: where the placement policy says, and
    /// as latency control bends that. The item needs a new copy.
    #[inline]
    pub fn tiers_for(&mut self, index: BatchIndex) -> TierOrder {
        let at = self.engine.batch.place(index);
        let page = self.engine.batch.page_of(at);
        let size = self.engine.batch.pages[at].item.size;
        let engine = &mut *self.engine;
        let order = match page {
            Some(no) => engine.order_of(no),
            None => TierOrder::downwards(engine.ranks.len()), // its number may be another page's
        };
        if engine.closed == 0 && engine.in_order && engine.table.large() == 0 {
            return engine.turned_order(order);
        }
        engine.turned_order(engine.open_to(size, order))
    }

    /// The tier whose copies of clean pages are left behind: its pages are stored in the buffer,
    /// because latency control has moved the client there.
    pub fn leaves_copies_in(&self) -> Option<TierId> {
        let last = *self.engine.ranks.last()?;
        let first = self.engine.ranked.first()?;
        let has_room = || first.headroom() >= BUFFER_ROOM_MIN;
        let behind = self.engine.turned?.leaves_copy_behind(has_room);
        behind.then_some(last)
    }
}

impl<L: Ledger> Engine<L> {
    /// The tiers to offer a page to: as the placement policy says, but first where a plugin wants
    /// it to go.
    #[inline]
    fn order_of(&mut self, no: PageNo) -> TierOrder {
        let order = self.place.order(no, &self.ranked);
        match self.places.take(no) {
            Some(rank) if usize::from(rank.0) < self.ranks.len() => {
                self.stats.placed += 1;
                order.led_by(rank)
            }
            _ => order,
        }
    }

    /// The tiers of `order`, ranks, that take pages of this size.
    fn open_to(&self, size: PageSize, order: TierOrder) -> TierOrder {
        let mut open = TierOrder::default();
        for rank in order.iter() {
            let tier = self.ranks.get(usize::from(rank.0)).copied();
            let takes = |tier: &TierId| !self.is_closed(*tier) && self.size_of(*tier) == size;
            if let Some(tier) = tier.filter(takes) {
                open.then(tier);
            }
        }
        open
    }

    /// Size of the pages of a tier's copies.
    pub(crate) fn size_of(&self, tier: TierId) -> PageSize {
        let state = self.tiers.get(usize::from(tier.0));
        state.map_or(PageSize::Base, |state| state.page)
    }

    /// `order`, as latency control bends it.
    #[inline]
    pub(crate) fn turned_order(&self, order: TierOrder) -> TierOrder {
        match (self.turned, self.ranked.first()) {
            (Some(turned), Some(first)) => turned.order(order, first.latency),
            _ => order,
        }
    }

    #[inline]
    pub(crate) fn remember_age(&mut self, no: PageNo, stored: Entry) {
        if self.has_age(stored) {
            self.remember_age_in(stored.tier.0 as usize, no, stored);
        }
    }

    /// Whether the age of a stored page matters: its tier demotes.
    #[inline]
    pub(crate) fn has_age(&self, stored: Entry) -> bool {
        let tier = stored.tier.0 as usize;
        stored.tier != TierId::FILL && self.config.demotes.get(tier).copied().unwrap_or(false)
    }

    #[inline(never)]
    fn remember_age_in(&mut self, tier: usize, no: PageNo, stored: Entry) {
        let table = &self.table;
        let is_there = |no| is_in(table.entry(no), stored.tier);
        self.ages.push(tier, no, is_there);
    }
}

fn is_in(entry: Entry, tier: TierId) -> bool {
    entry.state == PageState::Stored && entry.tier == tier
}

fn still_there(entry: Entry, tier: TierId, stamp: Stamp) -> bool {
    is_in(entry, tier) && entry.stamp == stamp
}
