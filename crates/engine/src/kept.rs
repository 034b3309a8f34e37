//! Resident pages that the policy does not know for a while, so that it does not name them again
//! and again: those of spaces that are passed over, and those that the kernel refused to move.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use rustc_hash::{FxHashMap, FxHashSet};
use undercroft_base::{Flags, PageNo, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_policy::reclaim::Arrival;

use crate::limits::EVICT_PAGES_MAX;
use crate::{Engine, Evictions, Ledger, PageEvent};

/// A page that was refused many times in a row waits until this many times the resident pages have
/// been chosen.
const WAIT_ROTATIONS_MAX: u64 = 64;

/// The spaces and the pages.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Spaces that are passed over at the moment: a few.
    pub spaces: FxHashSet<SpaceId>,
    /// Resident pages that the policy does not know. A tree, because it grows in small steps.
    pub pages: BTreeSet<(SpaceId, PageNo)>,
    /// Pages that were refused when they were chosen last. Those that may be chosen again have not
    /// been since.
    refusals: FxHashMap<PageNo, Refusal>,
    /// When refused pages are due: the count of chosen pages. Also some that need no more.
    due: BinaryHeap<Reverse<(u64, SpaceId, PageNo)>>,
}

/// What is known of a page that the kernel did not move: it is locked, read-only or pinned.
#[derive(Debug, Clone, Copy)]
struct Refusal {
    /// How long the page waits before it may be chosen again, in chosen pages.
    wait: u64,
    /// The count of chosen pages at which it may.
    due: u64,
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
    /// A resident page was refused. The policy knows it again when as many pages were chosen as are
    /// resident, and after each refusal in a row when twice as many were.
    #[cold]
    pub(crate) fn keep_refused(&mut self, no: PageNo) {
        let (space, page) = self.table.address(no);
        let rotation = self.resident.max(EVICT_PAGES_MAX as u64);
        let wait = match self.kept.refusals.get(&no) {
            Some(refusal) => (2 * refusal.wait).min(WAIT_ROTATIONS_MAX * rotation),
            None => rotation,
        };
        self.wait_until(no, wait, self.evictions + wait);
        self.reclaim.remove(no);
        self.kept.pages.insert((space, no));
        self.tell_page(space, page, PageEvent::Kept);
    }

    fn wait_until(&mut self, no: PageNo, wait: u64, due: u64) {
        let (space, _) = self.table.address(no);
        self.kept.refusals.insert(no, Refusal { wait, due });
        self.kept.due.push(Reverse((due, space, no)));
        if self.kept.due.len() > 2 * self.kept.refusals.len() + EVICT_PAGES_MAX {
            let refusals = &self.kept.refusals;
            let needed = |due: u64, no: &PageNo| refusals.get(no).is_some_and(|r| r.due == due);
            self.kept
                .due
                .retain(|Reverse((due, _, no))| needed(*due, no));
        }
    }

    /// Gives the policy refused pages, at most a batch: those that are due, or, with `all`, those
    /// that will be due first. False if there is none.
    #[inline]
    pub(crate) fn take_back_refused(&mut self, all: bool) -> bool {
        let mut given = 0;
        while given < EVICT_PAGES_MAX
            && let Some(Reverse((due, space, no))) = self.kept.due.peek().copied()
            && (all || due <= self.evictions)
        {
            self.kept.due.pop();
            let waits = self.kept.refusals.get(&no).is_some_and(|r| r.due == due);
            if waits && self.kept.pages.contains(&(space, no)) {
                self.take_back(space, no);
                given += 1;
            }
        }
        given > 0
    }

    /// The page was not refused, or is another one now.
    #[inline]
    pub(crate) fn forget_refusal(&mut self, no: PageNo) {
        if !self.kept.refusals.is_empty() {
            self.kept.refusals.remove(&no);
        }
    }

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
        self.forget_refusal(no);
        let kept =
            !self.kept.pages.is_empty() && self.kept.pages.remove(&(self.table.address(no).0, no));
        if !kept {
            self.reclaim.remove(no);
        }
        kept
    }

    /// The page has another number.
    pub(crate) fn renumber(&mut self, old: PageNo, new: PageNo) {
        let refusal = self.kept.refusals.get(&old).copied();
        if self.unlist(old) {
            self.kept.pages.insert((self.table.address(new).0, new));
        } else {
            self.reclaim.insert(new, Arrival::Returned);
        }
        if let Some(Refusal { wait, due }) = refusal {
            self.wait_until(new, wait, due);
        }
    }

    /// Whether the policy knows a resident page with a frame of its own.
    #[inline]
    pub(crate) fn is_listed(&self, no: PageNo) -> bool {
        self.kept.pages.is_empty() || !self.kept.pages.contains(&(self.table.address(no).0, no))
    }
}
