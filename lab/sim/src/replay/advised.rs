//! A client's side of the user's policy: what it is told, and when its wishes are taken.

use undercroft_base::{SpaceId, VirtPage};
use undercroft_plugin::Memory;

use crate::plugin::Plugin;
use crate::replay::client::Client;

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
            .as_mut()
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
