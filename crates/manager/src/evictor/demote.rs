//! From tier to tier: the oldest pages of a full RAM tier go to the next one.

use std::sync::atomic::Ordering;

use undercroft_base::{PAGE_BYTES, Store, StoreError, TierId, page_checksum};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};

use super::Evictor;
use crate::shared::MeteredTier;

impl Evictor {
    /// True when a RAM tier with a tier below it has no room for the next batch.
    pub(super) fn pool_is_full(&self) -> bool {
        let tiers = &self.shared.tiers;
        let last = tiers.len() - 1;
        tiers[..last]
            .iter()
            .any(|t| t.is_ram() && headroom(t) < wanted_headroom(t))
    }

    /// Moves up to 1 MiB of the oldest pages of the first full RAM tier to the next tier; false when nothing moved.
    pub(super) fn demote(&mut self) -> bool {
        let tiers = &self.shared.tiers;
        let Some(from) = (0..tiers.len() - 1).find(|at| {
            tiers[*at].is_ram() && headroom(&tiers[*at]) < 2 * wanted_headroom(&tiers[*at])
        }) else {
            return false;
        };
        self.demotions.clear();
        let tier = TierId(from as u8);
        self.shared
            .engine()
            .select_demotions(tier, DEMOTE_PAGES_MAX, &mut self.demotions);
        if self.demotions.is_empty() {
            return false;
        }
        let mut loaded = Vec::with_capacity(self.demotions.len());
        for (at, item) in self.demotions.iter().enumerate() {
            let page = self.demote_buffer.page_mut(at);
            loaded.push(tiers[from].tier.load(item.slot, item.stamp, page).is_ok());
        }
        let mut batch = Vec::with_capacity(self.demotions.len());
        let mut indices = Vec::with_capacity(self.demotions.len());
        for (at, item) in self
            .demotions
            .iter()
            .enumerate()
            .filter(|(at, _)| loaded[*at])
        {
            let page = self.demote_buffer.page(at);
            indices.push(at);
            batch.push(Store {
                page,
                stamp: item.stamp,
                checksum: page_checksum(page, item.stamp),
                result: Err(StoreError::Full),
            });
        }
        let next = &tiers[from + 1];
        next.tier.store(&mut batch);
        let mut moved = 0;
        let mut engine = self.shared.engine();
        for (at, item) in self.demotions.iter().enumerate() {
            if !loaded[at] {
                engine.demotion_failed(*item);
            }
        }
        for (at, store) in indices.iter().zip(&batch) {
            match store.result {
                Ok(slot) => {
                    moved += 1;
                    engine.demoted(self.demotions[*at], TierId(from as u8 + 1), slot);
                }
                Err(_) => engine.demotion_failed(self.demotions[*at]),
            }
        }
        drop(engine);
        next.writes.fetch_add(moved, Ordering::Relaxed);
        self.shared.free_released();
        moved > 0
    }
}

/// Room a RAM tier should have for the next batches; a small tier has a quarter.
fn wanted_headroom(metered: &MeteredTier) -> u64 {
    let batch = (2 * EVICT_PAGES_MAX * PAGE_BYTES) as u64;
    batch.min(metered.tier.info().capacity.0 / 4)
}

fn headroom(metered: &MeteredTier) -> u64 {
    metered
        .tier
        .info()
        .capacity
        .0
        .saturating_sub(metered.tier.usage().held.0)
}
