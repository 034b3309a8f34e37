//! The report's field names, numbers and text.

use hdrhistogram::Histogram;
use serde_json::Value;
use undercroft_base::{Bytes, Nanos, PageCount, RemoteCounts};
use undercroft_engine::Stats;
use undercroft_policy::mrc::{Curve, Point};
use undercroft_qos::Monitor;
use undercroft_tier::spec::Rated;

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

fn rated() -> Rated {
    Rated {
        price: Some("2".parse().expect("a price")),
        budget: Some("600T".parse().expect("a budget")),
    }
}

/// The cost of the RAM tier of [`sample`].
fn pool_use() -> TierUse {
    TierUse {
        charged_to_limit: true,
        rated: rated(),
        held_peak: Bytes(3 << 20),
        written: Bytes(1 << 30),
    }
}

fn pool() -> TierReport {
    TierReport {
        figures: TierFigures {
            name: "ram".into(),
            kind: "ram".into(),
            emulated: false,
            ratio: Some(4.0),
            reads: 100,
            writes: 125,
            written_bytes: 1 << 30,
            updates: 0,
            cost: pool_use().cost(),
            wear: pool_use().wear(2.5),
            remote: Some(RemoteReport::of(RemoteCounts::default())),
            drain: None,
        },
        shape: None,
        mapping: None,
        capacity_bytes: 1 << 30,
        logical_bytes_peak: 8 << 20,
        stored_bytes_peak: 2 << 20,
        held_bytes_peak: 3 << 20,
        errors: 0,
        read_latency_seconds: None,
        file: Some(FileCounts::default()),
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
    let mrc = MissRatioCurve::of(
        &curve(),
        8 << 20,
        &stats,
        (Nanos(2_500_000_000), Nanos(0), CurveBegan::Start),
        Some(Nanos(21_000)),
    );
    Report {
        schema_version: SCHEMA_VERSION,
        version: "1".into(),
        kernel: kernel_release(),
        command: vec!["redis-server".into(), "--port".into(), "7001".into()],
        name: None,
        exit_status: 0,
        signal: None,
        pid: 4711,
        started_unix_seconds: 1.75e9,
        wall_seconds: 2.5,
        memory_max_bytes: limit(8 << 20),
        memory_bytes_peak: stats.pages_peak.bytes().0,
        resident_bytes_peak: stats.resident_peak.bytes().0,
        dram_bytes_peak: stats.dram_peak.0,
        faults: Faults::of(&stats),
        fault_latency_seconds: Quantiles::of(&histogram(
            [5_000; 98].into_iter().chain([20_000, 90_000]),
        )),
        fault_breakdown_seconds: Some(breakdown()),
        latency_bound: Some(bound_report()),
        stall_seconds: 1e-3,
        stall_some_seconds: 8e-4,
        pages: Pages::from(&stats),
        tiers: vec![pool()],
        limit_exceeded: LimitExceeded::default(),
        immovable: Immovable::default(),
        pauses: Pauses::default(),
        manager: ManagerCost::default(),
        spaces: 1,
        mappings_peak: 40,
        managed: true,
        unmanaged_processes_peak: 1,
        policies: policies(),
        guest: Some(guest()),
        counters: Counters::from(&stats),
        access_scans: Some(access_scans()),
        mrc,
        cost: CostReport::of("4".parse().ok(), peaks(&stats), &[pool_use()]),
        takeovers: Takeovers::default(),
    }
}

fn guest() -> GuestMemory {
    GuestMemory {
        bytes: 160 << 20,
        resident_bytes: 60 << 20,
        stored_bytes: 90 << 20,
        given_back_bytes: 0,
        huge_pages_short: None,
        locked_bytes: 0,
        locks_ignored: 0,
        handed_over: None,
        views: 0,
        access: GuestAccess::Scanned,
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
        plugin: Some(PluginReport {
            file: "mine.wasm".into(),
            events: 100,
            pages_wished: 20,
            pages_chosen: 10,
            prefetches_wished: 30,
            prefetches_done: 20,
            scans: 3,
            parameters: vec![PluginParameter {
                name: "behind".into(),
                value: 16,
            }],
            ..PluginReport::default()
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
    assert!(text.lines().count() <= 12, "{text}");
    let guest = "guest      160.0 MiB: 60.0 MiB in memory, 90.0 MiB in tiers\n";
    assert!(text.contains(guest), "{text}");
    let unknown = GuestMemory {
        access: GuestAccess::KernelSwap,
        ..self::guest()
    };
    let why = "; which pages it uses is not known: kernel swap is on";
    assert!(unknown.line().ends_with(why), "{}", unknown.line());
    let locked = GuestMemory {
        locked_bytes: 2 << 20,
        locks_ignored: 7,
        views: 2,
        ..self::guest()
    };
    let both = "; 2.0 MiB locked; 7 locks too many; mapped 2 more times";
    assert!(locked.line().ends_with(both), "{}", locked.line());
    assert!(human_summary(&sample(), true).contains('\x1b'));
    let piped = Report {
        signal: Some(13),
        ..sample()
    };
    assert!(human_summary(&piped, false).contains("ended by signal 13 (SIGPIPE)"));
}

#[test]
fn summary_without_a_managed_page_is_one_line_and_suggests_a_limit() {
    let said = |peak: u64, limit: Option<u64>| {
        let report = Report {
            faults: Faults::default(),
            memory_bytes_peak: peak,
            memory_max_bytes: limit,
            ..sample()
        };
        human_summary(&report, false)
    };
    let begin = "undercroft redis-server --port 7001: peak ";
    assert_eq!(
        said(523 << 20, None),
        format!(
            "{begin}523.0 MiB, without a limit; try -m 262M, then `undercroft status --mrc` says what \
             other limits cost\n"
        )
    );
    assert_eq!(
        said(3 << 20, None),
        format!("{begin}3.0 MiB, without a limit\n")
    );
    assert_eq!(
        said(523 << 20, Some(1 << 30)),
        format!("{begin}523.0 MiB, within the limit of 1.0 GiB: no page had to leave\n")
    );
    assert_eq!(said(0, None), "");
    let ended = Report {
        faults: Faults::default(),
        memory_bytes_peak: 3 << 20,
        memory_max_bytes: None,
        signal: Some(13),
        ..sample()
    };
    let said = human_summary(&ended, false);
    assert!(
        said.contains(": ended by signal 13 (SIGPIPE); peak 3.0 MiB"),
        "{said}"
    );
}

#[test]
fn summary_warns_of_what_went_wrong() {
    let mut report = sample();
    report.immovable = Immovable {
        bytes_peak: 70 << 20,
        limit_raised_bytes_peak: 9 << 20,
        limit_raised_seconds: 1.5,
        ..Immovable::default()
    };
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
    assert!(text.lines().count() <= 12, "{text}");
    assert!(
        text.lines()
            .next()
            .is_some_and(|line| line.ends_with("...") && line.chars().count() < 80),
        "{text}"
    );
}

/// The times of a run of ten seconds with 100,000 faults under 8 MiB, and with twice as many, a
/// tenth and none under 4, 16 and 32 MiB. Faults are known to this part.
fn times(each: Option<Nanos>, part: f64) -> [(Option<f64>, Option<f64>); 4] {
    let stats = Stats {
        swap_in: 100_000,
        pages_swapped_out: 1,
        ..Stats::default()
    };
    let point = |mib: u64, faults: f64| Point {
        limit: Bytes(mib << 20),
        faults,
        least: faults * (1.0 - part),
        most: Some(faults * (1.0 + part)),
    };
    let curve = Curve {
        points: vec![point(4, 2e5), point(8, 1e5), point(16, 1e4), point(32, 0.0)],
        ..curve()
    };
    let wall = (Nanos(10_000_000_000), Nanos(0), CurveBegan::Start);
    let mrc = MissRatioCurve::of(&curve, 8 << 20, &stats, wall, each).expect("pages left");
    assert_eq!(mrc.fault_seconds, each.map(Nanos::seconds));
    let time = |at: usize| {
        (
            mrc.limits[at].wall_seconds,
            mrc.limits[at].wall_seconds_most,
        )
    };
    [0, 1, 2, 3].map(time)
}

#[test]
fn higher_limits_save_the_measured_cost_of_faults() {
    let of = times(Some(Nanos(10_000)), 0.0);
    assert_eq!(of[0], (None, None), "nothing is said of lower limits");
    assert_eq!(of[1], (Some(10.0), Some(10.0)));
    assert_eq!(of[2], (Some(9.1), Some(9.325)));
    assert_eq!(of[3], (Some(9.0), Some(9.25)));
}

#[test]
fn time_that_may_be_off_by_a_third_is_only_bounded() {
    let present = (Some(10.0), Some(10.0));
    // Faults took a quarter of the time, and may have cost the program twice as much.
    let of = times(Some(Nanos(25_000)), 0.0);
    assert_eq!(of[1..3], [present, (None, Some(8.3125))]);
    // Faults took three quarters of it.
    let of = times(Some(Nanos(75_000)), 0.0);
    assert_eq!(
        of[1..],
        [present, (None, Some(4.9375)), (None, Some(4.375))]
    );
    // The faults themselves may be twenty times as many.
    let of = times(Some(Nanos(40_000)), 19.0);
    assert_eq!(of[1..3], [present, (None, Some(10.0))]);
    // Faults cannot have cost more than there was time.
    let of = times(Some(Nanos(140_000)), 0.0);
    assert_eq!(of[1..], [present, (None, Some(0.55)), (None, None)]);
    // What one costs is not known.
    assert_eq!(times(None, 0.0)[1..], [present, (None, None), (None, None)]);
}

#[test]
fn nothing_is_said_of_other_limits_before_a_page_has_left() {
    let stats = Stats::default();
    let wall = (Nanos(1), Nanos(0), CurveBegan::Start);
    let none = MissRatioCurve::of(&curve(), 8 << 20, &stats, wall, None);
    assert_eq!(none, None);
}
