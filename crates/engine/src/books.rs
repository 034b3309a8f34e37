//! The counts, states and limits in the books.

use undercroft_base::{
    Bytes, Entry, Flags, PAGE_BYTES, PageCount, PageNo, PageState, Slot, SpaceId, TierId, VirtPage,
    VirtRange,
};
use undercroft_policy::place::Share;
use undercroft_policy::reclaim::Choice;

use crate::layout::is_zero;
use crate::ledger::Ledger;
use crate::{BooksView, Stats};

impl<'e, L: Ledger> BooksView<'e, L> {
    /// DRAM the client costs now: resident managed pages plus what tiers hold.
    pub fn dram_used(self) -> Bytes {
        Bytes(self.engine.resident * PAGE_BYTES as u64 + self.engine.pool_held.0)
    }

    /// Resident managed pages, and pages in flight.
    pub fn resident(self) -> PageCount {
        PageCount(self.engine.resident)
    }

    /// The limit in force.
    pub fn limit(self) -> Bytes {
        self.engine.config.limit
    }

    /// How much DRAM copies in memory should have, if the placement policy decides that.
    pub fn share(self) -> Option<Share> {
        self.engine.place.share()
    }

    /// Counters since the start.
    pub fn stats(self) -> &'e Stats {
        &self.engine.stats
    }

    /// What the reclaim policy has chosen, if it chooses between rules. O(1).
    pub fn reclaim_choice(self) -> Option<Choice> {
        self.engine.reclaim.choice()
    }

    /// Bytes of metadata: the ledger's words, the maps that find them, the policy's peak, and the
    /// ages of pages in tiers.
    pub fn metadata_bytes(self) -> u64 {
        self.engine.table.metadata_bytes()
            + self.engine.reclaim.metadata_bytes().0
            + self.engine.departures.metadata_bytes()
            + self.engine.ages.metadata_bytes()
    }

    /// How many pages fit below the limit. Negative when the limit is exceeded.
    #[inline]
    pub fn room(self) -> i64 {
        let limit = self.engine.config.limit.0 as i64;
        (limit - self.dram_used().0 as i64) >> PAGE_BYTES.trailing_zeros()
    }

    /// True when less room than the reserve is left: reclaim should start.
    pub fn reclaim_wanted(self) -> bool {
        self.room() < self.engine.reserve()
    }

    /// True while reclaim, once started, should continue: until one and a half reserves are free.
    pub fn reclaim_unfinished(self) -> bool {
        self.room() < self.engine.reserve() * 3 / 2
    }

    /// Whether the page is in memory. O(1). For a caller that has the number
    /// ([`Uses::number`](crate::Uses::number)).
    #[inline]
    pub fn is_resident(self, no: PageNo) -> bool {
        self.engine.table.entry(no).state == PageState::Resident
    }

    /// Whether the page has ever been touched. O(1). For a caller that has the number.
    #[inline]
    pub fn is_known(self, no: PageNo) -> bool {
        self.engine.table.entry(no) != Entry::UNTOUCHED
    }

    /// Whether several pages refer to the slot. O(1). For the oracle of the storms.
    pub fn is_shared_slot(self, tier: TierId, slot: Slot) -> bool {
        self.engine
            .refs
            .get(&(tier, slot))
            .is_some_and(|claims| *claims > 1)
    }

    /// The entry of a page, for status, takeover and tests.
    pub fn entry(self, space: SpaceId, page: VirtPage) -> Entry {
        self.engine
            .table
            .find(space, page)
            .map_or(Entry::UNTOUCHED, |no| self.engine.table.entry(no))
    }

    /// The managed ranges of a space, sorted.
    pub fn regions(self, space: SpaceId) -> &'e [VirtRange] {
        self.engine.table.regions(space)
    }

    /// Whether the page is in a managed range.
    #[inline]
    pub fn is_managed(self, space: SpaceId, page: VirtPage) -> bool {
        !(VirtRange::one(page).overlapping(self.regions(space))).is_empty()
    }

    /// The number of pages in all managed ranges, touched or not.
    pub fn managed_pages(self) -> PageCount {
        let spaces = self.engine.table.spaces();
        PageCount(
            spaces
                .flat_map(|s| self.engine.table.regions(s))
                .map(|r| r.count().0)
                .sum(),
        )
    }

    /// Every space of the client.
    pub fn spaces(self) -> Vec<SpaceId> {
        self.engine.table.spaces().collect()
    }

    /// Checks the books against the ledger; panics with the difference. For tests: O(all entries).
    pub fn audit(self) {
        let census = self.engine.table.census();
        let of = |state: PageState| census.get(&(state as u8)).copied().unwrap_or(0);
        let (inherited, inherited_leaving) = self.engine.table.count_inherited();
        let resident = of(PageState::Resident) - inherited;
        let evicting = of(PageState::Evicting) - inherited_leaving;
        let counted = resident + evicting + of(PageState::Loading);
        assert_eq!(
            self.engine.resident, counted,
            "resident count differs from the ledger: {census:?}"
        );
        assert_eq!(
            self.engine.table.stored(),
            of(PageState::Stored),
            "count of stored pages differs from the ledger: {census:?}"
        );
        assert_eq!(
            self.engine.reclaim.len().0 + self.kept_pages().0,
            resident,
            "policy length differs from the ledger"
        );
    }

    /// Pages that the policy does not know, because their spaces are passed over.
    pub fn kept_pages(self) -> PageCount {
        PageCount(self.engine.kept.pages.len() as u64)
    }

    /// The known parts of `range`, ascending, at most a chunk each (2 MiB of pages of 4 KiB). A
    /// caller that may not hold the engine for long gives these, one by one, to
    /// [`Layout::removed`](crate::Layout::removed),
    /// [`Layout::remap_pages`](crate::Layout::remap_pages),
    /// [`Forks::inherit_range`](crate::Forks::inherit_range) or
    /// [`Forks::bequeath`](crate::Forks::bequeath). No page is read. O(chunks of the range).
    pub fn parts(self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        self.some_parts(space, range, usize::MAX)
    }

    /// The first `most` of [`Books::parts`]. The next ones are those of the rest of `range`. For a
    /// caller that may not even name them all under one hold: O(log(chunks of the space) + parts).
    pub fn some_parts(self, space: SpaceId, range: VirtRange, most: usize) -> Vec<VirtRange> {
        let stretches = self.engine.table.stretches(space, range, most);
        stretches.into_iter().map(|part| part.pages).collect()
    }

    /// Whether every page of `range` is in memory or untouched, and needs no stored copy. If so, it
    /// reads right bytes even where the books have no room for a fork child or for a new place.
    pub fn keeps_nothing(self, space: SpaceId, range: VirtRange) -> bool {
        self.engine.table.known_pages(space, range).all(|(_, no)| {
            let entry = self.engine.table.entry(no);
            match entry.state {
                PageState::Resident | PageState::Untouched => true,
                PageState::Loading => is_zero(entry),
                PageState::Evicting | PageState::Stored | PageState::Lost => false,
            }
        })
    }

    /// Ranges of pages of `range` whose frames are charged to a relative. O(known pages of it).
    pub fn inherited(self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        let mut ranges: Vec<VirtRange> = Vec::new();
        for (page, no) in self.engine.table.known_pages(space, range) {
            let entry = self.engine.table.entry(no);
            if entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED) {
                match ranges.last_mut() {
                    Some(last) if last.end == page => last.end = page.plus(1),
                    _ => ranges.push(VirtRange::new(page, page.plus(1))),
                }
            }
        }
        ranges
    }
}
