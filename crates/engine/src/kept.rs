//! Resident pages that the policy does not know for a while, so that it does not name them again
//! and again: those of spaces that are passed over, and those that cannot move. The kernel refused
//! to move these, or they are in a mapping that is set aside, or they are locked.
//!
//! What cannot move is not the working set. So it raises the limit in force: by no more than it
//! takes, and only as far as the other pages would have less than a floor ([`Engine::raised`]).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use rustc_hash::{FxHashMap, FxHashSet};
use undercroft_base::{Flags, PageCount, PageNo, PageState, SpaceId, VirtPage, VirtRange};
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
    /// Resident pages of those spaces, and those that were refused once. A tree, because it grows
    /// in small steps.
    pub pages: BTreeSet<(SpaceId, PageNo)>,
    /// Resident pages that cannot move: they are locked, in a mapping that is set aside, or were
    /// refused twice in a row.
    pub still: BTreeSet<(SpaceId, PageNo)>,
    /// The same in base pages.
    pub still_pages: PageCount,
    /// Mappings that are set aside: no page of them moves. Disjoint; the end of each by its start.
    aside: BTreeMap<(SpaceId, VirtPage), VirtPage>,
    /// Pages that were refused when they were chosen last. Those that may be chosen again have not
    /// been since.
    refusals: FxHashMap<PageNo, Waiting>,
    /// When refused pages are due: the count of chosen pages. Also some that need no more.
    due: BinaryHeap<Reverse<(u64, SpaceId, PageNo)>>,
}

/// Waiting of a page that the kernel did not move: it is locked, read-only or pinned.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// How long the page waits before it may be chosen again, in chosen pages.
    wait: u64,
    /// When that is, by the count of chosen pages. `None`: it may be chosen.
    due: Option<u64>,
}

impl Kept {
    /// The kept pages of a space.
    fn of(&self, space: SpaceId) -> impl Iterator<Item = PageNo> {
        Kept::in_space(&self.pages, space)
    }

    fn in_space(of: &BTreeSet<(SpaceId, PageNo)>, space: SpaceId) -> impl Iterator<Item = PageNo> {
        let all = (space, PageNo(0))..=(space, PageNo(u32::MAX));
        of.range(all).map(|(_, no)| *no)
    }

    fn has(&self, page: &(SpaceId, PageNo)) -> bool {
        self.pages.contains(page) || self.still.contains(page)
    }

    /// The parts of `range` that are set aside, ascending.
    fn aside_in(&self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        let below = self.aside.range(..(space, range.end)).rev();
        let found = below
            .map(|((of, start), end)| (*of, VirtRange::new(*start, *end)))
            .take_while(|(of, old)| *of == space && old.end > range.start);
        let mut parts: Vec<_> = found.map(|(_, old)| old.intersect(range)).collect();
        parts.reverse();
        parts
    }

    /// No part of `range` is set aside any more.
    pub(crate) fn cut_aside(&mut self, space: SpaceId, range: VirtRange) {
        for part in self.aside_in(space, range) {
            let last = self.aside.range(..=(space, part.start)).next_back();
            let Some(((_, start), end)) = last.map(|(start, end)| (*start, *end)) else {
                continue;
            };
            self.aside.remove(&(space, start));
            for rest in VirtRange::new(start, end).minus(&[part]) {
                self.aside.insert((space, rest.start), rest.end);
            }
        }
    }

    /// True if the page cannot move, as far as is known.
    fn is_aside(&self, space: SpaceId, page: VirtPage) -> bool {
        !self.aside.is_empty() && !self.aside_in(space, VirtRange::one(page)).is_empty()
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

    /// No page of `range` can move from now on, also none that comes later: the kernel moves none
    /// of this mapping. With `on` false, they can. The caller then calls
    /// [`Evictions::follow_still`] for each known part.
    pub fn set_still(&mut self, space: SpaceId, range: VirtRange, on: bool) {
        let kept = &mut self.engine.kept;
        kept.cut_aside(space, range);
        if on && !range.is_empty() {
            kept.aside.insert((space, range.start), range.end);
        }
    }

    /// The policy forgets the pages of `part` that cannot move, and knows the others again. O(pages
    /// of the part).
    pub fn follow_still(&mut self, space: SpaceId, part: VirtRange) {
        for (page, no) in self.engine.table.known_pages(space, part) {
            if self.engine.kept.is_aside(space, page) {
                self.engine.hold_still(no);
            } else {
                self.engine.let_move(no);
            }
        }
    }

    /// The parts of `range` that are set aside ([`Evictions::set_still`]), ascending.
    pub fn still_parts(&self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        self.engine.kept.aside_in(space, range)
    }

    /// The pages that can move shall have this much memory at least, however many cannot.
    pub fn set_floor(&mut self, floor: PageCount) {
        self.engine.floor = floor;
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
        // A page that was refused once may have been in use for that moment.
        if wait == rotation {
            self.kept.pages.insert((space, no));
        } else {
            self.keep_still(space, no);
        }
        self.tell_page(space, page, PageEvent::Kept);
    }

    /// A page that is in memory stays there, and the policy forgets it.
    pub(crate) fn hold_still(&mut self, no: PageNo) {
        let entry = self.table.entry(no);
        if entry.state != PageState::Resident || entry.flags.has(Flags::INHERITED) {
            return;
        }
        let (space, page) = self.table.address(no);
        if self.is_listed(no) {
            self.reclaim.remove(no);
            self.tell_page(space, page, PageEvent::Kept);
        }
        self.kept.pages.remove(&(space, no));
        self.keep_still(space, no);
    }

    /// The page cannot move. False if that was known.
    fn keep_still(&mut self, space: SpaceId, no: PageNo) -> bool {
        let new = self.kept.still.insert((space, no));
        self.kept.still_pages.0 += if new { self.table.base_pages(no) } else { 0 };
        new
    }

    fn forget_still(&mut self, space: SpaceId, no: PageNo) {
        if self.kept.still.remove(&(space, no)) {
            self.kept.still_pages.0 -= self.table.base_pages(no);
        }
    }

    /// The policy knows a page again, unless the kernel refused to move it or it is locked.
    pub(crate) fn let_move(&mut self, no: PageNo) {
        let (space, _) = self.table.address(no);
        let waits = (self.kept.refusals.get(&no)).is_some_and(|refusal| refusal.due.is_some());
        let locked = self.table.entry(no).flags.has(Flags::LOCKED);
        if !waits && !locked && self.kept.still.contains(&(space, no)) {
            self.take_back(space, no);
        }
    }

    /// By how much the limit in force is above the one that was set, because of pages that cannot
    /// move: by no more than these take, and only as far as the others would have less than the
    /// floor.
    #[inline]
    pub(crate) fn raised(&self) -> u64 {
        if self.kept.still.is_empty() {
            return 0;
        }
        let still = self.kept.still_pages.bytes().0;
        let limit = self.config.limit.0;
        let floor = self.floor.bytes().0.min(limit / 2);
        (still + self.pool_held.0 + floor)
            .saturating_sub(limit)
            .min(still)
    }

    fn wait_until(&mut self, no: PageNo, wait: u64, due: u64) {
        let (space, _) = self.table.address(no);
        let waiting = Waiting {
            wait,
            due: Some(due),
        };
        self.kept.refusals.insert(no, waiting);
        self.kept.due.push(Reverse((due, space, no)));
        if self.kept.due.len() > 2 * self.kept.refusals.len() + EVICT_PAGES_MAX {
            let refusals = &self.kept.refusals;
            let needed =
                |due: u64, no: &PageNo| refusals.get(no).is_some_and(|r| r.due == Some(due));
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
            let waits = (self.kept.refusals.get(&no)).is_some_and(|r| r.due == Some(due));
            // It may be gone, or be another page.
            if waits && self.kept.has(&(space, no)) {
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
        if !self.kept.pages.remove(&(space, no)) {
            self.forget_still(space, no);
        }
        if let Some(refusal) = self.kept.refusals.get_mut(&no) {
            refusal.due = None;
        }
        self.tell_page(space, page, PageEvent::TakenBack);
        self.reclaim.insert(no, Arrival::Returned);
    }

    /// Pages of `range` are about to belong to another space, as they are. The policy knows those
    /// that were kept again.
    pub(crate) fn take_back_all(&mut self, space: SpaceId, range: VirtRange) {
        let within = |no: &PageNo| range.contains(self.table.address(*no).1);
        let kept = &self.kept;
        let still = Kept::in_space(&kept.still, space);
        let pages: Vec<_> = kept.of(space).chain(still).filter(within).collect();
        for no in pages {
            self.take_back(space, no);
        }
    }

    /// Removes pages of spaces that are passed over, and of mappings that are set aside, from the
    /// victims: they stay. The policy named them and no longer knows them.
    #[inline]
    pub(crate) fn keep_victims(&mut self) {
        if self.kept.spaces.is_empty() && self.kept.aside.is_empty() {
            return;
        }
        let mut victims = std::mem::take(&mut self.victims);
        victims.retain(|no| {
            let (space, page) = self.table.address(*no);
            let keep = if self.kept.spaces.contains(&space) {
                self.kept.pages.insert((space, *no))
            } else {
                self.kept.is_aside(space, page) && self.keep_still(space, *no)
            };
            if keep {
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
        let kept = !self.is_listed(no);
        if kept {
            let (space, _) = self.table.address(no);
            self.kept.pages.remove(&(space, no));
            self.forget_still(space, no);
        } else {
            self.reclaim.remove(no);
        }
        kept
    }

    /// The page has another number.
    pub(crate) fn renumber(&mut self, old: PageNo, new: PageNo) {
        let refusal = self.kept.refusals.get(&old).copied();
        let entry = self.table.entry(old);
        let page = (self.table.address(new).0, new);
        let passed_over = self.kept.pages.contains(&(self.table.address(old).0, old));
        // What is set aside is so at its old place only.
        let stays = passed_over || refusal.is_some() || entry.flags.has(Flags::LOCKED);
        match self.unlist(old) {
            true if passed_over => _ = self.kept.pages.insert(page),
            true if stays => _ = self.keep_still(page.0, new),
            kept => {
                if kept {
                    let (space, page) = self.table.address(old);
                    self.tell_page(space, page, PageEvent::TakenBack);
                }
                self.reclaim.insert(new, Arrival::Returned);
            }
        }
        match refusal {
            Some(Waiting {
                wait,
                due: Some(due),
            }) => self.wait_until(new, wait, due),
            Some(ended) => _ = self.kept.refusals.insert(new, ended),
            None => {}
        }
    }

    /// Whether the policy knows a resident page with a frame of its own.
    #[inline]
    pub(crate) fn is_listed(&self, no: PageNo) -> bool {
        if self.kept.pages.is_empty() && self.kept.still.is_empty() {
            return true;
        }
        !self.kept.has(&(self.table.address(no).0, no))
    }
}
