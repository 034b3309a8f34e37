//! Which slots of the file are in use, and in what order they are given out: slab by slab, so that
//! a batch is one write.
//!
//! The bitmaps live in the slot table's memory. The counts here are rebuilt from them. Callers hold
//! the tier's mutex.
//!
//! A tier that has twice the space of its slots in use, and 64 MiB more, takes no slab, but fills
//! the emptiest. If it has more than that because slots were freed, slabs are emptied.
//!
//! A slab is counted in the quota ([`Quota`]) and marked before it takes space. Its mark goes when
//! the space was given back, and then its count. So the marks never say less than there is.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::RESERVE_MAX;
use super::room::Quota;

/// Beyond its grant, a tier has this part of its slots in use before it takes another slab.
const DENSE: (u64, u64) = (7, 8);

/// A tier has at most this many times the space of its slots in use, and [`SLACK_SLABS`] more.
const SPREAD: u64 = 2;
/// Slabs that a tier may have beyond [`SPREAD`]: 64 MiB, if its pages are base pages.
const SLACK_SLABS: u64 = 64;

/// Where a tier has more space than that, its pages are gathered until it has this part of it.
const GATHERED: (u64, u64) = (3, 4);

/// While a tier has more space than its quota, it fills slabs of which this part of the slots is
/// free, the fullest first, so that others come free.
const WORTH_FILLING: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Takes no space: never written, or discarded.
    Clean,
    /// No slot in use, but space still allocated; listed in `dirty`.
    Dirty,
    /// Being filled.
    Current,
    /// Has slots in use (or had just now), and is not being filled.
    Used,
    /// As `Used`, but no slot is given out, because its pages are being stored elsewhere.
    Leaving,
    /// Empty, and in no list until its space is discarded.
    Discarding,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    state: State,
    live: u16,
}

/// Counts and lists over the bitmaps.
#[derive(Debug)]
pub(super) struct Slabs {
    /// All slabs up to the last that was given out.
    slabs: Vec<Slab>,
    /// Of the file.
    count: u32,
    /// Slots of one slab.
    slots: u32,
    /// Slabs behind `slabs` up to this one were counted and marked ahead, and have space.
    ahead: u32,
    /// The slab being filled, and the next slot to try.
    current: Option<(u32, u32)>,
    /// Empty slabs, oldest first. They are reused before clean ones, because their space is
    /// allocated already.
    dirty: VecDeque<u32>,
    clean: Vec<u32>,
    taken_slots: u64,
    occupied: u64,
}

/// The words of the slot table that say what is in use.
#[derive(Clone, Copy)]
pub(super) struct Bitmaps<'a> {
    /// Slots of one slab.
    pub(super) slab_slots: u32,
    /// A bit for each slot: it is in use.
    pub(super) slots: &'a [AtomicU64],
    /// A bit for each slab: it has space, or may have.
    pub(super) space: &'a [AtomicU64],
    pub(super) quota: Quota<'a>,
    /// Slabs beyond this many are used densely; 0 = none.
    pub(super) grant: u64,
}

/// Most slabs that a tier should have with this many slots in use.
///
/// * `slots`: of one slab.
pub(super) fn slabs_max(taken_slots: u64, slots: u32) -> u64 {
    (taken_slots * SPREAD).div_ceil(u64::from(slots)) + SLACK_SLABS
}

fn is_set(words: &[AtomicU64], at: u64) -> bool {
    words[at as usize / 64].load(Relaxed) >> (at % 64) & 1 == 1
}

fn set(words: &[AtomicU64], at: u64, to: bool) {
    let word = &words[at as usize / 64];
    let bit = 1 << (at % 64);
    let old = word.load(Relaxed);
    word.store(if to { old | bit } else { old & !bit }, Relaxed);
}

impl Bitmaps<'_> {
    pub(super) fn is_taken(&self, slot: u64) -> bool {
        is_set(self.slots, slot)
    }

    /// For slots whose use other words say better.
    pub(super) fn set_taken(&self, slot: u64, to: bool) {
        set(self.slots, slot, to);
    }

    fn slab_words(&self) -> usize {
        self.slab_slots as usize / 64
    }

    /// Counts up to `want` slabs. Returns how many; the caller marks them.
    fn take(&self, want: u32) -> u32 {
        self.quota.take(want)
    }

    fn mark(&self, slab: u32) {
        set(self.space, u64::from(slab), true);
    }

    /// The space of a slab was given back.
    fn give(&self, slab: u32) {
        set(self.space, u64::from(slab), false);
        self.quota.give(1);
    }

    /// The tier has more space than its quota.
    fn is_over(&self) -> bool {
        let counts = self.quota.counts();
        counts.held > counts.most
    }

    /// All slabs from this one on have no space.
    pub(super) fn end(&self) -> u32 {
        let last = self.space.iter().rposition(|word| word.load(Relaxed) != 0);
        last.map_or(0, |at| {
            let word = self.space[at].load(Relaxed);
            at as u32 * 64 + 64 - word.leading_zeros()
        })
    }

    fn live(&self, slab: u32) -> u32 {
        let from = slab as usize * self.slab_words();
        let words = &self.slots[from..from + self.slab_words()];
        words
            .iter()
            .map(|word| word.load(Relaxed).count_ones())
            .sum()
    }

    /// The first free slot of `slab` at or after `index`.
    fn first_free(&self, slab: u32, index: u32) -> Option<u32> {
        let mut index = index;
        while index < self.slab_slots {
            let word =
                self.slots[slab as usize * self.slab_words() + index as usize / 64].load(Relaxed);
            let skipped = (word >> (index % 64)).trailing_ones();
            if index % 64 + skipped < 64 {
                return Some(index + skipped);
            }
            index = (index / 64 + 1) * 64;
        }
        None
    }
}

impl Slabs {
    /// Counts from the bitmaps of a file of `count` slabs, and corrects the quota's count.
    pub(super) fn from_bitmaps(bitmaps: Bitmaps<'_>, count: u32) -> Slabs {
        let mut this = Slabs {
            slabs: Vec::with_capacity(count as usize),
            count,
            slots: bitmaps.slab_slots,
            ahead: bitmaps.end(),
            current: None,
            dirty: VecDeque::with_capacity(count as usize),
            clean: Vec::with_capacity(count as usize),
            taken_slots: 0,
            occupied: 0,
        };
        for slab in 0..this.ahead {
            let has_space = is_set(bitmaps.space, u64::from(slab));
            let live = if has_space { bitmaps.live(slab) } else { 0 };
            let state = match (has_space, live) {
                (false, _) => State::Clean,
                (true, 0) => State::Dirty,
                (true, _) => State::Used,
            };
            match state {
                State::Clean => this.clean.push(slab),
                State::Dirty => this.dirty.push_back(slab),
                State::Used | State::Leaving | State::Current | State::Discarding => {}
            }
            this.occupied += u64::from(has_space);
            this.taken_slots += u64::from(live);
            this.slabs.push(Slab {
                state,
                live: live as u16,
            });
        }
        bitmaps.quota.correct(this.occupied as u32);
        this
    }

    /// Slots in use.
    pub(super) fn taken_slots(&self) -> u64 {
        self.taken_slots
    }

    /// Slabs whose space is allocated, or may be, without those taken ahead.
    pub(super) fn occupied(&self) -> u64 {
        self.occupied
    }

    /// Slabs that were taken before they are needed.
    pub(super) fn spare(&self) -> Range<u32> {
        self.slabs.len() as u32..self.ahead
    }

    /// The space of [`Slabs::spare`] was given back. Clean slabs at the end are as new ones again.
    /// Cost: O(clean slabs), if there are some at the end.
    pub(super) fn drop_spare(&mut self, bitmaps: Bitmaps<'_>) {
        self.spare().for_each(|slab| bitmaps.give(slab));
        let before = self.slabs.len();
        while self
            .slabs
            .pop_if(|slab| slab.state == State::Clean)
            .is_some()
        {}
        self.ahead = self.slabs.len() as u32;
        if self.slabs.len() < before {
            let end = self.ahead;
            self.clean.retain(|slab| *slab < end);
        }
    }

    /// Slabs that it may take until it has as many as it should. Negative: it has more.
    fn room(&self) -> i64 {
        slabs_max(self.taken_slots, self.slots) as i64
            - (self.occupied + self.spare().len() as u64) as i64
    }

    /// True if there is more space than there should be with the slots that are in use now.
    pub(super) fn has_excess(&self) -> bool {
        self.room() < 0
    }

    /// Slabs with used slots, and the one being filled.
    pub(super) fn in_use(&self) -> usize {
        self.occupied as usize - self.dirty.len()
    }

    /// Appends up to `want` slots to `slots`, ascending inside a slab; fewer when the quota is
    /// full. Cost: O(1) a slot while there are empty slabs, or while it may take new ones. After
    /// that a scan of the slab counts for each slab that is reused.
    pub(super) fn alloc(&mut self, bitmaps: Bitmaps<'_>, want: usize, slots: &mut Vec<u64>) {
        let most = u64::from(bitmaps.quota.counts().most) * u64::from(self.slots);
        let room = most.saturating_sub(self.taken_slots);
        for _ in 0..want.min(usize::try_from(room).unwrap_or(usize::MAX)) {
            let Some(slot) = self.next_slot(bitmaps) else {
                return;
            };
            set(bitmaps.slots, slot, true);
            self.slabs[(slot / u64::from(self.slots)) as usize].live += 1;
            self.taken_slots += 1;
            slots.push(slot);
        }
    }

    /// Frees a slot. Panics if it is free already: the caller's books are wrong.
    pub(super) fn free(&mut self, bitmaps: Bitmaps<'_>, slot: u64) {
        let known = slot < self.slabs.len() as u64 * u64::from(self.slots);
        assert!(
            known && bitmaps.is_taken(slot),
            "slot {slot} of the file tier is free already"
        );
        set(bitmaps.slots, slot, false);
        self.taken_slots -= 1;
        let number = (slot / u64::from(self.slots)) as u32;
        let slab = &mut self.slabs[number as usize];
        slab.live -= 1;
        if slab.live == 0 && matches!(slab.state, State::Used | State::Leaving) {
            slab.state = State::Dirty;
            self.dirty.push_back(number);
        }
    }

    /// If more than `keep` slabs are empty, or it has too much space and one is, takes the one that
    /// has been empty longest out of the lists, to be discarded.
    pub(super) fn take_surplus(&mut self, bitmaps: Bitmaps<'_>, keep: usize) -> Option<u32> {
        let too_much = bitmaps.is_over() || self.has_excess();
        let keep = if too_much { 0 } else { keep };
        let current = self.current.map(|(slab, _)| self.slabs[slab as usize].live);
        if keep == 0 && current == Some(0) {
            self.retire_current();
        }
        if self.dirty.len() <= keep {
            return None;
        }
        let slab = self.dirty.pop_front()?;
        self.slabs[slab as usize].state = State::Discarding;
        Some(slab)
    }

    /// The space of a slab from `take_surplus` was discarded.
    pub(super) fn discarded(&mut self, bitmaps: Bitmaps<'_>, slab: u32) {
        self.slabs[slab as usize].state = State::Clean;
        self.occupied -= 1;
        self.clean.push(slab);
        bitmaps.give(slab);
    }

    /// The slab could not be discarded, and keeps its space.
    pub(super) fn not_discarded(&mut self, slab: u32) {
        self.slabs[slab as usize].state = State::Dirty;
        self.dirty.push_back(slab);
    }

    /// If it has too much space although no slab is empty, chooses the emptiest slabs. Once their
    /// pages are elsewhere, it has three quarters of what it may. Returns them ascending.
    /// No slot of theirs is given out until [`Slabs::stay`]. Cost: O(slabs log slabs) then.
    pub(super) fn leave(&mut self) -> Vec<u32> {
        let mut chosen = Vec::new();
        if !self.has_excess() || !self.dirty.is_empty() {
            return chosen;
        }
        let mut used: Vec<(u16, u32)> = self.used(1).map(|(at, slab)| (slab.live, at)).collect();
        used.sort_unstable();
        let target = slabs_max(self.taken_slots, self.slots) * GATHERED.0 / GATHERED.1;
        let mut pages = 0;
        for (live, slab) in used {
            pages += u64::from(live);
            let more = pages.div_ceil(u64::from(self.slots));
            if self.occupied + more <= target + chosen.len() as u64 {
                break;
            }
            self.slabs[slab as usize].state = State::Leaving;
            chosen.push(slab);
        }
        chosen.sort_unstable();
        chosen
    }

    /// Slots of all slabs are given out again.
    pub(super) fn stay(&mut self) {
        let slabs = self.slabs.iter_mut();
        let leaving = slabs.filter(|slab| slab.state == State::Leaving);
        leaving.for_each(|slab| slab.state = State::Used);
    }

    fn next_slot(&mut self, bitmaps: Bitmaps<'_>) -> Option<u64> {
        loop {
            let (slab, index) = match self.current {
                Some(current) => current,
                None => (self.next_slab(bitmaps)?, 0),
            };
            match bitmaps.first_free(slab, index) {
                Some(free) => {
                    self.current = Some((slab, free + 1));
                    return Some(u64::from(slab) * u64::from(self.slots) + u64::from(free));
                }
                None => {
                    self.current = Some((slab, self.slots));
                    self.retire_current();
                }
            }
        }
    }

    fn retire_current(&mut self) {
        let Some((number, _)) = self.current.take() else {
            return;
        };
        let slab = &mut self.slabs[number as usize];
        if slab.live == 0 {
            slab.state = State::Dirty;
            self.dirty.push_back(number);
        } else {
            slab.state = State::Used;
        }
    }

    fn next_slab(&mut self, bitmaps: Bitmaps<'_>) -> Option<u32> {
        let used = if bitmaps.is_over() {
            self.fullest().or_else(|| self.emptiest())
        } else {
            None
        };
        let used = used.or_else(|| self.dirty.pop_front());
        let used = match used {
            None if self.is_sparse(bitmaps) => self.emptiest(),
            used => used,
        };
        let slab = used
            .or_else(|| self.clean_slab(bitmaps))
            .or_else(|| self.fresh_slab(bitmaps))
            .or_else(|| self.emptiest())?;
        let state = &mut self.slabs[slab as usize].state;
        self.occupied += u64::from(*state == State::Clean);
        *state = State::Current;
        self.current = Some((slab, 0));
        Some(slab)
    }

    /// Too much of its space is free for another slab: half of it and more, or, where it has more
    /// than its grant, an eighth.
    fn is_sparse(&self, bitmaps: Bitmaps<'_>) -> bool {
        let slots = self.occupied * u64::from(self.slots);
        let is_beyond = bitmaps.grant != 0 && self.occupied >= bitmaps.grant;
        let beyond = is_beyond && self.taken_slots * DENSE.1 < slots * DENSE.0;
        beyond || self.room() < 1
    }

    fn clean_slab(&mut self, bitmaps: Bitmaps<'_>) -> Option<u32> {
        if self.clean.is_empty() || bitmaps.take(1) == 0 {
            return None;
        }
        let slab = self.clean.pop()?;
        bitmaps.mark(slab);
        Some(slab)
    }

    /// A slab that was never used. If none was taken ahead, takes a quarter of the slabs there are,
    /// at most [`RESERVE_MAX`], as far as the quota and its bound go. So a file has few pieces.
    fn fresh_slab(&mut self, bitmaps: Bitmaps<'_>) -> Option<u32> {
        let next = self.slabs.len() as u32;
        if next == self.ahead {
            let room = u32::try_from(self.room()).unwrap_or(0).max(1);
            let most = (self.ahead / 4).clamp(1, RESERVE_MAX).min(room);
            let more = bitmaps.take(most.min(self.count - self.ahead));
            (next..next + more).for_each(|slab| bitmaps.mark(slab));
            self.ahead += more;
        }
        if next == self.ahead {
            return None;
        }
        self.slabs.push(Slab {
            state: State::Clean,
            live: 0,
        });
        Some(next)
    }

    fn emptiest(&self) -> Option<u32> {
        self.used(1)
            .min_by_key(|(_, slab)| slab.live)
            .map(|it| it.0)
    }

    fn fullest(&self) -> Option<u32> {
        let used = self.used(self.slots / WORTH_FILLING);
        used.max_by_key(|(_, slab)| slab.live).map(|it| it.0)
    }

    /// Slabs in use of which at least `free` slots are free.
    fn used(&self, free: u32) -> impl Iterator<Item = (u32, &Slab)> {
        let most = self.slots - free;
        let has = move |slab: &Slab| u32::from(slab.live) <= most;
        let slabs = (0..).zip(&self.slabs);
        slabs.filter(move |(_, slab)| slab.state == State::Used && has(slab))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_model::contract::Pages;

    const SLAB_SLOTS: u32 = crate::file::slab_slots(undercroft_base::PageSize::Base);

    /// The words of a slot table, for `count` slabs.
    struct Words {
        all: Vec<AtomicU64>,
        /// Where the bits of the slots begin.
        slots: usize,
    }

    impl Words {
        fn new(count: u32, most: u32) -> Words {
            let slots = 1 + count.div_ceil(64) as usize;
            let words = 0..slots + count as usize * SLAB_SLOTS as usize / 64;
            let this = Words {
                all: words.map(|_| AtomicU64::new(0)).collect(),
                slots,
            };
            this.bitmaps().quota.begin(most);
            this
        }

        fn bitmaps(&self) -> Bitmaps<'_> {
            Bitmaps {
                slab_slots: SLAB_SLOTS,
                quota: Quota(&self.all[0]),
                space: &self.all[1..self.slots],
                slots: &self.all[self.slots..],
                grant: 0,
            }
        }

        fn set_quota(&self, most: u32) {
            let held = u64::from(self.bitmaps().quota.counts().held);
            self.all[0].store(u64::from(most) << 32 | held, Relaxed);
        }

        fn live(&self) -> usize {
            let words = self.bitmaps().slots.iter();
            words
                .map(|word| word.load(Relaxed).count_ones() as usize)
                .sum()
        }

        fn marked(&self) -> u32 {
            let space = self.bitmaps().space.iter();
            space.map(|word| word.load(Relaxed).count_ones()).sum()
        }
    }

    #[test]
    fn slabs_batches_are_consecutive_then_reuse_the_emptiest() {
        let words = Words::new(3, 3);
        let bitmaps = words.bitmaps();
        let mut slabs = Slabs::from_bitmaps(bitmaps, 3);
        let mut slots = Vec::new();
        slabs.alloc(bitmaps, 300, &mut slots);
        assert_eq!(slots, (0..300).collect::<Vec<_>>());
        slabs.alloc(bitmaps, 1000, &mut slots);
        assert_eq!(slots, (0..768).collect::<Vec<_>>());
        for slot in [3, 4, 300, 301, 302, 700] {
            slabs.free(bitmaps, slot);
        }
        let mut again = Vec::new();
        slabs.alloc(bitmaps, 10, &mut again);
        assert_eq!(again, [300, 301, 302, 3, 4, 700]);
        assert_eq!(slabs.occupied(), 3);
    }

    #[test]
    fn slabs_random_use_never_gives_a_slot_twice_and_discards_all() {
        let seed = 21;
        println!("seed {seed}");
        let words = Words::new(16, 16);
        let bitmaps = words.bitmaps();
        let mut slabs = Slabs::from_bitmaps(bitmaps, 16);
        let mut random = Pages::new(seed);
        let mut live = Vec::new();
        for _ in 0..20_000 {
            let before = live.len();
            slabs.alloc(bitmaps, random.below(70) as usize, &mut live);
            assert!(live[before..].iter().all(|&slot| bitmaps.is_taken(slot)));
            let drop = random.below(72).min(live.len() as u64);
            for _ in 0..drop {
                let at = random.below(live.len() as u64) as usize;
                slabs.free(bitmaps, live.swap_remove(at));
            }
            if let Some(slab) = slabs.take_surplus(bitmaps, 2) {
                slabs.discarded(bitmaps, slab);
            }
            assert_eq!(words.live(), live.len());
            assert_eq!(slabs.taken_slots, live.len() as u64);
        }
        for slot in live.drain(..) {
            slabs.free(bitmaps, slot);
        }
        while let Some(slab) = slabs.take_surplus(bitmaps, 0) {
            slabs.discarded(bitmaps, slab);
        }
        slabs.drop_spare(bitmaps);
        assert_eq!((slabs.occupied(), words.marked()), (0, 0));
        assert_eq!(bitmaps.quota.counts().held, 0);
        slabs.alloc(bitmaps, 100_000, &mut live);
        assert_eq!(live.len(), 16 * 256);
    }

    /// The quota moves at random between any two steps, and managers die. After each change no
    /// slab takes space beyond it, or beyond what there was, and no slot is given out beyond it.
    #[test]
    fn slabs_keep_to_a_quota_that_moves() {
        for seed in 0..40 {
            println!("seed {seed}");
            let words = Words::new(48, 20);
            let bitmaps = words.bitmaps();
            let mut slabs = Slabs::from_bitmaps(bitmaps, 48);
            let (mut random, mut live) = (Pages::new(seed), Vec::new());
            // What there may be at most, by the last answer.
            let mut bound = 20;
            for _ in 0..3000 {
                match random.below(24) {
                    0 => {
                        let most = 1 + random.below(48) as u32;
                        words.set_quota(most);
                        bound = most.max(bitmaps.quota.counts().held);
                    }
                    1 => slabs = Slabs::from_bitmaps(bitmaps, 48), // another manager
                    2..5 => {
                        if let Some(slab) = slabs.take_surplus(bitmaps, random.below(4) as usize) {
                            match random.below(5) {
                                0 => slabs.not_discarded(slab),
                                _ => slabs.discarded(bitmaps, slab),
                            }
                        }
                    }
                    5 => slabs.drop_spare(bitmaps),
                    6..16 => {
                        let (most, before) = (bitmaps.quota.counts().most, live.len());
                        slabs.alloc(bitmaps, random.below(300) as usize, &mut live);
                        let most = before.max(most as usize * SLAB_SLOTS as usize);
                        assert!(live.len() <= most, "{} slots of {most}", live.len());
                    }
                    _ => {
                        for _ in 0..random.below(280).min(live.len() as u64) {
                            let at = random.below(live.len() as u64) as usize;
                            slabs.free(bitmaps, live.swap_remove(at));
                        }
                    }
                }
                let counts = bitmaps.quota.counts();
                assert!(counts.held <= bound, "{counts:?} of {bound}");
                assert_eq!(words.marked(), counts.held);
                assert_eq!(
                    (words.live(), slabs.taken_slots),
                    (live.len(), live.len() as u64)
                );
                let (spare, occupied) = (slabs.spare().len() as u64, slabs.occupied());
                assert_eq!(u64::from(counts.held), occupied + spare);
                bound = counts.held.max(counts.most);
            }
        }
    }

    /// Course of a random workload: most slabs beside the bound, and writes for each batch.
    struct Course {
        worst: i64,
        batches: u64,
        writes: u64,
    }

    /// Batches of 256 pages replace as many of `pages` at random.
    fn replaced_at_random(seed: u64, pages: usize) -> Course {
        let words = Words::new(2000, 2000);
        let bitmaps = words.bitmaps();
        let mut slabs = Slabs::from_bitmaps(bitmaps, 2000);
        let (mut random, mut live) = (Pages::new(seed), Vec::new());
        let mut course = Course {
            worst: i64::MIN,
            batches: 0,
            writes: 0,
        };
        for _ in 0..8000 {
            let before = live.len();
            slabs.alloc(bitmaps, 256, &mut live);
            assert_eq!(live.len(), before + 256, "a batch was refused");
            let batch = &live[before..];
            let breaks = batch.windows(2).filter(|of| of[0] + 1 != of[1]).count();
            course.batches += 1;
            course.writes += 1 + breaks as u64;
            course.worst = course.worst.max(-slabs.room());
            while live.len() > pages {
                let at = random.below(live.len() as u64) as usize;
                slabs.free(bitmaps, live.swap_remove(at));
            }
            while let Some(slab) = slabs.take_surplus(bitmaps, slabs.in_use().max(16)) {
                slabs.discarded(bitmaps, slab);
            }
            if slabs.has_excess() {
                slabs.drop_spare(bitmaps);
            }
            assert_eq!(words.live(), live.len());
        }
        course
    }

    /// A program that replaces its pages at random has at most twice their space and 64 MiB more,
    /// and still writes many pages at a time.
    #[test]
    fn slabs_of_pages_replaced_at_random_stay_within_their_bound() {
        for pages in [10 << 8, 72 << 8, 300 << 8] {
            let course = replaced_at_random(11, pages);
            let writes = course.writes as f64 / course.batches as f64;
            println!(
                "{} MiB: {writes:.1} writes for 256 pages, {} slabs beyond the bound",
                pages >> 8,
                course.worst
            );
            assert!(course.worst <= 1, "{} slabs", course.worst);
            assert!(writes < 64.0, "{writes} writes for 256 pages");
        }
    }

    /// Beyond the grant it takes no slab while an eighth of its slots is free.
    #[test]
    fn slabs_beyond_the_grant_are_used_densely() {
        let words = Words::new(60, 60);
        let bitmaps = Bitmaps {
            grant: 10,
            ..words.bitmaps()
        };
        let mut slabs = Slabs::from_bitmaps(bitmaps, 60);
        let (mut random, mut live) = (Pages::new(9), Vec::new());
        slabs.alloc(bitmaps, 20 * 256, &mut live);
        for _ in 0..20_000 {
            let at = random.below(live.len() as u64) as usize;
            slabs.free(bitmaps, live.swap_remove(at));
            slabs.alloc(bitmaps, 1, &mut live);
            assert!(slabs.occupied() <= 23, "{} slabs", slabs.occupied());
        }
        // Within its grant it writes one slab after the other.
        let words = Words::new(60, 60);
        let bitmaps = Bitmaps {
            grant: 10,
            ..words.bitmaps()
        };
        let (mut slabs, mut live) = (Slabs::from_bitmaps(bitmaps, 60), Vec::new());
        slabs.alloc(bitmaps, 256, &mut live);
        live.iter()
            .step_by(2)
            .for_each(|slot| slabs.free(bitmaps, *slot));
        live.clear();
        slabs.alloc(bitmaps, 100, &mut live);
        assert_eq!(live, (256..356).collect::<Vec<_>>());
    }

    /// Half of every slab is free, and the quota is half of what there is: with use, whole slabs
    /// come free until it is kept.
    #[test]
    fn slabs_come_free_with_use_while_the_quota_is_exceeded() {
        let words = Words::new(40, 40);
        let bitmaps = words.bitmaps();
        let mut slabs = Slabs::from_bitmaps(bitmaps, 40);
        let mut all = Vec::new();
        slabs.alloc(bitmaps, 40 * 256, &mut all);
        let mut live: Vec<u64> = all.into_iter().filter(|slot| slot % 2 == 0).collect();
        (0..40 * 256)
            .filter(|slot| slot % 2 == 1)
            .for_each(|slot| slabs.free(bitmaps, slot));
        words.set_quota(24);
        let (mut random, mut given) = (Pages::new(8), 0);
        while bitmaps.is_over() {
            let at = random.below(live.len() as u64) as usize;
            slabs.free(bitmaps, live.swap_remove(at));
            slabs.alloc(bitmaps, 1, &mut live);
            given += 1;
            while let Some(slab) = slabs.take_surplus(bitmaps, 16) {
                slabs.discarded(bitmaps, slab);
            }
            assert!(given < 100_000, "it stays at {:?}", bitmaps.quota.counts());
        }
        assert_eq!(live.len(), 20 * 256);
        println!("{given} pages changed places");
    }
}
