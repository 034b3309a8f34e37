//! The sample, the bounds, and what a mini counts. How near the curve comes to replays at each
//! limit: `sim/tests/simulator/mrc.rs`.

use super::*;
use crate::place::{LatencyClass, TierState};

fn no_room(_: PageCount) -> PageCount {
    PageCount(0)
}

fn estimator(limit: u64) -> Estimator {
    let lru = "lru".parse().expect("a policy");
    Estimator::new(&lru, &PlacementName::default(), PageCount(limit), no_room)
}

fn event(page: u64, what: What) -> Event {
    Event {
        page: PageNo(page as u32),
        what,
    }
}

const NEW: What = What::New { pages: 1 };
const LOADED: What = What::Loaded {
    pages: 1,
    demanded: true,
};

/// A program that goes round `pages` under an LRU limit: each use is a fault, or none is.
fn loop_over(estimator: &mut Estimator, pages: u64, rounds: u64, limit: u64) -> u64 {
    let mut faults = 0;
    let mut events = Vec::new();
    for round in 0..rounds {
        for page in 0..pages {
            let what = match round {
                0 => NEW,
                _ if pages > limit => LOADED,
                _ => What::Used,
            };
            faults += u64::from(what == LOADED);
            if estimator.sampling().takes(PageNo(page as u32)) {
                events.push(event(page, what));
            }
        }
        estimator.feed(&events, &Tiers::NONE);
        events.clear();
    }
    faults
}

#[test]
fn sampling_takes_exactly_one_page_of_each_block_and_a_part_of_the_larger_sample() {
    for shift in 0..12 {
        let (all, fewer) = (Sampling { shift }, Sampling { shift: shift + 1 });
        let mut first = 0;
        for block in 0..50u32 {
            let pages = (block << shift)..((block + 1) << shift);
            let taken: Vec<_> = pages.filter(|page| all.takes(PageNo(*page))).collect();
            assert_eq!(taken.len(), 1, "one in {}", all.one_in());
            first += u32::from(taken[0] & 1 == 0);
        }
        assert!(
            shift == 0 || (10..=40).contains(&first),
            "{first} of 50 even"
        );
        for page in (0..10_000).map(PageNo) {
            assert!(all.takes(page) || !fewer.takes(page), "{page:?}");
        }
    }
}

#[test]
fn loop_larger_than_the_limit_fits_where_it_fits() {
    let (limit, pages, rounds) = (40_000, 55_000, 6);
    let mut estimator = estimator(limit);
    let faults = loop_over(&mut estimator, pages, rounds, limit);
    for point in estimator.curve(faults).points {
        let fits = point.limit.pages_floor().0 >= pages;
        let want = if fits { 0.0 } else { faults as f64 };
        let error = (point.faults - want).abs();
        assert!(error <= want * 0.01, "{point:?}, {want}");
        assert!(point.least <= want && point.most >= Some(want), "{point:?}");
    }
}

#[test]
fn loop_that_fits_is_a_fault_a_scan_where_it_does_not() {
    let (limit, pages) = (40_000, 36_000);
    let mut estimator = estimator(limit);
    loop_over(&mut estimator, pages, 6, limit);
    for point in estimator.curve(0).points {
        let fits = point.limit.pages_floor().0 >= pages;
        let want = if fits { 0.0 } else { (pages * 5) as f64 };
        assert!((point.faults - want).abs() <= want * 0.01, "{point:?}");
        assert_eq!(point.most.is_none(), !fits, "scans show a part: {point:?}");
    }
}

#[test]
fn pages_that_came_together_are_parts_of_one_fault() {
    let mut estimator = estimator(64);
    let what = What::Loaded {
        pages: 4,
        demanded: false,
    };
    let all: Vec<_> = (0..400).map(|page| event(page, NEW)).collect();
    estimator.feed(&all, &Tiers::NONE);
    let back: Vec<_> = (0..200).map(|page| event(page, what)).collect();
    estimator.feed(&back, &Tiers::NONE);
    let present = estimator.minis[PRESENT].faults();
    assert_eq!(present, 50.0);
}

#[test]
fn dropped_page_makes_room_and_is_no_fault_when_it_is_new_again() {
    let mut estimator = estimator(64);
    let fill = |from: u64| (from..from + 64).map(|page| event(page, NEW));
    let events: Vec<_> = fill(0)
        .chain((0..64).map(|page| event(page, What::Gone)))
        .chain(fill(64))
        .chain(fill(0))
        .collect();
    estimator.feed(&events, &Tiers::NONE);
    let curve = estimator.curve(0);
    assert!(curve.points.iter().all(|point| point.faults == 0.0));
    assert_eq!(curve.followed, PageCount(128));
    let last: Vec<_> = (64..128).map(|page| event(page, What::Used)).collect();
    estimator.feed(&last, &Tiers::NONE);
    assert_eq!(estimator.minis[PRESENT].faults(), 64.0, "they had to leave");
}

/// A pool of at most half of a limit of `limit` pages, four copies in a page of it.
fn pool(limit: u64, latency: LatencyClass) -> TierState {
    TierState {
        capacity: PageCount(limit / 2).bytes(),
        dram: PageCount(256).bytes(),
        copies: PageCount(1024),
        packed: PageCount(256).bytes(),
        load_ns: 3_000,
        demotes: true,
        ..TierState::empty(latency)
    }
}

#[test]
fn copies_take_room_only_as_far_as_there_are_any() {
    let mut estimator = estimator(64);
    let all: Vec<_> = (0..100).map(|page| event(page, NEW)).collect();
    let tiers = Tiers::new(&[pool(64, LatencyClass::Memory)], 0.0);
    for _ in 0..8 {
        estimator.feed(&all, &tiers);
    }
    // 128 pages hold all; 64 hold 50 and 14 pages with 56 copies, or so.
    let here = |at: usize| estimator.minis[at].here();
    assert_eq!(here(9), 100);
    assert!((48..=52).contains(&here(PRESENT)), "{}", here(PRESENT));
}

/// Each limit has its own split: where a loop fits without copies, they get nothing; where it is
/// far from fitting and a device is slow, copies get what they may.
#[test]
fn each_limit_decides_how_much_copies_have() {
    let (limit, pages) = (40_000, 44_000);
    let device = TierState {
        capacity: Bytes(1 << 40),
        load_ns: 80_000,
        latency: LatencyClass::Device,
        demotes: false,
        ..pool(limit, LatencyClass::Device)
    };
    let tiers = Tiers::new(&[pool(limit, LatencyClass::Memory), device], 0.0);
    let mut estimator = estimator(limit);
    for round in 0..40 {
        let what = if round == 0 { NEW } else { LOADED };
        let events: Vec<_> = (0..pages)
            .filter(|page| estimator.sampling().takes(PageNo(*page as u32)))
            .map(|page| event(page, what))
            .collect();
        estimator.feed(&events, &tiers);
    }
    let dram = |at: usize| estimator.minis[at].dram_pages() / estimator.minis[at].limit.0 as f64;
    assert!(dram(6) < 0.05, "it fits in 50,000 pages: {}", dram(6));
    assert!(dram(0) > 0.3, "it needs twice as many: {}", dram(0));
}

/// After a takeover: pages come back that were never seen to arrive.
#[test]
fn pages_that_were_out_before_they_were_followed_are_no_faults_above_the_limit() {
    let mut estimator = estimator(64);
    let all: Vec<_> = (0..80).map(|page| event(page, LOADED)).collect();
    for _ in 0..2 {
        estimator.feed(&all, &Tiers::NONE);
    }
    let faults = |at: usize| estimator.minis[at].faults();
    assert_eq!(faults(PRESENT), 160.0);
    assert_eq!(faults(7), 0.0, "96 pages hold all");
    assert_eq!(faults(5), 80.0, "72 pages do not");
}

#[test]
fn sample_and_memory_are_bounded() {
    let mut estimator = estimator(64);
    assert_eq!(estimator.sampling().one_in(), 1);
    for start in (0..400_000u64).step_by(1000) {
        let pages = start..start + 1000;
        let events: Vec<_> = pages.map(|page| event(page, NEW)).collect();
        estimator.feed(&events, &Tiers::NONE);
    }
    let curve = estimator.curve(0);
    assert!(curve.followed.0 <= PAGES_MAX as u64 + 1, "{curve:?}");
    let now = estimator.numbers.len() as u64;
    assert!(now * curve.one_in >= 390_000, "{now}, {curve:?}");
    let bytes = estimator.metadata_bytes();
    assert!(bytes < 4 << 20, "{bytes}");
}

#[test]
fn tiers_in_memory_are_one_pool_and_its_copies_are_as_large_as_measured() {
    let one = pool(4096, LatencyClass::Memory);
    let device = pool(4096, LatencyClass::Device);
    let limit = PageCount(4096);
    let away = |tiers: &[TierState]| {
        let mut away = Away::new(&PlacementName::default(), limit, limit);
        away.set_tiers(&Tiers::new(tiers, 0.0), 4, 0.0);
        for page in 0..64 {
            away.left(PageNo(page), page + 1, |page| page.0 + 1);
        }
        away.dram_pages()
    };
    assert_eq!(away(&[one, one, device]), 64.0, "256 copies, 4 in a page");
    assert_eq!(away(&[device]), 0.0);
}
