//! Where a registration may begin and end, so that it covers what is new and little else: the
//! kernel visits each mapping of the range.
//!
//! It begins and ends beside a mapping that cannot be managed (a *fence*), or beside one that is
//! registered. All between two of those is new or empty. So no end is inside a mapping, whatever
//! the program maps there meanwhile.
//!
//! The program may also replace all there is on both sides of an end by one mapping, which is then
//! cut there. It does so near to where it has just mapped something. So a registration goes on
//! beyond its ground ([`Ground::beyond`]).
//!
//! A hint. An old one only makes registrations smaller or larger than they need be: the books learn
//! of a mapping only once it is registered whole (`discover.rs`).

use std::collections::BTreeMap;
use std::sync::Mutex;

use undercroft_base::{VirtPage, VirtRange};

use crate::sync::lock;

/// How far a registration goes on beyond its ground, in pages. Bounds how many mappings the kernel
/// looks at.
const BEYOND_PAGES: u64 = 1024;

/// The known mappings of an address space.
pub(crate) struct Ground {
    /// Every page that can be registered.
    all: VirtRange,
    marks: Mutex<Marks>,
}

#[derive(Default)]
struct Marks {
    /// Mappings that cannot be managed, as of the last discovery, and those that were seen since.
    fences: Ranges,
    /// Mappings that are registered.
    registered: Ranges,
}

/// Disjoint ranges: the end of each by its start. All methods take O(log n).
#[derive(Clone, Default)]
struct Ranges(BTreeMap<VirtPage, VirtPage>);

impl Ground {
    /// Of an address space of which nothing is known.
    /// * `all`: every page that can be registered.
    pub(crate) fn new(all: VirtRange) -> Ground {
        Ground {
            all,
            marks: Mutex::default(),
        }
    }

    /// A discovery has found these.
    pub(crate) fn surveyed(
        &self,
        fences: impl IntoIterator<Item = VirtRange>,
        registered: &[VirtRange],
    ) {
        let mut marks = lock(&self.marks);
        marks.fences = Ranges::of(fences);
        marks.registered = Ranges::of(registered.iter().copied());
    }

    /// Notes a mapping that cannot be managed, until the next discovery. Old ones that it meets may
    /// be gone by now; they count as one with it.
    pub(crate) fn fence(&self, range: VirtRange) {
        let mut marks = lock(&self.marks);
        marks.registered.cut(range);
        marks.fences.add(range);
    }

    /// The fences of a fork child are those of its parent.
    pub(crate) fn fenced_as(&self, parent: &Ground) {
        let fences = lock(&parent.marks).fences.clone();
        lock(&self.marks).fences = fences;
    }

    /// Notes that the mappings of `range` are registered.
    pub(crate) fn registered(&self, range: VirtRange) {
        lock(&self.marks).registered.add(range);
    }

    /// Notes that the mappings of `range` are gone.
    pub(crate) fn gone(&self, range: VirtRange) {
        lock(&self.marks).registered.cut(range);
    }

    /// True if all of `range` is registered, if nothing has changed since.
    pub(crate) fn has(&self, range: VirtRange) -> bool {
        lock(&self.marks).registered.covers(range)
    }

    /// `range`, and all addresses up to the nearest fences and the nearest registered mappings on
    /// both sides. `None` if a fence is in `range`.
    pub(crate) fn around(&self, range: VirtRange) -> Option<VirtRange> {
        let marks = lock(&self.marks);
        let room = marks.fences.room(range, self.all)?;
        Some(room.intersect(marks.registered.beside(range, self.all)))
    }

    /// `ground`, and [`BEYOND_PAGES`] on both sides, but no fence. What is registered there stays
    /// as it is: the kernel passes over it.
    pub(crate) fn beyond(&self, ground: VirtRange) -> VirtRange {
        let far = VirtRange::new(
            VirtPage(ground.start.0.saturating_sub(BEYOND_PAGES)),
            ground.end.plus(BEYOND_PAGES),
        );
        let marks = lock(&self.marks);
        marks.fences.beside(ground, self.all).intersect(far)
    }

    /// Ranges, one for each part of the ground that some of the mappings `of` share: from its first
    /// to its last. Where most memory is mapped comes first, because there the program can grow
    /// fastest.
    /// * `of`: ascending.
    pub(crate) fn spans(&self, of: &[VirtRange]) -> Vec<VirtRange> {
        let mut spans: Vec<(VirtRange, VirtRange, u64)> = Vec::new();
        for range in of {
            let room = self.around(*range).unwrap_or(*range);
            let pages = range.count().0;
            match spans.last_mut() {
                Some((within, span, sum)) if *within == room => {
                    *span = VirtRange::new(span.start, range.end);
                    *sum += pages;
                }
                _ => spans.push((room, *range, pages)),
            }
        }
        spans.sort_by_key(|(_, _, pages)| std::cmp::Reverse(*pages));
        spans.into_iter().map(|(_, span, _)| span).collect()
    }
}

impl Ranges {
    fn of(ranges: impl IntoIterator<Item = VirtRange>) -> Ranges {
        let ranges = ranges.into_iter();
        Ranges(ranges.map(|range| (range.start, range.end)).collect())
    }

    /// The last range that begins before `page`.
    fn before(&self, page: VirtPage) -> Option<VirtRange> {
        let (start, end) = self.0.range(..page).next_back()?;
        Some(VirtRange::new(*start, *end))
    }

    /// Adds a range, as one with those that it meets or touches.
    fn add(&mut self, range: VirtRange) {
        let mut whole = range;
        while let Some(old) = self.before(whole.end.plus(1))
            && old.end >= whole.start
        {
            whole = VirtRange::new(old.start.min(whole.start), old.end.max(whole.end));
            self.0.remove(&old.start);
        }
        self.0.insert(whole.start, whole.end);
    }

    /// Removes the pages of a range.
    fn cut(&mut self, range: VirtRange) {
        while let Some(old) = self.before(range.end)
            && old.end > range.start
        {
            self.0.remove(&old.start);
            for rest in old.minus(&[range]) {
                self.0.insert(rest.start, rest.end);
            }
            if old.start <= range.start {
                break;
            }
        }
    }

    fn covers(&self, range: VirtRange) -> bool {
        let last = self.before(range.end);
        last.is_some_and(|last| last.intersect(range) == range)
    }

    /// All addresses between the nearest ranges. `None` if one of those is in `range`.
    fn room(&self, range: VirtRange, all: VirtRange) -> Option<VirtRange> {
        let is_free = (self.before(range.end)).is_none_or(|last| last.end <= range.start);
        let room = self.beside(range, all);
        (is_free && room.intersect(range) == range).then_some(room)
    }

    /// `range`, and all addresses beside it up to the nearest ranges, within `all`.
    fn beside(&self, range: VirtRange, all: VirtRange) -> VirtRange {
        let below = self.before(range.start).map(|last| last.end);
        let within = (self.before(range.end)).filter(|last| last.end > range.end);
        let next = self.0.range(range.end..).next().map(|(start, _)| *start);
        let above = within.map(|_| range.end).or(next);
        VirtRange::new(
            below.map_or(all.start, |end| end.min(range.start)),
            above.unwrap_or(all.end),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    /// Each call of the kernel may wait for threads of the program that have no CPU, and the others
    /// grow meanwhile.
    #[test]
    fn all_between_two_fences_is_registered_at_once_and_the_largest_first() {
        let ground = Ground::new(pages(16, 1 << 35));
        ground.surveyed([pages(0x100, 0x110), pages(0x300, 0x400)], &[]);
        let of = [
            (0x20, 0x21),
            (0x110, 0x120),
            (0x120, 0x160),
            (0x180, 0x190),
            (0x400, 0x420),
        ];
        let of = of.map(|(start, end)| pages(start, end));
        let in_turn = [pages(0x110, 0x190), pages(0x400, 0x420), pages(0x20, 0x21)];
        assert_eq!(ground.spans(&of), in_turn);
    }

    #[test]
    fn the_ground_of_a_new_mapping_ends_beside_what_is_registered() {
        let ground = Ground::new(pages(16, 1 << 35));
        ground.surveyed(
            [pages(100, 110), pages(900, 950)],
            &[pages(200, 210), pages(400, 450)],
        );
        assert_eq!(ground.around(pages(300, 310)), Some(pages(210, 400)));
        assert_eq!(ground.around(pages(120, 130)), Some(pages(110, 200)));
        assert_eq!(ground.around(pages(500, 510)), Some(pages(450, 900)));
        assert_eq!(ground.around(pages(105, 120)), None, "a fence is in it");
        // What was registered there may be gone.
        assert_eq!(ground.around(pages(205, 410)), Some(pages(205, 410)));
        assert_eq!(ground.around(pages(195, 460)), Some(pages(110, 900)));
        assert_eq!(ground.around(pages(200, 210)), Some(pages(110, 400)));
        ground.registered(pages(300, 310));
        assert_eq!(ground.around(pages(500, 510)), Some(pages(450, 900)));
        assert_eq!(ground.around(pages(320, 330)), Some(pages(310, 400)));
        ground.gone(pages(305, 500));
        assert_eq!(ground.around(pages(320, 330)), Some(pages(305, 900)));
        ground.fence(pages(302, 304));
        assert_eq!(ground.around(pages(320, 330)), Some(pages(305, 900)));
        assert_eq!(ground.around(pages(250, 260)), Some(pages(210, 300)));
    }

    /// A mapping that replaces all there is at an end is not split there.
    #[test]
    fn a_registration_goes_on_beyond_its_ground_but_over_no_fence() {
        let ground = Ground::new(pages(16, 1 << 35));
        let fences = [pages(10_000, 10_010), pages(19_000, 19_100)];
        ground.surveyed(fences, &[pages(15_000, 15_100)]);
        for (of, to) in [
            ((15_100, 15_200), (14_076, 16_224)),
            ((10_020, 15_000), (10_010, 16_024)),
            ((18_000, 18_900), (16_976, 19_000)),
            ((100, 200), (16, 1224)),
        ] {
            assert_eq!(ground.beyond(pages(of.0, of.1)), pages(to.0, to.1));
        }
    }

    #[test]
    fn ranges_that_meet_or_touch_are_one() {
        let mut ranges = Ranges::default();
        for (start, end) in [
            (10, 20),
            (30, 40),
            (20, 25),
            (50, 60),
            (24, 30),
            (70, 80),
            (55, 75),
        ] {
            ranges.add(pages(start, end));
        }
        let all: Vec<_> = ranges
            .0
            .iter()
            .map(|(start, end)| (start.0, end.0))
            .collect();
        assert_eq!(all, [(10, 40), (50, 80)]);
        assert!(ranges.covers(pages(10, 40)) && !ranges.covers(pages(30, 55)));
        ranges.cut(pages(15, 55));
        ranges.cut(pages(60, 62));
        let all: Vec<_> = ranges
            .0
            .iter()
            .map(|(start, end)| (start.0, end.0))
            .collect();
        assert_eq!(all, [(10, 15), (55, 60), (62, 80)]);
    }
}
