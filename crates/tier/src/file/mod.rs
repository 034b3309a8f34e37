//! The file tier: page copies in a file or block device, written in large sequential O_DIRECT
//! writes.
//!
//! ```text
//! file:        | slab 0: 256 slots of a page | slab 1 | ...       slot n = the n-th page
//! slot table:  | superblock 4 KiB | slots in use, 1 bit each | slabs with space, 1 bit each
//!              | checksums, 8 bytes a slot | pages that wait to be written, 1 MiB |
//! superblock:  | magic | slabs | quota and slabs with space | slots in use | mark | grant |
//!              | packed |   8 bytes each
//! ```
//! A slab of large pages has 64 slots, and none waits to be written: a large page is a large write.
//!
//! The slot table is a memfd that outlives the manager. It takes 8.1 bytes a slot, sparse like the
//! file, and at most 1 MiB for waiting pages ([`FileTier::write_behind`]). A page's stamp is part
//! of its checksum and is not stored again. Pages that are written together get consecutive slots
//! where possible, so that one operation writes them. Empty slabs are reused first, and discarded
//! when there are more than a few. `load` copies a waiting page, or says where to read; it touches
//! only the slot table.
//!
//! A file may be longer than what the tier may take of it: its quota ([`Room`]). Whole slabs take
//! space, wherever they are, and never more of them than the quota. A quota that is lowered below
//! that holds for slots at once, and for slabs as they come free. What a tier has beyond the first
//! quota it uses densely, so that it can be given back.
//!
//! A tier that packs ([`Backing::packing`]) has several compressed pages in a slot: see
//! `parts.rs`. Then "block" is a slot of the above, and a slot is a part of a block.
//!
//! Locks: `writer` is held during I/O; only `store` takes it. `slabs` is held for bookkeeping only.
//! `free` takes only `slabs` and does no I/O, so it may be called from anywhere.

mod backing;
mod behind;
mod meter;
#[cfg(test)]
mod packed_tests;
mod parts;
#[cfg(test)]
mod quota_tests;
mod room;
mod slabs;
mod table;
#[cfg(test)]
mod tests;
mod write;

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, LatencyClass, LoadError, Loaded, Nanos, PageKey, PageSize, Slot, Stamp,
    Store, StoreError, Tier, TierFacts, TierInfo, TierUsage,
};
use undercroft_sys::mapping::{PageBuf, SharedMemory};

use crate::shape::Shape;
pub use backing::{Backing, BackingError};
use behind::Behind;
pub use behind::WAITING_PAGES_MAX;
use meter::Counters;
pub use meter::{FileCounts, FileMeter};
use parts::Parts;
pub use room::{Room, Taken};
use slabs::{Bitmaps, Slabs};
use table::{behind_word, bitmaps_of, checked_slabs, checksums_word, parts_word, quota_of};
use write::Writer;

/// Most bytes of space that a tier should have whose copies take `stored`: twice that, and 64
/// slabs. It may have more until the copies that are left are stored together.
pub fn space_max(stored: Bytes, page: PageSize) -> Bytes {
    let slots = stored.0 / page.bytes() as u64;
    Bytes(slabs::slabs_max(slots, slab_slots(page)) * slab_bytes(page))
}

/// Unit of allocation and discard, for base pages.
pub const SLAB_BYTES: u64 = slab_bytes(PageSize::Base);
/// Slots of one slab: whole words of the bitmap.
pub(crate) const fn slab_slots(page: PageSize) -> u32 {
    match page {
        PageSize::Base => 256,
        PageSize::Large => 64,
    }
}
/// Unit of allocation and discard.
pub(crate) const fn slab_bytes(page: PageSize) -> u64 {
    slab_slots(page) as u64 * page.bytes() as u64
}
/// Base pages written at a time.
const BATCH_PAGES: usize = 256;
/// Empty slabs that keep their space, so that a tier does not discard what it will write next. A
/// busy tier keeps as many as are in use.
const DIRTY_SLABS_KEPT: usize = 16;
/// Most discards at once. A read waits for a discard as long as for a write of 1 MiB.
const DISCARDS_AT_ONCE: usize = 2;
/// The same while an idle tier has more space than its quota: another run waits for it.
const DISCARDS_OVER: usize = 16;
/// Most slabs that are reserved before they are needed.
const RESERVE_MAX: u32 = 64;

/// First word of the slot table: "UCSLOT" and the version of the layout above.
const MAGIC: u64 = u64::from_le_bytes(*b"UCSLOT\x05\x00");
/// The version in it.
pub const VERSION: u64 = MAGIC >> 48;
/// Facts of a file or block device.
pub const FACTS: TierFacts = TierFacts {
    grows: true,
    ..TierFacts::of("file", LatencyClass::Device, Nanos(80_000))
};
const MAGIC_WORD: usize = 0;
const SLABS_WORD: usize = 1;
const QUOTA_WORD: usize = 2;
const USED_WORD: usize = 3;
const MARK_WORD: usize = 4;
const GRANT_WORD: usize = 5;
const PACKED_WORD: usize = 6;
const PAGE_WORDS: usize = BASE_PAGE_BYTES / 8;

/// Why a file tier could not be made.
#[derive(Debug, thiserror::Error)]
pub enum FileTierError {
    /// The slot table is smaller than [`FileTier::table_bytes`] says.
    #[error("the slot table has {0}, the file needs {1}")]
    Table(Bytes, Bytes),
    /// `recover` found no slot table of this version and size.
    #[error("the shared memory holds no slot table for this file")]
    NotASlotTable,
    /// More slots than a page entry can name.
    #[error("{0} is too large for a file tier; give size= up to {1}")]
    TooLarge(Bytes, Bytes),
    /// No memory for the write buffer.
    #[error("cannot get memory for writing: {0}")]
    Memory(std::io::Error),
}

const SIZE_MAX: u64 = 1 << 44; // 16 TiB: slab numbers and counts stay far inside u32

type Made = Result<FileTier, FileTierError>;

/// A tier in a file or on a block device.
pub struct FileTier {
    backing: Backing,
    table: SharedMemory,
    info: TierInfo,
    slot_count: u64,
    checksums_word: usize,
    slabs: Mutex<Slabs>,
    /// Of a packed tier.
    parts: Option<Parts>,
    behind: Behind,
    key: PageKey,
    shape: Option<Shape>,
    writer: Mutex<Writer>,
    bell: Option<OwnedFd>,
    held: AtomicU64,
    counters: Arc<Counters>,
}

impl FileTier {
    /// Length of the slot table for this file.
    pub fn table_bytes(backing: &Backing) -> usize {
        let slabs = (backing.bytes().0 / slab_bytes(backing.page())) as usize;
        let packed = if backing.packs() {
            Parts::words(slabs)
        } else {
            0
        };
        (parts_word(slabs, slab_slots(backing.page())) + packed) * 8
    }

    /// A new, empty tier. `table`: all zeros, [`FileTier::table_bytes`] long.
    pub fn new(backing: Backing, table: SharedMemory, key: &PageKey) -> Made {
        let slabs = checked_slabs(&backing, &table)?;
        table.words()[SLABS_WORD].store(u64::from(slabs), Relaxed);
        table.words()[PACKED_WORD].store(u64::from(backing.packs()), Relaxed);
        quota_of(&table).begin(slabs);
        table.words()[MAGIC_WORD].store(MAGIC, Relaxed);
        FileTier::with_table(backing, table, slabs, key)
    }

    /// The tier that an earlier manager left: the same file ([`Backing::inherit`]) and its slot
    /// table. The caller frees slots that no page entry names: see [`FileTier::for_each_slot`].
    /// Pages that waited to be written are read from the table, and are written when others join
    /// them.
    pub fn recover(backing: Backing, table: SharedMemory, key: &PageKey) -> Made {
        let slabs = checked_slabs(&backing, &table)?;
        let words = table.words();
        if words[MAGIC_WORD].load(Relaxed) != MAGIC
            || words[SLABS_WORD].load(Relaxed) != u64::from(slabs)
            || words[PACKED_WORD].load(Relaxed) != u64::from(backing.packs())
        {
            return Err(FileTierError::NotASlotTable);
        }
        let tier = FileTier::with_table(backing, table, slabs, key)?;
        tier.behind.inherit();
        Ok(tier)
    }

    fn with_table(
        backing: Backing,
        table: SharedMemory,
        slab_count: u32,
        key: &PageKey,
    ) -> Result<FileTier, FileTierError> {
        let page = backing.page();
        let slots = slab_slots(page);
        let slot_count = u64::from(slab_count) * u64::from(slots);
        let bitmaps = bitmaps_of(&table, slab_count, slots);
        let packed = backing.packs().then(|| {
            let parts = Parts::over(parts_word(slab_count as usize, slots), slab_count);
            parts.recover(&table, bitmaps, bitmaps.end());
            parts
        });
        let slabs = Slabs::from_bitmaps(bitmaps, slab_count);
        let buffer = PageBuf::new(page.at_once(BATCH_PAGES), page);
        let tier = FileTier {
            info: TierInfo {
                name: backing.name().to_owned(),
                facts: &FACTS,
                page,
                emulated: false,
                capacity: backing.bytes(),
            },
            backing,
            slot_count,
            checksums_word: checksums_word(slab_count as usize, slots),
            bell: None,
            held: AtomicU64::new(0),
            behind: Behind::over(&table, behind_word(slab_count as usize, slots)),
            key: key.clone(),
            shape: None,
            writer: Mutex::new(Writer::new(
                buffer.map_err(FileTierError::Memory)?,
                u64::from(slabs.spare().end) * slab_bytes(page),
            )),
            parts: packed,
            slabs: Mutex::new(slabs),
            counters: Arc::default(),
            table,
        };
        tier.publish(&tier.lock_slabs());
        Ok(tier)
    }

    /// Lets up to `pages` wait in memory until they are written together: see [`Tier::dram`].
    /// `pages` is more than 64 and at most [`WAITING_PAGES_MAX`]. A waiting page counts as stored.
    /// If the device refuses it later, it stays in memory.
    pub fn write_behind(mut self, pages: usize) -> FileTier {
        let is_small = self.info.page == PageSize::Base;
        self.behind.set_most(if is_small { pages } else { 0 });
        self
    }

    /// Rings this eventfd when as many slots are in use as its mark says: see [`Room`].
    pub fn with_bell(mut self, bell: Option<OwnedFd>) -> FileTier {
        self.bell = bell;
        self
    }

    /// Gives it the times of another device. A page that waits to be written costs none, as on the
    /// real one.
    pub fn shaped(mut self, shape: Shape) -> FileTier {
        self.info.emulated = true;
        self.shape = Some(shape);
        self
    }

    /// The file or device: whether it is O_DIRECT, in memory, a block device.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Reader of the counts, for the report.
    pub fn meter(&self) -> FileMeter {
        FileMeter::of(&self.counters)
    }

    /// Discards every empty slab.
    #[cfg(test)]
    fn trim(&self) {
        let _more = self.discard_surplus(0, usize::MAX);
        self.release_reserve();
    }

    /// Calls `visit` with every slot that is in use. For takeover: no thread may store or free
    /// meanwhile.
    pub fn for_each_slot(&self, mut visit: impl FnMut(Slot)) {
        let bitmaps = self.bitmaps();
        for (word, bits) in bitmaps.slots.iter().enumerate() {
            let mut bits = bits.load(Relaxed);
            while bits != 0 {
                self.for_each_part(
                    word as u64 * 64 + u64::from(bits.trailing_zeros()),
                    &mut visit,
                );
                bits &= bits - 1;
            }
        }
    }

    /// Calls `visit` with every slot of a block that is in use.
    fn for_each_part(&self, block: u64, mut visit: impl FnMut(Slot)) {
        let Some(parts) = &self.parts else {
            return visit(Slot(block));
        };
        let mut bits = parts.of_block(&self.table, block);
        while bits != 0 {
            visit(Parts::slot(block, bits.trailing_zeros() as u8));
            bits &= bits - 1;
        }
    }

    /// The slot of a part of a block; in a tier that is not packed, the block itself.
    fn slot(&self, block: u64, part: u8) -> Slot {
        match self.parts {
            Some(_) => Parts::slot(block, part),
            None => Slot(block),
        }
    }

    fn block_of(&self, slot: Slot) -> u64 {
        match self.parts {
            Some(_) => Parts::block(slot),
            None => slot.0,
        }
    }

    /// The word of the slot table with the checksum of a slot.
    fn sum_word(&self, slot: Slot) -> &AtomicU64 {
        let of_part = self.parts.as_ref().and_then(|parts| parts.sum_word(slot));
        let of_block = || self.checksums_word + self.block_of(slot) as usize;
        &self.table.words()[of_part.unwrap_or_else(of_block)]
    }

    fn bitmaps(&self) -> Bitmaps<'_> {
        let slots = slab_slots(self.info.page);
        bitmaps_of(
            &self.table,
            (self.slot_count / u64::from(slots)) as u32,
            slots,
        )
    }

    fn slab_bytes(&self) -> u64 {
        slab_bytes(self.info.page)
    }

    fn page_bytes(&self) -> usize {
        self.info.page.bytes()
    }

    fn lock_slabs(&self) -> MutexGuard<'_, Slabs> {
        // A panic under this lock comes from a check in `free`, before anything was changed.
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_writer(&self) -> MutexGuard<'_, Writer> {
        // Between stores the writer keeps only its pause.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, slabs: &Slabs) {
        self.table.words()[USED_WORD].store(slabs.taken_slots(), Relaxed);
        self.held
            .store(slabs.occupied() * self.slab_bytes(), Relaxed);
    }

    /// Rings the bell if the mark is reached, once for each mark.
    fn ring(&self) {
        let words = self.table.words();
        let mark = words[MARK_WORD].load(Relaxed);
        if mark != 0
            && words[USED_WORD].load(Relaxed) >= mark
            && words[MARK_WORD].swap(0, Relaxed) != 0
            && let Some(bell) = &self.bell
        {
            // It cannot fail for long: the counter of an eventfd is far from full.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    /// Gives back the space that was reserved beyond all slabs in use.
    fn release_reserve(&self) {
        // The lock keeps slots of that space from being written meanwhile. If it is taken, the tier
        // is not idle.
        let Ok(mut writer) = self.writer.try_lock() else {
            return;
        };
        let spare = self.lock_slabs().spare();
        if !spare.is_empty() {
            let bytes = |slabs: u64| slabs * self.slab_bytes();
            let (at, slabs) = (u64::from(spare.start), spare.len() as u64);
            let discarded = (self.backing).discard(bytes(at), bytes(slabs));
            if discarded.is_err() && !self.backing.is_block_device() {
                return; // it keeps its space
            }
        }
        let mut slabs = self.lock_slabs();
        slabs.drop_spare(self.bitmaps());
        writer.reserved = u64::from(slabs.spare().end) * self.slab_bytes();
    }

    /// Discards empty slabs: `most` of them, and none if no more than `keep` are empty, unless the
    /// tier has too much space. False: no more are to be discarded.
    fn discard_surplus(&self, keep: usize, most: usize) -> bool {
        for _ in 0..most {
            let Some(slab) = self.lock_slabs().take_surplus(self.bitmaps(), keep) else {
                return false;
            };
            let discarded = self
                .backing
                .discard(u64::from(slab) * self.slab_bytes(), self.slab_bytes())
                .is_ok();
            let counter = if discarded {
                &self.counters.slabs_discarded
            } else {
                &self.counters.discards_failed
            };
            counter.fetch_add(1, Relaxed);
            let mut slabs = self.lock_slabs();
            if !discarded && !self.backing.is_block_device() {
                slabs.not_discarded(slab);
                return false;
            }
            slabs.discarded(self.bitmaps(), slab);
            self.publish(&slabs);
        }
        true
    }
}

impl Tier for FileTier {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn capacity(&self) -> Bytes {
        match self.bitmaps().quota.counts().most {
            0 => self.info.capacity, // it was closed
            most => Bytes(u64::from(most) * self.slab_bytes()),
        }
    }

    fn usage(&self) -> TierUsage {
        let blocks = self.table.words()[USED_WORD].load(Relaxed);
        let pages = self.parts.as_ref().map_or(blocks, Parts::live);
        TierUsage {
            logical: Bytes(pages * self.page_bytes() as u64),
            stored: Bytes(blocks * self.page_bytes() as u64),
            held: Bytes(self.held.load(Relaxed)),
        }
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let mut writer = self.lock_writer();
        for part in batch.chunks_mut(self.info.page.at_once(BATCH_PAGES)) {
            for item in part.iter_mut() {
                assert_eq!(
                    item.page.len(),
                    self.page_bytes(),
                    "a page to store is not one page"
                );
                item.result = Err(StoreError::Full);
            }
            self.store_part(part, &mut writer);
        }
        drop(writer);
        // A read may come at any moment. So space is discarded when the tier is idle, or when half
        // of it is unused.
        let slabs = self.lock_slabs();
        let (keep, excess) = (slabs.in_use().max(DIRTY_SLABS_KEPT), slabs.has_excess());
        drop(slabs);
        let _more = self.discard_surplus(keep, DISCARDS_AT_ONCE);
        if excess {
            self.release_reserve();
        }
    }

    fn dram(&self) -> Bytes {
        self.behind.dram()
    }

    fn close(&self) {
        self.backing.give_back();
        let _ = self.table.punch(0, self.table.len()); // a refusal leaves the memory in use
    }

    fn tidy(&self) -> bool {
        let counts = self.bitmaps().quota.counts();
        let most = if counts.held > counts.most || self.lock_slabs().has_excess() {
            DISCARDS_OVER
        } else {
            DISCARDS_AT_ONCE
        };
        let more = self.discard_surplus(DIRTY_SLABS_KEPT, most);
        self.release_reserve();
        more
    }

    fn scattered(&self) -> Vec<Range<Slot>> {
        let slabs = self.lock_slabs().leave();
        let each = u64::from(slab_slots(self.info.page));
        let slots = |slab: u32| {
            let first = u64::from(slab) * each;
            self.slot(first, 0)..self.slot(first + each, 0)
        };
        slabs.into_iter().map(slots).collect()
    }

    fn gathered(&self) {
        self.lock_slabs().stay();
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let checksum = self.checksum(slot, stamp).ok_or(LoadError::Corrupt)?;
        let block = self.block_of(slot);
        let behind = self.behind.load(&self.table, block, dst, |page| {
            self.unpack(slot, page) && self.key.checksum(page, stamp) == checksum
        });
        match behind {
            None => Ok(Loaded::Read {
                fd: self.backing.file().as_raw_fd(),
                offset: block * self.page_bytes() as u64,
            }),
            Some(true) => Ok(Loaded::Done),
            Some(false) => Err(LoadError::Corrupt),
        }
    }

    fn reading(&self, offset: u64, bytes: u64) -> Nanos {
        let end = self.shape.as_ref().map(|shape| shape.read(offset, bytes));
        let left = end.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(Instant::now())
        });
        Nanos(left.as_nanos() as u64)
    }

    fn unpack(&self, slot: Slot, page: &mut [u8]) -> bool {
        self.parts.is_none() || parts::unpack(slot, page)
    }

    fn checksum(&self, slot: Slot, _stamp: Stamp) -> Option<u64> {
        let known = match &self.parts {
            Some(parts) => parts.is_taken(&self.table, slot),
            None => slot.0 < self.slot_count && self.bitmaps().is_taken(slot.0),
        };
        known.then(|| self.sum_word(slot).load(Relaxed))
    }

    fn free(&self, slots: &[Slot]) {
        let mut slabs = self.lock_slabs();
        for slot in slots {
            self.free_slot(&mut slabs, *slot);
        }
        self.publish(&slabs);
    }
}
