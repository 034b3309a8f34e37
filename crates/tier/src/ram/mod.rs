//! The compressed RAM tier ("pool"): page copies in a memfd that outlives the manager.
//!
//! ```text
//! memfd:   | superblock 4 KiB | directory, 64 bytes a block | block 0 | block 1 | ...      (sparse)
//! block:   | object | object | ...            all of one class; 32 KiB of address space, 1 to 8 pages used
//! object:  | checksum 8 | stamp 2 | length 2 (12 bits) and compressor (4 bits) | compressed bytes ... |
//! slot  =  offset of the object in the memfd / 16
//! ```
//! `load` finds the object from the slot alone: no lock, no directory. `store` compresses without the lock, takes
//! places for the batch under one short lock, and copies in without it. Empty blocks go back to the
//! operating system, but for a few.
//!
//! A slot that is read while it is freed and used anew gives a copy that does not verify; bytes are copied out of the
//! shared memory before anything interprets them.

mod classes;
mod compressor;
mod heap;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{
    Bytes, LoadError, Loaded, PAGE_BYTES, Slot, Stamp, Store, StoreError, Tier, TierInfo, TierKind,
    TierUsage, page_checksum,
};
use undercroft_sys::mapping::SharedMemory;

use classes::{ALIGN_BYTES, BLOCK_BYTES, CLASSES, OBJECT_BYTES_MAX, class_of};
pub use compressor::{Compressor, UnknownCompressor};
use compressor::{Scratch, with_scratch};
use heap::{DIRECTORY_BYTES, Directory, Emptied, Heap};

/// Bytes before the compressed ones.
const HEADER_BYTES: usize = 12;
/// Pages compressed before the lock is taken; bounds each thread's scratch memory to 264 KiB.
const BATCH_PAGES: usize = 64;
/// Blocks given back to the operating system at a time.
const EMPTIED_BATCH: usize = 32;
/// First word of the superblock: "UCPOOL" and the version of everything in this file and `classes.rs`.
const MAGIC: u64 = u64::from_le_bytes(*b"UCPOOL\x01\x00");
/// Superblock words.
const MAGIC_WORD: usize = 0;
const USED_WORD: usize = 1;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RamPoolError {
    /// The memory has no room for one block, or slots would not fit a page entry.
    #[error("a RAM pool cannot have {0} of address space (from {min} to {max})", min = RamPool::reserve_for(Bytes(0)), max = Bytes(RESERVE_MAX))]
    Reserve(Bytes),
    /// `recover` found no pool of this version.
    #[error("the shared memory holds no RAM pool of this version")]
    NotAPool,
}

/// Slots are offsets in units of 16 bytes.
const RESERVE_MAX: u64 = Slot::LIMIT * ALIGN_BYTES as u64;

/// The compressed RAM tier.
pub struct RamPool {
    memory: SharedMemory,
    info: TierInfo,
    compressor: Compressor,
    heap: Mutex<Heap>,
    data_offset: usize,
    blocks: u32,
    logical: AtomicU64,
    stored: AtomicU64,
    held: AtomicU64,
    capacity: AtomicU64,
}

/// What stands before an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    checksum: u64,
    stamp: Stamp,
    length: u16,
    code: u8,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.stamp.0.to_le_bytes());
        bytes[10..].copy_from_slice(&(self.length << 4 | u16::from(self.code)).to_le_bytes());
        bytes
    }

    /// From the object's first two words; the upper half of the second is compressed bytes.
    fn from_words(first: u64, second: u64) -> Header {
        let tail = (second >> 16) as u16;
        Header {
            checksum: first,
            stamp: Stamp(second as u16),
            length: tail >> 4,
            code: tail as u8 & 15,
        }
    }
}

impl RamPool {
    /// Address space a pool should be given so that `capacity` bytes of memory surely fit: blocks use
    /// 1 to 8 of their 8 pages.
    /// Address space costs nothing until it is used.
    pub const fn reserve_for(capacity: Bytes) -> Bytes {
        let blocks = capacity.0.div_ceil(PAGE_BYTES as u64) + 1;
        let directory = (blocks * DIRECTORY_BYTES).next_multiple_of(BLOCK_BYTES as u64);
        Bytes(PAGE_BYTES as u64 + directory + BLOCK_BYTES as u64 * (blocks + 1))
    }

    /// A new, empty pool in `memory`, which must be all zeros; its length is the address space the pool may ever use
    /// (see [`RamPool::reserve_for`]). `capacity`: most bytes held; see [`RamPool::set_capacity`].
    pub fn new(
        memory: SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
    ) -> Result<RamPool, RamPoolError> {
        let (blocks, data_offset) = layout(memory.len())?;
        memory.words()[MAGIC_WORD].store(MAGIC, Relaxed);
        let heap = Heap::new(blocks, heap_capacity(capacity));
        let pool = RamPool::with_heap(memory, compressor, capacity, heap, blocks, data_offset);
        pool.publish_held(&pool.lock());
        Ok(pool)
    }

    /// The pool that an earlier manager left in `memory`, with every object it held. Objects that no page entry names (the manager
    /// died between storing and publishing) are the caller's to free: see [`RamPool::for_each_slot`].
    /// Cost: one cache line a block, one an object.
    pub fn recover(
        memory: SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
    ) -> Result<RamPool, RamPoolError> {
        let (blocks, data_offset) = layout(memory.len())?;
        if memory.words()[MAGIC_WORD].load(Relaxed) != MAGIC {
            return Err(RamPoolError::NotAPool);
        }
        let used = memory.words()[USED_WORD].load(Relaxed);
        let used = u32::try_from(used).unwrap_or(u32::MAX);
        let directory = directory_of(&memory);
        let heap = Heap::recover(directory, blocks, used, heap_capacity(capacity));
        let pool = RamPool::with_heap(memory, compressor, capacity, heap, blocks, data_offset);
        let (mut logical, mut stored) = (0, 0);
        pool.for_each_slot(|slot| {
            logical += PAGE_BYTES as u64;
            stored += pool.object_bytes(slot);
        });
        pool.logical.store(logical, Relaxed);
        pool.stored.store(stored, Relaxed);
        let used = pool.lock().used();
        pool.punch_free_blocks(used);
        pool.publish_held(&pool.lock());
        Ok(pool)
    }

    fn with_heap(
        memory: SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
        heap: Heap,
        blocks: u32,
        data_offset: usize,
    ) -> RamPool {
        RamPool {
            info: TierInfo {
                name: "ram".to_owned(),
                kind: TierKind::Ram,
                emulated: false,
                capacity,
            },
            memory,
            compressor,
            heap: Mutex::new(heap),
            data_offset,
            blocks,
            logical: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            held: AtomicU64::new(0),
            capacity: AtomicU64::new(capacity.0),
        }
    }

    /// Changes how many bytes the pool may hold. Below what it holds now, nothing is lost: stores that need memory are
    /// refused with `Full` until enough has been freed.
    pub fn set_capacity(&self, capacity: Bytes) {
        self.capacity.store(capacity.0, Relaxed);
        self.lock().set_capacity(heap_capacity(capacity));
        self.trim();
    }

    /// The capacity now; `info` keeps the one given at the start.
    pub fn capacity(&self) -> Bytes {
        Bytes(self.capacity.load(Relaxed))
    }

    /// The compressor of new copies.
    pub fn compressor(&self) -> Compressor {
        self.compressor
    }

    /// Gives the memory of all empty blocks back to the operating system.
    pub fn trim(&self) {
        loop {
            let mut emptied = [Emptied::default(); EMPTIED_BATCH];
            let mut count = 0;
            {
                let mut heap = self.lock();
                while count < EMPTIED_BATCH {
                    let Some(block) = heap.take_empty(self.directory()) else {
                        break;
                    };
                    emptied[count] = block;
                    count += 1;
                }
            }
            self.give_back(&mut emptied[..count]);
            if count < EMPTIED_BATCH {
                return;
            }
        }
    }

    /// Allocates this thread's working memory, so that its first `load` or `store` does not.
    pub fn warm_thread(&self) {
        with_scratch(|scratch| scratch.reserve(self.compressor, BATCH_PAGES));
    }

    /// Calls `visit` with every slot that is taken; for takeover, while nobody stores or frees.
    pub fn for_each_slot(&self, mut visit: impl FnMut(Slot)) {
        let used = self.lock().used();
        let directory = self.directory();
        for block in 0..used {
            let Some((class, _)) = directory.state(block) else {
                continue;
            };
            for index in 0..CLASSES[class].objects {
                if directory.is_live(block, index) {
                    visit(self.slot(block, class, index));
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Heap> {
        // A panic under the lock comes from `free`'s check, before anything was changed.
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self) -> Directory<'_> {
        directory_of(&self.memory)
    }

    fn publish_held(&self, heap: &Heap) {
        self.memory.words()[USED_WORD].store(u64::from(heap.used()), Relaxed);
        self.held.store(heap.held() + PAGE_BYTES as u64, Relaxed);
    }

    fn slot(&self, block: u32, class: usize, index: u16) -> Slot {
        let inside = CLASSES[class].object_bytes as usize * index as usize;
        let offset = self.data_offset + block as usize * BLOCK_BYTES + inside;
        Slot((offset / ALIGN_BYTES) as u64)
    }

    /// The block and index of a slot; panics when it is no slot of this pool: the caller's books are wrong.
    fn place(&self, slot: Slot) -> (u32, u16) {
        let place = || {
            let offset = (slot.0 as usize * ALIGN_BYTES).checked_sub(self.data_offset)?;
            let block = u32::try_from(offset / BLOCK_BYTES).ok()?;
            let (class, _) = (block < self.blocks).then(|| self.directory().state(block))??;
            let inside = offset % BLOCK_BYTES;
            let bytes = CLASSES[class].object_bytes as usize;
            let index = (inside / bytes) as u16;
            (inside.is_multiple_of(bytes) && index < CLASSES[class].objects)
                .then_some((block, index))
        };
        place().unwrap_or_else(|| panic!("{slot:?} is not a taken slot of the RAM pool"))
    }

    /// The offset and header of an object; `None` when no object can be there.
    fn header(&self, slot: Slot) -> Option<(usize, Header)> {
        let offset = usize::try_from(slot.0).ok()?.checked_mul(ALIGN_BYTES)?;
        if offset < self.data_offset || offset + ALIGN_BYTES > self.memory.len() {
            return None;
        }
        let words = self.memory.words().get(offset / 8..offset / 8 + 2)?;
        let header = Header::from_words(words[0].load(Relaxed), words[1].load(Relaxed));
        let bytes = HEADER_BYTES + usize::from(header.length);
        (bytes <= OBJECT_BYTES_MAX && offset + bytes <= self.memory.len())
            .then_some((offset, header))
    }

    fn object_bytes(&self, slot: Slot) -> u64 {
        self.header(slot)
            .map_or(0, |(_, header)| u64::from(header.length))
    }

    fn store_batch(&self, batch: &mut [Store<'_>], scratch: &mut Scratch) {
        scratch.reserve(self.compressor, batch.len());
        // (start in `scratch.objects`, length); length 0: not to be stored.
        let mut objects = [(0usize, 0usize); BATCH_PAGES];
        let mut at = 0;
        for (item, object) in batch.iter_mut().zip(&mut objects) {
            assert_eq!(
                item.page.len(),
                PAGE_BYTES,
                "a page to store is not one page"
            );
            let length = scratch.compress(self.compressor, item.page, at + HEADER_BYTES);
            let Some(length) = length.filter(|length| HEADER_BYTES + length <= OBJECT_BYTES_MAX)
            else {
                item.result = Err(StoreError::Incompressible);
                continue;
            };
            let header = Header {
                checksum: item.checksum,
                stamp: item.stamp,
                length: length as u16,
                code: self.compressor.code(),
            };
            scratch.objects[at..at + HEADER_BYTES].copy_from_slice(&header.to_bytes());
            *object = (at, HEADER_BYTES + length);
            at += HEADER_BYTES + length;
        }
        if self.place_objects(batch, &objects) {
            // Other classes' empty blocks are memory too: give them back and try once more.
            self.trim();
            self.place_objects(batch, &objects);
        }
        let (mut logical, mut stored) = (0, 0);
        for (item, (start, bytes)) in batch.iter().zip(objects) {
            if bytes == 0 {
                continue;
            }
            if let Ok(slot) = item.result {
                let offset = slot.0 as usize * ALIGN_BYTES;
                self.memory
                    .bytes_in(offset, &scratch.objects[start..start + bytes]);
                logical += PAGE_BYTES as u64;
                stored += (bytes - HEADER_BYTES) as u64;
            }
        }
        self.logical.fetch_add(logical, Relaxed);
        self.stored.fetch_add(stored, Relaxed);
    }

    /// Gives every object without a slot one, under one lock. True when some were refused although
    /// memory might be found.
    fn place_objects(&self, batch: &mut [Store<'_>], objects: &[(usize, usize)]) -> bool {
        let mut refused = false;
        let mut heap = self.lock();
        for (item, &(_, bytes)) in batch.iter_mut().zip(objects) {
            if bytes == 0 || item.result.is_ok() {
                continue;
            }
            let place = class_of(bytes).and_then(|class| heap.alloc(self.directory(), class));
            item.result = match place {
                Some(place) => Ok(self.slot(place.block, place.class.into(), place.index)),
                None => {
                    refused = true;
                    Err(StoreError::Full)
                }
            };
        }
        self.publish_held(&heap);
        refused && heap.has_empty()
    }

    /// Returns the memory of emptied blocks to the operating system, then the blocks to the heap.
    fn give_back(&self, emptied: &mut [Emptied]) {
        if emptied.is_empty() {
            return;
        }
        emptied.sort_unstable_by_key(|emptied| emptied.block);
        for run in emptied.chunk_by(|a, b| a.block + 1 == b.block) {
            self.punch(run[0].block, run.len() as u32);
        }
        let mut heap = self.lock();
        for &block in emptied.iter() {
            heap.reclaim(self.directory(), block);
        }
        self.publish_held(&heap);
    }

    fn punch(&self, block: u32, count: u32) {
        let offset = self.data_offset + block as usize * BLOCK_BYTES;
        // A memfd refuses this only when it is sealed or the kernel is out of memory; the block is used anew either
        // way, and its memory is counted again then.
        let _ = self.memory.punch(offset, count as usize * BLOCK_BYTES);
    }

    fn punch_free_blocks(&self, used: u32) {
        let directory = self.directory();
        let mut block = 0;
        while block < used {
            let end = (block..used)
                .find(|&block| directory.state(block).is_some())
                .unwrap_or(used);
            if end > block {
                self.punch(block, end - block);
            }
            block = end + 1;
        }
    }
}

impl Tier for RamPool {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn usage(&self) -> TierUsage {
        TierUsage {
            logical: Bytes(self.logical.load(Relaxed)),
            stored: Bytes(self.stored.load(Relaxed)),
            held: Bytes(self.held.load(Relaxed)),
        }
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        with_scratch(|scratch| {
            for item in batch.iter_mut() {
                item.result = Err(StoreError::Full);
            }
            for part in batch.chunks_mut(BATCH_PAGES) {
                self.store_batch(part, scratch);
            }
        });
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let (offset, header) = self.header(slot).ok_or(LoadError::Corrupt)?;
        let compressor = Compressor::from_code(header.code).ok_or(LoadError::Corrupt)?;
        if header.stamp != stamp || header.length == 0 {
            return Err(LoadError::Corrupt);
        }
        let bytes = usize::from(header.length);
        let whole = with_scratch(|scratch| {
            self.memory
                .bytes_out(offset + HEADER_BYTES, &mut scratch.object[..bytes]);
            scratch.decompress(compressor, bytes, dst)
        });
        if whole && page_checksum(dst, stamp) == header.checksum {
            Ok(Loaded::Done)
        } else {
            Err(LoadError::Corrupt)
        }
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        let (_, header) = self.header(slot)?;
        (header.stamp == stamp && header.length != 0).then_some(header.checksum)
    }

    fn free(&self, slots: &[Slot]) {
        for slots in slots.chunks(EMPTIED_BATCH) {
            // Headers are likely out of cache: read them before the lock is taken.
            let stored: u64 = slots.iter().map(|&slot| self.object_bytes(slot)).sum();
            let mut emptied = [Emptied::default(); EMPTIED_BATCH];
            let mut count = 0;
            {
                let mut heap = self.lock();
                for &slot in slots {
                    let (block, index) = self.place(slot);
                    if let Some(block) = heap.free(self.directory(), block, index) {
                        emptied[count] = block;
                        count += 1;
                    }
                }
                while count < EMPTIED_BATCH
                    && let Some(block) = heap.take_surplus(self.directory())
                {
                    emptied[count] = block;
                    count += 1;
                }
            }
            subtract(&self.logical, (slots.len() * PAGE_BYTES) as u64);
            subtract(&self.stored, stored);
            self.give_back(&mut emptied[..count]);
        }
    }
}

/// Saturates: a flipped bit in a header's length must not make the usage absurd.
fn subtract(count: &AtomicU64, by: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(by)));
}

/// Blocks, and where the first begins, in `bytes` of address space.
fn layout(bytes: usize) -> Result<(u32, usize), RamPoolError> {
    let error = || RamPoolError::Reserve(Bytes(bytes as u64));
    let room = bytes.saturating_sub(PAGE_BYTES + BLOCK_BYTES);
    let blocks = room / (BLOCK_BYTES + DIRECTORY_BYTES as usize);
    let data = (PAGE_BYTES + blocks * DIRECTORY_BYTES as usize).next_multiple_of(BLOCK_BYTES);
    if blocks == 0 || bytes as u64 > RESERVE_MAX {
        return Err(error());
    }
    Ok((u32::try_from(blocks).map_err(|_| error())?, data))
}

fn directory_of(memory: &SharedMemory) -> Directory<'_> {
    Directory(&memory.words()[PAGE_BYTES / 8..])
}

/// The heap does not know of the superblock.
fn heap_capacity(capacity: Bytes) -> u64 {
    capacity.0.saturating_sub(PAGE_BYTES as u64)
}
