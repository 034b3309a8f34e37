//! A fork: the child has what its parent has. Stored copies are shared by count, and the frames of
//! resident pages are charged to the parent. What happens to those frames later is in `cow.rs`.

use undercroft_base::{Entry, Flags, PageNo, PageState, SpaceId, VirtPage, VirtRange};

use crate::layout::is_zero;
use crate::ledger::Ledger;
use crate::{BookEvent, EVERYTHING, Effect, Engine, Forks, LedgerFull};

impl<L: Ledger> Forks<'_, L> {
    /// The client forked: the child has the parent's pages. The frames of resident pages are
    /// charged to the parent, until one of the two writes or evicts the page
    /// ([`Forks::own_frame`]). Stored copies are shared.
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
        let child = self.begin_fork(parent)?;
        let mut effect = Effect::default();
        for part in self.engine.books().parts(parent, EVERYTHING) {
            match self.inherit_range(parent, child, part, wiped) {
                Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
                Err(full) => {
                    self.engine.layout().remove_space(child);
                    return Err(full);
                }
            }
        }
        self.end_fork(parent, child);
        for range in wiped {
            self.engine.tell(BookEvent::Dropped(child, *range));
        }
        Ok((child, effect))
    }

    /// All parts of the parent were inherited, or are unmanaged in the child.
    pub fn end_fork(&mut self, parent: SpaceId, child: SpaceId) {
        self.engine.tell(BookEvent::Forked { parent, child });
    }

    /// The child of a fork, with the managed ranges of its parent. Nothing is known of its pages:
    /// those of each part of [`BooksView::parts`](crate::BooksView::parts) follow by
    /// [`Forks::inherit_range`], before anything is installed in either.
    ///
    /// Errors: no number is free for it.
    pub fn begin_fork(&mut self, parent: SpaceId) -> Result<SpaceId, LedgerFull> {
        let size = self.engine.table.size_in(parent);
        let child = self.engine.new_space(size, |_| false)?;
        let regions = self.engine.table.regions(parent).to_vec();
        self.engine.table.set_regions(child, regions);
        Ok(child)
    }

    /// Gives a fork child what its parent has in `range`.
    ///
    /// Errors: the ledger is full. Pages of `range` that are [`away`](crate::BooksView::away) in
    /// the parent may not be in the child's books.
    pub fn inherit_range(
        &mut self,
        parent: SpaceId,
        child: SpaceId,
        range: VirtRange,
        wiped: &[VirtRange],
    ) -> Result<Effect, LedgerFull> {
        let mut effect = Effect::default();
        for (page, no) in self.engine.table.known_pages(parent, range) {
            let entry = self.engine.table.entry(no);
            let zeros = wiped.iter().any(|range| range.contains(page));
            if entry == Entry::UNTOUCHED || zeros {
                continue;
            }
            let copy = self.engine.table.find_or_add(child, page)?;
            effect.cancel_batch |= self.engine.copy_page(no, copy);
        }
        Ok(effect)
    }

    /// Gives an untouched page the state of `from`, as a fork does: see [`Forks::forked`]. Only
    /// replays need it: they have a family in one space, with its pages at different addresses.
    ///
    /// Errors: the ledger is full.
    pub fn inherit(
        &mut self,
        space: SpaceId,
        page: VirtPage,
        from: VirtPage,
    ) -> Result<(), LedgerFull> {
        let copy = self.engine.table.find_or_add(space, page)?;
        if let Some(no) = self.engine.table.find(space, from)
            && no != copy
            && self.engine.table.entry(copy) == Entry::UNTOUCHED
        {
            self.engine.copy_page(no, copy);
        }
        Ok(())
    }
}

impl<L: Ledger> Engine<L> {
    /// Gives `copy`, an untouched page, the state of the page `no`, as a fork does. True if `no` is
    /// in the batch in flight.
    fn copy_page(&mut self, no: PageNo, copy: PageNo) -> bool {
        let entry = self.table.entry(no);
        let flags = Flags(entry.flags.0 & Flags::LOCKED.0);
        let inherited = flags.with(Flags::INHERITED);
        let theirs = match entry.state {
            PageState::Untouched | PageState::Lost => Entry { flags, ..entry },
            PageState::Resident => {
                let theirs = Entry {
                    state: PageState::Resident,
                    flags: inherited,
                    ..Entry::UNTOUCHED
                };
                if entry.has_left() {
                    theirs.that_left()
                } else {
                    theirs
                }
            }
            PageState::Evicting => {
                if let Some(leader) = self.batch.follow(no, copy) {
                    self.note_follower(leader, copy);
                }
                if entry.flags.has(Flags::RETAINED) {
                    self.share(entry.tier, entry.slot);
                    Entry {
                        flags: inherited.with(Flags::RETAINED),
                        ..entry
                    }
                } else {
                    Entry {
                        flags: inherited,
                        ..entry
                    }
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
        self.departures.copy(no, copy);
        self.table.set(copy, theirs);
        if theirs.state == PageState::Stored {
            // This copy may outlive the parent's, and is then the one to demote.
            self.remember_age(copy, theirs);
        }
        entry.state == PageState::Evicting
    }
}
