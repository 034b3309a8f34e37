//! The types that all other crates use: units, prices, CPUs, page identities, the page entry, the
//! Tier port.
//!
//! Level 0: depends on no other crate of the workspace, does no I/O, reads no clock, has no
//! `unsafe`.

mod cpus;
mod entry;
mod ids;
mod price;
mod tier;
mod units;

pub use cpus::{Cpus, CpusError};
pub use entry::{Entry, Flags, PageState};
pub use ids::{
    CHUNK_PAGES, ChunkNo, PageNo, Slot, SpaceId, Stamp, ThreadId, TierId, VirtPage, VirtRange,
};
pub use price::{Price, PriceError, WriteBudget};
pub use tier::{
    FailKind, Fetched, Inbox, LoadError, Loaded, Store, StoreError, Tier, TierInfo, TierKind,
    TierUsage,
};
pub use units::{Bytes, Nanos, PAGE_BYTES, PageCount, ParseUnitError};

const _: () = assert!(usize::BITS == 64, "sizes and addresses are 64 bits");

/// The checksum of a page copy of generation `stamp`: XXH3-64, seeded with the stamp. It decides
/// whether a page is unchanged since it was loaded, so it has 64 bits. Cost: about 0.15 us a page
/// in cache.
pub fn page_checksum(page: &[u8], stamp: Stamp) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(page, u64::from(stamp.0))
}

/// `Some(word)` if the page is one repeated 32-bit word, as a zero page is. Cost: one pass, which
/// ends at the first difference.
pub fn fill_word(page: &[u8]) -> Option<u32> {
    let (words, rest) = page.as_chunks::<4>();
    let first = words.first()?;
    (rest.is_empty() && words.iter().all(|word| word == first)).then(|| u32::from_ne_bytes(*first))
}
