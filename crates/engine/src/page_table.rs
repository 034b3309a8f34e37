//! Where each page's entry is: address spaces, their regions, and the chunks of the ledger they
//! use.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

use rustc_hash::{FxHashMap, FxHashSet};
use undercroft_base::{
    CHUNK_PAGES, ChunkNo, Entry, Flags, PageNo, PageState, SpaceId, TierId, VirtPage, VirtRange,
};

use crate::ledger::{ChunkHead, Ledger, LedgerError, LedgerWords};

/// One address space of the client.
#[derive(Debug, Default)]
struct Space {
    /// Managed ranges, sorted and disjoint. Ranges that were registered apart stay apart, because
    /// no installation may span two mappings. They bound batches; correctness never depends on
    /// them.
    regions: Vec<VirtRange>,
    /// 2 MiB position -> chunk. A tree: the next few chunks of a range are found without the
    /// others, and it grows without a moment in which all of it is moved. Most searches do not
    /// come here ([`PageTable::found`]).
    chunks: BTreeMap<u64, ChunkNo>,
}

/// The page table of one client: every address space, over one ledger.
pub(crate) struct PageTable<L> {
    ledger: L,
    spaces: FxHashMap<SpaceId, Space>,
    free: Vec<ChunkNo>,
    /// Chunks from this one on were never used.
    fresh: u32,
    next_space: u32,
    /// Pages in the state `Stored`.
    stored: u64,
    /// Chunks that were found lately, by position. A chunk's head in the ledger is compared,
    /// because the chunk may be at another position by now.
    found: [Cell<ChunkNo>; FOUND],
}

/// Chunks that are remembered in this way.
const FOUND: usize = 512;

/// Pages of one chunk that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub pages: VirtRange,
    /// The number of the first.
    pub first: PageNo,
}

impl Stretch {
    fn entries(self) -> impl Iterator<Item = (VirtPage, PageNo)> {
        let numbers = self.first.0..;
        self.pages.pages().zip(numbers.map(PageNo))
    }
}

/// The ledger has no free chunk: the client manages more address space than the ledger was made
/// for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerFull;

/// The heads of all chunks, if every word of the ledger is possible.
fn check<L: Ledger>(ledger: &L, tiers: usize) -> Result<Vec<Option<ChunkHead>>, LedgerError> {
    let mut heads = Vec::with_capacity(ledger.chunks().len());
    let mut places = FxHashSet::default();
    let touched = ledger.touched_chunks().min(ledger.chunks().len());
    for (at, word) in ledger.chunks()[..touched].iter().enumerate() {
        let chunk = ChunkNo(at as u32);
        let word = word.load(Ordering::Relaxed);
        let head = ChunkHead::unpack(word);
        let wrong = |why| {
            Err(LedgerError::Head {
                chunk: chunk.0,
                why,
            })
        };
        match head {
            Some(head) if head.pack() != word => return wrong("bits are set that mean nothing"),
            Some(head) if !places.insert((head.space, head.first)) => {
                return wrong("an earlier chunk has the same place");
            }
            None if word != 0 => return wrong("it is neither free nor in use"),
            _ => {}
        }
        heads.push(head);
    }
    for (at, head) in heads.iter().enumerate() {
        for offset in 0..CHUNK_PAGES {
            check_entry(
                ledger,
                ChunkNo(at as u32).page(offset),
                head.is_some(),
                tiers,
            )?;
        }
    }
    Ok(heads)
}

fn check_entry<L: Ledger>(
    ledger: &L,
    page: PageNo,
    in_use: bool,
    tiers: usize,
) -> Result<(), LedgerError> {
    let word = ledger.entries()[page.0 as usize].load(Ordering::Relaxed);
    if word == 0 {
        return Ok(());
    }
    let entry = Entry::unpack(word);
    let retained = entry.flags.has(Flags::RETAINED);
    let has_copy = matches!(entry.state, PageState::Stored | PageState::Loading);
    let known = usize::from(entry.tier.0) < tiers;
    let filled = entry.tier == TierId::FILL && entry.slot.0 <= u64::from(u32::MAX);
    let why = match entry.state {
        _ if !in_use => "its chunk is free",
        _ if entry.pack() != word => "no state has this number",
        _ if has_copy && !known && !filled => "it is in a tier that there is not",
        _ if retained && has_copy => "it is stored and keeps a copy of itself",
        _ if retained && !known => "it keeps a copy in a tier that there is not",
        _ => return Ok(()),
    };
    let page = page.0;
    Err(LedgerError::Entry { page, word, why })
}

#[inline]
fn position(page: VirtPage) -> (u64, u32) {
    let chunk = u64::from(CHUNK_PAGES);
    (page.0 / chunk, (page.0 % chunk) as u32)
}

/// The positions of all chunks that have pages of `range`.
#[inline]
fn positions(range: VirtRange) -> Range<u64> {
    let end = position(VirtPage(range.end.0.max(1) - 1)).0 + 1;
    let start = position(range.start).0;
    start..if range.is_empty() { start } else { end }
}

impl<L: Ledger> PageTable<L> {
    pub(crate) fn new(ledger: L) -> PageTable<L> {
        PageTable {
            ledger,
            spaces: FxHashMap::default(),
            free: Vec::new(),
            fresh: 0,
            next_space: 1,
            stored: 0,
            found: [const { Cell::new(ChunkNo(0)) }; FOUND],
        }
    }

    /// The page table that a dead manager left: the chunks of `spaces`. The chunks of other spaces
    /// are emptied.
    ///
    /// Errors: a head or an entry is impossible; nothing was written. Cost: O(all entries).
    pub(crate) fn recover(
        ledger: L,
        spaces: &[SpaceId],
        tiers: usize,
    ) -> Result<PageTable<L>, LedgerError> {
        let heads = check(&ledger, tiers)?;
        let mut table = PageTable::new(ledger);
        for space in spaces {
            table.spaces.insert(*space, Space::default());
            table.next_space = table.next_space.max(space.0 + 1);
        }
        for (at, head) in heads.into_iter().enumerate().rev() {
            let chunk = ChunkNo(at as u32);
            let Some(head) = head else {
                if chunk.0 < table.fresh {
                    table.free.push(chunk);
                }
                continue;
            };
            table.fresh = table.fresh.max(chunk.0 + 1);
            table.next_space = table.next_space.max(head.space.0 + 1);
            match table.spaces.get_mut(&head.space) {
                Some(owner) => {
                    let at = position(head.first).0;
                    owner.chunks.insert(at, chunk);
                }
                None => {
                    for offset in 0..CHUNK_PAGES {
                        if table.entry(chunk.page(offset)) != Entry::UNTOUCHED {
                            table.ledger.set_entry(chunk.page(offset), Entry::UNTOUCHED);
                        }
                    }
                    table.ledger.set_head(chunk, None);
                    table.free.push(chunk);
                }
            }
        }
        table.stored = table.count(PageState::Stored);
        Ok(table)
    }

    pub(crate) fn ledger(&self) -> &L {
        &self.ledger
    }

    /// Every page that was ever in use has a smaller number.
    pub(crate) fn end(&self) -> PageNo {
        PageNo(self.fresh * CHUNK_PAGES)
    }

    /// Whether the page's chunk is in use.
    pub(crate) fn has_page(&self, page: PageNo) -> bool {
        let chunk = page.chunk();
        (chunk.0 as usize) < self.ledger.chunks().len() && self.ledger.head(chunk).is_some()
    }

    pub(crate) fn add_space(&mut self) -> SpaceId {
        let id = SpaceId(self.next_space);
        self.next_space += 1;
        self.spaces.insert(id, Space::default());
        id
    }

    pub(crate) fn has_space(&self, space: SpaceId) -> bool {
        self.spaces.contains_key(&space)
    }

    pub(crate) fn spaces(&self) -> impl Iterator<Item = SpaceId> {
        self.spaces.keys().copied()
    }

    /// The page's number, if its chunk exists. O(1), no allocation.
    #[inline]
    pub(crate) fn find(&self, space: SpaceId, page: VirtPage) -> Option<PageNo> {
        let chunk = self.found_slot(space, page).get();
        let no = chunk.page(position(page).1);
        if self.is_at(no, space, page) {
            Some(no)
        } else {
            self.search(space, page)
        }
    }

    #[inline]
    fn found_slot(&self, space: SpaceId, page: VirtPage) -> &Cell<ChunkNo> {
        &self.found[(position(page).0 ^ u64::from(space.0)) as usize % FOUND]
    }

    #[inline(never)]
    fn search(&self, space: SpaceId, page: VirtPage) -> Option<PageNo> {
        let (at, offset) = position(page);
        let chunk = *self.spaces.get(&space)?.chunks.get(&at)?;
        self.found_slot(space, page).set(chunk);
        Some(chunk.page(offset))
    }

    /// Whether the page is mapped there. O(1), no search.
    #[inline]
    pub(crate) fn is_at(&self, no: PageNo, space: SpaceId, page: VirtPage) -> bool {
        let (at, offset) = position(page);
        let first = VirtPage(at * u64::from(CHUNK_PAGES));
        let word = self.ledger.chunks().get(no.chunk().0 as usize);
        let word = word.map_or(0, |word| word.load(Ordering::Relaxed));
        // A position that no head can name would look like another.
        at < ChunkHead::POSITIONS
            && word == ChunkHead { space, first }.pack()
            && no.offset() == offset
    }

    /// The page's number. Takes a fresh chunk if there is none yet.
    pub(crate) fn find_or_add(
        &mut self,
        space: SpaceId,
        page: VirtPage,
    ) -> Result<PageNo, LedgerFull> {
        if let Some(found) = self.find(space, page) {
            return Ok(found);
        }
        let (at, offset) = position(page);
        let chunk = match self.free.pop() {
            Some(chunk) => chunk,
            None if (self.fresh as usize) < self.ledger.chunks().len() => {
                self.fresh += 1;
                ChunkNo(self.fresh - 1)
            }
            None => return Err(LedgerFull),
        };
        let owner = self
            .spaces
            .get_mut(&space)
            .expect("caller checked the space");
        owner.chunks.insert(at, chunk);
        let first = VirtPage(at * u64::from(CHUNK_PAGES));
        self.ledger
            .set_head(chunk, Some(ChunkHead { space, first }));
        Ok(chunk.page(offset))
    }

    #[inline]
    pub(crate) fn entry(&self, page: PageNo) -> Entry {
        self.ledger.entry(page)
    }

    #[inline]
    pub(crate) fn set(&mut self, page: PageNo, entry: Entry) {
        self.note_state(page, entry.state);
        self.ledger.set_entry(page, entry);
    }

    /// Changes the state alone.
    #[inline]
    pub(crate) fn set_state(&mut self, page: PageNo, state: PageState) {
        self.note_state(page, state);
        self.ledger.set_state(page, state);
    }

    #[inline]
    fn note_state(&mut self, page: PageNo, state: PageState) {
        let was = self.entry(page).state;
        self.stored += u64::from(state == PageState::Stored);
        self.stored -= u64::from(was == PageState::Stored);
    }

    /// Pages that are out of memory, in a tier or as a repeated word.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }

    /// Where a page is mapped; `None` if its chunk is free.
    pub(crate) fn address_if_used(&self, page: PageNo) -> Option<(SpaceId, VirtPage)> {
        let head = self.ledger.head(page.chunk())?;
        Some((head.space, head.first.plus(u64::from(page.offset()))))
    }

    /// Where a page is mapped. Panics if its chunk is free: nothing may refer to such a page.
    #[inline]
    pub(crate) fn address(&self, page: PageNo) -> (SpaceId, VirtPage) {
        self.address_if_used(page).expect("page of a chunk in use")
    }

    /// The first `most` stretches of `range` that have entries, ascending, one a chunk. Absent
    /// chunks are skipped whole. O(log(chunks of the space) + stretches).
    pub(crate) fn stretches(&self, space: SpaceId, range: VirtRange, most: usize) -> Vec<Stretch> {
        let Some(owner) = self.spaces.get(&space) else {
            return Vec::new();
        };
        let stretch = |(at, chunk): (&u64, &ChunkNo)| {
            let first = VirtPage(at * u64::from(CHUNK_PAGES));
            let whole = VirtRange::new(first, first.plus(u64::from(CHUNK_PAGES)));
            let pages = range.intersect(whole);
            let first = chunk.page((pages.start.0.saturating_sub(first.0)) as u32);
            (!pages.is_empty()).then_some(Stretch { pages, first })
        };
        let chunks = owner.chunks.range(positions(range));
        chunks.filter_map(stretch).take(most).collect()
    }

    /// Pages of `range` that have an entry, ascending. As [`PageTable::stretches`], and O(1) a
    /// page.
    pub(crate) fn known_pages(
        &self,
        space: SpaceId,
        range: VirtRange,
    ) -> impl Iterator<Item = (VirtPage, PageNo)> + use<L> {
        let stretches = self.stretches(space, range, usize::MAX);
        stretches.into_iter().flat_map(Stretch::entries)
    }

    /// Gives a chunk, with what its entries say, to another space, at the same place there. False
    /// where `part` is less than a chunk, or the place is taken. O(1).
    pub(crate) fn give(&mut self, space: SpaceId, part: VirtRange, to: SpaceId) -> bool {
        let (at, offset) = position(part.start);
        if offset != 0 || part.count().0 != u64::from(CHUNK_PAGES) {
            return false;
        }
        let taken = self
            .spaces
            .get(&to)
            .is_none_or(|to| to.chunks.contains_key(&at));
        if taken {
            return false;
        }
        let Some(owner) = self.spaces.get_mut(&space) else {
            return false;
        };
        let Some(chunk) = owner.chunks.remove(&at) else {
            return false;
        };
        let first = part.start;
        self.ledger
            .set_head(chunk, Some(ChunkHead { space: to, first }));
        if let Some(to) = self.spaces.get_mut(&to) {
            to.chunks.insert(at, chunk);
        }
        true
    }

    /// Frees the chunks of `range` whose entries are all untouched. O(chunks of the range).
    pub(crate) fn trim(&mut self, space: SpaceId, range: VirtRange) {
        let Some(owner) = self.spaces.get_mut(&space) else {
            return;
        };
        let ledger = &self.ledger;
        let untouched = |no: PageNo| ledger.entry(no) == Entry::UNTOUCHED;
        let is_empty = |chunk: &ChunkNo| (0..CHUNK_PAGES).all(|at| untouched(chunk.page(at)));
        let within = owner.chunks.range(positions(range));
        let empty = within.filter(|(_, chunk)| is_empty(chunk));
        let empty: Vec<(u64, ChunkNo)> = empty.map(|(at, chunk)| (*at, *chunk)).collect();
        for (at, chunk) in empty {
            owner.chunks.remove(&at);
            ledger.set_head(chunk, None);
            self.free.push(chunk);
        }
    }

    /// Forgets a space. The caller has released its pages: every entry is untouched.
    pub(crate) fn remove_space(&mut self, space: SpaceId) {
        self.trim(space, VirtRange::new(VirtPage(0), VirtPage(u64::MAX)));
        let owner = self.spaces.remove(&space);
        debug_assert!(owner.is_none_or(|owner| owner.chunks.is_empty()));
    }

    /// Adds a managed range. O(log regions + regions it overlaps); O(1) at the end.
    pub(crate) fn add_region(&mut self, space: SpaceId, range: VirtRange) {
        let Some(owner) = self.spaces.get_mut(&space) else {
            return;
        };
        let regions = &mut owner.regions;
        let touched = range.overlapping(regions);
        let mut merged = range;
        for old in &regions[touched.clone()] {
            merged = VirtRange::new(old.start.min(merged.start), old.end.max(merged.end));
        }
        regions.splice(touched, [merged]);
        self.ledger.regions_changed(space, regions);
    }

    /// Gives a space these managed ranges, sorted and disjoint, in place of its own.
    pub(crate) fn set_regions(&mut self, space: SpaceId, regions: Vec<VirtRange>) {
        if let Some(owner) = self.spaces.get_mut(&space) {
            owner.regions = regions;
            self.ledger.regions_changed(space, &owner.regions);
        }
    }

    /// Removes a range from the managed ones.
    pub(crate) fn cut_region(&mut self, space: SpaceId, range: VirtRange) {
        let Some(owner) = self.spaces.get_mut(&space) else {
            return;
        };
        let regions = &mut owner.regions;
        let cut = range.overlapping(regions);
        let (Some(first), Some(last)) = (regions[cut.clone()].first(), regions[cut.clone()].last())
        else {
            return;
        };
        let rest = [
            VirtRange::new(first.start, first.end.min(range.start)),
            VirtRange::new(last.start.max(range.end), last.end),
        ];
        regions.splice(cut, rest.into_iter().filter(|rest| !rest.is_empty()));
        self.ledger.regions_changed(space, regions);
    }

    /// The managed ranges of a space, sorted.
    pub(crate) fn regions(&self, space: SpaceId) -> &[VirtRange] {
        self.spaces.get(&space).map_or(&[], |owner| &owner.regions)
    }

    /// The managed range around `page`. Just the page if there is none: the mapping grew in place.
    pub(crate) fn region_around(&self, space: SpaceId, page: VirtPage) -> VirtRange {
        let regions = self.regions(space);
        let at = regions.partition_point(|region| region.end <= page);
        match regions.get(at) {
            Some(region) if region.contains(page) => *region,
            _ => VirtRange::new(page, page.plus(1)),
        }
    }

    /// Counts pages by state, for tests and audits. O(all entries).
    pub(crate) fn census(&self) -> FxHashMap<u8, u64> {
        let mut counts = FxHashMap::default();
        for owner in self.spaces.values() {
            for chunk in owner.chunks.values() {
                for offset in 0..CHUNK_PAGES {
                    let state = self.entry(chunk.page(offset)).state;
                    if state != PageState::Untouched {
                        *counts.entry(state as u8).or_default() += 1;
                    }
                }
            }
        }
        counts
    }

    fn count(&self, state: PageState) -> u64 {
        self.census().get(&(state as u8)).copied().unwrap_or(0)
    }

    /// Pages in frames that are charged to a fork relative, for audits. O(all entries).
    pub(crate) fn count_inherited(&self) -> (u64, u64) {
        let (mut resident, mut evicting) = (0, 0);
        for owner in self.spaces.values() {
            for chunk in owner.chunks.values() {
                for offset in 0..CHUNK_PAGES {
                    let entry = self.entry(chunk.page(offset));
                    if entry.flags.has(Flags::INHERITED) {
                        resident += u64::from(entry.state == PageState::Resident);
                        evicting += u64::from(entry.state == PageState::Evicting);
                    }
                }
            }
        }
        (resident, evicting)
    }

    /// Bytes of metadata: ledger words in use and the maps that find them.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let chunks: u64 = self.spaces.values().map(|s| s.chunks.len() as u64).sum();
        // A node of the tree has room for 11 chunks, and at least half of it is in use.
        u64::from(self.fresh) * (8 + 8 * u64::from(CHUNK_PAGES)) + chunks * 24
    }
}
