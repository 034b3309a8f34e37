//! The eviction path: choose a batch, learn what could be taken, publish where each page went.
//!
//! Several batches may be in flight. At most two have pages of one address space, each a half of
//! what its agent can hold. Their pages are `Evicting`. Layout changes find them here, and mark
//! them dead or give them their new address. So bytes in the evictor's hands never come back for
//! the wrong page.

use undercroft_base::{
    Entry, Flags, PageCount, PageNo, PageState, Slot, SpaceId, Stamp, TierId, VirtPage, VirtRange,
};
use undercroft_policy::place::{Event, Leaving};
use undercroft_policy::reclaim::{Arrival, Verdict};

use crate::batch::{BatchIndex, EvictItem, HALF_PAGES, InFlight, Outcome, Taken};
use crate::ledger::Ledger;
use crate::ledger::{ChunkHead, SPACE_BITS};
use crate::limits::{EVICT_PAGES_MAX, RECENT_PAGES, SELECT_SCAN_MAX};
use crate::page_table::PageTable;
use crate::wished::Links;
use crate::{BookEvent, Engine, Evictions, PageEvent, Room, notes};

impl<L: Ledger> Evictions<'_, L> {
    /// Starts a batch of up to `want` base pages, sorted by space and address. Pages that come
    /// together stand together, so that they are stored so. A large page ends
    /// it, and may be beyond that. False when there is none. Beside a batch in flight it has at
    /// most [`HALF_PAGES`]. The pages are `Evicting` from now on.
    ///
    /// A successor finds the pages of up to [`GROUPS`](crate::GROUPS) batches and groups set aside.
    /// A page of a further one is lost if the successor finds it absent.
    #[inline(always)] // on the eviction path
    pub fn select(&mut self, want: usize, out: &mut Vec<EvictItem>) -> bool {
        self.select_ahead(&mut Vec::new(), want, out)
    }

    /// As [`Evictions::select`], but pages of `wishes` leave first: those that could have been
    /// chosen, too. The policy chooses the rest of the batch. The numbers may be of no space and
    /// no page. Wishes that the batch had no room for are left.
    #[inline(always)] // on the eviction path
    pub fn select_ahead(
        &mut self,
        wishes: &mut Vec<(SpaceId, VirtPage)>,
        want: usize,
        out: &mut Vec<EvictItem>,
    ) -> bool {
        self.engine.victims.clear();
        self.engine.take_back_refused(false);
        // Fewer are protected when nothing else can leave and there is no room. Otherwise threads
        // could wait for ever: under a small limit, beside a large pool or many locked pages, all
        // pages that may leave can be recent.
        let mut protected = self.engine.protected();
        if !wishes.is_empty() {
            self.engine.name_wished(wishes, want, protected);
        }
        if self.engine.links.is_any() && self.engine.table.large() == 0 {
            self.engine.name_together(want, protected);
        }
        self.engine.name_victims(want, protected);
        while self.engine.victims.is_empty() && protected > 0 && self.engine.books().is_full() {
            protected /= 2;
            self.engine.name_victims(want, protected);
        }
        // What was refused is tried before its time when nothing else can leave.
        if self.engine.victims.is_empty()
            && self.engine.books().is_full()
            && self.engine.take_back_refused(true)
        {
            self.engine.name_victims(want, 0);
        }
        self.engine.start_batch(out)
    }

    /// As [`Evictions::select_ahead`], but no other page leaves. False if none of these may.
    pub fn select_wished(
        &mut self,
        wishes: &mut Vec<(SpaceId, VirtPage)>,
        want: usize,
        out: &mut Vec<EvictItem>,
    ) -> bool {
        self.engine.victims.clear();
        let protected = self.engine.protected();
        self.engine.name_wished(wishes, want, protected);
        self.engine.start_batch(out)
    }

    /// Whether a page that a plugin has named could be chosen now. The numbers may be of no space
    /// and no page.
    pub fn may_leave(&self, space: SpaceId, page: VirtPage) -> bool {
        let protected = self.engine.protected();
        self.engine.find_wished(space, page, protected).is_some()
    }

    /// As [`Evictions::select`], but the caller names the victims: up to a batch of evictable pages
    /// of `ranges`, in order. Ranges may overlap. It is for pages that should leave first. Those
    /// are zero pages that were mapped ahead and never written, and pages whose frame is shared
    /// with a relative's page that has left. Such a frame is freed only when they leave too.
    pub fn select_these(
        &mut self,
        space: SpaceId,
        ranges: &[VirtRange],
        out: &mut Vec<EvictItem>,
    ) -> bool {
        self.engine.victims.clear();
        let (_, room) = self.engine.batch.places_for(space);
        if self.engine.kept.spaces.contains(&space) || room == 0 {
            out.clear();
            return false;
        }
        let most = self.engine.table.size_in(space).at_once(room);
        for page in ranges.iter().flat_map(|range| range.pages()) {
            if self.engine.victims.len() == most {
                break;
            }
            let Some(no) = self.engine.table.find(space, page) else {
                continue;
            };
            let entry = self.engine.table.entry(no);
            let counted = entry.state == PageState::Resident
                && !entry.flags.has(Flags::LOCKED)
                && !entry.flags.has(Flags::INHERITED);
            if counted
                && !self.engine.recent.holds(no, RECENT_PAGES)
                && !self.engine.victims.contains(&no)
            {
                self.engine.unlist(no);
                self.engine.victims.push(no);
            }
        }
        self.engine.start_batch(out)
    }

    /// Sets a group of the batch aside, all of one address space: their process has not answered
    /// which of them it moved. They stay `Evicting` beside later batches, and are settled or
    /// published by the indices that `group` has afterwards. No page of their space is chosen until
    /// [`Evictions::pass_over`] ends that.
    pub fn set_aside(&mut self, group: &mut [EvictItem]) {
        let Some(first) = group.first().copied() else {
            return;
        };
        let base = self.engine.batch.begin();
        let start = self.engine.batch.place(first.at);
        for (of, item) in group.iter_mut().enumerate() {
            let (at, to) = (self.engine.batch.place(item.at), base + of);
            debug_assert_eq!(at, start + of, "a group is a piece of the batch");
            self.engine.move_note(at, to);
            let page = std::mem::replace(&mut self.engine.batch.pages[at], InFlight::NONE);
            self.engine.batch.put(to, page);
            item.at = self.engine.batch.index(to);
            self.engine.batch.pages[to].item.at = item.at;
        }
        for (leader, _) in &mut self.engine.batch.followers {
            if (start..start + group.len()).contains(leader) {
                *leader = base + *leader - start;
            }
        }
        self.pass_over(first.space, true);
    }

    /// Which of `items` are still worth storing, that is, still in use by a process. Bit i: item i
    /// of the slice.
    pub fn alive_mask(&self, items: &[EvictItem]) -> u64 {
        self.engine
            .mask(items, |place| self.engine.batch.is_alive(place))
    }

    /// Which of `items` a thread waits for. The caller puts those back first. A page that a fork
    /// child shares is stored instead, and each process loads it. Bit i: item i of the slice.
    pub fn wanted_mask(&self, items: &[EvictItem]) -> u64 {
        self.engine
            .mask(items, |place| self.engine.batch.is_wanted(place))
    }

    /// Whether an item is still to be evicted, and still mapped at `page`. The caller asks right
    /// before it takes the page, with no layout event between.
    pub fn is_at(&self, index: BatchIndex, page: VirtPage) -> bool {
        let in_flight = &self.engine.batch.pages[self.engine.batch.place(index)];
        !in_flight.dead && !in_flight.settled && in_flight.item.page == page
    }

    /// Appends where an item has to be put back: its place now, which may have changed since it was
    /// selected, and those of fork children. Nothing when every process dropped it.
    pub fn places_of(&self, index: BatchIndex, out: &mut Vec<(SpaceId, VirtPage)>) {
        self.engine.add_places(self.engine.batch.place(index), out);
    }

    /// Reports whether an item could be taken. If it was not `Moved`, the item ends here: it is
    /// resident again. Appends to `wake` where threads wait.
    #[inline]
    pub fn settle(&mut self, index: BatchIndex, taken: Taken, wake: &mut Vec<(SpaceId, VirtPage)>) {
        if taken != Taken::Moved {
            self.engine
                .settle_here(self.engine.batch.place(index), taken, wake);
        }
    }

    /// [`Evictions::publish`] for each of several items.
    pub fn publish_all(
        &mut self,
        items: &[(BatchIndex, Outcome)],
        wake: &mut Vec<(SpaceId, VirtPage)>,
    ) {
        for (index, outcome) in items {
            self.publish(*index, *outcome, wake);
        }
    }

    /// Takes the copy that a tier keeps of item `index`, so that it can be changed in place: the
    /// caller owns its slot from now on, and the page has no copy. The caller publishes the page as
    /// stored in that slot, or frees it. `None`: there is no copy, others refer to it as well, or
    /// its tier is closed; nothing is changed.
    pub fn take_retained(&mut self, index: BatchIndex) -> Option<(TierId, Slot)> {
        let at = self.engine.batch.place(index);
        let page = &self.engine.batch.pages[at];
        let no = page.item.no;
        let alone = !page.dead && self.engine.batch.followers.iter().all(|(of, _)| *of != at);
        let entry = self.engine.table.entry(no);
        let (tier, slot) = (entry.tier, entry.slot);
        let owns = alone
            && entry.flags.has(Flags::RETAINED)
            && tier != TierId::FILL
            && !self.engine.is_closed(tier)
            && !self.engine.refs.contains_key(&(tier, slot));
        if !owns {
            return None;
        }
        let without = Entry {
            state: entry.state,
            flags: entry.flags.without(Flags::RETAINED),
            ..Entry::UNTOUCHED
        };
        let left = entry.has_left();
        (self.engine.table).set(no, if left { without.that_left() } else { without });
        Some((tier, slot))
    }

    /// Publishes where an item that was `Moved` went. The old copy may be freed after this.
    /// `PutBack`: the caller has installed the bytes at every place of [`Evictions::places_of`].
    /// Appends to `wake` where threads wait.
    #[inline(always)] // on the eviction path
    pub fn publish(
        &mut self,
        index: BatchIndex,
        outcome: Outcome,
        wake: &mut Vec<(SpaceId, VirtPage)>,
    ) {
        let at = self.engine.batch.place(index);
        let page = &mut self.engine.batch.pages[at];
        assert!(!page.settled, "an evicted page is published once");
        page.settled = true;
        let (dead, no, stamp) = (page.dead, page.item.no, page.item.stamp);
        let (moved, place) = (page.moved, (page.item.space, page.item.page));
        let heir = page.heir;
        if page.wanted {
            self.engine.add_places(at, wake);
        }
        let mut claims = 0;
        if !dead {
            claims += u32::from(self.engine.publish_one(no, stamp, outcome));
            match outcome {
                Outcome::PutBack => {
                    let what = if moved {
                        PageEvent::Stayed
                    } else {
                        PageEvent::PutBack
                    };
                    self.engine.tell_page(place.0, place.1, what);
                    self.engine.put_back(at);
                }
                Outcome::Lost => self.engine.uncount(no),
                _ => {
                    self.engine.uncount(no);
                    self.engine.stats.pages_swapped_out += 1;
                    self.engine.stats.base_pages_freed += self.engine.table.base_pages(no);
                    if let Outcome::Stored(tier, _) = outcome
                        && !self.engine.journals.is_empty()
                    {
                        (self.engine).tell_placed(place.0, place.1, tier, BookEvent::Stored);
                    }
                    if outcome == Outcome::Clean && !moved {
                        self.engine
                            .tell_page(place.0, place.1, PageEvent::LeftClean);
                    }
                }
            }
        }
        if !self.engine.batch.followers.is_empty() {
            claims += self.engine.publish_followers(at, stamp, outcome);
        }
        if let Outcome::Stored(tier, slot) = outcome {
            match claims {
                0 => self.engine.release(tier, slot),
                1 => {}
                more => _ = self.engine.refs.insert((tier, slot), more),
            }
        }
        if let (Some((space, heir)), false) = (heir, dead) {
            self.engine
                .retain_for(space, heir, self.engine.table.entry(no));
        }
        self.engine.forget_note(at);
    }
}

/// Sorts victims by space, and those of one space so that pages that come together stand together:
/// in the order in which their first was chosen, each by address.
#[inline(never)]
fn order_linked<L: Ledger>(victims: &mut [PageNo], links: &Links, table: &PageTable<L>) {
    let groups: Vec<PageNo> = victims.iter().map(|no| links.group(*no)).collect();
    let chosen = |group: PageNo| groups.iter().position(|of| *of == group);
    let keys = victims.iter().zip(&groups).map(|(no, group)| {
        let (space, page) = table.address(*no);
        (space, chosen(*group), page, *no)
    });
    let mut keys: Vec<_> = keys.collect();
    keys.sort_unstable();
    (victims.iter_mut().zip(keys)).for_each(|(no, key)| *no = key.3);
}

impl<L: Ledger> Engine<L> {
    /// Makes the victims the batch. The policy has already forgotten them.
    #[inline(always)] // on the eviction path
    fn start_batch(&mut self, out: &mut Vec<EvictItem>) -> bool {
        out.clear();
        let base = self.batch.begin();
        let stamp = self.stamp();
        let table = &mut self.table;
        if self.links.is_any() {
            order_linked(&mut self.victims, &self.links, table);
        } else if self.victims.len() > 1 {
            self.victims.sort_unstable_by_key(|no| table.address(*no));
        }
        // Counted here, not when published: the refault distance must not depend on how long
        // storing takes.
        self.evictions += self.victims.len() as u64;
        let (mut of, mut place) = (None, 0);
        for (at, &no) in self.victims.iter().enumerate() {
            let entry = table.entry(no);
            let (space, page) = table.address(no);
            if of != Some(space) {
                (of, place) = (Some(space), self.batch.places_for(space).0);
            }
            let at = base + at;
            notes::note_item(table.ledger(), at, space, place, no);
            table.set_state(no, PageState::Evicting);
            let retained = if entry.flags.has(Flags::RETAINED) {
                Some((entry.tier, entry.slot, entry.stamp))
            } else {
                None
            };
            let item = EvictItem {
                at: self.batch.index(at),
                no,
                space,
                page,
                place: place as u8,
                size: table.size(no),
                stamp,
                retained,
            };
            place += 1;
            let page = InFlight {
                item,
                dead: false,
                wanted: false,
                settled: false,
                moved: false,
                heir: None,
            };
            self.batch.put(at, page);
            out.push(item);
        }
        if !self.journals.is_empty() {
            self.tell_batch(out);
        }
        if self.links_pages {
            self.tell_leaving(out);
        }
        !out.is_empty()
    }

    /// Tells the placement policy which pages leave together.
    #[inline(never)]
    fn tell_leaving(&mut self, items: &[EvictItem]) {
        let leaving: Vec<Leaving> = (items.iter())
            .map(|item| Leaving {
                no: item.no,
                unused: self.table.entry(item.no).flags.has(Flags::PREFETCHED),
            })
            .collect();
        let event = Event::Leaving(&leaving, &self.ranked);
        self.place.heard(event);
    }

    #[inline(never)]
    fn tell_batch(&mut self, items: &[EvictItem]) {
        if !items.is_empty() {
            self.tell(BookEvent::BatchBegan);
        }
        for item in items {
            self.tell_page(item.space, item.page, PageEvent::Chosen);
        }
    }

    /// Has the policy name victims. None is locked, of the newest `protected` pages, or of a space
    /// whose agent holds as many as it can.
    fn name_victims(&mut self, want: usize, protected: usize) {
        let kept = &self.kept.spaces;
        let mut busy = self.batch.spaces();
        busy.retain(|space| !kept.contains(space) && self.batch.places_for(*space).1 == 0);
        let most = self.most_at_once();
        let Engine {
            table,
            recent,
            reclaim,
            victims,
            ..
        } = self;
        let mut verdict = |no: PageNo| {
            let entry = table.entry(no);
            debug_assert_eq!(entry.state, PageState::Resident);
            let is_busy = || busy.contains(&table.address(no).0);
            if entry.flags.has(Flags::LOCKED)
                || recent.holds(no, protected)
                || !busy.is_empty() && is_busy()
            {
                Verdict::Skip
            } else {
                Verdict::Take
            }
        };
        let named: u64 = victims.iter().map(|no| table.base_pages(*no)).sum();
        let want = want.min(most).saturating_sub(named as usize);
        if table.large() == 0 {
            reclaim.select(want, SELECT_SCAN_MAX, &mut verdict, victims);
        } else {
            let mut missing = want;
            while missing > 0 {
                let count = victims.len();
                reclaim.select(1, SELECT_SCAN_MAX, &mut verdict, victims);
                let Some(no) = victims.get(count) else { break };
                missing = missing.saturating_sub(table.base_pages(*no) as usize);
            }
        }
        self.keep_victims();
    }

    /// A page that a plugin has named. `None`: there is none of these numbers.
    pub(crate) fn find_named(&self, space: SpaceId, page: VirtPage) -> Option<PageNo> {
        let chunk = page.0 / u64::from(undercroft_base::CHUNK_PAGES);
        if space.0 >= 1 << SPACE_BITS || chunk >= ChunkHead::POSITIONS {
            return None; // the ledger has no such numbers
        }
        self.table.find(space, page)
    }

    /// Pages that came last, and stay: at most half of the resident ones.
    fn protected(&self) -> usize {
        match self.config.room {
            Room::Ahead => (self.resident / 2).min(RECENT_PAGES as u64) as usize,
            Room::AfterPlan => 0,
        }
    }

    /// A page that a plugin has named, if the policy could name it: it is not locked, not of the
    /// newest `protected`, not refused a while ago, and not of a space whose agent holds as many as
    /// it can.
    fn find_wished(&self, space: SpaceId, page: VirtPage, protected: usize) -> Option<PageNo> {
        let no = self.find_named(space, page)?;
        self.may_be_named(no, space, protected).then_some(no)
    }

    fn may_be_named(&self, no: PageNo, space: SpaceId, protected: usize) -> bool {
        let entry = self.table.entry(no);
        entry.state == PageState::Resident
            && !entry.flags.has(Flags::LOCKED)
            && !entry.flags.has(Flags::INHERITED)
            && self.is_listed(no)
            && !self.recent.holds(no, protected)
            && !self.kept.spaces.contains(&space)
            && self.batch.places_for(space).1 > 0
    }

    /// Makes pages that come together victims together, up to `want`: after each that the policy
    /// names, those that come with it. If there is no room for all of them, the next batch begins
    /// with the others. So they are stored side by side.
    #[inline(never)]
    fn name_together(&mut self, want: usize, protected: usize) {
        let want = want.min(self.most_at_once());
        let mut linked = Vec::new();
        let mut first = self.links.begun.take();
        loop {
            linked.clear();
            first
                .iter()
                .for_each(|no| self.links.append(*no, &mut linked));
            for other in &linked {
                // What was linked may have been dropped since.
                let space = self.table.address_if_used(*other).map(|address| address.0);
                let may_leave = |space| self.may_be_named(*other, space, protected);
                if space.is_some_and(may_leave) && !self.victims.contains(other) {
                    if self.victims.len() == want {
                        self.links.begun = first;
                        return;
                    }
                    self.reclaim.remove(*other);
                    self.victims.push(*other);
                }
            }
            let count = self.victims.len();
            if count >= want {
                return;
            }
            self.name_victims(count + 1, protected);
            first = self.victims.get(count).copied();
            if first.is_none() {
                return;
            }
        }
    }

    /// Base pages of a batch that begins now, at most.
    fn most_at_once(&self) -> usize {
        if self.batch.is_any() {
            HALF_PAGES
        } else {
            EVICT_PAGES_MAX
        }
    }

    /// Makes those of `wishes` the victims that the policy could have named: up to `want` base
    /// pages. What was looked at is wished no more.
    #[inline(never)]
    fn name_wished(
        &mut self,
        wishes: &mut Vec<(SpaceId, VirtPage)>,
        want: usize,
        protected: usize,
    ) {
        let mut missing = want.min(self.most_at_once()) as u64;
        let mut looked = 0;
        while missing > 0
            && let Some(&(space, page)) = wishes.get(looked)
        {
            looked += 1;
            if let Some(no) = self.find_wished(space, page, protected)
                && !self.victims.contains(&no)
            {
                self.reclaim.remove(no);
                self.victims.push(no);
                self.stats.wished += 1;
                missing = missing.saturating_sub(self.table.base_pages(no));
            }
        }
        wishes.drain(..looked);
    }

    #[inline]
    fn mask(&self, items: &[EvictItem], holds: impl Fn(usize) -> bool) -> u64 {
        let bit =
            |(at, item): (usize, &EvictItem)| u64::from(holds(self.batch.place(item.at))) << at;
        items.iter().enumerate().map(bit).sum()
    }

    fn add_places(&self, at: usize, out: &mut Vec<(SpaceId, VirtPage)>) {
        let page = &self.batch.pages[at];
        if !page.dead {
            out.push((page.item.space, page.item.page));
        }
        for (leader, child) in &self.batch.followers {
            if *leader == at {
                out.push(self.table.address(*child));
            }
        }
    }

    fn settle_here(&mut self, at: usize, taken: Taken, wake: &mut Vec<(SpaceId, VirtPage)>) {
        self.stats.refused_busy += u64::from(taken == Taken::Busy);
        if self.batch.pages[at].wanted {
            self.add_places(at, wake);
        }
        while let Some(child) = self.take_follower(at) {
            // The page was there at the fork, so the child has the frame too.
            let entry = self.table.entry(child);
            if entry.flags.has(Flags::RETAINED) {
                self.release(entry.tier, entry.slot);
            }
            let flags = entry.flags.without(Flags::RETAINED);
            let stays = Entry {
                state: PageState::Resident,
                flags,
                ..Entry::UNTOUCHED
            };
            let left = entry.has_left() || taken == Taken::Unsure;
            (self.table).set(child, if left { stays.that_left() } else { stays });
        }
        let InFlight { dead, item, .. } = self.batch.pages[at];
        if !dead {
            self.tell_page(item.space, item.page, PageEvent::Stayed);
            match taken {
                Taken::Unsure => self.back_to_resident(at, Arrival::Returned),
                Taken::Busy => {
                    self.stay_resident(at, Arrival::Returned);
                    self.keep_refused(item.no);
                }
                _ => self.stay_resident(at, Arrival::Returned),
            }
        }
        self.batch.pages[at].settled = true;
        self.forget_note(at);
    }

    /// Item `at` was put back: it is resident again. If a thread waited for it, it is not cold.
    #[inline(never)]
    fn put_back(&mut self, at: usize) {
        let wanted = self.batch.pages[at].wanted;
        if wanted {
            self.stats.recalled += 1
        } else {
            self.stats.refused_store += 1
        }
        let distance = PageCount(0);
        let arrival = if wanted {
            Arrival::SwapIn { distance }
        } else {
            Arrival::Returned
        };
        self.back_to_resident(at, arrival);
    }

    /// Publishes the pages of fork children that share item `at`. Returns how many references to
    /// the new slot they took.
    #[inline(never)]
    fn publish_followers(&mut self, at: usize, stamp: Stamp, outcome: Outcome) -> u32 {
        let mut claims = 0;
        while let Some(child) = self.take_follower(at) {
            claims += u32::from(self.publish_one(child, stamp, outcome));
            if outcome == Outcome::PutBack {
                // The child's reference to the copy below, if any, stays retained too.
                let entry = self.table.entry(child);
                let flags = entry.flags.without(Flags::INHERITED);
                self.table.set(
                    child,
                    Entry {
                        state: PageState::Resident,
                        flags,
                        ..entry
                    }
                    .that_left(),
                );
                self.count(child);
                let (space, page) = self.table.address(child);
                self.tell_page(space, page, PageEvent::Found);
                self.reclaim.insert(child, Arrival::Returned);
            }
        }
        claims
    }

    /// Gives one page of the batch its stored entry. True when the entry refers to the new slot.
    /// Drops the reference to the retained copy, unless that copy is what is used now.
    #[inline(always)] // on the eviction path
    fn publish_one(&mut self, no: PageNo, stamp: Stamp, outcome: Outcome) -> bool {
        let entry = self.table.entry(no);
        assert_eq!(
            entry.state,
            PageState::Evicting,
            "a page of the batch changed state outside it"
        );
        let retained = entry.flags.has(Flags::RETAINED);
        let flags = Flags(entry.flags.0 & Flags::LOCKED.0);
        let stored = |tier, slot| Entry {
            state: PageState::Stored,
            flags,
            tier,
            slot,
            stamp,
        };
        let new = match outcome {
            Outcome::PutBack => return false, // the copy below, if any, stays retained
            Outcome::Clean => {
                assert!(retained, "a clean page has a copy below");
                self.stats.clean_dropped += 1;
                Entry {
                    state: PageState::Stored,
                    flags,
                    ..entry
                }
            }
            Outcome::Fill(word) => {
                self.stats.same_filled += 1;
                stored(TierId::FILL, Slot(u64::from(word)))
            }
            Outcome::Stored(tier, slot) => stored(tier, slot),
            Outcome::Lost => {
                self.stats.lost += 1;
                Entry {
                    state: PageState::Lost,
                    ..Entry::UNTOUCHED
                }
            }
        };
        if retained && outcome != Outcome::Clean {
            self.release(entry.tier, entry.slot);
        }
        self.table.set(no, new);
        self.forget_refusal(no);
        if outcome == Outcome::Clean {
            self.departures.left_clean(no, stamp);
        } else {
            self.departures.left_with_copy(no);
        }
        if outcome != Outcome::Lost {
            self.remember_age(no, new);
        }
        matches!(outcome, Outcome::Stored(..))
    }

    fn take_follower(&mut self, at: usize) -> Option<PageNo> {
        let found = self
            .batch
            .followers
            .iter()
            .position(|(leader, _)| *leader == at)?;
        Some(self.batch.followers.swap_remove(found).1)
    }

    /// Item `at`, which was out, or may have been, is resident again.
    pub(crate) fn back_to_resident(&mut self, at: usize, arrival: Arrival) {
        self.stay_resident(at, arrival);
        let no = self.batch.pages[at].item.no;
        self.table.set(no, self.table.entry(no).that_left());
    }

    /// Item `at` is resident, as it was before it was chosen.
    fn stay_resident(&mut self, at: usize, arrival: Arrival) {
        let no = self.batch.pages[at].item.no;
        let entry = self.table.entry(no);
        assert_eq!(
            entry.state,
            PageState::Evicting,
            "a page of the batch changed state outside it"
        );
        self.table.set_state(no, PageState::Resident);
        self.reclaim.insert(no, arrival);
        self.recent.push(no);
    }
}
