//! Moves copies that lie scattered in a file together, so that the file's space can be given back.
//!
//! A pass: the tier names ranges of slots and gives none of them out; the ledger is read once, and
//! the copies in the ranges are stored again, elsewhere in the same tier; the tier has its ranges
//! back. Ranges that became empty cost no space from then on.

use std::ops::Range;
use std::time::{Duration, Instant};

use undercroft_base::{PageNo, Slot, TierId};

use super::Migrator;

/// Time after a pass that moved nothing: copies that fork relatives share stay where they are.
const REST: Duration = Duration::from_secs(5);

/// The pass under way, and when the next may begin.
#[derive(Debug, Default)]
pub(super) struct Gather {
    pass: Option<Pass>,
    rests_until: Option<Instant>,
}

#[derive(Debug)]
struct Pass {
    tier: TierId,
    ranges: Vec<Range<Slot>>,
    /// Where the ledger is read on.
    next: PageNo,
    /// Copies that it has moved.
    moved: usize,
}

impl Migrator {
    /// Moves the next copies of a pass, or begins one if a tier is scattered. Returns how many
    /// moved. 0: no pass is under way.
    pub(super) fn gather_some(&mut self) -> usize {
        if self.gather.pass.is_none() {
            self.gather.pass = self.begin_pass();
        }
        while let Some(mut pass) = self.gather.pass.take() {
            let next = {
                let mut engine = self.shared.books.engine_for_many();
                let mut migrations = engine.migrations();
                migrations.select_slots(pass.tier, &pass.ranges, pass.next, &mut self.items)
            };
            self.shared.books.free_released(); // second copies were given up
            let tier = pass.tier;
            self.items.sort_unstable_by_key(|item| item.slot);
            let moved = if self.items.is_empty() {
                0
            } else {
                self.move_from(tier, tier)
            };
            pass.moved += moved;
            match next {
                Some(next) => {
                    pass.next = next;
                    self.gather.pass = Some(pass);
                }
                None => self.ends(&pass),
            }
            if moved > 0 {
                return moved;
            }
            self.items.clear();
        }
        0
    }

    fn ends(&mut self, pass: &Pass) {
        let tiers = &self.shared.books.tiers;
        tiers[usize::from(pass.tier.0)].tier.gathered();
        if pass.moved == 0 {
            self.gather.rests_until = Some(Instant::now() + REST);
        }
        self.shared.signals.kick_evictor(); // which discards what is empty
    }

    fn begin_pass(&self) -> Option<Pass> {
        let rests = |until: Instant| Instant::now() < until;
        if self.gather.rests_until.is_some_and(rests) {
            return None;
        }
        let tiers = &self.shared.books.tiers;
        let scattered = |tier: &TierId| tiers[usize::from(tier.0)].is_scattered();
        let tier = tiers.ranks().find(scattered)?;
        // Slots that wait to be freed are named by no entry: no pass would empty their ranges.
        self.shared.books.free_all_late();
        let ranges = tiers[usize::from(tier.0)].tier.scattered();
        (!ranges.is_empty()).then_some(Pass {
            tier,
            ranges,
            next: PageNo(0),
            moved: 0,
        })
    }
}
