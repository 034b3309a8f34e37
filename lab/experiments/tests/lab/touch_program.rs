//! The workload program as a user runs it: its lines parse and verify, bad arguments are refused.

use std::process::{Command, Output};
use undercroft_experiments::touch::PhaseLine;

fn touch(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft-touch"))
        .args(arguments)
        .output()
        .expect("the program starts")
}

fn lines(output: &Output) -> Vec<PhaseLine> {
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a phase line"))
        .collect()
}

#[test]
fn patterns_fill_run_and_verify_without_errors() {
    let mut arguments = vec!["--footprint-mib", "8", "--seed", "5", "--verify"];
    let phases: Vec<String> = ["seq", "stride", "random", "zipf"]
        .iter()
        .flat_map(|pattern| {
            [
                format!("{pattern}:write:3:3000"),
                format!("{pattern}:read:4:3000"),
            ]
        })
        .collect();
    phases
        .iter()
        .for_each(|phase| arguments.extend(["--phase", phase]));
    let output = touch(&arguments);
    assert!(output.status.success(), "{output:?}");
    let lines = lines(&output);
    assert_eq!(lines.len(), 1 + 8 + 1);
    assert_eq!((lines[0].pattern.as_str(), lines[0].ops), ("fill", 2048));
    assert_eq!((lines[9].pattern.as_str(), lines[9].ops), ("verify", 2048));
    for line in &lines {
        assert_eq!(line.errors, 0, "{line:?}");
        assert!(
            line.p50_ns <= line.p99_ns && line.p99_ns <= line.max_ns && line.mean_ns > 0.0,
            "{line:?}"
        );
    }
    assert!(
        lines[1..9].iter().all(|line| line.ops == 3000),
        "warm-up operations must not be counted"
    );
}

#[test]
fn threads_share_the_footprint_and_fill_it_together() {
    let phases = [
        "--phase",
        "random:write:6:3000",
        "--phase",
        "seq:read:2:4096",
    ];
    let output = touch(
        &[
            &["--mode", "shared", "--footprint-mib", "8", "--verify"],
            &phases[..],
        ]
        .concat(),
    );
    assert!(output.status.success(), "{output:?}");
    let lines = lines(&output);
    let shape = lines
        .iter()
        .map(|line| (&line.pattern[..], line.threads, line.ops));
    let want = [
        ("fill", 6, 2048),
        ("random", 6, 3000),
        ("seq", 2, 4096),
        ("verify", 6, 2048),
    ];
    assert_eq!(shape.collect::<Vec<_>>(), want);
    assert!(lines.iter().all(|line| line.errors == 0), "{lines:?}");
}

#[test]
fn first_touch_and_compute_verify() {
    let output = touch(&[
        "--mode",
        "first-touch",
        "--footprint-mib",
        "4",
        "--rounds",
        "2",
    ]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        lines(&output)
            .iter()
            .map(|line| line.ops)
            .collect::<Vec<_>>(),
        [1024, 1024]
    );
    let output = touch(&["--mode", "compute", "--footprint-mib", "2", "--rounds", "2"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(lines(&output).len(), 2);
}

#[test]
fn bad_arguments_are_refused_with_usage() {
    for bad in [
        &["--footprint-mib", "0"][..],
        &["--phase", "up:read"],
        &["--what"],
        &["--seed"],
        &["--mode", "x"],
    ] {
        let output = touch(bad);
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("usage:"),
            "{bad:?}"
        );
    }
}
