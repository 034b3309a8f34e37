//! One limit in miniature: the reclaim policy over the followed pages.

use undercroft_base::{PageCount, PageNo};

use crate::reclaim::{Arrival, Reclaim, Verdict};

/// Pages that the policy may look at for one victim, as in the engine.
const LOOKS: usize = 512;

/// The page is in memory. Any other word: evictions until it left, plus one; 0 = it is not known.
const HERE: u32 = u32::MAX;

/// A use of a page that has been there before.
#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    /// Its number among the followed pages.
    pub page: PageNo,
    /// Faults that it is, if it is one.
    pub weight: f64,
    /// A thread waited for it.
    pub demanded: bool,
    /// A scan found it.
    pub scanned: bool,
}

/// One limit.
pub(super) struct Mini {
    /// As for all pages.
    pub limit: PageCount,
    policy: Box<dyn Reclaim>,
    /// Where each page is.
    pages: Vec<u32>,
    /// Most pages in memory.
    room: u64,
    /// Pages that are out.
    out: u64,
    evictions: u32,
    faults: f64,
    /// Of `faults`, those that only a scan shows.
    faults_scanned: f64,
    loads: u64,
    victims: Vec<PageNo>,
}

impl Mini {
    pub(super) fn new(limit: PageCount, policy: Box<dyn Reclaim>) -> Mini {
        Mini {
            limit,
            policy,
            pages: Vec::new(),
            room: limit.0,
            out: 0,
            evictions: 0,
            faults: 0.0,
            faults_scanned: 0.0,
            loads: 0,
            victims: Vec::with_capacity(1),
        }
    }

    pub(super) fn set_room(&mut self, pages: u64) {
        self.room = pages;
        self.evict();
    }

    fn word(&mut self, page: PageNo) -> &mut u32 {
        let at = page.0 as usize;
        if at >= self.pages.len() {
            self.pages.resize(at + 1, 0);
        }
        &mut self.pages[at]
    }

    /// A page that was not known is in memory.
    pub(super) fn arrive(&mut self, page: PageNo) {
        *self.word(page) = HERE;
        self.policy.insert(page, Arrival::FirstTouch);
        self.evict();
    }

    /// A page that was known was used, or came along with one that was.
    pub(super) fn touch(&mut self, at: At) {
        let evictions = self.evictions;
        let word = self.word(at.page);
        let left = *word;
        if left == HERE {
            self.policy.touch(at.page, false);
            return;
        }
        *word = HERE;
        self.faults += at.weight;
        self.loads += 1;
        if at.scanned {
            self.faults_scanned += at.weight;
        }
        let distance = if left > 0 {
            self.out -= 1;
            PageCount(u64::from(evictions.wrapping_sub(left - 1)))
        } else {
            PageCount(u64::MAX) // it was out before it was followed
        };
        let arrival = if at.demanded {
            Arrival::SwapIn { distance }
        } else {
            Arrival::Prefetch
        };
        self.policy.insert(at.page, arrival);
        self.evict();
    }

    /// The page is no longer followed.
    pub(super) fn forget(&mut self, page: PageNo) {
        match std::mem::take(self.word(page)) {
            HERE => self.policy.remove(page),
            0 => {}
            _ => self.out -= 1,
        }
    }

    fn evict(&mut self) {
        // A policy looks at a bounded number of pages a call, so a call may name none.
        let mut calls = 2 + self.policy.len().0 / LOOKS as u64;
        while self.policy.len().0 > self.room && calls > 0 {
            self.victims.clear();
            let mut take = |_| Verdict::Take;
            self.policy.select(1, LOOKS, &mut take, &mut self.victims);
            let Some(page) = self.victims.pop() else {
                calls -= 1;
                continue;
            };
            self.evictions = (self.evictions + 1) % (HERE - 1);
            let left = self.evictions + 1;
            *self.word(page) = left;
            self.out += 1;
        }
    }

    /// Pages that are out.
    pub(super) fn out(&self) -> u64 {
        self.out
    }

    /// Faults that read, of all pages.
    pub(super) fn faults(&self) -> f64 {
        self.faults
    }

    /// Of these, the ones that only a scan shows.
    pub(super) fn faults_scanned(&self) -> f64 {
        self.faults_scanned
    }

    /// Followed pages that were loaded.
    pub(super) fn loads(&self) -> u64 {
        self.loads
    }

    pub(super) fn metadata_bytes(&self) -> u64 {
        self.policy.metadata_bytes().0 + (self.pages.capacity() * size_of::<u32>()) as u64
    }
}
