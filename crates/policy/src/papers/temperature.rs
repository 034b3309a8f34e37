//! RapidSwap §3.2: slabs of consecutive pages are hot, warm or cold, by the time since they were
//! used. Cold slabs move one tier down in the background. A fault lifts its slab to the fastest
//! tier below DRAM, in the background too: no fault waits for it.
//!
//! A slab is 256 pages whose numbers follow each other, and so their addresses. A use is a fault of
//! one of its pages, or a page of it that is stored. After 5 s without one, a hot slab is warm;
//! after 5 s more it is cold. It then moves one tier down each 5 s, until it is in the last one or
//! used.
//!
//! Differs: the paper keeps a slab together, so a fault moves all of it. Here each page has a place
//! of its own: a move takes the pages of the slab that are stored in one tier. A compressed pool is
//! above the fastest tier below DRAM. It, and every tier that is full, follow `waterfall`.

use std::collections::VecDeque;

use undercroft_base::{PageCount, PageNo, TierId};
use undercroft_policy_core::place::{
    Ask, LatencyClass, Loaded, MIGRATE_PAGES_MAX, Migration, Place, Shown, Temperatures, TierOrder,
    TierState, waterfall,
};

/// Pages of a slab: 1 MiB.
const SLAB_PAGES: u64 = MIGRATE_PAGES_MAX;

/// A moment: 2^26 ns, some 67 ms.
const TICK_BITS: u32 = 26;

/// A step colder: 5 s.
const STEP: u32 = (5_000_000_000_u64 >> TICK_BITS) as u32;

/// From hot to cold: two steps.
const COLD: u32 = 2 * STEP;

/// Slabs looked at for one answer: some microseconds, with the engine locked.
const SCAN_MAX: usize = 1024;

/// Slabs that wait to be lifted. If there are more, the newest wait for their next fault.
const LIFTS_MAX: usize = 256;

/// A slab. 8 bytes for each MiB of address space.
#[derive(Clone, Copy, Debug, Default)]
struct Slab {
    /// When it was used last, or as if; 0 = it is settled, or was never used.
    used: u32,
    /// The tier where its pages belong, or one that has none of them.
    level: u8,
    /// Whether it waits to be lifted.
    lifts: bool,
    /// A page of it was stored once.
    was_stored: bool,
}

/// The temperatures of all slabs.
#[derive(Clone, Debug, Default)]
pub struct Temperature {
    slabs: Vec<Slab>,
    /// Now, in ticks. At least 1 once the time was told.
    now: u32,
    /// The slab that is looked at next.
    cursor: usize,
    lifts: VecDeque<(u32, TierId)>,
}

/// The fastest tier below DRAM.
fn top(tiers: &[TierState]) -> Option<usize> {
    let below = |tier: &TierState| tier.latency != LatencyClass::Memory;
    tiers.iter().position(below)
}

fn number(no: PageNo) -> usize {
    (u64::from(no.0) / SLAB_PAGES) as usize
}

fn takes(tier: &TierState) -> bool {
    tier.headroom() >= PageCount(SLAB_PAGES).bytes()
}

impl Temperature {
    /// The slab is used now. It belongs into the fastest tier again.
    fn used(&mut self, slab: usize) -> &mut Slab {
        if slab >= self.slabs.len() {
            self.slabs.resize(slab + 1, Slab::default());
        }
        let slab = &mut self.slabs[slab];
        slab.used = self.now.max(1);
        slab.level = 0;
        slab.was_stored = true;
        slab
    }

    fn move_of(from: usize, to: usize) -> Migration {
        Migration {
            from: TierId(from as u8),
            to: TierId(to as u8),
            pages: PageCount(SLAB_PAGES),
        }
    }

    fn counted(&self, part: usize) -> Option<Temperatures> {
        let none: &[Slab] = &[];
        let part = match part {
            0 => self.slabs.chunks(SCAN_MAX).next().unwrap_or(none),
            _ => self.slabs.chunks(SCAN_MAX).nth(part)?,
        };
        let mut all = Temperatures::default();
        for slab in part.iter().filter(|slab| slab.was_stored) {
            match self.now.saturating_sub(slab.used) {
                age if slab.used == 0 || age >= COLD => all.cold += 1,
                age if age >= STEP => all.warm += 1,
                _ => all.hot += 1,
            }
        }
        Some(all)
    }

    /// The next slab that was used in a slow tier.
    fn lift(&mut self, top: usize, tiers: &[TierState]) -> Option<(usize, Migration)> {
        while let Some((slab, from)) = self.lifts.pop_front() {
            let (slab, from) = (slab as usize, usize::from(from.0));
            self.slabs[slab].lifts = false;
            if (top + 1..tiers.len()).contains(&from) && takes(&tiers[top]) {
                return Some((slab, Temperature::move_of(from, top)));
            }
        }
        None
    }

    /// The next slab that is cold.
    fn cool(&mut self, top: usize, tiers: &[TierState]) -> Option<(usize, Migration)> {
        for _ in 0..self.slabs.len().min(SCAN_MAX) {
            self.cursor = (self.cursor + 1) % self.slabs.len();
            let slab = &mut self.slabs[self.cursor];
            if slab.used == 0 || self.now.saturating_sub(slab.used) < COLD {
                continue;
            }
            let from = usize::from(slab.level).max(top);
            if from + 1 >= tiers.len() {
                slab.used = 0; // it is as low as can be
                continue;
            }
            if !takes(&tiers[from + 1]) {
                continue;
            }
            slab.level = from as u8 + 1;
            slab.used = (self.now - STEP).max(1); // warm, for one more step
            return Some((self.cursor, Temperature::move_of(from, from + 1)));
        }
        None
    }
}

impl Place for Temperature {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        self.used(number(no));
        TierOrder::downwards(tiers.len())
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        if page.waited > 0 {
            let (slab, waiting) = (number(page.no), self.lifts.len());
            let of = self.used(slab);
            if page.from.0 > 0 && !of.lifts && waiting < LIFTS_MAX {
                of.lifts = true;
                self.lifts.push_back((slab as u32, page.from));
            }
        }
        page.tier.keeps_copies()
    }

    fn next_move(&mut self, ask: Ask<'_>, tiers: &[TierState]) -> Option<Migration> {
        let Ask::Group(now, pages) = ask else {
            return waterfall::relieves(tiers);
        };
        self.now = ((now.0 >> TICK_BITS) as u32).max(1);
        let top = top(tiers)?;
        let lifted = self.lift(top, tiers);
        let (slab, asked) = lifted.or_else(|| self.cool(top, tiers))?;
        let first = (slab as u64 * SLAB_PAGES) as u32;
        pages.extend((first..=first + (SLAB_PAGES as u32 - 1)).map(PageNo));
        Some(asked)
    }

    fn shown(&self, part: usize) -> Shown {
        Shown {
            moves_groups: true,
            temperatures: self.counted(part),
            ..Shown::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::{Bytes, Nanos};

    fn tier(latency: LatencyClass, held: u64) -> TierState {
        TierState {
            capacity: Bytes(64 << 20),
            held: Bytes(held),
            packed: Bytes(held),
            demotes: true,
            ..TierState::empty(latency)
        }
    }

    fn three() -> [TierState; 3] {
        [
            tier(LatencyClass::Nvm, 0),
            tier(LatencyClass::Device, 0),
            tier(LatencyClass::Device, 0),
        ]
    }

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    /// All moves until `seconds`, asked for each second: (second, page, from, to).
    fn moves(of: &mut Temperature, tiers: &[TierState], from: u64, to: u64) -> Vec<[u64; 4]> {
        let mut found = Vec::new();
        for second in from..to {
            let mut pages = Vec::new();
            while let Some(next) = of.next_move(Ask::Group(at(second), &mut pages), tiers) {
                let (from, to) = (u64::from(next.from.0), u64::from(next.to.0));
                assert_eq!(pages.len() as u64, SLAB_PAGES);
                found.push([second, u64::from(pages[0].0), from, to]);
                pages.clear();
            }
        }
        found
    }

    fn store(of: &mut Temperature, no: u32) {
        of.order(PageNo(no), &three());
    }

    fn came_back(of: &mut Temperature, no: u32, from: u8) {
        of.loaded(Loaded {
            no: PageNo(no),
            from: TierId(from),
            tier: &three()[0],
            distance: None,
            waited: 1,
        });
    }

    #[test]
    fn a_slab_cools_in_steps_and_moves_down_to_the_last_tier() {
        let mut of = Temperature::default();
        assert_eq!(moves(&mut of, &three(), 1, 2), [[0; 4]; 0]);
        store(&mut of, 600);
        assert_eq!(
            moves(&mut of, &three(), 1, 60),
            [[11, 512, 0, 1], [16, 512, 1, 2]]
        );
    }

    #[test]
    fn slabs_are_counted_by_their_temperature() {
        let mut of = Temperature::default();
        let count = |of: &Temperature| {
            of.shown(0)
                .temperatures
                .map(|all| [all.hot, all.warm, all.cold])
        };
        assert_eq!(count(&of), Some([0; 3]));
        moves(&mut of, &three(), 1, 2);
        store(&mut of, 600); // slabs 0 and 1 hold nothing
        assert_eq!(count(&of), Some([1, 0, 0]));
        moves(&mut of, &three(), 2, 4);
        store(&mut of, 0);
        moves(&mut of, &three(), 4, 8);
        assert_eq!(count(&of), Some([1, 1, 0]));
        // They move down, rest there, and are as low as can be.
        moves(&mut of, &three(), 8, 60);
        assert_eq!(count(&of), Some([0, 0, 2]));
        came_back(&mut of, 0, 2);
        assert_eq!(count(&of), Some([1, 0, 1]));
        assert_eq!(of.shown(1).temperatures, None);
        store(&mut of, (SCAN_MAX as u64 * SLAB_PAGES) as u32);
        let last = of.shown(1).temperatures.map(|all| all.hot);
        assert_eq!((last, of.shown(2).temperatures), (Some(1), None));
    }

    #[test]
    fn a_slab_that_is_used_stays() {
        let mut of = Temperature::default();
        for second in 1..60 {
            of.next_move(Ask::Group(at(second), &mut Vec::new()), &three());
            store(&mut of, 600);
        }
        store(&mut of, 0);
        assert_eq!(moves(&mut of, &three(), 60, 68), [[0; 4]; 0]);
    }

    #[test]
    fn a_fault_lifts_its_slab_once_to_the_fastest_tier_below_memory() {
        let mut of = Temperature::default();
        moves(&mut of, &three(), 1, 2);
        store(&mut of, 600);
        moves(&mut of, &three(), 2, 60);
        for page in 512..520 {
            came_back(&mut of, page, 2);
        }
        assert_eq!(moves(&mut of, &three(), 60, 65), [[60, 512, 2, 0]]);
        // The pool is not below memory.
        let pool = [tier(LatencyClass::Memory, 0), three()[1], three()[2]];
        came_back(&mut of, 512, 2);
        assert_eq!(moves(&mut of, &pool, 65, 66), [[65, 512, 2, 1]]);
        came_back(&mut of, 512, 1);
        assert_eq!(moves(&mut of, &pool, 66, 67), [[0; 4]; 0]);
    }

    #[test]
    fn nothing_moves_into_a_tier_without_room_for_a_slab() {
        let full = tier(LatencyClass::Device, (63 << 20) + 1);
        let mut of = Temperature::default();
        moves(&mut of, &three(), 1, 2);
        store(&mut of, 600);
        let below = [three()[0], full, three()[2]];
        assert_eq!(moves(&mut of, &below, 2, 60), [[0; 4]; 0]);
        came_back(&mut of, 512, 2);
        let above = [
            TierState {
                latency: LatencyClass::Nvm,
                ..full
            },
            three()[1],
            three()[2],
        ];
        assert_eq!(moves(&mut of, &above, 60, 65), [[0; 4]; 0]);
    }
}
