//! Follows the movements of a live trace between two references: each changes the simulation as its
//! event changed the live run.

use undercroft_base::{Entry, Flags, PageNo, PageState, VirtPage, VirtRange};
use undercroft_engine::Taken;
use undercroft_engine::limits::EVICT_PAGES_MAX;

use super::client::{AHEAD, Client, DIRTY, KNOWN, WRITTEN};
use super::host::Host;
use crate::memory_trace::Becomes;
use crate::page_stream::MovedPage;
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
                Becomes::FellShort if self.setup.room == SimRoom::Traced => {
                    self.search_in_part(client)?;
                }
                Becomes::FellShort => {}
                Becomes::Ended => self.end_space(client, moved.number)?,
                Becomes::Ahead { written } if client.traced.is_some() => {
                    self.prefetch_along(client, no, written)?;
                }
                Becomes::Ahead { .. } => {}
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
                Becomes::Recalled => client.recalled_at = moved.after + 1,
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
                Becomes::Evicted { .. } | Becomes::Named { .. } => {
                    self.evict_batch(client, moved)?
                }
                Becomes::Returned => self.return_page(client, no)?,
                Becomes::Shared if self.share(client, no) => {}
                Becomes::Found | Becomes::FrameOwned | Becomes::FrameLeft | Becomes::Shared => {
                    self.find(client, no, moved.what == Becomes::FrameOwned)?;
                }
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

    /// Evicts as many pages as the live batch that begins with `first`, or the same ones if the
    /// manager named them.
    fn evict_batch(&mut self, client: &mut Client<'_>, first: MovedPage) -> Result<(), SetupError> {
        let next = &client.stream.moved[client.moved..];
        let batch = next.iter().take(EVICT_PAGES_MAX - 1);
        let with = batch.take_while(|next| (next.what, next.after) == (first.what, first.after));
        let count = 1 + with.count();
        let start = client.moved - 1;
        client.moved = start + count;
        match (self.setup.room, first.what) {
            (SimRoom::Traced, Becomes::Named { .. }) => self.evict_these(client, start, count),
            (SimRoom::Traced, _) => self.evict_count(client, count),
            _ => Ok(()),
        }
    }

    /// The page stayed after all, or its mapping was moved here.
    fn return_page(&mut self, client: &mut Client<'_>, no: PageNo) -> Result<(), SetupError> {
        let page = VirtPage(u64::from(no.0));
        if let Some(index) = client.take_leaving(no) {
            let (engine, wake) = (&mut client.engine, &mut self.wake);
            engine
                .evictions()
                .settle(client.batch[index].at, Taken::NotTried, wake);
            return Ok(());
        }
        // In the live run its command was given up, and the answer came after other batches had
        // left. The copy that was made here is of no use.
        if client.engine.books().entry(client.space, page).state == PageState::Stored {
            self.drop_pages(client, no.0, 1)?;
        }
        if client.engine.books().entry(client.space, page) == Entry::UNTOUCHED {
            let range = VirtRange::new(page, page.plus(1));
            client.engine.discovery().found_again(client.space, range);
            client.marks[no.0 as usize] |= KNOWN | WRITTEN | DIRTY;
            if self.setup.room != SimRoom::Traced {
                self.have_room(client, 0)?;
            }
        }
        Ok(())
    }

    /// The page was in memory when the manager first saw its mapping, or a relative had it.
    ///
    /// * `alone`: no relative's copy serves it.
    fn find(&mut self, client: &mut Client<'_>, no: PageNo, alone: bool) -> Result<(), SetupError> {
        if !self.own_shared(client, no, alone) {
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
        // A live run may begin above its limit; its evictions then show what leaves.
        if self.setup.room != SimRoom::Traced {
            self.have_room(client, 0)?;
        }
        self.reclaim(client)
    }

    /// Forgets `count` pages of one chunk from `first` on, in memory and in the tiers. Pages on
    /// their way out are out by then.
    pub(super) fn drop_pages(
        &mut self,
        client: &mut Client<'_>,
        first: u32,
        count: u32,
    ) -> Result<(), SetupError> {
        for number in first..first + count {
            if client.on_its_way(PageNo(number)).is_some() {
                self.let_one_go(client, PageNo(number))?;
            }
        }
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
