//! Prints what a page costs in each tier, beside the bare compressor: time to store, load and free,
//! ratios, fragmentation.
//!
//! `cargo bench -p undercroft-tier --bench tier_cost -- [PAGES_FILE]`
//!
//! PAGES_FILE: 4 KiB pages of a real heap. Without it, synthetic heap-like pages. Times are
//! processor time of one thread (of the file tier: wall time), best of several rounds. Compare
//! lines of one run only: absolute times say little.

use std::hint::black_box;
use std::time::Instant;

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, PageKey, Slot, Stamp, Store, StoreError, Tier, TierUsage,
};
use undercroft_seeded::{Page, Pages};
use undercroft_sys::mapping::SharedMemory;
use undercroft_tier::file::{Backing, FileTier};
use undercroft_tier::ram::{Compressor, RamPool};

const ROUNDS: usize = 15;
const BATCH: usize = 64;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // Cargo adds `--bench`, but not when it tests: then a small size is enough.
    let is_test = words.iter().all(|word| word != "--bench");
    let pages: Vec<Page> = match words.iter().find(|word| *word != "--bench") {
        Some(path) if !is_test => std::fs::read(path)?
            .as_chunks::<BASE_PAGE_BYTES>()
            .0
            .to_vec(),
        _ => {
            let mut random = Pages::new(1);
            let count = if is_test { 100 } else { 5000 };
            (0..count).map(|_| random.heap_like()).collect()
        }
    };
    println!(
        "{} pages; nanoseconds a page, best of {ROUNDS}",
        pages.len()
    );
    bare(&pages)?;
    for compressor in [Compressor::Lz4, Compressor::Zstd] {
        ram(&pages, compressor)?;
    }
    file(&pages)
}

/// Processor time this thread has used.
fn cpu_nanos() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

fn best(pages: usize, mut work: impl FnMut()) -> f64 {
    let times = (0..ROUNDS).map(|_| {
        let start = cpu_nanos();
        work();
        (cpu_nanos() - start) / pages as f64
    });
    times.fold(f64::MAX, f64::min)
}

/// The compressors and the checksum, without a tier.
fn bare(pages: &[Page]) -> Result<(), Failure> {
    let mut table = lz4_flex::block::CompressTable::small();
    let mut out = vec![0; 2 * BASE_PAGE_BYTES];
    let mut kept = Vec::new();
    let compress = best(pages.len(), || {
        kept.clear();
        for page in pages {
            let bytes = lz4_flex::block::compress_into_with_table(page, &mut out, &mut table);
            kept.push(out[..bytes.unwrap_or(0)].to_vec());
        }
    });
    let mut page = [0; BASE_PAGE_BYTES];
    let decompress = best(pages.len(), || {
        for object in &kept {
            let _ = black_box(lz4_flex::block::decompress_into(object, &mut page));
        }
    });
    let checksum = best(pages.len(), || {
        for page in pages {
            black_box(PageKey::KNOWN.checksum(page, Stamp(1)));
        }
    });
    let over = |part: usize| {
        kept.iter()
            .filter(|o| o.len() > BASE_PAGE_BYTES * part / 16)
            .count()
    };
    println!(
        "bare lz4: compress (and copy) {compress:.0}, decompress {decompress:.0}; checksum {checksum:.0}; \
         pages above 3/4: {}, 13/16: {}, 7/8: {}",
        over(12),
        over(13),
        over(14)
    );
    Ok(())
}

fn store(tier: &dyn Tier, pages: &[Page], checksums: &[u64], slots: &mut Vec<Option<Slot>>) {
    slots.clear();
    for (pages, checksums) in pages.chunks(BATCH).zip(checksums.chunks(BATCH)) {
        let mut batch: Vec<_> = pages
            .iter()
            .zip(checksums)
            .map(|(page, &checksum)| Store {
                page,
                stamp: Stamp(1),
                checksum,
                result: Err(StoreError::Full),
            })
            .collect();
        tier.store(&mut batch);
        slots.extend(batch.iter().map(|item| item.result.ok()));
    }
}

fn checksums(pages: &[Page]) -> Vec<u64> {
    let each = pages
        .iter()
        .map(|page| PageKey::KNOWN.checksum(page, Stamp(1)));
    each.collect()
}

/// Stores, loads and frees all pages in a pool of compressed memory, then frees at random.
fn ram(pages: &[Page], compressor: Compressor) -> Result<(), Failure> {
    let capacity = Bytes(pages.len() as u64 * 2 * BASE_PAGE_BYTES as u64 + (16 << 20));
    let reserve = RamPool::reserve_for(capacity).0 as usize;
    let memory = SharedMemory::create("tier-cost", reserve)?;
    let pool = RamPool::new(memory, compressor, capacity, &PageKey::KNOWN)?;
    let checksums = checksums(pages);
    let mut slots = Vec::with_capacity(pages.len());
    let (cold, free_all) = fill_and_empty(&pool, pages, &checksums, &mut slots);
    store(&pool, pages, &checksums, &mut slots);
    let usage = pool.usage();
    let warm = replace(&pool, pages, &checksums, &mut slots);
    let taken: Vec<_> = slots.iter().copied().flatten().collect();
    let load = load_all(&pool, &taken);
    println!(
        "ram {compressor}: store {cold:.0} into new memory, {warm:.0} into reused; load {load:.0}; free {free_all:.0} \
         with giving memory back; incompressible {}",
        slots.len() - taken.len()
    );
    println!(
        "  logical {} stored {} ({:.3}) held {} ({:.3}, {:.3} of stored)",
        usage.logical,
        usage.stored,
        usage.stored.0 as f64 / usage.logical.0 as f64,
        usage.held,
        usage.held.0 as f64 / usage.logical.0 as f64,
        held_of_stored(&usage)
    );
    fragment_and_compact(&pool, taken, pages.len());
    Ok(())
}

/// Nanoseconds a page to store into an empty pool, and to free: the best of several rounds.
fn fill_and_empty(
    pool: &RamPool,
    pages: &[Page],
    checksums: &[u64],
    slots: &mut Vec<Option<Slot>>,
) -> (f64, f64) {
    let (mut cold, mut free_all) = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        let start = cpu_nanos();
        store(pool, pages, checksums, slots);
        cold = cold.min((cpu_nanos() - start) / pages.len() as f64);
        let taken: Vec<_> = slots.iter().copied().flatten().collect();
        let start = cpu_nanos();
        for slots in taken.chunks(BATCH) {
            pool.free(slots);
        }
        free_all = free_all.min((cpu_nanos() - start) / taken.len() as f64);
    }
    (cold, free_all)
}

/// Nanoseconds a page to store in the steady state, in which each batch replaces an older one.
fn replace(pool: &RamPool, pages: &[Page], checksums: &[u64], slots: &mut [Option<Slot>]) -> f64 {
    let mut warm = f64::MAX;
    for _ in 0..ROUNDS {
        let mut nanos = 0.0;
        for at in (0..pages.len()).step_by(BATCH) {
            let end = (at + BATCH).min(pages.len());
            let old: Vec<_> = slots[at..end].iter().copied().flatten().collect();
            pool.free(&old);
            let mut new = Vec::with_capacity(BATCH);
            let start = cpu_nanos();
            store(pool, &pages[at..end], &checksums[at..end], &mut new);
            nanos += cpu_nanos() - start;
            slots[at..end].copy_from_slice(&new);
        }
        warm = warm.min(nanos / pages.len() as f64);
    }
    warm
}

/// Nanoseconds a page to load. Panics: if a load fails.
fn load_all(pool: &RamPool, taken: &[Slot]) -> f64 {
    let mut page = [0; BASE_PAGE_BYTES];
    let mut failures = 0;
    let load = best(taken.len(), || {
        for &slot in taken {
            failures += u64::from(pool.load(slot, Stamp(1), &mut page).is_err());
        }
    });
    assert_eq!(failures, 0, "a load failed");
    load
}

fn held_of_stored(usage: &TierUsage) -> f64 {
    usage.held.0 as f64 / usage.stored.0 as f64
}

/// Frees slots of `left` at random, down to a quarter of `pages`, then compacts. Prints how much
/// memory the pool holds for what it stores.
fn fragment_and_compact(pool: &RamPool, mut left: Vec<Slot>, pages: usize) {
    let mut random = Pages::new(2);
    for percent in [75, 50, 25] {
        while left.len() > pages * percent / 100 {
            let at = random.below(left.len() as u64) as usize;
            pool.free(&[left.swap_remove(at)]);
        }
        let held = held_of_stored(&pool.usage());
        println!("  after random frees to {percent} %: held {held:.2} of stored");
    }
    let start = cpu_nanos();
    let blocks = pool.compact(usize::MAX);
    println!(
        "  compacted: held {:.2} of stored; {blocks} blocks emptied, {:.0} ns each with giving memory back",
        held_of_stored(&pool.usage()),
        (cpu_nanos() - start) / blocks.max(1) as f64
    );
}

fn file(pages: &[Page]) -> Result<(), Failure> {
    let size = Bytes((pages.len() * BASE_PAGE_BYTES).next_multiple_of(1 << 20) as u64);
    let backing = Backing::open("/var/tmp".as_ref(), Some(size))?;
    let direct = backing.is_direct();
    let table = SharedMemory::create("tier-cost", FileTier::table_bytes(&backing))?;
    let tier = FileTier::new(backing, table, &PageKey::KNOWN)?;
    let checksums = checksums(pages);
    let mut slots = Vec::with_capacity(pages.len());
    let mut times = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        store(&tier, pages, &checksums, &mut slots);
        times.push(start.elapsed().as_nanos() as f64 / pages.len() as f64);
        tier.free(&slots.iter().copied().flatten().collect::<Vec<_>>());
    }
    println!(
        "file (O_DIRECT: {direct}): store {:.0} into new space, {:.0} into reused, batches of {BATCH}: {:.0} MiB/s",
        times[0],
        times[1],
        BASE_PAGE_BYTES as f64 * 1e9 / times[1] / f64::from(1 << 20)
    );
    Ok(())
}
