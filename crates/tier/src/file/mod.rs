//! The file tier: page copies in a file or block device, written in large sequential O_DIRECT
//! writes.
//!
//! ```text
//! file:        | slab 0: 256 slots of a page | slab 1 | ...       slot n = the n-th page
//! slot table:  | superblock 4 KiB | slots in use, 1 bit each | slabs with space, 1 bit each
//!              | checksums, 8 bytes a slot | pages that wait to be written, 1 MiB |
//! superblock:  | magic | slabs | quota and slabs with space | slots in use | mark | grant |
//!              8 bytes each
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
//! Locks: `writer` is held during I/O; only `store` takes it. `slabs` is held for bookkeeping only.
//! `free` takes only `slabs` and does no I/O, so it may be called from anywhere.

mod backing;
mod behind;
mod meter;
#[cfg(test)]
mod quota_tests;
mod room;
mod slabs;
mod table;
#[cfg(test)]
mod tests;

use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, FailKind, LatencyClass, LoadError, Loaded, Nanos, PageKey, PageSize,
    Slot, Stamp, Store, StoreError, Tier, TierFacts, TierInfo, TierUsage,
};
use undercroft_sys::mapping::{PageBuf, SharedMemory};

use crate::shape::{Shape, wait_until};
pub use backing::{Backing, BackingError};
use behind::Behind;
pub use behind::WAITING_PAGES_MAX;
use meter::Counters;
pub use meter::{FileCounts, FileMeter};
pub use room::{Room, Taken};
use slabs::{Bitmaps, Slabs};
use table::{behind_word, bitmaps_of, checked_slabs, checksums_word, quota_of};

/// Most bytes of space that a tier should have whose copies are of `logical`: twice that, and
/// 64 slabs. It may have more until the copies that are left are stored together.
pub fn space_max(logical: Bytes, page: PageSize) -> Bytes {
    let slots = logical.0 / page.bytes() as u64;
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
/// How often one write is continued after a short or interrupted one.
const WRITE_TRIES: u32 = 4;
/// Empty slabs that keep their space, so that a tier does not discard what it will write next. A
/// busy tier keeps as many as are in use.
const DIRTY_SLABS_KEPT: usize = 16;
/// Most discards at once. A read waits for a discard as long as for a write of 1 MiB.
const DISCARDS_AT_ONCE: usize = 2;
/// The same while an idle tier has more space than its quota: another run waits for it.
const DISCARDS_OVER: usize = 16;
/// Most slabs that are reserved before they are needed.
const RESERVE_MAX: u32 = 64;
/// After a failed write, `store` answers `Full` at once for this long. Doubled with each further
/// failure.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// First word of the slot table: "UCSLOT" and the version of the layout above.
const MAGIC: u64 = u64::from_le_bytes(*b"UCSLOT\x04\x00");
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
    #[error("{0} is too large for a file tier; give size= up to {max}", max = Bytes(SIZE_MAX))]
    TooLarge(Bytes),
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
    behind: Behind,
    key: PageKey,
    shape: Option<Shape>,
    writer: Mutex<Writer>,
    bell: Option<OwnedFd>,
    held: AtomicU64,
    counters: Arc<Counters>,
}

/// Working state of the one thread that stores at a time.
struct Writer {
    /// Copies of the pages in hand, aligned as the device needs them.
    pages: PageBuf,
    /// Slots of the part in hand.
    slots: Vec<u64>,
    /// Writes of the part in hand.
    runs: Vec<WriteRun>,
    /// While `store` refuses at once: until when, and how many writes in a row failed.
    paused: Option<(Instant, u32)>,
    /// The file's space up to this offset was asked for in large pieces ([`Backing::reserve`]).
    reserved: u64,
}

impl Writer {
    /// Asks for the space of all slabs up to `end` that are new, before one of them is written.
    fn reserve(&mut self, backing: &Backing, end: u64) {
        if end > self.reserved {
            backing.reserve(self.reserved, end - self.reserved);
            self.reserved = end;
        }
    }
}

/// A write: pages `start..end` to consecutive slots.
#[derive(Clone, Copy, Debug)]
struct WriteRun {
    start: usize,
    end: usize,
    slot: u64,
    /// How many pages from `start` are on the device.
    done: usize,
    tries: u32,
    failed: Option<FailKind>,
}

impl FileTier {
    /// Length of the slot table for this file.
    pub fn table_bytes(backing: &Backing) -> usize {
        let slabs = (backing.bytes().0 / slab_bytes(backing.page())) as usize;
        (behind_word(slabs, slab_slots(backing.page())) + behind::WORDS) * 8
    }

    /// A new, empty tier. `table`: all zeros, [`FileTier::table_bytes`] long.
    pub fn new(backing: Backing, table: SharedMemory, key: &PageKey) -> Made {
        let slabs = checked_slabs(&backing, &table)?;
        table.words()[SLABS_WORD].store(u64::from(slabs), Relaxed);
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
        let slabs = Slabs::from_bitmaps(bitmaps_of(&table, slab_count, slots), slab_count);
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
            writer: Mutex::new(Writer {
                pages: buffer.map_err(FileTierError::Memory)?,
                slots: Vec::with_capacity(BATCH_PAGES),
                runs: Vec::with_capacity(BATCH_PAGES),
                paused: None,
                reserved: u64::from(slabs.spare().end) * slab_bytes(page),
            }),
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
                visit(Slot(word as u64 * 64 + u64::from(bits.trailing_zeros())));
                bits &= bits - 1;
            }
        }
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

    fn store_part(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        if let Some((until, _)) = writer.paused
            && Instant::now() < until
        {
            self.counters
                .pages_paused
                .fetch_add(batch.len() as u64, Relaxed);
            return;
        }
        if self.behind.is_on() {
            self.store_behind(batch, writer)
        } else {
            self.store_directly(batch, writer)
        }
    }

    /// Writes the batch at once: from where its pages are, if the device can read them there.
    fn store_directly(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        self.take_slots(batch, writer);
        let given = &batch[..writer.slots.len()];
        if given.iter().all(is_aligned) {
            let parts: Vec<IoSlice<'_>> = given.iter().map(|it| IoSlice::new(it.page)).collect();
            self.write_runs(writer, Some(&parts));
        } else {
            for (at, item) in given.iter().enumerate() {
                writer.pages.page_mut(at).copy_from_slice(item.page);
            }
            self.write_runs(writer, None);
        }
        self.give_results(batch, writer);
    }

    /// Takes slots for as many pages of the batch as possible, and computes their checksums.
    /// Results are Full at first, so the other pages' stay so.
    fn take_slots(&self, batch: &[Store<'_>], writer: &mut Writer) {
        writer.slots.clear();
        let end = {
            let mut slabs = self.lock_slabs();
            slabs.alloc(self.bitmaps(), batch.len(), &mut writer.slots);
            self.publish(&slabs);
            slabs.spare().end
        };
        self.ring();
        writer.reserve(&self.backing, u64::from(end) * self.slab_bytes());
        for (item, &slot) in batch.iter().zip(&writer.slots) {
            let word = &self.table.words()[self.checksums_word + slot as usize];
            word.store(item.checksum, Relaxed);
            self.behind.forget(&self.table, slot);
        }
    }

    /// Adds the batch to the waiting pages, and writes all when there are enough. A large batch is
    /// written at once. So is a batch for which no places are free because the waiting pages cannot
    /// be written.
    fn store_behind(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        let stuck = self.behind.is_full() || self.behind.lacks(batch.len());
        let written = !stuck || self.write_waiting(writer).is_ok();
        if !written || self.behind.is_enough(batch.len()) {
            return self.store_directly(batch, writer);
        }
        self.take_slots(batch, writer);
        for (item, &slot) in batch.iter_mut().zip(&writer.slots) {
            self.behind.add(&self.table, slot, item.page);
            item.result = Ok(Slot(slot));
        }
        if !self.behind.is_full() {
            return;
        }
        let Err(kind) = self.write_waiting(writer) else {
            writer.paused = None;
            return;
        };
        // Refused pages of this batch stay with the caller: their slots are freed, and they do not
        // wait. Refused pages of earlier batches stay here.
        let mut refused = 0;
        let mut slabs = self.lock_slabs();
        for (_, slot) in self.behind.waiting(&self.table) {
            let of = batch.iter_mut().find(|item| item.result == Ok(Slot(slot)));
            if let Some(item) = of {
                item.result = Err(StoreError::Failed(kind));
                refused += 1;
                slabs.free(self.bitmaps(), slot);
            }
        }
        self.publish(&slabs);
        drop(slabs);
        if refused > 0 {
            self.failed(kind, refused, writer);
        }
    }

    /// Writes all waiting pages. Error: some of them still wait.
    fn write_waiting(&self, writer: &mut Writer) -> Result<(), FailKind> {
        let (mut places, mut count) = ([0; WAITING_PAGES_MAX], 0);
        writer.slots.clear();
        for (place, slot) in self.behind.waiting(&self.table) {
            if !self.bitmaps().is_taken(slot) {
                self.behind.remove(&self.table, place); // freed while it waited
                continue;
            }
            let page = writer.pages.page_mut(count);
            self.behind.copy(&self.table, place, page);
            writer.slots.push(slot);
            places[count] = place;
            count += 1;
        }
        self.write_runs(writer, None);
        let mut result = Ok(());
        for run in &writer.runs {
            for (at, place) in places.iter().enumerate().take(run.end).skip(run.start) {
                match run.failed {
                    Some(kind) if at >= run.start + run.done => result = Err(kind),
                    _ => self.behind.remove(&self.table, *place),
                }
            }
        }
        self.behind.rewind(&self.table);
        result
    }

    /// Writes the pages in hand to their slots. Each run ends complete, or with `failed` set.
    ///
    /// By plain system calls: a batch is mostly one run, and the caller waits for it anyway.
    ///
    /// * `given`: where the pages are; `None`: copies of them are in the writer's buffer.
    fn write_runs(&self, writer: &mut Writer, given: Option<&[IoSlice<'_>]>) {
        let page = self.page_bytes();
        writer.runs.clear();
        for (at, &slot) in writer.slots.iter().enumerate() {
            match writer.runs.last_mut() {
                Some(run) if run.slot + (at - run.start) as u64 == slot => run.end = at + 1,
                _ => writer.runs.push(WriteRun {
                    start: at,
                    end: at + 1,
                    slot,
                    done: 0,
                    tries: 0,
                    failed: None,
                }),
            }
        }
        let mut end = None;
        for run in &mut writer.runs {
            if let Some(shape) = &self.shape {
                let bytes = ((run.end - run.start) * page) as u64;
                end = end.max(Some(shape.write(run.slot * page as u64, bytes)));
            }
            while run.failed.is_none() && run.start + run.done < run.end {
                run.tries += 1;
                let offset = (run.slot + run.done as u64) * page as u64;
                let (from, file) = (run.start + run.done, self.backing.file());
                let written = match given {
                    Some(parts) => rustix::io::pwritev(file, &parts[from..run.end], offset),
                    None => {
                        let bytes = &writer.pages[from * page..run.end * page];
                        rustix::io::pwrite(file, bytes, offset)
                    }
                };
                self.counters.writes.fetch_add(1, Relaxed);
                match written {
                    Ok(written) => {
                        let bytes = &self.counters.bytes_written;
                        bytes.fetch_add(written as u64, Relaxed);
                        run.done += written / page;
                    }
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(errno) => run.failed = Some(fail_kind(errno)),
                }
                // A short write: trying the rest shows what stopped it.
                if run.tries >= WRITE_TRIES && run.start + run.done < run.end {
                    run.failed.get_or_insert(FailKind::Io);
                }
            }
        }
        if let Some(end) = end {
            wait_until(end);
        }
    }

    /// Fills in the results, frees the slots of pages that were not written, and decides on a
    /// pause.
    fn give_results(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        let (mut failure, mut refused) = (None, 0);
        for run in &writer.runs {
            let items = batch.iter_mut().zip(&writer.slots);
            for (at, (item, &slot)) in items.enumerate().take(run.end).skip(run.start) {
                item.result = match run.failed {
                    Some(kind) if at >= run.start + run.done => {
                        failure = Some(kind);
                        refused += 1;
                        Err(StoreError::Failed(kind))
                    }
                    _ => Ok(Slot(slot)),
                };
            }
        }
        let Some(kind) = failure else {
            writer.paused = None;
            return;
        };
        let mut slabs = self.lock_slabs();
        for (item, &slot) in batch.iter().zip(&writer.slots) {
            if item.result.is_err() {
                slabs.free(self.bitmaps(), slot);
            }
        }
        self.publish(&slabs);
        drop(slabs);
        self.failed(kind, refused, writer);
    }

    /// The device refused `pages` of a batch: the next ones are refused at once for a while.
    fn failed(&self, kind: FailKind, pages: usize, writer: &mut Writer) {
        let counter = match kind {
            FailKind::NoSpace => &self.counters.pages_no_space,
            FailKind::Io => &self.counters.pages_failed,
        };
        counter.fetch_add(pages as u64, Relaxed);
        let times = writer.paused.map_or(0, |(_, times)| times);
        let pause = PAUSE_FIRST
            .saturating_mul(1 << times.min(10))
            .min(PAUSE_MAX);
        writer.paused = Some((Instant::now() + pause, times + 1));
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
        let slots = self.table.words()[USED_WORD].load(Relaxed);
        let logical = Bytes(slots * self.page_bytes() as u64);
        TierUsage {
            logical,
            stored: logical,
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
            Slot(first)..Slot(first + each)
        };
        slabs.into_iter().map(slots).collect()
    }

    fn gathered(&self) {
        self.lock_slabs().stay();
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let checksum = self.checksum(slot, stamp).ok_or(LoadError::Corrupt)?;
        let behind = self
            .behind
            .load(&self.table, slot.0, (&self.key, stamp, checksum), dst);
        match behind {
            None => Ok(Loaded::Read {
                fd: self.backing.file().as_raw_fd(),
                offset: slot.0 * self.page_bytes() as u64,
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

    fn checksum(&self, slot: Slot, _stamp: Stamp) -> Option<u64> {
        let known = slot.0 < self.slot_count && self.bitmaps().is_taken(slot.0);
        known.then(|| self.table.words()[self.checksums_word + slot.0 as usize].load(Relaxed))
    }

    fn free(&self, slots: &[Slot]) {
        let mut slabs = self.lock_slabs();
        for slot in slots {
            slabs.free(self.bitmaps(), slot.0);
        }
        self.publish(&slabs);
    }
}

/// A device with O_DIRECT reads whole pages.
fn is_aligned(item: &Store<'_>) -> bool {
    item.page.as_ptr().addr().is_multiple_of(BASE_PAGE_BYTES)
}

fn fail_kind(errno: Errno) -> FailKind {
    match errno {
        // EFBIG: a limit on file sizes. For us it is the same as a full file system.
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => FailKind::NoSpace,
        _ => FailKind::Io,
    }
}
