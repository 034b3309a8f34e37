//! Forks and ends of processes, as a live trace records them.
//!
//! A fork child starts with its parent's pages. The parent stays charged for the frames in memory;
//! both share the copies in the tiers. The trace says when the child is charged for a frame of its
//! own. A child may have faulted in the live run on a page that is in memory here: then it is
//! charged when it writes.

use undercroft_base::{Flags, PageNo, PageState, VirtPage, VirtRange};

use super::client::{Client, DIRTY, KNOWN, LENT, SHARED, WRITTEN};
use super::host::Host;
use crate::setup::SetupError;

impl Host {
    /// Begins the address space `child`. It has what `parent` has, where both have numbers.
    pub(super) fn fork(
        &mut self,
        client: &mut Client<'_>,
        child: u32,
        parent: u32,
    ) -> Result<(), SetupError> {
        if child == parent {
            return Ok(()); // recorded traces have no such fork
        }
        self.end_space(client, child)?; // by the trace it was empty
        let stream = client.stream;
        let common = stream.spaces.iter().flat_map(|of| of.common(child, parent));
        for (page, from) in common {
            self.inherit(client, page, from);
        }
        Ok(())
    }

    /// Shares the frame of a relative that has the page in memory; false when none has it here.
    pub(super) fn share(&mut self, client: &mut Client<'_>, no: PageNo) -> bool {
        let Some(spaces) = &client.stream.spaces else {
            return false;
        };
        let virt = |number: u32| VirtPage(u64::from(number));
        let entry = |number: u32| client.engine.books().entry(client.space, virt(number));
        // A relative has it in a tier, and it is not in memory here.
        let mut others = spaces.relatives(no.0);
        let Some(from) = others.find(|of| entry(*of).state != PageState::Untouched) else {
            return false;
        };
        if entry(no.0).state == PageState::Untouched {
            self.inherit(client, no.0, from);
        }
        true
    }

    /// Gives an unknown page the state of another, as fork does.
    fn inherit(&mut self, client: &mut Client<'_>, page: u32, from: u32) {
        let virt = |number: u32| VirtPage(u64::from(number));
        let inherited = client
            .engine
            .forks()
            .inherit(client.space, virt(page), virt(from));
        assert_eq!(inherited, Ok(()), "all pages have numbers");
        let entry = client.engine.books().entry(client.space, virt(page));
        if entry.flags.has(Flags::LOCKED) {
            // Always leave some pages that can be evicted.
            let range = VirtRange::new(virt(page), virt(page + 1));
            if client.locked < client.frames / 8 {
                client.locked += 1;
            } else {
                client.engine.layout().lock(client.space, range, false);
            }
        }
        let mark = client.marks[from as usize] & (WRITTEN | KNOWN);
        let shares = u8::from(entry.flags.has(Flags::INHERITED));
        client.marks[page as usize] = mark | (SHARED * shares);
        client.marks[from as usize] |= LENT * shares;
    }

    /// Forgets an address space.
    pub(super) fn end_space(
        &mut self,
        client: &mut Client<'_>,
        space: u32,
    ) -> Result<(), SetupError> {
        let Some(spaces) = &client.stream.spaces else {
            return Ok(());
        };
        let granule = spaces.granule();
        for first in spaces.granules(space) {
            let engine = &client.engine;
            let mut pages = *first..first + granule;
            if pages.any(|number| engine.books().is_known(PageNo(number))) {
                self.drop_pages(client, *first, granule)?;
            }
        }
        Ok(())
    }

    /// Charges a page for its frame, which was a relative's until now; false when it was not.
    pub(super) fn own_shared(&mut self, client: &mut Client<'_>, no: PageNo) -> bool {
        let page = VirtPage(u64::from(no.0));
        let entry = client.engine.books().entry(client.space, page);
        if entry.state != PageState::Resident || !entry.flags.has(Flags::INHERITED) {
            return false;
        }
        client.marks[no.0 as usize] &= !SHARED;
        client.marks[no.0 as usize] |= DIRTY | WRITTEN;
        client.engine.forks().own_frame(client.space, page);
        true
    }

    /// Item `index` of the batch leaves. Relatives may have its frame, which is freed only when
    /// they have left, too. As in the live run, one of them is charged for it and leaves next.
    #[inline(never)]
    pub(super) fn lend_on(&mut self, client: &mut Client<'_>, index: usize) {
        let Some(spaces) = &client.stream.spaces else {
            return;
        };
        let virt = |number: u32| VirtPage(u64::from(number));
        let mut others = spaces.relatives(client.batch[index].no.0);
        let heir = others.find(|of| {
            let entry = client.engine.books().entry(client.space, virt(*of));
            entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED)
        });
        if let Some(heir) = heir {
            let at = client.batch[index].at;
            client
                .engine
                .evictions()
                .leave_frame_to(at, client.space, virt(heir));
            let mark = &mut client.marks[heir as usize];
            *mark = *mark & !SHARED | LENT; // the next relative leaves after this one
            client.leave_next.push(PageNo(heir));
        }
    }

    /// Makes a batch of the pages that leave next. Returns how many.
    #[cold]
    pub(super) fn choose_heirs(&mut self, client: &mut Client<'_>) -> usize {
        let virt = |no: PageNo| VirtPage(u64::from(no.0));
        let pages = client.leave_next.drain(..);
        let ranges: Vec<_> = pages
            .map(|no| VirtRange::new(virt(no), virt(no).plus(1)))
            .collect();
        let (space, batch) = (client.space, &mut client.batch);
        if client
            .engine
            .evictions()
            .select_these(space, &ranges, batch)
        {
            batch.len()
        } else {
            0
        }
    }

    /// A write to a page that came from a relative and is in memory. False if the write is an
    /// ordinary reference.
    pub(super) fn write_shared(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
    ) -> Result<bool, SetupError> {
        if !self.own_shared(client, no) {
            let entry = client
                .engine
                .books()
                .entry(client.space, VirtPage(u64::from(no.0)));
            if !entry.flags.has(Flags::INHERITED) {
                client.marks[no.0 as usize] &= !SHARED;
            }
            return Ok(false);
        }
        client.marks[no.0 as usize] |= DIRTY | WRITTEN;
        self.have_room(client, 0)?;
        self.reclaim(client)?;
        Ok(true)
    }
}
