//! The buffer of a client whose latency bound the last tier cannot keep (NVSwap §III): its clean
//! pages leave to it, too, and a page that is still in the last tier brings its group.
//!
//! A group is 64 neighbouring pages; the paper's are pages that left together.

use undercroft_base::{Nanos, PageNo, PageState, Slot, Stamp, TierId, VirtPage};
use undercroft_device::Time;
use undercroft_engine::DemoteItem;

use super::client::Client;
use super::host::Host;
use super::tiers::tier_id;

/// Pages of a group.
const GROUP: u32 = 64;

impl Host {
    /// Whether the pages of a client go to the buffer.
    fn uses_buffer(&self, client: &Client<'_>) -> bool {
        let bounds = self.bounds.as_ref();
        bounds.is_some_and(|bounds| bounds.uses_buffer(client.index))
    }

    /// Whether a clean page may leave to the copy that `tier` keeps. Otherwise it is written to the
    /// buffer.
    pub(super) fn copy_is_good(&self, client: &Client<'_>, tier: TierId) -> bool {
        let is_last = usize::from(tier.0) + 1 == self.tiers.len();
        let turned = self.bounds.as_ref().filter(|_| is_last);
        let turned = turned.map(|bounds| bounds.turned(client.index));
        !turned.is_some_and(|turned| turned.leaves_copy_behind(|| self.takes(client, 0)))
    }

    /// Counts a page-in for the client's latency bound, if it has one. Its plan is still at hand.
    #[inline]
    pub(super) fn note_page_in(&mut self, client: &mut Client<'_>, took: Nanos) {
        let last = tier_id(self.tiers.len() - 1);
        let Some(bounds) = &mut self.bounds else {
            return;
        };
        let mut items = client.plan.items.iter();
        let queued = items.find(|item| item.demanded && item.tier == last);
        let queued = queued.map(|item| item.no);
        if bounds.note(client.index, client.clock, took, queued.is_some()) {
            self.bound_queue();
        }
        if let Some(no) = queued
            && self.uses_buffer(client)
        {
            self.fill_buffer(client, no);
        }
    }

    /// Moves all pages of a client from the last tier to the buffer, group by group, before it goes
    /// on: its bound cannot be kept while it reads them one by one.
    pub(super) fn fill_buffer_with_all(&mut self, client: &mut Client<'_>) {
        if !self.uses_buffer(client) {
            return;
        }
        for first in (0..client.stream.numbers).step_by(GROUP as usize) {
            let end = self.fill_buffer(client, PageNo(first));
            client.clock = client.clock.max(end);
        }
    }

    /// Moves the group of a page from the last tier to the buffer, while the client goes on: as
    /// many of it as the buffer has room for. Returns when the last tier has been read.
    fn fill_buffer(&mut self, client: &mut Client<'_>, no: PageNo) -> Time {
        let last = self.tiers.len() - 1;
        let first = no.0 / GROUP * GROUP;
        let room = self.tiers[0].free_pages().min(u64::from(GROUP)) as usize;
        let mut group: Vec<(PageNo, Slot, Stamp)> = Vec::new();
        for page in first..first + GROUP {
            let entry = client
                .engine
                .books()
                .entry(client.space, VirtPage(u64::from(page)));
            if entry.state == PageState::Stored && entry.tier == tier_id(last) {
                group.push((PageNo(page), entry.slot, entry.stamp));
            }
        }
        group.truncate(room);
        let Some((_, from, _)) = group.first().copied() else {
            return client.clock;
        };
        let end = self.tiers[last].read(client.clock, from, group.len() as u64);
        for (no, slot, stamp) in group {
            if !self.takes(client, 0) {
                break;
            }
            let to = self.tiers[0].take(client.home + u64::from(no.0), false);
            client.held[0] += 1;
            self.tiers[0].write(end, to, None);
            let item = DemoteItem {
                no,
                tier: tier_id(last),
                slot,
                stamp,
                selected: u64::MAX,
            };
            client.engine.migrations().demoted(item, tier_id(0), to);
        }
        self.collect(client);
        end
    }
}
