//! Chooses between the rules of `lru` and `active_inactive` while the program runs.
//!
//! Neither rule is always right. Two small samples of the pages are always kept by one rule each.
//! All other pages follow the rule whose sample has fewer refaults lately (set dueling: Qureshi et
//! al., ISCA 2007).
//!
//! ```text
//! pages, in blocks:   ....R F............F R..............R F....    R: sample kept by recency
//!                     others                                         F: sample kept by frequency
//! lists:   first set:   A = R; B, C = F, inactive and active
//!          second set:  A, B = all others, inactive and active
//! ```
//! - The samples lie in pairs, one beside the other. So both have similar parts of the program.
//! - A sample has its share of the memory, and refaults do not make that larger. The share is the
//!   part of all first touches that were in the sample.
//! - Which set a page is in follows from its number. So five lists cost no more bits a page than
//!   the two of `active_inactive`.

use undercroft_base::PageNo;

use super::duel::{Duel, Rule};
use super::lists::{List, PageLists, Set};
use super::two_lists::{Search, TwoLists};
use super::{Arrival, Reclaim, Shown, Verdict};

/// The sample that is kept by recency, in the set of the samples.
const RECENT: List = List::A;
/// The lists of both samples.
const SAMPLES: Set = Set::First;
/// The lists of all other pages.
const OTHERS: Set = Set::Second;

/// Pages of a block, which is in one sample as a whole. So windows of prefetched pages mostly stay
/// in one sample.
const BLOCK_PAGES: u32 = 16;
/// Each sample has one page in this many.
const ONE_IN: u32 = 32;

/// The sample that a page is in; `None` if it is in neither. Of each pair of blocks that is
/// sampled, one block is in each sample.
#[inline]
fn sample_of(page: PageNo) -> Option<Rule> {
    let block = page.0 / BLOCK_PAGES;
    // Multiples of 2^32 / golden ratio are spread evenly.
    let hash = (block / 2).wrapping_mul(0x9e37_79b1);
    let rule = if (block ^ hash.count_ones()) & 1 == 0 {
        Rule::Recency
    } else {
        Rule::Frequency
    };
    (hash < u32::MAX / ONE_IN * 2).then_some(rule)
}

/// Two samples, and the pages that follow.
pub struct Auto {
    lists: PageLists,
    frequent: TwoLists,
    others: TwoLists,
    duel: Duel,
    /// First touches: in both samples, and everywhere.
    sampled: u64,
    seen: u64,
}

impl Default for Auto {
    fn default() -> Self {
        Auto::new()
    }
}

impl Auto {
    /// Empty.
    pub fn new() -> Auto {
        let duel = Duel::new();
        let mut others = TwoLists::new(List::A, List::B);
        others.set_recency(duel.rule() == Rule::Recency);
        Auto {
            lists: PageLists::new(),
            frequent: TwoLists::new(List::B, List::C),
            others,
            duel,
            sampled: 0,
            seen: 0,
        }
    }

    /// The lists, set to those of a page's group: of the samples, or of all other pages.
    fn lists_of(&mut self, sample: Option<Rule>) -> &mut PageLists {
        self.lists.turn_to(match sample {
            Some(_) => SAMPLES,
            None => OTHERS,
        })
    }

    /// A page was loaded: by a fault of its own, or along with another.
    fn came_back(&mut self, sample: Option<Rule>, demanded: bool) {
        match sample {
            None => self.duel.other_loaded(demanded, self.lists.total().0),
            Some(of) => {
                if self.duel.sample_loaded(of, demanded) {
                    self.others.set_recency(self.duel.rule() == Rule::Recency);
                }
            }
        }
    }

    /// The pages that one sample may have.
    fn quota(&self) -> u64 {
        let total = self.lists.total().0;
        (total * self.sampled).div_ceil(2 * self.seen.max(1))
    }
}

impl Reclaim for Auto {
    fn insert(&mut self, page: PageNo, arrival: Arrival) {
        let sample = sample_of(page);
        match arrival {
            Arrival::FirstTouch => {
                self.seen += 1;
                self.sampled += u64::from(sample.is_some());
            }
            Arrival::SwapIn { .. } => self.came_back(sample, true),
            Arrival::Prefetch => self.came_back(sample, false),
            Arrival::Returned => {}
        }
        self.lists_of(sample);
        let lists = &mut self.lists;
        match sample {
            Some(Rule::Recency) => lists.push_back(RECENT, page),
            Some(Rule::Frequency) => self.frequent.insert(lists, page, arrival),
            None => self.others.insert(lists, page, arrival),
        }
    }

    fn remove(&mut self, page: PageNo) {
        self.lists_of(sample_of(page)).remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        let sample = sample_of(page);
        let Some(list) = self.lists_of(sample).list(page) else {
            return;
        };
        let lists = &mut self.lists;
        match sample {
            Some(Rule::Recency) => lists.move_to_back(RECENT, page),
            Some(Rule::Frequency) => self.frequent.touch(lists, list, page),
            None => self.others.touch(lists, list, page),
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let quota = self.quota();
        let over = |len: u64| len.saturating_sub(quota) as usize;
        let lists = self.lists.turn_to(SAMPLES);
        let recent_over = over(lists.len(RECENT).0);
        let frequent_over = over(self.frequent.len(lists));
        let mut recent_lap = lists.len(RECENT).0;
        let mut frequent_laps = self.frequent.begin(lists, scan_max);
        let mut other_laps = self.others.begin(lists.turn_to(OTHERS), scan_max);
        let mut search = Search {
            wanted: want,
            looks: scan_max,
            verdict,
            out,
        };
        // First the excess of each sample, then any page.
        for [recent_most, frequent_most] in [[recent_over, frequent_over], [usize::MAX; 2]] {
            lists.turn_to(SAMPLES);
            search.lap(lists, RECENT, &mut recent_lap, recent_most, None);
            let frequent_most = frequent_most.min(search.wanted);
            let frequent = &mut self.frequent;
            frequent.select(lists, &mut frequent_laps, frequent_most, &mut search);
            lists.turn_to(OTHERS);
            let wanted = search.wanted;
            self.others
                .select(lists, &mut other_laps, wanted, &mut search);
        }
    }

    fn shown(&self) -> Shown {
        Shown {
            choice: Some(self.duel.choice()),
            ..self.lists.shown()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::PageCount;

    /// Serves a reference; `room` pages fit. True if it missed.
    struct Memory {
        policy: Auto,
        resident: Vec<bool>,
        left_at: Vec<Option<u64>>,
        evictions: u64,
    }

    impl Memory {
        fn new(pages: usize) -> Memory {
            Memory {
                policy: Auto::new(),
                resident: vec![false; pages],
                left_at: vec![None; pages],
                evictions: 0,
            }
        }

        fn refer(&mut self, page: u32, room: u64) -> bool {
            let at = page as usize;
            if self.resident[at] {
                return false;
            }
            if self.policy.shown().len.0 >= room {
                let mut out = Vec::new();
                let take = &mut |_| Verdict::Take;
                self.policy.select(16, 1024, take, &mut out);
                for victim in out {
                    self.resident[victim.0 as usize] = false;
                    self.left_at[victim.0 as usize] = Some(self.evictions);
                    self.evictions += 1;
                }
            }
            let arrival = match self.left_at[at] {
                None => Arrival::FirstTouch,
                Some(left) => Arrival::SwapIn {
                    distance: PageCount(self.evictions - left),
                },
            };
            self.policy.insert(PageNo(page), arrival);
            self.resident[at] = true;
            true
        }

        fn rule(&self) -> &'static str {
            self.policy.duel.choice().name
        }
    }

    #[test]
    fn each_sample_has_a_32nd_of_the_pages_and_of_the_memory() {
        let pages = 1 << 16;
        let of = |rule| {
            let all = (0..pages).filter(|page| sample_of(PageNo(*page)) == Some(rule));
            all.count() as u32
        };
        for rule in [Rule::Recency, Rule::Frequency] {
            let share = pages / of(rule);
            assert!((30..=34).contains(&share), "{rule:?}: one in {share}");
        }
        let mut memory = Memory::new(pages as usize);
        for reference in 0..4 * pages {
            memory.refer(reference % pages, 16384);
        }
        let policy = &mut memory.policy;
        let lists = policy.lists.turn_to(SAMPLES);
        for len in [lists.len(RECENT).0, policy.frequent.len(lists)] {
            assert!((480..=544).contains(&len), "{len} pages of a sample");
        }
    }

    #[test]
    fn phases_turn_the_rule_round_and_back() {
        let (pages, room) = (32768u32, 8192);
        let mut memory = Memory::new(pages as usize);
        for reference in 0..16 * 12288 {
            memory.refer(reference % 12288, room);
        }
        assert_eq!(
            memory.rule(),
            "active_inactive",
            "a loop of 1.5 times memory"
        );
        // A window that moves on slowly; what the loop left in active is of no use.
        let (mut misses, mut reference) = (0, 0u32);
        while memory.rule() == "active_inactive" {
            let within = reference.wrapping_mul(2_654_435_761) >> 19;
            misses += u32::from(memory.refer((12288 + reference / 16 + within) % pages, room));
            reference += 1;
            assert!(misses < 40_000, "it does not turn");
        }
        let (mut misses, mut reference) = (0, 0u32);
        while memory.rule() == "lru" {
            misses += u32::from(memory.refer(reference % 12288, room));
            reference += 1;
            assert!(misses < 150_000, "it does not turn back for the loop");
        }
    }
}
