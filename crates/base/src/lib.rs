//! The types that all other crates use: units, prices, CPUs, page identities, the page entry, the
//! Tier port.
//!
//! Level 0: depends on no other crate of the workspace, does no I/O, reads no clock, has no
//! `unsafe`.

mod cpus;
mod entry;
mod ids;
mod key;
mod price;
mod slot_set;
mod tier;
mod units;

pub use cpus::{Cpus, CpusError};
pub use entry::{Entry, Flags, PageState};
pub use ids::{
    CHUNK_PAGES, ChunkNo, PageNo, Slot, SpaceId, Stamp, ThreadId, TierId, VirtPage, VirtRange,
};
pub use key::PageKey;
pub use price::{Price, PriceError, WriteBudget};
pub use slot_set::SlotSet;
pub use tier::{
    FailKind, Fetched, Inbox, LatencyClass, LoadError, Loaded, RemoteCounts, Store, StoreError,
    Tier, TierFacts, TierInfo, TierUsage,
};
pub use units::{BASE_PAGE_BYTES, Bytes, Exact, Nanos, PageCount, PageSize, ParseUnitError};

const _: () = assert!(usize::BITS == 64, "sizes and addresses are 64 bits");

/// `Some(word)` if the page is one repeated 32-bit word, as a zero page is. Cost: one pass, which
/// ends at the first difference.
pub fn fill_word(page: &[u8]) -> Option<u32> {
    let (words, rest) = page.as_chunks::<4>();
    let first = words.first()?;
    (rest.is_empty() && words.iter().all(|word| word == first)).then(|| u32::from_ne_bytes(*first))
}
