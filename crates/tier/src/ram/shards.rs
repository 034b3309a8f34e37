//! A pool that is larger than one table of slots can name: several pools side by side in one memfd,
//! each with an equal part of the capacity. A batch goes to the one that holds least.
//!
//! ```text
//! memfd:  | shard 0 | shard 1 | ...      32 GiB of address space each
//! slot:   slot in the shard * shards + shard
//! ```

use undercroft_base::{
    Bytes, LoadError, Loaded, PageSize, Slot, Stamp, Store, StoreError, Tier, TierInfo, TierUsage,
};
use undercroft_sys::mapping::SharedMemory;

use super::handles::SHARD_SLOTS_MAX;
use super::{Compressor, PageKey, RESERVE_MAX, RamPool, RamPoolError};

/// Most shards: 2 TiB of address space, some 1.5 TiB of copies.
pub(super) const SHARDS_MAX: u64 = 64;

/// Copies that surely fit one shard.
const SHARD_BYTES: u64 = 24 << 30;

const _: () = assert!(SHARDS_MAX * SHARD_SLOTS_MAX as u64 <= Slot::LIMIT);

/// The shards of a pool.
pub struct Shards {
    shards: Vec<RamPool>,
    info: TierInfo,
}

impl Shards {
    /// Address space for `capacity` bytes of memory: that of one pool, or whole shards.
    pub const fn reserve_for(capacity: Bytes) -> Bytes {
        let shards = capacity.0.div_ceil(SHARD_BYTES);
        match shards {
            0 | 1 => RamPool::reserve_for(capacity),
            2..SHARDS_MAX => Bytes(shards * RESERVE_MAX),
            _ => Bytes(SHARDS_MAX * RESERVE_MAX),
        }
    }

    /// As [`RamPool::new`], in each shard of `memory`; `again`: as [`RamPool::recover`].
    pub fn make(
        memory: &SharedMemory,
        compressor: Compressor,
        capacity: Bytes,
        key: &PageKey,
        again: bool,
    ) -> Result<Shards, RamPoolError> {
        Shards::of_length(
            memory,
            RESERVE_MAX as usize,
            (compressor, capacity, key),
            again,
        )
    }

    /// Keeps copies of pages of this size. The shards are empty, or know it (`again`).
    pub fn of_pages(mut self, page: PageSize, again: bool) -> Shards {
        if !again {
            let shards = std::mem::take(&mut self.shards).into_iter();
            self.shards = shards.map(|shard| shard.of_pages(page)).collect();
            self.info.page = page;
        }
        self
    }

    fn of_length(
        memory: &SharedMemory,
        length: usize,
        (compressor, capacity, key): (Compressor, Bytes, &PageKey),
        again: bool,
    ) -> Result<Shards, RamPoolError> {
        let parts = memory.parts(length).map_err(RamPoolError::Memory)?;
        let part = Bytes(capacity.0 / parts.len() as u64);
        let make = if again {
            RamPool::recover
        } else {
            RamPool::new
        };
        let shards = parts
            .into_iter()
            .map(|memory| make(memory, compressor, part, key))
            .collect::<Result<Vec<_>, _>>()?;
        let info = shards.first().map(|shard| TierInfo {
            capacity,
            ..shard.info().clone()
        });
        let info = info.ok_or(RamPoolError::Reserve(Bytes(0)))?;
        Ok(Shards { shards, info })
    }

    /// As [`RamPool::for_each_slot`].
    pub fn for_each_slot(&self, mut visit: impl FnMut(Slot)) {
        for (at, shard) in self.shards.iter().enumerate() {
            shard.for_each_slot(|slot| visit(self.slot(at, slot)));
        }
    }

    fn store_in(&self, shard: usize, batch: &mut [Store<'_>]) {
        self.shards[shard].store(batch);
        for item in batch {
            item.result = item.result.map(|slot| self.slot(shard, slot));
        }
    }

    fn slot(&self, shard: usize, slot: Slot) -> Slot {
        Slot(slot.0 * self.shards.len() as u64 + shard as u64)
    }

    /// The shard of a slot, and the slot in it.
    fn place(&self, slot: Slot) -> (&RamPool, Slot) {
        let count = self.shards.len() as u64;
        (
            &self.shards[(slot.0 % count) as usize],
            Slot(slot.0 / count),
        )
    }
}

impl Tier for Shards {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn close(&self) {
        self.shards.iter().for_each(Tier::close);
    }

    fn usage(&self) -> TierUsage {
        let mut all = TierUsage::default();
        for usage in self.shards.iter().map(Tier::usage) {
            all.logical.0 += usage.logical.0;
            all.stored.0 += usage.stored.0;
            all.held.0 += usage.held.0;
        }
        all
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let mut order: Vec<usize> = (0..self.shards.len()).collect();
        order.sort_by_key(|at| self.shards[*at].usage().held);
        let Some((&least, others)) = order.split_first() else {
            return;
        };
        self.store_in(least, batch);
        for item in batch {
            // One that holds more may have places of the right size.
            for at in others {
                if item.result == Err(StoreError::Full) {
                    self.store_in(*at, std::slice::from_mut(item));
                }
            }
        }
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let (shard, slot) = self.place(slot);
        shard.load(slot, stamp, dst)
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        let (shard, slot) = self.place(slot);
        shard.checksum(slot, stamp)
    }

    fn free(&self, slots: &[Slot]) {
        let mut sorted: Vec<_> = slots.iter().map(|slot| self.place(*slot)).collect();
        sorted.sort_unstable_by_key(|(shard, slot)| (std::ptr::from_ref(*shard), *slot));
        for of_shard in sorted.chunk_by(|one, next| std::ptr::eq(one.0, next.0)) {
            let slots: Vec<Slot> = of_shard.iter().map(|(_, slot)| *slot).collect();
            of_shard[0].0.free(&slots);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use undercroft_base::PageKey;
    use undercroft_model::contract::{self, Pages, Subject, store_all};

    use super::*;

    const SHARD: usize = 8 << 20;

    fn shards(memory: &SharedMemory, capacity: u64, again: bool) -> Shards {
        let of = (Compressor::Lz4, Bytes(capacity), &PageKey::KNOWN);
        Shards::of_length(memory, SHARD, of, again).expect("shards")
    }

    fn memory(count: usize) -> SharedMemory {
        SharedMemory::create("test-shards", count * SHARD).expect("memory")
    }

    #[test]
    fn shards_pass_the_tier_contract() {
        let (memory, idle_work) = (memory(3), || ());
        let tier = shards(&memory, 3 << 20, false);
        let subject = Subject {
            tier: &tier,
            idle_work: &idle_work,
            held_empty: Bytes(3 << 15),
        };
        contract::check(&subject, 91);
        contract::fills_and_recovers(&subject, 92, 20_000);
    }

    /// All shards fill alike, and a successor finds every copy under the slot that it had.
    #[test]
    fn shards_fill_alike_and_are_found_again() {
        let memory = memory(4);
        let old = shards(&memory, 8 << 20, false);
        let mut random = Pages::new(5);
        let pages: Vec<_> = (0..2000).map(|_| (random.heap_like(), Stamp(3))).collect();
        let slots: Vec<Slot> = (pages.chunks(50))
            .flat_map(|batch| store_all(&old, batch))
            .map(|stored| stored.expect("room"))
            .collect();
        let held: Vec<u64> = old
            .shards
            .iter()
            .map(|shard| shard.usage().held.0)
            .collect();
        let (least, most) = (held.iter().min(), held.iter().max());
        assert!(
            least
                .zip(most)
                .is_some_and(|(least, most)| most - least < 256 << 10),
            "{held:?}"
        );
        old.free(&slots[..500]);
        let fd = memory.as_fd().try_clone_to_owned().expect("a descriptor");
        let memory = SharedMemory::from_fd(fd).expect("the same memory");
        let new = shards(&memory, 8 << 20, true);
        let mut found = Vec::new();
        new.for_each_slot(|slot| found.push(slot));
        let mut left = slots[500..].to_vec();
        found.sort_unstable();
        left.sort_unstable();
        assert_eq!(found, left);
        let mut bytes = vec![0; undercroft_base::BASE_PAGE_BYTES];
        for (slot, (page, stamp)) in slots.iter().zip(&pages).skip(500) {
            new.load(*slot, *stamp, &mut bytes).expect("a copy");
            assert_eq!(bytes, page[..]);
            assert!(new.load(*slot, Stamp(4), &mut bytes).is_err());
        }
        new.close();
        assert_eq!(memory.allocated().expect("a memfd"), 0);
    }

    /// A machine of 4 TiB that gives a third to the pool: address space only.
    #[test]
    fn a_pool_of_a_terabyte_opens_and_keeps_pages() {
        let capacity = Bytes(1 << 40);
        let reserve = Shards::reserve_for(capacity);
        assert!(reserve.0 >= capacity.0 && reserve.0.is_multiple_of(RESERVE_MAX));
        let memory = SharedMemory::create("test-shards", reserve.0 as usize).expect("memory");
        let of = (Compressor::Lz4, capacity, &PageKey::KNOWN);
        let tier = Shards::make(&memory, of.0, of.1, of.2, false).expect("shards");
        let page = Pages::new(6).heap_like();
        let slots = store_all(&tier, &[(page, Stamp(1)); 64]);
        let slots: Vec<Slot> = slots.into_iter().map(|slot| slot.expect("room")).collect();
        let mut bytes = vec![0; undercroft_base::BASE_PAGE_BYTES];
        tier.load(slots[63], Stamp(1), &mut bytes).expect("a copy");
        assert_eq!(bytes, page[..]);
        assert_eq!(Shards::reserve_for(Bytes(24 << 30)).0, RESERVE_MAX);
        assert_eq!(
            Shards::reserve_for(Bytes(1 << 60)).0,
            SHARDS_MAX * RESERVE_MAX
        );
    }
}
