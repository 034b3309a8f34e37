//! `undercroft-lab storm`: passes; fails if a bug is put in, and then writes a file that replays to
//! the same failure.

use std::path::Path;
use std::process::{Command, Output};

fn storm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .arg("storm")
        .args(arguments)
        .output()
        .expect("the binary starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn storms_pass_and_say_what_they_met() {
    let output = storm(&["--seeds", "4", "--ops", "500", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["schema_version"], 1);
    assert_eq!(report["seeds"], 4);
    assert!(report["operations"].as_u64() >= Some(2000));
    assert!(report["seen"]["fault loads"].as_u64() > Some(100));
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0));
}

#[test]
fn failing_storm_ends_with_one_and_its_file_replays_to_the_same_failure() {
    let out = tempfile::tempdir().expect("a directory");
    let directory = out.path().display().to_string();
    let output = storm(&[
        "--seeds",
        "1",
        "--ops",
        "4000",
        "--sabotage",
        "free-early",
        "--out",
        &directory,
        "--json",
    ]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let failure = &report["failures"][0];
    assert!(failure["steps_kept"].as_u64() < Some(200), "{failure}");
    let file = out.path().join("storm-0.txt");
    let again = storm(&["--replay", &file.display().to_string(), "--json"]);
    assert_eq!(again.status.code(), Some(1));
    let again: serde_json::Value = serde_json::from_slice(&again.stdout).expect("JSON");
    assert_eq!(again["failures"][0]["place"], failure["place"]);
    assert_eq!(again["failures"][0]["message"], failure["message"]);
}

#[test]
fn wrong_replay_files_are_refused_with_their_line() {
    let refused = |path: &Path| {
        let output = storm(&["--replay", &path.display().to_string()]);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let out = tempfile::tempdir().expect("a directory");
    let file = out.path().join("storm.txt");
    assert!(refused(&file).contains("cannot replay"));
    std::fs::write(&file, "hello\n").expect("a file");
    assert!(refused(&file).contains("undercroft storm 1"));
    std::fs::write(&file, "undercroft storm 1\nseed = x\n").expect("a file");
    assert!(refused(&file).contains("line 2"));
}
