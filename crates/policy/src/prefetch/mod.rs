//! Prefetch policies: which neighbours of a faulting page are loaded with it.

#[cfg(test)]
mod contract;
pub mod first_touch;
pub mod majority;
pub mod neighbours;
pub mod none;
pub mod readahead;
pub mod window;

use crate::UnknownPolicy;
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

    /// True for a policy that never prefetches, so that it need not be asked.
    fn is_none(&self) -> bool {
        false
    }

    /// The name the user knows it by.
    fn name(&self) -> &'static str;
}

/// The prefetch policies a user can name; the first is the default.
pub const NAMES: [&str; 4] = ["majority", "readahead", "window", "none"];

/// Makes a policy without history. `readahead` and `window` take a size in pages after a colon.
/// `readahead:8`: blocks of up to 8, the faulting page included. `window:8`: 8 besides the faulting
/// page.
///
/// Errors: an unknown name or a size out of 1 to 63 (0 = none); the message lists the valid names.
pub fn by_name(name: &str) -> Result<Box<dyn Prefetch>, UnknownPolicy> {
    let unknown = || UnknownPolicy::new("prefetch", name, &NAMES);
    let (policy, pages) = match name.split_once(':') {
        None => (name, None),
        Some((policy, pages)) => {
            let pages: u32 = pages.parse().map_err(|_| unknown())?;
            if pages > WINDOW_MAX {
                return Err(unknown());
            }
            (policy, Some(pages))
        }
    };
    Ok(match (policy, pages) {
        ("majority", None) => Box::new(majority::Majority::new()),
        ("readahead", None) => Box::new(readahead::Readahead::new()),
        ("window", None) => Box::new(window::FixedWindow::new(window::PAGES_DEFAULT)),
        ("none", None) | ("readahead" | "window", Some(0)) => Box::new(none::NoPrefetch),
        ("readahead", Some(pages)) => Box::new(readahead::Readahead::with_max(pages)),
        ("window", Some(pages)) => Box::new(window::FixedWindow::new(pages)),
        _ => return Err(unknown()),
    })
}

policy_name! {
    /// The name of a prefetch policy that there is.
    PrefetchName makes Prefetch
}
