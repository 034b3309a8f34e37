//! As [`Worth`], and lifts slabs of neighbouring pages out of slow tiers while that pays.
//!
//! ```text
//! fault in a slow tier -> its slab may be lifted (`temperature`) -> are its pages used there?
//!                                         most: slabs are lifted, and cold ones go down
//!                                         few:  a slab now and then, ever more seldom, as a probe
//! ```
//! A page that was lifted counts as used when a thread waits for it before it leaves the fast tier
//! again: one bit a page. The share of such pages decides for all slabs, and for each slab that was
//! lifted before, its own share. `auto` also links the pages of sequences, as [`Locality`], and
//! demotes as `worth`; `auto_plain` does not.

use undercroft_base::{Bytes, Nanos, PageCount, PageNo, TierId};

use super::locality::Locality;
use super::temperature::{self, SLAB_PAGES, Temperature};
use super::worth::Worth;
use super::{
    GroupMove, Leaving, Migration, PageFacts, Place, Share, TIERS_MAX, TierOrder, TierState,
};

/// Lifts begin when this share of lifted pages was used, in percent, and end below the second.
const GOOD: u64 = 70;
const BAD: u64 = 59;
/// Lifted pages before the first decision. Older ones count half from the second number on.
const EVIDENCE: u64 = 512;
const WINDOW: u64 = 4096;
/// Faults in slow tiers between probes, at first and at most.
const GAP: u64 = 64;
const GAP_MAX: u64 = GAP << 8;
/// Lifted pages of a slab from which on its own share counts, and the most that count.
const KNOWN: u16 = 16;
const KNOWN_MAX: u16 = 512;

/// What came of the lifts of one slab: 6 bytes.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    lifted: u16,
    used: u16,
    fails: u8,
    skip: u8,
}

/// Worth of DRAM, lifts by evidence, and sequences if they are linked.
#[derive(Debug)]
pub struct Auto {
    worth: Worth,
    slabs: Temperature,
    locality: Option<Locality>,
    /// Bits of pages that were lifted, and not used since.
    fresh: Vec<u64>,
    past: Vec<History>,
    lifted: u64,
    used: u64,
    on: bool,
    gap: u64,
    since: u64,
    /// The fastest tier below memory.
    top: usize,
}

impl Auto {
    /// * `links`: pages of sequences are loaded together.
    pub fn new(links: bool) -> Auto {
        Auto {
            worth: Worth::default(),
            slabs: Temperature::default(),
            locality: links.then(Locality::default),
            fresh: Vec::new(),
            past: Vec::new(),
            lifted: 0,
            used: 0,
            on: false,
            gap: GAP,
            since: 0,
            top: 0,
        }
    }

    fn past(&mut self, no: PageNo) -> &mut History {
        let at = (u64::from(no.0) / SLAB_PAGES) as usize;
        if at >= self.past.len() {
            self.past.resize(at + 1, History::default());
        }
        &mut self.past[at]
    }

    /// Takes the bit of a page that was lifted. Returns whether it had one.
    fn settle(&mut self, no: PageNo) -> bool {
        let (at, bit) = (no.0 as usize / 64, 1 << (no.0 % 64));
        let word = self.fresh.get_mut(at);
        word.is_some_and(|word| std::mem::replace(word, *word & !bit) & bit != 0)
    }

    fn was_used(&mut self, no: PageNo) {
        if self.settle(no) {
            self.used += 1;
            self.past(no).used += 1;
        }
    }

    fn judge(&mut self) {
        let need = if self.on { BAD } else { GOOD };
        let good = self.used * 100 >= need * self.lifted;
        if self.lifted >= EVIDENCE && good != self.on {
            self.on = good;
            if !good {
                self.gap = (self.gap * 2).min(GAP_MAX);
            }
        }
    }

    /// Whether the slab of `no`, which was needed in a slow tier, is to be lifted.
    fn lifts(&mut self, no: PageNo) -> bool {
        self.judge();
        self.since += 1;
        let of = self.past(no);
        if of.lifted >= KNOWN {
            let good = u64::from(of.used) * 100 >= GOOD * u64::from(of.lifted);
            if !good && of.skip > 0 {
                of.skip -= 1;
                return false;
            }
            if good {
                of.fails = 0;
                return true;
            }
            of.fails = (of.fails + 1).min(7);
            of.skip = (1u16 << of.fails).min(255) as u8;
        }
        let probes = self.since >= self.gap;
        if !self.on && probes {
            self.since = 0;
            self.gap = (self.gap + self.gap / 4).min(GAP_MAX);
        }
        self.on || probes
    }
}

impl Place for Auto {
    fn order(&mut self, page: PageFacts, tiers: &[TierState]) -> TierOrder {
        self.settle(page.no);
        self.slabs.order(page, tiers);
        let order = self.worth.order(page, tiers);
        match &mut self.locality {
            Some(locality) if locality.is_to_disk(page.no) => locality.order(page, tiers),
            _ => order,
        }
    }

    /// As `worth`, and makes room for the slabs that wait.
    fn migrate(&mut self, limit: Bytes, tiers: &[TierState]) -> Option<Migration> {
        let mut seen = [TierState::empty(super::LatencyClass::Device); TIERS_MAX];
        let seen = &mut seen[..tiers.len()];
        seen.copy_from_slice(tiers);
        if let Some(top) = temperature::top(tiers).filter(|_| self.slabs.waits()) {
            let slab = PageCount(SLAB_PAGES).bytes().0;
            let more = slab.min(seen[top].capacity.0 / 8);
            if seen[top].held.0 > 0 {
                seen[top].held.0 += more;
                seen[top].packed.0 += more;
            }
        }
        self.worth.migrate(limit, seen)
    }

    fn moves_groups(&self) -> bool {
        true
    }

    fn group_to_move(
        &mut self,
        now: Nanos,
        tiers: &[TierState],
        pages: &mut Vec<PageNo>,
    ) -> Option<GroupMove> {
        if let Some(locality) = &mut self.locality {
            locality.group_to_move(now, tiers, pages);
        }
        self.top = temperature::top(tiers)?;
        self.slabs.next(now, tiers, pages, self.on, true)
    }

    fn moved(&mut self, no: PageNo, from: TierId, to: TierId) {
        self.settle(no);
        if to.0 > from.0 {
            return;
        }
        let at = no.0 as usize / 64;
        if at >= self.fresh.len() {
            self.fresh.resize(at + 1, 0);
        }
        self.fresh[at] |= 1 << (no.0 % 64);
        self.lifted += 1;
        if self.lifted > WINDOW {
            (self.lifted, self.used) = (self.lifted / 2, self.used / 2);
        }
        let of = self.past(no);
        of.lifted += 1;
        if of.lifted > KNOWN_MAX {
            (of.lifted, of.used) = (of.lifted / 2, of.used / 2);
        }
    }

    fn came_back(&mut self, no: PageNo, tier: TierId) {
        self.was_used(no);
        let mut linked = false;
        if let Some(locality) = &mut self.locality {
            linked = locality.is_linked(no);
            locality.came_back(no, tier);
        }
        self.slabs.touch(no);
        if usize::from(tier.0) > self.top && !linked && self.lifts(no) {
            self.slabs.came_back(no, tier);
        }
    }

    fn came_along(&mut self, no: PageNo) {
        if let Some(locality) = &mut self.locality {
            locality.came_along(no);
        }
    }

    fn first_used(&mut self, no: PageNo) {
        self.was_used(no);
        if let Some(locality) = &mut self.locality {
            locality.first_used(no);
        }
    }

    fn leaving(&mut self, pages: &[Leaving], tiers: &[TierState]) {
        if let Some(locality) = &mut self.locality {
            locality.leaving(pages, tiers);
        }
    }

    fn links_pages(&self) -> bool {
        self.locality.is_some()
    }

    fn together(&mut self, no: PageNo, out: &mut Vec<PageNo>) {
        if let Some(locality) = &mut self.locality {
            locality.together(no, out);
        }
    }

    fn refaulted(&mut self, distance: PageCount) {
        self.worth.refaulted(distance);
    }

    fn keeps(&self, no: PageNo, distance: Option<PageCount>, tier: &TierState) -> bool {
        let locality = self.locality.as_ref();
        self.worth.keeps(no, distance, tier)
            && locality.is_none_or(|locality| locality.keeps(no, distance, tier))
    }

    fn set_shift(&mut self, shift: f64) {
        if let Some(locality) = &mut self.locality {
            locality.set_shift(shift);
        }
    }

    fn share(&self) -> Option<Share> {
        self.worth.share()
    }

    fn name(&self) -> &'static str {
        match self.locality {
            Some(_) => "auto",
            None => "auto_plain",
        }
    }
}
