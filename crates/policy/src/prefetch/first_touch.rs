//! Gives first touches a window of their own, whatever policy loads pages.
//!
//! Zero pages that are mapped ahead cost no read. So the program's stream of first touches
//! ([`Majority`]) decides how many come along, and the policy for loads does not
//! (docs/design/0007).

use super::majority::Majority;
use super::neighbours::{Along, Around, Now};
use super::{FaultSeen, Prefetch, PrefetchName, Window};

/// A policy for loads, and the trend for first touches.
pub struct FirstTouches {
    loads: Box<dyn Prefetch>,
    trend: Majority,
}

impl FirstTouches {
    /// The policy of this name, with the trend for first touches. `majority` has it already, and
    /// under `none` no page comes along: both stay as they are.
    pub fn beside(name: &PrefetchName) -> Option<Box<dyn Prefetch>> {
        let loads = name.make()?;
        if name.to_string() == "majority" {
            return Some(loads);
        }
        let trend = Majority::trend_alone();
        Some(Box::new(FirstTouches { loads, trend }))
    }
}

impl Prefetch for FirstTouches {
    fn on_fault(&mut self, fault: FaultSeen) -> Window {
        if fault.first_touch {
            self.trend.on_fault(fault)
        } else {
            self.loads.on_fault(fault)
        }
    }

    fn off_trend(&mut self, fault: FaultSeen, now: Now, look: &mut dyn FnMut() -> Around) -> Along {
        self.loads.off_trend(fault, now, look)
    }
}

#[cfg(test)]
mod tests {
    use super::super::NAMES;
    use super::*;
    use undercroft_base::{SpaceId, ThreadId, VirtPage};

    fn brought(name: &str, first_touch: bool) -> u32 {
        let Some(mut policy) = FirstTouches::beside(&name.parse().expect("a policy")) else {
            return 0;
        };
        let (mut page, mut brought) = (1 << 20, 0);
        for _ in 0..50 {
            let window = policy.on_fault(FaultSeen {
                space: SpaceId(1),
                page: VirtPage(page),
                thread: ThreadId(1),
                first_touch,
            });
            brought += window.count;
            page += u64::from(window.count) + 1;
        }
        brought
    }

    #[test]
    fn first_touches_have_the_same_window_under_every_policy_that_prefetches() {
        let of = |name: &str| brought(name, true);
        for name in NAMES.iter().filter(|name| **name != "none") {
            assert_eq!(of(name), of("majority"), "{name}");
        }
        assert_eq!(of("none"), 0);
        assert!(
            brought("readahead", false) < of("readahead"),
            "loads differ"
        );
    }
}
