//! Reclaim policies: they order the resident pages, and name the next victims.
//!
//! A new one is a file that implements [`Reclaim`], and a row of the list in `policy/src/lib.rs`.
//! The suite `contract.rs` there runs over every name. Prefetch and place work alike.

pub mod active_inactive;
pub mod auto;
mod duel;
pub mod lists;
pub mod lru;
mod two_lists;

use undercroft_base::{Bytes, PageCount, PageNo};

/// Why a page became resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// First touch, or found resident when its region was attached.
    FirstTouch,
    /// Faulted back in. `distance`: evictions since it left, if known. A small one means that it
    /// left too early.
    SwapIn {
        /// Refault distance in pages.
        distance: PageCount,
    },
    /// Prefetched; not yet known to be used.
    Prefetch,
    /// Selected, but could not leave (touched, pinned, no room in a tier), so it is not cold.
    Returned,
}

/// Choice of a policy between two rules, and by which figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The policy whose rule is in force.
    pub name: &'static str,
    /// Times that the rule has changed.
    pub changes: u64,
    /// Pages loaded since the last change, or since the start.
    pub pages_since_change: u64,
    /// Page faults so far in the two samples that are always kept by the rule of `lru` and by that
    /// of `active_inactive`.
    pub sample_faults: [u64; 2],
}

/// State of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Pages inserted and neither removed nor taken out.
    pub len: PageCount,
    /// Most bytes of metadata held so far.
    pub metadata: Bytes,
    /// The rule in force of a policy that chooses between rules.
    pub choice: Option<Choice>,
}

/// The engine's verdict on a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The page may leave now.
    Take,
    /// Not now (locked, in flight, inside its minimum residency): keep it, and go on to the next.
    Skip,
}

/// An order over the resident pages of one client.
///
/// The engine calls `insert` once when a page becomes resident. It calls `remove` once when the
/// page stops being resident, unless `select` took it out. A page is never inserted twice without
/// one of these between.
pub trait Reclaim: Send {
    /// The page is resident now. O(1).
    fn insert(&mut self, page: PageNo, arrival: Arrival);

    /// The page is no longer resident, or is leaving. O(1). Panics if it is not inserted.
    fn remove(&mut self, page: PageNo);

    /// The page was used (`write`: written) since the last scan of its Accessed bit. O(1).
    fn touch(&mut self, page: PageNo, write: bool);

    /// Takes up to `want` victims out and appends them to `out`, coldest first; fewer is not an
    /// error. Scans at most `scan_max` pages. In one call, it does not return to a page that was
    /// skipped.
    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    );

    /// The state now. O(1).
    fn shown(&self) -> Shown;
}
