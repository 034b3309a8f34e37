//! Miss-ratio curves against LRU itself, and the sampled ones against the exact ones.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::{BTreeMap, HashMap};

use undercroft_references::{Analysis, Generator, PageTrace, Sampling};

fn analysis(spec: &str, sampling: Sampling) -> Analysis {
    let generator = Generator::new(spec.parse().unwrap());
    let mut analysis = Analysis::new(&generator.header(), 12, sampling).unwrap();
    for reference in generator {
        analysis.add(reference).unwrap();
    }
    analysis
}

/// Misses of an LRU memory of `pages` pages.
fn lru_misses(trace: &PageTrace, pages: usize) -> u64 {
    let mut used: BTreeMap<u64, u32> = BTreeMap::new();
    let mut at: HashMap<u32, u64> = HashMap::new();
    let mut misses = 0;
    for (time, entry) in trace.entries.iter().enumerate() {
        match at.insert(entry.page, time as u64) {
            Some(before) => {
                used.remove(&before);
            }
            None => {
                misses += 1;
                if at.len() > pages {
                    let (_, victim) = used.pop_first().unwrap();
                    at.remove(&victim);
                }
            }
        }
        used.insert(time as u64, entry.page);
    }
    misses
}

#[test]
fn exact_curve_is_lru_at_every_size() {
    for spec in [
        "zipf:pages=500,refs=20000,theta=0.8",
        "loop:pages=100,refs=5000",
        "scan_hot:pages=400,hot=50,refs=20000",
        "phases:pages=1000,set=60,phases=5,refs=20000+loop:pages=80,refs=3000",
    ] {
        let generator = Generator::new(spec.parse().unwrap());
        let trace = PageTrace::from_references(generator.header(), generator, 12, false).unwrap();
        let curve = analysis(spec, Sampling::Exact).distances().curve();
        for pages in [1, 2, 10, 49, 50, 51, 99, 100, 101, 250, 400, 2000] {
            let misses = lru_misses(&trace, pages);
            let expected = misses as f64 / trace.entries.len() as f64;
            let got = curve.miss_ratio(pages as u64);
            assert!(
                (got - expected).abs() < 1e-9,
                "{spec}, {pages} pages: {got}, LRU {expected}"
            );
        }
        assert_eq!(curve.miss_ratio(0), 1.0);
    }
}

#[test]
fn a_loop_hits_only_when_all_of_it_fits() {
    let analysis = analysis("loop:pages=100,refs=1000", Sampling::Exact);
    let curve = analysis.distances().curve();
    assert_eq!(curve.miss_ratio(99), 1.0);
    assert_eq!(curve.miss_ratio(100), 0.1);
}

#[test]
fn sampled_curves_are_near_the_exact_one() {
    let spec = "zipf:pages=50000,refs=500000,theta=0.9,seed=11";
    let exact = analysis(spec, Sampling::Exact).distances().curve();
    for (sampling, off_max) in [
        (Sampling::Rate(0.1), 0.02),
        (Sampling::Rate(0.02), 0.04),
        (Sampling::Pages(4096), 0.03),
    ] {
        let sampled = analysis(spec, sampling).distances().curve();
        let mut off_sum = 0.0;
        let mut count = 0;
        for percent in 1..=100 {
            let pages = 500 * percent;
            let off = (sampled.miss_ratio(pages) - exact.miss_ratio(pages)).abs();
            assert!(off < 2.0 * off_max, "{sampling:?}, {pages} pages: {off}");
            off_sum += off;
            count += 1;
        }
        let mean = off_sum / f64::from(count);
        println!("{sampling:?}: mean difference {mean:.4}");
        assert!(mean < off_max, "{sampling:?}: mean difference {mean}");
    }
}

#[test]
fn counts_and_footprint_are_those_of_the_generator() {
    let analysis = analysis(
        "uniform:pages=100,refs=10000,writes=0.25+loop:pages=10,refs=20,client=1",
        Sampling::Exact,
    );
    let accesses = analysis.accesses();
    assert_eq!(accesses.total(), 10_020);
    assert_eq!(analysis.footprint_pages(), 110);
    assert_eq!(analysis.written_pages(), 100);
    assert_eq!(
        (
            analysis.clients()[1].accesses.reads,
            analysis.clients()[1].pages
        ),
        (20, 10)
    );
    assert!((accesses.reads_per_write().unwrap() - 3.0).abs() < 0.2);
}

#[test]
fn nothing_gives_nothing() {
    let header = Generator::new("loop".parse().unwrap()).header();
    let empty = Analysis::new(&header, 12, Sampling::Exact).unwrap();
    assert_eq!(empty.distances().curve().miss_ratio(5), 0.0);
    assert_eq!(empty.accesses().reads_per_write(), None);
    assert!(empty.distances().histogram().is_empty());
}
