//! The undercroft rig against a stand-in program: what the rig passes, what it reads back, and that
//! a missing report is an error.
//!
//! The stand-in only runs the command. So this says nothing about undercroft itself.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use undercroft_base::Bytes;
use undercroft_experiments::rig::{
    CommandLine, Rig, RigError, Stdout, TierChoice, Undercroft, swap,
};

const SCRIPT: &str = r#"#!/bin/sh
report=
while [ "$1" != -- ]; do
  [ "$1" = --report ] && report=$2
  printf '%s\n' "$1" >> "$0.arguments"
  shift
done
shift
"$@"
status=$?
[ "${NO_REPORT-}" ] || echo '{"dram_bytes_peak":12345,"tiers":[{"kind":"ram","held_bytes_peak":777}]}' > "$report"
exit $status
"#;

fn rig(directory: &Path, script: &str) -> Undercroft {
    let binary = directory.join("stand-in");
    fs::write(&binary, script).expect("script");
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).expect("executable");
    Undercroft {
        binary,
        name: None,
        tier: TierChoice::RamThenFile(PathBuf::from("/var/swap")),
        swap: Bytes(1 << 30),
        directory: directory.to_owned(),
        extra: vec!["--policy".into(), "lru".into()],
        alone: true,
    }
}

fn command(words: &[&str]) -> CommandLine {
    CommandLine {
        words: words.iter().map(Into::into).collect(),
        stdout: Stdout::Lines,
    }
}

/// Waits a while for the swap of other tests to go; the rig refuses while there is one.
fn swap_is_active() -> bool {
    let error = swap::wait_until_alone().err();
    if let Some(error) = &error {
        println!("SKIPPED: {error}");
    }
    error.is_some()
}

#[test]
fn rig_passes_the_command_line_and_reads_the_report() {
    if swap_is_active() {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let rig = rig(directory.path(), SCRIPT);
    let stage = rig.set_up(Bytes(64 << 20)).expect("set up");
    let running = stage
        .spawn(&command(&["echo", "two words"]))
        .expect("spawn");
    let outcome = running.finish().expect("finish");
    assert_eq!(outcome.lines, ["two words"]);
    assert_eq!(outcome.memory.limit_bytes, 64 << 20);
    assert_eq!(outcome.memory.total_peak_bytes, 12345);
    assert_eq!(outcome.memory.compressed_peak_bytes, 777);
    let arguments =
        fs::read_to_string(directory.path().join("stand-in.arguments")).expect("arguments");
    let arguments: Vec<&str> = arguments.lines().collect();
    assert_eq!(
        arguments[..5],
        ["run", "--memory-max", "67108864", "--tier", "ram"]
    );
    assert!(
        arguments[6].starts_with("file:/var/swap/") && arguments[6].ends_with(",size=1073741824"),
        "{arguments:?}"
    );
    assert_eq!(arguments[9..], ["--quiet", "--policy", "lru"]);
}

#[test]
fn missing_report_and_failed_command_are_errors() {
    if swap_is_active() {
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let silent = SCRIPT.replace("${NO_REPORT-}", "yes");
    let rig = rig(directory.path(), &silent);
    let run = |words: &[&str]| {
        rig.set_up(Bytes(1 << 20))
            .expect("set up")
            .spawn(&command(words))
            .expect("spawn")
            .finish()
    };
    assert!(
        matches!(run(&["true"]), Err(RigError::Failed { what, .. }) if what.contains("report"))
    );
    let outcome = run(&["sh", "-c", "exit 3"]).expect("a failed command is an outcome");
    let error = outcome
        .successful("undercroft", "the workload")
        .expect_err("refused")
        .to_string();
    assert!(error.contains("wrong bytes"), "{error}");
}
