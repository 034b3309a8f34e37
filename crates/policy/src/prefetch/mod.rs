//! Prefetch policies: which neighbours of a faulting page are loaded with it.

#[cfg(test)]
mod contract;
pub mod first_touch;
pub mod majority;
pub mod neighbours;
pub mod readahead;
pub mod window;

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

policies! {
    /// The name of a prefetch policy that there is; the policy is `None` if it brings nothing.
    /// `readahead:8`: blocks of up to 8 pages, the faulting one included. `window:8`: 8 besides the
    /// faulting page. Sizes are 1 to 63; 0 = none.
    PrefetchName makes Option<Box<dyn Prefetch>>, "prefetch";
    "majority" => Some(Box::new(majority::Majority::new()));
    "readahead" => Some(Box::new(readahead::Readahead::new())),
        or pages @ 0..=WINDOW_MAX => boxed(pages, readahead::Readahead::with_max);
    "window" => Some(Box::new(window::FixedWindow::new(window::PAGES_DEFAULT))),
        or pages @ 0..=WINDOW_MAX => boxed(pages, window::FixedWindow::new);
    "none" => None;
}

/// A policy of a size that is not 0.
fn boxed<P>(pages: u32, of: impl FnOnce(u32) -> P) -> Option<Box<dyn Prefetch>>
where
    P: Prefetch + 'static,
{
    (pages > 0).then(|| Box::new(of(pages)) as Box<dyn Prefetch>)
}
