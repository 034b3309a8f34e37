//! Identities: which page, in which address space, in which tier slot. Each is its own type.

use crate::units::{BASE_PAGE_BYTES, PageCount};

/// Pages of one ledger chunk: one ledger page of 8-byte entries. 2 MiB of address space, if they
/// are base pages.
pub const CHUNK_PAGES: u32 = 512;

/// A page as the engine and policies know it: its index in the ledger (`chunk * 512 + offset`). It
/// is constant while the page is mapped at its address; a moved mapping gets new numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo(pub u32);

/// A chunk of the ledger: 512 consecutive, aligned pages of one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkNo(pub u32);

/// An address space (one `mm` of the kernel) of a client. Never reused while a manager lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u32);

/// The kernel's id of a faulting thread; 0 when unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId(pub u32);

/// A page of an address space: its address in units of the space's page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtPage(pub u64);

/// A half-open range of virtual pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VirtRange {
    /// First page.
    pub start: VirtPage,
    /// The page behind the last one; never below `start`.
    pub end: VirtPage,
}

/// A tier, numbered in the order the user gave, fastest first. `TierId::FILL` is no tier: the slot
/// then holds the 32-bit word that fills the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierId(pub u8);

/// A place inside a tier. Only the tier knows what the number means. At most 33 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u64);

/// The generation of a stored copy: a 16-bit count of evictions, in units that the engine chooses.
/// The checksum depends on it, so a stale or misdirected copy does not verify. Its age is the
/// refault distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(pub u16);

impl PageNo {
    /// The chunk this page is in.
    #[inline]
    pub fn chunk(self) -> ChunkNo {
        ChunkNo(self.0 / CHUNK_PAGES)
    }

    /// The page's place inside its chunk, 0..512.
    #[inline]
    pub fn offset(self) -> u32 {
        self.0 % CHUNK_PAGES
    }
}

impl ChunkNo {
    /// The page at `offset` (0..512) of this chunk.
    #[inline]
    pub fn page(self, offset: u32) -> PageNo {
        debug_assert!(offset < CHUNK_PAGES);
        PageNo(self.0 * CHUNK_PAGES + offset)
    }
}

impl TierId {
    /// Marks a page of one repeated 32-bit word: it takes no slot.
    pub const FILL: TierId = TierId(7);
    /// Most tiers of a client: 3 bits of the entry, without `FILL`.
    pub const MAX: usize = 7;
}

impl Slot {
    /// Slots are below this number (33 bits of the entry).
    pub const LIMIT: u64 = 1 << 33;
}

impl VirtPage {
    /// The page that holds `address`, in a space of base pages.
    pub fn of(address: u64) -> VirtPage {
        VirtPage(address / BASE_PAGE_BYTES as u64)
    }

    /// The address of the first byte, in a space of base pages.
    pub fn address(self) -> u64 {
        self.0 * BASE_PAGE_BYTES as u64
    }

    /// The page `count` pages further on.
    pub fn plus(self, count: u64) -> VirtPage {
        VirtPage(self.0 + count)
    }
}

impl VirtRange {
    /// The pages from `start` to `end`, `end` not included. Empty if `end <= start`.
    pub fn new(start: VirtPage, end: VirtPage) -> VirtRange {
        VirtRange {
            start,
            end: end.max(start),
        }
    }

    /// The range of one page.
    pub fn one(page: VirtPage) -> VirtRange {
        VirtRange::new(page, page.plus(1))
    }

    /// The range of the addresses `[start, end)`, both page-aligned, in a space of base pages.
    pub fn of_addresses(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage::of(start), VirtPage::of(end))
    }

    /// How many pages.
    pub fn count(self) -> PageCount {
        PageCount(self.end.0 - self.start.0)
    }

    /// True if it has no page.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// True when `page` is inside.
    pub fn contains(self, page: VirtPage) -> bool {
        self.start <= page && page < self.end
    }

    /// The pages that are in both ranges; may be empty.
    pub fn intersect(self, other: VirtRange) -> VirtRange {
        VirtRange::new(self.start.max(other.start), self.end.min(other.end))
    }

    /// The ranges of `sorted` (ascending, disjoint) that share a page with this range, which is not
    /// empty. O(log n).
    pub fn overlapping(self, sorted: &[VirtRange]) -> std::ops::Range<usize> {
        let from = sorted.partition_point(|range| range.end <= self.start);
        let to = sorted.partition_point(|range| range.start < self.end);
        from..to.max(from)
    }

    /// The parts of the range outside `holes`, ascending.
    pub fn minus(self, holes: &[VirtRange]) -> Vec<VirtRange> {
        let mut left = vec![self];
        for hole in holes {
            left = left
                .into_iter()
                .flat_map(|part| {
                    [
                        VirtRange::new(part.start, part.end.min(hole.start)),
                        VirtRange::new(part.start.max(hole.end), part.end),
                    ]
                })
                .filter(|part| !part.is_empty())
                .collect();
        }
        left
    }

    /// Adds this range to `sorted` (ascending, disjoint), as one with those that it shares a page
    /// with. False if one of them has all of it. O(log n + ranges behind it).
    pub fn add_to(self, sorted: &mut Vec<VirtRange>) -> bool {
        let touched = self.overlapping(sorted);
        if let [old] = sorted[touched.clone()]
            && old.intersect(self) == self
        {
            return false;
        }
        let mut merged = self;
        for old in &sorted[touched.clone()] {
            merged = VirtRange::new(old.start.min(merged.start), old.end.max(merged.end));
        }
        sorted.splice(touched, [merged]);
        true
    }

    /// Removes the pages of this range from `sorted` (ascending, disjoint). False if none of them
    /// is there. O(log n + ranges behind it).
    pub fn cut_from(self, sorted: &mut Vec<VirtRange>) -> bool {
        let cut = self.overlapping(sorted);
        let (Some(first), Some(last)) = (sorted[cut.clone()].first(), sorted[cut.clone()].last())
        else {
            return false;
        };
        let rest = [
            VirtRange::new(first.start, first.end.min(self.start)),
            VirtRange::new(last.start.max(self.end), last.end),
        ];
        sorted.splice(cut, rest.into_iter().filter(|rest| !rest.is_empty()));
        true
    }

    /// Every page, ascending.
    pub fn pages(self) -> impl DoubleEndedIterator<Item = VirtPage> {
        (self.start.0..self.end.0).map(VirtPage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn minus_leaves_what_no_hole_covers() {
        let holes = [range(0, 2), range(4, 6), range(9, 20)];
        assert_eq!(range(0, 10).minus(&holes), [range(2, 4), range(6, 9)]);
        assert_eq!(range(0, 10).minus(&[range(0, 10)]), []);
        assert_eq!(range(5, 8).minus(&[range(0, 3)]), [range(5, 8)]);
    }
}
