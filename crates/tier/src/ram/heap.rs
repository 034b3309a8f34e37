//! The pool's allocator: blocks, each of one size class, described by a directory inside the memfd.
//!
//! The directory has one cache line (8 words) a block. A later manager rebuilds everything else
//! from it:
//!
//! ```text
//! word 0      live objects << 16 | class + 1 (0: the block is free)
//! words 1-4   bitmap: which objects are taken
//! word 5      next << 32 | previous, in the list this block is in (block + 1, 0: none)
//! words 6-7   reserved
//! ```
//! Lists: a class has one for empty blocks and three by how full blocks are. The fullest blocks are
//! filled first, so that sparse blocks can become empty. Full blocks are in no list. Free blocks
//! form one list. Nothing here touches objects or the operating system. Callers hold the pool's
//! mutex.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::classes::{BLOCK_OBJECTS_MAX, CLASS_COUNT, CLASSES};

/// Directory words of a block.
pub(super) const DIRECTORY_WORDS: usize = 8;
/// Directory bytes of a block that was ever used.
pub(super) const DIRECTORY_BYTES: u64 = DIRECTORY_WORDS as u64 * 8;

const STATE: usize = 0;
const BITMAP: usize = 1;
const BITMAP_WORDS: usize = BLOCK_OBJECTS_MAX / 64;
const LINKS: usize = 5;
/// Lists of a class: 0 = empty, 1..=3 by thirds of fill.
const BANDS: usize = 4;
/// Larger classes whose half-filled blocks are tried before a new block is taken. Other numbers:
/// docs/design/0006.
const CLASSES_ABOVE: usize = 2;
/// The same when no new block may be taken.
const CLASSES_ABOVE_FULL: usize = 8;
/// Empty blocks are kept only while they are less than this part of the held bytes.
const EMPTY_SHARE: u64 = 16;

/// An object's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObjectPlace {
    pub(super) block: u32,
    pub(super) class: u8,
    pub(super) index: u16,
}

/// A block that has become empty and is in no list. The caller frees its memory, then calls
/// [`Heap::reclaim`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Emptied {
    pub(super) block: u32,
    pub(super) held_bytes: u64,
}

/// The lists and counts that a later manager rebuilds from the directory.
#[derive(Debug)]
pub(super) struct Heap {
    /// The first block of each list, plus one; 0: none.
    heads: [[u32; BANDS]; CLASS_COUNT],
    free_head: u32,
    /// Blocks ever used. Directory entries beyond are zero, and are not even read: that would
    /// allocate them.
    used: u32,
    blocks_max: u32,
    capacity: u64,
    /// Bytes of all blocks with a class, or waiting to be freed, and of their directory entries.
    held: u64,
    empty_bytes: u64,
    /// Free places in blocks of each class, and their bytes over all classes.
    free_places: [u32; CLASS_COUNT],
    idle_bytes: u64,
    /// Class to try next for a block to evacuate.
    next_class: usize,
}

/// The directory words of one pool.
#[derive(Clone, Copy)]
pub(super) struct Directory<'a>(pub(super) &'a [AtomicU64]);

impl Directory<'_> {
    fn word(&self, block: u32, word: usize) -> &AtomicU64 {
        &self.0[block as usize * DIRECTORY_WORDS + word]
    }

    /// Class and live objects of a block. `None` if it is free.
    pub(super) fn state(&self, block: u32) -> Option<(usize, u16)> {
        let state = self.word(block, STATE).load(Relaxed);
        let class = (state & 0xff) as usize;
        (1..=CLASS_COUNT)
            .contains(&class)
            .then(|| (class - 1, (state >> 16) as u16))
    }

    fn set_state(&self, block: u32, state: Option<(usize, u16)>) {
        let word = state.map_or(0, |(class, live)| {
            u64::from(live) << 16 | (class as u64 + 1)
        });
        self.word(block, STATE).store(word, Relaxed);
    }

    /// Whether an object is live.
    pub(super) fn is_live(&self, block: u32, index: u16) -> bool {
        let word = self.word(block, BITMAP + index as usize / 64).load(Relaxed);
        word >> (index % 64) & 1 == 1
    }

    fn take_first(&self, block: u32, objects: u16) -> Option<u16> {
        for at in 0..usize::from(objects).div_ceil(64) {
            let word = self.word(block, BITMAP + at);
            let bits = word.load(Relaxed);
            let index = at as u16 * 64 + bits.trailing_ones() as u16;
            if bits != u64::MAX && index < objects {
                word.store(bits | 1 << (index % 64), Relaxed);
                return Some(index);
            }
        }
        None
    }

    fn release(&self, block: u32, index: u16) {
        let word = self.word(block, BITMAP + index as usize / 64);
        word.store(word.load(Relaxed) & !(1 << (index % 64)), Relaxed);
    }

    fn links(&self, block: u32) -> (u32, u32) {
        let links = self.word(block, LINKS).load(Relaxed);
        (links as u32, (links >> 32) as u32)
    }

    fn set_links(&self, block: u32, previous: u32, next: u32) {
        self.word(block, LINKS)
            .store(u64::from(next) << 32 | u64::from(previous), Relaxed);
    }
}

/// The list for a block with `live` objects. `None`: it is full.
fn band(live: u16, objects: u16) -> Option<usize> {
    match live {
        0 => Some(0),
        _ if live == objects => None,
        _ => Some(1 + usize::from(live) * 3 / usize::from(objects)),
    }
}

impl Heap {
    /// A heap with no block in use.
    pub(super) fn new(blocks_max: u32, capacity: u64) -> Heap {
        Heap {
            heads: [[0; BANDS]; CLASS_COUNT],
            free_head: 0,
            used: 0,
            blocks_max,
            capacity,
            held: 0,
            empty_bytes: 0,
            free_places: [0; CLASS_COUNT],
            idle_bytes: 0,
            next_class: 0,
        }
    }

    /// Rebuilds the lists from the directory's first `used` blocks. Corrects bits without a class,
    /// and counts that differ from the bitmap: the writer died between two stores. `charged`: see
    /// `charge`. Blocks without live objects are free afterwards, and the caller frees their
    /// memory.
    pub(super) fn recover(
        directory: Directory<'_>,
        blocks_max: u32,
        used: u32,
        capacity: u64,
        charged: u64,
    ) -> Heap {
        let mut heap = Heap::new(blocks_max, capacity);
        heap.used = used.min(blocks_max);
        heap.held = u64::from(heap.used) * DIRECTORY_BYTES + charged;
        for block in (0..heap.used).rev() {
            let class = directory.state(block).map(|(class, _)| class);
            let objects = class.map_or(0, |class| CLASSES[class].objects);
            let mut live = 0;
            for at in 0..BITMAP_WORDS {
                let valid = match usize::from(objects).saturating_sub(at * 64) {
                    0 => 0,
                    bits @ 1..64 => (1 << bits) - 1,
                    _ => u64::MAX,
                };
                let word = directory.word(block, BITMAP + at);
                let bits = word.load(Relaxed) & valid;
                word.store(bits, Relaxed);
                live += bits.count_ones() as u16;
            }
            match class {
                Some(class) if live > 0 => {
                    directory.set_state(block, Some((class, live)));
                    heap.held += CLASSES[class].held_bytes();
                    heap.add_places(class, objects - live);
                    if let Some(band) = band(live, objects) {
                        heap.link(directory, block, class, band);
                    }
                }
                _ => {
                    directory.set_state(block, None);
                    heap.push_free(directory, block);
                }
            }
        }
        heap
    }

    /// Blocks ever used. The caller keeps the number for `recover`.
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Bytes in use, with the directory and empty blocks.
    pub(super) fn held(&self) -> u64 {
        self.held
    }

    /// Whether there is an empty block to free.
    pub(super) fn has_empty(&self) -> bool {
        self.empty_bytes != 0
    }

    /// Counts `bytes` of metadata kept elsewhere. False, and not counted, if they exceed the
    /// capacity.
    pub(super) fn charge(&mut self, bytes: u64) -> bool {
        let fits = self.held + bytes <= self.capacity;
        self.held += if fits { bytes } else { 0 };
        fits
    }

    /// Frees a place that was never used. A block that becomes empty stays in its list.
    pub(super) fn cancel(&mut self, directory: Directory<'_>, place: ObjectPlace) {
        let Some((class, live)) = directory.state(place.block) else {
            return;
        };
        directory.release(place.block, place.index);
        directory.set_state(place.block, Some((class, live - 1)));
        self.relink(directory, place.block, class, live, live - 1);
        self.add_places(class, 1);
        if live == 1 {
            self.empty_bytes += CLASSES[class].held_bytes();
        }
    }

    /// A place for one object of `class`. `None` if that needs memory beyond the capacity. Cost:
    /// O(1).
    pub(super) fn alloc(&mut self, directory: Directory<'_>, class: usize) -> Option<ObjectPlace> {
        let (block, class) = self
            .partial_from(class, CLASSES_ABOVE)
            .or_else(|| Some((self.new_block(directory, class)?, class)))
            .or_else(|| self.partial_from(class, CLASSES_ABOVE_FULL))?;
        self.take_in(directory, block, class)
    }

    fn take_in(
        &mut self,
        directory: Directory<'_>,
        block: u32,
        class: usize,
    ) -> Option<ObjectPlace> {
        let objects = CLASSES[class].objects;
        let (_, live) = directory.state(block)?;
        let index = directory.take_first(block, objects)?;
        directory.set_state(block, Some((class, live + 1)));
        self.relink(directory, block, class, live, live + 1);
        self.remove_places(class, 1);
        if live == 0 {
            self.empty_bytes -= CLASSES[class].held_bytes();
        }
        Some(ObjectPlace {
            block,
            class: class as u8,
            index,
        })
    }

    /// Frees an object. `Some`: the block is empty and leaves the heap until `reclaim`. Panics if
    /// the object is free already: the caller's books are wrong, and bytes would be lost.
    pub(super) fn free(
        &mut self,
        directory: Directory<'_>,
        block: u32,
        index: u16,
    ) -> Option<Emptied> {
        let (class, live) = directory
            .state(block)
            .filter(|_| directory.is_live(block, index))
            .unwrap_or_else(|| panic!("object {index} of block {block} is free already"));
        directory.release(block, index);
        directory.set_state(block, Some((class, live - 1)));
        self.relink(directory, block, class, live, live - 1);
        self.add_places(class, 1);
        if live > 1 {
            return None;
        }
        let held_bytes = CLASSES[class].held_bytes();
        self.empty_bytes += held_bytes;
        let first_of_class = directory.links(block).1 == 0;
        if first_of_class && self.empty_bytes * EMPTY_SHARE <= self.held {
            return None; // kept: the next object of this class needs no new memory
        }
        Some(self.detach_empty(directory, block, class))
    }

    /// Takes one empty block out of the heap, to be freed. `None` if there is none.
    pub(super) fn take_empty(&mut self, directory: Directory<'_>) -> Option<Emptied> {
        if self.empty_bytes == 0 {
            return None;
        }
        let class = (0..CLASS_COUNT).find(|&class| self.heads[class][0] != 0)?;
        Some(self.detach_empty(directory, self.heads[class][0] - 1, class))
    }

    /// Takes one empty block out of the heap, if there are more than are worth keeping: others have
    /// been freed since.
    pub(super) fn take_surplus(&mut self, directory: Directory<'_>) -> Option<Emptied> {
        (self.empty_bytes * EMPTY_SHARE > self.held)
            .then(|| self.take_empty(directory))
            .flatten()
    }

    /// The memory of an emptied block was freed. The block may be used again, for any class.
    pub(super) fn reclaim(&mut self, directory: Directory<'_>, emptied: Emptied) {
        self.held -= emptied.held_bytes;
        self.push_free(directory, emptied.block);
    }

    /// Whether free places are more than `1 / share` of the held bytes. Near the capacity a smaller
    /// part is enough.
    pub(super) fn is_sparse(&self, share: u64) -> bool {
        let near = self.held + self.held / 16 > self.capacity;
        self.idle_bytes * share * (1 + u64::from(near)) > self.held
    }

    /// Empties one sparse block into fuller ones of its class. `moved(from, to)` copies each
    /// object, or says that it cannot. `None`: no class has a block's worth of free places, or an
    /// object has to stay. Cost: one block's objects; classes take turns.
    pub(super) fn evacuate(
        &mut self,
        directory: Directory<'_>,
        mut moved: impl FnMut(ObjectPlace, ObjectPlace) -> bool,
    ) -> Option<Emptied> {
        let (block, class) = (0..CLASS_COUNT).find_map(|step| {
            let class = (self.next_class + step) % CLASS_COUNT;
            Some((self.evacuable(class)?, class))
        })?;
        self.next_class = (class + 1) % CLASS_COUNT;
        let objects = CLASSES[class].objects;
        let (_, mut live) = directory.state(block)?;
        self.unlink(directory, block, class, band(live, objects)?);
        self.remove_places(class, objects - live);
        for index in 0..objects {
            if !directory.is_live(block, index) {
                continue;
            }
            let from = ObjectPlace {
                block,
                class: class as u8,
                index,
            };
            let to = self
                .partial(class)
                .and_then(|to| self.take_in(directory, to, class))
                .expect("`evacuable` counted the free places");
            if !moved(from, to) {
                self.cancel(directory, to);
                self.add_places(class, objects - live);
                if let Some(band) = band(live, objects) {
                    self.link(directory, block, class, band);
                }
                return None;
            }
            directory.release(block, index);
            live -= 1;
            directory.set_state(block, Some((class, live)));
        }
        directory.set_state(block, None);
        Some(Emptied {
            block,
            held_bytes: CLASSES[class].held_bytes(),
        })
    }

    /// The sparsest block of `class`, if other blocks of the class have room for its objects.
    fn evacuable(&self, class: usize) -> Option<u32> {
        if self.heads[class][0] != 0 || self.free_places[class] < u32::from(CLASSES[class].objects)
        {
            return None; // an empty block is freed instead; see `take_empty`
        }
        let head = self.heads[class][1..].iter().find(|&&head| head != 0)?;
        Some(head - 1)
    }

    fn add_places(&mut self, class: usize, count: u16) {
        self.free_places[class] += u32::from(count);
        self.idle_bytes += u64::from(count) * u64::from(CLASSES[class].object_bytes);
    }

    fn remove_places(&mut self, class: usize, count: u16) {
        self.free_places[class] -= u32::from(count);
        self.idle_bytes -= u64::from(count) * u64::from(CLASSES[class].object_bytes);
    }

    fn detach_empty(&mut self, directory: Directory<'_>, block: u32, class: usize) -> Emptied {
        self.unlink(directory, block, class, 0);
        directory.set_state(block, None);
        self.remove_places(class, CLASSES[class].objects);
        let held_bytes = CLASSES[class].held_bytes();
        self.empty_bytes -= held_bytes;
        Emptied { block, held_bytes }
    }

    /// A block with room, of `class` or of one of the next `above` classes, and its class.
    fn partial_from(&self, class: usize, above: usize) -> Option<(u32, usize)> {
        let classes = class..CLASS_COUNT.min(class + 1 + above);
        classes
            .into_iter()
            .find_map(|class| Some((self.partial(class)?, class)))
    }

    fn partial(&self, class: usize) -> Option<u32> {
        let heads = &self.heads[class];
        heads
            .iter()
            .rev()
            .find(|&&head| head != 0)
            .map(|head| head - 1)
    }

    fn new_block(&mut self, directory: Directory<'_>, class: usize) -> Option<u32> {
        let held_bytes = CLASSES[class].held_bytes();
        let fresh = self.free_head == 0;
        let more = held_bytes + if fresh { DIRECTORY_BYTES } else { 0 };
        if self.held + more > self.capacity || (fresh && self.used == self.blocks_max) {
            return None;
        }
        let block = if fresh {
            self.used += 1;
            self.used - 1
        } else {
            let block = self.free_head - 1;
            self.free_head = directory.links(block).1;
            block
        };
        self.held += more;
        self.empty_bytes += held_bytes;
        directory.set_state(block, Some((class, 0)));
        self.link(directory, block, class, 0);
        self.add_places(class, CLASSES[class].objects);
        Some(block)
    }

    fn push_free(&mut self, directory: Directory<'_>, block: u32) {
        directory.set_links(block, 0, self.free_head);
        self.free_head = block + 1;
    }

    fn relink(
        &mut self,
        directory: Directory<'_>,
        block: u32,
        class: usize,
        before: u16,
        now: u16,
    ) {
        let objects = CLASSES[class].objects;
        let (from, to) = (band(before, objects), band(now, objects));
        if from == to {
            return;
        }
        if let Some(from) = from {
            self.unlink(directory, block, class, from);
        }
        if let Some(to) = to {
            self.link(directory, block, class, to);
        }
    }

    fn link(&mut self, directory: Directory<'_>, block: u32, class: usize, band: usize) {
        let head = self.heads[class][band];
        directory.set_links(block, 0, head);
        if head != 0 {
            let (_, next) = directory.links(head - 1);
            directory.set_links(head - 1, block + 1, next);
        }
        self.heads[class][band] = block + 1;
    }

    fn unlink(&mut self, directory: Directory<'_>, block: u32, class: usize, band: usize) {
        let (previous, next) = directory.links(block);
        if previous == 0 {
            self.heads[class][band] = next;
        } else {
            let (before, _) = directory.links(previous - 1);
            directory.set_links(previous - 1, before, next);
        }
        if next != 0 {
            let (_, after) = directory.links(next - 1);
            directory.set_links(next - 1, previous, after);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::classes::class_of;
    use undercroft_model::contract::Pages;

    fn directory_words(blocks: u32) -> Vec<AtomicU64> {
        (0..blocks as usize * DIRECTORY_WORDS)
            .map(|_| AtomicU64::new(0))
            .collect()
    }

    /// Sizes of compressed heap pages: a hump, with a tail of small and of large ones.
    fn size(random: &mut Pages) -> usize {
        let bell = (0..6).map(|_| random.below(500)).sum::<u64>() as usize;
        match random.below(10) {
            0 => 32 + random.below(500) as usize,
            1 => 2500 + random.below(1100) as usize,
            _ => 100 + bell,
        }
    }

    struct World<'a> {
        heap: Heap,
        directory: Directory<'a>,
        /// Objects with their bytes.
        live: Vec<(ObjectPlace, usize)>,
        bytes: u64,
    }

    impl World<'_> {
        fn store(&mut self, bytes: usize) -> bool {
            let Some(place) = self.heap.alloc(self.directory, class_of(bytes).unwrap()) else {
                return false;
            };
            self.live.push((place, bytes));
            self.bytes += bytes as u64;
            true
        }

        fn drop_at(&mut self, at: usize) {
            let (place, bytes) = self.live.swap_remove(at);
            self.bytes -= bytes as u64;
            if let Some(emptied) = self.heap.free(self.directory, place.block, place.index) {
                self.heap.reclaim(self.directory, emptied);
            }
        }

        fn compact(&mut self) {
            loop {
                let live = &mut self.live;
                let moved = |from: ObjectPlace, to: ObjectPlace| {
                    assert_eq!(from.class, to.class);
                    let object = live.iter_mut().find(|(place, _)| *place == from);
                    object.expect("only live objects move").0 = to;
                    true
                };
                let emptied = self.heap.take_empty(self.directory);
                let Some(emptied) = emptied.or_else(|| self.heap.evacuate(self.directory, moved))
                else {
                    return;
                };
                self.heap.reclaim(self.directory, emptied);
            }
        }

        fn overhead(&self) -> f64 {
            self.heap.held() as f64 / self.bytes as f64
        }
    }

    #[test]
    fn heap_never_gives_one_place_twice_and_ends_empty() {
        let words = directory_words(4096);
        let mut random = Pages::new(11);
        let mut world = World {
            heap: Heap::new(4096, 16 << 20),
            directory: Directory(&words),
            live: Vec::new(),
            bytes: 0,
        };
        let mut taken = std::collections::HashSet::new();
        for _ in 0..200_000 {
            if random.below(100) < 52 {
                let bytes = size(&mut random);
                if world.store(bytes) {
                    let (place, _) = world.live[world.live.len() - 1];
                    assert!(CLASSES[place.class as usize].object_bytes as usize >= bytes);
                    assert!(taken.insert((place.block, place.index)));
                }
            } else if !world.live.is_empty() {
                let at = random.below(world.live.len() as u64) as usize;
                let (place, _) = world.live[at];
                taken.remove(&(place.block, place.index));
                world.drop_at(at);
            }
            assert!(world.heap.held() <= 16 << 20);
        }
        while !world.live.is_empty() {
            world.drop_at(0);
        }
        while let Some(emptied) = world.heap.take_empty(world.directory) {
            world.heap.reclaim(world.directory, emptied);
        }
        assert_eq!(
            world.heap.held(),
            u64::from(world.heap.used()) * DIRECTORY_BYTES
        );
    }

    /// Prints held / (compressed + headers) after churn. Asserts the bound that the docs state.
    #[test]
    fn heap_fragmentation_stays_bounded_under_churn() {
        let small = cfg!(debug_assertions);
        let objects = if small { 20_000 } else { 200_000 };
        let blocks = objects as u32;
        let words = directory_words(blocks);
        let mut random = Pages::new(12);
        let mut world = World {
            heap: Heap::new(blocks, u64::MAX),
            directory: Directory(&words),
            live: Vec::new(),
            bytes: 0,
        };
        for _ in 0..objects {
            assert!(world.store(size(&mut random)));
        }
        println!("filled: {:.3}", world.overhead());
        for _ in 0..10 * objects {
            let at = random.below(world.live.len() as u64) as usize;
            world.drop_at(at);
            assert!(world.store(size(&mut random)));
        }
        println!("uniform replacement, 10 x: {:.3}", world.overhead());
        let steady = world.overhead();
        for _ in 0..10 * objects {
            // Zipf-like: 9 of 10 replacements hit a tenth of the objects.
            let part = if random.below(10) < 9 { 10 } else { 1 };
            let at = random.below(world.live.len() as u64 / part) as usize;
            world.drop_at(at);
            assert!(world.store(size(&mut random)));
            let last = world.live.len() - 1;
            world.live.swap(at, last);
        }
        println!("skewed replacement, 10 x: {:.3}", world.overhead());
        let (mut worst, mut refilled): (f64, f64) = (0.0, 0.0);
        for percent in [75, 50, 25, 10] {
            while world.live.len() > objects * percent / 100 {
                let at = random.below(world.live.len() as u64) as usize;
                world.drop_at(at);
            }
            println!("shrunk at random to {percent} %: {:.3}", world.overhead());
            worst = worst.max(world.overhead());
            if percent == 50 {
                let held = world.heap.held();
                world.heap.capacity = held;
                let stored = (0..objects)
                    .filter(|_| world.store(size(&mut random)))
                    .count();
                println!(
                    "... {stored} of {objects} fit into the same memory: {:.3}",
                    world.overhead()
                );
                refilled = world.overhead();
                world.heap.capacity = u64::MAX;
            }
        }
        world.compact();
        println!("... and compacted: {:.3}", world.overhead());
        assert!(world.overhead() < if small { 1.4 } else { 1.15 });
        assert!(steady < 1.15, "steady overhead {steady}");
        assert!(refilled < 1.15, "overhead after refilling {refilled}");
        // Without compaction, random frees may leave one object a block.
        assert!(worst < 8.0, "after random frees {worst}");
    }
}
