//! HybridSwap §4.4: a bound of the part of its time that a client waits for pages. It is kept by
//! shifting pages from the disk towards the SSD.
//!
//! Each window compares the part so far with the bound. Above it, the SSD segment of later
//! sequences grows by that ratio, up to the whole sequence. Clearly below it, for some windows in a
//! row in which the client waited little, the segment shrinks again. A program begins with
//! everything on the SSD. From there it shrinks to a part of the whole sequence at once, and not by
//! way of segments that are longer than any sequence.
//!
//! Differs: the paper also shifts sequences into memory, by not evicting them. Here the limit holds
//! before the bound, so that is left out.

use std::fmt;
use std::str::FromStr;

/// Largest shift. A sequence has at most 64 pages, and its SSD segment at least one.
pub const SHIFT_MAX: f64 = 64.0;

/// Part of the bound below which the client is clearly below it.
const CLEARLY: f64 = 0.95;

/// Windows in a row that must be clearly below the bound before pages shift to the disk.
const PATIENCE: u32 = 3;

/// The least that a shift shrinks to at once.
const SHRINK: f64 = 0.5;

/// Why a text is no stall bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no bound of the time that the program may wait; use a percentage from 1% to 99%, such as 30%"
)]
pub struct NoStallMax(String);

/// Most of its time that a client may wait for pages: above 0 and below 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct StallMax(f64);

impl StallMax {
    /// As a part.
    pub fn part(self) -> f64 {
        self.0
    }
}

impl FromStr for StallMax {
    type Err = NoStallMax;

    fn from_str(text: &str) -> Result<StallMax, NoStallMax> {
        let wrong = || NoStallMax(text.to_owned());
        let number = text.trim().strip_suffix('%').ok_or_else(wrong)?;
        let percent: f64 = number.trim().parse().map_err(|_| wrong())?;
        if (1.0..=99.0).contains(&percent) {
            Ok(StallMax(percent / 100.0))
        } else {
            Err(wrong())
        }
    }
}

impl fmt::Display for StallMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", (self.0 * 1e4).round() / 1e2)
    }
}

/// The bound of one client, and how far its pages are shifted.
#[derive(Clone, Debug, PartialEq)]
pub struct StallControl {
    bound: StallMax,
    shift: f64,
    below: u32,
    windows: (u64, u64),
}

impl StallControl {
    /// Everything goes to the SSD at first.
    pub fn new(bound: StallMax) -> StallControl {
        StallControl {
            bound,
            shift: SHIFT_MAX,
            below: 0,
            windows: (0, 0),
        }
    }

    /// Ends a window. Returns [`StallControl::asked`] from now on.
    ///
    /// * `ratio`: the part of its time that the client has waited, since it began.
    /// * `lately`: in this window alone. The part since the beginning tells late that a program has
    ///   begun to wait.
    /// * `all`: the least shift at which nothing goes to the disk, if that is known.
    pub fn end_window(&mut self, ratio: f64, lately: f64, all: Option<f64>) -> f64 {
        let all = all.unwrap_or(SHIFT_MAX).clamp(1.0, SHIFT_MAX);
        let relation = ratio / self.bound.0;
        if relation > 1.0 {
            self.windows.1 += 1;
            self.below = 0;
            let grown = self.shift * relation;
            self.shift = if grown < all { grown } else { SHIFT_MAX };
            return self.asked();
        }
        self.windows.0 += 1;
        let worse = relation.max(lately / self.bound.0);
        self.below = if worse < CLEARLY { self.below + 1 } else { 0 };
        if self.below >= PATIENCE {
            self.below = 0;
            self.shift = (self.shift.min(all) * worse.max(SHRINK)).max(1.0);
        }
        self.asked()
    }

    /// What placement is asked for: the shift, or infinity for the largest. 64 times a default that
    /// is shorter than a page is no whole sequence.
    pub fn asked(&self) -> f64 {
        if self.is_exhausted() {
            f64::INFINITY
        } else {
            self.shift
        }
    }

    /// The bound.
    pub fn bound(&self) -> StallMax {
        self.bound
    }

    /// By how much SSD segments are longer than their default: 1 to [`SHIFT_MAX`].
    pub fn shift(&self) -> f64 {
        self.shift
    }

    /// Windows that kept the bound, and windows that did not.
    pub fn windows(&self) -> (u64, u64) {
        self.windows
    }

    /// Whether nothing is left to do about a bound that is missed: nothing is sent to the disk.
    pub fn is_exhausted(&self) -> bool {
        self.shift >= SHIFT_MAX
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bounds_are_percentages_and_nonsense_is_refused() {
        let bound: StallMax = "30%".parse().expect("a bound");
        assert_eq!((bound.part(), bound.to_string().as_str()), (0.3, "30%"));
        for text in ["", "30", "0%", "100%", "-5%", "NaN%", "a%", "1e9%"] {
            let error = text.parse::<StallMax>().expect_err(text).to_string();
            assert!(error.contains("such as 30%"), "{error}");
        }
    }

    /// A client whose waits depend on the shift: `worst` with the default, `best` with all on SSD.
    /// Returns the part so far after each window.
    fn plant(bound: f64, worst: f64, best: f64, noise: &[f64]) -> (StallControl, Vec<f64>) {
        let mut control = StallControl::new(StallMax(bound));
        let mut waited = 0.0;
        let mut so_far = Vec::new();
        for (window, noise) in noise.iter().enumerate() {
            let share = (SHIFT_MAX / control.shift()).ln() / SHIFT_MAX.ln(); // on the disk
            let lately = (best + (worst - best) * share + noise).clamp(0.0, 1.0);
            waited += lately;
            let ratio = waited / (window + 1) as f64;
            so_far.push(ratio);
            control.end_window(ratio, lately, None);
        }
        (control, so_far)
    }

    #[test]
    fn a_bound_between_disk_and_ssd_is_kept_and_used() {
        for (bound, worst, best) in [(0.7, 0.9, 0.5), (0.5, 0.95, 0.2), (0.3, 0.8, 0.1)] {
            let (_, so_far) = plant(bound, worst, best, &[0.0; 400]);
            let last = so_far[so_far.len() - 1];
            assert!(
                last <= bound + 0.02 && last >= bound - 0.05,
                "{bound}: {last}"
            );
        }
    }

    #[test]
    fn a_bound_that_the_ssd_misses_has_no_page_on_the_disk() {
        let (control, _) = plant(0.2, 0.9, 0.5, &[0.0; 50]);
        assert!(control.is_exhausted());
        assert_eq!(control.asked(), f64::INFINITY);
        assert_eq!(control.windows(), (0, 50));
    }

    /// A disk that 16 pages of 64 hide: from 4 on nothing goes there.
    #[test]
    fn shifts_that_leave_nothing_for_the_disk_are_skipped() {
        let mut control = StallControl::new(StallMax(0.5));
        let mut window = |ratio: f64| control.end_window(ratio, ratio, Some(4.0));
        let all = f64::INFINITY;
        assert_eq!([0.375; 3].map(&mut window), [all, all, 3.0]);
        assert_eq!([0.625; 2].map(&mut window), [3.75, all]);
        assert_eq!([0.125; 3].map(window), [all, all, 2.0]);
    }

    #[test]
    fn a_bound_that_the_disk_keeps_shifts_nothing() {
        let (control, _) = plant(0.9, 0.5, 0.2, &[0.0; 100]);
        assert_eq!((control.shift(), control.asked()), (1.0, 1.0));
    }

    proptest! {
        #[test]
        fn shifts_stay_in_range_and_noise_breaks_no_bound_for_long(
            bound in 0.2f64..0.9,
            noise in prop::collection::vec(-0.1f64..0.1, 300),
        ) {
            let (control, so_far) = plant(bound, 1.0, 0.1, &noise);
            prop_assert!((1.0..=SHIFT_MAX).contains(&control.shift()));
            let last = so_far[so_far.len() - 1];
            prop_assert!((last - bound).abs() < 0.05, "{bound}: {last}");
        }
    }
}
