//! Slots of the pool: numbers that say where an object is *now*, so that objects can be moved.
//!
//! Rejected: the object's offset as slot. It saves 8 bytes a page and one cache line a load. But
//! then nothing can be moved, and random frees leave several times the memory needed
//! (docs/design/0006).
//!
//! The table is in the memfd: 4 bytes a slot, two slots to a word. An entry is 0 (never used), the
//! object's offset in units of 16 bytes, or `FREE` and the next free slot plus one. Writers hold
//! the pool's mutex; readers need no lock.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

const FREE: u32 = 1 << 31;
/// Offsets in units of the alignment are below this.
pub(super) const LOCATION_LIMIT: u64 = FREE as u64;

/// Most slots of one pool: an object of it has 200 bytes or more on average. So slots of all shards
/// are numbers that a page entry can hold.
pub(super) const SHARD_SLOTS_MAX: u32 = 1 << 27;

/// The table's words.
#[derive(Clone, Copy)]
pub(super) struct Table<'a>(pub(super) &'a [AtomicU64]);

/// Which slots are free.
#[derive(Debug)]
pub(super) struct Handles {
    free_head: u32,
    used: u32,
    max: u32,
}

impl Table<'_> {
    fn get(&self, handle: u32) -> u32 {
        let word = self.0[handle as usize / 2].load(Acquire);
        (word >> (handle % 2 * 32)) as u32
    }

    fn set(&self, handle: u32, entry: u32) {
        let word = &self.0[handle as usize / 2];
        let shift = handle % 2 * 32;
        let other = word.load(Relaxed) & !(0xffff_ffff << shift);
        word.store(other | u64::from(entry) << shift, Release);
    }

    /// Where the object of a slot is. `None`: the slot is free, or does not exist.
    pub(super) fn location(&self, slot: u64) -> Option<u32> {
        let handle = u32::try_from(slot)
            .ok()
            .filter(|&h| (h as usize / 2) < self.0.len())?;
        let entry = self.get(handle);
        (entry != 0 && entry & FREE == 0).then_some(entry)
    }

    /// The object was copied to `location`: readers find it there from now on.
    pub(super) fn moved(&self, handle: u32, location: u32) {
        self.set(handle, location);
    }
}

impl Handles {
    /// All slots are free.
    pub(super) fn new(max: u32) -> Handles {
        Handles {
            free_head: 0,
            used: 0,
            max,
        }
    }

    /// Slots below `used` for which `is_taken` is false are free.
    pub(super) fn recover(
        table: Table<'_>,
        max: u32,
        used: u32,
        is_taken: impl Fn(u32) -> bool,
    ) -> Handles {
        let mut handles = Handles::new(max);
        handles.used = used.min(max);
        for handle in (0..handles.used).rev().filter(|&handle| !is_taken(handle)) {
            handles.free(table, handle);
        }
        handles
    }

    /// How many slots were ever used.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// A slot for the object at `location`. `None`: all are in use, or `charge` refused the memory
    /// for one more.
    pub(super) fn alloc(
        &mut self,
        table: Table<'_>,
        location: u32,
        charge: impl FnOnce() -> bool,
    ) -> Option<u32> {
        let handle = if self.free_head != 0 {
            let handle = self.free_head - 1;
            self.free_head = table.get(handle) & !FREE;
            handle
        } else if self.used < self.max && charge() {
            self.used += 1;
            self.used - 1
        } else {
            return None;
        };
        table.set(handle, location);
        Some(handle)
    }

    /// Frees a slot. The caller knows that it is in use.
    pub(super) fn free(&mut self, table: Table<'_>, handle: u32) {
        table.set(handle, FREE | self.free_head);
        self.free_head = handle + 1;
    }
}
