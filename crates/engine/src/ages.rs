//! The order in which the pages of each tier were stored.
//!
//! A tier that is a device may hold very many pages, so no call takes time for all of them: stale
//! entries are removed a few at a time, and the queue grows by blocks, which are never copied.
//! Cost: 8 bytes for each page stored in a tier that demotes, as many again for entries that are
//! stale, and 4 bytes for each page of a chunk that had one.

use std::collections::VecDeque;

use undercroft_base::{CHUNK_PAGES, PageNo};

use crate::limits::DEMOTE_PAGES_MAX;

/// A page, and the number of this entry among all. Only the newest entry of a page counts: a page
/// that leaves clean again and again has many.
type Age = (PageNo, u32);

/// Result of [`Ages::pop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Oldest {
    /// A page. It may have left the tier: its own entry tells.
    Page(PageNo),
    /// An entry that no longer counts.
    Stale,
}

/// Entries of one block: 32 KiB.
const BLOCK: usize = 4096;

/// Entries looked at for each new one, while stale ones are removed. More than one, so that it
/// ends.
const SWEPT_AT_ONCE: usize = 4;

/// A queue in blocks.
#[derive(Debug, Default)]
struct Fifo {
    blocks: VecDeque<Vec<Age>>,
    /// Entries of the first block that are gone.
    gone: usize,
    len: usize,
}

impl Fifo {
    fn push(&mut self, age: Age) {
        match self.blocks.back_mut() {
            Some(block) if block.len() < BLOCK => block.push(age),
            _ => {
                let mut block = Vec::with_capacity(BLOCK);
                block.push(age);
                self.blocks.push_back(block);
            }
        }
        self.len += 1;
    }

    fn pop(&mut self) -> Option<Age> {
        let age = *self.blocks.front()?.get(self.gone)?;
        self.gone += 1;
        self.len -= 1;
        if self.gone == BLOCK || self.len == 0 {
            self.blocks.pop_front();
            self.gone = 0;
        }
        Some(age)
    }
}

/// The pages of one tier, the oldest first.
#[derive(Debug, Default)]
struct Queue {
    /// Older than all of `newest`. Empty, unless stale entries are being removed.
    swept: Fifo,
    newest: Fifo,
    /// Length at which stale entries are removed next.
    sweep_at: usize,
    sweeps: bool,
}

impl Queue {
    fn len(&self) -> usize {
        self.swept.len + self.newest.len
    }

    fn sweep(&mut self, counts: impl Fn(Age) -> bool) {
        for _ in 0..SWEPT_AT_ONCE {
            match self.newest.pop() {
                Some(age) if counts(age) => self.swept.push(age),
                Some(_) => {}
                None => {
                    std::mem::swap(&mut self.swept, &mut self.newest);
                    self.sweeps = false;
                    self.sweep_at = 2 * self.len();
                    return;
                }
            }
        }
    }
}

/// The newest entries of the pages of one chunk; 0 = none.
type Newest = Box<[u32; CHUNK_PAGES as usize]>;

/// The ages of all tiers.
#[derive(Debug, Default)]
pub(crate) struct Ages {
    tiers: Vec<Queue>,
    chunks: Vec<Option<Newest>>,
    last: u32,
}

fn is_newest(chunks: &[Option<Newest>], (no, number): Age) -> bool {
    let chunk = chunks.get(no.chunk().0 as usize).and_then(Option::as_ref);
    chunk.is_some_and(|of| of[(no.0 % CHUNK_PAGES) as usize] == number)
}

impl Ages {
    pub(crate) fn new(tiers: usize) -> Ages {
        let tiers = std::iter::repeat_with(Queue::default).take(tiers).collect();
        Ages {
            tiers,
            ..Ages::default()
        }
    }

    /// Entries of a tier, stale ones included.
    pub(crate) fn len(&self, tier: usize) -> usize {
        self.tiers.get(tier).map_or(0, Queue::len)
    }

    /// The page is the newest of a tier from now on. O(1); allocates at the first page of a chunk.
    ///
    /// * `is_there`: whether a page is in this tier.
    pub(crate) fn push(&mut self, tier: usize, no: PageNo, is_there: impl Fn(PageNo) -> bool) {
        let age = self.next(no);
        let queue = &mut self.tiers[tier];
        queue.newest.push(age);
        queue.sweeps |= queue.len() >= queue.sweep_at.max(4 * DEMOTE_PAGES_MAX);
        if queue.sweeps {
            queue.sweep(|age| is_newest(&self.chunks, age) && is_there(age.0));
        }
    }

    /// As [`Ages::push`] of each, for pages that are all there and were not pushed before: nothing
    /// is stale, so nothing is swept.
    pub(crate) fn push_all(&mut self, tier: usize, pages: impl IntoIterator<Item = PageNo>) {
        for no in pages {
            let age = self.next(no);
            self.tiers[tier].newest.push(age);
        }
        self.tiers[tier].sweep_at = 2 * self.tiers[tier].len();
    }

    /// The page's newest entry.
    fn next(&mut self, no: PageNo) -> Age {
        self.last = self.last.wrapping_add(1).max(1);
        let at = no.chunk().0 as usize;
        if at >= self.chunks.len() {
            self.chunks.resize_with(at + 1, || None);
        }
        let chunk = self.chunks[at].get_or_insert_with(|| Box::new([0; CHUNK_PAGES as usize]));
        chunk[(no.0 % CHUNK_PAGES) as usize] = self.last;
        (no, self.last)
    }

    /// Takes the oldest entry of a tier out. `None`: the tier has none.
    pub(crate) fn pop(&mut self, tier: usize) -> Option<Oldest> {
        let queue = &mut self.tiers[tier];
        let age = queue.swept.pop().or_else(|| queue.newest.pop())?;
        Some(if is_newest(&self.chunks, age) {
            Oldest::Page(age.0)
        } else {
            Oldest::Stale
        })
    }

    /// Memory held.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        let queues = self.tiers.iter();
        let blocks = queues.map(|queue| queue.swept.blocks.len() + queue.newest.blocks.len());
        let chunks = self.chunks.iter().flatten().count();
        (blocks.sum::<usize>() * BLOCK * size_of::<Age>()
            + chunks * size_of::<[u32; CHUNK_PAGES as usize]>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(oldest: Option<Oldest>) -> Option<PageNo> {
        match oldest? {
            Oldest::Page(no) => Some(no),
            Oldest::Stale => None,
        }
    }

    /// Pages that are gone go, others stay in their order, whatever comes between.
    #[test]
    fn the_oldest_comes_first_and_what_is_stale_is_removed_in_the_end() {
        let mut ages = Ages::new(1);
        let lives = |no: PageNo| no.0.is_multiple_of(10);
        let mut last = None;
        for no in 0..100_000 {
            ages.push(0, PageNo(no), lives);
            assert!(ages.len(0) < 60_000, "{} entries at {no}", ages.len(0));
            if no % 50 == 0 {
                let oldest = page(ages.pop(0));
                assert!(oldest.is_some() && last < oldest, "{last:?}, {oldest:?}");
                last = oldest;
            }
        }
        let mut left = 0;
        while ages.len(0) > 0 {
            let oldest = page(ages.pop(0));
            assert!(oldest.is_some() && last < oldest, "{last:?}, {oldest:?}");
            last = oldest;
            left += u32::from(oldest.is_some_and(lives));
        }
        assert!(left > 0, "those that are there stay");
        assert_eq!((ages.len(0), ages.pop(0)), (0, None));
    }

    /// A page that leaves clean is there each time: it has one entry that counts.
    #[test]
    fn a_page_that_comes_again_and_again_counts_once() {
        let mut ages = Ages::new(2);
        for round in 0..1000 {
            for no in 0..1000 {
                ages.push(1, PageNo(no), |_| true);
            }
            assert!(ages.len(1) <= 4100, "{} entries, {round}", ages.len(1));
        }
        let mut found = Vec::new();
        while let Some(oldest) = ages.pop(1) {
            found.extend(page(Some(oldest)));
        }
        assert_eq!(found, (0..1000).map(PageNo).collect::<Vec<_>>());
        assert_eq!(ages.len(0), 0);
    }
}
