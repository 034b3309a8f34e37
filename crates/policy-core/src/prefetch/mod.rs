//! Prefetch policies: which neighbours of a faulting page are loaded with it.

pub mod majority;
pub mod neighbours;
pub mod readahead;

use neighbours::{Along, Around, Now};
use undercroft_base::{SpaceId, ThreadId, VirtPage};

/// A fault, as a prefetcher sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultSeen {
    /// The address space.
    pub space: SpaceId,
    /// The page.
    pub page: VirtPage,
    /// The faulting thread; 0 when unknown.
    pub thread: ThreadId,
    /// True when the page was never touched before (its neighbours would be fresh pages, not
    /// loads).
    pub first_touch: bool,
}

/// Pages to load along: `fault + stride`, `fault + 2*stride`, ... `count` of them. The engine takes
/// those in the wanted state: stored, or untouched on a first touch. It stops at the end of the
/// mapping, and never exceeds its own bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Distance between pages; negative for a descending scan. Meaningless when `count` is 0.
    pub stride: i64,
    /// How many pages besides the faulting one.
    pub count: u32,
}

/// Largest window a policy may ask for, in pages besides the faulting one.
pub const WINDOW_MAX: u32 = 63;

/// Chooses the window for each fault.
pub trait Prefetch: Send {
    /// Called once for each fault, in order. O(1), no allocation: it is on the fault path.
    fn on_fault(&mut self, fault: FaultSeen) -> Window;

    /// Called after [`Prefetch::on_fault`], if a device has the page and no window was asked for:
    /// which pages around it come along. Cost: as above.
    ///
    /// * `look`: which of them the device has. It is called at most once, and only if it matters.
    fn off_trend(
        &mut self,
        _fault: FaultSeen,
        _now: Now,
        _look: &mut dyn FnMut() -> Around,
    ) -> Along {
        Along::default()
    }
}
