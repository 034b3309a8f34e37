//! What a live trace says of pages between two references: each entry changes the simulation as its
//! event changed the live run.

use undercroft_base::{Entry, Flags, PageNo, PageState, VirtPage, VirtRange};
use undercroft_engine::Taken;
use undercroft_engine::limits::EVICT_PAGES_MAX;

use super::client::{AHEAD, Client, DIRTY, KNOWN, WRITTEN};
use super::host::Host;
use crate::memory_trace::Becomes;
use crate::setup::{Room, SetupError};

impl Host {
    /// Applies what the trace says of pages before the next reference of a client.
    pub(super) fn follow(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        loop {
            let moved = match client.stream.moved.get(client.moved) {
                Some(moved) if moved.after <= client.at => *moved,
                _ => return Ok(()),
            };
            client.moved += 1;
            match moved.what {
                Becomes::Forked { parent } => {
                    self.fork(client, moved.number, u32::from(parent))?;
                    continue;
                }
                Becomes::Ended => {
                    self.end_space(client, moved.number)?;
                    continue;
                }
                _ => {}
            }
            let page = VirtPage(u64::from(moved.number));
            let range = VirtRange::new(page, page.plus(1));
            if let Becomes::Ahead { written } = moved.what {
                if client.traced.is_some() {
                    self.bring_along(client, PageNo(moved.number), written)?;
                }
                continue;
            }
            let mark = &mut client.marks[moved.number as usize];
            if moved.what == Becomes::Written {
                if client.engine.entry(client.space, page).state == PageState::Resident {
                    client.marks[moved.number as usize] |= DIRTY | WRITTEN;
                }
                continue;
            }
            if moved.what == Becomes::Unchanged {
                // If the page has been in memory for longer than live, it may have been changed
                // before.
                if client.missed == moved.after {
                    *mark &= !DIRTY;
                }
                continue;
            }
            if moved.what == Becomes::Recalled {
                client.recalled_at = moved.after + 1;
                continue;
            }
            if moved.what == Becomes::Locked {
                // Not for the bounds and the policies compared, and never so many that nothing can
                // leave.
                let entry = client.engine.entry(client.space, page);
                let may = self.setup.room != Room::AfterPlan && client.locked < client.frames / 8;
                if may && !entry.flags.has(Flags::LOCKED) {
                    client.locked += 1;
                    client.engine.lock(client.space, range, true);
                }
                continue;
            }
            if moved.what == Becomes::Used {
                // If the simulation has evicted it, a use in memory says nothing.
                if client.engine.touch(PageNo(moved.number), false) && *mark & AHEAD != 0 {
                    *mark = (*mark & !AHEAD) | KNOWN;
                    client.seen.ahead_used += 1;
                }
                continue;
            }
            if matches!(moved.what, Becomes::Evicted | Becomes::Named) {
                let next = &client.stream.moved[client.moved..];
                let batch = next.iter().take(EVICT_PAGES_MAX - 1);
                let with =
                    batch.take_while(|next| (next.what, next.after) == (moved.what, moved.after));
                let count = 1 + with.count();
                let first = client.moved - 1;
                client.moved = first + count;
                match (self.setup.room, moved.what) {
                    (Room::Traced, Becomes::Named) => self.evict_these(client, first, count)?,
                    (Room::Traced, _) => self.evict_so_many(client, count)?,
                    _ => {}
                }
                continue;
            }
            if moved.what == Becomes::Returned {
                if let Some(index) = client.take_leaving(PageNo(moved.number)) {
                    let (engine, wake) = (&mut client.engine, &mut self.wake);
                    engine.settle(client.batch[index].at, Taken::NotTried, wake);
                } else if client.engine.entry(client.space, page) == Entry::UNTOUCHED {
                    // Its mapping was moved.
                    client.engine.found_again(client.space, range);
                    client.marks[moved.number as usize] |= KNOWN | WRITTEN | DIRTY;
                    if self.setup.room != Room::Traced {
                        self.have_room(client, 0)?;
                    }
                }
                continue;
            }
            if moved.what == Becomes::Shared && self.share(client, PageNo(moved.number)) {
                continue;
            }
            if matches!(moved.what, Becomes::Found | Becomes::Shared) {
                if !self.own_shared(client, PageNo(moved.number)) {
                    if !client.engine.is_known(PageNo(moved.number)) {
                        // It was used before; its bytes are unknown.
                        client.marks[moved.number as usize] |= KNOWN | WRITTEN | DIRTY;
                    }
                    client.engine.found_resident(client.space, range);
                }
                // A live run may begin above its limit; its evictions tell what leaves.
                if self.setup.room != Room::Traced {
                    self.have_room(client, 0)?;
                }
                self.reclaim(client)?;
                continue;
            }
            self.drop_pages(client, moved.number, 1)?;
        }
    }

    /// Forgets `count` pages of one chunk from `first` on, in memory and in the tiers. Pages on
    /// their way out have left by then.
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
            let entry = client.engine.entry(client.space, page(number));
            client.locked -= u64::from(entry.flags.has(Flags::LOCKED));
        }
        let range = VirtRange::new(page(first), page(first + count));
        client.engine.removed(client.space, range);
        // Where nothing else was in its chunk (or in the one that begins behind it), that lost its
        // numbers. The last given up are the first taken.
        for number in [first + count, first] {
            if number < client.stream.numbers {
                let no = client.engine.number(client.space, page(number));
                assert_eq!(no, Ok(PageNo(number)), "a page keeps its number");
            }
        }
        self.collect(client);
        Ok(())
    }
}
