//! Repeats recorded evictions: a batch is named at once, and leaves page by page.
//!
//! As in the live run, a batch stays on its way out until the next one is named. A page leaves
//! earlier if the trace shows that it was out by then. It is recalled, or stays, if the trace says
//! so.

use undercroft_base::{PageNo, PageState, VirtPage, VirtRange};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{Outcome, Taken};

use super::client::{Client, DIRTY, WRITTEN};
use super::host::Host;
use crate::setup::SetupError;

impl Host {
    /// Lets the policy select `count` pages, less those that had to leave before; fewer if no more
    /// may leave. The last batch stays on its way out: see [`Host::let_go`].
    pub(super) fn evict_count(
        &mut self,
        client: &mut Client<'_>,
        count: usize,
    ) -> Result<(), SetupError> {
        let forced = &mut client.forced;
        let before = count.min(*forced);
        *forced -= before;
        let mut left = count - before;
        while left > 0 {
            self.let_go(client)?;
            let chosen = self.choose(client, left);
            if chosen == 0 {
                break; // only locked pages are left; while there is room, also the newest ones
            }
            left -= chosen;
            client.leaving = u64::MAX >> (EVICT_PAGES_MAX - chosen);
        }
        Ok(())
    }

    /// Lets the policy search once, for a whole batch, as it did in the live run. What it names
    /// counts as having left before the trace says so.
    pub(super) fn search_in_part(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        self.let_go(client)?;
        self.migrate(client);
        let batch = &mut client.batch;
        if client.engine.evictions().select(EVICT_PAGES_MAX, batch) {
            client.leaving = u64::MAX >> (EVICT_PAGES_MAX - batch.len());
            client.forced += batch.len();
        }
        Ok(())
    }

    /// Lets all pages on their way out leave.
    #[inline]
    pub(super) fn let_go(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        match client.leaving {
            0 => Ok(()),
            _ => self.let_batch_go(client),
        }
    }

    #[inline(never)]
    pub(super) fn let_batch_go(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        while client.leaving != 0 {
            self.let_next_go(client)?;
        }
        if self.has_pool {
            self.collect(client);
        }
        Ok(())
    }

    /// Lets the first page on its way out leave.
    pub(super) fn let_next_go(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        let index = client.leaving.trailing_zeros() as usize;
        client.leaving &= client.leaving - 1;
        self.evict_one(client, index)
    }

    /// Lets a page leave if it is on its way out. If other pages leave together with it, as a fork
    /// child's page does, all leave.
    pub(super) fn let_one_go(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
    ) -> Result<(), SetupError> {
        if let Some(index) = client.take_leaving(no) {
            self.evict_one(client, index)?;
            if self.has_pool {
                self.collect(client);
            }
        } else if client.leaving != 0 {
            let entry = client
                .engine
                .books()
                .entry(client.space, VirtPage(u64::from(no.0)));
            if entry.state == PageState::Evicting {
                self.let_batch_go(client)?;
            }
        }
        Ok(())
    }

    /// Recalls a page on its way out.
    pub(super) fn recall(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
        write: bool,
    ) -> Result<(), SetupError> {
        let index = client
            .take_leaving(no)
            .expect("a page that is waited for is on its way");
        client.seen.misses += 1;
        client.missed = client.at;
        client.marks[no.0 as usize] |= u8::from(write) * (DIRTY | WRITTEN);
        let at = client.batch[index].at;
        client
            .engine
            .evictions()
            .settle(at, Taken::Moved, &mut self.wake);
        client
            .engine
            .evictions()
            .publish(at, Outcome::PutBack, &mut self.wake);
        Ok(())
    }

    /// Evicts the `count` pages that the live manager named itself, by the movements from `first`
    /// on, if they are in memory and may leave. Like any batch they stay on their way out: see
    /// [`Host::let_go`].
    pub(super) fn evict_these(
        &mut self,
        client: &mut Client<'_>,
        first: usize,
        count: usize,
    ) -> Result<(), SetupError> {
        self.let_go(client)?;
        self.migrate(client);
        let pages = client.stream.moved[first..first + count].iter();
        let ranges: Vec<VirtRange> = pages
            .map(|moved| VirtPage(u64::from(moved.number)))
            .map(|page| VirtRange::new(page, page.plus(1)))
            .collect();
        let (space, batch) = (client.space, &mut client.batch);
        if client
            .engine
            .evictions()
            .select_these(space, &ranges, batch)
        {
            client.leaving = u64::MAX >> (EVICT_PAGES_MAX - batch.len());
        }
        Ok(())
    }
}
