//! A successor recovers a large ledger in little time and memory: nothing is kept of each page.
//! In a binary of its own, because the memory of the process is measured.
//!
//! `UNDERCROFT_TEST_LEDGER_PAGES`: pages of the ledger, 2^24 by default (64 GiB); 2^26 for figures.

#![allow(clippy::unwrap_used, reason = "everything here is a test")]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, CHUNK_PAGES, Entry, Flags, PageSize, PageState, Slot, SpaceId, Stamp,
    TierId, VirtPage,
};
use undercroft_engine::{
    Config, Engine, Found, HeldPage, Here, Ledger, Recovered, Room, VecLedger,
};
use undercroft_policy::{prefetch, reclaim};

const PAGES: u64 = 1 << 24;

/// Of 64 pages, one is resident, and one in 16 is in the first tier. One in each chunk has the slot
/// of another.
const RESIDENT_EVERY: u64 = 64;
const FIRST_TIER_EVERY: u64 = 16;

const SPACES: [SpaceId; 3] = [SpaceId(1), SpaceId(2), SpaceId(3)];

/// A ledger that counts how often words of pages were asked for, one or many at once.
struct Counting {
    ledger: VecLedger,
    asked: Arc<AtomicU64>,
}

impl Ledger for Counting {
    fn entries(&self) -> &[AtomicU64] {
        // One thread counts, and an atomic addition would cost more than all else.
        let asked = self.asked.load(Ordering::Relaxed) + 1;
        self.asked.store(asked, Ordering::Relaxed);
        self.ledger.entries()
    }

    fn chunks(&self) -> &[AtomicU64] {
        self.ledger.chunks()
    }

    fn notes(&self) -> &[AtomicU64] {
        self.ledger.notes()
    }
}

fn stored(tier: u8, slot: u64, stamp: u64) -> Entry {
    Entry {
        state: PageState::Stored,
        tier: TierId(tier),
        slot: Slot(slot),
        stamp: Stamp(stamp as u16),
        ..Entry::UNTOUCHED
    }
}

/// State of page `at` of the ledger. Slots go to and fro, stamps wrap.
fn entry(at: u64, pages: u64) -> Entry {
    let stamp = at * 48_271 % 60_000 + 20_000;
    match at {
        _ if at.is_multiple_of(RESIDENT_EVERY) => Entry {
            state: PageState::Resident,
            ..Entry::UNTOUCHED
        },
        _ if at % FIRST_TIER_EVERY == 1 => stored(0, at / FIRST_TIER_EVERY, stamp),
        // A child of a fork has the slot of the page before, too.
        _ if at % u64::from(CHUNK_PAGES) == 511 => Entry {
            flags: Flags::SHARED,
            ..entry(at - 1, pages)
        },
        _ => stored(1, (at * 4097) % pages.next_power_of_two(), stamp),
    }
}

fn ledger(pages: u64) -> Counting {
    let chunks = pages / u64::from(CHUNK_PAGES);
    let ledger = VecLedger::new(chunks as usize);
    for chunk in 0..chunks {
        let space = 1 + chunk % SPACES.len() as u64;
        let head = 1 << 63 | space << 36 | (1 << 20 | chunk);
        ledger.chunks()[chunk as usize].store(head, Ordering::Relaxed);
    }
    for (at, word) in (0..).zip(ledger.entries()) {
        word.store(entry(at, pages).pack(), Ordering::Relaxed);
    }
    Counting {
        ledger,
        asked: Arc::default(),
    }
}

/// Nothing is in flight, so nothing is asked.
struct Nothing;

impl Found for Nothing {
    fn page(&mut self, space: SpaceId, page: VirtPage) -> Here {
        panic!("asked for {space:?} {page:?}")
    }

    fn held(&mut self, owner: SpaceId, place: usize) -> HeldPage {
        panic!("asked for {owner:?} {place}")
    }
}

/// A figure of this process's memory, in bytes.
fn memory(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    let kib = line.split_ascii_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

/// CPU time that this thread has used.
fn cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = stat.split_ascii_whitespace().next().unwrap();
    Duration::from_nanos(nanos.parse().unwrap())
}

#[test]
fn a_large_ledger_is_recovered_with_little_memory_and_few_passes() {
    let pages = std::env::var("UNDERCROFT_TEST_LEDGER_PAGES").ok();
    let pages: u64 = pages.map_or(PAGES, |pages| pages.parse().unwrap());
    let ledger = ledger(pages);
    let asked = ledger.asked.clone();
    let config = Config {
        limit: Bytes(pages * BASE_PAGE_BYTES as u64),
        retain: vec![false, true],
        demotes: vec![true, false],
        room: Room::Ahead,
    };
    let (reclaim, prefetch) = (reclaim::by_name("lru"), prefetch::by_name("none"));
    let before = memory("VmRSS");
    fs::write("/proc/self/clear_refs", "5").unwrap(); // the peak begins anew
    let (began, ran) = (Instant::now(), cpu_time());
    let spaces = SPACES.map(|space| (space, PageSize::Base));
    let engine = Engine::recover(ledger, reclaim.unwrap(), prefetch.unwrap(), config, &spaces);
    let (mut engine, claims) = engine.unwrap();
    assert_eq!(engine.in_flight(), []);
    let mut recovered = Recovered::default();
    engine.reconcile_flight(&mut Nothing, &mut recovered);
    let (took, ran) = (began.elapsed(), cpu_time() - ran);
    let (peak, after) = (memory("VmHWM"), memory("VmRSS"));
    let reads = asked.load(Ordering::Relaxed);
    // Any engine with these pages has ages of a tier that demotes (8 bytes a page, 2 KiB a chunk),
    // a list of resident pages (368 bytes a chunk), and trees of chunks and shared slots.
    let chunks = pages / u64::from(CHUNK_PAGES);
    let kept = pages / FIRST_TIER_EVERY * 8 + chunks * (2048 + 368 + 128);
    println!(
        "{pages} pages: {took:.2?} ({ran:.2?} of CPU time), {} MiB at the peak, {} MiB in the end \
         (any engine with these pages has some {} MiB), {:.2} reads a page",
        (peak - before) >> 20,
        after.saturating_sub(before) >> 20,
        kept >> 20,
        reads as f64 / pages as f64
    );
    let of = |tier| claims.of(TierId(tier)).iter().count() as u64;
    assert_eq!(of(0), pages / FIRST_TIER_EVERY);
    let resident = pages / RESIDENT_EVERY;
    assert_eq!(engine.books().resident().0, resident);
    assert_eq!(of(1), pages - resident - of(0) - chunks);
    assert_eq!(recovered, Recovered::default());
    assert!(reads <= 2 * pages, "{reads} reads of {pages} pages");
    // 5 s for 2^26 pages. One thread does all, so a CPU of its own takes as long.
    let most = Duration::from_secs(5) * (pages >> 20) as u32 / 64;
    assert!(ran <= most, "{ran:.2?} of CPU time, of {most:.2?}");
    let extra = (peak - before).saturating_sub(kept);
    // 100 MB for 2^26 pages.
    let most = (4 << 20) + pages * 11 / 8;
    assert!(extra <= most, "{extra} bytes beside {kept}, of {most}");
}
