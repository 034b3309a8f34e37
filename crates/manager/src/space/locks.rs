//! Page locks: programs keep pages of a guest in memory while a device writes there past page
//! tables. Asked by the way out, with the pages protected.
//!
//! A client counts its page up, and then writes to it, atomically and without a change. Either the
//! count is seen here, and the page stays; or it is set later, and then so is the write: that is a
//! fault, and the client waits for the page. A client that only read the page instead would not
//! wait: a protected page can be read, and it would be punched under the device.
//!
//! Locked pages count as memory that cannot leave: the engine asks less and less often for them,
//! and the limit is raised as far as the rest needs. So they are bounded. The bound here is twice
//! what a client may lock: a page that was unlocked counts until its count is looked at again. A
//! client that keeps to what it may lock is refused only if it unlocks that many pages, and locks
//! others, during one such look. What a client locks beyond the bound leaves as any page.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{PageCount, VirtPage};
use undercroft_engine::EvictItem;
use undercroft_sys::page_locks::{CLIENTS, PageLocks};

use crate::sync::lock;

/// The page locks of one guest.
pub(crate) struct Locks {
    memory: PageLocks,
    /// Pages that one client may lock.
    each_max: PageCount,
    clients: [Mutex<Stays>; CLIENTS],
    ignored: AtomicU64,
}

/// The pages that stay because of one client, as of the last looks at each.
#[derive(Default)]
struct Stays {
    /// A bit for each page; empty until the first.
    pages: Vec<u64>,
    count: u64,
}

impl Stays {
    /// Forgets the pages of which `is_set` says that they are not locked any more.
    fn look_again(&mut self, is_set: impl Fn(VirtPage) -> bool) {
        for (at, word) in self.pages.iter_mut().enumerate() {
            let mut left = *word;
            while left != 0 {
                let bit = left.trailing_zeros();
                left &= left - 1;
                if !is_set(VirtPage(at as u64 * 64 + u64::from(bit))) {
                    *word &= !(1 << bit);
                    self.count -= 1;
                }
            }
        }
    }

    /// Whether `page` stays, or does from now on: `most` pages do.
    fn add(&mut self, page: VirtPage, of: PageCount, most: u64) -> bool {
        if self.pages.is_empty() {
            self.pages.resize(of.0.div_ceil(64) as usize, 0);
        }
        let (word, bit) = (&mut self.pages[page.0 as usize / 64], 1 << (page.0 % 64));
        if *word & bit != 0 {
            return true;
        }
        let room = self.count < most;
        if room {
            *word |= bit;
            self.count += 1;
        }
        room
    }
}

impl Locks {
    pub(crate) fn new(memory: PageLocks, each_max: PageCount) -> Locks {
        Locks {
            memory,
            each_max,
            clients: Default::default(),
            ignored: AtomicU64::new(0),
        }
    }

    /// The file in which clients lock pages.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The pages of a group that stay, one bit each. The caller has protected them.
    pub(crate) fn among(&self, group: &[EvictItem]) -> u64 {
        self.memory.synchronize();
        let of = |client: usize| {
            let is_set = |item: &EvictItem| self.memory.is_set(client, item.page);
            let all = group.iter().enumerate();
            let set: u64 = all.map(|(at, item)| u64::from(is_set(item)) << at).sum();
            if set == 0 || !self.memory.lives(client) {
                return 0;
            }
            self.of_client(client, group, set)
        };
        let clients = (0..CLIENTS).filter(|client| self.memory.was_used(*client));
        clients.fold(0, |all, client| all | of(client))
    }

    /// The pages of `set` that the client may lock.
    fn of_client(&self, client: usize, group: &[EvictItem], set: u64) -> u64 {
        let mut stays = lock(&self.clients[client]);
        let (all, most) = (self.memory.pages(), 2 * self.each_max.0);
        let (mut locked, mut looked) = (0, false);
        for at in (0..group.len()).filter(|at| set >> at & 1 == 1) {
            let page = group[at].page;
            let mut has_room = stays.add(page, all, most);
            if !has_room && !looked {
                stays.look_again(|page| self.memory.is_set(client, page));
                has_room = stays.add(page, all, most);
                looked = true;
            }
            locked |= u64::from(has_room) << at;
        }
        let ignored = u64::from((set & !locked).count_ones());
        if ignored > 0 && self.ignored.fetch_add(ignored, Ordering::Relaxed) == 0 {
            crate::log::warn(&format!(
                "a program has locked more pages of the machine than it may, {} at once: the others \
                 leave memory, and what a device writes there is lost",
                self.each_max.0
            ));
        }
        locked
    }

    /// Pages that are locked, of those that were to leave; and how often a lock was not kept.
    pub(crate) fn now(&self) -> (PageCount, u64) {
        let of = |client: usize| {
            let mut stays = lock(&self.clients[client]);
            let lives = stays.count > 0 && self.memory.lives(client);
            stays.look_again(|page| lives && self.memory.is_set(client, page));
            stays.count
        };
        let pages = (0..CLIENTS).map(of).sum();
        (PageCount(pages), self.ignored.load(Ordering::Relaxed))
    }
}
