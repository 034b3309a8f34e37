//! The contract that every Tier implementation passes, against an oracle that keeps every byte. For
//! tests.
//!
//! A suite panics with its seed at the first difference. Data are heap-like: see [`Pages`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use undercroft_base::{
    Bytes, FailKind, Inbox, LoadError, Loaded, PAGE_BYTES, Slot, Stamp, Store, StoreError, Tier,
    page_checksum,
};
pub(crate) use undercroft_seeded::{Page, Pages};
use undercroft_sys::mapping::PageBuf;

use crate::mailbox::Mailbox;

/// A tier under test, and facts that the suite needs about it.
pub(crate) struct Subject<'a> {
    /// The tier.
    pub tier: &'a dyn Tier,
    /// Does the tier's idle work, which frees what it keeps for later. Called before `held` is
    /// checked.
    pub idle_work: &'a (dyn Fn() + Sync),
    /// Most bytes it may hold when it is empty and the idle work is done.
    pub held_empty: Bytes,
}

/// Stores `pages` as one batch. Returns each result. The pages of a batch with an even count are
/// aligned, as a device reads them without a copy; others are anywhere.
pub(crate) fn store_all(tier: &dyn Tier, pages: &[(Page, Stamp)]) -> Vec<Result<Slot, StoreError>> {
    let mut aligned = PageBuf::new(pages.len()).expect("memory");
    for (at, (page, _)) in pages.iter().enumerate() {
        aligned.page_mut(at).copy_from_slice(page);
    }
    let are_aligned = pages.len().is_multiple_of(2);
    let mut batch: Vec<_> = pages
        .iter()
        .enumerate()
        .map(|(at, (page, stamp))| Store {
            page: if are_aligned { aligned.page(at) } else { page },
            stamp: *stamp,
            checksum: page_checksum(page, *stamp),
            result: Err(StoreError::Full),
        })
        .collect();
    tier.store(&mut batch);
    batch.iter().map(|item| item.result).collect()
}

impl Subject<'_> {
    /// Loads one page as the engine does: at once, or by a read and a check of the checksum.
    pub(crate) fn load(&self, slot: Slot, stamp: Stamp) -> Result<Box<Page>, LoadError> {
        let mut page = Box::new([0xa5; PAGE_BYTES]);
        match self.tier.load(slot, stamp, &mut page[..])? {
            Loaded::Done => {}
            Loaded::Read { fd, offset } => {
                read_page(fd, offset, &mut page).map_err(|_| LoadError::Failed(FailKind::Io))?;
                let kept = self.tier.checksum(slot, stamp).ok_or(LoadError::Corrupt)?;
                if page_checksum(&page[..], stamp) != kept {
                    return Err(LoadError::Corrupt);
                }
            }
            Loaded::Fetch => page.copy_from_slice(&self.fetch(slot, stamp)?),
        }
        Ok(page)
    }

    /// Fetches one page, again while it is late.
    fn fetch(&self, slot: Slot, stamp: Stamp) -> Result<Box<[u8]>, LoadError> {
        let mailbox = Arc::new(Mailbox::default());
        let inbox: Arc<dyn Inbox> = mailbox.clone();
        for token in 0..1000 {
            self.tier.fetch(slot, stamp, token, &inbox);
            let mut arrivals = mailbox.wait(Duration::from_secs(5));
            assert_eq!(arrivals.len(), 1, "arrivals for one fetch");
            let arrival = arrivals.pop().expect("one arrival");
            assert_eq!(arrival.token, token);
            if arrival.page != Err(LoadError::Late) {
                return arrival.page;
            }
        }
        Err(LoadError::Late)
    }
}

/// What a caller does for `Loaded::Read`, without a ring: opens the descriptor's file again and
/// reads one page.
fn read_page(fd: RawFd, offset: u64, page: &mut Page) -> std::io::Result<()> {
    File::open(format!("/proc/self/fd/{fd}"))?.read_exact_at(page, offset)
}

/// Runs the whole suite. The tier must be empty, and have room for at least 4096 pages.
pub(crate) fn check(subject: &Subject<'_>, seed: u64) {
    println!("contract of {}: seed {seed}", subject.tier.info().name);
    random_operations(subject, seed, 2000);
    concurrent_loads(subject, seed);
    concurrent_stores(subject, seed);
    becomes_empty(subject);
}

type Oracle = BTreeMap<Slot, (Box<Page>, Stamp)>;

/// Stores, loads and frees at random; every byte and every count is compared after each step.
pub(crate) fn random_operations(subject: &Subject<'_>, seed: u64, steps: u32) {
    let tier = subject.tier;
    let mut random = Pages::new(seed);
    let mut oracle = Oracle::new();
    assert_eq!(tier.usage().logical, Bytes(0), "the tier is not empty");
    for step in 0..steps {
        let context = format!("seed {seed} step {step}");
        match random.below(8) {
            0..3 => {
                let count = 1 + random.below(100).min(random.below(100));
                let pages: Vec<_> = (0..count)
                    .map(|_| (random.mixed(), Stamp(random.number() as u16)))
                    .collect();
                let results = store_all(tier, &pages);
                for ((page, stamp), result) in pages.into_iter().zip(results) {
                    match result {
                        Ok(slot) => {
                            assert!(slot.0 < Slot::LIMIT, "{context}");
                            let old = oracle.insert(slot, (Box::new(page), stamp));
                            assert!(old.is_none(), "{context}: {slot:?} given twice");
                        }
                        Err(StoreError::Incompressible | StoreError::Full) => {}
                        Err(error) => panic!("{context}: {error}"),
                    }
                }
            }
            3..6 => {
                for _ in 0..20 {
                    load_any(subject, &oracle, &mut random, &context);
                }
            }
            _ => {
                let count = random.below(80) as usize;
                let slots: Vec<_> = (0..count)
                    .filter_map(|_| {
                        let slot = any_slot(&oracle, &mut random)?;
                        oracle
                            .remove(&slot)
                            .map(|(page, stamp)| (slot, page, stamp))
                    })
                    .collect();
                tier.free(&slots.iter().map(|(slot, ..)| *slot).collect::<Vec<_>>());
                if random.below(4) == 0 {
                    tier.tidy();
                }
                for (slot, page, stamp) in slots {
                    if let Ok(loaded) = subject.load(slot, stamp) {
                        assert!(
                            loaded == page,
                            "{context}: freed {slot:?} gives other bytes"
                        );
                    }
                }
            }
        }
        let usage = tier.usage();
        assert_eq!(
            usage.logical.0,
            (oracle.len() * PAGE_BYTES) as u64,
            "{context}"
        );
        assert!(usage.stored <= usage.held, "{context}: {usage:?}");
    }
    for (&slot, (page, stamp)) in &oracle {
        let loaded = subject.load(slot, *stamp).expect("a stored page loads");
        assert!(loaded == *page, "seed {seed}: {slot:?} differs at the end");
    }
    tier.free(&oracle.keys().copied().collect::<Vec<_>>());
    becomes_empty(subject);
}

fn any_slot(oracle: &Oracle, random: &mut Pages) -> Option<Slot> {
    let (&first, _) = oracle.first_key_value()?;
    let (&last, _) = oracle.last_key_value()?;
    let from = Slot(first.0 + random.below(last.0 - first.0 + 1));
    oracle.range(from..).next().map(|(&slot, _)| slot)
}

/// False if there is nothing to load.
fn load_any(subject: &Subject<'_>, oracle: &Oracle, random: &mut Pages, context: &str) -> bool {
    let Some(slot) = any_slot(oracle, random) else {
        return false;
    };
    let (page, stamp) = &oracle[&slot];
    let loaded = subject
        .load(slot, *stamp)
        .unwrap_or_else(|error| panic!("{context}: {slot:?}: {error}"));
    assert!(loaded == *page, "{context}: {slot:?} differs");
    let kept = subject.tier.checksum(slot, *stamp);
    assert_eq!(kept, Some(page_checksum(&page[..], *stamp)), "{context}");
    let wrong = Stamp(stamp.0 ^ (1 << random.below(16)));
    let other = subject.tier.checksum(slot, wrong);
    assert_ne!(
        other,
        Some(page_checksum(&page[..], wrong)),
        "{context}: the bytes pass for another generation's"
    );
    assert_eq!(
        subject.load(slot, wrong).err(),
        Some(LoadError::Corrupt),
        "{context}"
    );
    true
}

/// What the threads of [`concurrent_loads`] share.
#[derive(Default)]
struct Scene {
    /// Pages that are stored.
    live: RwLock<Oracle>,
    /// Pages that are being freed, or were.
    doomed: RwLock<Oracle>,
    done: AtomicBool,
    /// Loads of live pages.
    loads: AtomicU64,
    /// Loads of freed pages that were noticed.
    stale: AtomicU64,
}

impl Scene {
    /// Loads live slots until the end; every byte must be right.
    fn load_live(&self, subject: &Subject<'_>, seed: u64) {
        let mut random = Pages::new(seed);
        while !self.done.load(Relaxed) {
            let live = self.live.read().expect("the worker lives");
            let loaded = load_any(subject, &live, &mut random, "concurrent load");
            self.loads.fetch_add(u64::from(loaded), Relaxed);
        }
    }

    /// Loads slots that are being freed until the end; other bytes must be noticed.
    fn load_doomed(&self, subject: &Subject<'_>) {
        while !self.done.load(Relaxed) {
            let doomed = self.doomed.read().expect("the worker lives").clone();
            for (slot, (page, stamp)) in doomed {
                match subject.load(slot, stamp) {
                    Ok(loaded) => assert!(loaded == page, "{slot:?}: wrong bytes unnoticed"),
                    Err(LoadError::Corrupt) => _ = self.stale.fetch_add(1, Relaxed),
                    Err(error) => panic!("{slot:?}: {error}"),
                }
            }
            std::thread::yield_now();
        }
    }

    /// Stores some pages, and frees the excess.
    fn store_and_free(&self, subject: &Subject<'_>, random: &mut Pages, round: u32) {
        let pages: Vec<_> = (0..32)
            .map(|_| (random.mixed(), Stamp(random.number() as u16)))
            .collect();
        let results = store_all(subject.tier, &pages);
        let mut victims = Oracle::new();
        {
            let mut live = self.live.write().expect("readers live");
            for ((page, stamp), result) in pages.into_iter().zip(results) {
                if let Ok(slot) = result {
                    let old = live.insert(slot, (Box::new(page), stamp));
                    assert!(old.is_none(), "round {round}: {slot:?} given twice");
                }
            }
            while live.len() > 600 {
                let Some(slot) = any_slot(&live, random) else {
                    break;
                };
                victims.extend(live.remove_entry(&slot));
            }
        }
        *self.doomed.write().expect("readers live") = victims.clone();
        let slots: Vec<_> = victims.keys().copied().collect();
        subject.tier.free(&slots);
    }
}

/// Two threads load live slots and one loads slots that are being freed, while a worker stores and
/// frees.
pub(crate) fn concurrent_loads(subject: &Subject<'_>, seed: u64) {
    let scene = Scene::default();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let scene = &scene;
            scope.spawn(move || scene.load_live(subject, seed ^ (thread + 1)));
        }
        scope.spawn(|| scene.load_doomed(subject));
        let mut random = Pages::new(seed);
        let work = || {
            for round in 0..300 {
                scene.store_and_free(subject, &mut random, round);
            }
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        scene.done.store(true, Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    let loads = scene.loads.into_inner();
    let stale = scene.stale.into_inner();
    println!("concurrent: {loads} loads, {stale} reads of freed slots noticed");
    assert!(loads > 0, "nothing was loaded while pages were stored");
    let left = scene.live.into_inner().expect("threads ended well");
    subject.tier.free(&left.keys().copied().collect::<Vec<_>>());
    becomes_empty(subject);
}

/// Three threads store, load and free their own pages at once. No slot ever belongs to two threads,
/// and every byte stays.
pub(crate) fn concurrent_stores(subject: &Subject<'_>, seed: u64) {
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || {
                let mut random = Pages::new(seed ^ (0x100 + thread));
                let mut oracle = Oracle::new();
                let context = format!("seed {seed} storing thread {thread}");
                for _ in 0..120 {
                    let count = 1 + random.below(60);
                    // Few stamps: mixed-up slots must show by their bytes, not by chance.
                    let pages: Vec<_> = (0..count)
                        .map(|_| (random.mixed(), Stamp(random.below(2) as u16)))
                        .collect();
                    for ((page, stamp), result) in pages.iter().zip(store_all(subject.tier, &pages))
                    {
                        if let Ok(slot) = result {
                            let old = oracle.insert(slot, (Box::new(*page), *stamp));
                            assert!(old.is_none(), "{context}: {slot:?} given twice");
                        }
                    }
                    for _ in 0..10 {
                        load_any(subject, &oracle, &mut random, &context);
                    }
                    let mut freed = Vec::new();
                    while oracle.len() > 300 || random.below(8) != 0 {
                        let Some(slot) = any_slot(&oracle, &mut random) else {
                            break;
                        };
                        oracle.remove(&slot);
                        freed.push(slot);
                    }
                    subject.tier.free(&freed);
                }
                for (&slot, (page, stamp)) in &oracle {
                    let loaded = subject.load(slot, *stamp);
                    assert!(loaded.as_ref() == Ok(page), "{context}: {slot:?} differs");
                }
                subject
                    .tier
                    .free(&oracle.keys().copied().collect::<Vec<_>>());
            });
        }
    });
    becomes_empty(subject);
}

/// Checks that nothing is stored, and that nothing (or nearly nothing) is held.
pub(crate) fn becomes_empty(subject: &Subject<'_>) {
    (subject.idle_work)();
    let usage = subject.tier.usage();
    assert_eq!((usage.logical, usage.stored), (Bytes(0), Bytes(0)));
    assert!(
        usage.held <= subject.held_empty,
        "held {} when empty, not at most {}",
        usage.held,
        subject.held_empty
    );
}

/// Fills the tier with at most `pages_max` pages. Checks that nothing was lost, and that freed room
/// can be used again.
pub(crate) fn fills_and_recovers(subject: &Subject<'_>, seed: u64, pages_max: usize) {
    println!("filling {}: seed {seed}", subject.tier.info().name);
    let mut random = Pages::new(seed);
    let mut oracle = Oracle::new();
    let mut store_until_full = |oracle: &mut Oracle| {
        for _ in 0..pages_max.div_ceil(64) {
            let pages: Vec<_> = (0..64).map(|n| (random.heap_like(), Stamp(n))).collect();
            let results = store_all(subject.tier, &pages);
            let full = results.contains(&Err(StoreError::Full));
            for ((page, stamp), result) in pages.into_iter().zip(results) {
                match result {
                    Ok(slot) => assert!(oracle.insert(slot, (Box::new(page), stamp)).is_none()),
                    Err(error) => assert_eq!(error, StoreError::Full),
                }
            }
            assert!(subject.tier.usage().held <= subject.tier.capacity());
            if full {
                return;
            }
        }
        panic!("seed {seed}: not full after {pages_max} pages");
    };
    store_until_full(&mut oracle);
    let first = oracle.len();
    let half: Vec<_> = oracle.keys().copied().step_by(2).collect();
    for slot in &half {
        oracle.remove(slot);
    }
    subject.tier.free(&half);
    store_until_full(&mut oracle);
    let again = oracle.len();
    assert!(
        again * 10 >= first * 8,
        "{first} pages fitted first, {again} after freeing half"
    );
    for (&slot, (page, stamp)) in &oracle {
        assert!(
            subject.load(slot, *stamp).expect("stored") == *page,
            "{slot:?} differs"
        );
    }
    subject
        .tier
        .free(&oracle.keys().copied().collect::<Vec<_>>());
    becomes_empty(subject);
}
