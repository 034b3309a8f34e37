//! As [`waterfall`], and decides how much DRAM compressed copies may take above tiers that use
//! none: as much as they are worth.
//!
//! ```text
//! DRAM:              | resident pages                 | compressed copies |
//!                                               <---- boundary ---->
//! refaults speak for      more copies (far ones)       fewer copies (near ones)
//! ```
//! If `d` more pages had been resident, a page that comes back after `d` evictions would still be
//! in memory. So the distances of the refaults tell what every other split would have cost. A
//! refault within the pages gained is no fault. One within the copies that fit is a decompression.
//! One within the pages that the tiers below hold reads that tier. Every other one reads the last
//! tier. The cheapest split is the target. Source: Wilson, Kaplan,
//! Smaragdakis, *The Case for Compressed Caching in Virtual Memory Systems* (USENIX ATC 1999),
//! which counts uses in an LRU order. Here only refaults are known, so what a *smaller* resident
//! part costs is guessed from the nearest refaults. So the target moves in steps, up and down. Each
//! time that growth had to be taken back, the next growth waits longer.
//!
//! Before the first decision copies may have all they can, unless they compress badly: then they
//! begin with nothing, and refaults earn them DRAM.
//!
//! Pools without such a tier below them are left to [`waterfall`]: there is nothing to choose.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageNo, TierId};

use super::{
    BATCH_PAGES, LatencyClass, Loaded, MIGRATE_PAGES_MAX, Migration, Place, Share, Shown,
    TIERS_MAX, TierOrder, TierState, waterfall,
};

/// Classes of distances. The last one counts every larger distance.
const BUCKETS: usize = 256;
/// At least this many classes cover the distances up to the number of pages in the limit.
const PER_LIMIT: u64 = 64;
/// Refaults between decisions. Older ones count half after each.
const EVIDENCE: u64 = 512;
/// Splits compared, besides the one that gives copies the most DRAM they may have.
const SPLITS: u64 = 32;
/// Another split has to be cheaper by this part.
const GAIN_PART: u64 = 16;
/// Copies get or lose at most this part of the limit in one decision: the first refaults of a
/// program say little of the pages that left before.
const STEP_PART: u64 = 16;
/// Most decisions without growth after growth was taken back.
const PATIENCE_MAX: u32 = 64;
/// Nothing is decided before the evictions are this multiple of the pages that copies could hold,
/// plus those that their DRAM could hold. Before that, no page can have come back from so far, and
/// only near refaults would count.
const MATURE: f64 = 1.5;
/// Pages in one page of copies, while there are too few copies to measure it.
const RATIO_FIRST: f64 = 2.5;
/// From this many copies on, the ratio is measured.
const RATIO_PAGES: u64 = 256;
/// Part of a pool that copies fill; the rest is free places.
const FILLED: f64 = 0.85;
/// Without evidence, copies get DRAM only if a page of it holds this many. With fewer, the resident
/// pages that have to go are nearly as many as those that the copies keep from the device.
const RATIO_OPEN: f64 = 2.0;

/// Nanoseconds of a fault besides loading: the program waits for its pager and back.
const FAULT_NS: f64 = 10_000.0;
/// Nanoseconds to compress a page again, once it has come back.
const COPY_NS: f64 = 4_000.0;

/// Splits DRAM by the worth of compressed copies.
#[derive(Clone, Debug)]
pub struct Worth {
    /// Refaults by distance. Older ones count less. The distances are those that pages would have
    /// with the DRAM that copies have now.
    refaults: [u32; BUCKETS],
    /// Buckets of DRAM that copies have.
    copies: u64,
    /// log2 of the evictions of one bucket.
    width: u32,
    /// Refaults since the last decision.
    seen: u64,
    /// New copies since the last demotion beyond the target.
    unmoved: u64,
    /// New copies so far.
    left: u64,
    /// Bytes that copies should have. `None` before the first decision, and while they compress
    /// well: all they may.
    target: Option<Bytes>,
    /// Refaults within this distance are worth a copy in memory.
    reach: PageCount,
    ratio: f64,
    patience: u32,
    wait: u32,
    grew: bool,
    decisions: u64,
}

impl Default for Worth {
    fn default() -> Self {
        Worth {
            refaults: [0; BUCKETS],
            copies: 0,
            width: 0,
            seen: 0,
            unmoved: 0,
            left: 0,
            target: None,
            reach: PageCount(0),
            ratio: RATIO_FIRST,
            patience: 1,
            wait: 0,
            grew: false,
            decisions: 0,
        }
    }
}

/// The tiers in DRAM above the first that uses none, and the tiers from that on. `None`: one of
/// them is missing.
fn pools_above(tiers: &[TierState]) -> Option<(&[TierState], &[TierState])> {
    let first = tiers
        .iter()
        .position(|tier| tier.latency != LatencyClass::Memory)?;
    (first > 0).then(|| tiers.split_at(first))
}

fn sum(tiers: &[TierState], of: impl Fn(&TierState) -> u64) -> u64 {
    tiers.iter().map(of).fold(0, u64::saturating_add)
}

/// The DRAM that the decision divides, in pages.
struct Split {
    /// DRAM in all.
    limit: f64,
    /// DRAM of copies now.
    now: f64,
    ratio: f64,
    memory_ns: f64,
    below: Below,
}

impl Split {
    /// Cost of the refaults seen, in nanoseconds, if copies had `copies` pages of DRAM.
    fn cost(&self, refaults: &Nearer, copies: f64) -> f64 {
        let gained = self.now - copies;
        let kept = gained + copies * self.ratio;
        // The resident pages that would have to go are used as often as those that went last.
        let loads = refaults.than(kept) - refaults.than(gained) + refaults.than(-gained);
        loads * (FAULT_NS + self.memory_ns + COPY_NS) + self.below.cost(refaults, kept)
    }
}

/// The tiers below, fastest first: pages that each holds, and nanoseconds to load one.
#[derive(Default)]
struct Below {
    tiers: [(f64, f64); TIERS_MAX],
    count: usize,
}

impl Below {
    fn of(tiers: &[TierState]) -> Below {
        let mut below = Below::default();
        for tier in tiers.iter().take(TIERS_MAX) {
            let pages = tier.capacity_pages().0 as f64;
            below.tiers[below.count] = (pages, tier.load_ns as f64);
            below.count += 1;
        }
        below
    }

    /// The cost of the refaults beyond `gone` pages more, loads only.
    fn cost(&self, refaults: &Nearer, gone: f64) -> f64 {
        let (mut cost, mut so_far, mut pages) = (0.0, refaults.than(gone), 0.0);
        for (at, (holds, load_ns)) in self.tiers[..self.count].iter().enumerate() {
            pages += holds;
            let last = at + 1 == self.count;
            let to = if last {
                refaults.all
            } else {
                refaults.than(gone + pages)
            };
            cost += (to - so_far) * (FAULT_NS + load_ns);
            so_far = to;
        }
        cost
    }
}

/// How many refaults are nearer than a distance. Those of a class are spread evenly over it.
struct Nearer {
    /// In the classes before each; the last has no upper end.
    before: [f64; BUCKETS],
    all: f64,
    /// Pages of a class.
    bucket: f64,
}

impl Nearer {
    fn of(refaults: &[u32; BUCKETS], width: u32) -> Nearer {
        let (mut before, mut all) = ([0.0; BUCKETS], 0.0);
        for (at, count) in refaults.iter().enumerate() {
            before[at] = all;
            all += f64::from(*count);
        }
        Nearer {
            before,
            all,
            bucket: f64::from(1u32 << width),
        }
    }

    /// O(1).
    fn than(&self, distance: f64) -> f64 {
        let at = (distance / self.bucket).clamp(0.0, (BUCKETS - 1) as f64);
        let class = (at as usize).min(BUCKETS - 2);
        let (from, to) = (self.before[class], self.before[class + 1]);
        from + (to - from) * (at - class as f64)
    }
}

impl Worth {
    /// Decides anew.
    fn decide(&mut self, split: &Split, most: Bytes) {
        let page = BASE_PAGE_BYTES as f64;
        let before = self.target.unwrap_or(most).0.min(most.0) as f64 / page;
        let top = most.0 as f64 / page;
        let refaults = Nearer::of(&self.refaults, self.width);
        let (mut best, mut least) = (before, split.cost(&refaults, before));
        least -= least / GAIN_PART as f64;
        for step in 0..=SPLITS {
            let copies = top * step as f64 / SPLITS as f64;
            let cost = split.cost(&refaults, copies);
            if cost < least {
                (best, least) = (copies, cost);
            }
        }
        self.wait = self.wait.saturating_sub(1);
        let step = split.limit / STEP_PART as f64;
        if best < before {
            if self.grew {
                self.patience = (self.patience * 2).min(PATIENCE_MAX);
            }
            self.wait = self.patience;
            self.grew = false;
            best = best.max(before - step);
        } else if best > before {
            best = if self.wait > 0 {
                before
            } else {
                best.min(before + step)
            };
            self.grew |= best > before;
        }
        self.decisions += 1;
        self.target = Some(Bytes((best * page) as u64));
        self.reach = PageCount((best * split.ratio) as u64);
        for count in &mut self.refaults {
            *count /= 2;
        }
        self.seen = 0;
    }

    /// Copies have `copies` buckets of DRAM now; resident pages have the rest. What copies give up
    /// goes to pages. Then the nearest refaults would be no faults, and the others are nearer by
    /// that much.
    fn shift(&mut self, copies: u64) {
        let by = copies.abs_diff(self.copies).min(BUCKETS as u64 - 1) as usize;
        let last = BUCKETS - 1; // stays: it has no upper end
        if copies < self.copies {
            self.refaults.copy_within(by..last, 0);
            self.refaults[last - by..last].fill(0);
        } else if by > 0 {
            let beyond: u32 = self.refaults[last - by..last].iter().sum();
            self.refaults[last] += beyond;
            self.refaults.copy_within(..last - by, by);
            self.refaults[..by].fill(0);
        }
        self.copies = copies;
    }

    /// Brings the state up to date with the tiers, and decides anew if there is enough evidence.
    fn decide_if_due(&mut self, limit: Bytes, tiers: &[TierState]) {
        let Some((memory, below)) = pools_above(tiers) else {
            return;
        };
        let width = (limit.0 / BASE_PAGE_BYTES as u64 / PER_LIMIT)
            .max(1)
            .ilog2();
        if width != self.width {
            (self.width, self.refaults, self.copies) = (width, [0; BUCKETS], 0);
        }
        let dram = sum(memory, |t| t.dram.0);
        self.shift((dram / BASE_PAGE_BYTES as u64) >> self.width);
        let (copies, packed) = (sum(memory, |t| t.copies.0), sum(memory, |t| t.packed.0));
        if copies >= RATIO_PAGES && packed > 0 {
            let ratio = (copies * BASE_PAGE_BYTES as u64) as f64 / packed as f64;
            self.ratio = (ratio * FILLED).clamp(1.0, 100.0);
            if self.target.is_none() && self.ratio < RATIO_OPEN {
                self.target = Some(Bytes(0));
            }
        }
        if self.seen < EVIDENCE {
            return;
        }
        let page = BASE_PAGE_BYTES as f64;
        let split = Split {
            limit: limit.0 as f64 / page,
            now: dram as f64 / page,
            ratio: self.ratio,
            memory_ns: memory.iter().map(|t| t.load_ns).max().unwrap_or(0) as f64,
            below: Below::of(below),
        };
        if (self.left as f64) < MATURE * split.now * (1.0 + split.ratio) {
            return;
        }
        self.decide(&split, Bytes(sum(memory, |t| t.capacity.0)));
    }

    /// A demotion that brings copies back to their target, with room for the next batches.
    fn shrink(&mut self, tiers: &[TierState]) -> Option<Migration> {
        let (target, (memory, _)) = (self.target?, pools_above(tiers)?);
        let room = (2 * BATCH_PAGES * BASE_PAGE_BYTES as u64).min(target.0 / 4);
        if sum(memory, |t| t.dram.0) + room <= target.0 {
            return None;
        }
        let from = memory.iter().rposition(|t| t.demotes && t.copies.0 > 0)?;
        let pages = memory[from].copies.0.div_ceil(4).min(MIGRATE_PAGES_MAX);
        // Not faster than new copies come. Otherwise reclaim would be late.
        if self.unmoved < pages {
            return None;
        }
        self.unmoved = 0;
        Some(Migration {
            from: TierId(from as u8),
            to: TierId(from as u8 + 1),
            pages: PageCount(pages),
        })
    }

    /// Whether copies take more than their target.
    fn is_over(&self, tiers: &[TierState]) -> bool {
        match (self.target, pools_above(tiers)) {
            (Some(target), Some((memory, _))) => sum(memory, |t| t.dram.0) >= target.0,
            _ => false,
        }
    }
}

impl Place for Worth {
    fn order(&mut self, _: PageNo, tiers: &[TierState]) -> TierOrder {
        self.unmoved += 1;
        self.left += 1;
        if !self.is_over(tiers) {
            return TierOrder::downwards(tiers.len());
        }
        let below = pools_above(tiers).map_or(0, |(memory, _)| memory.len());
        let mut order = TierOrder::default();
        for tier in (below..tiers.len()).chain(0..below) {
            order.then(TierId(tier as u8));
        }
        order
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        let far = match page.distance {
            Some(distance) => {
                let bucket = (distance.0 >> self.width).min(BUCKETS as u64 - 1);
                self.refaults[bucket as usize] += page.waited as u32;
                self.seen += page.waited;
                self.reach == PageCount(0) || distance > self.reach
            }
            None => true,
        };
        far && page.tier.keeps_copies()
    }

    fn next_move(&mut self, dram: Bytes, tiers: &[TierState]) -> Option<Migration> {
        self.decide_if_due(dram, tiers);
        waterfall::relieves(tiers).or_else(|| self.shrink(tiers))
    }

    fn shown(&self) -> Shown {
        Shown {
            share: self.target.map(|target| Share {
                target,
                decisions: self.decisions,
            }),
            ..Shown::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Bytes = Bytes(64 << 20);
    const PAGES: u64 = LIMIT.0 / BASE_PAGE_BYTES as u64;

    /// A pool of up to half of the limit over a device. `dram`: bytes that copies have; each page
    /// of it holds three.
    fn tiers(dram: u64) -> [TierState; 2] {
        let pool = TierState {
            page: undercroft_base::PageSize::Base,
            capacity: Bytes(LIMIT.0 / 2),
            held: Bytes(dram),
            dram: Bytes(dram),
            copies: PageCount(dram * 3 / BASE_PAGE_BYTES as u64),
            packed: Bytes((dram as f64 * FILLED) as u64),
            load_ns: 3_000,
            latency: LatencyClass::Memory,
            demotes: true,
        };
        let device = TierState {
            capacity: Bytes(1 << 40),
            load_ns: 80_000,
            ..TierState::empty(LatencyClass::Device)
        };
        [pool, device]
    }

    fn refault(worth: &mut Worth, distance: u64) {
        worth.loaded(Loaded {
            no: PageNo(0),
            from: TierId(0),
            tier: &tiers(0)[0],
            distance: Some(PageCount(distance)),
            waited: 1,
        });
    }

    /// Returns the target, in percent of the limit, after each of `decisions`. Copies follow the
    /// target, and every refault has the distance `distance(dram)`.
    fn targets(decisions: usize, start: u64, distance: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut worth = Worth {
            target: Some(Bytes(start)),
            left: 20 * PAGES,
            ..Worth::default()
        };
        let mut dram = start;
        let mut found = Vec::new();
        worth.next_move(LIMIT, &tiers(dram));
        for _ in 0..decisions {
            for _ in 0..EVIDENCE {
                refault(&mut worth, distance(dram));
            }
            worth.next_move(LIMIT, &tiers(dram));
            let target = worth.shown().share.expect("a decision").target;
            dram = target.0;
            found.push(target.0 * 100 / LIMIT.0);
        }
        found
    }

    /// The cost by its definition: class by class, each spread evenly over its distances.
    fn cost_by_classes(refaults: &[u32; BUCKETS], width: u32, split: &Split, copies: f64) -> f64 {
        let gained = split.now - copies;
        let kept = gained + copies * split.ratio;
        let bucket = f64::from(1u32 << width);
        let mut cost = 0.0;
        for (at, count) in refaults.iter().enumerate() {
            let spread = if at + 1 == BUCKETS { 0.0 } else { 1.0 };
            let within = |to: f64| spread * ((to - at as f64 * bucket) / bucket).clamp(0.0, 1.0);
            let copied = within(kept) - within(gained) + within(-gained);
            let mut each = copied * (FAULT_NS + split.memory_ns + COPY_NS);
            let (mut so_far, mut pages) = (within(kept), 0.0);
            for (tier, (holds, load_ns)) in
                split.below.tiers[..split.below.count].iter().enumerate()
            {
                pages += holds;
                let is_last = tier + 1 == split.below.count;
                let to = if is_last { 1.0 } else { within(kept + pages) };
                each += (to - so_far) * (FAULT_NS + load_ns);
                so_far = to;
            }
            cost += f64::from(*count) * each;
        }
        cost
    }

    #[test]
    fn a_split_costs_what_its_classes_cost() {
        let mut random = undercroft_seeded::Random::new(7);
        for _ in 0..200 {
            let refaults: [u32; BUCKETS] = std::array::from_fn(|_| random.below(50) as u32);
            let width = random.below(6) as u32;
            let mut number = |most: u64| random.below(most) as f64;
            let mut below = Below {
                count: 1 + number(3) as usize,
                ..Below::default()
            };
            for tier in 0..below.count {
                below.tiers[tier] = (number(3_000), number(100_000));
            }
            let split = Split {
                limit: 4_000.0,
                now: number(4_000),
                ratio: 1.0 + number(400) / 100.0,
                memory_ns: number(10_000),
                below,
            };
            for step in 0..=SPLITS {
                let copies = 4_000.0 * step as f64 / SPLITS as f64;
                let expected = cost_by_classes(&refaults, width, &split, copies);
                let cost = split.cost(&Nearer::of(&refaults, width), copies);
                assert!(
                    (cost - expected).abs() <= expected * 1e-9,
                    "{cost}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn copies_of_pages_that_come_back_at_once_get_nothing() {
        let found = targets(12, LIMIT.0 / 2, |dram| match dram {
            0 => PAGES * 20, // it fits now: what is left comes from far
            _ => PAGES / 16,
        });
        assert_eq!(found[0], 50 - 100 / STEP_PART - 1, "one step at a time");
        assert_eq!(found[11], 0, "{found:?}");
    }

    /// A loop over one and a half times the limit: it fits if a quarter of the limit holds three
    /// copies in each page.
    #[test]
    fn a_loop_that_fits_with_copies_gets_room_for_them_slowly() {
        let found = targets(40, 1 << 20, |dram| {
            let resident = PAGES - dram / BASE_PAGE_BYTES as u64;
            PAGES * 3 / 2 - resident
        });
        let steps = found.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        assert!(steps.max() <= Some(100 / STEP_PART + 1), "{found:?}");
        let last = found[39];
        assert!((24..=40).contains(&last), "{found:?}");
    }

    #[test]
    fn what_no_split_holds_changes_nothing() {
        assert_eq!(targets(3, LIMIT.0 / 2, |_| PAGES * 20), [50; 3]);
    }

    /// While few pages have left, only those that left a moment ago can have come back.
    #[test]
    fn the_first_refaults_decide_nothing() {
        let pool = tiers(LIMIT.0 / 4);
        let mut worth = Worth::default();
        worth.next_move(LIMIT, &pool);
        for _ in 0..2 * EVIDENCE {
            refault(&mut worth, 1);
        }
        worth.next_move(LIMIT, &pool);
        assert_eq!(worth.shown().share, None);
        worth.left = 20 * PAGES;
        worth.next_move(LIMIT, &pool);
        let target = worth.shown().share.expect("a decision").target;
        assert!(target < Bytes(LIMIT.0 / 2), "{target}");
    }

    /// A page of DRAM that holds one and a half copies keeps few pages from the device.
    #[test]
    fn copies_that_compress_badly_begin_with_nothing() {
        let target = |pages_each: u64, copies: u64| {
            let [pool, device] = tiers(0);
            let dram = copies * BASE_PAGE_BYTES as u64 / pages_each;
            let pool = TierState {
                dram: Bytes(dram),
                copies: PageCount(copies * 3 / 2),
                packed: Bytes(dram),
                ..pool
            };
            let mut worth = Worth::default();
            worth.next_move(LIMIT, &[pool, device]);
            worth.shown().share.map(|share| share.target)
        };
        assert_eq!(target(1, RATIO_PAGES), Some(Bytes(0)), "1.5 copies a page");
        assert_eq!(target(2, RATIO_PAGES), None, "three copies a page");
        assert_eq!(target(1, RATIO_PAGES / 2), None, "too few to tell");
    }

    /// Beyond the pool is a tier that loads a page in less time than a decompression takes: if it
    /// holds all refaults, a pool only takes memory. If it is too small for them, the pool is worth
    /// it, because what the pool holds need not come from the device.
    #[test]
    fn a_pool_above_fast_memory_is_worth_what_the_tier_below_that_costs() {
        let of = |nvm_pages: u64, from: u64| {
            let [pool, device] = tiers(LIMIT.0 / 8);
            let nvm = TierState {
                capacity: Bytes(nvm_pages * BASE_PAGE_BYTES as u64),
                load_ns: 1_000,
                latency: LatencyClass::Nvm,
                demotes: true,
                ..device
            };
            let all = [pool, nvm, device];
            let mut worth = Worth {
                target: Some(pool.dram),
                left: 20 * PAGES,
                ..Worth::default()
            };
            worth.next_move(LIMIT, &all);
            for at in 0..EVIDENCE {
                refault(&mut worth, from + at * PAGES / EVIDENCE / 8);
            }
            worth.next_move(LIMIT, &all);
            worth.shown().share.expect("a decision").target
        };
        let (now, small, large) = (Bytes(LIMIT.0 / 8), PAGES / 64, 4 * PAGES);
        // The pool holds these. Half of them would not have left without it.
        assert!(of(large, PAGES / 8) < now);
        assert_eq!(of(small, PAGES / 8), now);
        // A larger pool would hold these.
        assert_eq!(of(large, PAGES * 3 / 8), now);
        assert!(of(small, PAGES * 3 / 8) > now);
    }

    #[test]
    fn beyond_the_target_new_pages_go_to_the_device_and_old_ones_follow_no_faster() {
        let full = tiers(LIMIT.0 / 4);
        let page = PageNo(0);
        let mut worth = Worth::default();
        assert_eq!(worth.order(page, &full).get(0), Some(TierId(0)));
        let mut worth = Worth {
            target: Some(Bytes(0)),
            ..Worth::default()
        };
        assert_eq!(worth.order(page, &full).get(0), Some(TierId(1)));
        assert_eq!(worth.next_move(LIMIT, &full), None, "one page came");
        for _ in 0..MIGRATE_PAGES_MAX {
            worth.order(page, &full);
        }
        let migration = worth.next_move(LIMIT, &full).expect("as many as came");
        assert_eq!((migration.from, migration.to), (TierId(0), TierId(1)));
        assert_eq!(migration.pages, PageCount(MIGRATE_PAGES_MAX));
        assert_eq!(worth.next_move(LIMIT, &full), None);
    }
}
