//! The slots that pages refer to, for a takeover: one bit each.

use undercroft_base::{Slot, SlotSet, TierId};

/// Slots by tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims([SlotSet; TierId::MAX + 1]);

impl Claims {
    /// Adds a slot. False if it was claimed before.
    pub(crate) fn insert(&mut self, tier: TierId, slot: Slot) -> bool {
        self.0[usize::from(tier.0)].insert(slot)
    }

    /// Slots of a tier.
    pub fn of(&self, tier: TierId) -> &SlotSet {
        &self.0[usize::from(tier.0)]
    }

    /// All, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (TierId, Slot)> {
        let tiers = (0..).map(TierId).zip(&self.0);
        tiers.flat_map(|(tier, slots)| slots.iter().map(move |slot| (tier, slot)))
    }
}
