//! A fixed window: the next pages come along with every fault, used or not.
//!
//! Source: PCM swap §III-3, read-ahead of 0 to 8 pages; also Linux before 3.14.
//! `readahead` grew out of it: that stops where the pages are not used, this does not.

use undercroft_policy_core::prefetch::{FaultSeen, Prefetch, WINDOW_MAX, Window};

/// Pages besides the faulting one, by default.
pub const PAGES_DEFAULT: u32 = 8;

/// Loads a window of fixed size with each fault.
#[derive(Clone, Copy, Debug)]
pub struct FixedWindow {
    pages: u32,
}

impl FixedWindow {
    /// A window of `pages`, at most [`WINDOW_MAX`].
    pub fn new(pages: u32) -> FixedWindow {
        FixedWindow {
            pages: pages.min(WINDOW_MAX),
        }
    }
}

impl Prefetch for FixedWindow {
    fn on_fault(&mut self, _fault: FaultSeen) -> Window {
        Window {
            stride: 1,
            count: self.pages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::{PrefetchName, by_name};
    use undercroft_base::{SpaceId, ThreadId, VirtPage};

    fn counts(name: &str, pages: &[u64]) -> Vec<u32> {
        let mut prefetch = by_name(name).expect("a known policy");
        let mut count = |page: &u64| {
            let fault = FaultSeen {
                space: SpaceId(1),
                page: VirtPage(*page),
                thread: ThreadId(0),
                first_touch: false,
            };
            prefetch.as_mut().map_or(0, |it| it.on_fault(fault).count)
        };
        pages.iter().map(&mut count).collect()
    }

    #[test]
    fn window_brings_the_same_whatever_happens() {
        assert_eq!(counts("window:3", &[7, 900, 2, 3]), [3, 3, 3, 3]);
        assert_eq!(counts("window", &[7]), [8]);
    }

    #[test]
    fn a_parsed_name_keeps_its_size() {
        let name: PrefetchName = "window:5".parse().expect("a known policy");
        assert_eq!(name.to_string(), "window:5");
        let fault = FaultSeen {
            space: SpaceId(1),
            page: VirtPage(16),
            thread: ThreadId(0),
            first_touch: false,
        };
        let window = name.make().map(|mut it| it.on_fault(fault).count);
        assert_eq!(window, Some(5));
    }

    #[test]
    fn names_take_a_size_and_refuse_nonsense() {
        assert_eq!(
            counts("readahead:4", &[16, 17, 18, 20, 24]),
            [0, 0, 1, 3, 3]
        );
        assert_eq!(counts("readahead:0", &[16, 17, 18]), [0, 0, 0]);
        assert_eq!(counts("window:0", &[16]), [0]);
        for name in [
            "window:",
            "window:64",
            "window:-1",
            "none:3",
            "majority:8",
            "readahead:x",
        ] {
            let error = by_name(name).err().expect(name).to_string();
            assert!(error.contains(name) && error.contains("window"), "{error}");
        }
    }
}
