//! Where the pages of a mini are that left it: in compressed memory, or in a tier below.
//!
//! The placement policy decides, as in the run itself. One page that is followed stands for as many
//! as [`Sampling::one_in`](super::Sampling::one_in), so the policy sees figures of all pages.

use std::collections::VecDeque;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageNo, TierId};

use crate::place::waterfall::Waterfall;
use crate::place::worth::Worth;
use crate::place::{LatencyClass, Loaded, Place, PlacementName, TIERS_MAX, TierState};

/// Copies in a page of DRAM, until there are enough to measure it.
const RATIO_FIRST: f64 = 2.5;
/// As many copies are enough.
const COPIES_MIN: u64 = 256;
/// Part of the pool's memory that copies fill, until it can be measured.
const FILLED_FIRST: f64 = 0.85;
/// Migrations carried out after one eviction.
const MIGRATIONS: usize = 4;

/// The tiers of the run as they are now.
#[derive(Clone, Copy, Debug)]
pub struct Tiers {
    /// All tiers in DRAM as one, if there are any.
    pool: Option<TierState>,
    below: [Option<TierState>; TIERS_MAX],
    /// DRAM of one copy, free places included, and what of it is the copy: bytes.
    copy: (f64, f64),
    /// Part of all evictions that needed no new copy.
    clean: f64,
}

impl Tiers {
    /// * `tiers`: all of them, fastest first.
    /// * `clean`: the part of all evictions that needed no new copy, 0 to 1.
    pub fn new(tiers: &[TierState], clean: f64) -> Tiers {
        let mut found = Tiers {
            pool: None,
            below: [None; TIERS_MAX],
            copy: (BASE_PAGE_BYTES as f64 / RATIO_FIRST, 0.0),
            clean: clean.clamp(0.0, 1.0),
        };
        for (at, tier) in tiers.iter().take(TIERS_MAX).enumerate() {
            if tier.latency != LatencyClass::Memory {
                found.below[at] = Some(*tier);
                continue;
            }
            let pool = found.pool.get_or_insert(TierState {
                demotes: true,
                ..TierState::empty(LatencyClass::Memory)
            });
            pool.capacity.0 = pool.capacity.0.saturating_add(tier.capacity.0);
            pool.dram.0 += tier.dram.0;
            pool.copies.0 += tier.copies.0;
            pool.packed.0 += tier.packed.0;
            pool.load_ns = pool.load_ns.max(tier.load_ns);
        }
        found.copy.1 = found.copy.0 * FILLED_FIRST;
        if let Some(pool) = found.pool
            && pool.copies.0 >= COPIES_MIN
            && pool.dram.0 > 0
        {
            let each = |bytes: Bytes| bytes.0 as f64 / pool.copies.0 as f64;
            found.copy = (each(pool.dram), each(pool.packed));
        }
        found
    }

    /// No tier: what leaves uses no DRAM.
    pub const NONE: Tiers = Tiers {
        pool: None,
        below: [None; TIERS_MAX],
        copy: (0.0, 0.0),
        clean: 0.0,
    };
}

/// A page that is out, and the count of evictions when it left.
type Copy = (PageNo, u32);

/// The copies of one mini.
pub(super) struct Away {
    place: Box<dyn Place>,
    /// The mini's limit, of all pages.
    limit: PageCount,
    /// The limit of the run.
    present: PageCount,
    one_in: u64,
    tiers: Tiers,
    /// Followed pages in the pool, oldest first. Some left it since then.
    queue: VecDeque<Copy>,
    in_pool: u64,
    /// Whether each page has its copy, or its last one, in the pool.
    pooled: Vec<bool>,
    /// Whether each page in memory still has a copy below.
    retained: Vec<bool>,
    /// Pages to demote that are less than one that is followed.
    owed: f64,
    /// Part of the evictions with a copy below that need no new one.
    clean: f64,
    /// Clean evictions that are less than one.
    clean_owed: f64,
    /// Evictions; of these, with a copy below.
    left: [u64; 2],
}

impl Away {
    pub(super) fn new(name: &PlacementName, limit: PageCount, present: PageCount) -> Away {
        // No other policy decides how much DRAM copies have.
        let place: Box<dyn Place> = match name.to_string().as_str() {
            "worth" => Box::new(Worth::default()),
            _ => Box::new(Waterfall),
        };
        Away {
            place,
            limit,
            present,
            one_in: 1,
            tiers: Tiers::NONE,
            queue: VecDeque::new(),
            in_pool: 0,
            pooled: Vec::new(),
            retained: Vec::new(),
            owed: 0.0,
            clean: 0.0,
            clean_owed: 0.0,
            left: [0; 2],
        }
    }

    /// The mini, and the run, have other limits from now on.
    pub(super) fn set_limit(&mut self, limit: PageCount, present: PageCount) {
        self.limit = limit;
        self.present = present;
    }

    /// * `retained`: the part of the evictions under the present limit that had a copy below.
    pub(super) fn set_tiers(&mut self, tiers: &Tiers, one_in: u64, retained: f64) {
        self.tiers = *tiers;
        self.one_in = one_in;
        self.clean = (tiers.clean / retained.max(0.01)).min(1.0);
    }

    /// The part of the evictions that had a copy below, 0 to 1.
    pub(super) fn retained(&self) -> f64 {
        self.left[1] as f64 / self.left[0].max(1) as f64
    }

    /// The pool's part of this limit is as large as that of the run's.
    fn capacity(&self, pool: &TierState) -> Bytes {
        let part = self.limit.0 as f64 / self.present.0.max(1) as f64;
        Bytes((pool.capacity.0 as f64 * part) as u64)
    }

    /// Bytes of DRAM that copies take. Without a tier below, more may be out than the pool holds:
    /// a run would go above its limit there.
    fn dram(&self) -> f64 {
        let all = (self.in_pool * self.one_in) as f64 * self.tiers.copy.0;
        let most = self.tiers.pool.map_or(0, |pool| self.capacity(&pool).0);
        all.min(most as f64)
    }

    /// Pages of DRAM that copies take, of all pages.
    pub(super) fn dram_pages(&self) -> f64 {
        self.dram() / BASE_PAGE_BYTES as f64
    }

    /// The tiers as they would be: the pool alone differs.
    fn states(&self) -> ([TierState; TIERS_MAX], usize) {
        let none = TierState::empty(LatencyClass::Device);
        let (mut states, mut count) = ([none; TIERS_MAX], 0);
        if let Some(pool) = self.tiers.pool {
            let copies = self.in_pool * self.one_in;
            states[0] = TierState {
                capacity: self.capacity(&pool),
                held: Bytes(self.dram() as u64),
                dram: Bytes(self.dram() as u64),
                copies: PageCount(copies),
                packed: Bytes((copies as f64 * self.tiers.copy.1) as u64),
                ..pool
            };
            count = 1;
        }
        for tier in self.tiers.below.iter().flatten() {
            if count < TIERS_MAX {
                states[count] = TierState {
                    demotes: false,
                    ..*tier
                };
                count += 1;
            }
        }
        (states, count)
    }

    fn resize(&mut self, page: PageNo) -> usize {
        let at = page.0 as usize;
        if at >= self.pooled.len() {
            self.pooled.resize(at + 1, false);
            self.retained.resize(at + 1, false);
        }
        at
    }

    /// Page `page` leaves memory. `left`: the count of evictions, plus one. `word`: the same of
    /// each page that is out.
    pub(super) fn left(&mut self, page: PageNo, left: u32, word: impl Fn(PageNo) -> u32) {
        let at = self.resize(page);
        let goes_below = self.chooses_below(page, at);
        self.pooled[at] = !goes_below;
        if !goes_below {
            self.queue.push_back((page, left));
            self.in_pool += 1;
        }
        if self.splits() {
            self.migrate(&word);
        }
        if self.queue.len() as u64 > 2 * self.in_pool + 64 {
            let pooled = &self.pooled;
            self.queue
                .retain(|(page, left)| pooled[page.0 as usize] && word(*page) == *left);
        }
    }

    /// Whether there is anything to decide: a pool, and a tier below.
    fn splits(&self) -> bool {
        self.tiers.pool.is_some() && self.tiers.below.iter().any(Option::is_some)
    }

    /// Whether the page goes to a tier below the pool.
    fn chooses_below(&mut self, page: PageNo, at: usize) -> bool {
        self.left[0] += 1;
        if std::mem::take(&mut self.retained[at]) {
            self.left[1] += 1;
            self.clean_owed += self.clean;
            if self.clean_owed >= 1.0 {
                self.clean_owed -= 1.0;
                return true;
            }
        }
        if !self.splits() {
            return self.tiers.pool.is_none();
        }
        let (states, count) = self.states();
        let mut goes_below = false;
        for _ in 0..self.one_in {
            let order = self.place.order(page, &states[..count]);
            goes_below = order.get(0) != Some(TierId(0));
        }
        goes_below
    }

    /// Moves copies on as the policy says.
    fn migrate(&mut self, word: &impl Fn(PageNo) -> u32) {
        for _ in 0..MIGRATIONS {
            let (states, count) = self.states();
            let dram = self.limit.bytes();
            let Some(migration) = self.place.next_move(dram, &states[..count]) else {
                return;
            };
            self.owed += migration.pages.0 as f64 / self.one_in as f64;
            self.demote(word);
        }
    }

    /// Moves the oldest copies on, as many as are owed.
    fn demote(&mut self, word: impl Fn(PageNo) -> u32) {
        while self.owed >= 1.0 {
            let Some((page, left)) = self.queue.pop_front() else {
                self.owed = 0.0;
                return;
            };
            let at = page.0 as usize;
            if self.pooled[at] && word(page) == left {
                self.pooled[at] = false;
                self.in_pool -= 1;
                self.owed -= 1.0;
            }
        }
    }

    /// Page `page` is no longer out. `came`: after as many evictions, of all pages, and by as many
    /// faults for which a thread waited; `None`: it was dropped.
    pub(super) fn back(&mut self, page: PageNo, came: Option<(PageCount, u64)>) {
        let at = self.resize(page);
        let was_pooled = std::mem::take(&mut self.pooled[at]);
        self.in_pool -= u64::from(was_pooled);
        let Some((distance, waited)) = came else {
            return;
        };
        let (states, count) = self.states();
        if count == 0 {
            return;
        }
        let from = if was_pooled { 0 } else { count - 1 };
        let keeps = self.place.loaded(Loaded {
            no: page,
            from: TierId(from as u8),
            tier: &states[from],
            distance: Some(distance),
            waited: if self.splits() { waited } else { 0 },
        });
        self.retained[at] = keeps && !was_pooled;
    }

    /// Page `page`, which is in memory, was dropped.
    pub(super) fn dropped(&mut self, page: PageNo) {
        let at = self.resize(page);
        self.retained[at] = false;
    }

    pub(super) fn metadata_bytes(&self) -> u64 {
        let flags = self.pooled.capacity() + self.retained.capacity();
        (self.queue.capacity() * size_of::<Copy>() + flags + size_of::<Worth>()) as u64
    }
}
