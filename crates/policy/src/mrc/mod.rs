//! The miss-ratio curve: how many faults the program would have had under other limits.
//!
//! ```text
//! faults, uses, drops of pages -> Sampling: one page in 2^n -> Event -> Estimator
//!   Mini: half the limit    Mini: the limit    ...    Mini: four times the limit
//!   each is the policies of reclaim and placement over the sampled pages, with memory as much
//!   smaller
//! ```
//! A miniature simulation for each limit (Waldspurger, Saemundsson, Ahmad, Park, *Cache Modeling
//! and Optimization using Miniature Simulations*, USENIX ATC 2017), because the policy is none
//! whose faults follow from one stack of pages (as LRU's do). Differs:
//! - Only faults and scans of Accessed bits are known, not every use. A fault here that is no fault
//!   in a mini is a use there. A page that a scan finds used, and that a mini does not have, is a
//!   fault there: one, though the page may have come and gone several times since the last scan. So
//!   the figures of limits far below the present one are too low.
//! - The sample is stratified: of each block of 2^n neighbouring pages one is followed. Chance then
//!   decides which pages, and not how many.
//! - What comes with one fault counts as parts of that fault, so that prefetch is not simulated.
//! - The mini at the present limit is compared with the faults that there were, and the ratio
//!   corrects all of them.
//!
//! Sans-I/O as all policies: the caller says what happened. Memory is bounded: at most
//! [`PAGES_MAX`] pages are followed. When there are more, every second one is given up.

mod away;
mod mini;
#[cfg(test)]
mod tests;

use rustc_hash::FxHashMap;
use undercroft_base::{Bytes, PageCount, PageNo};

use self::away::Away;
pub use self::away::Tiers;
use self::mini::{At, Mini};
use crate::place::PlacementName;
use crate::reclaim::ReclaimName;

/// Limits of the curve, in eighths of the present limit.
pub const EIGHTHS: [u64; 12] = [4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 24, 32];
/// Which of them is the present limit.
const PRESENT: usize = 4;

/// Followed pages that fit the present limit, at the start.
const PAGES_FIRST: u64 = 2048;
/// Most pages followed.
pub const PAGES_MAX: usize = 16_384;
/// With fewer sampled faults at the present limit, the ratio to the faults that there were is
/// chance, and corrects nothing.
const CORRECTION_MIN: u64 = 64;
/// Standard deviations of the range that a point gives.
const DEVIATIONS: f64 = 2.0;
/// The range goes to the next limits of the curve, because where it is steep, the estimate may be
/// off by that much memory. And it is wider by this part of the faults. Both from runs of programs:
/// docs/design/0018.
const UNKNOWN_PART: f64 = 0.2;
/// Below the present limit: if more than this part of a point's faults are known from scans alone,
/// it has no upper end.
const SCANNED_MAX: f64 = 0.1;

/// Which pages are followed: one of each block of 2^`shift`. Those of a larger shift are a part of
/// those of a smaller one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    shift: u32,
}

impl Sampling {
    /// For this limit.
    pub fn for_limit(limit: PageCount) -> Sampling {
        let shift = (limit.0 / PAGES_FIRST).max(1).ilog2();
        Sampling { shift }
    }

    /// Whether the page is followed. On the fault path: two steps on average.
    #[inline]
    pub fn takes(self, page: PageNo) -> bool {
        // Of the two halves of each block, one is taken.
        (0..self.shift).all(|level| {
            let block = (page.0 >> level) >> 1;
            let mixed = (block ^ (level << 27)).wrapping_mul(0x9e37_79b1);
            let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77);
            (mixed >> 31) == (page.0 >> level) & 1
        })
    }

    /// Pages for each that is followed.
    pub fn one_in(self) -> u64 {
        1 << self.shift
    }
}

/// The kinds of event of a page that is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The page is in memory and was not known before. `pages`: as many came with the same fault.
    New {
        /// At least 1.
        pages: u8,
    },
    /// The page came back. `pages`: as many came with the same fault.
    Loaded {
        /// At least 1.
        pages: u8,
        /// The thread waited for this one.
        demanded: bool,
    },
    /// A scan found that it was used.
    Used,
    /// The program dropped it.
    Gone,
}

/// An event of a page that is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// A page that [`Sampling::takes`].
    pub page: PageNo,
    /// The kind of event.
    pub what: What,
}

/// A limit and the faults it would have had: a point of the curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The limit.
    pub limit: Bytes,
    /// Faults that would have read a tier, since the start.
    pub faults: f64,
    /// They are hardly fewer than this,
    pub least: f64,
    /// and hardly more than this. `None`: they may be far more.
    pub most: Option<f64>,
}

/// Faults by limit, smallest limit first.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// A point for each of [`EIGHTHS`].
    pub points: Vec<Point>,
    /// Most pages that were followed at once.
    pub followed: PageCount,
    /// Pages for each of them.
    pub one_in: u64,
}

/// A page that is followed.
#[derive(Clone, Copy, Debug)]
struct Page {
    no: PageNo,
    /// Pages that came with it last. 0: there is no such page.
    together: u8,
}

/// Estimates the curve of one client.
pub struct Estimator {
    sampling: Sampling,
    limit: PageCount,
    /// Room that is kept free below a limit, on average.
    free: Box<dyn Fn(PageCount) -> PageCount + Send>,
    tiers: Tiers,
    numbers: FxHashMap<PageNo, u32>,
    pages: Vec<Page>,
    unused: Vec<u32>,
    /// Most pages followed at once.
    followed: usize,
    minis: Vec<Mini>,
}

impl Estimator {
    /// For a client with this limit, before its first page.
    ///
    /// * `reclaim`, `place`: its policies.   * `free`: room that is kept free below a limit, on
    ///   average.
    pub fn new(
        reclaim: &ReclaimName,
        place: &PlacementName,
        limit: PageCount,
        free: impl Fn(PageCount) -> PageCount + Send + 'static,
    ) -> Estimator {
        let minis = EIGHTHS.map(|part| {
            let present = limit;
            let limit = PageCount((present.0.saturating_mul(part) / 8).max(1));
            Mini::new(limit, reclaim.make(), Away::new(place, limit, present))
        });
        Estimator {
            sampling: Sampling::for_limit(limit),
            limit,
            free: Box::new(free),
            tiers: Tiers::NONE,
            numbers: FxHashMap::default(),
            pages: Vec::new(),
            unused: Vec::new(),
            followed: 0,
            minis: minis.into(),
        }
    }

    /// The client has another limit from now on. The minis take limits around it, and keep what
    /// they have in memory as far as it fits. All counts begin at zero, those that the caller gives
    /// to [`Estimator::curve`] too. Cost: O(pages that no longer fit).
    pub fn set_limit(&mut self, limit: PageCount) {
        self.limit = limit;
        for (mini, part) in self.minis.iter_mut().zip(EIGHTHS) {
            let own = PageCount((limit.0.saturating_mul(part) / 8).max(1));
            mini.set_limit(own, limit);
        }
        self.set_room();
    }

    /// Which pages to tell of. It changes only in [`Estimator::feed`].
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Takes what happened since the last call, in its order. Cost: about a microsecond an event.
    ///
    /// * `tiers`: as they are now.
    pub fn feed(&mut self, events: &[Event], tiers: &Tiers) {
        self.tiers = *tiers;
        self.set_room();
        for event in events {
            // The caller may not know of the last change of the sampling yet.
            if self.sampling.takes(event.page) {
                self.take(*event);
            }
        }
    }

    /// Tells each mini how much DRAM it has, and how large copies are.
    fn set_room(&mut self) {
        let one_in = self.sampling.one_in();
        let retained = self.minis[PRESENT].retained();
        for mini in &mut self.minis {
            let free = (self.free)(mini.limit).0.min(mini.limit.0);
            let room = PageCount(mini.limit.0 - free);
            mini.set_room(room, &self.tiers, one_in, retained);
        }
    }

    fn take(&mut self, event: Event) {
        let known = self.numbers.get(&event.page).copied();
        let at = match (known, event.what) {
            (Some(at), What::Gone) => {
                self.forget(at);
                return;
            }
            (None, What::Gone | What::Used) => return,
            (Some(at), _) => at,
            (None, _) => self.add(event.page),
        };
        let page = &mut self.pages[at as usize];
        let (is_new, demanded) = match event.what {
            What::New { pages } => {
                page.together = pages.max(1);
                (known.is_none(), true)
            }
            What::Loaded { pages, demanded } => {
                page.together = pages.max(1);
                (false, demanded)
            }
            What::Used | What::Gone => (false, true),
        };
        let one = At {
            page: PageNo(at),
            weight: self.sampling.one_in() as f64 / f64::from(page.together),
            demanded,
            scanned: event.what == What::Used,
        };
        for (at, mini) in self.minis.iter_mut().enumerate() {
            // It was out before it was followed. With more memory it may have been here.
            if is_new || (known.is_none() && at > PRESENT) {
                mini.arrive(one.page)
            } else {
                mini.touch(one)
            }
        }
        if self.numbers.len() > PAGES_MAX {
            self.follow_fewer();
        }
    }

    fn add(&mut self, no: PageNo) -> u32 {
        let page = Page { no, together: 1 };
        let at = match self.unused.pop() {
            Some(at) => {
                self.pages[at as usize] = page;
                at
            }
            None => {
                self.pages.push(page);
                self.pages.len() as u32 - 1
            }
        };
        self.numbers.insert(no, at);
        self.followed = self.followed.max(self.numbers.len());
        at
    }

    fn forget(&mut self, at: u32) {
        let page = &mut self.pages[at as usize];
        self.numbers.remove(&page.no);
        page.together = 0;
        self.unused.push(at);
        for mini in &mut self.minis {
            mini.forget(PageNo(at));
        }
    }

    /// Gives up every second page. The memory of each mini halves with them.
    fn follow_fewer(&mut self) {
        self.sampling.shift += 1;
        for at in 0..self.pages.len() as u32 {
            let Page { no, together } = self.pages[at as usize];
            if together > 0 && !self.sampling.takes(no) {
                self.forget(at);
            }
        }
        self.set_room();
    }

    /// The curve so far.
    ///
    /// * `faults`: those that read a tier, as counted since the start.
    pub fn curve(&self, faults: u64) -> Curve {
        let present = &self.minis[PRESENT];
        let correction = if present.loads() >= CORRECTION_MIN && present.faults() > 0.0 {
            faults as f64 / present.faults()
        } else {
            1.0
        };
        let point = |(at, mini): (usize, &Mini)| {
            let limit = PageCount((self.limit.0.saturating_mul(EIGHTHS[at]) / 8).max(1)).bytes();
            if at == PRESENT {
                let faults = faults as f64;
                return Point {
                    limit,
                    faults,
                    least: faults,
                    most: Some(faults),
                };
            }
            let near = |at: Option<usize>| {
                let mini = at.and_then(|at| self.minis.get(at)).unwrap_or(mini);
                mini.faults() * correction
            };
            let (faults, smaller, larger) =
                (near(Some(at)), near(at.checked_sub(1)), near(Some(at + 1)));
            let chance = DEVIATIONS / (mini.loads().max(1) as f64).sqrt();
            let part = chance + UNKNOWN_PART;
            // A mini without a fault may have missed some.
            let some = self.sampling.one_in() as f64;
            let scanned = mini.faults_scanned() > mini.faults() * SCANNED_MAX;
            let guessed = at < PRESENT && scanned;
            Point {
                limit,
                faults,
                least: (faults.min(larger) * (1.0 - part) - some).max(0.0),
                most: (!guessed).then_some(faults.max(smaller) * (1.0 + part) + some),
            }
        };
        Curve {
            points: self.minis.iter().enumerate().map(point).collect(),
            followed: PageCount(self.followed as u64),
            one_in: self.sampling.one_in(),
        }
    }

    /// Bytes of its tables. O(1).
    pub fn metadata_bytes(&self) -> u64 {
        let minis: u64 = self.minis.iter().map(Mini::metadata_bytes).sum();
        let tables = self.pages.capacity() * size_of::<Page>()
            + self.unused.capacity() * size_of::<u32>()
            + self.numbers.capacity() * (size_of::<(PageNo, u32)>() + 1);
        minis + tables as u64
    }
}
