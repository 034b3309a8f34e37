//! The prefetch policy of a replay that repeats recorded prefetches: the replay sets the window, or
//! the neighbours, before each fault, and the policy answers with them. See `traced.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use undercroft_base::PageNo;
use undercroft_policy::prefetch::neighbours::{Along, Around, Now, REACH};
use undercroft_policy::prefetch::{FaultSeen, Prefetch, WINDOW_MAX, Window};

use crate::memory_trace::Becomes;
use crate::page_stream::MovedPage;

/// What comes along with the current fault: a window, or neighbours.
#[derive(Debug, Default)]
pub struct NextWindow {
    stride: AtomicI64,
    count: AtomicU32,
    neighbours: AtomicU32,
}

impl NextWindow {
    /// Sets what comes along with the next fault. The fault is on `no`, by the reference before
    /// `after`. `moved` are the movements from there on; the window is their first pages, as long
    /// as they are equally spaced. If more of them are neighbours, these come along instead.
    pub fn expect(&self, no: PageNo, after: usize, moved: &[MovedPage]) {
        let (mut window, mut neighbours) = (Window::default(), 0u32);
        let mut in_window = true;
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
            }
            in_window &= distance == window.stride * steps;
            window.count += u32::from(in_window);
            if distance.unsigned_abs() <= u64::from(REACH) {
                neighbours |= 1 << (i64::from(REACH) + distance);
            }
        }
        if neighbours.count_ones() > window.count {
            self.set(Window::default(), neighbours);
        } else {
            self.set(window, 0);
        }
    }

    /// Sets what comes along with the next fault: a window, or neighbours (as [`Along::pages`]).
    pub fn set(&self, window: Window, neighbours: u32) {
        self.stride.store(window.stride, Ordering::Relaxed);
        self.count.store(window.count, Ordering::Relaxed);
        self.neighbours.store(neighbours, Ordering::Relaxed);
    }
}

/// Answers each fault with what is expected, once.
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

    fn off_trend(&mut self, _: FaultSeen, _: Now, look: &mut dyn FnMut() -> Around) -> Along {
        let pages = match self.next.neighbours.swap(0, Ordering::Relaxed) {
            0 => 0,
            pages => pages & look(),
        };
        Along { pages, used: 0 }
    }

    fn name(&self) -> &'static str {
        crate::setup::TRACED
    }
}
