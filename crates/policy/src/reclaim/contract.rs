//! The contract of [`Reclaim`]: every implementation passes it.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use undercroft_base::{CHUNK_PAGES, PageCount, PageNo};

use super::{Arrival, NAMES, Reclaim, Verdict, by_name};
use undercroft_seeded::Random;

fn arrival(number: u64) -> Arrival {
    match number % 8 {
        0 | 1 => Arrival::FirstTouch,
        2 => Arrival::Prefetch,
        3 => Arrival::Returned,
        _ => Arrival::SwapIn {
            distance: PageCount(1 << (number / 8 % 20)),
        },
    }
}

/// Calls `select` once and checks every rule. Returns the victims.
fn checked_select(
    policy: &mut dyn Reclaim,
    members: &HashSet<u32>,
    want: usize,
    scan_max: usize,
    skip: &dyn Fn(u32) -> bool,
) -> Vec<PageNo> {
    let mut judged: HashMap<u32, Verdict> = HashMap::new();
    let before = policy.shown().len;
    let mut out = vec![PageNo(u32::MAX)];
    let mut verdict = |page: PageNo| {
        assert!(members.contains(&page.0), "{page:?} is not resident");
        let verdict = if skip(page.0) {
            Verdict::Skip
        } else {
            Verdict::Take
        };
        let again = judged.insert(page.0, verdict);
        assert_eq!(again, None, "{page:?} was looked at twice");
        verdict
    };
    policy.select(want, scan_max, &mut verdict, &mut out);
    assert_eq!(out[0], PageNo(u32::MAX), "select appends");
    out.remove(0);
    assert!(judged.len() <= scan_max, "more looks than scan_max");
    assert!(out.len() <= want, "more victims than wanted");
    let taken = judged.values().filter(|&&verdict| verdict == Verdict::Take);
    assert_eq!(out.len(), taken.count());
    for page in &out {
        assert_eq!(judged.get(&page.0), Some(&Verdict::Take), "{page:?}");
    }
    let left = before.0 - out.len() as u64;
    assert_eq!(policy.shown().len, PageCount(left), "victims are taken out");
    out
}

/// Random operations against a set of the resident pages.
fn play(name: &str, seed: u64, ops: usize, pages: u64) {
    let mut policy = by_name(name).expect("a known policy");
    let mut random = Random::new(seed);
    let mut members: HashSet<u32> = HashSet::new();
    // Few pages of many chunks, or all of few.
    let apart = [1, 8][seed as usize % 2];
    for _ in 0..ops {
        let page = random.below(pages) as u32 * apart;
        match random.below(10) {
            0..4 => {
                if members.insert(page) {
                    policy.insert(PageNo(page), arrival(random.bits()));
                }
            }
            4..6 => {
                if members.remove(&page) {
                    policy.remove(PageNo(page));
                }
            }
            6..9 => policy.touch(PageNo(page), random.below(2) == 0),
            _ => {
                let (want, scan_max) = (random.below(20) as usize, random.below(60) as usize);
                let salt = random.bits();
                let skip = move |page: u32| Random::new(u64::from(page) ^ salt).below(3) == 0;
                for victim in checked_select(&mut *policy, &members, want, scan_max, &skip) {
                    members.remove(&victim.0);
                    if random.below(2) == 0 {
                        policy.insert(victim, Arrival::Returned);
                        members.insert(victim.0);
                    }
                }
            }
        }
        assert_eq!(policy.shown().len, PageCount(members.len() as u64));
    }
    // After enough calls every page was named: none is lost, and none is named that is not
    // resident.
    while !members.is_empty() {
        // Two laps: one may be spent on second chances.
        let scan_max = 2 * members.len() + 2;
        let victims = checked_select(&mut *policy, &members, usize::MAX, scan_max, &|_| false);
        assert!(
            !victims.is_empty(),
            "{} resident pages are lost",
            members.len()
        );
        for victim in victims {
            assert!(members.remove(&victim.0));
        }
    }
    assert_eq!(policy.shown().len, PageCount(0));
}

#[test]
fn every_policy_keeps_the_contract_for_100_000_operations() {
    for name in NAMES {
        println!("{name}: seeds 11, 12");
        play(name, 11, 100_000, 3000);
        play(name, 12, 100_000, 1500);
    }
}

#[test]
fn every_policy_survives_skips_only() {
    for name in NAMES {
        let mut policy = by_name(name).expect("a known policy");
        let members: HashSet<u32> = (0..100).collect();
        for &page in &members {
            policy.insert(PageNo(page), arrival(u64::from(page)));
            policy.touch(PageNo(page), true);
        }
        for _ in 0..3 {
            let victims = checked_select(&mut *policy, &members, 10, 1000, &|_| true);
            assert!(victims.is_empty());
        }
        let victims = checked_select(&mut *policy, &members, 10, 1000, &|page| page != 42);
        assert_eq!(victims, [PageNo(42)], "{name}");
    }
}

#[test]
fn every_policy_does_nothing_when_empty_or_asked_for_nothing() {
    for name in NAMES {
        let mut policy = by_name(name).expect("a known policy");
        assert!(checked_select(&mut *policy, &HashSet::new(), 10, 10, &|_| false).is_empty());
        policy.touch(PageNo(5), true);
        policy.insert(PageNo(5), Arrival::FirstTouch);
        let members = HashSet::from([5]);
        assert!(checked_select(&mut *policy, &members, 0, 10, &|_| false).is_empty());
        assert!(checked_select(&mut *policy, &members, 10, 0, &|_| false).is_empty());
        assert_eq!(
            checked_select(&mut *policy, &members, 10, 10, &|_| false),
            [PageNo(5)]
        );
    }
}

#[test]
fn every_policy_tells_what_metadata_it_holds() {
    for name in NAMES {
        let mut policy = by_name(name).expect("a known policy");
        assert_eq!(policy.shown().metadata.0, 0, "{name}");
        let pages = 64 * CHUNK_PAGES;
        for page in 0..pages {
            // Far from each other.
            policy.insert(PageNo(page * 7919 % pages), Arrival::FirstTouch);
        }
        // At least two page numbers of 32 bits: the ledger names 16 TiB.
        let a_page = policy.shown().metadata.0 as f64 / f64::from(pages);
        assert!((8.0..8.9).contains(&a_page), "{name}: {a_page}");
    }
}

#[test]
fn every_policy_panics_at_a_second_remove() {
    for name in NAMES {
        let outcome = std::panic::catch_unwind(|| {
            let mut policy = by_name(name).expect("a known policy");
            policy.insert(PageNo(5), Arrival::FirstTouch);
            policy.remove(PageNo(5));
            policy.remove(PageNo(5));
        });
        assert!(outcome.is_err(), "{name}");
    }
}

#[test]
fn unknown_policy_error_lists_the_names() {
    let error = by_name("mru").err().expect("no such policy").to_string();
    assert_eq!(
        error,
        "there is no reclaim policy `mru`; use one of: auto, active_inactive, lru"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_policy_keeps_the_contract(seed: u64, ops in 0..1500usize, pages in 1..600u64) {
        for name in NAMES {
            play(name, seed, ops, pages);
        }
    }
}
