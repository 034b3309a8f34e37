//! HybridSwap §4.4: a bound of the part of its time that a client waits for pages. It is kept by
//! shifting pages from the disk towards the SSD.
//!
//! From the part waited so far follows the part that a window may wait, so that the bound holds in
//! the end. In a window above that, the SSD segment of later sequences grows by the ratio, up to
//! the whole sequence. After some windows in a row that are clearly below it, the segment shrinks.
//! A program begins with everything on the SSD. From there the segment shrinks to a part of the
//! whole sequence at once, and not by way of segments that are longer than any sequence.
//!
//! Differs: the paper compares the part so far with the bound itself. It also shifts sequences into
//! memory, by not evicting them. Here the limit holds before the bound, so that is left out.

use std::fmt;
use std::str::FromStr;

/// Largest shift. A sequence has at most 64 pages, and its SSD segment at least one.
pub const SHIFT_MAX: f64 = 64.0;

/// Part of what a window may wait below which it is clearly below that.
const CLEARLY: f64 = 0.95;

/// Windows in a row that must be clearly below it before pages shift to the disk.
const PATIENCE: u32 = 3;

/// A stall below or above the bound is made good in a quarter of the time until now.
const CATCHES_UP: f64 = 4.0;

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
    /// * `lately`: in this window alone.
    /// * `all`: the least shift at which nothing goes to the disk, if that is known.
    pub fn end_window(&mut self, ratio: f64, lately: f64, all: Option<f64>) -> f64 {
        let all = all.unwrap_or(SHIFT_MAX).clamp(1.0, SHIFT_MAX);
        if ratio > self.bound.0 {
            self.windows.1 += 1;
        } else {
            self.windows.0 += 1;
        }
        let relation = lately / self.allowed(ratio);
        if relation > 1.0 {
            self.below = 0;
            let grown = self.shift * relation;
            self.shift = if grown < all { grown } else { SHIFT_MAX };
            return self.asked();
        }
        self.below = if relation < CLEARLY {
            self.below + 1
        } else {
            0
        };
        if self.below >= PATIENCE {
            self.below = 0;
            self.shift = (self.shift.min(all) * relation.max(SHRINK)).max(1.0);
        }
        self.asked()
    }

    /// The part of a window that it may wait, if it has waited `ratio` so far.
    fn allowed(&self, ratio: f64) -> f64 {
        let bound = self.bound.0;
        (bound + CATCHES_UP * (bound - ratio)).clamp(bound / 2.0, 1.0)
    }

    /// The shift that placement is asked for, or infinity for the largest. 64 times a default that
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

    /// A client and its control.
    struct Client {
        control: StallControl,
        waited: f64,
        windows: f64,
    }

    impl Client {
        fn new(bound: f64) -> Client {
            Client {
                control: StallControl::new(StallMax(bound)),
                waited: 0.0,
                windows: 0.0,
            }
        }

        /// The part of its pages that goes to the disk: 0 to 1.
        fn share(&self) -> f64 {
            (SHIFT_MAX / self.control.shift()).ln() / SHIFT_MAX.ln()
        }

        fn ratio(&self) -> f64 {
            self.waited / self.windows
        }

        /// Waits for this part of a window. Returns the part so far.
        fn waits(&mut self, lately: f64) -> f64 {
            let lately = lately.clamp(0.0, 1.0);
            (self.waited, self.windows) = (self.waited + lately, self.windows + 1.0);
            (self.control).end_window(self.ratio(), lately, Some(SHIFT_MAX));
            self.ratio()
        }
    }

    /// A client that waits `worst` with the default, and `best` with all on the SSD.
    fn plant(bound: f64, worst: f64, best: f64, noise: &[f64]) -> Client {
        let mut client = Client::new(bound);
        for noise in noise {
            client.waits(best + (worst - best) * client.share() + noise);
        }
        client
    }

    fn is_kept_and_used(bound: f64, ratio: f64) -> bool {
        ratio <= bound + 0.02 && ratio >= bound - 0.05
    }

    #[test]
    fn a_bound_between_disk_and_ssd_is_kept_and_used() {
        for (bound, worst, best) in [(0.7, 0.9, 0.5), (0.5, 0.95, 0.2), (0.3, 0.8, 0.1)] {
            let last = plant(bound, worst, best, &[0.0; 400]).ratio();
            assert!(is_kept_and_used(bound, last), "{bound}: {last}");
        }
    }

    #[test]
    fn a_bound_that_the_ssd_misses_has_no_page_on_the_disk() {
        let control = plant(0.2, 0.9, 0.5, &[0.0; 50]).control;
        assert!(control.is_exhausted());
        assert_eq!(control.asked(), f64::INFINITY);
        assert_eq!(control.windows(), (0, 50));
    }

    /// A disk that 16 pages of 64 hide: from 4 on nothing goes there.
    #[test]
    fn shifts_that_leave_nothing_for_the_disk_are_skipped() {
        let mut control = StallControl::new(StallMax(0.5));
        let all = f64::INFINITY;
        // Always at the bound so far, and below or above it in the last window.
        let mut window = |lately: f64| control.end_window(0.5, lately, Some(4.0));
        assert_eq!([0.375; 3].map(&mut window), [all, all, 3.0]);
        assert_eq!([0.625; 2].map(&mut window), [3.75, all]);
        assert_eq!([0.125; 3].map(window), [all, all, 2.0]);
    }

    #[test]
    fn a_bound_that_the_disk_keeps_shifts_nothing() {
        let control = plant(0.9, 0.5, 0.2, &[0.0; 100]).control;
        assert_eq!((control.shift(), control.asked()), (1.0, 1.0));
    }

    #[test]
    fn a_client_that_does_not_wait_keeps_its_bound() {
        let control = plant(0.3, 0.0, 0.0, &[0.0; 100]).control;
        assert_eq!((control.shift(), control.windows()), (1.0, (100, 0)));
    }

    #[test]
    fn what_was_missed_is_caught_up_within_limits() {
        let control = StallControl::new(StallMax(0.4));
        for (so_far, allowed) in [
            (0.4, 0.4),
            (0.35, 0.6),
            (0.0, 1.0),
            (0.42, 0.32),
            (0.9, 0.2),
        ] {
            let found = control.allowed(so_far);
            assert!((found - allowed).abs() < 1e-9, "{so_far}: {found}");
        }
    }

    /// The client computes alone at first, waits much, waits little, and rests in between.
    #[test]
    fn a_bound_is_kept_when_the_load_changes() {
        let mut client = Client::new(0.4);
        let loads = [(0.0, 0.0), (0.9, 0.2), (0.5, 0.1), (0.0, 0.0), (0.95, 0.3)];
        for (worst, best) in loads {
            for _ in 0..300 {
                client.waits(best + (worst - best) * client.share());
            }
            if worst > 0.0 {
                assert!(is_kept_and_used(0.4, client.ratio()), "{}", client.ratio());
            }
        }
    }

    /// Pages that go to the disk now are waited for 20 windows later.
    #[test]
    fn control_of_a_late_effect_swings_less_and_less() {
        for bound in [0.3, 0.5, 0.7] {
            let mut client = Client::new(bound);
            let mut shares = vec![0.0; 20];
            let mut apart = Vec::new();
            for window in 0..1000 {
                shares.push(client.share());
                let ratio = client.waits(0.1 + 0.8 * shares[window]);
                apart.push((ratio - bound).abs());
            }
            let most = |part: &[f64]| part.iter().copied().fold(0.0, f64::max);
            let (early, late) = (most(&apart[100..400]), most(&apart[700..]));
            assert!(late < 0.05 && late < early, "{bound}: {early}, {late}");
        }
    }

    /// Each waits for what both send to the disk.
    #[test]
    fn two_bounds_on_one_disk_are_both_kept() {
        let mut clients = [Client::new(0.3), Client::new(0.6)];
        for _ in 0..1000 {
            let both = clients.iter().map(Client::share).sum::<f64>() / 2.0;
            for client in &mut clients {
                client.waits(0.1 + 0.8 * client.share() * (0.5 + both));
            }
        }
        for (client, bound) in clients.iter().zip([0.3, 0.6]) {
            assert!(
                is_kept_and_used(bound, client.ratio()),
                "{}",
                client.ratio()
            );
        }
    }

    proptest! {
        #[test]
        fn shifts_stay_in_range_and_noise_breaks_no_bound_for_long(
            bound in 0.2f64..0.9,
            noise in prop::collection::vec(-0.1f64..0.1, 300),
        ) {
            let client = plant(bound, 1.0, 0.1, &noise);
            prop_assert!((1.0..=SHIFT_MAX).contains(&client.control.shift()));
            let last = client.ratio();
            prop_assert!((last - bound).abs() < 0.05, "{bound}: {last}");
        }
    }
}
