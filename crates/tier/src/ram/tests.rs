//! Tests of the RAM pool beyond the shared contract.

use std::os::fd::AsFd;

use super::*;
use undercroft_model::contract::{self, Page, Pages, Subject, store_all};

fn again(memory: &SharedMemory) -> SharedMemory {
    SharedMemory::from_fd(memory.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

fn pool(compressor: Compressor, capacity: u64) -> RamPool {
    let reserve = RamPool::reserve_for(Bytes(capacity)).0 as usize;
    let memory = SharedMemory::create("test-pool", reserve).unwrap();
    RamPool::new(memory, compressor, Bytes(capacity), &PageKey::KNOWN).unwrap()
}

fn subject<'a>(pool: &'a RamPool, idle_work: &'a (dyn Fn() + Sync)) -> Subject<'a> {
    Subject {
        tier: pool,
        idle_work,
        held_empty: Bytes(pool.info().capacity.0 / 32), // superblock and used directory entries
    }
}

fn store_one(pool: &RamPool, page: &Page, stamp: Stamp) -> Slot {
    store_all(pool, &[(*page, stamp)])[0].unwrap()
}

#[test]
fn pool_passes_the_tier_contract() {
    for (seed, compressor) in [(1, Compressor::Lz4), (2, Compressor::Zstd)] {
        let pool = pool(compressor, 32 << 20);
        contract::check(&subject(&pool, &|| ()), seed);
    }
}

#[test]
fn pool_at_capacity_is_full_and_recovers() {
    let pool = pool(Compressor::Lz4, 4 << 20);
    contract::fills_and_recovers(&subject(&pool, &|| ()), 3, 20_000);
}

#[test]
fn pool_any_flipped_bit_is_noticed() {
    let mut random = Pages::new(4);
    for compressor in [Compressor::Lz4, Compressor::Zstd] {
        let pool = pool(compressor, 4 << 20);
        let page = random.heap_like();
        let slot = store_one(&pool, &page, Stamp(9));
        let offset = offset_of(pool.table().location(slot.0).unwrap());
        let bytes = HEADER_BYTES + pool.object_bytes(slot) as usize;
        let (mut noticed, mut harmless) = (0, 0);
        let mut dst = [0; BASE_PAGE_BYTES];
        for bit in 0..bytes * 8 {
            let flip = || {
                let mut byte = [0];
                pool.memory.bytes_out(offset + bit / 8, &mut byte);
                pool.memory
                    .bytes_in(offset + bit / 8, &[byte[0] ^ 1 << (bit % 8)]);
            };
            flip();
            match pool.load(slot, Stamp(9), &mut dst) {
                Ok(_) => {
                    assert!(dst == page, "bit {bit}: wrong bytes unnoticed");
                    harmless += 1; // an unused bit of the compressed format
                }
                Err(error) => {
                    assert_eq!(error, LoadError::Corrupt);
                    noticed += 1;
                }
            }
            flip();
        }
        println!("{compressor}: {noticed} flips noticed, {harmless} harmless");
        assert!(noticed > harmless * 20);
        assert_eq!(pool.load(slot, Stamp(9), &mut dst), Ok(Loaded::Done));
    }
}

#[test]
fn pool_random_bytes_in_memory_never_panic_a_load() {
    let mut random = Pages::new(5);
    let pool = pool(Compressor::Lz4, 1 << 20);
    let slot = store_one(&pool, &random.heap_like(), Stamp(1));
    let offset = offset_of(pool.table().location(slot.0).unwrap());
    let mut dst = [0; BASE_PAGE_BYTES];
    for round in 0..20_000u32 {
        let noise = random.noise();
        let length = 1 + random.below(3000) as usize;
        let header = Header {
            checksum: random.number(),
            stamp: Stamp(1),
            length: length as u16,
            code: 1 + (round % 2) as u8,
            handle: slot.0 as u32,
        };
        pool.memory.bytes_in(offset, &header.to_bytes());
        pool.memory
            .bytes_in(offset + HEADER_BYTES, &noise[..length]);
        assert_eq!(pool.load(slot, Stamp(1), &mut dst), Err(LoadError::Corrupt));
    }
    for slot in [1, 2, 1 << 20, Slot::LIMIT - 1, Slot::LIMIT, u64::MAX] {
        assert_eq!(
            pool.load(Slot(slot), Stamp(1), &mut dst),
            Err(LoadError::Corrupt)
        );
        assert_eq!(pool.checksum(Slot(slot), Stamp(1)), None);
    }
}

#[test]
fn pool_noise_is_incompressible_and_takes_nothing() {
    let pool = pool(Compressor::Lz4, 1 << 20);
    let before = pool.usage();
    let noise = Pages::new(6).noise();
    let results = store_all(&pool, &[(noise, Stamp(1)), (noise, Stamp(2))]);
    assert_eq!(results, [Err(StoreError::Incompressible); 2]);
    assert_eq!(pool.usage(), before);
}

#[test]
#[should_panic(expected = "free already")]
fn pool_double_free_panics() {
    let pool = pool(Compressor::Lz4, 4 << 20);
    let page = Pages::new(8).heap_like();
    let slot = store_one(&pool, &page, Stamp(1));
    let _neighbour = store_one(&pool, &page, Stamp(1));
    pool.free(&[slot]);
    pool.free(&[slot]);
}

#[test]
fn pool_is_recovered_from_its_memory_alone() {
    let mut random = Pages::new(9);
    let old = pool(Compressor::Lz4, 16 << 20);
    let pages: Vec<_> = (0..3000).map(|n| (random.heap_like(), Stamp(n))).collect();
    let slots: Vec<_> = store_all(&old, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let (freed, kept): (Vec<_>, Vec<_>) = (0..slots.len()).partition(|n| n % 3 == 0 || *n > 2000);
    old.free(&freed.iter().map(|&n| slots[n]).collect::<Vec<_>>());
    old.trim();
    let usage = old.usage();

    let new = RamPool::recover(
        again(&old.memory),
        Compressor::Zstd,
        Bytes(16 << 20),
        &PageKey::KNOWN,
    )
    .unwrap();
    assert_eq!(new.usage(), usage);
    let mut found = Vec::new();
    new.for_each_slot(|slot| found.push(slot));
    found.sort_unstable();
    let mut expected: Vec<_> = kept.iter().map(|&n| slots[n]).collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
    let mut dst = [0; BASE_PAGE_BYTES];
    for &n in &kept {
        let (page, stamp) = &pages[n];
        assert_eq!(new.load(slots[n], *stamp, &mut dst), Ok(Loaded::Done));
        assert!(dst == *page);
    }
    // The heap still works: new objects never land on old ones.
    let more: Vec<_> = (0..1000).map(|n| (random.heap_like(), Stamp(n))).collect();
    for slot in store_all(&new, &more) {
        assert!(!expected.contains(&slot.unwrap()));
        found.push(slot.unwrap());
    }
    let allocated = new.memory.allocated().unwrap();
    assert!(
        allocated <= new.usage().held.0 + BASE_PAGE_BYTES as u64,
        "{allocated} {:?}",
        new.usage()
    );
    new.free(&found);
    new.trim();
    assert!(new.memory.allocated().unwrap() < 128 << 10);
    assert_eq!(new.usage().logical, Bytes(0));
    assert!(new.usage().held < Bytes(128 << 10), "{:?}", new.usage());
}

/// Stores a large page of heap-like and other parts.
fn store_large(
    pool: &RamPool,
    random: &mut Pages,
    stamp: Stamp,
) -> (Result<Slot, StoreError>, Vec<u8>) {
    let page: Vec<u8> = (0..512).flat_map(|_| random.mixed()).collect();
    let mut item = [Store {
        page: &page,
        stamp,
        checksum: PageKey::KNOWN.checksum(&page, stamp),
        result: Err(StoreError::Full),
    }];
    pool.store(&mut item);
    (item[0].result, page)
}

#[test]
fn large_pages_are_compressed_whole_and_keep_every_byte() {
    for (seed, compressor) in [(51, Compressor::Lz4), (52, Compressor::Zstd)] {
        let pool = pool(compressor, 96 << 20).of_pages(PageSize::Large);
        contract::few_pages(&subject(&pool, &|| pool.trim()), seed, 250);
        let mut noise = Pages::new(seed);
        let page: Vec<u8> = (0..512).flat_map(|_| noise.noise()).collect();
        let mut item = [Store {
            page: &page,
            stamp: Stamp(0),
            checksum: PageKey::KNOWN.checksum(&page, Stamp(0)),
            result: Err(StoreError::Full),
        }];
        pool.store(&mut item);
        assert_eq!(item[0].result, Err(StoreError::Incompressible));
        assert_eq!(pool.usage().stored, Bytes(0));
    }
}

#[test]
fn a_full_pool_of_large_pages_refuses_them_whole_and_takes_others_when_one_left() {
    let pool = pool(Compressor::Lz4, 8 << 20).of_pages(PageSize::Large);
    let mut random = Pages::new(53);
    let mut slots = Vec::new();
    let refused = loop {
        match store_large(&pool, &mut random, Stamp(1)).0 {
            Ok(slot) => slots.push(slot),
            Err(error) => break error,
        }
    };
    assert_eq!(refused, StoreError::Full);
    assert_eq!(pool.usage().logical, Bytes((slots.len() as u64) << 21));
    let mut found = Vec::new();
    pool.for_each_slot(|slot| found.push(slot));
    found.sort_unstable();
    slots.sort_unstable();
    assert_eq!(found, slots, "no part of the refused one is left");
    pool.free(&[slots[0]]);
    assert!(store_large(&pool, &mut random, Stamp(2)).0.is_ok());
}

/// A manager dies in the middle of a store or a free: parts are left that no root has.
#[test]
fn a_pool_of_large_pages_is_recovered_without_the_parts_that_no_copy_has() {
    let mut random = Pages::new(54);
    let old = pool(Compressor::Zstd, 32 << 20).of_pages(PageSize::Large);
    let stored = |at| store_large(&old, &mut random, Stamp(at));
    let kept: Vec<_> = (0..6)
        .map(stored)
        .map(|(slot, page)| (slot.unwrap(), page))
        .collect();
    let usage = old.usage();
    let (half, _) = store_large(&old, &mut random, Stamp(9));
    old.free_objects(&[half.unwrap()]);
    assert!(old.usage().stored > usage.stored, "its parts are there");
    let key = PageKey::KNOWN;
    let new = RamPool::recover(again(&old.memory), Compressor::Lz4, Bytes(32 << 20), &key).unwrap();
    assert_eq!(
        (new.usage().logical, new.usage().stored),
        (usage.logical, usage.stored)
    );
    assert_eq!(new.info().page, PageSize::Large);
    let mut page = vec![0; 2 << 20];
    for (at, (slot, bytes)) in (0..).zip(&kept) {
        assert_eq!(new.load(*slot, Stamp(at), &mut page), Ok(Loaded::Done));
        assert!(page == *bytes);
    }
    new.free(&kept.iter().map(|(slot, _)| *slot).collect::<Vec<_>>());
    new.trim();
    assert_eq!(
        (new.usage().logical, new.usage().stored),
        (Bytes(0), Bytes(0))
    );
}

#[test]
fn a_flipped_bit_of_a_large_page_is_noticed_wherever_it_is() {
    let pool = pool(Compressor::Lz4, 8 << 20).of_pages(PageSize::Large);
    let (slot, bytes) = store_large(&pool, &mut Pages::new(55), Stamp(3));
    let slot = slot.unwrap();
    let mut page = vec![0; 2 << 20];
    let used = pool.lock().handles.used();
    for handle in (0..used).step_by(17) {
        let at = offset_of(pool.table().location(handle.into()).unwrap());
        for at in [at, at + 9, at + 11, at + 13, at + HEADER_BYTES + 5] {
            let mut byte = [0];
            pool.memory.bytes_out(at, &mut byte);
            pool.memory.bytes_in(at, &[byte[0] ^ 4]);
            let loaded = pool.load(slot, Stamp(3), &mut page);
            assert!(
                loaded.is_err() || page == bytes,
                "handle {handle}, byte {at}"
            );
            pool.memory.bytes_in(at, &byte);
        }
    }
    assert_eq!(pool.load(slot, Stamp(3), &mut page), Ok(Loaded::Done));
}

#[test]
fn pool_recover_refuses_other_memory() {
    let memory = SharedMemory::create("test-empty", 1 << 20).unwrap();
    assert!(matches!(
        RamPool::recover(memory, Compressor::Lz4, Bytes(1 << 20), &PageKey::KNOWN),
        Err(RamPoolError::NotAPool)
    ));
    let memory = SharedMemory::create("test-small", 4096).unwrap();
    let error = RamPool::new(memory, Compressor::Lz4, Bytes(1 << 20), &PageKey::KNOWN)
        .err()
        .unwrap();
    assert!(error.to_string().contains("address space"), "{error}");
}

#[test]
fn pool_compacts_while_it_is_read_and_gives_memory_back() {
    let seed = 10;
    println!("seed {seed}");
    let mut random = Pages::new(seed);
    let pool = pool(Compressor::Lz4, 64 << 20);
    let pages: Vec<_> = (0..6000).map(|_| (random.heap_like(), Stamp(3))).collect();
    let slots: Vec<_> = store_all(&pool, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let (kept, freed): (Vec<_>, Vec<_>) = (0..slots.len()).partition(|_| random.below(5) == 0);
    pool.free(&freed.iter().map(|&n| slots[n]).collect::<Vec<_>>());
    let sparse = pool.usage();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut dst = [0; BASE_PAGE_BYTES];
            let mut rounds = 0;
            while !done.load(Relaxed) || rounds == 0 {
                for &n in &kept {
                    assert_eq!(pool.load(slots[n], Stamp(3), &mut dst), Ok(Loaded::Done));
                    assert!(dst == pages[n].0, "slot {n} differs while objects move");
                    let kept = pool.checksum(slots[n], Stamp(3));
                    assert_eq!(kept, Some(PageKey::KNOWN.checksum(&dst, Stamp(3))));
                }
                rounds += 1;
            }
            println!("{rounds} rounds of loads");
        });
        let mut moved = 0;
        while pool.compact(1) == 1 {
            moved += 1;
            std::thread::yield_now();
        }
        println!("{moved} blocks emptied");
        done.store(true, Relaxed);
    });
    let dense = pool.usage();
    let overhead = |usage: TierUsage| usage.held.0 as f64 / usage.stored.0 as f64;
    println!(
        "held / stored: {:.2}, then {:.2}",
        overhead(sparse),
        overhead(dense)
    );
    assert_eq!(
        (dense.logical, dense.stored),
        (sparse.logical, sparse.stored)
    );
    assert!(overhead(sparse) > 2.0 && overhead(dense) < 1.5);
    assert!(pool.memory.allocated().unwrap() <= dense.held.0 + BASE_PAGE_BYTES as u64);
    pool.free(&kept.iter().map(|&n| slots[n]).collect::<Vec<_>>());
    assert_eq!(pool.usage().logical, Bytes(0));
}

#[test]
fn pool_object_that_does_not_know_its_slot_stays() {
    let mut random = Pages::new(13);
    let pool = pool(Compressor::Lz4, 64 << 20);
    let pages: Vec<_> = (0..2000).map(|_| (random.heap_like(), Stamp(3))).collect();
    let slots: Vec<_> = store_all(&pool, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let (kept, freed): (Vec<Slot>, Vec<Slot>) = slots.iter().partition(|_| random.below(5) == 0);
    for slot in &kept {
        let location = pool.table().location(slot.0).unwrap();
        pool.memory.bytes_in(offset_of(location) + 12, &[0xff; 4]);
    }
    pool.free(&freed);
    while pool.compact(1) == 1 {}
    let mut dst = [0; BASE_PAGE_BYTES];
    for &slot in &kept {
        assert_eq!(pool.load(slot, Stamp(3), &mut dst), Err(LoadError::Corrupt));
    }
    pool.free(&kept);
    pool.trim();
    assert_eq!(pool.usage().logical, Bytes(0));
}

/// The writer dies before and after it points a slot at a copied object, and after it takes places.
#[test]
fn pool_is_recovered_from_the_middle_of_a_move_and_of_a_store() {
    let mut random = Pages::new(14);
    let old = pool(Compressor::Lz4, 16 << 20);
    let pages: Vec<_> = (0..200).map(|_| (random.heap_like(), Stamp(3))).collect();
    let slots: Vec<_> = store_all(&old, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let directory = old.directory();
    let mut taken = Vec::new();
    for (n, &slot) in slots.iter().enumerate().take(20) {
        let from = old.table().location(slot.0).unwrap();
        let (block, _) = old.layout.place(directory, from);
        let (class, _) = directory.state(block).unwrap();
        let place = old.lock().heap.alloc(directory, class).unwrap();
        let to = old
            .layout
            .location(place.block, place.class.into(), place.index);
        taken.push(to);
        if n < 10 {
            let mut object = vec![0; CLASSES[class].object_bytes as usize];
            old.memory.bytes_out(offset_of(from), &mut object);
            old.memory.bytes_in(offset_of(to), &object);
            if n < 5 {
                old.table().moved(slot.0 as u32, to);
            }
        }
    }
    old.publish(&old.lock());
    let new = RamPool::recover(
        again(&old.memory),
        Compressor::Lz4,
        Bytes(16 << 20),
        &PageKey::KNOWN,
    )
    .unwrap();
    assert_eq!(new.usage().logical, Bytes(200 * BASE_PAGE_BYTES as u64));
    let mut dst = [0; BASE_PAGE_BYTES];
    for (slot, (page, stamp)) in slots.iter().zip(&pages) {
        assert_eq!(new.load(*slot, *stamp, &mut dst), Ok(Loaded::Done));
        assert!(dst == *page);
    }
    new.free(&slots);
    new.trim();
    assert_eq!(new.usage().logical, Bytes(0));
    assert!(new.usage().held < Bytes(64 << 10), "{:?}", new.usage());
}

#[test]
fn pool_stores_compact_what_random_frees_left() {
    let mut random = Pages::new(15);
    let pool = pool(Compressor::Lz4, 64 << 20);
    let pages: Vec<_> = (0..6000).map(|_| (random.heap_like(), Stamp(3))).collect();
    let mut slots: Vec<_> = store_all(&pool, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    while slots.len() > 1500 {
        let at = random.below(slots.len() as u64) as usize;
        pool.free(&[slots.swap_remove(at)]);
    }
    let overhead = || pool.usage().held.0 as f64 / pool.usage().stored.0 as f64;
    let sparse = overhead();
    for pages in pages.chunks(8).take(150) {
        let stored = store_all(&pool, pages);
        slots.extend(stored.into_iter().map(Result::unwrap));
        for _ in 0..8 {
            let at = random.below(slots.len() as u64) as usize;
            pool.free(&[slots.swap_remove(at)]);
        }
    }
    println!("held / stored: {sparse:.2}, then {:.2}", overhead());
    assert!(sparse > 2.0 && overhead() < 1.5);
}
