//! How much space of the file the tier may take: its quota. Another process raises and lowers it
//! while the tier is used: a keeper, at the word of the daemon (docs/design/0039).
//!
//! ```text
//! one word of the slot table:  | quota, 32 bits | slabs that have space, 32 bits |
//! ```
//! The tier counts a slab before it takes space, and uncounts it once the space was given back. The
//! keeper changes the quota alone. Each of these is one exchange of the whole word. So once the
//! quota is lowered, no slab takes space until fewer than that have any, and the keeper's answer
//! says how many had at that moment. No manager is asked: the word is true also while there is
//! none.
//!
//! The tier says when half of what the quota leaves is full, so that more can be given before it is
//! full. The keeper sets a *mark* there. The tier rings a bell (an eventfd) when that many slots
//! are in use, and clears the mark.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering::*};

use undercroft_base::{Bytes, PageSize};
use undercroft_sys::mapping::SharedMemory;

use super::{GRANT_WORD, MARK_WORD, QUOTA_WORD, USED_WORD, slab_bytes, slab_slots};

/// The word. All zeros: no quota was set, or the tier was closed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quota<'a>(pub(super) &'a AtomicU64);

/// Its two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Slabs that may have space.
    pub(super) most: u32,
    /// Slabs that have, or had just now.
    pub(super) held: u32,
}

impl Counts {
    fn of(word: u64) -> Counts {
        Counts {
            most: (word >> 32) as u32,
            held: word as u32,
        }
    }

    fn word(self) -> u64 {
        u64::from(self.most) << 32 | u64::from(self.held)
    }
}

impl Quota<'_> {
    pub(super) fn counts(self) -> Counts {
        Counts::of(self.0.load(SeqCst))
    }

    /// Changes the word at once. Returns what it was; `None`: `change` refused.
    fn change(self, change: impl Fn(Counts) -> Option<Counts>) -> Option<Counts> {
        let change = |word| change(Counts::of(word)).map(Counts::word);
        let was = self.0.fetch_update(SeqCst, SeqCst, change).ok()?;
        Some(Counts::of(was))
    }

    /// Sets the first quota, unless there is one.
    pub(super) fn begin(self, most: u32) {
        self.change(|is| (is.most == 0).then_some(Counts { most, ..is }));
    }

    /// Sets another quota. Returns how many slabs have space; `None`: the tier was closed.
    fn set(self, most: u32) -> Option<u32> {
        let was = self.change(|is| (is.most != 0).then_some(Counts { most, ..is }));
        was.map(|was| was.held)
    }

    /// Counts up to `want` slabs more, as far as the quota goes. Returns how many.
    pub(super) fn take(self, want: u32) -> u32 {
        let more = |is: Counts| want.min(is.most.saturating_sub(is.held));
        let was = self.change(|is| {
            let held = is.held + more(is);
            Some(Counts { held, ..is })
        });
        was.map_or(0, more)
    }

    /// These slabs have no space any more.
    pub(super) fn give(self, slabs: u32) {
        self.change(|is| {
            let held = is.held.saturating_sub(slabs);
            Some(Counts { held, ..is })
        });
    }

    /// `held` slabs have space, as the table says. An earlier manager may have counted one and
    /// not used it yet.
    pub(super) fn correct(self, held: u32) {
        self.change(|is| Some(Counts { held, ..is }));
    }
}

/// The keeper's view of a tier: its quota, and what it has.
#[derive(Debug)]
pub struct Room {
    table: SharedMemory,
    slabs: u32,
    page: PageSize,
}

/// Bytes of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// May have space: the quota. 0: the tier was closed, and has none.
    pub quota: Bytes,
    /// Have space, whether there is a page or not.
    pub held: Bytes,
    /// Have pages.
    pub used: Bytes,
}

impl Room {
    /// * `table`: the slot table of a file of `size`, for copies of this size of page.
    pub(crate) fn over(table: BorrowedFd<'_>, size: Bytes, page: PageSize) -> io::Result<Room> {
        Ok(Room {
            table: SharedMemory::from_fd(table.try_clone_to_owned()?)?,
            slabs: u32::try_from(size.0 / slab_bytes(page)).unwrap_or(u32::MAX),
            page,
        })
    }

    fn quota(&self) -> Quota<'_> {
        Quota(&self.table.words()[QUOTA_WORD])
    }

    /// Whole slabs, one at least, and no more than the file has.
    fn slabs(&self, bytes: Bytes) -> u32 {
        let slabs = u32::try_from(bytes.0 / slab_bytes(self.page)).unwrap_or(u32::MAX);
        slabs.clamp(1, self.slabs)
    }

    /// Sets the first quota, before there is a tier: its grant.
    pub fn begin(&self, quota: Bytes) {
        let slabs = self.slabs(quota);
        self.quota().begin(slabs);
        self.table.words()[GRANT_WORD].store(u64::from(slabs), Relaxed);
        self.mark();
    }

    /// Sets a mark half-way between what is in use and the quota.
    fn mark(&self) {
        let words = self.table.words();
        let used = words[USED_WORD].load(Relaxed);
        let most = u64::from(self.quota().counts().most) * u64::from(slab_slots(self.page));
        let free = most.saturating_sub(used);
        words[MARK_WORD].store(used + (free / 2).max(1), Relaxed);
    }

    /// Sets another quota: whole slabs. From then on the tier has no more space than that, or than
    /// it has now if that is more. Then it gives space back as it comes free.
    pub fn set(&self, quota: Bytes) -> Taken {
        let most = self.slabs(quota);
        match self.quota().set(most) {
            Some(held) => {
                self.mark();
                self.taken(Counts { most, held })
            }
            None => Taken::default(),
        }
    }

    /// Reads what it has now. If the bell was rung, it is rung again at the next mark.
    pub fn read(&self) -> Taken {
        if self.table.words()[MARK_WORD].load(Relaxed) == 0 {
            self.mark();
        }
        self.taken(self.quota().counts())
    }

    fn taken(&self, counts: Counts) -> Taken {
        let bytes = |slabs| Bytes(u64::from(slabs) * slab_bytes(self.page));
        Taken {
            quota: bytes(counts.most),
            held: bytes(counts.held),
            used: Bytes(self.table.words()[USED_WORD].load(Relaxed) * self.page.bytes() as u64),
        }
    }
}
