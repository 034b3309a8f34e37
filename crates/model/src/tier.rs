//! A tier in ordinary memory that keeps real bytes, counts its slots, and fails by seed.
//!
//! Slots are reused last-freed-first, so that a reference to a freed slot soon finds another page's
//! bytes. As in the real tiers, a slot's checksum is kept apart from the device: a failing device
//! damages bytes, never checksums. After [`FakeTier::set_reads`] the tier mostly says where to
//! read, as a device does. There is no file: the caller reads by [`FakeTier::read`]. After
//! [`FakeTier::set_packs`] several copies are in each place: what is read stands for all of them,
//! and a failed read is one of them all. A remote tier
//! always says that the copy must be fetched; storms read it by [`FakeTier::read`], too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, FailKind, Fetched, Inbox, LatencyClass, LoadError, Loaded, Nanos,
    PageKey, PageSize, Slot, Stamp, Store, StoreError, Tier, TierFacts, TierInfo, TierUsage,
};

use crate::content::Content;
use undercroft_seeded::{Random, mix};

/// The descriptor in `Loaded::Read`: there is no file.
const NO_FILE: i32 = -1;

/// Facts of compressed memory. A test of the crate `tier` compares all of these with its own.
pub static POOL: TierFacts = TierFacts {
    charged_to_limit: true,
    ..TierFacts::of("ram", LatencyClass::Memory, Nanos(3_000))
};

/// Facts of mapped memory.
pub static MAPPED: TierFacts = TierFacts {
    updates_copies: true,
    ..TierFacts::of("nvm", LatencyClass::Nvm, Nanos(1_000))
};

/// Facts of a file or block device.
pub static DEVICE: TierFacts = TierFacts {
    grows: true,
    ..TierFacts::of("file", LatencyClass::Device, Nanos(80_000))
};

/// Facts of a cluster of other machines.
pub static CLUSTER: TierFacts = TierFacts {
    remote: true,
    ..TierFacts::of("redis", LatencyClass::Device, Nanos(300_000))
};

/// How often each failure strikes, in 1000 calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailRates {
    /// `StoreError::Full`.
    pub full: u64,
    /// `StoreError::Incompressible`.
    pub incompressible: u64,
    /// `StoreError::Failed(NoSpace)`.
    pub no_space: u64,
    /// `StoreError::Failed(Io)`; nothing was written.
    pub store_io: u64,
    /// `StoreError::Failed(Io)`; a part was written, over what the free slot held before.
    pub short: u64,
    /// A store writes a part and reports success: the rest of the slot keeps its old bytes.
    pub torn: u64,
    /// A store writes nothing and reports success: the slot keeps its old bytes.
    pub lost: u64,
    /// A store is silently damaged: one bit of the copy flips and stays so.
    pub flip: u64,
    /// `LoadError::Failed(Io)`; the next load may work.
    pub load_io: u64,
    /// A load sees what the slot held before (a stale sector); the next load may work.
    pub stale: u64,
    /// A load sees what another slot holds; the next load may work.
    pub misdirected: u64,
}

impl FailRates {
    /// Nothing fails.
    pub const NONE: FailRates = FailRates {
        full: 0,
        incompressible: 0,
        no_space: 0,
        store_io: 0,
        short: 0,
        torn: 0,
        lost: 0,
        flip: 0,
        load_io: 0,
        stale: 0,
        misdirected: 0,
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
    /// Whether every operation fails.
    gone: bool,
    random: Random,
    /// How often each failure occurred since the last question.
    struck: BTreeMap<&'static str, u64>,
    /// The last load failed by injection.
    made_to_fail: bool,
    /// Most loads say where to read.
    reads: bool,
    /// Several copies are where one is read.
    packs: bool,
}

/// Copies in one place of a tier that packs.
const PARTS: u64 = 4;

impl Inner {
    /// Draws which of `kinds` happens now, if any. Each has its chance in 1000.
    fn draw<T, const N: usize>(&mut self, kinds: [(u64, T); N]) -> Option<T> {
        let strikes = self.random.below(1000);
        let mut sum = 0;
        kinds.into_iter().find_map(|(rate, kind)| {
            sum += rate;
            (strikes < sum).then_some(kind)
        })
    }

    fn strike(&mut self, what: &'static str) {
        *self.struck.entry(what).or_default() += 1;
    }

    /// Reads what the device has at `slot`, or what a failing device gives instead. A free slot has
    /// what it held last. Errors: the device failed.
    fn read(&mut self, slot: Slot, dst: &mut [u8]) -> Result<(), FailKind> {
        self.made_to_fail = false;
        if self.gone {
            self.made_to_fail = true;
            self.strike("gone");
            return Err(FailKind::Io);
        }
        let Some(kept) = self.kept.get(&slot) else {
            match self.free.iter().find(|(free, _)| *free == slot) {
                Some((_, bytes)) => dst.copy_from_slice(bytes),
                None => dst.fill(0),
            }
            return Ok(());
        };
        let (stamp, checksum, damaged) = (kept.stamp, kept.checksum, kept.damaged);
        let kinds = [
            (self.rates.load_io, "EIO of a load"),
            (self.rates.stale, "stale read"),
            (self.rates.misdirected, "misdirected read"),
        ];
        let mut failure = self.draw(kinds);
        let slots = self.kept.len();
        let other = self.random.index(slots);
        let seen = match failure {
            Some("EIO of a load") => {
                self.made_to_fail = true;
                self.strike("EIO of a load");
                return Err(FailKind::Io);
            }
            Some("misdirected read") => self.kept.values().nth(other).map(|kept| &kept.bytes),
            Some(_) => self.kept[&slot].before.as_ref(),
            None => None,
        };
        match seen {
            Some(bytes) => dst.copy_from_slice(bytes),
            None => {
                failure = None;
                dst.copy_from_slice(&self.kept[&slot].bytes);
            }
        }
        if let Some(name) = failure {
            self.strike(name);
        }
        // Right bytes for the wrong reason are right.
        self.made_to_fail =
            PageKey::KNOWN.checksum(dst, stamp) != checksum && (failure.is_some() || damaged);
        Ok(())
    }

    /// Reads a place that has several copies. What is read says which place it is, and whether it
    /// is as it was before. Errors: the device failed.
    fn read_block(&mut self, block: u64, dst: &mut [u8]) -> Result<(), FailKind> {
        let failure = if self.gone {
            Some("gone")
        } else {
            self.draw([
                (self.rates.load_io, "EIO of a load"),
                (self.rates.stale, "stale read"),
                (self.rates.misdirected, "misdirected read"),
            ])
        };
        self.made_to_fail = matches!(failure, Some("gone" | "EIO of a load"));
        failure.into_iter().for_each(|name| self.strike(name));
        if self.made_to_fail {
            return Err(FailKind::Io);
        }
        let block = match failure {
            Some("misdirected read") => self.random.below(1 + self.next / PARTS),
            _ => block,
        };
        dst.fill(0);
        let (words, _) = dst.as_chunks_mut::<8>();
        words[0] = block.to_ne_bytes();
        words[1] = u64::from(failure == Some("stale read")).to_ne_bytes();
        Ok(())
    }

    /// Makes the copy of `slot` of what [`Inner::read_block`] has read.
    fn unpack(&mut self, slot: Slot, page: &mut [u8]) {
        let (words, _) = page.as_chunks::<8>();
        let [block, stale] = [0, 1].map(|at| u64::from_ne_bytes(words[at]));
        let found = Slot(block * PARTS + slot.0 % PARTS);
        let bytes = match self.kept.get(&found) {
            Some(kept) if stale == 1 => Some(kept.before.as_ref().unwrap_or(&kept.bytes)),
            Some(kept) => Some(&kept.bytes),
            None => {
                let free = self.free.iter().find(|(free, _)| *free == found);
                free.map(|(_, bytes)| bytes)
            }
        };
        match bytes {
            Some(bytes) => page.copy_from_slice(bytes),
            None => page.fill(0),
        }
        self.made_to_fail = self.kept.get(&slot).is_some_and(|kept| {
            let is_right = PageKey::KNOWN.checksum(page, kept.stamp) == kept.checksum;
            !is_right && (found != slot || stale == 1 || kept.damaged)
        });
    }
}

/// A tier in memory with injected failures.
#[derive(Debug)]
pub struct FakeTier {
    info: TierInfo,
    /// Bytes that it may hold now.
    most: AtomicU64,
    inner: Mutex<Inner>,
}

impl FakeTier {
    /// An empty tier for `capacity` of uncompressed pages. A tier that counts towards the limit
    /// compresses: it holds a quarter to three quarters of each page.
    pub fn new(name: &str, facts: &'static TierFacts, capacity: Bytes, seed: u64) -> FakeTier {
        FakeTier {
            info: TierInfo {
                name: name.to_owned(),
                facts,
                page: PageSize::Base,
                emulated: true,
                capacity,
            },
            most: AtomicU64::new(capacity.0),
            inner: Mutex::new(Inner {
                kept: BTreeMap::new(),
                free: Vec::new(),
                next: 0,
                held: 0,
                rates: FailRates::NONE,
                gone: false,
                random: Random::new(seed),
                struck: BTreeMap::new(),
                made_to_fail: false,
                reads: false,
                packs: false,
            }),
        }
    }

    /// Counts its copies as pages of this size. Their contents stay as short as base pages: a
    /// [`Content`](crate::Content) stands for a page of any size.
    pub fn of_pages(mut self, page: PageSize) -> FakeTier {
        self.info.page = page;
        self
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it may hold this much, and no more than its size. What is there stays.
    pub fn set_capacity(&self, capacity: Bytes) {
        let most = capacity.min(self.info.capacity);
        self.most.store(most.0, Ordering::Relaxed);
    }

    /// From now on it fails this often.
    pub fn set_rates(&self, rates: FailRates) {
        self.inner().rates = rates;
    }

    /// Failures from now on are those of `seed`.
    pub fn reseed(&self, seed: u64) {
        self.inner().random = Random::new(seed);
    }

    /// Every operation fails from now on (or works again).
    pub fn set_gone(&self, gone: bool) {
        self.inner().gone = gone;
    }

    /// From now on most loads say where to read (or none does).
    pub fn set_reads(&self, reads: bool) {
        self.inner().reads = reads;
    }

    /// From now on several copies are in each place of the device (or one is). Before the first
    /// copy is stored.
    pub fn set_packs(&self, packs: bool) {
        self.inner().packs = packs;
    }

    /// Reads a page where [`Loaded::Read`] said. The bytes are not verified. Errors: the device
    /// failed.
    pub fn read(&self, offset: u64, dst: &mut [u8]) -> Result<(), FailKind> {
        let place = offset / BASE_PAGE_BYTES as u64;
        let mut inner = self.inner();
        if inner.packs {
            inner.read_block(place, dst)
        } else {
            inner.read(Slot(place), dst)
        }
    }

    /// True while every operation fails.
    pub fn is_gone(&self) -> bool {
        self.inner().gone
    }

    /// Which failures occurred since the last question, and how often.
    pub fn take_struck(&self) -> BTreeMap<&'static str, u64> {
        std::mem::take(&mut self.inner().struck)
    }

    /// Whether the last load or read failed by injection, or found a copy damaged by injection.
    pub fn was_made_to_fail(&self) -> bool {
        self.inner().made_to_fail
    }

    /// The content of the slot, if it is in use with this stamp and undamaged. No failure is
    /// injected.
    pub fn content(&self, slot: Slot, stamp: Stamp) -> Option<Content> {
        let inner = self.inner();
        let kept = inner.kept.get(&slot)?;
        if kept.stamp == stamp && !kept.damaged {
            Content::of(&kept.bytes)
        } else {
            None
        }
    }

    /// Frees every slot that is not in `wanted`, as a manager does that took over from a dead one.
    /// Returns how many.
    pub fn retain_only(&self, wanted: &BTreeSet<Slot>) -> usize {
        let live = self.live();
        let unwanted: Vec<Slot> = live.into_iter().filter(|s| !wanted.contains(s)).collect();
        self.free(&unwanted);
        unwanted.len()
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

    fn capacity(&self) -> Bytes {
        Bytes(self.most.load(Ordering::Relaxed))
    }

    fn usage(&self) -> TierUsage {
        let inner = self.inner();
        let logical = Bytes((inner.kept.len() * self.info.page.bytes()) as u64);
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
                PageKey::KNOWN.checksum(store.page, store.stamp),
                "the caller's checksum"
            );
            let rates = inner.rates;
            let full = (inner.kept.len() + 1) * self.info.page.bytes() > self.capacity().0 as usize;
            let failed = match (inner.gone, full) {
                (true, _) => Some(("gone", StoreError::Failed(FailKind::Io))),
                (_, true) => Some(("full", StoreError::Full)),
                _ => {
                    let kinds = [
                        (rates.full, ("full", StoreError::Full)),
                        (
                            rates.incompressible,
                            ("incompressible", StoreError::Incompressible),
                        ),
                        (
                            rates.no_space,
                            ("ENOSPC", StoreError::Failed(FailKind::NoSpace)),
                        ),
                        (
                            rates.store_io,
                            ("EIO of a store", StoreError::Failed(FailKind::Io)),
                        ),
                        (
                            rates.short,
                            ("short write", StoreError::Failed(FailKind::Io)),
                        ),
                    ];
                    inner.draw(kinds)
                }
            };
            if let Some((name, error)) = failed {
                inner.strike(name);
                if name == "short write" {
                    let written = 512 * inner.random.index(8);
                    if let Some((_, held)) = inner.free.last_mut() {
                        held[..written].copy_from_slice(&store.page[..written]);
                    }
                }
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
            let kinds = [
                (rates.flip, "bit flip"),
                (rates.torn, "torn write"),
                (rates.lost, "lost write"),
            ];
            let damage = inner.draw(kinds);
            if let Some(name) = damage {
                inner.strike(name);
                let kept = match name {
                    "bit flip" => {
                        let at = inner.random.index(BASE_PAGE_BYTES);
                        bytes[at] ^= 1 << inner.random.below(8);
                        BASE_PAGE_BYTES
                    }
                    "torn write" => 512 * (1 + inner.random.index(7)),
                    _ => 0,
                };
                match &before {
                    Some(before) => bytes[kept..].copy_from_slice(&before[kept..]),
                    None => bytes[kept..].fill(0),
                }
            }
            // The bytes may be right all the same.
            let damaged = *bytes != *store.page;
            let size = if self.info.facts.charged_to_limit {
                BASE_PAGE_BYTES as u64 / 4 + mix(store.checksum) % 2048
            } else {
                BASE_PAGE_BYTES as u64
            };
            let size = size * self.info.page.base_pages();
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
        inner.made_to_fail = false;
        let kept = inner.kept.get(&slot).filter(|kept| kept.stamp == stamp);
        let checksum = kept.ok_or(LoadError::Corrupt)?.checksum;
        if self.info.facts.remote {
            return Ok(Loaded::Fetch);
        }
        if inner.reads && inner.random.chance(3, 4) {
            let place = if inner.packs { slot.0 / PARTS } else { slot.0 };
            let offset = place * BASE_PAGE_BYTES as u64;
            return Ok(Loaded::Read {
                fd: NO_FILE,
                offset,
            });
        }
        inner.read(slot, dst).map_err(LoadError::Failed)?;
        if PageKey::KNOWN.checksum(dst, stamp) == checksum {
            Ok(Loaded::Done)
        } else {
            Err(LoadError::Corrupt)
        }
    }

    fn unpack(&self, slot: Slot, page: &mut [u8]) -> bool {
        let mut inner = self.inner();
        if inner.packs {
            inner.unpack(slot, page);
        }
        true
    }

    fn fetch(&self, slot: Slot, stamp: Stamp, token: u64, inbox: &Arc<dyn Inbox>) {
        let mut page = vec![0; BASE_PAGE_BYTES].into_boxed_slice();
        let read = self.inner().read(slot, &mut page);
        let verified = self.checksum(slot, stamp) == Some(PageKey::KNOWN.checksum(&page, stamp));
        let page = match (read, verified) {
            (Ok(()), true) => Ok(page),
            (Ok(()), false) => Err(LoadError::Corrupt),
            (Err(_), _) => Err(LoadError::Late),
        };
        inbox.deliver(Fetched { token, page });
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        let inner = self.inner();
        let kept = inner.kept.get(&slot)?;
        (kept.stamp == stamp).then_some(kept.checksum)
    }

    fn update(&self, slot: Slot, item: &Store<'_>) -> Option<Result<Bytes, StoreError>> {
        if !self.info.facts.updates_copies {
            return None;
        }
        let mut inner = self.inner();
        let rate = inner.rates.store_io;
        let failed = inner.gone || inner.draw([(rate, ())]).is_some();
        let kept = inner.kept.get_mut(&slot)?;
        let half = if failed {
            BASE_PAGE_BYTES / 2
        } else {
            BASE_PAGE_BYTES
        };
        let written = (0..half).step_by(512).filter(|at| {
            let sector = *at..*at + 512;
            let differs = kept.bytes[sector.clone()] != item.page[sector.clone()];
            kept.bytes[sector.clone()].copy_from_slice(&item.page[sector]);
            differs
        });
        let written = written.count() * 512;
        (kept.stamp, kept.checksum) = (item.stamp, item.checksum);
        kept.damaged = *kept.bytes != *item.page;
        if failed {
            inner.strike("EIO of a store");
            return Some(Err(StoreError::Failed(FailKind::Io)));
        }
        Some(Ok(Bytes(written as u64)))
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
            checksum: PageKey::KNOWN.checksum(&bytes, stamp),
            result: Err(StoreError::Full),
        }];
        tier.store(&mut batch);
        batch[0].result
    }

    #[test]
    fn tier_gives_back_bytes_and_refuses_what_is_damaged_stale_or_full() {
        let tier = FakeTier::new("t", &DEVICE, Bytes(2 * 4096), 1);
        let mut page = vec![0; BASE_PAGE_BYTES];
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

    #[test]
    fn tier_says_where_to_read_and_the_bytes_there_verify_by_its_checksum() {
        let tier = FakeTier::new("t", &DEVICE, Bytes(2 * 4096), 1);
        tier.set_reads(true);
        let mut page = vec![0; BASE_PAGE_BYTES];
        store(&tier, Content(4), Stamp(1)).unwrap();
        let slot = store(&tier, Content(5), Stamp(1)).unwrap();
        let loads = (0..20).map(|_| tier.load(slot, Stamp(1), &mut page));
        let read = loads.filter_map(|loaded| match loaded {
            Ok(Loaded::Read { offset, .. }) => Some(offset),
            _ => None,
        });
        let read: Vec<u64> = read.collect();
        assert!((10..20).contains(&read.len()), "{} of 20", read.len());
        page.fill(0);
        assert_eq!(tier.read(read[0], &mut page), Ok(()));
        let sum = PageKey::KNOWN.checksum(&page, Stamp(1));
        assert_eq!(tier.checksum(slot, Stamp(1)), Some(sum));
        assert_eq!(Content::of(&page), Some(Content(5)));
        tier.set_gone(true);
        assert_eq!(tier.read(read[0], &mut page), Err(FailKind::Io));
        assert!(tier.was_made_to_fail());
    }

    #[test]
    fn copies_in_one_place_are_read_by_one_read_and_fail_together() {
        let tier = FakeTier::new("t", &DEVICE, Bytes(9 * 4096), 1);
        tier.set_reads(true);
        tier.set_packs(true);
        let mut page = vec![0; BASE_PAGE_BYTES];
        let slots: Vec<Slot> = (1..=8)
            .map(|number| store(&tier, Content(number), Stamp(1)).unwrap())
            .collect();
        let place = |slot: Slot| slot.0 / PARTS * BASE_PAGE_BYTES as u64;
        for (slot, number) in slots.iter().zip(1..) {
            assert_eq!(tier.read(place(*slot), &mut page), Ok(()));
            assert!(tier.unpack(*slot, &mut page));
            assert_eq!(Content::of(&page), Some(Content(number)));
            assert!(!tier.was_made_to_fail());
        }
        // The other place is read: each of its copies is another's.
        assert_eq!(tier.read(place(slots[7]), &mut page), Ok(()));
        assert!(tier.unpack(slots[0], &mut page));
        assert_eq!(Content::of(&page), Some(Content(5)));
        assert!(tier.was_made_to_fail());
    }

    #[test]
    fn tier_misdirects_tears_loses_and_is_gone_and_every_time_its_checksum_tells() {
        let one = |change: fn(&mut FailRates)| {
            let mut rates = FailRates::NONE;
            change(&mut rates);
            rates
        };
        let stores: [(&str, FailRates); 3] = [
            ("torn write", one(|r| r.torn = 1000)),
            ("lost write", one(|r| r.lost = 1000)),
            ("bit flip", one(|r| r.flip = 1000)),
        ];
        let mut page = vec![0; BASE_PAGE_BYTES];
        for (name, rates) in stores {
            let tier = FakeTier::new("t", &DEVICE, Bytes(9 * 4096), 1);
            let old = store(&tier, Content(1), Stamp(1)).unwrap();
            tier.free(&[old]);
            tier.set_rates(rates);
            let slot = store(&tier, Content(2), Stamp(1)).unwrap();
            assert_eq!(slot, old);
            tier.set_rates(FailRates::NONE);
            let loaded = tier.load(slot, Stamp(1), &mut page);
            assert_eq!(loaded, Err(LoadError::Corrupt), "{name}");
            assert!(tier.is_damaged(slot) && tier.was_made_to_fail());
            assert_eq!(tier.content(slot, Stamp(1)), None);
            assert_eq!(tier.take_struck(), BTreeMap::from([(name, 1)]));
        }
        let tier = FakeTier::new("t", &DEVICE, Bytes(9 * 4096), 1);
        let slots: Vec<Slot> = (1..5)
            .map(|n| store(&tier, Content(n), Stamp(1)).unwrap())
            .collect();
        tier.set_rates(one(|r| r.misdirected = 1000));
        let wrong = (0..20).filter(|_| tier.load(slots[0], Stamp(1), &mut page).is_err());
        assert!(wrong.count() > 5);
        tier.set_rates(one(|r| r.short = 1000));
        let short = store(&tier, Content(9), Stamp(1));
        assert_eq!(short, Err(StoreError::Failed(FailKind::Io)));
        tier.set_rates(FailRates::NONE);
        assert_eq!(tier.retain_only(&BTreeSet::from([slots[2]])), 3);
        assert_eq!(tier.live(), [slots[2]]);
        tier.set_gone(true);
        assert!(tier.load(slots[2], Stamp(1), &mut page).is_err());
        assert!(store(&tier, Content(9), Stamp(1)).is_err());
        tier.set_gone(false);
        assert_eq!(tier.load(slots[2], Stamp(1), &mut page), Ok(Loaded::Done));
    }
}
