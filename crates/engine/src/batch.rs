//! The batches in flight: pages that were selected and are not yet published, and the index by
//! which the caller names each.

use undercroft_base::{PageNo, PageSize, Slot, SpaceId, Stamp, TierId, VirtPage};

use crate::limits::EVICT_PAGES_MAX;

/// A set of items is one word with a bit for each, and a `BatchIndex` holds the place in 8 bits.
const _: () = assert!(EVICT_PAGES_MAX <= u64::BITS as usize && EVICT_PAGES_MAX <= u8::MAX as usize);

/// Pages of one address space in a batch beside another that has pages of it: half of an agent's
/// holding area.
pub const HALF_PAGES: usize = EVICT_PAGES_MAX / 2;

const LOW_HALF: u64 = u64::MAX >> (64 - HALF_PAGES);

/// An item of a batch in flight. Only the engine makes one, so it always names an item of some
/// batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchIndex {
    at: u16,
    /// Counts batches, and wraps. An index that was kept for too long has another number than those
    /// of the next batches.
    batch: u8,
}

impl BatchIndex {
    /// The item's place among all that are in flight.
    #[inline]
    pub fn place(self) -> usize {
        usize::from(self.at)
    }
}

/// A page of the batch, as the caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictItem {
    /// Its place in the batch.
    pub at: BatchIndex,
    /// The page's entry.
    pub no: PageNo,
    /// Its address space.
    pub space: SpaceId,
    /// Where it is mapped.
    pub page: VirtPage,
    /// Where in the holding area of its space's agent its bytes are while it is in flight. Pages of
    /// one space in a batch have places that follow each other, from 0 or from [`HALF_PAGES`] on.
    pub place: u8,
    /// Its size.
    pub size: PageSize,
    /// Generation of the copy that will be made. The checksum depends on it.
    pub stamp: Stamp,
    /// The copy that a tier still keeps, if any. The page is clean if its bytes have that copy's
    /// checksum.
    pub retained: Option<(TierId, Slot, Stamp)>,
}

/// Whether a page could be taken out of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Only the caller has its bytes now.
    Moved,
    /// The page stays resident: it is pinned, or shared with another process.
    Busy,
    /// The page stays resident: the batch was cancelled, or the layout changed.
    NotTried,
    /// The agent was told to take it, and said neither that it did nor that it could not. The page
    /// counts as resident, and as out of memory once: if it turns out to be missing, it is lost,
    /// and never reads as zeros.
    Unsure,
}

/// Where a taken page went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stored in a tier.
    Stored(TierId, Slot),
    /// Unchanged since it was loaded, so the retained copy is used.
    Clean,
    /// Each of its 32-bit words is this one.
    Fill(u32),
    /// Put back into the client: a thread waits for it, or no tier took it.
    PutBack,
    /// The bytes are gone: they ended with the process that had them. Other processes can still see
    /// the place.
    Lost,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    pub item: EvictItem,
    /// The program dropped the page, so its bytes are not stored.
    pub dead: bool,
    pub wanted: bool,
    pub settled: bool,
    /// The program moved the page after it was chosen.
    pub moved: bool,
    /// The heir of its frame: see [`Evictions::leave_frame`](crate::Evictions::leave_frame).
    pub heir: Option<(SpaceId, VirtPage)>,
}

impl InFlight {
    /// A place of the batch with no page.
    pub(crate) const NONE: InFlight = InFlight {
        item: EvictItem {
            at: BatchIndex { at: 0, batch: 0 },
            no: PageNo(u32::MAX),
            space: SpaceId(u32::MAX),
            page: VirtPage(u64::MAX),
            place: 0,
            size: PageSize::Base,
            stamp: Stamp(0),
            retained: None,
        },
        dead: true,
        wanted: false,
        settled: true,
        moved: false,
        heir: None,
    };
}

/// The batches in flight. Each has a group of [`EVICT_PAGES_MAX`] places, and so has each group of
/// a batch that was set aside. Those of one address space have different halves of its agent's
/// holding area.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub pages: Vec<InFlight>,
    /// By group of places: how often it was begun, and wraps.
    numbers: Vec<u8>,
    /// Pages of fork children that share a page in flight: (its place, the child's page).
    pub followers: Vec<(usize, PageNo)>,
}

impl Batch {
    /// The first place of a group that has nothing in flight, for a new batch or one that is set
    /// aside. Indices of what was there are void from now on.
    #[inline]
    pub(crate) fn begin(&mut self) -> usize {
        let base = self.free_group();
        if base == 0 && self.pages.len() <= EVICT_PAGES_MAX {
            self.pages.clear();
            self.followers.clear();
        } else {
            self.clear_group(base);
        }
        let group = base / EVICT_PAGES_MAX;
        if self.numbers.len() <= group {
            self.numbers.resize(group + 1, 0);
        }
        self.numbers[group] = self.numbers[group].wrapping_add(1);
        base
    }

    fn free_group(&self) -> usize {
        let is_free = |base: &usize| {
            let mut places = self.pages.iter().skip(*base).take(EVICT_PAGES_MAX);
            places.all(|page| page.settled)
        };
        let mut groups = (0..).step_by(EVICT_PAGES_MAX);
        groups
            .find(is_free)
            .expect("there is always one behind the last")
    }

    /// Groups with something in flight stay where they are. Those behind the last of them go.
    #[inline(never)]
    fn clear_group(&mut self, base: usize) {
        let is_here = |place: usize| (base..base + EVICT_PAGES_MAX).contains(&place);
        self.followers.retain(|(leader, _)| !is_here(*leader));
        let last = self.pages.iter().rposition(|page| !page.settled);
        let groups = last.map_or(0, |last| last / EVICT_PAGES_MAX + 1);
        self.pages.truncate(groups * EVICT_PAGES_MAX);
        self.pages
            .resize(self.pages.len().max(base), InFlight::NONE);
        let end = self.pages.len().min(base + EVICT_PAGES_MAX);
        self.pages[base..end].fill(InFlight::NONE);
    }

    /// Puts a page at `place`: the next of the group that was begun last.
    #[inline]
    pub(crate) fn put(&mut self, place: usize, page: InFlight) {
        match self.pages.get_mut(place) {
            Some(at) => *at = page, // there are groups behind it
            None => self.pages.push(page),
        }
    }

    /// Whether a page is in flight.
    pub(crate) fn is_any(&self) -> bool {
        self.pages.iter().any(|page| !page.settled)
    }

    /// The place for the first of the next pages of `space`, and most pages that may follow each
    /// other from there on. 0: all places are in use.
    pub(crate) fn places_for(&self, space: SpaceId) -> (usize, usize) {
        let in_flight = self.pages.iter().filter(|page| !page.settled);
        let of = in_flight.filter(|page| page.item.space == space);
        let used = of.fold(0u64, |used, page| used | 1 << page.item.place);
        match (used & LOW_HALF, used & !LOW_HALF) {
            (0, 0) => (0, EVICT_PAGES_MAX),
            (0, _) => (0, HALF_PAGES),
            (_, 0) => (HALF_PAGES, HALF_PAGES),
            _ => (0, 0),
        }
    }

    /// The spaces of all pages in flight, each once.
    pub(crate) fn spaces(&self) -> Vec<SpaceId> {
        let mut spaces = Vec::new(); // allocates beside another batch only
        for page in self.pages.iter().filter(|page| !page.settled) {
            let space = page.item.space;
            if spaces.last() != Some(&space) && !spaces.contains(&space) {
                spaces.push(space);
            }
        }
        spaces
    }

    /// The batch number of the content of `place`.
    #[inline]
    fn number_at(&self, place: usize) -> u8 {
        self.numbers
            .get(place / EVICT_PAGES_MAX)
            .copied()
            .unwrap_or(0)
    }

    /// The index of the item at `place`.
    #[inline]
    pub(crate) fn index(&self, place: usize) -> BatchIndex {
        BatchIndex {
            at: u16::try_from(place).expect("some hundred groups are in flight at most"),
            batch: self.number_at(place),
        }
    }

    /// The place of the item in `pages`. Panics if the index is of another batch: the caller's bug.
    #[inline]
    pub(crate) fn place(&self, index: BatchIndex) -> usize {
        assert_eq!(
            index.batch,
            self.number_at(index.place()),
            "an index of another batch was used"
        );
        index.place()
    }

    /// Whether a fork child depends on the item at `place`.
    #[inline]
    pub(crate) fn has_follower(&self, place: usize) -> bool {
        self.followers.iter().any(|(leader, _)| *leader == place)
    }

    /// Whether a process still uses the page of the item at `place`.
    #[inline]
    pub(crate) fn is_alive(&self, place: usize) -> bool {
        !self.pages[place].dead || self.has_follower(place)
    }

    /// A page that the copy of the item at `place` is for. `None`: no process uses it any more.
    pub(crate) fn page_of(&self, place: usize) -> Option<PageNo> {
        let page = &self.pages[place];
        if !page.dead {
            return Some(page.item.no);
        }
        let mut followers = self.followers.iter();
        followers.find_map(|(of, no)| (*of == place).then_some(*no))
    }

    /// Whether a thread waits for the item at `place`, so that it must be put back.
    #[inline]
    pub(crate) fn is_wanted(&self, place: usize) -> bool {
        let page = &self.pages[place];
        page.wanted && !page.dead && !page.settled && !self.has_follower(place)
    }

    pub(crate) fn position(&self, no: PageNo) -> Option<usize> {
        self.pages
            .iter()
            .position(|p| p.item.no == no && !p.dead && !p.settled)
    }

    /// The pages in flight that a process still uses, and those of fork children that share them.
    pub(crate) fn numbers(&self) -> Vec<PageNo> {
        let alive = self.pages.iter().filter(|page| !page.dead && !page.settled);
        let followers = self.followers.iter().map(|(_, child)| *child);
        alive.map(|page| page.item.no).chain(followers).collect()
    }

    fn leader_of(&self, follower: PageNo) -> Option<usize> {
        self.followers
            .iter()
            .find(|(_, page)| *page == follower)
            .map(|(at, _)| *at)
    }

    /// A thread faulted on a page of the batch.
    pub(crate) fn want(&mut self, no: PageNo) {
        if let Some(at) = self.position(no).or_else(|| self.leader_of(no)) {
            self.pages[at].wanted = true;
        }
    }

    /// The program dropped the page.
    pub(crate) fn kill(&mut self, no: PageNo) {
        if let Some(at) = self.position(no) {
            self.pages[at].dead = true;
        }
        self.followers.retain(|(_, page)| *page != no);
    }

    /// The page moved to another address.
    pub(crate) fn rekey(&mut self, old: PageNo, new: PageNo, page: VirtPage) {
        if let Some(at) = self.position(old) {
            self.pages[at].item.no = new;
            self.pages[at].item.page = page;
            self.pages[at].moved = true;
        }
        for follower in &mut self.followers {
            if follower.1 == old {
                follower.1 = new;
            }
        }
    }

    /// The fork child's page `child` is a copy of `parent`, if that is in the batch. Returns the
    /// place of the item.
    pub(crate) fn follow(&mut self, parent: PageNo, child: PageNo) -> Option<usize> {
        let at = self.position(parent).or_else(|| self.leader_of(parent))?;
        self.followers.push((at, child));
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "an index of another batch")]
    fn an_index_of_the_last_batch_names_nothing_of_the_next() {
        let mut batch = Batch::default();
        let old = batch.index(3);
        assert_eq!(batch.place(old), 3);
        batch.begin();
        batch.place(old);
    }
}
