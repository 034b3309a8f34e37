//! Notes in the ledger: what a successor could not derive from the entries. A note is written
//! before the step it describes, and erased after it.
//!
//! ```text
//! word 0         old number of the page being moved (remap) + 1; 0 = none
//! word 1         its new number
//! words 2..66    a batch: word 2 + i is item i;  0 = finished
//! words 66..256  pages of fork children that share an item: they have its owner and place
//! words 256..448 further batches, and groups that were set aside, 64 words each: as the first
//!
//! 63   62       38 37    32 31        0
//! +---+-----------+--------+-----------+
//! | 1 | owner 24  | place 6| page 32   |   page = 2^32 - 1: the program dropped it
//! +---+-----------+--------+-----------+
//! ```
//! `owner`: the space whose agent moves the page out. `place`: where in its holding area the bytes
//! then are. It is the item's number among the items of that space.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{PageNo, SpaceId};

use crate::Engine;
use crate::ledger::{Ledger, NOTE_WORDS, SPACE_BITS};
use crate::limits::EVICT_PAGES_MAX;

const MOVED_FROM: usize = 0;
const MOVED_TO: usize = 1;
const BATCH: usize = 2;
const FOLLOWERS: usize = BATCH + EVICT_PAGES_MAX;
const ASIDE: usize = 256;

/// Batches and groups set aside that are noted.
pub const GROUPS: usize = 4;

const _: () = assert!(FOLLOWERS < ASIDE && EVICT_PAGES_MAX <= 1 << 6);
const _: () = assert!(ASIDE + (GROUPS - 1) * EVICT_PAGES_MAX == NOTE_WORDS);

/// The word of item `at`, if it is noted.
#[inline]
fn word_of(at: usize) -> Option<usize> {
    if at < EVICT_PAGES_MAX {
        Some(BATCH + at)
    } else {
        Some(ASIDE + at - EVICT_PAGES_MAX).filter(|word| *word < NOTE_WORDS)
    }
}

/// A page of the batch, or the page of a fork child that shares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub owner: SpaceId,
    pub place: usize,
    /// `None`: dropped.
    pub page: Option<PageNo>,
}

impl Note {
    #[inline]
    fn pack(self) -> u64 {
        let page = self.page.map_or(u32::MAX, |page| page.0);
        assert!(
            self.owner.0 < 1 << SPACE_BITS,
            "more address spaces than a note can name"
        );
        1 << 63 | u64::from(self.owner.0) << 38 | (self.place as u64) << 32 | u64::from(page)
    }

    #[inline]
    fn unpack(word: u64) -> Option<Note> {
        let page = word as u32;
        (word >> 63 == 1).then_some(Note {
            owner: SpaceId((word >> 38) as u32 & ((1 << SPACE_BITS) - 1)),
            place: (word >> 32) as usize & 63,
            page: (page != u32::MAX).then_some(PageNo(page)),
        })
    }
}

/// All notes of a ledger.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// The page that was being moved: (old, new).
    pub moved: Option<(PageNo, PageNo)>,
    /// By place of an item in flight.
    pub batch: Vec<Option<Note>>,
    pub followers: Vec<Note>,
}

/// Reads a ledger's notes. Any words can be read.
pub(crate) fn read(words: &[AtomicU64]) -> Notes {
    let word = |at: usize| words[at].load(Ordering::Relaxed);
    let moved = match word(MOVED_FROM) {
        from @ 1..=0xffff_ffff => Some((PageNo(from as u32 - 1), PageNo(word(MOVED_TO) as u32))),
        _ => None,
    };
    Notes {
        moved,
        batch: (BATCH..FOLLOWERS)
            .chain(ASIDE..NOTE_WORDS)
            .map(|at| Note::unpack(word(at)))
            .collect(),
        followers: (FOLLOWERS..ASIDE)
            .filter_map(|at| Note::unpack(word(at)))
            .collect(),
    }
}

/// Whether the agent of `space` has pages in hand, or a note says so.
pub(crate) fn name<L: Ledger>(ledger: &L, space: SpaceId) -> bool {
    let notes = ledger.notes()[BATCH..].iter();
    let mut owners = notes.filter_map(|word| Note::unpack(word.load(Ordering::Relaxed)));
    owners.any(|note| note.owner == space)
}

/// Item `at` of the batch will be the page `no`, the `place`th of `owner`.
#[inline]
pub(crate) fn note_item<L: Ledger>(
    ledger: &L,
    at: usize,
    owner: SpaceId,
    place: usize,
    no: PageNo,
) {
    let page = Some(no);
    if let Some(word) = word_of(at) {
        ledger.write(&ledger.notes()[word], Note { owner, place, page }.pack());
    }
}

impl<L: Ledger> Engine<L> {
    fn note(&self, at: usize, word: u64) {
        let ledger = self.table.ledger();
        ledger.write(&ledger.notes()[at], word);
    }

    fn noted(&self, at: usize) -> Option<Note> {
        Note::unpack(self.table.ledger().notes()[at].load(Ordering::Relaxed))
    }

    /// Replaces the notes of the batch by these.
    pub(crate) fn rewrite_notes(&mut self, batch: &[Option<Note>], followers: &[Note]) {
        for (at, note) in batch.iter().enumerate() {
            if let Some(word) = word_of(at) {
                self.note(word, note.map_or(0, Note::pack));
            }
        }
        for at in FOLLOWERS..ASIDE {
            let note = followers.get(at - FOLLOWERS);
            self.note(at, note.map_or(0, |note| note.pack()));
        }
        self.followers_noted = followers.len().min(ASIDE - FOLLOWERS);
    }

    /// Item `at` is finished, and no fork child depends on it.
    #[inline]
    pub(crate) fn forget_note(&mut self, at: usize) {
        let Some(word) = word_of(at) else { return };
        match self.followers_noted {
            0 => self.note(word, 0),
            _ => self.forget_note_and_followers(word),
        }
    }

    /// Item `at` is item `to` from now on. The new note first: of two that say the same, the first
    /// counts.
    pub(crate) fn move_note(&self, at: usize, to: usize) {
        let (Some(old), new) = (word_of(at), word_of(to)) else {
            return;
        };
        if let (Some(note), Some(new)) = (self.noted(old), new) {
            self.note(new, note.pack());
        }
        self.note(old, 0);
    }

    #[inline(never)]
    fn forget_note_and_followers(&mut self, of: usize) {
        let Some(leader) = self.noted(of) else {
            return;
        };
        self.note(of, 0);
        for word in FOLLOWERS..ASIDE {
            let same = |note: &Note| (note.owner, note.place) == (leader.owner, leader.place);
            if self.noted(word).as_ref().is_some_and(same) {
                self.note(word, 0);
                self.followers_noted -= 1;
            }
        }
    }

    /// A fork child's page shares item `leader`. When the notes are full, the page is lost if the
    /// manager dies now.
    pub(crate) fn note_follower(&mut self, leader: usize, child: PageNo) {
        let free = (FOLLOWERS..ASIDE).find(|at| self.noted(*at).is_none());
        let leader = word_of(leader).and_then(|word| self.noted(word));
        if let (Some(leader), Some(free)) = (leader, free) {
            let page = Some(child);
            self.note(free, Note { page, ..leader }.pack());
            self.followers_noted += 1;
        }
    }

    /// A page of the batch was dropped, or one that shares an item.
    pub(crate) fn note_dropped(&mut self, no: PageNo) {
        for at in BATCH..NOTE_WORDS {
            let Some(note) = self.noted(at).filter(|note| note.page == Some(no)) else {
                continue;
            };
            if !(FOLLOWERS..ASIDE).contains(&at) {
                self.note(at, Note { page: None, ..note }.pack())
            } else {
                self.note(at, 0);
                self.followers_noted -= 1;
            }
        }
    }

    /// A page's entry moves from `old` to `new`; `in_batch`: it is being evicted.
    pub(crate) fn note_move(&self, old: PageNo, new: PageNo, in_batch: bool) {
        self.note(MOVED_TO, u64::from(new.0));
        self.note(MOVED_FROM, u64::from(old.0) + 1);
        for at in (BATCH..NOTE_WORDS).filter(|_| in_batch) {
            if let Some(note) = self.noted(at).filter(|note| note.page == Some(old)) {
                let page = Some(new);
                self.note(at, Note { page, ..note }.pack());
            }
        }
    }

    /// The page has moved.
    pub(crate) fn forget_move(&self) {
        self.note(MOVED_FROM, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_read_back_and_no_word_is_one_by_chance_of_zero() {
        for page in [None, Some(PageNo(0)), Some(PageNo(u32::MAX - 1))] {
            let note = Note {
                owner: SpaceId(0xff_fffe),
                place: 63,
                page,
            };
            assert_eq!(Note::unpack(note.pack()), Some(note));
        }
        assert_eq!(Note::unpack(0), None);
    }
}
