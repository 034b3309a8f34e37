//! Pages that are refused to a process: the page table has no room for them, they are not in
//! memory, and the kernel would not let us poison them yet. A touch is refused when it comes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use undercroft_base::{VirtPage, VirtRange};

use crate::sync::lock;

/// Most ranges that are kept apart. Of more, all that lies between them is refused too.
const RANGES_MAX: usize = 1 << 16;

/// The refused pages of one address space.
#[derive(Default)]
pub(crate) struct Refused {
    any: AtomicBool,
    ranges: Mutex<Vec<VirtRange>>,
}

impl Refused {
    /// Whether `page` is refused. Cost: a load if none is.
    #[inline]
    pub(crate) fn has(&self, page: VirtPage) -> bool {
        self.any() && lock(&self.ranges).iter().any(|of| of.contains(page))
    }

    /// Whether any page is.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, range: VirtRange) {
        self.change(|ranges| ranges.push(range));
    }

    /// The program has dropped `range`: what comes there is new.
    pub(crate) fn gone(&self, range: VirtRange) {
        if self.any() {
            self.change(|ranges| without(ranges, range));
        }
    }

    /// A mapping has moved from `from` to the place `to` of the same length.
    pub(crate) fn moved(&self, from: VirtRange, to: VirtRange) {
        if !self.any() {
            return;
        }
        let there = |page: VirtPage| to.start.plus(page.0 - from.start.0);
        self.change(|ranges| {
            without(ranges, to);
            let all = ranges.iter().map(|of| of.intersect(from));
            let moved: Vec<_> = all
                .filter(|of| !of.is_empty())
                .map(|of| VirtRange::new(there(of.start), there(of.end)))
                .collect();
            without(ranges, from);
            ranges.extend(moved);
        });
    }

    /// A fork child is refused what its parent is.
    pub(crate) fn inherit(&self, parent: &Refused) {
        if parent.any() {
            let of_parent = lock(&parent.ranges).clone();
            self.change(|ranges| ranges.extend(of_parent));
        }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<VirtRange>)) {
        let mut ranges = lock(&self.ranges);
        change(&mut ranges);
        if ranges.len() > RANGES_MAX {
            let start = ranges.iter().map(|of| of.start).min();
            let end = ranges.iter().map(|of| of.end).max();
            let hull = start
                .zip(end)
                .map(|(start, end)| VirtRange::new(start, end));
            *ranges = hull.into_iter().collect();
        }
        self.any.store(!ranges.is_empty(), Ordering::Relaxed);
    }
}

fn without(ranges: &mut Vec<VirtRange>, hole: VirtRange) {
    *ranges = (ranges.iter()).flat_map(|of| of.minus(&[hole])).collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    fn pages(refused: &Refused) -> Vec<u64> {
        (0..100)
            .filter(|page| refused.has(VirtPage(*page)))
            .collect()
    }

    #[test]
    fn refused_pages_follow_what_the_program_does() {
        let parent = Refused::default();
        assert!(!parent.any());
        parent.add(range(10, 14));
        parent.gone(range(11, 12));
        assert_eq!(pages(&parent), [10, 12, 13]);
        let child = Refused::default();
        child.inherit(&parent);
        child.add(range(61, 62)); // what is there already goes when another mapping takes its place
        child.moved(range(12, 20), range(60, 68));
        assert_eq!(pages(&child), [10, 60, 61]);
        child.gone(range(0, 100));
        assert!(!child.any());
        assert_eq!(pages(&parent), [10, 12, 13]);
    }

    #[test]
    fn too_many_ranges_refuse_what_lies_between() {
        let refused = Refused::default();
        refused.change(|ranges| {
            ranges.extend((0..RANGES_MAX as u64).map(|at| range(3 * at, 3 * at + 1)))
        });
        assert!(!refused.has(VirtPage(1)));
        refused.add(range(1 << 30, (1 << 30) + 1));
        assert!(refused.has(VirtPage(1)) && refused.has(VirtPage(1 << 30)));
        assert!(!refused.has(VirtPage((1 << 30) + 1)));
    }
}
