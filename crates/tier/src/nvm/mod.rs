//! The nvm tier: whole pages in memory that is not DRAM, or in a file that stands for it. It is
//! mapped, so a load is a copy by the thread that wants the page. There is no block I/O.
//!
//! ```text
//! mapping:     | slot 0: one page | slot 1 | ...          slot n = the n-th page
//! slot table:  | superblock 4 KiB | bitmap, 1 bit a slot | checksums, 8 bytes a slot
//! ```
//! The slot table is a memfd that outlives the manager: 8.1 bytes a slot. A page's stamp is part of
//! its checksum and is not stored again. Stores pass the caches (non-temporal), and one fence
//! follows each batch. All space of the file is taken before it is mapped. If a page of the mapping
//! is gone all the same (the file was cut short, the memory is damaged), the load or store is an
//! I/O error of that page.
//!
//! Locks: `slots` is held for bookkeeping only. Several threads copy at once, each its own slots.

mod backing;
mod slots;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, FailKind, LatencyClass, LoadError, Loaded, Nanos, PageKey, PageSize,
    Slot, Stamp, Store, StoreError, Tier, TierFacts, TierInfo, TierUsage,
};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::nvm::{MappedAs, MappedFile, Unreachable};

pub use backing::{NvmBacking, NvmError};
use slots::{Slots, is_taken};

/// The size is a multiple of this: of a word of the bitmap, and of 1 MiB.
const fn unit_bytes(page: PageSize) -> u64 {
    match page {
        PageSize::Base => 1 << 20,
        large => 64 * large.bytes() as u64,
    }
}
/// Unit in which a changed copy is written: the smallest pages of the PCM paper.
const SECTOR_BYTES: usize = 512;
/// Bytes of a copy that are compared at a time.
const PART_BYTES: usize = 4096;
/// Largest size: slot numbers stay far inside a page entry's room.
const SIZE_MAX: u64 = 1 << 44;

/// First word of the slot table: "UCNVMT" and the version of the layout above.
const MAGIC: u64 = u64::from_le_bytes(*b"UCNVMT\x01\x00");
/// The version in it.
pub const VERSION: u64 = MAGIC >> 48;
/// A load copies a page from the mapping and verifies it. It is not measured: see `ram`.
pub const FACTS: TierFacts = TierFacts {
    updates_copies: true,
    ..TierFacts::of("nvm", LatencyClass::Nvm, Nanos(1_000))
};
const MAGIC_WORD: usize = 0;
const SLOTS_WORD: usize = 1;
const PAGE_WORDS: usize = BASE_PAGE_BYTES / 8;

/// Why an nvm tier could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NvmTierError {
    /// The slot table is smaller than [`NvmTier::table_bytes`] says.
    #[error("the slot table has {0}, the mapping needs {1}")]
    Table(Bytes, Bytes),
    /// `recover` found no slot table of this version and size.
    #[error("the shared memory holds no slot table for this mapping")]
    NotASlotTable,
    /// More slots than a page entry can name.
    #[error("{0} is too large for an nvm tier; give size= up to {max}", max = Bytes(SIZE_MAX))]
    TooLarge(Bytes),
    /// The kernel does not map it.
    #[error("cannot map {0}: {1}")]
    Map(String, std::io::Error),
}

/// A tier in mapped memory.
pub struct NvmTier {
    mapped: MappedFile,
    table: SharedMemory,
    info: TierInfo,
    slot_count: u64,
    key: PageKey,
    slots: Mutex<Slots>,
    taken: AtomicU64,
}

impl NvmTier {
    /// Length of the slot table for this mapping.
    pub fn table_bytes(backing: &NvmBacking) -> usize {
        let slots = slots_of(backing);
        (checksums_word(slots) + slots as usize) * 8
    }

    /// A new, empty tier. `table`: all zeros, [`NvmTier::table_bytes`] long.
    pub fn new(
        backing: NvmBacking,
        table: SharedMemory,
        key: &PageKey,
    ) -> Result<NvmTier, NvmTierError> {
        let slots = checked_slots(&backing, &table)?;
        table.words()[SLOTS_WORD].store(slots, Relaxed);
        table.words()[MAGIC_WORD].store(MAGIC, Relaxed);
        NvmTier::with_table(backing, table, slots, key)
    }

    /// The tier that an earlier manager left: the same file ([`NvmBacking::inherit`]) and its slot
    /// table. The caller frees slots that no page entry names: see [`NvmTier::for_each_slot`].
    pub fn recover(
        backing: NvmBacking,
        table: SharedMemory,
        key: &PageKey,
    ) -> Result<NvmTier, NvmTierError> {
        let slots = checked_slots(&backing, &table)?;
        let words = table.words();
        if words[MAGIC_WORD].load(Relaxed) != MAGIC || words[SLOTS_WORD].load(Relaxed) != slots {
            return Err(NvmTierError::NotASlotTable);
        }
        NvmTier::with_table(backing, table, slots, key)
    }

    fn with_table(
        backing: NvmBacking,
        table: SharedMemory,
        slot_count: u64,
        key: &PageKey,
    ) -> Result<NvmTier, NvmTierError> {
        let page = backing.page();
        let (file, name, bytes) = backing.into_file();
        let mapped = MappedFile::new(file, bytes as usize)
            .map_err(|error| NvmTierError::Map(name.clone(), error))?;
        let slots = Slots::from_bitmap(bitmap_of(&table, slot_count));
        Ok(NvmTier {
            info: TierInfo {
                name,
                facts: &FACTS,
                page,
                emulated: mapped.mapped_as() != MappedAs::Sync,
                capacity: Bytes(bytes),
            },
            taken: AtomicU64::new(slot_count - slots.free_slots()),
            slots: Mutex::new(slots),
            slot_count,
            key: key.clone(),
            mapped,
            table,
        })
    }

    /// How it is mapped. Without MAP_SYNC it only stands for non-volatile memory.
    pub fn mapped_as(&self) -> MappedAs {
        self.mapped.mapped_as()
    }

    /// Calls `visit` with every slot that is in use. For takeover: no thread may store or free
    /// meanwhile.
    pub fn for_each_slot(&self, mut visit: impl FnMut(Slot)) {
        (0..self.slot_count)
            .filter(|slot| is_taken(self.bitmap(), *slot))
            .for_each(|slot| visit(Slot(slot)));
    }

    fn bitmap(&self) -> &[AtomicU64] {
        bitmap_of(&self.table, self.slot_count)
    }

    fn checksum_of(&self, slot: u64) -> &AtomicU64 {
        &self.table.words()[checksums_word(self.slot_count) + slot as usize]
    }

    fn lock_slots(&self) -> MutexGuard<'_, Slots> {
        // A panic under this lock comes from a check in `free`, before anything was changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the sectors of a page that are not as in its slot; neighbours together.
    fn write_changed(&self, slot: Slot, item: &Store<'_>) -> Result<Bytes, StoreError> {
        let failed = |_| StoreError::Failed(FailKind::Io);
        self.checksum_of(slot.0).store(item.checksum, Relaxed);
        let mut written = 0;
        for (at, part) in item.page.chunks(PART_BYTES).enumerate() {
            let start = self.offset(slot) + at * PART_BYTES;
            written += self.write_part(start, part).map_err(failed)?;
        }
        self.mapped.fence();
        Ok(Bytes(written))
    }

    /// The same of a part of a page, which is at `start` of the mapping.
    fn write_part(&self, start: usize, new: &[u8]) -> Result<u64, Unreachable> {
        let mut old = [0; PART_BYTES];
        self.mapped.load(start, &mut old)?;
        let sectors = old.chunks(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES));
        let mut changed = sectors.map(|(old, new)| old != new).enumerate().peekable();
        let mut written = 0;
        while let Some((first, differs)) = changed.next() {
            if !differs {
                continue;
            }
            let mut end = first + 1;
            while changed.next_if(|(_, differs)| *differs).is_some() {
                end += 1;
            }
            let range = first * SECTOR_BYTES..end * SECTOR_BYTES;
            written += range.len() as u64;
            self.mapped.store(start + range.start, &new[range])?;
        }
        Ok(written)
    }

    /// Where a slot's page is in the mapping.
    fn offset(&self, slot: Slot) -> usize {
        slot.0 as usize * self.info.page.bytes()
    }

    fn publish(&self, slots: &Slots) {
        self.taken
            .store(self.slot_count - slots.free_slots(), Relaxed);
    }
}

impl Tier for NvmTier {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn usage(&self) -> TierUsage {
        let bytes = Bytes(self.taken.load(Relaxed) * self.info.page.bytes() as u64);
        TierUsage {
            logical: bytes,
            stored: bytes,
            held: bytes,
        }
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let mut taken = Vec::with_capacity(batch.len());
        {
            let mut slots = self.lock_slots();
            slots.alloc(self.bitmap(), batch.len(), &mut taken);
            self.publish(&slots);
        }
        let mut refused = Vec::new();
        let mut places = taken.iter();
        for item in batch {
            assert_eq!(
                item.page.len(),
                self.info.page.bytes(),
                "a page to store is not one page"
            );
            let Some(&slot) = places.next() else {
                item.result = Err(StoreError::Full);
                continue;
            };
            self.checksum_of(slot).store(item.checksum, Relaxed);
            item.result = match self.mapped.store(self.offset(Slot(slot)), item.page) {
                Ok(()) => Ok(Slot(slot)),
                Err(_) => {
                    refused.push(Slot(slot));
                    Err(StoreError::Failed(FailKind::Io))
                }
            };
        }
        self.mapped.fence();
        if !refused.is_empty() {
            self.free(&refused);
        }
    }

    fn update(&self, slot: Slot, item: &Store<'_>) -> Option<Result<Bytes, StoreError>> {
        if !is_taken(self.bitmap(), slot.0) {
            return None;
        }
        Some(self.write_changed(slot, item))
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let kept = self.checksum(slot, stamp).ok_or(LoadError::Corrupt)?;
        self.mapped
            .load(self.offset(slot), dst)
            .map_err(|_| LoadError::Failed(FailKind::Io))?;
        if self.key.checksum(dst, stamp) == kept {
            Ok(Loaded::Done)
        } else {
            Err(LoadError::Corrupt)
        }
    }

    fn checksum(&self, slot: Slot, _stamp: Stamp) -> Option<u64> {
        is_taken(self.bitmap(), slot.0).then(|| self.checksum_of(slot.0).load(Relaxed))
    }

    fn close(&self) {
        backing::give_back(self.mapped.file());
        let _ = self.table.punch(0, self.table.len()); // a refusal leaves the memory in use
    }

    fn free(&self, freed: &[Slot]) {
        let mut slots = self.lock_slots();
        for slot in freed {
            slots.free(self.bitmap(), slot.0);
        }
        self.publish(&slots);
    }
}

fn checked_slots(backing: &NvmBacking, table: &SharedMemory) -> Result<u64, NvmTierError> {
    let size = backing.bytes();
    if size.0 > SIZE_MAX {
        return Err(NvmTierError::TooLarge(size));
    }
    let needed = NvmTier::table_bytes(backing);
    if table.len() < needed {
        let (has, needed) = (table.len() as u64, needed as u64);
        return Err(NvmTierError::Table(Bytes(has), Bytes(needed)));
    }
    Ok(slots_of(backing))
}

fn slots_of(backing: &NvmBacking) -> u64 {
    let (page, size) = (backing.page(), backing.bytes().0);
    let unit = unit_bytes(page);
    size / unit * (unit / page.bytes() as u64)
}

fn bitmap_of(table: &SharedMemory, slots: u64) -> &[AtomicU64] {
    &table.words()[PAGE_WORDS..PAGE_WORDS + slots as usize / 64]
}

fn checksums_word(slots: u64) -> usize {
    PAGE_WORDS + (slots as usize / 64).next_multiple_of(PAGE_WORDS)
}
