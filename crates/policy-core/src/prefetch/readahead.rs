//! Kernel-style read-ahead: an aligned block around the fault, which grows while its pages are
//! used.
//!
//! Source: Linux `mm/swap_state.c`, `__swapin_nr_pages`. A block has 2, 4, 8 .. `pages_max` pages;
//! a miss at most halves it; a fault away from every known block loads 1 page. Differs: the kernel
//! counts a hit at each use of a read-ahead page. Here those pages are mapped and do not fault, so
//! a fault at the end of the last block counts as use of the whole block. Pages of the block below
//! the fault are not loaded, because a window goes one way. State is kept for the last `SPACES`
//! address spaces, with first touches apart.

use undercroft_base::{SpaceId, VirtPage};

use super::{FaultSeen, Prefetch, WINDOW_MAX, Window};

const SPACES: usize = 16;

/// The kernel's default block: `vm.page-cluster` = 3.
const PAGES_DEFAULT: u32 = 8;

#[derive(Clone, Copy)]
struct Seen {
    key: (SpaceId, bool),
    /// First page after the last window.
    next: VirtPage,
    last: VirtPage,
    pages: u32,
    used_at: u64,
}

/// Reads ahead of a fault. The block grows while its pages are used.
pub struct Readahead {
    seen: [Option<Seen>; SPACES],
    pages_max: u32,
    clock: u64,
}

impl Default for Readahead {
    fn default() -> Self {
        Readahead::new()
    }
}

impl Readahead {
    /// Blocks of up to 8 pages, as the kernel's default.
    pub fn new() -> Readahead {
        Readahead::with_max(PAGES_DEFAULT)
    }

    /// Blocks of up to `pages` pages, the faulting one included; rounded down to a power of two,
    /// 1..=64.
    pub fn with_max(pages: u32) -> Readahead {
        Readahead {
            seen: [None; SPACES],
            pages_max: 1 << pages.clamp(1, WINDOW_MAX + 1).ilog2(),
            clock: 0,
        }
    }
}

impl Prefetch for Readahead {
    fn on_fault(&mut self, fault: FaultSeen) -> Window {
        self.clock += 1;
        let key = (fault.space, fault.first_touch);
        let at = |seen: &Option<Seen>| seen.map_or(0, |seen| seen.used_at);
        let place = self
            .seen
            .iter()
            .position(|seen| seen.is_some_and(|seen| seen.key == key))
            .or_else(|| (0..SPACES).min_by_key(|&place| at(&self.seen[place])))
            .unwrap_or(0);
        let pages = match self.seen[place] {
            Some(seen) if seen.key == key => {
                let hits = if seen.pages > 1 && fault.page == seen.next {
                    seen.pages
                } else {
                    0
                };
                let beside = fault.page.0.abs_diff(seen.last.0) == 1;
                let grown = match hits {
                    0 if beside => 2,
                    0 => 1,
                    hits => (hits + 2).next_power_of_two(),
                };
                grown.max(seen.pages / 2).min(self.pages_max)
            }
            _ => 1,
        };
        let mask = u64::from(pages - 1);
        let block_last = fault.page.0 | mask;
        self.seen[place] = Some(Seen {
            key,
            next: VirtPage(block_last.wrapping_add(1)),
            last: fault.page,
            pages,
            used_at: self.clock,
        });
        Window {
            stride: 1,
            count: (block_last - fault.page.0) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::ThreadId;

    fn faults(prefetch: &mut Readahead, pages: &[u64]) -> Vec<u32> {
        let mut fault = FaultSeen {
            space: SpaceId(1),
            page: VirtPage(0),
            thread: ThreadId(0),
            first_touch: false,
        };
        let mut counts = Vec::new();
        for &page in pages {
            fault.page = VirtPage(page);
            counts.push(prefetch.on_fault(fault).count);
        }
        counts
    }

    #[test]
    fn readahead_grows_while_the_scan_continues() {
        let counts = faults(&mut Readahead::new(), &[16, 17, 18, 20, 24, 32]);
        assert_eq!(counts, [0, 0, 1, 3, 7, 7]);
    }

    #[test]
    fn readahead_halves_and_ends_when_faults_are_random() {
        let mut prefetch = Readahead::new();
        faults(&mut prefetch, &[16, 17, 18, 20, 24, 32]);
        let counts = faults(&mut prefetch, &[1000, 2000, 3000, 4000]);
        assert_eq!(counts, [3, 1, 0, 0]);
    }
}
