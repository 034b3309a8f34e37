//! A prefetcher that brings random neighbours: what the engine must bear of one that is wrong.

use undercroft_policy::prefetch::neighbours::{Along, Around, Now};
use undercroft_policy::prefetch::{FaultSeen, Prefetch, Window};
use undercroft_seeded::Random;

/// The windows of another policy, and any neighbours where that policy wants no window.
pub(super) struct Beside {
    windows: Option<Box<dyn Prefetch>>,
    random: Random,
}

impl Beside {
    pub(super) fn new(windows: Option<Box<dyn Prefetch>>, seed: u64) -> Beside {
        Beside {
            windows,
            random: Random::new(seed ^ 0xbe5),
        }
    }
}

impl Prefetch for Beside {
    fn on_fault(&mut self, fault: FaultSeen) -> Window {
        let windows = self.windows.as_mut();
        windows.map_or(Window::default(), |it| it.on_fault(fault))
    }

    fn off_trend(&mut self, _: FaultSeen, _: Now, look: &mut dyn FnMut() -> Around) -> Along {
        if self.random.chance(2, 3) {
            look();
        }
        // Without a look, or of pages that no device has, it gets none.
        Along {
            pages: self.random.bits() as u32,
            used: 0,
        }
    }
}
