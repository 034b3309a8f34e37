//! Demotion between tiers: the oldest pages of a fast tier move to the next, so new pages do not
//! have to be stored past old ones.

use std::collections::VecDeque;

use undercroft_base::{Bytes, Entry, PageNo, PageState, Slot, Stamp, TierId};

use undercroft_policy::place::{Migration, PageFacts, TierOrder, TierState};

use crate::batch::BatchIndex;
use crate::ledger::Ledger;
use crate::limits::{DEMOTE_PAGES_MAX, DEMOTE_SCAN_MAX, STAMP_EVICTIONS};
use crate::{Engine, Evictions, Migrations};

/// Stored pages, in the order they were stored. An entry may be stale: the page came back or was
/// dropped. The page's own entry tells.
#[derive(Debug, Default)]
pub(crate) struct AgeQueue {
    queue: VecDeque<(PageNo, Stamp)>,
    /// Length at which stale entries are removed next.
    sweep_at: usize,
}

/// One page to move to the next tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemoteItem {
    /// The page's entry.
    pub no: PageNo,
    /// The tier it is in.
    pub tier: TierId,
    /// Its slot there. The slot may be freed at any time, so its bytes count only if they verify.
    pub slot: Slot,
    /// Its generation, which the new copy keeps.
    pub stamp: Stamp,
}

impl<L: Ledger> Migrations<'_, L> {
    /// Reports how much DRAM the tiers hold now.
    pub fn set_pool_held(&mut self, held: Bytes) {
        self.engine.pool_held = held;
        let dram = self.engine.books().dram_used();
        self.engine.stats.dram_peak = self.engine.stats.dram_peak.max(dram);
    }

    /// Sets what each tier holds now, fastest first. Called before a decision is asked for. The
    /// engine itself knows whether pages may be demoted from a tier: it sets `demotes`.
    pub fn set_tiers(&mut self, tiers: impl IntoIterator<Item = TierState>) {
        self.engine.tiers.clear();
        let mut dram = 0;
        for (at, mut state) in tiers.into_iter().enumerate() {
            state.demotes = self.engine.config.demotes.get(at) == Some(&true);
            dram += state.dram.0;
            self.engine.tiers.push(state);
        }
        self.set_pool_held(Bytes(dram));
    }

    /// What should move between tiers before the next batch leaves. The caller carries it out with
    /// [`Migrations::select`], sets the tiers, and asks again until nothing moves.
    pub fn wanted(&mut self) -> Option<Migration> {
        let limit = self.engine.config.limit;
        self.engine.place.migrate(limit, &self.engine.tiers)
    }

    /// Appends up to `want` of the pages that have been longest in `tier`. They stay stored there,
    /// and loadable, until [`Migrations::demoted`]. Appends none when none is left, or when all
    /// that were scanned are shared with a fork relative.
    pub fn select(&mut self, tier: TierId, want: usize, out: &mut Vec<DemoteItem>) {
        let Some(ages) = self.engine.ages.get_mut(tier.0 as usize) else {
            return;
        };
        let want = want.min(DEMOTE_PAGES_MAX);
        let mut looks = ages.queue.len().min(DEMOTE_SCAN_MAX);
        while out.len() < want && looks > 0 {
            let Some((no, stamp)) = ages.queue.pop_front() else {
                break;
            };
            looks -= 1;
            let entry = self.engine.table.entry(no);
            if !still_there(entry, tier, stamp) {
                continue;
            }
            if self.engine.refs.contains_key(&(tier, entry.slot)) {
                ages.queue.push_back((no, stamp)); // shared with a fork relative, which may end
                continue;
            }
            out.push(DemoteItem {
                no,
                tier,
                slot: entry.slot,
                stamp,
            });
        }
        if !out.is_empty() {
            // Later evictions get another stamp. A page may come back, change, and be evicted to
            // the same slot before the demotion of its old bytes ends; the stamp tells the two
            // copies apart.
            self.engine.evictions = (self.engine.evictions + 1).next_multiple_of(STAMP_EVICTIONS);
        }
    }

    /// The copy of `item` was written to `slot` of `to`. Publishes it and frees the old slot. If
    /// the page is no longer at the old slot, frees the new one.
    pub fn demoted(&mut self, item: DemoteItem, to: TierId, slot: Slot) {
        let entry = self.engine.table.entry(item.no);
        let same = still_there(entry, item.tier, item.stamp) && entry.slot == item.slot;
        if !same || self.engine.refs.contains_key(&(item.tier, item.slot)) {
            self.engine.release(to, slot);
            return;
        }
        let moved = Entry {
            tier: to,
            slot,
            ..entry
        };
        self.engine.table.set(item.no, moved);
        self.engine.release(item.tier, item.slot);
        self.engine.remember_age(item.no, moved);
        self.engine.stats.demoted += 1;
    }

    /// The page could not be demoted. It counts as the newest now, so that others are tried first.
    pub fn failed(&mut self, item: DemoteItem) {
        let entry = self.engine.table.entry(item.no);
        if still_there(entry, item.tier, item.stamp) {
            self.engine.remember_age(item.no, entry);
        }
    }
}

impl<L: Ledger> Evictions<'_, L> {
    /// The tiers to offer an item of the batch to, in order. The item needs a new copy.
    #[inline]
    pub fn tiers_for(&mut self, index: BatchIndex) -> TierOrder {
        let no = self.engine.batch.pages[self.engine.batch.place(index)]
            .item
            .no;
        self.engine
            .place
            .order(PageFacts { no }, &self.engine.tiers)
    }
}

impl<L: Ledger> Engine<L> {
    #[inline]
    pub(crate) fn remember_age(&mut self, no: PageNo, stored: Entry) {
        let tier = stored.tier.0 as usize;
        if stored.tier != TierId::FILL && self.config.demotes.get(tier).copied().unwrap_or(false) {
            self.remember_age_in(tier, no, stored);
        }
    }

    #[inline(never)]
    fn remember_age_in(&mut self, tier: usize, no: PageNo, stored: Entry) {
        let ages = &mut self.ages[tier];
        ages.queue.push_back((no, stored.stamp));
        if ages.queue.len() >= ages.sweep_at.max(4 * DEMOTE_PAGES_MAX) {
            let table = &self.table;
            ages.queue
                .retain(|(no, stamp)| still_there(table.entry(*no), stored.tier, *stamp));
            ages.sweep_at = 2 * ages.queue.len();
        }
    }
}

fn still_there(entry: Entry, tier: TierId, stamp: Stamp) -> bool {
    entry.state == PageState::Stored && entry.tier == tier && entry.stamp == stamp
}
