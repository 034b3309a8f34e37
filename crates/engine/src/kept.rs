//! Pages of spaces that are passed over. The policy names them like any others. Each is then taken
//! away from the policy, so that it is not named again and again.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;
use undercroft_base::{Flags, PageNo, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_policy::reclaim::Arrival;

use crate::{Engine, Evictions, Ledger, PageEvent};

/// The spaces and the pages.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Spaces that are passed over at the moment: a few.
    pub spaces: FxHashSet<SpaceId>,
    /// Resident pages that the policy does not know. A tree, because it grows in small steps.
    pub pages: BTreeSet<(SpaceId, PageNo)>,
}

impl Kept {
    /// The kept pages of a space.
    fn of(&self, space: SpaceId) -> impl Iterator<Item = PageNo> {
        let all = (space, PageNo(0))..=(space, PageNo(u32::MAX));
        self.pages.range(all).map(|(_, no)| *no)
    }
}

impl<L: Ledger> Evictions<'_, L> {
    /// From now on no page of the space is chosen to leave, because its process cannot give any.
    /// With `on` false pages may be chosen again, once [`Evictions::take_back`] has returned them
    /// all.
    pub fn pass_over(&mut self, space: SpaceId, on: bool) {
        if on {
            self.engine.kept.spaces.insert(space)
        } else {
            self.engine.kept.spaces.remove(&space)
        };
    }

    /// Gives the policy up to `most` pages of a space that was passed over. False when the policy
    /// knows all of them.
    pub fn take_back(&mut self, space: SpaceId, most: usize) -> bool {
        let pages: Vec<_> = self.engine.kept.of(space).take(most).collect();
        for no in &pages {
            self.engine.take_back(space, *no);
        }
        !pages.is_empty()
    }

    /// The policy forgets a page that stays in memory, as it does with each that it chooses of a
    /// space that is passed over. Only replays need it.
    pub fn keep(&mut self, space: SpaceId, page: VirtPage) {
        let Some(no) = self.engine.table.find(space, page) else {
            return;
        };
        let entry = self.engine.table.entry(no);
        let counts = entry.state == PageState::Resident && !entry.flags.has(Flags::INHERITED);
        if counts && self.engine.is_listed(no) {
            self.engine.reclaim.remove(no);
            self.engine.kept.pages.insert((space, no));
        }
    }

    /// The policy knows the page again, if it was kept. Only replays need it.
    pub fn take_back_one(&mut self, space: SpaceId, page: VirtPage) {
        if let Some(no) = self.engine.table.find(space, page)
            && !self.engine.is_listed(no)
        {
            self.engine.take_back(space, no);
        }
    }
}

impl<L: Ledger> Engine<L> {
    fn take_back(&mut self, space: SpaceId, no: PageNo) {
        let (_, page) = self.table.address(no);
        self.kept.pages.remove(&(space, no));
        self.tell_page(space, page, PageEvent::TakenBack);
        self.reclaim.insert(no, Arrival::Returned);
    }

    /// Pages of `range` are about to belong to another space, as they are. The policy knows those
    /// that were kept again.
    pub(crate) fn take_back_all(&mut self, space: SpaceId, range: VirtRange) {
        let within = |no: &PageNo| range.contains(self.table.address(*no).1);
        let pages: Vec<_> = self.kept.of(space).filter(within).collect();
        for no in pages {
            self.take_back(space, no);
        }
    }

    /// Removes pages of spaces that are passed over from the victims: they stay. The policy named
    /// them and no longer knows them.
    #[inline]
    pub(crate) fn keep_victims(&mut self) {
        if self.kept.spaces.is_empty() {
            return;
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.retain(|no| {
            let (space, page) = self.table.address(*no);
            let keep = self.kept.spaces.contains(&space);
            if keep {
                self.kept.pages.insert((space, *no));
                self.tell_page(space, page, PageEvent::Kept);
            }
            !keep
        });
        self.victims = victims;
    }

    /// A page is no longer resident with a frame of its own, so the policy forgets it. True when it
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
        if self.unlist(old) {
            self.kept.pages.insert((self.table.address(new).0, new));
        } else {
            self.reclaim.insert(new, Arrival::Returned);
        }
    }

    /// Whether the policy knows a resident page with a frame of its own.
    #[inline]
    pub(crate) fn is_listed(&self, no: PageNo) -> bool {
        self.kept.pages.is_empty() || !self.kept.pages.contains(&(self.table.address(no).0, no))
    }
}
