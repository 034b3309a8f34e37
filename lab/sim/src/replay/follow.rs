//! Follows the movements of a live trace between two references: each changes the simulation as its
//! event changed the live run.

use undercroft_base::{Entry, Flags, PageNo, PageState, VirtPage, VirtRange};

use super::client::{AHEAD, Client, DIRTY, KNOWN, WRITTEN};
use super::host::Host;
use crate::memory_trace::Becomes;
use crate::setup::{SetupError, SimRoom};

impl Host {
    /// Applies the movements before the next reference of a client.
    pub(super) fn follow(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        while let Some(moved) = client.stream.moved.get(client.moved).copied()
            && moved.after <= client.at
        {
            client.moved += 1;
            let no = PageNo(moved.number);
            let page = VirtPage(u64::from(moved.number));
            match moved.what {
                Becomes::Forked { parent } => self.fork(client, moved.number, u32::from(parent))?,
                Becomes::Ended => self.end_space(client, moved.number)?,
                Becomes::Ahead => {} // the policy decides
                Becomes::Written => {
                    if client.engine.books().entry(client.space, page).state == PageState::Resident
                    {
                        client.marks[no.0 as usize] |= DIRTY | WRITTEN;
                    }
                }
                // The page may have been in memory for longer than in the live run, and may have
                // changed earlier.
                Becomes::Unchanged if client.missed == moved.after => {
                    client.marks[no.0 as usize] &= !DIRTY;
                }
                Becomes::Unchanged => {}
                Becomes::Locked => self.lock(client, page),
                Becomes::PassedOver | Becomes::TakenBack
                    if self.setup.room == SimRoom::AfterPlan => {}
                // Some pages must remain that can leave.
                Becomes::PassedOver => {
                    if client.engine.books().kept_pages().0 < client.frames / 2 {
                        client.engine.evictions().keep(client.space, page);
                    }
                }
                Becomes::TakenBack => client.engine.evictions().take_back_one(client.space, page),
                Becomes::Used => used(client, no),
                Becomes::Returned => self.return_page(client, no)?,
                Becomes::Shared if self.share(client, no) => {}
                Becomes::Found | Becomes::Shared => self.find(client, no)?,
                Becomes::Dropped => self.drop_pages(client, moved.number, 1)?,
            }
        }
        Ok(())
    }

    /// Locks the page, unless the replay is of a bound or a compared policy. At most an eighth of
    /// the frames is locked, so that pages can leave.
    fn lock(&self, client: &mut Client<'_>, page: VirtPage) {
        let entry = client.engine.books().entry(client.space, page);
        let may = self.setup.room != SimRoom::AfterPlan && client.locked < client.frames / 8;
        if may && !entry.flags.has(Flags::LOCKED) {
            client.locked += 1;
            let range = VirtRange::new(page, page.plus(1));
            client.engine.layout().lock(client.space, range, true);
        }
    }

    /// The page stayed after all, or its mapping was moved here.
    fn return_page(&mut self, client: &mut Client<'_>, no: PageNo) -> Result<(), SetupError> {
        let page = VirtPage(u64::from(no.0));
        // The copy that was made here is of no use.
        if client.engine.books().entry(client.space, page).state == PageState::Stored {
            self.drop_pages(client, no.0, 1)?;
        }
        if client.engine.books().entry(client.space, page) == Entry::UNTOUCHED {
            let range = VirtRange::new(page, page.plus(1));
            client.engine.discovery().found_again(client.space, range);
            client.marks[no.0 as usize] |= KNOWN | WRITTEN | DIRTY;
            self.have_room(client, 0)?;
        }
        Ok(())
    }

    /// The page was in memory when the manager first saw its mapping, or a relative had it.
    fn find(&mut self, client: &mut Client<'_>, no: PageNo) -> Result<(), SetupError> {
        if !self.own_shared(client, no) {
            if !client.engine.books().is_known(no) {
                // It was used before; its bytes are unknown.
                client.marks[no.0 as usize] |= KNOWN | WRITTEN | DIRTY;
            }
            let page = VirtPage(u64::from(no.0));
            let range = VirtRange::new(page, page.plus(1));
            client
                .engine
                .discovery()
                .found_resident(client.space, range);
        }
        self.have_room(client, 0)?;
        self.reclaim(client)
    }

    /// Forgets `count` pages of one chunk from `first` on, in memory and in the tiers.
    pub(super) fn drop_pages(
        &mut self,
        client: &mut Client<'_>,
        first: u32,
        count: u32,
    ) -> Result<(), SetupError> {
        let page = |number: u32| VirtPage(u64::from(number));
        for number in first..first + count {
            client.marks[number as usize] = 0;
            let entry = client.engine.books().entry(client.space, page(number));
            client.locked -= u64::from(entry.flags.has(Flags::LOCKED));
        }
        let range = VirtRange::new(page(first), page(first + count));
        client.engine.layout().removed(client.space, range);
        // If its chunk (or the next one) had no other page, the chunk lost its numbers. The numbers
        // freed last are taken first.
        for number in [first + count, first] {
            if number < client.stream.numbers {
                let no = client.engine.uses().number(client.space, page(number));
                assert_eq!(no, Ok(PageNo(number)), "a page keeps its number");
            }
        }
        self.collect(client);
        Ok(())
    }
}

/// The page was used in memory. If the simulation has evicted it, the use is ignored.
fn used(client: &mut Client<'_>, no: PageNo) {
    let known = client.engine.uses().touch(no, false);
    let mark = &mut client.marks[no.0 as usize];
    if known {
        client.engine.uses().used(no);
    }
    if known && *mark & AHEAD != 0 {
        *mark = (*mark & !AHEAD) | KNOWN;
        client.seen.ahead_used += 1;
    }
}
