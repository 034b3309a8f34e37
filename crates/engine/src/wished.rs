//! Places of copies that a plugin wishes: where a page goes when it next leaves, which pages come
//! with it, and moves between tiers. What cannot be honoured is left out; the books are right all
//! the same.
//!
//! Tiers are named as policies name them: by rank, the fastest is 0.

use undercroft_base::{LatencyClass, PageNo, PageState, SpaceId, TierId, VirtPage};

use crate::ledger::Ledger;
use crate::limits::{DEMOTE_PAGES_MAX, LINKED_PART, LINKS_MAX, LOAD_PAGES_MAX, PLACES_MAX};
use crate::{DemoteItem, Engine, Evictions, Migrations};

/// No page.
const NONE: PageNo = PageNo(u32::MAX);

/// The tiers that pages go to when they next leave: one place for all pages whose numbers have the
/// same rest. A newer wish takes the place of another.
#[derive(Debug, Default)]
pub(crate) struct Places(Vec<(PageNo, u8)>);

impl Places {
    fn at(&mut self, no: PageNo) -> &mut (PageNo, u8) {
        let at = no.0 as usize % PLACES_MAX;
        &mut self.0[at]
    }

    fn put(&mut self, no: PageNo, rank: u8) {
        if self.0.is_empty() {
            self.0.resize(PLACES_MAX, (NONE, 0));
        }
        *self.at(no) = (no, rank);
    }

    /// Takes the wish for a page. O(1).
    #[inline]
    pub(crate) fn take(&mut self, no: PageNo) -> Option<TierId> {
        if self.0.is_empty() {
            return None;
        }
        let place = self.at(no);
        (place.0 == no).then(|| {
            place.0 = NONE;
            TierId(place.1)
        })
    }
}

/// Pages, and for each the one that comes with it: one place for all pages whose numbers have the
/// same rest. A number may be another page's by now. Then that page comes along, or none does and
/// the link is forgotten: no byte is at stake.
#[derive(Debug, Default)]
pub(crate) struct Links {
    of: Vec<[PageNo; 2]>,
    /// A page that has left: others that come with it leave next.
    pub(crate) begun: Option<PageNo>,
}

impl Links {
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        !self.of.is_empty()
    }

    fn next(&self, no: PageNo) -> Option<PageNo> {
        let [of, next] = *self.of.get(no.0 as usize % LINKS_MAX)?;
        (of == no).then_some(next)
    }

    /// Whether a page comes with this one.
    #[inline]
    pub(crate) fn holds(&self, no: PageNo) -> bool {
        self.next(no).is_some()
    }

    fn put(&mut self, no: PageNo, next: PageNo) {
        if self.of.is_empty() {
            self.of.resize(LINKS_MAX, [NONE; 2]);
        }
        let place = &mut self.of[no.0 as usize % LINKS_MAX];
        if next != no {
            *place = [no, next];
        } else if place[0] == no {
            place[0] = NONE;
        }
    }

    /// Nothing comes with this page any more.
    pub(crate) fn forget(&mut self, no: PageNo) {
        if self.holds(no) {
            self.put(no, no);
        }
    }

    /// The same number for all pages that come together: the least of them. [`NONE`], after all
    /// others: the page comes alone.
    pub(crate) fn group(&self, no: PageNo) -> PageNo {
        let mut least = NONE;
        let mut next = self.next(no);
        for _ in 0..LOAD_PAGES_MAX {
            let Some(page) = next else { break };
            least = least.min(page);
            next = self.next(page).filter(|_| page != no);
        }
        least
    }

    /// Appends the pages that come with a page, until that is met again: as many as one load has,
    /// at most. A page that meets another one again is named again.
    pub(crate) fn append(&self, no: PageNo, out: &mut Vec<PageNo>) {
        let mut next = self.next(no);
        for _ in 1..LOAD_PAGES_MAX {
            let Some(page) = next.filter(|page| *page != no) else {
                break;
            };
            out.push(page);
            next = self.next(page);
        }
    }
}

/// The wish of a plugin for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// When it next leaves, a new copy of it shall be in the tier of this rank.
    In(TierId),
    /// When a thread waits for it, this page of the same space shall come along, and what comes
    /// with that. The page itself: none.
    With(VirtPage),
}

/// A move of copies that a plugin wishes. All numbers may be of nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WishedMove {
    /// The address space.
    pub space: SpaceId,
    /// The first page.
    pub page: VirtPage,
    /// How many pages.
    pub pages: u64,
    /// Where the copies are.
    pub from: TierId,
    /// Where they shall go.
    pub to: TierId,
}

impl<L: Ledger> Evictions<'_, L> {
    /// Has a page be offered to this tier first, when it next leaves, or come with this one. While
    /// any does, more is kept free, and the slowest tier keeps no copy of such a page: they are
    /// written together, so that they can be read together. False: the page is not in memory, or
    /// there is no such tier or page. O(1).
    pub fn place(&mut self, space: SpaceId, page: VirtPage, placing: Placing) -> bool {
        let engine = &mut *self.engine;
        let Some(no) = engine.find_named(space, page) else {
            return false;
        };
        let rank = match placing {
            Placing::In(rank) => rank,
            Placing::With(other) => return engine.link(no, space, other),
        };
        let state = engine.table.entry(no).state;
        let there = matches!(state, PageState::Resident | PageState::Evicting);
        if !there || usize::from(rank.0) >= engine.ranks.len() {
            return false;
        }
        engine.places.put(no, rank.0);
        true
    }

    /// Nothing is wished any more: the plugin has ended.
    pub fn forget_places(&mut self) {
        self.engine.places = Places::default();
        self.engine.links = Links::default();
        self.engine.reserve_part = self.engine.place.shown().reserve_part;
    }
}

impl<L: Ledger> Migrations<'_, L> {
    /// Appends the pages of wished moves that are in their tier, without those that are shared with
    /// a fork relative. Returns the tiers; `None`: there is nothing to move, or it may not move.
    /// The caller carries it out, sets the tiers, and asks again.
    ///
    /// Nothing moves to compressed memory, which the limit has to pay for, to a tier that is closed
    /// or has no room for all these pages, out of a closed tier, or up while latency control keeps
    /// the client out of there.
    ///
    /// * `wishes`: all from and to the same tiers. What is beyond [`DEMOTE_PAGES_MAX`] is left out.
    ///
    /// Cost: O(pages of the moves), and O(pages that are there, squared); no allocation.
    pub fn select_wished(
        &mut self,
        wishes: &[WishedMove],
        out: &mut Vec<DemoteItem>,
    ) -> Option<(TierId, TierId)> {
        let (from, to) = self.engine.wished_tiers(wishes)?;
        if self.spares(from, to) {
            return None;
        }
        let (before, selected) = (out.len(), self.engine.evictions);
        let most = before + self.engine.size_of(from).at_once(DEMOTE_PAGES_MAX);
        let pages = wishes.iter().flat_map(|wish| {
            let first = wish.page.0;
            let end = first.saturating_add(wish.pages);
            (first..end).map(|page| (wish.space, VirtPage(page)))
        });
        for (space, page) in pages.take(DEMOTE_PAGES_MAX) {
            if out.len() == most {
                break;
            }
            let no = self.engine.find_named(space, page);
            if let Some(no) = no.filter(|no| out[before..].iter().all(|item| item.no != *no)) {
                self.select_one(no, from, selected, out);
            }
        }
        self.count_selected(&out[before..]);
        (out.len() > before).then_some((from, to))
    }
}

impl<L: Ledger> Engine<L> {
    /// Has a page come with another one of its space.
    fn link(&mut self, no: PageNo, space: SpaceId, other: VirtPage) -> bool {
        let Some(next) = self.find_named(space, other) else {
            return false;
        };
        if next != no || self.links.is_any() {
            self.links.put(no, next);
            self.reserve_part = self.reserve_part.min(LINKED_PART);
        }
        true
    }

    /// The numbers of the tiers of moves, if copies may move between them.
    fn wished_tiers(&self, wishes: &[WishedMove]) -> Option<(TierId, TierId)> {
        let wish = wishes.first()?;
        let state = |rank: TierId| {
            let at = usize::from(rank.0);
            Some((*self.ranks.get(at)?, self.ranked.get(at)?))
        };
        let ((from, of), (to, there)) = (state(wish.from)?, state(wish.to)?);
        let pages = wishes
            .iter()
            .map(|wish| wish.pages.min(DEMOTE_PAGES_MAX as u64));
        let pages = pages.sum::<u64>().min(DEMOTE_PAGES_MAX as u64);
        let may = from != to
            && of.page == there.page
            && there.latency != LatencyClass::Memory
            && there.headroom().0 >= pages * there.page.bytes() as u64
            && !self.is_closed(from)
            && !self.is_closed(to);
        may.then_some((from, to))
    }
}
