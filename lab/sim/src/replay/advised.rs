//! A client's side of the user's policy: what it is told, and when its wishes are taken. Pages that
//! it wants in memory are loaded after a fault, as if they had come along with it.

use undercroft_base::{PageNo, SpaceId, VirtPage};
use undercroft_device::Time;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_plugin::{Found, Memory};

use crate::plugin::Plugin;
use crate::replay::client::{Client, SCANNED, USED};
use crate::replay::host::Host;
use crate::setup::SetupError;

/// A millisecond.
const MS: u64 = 1_000_000_000;

impl Client<'_> {
    /// Pages that the user's policy wants to leave first, by what has happened until now. None if
    /// there is no such policy.
    #[inline]
    pub(super) fn take_wishes(&mut self) -> Vec<(SpaceId, VirtPage)> {
        if self.plugin.is_none() {
            return Vec::new(); // no memory is taken
        }
        self.tell_plugin();
        self.plugin
            .as_ref()
            .map_or_else(Vec::new, Plugin::take_wishes)
    }

    /// Tells the user's policy what has happened, if there is one.
    pub(super) fn tell_plugin(&mut self) {
        let books = self.engine.books();
        let memory = Memory {
            limit: books.limit().0,
            used: books.dram_used().0,
            faults: books.stats().faults,
            waited_ms: (self.clock - self.came)
                .0
                .saturating_sub(self.spent.reference.0)
                / MS,
        };
        let now_ms = self.now().0 / 1_000_000;
        if self.next_scan().is_some_and(|due| due <= self.clock) {
            self.scan_for_plugin(now_ms);
        }
        if let Some(plugin) = &mut self.plugin {
            plugin.tell(memory, self.engine.books().ranked_tiers(), now_ms);
            for (space, page, placing) in plugin.take_places() {
                self.engine.evictions().place(space, page, placing);
            }
        }
    }

    /// When the user's policy is to hear of a scan; `None`: it does not ask.
    fn next_scan(&self) -> Option<Time> {
        let due_ms = self.plugin.as_ref()?.scan_ms()?;
        Some(Time(due_ms.saturating_mul(MS)))
    }

    /// References until the next scan for the user's policy, `most` at most.
    pub(super) fn until_scan(&self, most: usize, per_reference: Time) -> usize {
        let Some(due) = self.next_scan() else {
            return most;
        };
        let timed = self.clock.0 + per_reference.0 * self.at.saturating_sub(self.timed) as u64;
        let left = due.0.saturating_sub(timed);
        most.min(left.div_ceil(per_reference.0.max(1)).max(1) as usize)
    }

    /// As a live scan: a page counts as used from the second scan on.
    #[cold]
    fn scan_for_plugin(&mut self, now_ms: u64) {
        let mut found = Found::default();
        found.scanned(self.space);
        for (number, mark) in self.marks.iter_mut().enumerate() {
            if self.engine.books().is_resident(PageNo(number as u32)) {
                if *mark & (USED | SCANNED) == USED | SCANNED {
                    found.add(self.space, VirtPage(number as u64));
                }
                *mark = (*mark & !USED) | SCANNED;
            }
        }
        if let Some(plugin) = &mut self.plugin {
            plugin.scanned(found, now_ms);
        }
    }
}

impl Host {
    /// Selects what the user's policy wishes to be moved next.
    #[cold]
    pub(super) fn select_wished(&mut self, client: &mut Client<'_>) {
        while let Some(plugin) = &client.plugin {
            let (wishes, items) = (plugin.take_moves(), &mut client.beside.items);
            let found = client.engine.migrations().select_wished(&wishes, items);
            if let Some((_, to)) = found {
                client.beside.to = to;
            }
            if found.is_some() || wishes.is_empty() {
                return;
            }
        }
    }

    /// Has the user's policy, if there is one, hear between references.
    pub(super) fn pause(
        &mut self,
        client: &mut Client<'_>,
        per_reference: Time,
    ) -> Result<(), SetupError> {
        if client.plugin.is_some() {
            client.advance_clock(per_reference);
            self.leave_now(client)?;
        }
        Ok(())
    }

    /// Has the pages leave that the user's policy wants to leave although there may be room.
    #[cold]
    pub(super) fn leave_now(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        client.tell_plugin();
        while let Some(plugin) = &client.plugin {
            let mut wishes = plugin.take_leave_now();
            if wishes.is_empty() {
                break;
            }
            while (client.engine.evictions()).select_wished(
                &mut wishes,
                EVICT_PAGES_MAX,
                &mut client.batch,
            ) {
                for index in 0..client.batch.len() {
                    self.evict_one(client, index)?;
                }
                self.collect(client);
            }
        }
        Ok(())
    }

    /// Loads the pages that the user's policy wants in memory, as far as there is room for them.
    #[cold]
    pub(super) fn load_ahead(&mut self, client: &mut Client<'_>) {
        client.tell_plugin();
        while let Some(plugin) = &client.plugin {
            let wishes = plugin.take_loads();
            let mut rest = &wishes[..];
            while let Some(&(space, _)) = rest.first() {
                let same = rest.iter().take_while(|(of, _)| *of == space);
                let pages: Vec<_> = same.map(|(_, page)| *page).collect();
                let mut faults = client.engine.faults();
                let done = faults.prefetch(space, &pages, &mut client.plan);
                rest = &rest[done..];
                if !client.plan.items.is_empty() {
                    self.load(client);
                }
            }
            if wishes.is_empty() {
                return;
            }
        }
    }
}
