//! Writes to pages that fork relatives share. The frames that the copies take are counted before
//! they are taken; without room, the write waits.
//!
//! A frame is charged to one process. The other processes that map it are its heirs: their entries
//! are `INHERITED`.

use undercroft_base::{Entry, Flags, PageState, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_policy::mrc::What;
use undercroft_policy::reclaim::Arrival;

use crate::batch::BatchIndex;
use crate::ledger::Ledger;
use crate::limits::COPY_PAGES_MAX;
use crate::{Engine, Evictions, Fault, FaultAnswer, Faults, Forks, PageEvent, Room};

impl<L: Ledger> Faults<'_, L> {
    /// A thread is about to write to a write-protected page, whose frame relatives may share. The
    /// kernel will copy it. Counts the copies of the pages from the faulting one on; pages among
    /// them that are not shared come along. The engine does not know which relative keeps the old
    /// frame, so it charges the first of `relatives` that inherited the page. A later scan
    /// ([`Forks::own_frame`]) finds what that misses.
    ///
    /// * `shared`: for each page from the faulting one on, whether its frame is shared now. At most
    ///   [`COPY_PAGES_MAX`] are used.
    ///
    /// `Ok`: how many pages (at least 1) may lose their protection. `Err`: what to do instead, as
    /// for [`Faults::answer`].
    ///
    /// Cost: O([`COPY_PAGES_MAX`] x relatives).
    pub fn copy_on_write(
        &mut self,
        fault: Fault,
        shared: &[bool],
        relatives: &[SpaceId],
    ) -> Result<u64, FaultAnswer> {
        self.engine.stats.write_protect += 1;
        let mut granted = 0;
        let mut first_copies = false;
        for is_shared in shared.iter().take(COPY_PAGES_MAX as usize) {
            let page = fault.page.plus(granted);
            if !self.engine.is_present(fault.space, page) {
                break; // gone, or never touched: nothing to copy
            }
            let inherits = self.engine.inherits(fault.space, page);
            let payer = match (is_shared, inherits) {
                (_, true) => Some(fault.space),
                (true, false) => self.engine.heir(page, relatives),
                (false, false) => None,
            };
            // It has its frame already, so it needs no room.
            let copies = *is_shared && payer.is_some();
            if granted == 0 {
                first_copies = copies;
            } else if copies && !first_copies {
                // The write itself copies nothing. So the pages after it are not worth a frame.
                break;
            }
            if copies {
                let room = self.engine.books().room();
                let needed = self.engine.table.size_in(fault.space).base_pages() as i64;
                if room < needed && self.engine.config.room == Room::Ahead && !fault.urgent {
                    if granted > 0 {
                        break;
                    }
                    if room.saturating_add_unsigned(self.engine.over_limit.0) < needed {
                        self.engine.stats.waited_for_room += 1;
                        return Err(self.engine.wait_for_room(fault));
                    }
                    self.engine.stats.over_limit += 1;
                }
            }
            if let Some(payer) = payer {
                self.engine.forks().own_frame(payer, page);
            }
            granted += 1;
        }
        Ok(granted.max(1))
    }
}

impl<L: Ledger> Evictions<'_, L> {
    /// An item of the batch has been taken out, and relatives share its frame. The first of them
    /// that inherited the page and still has it is charged, and returned. The frame is freed only
    /// when that heir's page leaves too; it then finds the copy that this item left in a tier.
    pub fn leave_frame(
        &mut self,
        index: BatchIndex,
        relatives: &[SpaceId],
    ) -> Option<(SpaceId, VirtPage)> {
        let page = self.engine.batch.pages[self.engine.batch.place(index)]
            .item
            .page;
        let heir = self.engine.heir(page, relatives)?;
        self.leave_frame_to(index, heir, page);
        Some((heir, page))
    }

    /// As [`Evictions::leave_frame`], for a known heir: its page is inherited. Only replays need
    /// it: they have a family in one space, so the heir's page has another address.
    pub fn leave_frame_to(&mut self, index: BatchIndex, space: SpaceId, page: VirtPage) {
        let at = self.engine.batch.place(index);
        self.engine.charge(space, page);
        self.engine.batch.pages[at].heir = Some((space, page));
    }
}

impl<L: Ledger> Forks<'_, L> {
    /// A part of an address space is about to end. Each of its frames is charged to the first of
    /// its heirs. If that heir had a frame of its own, one frame too many is counted.
    ///
    /// Cost: O(pages of the part x relatives).
    pub fn bequeath(&mut self, space: SpaceId, range: VirtRange, relatives: &[SpaceId]) {
        if relatives.is_empty() {
            return;
        }
        for (page, no) in self.engine.table.known_pages(space, range) {
            let entry = self.engine.table.entry(no);
            if entry.state != PageState::Resident || entry.flags.has(Flags::INHERITED) {
                continue;
            }
            if let Some(heir) = self.engine.heir(page, relatives) {
                self.own_frame(heir, page);
            }
        }
    }

    /// An inherited page has a frame of its own now, or is charged for the shared one. It counts,
    /// and may be evicted.
    pub fn own_frame(&mut self, space: SpaceId, page: VirtPage) {
        self.engine.charge(space, page);
    }
}

impl<L: Ledger> Engine<L> {
    /// An inherited page counts from now on.
    fn charge(&mut self, space: SpaceId, page: VirtPage) {
        let Some(no) = self.table.find(space, page) else {
            return;
        };
        let entry = self.table.entry(no);
        if entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED) {
            let flags = entry.flags.without(Flags::INHERITED);
            self.table.set(no, Entry { flags, ..entry });
            self.count(no);
            self.tell_page(space, page, PageEvent::Found);
            self.reclaim.insert(no, Arrival::FirstTouch);
            self.see(no, What::New { pages: 1 });
        }
    }

    /// A page shared the frame of one that was just stored. It keeps that copy as its retained
    /// copy, in case no process writes to it.
    pub(crate) fn retain_for(&mut self, space: SpaceId, page: VirtPage, stored: Entry) {
        let Some(no) = self.table.find(space, page) else {
            return;
        };
        let entry = self.table.entry(no);
        let takes = entry.state == PageState::Resident && !entry.flags.has(Flags::RETAINED);
        if takes && stored.state == PageState::Stored && stored.tier != TierId::FILL {
            self.share(stored.tier, stored.slot);
            let kept = Entry {
                state: PageState::Resident,
                flags: entry.flags.with(Flags::RETAINED),
                ..stored
            };
            self.table.set(no, kept);
        }
    }

    /// Whether the page is in memory, or just leaving it, as far as the books know.
    pub(crate) fn is_present(&self, space: SpaceId, page: VirtPage) -> bool {
        let state = self.books().entry(space, page).state;
        matches!(state, PageState::Resident | PageState::Evicting)
    }

    /// Whether the page is in memory and charged to a relative.
    pub(crate) fn inherits(&self, space: SpaceId, page: VirtPage) -> bool {
        let entry = self.books().entry(space, page);
        entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED)
    }

    pub(crate) fn heir(&self, page: VirtPage, relatives: &[SpaceId]) -> Option<SpaceId> {
        let mut heirs = relatives.iter().filter(|of| self.inherits(**of, page));
        heirs.next().copied()
    }
}
