//! Refusals of the lab, by exit status and words of the message, and its lists.

use std::process::{Command, Output};

fn lab(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .args(words)
        .output()
        .expect("the binary runs")
}

#[track_caller]
fn refused(words: &[&str], code: i32, expected: &[&str]) {
    let output = lab(words);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {errors}");
    for word in expected {
        assert!(
            errors.contains(word),
            "{words:?}: `{word}` is not in: {errors}"
        );
    }
    assert!(!errors.contains("panicked"), "{words:?}: {errors}");
}

#[test]
fn unknown_experiments_and_unreadable_results_are_refused() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let out = here.path().to_str().expect("a plain name");
    let unknown = ["run", "astrology", "--kernel-only", "--out", out];
    refused(&unknown, 1, &["astrology", "undercroft-lab list"]);
    let unreadable = ["plot", "/nowhere/results.json", "--out", out];
    refused(&unreadable, 1, &["/nowhere/results.json"]);
    refused(
        &["cost", "/nonexistent.json"],
        1,
        &["/nonexistent.json", "--memory-price"],
    );
    let untested = ["run", "idle", "--undercroft", "/nonexistent", "--out", out];
    refused(&untested, 1, &["/nonexistent"]);
}

#[test]
fn the_list_carries_its_version() {
    let output = lab(&["list", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(json["schema_version"], 1);
    assert!(
        json["experiments"]
            .as_array()
            .is_some_and(|all| all.len() > 10),
        "{json}"
    );
}
