//! The report's field names, numbers and text.

use hdrhistogram::Histogram;
use serde_json::Value;
use undercroft_base::{Bytes, Nanos, PageCount, TierInfo, TierKind, TierUsage};
use undercroft_engine::Stats;
use undercroft_policy::mrc::{Curve, Point};
use undercroft_qos::Monitor;

use super::*;

fn histogram(values: impl IntoIterator<Item = u64>) -> Histogram<u64> {
    let mut histogram = Histogram::new(3).expect("3 digits are allowed");
    for value in values {
        histogram
            .record(value)
            .expect("an auto-resizing histogram takes any value");
    }
    histogram
}

fn ram() -> TierInfo {
    TierInfo {
        name: "ram".into(),
        kind: TierKind::Ram,
        emulated: false,
        capacity: Bytes(1 << 30),
    }
}

fn usage(logical: u64, stored: u64, held: u64) -> TierUsage {
    TierUsage {
        logical: Bytes(logical),
        stored: Bytes(stored),
        held: Bytes(held),
    }
}

fn rated() -> Rated {
    Rated {
        price: Some("2".parse().expect("a price")),
        budget: Some("600T".parse().expect("a budget")),
    }
}

fn sample() -> Report {
    let stats = Stats {
        faults: 10,
        first_touch: 4,
        swap_in: 6,
        prefetch_hits: 31,
        pages_swapped_in: 100,
        pages_swapped_out: 200,
        clean_dropped: 50,
        same_filled: 25,
        prefetched: 94,
        resident_peak: PageCount(1024),
        pages_peak: PageCount(3072),
        dram_peak: Bytes(6 << 20),
        ..Stats::default()
    };
    let wall = Nanos(2_500_000_000);
    let mrc = MissRatioCurve::of(&curve(), 8 << 20, &stats, (wall, Nanos(0)), Nanos(5_000));
    Report::new(&ReportInputs {
        command: vec!["redis-server".into(), "--port".into(), "7001".into()],
        exit_status: 0,
        wall,
        memory_max: 8 << 20,
        stats: &stats,
        fault_latency: &histogram([5_000; 98].into_iter().chain([20_000, 90_000])),
        latency_bound: Some(bound_report()),
        stall: Nanos(1_000_000),
        stall_some: Nanos(800_000),
        stall_bound: Some(stall_bound()),
        tiers: vec![TierInputs {
            info: ram(),
            mapped_as: None,
            shape: None,
            peak: usage(8 << 20, 2 << 20, 3 << 20),
            at_logical_peak: usage(8 << 20, 2 << 20, 3 << 20),
            reads: 100,
            writes: 125,
            written: Bytes(1 << 30),
            updates: 0,
            rated: rated(),
            errors: 0,
            read_latency: &histogram([]),
            drain: None,
            remote: Some(RemoteCounts::default()),
            file: Some(FileCounts {
                writes: 3,
                ..FileCounts::default()
            }),
        }],
        limit_exceeded: LimitExceeded::default(),
        pauses: Pauses::default(),
        manager_cpu: Nanos(300_000_000),
        scale: Scale::default(),
        metadata: Bytes(32768),
        evict_batches: 4,
        evict_locks: 70,
        commands_given_up: 0,
        threads_moved: 0,
        managed_pages: 2048,
        spaces: 1,
        unmanaged_for_long: false,
        strays: 1,
        mappings_peak: 40,
        fault_breakdown: Some(breakdown()),
        policies: policies(),
        access_scans: Some(access_scans()),
        mrc,
        memory_price: Some("4".parse().expect("a price")),
    })
}

fn stall_bound() -> StallBoundReport {
    StallBoundReport {
        bound: "30%".to_owned(),
        ratio: 0.25,
        windows_kept: 9,
        windows_missed: 1,
        shift: 4.0,
    }
}

fn bound_report() -> BoundReport {
    BoundReport {
        control: Some(crate::report::BoundControl {
            pages_go_to: "buffer".to_owned(),
            batch_pages: 9,
            changes: 2,
            writes_after_reads: 5,
        }),
        ..BoundReport::of(&bound())
    }
}

/// Three windows of ten page-ins, all within the limit.
fn bound() -> Monitor {
    let mut monitor = Monitor::new("p90=100us".parse().expect("a bound"));
    for micros in [90, 20, 30] {
        (0..10).for_each(|_| monitor.add(Nanos(micros * 1000)));
        monitor.end_window().expect("enough page-ins");
    }
    monitor
}

fn curve() -> Curve {
    let point = |mib: u64, faults, most| Point {
        limit: Bytes(mib << 20),
        faults,
        least: faults / 2.0,
        most,
    };
    Curve {
        points: vec![
            point(4, 200_006.0, None),
            point(8, 6.0, Some(6.0)),
            point(16, 0.0, Some(2.0)),
        ],
        followed: PageCount(500),
        one_in: 4,
    }
}

fn breakdown() -> FaultBreakdown {
    FaultBreakdown {
        faults: 10,
        intake: 1e-6,
        decide: 2e-6,
        load: 3e-6,
        install: 4e-6,
    }
}

fn access_scans() -> AccessScans {
    AccessScans {
        count: 10,
        seconds: 0.01,
        pages_used: 1000,
    }
}

fn policies() -> Policies {
    Policies {
        reclaim: "auto".into(),
        prefetch: "majority".into(),
        placement: "worth".into(),
        compressed_bytes_target: Some(4096),
        placement_decisions: 3,
        choice: Some(PolicyChoice {
            rule: "active_inactive".into(),
            changes: 1,
            pages_since_change: 100,
            lru_sample_faults: 30,
            active_inactive_sample_faults: 10,
        }),
    }
}

/// Every path of names in a JSON value, arrays as `[]`, sorted.
fn paths(value: &Value, prefix: &str, out: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if prefix.is_empty() {
                    name.clone()
                } else {
                    format!("{prefix}.{name}")
                };
                paths(value, &path, out);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            for value in values {
                paths(value, &format!("{prefix}[]"), out);
            }
        }
        _ => out.push(prefix.to_owned()),
    }
}

#[test]
fn report_field_names_are_those_promised() {
    let json = serde_json::to_value(sample()).expect("a report is plain data");
    let mut found = Vec::new();
    paths(&json, "", &mut found);
    found.sort();
    let golden = include_str!("golden_fields.txt");
    assert_eq!(
        found.join("\n"),
        golden.trim(),
        "a renamed field needs a new schema_version"
    );
}

#[test]
fn report_survives_json() {
    let report = sample();
    let text = serde_json::to_string(&report).expect("a report is plain data");
    let back: Report = serde_json::from_str(&text).expect("it reads what it wrote");
    assert_eq!(back, report);
}

#[test]
fn quantiles_are_in_seconds_and_absent_when_empty() {
    assert_eq!(Quantiles::of(&histogram([])), None);
    let q = Quantiles::of(&histogram((1..=1000).map(|n| n * 1000))).expect("not empty");
    for (got, want) in [
        (q.p50, 500e-6),
        (q.p90, 900e-6),
        (q.p99, 990e-6),
        (q.p999, 999e-6),
        (q.max, 1e-3),
    ] {
        assert!((got - want).abs() / want < 0.002, "{got} is not {want}");
    }
}

#[test]
fn no_limit_is_null_not_a_large_number() {
    assert_eq!(limit(u64::MAX), None);
    assert_eq!(limit(1 << 30), Some(1 << 30));
}

#[test]
fn rates_need_time_to_pass() {
    let after = Stats {
        faults: 10,
        pages_swapped_in: 20,
        pages_swapped_out: 30,
        ..Stats::default()
    };
    let rates = Rates::between(&Stats::default(), &after, 2.0);
    assert_eq!(
        (
            rates.faults_per_second,
            rates.swapped_in_per_second,
            rates.swapped_out_per_second
        ),
        (5.0, 10.0, 15.0)
    );
    assert_eq!(
        Rates::between(&Stats::default(), &after, 0.0),
        Rates::default()
    );
}

#[test]
fn summary_shows_logical_stored_and_ratio_side_by_side() {
    let text = human_summary(&sample(), false);
    assert!(!text.contains('\x1b'), "colour was not asked for: {text:?}");
    assert!(
        text.contains("logical 8.0 MiB, stored 2.0 MiB, ratio 4.00"),
        "{text}"
    );
    assert!(
        text.contains("6.0 MiB DRAM at most (limit 8.0 MiB)"),
        "{text}"
    );
    assert!(text.contains("p50 5.0 us, p99 20.0 us"), "{text}");
    assert!(!text.contains("warning"), "nothing went wrong: {text}");
    assert!(text.contains("p90=100us: kept in 3 of 3 windows, worst 90.1 us"));
    assert!(
        text.contains("$0.0215 at peak (DRAM $0.0156, tiers $0.0059), 46 % of all in DRAM"),
        "{text}"
    );
    assert!(text.lines().count() <= 11, "{text}");
    assert!(human_summary(&sample(), true).contains('\x1b'));
}

#[test]
fn summary_warns_of_what_went_wrong() {
    let mut report = sample();
    report.limit_exceeded = LimitExceeded {
        events: 2,
        bytes_peak: 4096,
        seconds: 0.5,
    };
    report.counters.lost = 3;
    let mut missed = bound();
    (0..10).for_each(|_| missed.add(Nanos(500_000)));
    missed.end_window().expect("enough page-ins");
    report.latency_bound = Some(BoundReport::of(&missed));
    let text = human_summary(&report, false);
    assert!(
        text.contains("above the limit 2 times, by 4.0 KiB at most, for 500.0 ms"),
        "{text}"
    );
    assert!(text.contains("3 pages were lost"), "{text}");
    assert!(
        text.contains("p90=100us was missed in 1 window; every window would have kept 507.9 us"),
        "{text}"
    );
}

#[test]
fn summary_keeps_a_long_command_on_one_line() {
    let mut report = sample();
    report.command = vec!["sh".into(), "-c".into(), "echo é\n".repeat(100)];
    let text = human_summary(&report, false);
    assert!(text.lines().count() <= 11, "{text}");
    assert!(
        text.lines()
            .next()
            .is_some_and(|line| line.ends_with("...") && line.chars().count() < 80),
        "{text}"
    );
}

#[test]
fn other_limits_cost_time_by_their_faults_and_save_no_more_than_faults_took() {
    let mrc = sample().mrc.expect("pages left");
    let in_force: Vec<_> = mrc.limits.iter().map(|point| point.in_force).collect();
    assert_eq!(in_force, [false, true, false]);
    let each = mrc.fault_seconds;
    assert!(each > 5e-6, "{each}");
    let seconds: Vec<_> = mrc.limits.iter().map(|point| point.wall_seconds).collect();
    assert!(
        (seconds[0] - 2.5 - 200_000.0 * each).abs() < 1e-6,
        "{mrc:?}"
    );
    assert!((seconds[1] - 2.5).abs() < 1e-9, "{mrc:?}");
    assert!((seconds[2] - 2.5 + 6.0 * each).abs() < 1e-6, "{mrc:?}");
    assert_eq!(mrc.limits[0].faults, 200_010.0, "four are first touches");
}

#[test]
fn nothing_is_said_of_other_limits_before_a_page_has_left() {
    let stats = Stats::default();
    let none = MissRatioCurve::of(&curve(), 8 << 20, &stats, (Nanos(1), Nanos(0)), Nanos(1));
    assert_eq!(none, None);
}
