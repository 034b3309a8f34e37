//! A run's room in a tier, and what the run says of it.

use std::path::Path;
use std::time::Duration;

use undercroft_base::Bytes;
use undercroft_proto::grant::{SLAB_BYTES, StorageClaim, StorageFigures};
use undercroft_tier::spec::TierSpec;

use crate::config::Budget;

/// No smaller change is asked for: it costs a message.
pub(crate) const CHANGE_MIN: u64 = 4 * SLAB_BYTES;

/// More storage or memory than any machine has. Sums of such sizes do not overflow.
pub(crate) const BYTES_MAX: u64 = 1 << 46;

/// A run that fills half of what is free for it in this time is asked for its figures more often.
const SOON: Duration = Duration::from_secs(4);

/// Shortest time over which its pace is measured.
const COUNTED_MIN: Duration = Duration::from_millis(500);

/// A run's room in a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    /// Of which budget; `None`: the configuration has it no more.
    pub(crate) budget: Option<usize>,
    /// Protection.
    pub(crate) least: u64,
    /// Its file's length.
    pub(crate) most: u64,
    /// The quota that it keeps to.
    pub(crate) quota: u64,
    /// The quota that it was asked to keep to; `quota`: it was not asked, or has answered.
    pub(crate) asked: u64,
    /// The room that it should have.
    pub(crate) target: u64,
    /// Space that it may still have: of an earlier quota.
    ceiling: u64,
    /// Its own figures of what it has.
    pub(crate) told: StorageFigures,
    /// Bytes a second that its pages took lately, more than before.
    pub(crate) pace: f64,
    /// When they were counted for that, and what they took.
    counted: (Duration, u64),
}

impl Store {
    fn new(budget: Option<usize>, least: u64, most: u64, told: StorageFigures) -> Store {
        Store {
            budget,
            least: least.min(most),
            most,
            quota: told.quota,
            asked: told.quota,
            target: told.quota,
            ceiling: told.quota.max(told.held),
            told,
            pace: 0.0,
            counted: (Duration::ZERO, told.used),
        }
    }

    /// Room that counts as its own.
    pub(crate) fn counts(&self) -> u64 {
        let held = self.told.held.min(self.ceiling);
        self.quota.max(self.asked).max(held)
    }

    /// Whether it is asked for room, or is about to be, or still has space beyond its quota that
    /// its pages do not need.
    pub(crate) fn gives(&self) -> bool {
        let is_due = self.quota.saturating_sub(self.target) >= CHANGE_MIN;
        is_due || self.asked < self.quota || self.counts() > self.quota.max(self.need())
    }

    pub(crate) fn used(&self) -> u64 {
        self.told.used.min(self.ceiling)
    }

    /// Space that it needs for its pages: an eighth of the space beyond its grant is free.
    pub(crate) fn need(&self) -> u64 {
        let space = (self.used() / 7 * 8).next_multiple_of(SLAB_BYTES);
        self.least.max(space).min(self.most)
    }

    /// The quota that it is to be asked to keep to, if not the present one.
    ///
    /// * `free`: room of its tier that is no run's.
    /// * `least`: no smaller change is worth a message.
    pub(crate) fn wish(&self, free: u64, least: u64) -> u64 {
        if self.target <= self.quota {
            let less = self.quota - self.target;
            return if less >= least {
                self.target
            } else {
                self.quota
            };
        }
        let more = whole_slabs((self.target - self.quota).min(free));
        self.quota + if more >= least { more } else { 0 }
    }

    /// Whether it has much less room to grow into than it should have.
    pub(crate) fn is_short(&self, target: u64) -> bool {
        let room = |quota: u64| quota.saturating_sub(self.used());
        target >= self.quota + CHANGE_MIN && 2 * room(self.quota) < room(target)
    }

    pub(crate) fn note(&mut self, told: StorageFigures, now: Duration) {
        let passed = now.saturating_sub(self.counted.0);
        if passed >= COUNTED_MIN {
            let grown = told.used.saturating_sub(self.counted.1);
            self.pace = grown as f64 / passed.as_secs_f64();
            self.counted = (now, told.used);
        }
        self.take(told);
    }

    /// At its pace it has soon filled half of what is free for it.
    pub(crate) fn fills(&self) -> bool {
        let free = self.quota.saturating_sub(self.told.used);
        self.pace > 0.0 && self.pace * SOON.as_secs_f64() > free as f64 / 2.0
    }

    fn take(&mut self, told: StorageFigures) {
        self.told = told;
        if self.asked == self.quota {
            // With more space than its quota it only gets less.
            self.ceiling = self.quota.max(self.ceiling.min(told.held));
        }
        if told.quota == 0 {
            *self = Store::new(None, 0, 0, StorageFigures::default()); // the tier was removed
        }
    }

    /// Its answer: the quota holds since then.
    pub(crate) fn answer(&mut self, told: StorageFigures) {
        self.ceiling = self.counts();
        self.quota = self.asked;
        self.take(told);
    }
}

/// Grants to a new run, of each tier that has a budget.
pub(crate) fn granted(tiers: &[Budget]) -> Vec<Store> {
    let budgets = tiers.iter().filter_map(|tier| Some((tier, tier.sizes?)));
    let store = |(at, (tier, (whole, each))): (usize, (&Budget, (Bytes, Bytes)))| {
        let quota = whole_slabs(each.0);
        let most = if tier.grows() {
            whole_slabs(whole.0)
        } else {
            quota
        };
        let told = StorageFigures {
            quota,
            ..StorageFigures::default()
        };
        Store::new(Some(at), quota, most, told)
    };
    budgets.enumerate().map(store).collect()
}

pub(crate) fn whole_slabs(bytes: u64) -> u64 {
    bytes / SLAB_BYTES * SLAB_BYTES
}

/// Rooms of a run of an earlier daemon: of the tiers in the same directories, in their order.
pub(crate) fn claimed(tiers: &[Budget], claims: &[StorageClaim]) -> Vec<Store> {
    let mut left: Vec<_> = {
        let budgets = tiers.iter().filter_map(|tier| Some((tier, tier.sizes?)));
        budgets.enumerate().collect()
    };
    let store = |claim: &StorageClaim| {
        let told = sane(claim.figures);
        let spec = claim.tier.parse::<TierSpec>().ok();
        let same = |(_, (tier, _)): &(usize, (&Budget, _))| {
            spec.as_ref()
                .is_some_and(|spec| place(spec) == place(&tier.spec))
        };
        let found = left.iter().position(same).map(|at| left.remove(at));
        let Some((at, (tier, (_, each)))) = found else {
            return Store::new(None, 0, 0, told);
        };
        let length = spec.and_then(|spec| spec.size).map_or(0, |size| size.0);
        let most = if tier.grows() {
            whole_slabs(length)
        } else {
            told.quota
        };
        if told.quota == 0 {
            return Store::new(None, 0, 0, told);
        }
        Store::new(Some(at), whole_slabs(each.0), most, told)
    };
    claims.iter().map(store).collect()
}

/// Kind and directory.
fn place(spec: &TierSpec) -> Option<(&str, &Path)> {
    Some((spec.facts().kind, spec.path.as_deref()?))
}

/// Sums of such figures do not overflow.
pub(crate) fn sane(told: StorageFigures) -> StorageFigures {
    let sane = |bytes: u64| bytes.min(BYTES_MAX);
    StorageFigures {
        quota: sane(told.quota),
        held: sane(told.held),
        used: sane(told.used),
    }
}
