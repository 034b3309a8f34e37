//! No prefetch: each fault brings its own page only.

use super::{FaultSeen, Prefetch, Window};

/// Never prefetches.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPrefetch;

impl Prefetch for NoPrefetch {
    fn on_fault(&mut self, _fault: FaultSeen) -> Window {
        Window::default()
    }

    fn is_none(&self) -> bool {
        true
    }

    fn name(&self) -> &'static str {
        "none"
    }
}
