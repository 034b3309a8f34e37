//! The slot table of the remote tier: where the two copies of each slot are, and what they hold.
//!
//! ```text
//! | superblock 4 KiB: magic, slots, run | slot 0: checksum, place, facts | slot 1 | ...
//! place: | number of the copies' keys, 40 bits | first tag, 12 | second tag, 12 |   0: free
//! facts: | stamp, 16 bits | length of the value, 16 |
//! ```
//! It is a memfd, which outlives the manager. A number is used once in a run: a write that arrives
//! late can never replace a newer copy. A page with one copy has the same tag twice.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Stamp};
use undercroft_sys::mapping::SharedMemory;

use super::RemoteError;

/// "UCREMO" and the version of the layout above.
const MAGIC: u64 = u64::from_le_bytes(*b"UCREMO\x01\x00");
const SLOTS_WORD: usize = 1;
const RUN_WORD: usize = 2;
const HEAD_WORDS: usize = BASE_PAGE_BYTES / 8;
const ROW_WORDS: usize = 3;

/// Tags there are: see `keys.rs`.
pub(super) const TAGS: u16 = 1 << 12;
const NUMBERS: u64 = 1 << 40;
/// DRAM of a slot: its row, and its place in the list of free slots.
const SLOT_DRAM: u64 = (ROW_WORDS * 8 + 4) as u64;

/// Where the copies of a slot are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copies {
    pub number: u64,
    pub tags: [u16; 2],
}

impl Copies {
    /// True if there is one copy only.
    pub(super) fn is_single(self) -> bool {
        self.tags[0] == self.tags[1]
    }

    fn word(self) -> u64 {
        self.number << 24 | u64::from(self.tags[0]) << 12 | u64::from(self.tags[1])
    }

    fn of(word: u64) -> Option<Copies> {
        let tag = |shift: u32| (word >> shift) as u16 & (TAGS - 1);
        (word != 0).then(|| Copies {
            number: word >> 24,
            tags: [tag(12), tag(0)],
        })
    }
}

/// Knowledge of a slot that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotInUse {
    pub checksum: u64,
    pub place: Copies,
    pub stamp: Stamp,
    /// Bytes of the value.
    pub bytes: u32,
}

/// Which slots are free.
#[derive(Debug, Default)]
struct Free {
    list: Vec<u32>,
    used: u32,
}

/// The table. Readers take no lock.
#[derive(Debug)]
pub(super) struct Table {
    memory: SharedMemory,
    slots: u32,
    run: u64,
    free: Mutex<Free>,
    numbers: AtomicU64,
    high: AtomicU64,
}

impl Table {
    /// Length of the table of a tier of `capacity`. A page takes at least 1 KiB of it here: more
    /// slots than that would not be used.
    pub(super) fn bytes_for(capacity: Bytes) -> usize {
        (HEAD_WORDS + slots_for(capacity) as usize * ROW_WORDS) * 8
    }

    /// Writes the number of the run into a table that is all zeros.
    pub(super) fn begin(memory: &SharedMemory, run: u64) {
        memory.words()[RUN_WORD].store(run, Relaxed);
    }

    /// An empty table over memory for which [`Table::begin`] was called.
    pub(super) fn new(memory: SharedMemory, capacity: Bytes) -> Result<Table, RemoteError> {
        let (slots, run) = (slots_for(capacity), memory.words()[RUN_WORD].load(Relaxed));
        if memory.len() < Table::bytes_for(capacity) || run == 0 {
            return Err(RemoteError::Table);
        }
        memory.words()[SLOTS_WORD].store(u64::from(slots), Relaxed);
        memory.words()[0].store(MAGIC, Relaxed);
        Ok(Table {
            memory,
            slots,
            run,
            free: Mutex::default(),
            numbers: AtomicU64::new(1),
            high: AtomicU64::new(0),
        })
    }

    /// The number of the run, which is part of every key.
    pub(super) fn run(&self) -> u64 {
        self.run
    }

    /// DRAM of the rows that were ever used.
    pub(super) fn dram(&self) -> Bytes {
        Bytes(self.high.load(Relaxed) * SLOT_DRAM)
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        // A panic under this lock comes from a check, before anything was changed.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn words(&self, slot: u64) -> Option<&[AtomicU64]> {
        if slot >= u64::from(self.slots) {
            return None;
        }
        let at = HEAD_WORDS + slot as usize * ROW_WORDS;
        Some(&self.memory.words()[at..at + ROW_WORDS])
    }

    /// A number for new keys. `None`: all are used up.
    pub(super) fn number(&self) -> Option<u64> {
        let number = self.numbers.fetch_add(1, Relaxed);
        (number < NUMBERS).then_some(number)
    }

    /// Takes up to `count` free slots. Their rows stay empty until [`Table::set`].
    pub(super) fn take(&self, count: usize, slots: &mut Vec<u64>) {
        let mut free = self.free();
        for _ in 0..count {
            let slot = match free.list.pop() {
                Some(slot) => slot,
                None if free.used < self.slots => {
                    free.used += 1;
                    self.high.store(u64::from(free.used), Relaxed);
                    free.used - 1
                }
                None => return,
            };
            slots.push(u64::from(slot));
        }
    }

    /// Gives back slots whose rows are empty.
    pub(super) fn give_back(&self, slots: impl Iterator<Item = u64>) {
        self.free().list.extend(slots.map(|slot| slot as u32));
    }

    /// Fills the row of a slot that the caller took.
    pub(super) fn set(&self, slot: u64, row: &SlotInUse) {
        let words = self.words(slot).expect("a slot of this table");
        words[0].store(row.checksum, Relaxed);
        words[2].store(u64::from(row.stamp.0) << 16 | u64::from(row.bytes), Relaxed);
        words[1].store(row.place.word(), Release);
    }

    /// The row of a slot in use. While the slot is freed and used again, it may mix two copies; the
    /// stamp and the checksum show that.
    pub(super) fn row(&self, slot: u64) -> Option<SlotInUse> {
        let words = self.words(slot)?;
        let place = Copies::of(words[1].load(Acquire))?;
        let facts = words[2].load(Relaxed);
        Some(SlotInUse {
            checksum: words[0].load(Relaxed),
            place,
            stamp: Stamp((facts >> 16) as u16),
            bytes: u32::from(facts as u16),
        })
    }

    /// Names other copies of a slot, unless it was freed meanwhile.
    pub(super) fn replace(&self, slot: u64, old: Copies, new: Copies) -> bool {
        let words = self.words(slot).expect("a slot of this table");
        let changed = words[1].compare_exchange(old.word(), new.word(), Release, Relaxed);
        changed.is_ok()
    }

    /// Empties the row of a slot. `None`: it is free already.
    pub(super) fn empty(&self, slot: u64) -> Option<SlotInUse> {
        let words = self.words(slot)?;
        // A copy may be made anew at this moment, and change the place.
        loop {
            let row = self.row(slot)?;
            let old = row.place.word();
            if words[1].compare_exchange(old, 0, Release, Relaxed).is_ok() {
                return Some(row);
            }
        }
    }

    /// Slots that were ever used; some of them are free.
    pub(super) fn slots(&self) -> u64 {
        self.high.load(Relaxed)
    }
}

fn slots_for(capacity: Bytes) -> u32 {
    (capacity.0 >> 10).clamp(1, u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: Bytes = Bytes(4 << 10);

    fn table() -> Table {
        let memory = SharedMemory::create("test-remote", Table::bytes_for(CAPACITY)).unwrap();
        Table::begin(&memory, 7);
        Table::new(memory, CAPACITY).unwrap()
    }

    #[test]
    fn rows_are_kept_replaced_and_emptied_once() {
        let table = table();
        let mut slots = Vec::new();
        table.take(9, &mut slots);
        assert_eq!(slots, [0, 1, 2, 3], "4 KiB have four slots of 1 KiB");
        let row = SlotInUse {
            checksum: u64::MAX,
            place: Copies {
                number: NUMBERS - 1,
                tags: [TAGS - 1, 1],
            },
            stamp: Stamp(u16::MAX),
            bytes: 4108,
        };
        assert_eq!(table.row(3), None);
        table.set(3, &row);
        assert_eq!(table.row(3), Some(row));
        let new = Copies {
            number: 5,
            tags: [2, 2],
        };
        assert!(table.replace(3, row.place, new));
        assert!(!table.replace(3, row.place, new), "it was replaced");
        assert_eq!(table.empty(3).map(|row| row.place), Some(new));
        assert_eq!((table.empty(3), table.row(3)), (None, None));
        assert!(!table.replace(3, new, row.place), "it was freed");
        assert_eq!((table.row(4), table.row(u64::MAX)), (None, None));
        table.give_back([3].into_iter());
        slots.clear();
        table.take(9, &mut slots);
        assert_eq!(slots, [3]);
        assert_eq!(table.dram(), Bytes(4 * SLOT_DRAM));
    }

    #[test]
    fn memory_without_a_run_or_too_small_is_refused() {
        let memory = SharedMemory::create("test-remote", Table::bytes_for(CAPACITY)).unwrap();
        assert!(Table::new(memory, CAPACITY).is_err(), "no run");
        let memory = SharedMemory::create("test-remote", 4096).unwrap();
        Table::begin(&memory, 7);
        assert!(Table::new(memory, CAPACITY).is_err(), "too small");
    }
}
