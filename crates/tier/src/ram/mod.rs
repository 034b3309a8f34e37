//! The compressed RAM tier ("pool"): page copies in a memfd that outlives the manager.
//!
//! ```text
//! memfd:   | superblock 4 KiB | directory, 64 bytes a block | slots, 4 bytes each
//!          | block 0 | block 1 | ...                             (sparse)
//! block:   | object | object | ...   all of one class; 32 KiB of addresses, 1 to 8 pages used
//! object:  | checksum 8 | stamp 2 | length 2 (12 bits) and compressor (4 bits) | slot 4
//!          | compressed bytes ... |
//! ```
//! `load` looks up where the object is now and takes no lock. `store` compresses without the lock,
//! takes places for the batch under one short lock, and copies without it. Empty blocks, except a
//! few, go back to the operating system. When too much of the pool is free places, `store`
//! compacts: it moves the objects of a sparse block to others ([`RamPool::compact`]). A load that
//! races with a move does not verify. It sees that the object has moved, and tries again.
//!
//! Copies of large pages are several objects: `large.rs`.
//!
//! If a slot is freed and reused while it is read, the copy does not verify. Bytes are copied out
//! of the shared memory before anything interprets them.

mod classes;
pub(crate) mod compressor;
mod handles;
mod heap;
mod large;
mod shards;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, LatencyClass, LoadError, Loaded, Nanos, PageKey, PageSize, Slot, Stamp,
    Store, StoreError, Tier, TierFacts, TierInfo, TierUsage,
};
use undercroft_sys::mapping::SharedMemory;

use classes::{ALIGN_BYTES, BLOCK_BYTES, CLASSES, OBJECT_BYTES_MAX, class_of};
pub use compressor::{Compressor, UnknownCompressor};
use compressor::{Scratch, with_scratch};
use handles::{Handles, LOCATION_LIMIT, SHARD_SLOTS_MAX, Table};
use heap::{DIRECTORY_BYTES, Directory, Emptied, Heap, ObjectPlace};
pub use shards::Shards;

/// Bytes before the compressed ones.
const HEADER_BYTES: usize = 16;
/// Pages compressed before the lock is taken; bounds each thread's scratch memory to 264 KiB.
const BATCH_PAGES: usize = 64;
/// Blocks whose memory is freed at a time.
const EMPTIED_BATCH: usize = 32;
/// First word of the superblock: "UCPOOL" and the version of everything in this file and
/// `classes.rs`.
const MAGIC: u64 = u64::from_le_bytes(*b"UCPOOL\x01\x00");
/// The version in it.
pub const VERSION: u64 = MAGIC >> 48;
/// A load decompresses a page. It is not measured: two readings of the clock would cost a tenth.
pub const FACTS: TierFacts = TierFacts {
    charged_to_limit: true,
    ..TierFacts::of("ram", LatencyClass::Memory, Nanos(3_000))
};
/// Superblock words.
const MAGIC_WORD: usize = 0;
const USED_WORD: usize = 1;
const HANDLES_WORD: usize = 2;
/// Base pages of a copy's page; 0 = 1.
const SIZE_WORD: usize = 3;
/// Bytes of one slot in the table. Each block has as many slots as any block can have objects.
const HANDLE_BYTES: u64 = 4;
const HANDLES_PER_BLOCK: usize = handles_per_block();
/// Most blocks that one `store` evacuates, when free places are more than `1 / IDLE_SHARE` of the
/// held bytes.
const EVACUATIONS_PER_STORE: usize = 4;
const IDLE_SHARE: u64 = 8;

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RamPoolError {
    /// The memory has no room for one block, or slots would not fit a page entry.
    #[error(
        "a RAM pool cannot have {0} of address space (from {min} to {max})",
        min = RamPool::reserve_for(Bytes(0)),
        max = Bytes(RESERVE_MAX)
    )]
    Reserve(Bytes),
    /// A part of the memory could not be mapped.
    #[error("memory for a part of the RAM pool: {0}")]
    Memory(#[source] std::io::Error),
    /// `recover` found no pool of this version.
    #[error("the shared memory holds no RAM pool of this version")]
    NotAPool,
}

/// Slot table entries are offsets in units of 16 bytes. That limits one pool to 32 GiB of address
/// space, about 25 GiB of objects. A larger one is several: [`Shards`].
const RESERVE_MAX: u64 = LOCATION_LIMIT * ALIGN_BYTES as u64;

/// The compressed RAM tier.
pub struct RamPool {
    memory: SharedMemory,
    info: TierInfo,
    compressor: Compressor,
    key: PageKey,
    places: Mutex<Guarded>,
    layout: Layout,
    logical: AtomicU64,
    stored: AtomicU64,
    held: AtomicU64,
}

/// State that the lock guards.
struct Guarded {
    heap: Heap,
    handles: Handles,
    /// Batches that have places, but whose bytes are still being copied: nothing may move
    /// meanwhile.
    storing: u32,
}

/// Where things are in the memfd.
#[derive(Clone, Copy, Debug)]
struct Layout {
    blocks: u32,
    handles_offset: usize,
    data_offset: usize,
}

/// The header before an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    checksum: u64,
    stamp: Stamp,
    length: u16,
    code: u8,
    handle: u32,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.checksum.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.stamp.0.to_le_bytes());
        bytes[12..].copy_from_slice(&self.handle.to_le_bytes());
        bytes[10..12].copy_from_slice(&(self.length << 4 | u16::from(self.code)).to_le_bytes());
        bytes
    }

    /// From the object's first two words.
    fn from_words(first: u64, second: u64) -> Header {
        let tail = (second >> 16) as u16;
        Header {
            checksum: first,
            stamp: Stamp(second as u16),
            length: tail >> 4,
            code: tail as u8 & 15,
            handle: (second >> 32) as u32,
        }
    }
}

impl RamPool {
    /// Address space in which `capacity` bytes of memory surely fit (blocks use 1 to 8 of their 8
    /// pages), or the most that a pool can use. It costs nothing until it is used.
    pub const fn reserve_for(capacity: Bytes) -> Bytes {
        let blocks = capacity.0.div_ceil(BASE_PAGE_BYTES as u64) + 2;
        let per_block = BLOCK_BYTES as u64 + DIRECTORY_BYTES + 4 * HANDLES_PER_BLOCK as u64;
        let bytes = blocks
            .saturating_mul(per_block)
            .saturating_add(4 * BLOCK_BYTES as u64);
        let bytes = bytes.saturating_add(BASE_PAGE_BYTES as u64 - 1) / BASE_PAGE_BYTES as u64
            * BASE_PAGE_BYTES as u64;
        Bytes(if bytes < RESERVE_MAX {
            bytes
        } else {
            RESERVE_MAX
        })
    }

    /// A new, empty pool in `memory`, which must be all zeros. The length of `memory` is the
    /// address space that the pool may ever use (see [`RamPool::reserve_for`]). `capacity`: most
    /// bytes held.
    pub fn new(
        memory: SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
        key: &PageKey,
    ) -> Result<RamPool, RamPoolError> {
        let layout = Layout::of(memory.len())?;
        memory.words()[MAGIC_WORD].store(MAGIC, Relaxed);
        let places = Guarded {
            heap: Heap::new(layout.blocks, heap_capacity(capacity)),
            handles: Handles::new(layout.handles()),
            storing: 0,
        };
        let of = (compressor, capacity, key);
        Ok(RamPool::with_places(memory, of, places, layout))
    }

    /// The pool that an earlier manager left in `memory`, with every object in it. Places without a
    /// slot are free again. The caller frees slots that no page entry names (the manager died
    /// between storing and publishing): see [`RamPool::for_each_slot`]. Cost: one cache line a
    /// block, one an object.
    pub fn recover(
        memory: SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
        key: &PageKey,
    ) -> Result<RamPool, RamPoolError> {
        let layout = Layout::of(memory.len())?;
        let word = |at: usize| memory.words()[at].load(Relaxed);
        if word(MAGIC_WORD) != MAGIC {
            return Err(RamPoolError::NotAPool);
        }
        let used = |at| u32::try_from(word(at)).unwrap_or(u32::MAX);
        let handles_used = used(HANDLES_WORD).min(layout.handles());
        let directory = layout.directory(&memory);
        let places = Guarded {
            heap: Heap::recover(
                directory,
                layout.blocks,
                used(USED_WORD),
                heap_capacity(capacity),
                HANDLE_BYTES * u64::from(handles_used),
            ),
            handles: Handles::new(layout.handles()),
            storing: 0,
        };
        let size = word(SIZE_WORD);
        let of = (compressor, capacity, key);
        let mut pool = RamPool::with_places(memory, of, places, layout);
        pool.match_slots(handles_used);
        if size == PageSize::Large.base_pages() {
            pool.info.page = PageSize::Large;
            pool.drop_strays();
        }
        Ok(pool)
    }

    fn with_places(
        memory: SharedMemory,
        (compressor, capacity, key): (Compressor, Bytes, &PageKey),
        places: Guarded,
        layout: Layout,
    ) -> RamPool {
        let pool = RamPool {
            info: TierInfo {
                name: "ram".to_owned(),
                facts: &FACTS,
                page: PageSize::Base,
                emulated: false,
                capacity,
            },
            memory,
            compressor,
            key: key.clone(),
            places: Mutex::new(places),
            layout,
            logical: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            held: AtomicU64::new(BASE_PAGE_BYTES as u64),
        };
        pool.held.store(pool.lock().held(), Relaxed);
        pool
    }

    /// Second half of recovery. A place in use is an object if its header names a slot that points
    /// back at it. Any other is freed, and so is every slot without an object.
    fn match_slots(&self, handles_used: u32) {
        let (directory, table) = (self.directory(), self.table());
        let mut places = self.lock();
        let blocks = places.heap.used();
        let mut taken = vec![false; handles_used as usize];
        let (mut logical, mut stored) = (0, 0);
        for block in 0..blocks {
            let Some((class, _)) = directory.state(block) else {
                continue;
            };
            for index in (0..CLASSES[class].objects).filter(|&at| directory.is_live(block, at)) {
                let location = self.layout.location(block, class, index);
                let header = self.header_at(location).filter(|header| {
                    let known = taken.get(header.handle as usize) == Some(&false);
                    known && table.location(header.handle.into()) == Some(location)
                });
                if let Some(header) = header {
                    taken[header.handle as usize] = true;
                    logical += BASE_PAGE_BYTES as u64;
                    stored += u64::from(header.length);
                } else if let Some(emptied) = places.heap.free(directory, block, index) {
                    places.heap.reclaim(directory, emptied);
                }
            }
        }
        places.handles = Handles::recover(table, self.layout.handles(), handles_used, |handle| {
            taken[handle as usize]
        });
        while let Some(emptied) = places.heap.take_empty(directory) {
            places.heap.reclaim(directory, emptied);
        }
        self.logical.store(logical, Relaxed);
        self.stored.store(stored, Relaxed);
        self.publish(&places);
        drop(places);
        self.punch_free_blocks(blocks);
    }

    /// The compressor of new copies.
    pub fn compressor(&self) -> Compressor {
        self.compressor
    }

    /// Frees the memory of all empty blocks.
    pub fn trim(&self) {
        loop {
            let mut emptied = [Emptied::default(); EMPTIED_BATCH];
            let mut count = 0;
            {
                let mut places = self.lock();
                while count < EMPTIED_BATCH {
                    let Some(block) = places.heap.take_empty(self.directory()) else {
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

    /// Moves the objects of up to `blocks` sparse blocks into others and frees the emptied blocks.
    /// Returns how many it freed. If fewer than asked, nothing is left to gain, or a store is in
    /// progress. `store` compacts by itself when an eighth of the memory is free places. Call this
    /// when only frees happen, or when memory is short. Cost: about 0.3 us an object moved, under
    /// the lock for one block at a time. Loads go on.
    pub fn compact(&self, blocks: usize) -> usize {
        for done in 0..blocks {
            let emptied = {
                let mut places = self.lock();
                if places.storing > 0 {
                    return done;
                }
                let empty = places.heap.take_empty(self.directory());
                empty.or_else(|| {
                    places
                        .heap
                        .evacuate(self.directory(), |from, to| self.move_object(from, to))
                })
            };
            match emptied {
                Some(emptied) => self.give_back(&mut [emptied]),
                None => return done,
            }
        }
        blocks
    }

    /// Under the lock: copies an object and points its slot at the copy. False if its header does
    /// not name its slot (flipped bits). It then stays, and a load will find it corrupt.
    fn move_object(&self, from: ObjectPlace, to: ObjectPlace) -> bool {
        let bytes = CLASSES[usize::from(from.class)].object_bytes as usize;
        let location = |place: ObjectPlace| {
            self.layout
                .location(place.block, place.class.into(), place.index)
        };
        let mut object = [0; OBJECT_BYTES_MAX];
        self.memory
            .bytes_out(offset_of(location(from)), &mut object[..bytes]);
        self.memory
            .bytes_in(offset_of(location(to)), &object[..bytes]);
        let handle = u32::from_le_bytes([object[12], object[13], object[14], object[15]]);
        let named = self.table().location(handle.into()) == Some(location(from));
        if named {
            self.table().moved(handle, location(to));
        }
        named
    }

    /// Calls `visit` with every slot that is in use. For takeover: no thread may store or free
    /// meanwhile.
    pub fn for_each_slot(&self, visit: impl FnMut(Slot)) {
        let used = self.lock().handles.used();
        let slots = (0..u64::from(used)).map(Slot);
        slots.filter(|slot| self.is_copy(*slot)).for_each(visit);
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        // A panic under this lock comes from a check in `free`, before anything was changed.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory(&self) -> Directory<'_> {
        self.layout.directory(&self.memory)
    }

    fn table(&self) -> Table<'_> {
        let start = self.layout.handles_offset / 8;
        Table(&self.memory.words()[start..start + self.layout.handles() as usize / 2])
    }

    fn publish(&self, places: &Guarded) {
        let words = self.memory.words();
        words[USED_WORD].store(u64::from(places.heap.used()), Relaxed);
        words[HANDLES_WORD].store(u64::from(places.handles.used()), Relaxed);
        self.held.store(places.held(), Relaxed);
    }

    /// The header at a location. `None` if no object can be there.
    fn header_at(&self, location: u32) -> Option<Header> {
        let offset = offset_of(location);
        let words = self.memory.words().get(offset / 8..offset / 8 + 2)?;
        let header = Header::from_words(words[0].load(Relaxed), words[1].load(Relaxed));
        let bytes = HEADER_BYTES + usize::from(header.length);
        let fits = bytes <= OBJECT_BYTES_MAX && offset + bytes <= self.memory.len();
        (fits && header.length != 0).then_some(header)
    }

    /// The header of a slot's object and where it is, if it is of this generation.
    fn find(&self, slot: Slot, stamp: Stamp) -> Option<(u32, Header)> {
        let location = self.table().location(slot.0)?;
        let header = self.header_at(location)?;
        (u64::from(header.handle) == slot.0 && header.stamp == stamp).then_some((location, header))
    }

    fn object_bytes(&self, slot: Slot) -> u64 {
        let location = self.table().location(slot.0);
        location
            .and_then(|location| self.header_at(location))
            .map_or(0, |header| u64::from(header.length))
    }

    /// Loads from where the object is now. `None` if something else is there.
    fn load_once(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Option<()> {
        let (location, header) = self.find(slot, stamp)?;
        let compressor = Compressor::from_code(header.code)?;
        let bytes = usize::from(header.length);
        let whole = with_scratch(|scratch| {
            let object = &mut scratch.object[..bytes];
            self.memory
                .bytes_out(offset_of(location) + HEADER_BYTES, object);
            scratch.decompress(compressor, bytes, dst)
        });
        (whole && self.key.checksum(dst, stamp) == header.checksum).then_some(())
    }

    fn store_batch(&self, batch: &mut [Store<'_>], scratch: &mut Scratch) {
        scratch.reserve(self.compressor, batch.len());
        // (start in `scratch.objects`, length); length 0: not stored
        let mut objects = [(0usize, 0usize); BATCH_PAGES];
        let mut at = 0;
        for (item, object) in batch.iter_mut().zip(&mut objects) {
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
                handle: 0, // known when the object has a slot
            };
            scratch.objects[at..at + HEADER_BYTES].copy_from_slice(&header.to_bytes());
            *object = (at, HEADER_BYTES + length);
            at += HEADER_BYTES + length;
        }
        self.lock().storing += 1;
        if self.place_objects(batch, &objects) {
            // Other classes' empty blocks are memory too: free them and try once more.
            self.trim();
            self.place_objects(batch, &objects);
        }
        let (mut logical, mut stored) = (0, 0);
        for (item, (start, bytes)) in batch.iter().zip(objects) {
            if bytes == 0 {
                continue;
            }
            if let Ok(slot) = item.result {
                let object = &mut scratch.objects[start..start + bytes];
                object[12..16].copy_from_slice(&(slot.0 as u32).to_le_bytes());
                if let Some(location) = self.table().location(slot.0) {
                    self.memory.bytes_in(offset_of(location), object);
                }
                logical += BASE_PAGE_BYTES as u64;
                stored += (bytes - HEADER_BYTES) as u64;
            }
        }
        self.logical.fetch_add(logical, Relaxed);
        self.stored.fetch_add(stored, Relaxed);
        let sparse = {
            let mut places = self.lock();
            places.storing -= 1;
            places.heap.is_sparse(IDLE_SHARE)
        };
        if sparse {
            self.compact(EVACUATIONS_PER_STORE);
        }
    }

    /// Gives a slot to every object without one, under one lock. True if some were refused, but
    /// freeing memory may help.
    fn place_objects(&self, batch: &mut [Store<'_>], objects: &[(usize, usize)]) -> bool {
        let mut refused = false;
        let mut places = self.lock();
        for (item, &(_, bytes)) in batch.iter_mut().zip(objects) {
            if bytes == 0 || item.result.is_ok() {
                continue;
            }
            let slot = class_of(bytes).and_then(|class| self.take_place(&mut places, class));
            item.result = match slot {
                Some(slot) => Ok(Slot(slot.into())),
                None => {
                    refused = true;
                    Err(StoreError::Full)
                }
            };
        }
        self.publish(&places);
        refused && places.heap.has_empty()
    }

    /// A place for an object, and its slot.
    fn take_place(&self, places: &mut Guarded, class: usize) -> Option<u32> {
        let (directory, table) = (self.directory(), self.table());
        let place = places.heap.alloc(directory, class)?;
        let location = self
            .layout
            .location(place.block, place.class.into(), place.index);
        let Guarded { heap, handles, .. } = places;
        let slot = handles.alloc(table, location, || heap.charge(HANDLE_BYTES));
        if slot.is_none() {
            // The place is empty memory and counted already. `take_empty` finds the block if it is
            // empty.
            heap.cancel(directory, place);
        }
        slot
    }

    /// Frees objects, which counts as fewer stored bytes.
    fn free_objects(&self, slots: &[Slot]) {
        for slots in slots.chunks(EMPTIED_BATCH) {
            // Headers are likely out of cache, so they are read before the lock as well. What
            // counts is read under it: an object that is moved has no length for a moment.
            for &slot in slots {
                std::hint::black_box(self.object_bytes(slot));
            }
            let mut stored = 0;
            let mut emptied = [Emptied::default(); EMPTIED_BATCH];
            let mut count = 0;
            {
                let (directory, table) = (self.directory(), self.table());
                let mut places = self.lock();
                for &slot in slots {
                    let location = table
                        .location(slot.0)
                        .unwrap_or_else(|| panic!("{slot:?} of the RAM pool is free already"));
                    stored += self.object_bytes(slot);
                    let (block, index) = self.layout.place(directory, location);
                    places.handles.free(table, slot.0 as u32);
                    if let Some(block) = places.heap.free(directory, block, index) {
                        emptied[count] = block;
                        count += 1;
                    }
                }
                while count < EMPTIED_BATCH
                    && let Some(block) = places.heap.take_surplus(directory)
                {
                    emptied[count] = block;
                    count += 1;
                }
            }
            subtract(&self.stored, stored);
            self.give_back(&mut emptied[..count]);
        }
    }

    /// Frees the memory of emptied blocks, then returns the blocks to the heap.
    fn give_back(&self, emptied: &mut [Emptied]) {
        if emptied.is_empty() {
            return;
        }
        emptied.sort_unstable_by_key(|emptied| emptied.block);
        for run in emptied.chunk_by(|a, b| a.block + 1 == b.block) {
            self.punch(run[0].block, run.len() as u32);
        }
        let mut places = self.lock();
        for &block in emptied.iter() {
            places.heap.reclaim(self.directory(), block);
        }
        self.publish(&places);
    }

    fn punch(&self, block: u32, count: u32) {
        let offset = self.layout.data_offset + block as usize * BLOCK_BYTES;
        // A memfd refuses this only if it is sealed or the kernel is out of memory. Either way the
        // block is used again, and its memory is then counted again.
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

    fn close(&self) {
        let _ = self.memory.punch(0, self.memory.len()); // a refusal leaves the memory in use
        self.held.store(0, Relaxed);
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
                assert_eq!(
                    item.page.len(),
                    self.info.page.bytes(),
                    "a page to store is not one page"
                );
                item.result = Err(StoreError::Full);
            }
            if self.info.page != PageSize::Base {
                let items = batch.iter_mut();
                return items.for_each(|item| self.store_large(item, scratch));
            }
            for part in batch.chunks_mut(BATCH_PAGES) {
                self.store_batch(part, scratch);
            }
        });
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let mut tried = None;
        loop {
            let location = self.table().location(slot.0);
            if location.is_none() || location == tried {
                return Err(LoadError::Corrupt);
            }
            let loaded = match self.info.page {
                PageSize::Base => self.load_once(slot, stamp, dst),
                PageSize::Large => self.load_large(slot, stamp, dst),
            };
            if loaded.is_some() {
                return Ok(Loaded::Done);
            }
            tried = location; // If it was moved while it was read, it is elsewhere now.
        }
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        loop {
            let location = self.table().location(slot.0)?;
            let found = self.find(slot, stamp);
            fence(Acquire);
            if self.table().location(slot.0) == Some(location) {
                return found.map(|(_, header)| header.checksum);
            }
        }
    }

    fn free(&self, slots: &[Slot]) {
        match self.info.page {
            PageSize::Base => {
                self.free_objects(slots);
                subtract(&self.logical, (slots.len() * BASE_PAGE_BYTES) as u64);
            }
            PageSize::Large => slots.iter().for_each(|slot| self.free_large(*slot)),
        }
    }
}

/// Subtracts and saturates: a flipped bit in a header's length must not make the usage absurd.
fn subtract(count: &AtomicU64, by: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |now| Some(now.saturating_sub(by)));
}

impl Guarded {
    /// Bytes of all memory in use.
    fn held(&self) -> u64 {
        self.heap.held() + BASE_PAGE_BYTES as u64
    }
}

impl Layout {
    /// How `bytes` of address space are divided.
    fn of(bytes: usize) -> Result<Layout, RamPoolError> {
        let error = || RamPoolError::Reserve(Bytes(bytes as u64));
        let room = bytes.saturating_sub(2 * BASE_PAGE_BYTES + 2 * BLOCK_BYTES);
        let per_block = BLOCK_BYTES + DIRECTORY_BYTES as usize + 4 * HANDLES_PER_BLOCK;
        let blocks = room / per_block;
        if blocks == 0 || bytes as u64 > RESERVE_MAX {
            return Err(error());
        }
        let directory_end = BASE_PAGE_BYTES + blocks * DIRECTORY_BYTES as usize;
        let handles_offset = directory_end.next_multiple_of(BASE_PAGE_BYTES);
        let handles_end = handles_offset + blocks * HANDLES_PER_BLOCK * 4;
        Ok(Layout {
            blocks: u32::try_from(blocks).map_err(|_| error())?,
            handles_offset,
            data_offset: handles_end.next_multiple_of(BLOCK_BYTES),
        })
    }

    fn handles(&self) -> u32 {
        (self.blocks * HANDLES_PER_BLOCK as u32).min(SHARD_SLOTS_MAX)
    }

    fn directory<'a>(&self, memory: &'a SharedMemory) -> Directory<'a> {
        Directory(&memory.words()[BASE_PAGE_BYTES / 8..self.handles_offset / 8])
    }

    fn location(&self, block: u32, class: usize, index: u16) -> u32 {
        let inside = CLASSES[class].object_bytes as usize * index as usize;
        let offset = self.data_offset + block as usize * BLOCK_BYTES + inside;
        (offset / ALIGN_BYTES) as u32
    }

    /// The block and index of a location from the slot table. Panics if no object can be there:
    /// something else has changed the memory, and going on would give one place to two pages.
    fn place(&self, directory: Directory<'_>, location: u32) -> (u32, u16) {
        let place = || {
            let offset = offset_of(location).checked_sub(self.data_offset)?;
            let block = u32::try_from(offset / BLOCK_BYTES).ok()?;
            let (class, _) = (block < self.blocks).then(|| directory.state(block))??;
            let inside = offset % BLOCK_BYTES;
            let bytes = CLASSES[class].object_bytes as usize;
            let index = (inside / bytes) as u16;
            (inside.is_multiple_of(bytes) && index < CLASSES[class].objects)
                .then_some((block, index))
        };
        place().unwrap_or_else(|| panic!("the RAM pool's slot table is damaged"))
    }
}

fn offset_of(location: u32) -> usize {
    location as usize * ALIGN_BYTES
}

const fn handles_per_block() -> usize {
    let (mut most, mut class) = (0, 0);
    while class < CLASSES.len() {
        if CLASSES[class].objects as usize > most {
            most = CLASSES[class].objects as usize;
        }
        class += 1;
    }
    most.next_multiple_of(2)
}

/// The heap's part of `capacity`: it does not know of the superblock.
fn heap_capacity(capacity: Bytes) -> u64 {
    capacity.0.saturating_sub(BASE_PAGE_BYTES as u64)
}
