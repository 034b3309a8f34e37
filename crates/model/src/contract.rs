//! The contract that every Tier implementation passes, against an oracle that keeps every byte.
//!
//! A suite panics with its seed at the first difference. Data are heap-like: see [`Pages`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, FailKind, Fetched, Inbox, LoadError, Loaded, PageKey, Slot, Stamp,
    Store, StoreError, Tier,
};
pub use undercroft_seeded::{Page, Pages};

/// A page where a device can read and write it.
#[derive(Clone)]
#[repr(align(4096))]
struct Aligned(Page);

/// The way of fetched copies to the thread that waits.
struct Door(Sender<Fetched>);

impl Inbox for Door {
    fn deliver(&self, arrival: Fetched) {
        let _ = self.0.send(arrival); // the thread may have given up
    }
}

/// A tier under test, and facts that the suite needs about it.
pub struct Subject<'a> {
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
pub fn store_all(tier: &dyn Tier, pages: &[(Page, Stamp)]) -> Vec<Result<Slot, StoreError>> {
    let aligned: Vec<_> = pages.iter().map(|(page, _)| Aligned(*page)).collect();
    let are_aligned = pages.len().is_multiple_of(2);
    let mut batch: Vec<_> = pages
        .iter()
        .enumerate()
        .map(|(at, (page, stamp))| Store {
            page: if are_aligned { &aligned[at].0 } else { page },
            stamp: *stamp,
            checksum: PageKey::KNOWN.checksum(page, *stamp),
            result: Err(StoreError::Full),
        })
        .collect();
    tier.store(&mut batch);
    batch.iter().map(|item| item.result).collect()
}

impl Subject<'_> {
    /// Loads one page as the engine does: at once, or by a read and a check of the checksum.
    pub fn load(&self, slot: Slot, stamp: Stamp) -> Result<Box<Page>, LoadError> {
        let page = self.load_whole(slot, stamp)?;
        Ok(page.try_into().expect("a base page"))
    }

    fn load_whole(&self, slot: Slot, stamp: Stamp) -> Result<Box<[u8]>, LoadError> {
        let mut page = vec![0xa5; self.tier.info().page.bytes()].into_boxed_slice();
        match self.tier.load(slot, stamp, &mut page[..])? {
            Loaded::Done => {}
            Loaded::Read { fd, offset } => {
                read_page(fd, offset, &mut page).map_err(|_| LoadError::Failed(FailKind::Io))?;
                if !self.tier.unpack(slot, &mut page) {
                    return Err(LoadError::Corrupt);
                }
                let kept = self.tier.checksum(slot, stamp).ok_or(LoadError::Corrupt)?;
                if PageKey::KNOWN.checksum(&page[..], stamp) != kept {
                    return Err(LoadError::Corrupt);
                }
            }
            Loaded::Fetch => page.copy_from_slice(&self.fetch(slot, stamp)?),
        }
        Ok(page)
    }

    /// Fetches one page, again while it is late.
    fn fetch(&self, slot: Slot, stamp: Stamp) -> Result<Box<[u8]>, LoadError> {
        let (door, arrivals) = channel();
        let inbox: Arc<dyn Inbox> = Arc::new(Door(door));
        for token in 0..1000 {
            self.tier.fetch(slot, stamp, token, &inbox);
            let arrival = arrivals.recv_timeout(Duration::from_secs(5));
            let arrival = arrival.expect("an arrival for each fetch");
            assert_eq!(arrival.token, token);
            assert!(arrivals.try_recv().is_err(), "two arrivals for one fetch");
            if arrival.page != Err(LoadError::Late) {
                return arrival.page;
            }
        }
        Err(LoadError::Late)
    }
}

/// Carries `Loaded::Read` out, without a ring: opens the descriptor's file again and reads one
/// page.
fn read_page(fd: RawFd, offset: u64, page: &mut [u8]) -> std::io::Result<()> {
    File::open(format!("/proc/self/fd/{fd}"))?.read_exact_at(page, offset)
}

/// Stores, loads and frees pages of the tier's size, some tens at once. Every byte and every count
/// is compared after each step. For tiers of large pages: the suite would take gigabytes of them.
pub fn few_pages(subject: &Subject<'_>, seed: u64, steps: u32) {
    let (tier, bytes) = (subject.tier, subject.tier.info().page.bytes());
    let mut random = Pages::new(seed);
    let mut oracle: Vec<(Slot, Box<[u8]>, Stamp)> = Vec::new();
    println!("few pages of {}: seed {seed}", tier.info().name);
    for step in 0..steps {
        let context = format!("seed {seed} step {step}");
        if oracle.len() < 24 && random.below(2) == 0 {
            let stamp = Stamp(random.number() as u16);
            let parts = (0..bytes / BASE_PAGE_BYTES).flat_map(|_| random.mixed());
            let page: Box<[u8]> = parts.collect();
            let mut item = [Store {
                page: &page,
                stamp,
                checksum: PageKey::KNOWN.checksum(&page, stamp),
                result: Err(StoreError::Full),
            }];
            tier.store(&mut item);
            let slot = item[0]
                .result
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(
                oracle.iter().all(|(other, ..)| *other != slot),
                "{context}: given twice"
            );
            oracle.push((slot, page, stamp));
        } else if !oracle.is_empty() {
            let at = random.below(oracle.len() as u64) as usize;
            let (slot, page, stamp) = &oracle[at];
            let loaded = subject.load_whole(*slot, *stamp);
            assert!(loaded.as_ref() == Ok(page), "{context}: {slot:?} differs");
            let checksum = PageKey::KNOWN.checksum(page, *stamp);
            assert_eq!(tier.checksum(*slot, *stamp), Some(checksum), "{context}");
            let other = subject.load_whole(*slot, Stamp(stamp.0 ^ 1));
            assert_eq!(other.err(), Some(LoadError::Corrupt), "{context}");
            if random.below(2) == 0 {
                let (slot, ..) = oracle.swap_remove(at);
                tier.free(&[slot]);
            }
        }
        assert_eq!(
            tier.usage().logical,
            Bytes((oracle.len() * bytes) as u64),
            "{context}"
        );
    }
    for (slot, page, stamp) in oracle {
        let loaded = subject.load_whole(slot, stamp);
        assert!(
            loaded.as_ref() == Ok(&page),
            "seed {seed}: {slot:?} differs at the end"
        );
        tier.free(&[slot]);
    }
    becomes_empty(subject);
}

/// Runs the whole suite. The tier must be empty, and have room for at least 4096 pages.
pub fn check(subject: &Subject<'_>, seed: u64) {
    println!("contract of {}: seed {seed}", subject.tier.info().name);
    random_operations(subject, seed, 2000);
    concurrent_loads(subject, seed);
    concurrent_stores(subject, seed);
    becomes_empty(subject);
}

type Oracle = BTreeMap<Slot, (Box<Page>, Stamp)>;

/// Stores, loads and frees at random; every byte and every count is compared after each step.
pub fn random_operations(subject: &Subject<'_>, seed: u64, steps: u32) {
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
            (oracle.len() * BASE_PAGE_BYTES) as u64,
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
    assert_eq!(
        kept,
        Some(PageKey::KNOWN.checksum(&page[..], *stamp)),
        "{context}"
    );
    let wrong = Stamp(stamp.0 ^ (1 << random.below(16)));
    let other = subject.tier.checksum(slot, wrong);
    assert_ne!(
        other,
        Some(PageKey::KNOWN.checksum(&page[..], wrong)),
        "{context}: the bytes pass for another generation's"
    );
    assert_eq!(
        subject.load(slot, wrong).err(),
        Some(LoadError::Corrupt),
        "{context}"
    );
    true
}

/// State that the threads of [`concurrent_loads`] share.
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
pub fn concurrent_loads(subject: &Subject<'_>, seed: u64) {
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
pub fn concurrent_stores(subject: &Subject<'_>, seed: u64) {
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
pub fn becomes_empty(subject: &Subject<'_>) {
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
pub fn fills_and_recovers(subject: &Subject<'_>, seed: u64, pages_max: usize) {
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
