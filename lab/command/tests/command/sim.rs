//! `undercroft-lab sim` as a user meets it: tables, JSON, files, plots, and refusals that name the
//! option.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use undercroft_trace::{Access, Event, Header, Kind, Movement, TimeUnit, TraceWriter};

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .arg("sim")
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const TRACE: &str = "zipf:pages=500,refs=20000,writes=0.3,seed=1";

#[test]
fn a_sweep_prints_json_with_one_outcome_for_each_combination() {
    let sweep = [
        "--trace",
        TRACE,
        "-m",
        "5%,50p",
        "--reclaim",
        "clock,belady",
        "--tier",
        "pcm/hdd-7200",
        "--json",
    ];
    let output = sim(&sweep);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(output.stderr.is_empty(), "no progress without a terminal");
    let results: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(results["schema_version"], 1);
    assert_eq!(results["simulated"], true);
    assert_eq!(results["references"], 20_000);
    let outcomes = results["outcomes"].as_array().expect("a list");
    assert_eq!(outcomes.len(), 8);
    let misses = |at: usize| outcomes[at]["misses"].as_u64().expect("a number");
    assert!(
        misses(2) < misses(0),
        "Belady's misses are fewer than CLOCK's"
    );
    assert!(outcomes[0]["tiers"][0]["lifetime_years"].is_number());
    assert_eq!(outcomes[7]["setting"]["room"], "after");
    let ahead = sim(&[&sweep[..], &["--room", "ahead"]].concat());
    let ahead: serde_json::Value = serde_json::from_slice(&ahead.stdout).expect("JSON");
    assert_eq!(ahead["outcomes"][7]["setting"]["room"], "ahead");
    let again = sim(&sweep);
    assert_eq!(
        output.stdout, again.stdout,
        "the same run gives the same bytes"
    );
}

#[test]
fn out_gets_every_form_and_plots_that_say_simulated() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("new");
    let output = sim(&[
        "--trace",
        TRACE,
        "-m",
        "5%,10%,50%",
        "--prefetch",
        "none,window:4",
        "--out",
        out.to_str().expect("UTF-8"),
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("simulated: zipf"));
    for name in [
        "results.json",
        "results.csv",
        "results.md",
        "misses.svg",
        "elapsed.svg",
        "energy.svg",
    ] {
        assert!(
            fs::metadata(out.join(name)).expect(name).len() > 100,
            "{name}"
        );
    }
    assert_eq!(
        fs::read_to_string(out.join("results.csv"))
            .expect("text")
            .lines()
            .count(),
        7
    );
    assert!(
        fs::read_to_string(out.join("misses.svg"))
            .expect("text")
            .contains("simulated")
    );
}

/// Records a live run that prefetched pages: twice round eight pages, with a fault on every second
/// one.
fn recorded(directory: &Path) -> String {
    recorded_by(directory, "")
}

/// The same, with this source in its header.
fn recorded_by(directory: &Path, source: &str) -> String {
    let header = Header {
        source: source.to_owned(),
        granularity: 12,
        time_unit: TimeUnit::Nanoseconds,
        live: true,
        movements: true,
        ..Header::default()
    };
    let path = directory.join("live.uct");
    let file = fs::File::create(&path).expect("a file");
    let mut writer = TraceWriter::new(file, header).expect("a trace");
    for time in 0..16 {
        let kind = match time % 2 {
            0 => Kind::Access(Access::Read),
            _ => Kind::Movement(Movement::Ahead),
        };
        let event = Event {
            time,
            address: time % 8 * 4096,
            kind,
            client: 0,
            thread: 0,
        };
        writer.write_event(event).expect("written");
    }
    writer.finish(16).expect("ended");
    path.display().to_string()
}

#[test]
fn a_trace_recorded_with_prefetch_is_replayed_with_a_warning_and_what_is_gone_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let trace = recorded(directory.path());
    let all = ["--trace", &trace, "-m", "4p", "--reclaim", "lru", "--json"];
    let output = sim(&all);
    let note = text(&output.stderr);
    assert!(output.status.success(), "{note}");
    assert!(
        note.contains("only a guess") && note.contains("--prefetch none"),
        "{note}"
    );
    let results: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let first = &results["outcomes"][0];
    assert_eq!(first["setting"]["prefetch"], "none");
    assert_eq!(first["misses"], 4);
    for (option, instead) in [
        ("--prefetch", "--prefetch none"),
        ("--room", "--room ahead"),
    ] {
        let refused = sim(&["--trace", TRACE, option, "traced"]);
        let error = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{error}");
        assert!(error.contains(option) && error.contains(instead), "{error}");
    }
}

#[test]
fn a_live_trace_is_replayed_as_it_was_recorded_unless_told_otherwise() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = "undercroft 0.1.0 run, --memory-max 16384 --policy clock --prefetch majority";
    let of = |source: &str, more: &[&str]| {
        let trace = recorded_by(directory.path(), source);
        let output = sim(&[&["--trace", &trace, "--json"], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let results: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let setting = &results["outcomes"][0]["setting"];
        ["reclaim", "placement", "room", "prefetch"]
            .map(|name| setting[name].as_str().map(str::to_owned))
    };
    let is = |setting: [&str; 4]| setting.map(|text| Some(text.to_owned()));
    let worth = format!("{run} --placement worth");
    assert_eq!(of(&worth, &[]), is(["clock", "worth", "ahead", "majority"]));
    assert_eq!(
        of(run, &[]),
        is(["clock", "waterfall", "ahead", "majority"])
    );
    for (option, value, setting) in [
        (
            "--placement",
            "worth",
            ["clock", "worth", "ahead", "majority"],
        ),
        (
            "--placement",
            "waterfall",
            ["clock", "waterfall", "after", "majority"],
        ),
        ("--reclaim", "lru", ["lru", "worth", "after", "majority"]),
    ] {
        assert_eq!(
            of(&worth, &[option, value]),
            is(setting),
            "{option} {value}"
        );
    }
}

#[test]
fn what_cannot_be_simulated_is_refused_with_the_options_name() {
    for (arguments, status, part) in [
        (&[][..], 2, "--trace is missing"),
        (&["--trace", "nothing-here"], 2, "--trace nothing-here"),
        (&["--trace", "zipf:pages=0"], 2, "--trace"),
        (&["--trace", TRACE, "--memory", "0.01%"], 2, "--memory"),
        (&["--trace", TRACE, "--memory", "0"], 2, "--memory"),
        (
            &["--trace", TRACE, "--page-size", "1M", "--memory", "64K"],
            2,
            "--page-size",
        ),
        (&["--trace", TRACE, "--page-size", "3000"], 2, "--page-size"),
        (&["--trace", TRACE, "--page-size", "512"], 2, "--page-size"),
        (&["--trace", TRACE, "--reclaim", "mru"], 2, "belady"),
        (
            &["--trace", TRACE, "--prefetch", "readahead:99"],
            2,
            "--prefetch",
        ),
        (
            &[
                "--trace",
                TRACE,
                "--latency",
                "p99=1ms",
                "--stall-max",
                "30%",
            ],
            2,
            "--stall-max",
        ),
        (&["--trace", TRACE, "--tier", "floppy"], 2, "hdd-7200"),
        (&["--trace", TRACE, "--tier", ""], 2, "--tier"),
        (&["--trace", TRACE, "--tier", "pcm,size=8K"], 1, "--tier"),
        (&["--trace", "/dev/null"], 1, "/dev/null"),
    ] {
        let output = sim(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(error.contains(part), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn mrc_shows_the_estimate_of_each_limit_beside_a_replay() {
    let arguments = ["--trace", TRACE, "-m", "80p", "--reclaim", "lru", "--mrc"];
    let output = sim(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    let (_, curve) = printed.split_once("swap-ins by limit").expect("a curve");
    let lines: Vec<_> = curve.lines().skip(2).collect();
    assert_eq!(lines.len(), 12, "{printed}");
    assert!(
        lines[4].starts_with('>') && lines[4].contains(" 80 "),
        "{printed}"
    );
    assert!(
        lines.iter().all(|line| line.trim_end().ends_with('%')),
        "{printed}"
    );
    let plain = text(&sim(&arguments[..6]).stdout);
    assert!(!plain.contains("swap-ins by limit"), "only if asked for");
}
