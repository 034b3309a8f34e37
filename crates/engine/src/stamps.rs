//! The order in which the pages of a ledger were stored, by their stamps, without a list of all
//! pages. Stamps are counted first. Then the pages are visited once for each window of stamps, and
//! sorted within it.

use std::cmp::Reverse;

use undercroft_base::{PageNo, Stamp, TierId};

/// Pages that are sorted at once: 32 MiB.
const SORTED_MAX: u64 = 8 << 20;

const STAMPS: usize = 1 << 16;

/// How often each stamp was met.
pub(crate) struct Stamps {
    /// Whether a stored page has the stamp.
    met: Vec<bool>,
    /// Pages of each tier, by stamp. Nothing for a tier in which ages do not matter.
    aged: Vec<Vec<u32>>,
}

/// Stamps of a tier that follow each other, the oldest first.
pub(crate) struct Window {
    pub tier: TierId,
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
    /// * `ages_matter`: of each tier.
    pub(crate) fn new(ages_matter: &[bool]) -> Stamps {
        let counts = |matter: &bool| vec![0; if *matter { STAMPS } else { 0 }];
        Stamps {
            met: vec![false; STAMPS],
            aged: ages_matter.iter().map(counts).collect(),
        }
    }

    /// A page is stored.
    #[inline]
    pub(crate) fn note(&mut self, tier: TierId, stamp: Stamp) {
        let at = usize::from(stamp.0);
        self.met[at] = true;
        if let Some(count) = (self.aged.get_mut(usize::from(tier.0))).and_then(|of| of.get_mut(at))
        {
            *count += 1;
        }
    }

    /// Stamps wrap: the newest is the one before the widest gap.
    pub(crate) fn newest(&self) -> Stamp {
        let met = (0..=u16::MAX).filter(|stamp| self.met[usize::from(*stamp)]);
        let stamps: Vec<u16> = met.collect();
        let next = stamps.iter().cycle().skip(1);
        let gaps = stamps.iter().zip(next);
        let gaps = gaps.map(|(stamp, next)| (next.wrapping_sub(*stamp).wrapping_sub(1), *stamp));
        let newest = gaps.min_by_key(|(gap, _)| Reverse(*gap));
        Stamp(newest.map_or(u16::MAX, |(_, stamp)| stamp))
    }

    /// All pages that have an age, tier by tier and the oldest first, in windows of [`SORTED_MAX`]
    /// pages or one stamp.
    pub(crate) fn windows(&self, newest: Stamp) -> Vec<Window> {
        let tiers = (0..).map(TierId).zip(&self.aged);
        let matter = tiers.filter(|(_, counts)| !counts.is_empty());
        let windows = matter.flat_map(|(tier, counts)| windows_of(tier, counts, newest));
        windows.collect()
    }
}

fn windows_of(tier: TierId, counts: &[u32], newest: Stamp) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    let mut sum = 0;
    for age in (0..=u16::MAX).rev() {
        let stamp = newest.0.wrapping_sub(age);
        let count = counts[usize::from(stamp)];
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
                    tier,
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
    #[inline]
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

    /// Pages of tier 1, which demotes. Tier 0 does not, and has one page of each stamp.
    fn stamps(of: &[(u16, u32)]) -> Stamps {
        let mut stamps = Stamps::new(&[false, true]);
        for (stamp, count) in of {
            stamps.note(TierId(0), Stamp(*stamp));
            stamps.aged[1][usize::from(*stamp)] = *count;
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
        assert!(windows.iter().all(|window| window.tier == TierId(1)));
        let ages: Vec<_> = windows.iter().map(|w| (w.oldest, w.youngest)).collect();
        assert_eq!(ages, [(10, 9), (8, 8), (7, 7), (0, 0)]);
        let sorted = windows[0].room().pages.len();
        assert_eq!(sorted, SORTED_MAX as usize);
        assert!(windows[2].room().pages.is_empty());
    }
}
