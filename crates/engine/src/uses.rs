//! Uses of pages that are in memory. They tell the policy which pages are worth keeping.

use undercroft_base::{Entry, Flags, PageNo, PageState, SpaceId, VirtPage};
use undercroft_policy::mrc::What;
use undercroft_policy::place::Event;

use crate::ledger::Ledger;
use crate::{LedgerFull, PageEvent, Uses};

impl<L: Ledger> Uses<'_, L> {
    /// The page's number, for [`Uses::touch`]. It is the same until the page is dropped. A chunk
    /// that has no numbers yet takes the lowest free ones.
    ///
    /// Errors: the ledger is full. Panics: when the space is not there.
    pub fn number(&mut self, space: SpaceId, page: VirtPage) -> Result<PageNo, LedgerFull> {
        self.engine.table.find_or_add(space, page)
    }

    /// The program used the page, or wrote to it (`write`), as access bits or a trace tell. True if
    /// the page is in memory; the policy then knows of the use. False if this use is a fault. Cost:
    /// O(1), no search.
    #[inline]
    pub fn touch(&mut self, no: PageNo, write: bool) -> bool {
        let entry = self.engine.table.entry(no);
        let resident = entry.state == PageState::Resident;
        if resident && entry.flags.has(Flags::PREFETCHED) {
            let flags = entry.flags.without(Flags::PREFETCHED);
            self.engine.table.set(no, Entry { flags, ..entry });
            self.engine.place.heard(Event::FirstUsed(no));
        }
        // The frame of an inherited page is charged to a relative, so the policy does not know it.
        if resident && !entry.flags.has(Flags::INHERITED) && self.engine.is_listed(no) {
            self.engine.reclaim.touch(no, write);
        }
        resident
    }

    /// A scan found the page used, if one was made: tells those that follow it.
    #[inline]
    pub fn used(&mut self, no: PageNo) {
        self.engine.see(no, What::Used);
    }

    /// As [`Uses::touch`] and [`Uses::used`], by address. For a caller whose knowledge is old: the
    /// page may have left meanwhile. Reserves no entries.
    #[inline]
    pub fn touch_at(&mut self, space: SpaceId, page: VirtPage, write: bool) -> bool {
        match self.engine.table.find(space, page) {
            Some(no) => {
                let used = self.touch(no, write);
                if used {
                    self.used(no);
                    self.engine.tell_page(space, page, PageEvent::Used);
                }
                used
            }
            None => false,
        }
    }
}
