//! Decides which of two rules costs fewer faults, by a sample of each.
//!
//! The cost of a sample is what is loaded into it: 1 for a fault, 1/16 for a page that came along
//! with another. Recent costs are compared, because programs change. The rule in force changes when
//! the other one's sample costs less by more than chance: by 6 standard deviations of a count, and
//! by a ninth. Faults come in clusters, so their number varies more than a count of single ones.
//!
//! A sample does not show one thing. A rule that keeps a page here and there leaves holes in the
//! streams of the program. Prefetch then finds no trend, and every page is a fault, in both
//! samples. So the *share* of loaded pages that were faults is taken from all other pages, while
//! each rule is in force. The cost of the rule that is not in force counts by its share over that
//! of the rule in force. It fades away, so that the rule is tried again one day.

use super::Choice;

/// A rule that keeps pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// That of `lru`.
    Recency,
    /// That of `active_inactive`.
    Frequency,
}

/// Names of the rules, by number.
const NAMES: [&str; 2] = ["lru", "active_inactive"];

/// Cost of a fault. A page that came along costs 1.
const FAULT: u64 = 16;
/// Costs that are remembered: of this many faults.
const FAULTS_MAX: u64 = 512;
/// A difference counts from this many standard deviations on, squared.
const SIGMA_SQUARED: u64 = 36;
/// Once the costs pass that of [`FAULTS_MAX`] faults, each loses one part in this.
const FADE: u64 = 8;
/// When the rule changes, each cost keeps one part in this.
const KEPT: u64 = 4;

/// A share of 1.
const WHOLE: i64 = 1 << 32;
/// Added to both shares, so that small ones say little.
const SHARE_FLOOR: i64 = WHOLE / 16;
/// Loaded pages that a share remembers.
const SHARE_PAGES: i64 = 1024;
/// Loaded pages until the share of the rule that is not in force has faded, as a multiple of the
/// resident pages.
const FADE_TIMES: u64 = 16;

/// Costs of the samples, and the rule that they speak for.
pub(super) struct Duel {
    rule: Rule,
    /// Costs lately, by rule.
    costs: [u64; 2],
    /// Loaded pages that were faults, of all loaded pages: under each rule. `None` until the rule
    /// has been in force.
    shares: [Option<i64>; 2],
    /// Faults in the samples since the start.
    faults: [u64; 2],
    changes: u64,
    /// Pages loaded since the last change.
    loaded: u64,
}

impl Duel {
    /// No costs yet. Frequency is in force: short programs end before there is evidence, and fault
    /// less with it.
    pub(super) fn new() -> Duel {
        Duel {
            rule: Rule::Frequency,
            costs: [0; 2],
            shares: [None, Some(WHOLE / 2)],
            faults: [0; 2],
            changes: 0,
            loaded: 0,
        }
    }

    /// The rule in force.
    pub(super) fn rule(&self) -> Rule {
        self.rule
    }

    /// As [`Shown::choice`](super::Shown::choice).
    pub(super) fn choice(&self) -> Choice {
        Choice {
            name: NAMES[self.rule as usize],
            changes: self.changes,
            pages_since_change: self.loaded,
            sample_faults: self.faults,
        }
    }

    /// A page that is in no sample was loaded. O(1).
    ///
    /// * `demanded`: by a fault of its own.
    pub(super) fn other_loaded(&mut self, demanded: bool, resident: u64) {
        self.loaded += 1;
        let (now, other) = (self.rule as usize, 1 - self.rule as usize);
        let target = if demanded { WHOLE } else { 0 };
        let share = self.shares[now].unwrap_or(WHOLE / 2);
        let share = share + (target - share) / SHARE_PAGES;
        self.shares[now] = Some(share);
        if let Some(past) = &mut self.shares[other] {
            *past += (share - *past) / (FADE_TIMES * resident.max(1)).cast_signed();
        }
    }

    /// A page of the sample of `of` was loaded. True if the rule has changed. O(1).
    pub(super) fn sample_loaded(&mut self, of: Rule, demanded: bool) -> bool {
        self.loaded += 1;
        self.faults[of as usize] += u64::from(demanded);
        self.costs[of as usize] += if demanded { FAULT } else { 1 };
        if self.costs[0] + self.costs[1] > FAULTS_MAX * FAULT {
            self.costs = self.costs.map(|cost| cost - cost / FADE);
        }
        let turns = self.other_costs_less();
        if turns {
            self.rule = match self.rule {
                Rule::Recency => Rule::Frequency,
                Rule::Frequency => Rule::Recency,
            };
            self.changes += 1;
            self.loaded = 0;
            self.costs = self.costs.map(|cost| cost / KEPT);
            // Where it begins; it is measured from now on.
            let [share, other] = self.shares;
            self.shares = [share.or(other), other.or(share)];
        }
        turns
    }

    /// Whether the rule that is not in force costs less, by more than chance.
    fn other_costs_less(&self) -> bool {
        let (now, other) = (self.rule as usize, 1 - self.rule as usize);
        let share = |rule: usize| self.shares[rule].or(self.shares[now]).unwrap_or(WHOLE / 2);
        let weight = |rule| (share(rule) + SHARE_FLOOR).cast_unsigned() / FAULT;
        let mine = self.costs[now];
        let others = self.costs[other] * weight(other) / weight(now);
        let more = mine.saturating_sub(others);
        more * more > SIGMA_SQUARED * FAULT * (mine + others) && mine * 8 > others * 9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(duel: &mut Duel, of: Rule, times: u32) -> u32 {
        (0..times)
            .map(|_| u32::from(duel.sample_loaded(of, true)))
            .sum()
    }

    #[test]
    fn rule_changes_when_its_sample_faults_more() {
        let mut duel = Duel::new();
        assert_eq!(fault(&mut duel, Rule::Frequency, 36), 0, "chance");
        assert_eq!(fault(&mut duel, Rule::Frequency, 1), 1);
        assert_eq!(duel.rule(), Rule::Recency);
        let choice = duel.choice();
        assert_eq!((choice.name, choice.changes), ("lru", 1));
        assert_eq!(choice.sample_faults, [0, 37]);
    }

    #[test]
    fn rule_stays_while_both_samples_fault_alike() {
        let mut duel = Duel::new();
        for _ in 0..100_000 {
            assert_eq!(fault(&mut duel, Rule::Recency, 1), 0);
            assert_eq!(fault(&mut duel, Rule::Frequency, 1), 0);
        }
    }

    #[test]
    fn long_past_does_not_delay_a_change() {
        let mut duel = Duel::new();
        fault(&mut duel, Rule::Recency, 100_000);
        let mut faults = 0;
        while duel.rule() == Rule::Frequency {
            fault(&mut duel, Rule::Frequency, 1);
            faults += 1;
        }
        assert!(faults < 1000, "{faults}");
    }

    #[test]
    fn prefetched_pages_cost_a_sixteenth() {
        let mut duel = Duel::new();
        for _ in 0..16 * 36 {
            assert!(!duel.sample_loaded(Rule::Frequency, false));
        }
        assert_eq!(duel.choice().sample_faults, [0, 0]);
        assert_eq!(fault(&mut duel, Rule::Frequency, 1), 1);
    }

    #[test]
    fn rule_that_spoils_prefetch_is_left_though_samples_fault_alike() {
        let mut duel = Duel::new();
        let load = |duel: &mut Duel, one_in: u32| {
            for page in 0..20_000 {
                duel.other_loaded(page % one_in == 0, 1 << 20);
            }
        };
        load(&mut duel, 10);
        fault(&mut duel, Rule::Frequency, 40);
        assert_eq!(duel.rule(), Rule::Recency);
        load(&mut duel, 2);
        for _ in 0..200 {
            fault(&mut duel, Rule::Frequency, 1);
            fault(&mut duel, Rule::Recency, 1);
        }
        assert_eq!(duel.rule(), Rule::Frequency);
        // It is remembered.
        load(&mut duel, 10);
        for _ in 0..1000 {
            fault(&mut duel, Rule::Frequency, 3);
            fault(&mut duel, Rule::Recency, 2);
        }
        assert_eq!(duel.choice().changes, 2);
    }
}
