//! A tier in ordinary memory that keeps real bytes, counts its slots, and fails by seed.
//!
//! Slots are reused last-freed-first, so that a reference to a freed slot soon meets another page's bytes.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{
    Bytes, FailKind, LoadError, Loaded, PAGE_BYTES, Slot, Stamp, Store, StoreError, Tier, TierInfo,
    TierKind, TierUsage, page_checksum,
};

use crate::random::{Random, mix};

/// How often each failure strikes, in 1000 calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailRates {
    /// `StoreError::Full`.
    pub full: u64,
    /// `StoreError::Incompressible`.
    pub incompressible: u64,
    /// `StoreError::Failed(NoSpace)`.
    pub no_space: u64,
    /// `StoreError::Failed(Io)`.
    pub store_io: u64,
    /// `LoadError::Failed(Io)`; the next load may work.
    pub load_io: u64,
    /// A load sees what the slot held before (a stale sector); the next load may work.
    pub stale: u64,
    /// A store is silently damaged: one bit of the copy flips and stays so.
    pub flip: u64,
}

impl FailRates {
    /// Nothing fails.
    pub const NONE: FailRates = FailRates {
        full: 0,
        incompressible: 0,
        no_space: 0,
        store_io: 0,
        load_io: 0,
        stale: 0,
        flip: 0,
    };
}

#[derive(Debug)]
struct Kept {
    bytes: Box<[u8]>,
    before: Option<Box<[u8]>>,
    stamp: Stamp,
    checksum: u64,
    size: u64,
    damaged: bool,
}

#[derive(Debug)]
struct Inner {
    kept: BTreeMap<Slot, Kept>,
    /// Free slots with what they last held, last freed at the end.
    free: Vec<(Slot, Box<[u8]>)>,
    next: u64,
    held: u64,
    rates: FailRates,
    random: Random,
}

/// See the module.
#[derive(Debug)]
pub struct FakeTier {
    info: TierInfo,
    inner: Mutex<Inner>,
}

impl FakeTier {
    /// An empty tier for `capacity` of uncompressed pages. A RAM tier holds a quarter to three quarters of each page.
    pub fn new(name: &str, kind: TierKind, capacity: Bytes, seed: u64) -> FakeTier {
        FakeTier {
            info: TierInfo {
                name: name.to_owned(),
                kind,
                emulated: true,
                capacity,
            },
            inner: Mutex::new(Inner {
                kept: BTreeMap::new(),
                free: Vec::new(),
                next: 0,
                held: 0,
                rates: FailRates::NONE,
                random: Random::new(seed),
            }),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it fails this often.
    pub fn set_rates(&self, rates: FailRates) {
        self.inner().rates = rates;
    }

    /// True while the slot is taken.
    pub fn is_live(&self, slot: Slot) -> bool {
        self.inner().kept.contains_key(&slot)
    }

    /// True when the slot's copy was damaged by an injected failure.
    pub fn is_damaged(&self, slot: Slot) -> bool {
        self.inner()
            .kept
            .get(&slot)
            .is_some_and(|kept| kept.damaged)
    }

    /// Slots taken, ascending.
    pub fn live(&self) -> Vec<Slot> {
        self.inner().kept.keys().copied().collect()
    }
}

impl Tier for FakeTier {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn usage(&self) -> TierUsage {
        let inner = self.inner();
        let logical = Bytes((inner.kept.len() * PAGE_BYTES) as u64);
        TierUsage {
            logical,
            stored: Bytes(inner.held),
            held: Bytes(inner.held),
        }
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let mut inner = self.inner();
        for store in batch {
            assert_eq!(
                store.checksum,
                page_checksum(store.page, store.stamp),
                "the caller's checksum"
            );
            let rates = inner.rates;
            let full = (inner.kept.len() + 1) * PAGE_BYTES > self.info.capacity.0 as usize;
            let strikes = inner.random.below(1000);
            let steps = [
                (rates.full, StoreError::Full),
                (rates.incompressible, StoreError::Incompressible),
                (rates.no_space, StoreError::Failed(FailKind::NoSpace)),
                (rates.store_io, StoreError::Failed(FailKind::Io)),
            ];
            let mut sum = 0;
            let failed = steps.into_iter().find_map(|(rate, error)| {
                sum += rate;
                (strikes < sum).then_some(error)
            });
            if let Some(error) = failed.or(full.then_some(StoreError::Full)) {
                store.result = Err(error);
                continue;
            }
            let (slot, before) = match inner.free.pop() {
                Some((slot, before)) => (slot, Some(before)),
                None => {
                    inner.next += 1;
                    (Slot(inner.next - 1), None)
                }
            };
            let mut bytes: Box<[u8]> = store.page.into();
            let damaged = inner.random.chance(rates.flip, 1000);
            if damaged {
                let at = inner.random.index(PAGE_BYTES);
                bytes[at] ^= 1 << inner.random.below(8);
            }
            let size = match self.info.kind {
                TierKind::Ram => PAGE_BYTES as u64 / 4 + mix(store.checksum) % 2048,
                TierKind::File => PAGE_BYTES as u64,
            };
            inner.held += size;
            inner.kept.insert(
                slot,
                Kept {
                    bytes,
                    before,
                    stamp: store.stamp,
                    checksum: store.checksum,
                    size,
                    damaged,
                },
            );
            store.result = Ok(slot);
        }
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let mut inner = self.inner();
        let rates = inner.rates;
        let (io, stale) = (
            inner.random.chance(rates.load_io, 1000),
            inner.random.chance(rates.stale, 1000),
        );
        let kept = inner.kept.get(&slot).filter(|kept| kept.stamp == stamp);
        let Some(kept) = kept else {
            return Err(LoadError::Corrupt);
        };
        if io {
            return Err(LoadError::Failed(FailKind::Io));
        }
        match (&kept.before, stale) {
            (Some(before), true) => dst.copy_from_slice(before),
            _ => dst.copy_from_slice(&kept.bytes),
        }
        match page_checksum(dst, stamp) == kept.checksum {
            true => Ok(Loaded::Done),
            false => Err(LoadError::Corrupt),
        }
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        let inner = self.inner();
        let kept = inner.kept.get(&slot)?;
        (kept.stamp == stamp).then_some(kept.checksum)
    }

    fn free(&self, slots: &[Slot]) {
        let mut inner = self.inner();
        for slot in slots {
            let kept = inner.kept.remove(slot);
            let kept =
                kept.unwrap_or_else(|| panic!("{}: {slot:?} is free already", self.info.name));
            inner.held -= kept.size;
            inner.free.push((*slot, kept.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Content;

    fn store(tier: &FakeTier, content: Content, stamp: Stamp) -> Result<Slot, StoreError> {
        let bytes = content.bytes();
        let mut batch = [Store {
            page: &bytes,
            stamp,
            checksum: page_checksum(&bytes, stamp),
            result: Err(StoreError::Full),
        }];
        tier.store(&mut batch);
        batch[0].result
    }

    #[test]
    fn tier_gives_back_bytes_and_refuses_what_is_damaged_stale_or_full() {
        let tier = FakeTier::new("t", TierKind::File, Bytes(2 * 4096), 1);
        let mut page = vec![0; PAGE_BYTES];
        let slot = store(&tier, Content(5), Stamp(1)).unwrap();
        assert_eq!(tier.load(slot, Stamp(1), &mut page), Ok(Loaded::Done));
        assert_eq!(Content::of(&page), Some(Content(5)));
        assert_eq!(
            tier.load(slot, Stamp(2), &mut page),
            Err(LoadError::Corrupt)
        );
        tier.free(&[slot]);
        tier.set_rates(FailRates {
            flip: 1000,
            ..FailRates::NONE
        });
        let slot = store(&tier, Content(6), Stamp(1)).unwrap();
        assert!(tier.is_damaged(slot));
        assert_eq!(
            tier.load(slot, Stamp(1), &mut page),
            Err(LoadError::Corrupt)
        );
        tier.free(&[slot]);
        tier.set_rates(FailRates {
            stale: 1000,
            ..FailRates::NONE
        });
        let slot = store(&tier, Content(7), Stamp(1)).unwrap();
        assert_eq!(
            tier.load(slot, Stamp(1), &mut page),
            Err(LoadError::Corrupt)
        );
        store(&tier, Content(8), Stamp(1)).unwrap();
        assert_eq!(store(&tier, Content(9), Stamp(1)), Err(StoreError::Full));
    }
}
