//! Counters of one client since its start. The caller turns them into reports.

use undercroft_base::{Bytes, PageCount};

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Fault messages.
    pub faults: u64,
    /// Fault messages of pages never touched before.
    pub first_touch: u64,
    /// Fault messages of stored pages.
    pub swap_in: u64,
    /// Fault messages of pages that were loading, evicting or resident.
    pub repeated: u64,
    /// Writes to pages that are protected because fork relatives may share them. Not part of
    /// `faults`.
    pub write_protect: u64,
    /// Faults of either kind that found no room and waited for reclaim.
    pub waited_for_room: u64,
    /// Faults at the page that a prefetch trend expected. The whole window before such a fault
    /// counts as used.
    pub prefetch_hits: u64,
    /// Pages installed from a tier.
    pub pages_swapped_in: u64,
    /// Pages evicted to a tier, clean and same-filled ones included.
    pub pages_swapped_out: u64,
    /// Base pages that these freed.
    pub base_pages_freed: u64,
    /// Pages evicted with a retained copy that was still right: nothing was written.
    pub clean_dropped: u64,
    /// Pages evicted that were one repeated word: they take no slot.
    pub same_filled: u64,
    /// Pages installed besides the faulting one, from a tier.
    pub prefetched: u64,
    /// Zero pages mapped besides the faulting one.
    pub zero_ahead: u64,
    /// Pages moved from one tier to another.
    pub demoted: u64,
    /// Of these, to a faster tier.
    pub lifted: u64,
    /// Victims that could not leave: pinned or shared.
    pub refused_busy: u64,
    /// Victims that no tier took: they stayed.
    pub refused_store: u64,
    /// Victims touched while they were leaving.
    pub recalled: u64,
    /// Victims that a plugin had named.
    pub wished: u64,
    /// Pages that were first offered to the tier that a plugin had wished.
    pub placed: u64,
    /// Pages whose copies failed to verify.
    pub lost: u64,
    /// Pages that the kernel had dropped without an event.
    pub vanished: u64,
    /// Faults served above the limit because no tier had room.
    pub over_limit: u64,
    /// Peak of resident managed pages.
    pub resident_peak: PageCount,
    /// Peak of the pages that the client has, in memory and out of it: what it would take without
    /// tiers. A stored page that fork relatives share counts for each.
    pub pages_peak: PageCount,
    /// Peak of DRAM: resident managed pages plus what tiers hold in memory.
    pub dram_peak: Bytes,
}

impl Stats {
    /// Pages that came into memory at a fault.
    pub fn arrivals(&self) -> u64 {
        self.first_touch + self.zero_ahead + self.pages_swapped_in
    }

    /// The part of all evictions that wrote nothing, because a copy was still right: 0 to 1.
    pub fn clean_part(&self) -> f64 {
        self.clean_dropped as f64 / self.pages_swapped_out.max(1) as f64
    }
}
