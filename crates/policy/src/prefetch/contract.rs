//! The contract of [`Prefetch`]: every implementation passes it.

use proptest::prelude::*;
use undercroft_base::{PageCount, SpaceId, ThreadId, VirtPage};

use super::neighbours::{Now, REACH};
use super::{FaultSeen, NAMES, WINDOW_MAX, by_name};
use undercroft_seeded::Random;

/// Page numbers near the ends of the number space, in a heap, and anywhere.
fn page(random: &mut Random, last: u64) -> u64 {
    match random.below(6) {
        0 => random.bits(),
        1 => random.below(4),
        2 => u64::MAX - random.below(4),
        3 => 0x7_f000_0000 + random.below(1000),
        _ => last.wrapping_add(random.below(9)).wrapping_sub(4),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_prefetcher_bounds_its_window_for_any_fault(seed: u64, faults in 0..3000usize, threads in 1..200u64) {
        for name in NAMES {
            let Some(mut prefetch) = by_name(name).expect("a known policy") else {
                continue;
            };
            let mut random = Random::new(seed);
            let (mut last, mut arrivals) = (0, 0);
            for _ in 0..faults {
                last = page(&mut random, last);
                let fault = FaultSeen {
                    space: SpaceId(random.below(1 + threads / 8) as u32),
                    page: VirtPage(last),
                    thread: ThreadId(random.below(threads) as u32),
                    first_touch: random.below(2) == 0,
                };
                let window = prefetch.on_fault(fault);
                prop_assert!(window.count <= WINDOW_MAX);
                prop_assert!(window.count == 0 || window.stride != 0);
                arrivals += 1 + u64::from(window.count);
                if fault.first_touch || window.count > 0 {
                    continue;
                }
                let around = random.bits() as u32 & !(1 << REACH) & ((1 << (2 * REACH + 1)) - 1);
                let now = Now {
                    arrivals,
                    resident_max: PageCount(random.below(4096)),
                    stored: PageCount(random.below(4096)),
                };
                let mut looks = 0;
                let along = prefetch.off_trend(fault, now, &mut || {
                    looks += 1;
                    around
                });
                prop_assert!(looks <= 1 && along.pages & !around == 0);
                prop_assert!(along.used <= along.pages.count_ones() + 1);
                prop_assert!(along.pages == 0 || looks == 1);
                arrivals += u64::from(along.pages.count_ones());
            }
        }
    }
}

#[test]
fn every_prefetcher_but_none_follows_a_scan_and_all_but_window_ignore_random_faults() {
    for name in NAMES {
        let Some(mut prefetch) = by_name(name).expect("a known policy") else {
            continue;
        };
        let mut fault = FaultSeen {
            space: SpaceId(1),
            page: VirtPage(1 << 20),
            thread: ThreadId(1),
            first_touch: false,
        };
        let mut faults = 0;
        while fault.page.0 < (1 << 20) + 4096 {
            let window = prefetch.on_fault(fault);
            fault.page.0 += 1 + u64::from(window.count);
            faults += 1;
        }
        assert!(faults <= 4096 / 8 + 10, "{name}: {faults}");
        let mut random = Random::new(9);
        let mut brought = 0;
        for _ in 0..10_000 {
            fault.page.0 = random.below(1 << 24);
            brought += prefetch.on_fault(fault).count;
        }
        assert!(
            brought < 100 || *name == "window",
            "{name}: {brought} pages brought at random faults"
        );
    }
}

#[test]
fn unknown_prefetcher_error_lists_the_names() {
    let error = by_name("x").err().expect("no such policy").to_string();
    assert_eq!(
        error,
        "there is no prefetch policy `x`; use one of: majority, readahead, window, none"
    );
}
