//! The way of a batch to the file: pages become blocks, blocks get slots, and are written in large
//! runs, at once or after they waited ([`Behind`](super::behind::Behind)).
//!
//! A block is a page as it is, or, in a packed tier, several compressed pages of one batch: pages
//! that leave together come back together. Blocks are in the order of their first pages.

use std::io::IoSlice;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use undercroft_base::{BASE_PAGE_BYTES, FailKind, Slot, Store, StoreError};
use undercroft_sys::mapping::PageBuf;

use super::behind::WAITING_PAGES_MAX;
use super::parts::{self, Evidence, PARTS_MAX};
use super::slabs::Slabs;
use super::{BATCH_PAGES, Backing, FileTier};
use crate::shape::wait_until;

/// How often one write is continued after a short or interrupted one.
const WRITE_TRIES: u32 = 4;
/// After a failed write, `store` answers `Full` at once for this long. Doubled with each further
/// failure.
pub(super) const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// Longest such pause.
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Blocks that a compressed page is tried in, before it begins another.
const OPEN_BLOCKS: usize = 4;

/// Working state of the one thread that stores at a time.
pub(super) struct Writer {
    /// Blocks in hand, aligned as the device needs them: those that are packed, or copies of pages.
    pages: PageBuf,
    work: Work,
    /// While `store` refuses at once: until when, and how many writes in a row failed.
    paused: Option<(Instant, u32)>,
    /// The file's space up to this offset was asked for in large pieces ([`Backing::reserve`]).
    pub(super) reserved: u64,
    evidence: Evidence,
}

/// The part of a batch in hand.
struct Work {
    /// Where each page of the batch is: block in hand, and part of it.
    places: Vec<(usize, u8)>,
    blocks: Vec<Block>,
    /// Slots of blocks in hand. There may be fewer than blocks.
    slots: Vec<u64>,
    /// Writes of blocks in hand.
    runs: Vec<WriteRun>,
}

/// A block in hand.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Its first page, by place in the batch.
    first: usize,
    /// Compressed pages in it; 0: it is a page as it is.
    parts: u8,
    bytes: usize,
}

/// A write: blocks `start..end` to consecutive slots.
#[derive(Clone, Copy, Debug)]
struct WriteRun {
    start: usize,
    end: usize,
    slot: u64,
    /// How many blocks from `start` are on the device.
    done: usize,
    tries: u32,
    failed: Option<FailKind>,
}

impl WriteRun {
    /// Why this block, one of its own, is not on the device.
    fn failure(&self, block: usize) -> Option<FailKind> {
        self.failed.filter(|_| block >= self.start + self.done)
    }
}

/// Where the bytes of blocks in hand are.
enum From<'a> {
    Anywhere(&'a [IoSlice<'a>]),
    Buffer(&'a PageBuf),
}

impl Writer {
    pub(super) fn new(pages: PageBuf, reserved: u64) -> Writer {
        Writer {
            pages,
            work: Work {
                places: Vec::with_capacity(BATCH_PAGES),
                blocks: Vec::with_capacity(BATCH_PAGES),
                slots: Vec::with_capacity(BATCH_PAGES),
                runs: Vec::with_capacity(BATCH_PAGES),
            },
            paused: None,
            reserved,
            evidence: Evidence::default(),
        }
    }

    /// Asks for the space of all slabs up to `end` that are new, before one of them is written.
    fn reserve(&mut self, backing: &Backing, end: u64) {
        if end > self.reserved {
            backing.reserve(self.reserved, end - self.reserved);
            self.reserved = end;
        }
    }

    /// Makes blocks of a batch. Those that are packed are in `pages` afterwards.
    fn arrange(&mut self, batch: &[Store<'_>], packs: bool) {
        let Writer {
            pages,
            work,
            evidence,
            ..
        } = self;
        work.places.clear();
        work.blocks.clear();
        for (first, item) in batch.iter().enumerate() {
            let pack = |bytes: &[u8]| work.pack(pages, first, bytes);
            if !packs || evidence.compress(item.page, pack).is_none() {
                work.places.push((work.blocks.len(), 0));
                work.blocks.push(Block {
                    first,
                    parts: 0,
                    bytes: 0,
                });
            }
        }
        // A page alone in its block is stored as it is: a read is quicker.
        for block in work.blocks.iter_mut().filter(|block| block.parts == 1) {
            block.parts = 0;
            work.places[block.first].1 = 0;
        }
    }
}

impl Work {
    /// Puts a compressed page into a block with room for it, or into a new one.
    fn pack(&mut self, pages: &mut PageBuf, first: usize, bytes: &[u8]) {
        let fits = |block: &&mut Block| {
            let parts = usize::from(block.parts);
            parts < PARTS_MAX && block.bytes + bytes.len() <= BASE_PAGE_BYTES
        };
        let open = self.blocks.iter_mut().enumerate().rev();
        let mut open = open.filter(|(_, block)| block.parts > 0).take(OPEN_BLOCKS);
        let at = open.find(|(_, block)| fits(block)).map(|(at, _)| at);
        let at = at.unwrap_or_else(|| {
            let at = self.blocks.len();
            let bytes = parts::begin(pages.page_mut(at));
            self.blocks.push(Block {
                first,
                parts: 0,
                bytes,
            });
            at
        });
        let block = &mut self.blocks[at];
        block.parts += 1;
        let to = (block.bytes, block.parts);
        block.bytes = parts::append(pages.page_mut(at), to, bytes);
        self.places.push((at, block.parts));
    }
}

impl FileTier {
    pub(super) fn store_part(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
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
            writer.arrange(batch, self.parts.is_some());
            self.store_directly(batch, writer)
        }
    }

    /// Writes the blocks in hand at once: from where their pages are, if the device can read them
    /// there.
    fn store_directly(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        self.take_slots(batch, writer);
        let Writer { pages, work, .. } = writer;
        let given = &work.blocks[..work.slots.len()];
        let whole = given.iter().filter(|block| block.parts == 0);
        if whole.clone().all(|block| is_aligned(&batch[block.first])) {
            let bytes = |(at, block): (usize, &Block)| {
                IoSlice::new(block_bytes(block, batch, pages.page(at)))
            };
            let parts: Vec<IoSlice<'_>> = given.iter().enumerate().map(bytes).collect();
            self.write_runs(&work.slots, &mut work.runs, From::Anywhere(&parts));
        } else {
            for (at, block) in given.iter().enumerate() {
                if block.parts == 0 {
                    pages.page_mut(at).copy_from_slice(batch[block.first].page);
                }
            }
            self.write_runs(&work.slots, &mut work.runs, From::Buffer(pages));
        }
        self.give_results(batch, writer);
    }

    /// Takes slots for as many blocks in hand as possible, and notes the checksums of their pages.
    /// Results are Full at first, so the other pages' stay so.
    fn take_slots(&self, batch: &[Store<'_>], writer: &mut Writer) {
        let work = &mut writer.work;
        work.slots.clear();
        let end = {
            let mut slabs = self.lock_slabs();
            slabs.alloc(self.bitmaps(), work.blocks.len(), &mut work.slots);
            if let Some(parts) = &self.parts {
                let places = work.places.iter();
                let slots = places.filter_map(|place| self.slot_of(&work.slots, *place));
                slots.for_each(|slot| parts.take(&self.table, slot));
            }
            self.publish(&slabs);
            slabs.spare().end
        };
        self.ring();
        for (item, place) in batch.iter().zip(&work.places) {
            if let Some(slot) = self.slot_of(&work.slots, *place) {
                self.sum_word(slot).store(item.checksum, Relaxed);
            }
        }
        for slot in &work.slots {
            self.behind.forget(&self.table, *slot);
        }
        writer.reserve(&self.backing, u64::from(end) * self.slab_bytes());
    }

    /// The slot of a page at a place of the blocks in hand; `None`: there is none for its block.
    fn slot_of(&self, slots: &[u64], (block, part): (usize, u8)) -> Option<Slot> {
        slots.get(block).map(|slot| self.slot(*slot, part))
    }

    /// Adds the batch to the waiting blocks, and writes all when there are enough. A large batch is
    /// written at once. So is a batch for which no places are free because the waiting blocks
    /// cannot be written.
    fn store_behind(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        // Its blocks are no more than its pages.
        let stuck = self.behind.is_full() || self.behind.lacks(batch.len());
        let written = !stuck || self.write_waiting(writer).is_ok();
        writer.arrange(batch, self.parts.is_some());
        if !written || self.behind.is_enough(writer.work.blocks.len()) {
            return self.store_directly(batch, writer);
        }
        self.take_slots(batch, writer);
        let work = &writer.work;
        for (at, (block, slot)) in work.blocks.iter().zip(&work.slots).enumerate() {
            let bytes = block_bytes(block, batch, writer.pages.page(at));
            self.behind.add(&self.table, *slot, bytes);
        }
        for (item, place) in batch.iter_mut().zip(&work.places) {
            let slot = self.slot_of(&work.slots, *place);
            item.result = slot.ok_or(StoreError::Full);
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
        for (_, block) in self.behind.waiting(&self.table) {
            let is_of = |item: &&mut Store<'_>| {
                let slot = item.result.as_ref().ok();
                slot.is_some_and(|slot| self.block_of(*slot) == block)
            };
            for item in batch.iter_mut().filter(is_of) {
                self.free_slot(&mut slabs, item.result.expect("it has a slot"));
                item.result = Err(StoreError::Failed(kind));
                refused += 1;
            }
        }
        self.publish(&slabs);
        drop(slabs);
        if refused > 0 {
            self.failed(kind, refused, writer);
        }
    }

    /// Writes all waiting blocks. Error: some of them still wait.
    fn write_waiting(&self, writer: &mut Writer) -> Result<(), FailKind> {
        let (mut places, mut count) = ([0; WAITING_PAGES_MAX], 0);
        let Writer { pages, work, .. } = writer;
        work.slots.clear();
        for (place, slot) in self.behind.waiting(&self.table) {
            if !self.bitmaps().is_taken(slot) {
                self.behind.remove(&self.table, place); // freed while it waited
                continue;
            }
            self.behind.copy(&self.table, place, pages.page_mut(count));
            work.slots.push(slot);
            places[count] = place;
            count += 1;
        }
        self.write_runs(&work.slots, &mut work.runs, From::Buffer(pages));
        let mut result = Ok(());
        for run in &work.runs {
            for (at, place) in places.iter().enumerate().take(run.end).skip(run.start) {
                match run.failure(at) {
                    Some(kind) => result = Err(kind),
                    None => self.behind.remove(&self.table, *place),
                }
            }
        }
        self.behind.rewind(&self.table);
        result
    }

    /// Writes the blocks in hand to their slots. Each run ends complete, or with `failed` set.
    ///
    /// By plain system calls: a batch is mostly one run, and the caller waits for it anyway.
    fn write_runs(&self, slots: &[u64], runs: &mut Vec<WriteRun>, from: From<'_>) {
        let page = self.page_bytes();
        runs.clear();
        for (at, &slot) in slots.iter().enumerate() {
            match runs.last_mut() {
                Some(run) if run.slot + (at - run.start) as u64 == slot => run.end = at + 1,
                _ => runs.push(WriteRun {
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
        for run in runs {
            if let Some(shape) = &self.shape {
                let bytes = ((run.end - run.start) * page) as u64;
                end = end.max(Some(shape.write(run.slot * page as u64, bytes)));
            }
            while run.failed.is_none() && run.start + run.done < run.end {
                self.write_some(run, &from);
            }
        }
        if let Some(end) = end {
            wait_until(end);
        }
    }

    /// Writes what is left of a run, as far as one system call does.
    fn write_some(&self, run: &mut WriteRun, from: &From<'_>) {
        let page = self.page_bytes();
        run.tries += 1;
        let offset = (run.slot + run.done as u64) * page as u64;
        let (first, file) = (run.start + run.done, self.backing.file());
        let written = match from {
            From::Anywhere(parts) => rustix::io::pwritev(file, &parts[first..run.end], offset),
            From::Buffer(pages) => {
                rustix::io::pwrite(file, &pages[first * page..run.end * page], offset)
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

    /// Fills in the results, frees the slots of pages that were not written, and decides on a
    /// pause.
    fn give_results(&self, batch: &mut [Store<'_>], writer: &mut Writer) {
        let work = &writer.work;
        let (mut failure, mut refused) = (None, Vec::new());
        for (item, place) in batch.iter_mut().zip(&work.places) {
            let Some(slot) = self.slot_of(&work.slots, *place) else {
                continue;
            };
            let has = |run: &&WriteRun| (run.start..run.end).contains(&place.0);
            let run = work.runs.iter().find(has);
            item.result = match run.and_then(|run| run.failure(place.0)) {
                Some(kind) => {
                    failure = Some(kind);
                    refused.push(slot);
                    Err(StoreError::Failed(kind))
                }
                None => Ok(slot),
            };
        }
        let Some(kind) = failure else {
            writer.paused = None;
            return;
        };
        let mut slabs = self.lock_slabs();
        for slot in &refused {
            self.free_slot(&mut slabs, *slot);
        }
        self.publish(&slabs);
        drop(slabs);
        self.failed(kind, refused.len(), writer);
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

    /// Frees a slot. The caller publishes.
    pub(super) fn free_slot(&self, slabs: &mut Slabs, slot: Slot) {
        let is_last = match &self.parts {
            Some(parts) => parts.free(&self.table, slot),
            None => true,
        };
        if is_last {
            slabs.free(self.bitmaps(), self.block_of(slot));
        }
    }
}

/// The bytes of a block in hand. `packed`: those that it has if it is packed.
fn block_bytes<'a>(block: &Block, batch: &'a [Store<'_>], packed: &'a [u8]) -> &'a [u8] {
    if block.parts == 0 {
        batch[block.first].page
    } else {
        packed
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
