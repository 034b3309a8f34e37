//! The guest of a run, as its policy asks about addresses in it.

use undercroft_base::SpaceId;

use crate::tables::{GuestMemory, Reverse, translate};

/// Tables that the questions of one event may look at: some milliseconds.
const LOOKS_AN_EVENT: u32 = 8192;
/// Of these, those that only [`translate`] takes.
const LOOKS_KEPT: u32 = 2048;
/// Looks that each event adds for going through all tables of a program. So the tables of a small
/// one may be gone through at each event, and those of a large one seldom.
const LOOKS_SAVED: u32 = 64;
/// Levels of tables: the most that one translation looks at.
const LEVELS: u32 = 4;

/// Programs of the guest whose tables are remembered.
const REMEMBERED: usize = 4;

/// A guest's memory, and where its programs have it. Its pages may be larger than 4 KiB.
pub struct Guest {
    space: SpaceId,
    memory: Box<dyn GuestMemory>,
    /// Pages of 4 KiB that a page of the space has.
    each: u64,
    looks: u32,
    saved: u32,
    /// The newest last, each with the looks that it took.
    known: Vec<(Reverse, u32)>,
}

impl Guest {
    /// * `each`: pages of 4 KiB that a page of the space has.
    pub fn new(space: SpaceId, memory: Box<dyn GuestMemory>, each: u64) -> Guest {
        Guest {
            space,
            memory,
            each: each.max(1),
            looks: 0,
            saved: LOOKS_AN_EVENT - LOOKS_KEPT,
            known: Vec::new(),
        }
    }

    pub(crate) fn is(&self, space: u32) -> bool {
        self.space.0 == space
    }

    /// An event begins.
    pub(crate) fn begin(&mut self) {
        self.looks = LOOKS_AN_EVENT;
        self.saved = (self.saved + LOOKS_SAVED).min(LOOKS_AN_EVENT - LOOKS_KEPT);
    }

    /// No program's tables are at 0: that says that they are not known.
    fn translate(&mut self, cr3: u64, page: u64) -> Option<u64> {
        if cr3 < 4096 {
            return None;
        }
        self.looks = self.looks.checked_sub(LEVELS)?;
        translate(&*self.memory, cr3, page)
    }

    /// The page of the space that has a virtual page of 4 KiB.
    pub(crate) fn host_page(&mut self, cr3: u64, page: u64) -> Option<u64> {
        Some(self.translate(cr3, page)? / self.each)
    }

    /// The virtual page where a page of the space is mapped, and is known to be. Tables are looked
    /// at again if it is not, as far as looks were saved.
    pub(crate) fn guest_page(&mut self, cr3: u64, page: u64) -> Option<u64> {
        if self.each > 1 || cr3 < 4096 {
            return None; // a large page has many
        }
        let found = self.known.iter().position(|(of, _)| of.is_of(cr3));
        let told = found.and_then(|at| self.known[at].0.page(page));
        if let Some(told) = told
            && self.translate(cr3, told) == Some(page)
        {
            return Some(told);
        }
        let allowed = self.saved.min(self.looks.saturating_sub(LOOKS_KEPT));
        let least = found.map_or(0, |at| self.known[at].1);
        if allowed <= least {
            return None;
        }
        match found {
            Some(at) => drop(self.known.remove(at)),
            None if self.known.len() == REMEMBERED => drop(self.known.remove(0)),
            None => {}
        }
        let mut left = allowed;
        let of = Reverse::of(&*self.memory, cr3, &mut left);
        let took = allowed - left;
        (self.looks, self.saved) = (self.looks - took, self.saved - took);
        let told = of.page(page);
        self.known.push((of, took));
        told
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const CR3: u64 = 0x1000;

    /// Tables in pages 1 to 4, by which virtual page 5 is at a page that changes.
    struct Changing(Arc<AtomicU64>);

    impl GuestMemory for Changing {
        fn pages(&self) -> u64 {
            1024
        }

        fn read(&self, page: u64, from: usize, words: &mut [u64]) -> bool {
            for (at, word) in words.iter_mut().enumerate() {
                *word = match (page, from + at) {
                    (1..=3, 0) => (page + 1) << 12 | 7,
                    (4, 5) => self.0.load(Ordering::Relaxed) << 12 | 7,
                    _ => 0,
                };
            }
            true
        }
    }

    #[test]
    fn tables_that_changed_are_looked_at_again() {
        let at = Arc::new(AtomicU64::new(9));
        let mut guest = Guest::new(SpaceId(3), Box::new(Changing(at.clone())), 1);
        assert_eq!(guest.guest_page(CR3, 9), None, "no event has begun");
        guest.begin();
        assert_eq!(guest.guest_page(CR3, 9), Some(5));
        assert_eq!(
            guest.guest_page(CR3 | 1, 9),
            Some(5),
            "flags are no part of it"
        );
        at.store(700, Ordering::Relaxed);
        assert_eq!(guest.host_page(CR3, 5), Some(700));
        assert_eq!(guest.guest_page(CR3, 9), None);
        assert_eq!(guest.guest_page(CR3, 700), Some(5));
        assert_eq!(guest.guest_page(0, 700), None);
        (0..9).for_each(|other| _ = guest.guest_page(CR3 + (other << 12), 700));
        assert_eq!(guest.known.len(), REMEMBERED);
    }

    /// Also if each is of other tables, or of a page that is mapped nowhere.
    #[test]
    fn the_questions_of_an_event_have_a_bound_and_those_of_many_a_lower_one() {
        let mut guest = Guest::new(SpaceId(3), Box::new(Changing(Arc::default())), 1);
        guest.begin();
        (0..9000).for_each(|at| _ = guest.guest_page((at % 7) << 12, at));
        assert_eq!(guest.saved, 0);
        let answers = (0..5000).filter(|_| guest.host_page(CR3, 5).is_some());
        assert!(answers.count() >= (LOOKS_KEPT / LEVELS) as usize);
        assert_eq!(guest.host_page(CR3, 5), None);
        for _ in 0..100 {
            guest.begin();
            assert_eq!(guest.host_page(CR3, 5), Some(0));
            let before = guest.looks;
            (0..9000).for_each(|at| _ = guest.guest_page((at % 7) << 12, at));
            assert!(before - guest.looks <= LOOKS_SAVED, "{}", guest.looks);
        }
    }

    #[test]
    fn of_large_pages_one_has_many_of_a_program() {
        let at = Arc::new(AtomicU64::new(513));
        let mut guest = Guest::new(SpaceId(3), Box::new(Changing(at)), 512);
        guest.begin();
        assert_eq!(guest.host_page(CR3, 5), Some(1));
        assert_eq!(guest.guest_page(CR3, 1), None);
    }
}
