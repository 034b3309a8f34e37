//! A manager's legacy to its successor, besides ledger and tiers: which process has which space
//! and which descriptors (`row.rs`), its managed ranges, and the layout events that were read and
//! not applied (`inbox.rs`). A memfd that the keeper makes.
//!
//! ```text
//! page 0        header
//! page 1..      inbox: blocks of messages
//! then          rows, one for each address space
//! ```
//! Descriptors are numbers in the table of the manager that wrote them. A successor gets them under
//! other numbers, and has to write those down while it may die itself. So each row has two places
//! for its numbers. The lowest bit of the generation in the header says which of them is true: one
//! store makes the successor's numbers true, and its holder the one to ask.

mod inbox;
mod row;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use undercroft_base::{BASE_PAGE_BYTES, Nanos, SpaceId, VirtPage, VirtRange};
use undercroft_sys::mapping::SharedMemory;

use crate::report::TakenOver;
pub use inbox::{EventInbox, HeldEvent};
pub use row::{Fds, Flag, Heir, Number, Row};

/// Locks `mutex`, also after a panic of its last holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fault threads at most.
const THREADS_MAX: usize = 8;

const MAGIC: u64 = u64::from_le_bytes(*b"uclegacy");
/// Of this layout. A successor reads no other.
pub const VERSION: u64 = 7;

const MAGIC_WORD: usize = 0;
const VERSION_WORD: usize = 1;
const GENERATION_WORD: usize = 2;
/// Why no successor can take over: a set of [`Cannot`].
const CANNOT_WORD: usize = 3;
/// 1 once the manager of this generation has served a fault.
const SERVED_WORD: usize = 4;
/// 1 while the keeper replaces the manager.
const UPGRADES_WORD: usize = 5;
/// Rows that were ever in use: the first ones.
const ROWS_WORD: usize = 6;
/// The page that each fault thread serves; 0: none.
const SERVING_WORD: usize = 8;

/// For each kind of request: where the last one is, and its length. 0: none.
const ASKED_WORD: usize = 16;
/// Their texts, in two places each: the one that is not true is written.
const TEXT_WORD: usize = 32;
const TEXT_WORDS: usize = 16;
/// Kinds of requests.
pub const ASKS: usize = 12;

/// Takeovers so far, as the keeper has them: [`TakenOver`], a word each.
const TAKEN_WORD: usize = TEXT_WORD + ASKS * 2 * TEXT_WORDS;

const PAGE_WORDS: usize = BASE_PAGE_BYTES / 8;
const HEADER_WORDS: usize = PAGE_WORDS;

const _: () = assert!(SERVING_WORD + THREADS_MAX <= ASKED_WORD);
const _: () = assert!(ASKED_WORD + ASKS <= TEXT_WORD);
const _: () = assert!(TAKEN_WORD + 4 <= HEADER_WORDS);

/// Why the legacy of a dead manager cannot be used. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum LegacyError {
    /// Its length, in bytes.
    #[error("the table of processes has {0} bytes: it was cut off")]
    TooShort(usize),
    /// Its magic number is another.
    #[error("not a table of processes: byte 0 is not its magic number")]
    NotOne,
    /// Its version.
    #[error("the table of processes is of version {0}, and only version {VERSION} can be read")]
    Version(u64),
}

/// Why what is in the legacy is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cannot {
    /// More address spaces than rows.
    Spaces = 1,
    /// More layout events held back than there is room for.
    Events = 2,
    /// More managed ranges in one space, or old places of moves, than its row has room for.
    Ranges = 4,
    /// Tiers have come or gone since the start.
    Tiers = 8,
}

impl Cannot {
    const ALL: [(Cannot, &'static str); 4] = [
        (Cannot::Spaces, "it has too many processes"),
        (Cannot::Events, "too many layout events waited"),
        (Cannot::Ranges, "it has too many mappings"),
        (
            Cannot::Tiers,
            "tiers were added or removed, and it knows those of the start",
        ),
    ];
}

/// The memory that survives, and what of it is free.
pub struct Legacy {
    memory: Arc<SharedMemory>,
    rows: Mutex<Rows>,
    /// Blocks of the inbox that no thread has.
    blocks: Mutex<Vec<usize>>,
    reads: AtomicU64,
}

#[derive(Default)]
struct Rows {
    of: HashMap<SpaceId, usize>,
    /// Rows that were in use.
    free: Vec<usize>,
}

impl Legacy {
    /// Bytes of shared memory for `rows` rows; sparse, so only what is used takes memory.
    fn bytes(rows: usize) -> usize {
        (inbox::END_WORD + rows * row::ROW_WORDS) * 8
    }

    /// Lays an empty one out over fresh memory, all zero.
    pub fn create(memory: SharedMemory) -> Result<Legacy, LegacyError> {
        let legacy = Legacy::over(memory)?;
        legacy.word(VERSION_WORD).store(VERSION, Ordering::Relaxed);
        legacy.word(MAGIC_WORD).store(MAGIC, Ordering::Release);
        Ok(legacy)
    }

    /// Opens the one that a dead manager left. Checks its header. Nothing is changed.
    pub fn open(memory: SharedMemory) -> Result<Legacy, LegacyError> {
        let legacy = Legacy::over(memory)?;
        if legacy.load(MAGIC_WORD) != MAGIC {
            return Err(LegacyError::NotOne);
        }
        match legacy.load(VERSION_WORD) {
            VERSION => {}
            other => return Err(LegacyError::Version(other)),
        }
        {
            let mut rows = lock(&legacy.rows);
            let used = (legacy.load(ROWS_WORD) as usize).min(legacy.row_count());
            for at in (0..used).rev() {
                match row::space_at(&legacy.memory, at) {
                    Some(space) => _ = rows.of.insert(space, at),
                    None => rows.free.push(at),
                }
            }
        }
        Ok(legacy)
    }

    fn over(memory: SharedMemory) -> Result<Legacy, LegacyError> {
        if memory.len() < Legacy::bytes(1) {
            return Err(LegacyError::TooShort(memory.len()));
        }
        Ok(Legacy {
            memory: Arc::new(memory),
            rows: Mutex::default(),
            blocks: Mutex::new((0..inbox::BLOCKS).rev().collect()),
            reads: AtomicU64::new(0),
        })
    }

    /// Memory of its own, for tests.
    #[cfg(test)]
    pub fn for_tests() -> Arc<Legacy> {
        let memory = fresh(true).expect("memory");
        Arc::new(Legacy::create(memory).expect("fresh memory"))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.memory.words()[at]
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Has managers tell these takeovers in their status. For the keeper.
    pub fn note_takeovers(&self, of: TakenOver) {
        let seconds = |of: f64| (of * 1e9) as u64;
        let words = [
            of.count,
            of.upgrades,
            seconds(of.pause_seconds_last),
            seconds(of.pause_seconds_max),
        ];
        for (at, word) in words.into_iter().enumerate() {
            self.word(TAKEN_WORD + at).store(word, Ordering::Relaxed);
        }
    }

    /// The takeovers that the keeper noted last. One that is noted meanwhile may be there in part.
    pub fn takeovers(&self) -> TakenOver {
        let [count, upgrades, last, max] = [0, 1, 2, 3].map(|at| self.load(TAKEN_WORD + at));
        TakenOver {
            count,
            upgrades,
            pause_seconds_last: Nanos(last).seconds(),
            pause_seconds_max: Nanos(max).seconds(),
        }
    }

    /// Counts managers. Its lowest bit says which numbers of descriptors are true.
    pub fn generation(&self) -> u64 {
        self.load(GENERATION_WORD)
    }

    /// From now on the numbers of the next generation are true.
    pub fn begin_generation(&self) {
        self.word(SERVED_WORD).store(0, Ordering::Relaxed);
        for thread in 0..THREADS_MAX {
            self.word(SERVING_WORD + thread).store(0, Ordering::Relaxed);
        }
        let next = self.generation() + 1;
        self.word(GENERATION_WORD).store(next, Ordering::Release);
    }

    /// Notes that a part of the manager's state is not in here. It stays so for the whole run.
    pub fn cannot(&self, why: Cannot) {
        self.word(CANNOT_WORD)
            .fetch_or(why as u64, Ordering::Relaxed);
    }

    /// Notes that the tiers are others than those of the start, before they are. Errors: why they
    /// may not change now.
    pub fn change_tiers(&self) -> Result<(), &'static str> {
        // The other side sets its word before it reads this one.
        let before = self
            .word(CANNOT_WORD)
            .fetch_or(Cannot::Tiers as u64, Ordering::SeqCst);
        if self.word(UPGRADES_WORD).load(Ordering::SeqCst) == 0 {
            return Ok(());
        }
        if before & Cannot::Tiers as u64 == 0 {
            self.word(CANNOT_WORD)
                .fetch_and(!(Cannot::Tiers as u64), Ordering::SeqCst);
        }
        Err("another manager is about to take over; ask again")
    }

    /// From now on tiers may not change, because another manager is to take over; or they may
    /// again. Call it before [`Legacy::refusal`].
    pub fn set_upgrades(&self, upgrades: bool) {
        self.word(UPGRADES_WORD)
            .store(upgrades.into(), Ordering::SeqCst);
    }

    /// Why no successor can take over, if none can.
    pub fn refusal(&self) -> Option<&'static str> {
        let set = self.word(CANNOT_WORD).load(Ordering::SeqCst);
        let mut all = Cannot::ALL.iter();
        all.find(|(why, _)| set & *why as u64 != 0)
            .map(|(_, text)| *text)
    }

    /// A fault of this generation was served.
    #[inline]
    pub fn served(&self) {
        self.word(SERVED_WORD).store(1, Ordering::Relaxed);
    }

    /// True if a fault of this generation was served.
    pub fn has_served(&self) -> bool {
        self.load(SERVED_WORD) != 0
    }

    /// Fault thread `thread` begins to serve this page.
    #[inline]
    pub fn serving(&self, thread: usize, space: SpaceId, page: VirtPage) {
        let word = u64::from(space.0) << 40 | page.0 & ((1 << 40) - 1);
        self.word(SERVING_WORD + thread % THREADS_MAX)
            .store(word, Ordering::Relaxed);
    }

    /// Fault thread `thread` serves no page.
    #[inline]
    pub fn rests(&self, thread: usize) {
        self.word(SERVING_WORD + thread % THREADS_MAX)
            .store(0, Ordering::Relaxed);
    }

    /// The pages that fault threads served when the manager died.
    pub fn was_serving(&self) -> Vec<u64> {
        let words = (0..THREADS_MAX).map(|thread| self.load(SERVING_WORD + thread));
        words.filter(|word| *word != 0).collect()
    }

    /// A user has asked for something that a successor has to do as well. The last request of each
    /// kind counts. A longer text than there is room for is not kept.
    ///
    /// * `kind`: below [`ASKS`].
    pub fn asked(&self, kind: usize, text: &[u8]) {
        if text.len() > TEXT_WORDS * 8 {
            return;
        }
        let place = 1 - (self.load(ASKED_WORD + kind) & 1);
        let first = Legacy::text_word(kind, place);
        for (at, part) in text.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            let word = u64::from_le_bytes(word);
            self.word(first + at).store(word, Ordering::Relaxed);
        }
        // One store makes it true: the manager may die before and after.
        let found = (text.len() as u64) << 1 | place;
        self.word(ASKED_WORD + kind).store(found, Ordering::Release);
    }

    /// The last request of each kind, in order of the kinds.
    pub fn asks(&self) -> Vec<Vec<u8>> {
        let of = |kind: usize| {
            let found = self.load(ASKED_WORD + kind);
            let length = (found >> 1) as usize;
            if length == 0 || length > TEXT_WORDS * 8 {
                return None;
            }
            let first = Legacy::text_word(kind, found & 1);
            let words = (first..first + TEXT_WORDS).map(|at| self.load(at).to_le_bytes());
            let mut text: Vec<u8> = words.flatten().collect();
            text.truncate(length);
            Some(text)
        };
        (0..ASKS).filter_map(of).collect()
    }

    fn text_word(kind: usize, place: u64) -> usize {
        TEXT_WORD + (2 * kind + place as usize) * TEXT_WORDS
    }

    /// The managed ranges of a space have changed.
    pub fn regions_changed(&self, space: SpaceId, regions: &[VirtRange]) {
        let at = lock(&self.rows).of.get(&space).copied();
        if let Some(at) = at {
            row::write_regions(self, at, regions);
        }
    }

    /// Notes that a managed range of a space has come or gone.
    /// * `regions`: all of them now.
    pub fn region_changed(
        &self,
        space: SpaceId,
        range: VirtRange,
        is_managed: bool,
        regions: &[VirtRange],
    ) {
        let at = lock(&self.rows).of.get(&space).copied();
        if let Some(at) = at {
            row::note_change(self, at, (range, is_managed), regions);
        }
    }
}

impl AsFd for Legacy {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// The keeper's view: it opens the memory, and asks about a dead manager.
///
/// * `limited`: the user's limits bound the address space of a process or the length of a file.
pub fn fresh(limited: bool) -> io::Result<SharedMemory> {
    let rows = if limited {
        row::ROWS_LIMITED
    } else {
        row::ROWS
    };
    SharedMemory::create("uc-legacy", Legacy::bytes(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(memory: &SharedMemory) -> SharedMemory {
        let fd = memory.as_fd().try_clone_to_owned().expect("a descriptor");
        SharedMemory::from_fd(fd).expect("the same memory")
    }

    #[test]
    fn another_version_is_refused_and_nothing_is_changed() {
        let memory = fresh(true).expect("memory");
        assert!(matches!(
            Legacy::open(again(&memory)),
            Err(LegacyError::NotOne)
        ));
        let legacy = Legacy::create(again(&memory)).expect("fresh memory");
        legacy.word(VERSION_WORD).store(99, Ordering::Relaxed);
        assert!(matches!(
            Legacy::open(again(&memory)),
            Err(LegacyError::Version(99))
        ));
        assert_eq!(legacy.generation(), 0);
        let short = SharedMemory::create("short", BASE_PAGE_BYTES).expect("memory");
        assert!(matches!(
            Legacy::open(short),
            Err(LegacyError::TooShort(BASE_PAGE_BYTES))
        ));
    }

    #[test]
    fn takeovers_that_the_keeper_notes_are_told_by_each_manager() {
        let memory = fresh(true).expect("memory");
        let legacy = Legacy::create(again(&memory)).expect("fresh memory");
        assert_eq!(legacy.takeovers(), TakenOver::default());
        let taken = TakenOver {
            count: 3,
            upgrades: 1,
            pause_seconds_last: 0.25,
            pause_seconds_max: 1.5,
        };
        let keepers = Legacy::open(again(&memory)).expect("the same memory");
        keepers.note_takeovers(taken);
        legacy.begin_generation();
        assert_eq!(legacy.takeovers(), taken);
        assert_eq!(
            taken.to_string(),
            "3 took over; the program waited for 250.0 ms, 1.50 s at most"
        );
    }

    #[test]
    fn tiers_change_or_an_upgrade_goes_on_and_never_both() {
        let legacy = Legacy::for_tests();
        legacy.set_upgrades(true);
        assert!(legacy.change_tiers().is_err());
        assert_eq!(legacy.refusal(), None, "nothing has changed");
        legacy.set_upgrades(false);
        assert_eq!(legacy.change_tiers(), Ok(()));
        assert!(legacy.refusal().is_some_and(|why| why.contains("tiers")));
        legacy.set_upgrades(true);
        assert!(legacy.change_tiers().is_err());
        assert!(legacy.refusal().is_some(), "they have changed before");
    }

    #[test]
    fn the_last_request_of_each_kind_is_kept() {
        let legacy = Legacy::for_tests();
        assert!(legacy.asks().is_empty());
        legacy.asked(ASKS - 1, b"last kind");
        legacy.asked(0, &[b'x'; 128]);
        legacy.asked(0, &[b'y'; 129]);
        assert_eq!(legacy.asks(), [vec![b'x'; 128], b"last kind".to_vec()]);
        legacy.asked(0, b"1");
        legacy.asked(0, b"22");
        legacy.begin_generation();
        assert_eq!(legacy.asks(), [b"22".to_vec(), b"last kind".to_vec()]);
    }

    #[test]
    fn a_generation_begins_with_nothing_served() {
        let legacy = Legacy::for_tests();
        legacy.served();
        legacy.serving(1, SpaceId(3), VirtPage(7));
        assert_eq!(legacy.was_serving(), [3 << 40 | 7]);
        legacy.begin_generation();
        assert_eq!((legacy.generation(), legacy.has_served()), (1, false));
        assert!(legacy.was_serving().is_empty());
        assert_eq!(legacy.refusal(), None);
        legacy.cannot(Cannot::Events);
        assert!(legacy.refusal().is_some());
    }
}
