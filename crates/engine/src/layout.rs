//! What the program does to its address space: drop, unmap, move, fork. The caller reports each
//! event in the kernel's order, while no page of the space can be installed.

use undercroft_base::{
    Entry, Flags, PageNo, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange,
};
use undercroft_policy::reclaim::Arrival;

use crate::ledger::Ledger;
use crate::{Engine, LedgerFull};

/// What the caller must still do after a layout event.
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

impl<L: Ledger> Engine<L> {
    /// The range is managed from now on.
    pub fn attached(&mut self, space: SpaceId, range: VirtRange) {
        self.table.add_region(space, range);
    }

    /// The program dropped the contents (`MADV_DONTNEED`, `FREE`, `REMOVE`): the pages read as
    /// zeros.
    pub fn removed(&mut self, space: SpaceId, range: VirtRange) -> Effect {
        let mut effect = Effect::default();
        for (_, no) in self.table.known_pages(space, range) {
            effect.cancel_batch |= self.drop_page(no);
        }
        self.table.trim(space, range);
        effect
    }

    /// What of `range` is known, ascending, at most a chunk each (2 MiB of pages of 4 KiB). A
    /// caller that may not hold the engine for long gives these, one by one, to
    /// [`Engine::removed`], [`Engine::remap_pages`], [`Engine::inherit_range`] or
    /// [`Engine::bequeath`]. No page is looked at. O(chunks of the range, or of the space if
    /// fewer).
    pub fn parts(&self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        let stretches = self.table.stretches(space, range);
        stretches.into_iter().map(|part| part.pages).collect()
    }

    /// The range is no longer managed. The caller drops its pages, by [`Engine::removed`] or
    /// [`Engine::bury`].
    pub fn detached(&mut self, space: SpaceId, range: VirtRange) {
        self.table.cut_region(space, range);
    }

    /// As [`Engine::removed`], for large ranges: whole chunks of `parts` are given to the space
    /// `grave`, and nothing else is done to their pages. The caller drops these later, part by
    /// part, and then removes that space. Until then they count, and hold their slots.
    ///
    /// * `parts`: of [`Engine::parts`].
    ///
    /// Cost: O(parts); that of [`Engine::removed`] where a part is less than a chunk.
    pub fn bury(&mut self, space: SpaceId, parts: &[VirtRange], grave: SpaceId) -> Effect {
        let mut effect = Effect::default();
        // The batch names its pages by address, so what is in it has to be dropped here. A plan
        // compares the place of its pages with that in the ledger, and finds that they are gone.
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
            return effect;
        };
        let all = VirtRange::new(first.start, last.end);
        for no in self.batch.numbers() {
            let (of, page) = self.table.address(no);
            if of == space && all.contains(page) {
                effect.cancel_batch |= self.drop_page(no);
            }
        }
        for part in parts {
            if !self.table.give(space, *part, grave) {
                effect.cancel_batch |= self.removed(space, *part).cancel_batch;
            }
        }
        effect
    }

    /// The mapping is gone.
    pub fn unmapped(&mut self, space: SpaceId, range: VirtRange) -> Effect {
        self.table.cut_region(space, range);
        self.removed(space, range)
    }

    /// The mapping moved: its pages keep their contents at the new address. What was there before
    /// is gone.
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

    /// The second part of [`Engine::remapped`], after [`Engine::unmapped`] of the new place. A
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

    /// The mapping moved, as far as managed ranges go. Its pages follow by [`Engine::remap_pages`].
    pub fn region_moved(&mut self, space: SpaceId, from: VirtRange, to: VirtPage) {
        let new = VirtRange::new(to, to.plus(from.count().0));
        self.table.cut_region(space, from);
        self.table.add_region(space, new);
    }

    /// Pages keep their contents at a new address. What a fault has begun to fill there meanwhile
    /// is dropped.
    ///
    /// Errors: the ledger has no room for the new place. The pages from there on stay where they
    /// are: see [`Engine::keeps_nothing`].
    pub fn remap_pages(
        &mut self,
        space: SpaceId,
        from: VirtRange,
        to: VirtPage,
    ) -> Result<Effect, LedgerFull> {
        let mut effect = Effect::default();
        for (page, no) in self.table.known_pages(space, from) {
            let entry = self.table.entry(no);
            if entry == Entry::UNTOUCHED {
                continue;
            }
            let target = to.plus(page.0 - from.start.0);
            let new_no = self.table.find_or_add(space, target)?;
            if self.table.entry(new_no) != Entry::UNTOUCHED {
                effect.cancel_batch |= self.drop_page(new_no);
            }
            match entry.state {
                PageState::Resident if !entry.flags.has(Flags::INHERITED) => {
                    self.renumber(no, new_no);
                }
                PageState::Evicting => {
                    self.batch.rekey(no, new_no, target);
                    effect.cancel_batch = true;
                }
                _ => {}
            }
            let moved = match entry.state {
                PageState::Loading if is_zero(entry) => {
                    self.uncount();
                    Entry {
                        flags: entry.flags,
                        ..Entry::UNTOUCHED
                    }
                }
                // The plan has this reference and will drop it. The page at the new address needs
                // its own.
                PageState::Loading => {
                    self.uncount();
                    self.share(entry.tier, entry.slot);
                    Entry {
                        state: PageState::Stored,
                        ..entry
                    }
                }
                _ => entry,
            };
            // The new entry is written first. A page that has two entries for a moment can be
            // recognised; one that has none cannot.
            self.note_move(no, new_no, entry.state == PageState::Evicting);
            self.table.set(new_no, moved);
            self.table.set(no, Entry::UNTOUCHED);
            self.forget_move();
            if moved.state == PageState::Stored {
                self.remember_age(new_no, moved);
            }
        }
        self.table.trim(space, from);
        Ok(effect)
    }

    /// The client forked: the child has the parent's pages. The frames of resident pages are
    /// charged to the parent, until one of the two writes or evicts the page
    /// ([`Engine::own_frame`]). Stored copies are shared.
    ///
    /// * `wiped`: ranges marked `MADV_WIPEONFORK`, which the child sees as zeros. The caller unmaps
    ///   ranges marked `MADV_DONTFORK` in the child.
    ///
    /// Errors: the ledger is full. The child must be ended; the engine keeps nothing of it.
    pub fn forked(
        &mut self,
        parent: SpaceId,
        wiped: &[VirtRange],
    ) -> Result<(SpaceId, Effect), LedgerFull> {
        let child = self.begin_fork(parent);
        let mut effect = Effect::default();
        for part in self.parts(parent, EVERYTHING) {
            match self.inherit_range(parent, child, part, wiped) {
                Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
                Err(full) => {
                    self.remove_space(child);
                    return Err(full);
                }
            }
        }
        Ok((child, effect))
    }

    /// The child of a fork, with the managed ranges of its parent. Nothing is known of its pages:
    /// those of each part of [`Engine::parts`] follow by [`Engine::inherit_range`], before anything
    /// is installed in either.
    pub fn begin_fork(&mut self, parent: SpaceId) -> SpaceId {
        let child = self.table.add_space();
        for region in self.table.regions(parent).to_vec() {
            self.table.add_region(child, region);
        }
        child
    }

    /// Gives a fork child what its parent has in `range`.
    ///
    /// Errors: the ledger is full; see [`Engine::keeps_nothing`].
    pub fn inherit_range(
        &mut self,
        parent: SpaceId,
        child: SpaceId,
        range: VirtRange,
        wiped: &[VirtRange],
    ) -> Result<Effect, LedgerFull> {
        let mut effect = Effect::default();
        for (page, no) in self.table.known_pages(parent, range) {
            let entry = self.table.entry(no);
            let zeros = wiped.iter().any(|range| range.contains(page));
            if entry == Entry::UNTOUCHED || zeros {
                continue;
            }
            let copy = self.table.find_or_add(child, page)?;
            effect.cancel_batch |= self.copy_page(no, copy);
        }
        Ok(effect)
    }

    /// Whether every page of `range` is in memory or untouched, with no copy below that is needed.
    /// Where the books have no room for a fork child, or for a new place, it then reads right bytes
    /// all the same.
    pub fn keeps_nothing(&self, space: SpaceId, range: VirtRange) -> bool {
        self.table.known_pages(space, range).all(|(_, no)| {
            let entry = self.table.entry(no);
            match entry.state {
                PageState::Resident | PageState::Untouched => true,
                PageState::Loading => is_zero(entry),
                PageState::Evicting | PageState::Stored | PageState::Lost => false,
            }
        })
    }

    /// Gives an untouched page the state of `from`, as a fork does: see [`Engine::forked`]. For a
    /// caller that has several processes in one space, with their pages at different addresses.
    ///
    /// Errors: the ledger is full.
    pub fn inherit(
        &mut self,
        space: SpaceId,
        page: VirtPage,
        from: VirtPage,
    ) -> Result<(), LedgerFull> {
        let copy = self.table.find_or_add(space, page)?;
        if let Some(no) = self.table.find(space, from)
            && no != copy
            && self.table.entry(copy) == Entry::UNTOUCHED
        {
            self.copy_page(no, copy);
        }
        Ok(())
    }

    /// Gives `copy`, an untouched page, the state of the page `no`, as a fork does. True if `no` is
    /// in the batch in flight.
    fn copy_page(&mut self, no: PageNo, copy: PageNo) -> bool {
        let entry = self.table.entry(no);
        let flags = Flags(entry.flags.0 & Flags::LOCKED.0);
        let inherited = flags.with(Flags::INHERITED);
        let theirs = match entry.state {
            PageState::Untouched | PageState::Lost => Entry { flags, ..entry },
            PageState::Resident => Entry {
                state: PageState::Resident,
                flags: inherited,
                ..Entry::UNTOUCHED
            },
            PageState::Evicting => {
                if let Some(leader) = self.batch.follow(no, copy) {
                    self.note_follower(leader, copy);
                }
                match entry.flags.has(Flags::RETAINED) {
                    true => {
                        self.share(entry.tier, entry.slot);
                        Entry {
                            flags: inherited.with(Flags::RETAINED),
                            ..entry
                        }
                    }
                    false => Entry {
                        flags: inherited,
                        ..entry
                    },
                }
            }
            PageState::Loading if is_zero(entry) => Entry {
                flags,
                ..Entry::UNTOUCHED
            },
            PageState::Stored | PageState::Loading => {
                self.share(entry.tier, entry.slot);
                Entry {
                    state: PageState::Stored,
                    flags,
                    ..entry
                }
            }
        };
        self.table.set(copy, theirs);
        if theirs.state == PageState::Stored {
            // This copy may outlive the parent's, and is then the one to demote.
            self.remember_age(copy, theirs);
        }
        entry.state == PageState::Evicting
    }

    /// An inherited page has a frame of its own now, or is charged for the shared one. It counts,
    /// and may be evicted.
    pub fn own_frame(&mut self, space: SpaceId, page: VirtPage) {
        let Some(no) = self.table.find(space, page) else {
            return;
        };
        let entry = self.table.entry(no);
        if entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED) {
            let flags = entry.flags.without(Flags::INHERITED);
            self.table.set(no, Entry { flags, ..entry });
            self.count();
            self.reclaim.insert(no, Arrival::FirstTouch);
        }
    }

    /// Ranges of pages of `range` whose frames are charged to a relative. O(known pages of it).
    pub fn inherited(&self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        let mut ranges: Vec<VirtRange> = Vec::new();
        for (page, no) in self.table.known_pages(space, range) {
            let entry = self.table.entry(no);
            if entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED) {
                match ranges.last_mut() {
                    Some(last) if last.end == page => last.end = page.plus(1),
                    _ => ranges.push(VirtRange::new(page, page.plus(1))),
                }
            }
        }
        ranges
    }

    /// The address space is gone (exit, exec).
    pub fn remove_space(&mut self, space: SpaceId) -> Effect {
        let effect = self.unmapped(space, EVERYTHING);
        self.table.remove_space(space);
        self.waiters.retain(|(of, _)| *of != space);
        effect
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
                    self.uncount();
                    self.unlist(no);
                }
            }
            PageState::Evicting => {
                evicting = true;
                self.batch.kill(no);
                if !inherited {
                    self.uncount();
                }
            }
            PageState::Stored => self.release(entry.tier, entry.slot),
            // The plan has the reference to the slot, and drops it when it finishes.
            PageState::Loading => self.uncount(),
        }
        if retained {
            self.release(entry.tier, entry.slot);
        }
        self.table.set(no, Entry::UNTOUCHED);
        if evicting {
            self.note_dropped(no);
        }
        evicting
    }

    /// The number of a page that has an entry. For tests.
    #[doc(hidden)]
    pub fn page_no(&self, space: SpaceId, page: VirtPage) -> Option<PageNo> {
        self.table.find(space, page)
    }
}

/// Whether the page is being touched for the first time, or is as good as new. It may turn out to
/// be in memory already, so a copy of its entry must not say that it is stored.
pub(crate) fn is_zero(entry: Entry) -> bool {
    entry.tier == TierId::FILL && entry.slot == Slot(0)
}
