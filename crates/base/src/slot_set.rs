//! A set of slots of one tier: one bit each, in blocks that are there only where it has members.
//!
//! For takeovers, which compare all slots of a tier with those that pages refer to. 256 GiB of
//! pages take 8 MiB.

use std::collections::BTreeMap;
use std::fmt;

use crate::ids::Slot;

const WORDS: usize = 512;
const SLOTS: u64 = WORDS as u64 * 64;

/// Blocks that are found without a search: those of 8 TiB of pages. Tiers give out low slots first.
const DIRECT: usize = 1 << 16;

type Block = Box<[u64; WORDS]>;

/// A set of slots.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SlotSet {
    direct: Vec<Option<Block>>,
    others: BTreeMap<u64, Block>,
}

fn place(slot: Slot) -> (u64, usize, u64) {
    let within = slot.0 % SLOTS;
    (slot.0 / SLOTS, (within / 64) as usize, 1 << (within % 64))
}

fn fresh() -> Block {
    Box::new([0; WORDS])
}

impl SlotSet {
    /// Adds a slot. False if it was in the set.
    pub fn insert(&mut self, slot: Slot) -> bool {
        let (block, word, bit) = place(slot);
        let word = &mut self.block(block)[word];
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Whether the slot is in the set.
    pub fn contains(&self, slot: Slot) -> bool {
        let (block, word, bit) = place(slot);
        self.get(block).is_some_and(|block| block[word] & bit != 0)
    }

    /// The slots, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Slot> {
        self.words().flat_map(|(first, word)| bits(first, word))
    }

    /// The slots that are not in `other`, ascending.
    pub fn without(&self, other: &SlotSet) -> impl Iterator<Item = Slot> {
        self.words().flat_map(|(first, word)| {
            let (block, at, _) = place(first);
            let taken = other.get(block).map_or(0, |block| block[at]);
            bits(first, word & !taken)
        })
    }

    fn block(&mut self, number: u64) -> &mut Block {
        match usize::try_from(number) {
            Ok(at) if at < DIRECT => {
                if at >= self.direct.len() {
                    self.direct.resize_with(at + 1, || None);
                }
                self.direct[at].get_or_insert_with(fresh)
            }
            _ => self.others.entry(number).or_insert_with(fresh),
        }
    }

    fn get(&self, number: u64) -> Option<&Block> {
        match usize::try_from(number) {
            Ok(at) if at < DIRECT => self.direct.get(at)?.as_ref(),
            _ => self.others.get(&number),
        }
    }

    /// The words that may have members, each with its first slot.
    fn words(&self) -> impl Iterator<Item = (Slot, u64)> {
        let direct = (0..).zip(&self.direct);
        let direct = direct.filter_map(|(at, block)| Some((at, block.as_ref()?)));
        let others = self.others.iter().map(|(at, block)| (*at, block));
        let words = |(at, block): (u64, &Block)| {
            let first = (at * SLOTS..).step_by(64).map(Slot);
            first.zip(**block)
        };
        direct.chain(others).flat_map(words)
    }
}

/// The members that a word stands for.
fn bits(first: Slot, word: u64) -> impl Iterator<Item = Slot> {
    let mut left = word;
    std::iter::from_fn(move || {
        let at = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (at < 64).then(|| Slot(first.0 + u64::from(at)))
    })
}

impl fmt::Debug for SlotSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_set()
            .entries(self.iter().map(|slot| slot.0))
            .finish()
    }
}

impl FromIterator<Slot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = Slot>>(slots: I) -> SlotSet {
        let mut set = SlotSet::default();
        for slot in slots {
            set.insert(slot);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(of: &[u64]) -> SlotSet {
        of.iter().map(|slot| Slot(*slot)).collect()
    }

    #[test]
    fn slots_come_back_in_order_and_once() {
        let last = Slot::LIMIT - 1;
        let mut some = set(&[last, 0, 64, 63, 0, SLOTS, 70_000, SLOTS * DIRECT as u64]);
        let all = [0, 63, 64, SLOTS, 70_000, SLOTS * DIRECT as u64, last];
        assert_eq!(some.iter().map(|slot| slot.0).collect::<Vec<_>>(), all);
        assert!(!some.insert(Slot(63)) && some.insert(Slot(62)));
        assert!(some.contains(Slot(last)) && !some.contains(Slot(last - 1)));
        assert!(!some.contains(Slot(1 << 30)));
    }

    #[test]
    fn what_another_set_has_is_left_out() {
        let (all, claimed) = (set(&[1, 2, 3, 40_000, 1 << 36]), set(&[2, 4, 1 << 36]));
        let left: Vec<u64> = all.without(&claimed).map(|slot| slot.0).collect();
        assert_eq!(left, [1, 3, 40_000]);
    }
}
