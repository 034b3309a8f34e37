//! How large the queue of the regular zone may be, and who uses the buffer (NVSwap §IV, Eq. 1 and
//! Algorithm 1). The regular zone is the slow device. The buffer is the fast tier above it.
//!
//! ```text
//! S(t+1) = (1 - g) * S(t) + g * S(t) * goal / observed             (1)
//! ```
//!
//! The goal is the smallest bound of the clients that use the queue. If S(t+1) would be below its
//! least size, the device cannot serve that client: it gets the buffer, and the next bound is the
//! goal.
//!
//! Differs from the paper, where its text leaves a choice:
//! - The reserve is added to the answer, not to S(t). Otherwise it would be multiplied again and
//!   again.
//! - If no bound can be served, S is its least size. The algorithm as printed leaves it below.
//! - Without an observation (no client used the queue), S and the sets stay.
//! - The paper gives no value of g.
//! - The least size is what writes need, if that is known, and not the channels: an SSD whose reads
//!   find a channel without a write keeps smaller bounds. S grows only while writes wait for it.
//!   After a goal was missed, S stays below that size, for longer each time: above it, the tail of
//!   reads jumps by the time of a write.

use undercroft_base::Nanos;

/// Bounds of the queue, in slots: requests that may be in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueLimits {
    /// Least size: the channels of the device.
    pub min: u32,
    /// Largest size.
    pub max: u32,
    /// Slots for clients without a bound, besides these.
    pub reserve: u32,
    /// How much one observation counts: above 0, up to 1.
    pub smoothing: f64,
}

impl QueueLimits {
    /// S_max of the paper.
    pub const MAX: u32 = 1024;

    /// A device with this many channels, and the paper's largest size.
    pub fn of_channels(channels: u32) -> QueueLimits {
        QueueLimits {
            min: channels.max(1),
            max: QueueLimits::MAX.max(channels),
            reserve: 0,
            smoothing: 0.5,
        }
    }

    /// The paper's least size is the device's channels: below it, a client gets the buffer. Without
    /// a buffer the queue may leave channels to reads.
    pub fn of_device(channels: u32, has_buffer: bool) -> QueueLimits {
        QueueLimits {
            min: if has_buffer { channels.max(1) } else { 1 },
            ..QueueLimits::of_channels(channels)
        }
    }
}

/// The queue of one device.
#[derive(Clone, Debug)]
pub struct Queue {
    limits: QueueLimits,
    /// S(t), between the limits.
    size: f64,
    /// Channels that writes need; `None`: unknown.
    needs: Option<Needs>,
    /// The goal was missed at this size; it holds for this many steps, and the next one for longer.
    ceiling: Option<(f64, u32)>,
    next_hold: u32,
    /// No client with a bound uses it, so nothing bounds it.
    rests: bool,
}

/// Slots that writes need.
#[derive(Clone, Copy, Debug)]
struct Needs {
    least: u32,
    waited: bool,
}

/// Steps for which S stays below a size that missed the goal: at first, and at most.
const HOLD: (u32, u32) = (8, 256);

impl Queue {
    /// A queue of the largest size. Panics if the limits exclude each other.
    pub fn new(limits: QueueLimits) -> Queue {
        assert!(
            0 < limits.min && limits.min <= limits.max,
            "a queue has a slot, and at least its least size"
        );
        assert!(limits.smoothing > 0.0 && limits.smoothing <= 1.0);
        Queue {
            limits,
            size: f64::from(limits.max),
            needs: None,
            ceiling: None,
            next_hold: HOLD.0,
            rests: false,
        }
    }

    /// Says what writes needed since the last step.
    ///
    /// * `least`: slots. * `waited`: they waited for one.
    pub fn set_needs(&mut self, least: u32, waited: bool) {
        let least = least.clamp(self.limits.min, self.limits.max);
        self.needs = Some(Needs { least, waited });
    }

    /// Whether it is said what writes need.
    pub fn counts_writes(&self) -> bool {
        self.needs.is_some()
    }

    /// Says whether no client with a bound uses it until the next step. S waits for one that does,
    /// and is no bound for others meanwhile.
    pub fn set_rests(&mut self, rests: bool) {
        self.rests = rests;
    }

    /// Writes will need this many slots at most: S begins no larger.
    pub fn begin_at(&mut self, slots: u32) {
        let (min, max) = (self.limits.min, self.limits.max);
        self.size = self.size.min(f64::from(slots.clamp(min, max)));
    }

    /// Takes a step of Algorithm 1. O(clients squared), no allocation.
    ///
    /// * `bounds`: of each client; `None` for a client that has none.
    /// * `observed`: latency of the queue since the last step.
    /// * `uses_buffer`: gets for each client whether it is in the set NS.
    pub fn step(
        &mut self,
        bounds: &[Option<Nanos>],
        observed: Option<Nanos>,
        uses_buffer: &mut [bool],
    ) {
        assert_eq!(bounds.len(), uses_buffer.len(), "a set of these clients");
        let Some(observed) = observed else {
            return;
        };
        uses_buffer.fill(false);
        let least = self.needs.map_or(self.limits.min, |needs| needs.least);
        let (min, max) = (f64::from(least), f64::from(self.limits.max));
        let mut next = max;
        while let Some(first) = most_sensitive(bounds, uses_buffer) {
            next = self.after(bounds[first].unwrap_or_default(), observed);
            if next >= min {
                break;
            }
            uses_buffer[first] = true;
        }
        let next = next.clamp(min, max);
        self.size = match self.needs {
            Some(needs) => self.held_down(next, needs).max(min),
            None => next,
        };
    }

    /// A size that is no larger than writes need, and below one that missed the goal lately.
    fn held_down(&mut self, next: f64, needs: Needs) -> f64 {
        if next < self.size {
            self.ceiling = Some(((self.size.floor() - 1.0).max(1.0), self.next_hold));
            self.next_hold = (2 * self.next_hold).min(HOLD.1);
            return next;
        }
        self.ceiling = match self.ceiling {
            Some((size, left)) if left > 1 => Some((size, left - 1)),
            _ => None,
        };
        let ceiling = self.ceiling.map_or(next, |(size, _)| size);
        let wanted = if needs.waited { next } else { self.size };
        wanted.min(ceiling.max(self.size))
    }

    /// Equation 1.
    fn after(&self, goal: Nanos, observed: Nanos) -> f64 {
        let g = self.limits.smoothing;
        let ratio = goal.0 as f64 / observed.0.max(1) as f64;
        (1.0 - g) * self.size + g * (self.size * ratio)
    }

    /// S(t): requests of clients with a bound, and the pages of one reclaim batch.
    pub fn slots(&self) -> u32 {
        if self.rests {
            self.limits.max
        } else {
            self.size as u32
        }
    }

    /// S(t) with the reserve.
    pub fn slots_in_all(&self) -> u32 {
        self.slots() + self.limits.reserve
    }

    /// True if it cannot be made smaller.
    pub fn is_least(&self) -> bool {
        self.slots() == self.limits.min
    }
}

/// The client with the smallest bound that does not use the buffer yet.
fn most_sensitive(bounds: &[Option<Nanos>], uses_buffer: &[bool]) -> Option<usize> {
    let clients = bounds.iter().zip(uses_buffer).enumerate();
    let left = clients.filter(|(_, (_, uses))| !**uses);
    let left = left.filter_map(|(at, (bound, _))| bound.map(|bound| (bound, at)));
    left.min().map(|(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn us(micros: u64) -> Nanos {
        Nanos(micros * 1000)
    }

    fn queue(min: u32, max: u32, reserve: u32, size: f64) -> Queue {
        let limits = QueueLimits {
            min,
            max,
            reserve,
            smoothing: 0.5,
        };
        Queue {
            size,
            ..Queue::new(limits)
        }
    }

    /// (S(t), observed) -> (NS, S(t+1)), for bounds of 1000, 500 and 300 us, as in the paper's
    /// figure 5. By hand, with g = 1/2: S * (1 + goal / observed) / 2.
    #[test]
    fn steps_are_those_worked_by_hand() {
        let bounds = [1000, 500, 300].map(|micros| Some(us(micros)));
        for (size, observed, sets, next) in [
            // 32 * (1 + 300/600) / 2 = 24: the device serves all.
            (32.0, 600, [false; 3], 24.0),
            // Exactly the goal: nothing changes.
            (32.0, 300, [false; 3], 32.0),
            // Half the goal: 32 * (1 + 2) / 2 = 48.
            (32.0, 150, [false; 3], 48.0),
            // 12 * (1 + 300/1200) / 2 = 7.5 < 9; with 500: 12 * (1 + 5/12) / 2 = 8.5 < 9;
            // with 1000: 12 * (1 + 10/12) / 2 = 11.
            (12.0, 1200, [false, true, true], 11.0),
            // 9 * (1 + 300/375) / 2 = 8.1 < 9; with 500: 9 * (1 + 4/3) / 2 = 10.5.
            (9.0, 375, [false, false, true], 10.5),
            // No bound can be served: 9 * (1 + 0.3/2) / 2, .. , 9 * (1 + 1/2) / 2 are all below 9.
            (9.0, 2000, [true; 3], 9.0),
            // 1000 * (1 + 3) / 2 = 2000, and the largest size is 1024.
            (1000.0, 100, [false; 3], 1024.0),
        ] {
            let mut of = queue(9, 1024, 4, size);
            let mut found = [true, false, true];
            of.step(&bounds, Some(us(observed)), &mut found);
            assert_eq!((found, of.size), (sets, next), "{size}, {observed} us");
            assert_eq!(of.slots(), next as u32);
            assert_eq!(of.slots_in_all(), next as u32 + 4);
        }
    }

    #[test]
    fn without_an_observation_nothing_changes() {
        let mut of = queue(4, 64, 0, 20.0);
        let mut found = [true, false];
        of.step(&[Some(us(1)), None], None, &mut found);
        assert_eq!((found, of.size), ([true, false], 20.0));
    }

    #[test]
    fn clients_without_a_bound_have_no_say_and_no_buffer() {
        let mut of = queue(4, 64, 0, 5.0);
        let mut found = [true; 3];
        of.step(&[None, Some(us(10)), None], Some(us(1000)), &mut found);
        assert_eq!((found, of.size), ([false, true, false], 4.0));
        of.step(&[None; 3], Some(us(1000)), &mut found);
        assert_eq!((found, of.size), ([false; 3], 64.0), "there is no goal");
    }

    proptest! {
        /// Any history stays within the limits. A client that uses the buffer has no larger bound
        /// than one that does not.
        #[test]
        fn sizes_stay_within_limits_and_the_most_sensitive_leave_first(
            bounds in prop::collection::vec(prop::option::of(1u64..5_000), 1..6),
            observed in prop::collection::vec(0u64..10_000, 1..50),
            (min, more) in (1u32..40, 0u32..2_000),
        ) {
            let mut of = Queue::new(QueueLimits {
                min,
                max: min + more,
                reserve: 0,
                smoothing: 0.3,
            });
            let bounds: Vec<_> = bounds.into_iter().map(|bound| bound.map(us)).collect();
            let mut found = vec![false; bounds.len()];
            for micros in observed {
                of.step(&bounds, Some(us(micros)), &mut found);
                prop_assert!((min..=min + more).contains(&of.slots()));
                let of_set = |set: bool| {
                    let members = bounds.iter().zip(&found).filter(move |(_, uses)| **uses == set);
                    members.filter_map(|(bound, _)| *bound)
                };
                let (most, least) = (of_set(true).max(), of_set(false).min());
                prop_assert!(most.is_none() || least.is_none() || most <= least);
            }
        }
    }
}
