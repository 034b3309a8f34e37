//! Kernel swap that is switched on while the program runs. Kernels before 6.16 may lose a page that
//! is moved out while they swap it: there a run is paused as long as swap is on.

use std::fs::File;
use std::time::{Duration, Instant};

use undercroft_sys::probe::{Check, State, Swaps};

use super::Control;
use super::tell::pause_first;
use crate::gauges::Hold;
use crate::log::warn;
use crate::space::shared::Shared;

/// Time between two looks, beside those that the kernel asks for (`POLLPRI`).
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Watches the kernel's swap.
pub(super) struct SwapWatch {
    swaps: Swaps,
    look_at: Instant,
    /// Pages may be lost.
    unsafe_now: bool,
}

/// A change that matters.
#[derive(Debug)]
pub(super) enum Change {
    /// Pages that are moved out may be lost from now on.
    On(Check),
    /// They are safe again.
    Off,
}

impl SwapWatch {
    pub(super) fn new(swaps: Swaps) -> SwapWatch {
        SwapWatch {
            swaps,
            look_at: Instant::now(),
            unsafe_now: false,
        }
    }

    /// The file to poll for `POLLPRI`, if this kernel's swap matters.
    pub(super) fn fd(&self) -> Option<&File> {
        self.swaps.to_watch()
    }

    /// Looks if it is time, or if the kernel `asks` for it. Cost otherwise: nothing.
    pub(super) fn look(&mut self, asks: bool, now: Instant) -> Option<Change> {
        self.fd()?;
        if !asks && now < self.look_at {
            return None;
        }
        self.look_at = now + LOOK_EVERY;
        let check = self.swaps.check();
        let unsafe_now = check.state == State::Missing;
        if std::mem::replace(&mut self.unsafe_now, unsafe_now) == unsafe_now {
            return None;
        }
        Some(if unsafe_now {
            Change::On(check)
        } else {
            Change::Off
        })
    }
}

/// Tells the user that no page leaves.
fn warn_of(check: &Check) {
    warn(&format!(
        "kernel swap: {}; no page leaves, and the limit is not kept, until it is off ({})",
        check.detail, check.fix
    ));
}

impl SwapWatch {
    /// Pauses the run before any thread evicts a page, if swap is on.
    pub(super) fn pause_first(&mut self, shared: &Shared) {
        if let Some(Change::On(check)) = self.look(true, Instant::now()) {
            pause_first(shared, Hold::Swap);
            warn_of(&check);
        }
    }
}

impl Control {
    /// Follows the kernel's swap.
    /// * `asks`: the kernel says that it has changed.
    pub(super) fn note_swap(&mut self, asks: bool) {
        match self.swap.look(asks, Instant::now()) {
            None => {}
            Some(Change::On(check)) => {
                self.hold(Hold::Swap, true);
                warn_of(&check);
            }
            Some(Change::Off) => {
                self.hold(Hold::Swap, false);
                warn("kernel swap is off: pages leave again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const HEADER: &str = "Filename\tType\tSize\tUsed\tPriority\n";

    #[test]
    fn swap_that_is_switched_on_later_is_seen_where_it_loses_pages() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let put = |text: &str| fs::write(file.path(), text).expect("written");
        let on = format!("{HEADER}/dev/zram0 partition 1 0 100\n");
        let (now, soon) = (Instant::now(), Duration::from_millis(1));
        for (release, matters) in [("6.8.0-60-generic", true), ("6.16.1", false)] {
            put(HEADER);
            let mut watch = SwapWatch::new(Swaps::of(file.path(), release));
            assert_eq!(watch.fd().is_some(), matters, "{release}");
            assert!(watch.look(true, now).is_none(), "none is on");
            put(&on);
            assert!(watch.look(false, now + soon).is_none(), "not yet");
            let seen = watch.look(false, now + LOOK_EVERY);
            let seen = matches!(&seen, Some(Change::On(check)) if check.fix.contains("/dev/zram0"));
            assert_eq!(seen, matters, "{release}");
            assert!(watch.look(true, now + LOOK_EVERY).is_none(), "said once");
            put(HEADER);
            let seen = watch.look(true, now + LOOK_EVERY + soon);
            assert_eq!(matches!(seen, Some(Change::Off)), matters, "{release}");
        }
    }
}
