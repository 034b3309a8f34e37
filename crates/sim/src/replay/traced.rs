//! Repeats recorded prefetch: pages that were prefetched in the live run are prefetched at the same
//! reference.
//!
//! A use of a page in memory raises no fault, so a live trace lacks the uses of prefetched pages. A
//! prefetcher that decides anew sees other streams than the live one. A simulation without prefetch
//! lacks the pages, and the room that they took. So the trace names the prefetched pages
//! (`Becomes::Ahead`).
//!
//! There are two ways. If the live fault is a fault here, too, its pages come through the engine's
//! prefetch port, so that one request reads all: `NextWindow::expect` sets the window before the
//! engine asks. [`Host::prefetch_along`] loads the others where the trace names them. Those are
//! pages of a wide window with gaps, of a fault that is a hit here, or of another thread's fault.

use undercroft_base::{PageNo, ThreadId, TierId, VirtPage};
use undercroft_engine::{Fault, FaultAnswer, Install};
use undercroft_policy::prefetch::Window;

use super::client::{AHEAD, Client, DIRTY, KNOWN, WRITTEN};
use super::host::Host;
use crate::memory_trace::Becomes;
use crate::setup::{SetupError, SimRoom};

impl Host {
    /// Called before the fault at `no`, the last reference done. First it lets pages leave: those
    /// that had left when the live run prefetched, and as many of the last batch as the engine
    /// wants free for a window.
    pub(super) fn expect_window(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
    ) -> Result<(), SetupError> {
        let (stream, after, moved) = (client.stream, client.at, client.moved);
        let Some(next) = &client.traced else {
            return Ok(());
        };
        next.expect(no, after, &stream.moved[moved..]);
        let with = stream.moved[moved..].iter();
        let mut pages = 0;
        for moved in with.take_while(|moved| moved.after == after) {
            if matches!(moved.what, Becomes::Ahead { .. }) {
                self.let_one_go(client, PageNo(moved.number))?;
                pages += 1;
            }
        }
        while client.leaving != 0 && client.engine.books().room() < 2 * pages {
            self.let_next_go(client)?;
            if self.has_pool {
                self.collect(client);
            }
        }
        Ok(())
    }

    /// Prefetches a page that the live run prefetched, unless it is in memory.
    ///
    /// * `written`: the program wrote it then.
    pub(super) fn prefetch_along(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
        written: bool,
    ) -> Result<(), SetupError> {
        if !client.engine.books().is_resident(no) {
            self.let_one_go(client, no)?;
            self.load_along(client, no)?;
        }
        if written && client.engine.books().is_resident(no) {
            let mark = &mut client.marks[no.0 as usize];
            client.seen.ahead_used += u64::from(*mark & AHEAD != 0);
            *mark = (*mark & !AHEAD) | KNOWN | DIRTY | WRITTEN;
        }
        Ok(())
    }

    /// As [`Host::serve`], but without a faulting or waiting thread.
    fn load_along(&mut self, client: &mut Client<'_>, no: PageNo) -> Result<(), SetupError> {
        if self.setup.room != SimRoom::AfterPlan {
            self.have_room(client, 1)?;
        }
        let fault = Fault {
            space: client.space,
            page: VirtPage(u64::from(no.0)),
            write: false,
            thread: ThreadId(0),
            urgent: false,
        };
        if let Some(next) = &client.traced {
            next.set(Window::default(), 0); // of a reference that was no fault
        }
        let answer = client.engine.faults().answer(fault, &mut client.plan);
        assert_eq!(answer, FaultAnswer::Load, "{no:?} is not in memory");
        client.plan.items[0].demanded = false;
        self.have_room(client, 0)?;
        let item = &mut client.plan.items[0];
        item.install = Install::Done;
        if item.tier != TierId::FILL {
            let tier = &mut self.tiers[item.tier.0 as usize];
            let end = tier.read(client.clock, item.slot, 1);
            client.ahead_until = client.ahead_until.max(end);
        }
        let mark = &mut client.marks[no.0 as usize];
        *mark = (*mark & !DIRTY) | if item.fresh { KNOWN } else { AHEAD };
        client
            .engine
            .faults()
            .finish(client.plan.fault, &mut client.plan.items);
        self.collect(client);
        self.reclaim(client)
    }
}
