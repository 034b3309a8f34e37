//! Write-behind: stored pages wait in the slot table's memory until there are enough for one large
//! write.
//!
//! A read waits while the device is busy with a write. Large writes delay fewer reads than many
//! small ones (figures: docs/design/0011). Any thread reads waiting pages from here without a lock.
//! The checksum tells whether the place was given to another page meanwhile. Everything else is
//! done by the thread that holds the writer's lock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*, fence};

use undercroft_base::{BASE_PAGE_BYTES, Bytes};
use undercroft_sys::mapping::SharedMemory;

use super::{BATCH_PAGES, PAGE_WORDS};

/// Places, and so the most pages that wait at once: 1 MiB.
pub const WAITING_PAGES_MAX: usize = BATCH_PAGES;

/// Words used in the slot table. First the places, one word each: the slot of its page + 1 (0:
/// free). Then the pages.
pub(super) const WORDS: usize =
    WAITING_PAGES_MAX.next_multiple_of(PAGE_WORDS) + WAITING_PAGES_MAX * PAGE_WORDS;

/// The waiting pages are written when fewer places than this are free.
const ROOM: usize = 64;

/// Keeps the pages that wait to be written. The tier owns the memory and passes it to each call.
#[derive(Debug)]
pub(super) struct Behind {
    first_word: usize,
    /// How many pages may wait at once; 0 = none.
    most: usize,
    /// All places in use are below this one.
    end: AtomicUsize,
    /// Places that were ever used: their memory is allocated.
    used: AtomicUsize,
}

impl Behind {
    /// Uses the words from `first_word` on. They are all zeros, or as an earlier manager left them.
    pub(super) fn over(table: &SharedMemory, first_word: usize) -> Behind {
        let mut this = Behind {
            first_word,
            most: 0,
            end: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
        };
        let left = this.slots(table).iter().rposition(|w| w.load(Relaxed) != 0);
        this.end = left.map_or(0, |last| last + 1).into();
        this
    }

    /// Another process has used the memory; how much of it is unknown.
    pub(super) fn inherit(&self) {
        self.used.store(WAITING_PAGES_MAX, Relaxed);
    }

    pub(super) fn set_most(&mut self, pages: usize) {
        self.most = pages.min(WAITING_PAGES_MAX);
    }

    /// Whether pages may wait.
    pub(super) fn is_on(&self) -> bool {
        self.most > ROOM
    }

    /// Whether there are too few places for `pages` more.
    pub(super) fn lacks(&self, pages: usize) -> bool {
        self.end.load(Relaxed) + pages > self.most
    }

    /// Whether `pages` are enough for a write of their own, and no other pages wait before them.
    pub(super) fn is_enough(&self, pages: usize) -> bool {
        pages + ROOM > self.most && self.end.load(Relaxed) == 0
    }

    /// Whether it is time to write.
    pub(super) fn is_full(&self) -> bool {
        self.end.load(Relaxed) + ROOM > self.most
    }

    /// Memory allocated for pages that wait.
    pub(super) fn dram(&self) -> Bytes {
        Bytes((self.used.load(Relaxed) * BASE_PAGE_BYTES) as u64)
    }

    fn slots<'a>(&self, table: &'a SharedMemory) -> &'a [AtomicU64] {
        &table.words()[self.first_word..][..WAITING_PAGES_MAX]
    }

    fn page_at(&self, place: usize) -> usize {
        (self.first_word + WAITING_PAGES_MAX.next_multiple_of(PAGE_WORDS)) * 8
            + place * BASE_PAGE_BYTES
    }

    /// Where the page of `slot` waits. Cost: one load if no page waits, otherwise up to 2 KiB of
    /// words.
    fn find(&self, table: &SharedMemory, slot: u64) -> Option<usize> {
        let end = self.end.load(Acquire);
        let slots = &self.slots(table)[..end];
        slots.iter().position(|word| word.load(Acquire) == slot + 1)
    }

    /// Copies the page of `slot` out. `None`: it does not wait, so it is on the device. False: its
    /// bytes are not the expected ones.
    ///
    /// * `verify`: makes the page of the bytes of its block, if it is the expected one.
    pub(super) fn load(
        &self,
        table: &SharedMemory,
        slot: u64,
        dst: &mut [u8],
        verify: impl Fn(&mut [u8]) -> bool,
    ) -> Option<bool> {
        loop {
            let place = self.find(table, slot)?;
            table.bytes_out(self.page_at(place), dst);
            fence(Acquire); // the check below comes after the copy
            if verify(dst) {
                return Some(true);
            }
            // Was the page written meanwhile, and its place given to another?
            if self.find(table, slot) == Some(place) {
                return Some(false);
            }
        }
    }

    /// The slot is given to another page: the page that waited for it is dropped.
    pub(super) fn forget(&self, table: &SharedMemory, slot: u64) {
        if let Some(place) = self.find(table, slot) {
            self.remove(table, place);
        }
    }

    /// The page of `slot` waits from now on. There is a free place (see [`Behind::lacks`]), and no
    /// page waits for the slot.
    pub(super) fn add(&self, table: &SharedMemory, slot: u64, page: &[u8]) {
        let place = self.end.load(Relaxed);
        fence(Release); // the place was seen free before its bytes change
        table.bytes_in(self.page_at(place), page);
        self.slots(table)[place].store(slot + 1, Release);
        self.end.store(place + 1, Release);
        self.used.fetch_max(place + 1, Relaxed);
    }

    /// Every place in use with its slot, in the order in which they were added.
    pub(super) fn waiting<'a>(
        &self,
        table: &'a SharedMemory,
    ) -> impl Iterator<Item = (usize, u64)> + use<'a> {
        let slots = &self.slots(table)[..self.end.load(Relaxed)];
        let waits =
            |(place, word): (usize, &AtomicU64)| Some((place, word.load(Relaxed).checked_sub(1)?));
        slots.iter().enumerate().filter_map(waits)
    }

    /// Copies the page at `place` to the buffer it is written from.
    pub(super) fn copy(&self, table: &SharedMemory, place: usize, dst: &mut [u8]) {
        table.bytes_out(self.page_at(place), dst);
    }

    /// The page at `place` is on the device, or its slot was freed.
    pub(super) fn remove(&self, table: &SharedMemory, place: usize) {
        self.slots(table)[place].store(0, Release);
    }

    /// Starts again at the first place, if no page waits.
    pub(super) fn rewind(&self, table: &SharedMemory) {
        if self.waiting(table).next().is_none() {
            self.end.store(0, Release);
        }
    }
}
