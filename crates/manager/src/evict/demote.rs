//! Moves pages from tier to tier, as the placement policy asks, out of tiers that the processor
//! reads. Those on a device are moved in the background (`migrate`).

use std::sync::atomic::Ordering;

use undercroft_base::{Loaded, Store, StoreError, Tier};
use undercroft_engine::DemoteItem;
use undercroft_policy::place::Migration;

use super::Evictor;
use crate::books::page_of;

impl Evictor {
    /// Moves the oldest pages of one tier to another, as many as `migration` says. False if none
    /// moved. The caller has held `Books::storing` since the engine named the tiers.
    pub(super) fn demote(&mut self, migration: Migration) -> bool {
        let from = &self.shared.books.tiers[usize::from(migration.from.0)];
        let to = &self.shared.books.tiers[usize::from(migration.to.0)];
        let want = migration.pages.0 as usize;
        self.demotions.clear();
        self.shared
            .books
            .engine()
            .migrations()
            .select(migration.from, want, &mut self.demotions);
        if self.demotions.is_empty() {
            return false;
        }
        let mut sums = Vec::with_capacity(self.demotions.len());
        let (size, buffer) = (from.tier.info().page, &mut self.demote_buffer);
        for (at, item) in self.demotions.iter().enumerate() {
            let page = &mut buffer[at * size.bytes()..][..size.bytes()];
            sums.push(copy_of(from.tier.as_ref(), item, page));
        }
        let loaded = |(at, sum): (usize, &Option<u64>)| sum.map(|sum| (at, sum));
        let mut batch: Vec<Store<'_>> = (sums.iter().enumerate().filter_map(loaded))
            .map(|(at, checksum)| Store {
                page: page_of(buffer, size, at),
                stamp: self.demotions[at].stamp,
                checksum,
                result: Err(StoreError::Full),
            })
            .collect();
        to.tier.store(&mut batch);
        let mut stored = batch.iter().map(|store| store.result.ok());
        let mut moved = 0;
        let mut engine = self.shared.books.engine();
        for (item, sum) in self.demotions.iter().zip(&sums) {
            match sum.and_then(|_| stored.next().flatten()) {
                Some(slot) => {
                    moved += 1;
                    engine.migrations().demoted(*item, migration.to, slot);
                }
                None => _ = engine.migrations().failed(*item),
            }
        }
        drop(engine);
        to.writes.fetch_add(moved, Ordering::Relaxed);
        self.shared.books.free_released();
        moved > 0
    }
}

/// Reads a copy into `page`, and returns the checksum that goes along with it. The bytes are not
/// hashed again, so a damaged copy stays recognizable. `None`: the copy is gone or damaged, or it
/// is on a device or another machine: then nothing was read, and the buffer is as it was.
fn copy_of(tier: &dyn Tier, item: &DemoteItem, page: &mut [u8]) -> Option<u64> {
    let checksum = tier.checksum(item.slot, item.stamp)?;
    match tier.load(item.slot, item.stamp, page) {
        Ok(Loaded::Done) => Some(checksum),
        Ok(Loaded::Read { .. } | Loaded::Fetch) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageKey, PageNo, Slot, Stamp, TierId};
    use undercroft_sys::mapping::SharedMemory;
    use undercroft_tier::file::{Backing, FileTier};
    use undercroft_tier::ram::{Compressor, RamPool};

    use super::*;

    const STAMP: Stamp = Stamp(3);

    fn pool() -> RamPool {
        let capacity = Bytes(1 << 20);
        let reserve = RamPool::reserve_for(capacity).0 as usize;
        let memory = SharedMemory::create("uc-test-pool", reserve).expect("a memfd");
        RamPool::new(memory, Compressor::Lz4, capacity, &PageKey::KNOWN).expect("an empty pool")
    }

    fn file(folder: &std::path::Path) -> FileTier {
        let backing = Backing::open(&folder.join("tier"), Some(Bytes(8 << 20))).expect("a file");
        let table = FileTier::table_bytes(&backing);
        let memory = SharedMemory::create("uc-test-table", table).expect("a memfd");
        FileTier::new(backing, memory, &PageKey::KNOWN).expect("an empty tier")
    }

    /// Stores a page and reads it as a demotion does, into a buffer that has other bytes.
    fn demoted(tier: &dyn Tier) -> (Option<u64>, Vec<u8>) {
        let bytes: Vec<u8> = (0..BASE_PAGE_BYTES).map(|at| (at / 64) as u8).collect();
        let mut batch = [Store {
            page: &bytes,
            stamp: STAMP,
            checksum: PageKey::KNOWN.checksum(&bytes, STAMP),
            result: Err(StoreError::Full),
        }];
        tier.store(&mut batch);
        let slot = batch[0].result.expect("room for a page");
        let item = |slot| DemoteItem {
            no: PageNo(1),
            tier: TierId(0),
            slot,
            stamp: STAMP,
            selected: 0,
        };
        let mut page = vec![0xee; BASE_PAGE_BYTES];
        let gone = copy_of(tier, &item(Slot(slot.0 + 1)), &mut page);
        assert_eq!(gone, None, "a slot that is free has no copy");
        page.fill(0xee);
        (copy_of(tier, &item(slot), &mut page), page)
    }

    #[test]
    fn a_copy_in_memory_comes_with_its_checksum() {
        let (sum, page) = demoted(&pool());
        assert_eq!(sum, Some(PageKey::KNOWN.checksum(&page, STAMP)));
    }

    /// A file tier above another: a buffer that was not read into is not taken for the page's
    /// bytes.
    #[test]
    fn a_copy_on_a_device_is_not_taken_for_read() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (sum, page) = demoted(&file(folder.path()));
        assert_eq!(sum, None);
        assert!(page.iter().all(|byte| *byte == 0xee), "nothing was read");
    }
}
