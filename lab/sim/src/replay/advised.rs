//! A client's side of the user's policy: what it is told, and when its wishes are taken. Pages that
//! it wants in memory are loaded after a fault, as if they had come along with it.

use undercroft_base::{SpaceId, VirtPage};
use undercroft_plugin::Memory;

use crate::plugin::Plugin;
use crate::replay::client::Client;
use crate::replay::host::Host;

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
        };
        let now_ms = self.now().0 / 1_000_000;
        if let Some(plugin) = &mut self.plugin {
            plugin.tell(memory, now_ms);
        }
    }
}

impl Host {
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
