//! How near the estimated miss-ratio curve comes to replays at each of its limits. The estimator
//! gets what it would get in a live run: faults, and a scan each time that a 64th of the
//! resident pages has left.

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use undercroft_sim::Sweep;
use undercroft_sim::open::open;
use undercroft_sim::outcome::CurvePoint;
use undercroft_sim::setup::{Memory, Setup, SimRoom};

/// The curve of one run with `pages` of memory, beside replays.
fn curve(trace: &str, pages: u64, change: impl FnOnce(&mut Setup)) -> Vec<CurvePoint> {
    let mut setup = Setup {
        memory: Memory::Pages(pages),
        reclaim: "active_inactive".to_owned(),
        room: SimRoom::Ahead,
        curve: true,
        ..Setup::default()
    };
    change(&mut setup);
    let trace = open(trace).unwrap();
    let results = Sweep::single(setup).run(&trace, &mut |_| ()).unwrap();
    results.outcomes[0].clients[0].mrc.clone().unwrap()
}

/// Fails if an estimate is farther off than `percent`: of the limits at least as large as the
/// present one, and from `least` times the present one on. Estimates of few faults may be off by
/// a hundredth of those at the present limit.
fn within(curve: &[CurvePoint], pages: u64, least: f64, percent: [f64; 2]) {
    let present = curve.iter().find(|point| point.memory_pages == pages);
    let few = present.unwrap().swap_ins / 100.0;
    let mut compared = 0;
    for point in curve {
        let exact = point.swap_ins_replayed.unwrap() as f64;
        let percent = match point.memory_pages {
            size if size >= pages => percent[0],
            size if size as f64 >= least * pages as f64 => percent[1],
            _ => continue,
        };
        compared += 1;
        let off = (point.swap_ins - exact).abs();
        assert!(
            off <= (exact * percent / 100.0).max(few),
            "{point:?} is off by more than {percent} %: {curve:#?}"
        );
    }
    assert!(compared >= 8, "{curve:?}");
}

#[test]
fn zipf_is_near_at_all_limits() {
    let trace = "zipf:pages=40000,refs=1500000,theta=0.9,seed=3";
    for reclaim in ["active_inactive", "lru"] {
        let curve = curve(trace, 8192, |s| s.reclaim = reclaim.to_owned());
        within(&curve, 8192, 0.7, [5.0, 15.0]);
    }
}

/// The followed pages are few, so which rule `auto` would choose is known less well.
#[test]
fn auto_is_near_at_all_limits() {
    for trace in [
        "zipf:pages=40000,refs=1500000,theta=0.9,seed=3",
        "scan_hot:pages=40000,refs=800000,hot=3000,share=0.7,seed=5",
        "phases:pages=60000,refs=900000,phases=9,set=12000,seed=6",
    ] {
        let curve = curve(trace, 8192, |s| s.reclaim = "auto".to_owned());
        for point in &curve {
            let exact = point.swap_ins_replayed.unwrap() as f64;
            println!(
                "{trace}: {} {:.2}",
                point.memory_pages,
                point.swap_ins / exact
            );
        }
        within(&curve, 8192, 0.7, [15.0, 15.0]);
    }
}

#[test]
fn uniform_is_near_at_all_limits() {
    let curve = curve("uniform:pages=20000,refs=400000,seed=4", 8192, |_| ());
    within(&curve, 8192, 0.7, [5.0, 15.0]);
}

#[test]
fn loop_has_its_cliff_where_it_is() {
    let curve = curve("loop:pages=15000,refs=300000", 8192, |s| {
        s.reclaim = "lru".to_owned();
    });
    within(&curve, 8192, 0.5, [2.0, 2.0]);
    let cliff = curve.iter().find(|point| point.swap_ins < 1000.0).unwrap();
    assert_eq!(cliff.memory_pages, 16384, "{curve:?}");
}

#[test]
fn loop_that_just_fits_has_no_faults() {
    let curve = curve("loop:pages=9100,refs=100000", 8192, |s| {
        s.reclaim = "lru".to_owned();
        s.placement = "waterfall".parse().unwrap();
    });
    let more = curve.iter().find(|point| point.memory_pages == 9216);
    assert_eq!(more.unwrap().swap_ins_replayed, Some(0), "{more:?}");
    within(&curve, 8192, 0.5, [2.0, 2.0]);
}

#[test]
fn hot_set_beside_a_scan_is_near() {
    let trace = "scan_hot:pages=40000,refs=800000,hot=3000,share=0.7,seed=5";
    let curve = curve(trace, 8192, |_| ());
    within(&curve, 8192, 0.7, [10.0, 15.0]);
}

#[test]
fn phases_are_near() {
    let trace = "phases:pages=60000,refs=900000,phases=9,set=12000,seed=6";
    let curve = curve(trace, 8192, |_| ());
    within(&curve, 8192, 0.7, [8.0, 15.0]);
}

#[test]
fn bounds_have_no_curve_and_others_only_if_asked_for() {
    let setup = Setup {
        memory: Memory::Pages(64),
        reclaim: "belady".to_owned(),
        curve: true,
        ..Setup::default()
    };
    let trace = open("loop:pages=100,refs=1000").unwrap();
    let of = |setup: Setup| {
        let results = Sweep::single(setup).run(&trace, &mut |_| ()).unwrap();
        results.outcomes[0].clients[0].mrc.clone()
    };
    assert_eq!(of(setup), None);
    assert_eq!(of(Setup::default()), None);
}
