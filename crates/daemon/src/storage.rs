//! Who has how much of which tier. No I/O: it sees messages and the time. docs/design/0039.
//!
//! What a run is granted is protected: it is never asked for less. All other room of a tier is lent
//! beside what each run uses, and asked back when another run needs it. Runs that use half of their
//! grant share it by weight; if there are none, all do.
//!
//! Room is never given twice. A run counts for the largest of: the quota that it keeps to, the one
//! that it was asked to keep to, and the space that it still has after its quota was lowered.

use std::collections::BTreeMap;

use undercroft_base::Bytes;
use undercroft_proto::grant::SLAB_BYTES;

use crate::config::Budget;
use crate::member::Member;
use crate::store::{CHANGE_MIN, Store, whole_slabs};

/// Room of a tier for one run.
struct Want {
    weight: u32,
    /// Whether it uses half of its grant.
    is_active: bool,
    /// Protection and what it has.
    need: u64,
    most: u64,
}

/// Targets of all runs: what each needs, and a share of what none needs.
fn lend(size: u64, wants: &[Want]) -> Vec<u64> {
    let need: u64 = wants.iter().map(|want| want.need).sum();
    let any_active = wants.iter().any(|want| want.is_active);
    let shares = |want: &Want| want.is_active || !any_active;
    let weight = |want: &Want| u128::from(want.weight) * u128::from(shares(want));
    let weights: u128 = wants.iter().map(weight).sum();
    let rest = u128::from(size.saturating_sub(need));
    let share = |want: &Want| rest * weight(want) / weights.max(1);
    let target = |want: &Want| whole_slabs(want.need + share(want) as u64).min(want.most);
    wants.iter().map(target).collect()
}

/// A tier that has a budget, and how what it has is lent.
struct Lent {
    spec: String,
    whole: u64,
    grant: u64,
    /// Kept for the run that is to be admitted next.
    kept: u64,
}

/// All of them.
pub(crate) struct Storage {
    budgets: Vec<Lent>,
    /// The run that waited to be admitted when room was last divided.
    waiting: Option<u64>,
}

/// A tier has no room for one more run.
#[derive(Debug)]
pub(crate) struct Short {
    pub(crate) why: String,
    pub(crate) left: u64,
}

type All = BTreeMap<u64, Member>;

/// The store of each run that has one of this budget, with its weight.
fn stores(members: &All, at: usize) -> impl Iterator<Item = (u32, &Store)> {
    members.values().flat_map(move |member| {
        let of = member
            .storage
            .iter()
            .filter(move |it| it.budget == Some(at));
        of.map(|store| (member.class.weight, store))
    })
}

impl Storage {
    pub(crate) fn new(tiers: &[Budget]) -> Storage {
        let budget = |tier: &Budget| {
            let (whole, each) = tier.sizes?;
            Some(Lent {
                spec: tier.spec.to_string(),
                whole: whole.0,
                grant: whole_slabs(each.0),
                kept: 0,
            })
        };
        Storage {
            budgets: tiers.iter().filter_map(budget).collect(),
            waiting: None,
        }
    }

    /// Room of each budget that counts as some run's, and what pages take of it.
    pub(crate) fn given(&self, members: &All) -> Vec<(u64, u64)> {
        let sum = |at: usize, of: fn(&Store) -> u64| stores(members, at).map(|it| of(it.1)).sum();
        let all = 0..self.budgets.len();
        all.map(|at| (sum(at, Store::counts), sum(at, Store::used)))
            .collect()
    }

    /// Room of each budget that is no run's.
    fn free(&self, members: &All) -> Vec<u64> {
        let given = self.given(members);
        let each = self.budgets.iter().zip(given);
        each.map(|(lent, (given, _))| lent.whole.saturating_sub(given))
            .collect()
    }

    fn short(&self, lefts: impl Iterator<Item = u64>, more: &str) -> Result<(), Short> {
        for (lent, left) in self.budgets.iter().zip(lefts) {
            if left < lent.grant {
                let why = format!(
                    "the tier {} has no room for one more file of {}: {} of {} is left{more}",
                    lent.spec,
                    Bytes(lent.grant),
                    Bytes(left),
                    Bytes(lent.whole)
                );
                return Err(Short { why, left });
            }
        }
        Ok(())
    }

    /// Whether one more run could be granted its storage, if others gave all that is not protected.
    ///
    /// * `waiting`: runs that wait already.
    pub(crate) fn could_admit(&self, members: &All, waiting: usize) -> Result<(), Short> {
        let left = self.budgets.iter().enumerate().map(|(at, lent)| {
            let protected: u64 = stores(members, at).map(|it| it.1.least).sum();
            lent.whole
                .saturating_sub(protected + lent.grant * waiting as u64)
        });
        self.short(left, "")
    }

    /// Whether one more run can be granted its storage now.
    pub(crate) fn can_admit(&self, members: &All) -> Result<(), Short> {
        let free = self.free(members).into_iter();
        self.short(free, ", and other runs use what they were lent")
    }

    /// Decides what each run should have, if runs have come or gone, or one has much less room to
    /// grow into than it should have.
    ///
    /// * `waiting`: the run that is to be admitted next. Room is kept for it, if what others need
    ///   leaves enough.
    pub(crate) fn plan(&mut self, members: &mut All, stirred: bool, waiting: Option<u64>) {
        let stirred = stirred | (std::mem::replace(&mut self.waiting, waiting) != waiting);
        for (at, lent) in self.budgets.iter_mut().enumerate() {
            let want = |(weight, store): (u32, &Store)| Want {
                weight,
                is_active: 2 * store.used() >= store.least,
                need: store.need(),
                most: store.most,
            };
            let wants: Vec<Want> = stores(members, at).map(want).collect();
            let need: u64 = wants.iter().map(|want| want.need).sum();
            let kept = match waiting {
                Some(_) if need + lent.grant <= lent.whole => lent.grant,
                _ => 0,
            };
            let stirred = stirred | (std::mem::replace(&mut lent.kept, kept) != kept);
            let targets = lend(lent.whole - kept, &wants);
            let is_short = |((_, store), target): ((u32, &Store), &u64)| store.is_short(*target);
            if !stirred && !stores(members, at).zip(&targets).any(is_short) {
                continue;
            }
            let all = members.values_mut().flat_map(|it| &mut it.storage);
            let all = all.filter(|store| store.budget == Some(at));
            for (store, target) in all.zip(targets) {
                store.target = target;
            }
        }
    }

    /// Asks runs to keep to other quotas: those that shall have less, and those that shall have
    /// more, as far as there is room. Returns whom, and which.
    ///
    /// * `may_raise`: all runs that have room are known.
    pub(crate) fn ask(&self, members: &mut All, may_raise: bool) -> Vec<(u64, Vec<u64>)> {
        let mut free = self.free(members);
        let least = match self.waiting {
            Some(_) => SLAB_BYTES,
            None => CHANGE_MIN,
        };
        for (free, lent) in free.iter_mut().zip(&self.budgets) {
            *free = free.saturating_sub(lent.kept);
        }
        let mut asks = Vec::new();
        for (id, member) in members {
            if member.asked_quotas {
                continue;
            }
            for store in &mut member.storage {
                let free = store.budget.and_then(|at| free.get_mut(at));
                let Some(free) = free else {
                    continue;
                };
                let can = if may_raise { *free } else { 0 };
                let before = store.counts();
                store.asked = store.wish(can, least);
                *free -= store.counts() - before;
            }
            let asks_more = |store: &Store| store.asked != store.quota;
            if member.storage.iter().any(asks_more) {
                member.asked_quotas = true;
                let quotas = member.storage.iter().map(|store| store.asked);
                asks.push((*id, quotas.collect()));
            }
        }
        asks
    }
}

#[cfg(test)]
#[path = "storage_tests.rs"]
mod tests;
