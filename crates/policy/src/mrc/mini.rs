//! A limit in miniature: the policies over the followed pages.

use undercroft_base::{PageCount, PageNo};

use super::away::{Away, Tiers};
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

/// A limit in miniature.
pub(super) struct Mini {
    /// As for all pages.
    pub limit: PageCount,
    policy: Box<dyn Reclaim>,
    /// Where each page is.
    pages: Vec<u32>,
    /// Its copies.
    away: Away,
    /// Pages of DRAM for pages in memory and for copies, of all pages.
    room: f64,
    one_in: u64,
    evictions: u32,
    faults: f64,
    /// Of `faults`, those that only a scan shows.
    faults_scanned: f64,
    loads: u64,
    victims: Vec<PageNo>,
}

impl Mini {
    pub(super) fn new(limit: PageCount, policy: Box<dyn Reclaim>, away: Away) -> Mini {
        Mini {
            limit,
            policy,
            pages: Vec::new(),
            away,
            room: limit.0 as f64,
            one_in: 1,
            evictions: 0,
            faults: 0.0,
            faults_scanned: 0.0,
            loads: 0,
            victims: Vec::with_capacity(1),
        }
    }

    /// Takes another limit, and counts from zero.
    /// * `present`: the limit of the run.
    pub(super) fn set_limit(&mut self, limit: PageCount, present: PageCount) {
        self.limit = limit;
        self.away.set_limit(limit, present);
        self.faults = 0.0;
        self.faults_scanned = 0.0;
        self.loads = 0;
    }

    /// * `room`: DRAM for pages in memory and for copies, in pages.   * `retained`: see
    ///   [`Away::set_tiers`].
    pub(super) fn set_room(&mut self, room: PageCount, tiers: &Tiers, one_in: u64, retained: f64) {
        self.room = room.0 as f64;
        self.one_in = one_in;
        self.away.set_tiers(tiers, one_in, retained);
        self.evict();
    }

    /// The part of its evictions that had a copy below, 0 to 1.
    pub(super) fn retained(&self) -> f64 {
        self.away.retained()
    }

    /// Most followed pages in memory.
    fn room(&self) -> u64 {
        let pages = (self.room - self.away.dram_pages()) / self.one_in as f64;
        pages.round().max(1.0) as u64
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
            let distance = PageCount(u64::from(evictions.wrapping_sub(left - 1)));
            let waited = match (at.demanded, at.scanned) {
                (false, _) => 0,
                (true, false) => self.one_in,
                (true, true) => at.weight.round() as u64,
            };
            let of_all = PageCount(distance.0 * self.one_in);
            self.away.back(at.page, Some((of_all, waited)));
            distance
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
            HERE => {
                self.policy.remove(page);
                self.away.dropped(page);
            }
            0 => {}
            _ => self.away.back(page, None),
        }
    }

    fn evict(&mut self) {
        // A policy looks at a bounded number of pages a call, so a call may name none.
        let mut calls = 2 + self.policy.shown().len.0 / LOOKS as u64;
        while self.policy.shown().len.0 > self.room() && calls > 0 {
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
            let pages = &self.pages;
            let word = |page: PageNo| pages[page.0 as usize];
            self.away.left(page, left, word);
        }
    }

    /// Pages of DRAM that copies have, of all pages.
    #[cfg(test)]
    pub(super) fn dram_pages(&self) -> f64 {
        self.away.dram_pages()
    }

    /// Followed pages in memory.
    #[cfg(test)]
    pub(super) fn here(&self) -> u64 {
        self.policy.shown().len.0
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
        let pages = (self.pages.capacity() * size_of::<u32>()) as u64;
        self.policy.shown().metadata.0 + self.away.metadata_bytes() + pages
    }
}
