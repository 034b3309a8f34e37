//! The counts, states and limits in the books.

use undercroft_base::{
    Bytes, Entry, Flags, PageCount, PageNo, PageSize, PageState, Slot, SpaceId, TierId, VirtPage,
    VirtRange,
};
use undercroft_policy::place;
use undercroft_policy::reclaim::Choice;

use crate::layout::is_zero;
use crate::ledger::Ledger;
use crate::{BooksView, Stats};

impl<'e, L: Ledger> BooksView<'e, L> {
    /// DRAM the client costs now: resident managed pages plus what tiers hold.
    pub fn dram_used(self) -> Bytes {
        Bytes(self.resident().bytes().0 + self.engine.pool_held.0)
    }

    /// Resident managed pages, and pages in flight, in base pages.
    pub fn resident(self) -> PageCount {
        PageCount(self.engine.resident)
    }

    /// Pages with a copy in a tier that are not in memory, in base pages.
    pub fn stored(self) -> PageCount {
        PageCount(self.engine.table.stored())
    }

    /// The limit that was set, or that is approached now.
    pub fn limit(self) -> Bytes {
        self.engine.config.limit
    }

    /// The state of the placement policy: see [`place::Place::shown`].
    pub fn placement(self) -> place::Shown {
        self.engine.place.shown()
    }

    /// The tiers in use as they were reported last, fastest first.
    pub fn ranked_tiers(self) -> &'e [place::TierState] {
        &self.engine.ranked
    }

    /// Counters since the start.
    pub fn stats(self) -> &'e Stats {
        &self.engine.stats
    }

    /// Choice of the reclaim policy, if it chooses between rules. O(1).
    pub fn reclaim_choice(self) -> Option<Choice> {
        self.engine.reclaim.shown().choice
    }

    /// Bytes of metadata: the ledger's words, the maps that find them, the policy's peak, and the
    /// ages of pages in tiers.
    pub fn metadata_bytes(self) -> u64 {
        self.engine.table.metadata_bytes()
            + self.engine.reclaim.shown().metadata.0
            + self.engine.departures.metadata_bytes()
            + self.engine.ages.metadata_bytes()
    }

    /// DRAM of pages that cannot leave: the kernel refused to move them, or they are locked.
    pub fn immovable(self) -> Bytes {
        self.engine.kept.still_pages.bytes()
    }

    /// By how much the limit in force is above [`BooksView::limit`], because of pages that cannot
    /// leave. At most what these take.
    pub fn raised(self) -> Bytes {
        Bytes(self.engine.raised())
    }

    /// How many base pages fit below the limit in force. Negative when it is exceeded.
    #[inline]
    pub fn room(self) -> i64 {
        let limit = (self.engine.config.limit.0 as i64).saturating_add(self.engine.raised() as i64);
        (limit - self.dram_used().0 as i64) >> PageSize::Base.bytes().trailing_zeros()
    }

    /// Whether there is no room for one more page, of the largest size that there is.
    #[inline]
    pub fn is_full(self) -> bool {
        self.room() < self.engine.table.large().max(1) as i64
    }

    /// Size of the pages of a space. O(1).
    pub fn page_size(self, space: SpaceId) -> PageSize {
        self.engine.table.size_in(space)
    }

    /// By how many base pages faults may exceed the limit now.
    pub fn over_limit(self) -> PageCount {
        self.engine.over_limit
    }

    /// True when less room than the reserve is left: reclaim should start.
    pub fn reclaim_wanted(self) -> bool {
        self.room() < self.engine.reserve()
    }

    /// True while reclaim, once started, should continue: until one and a half reserves are free.
    pub fn reclaim_unfinished(self) -> bool {
        self.reclaim_lacks() > 0
    }

    /// How many base pages are still to leave until then.
    pub fn reclaim_lacks(self) -> i64 {
        self.engine.reserve() * 3 / 2 - self.room()
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

    /// Items of plans that are not finished: pages that are loading, and upset loads. For tests:
    /// O(all entries).
    pub fn unfinished_loads(self) -> usize {
        let loading = |(_, entry): &(_, Entry)| entry.state == PageState::Loading;
        self.engine.table.all_known().filter(loading).count() + self.engine.orphans.count()
    }

    /// Checks the books against the ledger; panics with the difference. For tests: O(all entries).
    pub fn audit(self) {
        let table = &self.engine.table;
        let (mut listed, mut counted, mut stored) = (0, 0, 0);
        for (no, entry) in table.all_known() {
            let own = !entry.flags.has(Flags::INHERITED);
            match entry.state {
                PageState::Stored => stored += table.base_pages(no),
                PageState::Resident | PageState::Evicting if own => {
                    listed += u64::from(entry.state == PageState::Resident);
                    counted += table.base_pages(no);
                }
                PageState::Loading => counted += table.base_pages(no),
                _ => {}
            }
        }
        assert_eq!(
            self.engine.resident, counted,
            "resident count differs from the ledger"
        );
        assert_eq!(
            table.stored(),
            stored,
            "count of stored pages differs from the ledger"
        );
        let still = self.engine.kept.still.iter();
        let still: u64 = still.map(|(_, no)| table.base_pages(*no)).sum();
        assert_eq!(
            self.engine.kept.still_pages.0, still,
            "count of still pages"
        );
        assert_eq!(
            self.engine.reclaim.shown().len.0 + self.kept_pages().0,
            listed,
            "policy length differs from the ledger"
        );
    }

    /// Resident pages that the policy does not know: their spaces are passed over, or they cannot
    /// leave.
    pub fn kept_pages(self) -> PageCount {
        let kept = &self.engine.kept;
        PageCount((kept.pages.len() + kept.still.len()) as u64)
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

    /// Ranges of pages of `range` that have contents and may not be in memory. Every other page
    /// reads right bytes even where the books have no room for a fork child or for a new place.
    /// These do not: the caller poisons them there. O(known pages of it).
    pub fn away(self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        self.ranges(space, range, |entry| match entry.state {
            PageState::Resident | PageState::Untouched => false,
            PageState::Loading => !is_zero(entry),
            PageState::Evicting | PageState::Stored | PageState::Lost => true,
        })
    }

    /// How many pages of `range` are in memory or on their way, and how many only in tiers, in base
    /// pages. O(known pages of it).
    pub fn places(self, space: SpaceId, range: VirtRange) -> (PageCount, PageCount) {
        let (mut here, mut away) = (0, 0);
        for (_, no) in self.engine.table.known_pages(space, range) {
            let pages = self.engine.table.base_pages(no);
            match self.engine.table.entry(no).state {
                PageState::Resident | PageState::Evicting | PageState::Loading => here += pages,
                PageState::Stored => away += pages,
                PageState::Untouched | PageState::Lost => {}
            }
        }
        (PageCount(here), PageCount(away))
    }

    /// Ranges of pages of `range` whose frames are charged to a relative. O(known pages of it).
    pub fn inherited(self, space: SpaceId, range: VirtRange) -> Vec<VirtRange> {
        self.ranges(space, range, |entry| {
            entry.state == PageState::Resident && entry.flags.has(Flags::INHERITED)
        })
    }

    /// The pages of `range` whose entries are `wanted`, as ranges.
    fn ranges(
        self,
        space: SpaceId,
        range: VirtRange,
        wanted: impl Fn(Entry) -> bool,
    ) -> Vec<VirtRange> {
        let mut ranges: Vec<VirtRange> = Vec::new();
        for (page, no) in self.engine.table.known_pages(space, range) {
            if wanted(self.engine.table.entry(no)) {
                match ranges.last_mut() {
                    Some(last) if last.end == page => last.end = page.plus(1),
                    _ => ranges.push(VirtRange::new(page, page.plus(1))),
                }
            }
        }
        ranges
    }
}
