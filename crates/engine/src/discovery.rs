//! Corrects the books by what the kernel shows: pages that were in memory before their region was
//! managed, and pages that are gone without an event.

use undercroft_base::{Entry, Flags, PageCount, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_policy::mrc::What;
use undercroft_policy::reclaim::Arrival;

use crate::ledger::Ledger;
use crate::{BookEvent, Discovery, Engine, PageEvent};

/// Fate of a page that is resident by the books, and missing by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The page has not left memory since it came as zeros. The program or the kernel dropped it,
    /// and it reads as zeros. Three things do so without an event: guard pages; a `MADV_DONTNEED`
    /// whose event was read before the page came, and that was carried out after; and fork, for
    /// pages that were never written.
    Dropped,
    /// The page was out of memory: it may have been lost there, or on its way back.
    Lost,
}

impl<L: Ledger> Discovery<'_, L> {
    /// Announces resident pages that [`Discovery::found_resident`] will report. Until then they
    /// use up room for faults, but nothing is reclaimed for them. 0 when all are reported.
    pub fn expect_found(&mut self, pages: PageCount) {
        self.engine.expected_found = pages.0;
    }

    /// A page was found in the memory of a process that is being attached, and another process
    /// shares its frame. If one of the older `relatives` has the page too, it becomes inherited and
    /// is not counted again. False if none has, or no region has the page.
    pub fn found_shared(&mut self, space: SpaceId, page: VirtPage, relatives: &[SpaceId]) -> bool {
        let mut older = relatives.iter().filter(|of| **of < space);
        let one = VirtRange::new(page, page.plus(1));
        if !older.any(|of| self.engine.is_present(*of, page))
            || self.engine.managed(space, one).is_empty()
        {
            return false;
        }
        let Ok(no) = self.engine.table.find_or_add(space, page) else {
            return false;
        };
        let entry = self.engine.table.entry(no);
        if entry.state == PageState::Untouched {
            let flags = entry.flags.with(Flags::INHERITED);
            let state = PageState::Resident;
            self.engine.table.set(
                no,
                Entry {
                    state,
                    flags,
                    ..entry
                },
            );
            self.engine.tell_page(space, page, PageEvent::FoundShared);
        }
        true
    }

    /// Reports pages of `range` that were resident when their region was attached. They are counted
    /// now. Pages that no region has any more are left out: the program may have put another
    /// mapping there.
    pub fn found_resident(&mut self, space: SpaceId, range: VirtRange) {
        self.engine.found(space, range, Arrival::FirstTouch);
    }

    /// As [`Discovery::found_resident`], for pages that the books had elsewhere: they count as no
    /// newer than they were. Only replays need it: live, the pages of a move follow by
    /// [`Layout::remap_pages`](crate::Layout::remap_pages).
    pub fn found_again(&mut self, space: SpaceId, range: VirtRange) {
        self.engine.found(space, range, Arrival::Returned);
    }

    /// State of this page if the kernel says that it is missing. `None`: the books do not have it
    /// as resident, so it may well be missing.
    pub fn missing(&self, space: SpaceId, page: VirtPage) -> Option<Missing> {
        let no = self.engine.table.find(space, page)?;
        let entry = self.engine.table.entry(no);
        match entry.state {
            PageState::Resident if entry.has_left() => Some(Missing::Lost),
            PageState::Resident => Some(Missing::Dropped),
            _ => None,
        }
    }

    /// The kernel says that this page is missing, though the books have it as resident and no event
    /// said otherwise. As `how` says, it reads as zeros from now on, or as an error.
    pub fn vanished(&mut self, space: SpaceId, page: VirtPage, how: Missing) {
        match how {
            Missing::Dropped => self.engine.stats.vanished += 1,
            Missing::Lost => self.engine.stats.lost += 1,
        }
        let Some(no) = self.engine.table.find(space, page) else {
            return;
        };
        if self.engine.table.entry(no).state == PageState::Resident {
            self.engine.drop_page(no);
            if how == Missing::Lost {
                let state = PageState::Lost;
                let lost = Entry {
                    state,
                    ..Entry::UNTOUCHED
                };
                self.engine.table.set(no, lost);
            }
            let one = VirtRange::new(page, page.plus(1));
            self.engine.tell(BookEvent::Dropped(space, one));
        }
    }
}

impl<L: Ledger> Engine<L> {
    /// The parts of `range` that a region has. O(log regions + parts).
    fn managed(&self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        let regions = self.table.regions(space);
        let parts = regions[range.overlapping(regions)].iter();
        parts.map(|region| range.intersect(*region)).collect()
    }

    /// Pages outside all regions stay unknown: nothing serves a fault there, so they must not
    /// leave.
    fn found(&mut self, space: SpaceId, range: VirtRange, arrival: Arrival) {
        let managed = self.managed(space, range);
        for page in managed.into_iter().flat_map(VirtRange::pages) {
            let Ok(no) = self.table.find_or_add(space, page) else {
                return;
            };
            let entry = self.table.entry(no);
            if entry.state == PageState::Untouched {
                self.table.set(
                    no,
                    Entry {
                        state: PageState::Resident,
                        ..entry
                    },
                );
                self.count(no);
                self.tell_page(space, page, PageEvent::Found);
                self.expected_found = self
                    .expected_found
                    .saturating_sub(self.table.base_pages(no));
                self.reclaim.insert(no, arrival);
                self.see(no, What::New { pages: 1 });
            }
        }
    }
}
