//! Every bound of the engine in one place: queues, batches, windows, reserves.

use undercroft_base::PageCount;
use undercroft_policy::{place, prefetch};

/// Most base pages one fault brings in, the faulting one included. A larger page comes alone.
pub const LOAD_PAGES_MAX: usize = 64;

/// Most pages in one eviction batch: the agent's staging area holds this many. A large page ends a
/// batch.
pub const EVICT_PAGES_MAX: usize = 64;

/// Most base pages in one demotion batch: 1 MiB, one slab of a block tier. A larger page moves
/// alone.
pub const DEMOTE_PAGES_MAX: usize = 256;

/// Entries scanned for one demotion batch: most may be stale, or shared after a fork.
pub const DEMOTE_SCAN_MAX: usize = 16 * DEMOTE_PAGES_MAX;

/// Entries looked at in one part of the drain of a tier: some 100 us.
pub const DRAIN_SCAN_MAX: u32 = 16_384;

/// Pages that the policy may scan for one batch of victims.
pub const SELECT_SCAN_MAX: usize = 8 * EVICT_PAGES_MAX;

/// Pages whose place a plugin may wish at a time. 512 KiB, taken with the first wish.
pub const PLACES_MAX: usize = 1 << 16;

/// Pages that a plugin may link at a time. 2 MiB, taken with the first wish.
pub const LINKS_MAX: usize = 1 << 18;

/// Pages of the limit for each one that is kept free while a plugin links pages: those that come
/// together need room (docs/design/0040).
pub const LINKED_PART: u64 = 64;

/// Minimum residency: the newest pages, which may not leave yet. Without it, a thread that needs a
/// few pages at once makes no progress. Never more than half of the resident pages.
pub const RECENT_PAGES: usize = 32;

/// Pages that can move have this much memory at least, if others cannot: 8 MiB.
pub const FLOOR_MIN: PageCount = PageCount(2048);

/// Pages of a snapshot's file that are known to be needed: those of 4 GiB. 4 MiB of memory.
pub const KNOWN_MAX: u64 = 1 << 20;

/// Regions of a space to which known pages are brought. One that is cut into more gets none in the
/// rest.
pub const KNOWN_REGIONS: usize = 16;

/// Known pages that are looked at for one fault: some are in memory.
pub const KNOWN_LOOKS: usize = 4 * LOAD_PAGES_MAX;

/// Faults that may wait for room at once, before the oldest is woken to fault again.
pub const WAITERS_MAX: usize = 1024;

/// Evictions that one step of the stamp counts: its 16 bits cover 2^20 evictions.
pub const STAMP_EVICTIONS: u64 = 16;

/// Events of followed pages that are kept until the caller takes them: half a MiB.
pub const SEEN_MAX: usize = 1 << 16;

/// Part of the limit, in percent, up to which RAM tiers keep the copies of prefetched pages.
pub const RETAIN_AHEAD_PERCENT: u128 = 65;

/// Pages of room kept below the limit, so that the fault path finds room without waiting for
/// reclaim. docs/design/0040 has what it costs a program that just fits.
///
/// * `part`: one in this many pages ([`place::Shown::reserve_part`]).
pub fn reserve(limit: PageCount, part: u64) -> PageCount {
    PageCount((limit.0 / part).clamp(32, 2048).min(limit.0 / 4))
}

/// Most pages that lose their write protection at once.
pub const COPY_PAGES_MAX: u64 = 64;

// Other crates have names of their own for these.
const _: () = assert!(EVICT_PAGES_MAX as u64 == place::BATCH_PAGES);
const _: () = assert!(DEMOTE_PAGES_MAX as u64 == place::MIGRATE_PAGES_MAX);
const _: () = assert!(prefetch::WINDOW_MAX as usize == LOAD_PAGES_MAX - 1);
// A set of pages of a plan or a batch is one word.
const _: () = assert!(LOAD_PAGES_MAX <= u64::BITS as usize);
const _: () = assert!(EVICT_PAGES_MAX <= u64::BITS as usize);
