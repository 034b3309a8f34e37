//! How much of the time a client waits for its pages, as the kernel's pressure stall information
//! tells it (PSI, `some`): a second in which three threads wait is one second.

use std::collections::VecDeque;

use undercroft_base::Nanos;

/// Separate stretches of waiting that are remembered: 64 KiB. A wait that began before the oldest
/// of them counts from its end. While one thread waits for a disk, others end many waits for an
/// SSD.
const REMEMBERED: usize = 4096;

/// How often averages are taken, as in the kernel.
const PERIOD: Nanos = Nanos(2_000_000_000);

/// Seconds over which the averages decay.
const SPANS: [f64; 3] = [10.0, 60.0, 300.0];

/// The time in which at least one thread waited.
#[derive(Clone, Debug)]
pub struct Waits {
    total: Nanos,
    /// Stretches that do not touch each other, oldest first.
    recent: VecDeque<(u64, u64)>,
    /// Before this nothing is known any more.
    forgotten: u64,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits {
            total: Nanos(0),
            recent: VecDeque::with_capacity(REMEMBERED + 1),
            forgotten: 0,
        }
    }
}

impl Waits {
    /// A thread waited from one moment to another. Waits come in about the order of their ends.
    /// On the fault path: O(1) amortised while they do, allocates nothing.
    pub fn add(&mut self, from: Nanos, to: Nanos) {
        let (mut start, mut end) = (from.0.max(self.forgotten), to.0);
        if start >= end {
            return;
        }
        // What it touches is at the back, where the latest stretches are.
        let mut at = self.recent.len();
        while at > 0 && self.recent[at - 1].0 > end {
            at -= 1;
        }
        let after = at;
        let mut known = 0;
        while at > 0 && self.recent[at - 1].1 >= start {
            at -= 1;
            let (first, last) = self.recent[at];
            known += last - first;
            (start, end) = (start.min(first), end.max(last));
        }
        self.total.0 += end - start - known;
        if at == after {
            self.recent.insert(at, (start, end));
        } else {
            self.recent[at] = (start, end);
            self.recent.drain(at + 1..after);
        }
        if self.recent.len() > REMEMBERED
            && let Some((_, last)) = self.recent.pop_front()
        {
            self.forgotten = last;
        }
    }

    /// The sum since the start.
    pub fn total(&self) -> Nanos {
        self.total
    }
}

/// The part of the time in which a thread waited, lately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    taken: Nanos,
    total: Nanos,
    averages: [f64; 3],
}

impl Pressure {
    /// Takes the averages if it is time: every two seconds.
    ///
    /// * `now`: since the start.   * `total`: [`Waits::total`].
    pub fn note(&mut self, now: Nanos, total: Nanos) {
        let passed = now.since(self.taken);
        if passed < PERIOD {
            return;
        }
        let part = (total.since(self.total).seconds() / passed.seconds()).min(1.0);
        for (average, span) in self.averages.iter_mut().zip(SPANS) {
            let kept = (-passed.seconds() / span).exp();
            *average = *average * kept + part * (1.0 - kept);
        }
        (self.taken, self.total) = (now, total);
    }

    /// Parts, 0 to 1, over about 10, 60 and 300 seconds.
    pub fn averages(&self) -> [f64; 3] {
        self.averages
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn total(waits: &[(u64, u64)]) -> u64 {
        let mut sum = Waits::default();
        for (from, to) in waits {
            sum.add(Nanos(*from), Nanos(*to));
        }
        sum.total().0
    }

    #[test]
    fn waits_that_overlap_count_once() {
        assert_eq!(total(&[(0, 10), (5, 15), (20, 30)]), 25);
        assert_eq!(total(&[(20, 30), (40, 50), (10, 60)]), 50);
        assert_eq!(total(&[(10, 20), (12, 15), (20, 25)]), 15);
        assert_eq!(total(&[(10, 20), (0, 5), (5, 5), (9, 3)]), 15);
    }

    #[test]
    fn a_long_wait_counts_whole_beside_many_short_ones() {
        let mut waits: Vec<(u64, u64)> = (0..500).map(|at| (at * 20, at * 20 + 2)).collect();
        waits.push((0, 10_000));
        assert_eq!(total(&waits), 10_000);
    }

    #[test]
    fn no_more_stretches_are_remembered_than_there_is_room_for() {
        let mut sum = Waits::default();
        let most = REMEMBERED as u64 + 100;
        for at in 0..most {
            sum.add(Nanos(at * 20), Nanos(at * 20 + 2));
        }
        assert_eq!(sum.total(), Nanos(most * 2));
        assert_eq!(sum.recent.len(), REMEMBERED);
        sum.add(Nanos(0), Nanos(1)); // before all that is remembered
        assert_eq!(sum.total(), Nanos(most * 2));
    }

    proptest! {
        /// A few threads, each of which waits again and again.
        #[test]
        fn total_is_the_union(
            steps in prop::collection::vec((0usize..4, 1u64..50, 0u64..50), 1..200)
        ) {
            let mut free = [0u64; 4];
            let mut waits: Vec<(u64, u64)> = Vec::new();
            for (thread, takes, pause) in steps {
                let from = free[thread] + pause;
                // The first thread waits for a slower device.
                let takes = if thread == 0 { takes * 100 } else { takes };
                waits.push((from, from + takes));
                free[thread] = from + takes;
            }
            waits.sort_by_key(|(_, to)| *to);
            let mut union = 0;
            let (mut by_start, mut covered) = (waits.clone(), 0);
            by_start.sort_unstable();
            for (from, to) in by_start {
                union += to.saturating_sub(from.max(covered));
                covered = covered.max(to);
            }
            let found = total(&waits);
            prop_assert_eq!(found, union);
        }
    }

    #[test]
    fn averages_come_near_the_part_that_is_waited_and_fall_again() {
        let mut pressure = Pressure::default();
        let second = 1_000_000_000;
        let (mut now, mut waited) = (0, 0);
        let mut pass = |pressure: &mut Pressure, seconds: u64, tenths: u64| {
            for _ in 0..seconds {
                now += second;
                waited += second / 10 * tenths;
                pressure.note(Nanos(now), Nanos(waited));
            }
        };
        pass(&mut pressure, 60, 4);
        let [ten, sixty, most] = pressure.averages();
        assert!((ten - 0.4).abs() < 0.01, "{ten}");
        assert!(
            (sixty - 0.4 * (1.0 - (-1f64).exp())).abs() < 0.01,
            "{sixty}"
        );
        assert!(most < 0.1 && most > 0.05, "{most}");
        pass(&mut pressure, 60, 0);
        assert!(pressure.averages()[0] < 0.01);
    }
}
