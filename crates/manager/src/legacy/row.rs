//! One row: what a successor cannot find out about one address space.
//!
//! ```text
//! words 0..32    fields (`word`), with the numbers of the descriptors twice
//! then           old places of moved mappings: which copy is true, then two copies
//! then           managed ranges, in the same way
//! ```
//! A row counts once its first word is written. A list is written to the copy that is not true, and
//! one store makes it true.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_sys::handover::NONE;
use undercroft_sys::mapping::SharedMemory;

use super::{Cannot, Legacy, inbox};
use crate::sync::lock;

/// Address spaces at once.
pub(super) const ROWS: usize = 1024;

/// Ranges of one list. A program that has more cannot be taken over.
const VACATED_MAX: usize = 96;
const REGIONS_MAX: usize = 4096;

const FIELD_WORDS: usize = 32;
const fn list_words(most: usize) -> usize {
    1 + 2 * copy_words(most)
}
const fn copy_words(most: usize) -> usize {
    1 + 2 * most
}
const VACATED_AT: usize = FIELD_WORDS;
const REGIONS_AT: usize = VACATED_AT + list_words(VACATED_MAX);
pub(super) const ROW_WORDS: usize = (REGIONS_AT + list_words(REGIONS_MAX)).next_multiple_of(512);

/// The fields of a row.
mod word {
    /// 0: free. Else the space's number + 1.
    pub(super) const SPACE: usize = 0;
    /// The parent's number + 1, or 0; in the upper half the family's.
    pub(super) const PARENT: usize = 1;
    pub(super) const FLAGS: usize = 2;
    /// Numbers and addresses, in the order of `Number`.
    pub(super) const NUMBERS: usize = 3;
    /// Numbers of descriptors, two in a word, in the order of `Fds`; then the same again.
    pub(super) const FDS: usize = 18;
}

/// Descriptors of a row, and words for them.
const FDS: usize = 11;
const FD_WORDS: usize = FDS.div_ceil(2);

const _: () = assert!(word::NUMBERS + Number::COUNT <= word::FDS);
const _: () = assert!(word::FDS + 2 * FD_WORDS <= FIELD_WORDS);
const _: () = assert!(FDS <= undercroft_sys::handover::ASK_MAX);

/// A number of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Pid,
    Beacon,
    Holding,
    PrivateStart,
    PrivateEnd,
    ProofLow,
    ProofHigh,
    /// The number on the beacon of a fork child.
    Nonce,
    /// The thread that the number was given to.
    NonceThread,
    /// The only thread of a fork child; 0: unknown.
    Proven,
    Agent,
    Filters,
    /// The command of the group that is being evicted, + 1 << 32; 0: none was posted.
    Command,
}

impl Number {
    const COUNT: usize = Number::Command as usize + 1;
}

/// A flag of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    Managed = 1,
    /// The books of a fork child are its own.
    Corrected = 2,
    Exited = 4,
    /// It has announced itself: identity and agent are whole.
    Announced = 8,
    /// Its mappings cannot be read.
    Unreadable = 16,
}

/// The descriptors of one address space, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fds {
    Uffd,
    HoldingUffd,
    Pidfd,
    CommandPage,
    Pagemap,
    Maps,
    Memory,
    Tasks,
    AgentPidfd,
    AgentStatus,
    /// The socket of a handshake whose last answer is not sent.
    Greeting,
}

/// The row of one address space. Does nothing where there is none: in tests, or if there are too
/// many spaces.
#[derive(Clone, Default)]
pub(crate) struct Row(Arc<Mutex<Option<Place>>>);

/// Which row of which legacy.
type Place = (Arc<Legacy>, usize);

/// What a row says, read by a successor.
#[derive(Clone, Debug)]
pub(crate) struct Heir {
    pub space: SpaceId,
    pub parent: Option<SpaceId>,
    pub family: SpaceId,
    flags: u64,
    numbers: [u64; Number::COUNT],
    pub fds: [i32; FDS],
    pub vacated: Vec<VirtRange>,
    pub regions: Vec<VirtRange>,
}

impl Heir {
    pub(crate) fn has(&self, flag: Flag) -> bool {
        self.flags & flag as u64 != 0
    }

    pub(crate) fn number(&self, of: Number) -> u64 {
        self.numbers[of as usize]
    }
}

fn base(at: usize) -> usize {
    inbox::END_WORD + at * ROW_WORDS
}

/// The space of row `at`, if it is in use.
pub(super) fn space_at(memory: &SharedMemory, at: usize) -> Option<SpaceId> {
    let word = memory.words()[base(at) + word::SPACE].load(Ordering::Acquire);
    (word != 0).then(|| SpaceId(word as u32 - 1))
}

/// Replaces a list by `ranges`. False if they are too many; the old list stays true then.
fn write_list(legacy: &Legacy, at: usize, most: usize, ranges: &[VirtRange]) -> bool {
    if ranges.len() > most {
        return false;
    }
    let next = 1 - (legacy.load(at) & 1);
    let copy = at + 1 + next as usize * copy_words(most);
    for (place, range) in ranges.iter().enumerate() {
        let start = copy + 1 + 2 * place;
        legacy.word(start).store(range.start.0, Ordering::Relaxed);
        legacy.word(start + 1).store(range.end.0, Ordering::Relaxed);
    }
    legacy
        .word(copy)
        .store(ranges.len() as u64, Ordering::Relaxed);
    legacy.word(at).store(next, Ordering::Release);
    true
}

fn read_list(legacy: &Legacy, at: usize, most: usize) -> Vec<VirtRange> {
    let copy = at + 1 + (legacy.load(at) & 1) as usize * copy_words(most);
    let count = (legacy.load(copy) as usize).min(most);
    let range = |place: usize| {
        let start = copy + 1 + 2 * place;
        let page = |at: usize| VirtPage(legacy.load(at));
        VirtRange::new(page(start), page(start + 1))
    };
    (0..count).map(range).collect()
}

/// The managed ranges of row `at` have changed.
pub(super) fn write_regions(legacy: &Legacy, at: usize, regions: &[VirtRange]) {
    if !write_list(legacy, base(at) + REGIONS_AT, REGIONS_MAX, regions) {
        legacy.cannot(Cannot::Ranges);
    }
}

impl Legacy {
    /// A row for a new space, with its managed ranges. It counts once [`Row::commit`] is called.
    pub(crate) fn add(self: &Arc<Legacy>, space: SpaceId, regions: &[VirtRange]) -> Row {
        let at = {
            let mut rows = lock(&self.rows);
            let Some(at) = rows.free.pop() else {
                self.cannot(Cannot::Spaces);
                return Row::default();
            };
            for word in 0..FIELD_WORDS {
                self.word(base(at) + word).store(0, Ordering::Relaxed);
            }
            rows.of.insert(space, at);
            at
        };
        write_list(self, base(at) + VACATED_AT, VACATED_MAX, &[]);
        write_regions(self, at, regions);
        let row = Row(Arc::new(Mutex::new(Some((self.clone(), at)))));
        for bank in 0..2 {
            row.write_fds(bank, &[NONE; FDS]);
        }
        row
    }

    /// The rows in use. For a successor.
    pub(crate) fn heirs(self: &Arc<Legacy>) -> Vec<(Row, Heir)> {
        let of: Vec<(SpaceId, usize)> = {
            let rows = lock(&self.rows);
            rows.of.iter().map(|(space, at)| (*space, *at)).collect()
        };
        let mut heirs: Vec<_> = of
            .into_iter()
            .map(|(space, at)| {
                let row = Row(Arc::new(Mutex::new(Some((self.clone(), at)))));
                (row, self.heir(space, at))
            })
            .collect();
        heirs.sort_by_key(|(_, heir)| heir.space);
        heirs
    }

    fn heir(&self, space: SpaceId, at: usize) -> Heir {
        let base = base(at);
        let field = |word: usize| self.load(base + word);
        let parents = field(word::PARENT);
        let bank = (self.generation() & 1) as usize;
        let fd = |of: usize| {
            let word = field(word::FDS + bank * FD_WORDS + of / 2);
            (word >> (32 * (of % 2))) as u32 as i32
        };
        Heir {
            space,
            parent: (parents as u32).checked_sub(1).map(SpaceId),
            family: SpaceId((parents >> 32) as u32),
            flags: field(word::FLAGS),
            numbers: std::array::from_fn(|of| field(word::NUMBERS + of)),
            fds: std::array::from_fn(fd),
            vacated: read_list(self, base + VACATED_AT, VACATED_MAX),
            regions: read_list(self, base + REGIONS_AT, REGIONS_MAX),
        }
    }
}

impl Row {
    fn with(&self, act: impl FnOnce(&Legacy, usize)) {
        if let Some((legacy, at)) = &*lock(&self.0) {
            act(legacy, base(*at));
        }
    }

    /// The row counts from now on.
    pub(crate) fn commit(&self, space: SpaceId, parent: Option<SpaceId>, family: SpaceId) {
        self.with(|legacy, base| {
            let parents = u64::from(parent.map_or(0, |of| of.0 + 1)) | u64::from(family.0) << 32;
            let parent = legacy.word(base + word::PARENT);
            parent.store(parents, Ordering::Relaxed);
            let space_word = legacy.word(base + word::SPACE);
            space_word.store(u64::from(space.0) + 1, Ordering::Release);
        });
    }

    /// The address space is gone. Call it before its descriptors are closed: their numbers may
    /// become those of others.
    pub(crate) fn free(&self) {
        if let Some((legacy, at)) = lock(&self.0).take() {
            let word = legacy.word(base(at) + word::SPACE);
            word.store(0, Ordering::Release);
            let mut rows = lock(&legacy.rows);
            rows.of.retain(|_, of| *of != at);
            rows.free.push(at);
        }
    }

    pub(crate) fn set(&self, flag: Flag) {
        self.with(|legacy, base| {
            let word = legacy.word(base + word::FLAGS);
            word.fetch_or(flag as u64, Ordering::Release);
        });
    }

    pub(crate) fn put(&self, of: Number, number: u64) {
        self.with(|legacy, base| {
            let word = legacy.word(base + word::NUMBERS + of as usize);
            word.store(number, Ordering::Release);
        });
    }

    /// Notes the number of a descriptor, or that there is none.
    pub(crate) fn put_fd(&self, of: Fds, fd: Option<BorrowedFd<'_>>) {
        let number = fd.map_or(NONE, |fd| fd.as_raw_fd()) as u32;
        self.with(|legacy, base| {
            let bank = (legacy.generation() & 1) as usize;
            let at = of as usize;
            let word = legacy.word(base + word::FDS + bank * FD_WORDS + at / 2);
            let shift = 32 * (at % 2);
            let other = word.load(Ordering::Relaxed) & !(0xffff_ffff << shift);
            word.store(other | u64::from(number) << shift, Ordering::Release);
        });
    }

    /// Notes all numbers of the generation after this one.
    pub(crate) fn put_next_fds(&self, fds: &[i32; FDS]) {
        let mut bank = 0;
        self.with(|legacy, _| bank = 1 - (legacy.generation() & 1) as usize);
        self.write_fds(bank, fds);
    }

    fn write_fds(&self, bank: usize, fds: &[i32; FDS]) {
        self.with(|legacy, base| {
            for (at, pair) in fds.chunks(2).enumerate() {
                let number = |of: usize| u64::from(pair.get(of).copied().unwrap_or(NONE) as u32);
                let word = legacy.word(base + word::FDS + bank * FD_WORDS + at);
                word.store(number(0) | number(1) << 32, Ordering::Release);
            }
        });
    }

    /// The old places of moved mappings whose end is still to be reported.
    pub(crate) fn put_vacated(&self, vacated: &[VirtRange]) {
        self.with(|legacy, base| {
            if !write_list(legacy, base + VACATED_AT, VACATED_MAX, vacated) {
                legacy.cannot(Cannot::Ranges);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn a_row_is_read_back_once_it_is_committed() {
        let legacy = Legacy::for_tests();
        let row = legacy.add(SpaceId(4), &[pages(1, 3)]);
        let file = std::fs::File::open("/dev/null").expect("a file");
        row.put(Number::Beacon, 77);
        row.put_fd(Fds::Greeting, Some(file.as_fd()));
        row.put_fd(Fds::Uffd, Some(file.as_fd()));
        assert_eq!(
            space_at(&legacy.memory, lock(&legacy.rows).of[&SpaceId(4)]),
            None
        );
        row.commit(SpaceId(4), Some(SpaceId(0)), SpaceId(2));
        row.set(Flag::Managed);
        legacy.regions_changed(SpaceId(4), &[pages(1, 2), pages(5, 9)]);
        row.put_vacated(&[pages(3, 4)]);
        let [(_, heir)] = &legacy.heirs()[..] else {
            panic!("one row")
        };
        assert_eq!(
            (heir.space, heir.parent, heir.family),
            (SpaceId(4), Some(SpaceId(0)), SpaceId(2))
        );
        assert!(heir.has(Flag::Managed) && !heir.has(Flag::Exited));
        assert_eq!(heir.number(Number::Beacon), 77);
        assert_eq!(heir.fds[Fds::Uffd as usize], file.as_raw_fd());
        assert_eq!(heir.fds[Fds::Greeting as usize], file.as_raw_fd());
        assert_eq!(heir.fds[Fds::Maps as usize], NONE);
        assert_eq!(heir.regions, [pages(1, 2), pages(5, 9)]);
        assert_eq!(heir.vacated, [pages(3, 4)]);
        // The numbers of the next generation count once it has begun.
        row.put_next_fds(&[9; FDS]);
        assert_eq!(legacy.heirs()[0].1.fds[0], file.as_raw_fd());
        legacy.begin_generation();
        assert_eq!(legacy.heirs()[0].1.fds, [9; FDS]);
        row.free();
        assert!(legacy.heirs().is_empty());
        row.put(Number::Beacon, 1); // nothing happens
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let legacy = Legacy::for_tests();
        let row = legacy.add(SpaceId(1), &[]);
        row.commit(SpaceId(1), None, SpaceId(1));
        let many: Vec<VirtRange> = (0..=REGIONS_MAX as u64)
            .map(|at| pages(2 * at, 2 * at + 1))
            .collect();
        legacy.regions_changed(SpaceId(1), &many[1..]);
        assert_eq!(legacy.refusal(), None);
        legacy.regions_changed(SpaceId(1), &many);
        assert!(legacy.refusal().is_some());
        let legacy = Legacy::for_tests();
        let rows: Vec<Row> = (0..ROWS)
            .map(|at| legacy.add(SpaceId(at as u32), &[]))
            .collect();
        assert_eq!(legacy.refusal(), None);
        legacy.add(SpaceId(ROWS as u32), &[]);
        assert!(legacy.refusal().is_some() && rows.len() == ROWS);
    }
}
