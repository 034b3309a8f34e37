//! Pages of spaces that are passed over: the policy names them as any others, and they are put out
//! of its hands as it does, so that it does not come across them again and again.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;
use undercroft_base::{PageNo, SpaceId};
use undercroft_policy::reclaim::Arrival;

use crate::{Engine, Evictions, Ledger};

/// Which they are.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Spaces of which no page is chosen for the time being: a few.
    pub spaces: FxHashSet<SpaceId>,
    /// Resident pages that the policy does not know. A tree, because it grows in small steps.
    pub pages: BTreeSet<(SpaceId, PageNo)>,
}

impl<L: Ledger> Evictions<'_, L> {
    /// No page of the space is chosen to leave from now on (or may be again, when
    /// [`Evictions::take_back`] is through): its process cannot give any.
    pub fn pass_over(&mut self, space: SpaceId, on: bool) {
        match on {
            true => self.engine.kept.spaces.insert(space),
            false => self.engine.kept.spaces.remove(&space),
        };
    }

    /// Tells the policy of up to `most` pages of a space that was passed over; false when it knows
    /// all of them.
    pub fn take_back(&mut self, space: SpaceId, most: usize) -> bool {
        let of_space = (space, PageNo(0))..=(space, PageNo(u32::MAX));
        let pages: Vec<_> = self
            .engine
            .kept
            .pages
            .range(of_space)
            .take(most)
            .copied()
            .collect();
        for key in &pages {
            self.engine.kept.pages.remove(key);
            self.engine.reclaim.insert(key.1, Arrival::Returned);
        }
        !pages.is_empty()
    }
}

impl<L: Ledger> Engine<L> {
    /// Of the victims that the policy named, and knows no more, those of spaces that are passed
    /// over stay.
    #[inline]
    pub(crate) fn keep_victims(&mut self) {
        if self.kept.spaces.is_empty() {
            return;
        }
        let Engine {
            table,
            victims,
            kept,
            ..
        } = self;
        victims.retain(|no| {
            let space = table.address(*no).0;
            let keep = kept.spaces.contains(&space);
            if keep {
                kept.pages.insert((space, *no));
            }
            !keep
        });
    }

    /// A resident page with a frame of its own is one no more: the policy forgets it. True when it
    /// was kept.
    #[inline]
    pub(crate) fn unlist(&mut self, no: PageNo) -> bool {
        let kept =
            !self.kept.pages.is_empty() && self.kept.pages.remove(&(self.table.address(no).0, no));
        if !kept {
            self.reclaim.remove(no);
        }
        kept
    }

    /// The page has another number.
    pub(crate) fn renumber(&mut self, old: PageNo, new: PageNo) {
        match self.unlist(old) {
            true => _ = self.kept.pages.insert((self.table.address(new).0, new)),
            false => self.reclaim.insert(new, Arrival::Returned),
        }
    }

    /// Whether the policy knows a resident page with a frame of its own.
    #[inline]
    pub(crate) fn is_listed(&self, no: PageNo) -> bool {
        self.kept.pages.is_empty() || !self.kept.pages.contains(&(self.table.address(no).0, no))
    }
}
