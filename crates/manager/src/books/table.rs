//! The tiers of a run, by number. Tiers come and go while the program runs, and threads use them
//! without a lock: a tier that was made stays in memory until the run ends. Only its space is given
//! back.

use std::ops::Index;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use undercroft_base::TierId;
use undercroft_policy::place::TierState;

use super::metered::MeteredTier;

/// Tiers that one run may make, those that were removed included.
const MADE_MAX: usize = 64;

/// The end of a list of ranks.
const NONE: u8 = 0xff;

const _: () = assert!(TierId::MAX < 8, "the ranks are bytes of one word");
const _: () = assert!(MADE_MAX < NONE as usize);

/// All tiers of a run.
pub(crate) struct Tiers {
    /// Every tier that was made, in this order.
    made: Box<[OnceLock<MeteredTier>]>,
    made_count: AtomicUsize,
    /// Number -> place in `made`.
    at: [AtomicU8; TierId::MAX],
    /// Numbers given so far, those of removed tiers included.
    count: AtomicUsize,
    /// The numbers of the tiers in use, fastest first: byte r is the tier of rank r.
    ranks: AtomicU64,
}

impl Tiers {
    /// The tiers of the start, fastest first. Panics if there are more than numbers.
    pub(crate) fn new(tiers: Vec<MeteredTier>) -> Tiers {
        let found = Tiers {
            made: (0..MADE_MAX).map(|_| OnceLock::new()).collect(),
            made_count: AtomicUsize::new(0),
            at: std::array::from_fn(|_| AtomicU8::new(NONE)),
            count: AtomicUsize::new(0),
            ranks: AtomicU64::new(u64::MAX),
        };
        let ids: Vec<TierId> = (0..tiers.len()).map(|at| TierId(at as u8)).collect();
        for (id, tier) in ids.iter().zip(tiers) {
            assert!(found.place(*id, tier), "more tiers than a run may have");
            found.show(*id);
        }
        found.set_ranks(&ids);
        found
    }

    /// Gives a number to a tier. No thread looks for it before [`Tiers::show`]. One thread at a
    /// time. False: the run has made too many.
    pub(crate) fn place(&self, id: TierId, tier: MeteredTier) -> bool {
        let place = self.made_count.load(Ordering::Relaxed);
        let Some(free) = self.made.get(place) else {
            return false;
        };
        assert!(free.set(tier).is_ok(), "the place of a tier was taken");
        self.made_count.store(place + 1, Ordering::Release);
        self.at[usize::from(id.0)].store(place as u8, Ordering::Release);
        true
    }

    /// The tier of this number is found from now on.
    pub(crate) fn show(&self, id: TierId) {
        self.count
            .fetch_max(usize::from(id.0) + 1, Ordering::Release);
    }

    /// Sets which tiers are in use, fastest first.
    pub(crate) fn set_ranks(&self, ranks: &[TierId]) {
        let mut word = u64::MAX.to_le_bytes();
        for (byte, id) in word.iter_mut().zip(ranks) {
            *byte = id.0;
        }
        self.ranks
            .store(u64::from_le_bytes(word), Ordering::Release);
    }

    /// The tiers in use, fastest first.
    pub(crate) fn ranks(&self) -> impl DoubleEndedIterator<Item = TierId> + use<> {
        let word = self.ranks.load(Ordering::Acquire).to_le_bytes();
        let count = word.iter().position(|id| *id == NONE).unwrap_or(8);
        (0..count).map(move |rank| TierId(word[rank]))
    }

    /// The tiers in use, fastest first, themselves.
    pub(crate) fn ranked(&self) -> impl DoubleEndedIterator<Item = &MeteredTier> {
        self.ranks().map(|id| &self[usize::from(id.0)])
    }

    /// The states of the tiers in use, fastest first.
    pub(crate) fn ranked_states(&self) -> Vec<TierState> {
        self.ranked().map(MeteredTier::state).collect()
    }

    /// A number that no tier in use has. Error: the run may have no other tier; for the user.
    pub(crate) fn free_number(&self) -> Result<TierId, String> {
        if self.made_count.load(Ordering::Relaxed) >= MADE_MAX {
            return Err(format!(
                "the run has made {MADE_MAX} tiers, as many as it may in its time; use one again that \
                 was drained (`tiers add` with its number), or start the program anew"
            ));
        }
        let used: Vec<TierId> = self.ranks().collect();
        let mut all = (0..TierId::MAX).map(|at| TierId(at as u8));
        all.find(|id| !used.contains(id)).ok_or_else(|| {
            format!(
                "the run has {} tiers, as many as it may; remove one first",
                TierId::MAX
            )
        })
    }

    /// Numbers given so far. A number without a tier in use has the tier that had it last.
    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(crate) fn get(&self, number: usize) -> Option<&MeteredTier> {
        (number < self.len()).then(|| &self[number])
    }

    /// By number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &MeteredTier> {
        (0..self.len()).map(|number| &self[number])
    }

    /// The tiers whose numbers others have now.
    pub(crate) fn earlier(&self) -> impl Iterator<Item = &MeteredTier> {
        let current: Vec<usize> = (0..self.len())
            .map(|number| self.place_of(number))
            .collect();
        let made = self.made.iter().enumerate();
        made.filter(move |(place, _)| !current.contains(place))
            .filter_map(|(_, tier)| tier.get())
    }

    fn place_of(&self, number: usize) -> usize {
        usize::from(self.at[number].load(Ordering::Acquire))
    }
}

impl Index<usize> for Tiers {
    type Output = MeteredTier;

    fn index(&self, number: usize) -> &MeteredTier {
        let made = self.made[self.place_of(number)].get();
        made.expect("a number was given to a tier")
    }
}
