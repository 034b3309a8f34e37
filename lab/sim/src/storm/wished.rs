//! Places of pages, and moves of copies, that a plugin wishes.

use undercroft_engine::{BatchIndex, Placing, WishedMove};
use undercroft_policy::place::TierOrder;

use super::meddler::Plugin;
use super::world::World;

impl World {
    /// Has the engine know where the plugin wants pages to go, and which come together.
    pub(super) fn note_places(&mut self) {
        while let Some((space, page, placing)) = self.plugin.as_mut().and_then(Plugin::take_place) {
            match (self.engine.evictions().place(space, page, placing), placing) {
                (false, _) => self.saw("a plugin's place: of no page or tier"),
                (true, Placing::With(_)) => self.saw("a plugin's place: beside another page"),
                (true, Placing::In(_)) => {}
            }
        }
    }

    /// The tiers to offer a page of the batch to.
    pub(super) fn tiers_for(&mut self, index: BatchIndex) -> TierOrder {
        let before = self.engine.books().stats().placed;
        let order = self.engine.evictions().tiers_for(index);
        if self.engine.books().stats().placed > before {
            self.saw("a plugin's place: offered");
        }
        order
    }

    /// Starts to move what a plugin wishes. False if there is none, or it is nowhere.
    pub(super) fn start_wished_move(&mut self) -> bool {
        let wishes = self
            .plugin
            .as_mut()
            .map_or_else(Vec::new, Plugin::take_moves);
        !wishes.is_empty() && self.start_moves(&wishes)
    }

    /// Starts to move what is wished. False if it is nowhere.
    pub fn start_moves(&mut self, wishes: &[WishedMove]) -> bool {
        let mut items = Vec::new();
        let mut migrations = self.engine.migrations();
        let Some((_, to)) = migrations.select_wished(wishes, &mut items) else {
            self.saw("a plugin's move: nothing");
            return false;
        };
        self.saw("a plugin's move: begun");
        self.start_move(items, to)
    }
}
