//! The prefetch policy of a replay that repeats recorded prefetches: the replay sets the window
//! before each fault, and the policy answers with it. See `traced.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use undercroft_base::PageNo;
use undercroft_policy::prefetch::{FaultSeen, Prefetch, WINDOW_MAX, Window};

use crate::memory_trace::Becomes;
use crate::page_stream::MovedPage;

/// The window of the current fault.
#[derive(Debug, Default)]
pub struct NextWindow {
    stride: AtomicI64,
    count: AtomicU32,
}

impl NextWindow {
    /// Sets the window of the next fault. The fault is on `no`, by the reference before `after`.
    /// `moved` are the movements from there on; the window is their first pages, as long as they
    /// are equally spaced.
    pub fn expect(&self, no: PageNo, after: usize, moved: &[MovedPage]) {
        let mut window = Window::default();
        let ahead = |moved: &&MovedPage| {
            moved.after == after && matches!(moved.what, Becomes::Ahead { .. })
        };
        // Entries about the fault itself come before.
        let itself = |moved: &&MovedPage| {
            moved.after == after && matches!(moved.what, Becomes::Written | Becomes::Unchanged)
        };
        let moved = moved.iter().skip_while(itself);
        let ahead = moved.take_while(ahead).take(WINDOW_MAX as usize);
        for (page, steps) in ahead.zip(1..) {
            let distance = i64::from(page.number) - i64::from(no.0);
            if steps == 1 {
                window.stride = distance;
            } else if distance != window.stride * steps {
                break;
            }
            window.count += 1;
        }
        self.set(window);
    }

    /// Sets the window of the next fault.
    pub fn set(&self, window: Window) {
        self.stride.store(window.stride, Ordering::Relaxed);
        self.count.store(window.count, Ordering::Relaxed);
    }
}

/// Answers each fault with the expected window, once.
pub(super) struct Traced {
    next: Arc<NextWindow>,
}

impl Traced {
    /// * `next`: where the replay sets the window.
    pub(super) fn new(next: Arc<NextWindow>) -> Traced {
        Traced { next }
    }
}

impl Prefetch for Traced {
    fn on_fault(&mut self, _fault: FaultSeen) -> Window {
        Window {
            stride: self.next.stride.load(Ordering::Relaxed),
            count: self.next.count.swap(0, Ordering::Relaxed),
        }
    }

    fn name(&self) -> &'static str {
        crate::setup::TRACED
    }
}
