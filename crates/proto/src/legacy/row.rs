//! A row: what a successor cannot find out about one address space.
//!
//! ```text
//! words 0..32    fields (`word`), with the numbers of the descriptors twice
//! then           old places of moved mappings: which copy is true, then two copies
//! then           changes of managed ranges since their list was written
//! then           managed ranges, in the same way as the old places
//! ```
//! A row counts once its first word is written. A list is written to the copy that is not true, and
//! one store makes it true. The same word has the number of changes since then, so one store adds a
//! change, and a new list has none.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_sys::handover::NONE;
use undercroft_sys::mapping::SharedMemory;

use super::lock;
use super::{Cannot, Legacy, ROWS_WORD, inbox};

/// Address spaces at once: 64 GiB of sparse memory. Each row that is used takes 12 KiB of it, and
/// up to 16 more for changes of its ranges.
pub(super) const ROWS: usize = 1 << 14;

/// The same if the user's limits bound the address space of a process or the length of a file: 1
/// GiB.
pub(super) const ROWS_LIMITED: usize = 1 << 8;

/// Ranges of one list. A program that has more cannot be taken over.
const VACATED_MAX: usize = 96;
const REGIONS_MAX: usize = 1 << 17;

/// Changes of managed ranges until their list is written again: as many as it has ranges, so that
/// each change costs the same, but within these. The upper one bounds how long a successor takes
/// to read them, the lower one how often a short list is written.
const CHANGES: (usize, usize) = (64, 1024);

const FIELD_WORDS: usize = 32;
const fn list_words(most: usize) -> usize {
    1 + 2 * copy_words(most)
}
const fn copy_words(most: usize) -> usize {
    1 + 2 * most
}
const VACATED_AT: usize = FIELD_WORDS;
const CHANGES_AT: usize = VACATED_AT + list_words(VACATED_MAX);
const REGIONS_AT: usize = CHANGES_AT + 2 * CHANGES.1;
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
pub enum Number {
    /// The process id.
    Pid,
    /// The address of its beacon.
    Beacon,
    /// The address of its holding area.
    Holding,
    /// The start of the shim's private memory.
    PrivateStart,
    /// The end of that.
    PrivateEnd,
    /// The first half of the proof that its agent gave.
    ProofLow,
    /// The other half.
    ProofHigh,
    /// The number on the beacon of a fork child.
    Nonce,
    /// The thread that the number was given to.
    NonceThread,
    /// The only thread of a fork child; 0: unknown.
    Proven,
    /// The process id of its agent.
    Agent,
    /// The command of the group that is being evicted in the low half of the holding area, + 1 <<
    /// 32; 0: none was posted.
    Command,
    /// The same of the high half.
    CommandHigh,
    /// Pages that were not registered for a moment. The end is written last, and 0 before.
    ExposedStart,
    /// The end of those.
    ExposedEnd,
}

impl Number {
    /// Of guest memory: the page at which its host maps it.
    pub const VIEW: Number = Number::Holding;
    /// Of guest memory: the address space of its host.
    pub const HOST: Number = Number::Agent;
    /// Of a machine that was handed over: the first of its slots.
    pub const SLOT: Number = Number::Holding;
    const COUNT: usize = Number::ExposedEnd as usize + 1;
}

/// A flag of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// Its memory is managed.
    Managed = 1,
    /// The books of a fork child are its own.
    Corrected = 2,
    /// The process has exited, or called exec.
    Exited = 4,
    /// The process has announced itself: identity and agent are whole.
    Announced = 8,
    /// Its mappings cannot be read.
    Unreadable = 16,
    /// Missing pages that the books do not know are refused.
    Short = 32,
    /// Another process has its memory, and is no vfork child.
    Partners = 64,
    /// The memory of a virtual machine, which has a host in place of identity and agent.
    Guest = 128,
    /// The memory of a virtual machine that was handed over. It has a pidfd and a page map, and no
    /// agent.
    Handed = 256,
}

/// The descriptors of one address space, in this order. Each is named by what it is of.
#[expect(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fds {
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
pub struct Row(Arc<Mutex<Option<RowAt>>>);

/// Which row of which legacy.
type RowAt = (Arc<Legacy>, usize);

/// The contents of a row, read by a successor.
#[derive(Clone, Debug)]
pub struct Heir {
    /// The address space.
    pub space: SpaceId,
    /// That of which it is a fork child.
    pub parent: Option<SpaceId>,
    /// The first of its family.
    pub family: SpaceId,
    flags: u64,
    numbers: [u64; Number::COUNT],
    /// By [`Fds`]; -1: none.
    pub fds: [i32; FDS],
    /// Old places of moves.
    pub vacated: Vec<VirtRange>,
    /// Managed ranges.
    pub regions: Vec<VirtRange>,
}

impl Heir {
    /// Whether a flag is set.
    pub fn has(&self, flag: Flag) -> bool {
        self.flags & flag as u64 != 0
    }

    /// A number of it.
    pub fn number(&self, of: Number) -> u64 {
        self.numbers[of as usize]
    }

    /// The range that was not registered for a moment; empty: nothing.
    pub fn exposed(&self) -> VirtRange {
        let [start, end] = [Number::ExposedStart, Number::ExposedEnd].map(|of| self.number(of));
        VirtRange::new(VirtPage(start), VirtPage(end.max(start)))
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

/// Replaces a list by `ranges`, without changes since. False if they are too many; the old list
/// stays true then.
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

/// The managed ranges of row `at`.
fn read_regions(legacy: &Legacy, at: usize) -> Vec<VirtRange> {
    let mut regions = read_list(legacy, base(at) + REGIONS_AT, REGIONS_MAX);
    let noted = (legacy.load(base(at) + REGIONS_AT) >> 1) as usize;
    for change in 0..noted.min(CHANGES.1) {
        let word = base(at) + CHANGES_AT + 2 * change;
        let (start, end) = (legacy.load(word), legacy.load(word + 1));
        let range = VirtRange::new(VirtPage(start >> 1), VirtPage(end));
        if start & 1 != 0 {
            range.add_to(&mut regions);
        } else {
            range.cut_from(&mut regions);
        }
    }
    regions
}

/// The managed ranges of row `at` have changed.
/// * `range`: it has come (`is_managed`) or gone.
/// * `regions`: all of them now.
pub(super) fn note_change(
    legacy: &Legacy,
    at: usize,
    (range, is_managed): (VirtRange, bool),
    regions: &[VirtRange],
) {
    let state = legacy.word(base(at) + REGIONS_AT);
    let noted = state.load(Ordering::Relaxed);
    let change = (noted >> 1) as usize;
    if change >= regions.len().clamp(CHANGES.0, CHANGES.1) || regions.len() > REGIONS_MAX {
        return write_regions(legacy, at, regions);
    }
    let word = base(at) + CHANGES_AT + 2 * change;
    let start = range.start.0 << 1 | u64::from(is_managed);
    legacy.word(word).store(start, Ordering::Relaxed);
    legacy.word(word + 1).store(range.end.0, Ordering::Relaxed);
    state.store(noted + 2, Ordering::Release);
}

/// The managed ranges of row `at` are these from now on.
pub(super) fn write_regions(legacy: &Legacy, at: usize, regions: &[VirtRange]) {
    if !write_list(legacy, base(at) + REGIONS_AT, REGIONS_MAX, regions) {
        legacy.cannot(Cannot::Ranges);
    }
}

impl Legacy {
    /// A row for a new space, with its managed ranges. It counts once [`Row::commit`] is called.
    pub fn add(self: &Arc<Legacy>, space: SpaceId, regions: &[VirtRange]) -> Row {
        let at = {
            let mut rows = lock(&self.rows);
            let Some(at) = rows.free.pop().or_else(|| self.fresh_row()) else {
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

    /// A row that was never in use. Called with the rows locked.
    fn fresh_row(&self) -> Option<usize> {
        let at = self.load(ROWS_WORD) as usize;
        let is_there = at < self.row_count();
        is_there.then(|| {
            self.word(ROWS_WORD).store(at as u64 + 1, Ordering::Release);
            at
        })
    }

    /// Rows that the memory has room for.
    pub(super) fn row_count(&self) -> usize {
        (self.memory.len() / 8 - inbox::END_WORD) / ROW_WORDS
    }

    /// The rows in use. For a successor.
    pub fn heirs(self: &Arc<Legacy>) -> Vec<(Row, Heir)> {
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
            regions: read_regions(self, at),
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
    pub fn commit(&self, space: SpaceId, parent: Option<SpaceId>, family: SpaceId) {
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
    pub fn free(&self) {
        if let Some((legacy, at)) = lock(&self.0).take() {
            let word = legacy.word(base(at) + word::SPACE);
            word.store(0, Ordering::Release);
            let mut rows = lock(&legacy.rows);
            rows.of.retain(|_, of| *of != at);
            rows.free.push(at);
        }
    }

    /// Sets a flag.
    pub fn set(&self, flag: Flag) {
        self.with(|legacy, base| {
            let word = legacy.word(base + word::FLAGS);
            word.fetch_or(flag as u64, Ordering::Release);
        });
    }

    /// Writes a number.
    pub fn put(&self, of: Number, number: u64) {
        self.with(|legacy, base| {
            let word = legacy.word(base + word::NUMBERS + of as usize);
            word.store(number, Ordering::Release);
        });
    }

    /// Notes the number of a descriptor, or that there is none.
    pub fn put_fd(&self, of: Fds, fd: Option<BorrowedFd<'_>>) {
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
    pub fn put_next_fds(&self, fds: &[i32; FDS]) {
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

    /// Notes the range that is not registered for a moment; empty: nothing.
    pub fn put_exposed(&self, range: VirtRange) {
        self.put(Number::ExposedEnd, 0);
        self.put(Number::ExposedStart, range.start.0);
        self.put(Number::ExposedEnd, range.end.0);
    }

    /// The old places of moved mappings whose end is still to be reported.
    pub fn put_vacated(&self, vacated: &[VirtRange]) {
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
        assert!(heir.exposed().is_empty());
        row.put_exposed(pages(6, 8));
        assert_eq!(legacy.heirs()[0].1.exposed(), pages(6, 8));
        row.put_exposed(pages(6, 6));
        assert!(legacy.heirs()[0].1.exposed().is_empty());
        // The numbers of the next generation count once it has begun.
        row.put_next_fds(&[9; FDS]);
        assert_eq!(legacy.heirs()[0].1.fds[0], file.as_raw_fd());
        legacy.begin_generation();
        assert_eq!(legacy.heirs()[0].1.fds, [9; FDS]);
        row.free();
        assert!(legacy.heirs().is_empty());
        row.put(Number::Beacon, 1); // nothing happens
    }

    /// A list that is written whole for each change costs time in proportion to the mappings.
    #[test]
    fn changes_of_ranges_are_noted_one_by_one_and_read_back_in_order() {
        let legacy = Legacy::for_tests();
        let row = legacy.add(SpaceId(4), &[]);
        row.commit(SpaceId(4), None, SpaceId(4));
        let (mut regions, mut written, mut copy) = (Vec::new(), 0, 0);
        let mut now_and_then = 0;
        let mut change = |range: VirtRange, is_managed: bool| {
            let changed = if is_managed {
                range.add_to(&mut regions)
            } else {
                range.cut_from(&mut regions)
            };
            assert!(changed);
            legacy.region_changed(SpaceId(4), range, is_managed, &regions);
            let state = legacy.load(base(0) + REGIONS_AT);
            if state & 1 != copy {
                (copy, written) = (state & 1, written + regions.len());
            }
            now_and_then += 1;
            if now_and_then % 97 == 0 {
                assert_eq!(legacy.heirs()[0].1.regions, regions);
            }
        };
        for at in (0..6000).rev() {
            change(pages(8 * at, 8 * at + 6), true);
        }
        for at in 0..5900 {
            change(pages(8 * at + 2, 8 * at + 9), false);
        }
        assert_eq!(legacy.heirs()[0].1.regions, regions);
        assert!(
            written < 6 * 12_000,
            "{written} ranges written for 11,900 changes"
        );
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
        let rows: Vec<Row> = (0..ROWS_LIMITED)
            .map(|at| legacy.add(SpaceId(at as u32), &[]))
            .collect();
        assert_eq!(legacy.refusal(), None);
        legacy.add(SpaceId(ROWS_LIMITED as u32), &[]);
        assert!(legacy.refusal().is_some() && rows.len() == ROWS_LIMITED);
    }

    #[test]
    fn only_rows_that_were_used_are_read() {
        let memory = super::super::fresh(false).expect("memory");
        let legacy = Arc::new(Legacy::create(memory).expect("fresh memory"));
        let rows: Vec<Row> = (0..ROWS as u32)
            .step_by(ROWS / 16)
            .map(|at| legacy.add(SpaceId(at), &[pages(1, 2)]))
            .collect();
        for (at, row) in rows.iter().enumerate() {
            row.commit(SpaceId(at as u32), None, SpaceId(1));
        }
        rows[3].free();
        let memory = SharedMemory::from_fd(legacy.as_fd().try_clone_to_owned().expect("a copy"));
        let again = Arc::new(Legacy::open(memory.expect("the same memory")).expect("whole"));
        assert_eq!(again.heirs().len(), 15);
        assert_eq!(
            lock(&again.rows).free,
            [3],
            "and no row that was never used"
        );
        assert_eq!(again.row_count(), ROWS);
    }
}
