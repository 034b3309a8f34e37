//! Changes of an address space by the program: drop, unmap, move, fork. The caller reports each
//! event in the kernel's order, while no page of the space can be installed.

use undercroft_base::{
    Entry, Flags, PageCount, PageNo, PageSize, PageState, Slot, SpaceId, TierId, VirtPage,
    VirtRange,
};
use undercroft_policy::mrc::What;

use crate::ledger::Ledger;
use crate::notes;
use crate::{BookEvent, Engine, Layout, LedgerFull};

/// Work of the caller after a layout event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// The event concerns a page of the batch in flight: the agent must move no more pages of this
    /// batch.
    pub cancel_batch: bool,
}

/// Every page of an address space.
pub const EVERYTHING: VirtRange = VirtRange {
    start: VirtPage(0),
    end: VirtPage(u64::MAX),
};

impl<L: Ledger> Layout<'_, L> {
    /// A new address space of the client, of base pages. As [`Layout::new_space`], for callers that
    /// have few.
    ///
    /// Panics: no number is free.
    pub fn add_space(&mut self) -> SpaceId {
        self.new_space(PageSize::Base, |_| false)
            .expect("a number that is free")
    }

    /// A new address space of the client, with pages of this size. Its number is that of no other
    /// space, of no page in flight and of no note, and was not in use for as long as possible.
    ///
    /// * `is_used`: the caller still knows something by this number.
    ///
    /// Errors: no number is free.
    pub fn new_space(
        &mut self,
        size: PageSize,
        is_used: impl Fn(SpaceId) -> bool,
    ) -> Result<SpaceId, LedgerFull> {
        self.engine.new_space(size, is_used)
    }

    /// A space for what is cut off from `space`: see [`Layout::bury`]. `None` while half of the
    /// numbers are in use: the rest is for processes.
    pub fn new_grave(&mut self, space: SpaceId) -> Option<SpaceId> {
        if self.engine.table.spaces_are_scarce() {
            return None;
        }
        let size = self.engine.table.size_in(space);
        self.new_space(size, |_| false).ok()
    }

    /// Locks the pages of `range`, so that they are never evicted, or unlocks them. Returns how
    /// many are not in memory now: the caller must bring those in, by touching them through the
    /// client.
    pub fn lock(&mut self, space: SpaceId, range: VirtRange, on: bool) -> PageCount {
        let mut absent = 0;
        for page in range.pages() {
            let Ok(no) = self.engine.table.find_or_add(space, page) else {
                continue;
            };
            let mut entry = self.engine.table.entry(no);
            absent += u64::from(matches!(
                entry.state,
                PageState::Stored | PageState::Evicting | PageState::Loading
            ));
            entry.flags = if on {
                entry.flags.with(Flags::LOCKED)
            } else {
                entry.flags.without(Flags::LOCKED)
            };
            self.engine.table.set(no, entry);
            if on {
                self.engine.hold_still(no);
            } else {
                self.engine.let_move(no);
            }
        }
        if on {
            self.engine.tell(BookEvent::Locked(space, range));
        }
        PageCount(absent)
    }

    /// The range is managed from now on.
    pub fn attached(&mut self, space: SpaceId, range: VirtRange) {
        self.engine.table.add_region(space, range);
    }

    /// The pages of `range`, of which the books know nothing, have their contents in `tier`: the
    /// first in `slot`, each next one in the next slot. No other page has one of these.
    ///
    /// Errors: the ledger has no room. The pages from there on stay unknown.
    pub fn provided(
        &mut self,
        space: SpaceId,
        range: VirtRange,
        tier: TierId,
        slot: Slot,
    ) -> Result<(), LedgerFull> {
        for (page, slot) in range.pages().zip((slot.0..).map(Slot)) {
            let no = self.engine.table.find_or_add(space, page)?;
            assert_eq!(self.engine.table.entry(no), Entry::UNTOUCHED);
            let provided = Entry {
                state: PageState::Stored,
                tier,
                slot,
                ..Entry::UNTOUCHED
            };
            self.engine.table.set(no, provided);
        }
        Ok(())
    }

    /// The program dropped the contents (`MADV_DONTNEED`, `FREE`, `REMOVE`): the pages read as
    /// zeros.
    pub fn removed(&mut self, space: SpaceId, range: VirtRange) -> Effect {
        let mut effect = Effect::default();
        for (_, no) in self.engine.table.known_pages(space, range) {
            effect.cancel_batch |= self.engine.drop_page(no);
        }
        self.engine.table.trim(space, range);
        self.engine.tell(BookEvent::Dropped(space, range));
        effect
    }

    /// The range is no longer managed. The caller drops its pages, by [`Layout::removed`] or
    /// [`Layout::bury`].
    pub fn detached(&mut self, space: SpaceId, range: VirtRange) {
        self.engine.kept.cut_aside(space, range);
        self.engine.table.cut_region(space, range);
    }

    /// As [`Layout::removed`], for large ranges. Whole chunks of `parts` are given to the space
    /// `grave`; nothing else is done to their pages. The caller drops these later, part by part,
    /// and then removes that space. Until then they count, and hold their slots.
    ///
    /// * `parts`: of [`BooksView::parts`](crate::BooksView::parts).
    ///
    /// Cost: O(parts); that of [`Layout::removed`] where a part is less than a chunk.
    pub fn bury(&mut self, space: SpaceId, parts: &[VirtRange], grave: SpaceId) -> Effect {
        let mut effect = Effect::default();
        // The batch names its pages by address, so its pages in the range must be dropped here. A
        // plan compares the place of its pages with that in the ledger, and finds that they are
        // gone: its load is upset.
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
            return effect;
        };
        let all = VirtRange::new(first.start, last.end);
        for no in self.engine.batch.numbers() {
            let (of, page) = self.engine.table.address(no);
            if of == space && all.contains(page) {
                effect.cancel_batch |= self.engine.drop_page(no);
            }
        }
        self.engine.take_back_all(space, all);
        for part in parts {
            if self.engine.table.give(space, *part, grave) {
                self.engine.upset_chunk();
                self.engine.tell(BookEvent::Dropped(space, *part))
            } else {
                effect.cancel_batch |= self.removed(space, *part).cancel_batch
            }
        }
        effect
    }

    /// The mapping is gone.
    pub fn unmapped(&mut self, space: SpaceId, range: VirtRange) -> Effect {
        self.detached(space, range);
        self.removed(space, range)
    }

    /// The mapping moved: its pages keep their contents at the new address. The earlier contents of
    /// that place are gone.
    ///
    /// Errors: the ledger has no room for the new place. The pages from there on are lost, and the
    /// caller must end the client.
    pub fn remapped(
        &mut self,
        space: SpaceId,
        from: VirtRange,
        to: VirtPage,
    ) -> Result<Effect, LedgerFull> {
        let new = VirtRange::new(to, to.plus(from.count().0));
        let effect = self.unmapped(space, new);
        let moved = self.remap_rest(space, from, to)?;
        Ok(Effect {
            cancel_batch: effect.cancel_batch | moved.cancel_batch,
        })
    }

    /// The second part of [`Layout::remapped`], after [`Layout::unmapped`] of the new place. A
    /// successor calls it when its predecessor died in that part: the pages that had moved stay,
    /// the rest follow.
    pub fn remap_rest(
        &mut self,
        space: SpaceId,
        from: VirtRange,
        to: VirtPage,
    ) -> Result<Effect, LedgerFull> {
        self.region_moved(space, from, to);
        self.remap_pages(space, from, to)
    }

    /// The mapping moved, as far as managed ranges go. Its pages follow by [`Layout::remap_pages`].
    pub fn region_moved(&mut self, space: SpaceId, from: VirtRange, to: VirtPage) {
        let new = VirtRange::new(to, to.plus(from.count().0));
        self.detached(space, from);
        self.engine.table.add_region(space, new);
    }

    /// Pages keep their contents at a new address. If a fault has begun to fill a page there
    /// meanwhile, that page is dropped.
    ///
    /// Errors: the ledger has no room for the new place. The pages from there on stay where they
    /// are: see [`BooksView::away`](crate::BooksView::away).
    pub fn remap_pages(
        &mut self,
        space: SpaceId,
        from: VirtRange,
        to: VirtPage,
    ) -> Result<Effect, LedgerFull> {
        let mut effect = Effect::default();
        for (page, no) in self.engine.table.known_pages(space, from) {
            let entry = self.engine.table.entry(no);
            if entry == Entry::UNTOUCHED {
                continue;
            }
            let target = to.plus(page.0 - from.start.0);
            let Ok(new_no) = self.engine.table.find_or_add(space, target) else {
                let before = VirtRange::new(from.start, page);
                self.engine.tell(BookEvent::Moved(space, before, to));
                return Err(LedgerFull);
            };
            if self.engine.table.entry(new_no) != Entry::UNTOUCHED {
                effect.cancel_batch |= self.engine.drop_page(new_no);
            }
            match entry.state {
                PageState::Resident if !entry.flags.has(Flags::INHERITED) => {
                    self.engine.renumber(no, new_no);
                }
                PageState::Evicting => {
                    self.engine.batch.rekey(no, new_no, target);
                    effect.cancel_batch = true;
                }
                _ => {}
            }
            let moved = match entry.state {
                PageState::Loading if is_zero(entry) => {
                    self.engine.upset(no);
                    Entry {
                        flags: entry.flags,
                        ..Entry::UNTOUCHED
                    }
                }
                // The plan has this reference and will drop it. The page at the new address needs
                // its own.
                PageState::Loading => {
                    self.engine.upset(no);
                    self.engine.share(entry.tier, entry.slot);
                    Entry {
                        state: PageState::Stored,
                        ..entry
                    }
                }
                _ => entry,
            };
            // The new entry is written first. A page that has two entries for a moment can be
            // recognised; one that has none cannot.
            self.engine
                .note_move(no, new_no, entry.state == PageState::Evicting);
            self.engine.departures.copy(no, new_no);
            self.engine.table.set(new_no, moved);
            self.engine.table.set(no, Entry::UNTOUCHED);
            self.engine.see(no, What::Gone);
            self.engine.see(new_no, What::New { pages: 1 });
            self.engine.forget_move();
            if moved.state == PageState::Stored {
                self.engine.remember_age(new_no, moved);
            }
        }
        self.engine.table.trim(space, from);
        self.engine.tell(BookEvent::Moved(space, from, to));
        Ok(effect)
    }

    /// The address space is gone (exit, exec). A caller that forgets its pages part by part says so
    /// first; [`Layout::remove_space`] ends that.
    pub fn ending(&mut self, space: SpaceId) {
        self.engine.tell(BookEvent::Ended(space));
    }

    /// The address space is gone (exit, exec).
    pub fn remove_space(&mut self, space: SpaceId) -> Effect {
        self.ending(space);
        let effect = self.unmapped(space, EVERYTHING);
        self.engine.table.remove_space(space);
        self.engine.waiters.retain(|(of, _)| *of != space);
        if let Some(source) = &mut self.engine.source {
            source.forget(space);
        }
        effect
    }
}

impl<L: Ledger> Engine<L> {
    pub(crate) fn new_space(
        &mut self,
        size: PageSize,
        is_used: impl Fn(SpaceId) -> bool,
    ) -> Result<SpaceId, LedgerFull> {
        let (batch, kept) = (&self.batch, &self.kept);
        let is_used = |ledger: &L, id: SpaceId| {
            let in_flight = batch.pages.iter().any(|page| page.item.space == id);
            in_flight || kept.spaces.contains(&id) || notes::name(ledger, id) || is_used(id)
        };
        self.table.new_space(size, is_used).ok_or(LedgerFull)
    }

    /// The next space has the number `next`; no space has `end` or more. For tests: they come to
    /// the last number soon, or run out of numbers.
    pub fn number_spaces(&mut self, next: u32, end: u32) {
        self.table.end_spaces_at(end);
        self.table.begin_spaces_at(next);
    }

    /// Forgets one page. True if it was in the batch in flight.
    pub(crate) fn drop_page(&mut self, no: PageNo) -> bool {
        let entry = self.table.entry(no);
        let retained = entry.flags.has(Flags::RETAINED);
        let inherited = entry.flags.has(Flags::INHERITED);
        let mut evicting = false;
        match entry.state {
            PageState::Untouched | PageState::Lost => {}
            PageState::Resident => {
                if !inherited {
                    self.uncount(no);
                    self.unlist(no);
                }
            }
            PageState::Evicting => {
                evicting = true;
                self.batch.kill(no);
                if !inherited {
                    self.uncount(no);
                }
            }
            PageState::Stored => self.release(entry.tier, entry.slot),
            // The plan has the reference to the slot, and drops it when it finishes.
            PageState::Loading => self.upset(no),
        }
        if retained {
            self.release(entry.tier, entry.slot);
        }
        self.table.set(no, Entry::UNTOUCHED);
        self.see(no, What::Gone);
        if evicting {
            self.note_dropped(no);
        }
        evicting
    }
}

/// Whether the page is being touched for the first time, or is as good as new. It may turn out to
/// be in memory already, so a copy of its entry must not say that it is stored.
pub(crate) fn is_zero(entry: Entry) -> bool {
    entry.tier == TierId::FILL && entry.slot == Slot(0)
}
