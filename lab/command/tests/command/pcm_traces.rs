//! `undercroft-lab run pcm-traces --small`: the binary records a real program for its own
//! experiments.

use std::io::Write as _;
use std::process::Command;

#[test]
fn small_set_of_traces_is_recorded_by_the_binary_itself() {
    for program in ["valgrind", "sort"] {
        if Command::new(program).arg("--version").output().is_err() {
            let line = format!("SKIPPED: pcm-traces: {program} is not installed\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            return;
        }
    }
    let out = tempfile::tempdir().expect("a directory");
    let run = |words: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
            .args(words)
            .output()
            .expect("undercroft runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{words:?}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    };
    let place = out.path().to_str().expect("a plain name");
    run(&[
        "run",
        "pcm-traces",
        "--small",
        "--kernel-only",
        "--out",
        place,
    ]);
    let text = std::fs::read_to_string(out.path().join("results.json")).expect("results.json");
    let results: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let facts = &results["simulated"]["traces"][0];
    let count = |name: &str| facts[name].as_u64().expect(name);
    assert_eq!(facts["command"], "sort lines");
    assert!(
        facts["source"]
            .as_str()
            .is_some_and(|by| by.contains("lackey, cache 16384,8,64"))
    );
    // The file agrees with the results.
    let trace = out.path().join("sort.trace");
    let info = run(&[
        "trace",
        "info",
        "--json",
        trace.to_str().expect("a plain name"),
    ]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let total = count("instruction_reads") + count("data_reads") + count("data_writes");
    assert!(
        count("data_reads") > 1000 && count("data_writes") > 100,
        "{facts}"
    );
    assert_eq!(info["references"]["total"].as_u64(), Some(total), "{info}");
}
