//! Where each page's entry is: address spaces, their regions, and the chunks of the ledger they
//! use.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

use rustc_hash::{FxHashMap, FxHashSet};
use undercroft_base::{
    CHUNK_PAGES, ChunkNo, Entry, Flags, PageNo, PageSize, PageState, SpaceId, TierId, VirtPage,
    VirtRange,
};

use crate::ledger::{ChunkHead, Ledger, LedgerError, LedgerWords, SPACE_BITS};

/// An address space of the client.
#[derive(Debug, Default)]
struct Space {
    size: PageSize,
    /// Managed ranges, sorted and disjoint. Ranges that were registered apart stay apart, because
    /// no installation may span two mappings. They bound batches; correctness never depends on
    /// them.
    regions: Vec<VirtRange>,
    /// Position -> chunk. A tree: the next few chunks of a range are found without the
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
    /// The number of the next space. Numbers are given out in turn, and after the last the first
    /// follows: a number comes again only after all others, when no thread has it in hand any more.
    next_space: u32,
    /// No space has this number, or a greater one.
    spaces_end: u32,
    /// Base pages in the state `Stored`.
    stored: u64,
    /// Size of the pages of each chunk that was ever in use.
    sizes: Vec<PageSize>,
    /// Base pages of the largest page that there may be, if it is no base page; otherwise 0.
    large: u64,
    /// Chunks that were found lately, by position. A chunk's head in the ledger is compared,
    /// because the chunk may be at another position by now.
    found: [Cell<ChunkNo>; FOUND],
}

/// The first number of a space, and the end of all: a chunk's head and a note have 24 bits for it.
const FIRST_SPACE: u32 = 1;
const SPACES_END: u32 = 1 << SPACE_BITS;

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
/// for. Or every number for a space is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page table is full")]
pub struct LedgerFull;

/// Checks the heads of all chunks that were ever in use.
fn check_heads<L: Ledger>(ledger: &L, touched: usize) -> Result<(), LedgerError> {
    let mut places = FxHashSet::default();
    for (at, word) in ledger.chunks()[..touched].iter().enumerate() {
        let chunk = ChunkNo(at as u32);
        let word = word.load(Ordering::Relaxed);
        let wrong = |why| {
            Err(LedgerError::Head {
                chunk: chunk.0,
                why,
            })
        };
        match ChunkHead::unpack(word) {
            Some(head) if head.pack() != word => return wrong("bits are set that mean nothing"),
            Some(head) if !places.insert((head.space, head.first)) => {
                return wrong("an earlier chunk has the same place");
            }
            None if word != 0 => return wrong("it is neither free nor in use"),
            _ => {}
        }
    }
    Ok(())
}

/// Checks the entries of a chunk. Returns how many pages are stored.
fn check_entries<L: Ledger>(ledger: &L, chunk: ChunkNo, tiers: usize) -> Result<u64, LedgerError> {
    let (in_use, mut stored) = (ledger.head(chunk).is_some(), 0);
    for (offset, word) in (0..).zip(ledger.words(chunk)) {
        let word = word.load(Ordering::Relaxed);
        let state = check_entry(chunk.page(offset), word, in_use, tiers)?;
        stored += u64::from(state == PageState::Stored);
    }
    Ok(stored)
}

#[inline]
fn check_entry(
    page: PageNo,
    word: u64,
    in_use: bool,
    tiers: usize,
) -> Result<PageState, LedgerError> {
    if word == 0 {
        return Ok(PageState::Untouched);
    }
    let entry = Entry::unpack(word);
    let retained = entry.flags.has(Flags::RETAINED);
    let has_copy = matches!(entry.state, PageState::Stored | PageState::Loading);
    let known = usize::from(entry.tier.0) < tiers;
    let filled = entry.tier == TierId::FILL && entry.slot.0 <= u64::from(u32::MAX);
    let why = match entry.state {
        _ if !in_use => "its chunk is free",
        _ if entry.pack() != word => "no state has this number",
        _ if !Flags::KNOWN.has(entry.flags) => "it has a flag that there is not",
        _ if has_copy && !known && !filled => "it is in a tier that there is not",
        _ if retained && has_copy => "it is stored and keeps a copy of itself",
        _ if retained && !known => "it keeps a copy in a tier that there is not",
        _ => return Ok(entry.state),
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
            next_space: FIRST_SPACE,
            spaces_end: SPACES_END,
            stored: 0,
            sizes: Vec::new(),
            large: 0,
            found: [const { Cell::new(ChunkNo(0)) }; FOUND],
        }
    }

    /// The page table that a dead manager left: the chunks of `spaces`, with the sizes of their
    /// pages. The chunks of other spaces are emptied.
    ///
    /// Errors: a head or an entry is impossible; nothing was written. Cost: O(all entries).
    pub(crate) fn recover(
        ledger: L,
        spaces: &[(SpaceId, PageSize)],
        tiers: usize,
    ) -> Result<PageTable<L>, LedgerError> {
        let touched = ledger.touched_chunks().min(ledger.chunks().len());
        check_heads(&ledger, touched)?;
        let alive: FxHashMap<SpaceId, PageSize> = spaces.iter().copied().collect();
        let mut stored = 0;
        for chunk in (0..touched).map(|at| ChunkNo(at as u32)) {
            let found = check_entries(&ledger, chunk, tiers)?;
            let owner = ledger.head(chunk).map(|head| head.space);
            if let Some(size) = owner.and_then(|owner| alive.get(&owner)) {
                stored += found * size.base_pages();
            }
        }
        let mut table = PageTable::new(ledger);
        table.stored = stored;
        table.sizes = vec![PageSize::Base; touched];
        for (space, size) in spaces {
            table.insert_space(*space, *size);
            table.next_space = table.next_space.max(space.0 + 1);
        }
        for chunk in (0..touched).rev().map(|at| ChunkNo(at as u32)) {
            let Some(head) = table.ledger.head(chunk) else {
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
                    table.sizes[chunk.0 as usize] = owner.size;
                }
                None => table.empty(chunk),
            }
        }
        table.begin_spaces_at(table.next_space);
        Ok(table)
    }

    /// Frees a chunk of a space that is gone.
    fn empty(&mut self, chunk: ChunkNo) {
        for offset in 0..CHUNK_PAGES {
            if self.known(chunk.page(offset)).is_some() {
                (self.ledger).set_entry(chunk.page(offset), Entry::UNTOUCHED);
            }
        }
        self.ledger.set_head(chunk, None);
        self.free.push(chunk);
    }

    /// The page's entry, if anything is known of the page. Cost: one load.
    #[inline]
    pub(crate) fn known(&self, page: PageNo) -> Option<Entry> {
        let word = self.ledger.entries()[page.0 as usize].load(Ordering::Relaxed);
        (word != 0).then(|| Entry::unpack(word))
    }

    pub(crate) fn ledger(&self) -> &L {
        &self.ledger
    }

    /// Every page that was ever in use has a smaller number.
    pub(crate) fn end(&self) -> PageNo {
        PageNo(self.fresh * CHUNK_PAGES)
    }

    /// Every chunk that was ever in use has a smaller number.
    pub(crate) fn chunks_used(&self) -> u32 {
        self.fresh
    }

    /// The chunks in use, by number.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = ChunkNo> {
        let all = (0..self.fresh).map(ChunkNo);
        all.filter(|chunk| self.ledger.head(*chunk).is_some())
    }

    /// Whether the page's chunk is in use.
    pub(crate) fn has_page(&self, page: PageNo) -> bool {
        let chunk = page.chunk();
        (chunk.0 as usize) < self.ledger.chunks().len() && self.ledger.head(chunk).is_some()
    }

    /// The next space has this number, or the first one if there is no such number.
    pub(crate) fn begin_spaces_at(&mut self, next: u32) {
        let exists = (FIRST_SPACE..self.spaces_end).contains(&next);
        self.next_space = if exists { next } else { FIRST_SPACE };
    }

    /// No space gets this number or a greater one from now on.
    pub(crate) fn end_spaces_at(&mut self, end: u32) {
        self.spaces_end = end.clamp(FIRST_SPACE + 1, SPACES_END);
        self.begin_spaces_at(self.next_space);
    }

    /// Whether half of the numbers for spaces are in use.
    pub(crate) fn spaces_are_scarce(&self) -> bool {
        self.spaces.len() as u64 * 2 >= u64::from(self.spaces_end - FIRST_SPACE)
    }

    /// A new space, with the next number that no space has and of which `is_used` is not true.
    /// `None`: there is none. O(1), unless many neighbours are in use.
    pub(crate) fn new_space(
        &mut self,
        size: PageSize,
        is_used: impl Fn(&L, SpaceId) -> bool,
    ) -> Option<SpaceId> {
        for _ in FIRST_SPACE..self.spaces_end {
            let id = SpaceId(self.next_space);
            self.begin_spaces_at(id.0 + 1);
            if !self.spaces.contains_key(&id) && !is_used(&self.ledger, id) {
                self.insert_space(id, size);
                return Some(id);
            }
        }
        None
    }

    fn insert_space(&mut self, id: SpaceId, size: PageSize) {
        let space = Space {
            size,
            ..Space::default()
        };
        self.spaces.insert(id, space);
        if size != PageSize::Base {
            self.large = self.large.max(size.base_pages());
        }
    }

    /// Size of the pages of a space. O(1).
    pub(crate) fn size_in(&self, space: SpaceId) -> PageSize {
        (self.spaces.get(&space)).map_or(PageSize::Base, |owner| owner.size)
    }

    /// Size of a page. O(1), no search.
    #[inline]
    pub(crate) fn size(&self, page: PageNo) -> PageSize {
        let size = self.sizes.get(page.chunk().0 as usize);
        size.copied().unwrap_or_default()
    }

    /// Base pages of a page. O(1), no search.
    #[inline]
    pub(crate) fn base_pages(&self, page: PageNo) -> u64 {
        self.size(page).base_pages()
    }

    /// Base pages of the largest page that there may be, if it is no base page; otherwise 0.
    #[inline]
    pub(crate) fn large(&self) -> u64 {
        self.large
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
        self.sizes.resize(self.fresh as usize, PageSize::Base);
        self.sizes[chunk.0 as usize] = owner.size;
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
        let was = self.entry(page).state == PageState::Stored;
        let is = state == PageState::Stored;
        if was != is {
            let pages = self.base_pages(page);
            self.stored += if is { pages } else { 0 };
            self.stored -= if was { pages } else { 0 };
        }
    }

    /// Base pages that are out of memory, in a tier or as a repeated word.
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
            .is_none_or(|to| to.chunks.contains_key(&at) || to.size != self.size_in(space));
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
        if range.add_to(&mut owner.regions) {
            self.ledger
                .region_changed(space, range, true, &owner.regions);
        }
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
        if range.cut_from(&mut owner.regions) {
            self.ledger
                .region_changed(space, range, false, &owner.regions);
        }
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

    /// Every page that is not `Untouched`, for audits. O(all entries).
    pub(crate) fn all_known(&self) -> impl Iterator<Item = (PageNo, Entry)> {
        let chunks = self.spaces.values().flat_map(|owner| owner.chunks.values());
        let pages = chunks.flat_map(|chunk| (0..CHUNK_PAGES).map(|offset| chunk.page(offset)));
        let known = pages.map(|no| (no, self.entry(no)));
        known.filter(|(_, entry)| entry.state != PageState::Untouched)
    }

    /// Bytes of metadata: ledger words in use and the maps that find them.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let chunks: u64 = self.spaces.values().map(|s| s.chunks.len() as u64).sum();
        // A node of the tree has room for 11 chunks, and at least half of it is in use.
        u64::from(self.fresh) * (9 + 8 * u64::from(CHUNK_PAGES)) + chunks * 24
    }
}
