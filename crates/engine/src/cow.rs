//! Writes to pages that fork relatives share: the frames they take are counted, and held back
//! without room, before they are taken.
//!
//! A frame is charged to one process; the others that map it are its heirs: their entries are
//! `INHERITED`.

use undercroft_base::{Entry, Flags, PageState, SpaceId, TierId, VirtPage, VirtRange};

use crate::batch::BatchIndex;
use crate::ledger::Ledger;
use crate::limits::COPY_PAGES_MAX;
use crate::{Engine, Fault, FaultAnswer, Room};

impl<L: Ledger> Engine<L> {
    /// A thread is about to write to a page that is write-protected because relatives may share its
    /// frame: the kernel will copy it. Counts the copies of the pages from the faulting one on, and
    /// lets pages among them that nobody shares come along. Which relative keeps the old frame is
    /// not known, so the first of `relatives` that has inherited the page is charged; a later look
    /// ([`Engine::own_frame`]) finds what that misses.
    ///
    /// * `shared`: for each page from the faulting one on, whether its frame is shared now; at most
    ///   [`COPY_PAGES_MAX`] are looked at.
    /// * `told`: each page that is counted from now on, and whose it is.
    ///
    /// `Ok`: so many pages (at least 1) may lose their protection. `Err`: what to do instead, as
    /// [`Engine::fault`] says.
    ///
    /// Cost: O([`COPY_PAGES_MAX`] x relatives).
    pub fn copy_on_write(
        &mut self,
        fault: Fault,
        shared: &[bool],
        relatives: &[SpaceId],
        mut told: impl FnMut(SpaceId, VirtPage),
    ) -> Result<u64, FaultAnswer> {
        self.stats.write_protect += 1;
        let mut granted = 0;
        let mut first_copies = false;
        for is_shared in shared.iter().take(COPY_PAGES_MAX as usize) {
            let page = fault.page.plus(granted);
            if !self.is_present(fault.space, page) {
                break; // not there any more, or never known: nothing to copy
            }
            let inherits = self.inherits(fault.space, page);
            let payer = match (is_shared, inherits) {
                (_, true) => Some(fault.space),
                (true, false) => self.heir(page, relatives),
                (false, false) => None,
            };
            // Its frame is there already: no room is needed.
            let copies = *is_shared && payer.is_some();
            if granted == 0 {
                first_copies = copies;
            } else if copies && !first_copies {
                break; // where the write itself copies nothing, what follows is no guess worth a frame
            }
            if copies {
                let room = self.room();
                if room < 1 && self.config.room == Room::Ahead && !fault.urgent {
                    if granted > 0 {
                        break;
                    }
                    if room.saturating_add_unsigned(self.over_limit.0) < 1 {
                        self.stats.waited_for_room += 1;
                        return Err(self.wait_for_room(fault));
                    }
                    self.stats.over_limit += 1;
                }
            }
            if let Some(payer) = payer {
                self.own_frame(payer, page);
                told(payer, page);
            }
            granted += 1;
        }
        Ok(granted.max(1))
    }

    /// An item of the batch, which has been taken out, shared its frame with relatives, and the
    /// first of them that has inherited the page still has it: that one is charged, and returned.
    /// Nothing is freed before its page leaves too; it then finds the copy that this one leaves
    /// below.
    pub fn leave_frame(
        &mut self,
        index: BatchIndex,
        relatives: &[SpaceId],
    ) -> Option<(SpaceId, VirtPage)> {
        let page = self.batch.pages[self.batch.place(index)].item.page;
        let heir = self.heir(page, relatives)?;
        self.leave_frame_to(index, heir, page);
        Some((heir, page))
    }

    /// As [`Engine::leave_frame`], where the heir's page is known: an inherited one.
    pub fn leave_frame_to(&mut self, index: BatchIndex, space: SpaceId, page: VirtPage) {
        let at = self.batch.place(index);
        self.own_frame(space, page);
        self.batch.pages[at].heir = Some((space, page));
    }

    /// A page that shared the frame of one just stored keeps that copy below, in case nobody writes
    /// to it.
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

    /// A page found in the memory of a process that comes under management, whose frame another
    /// shares. When one of `relatives` that is older has it too, it becomes inherited and is not
    /// counted again; false when none has.
    pub fn found_shared(&mut self, space: SpaceId, page: VirtPage, relatives: &[SpaceId]) -> bool {
        let mut older = relatives.iter().filter(|of| **of < space);
        if !older.any(|of| self.is_present(*of, page)) {
            return false;
        }
        let Ok(no) = self.table.find_or_add(space, page) else {
            return false;
        };
        let entry = self.table.entry(no);
        if entry.state == PageState::Untouched {
            let flags = entry.flags.with(Flags::INHERITED);
            let state = PageState::Resident;
            self.table.set(
                no,
                Entry {
                    state,
                    flags,
                    ..entry
                },
            );
        }
        true
    }

    /// An address space is about to go. Frames that it was charged for are charged to the first of
    /// their heirs (too many, where it had one of its own). Cost: O(pages of the space x
    /// relatives). * `told`: each page that is charged to another from now on.
    pub fn bequeath(
        &mut self,
        space: SpaceId,
        relatives: &[SpaceId],
        mut told: impl FnMut(SpaceId, VirtPage),
    ) {
        if relatives.is_empty() {
            return;
        }
        let everything = VirtRange::new(VirtPage(0), VirtPage(u64::MAX));
        for (page, no) in self.table.known_pages(space, everything) {
            let entry = self.table.entry(no);
            if entry.state != PageState::Resident || entry.flags.has(Flags::INHERITED) {
                continue;
            }
            if let Some(heir) = self.heir(page, relatives) {
                self.own_frame(heir, page);
                told(heir, page);
            }
        }
    }

    /// In memory, as far as is known, or just leaving it.
    fn is_present(&self, space: SpaceId, page: VirtPage) -> bool {
        let state = self.entry(space, page).state;
        matches!(state, PageState::Resident | PageState::Evicting)
    }

    /// In memory, and charged to a relative.
    fn inherits(&self, space: SpaceId, page: VirtPage) -> bool {
        let entry = self.entry(space, page);
        entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED)
    }

    fn heir(&self, page: VirtPage, relatives: &[SpaceId]) -> Option<SpaceId> {
        let mut heirs = relatives.iter().filter(|of| self.inherits(**of, page));
        heirs.next().copied()
    }
}
