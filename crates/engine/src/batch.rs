//! The batch in flight: pages that were selected and are not yet published, and the index by which
//! the caller names each.

use undercroft_base::{PageNo, Slot, SpaceId, Stamp, TierId, VirtPage};

use crate::limits::EVICT_PAGES_MAX;

/// A set of items is one word with a bit for each, and a `BatchIndex` holds the place in 8 bits.
const _: () = assert!(EVICT_PAGES_MAX <= u64::BITS as usize && EVICT_PAGES_MAX <= u8::MAX as usize);

/// One item of the batch in flight. Only the engine makes one, so it always names an item of some
/// batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchIndex {
    at: u16,
    /// Counts batches, and wraps. An index that was kept for too long has another number than those
    /// of the next batches.
    batch: u8,
}

impl BatchIndex {
    /// The item's place in the list that [`Evictions::select`](crate::Evictions::select) returned.
    #[inline]
    pub fn place(self) -> usize {
        usize::from(self.at)
    }
}

/// One page of the batch, as the caller sees it.
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
    /// Generation of the copy that will be made. It seeds the checksum.
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
    /// It stays resident: it is pinned, or shared with another process.
    Busy,
    /// It stays resident: the batch was cancelled, or the layout changed.
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

/// The batch in flight. Behind its [`EVICT_PAGES_MAX`] places are groups of earlier batches that
/// were set aside, with as many places each.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub pages: Vec<InFlight>,
    /// Counts batches, and wraps.
    number: u8,
    /// The same for each place of a group: how many groups have been there.
    numbers: Vec<u8>,
    /// Pages of fork children that share a page of the batch: (its place, the child's page).
    pub followers: Vec<(usize, PageNo)>,
}

impl Batch {
    /// Forgets the last batch. Its indices are void from now on.
    #[inline]
    pub(crate) fn restart(&mut self) {
        if self.pages.len() <= EVICT_PAGES_MAX {
            self.pages.clear();
            self.followers.clear();
        } else {
            self.clear_first_places();
        }
        self.number = self.number.wrapping_add(1);
    }

    /// Groups that were set aside stay where they are.
    #[inline(never)]
    fn clear_first_places(&mut self) {
        self.pages[..EVICT_PAGES_MAX].fill(InFlight::NONE);
        self.followers
            .retain(|(leader, _)| *leader >= EVICT_PAGES_MAX);
        while let Some(last) = self.pages.len().checked_sub(EVICT_PAGES_MAX)
            && self.pages[last..].iter().all(|page| page.settled)
        {
            self.pages.truncate(last);
        }
    }

    /// Puts the next page of the batch at `place`.
    #[inline]
    pub(crate) fn put(&mut self, place: usize, page: InFlight) {
        match self.pages.get_mut(place) {
            Some(at) => *at = page, // there are groups set aside behind it
            None => self.pages.push(page),
        }
    }

    /// The first place where a group can be set aside. The earlier content of these places is void.
    pub(crate) fn aside_place(&mut self) -> usize {
        let free = |at: &usize| {
            let mut places = self.pages.iter().skip(*at).take(EVICT_PAGES_MAX);
            places.all(|page| page.settled)
        };
        let found = (EVICT_PAGES_MAX..).step_by(EVICT_PAGES_MAX).find(free);
        let base = found.expect("there is always one behind the last");
        let places = self.pages.len().max(base + EVICT_PAGES_MAX);
        self.pages.resize(places, InFlight::NONE);
        let group = base / EVICT_PAGES_MAX - 1;
        if self.numbers.len() <= group {
            self.numbers.resize(group + 1, 0);
        }
        self.numbers[group] = self.numbers[group].wrapping_add(1);
        base
    }

    /// The batch number of the content of `place`.
    #[inline]
    fn number_at(&self, place: usize) -> u8 {
        if place < EVICT_PAGES_MAX {
            self.number
        } else {
            let group = place / EVICT_PAGES_MAX - 1;
            self.numbers.get(group).copied().unwrap_or(0)
        }
    }

    /// The index of the item at `place`.
    #[inline]
    pub(crate) fn index(&self, place: usize) -> BatchIndex {
        BatchIndex {
            at: u16::try_from(place).expect("some hundred groups are set aside at most"),
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
        batch.restart();
        batch.place(old);
    }
}
