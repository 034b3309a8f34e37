//! The order in which the pages of a ledger were stored, by their stamps, without a list of all
//! pages. Stamps are counted first. Then the pages are visited once for each window of stamps, and
//! sorted within it.

use std::cmp::Reverse;

use undercroft_base::{PageNo, Stamp};

/// Pages that are sorted at once: 32 MiB.
const SORTED_MAX: u64 = 8 << 20;

const STAMPS: usize = 1 << 16;

/// How often each stamp was met.
pub(crate) struct Stamps {
    /// Pages, and those of them that have an age.
    counts: Vec<(u32, u32)>,
}

impl Default for Stamps {
    fn default() -> Stamps {
        let counts = vec![(0, 0); STAMPS];
        Stamps { counts }
    }
}

/// Stamps that follow each other, the oldest first.
pub(crate) struct Window {
    newest: Stamp,
    /// By age: how many evictions before the newest stamp. From the oldest to the youngest.
    oldest: u16,
    youngest: u16,
    /// Pages of each age, from the oldest to the youngest.
    counts: Vec<u32>,
}

/// Where the pages of a window are sorted.
pub(crate) struct Sorting<'a> {
    window: &'a Window,
    /// Where the next page of each age goes.
    next: Vec<u32>,
    pub pages: Vec<PageNo>,
}

/// Use of a page by a window.
pub(crate) enum Turn<'a> {
    /// The page goes there.
    Sorted(&'a mut PageNo),
    /// All of the window have one stamp.
    InOrder,
    /// The page is of another window.
    Elsewhere,
}

impl Stamps {
    /// A page is stored. `aged`: its age matters.
    pub(crate) fn note(&mut self, stamp: Stamp, aged: bool) {
        let (pages, with_age) = &mut self.counts[usize::from(stamp.0)];
        *pages += 1;
        *with_age += u32::from(aged);
    }

    /// Stamps wrap: the newest is the one before the widest gap.
    pub(crate) fn newest(&self) -> Stamp {
        let met = (0..=u16::MAX).filter(|stamp| self.counts[usize::from(*stamp)].0 > 0);
        let stamps: Vec<u16> = met.collect();
        let next = stamps.iter().cycle().skip(1);
        let gaps = stamps.iter().zip(next);
        let gaps = gaps.map(|(stamp, next)| (next.wrapping_sub(*stamp).wrapping_sub(1), *stamp));
        let newest = gaps.min_by_key(|(gap, _)| Reverse(*gap));
        Stamp(newest.map_or(u16::MAX, |(_, stamp)| stamp))
    }

    /// All pages that have an age, the oldest first, in windows of [`SORTED_MAX`] pages or one
    /// stamp.
    pub(crate) fn windows(&self, newest: Stamp) -> Vec<Window> {
        let mut windows: Vec<Window> = Vec::new();
        let mut sum = 0;
        for age in (0..=u16::MAX).rev() {
            let stamp = newest.0.wrapping_sub(age);
            let count = self.counts[usize::from(stamp)].1;
            if count == 0 {
                continue;
            }
            sum += u64::from(count);
            match windows.last_mut() {
                Some(last) if sum <= SORTED_MAX => {
                    last.youngest = age;
                    last.counts.resize(usize::from(last.oldest - age), 0);
                    last.counts.push(count);
                }
                _ => {
                    sum = u64::from(count);
                    windows.push(Window {
                        newest,
                        oldest: age,
                        youngest: age,
                        counts: vec![count],
                    });
                }
            }
        }
        windows
    }
}

impl Window {
    /// Room for its pages.
    pub(crate) fn room(&self) -> Sorting<'_> {
        let mut next = Vec::with_capacity(self.counts.len());
        let mut sum = 0;
        for count in &self.counts {
            next.push(sum);
            sum += count;
        }
        let single = self.oldest == self.youngest;
        Sorting {
            window: self,
            next,
            pages: vec![PageNo(0); if single { 0 } else { sum as usize }],
        }
    }
}

impl Sorting<'_> {
    pub(crate) fn place(&mut self, stamp: Stamp) -> Turn<'_> {
        let window = self.window;
        let age = window.newest.0.wrapping_sub(stamp.0);
        if age > window.oldest || age < window.youngest {
            return Turn::Elsewhere;
        }
        if window.oldest == window.youngest {
            return Turn::InOrder;
        }
        let next = &mut self.next[usize::from(window.oldest - age)];
        let at = *next as usize;
        *next += 1;
        Turn::Sorted(&mut self.pages[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(of: &[(u16, u32)]) -> Stamps {
        let mut stamps = Stamps::default();
        for (stamp, count) in of {
            stamps.counts[usize::from(*stamp)] = (*count, *count);
        }
        stamps
    }

    #[test]
    fn the_newest_stamp_is_before_the_widest_gap() {
        assert_eq!(stamps(&[]).newest(), Stamp(u16::MAX));
        assert_eq!(stamps(&[(7, 1)]).newest(), Stamp(7));
        assert_eq!(stamps(&[(3, 1), (4, 1), (9, 1)]).newest(), Stamp(9));
        // They have wrapped.
        assert_eq!(stamps(&[(3, 1), (65_530, 1)]).newest(), Stamp(3));
    }

    #[test]
    fn windows_have_few_pages_or_one_stamp_and_go_from_old_to_new() {
        let half = SORTED_MAX as u32 / 2;
        let all = stamps(&[(65_535, half), (0, half), (1, 1), (2, 3 * half), (9, 2)]);
        let windows = all.windows(Stamp(9));
        let ages: Vec<_> = windows.iter().map(|w| (w.oldest, w.youngest)).collect();
        assert_eq!(ages, [(10, 9), (8, 8), (7, 7), (0, 0)]);
        let sorted = windows[0].room().pages.len();
        assert_eq!(sorted, SORTED_MAX as usize);
        assert!(windows[2].room().pages.is_empty());
    }
}
