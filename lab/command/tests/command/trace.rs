//! `undercroft-lab trace` from the outside: records a real program; generates, converts and reads
//! traces; refuses bad ones.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

fn undercroft(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .arg("trace")
        .args(words)
        .output()
        .expect("the binary runs")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn good(words: &[&str]) -> String {
    let output = undercroft(words);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{words:?}: {}",
        errors(&output)
    );
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn refused(words: &[&str], status: i32, expected: &[&str]) {
    let output = undercroft(words);
    let errors = errors(&output);
    assert_eq!(output.status.code(), Some(status), "{words:?}: {errors}");
    for word in expected {
        assert!(
            errors.contains(word),
            "{words:?}: `{word}` is not in: {errors}"
        );
    }
    assert!(!errors.contains("panicked"), "{errors}");
}

fn json(path: &Path, more: &[&str]) -> serde_json::Value {
    let text = good(&[&["info", "--json", name(path)], more].concat());
    serde_json::from_str(&text).expect("JSON")
}

fn name(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().expect("a directory"))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn files(&self) -> usize {
        fs::read_dir(self.0.path()).expect("a directory").count()
    }
}

/// Whether a program is there. If not, prints that the test is skipped, without the harness's
/// capture.
fn have(test: &str, programs: &[&str]) -> bool {
    for program in programs {
        if Command::new(program).arg("--version").output().is_err() {
            let line = format!("SKIPPED: {test}: {program} is not installed\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            return false;
        }
    }
    true
}

/// Reads 2 MiB byte by byte and writes 1 MiB. Ends with status 7.
const PROGRAM: &str = "
static volatile unsigned char source[2 << 20], target[1 << 20];
int main(void) {
    unsigned sum = 0;
    for (unsigned at = 0; at < sizeof source; at += 16) sum += source[at];
    for (unsigned at = 0; at < sizeof target; at += 16) target[at] = (unsigned char)sum;
    return 7;
}";

#[test]
fn recorded_program_has_the_references_it_made() {
    if !have(
        "recorded_program_has_the_references_it_made",
        &["valgrind", "cc"],
    ) {
        return;
    }
    let place = Place::new();
    let (source, program) = (place.file("p.c"), place.file("p"));
    fs::write(&source, PROGRAM).expect("a file");
    let compiled = Command::new("cc")
        .args(["-O1", "-o", name(&program), name(&source)])
        .status();
    assert!(compiled.expect("cc runs").success());

    // Without a cache: every touch. The loops alone are 131072 reads and 65536 writes.
    let all = place.file("all.uct");
    let output = undercroft(&[
        "record",
        "--out",
        name(&all),
        "--cache",
        "none",
        "--",
        name(&program),
    ]);
    assert_eq!(output.status.code(), Some(7), "{}", errors(&output));
    let info = json(&all, &[]);
    let count =
        |info: &serde_json::Value, kind: &str| info["references"][kind].as_u64().expect("a count");
    assert!(
        (131_072..400_000).contains(&count(&info, "reads")),
        "{info}"
    );
    assert!(
        (65_536..300_000).contains(&count(&info, "writes")),
        "{info}"
    );
    assert!(count(&info, "instructions") > 500_000);
    assert_eq!(info["filtered"], false);
    assert_eq!(info["time_unit"], "references");
    assert_eq!(info["command"][0], name(&program));
    // The footprint is 3 MiB of its own and little else.
    let pages = info["footprint"]["pages"].as_u64().expect("a count");
    assert!((768..1200).contains(&pages), "{pages}");

    // Behind 256 KiB, each of the 49152 lines is fetched once. The 16384 written ones leave, except
    // for those that the cache holds.
    let filtered = place.file("filtered.uct");
    let output = undercroft(&[
        "record",
        "-q",
        "--out",
        name(&filtered),
        "--cache",
        "256K,16,64",
        "--",
        name(&program),
    ]);
    assert_eq!(output.status.code(), Some(7), "{}", errors(&output));
    assert_eq!(errors(&output), "");
    let info = json(&filtered, &["--page-size", "512"]);
    assert!((49_152..56_000).contains(&count(&info, "reads")), "{info}");
    assert!(
        (16_384 - 4096..20_000).contains(&count(&info, "writes")),
        "{info}"
    );
    assert_eq!(info["filtered"], true);
    assert_eq!(info["granularity_bytes"], 64);

    // If a store that misses fetches nothing, there are 16384 reads fewer.
    let validate = place.file("validate.uct");
    undercroft(&[
        "record",
        "--out",
        name(&validate),
        "--cache",
        "256K,16,64,validate",
        "--",
        name(&program),
    ]);
    let reads = count(&json(&validate, &[]), "reads");
    assert!((32_768..40_000).contains(&reads), "{reads}");
}

#[test]
fn program_that_is_killed_or_cannot_run_gives_its_status() {
    if !have(
        "program_that_is_killed_or_cannot_run_gives_its_status",
        &["valgrind"],
    ) {
        return;
    }
    let place = Place::new();
    let trace = place.file("t.uct");
    let out = name(&trace);
    let output = undercroft(&["record", "--out", out, "--", "sh", "-c", "kill -KILL $$"]);
    assert_eq!(output.status.code(), Some(137), "{}", errors(&output));
    assert!(json(&trace, &[])["references"]["total"].as_u64() > Some(1000));
    assert!(
        errors(&output).contains("signal 9 ended sh: the trace ends there"),
        "{}",
        errors(&output)
    );
    assert_eq!(place.files(), 1);
    fs::remove_file(&trace).expect("it was there");
    refused(
        &["record", "--out", out, "--", "/nowhere/prog"],
        127,
        &["nothing of /nowhere/prog", "fix:"],
    );
    assert_eq!(place.files(), 0);
}

#[test]
fn recording_that_is_asked_to_end_keeps_its_trace_and_nothing_else() {
    let test = "recording_that_is_asked_to_end_keeps_its_trace_and_nothing_else";
    if !have(test, &["valgrind"]) {
        return;
    }
    for (signal, status) in [("TERM", 143), ("HUP", 129)] {
        let place = Place::new();
        let (trace, begun) = (place.file("t.uct"), place.file("begun"));
        // Some minutes of work, so that the program ends in any case.
        let script = format!(
            ": > {}; i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done",
            name(&begun)
        );
        // The tests may run under nohup, which ignores the signal.
        let recording = Command::new("env")
            .arg(format!("--default-signal={signal}"))
            .arg(env!("CARGO_BIN_EXE_undercroft-lab"))
            .args(["trace", "record", "--out", name(&trace), "--"])
            .args(["sh", "-c", &script])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("the binary runs");
        for _ in 0..600 {
            if begun.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        assert!(begun.exists(), "the program did not begin");
        let kill = Command::new("kill")
            .args(["-s", signal, &recording.id().to_string()])
            .status();
        assert!(kill.expect("kill runs").success());
        let output = recording.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(status), "{}", errors(&output));
        assert!(json(&trace, &[])["references"]["total"].as_u64() > Some(1000));
        assert_eq!(place.files(), 2, "the trace and the program's own file");
    }
}

#[test]
fn recording_without_valgrind_names_the_fix() {
    let place = Place::new();
    let output = Command::new(env!("CARGO_BIN_EXE_undercroft-lab"))
        .args([
            "trace",
            "record",
            "--out",
            name(&place.file("t")),
            "--",
            "/bin/true",
        ])
        .env("PATH", "/nowhere")
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(125));
    assert!(
        errors(&output).contains("apt-get install valgrind"),
        "{}",
        errors(&output)
    );
    assert_eq!(place.files(), 0);
}

#[test]
fn generated_trace_is_shown_printed_and_imported_again() {
    let place = Place::new();
    let trace = place.file("t.uct");
    good(&[
        "generate",
        "zipf:pages=100,refs=20000,writes=0.25,seed=2",
        "--out",
        name(&trace),
    ]);
    let info = json(&trace, &[]);
    assert_eq!(info["references"]["total"], 20_000);
    assert_eq!(info["footprint"]["pages"], 100);
    assert_eq!(info["synthetic"], true);
    let curve = info["miss_ratio_curve"].as_array().expect("points");
    assert_eq!(curve[0]["miss_ratio"], 1.0);
    assert_eq!(curve[curve.len() - 1]["miss_ratio"], 0.005);

    let text = good(&["info", name(&trace)]);
    for word in [
        "20000",
        "100 pages",
        "reads:writes",
        "miss ratio of LRU",
        "first touch",
        "seed=2",
    ] {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
    let plot = place.file("curve.svg");
    good(&["info", name(&trace), "--plot", name(&plot)]);
    let svg = fs::read_to_string(&plot).expect("a plot");
    assert!(svg.contains("Miss ratio of LRU by memory") && svg.contains("polyline"));

    let csv = good(&["cat", name(&trace)]);
    assert_eq!(csv.lines().count(), 20_001);
    let (rows, again) = (place.file("t.csv"), place.file("again.uct"));
    fs::write(&rows, &csv).expect("a file");
    good(&[
        "import",
        "--format",
        "csv",
        name(&rows),
        "--out",
        name(&again),
        "--granularity",
        "4K",
    ]);
    assert_eq!(good(&["cat", name(&again)]), csv);
    assert_eq!(
        good(&["cat", name(&again), "--limit", "3"]).lines().count(),
        4
    );

    let log = place.file("log");
    fs::write(&log, "I  04001000,3\n L 1ffeffe7e0,8\n M 0421c7fc,8\n").expect("a file");
    good(&[
        "import",
        "--format",
        "lackey",
        name(&log),
        "--out",
        name(&again),
    ]);
    let rows = good(&["cat", name(&again)]);
    let rows: Vec<&str> = rows.lines().skip(1).collect();
    // The modify reaches over a line of 64 bytes, so it touches two.
    let expected = [
        "0,0x4001000,I,0,0",
        "1,0x1ffeffe7e0,R,0,0",
        "2,0x421c7fc,R,0,0",
        "2,0x421c800,R,0,0",
        "3,0x421c7fc,W,0,0",
        "3,0x421c800,W,0,0",
    ];
    assert_eq!(rows, expected);
}

#[test]
fn damaged_traces_are_refused_with_the_byte() {
    let place = Place::new();
    let trace = place.file("t.uct");
    good(&["generate", "loop:pages=100", "--out", name(&trace)]);
    let bytes = fs::read(&trace).expect("a trace");
    let bad = place.file("bad.uct");
    let with = |bytes: &[u8]| fs::write(&bad, bytes).expect("a file");

    with(&bytes[..bytes.len() - 30]);
    let length = format!("byte {}", bytes.len() - 30);
    refused(&["info", name(&bad)], 1, &[&length, "truncated", "fix:"]);
    refused(&["cat", name(&bad)], 1, &["truncated"]);

    let mut flipped = bytes.clone();
    let middle = bytes.len() / 2;
    flipped[middle] ^= 1;
    with(&flipped);
    refused(&["info", name(&bad)], 1, &["byte ", "corrupt"]);

    let mut newer = bytes.clone();
    newer[8] = 2;
    with(&newer);
    refused(&["info", name(&bad)], 1, &["byte 8", "version 2"]);

    with(b"not a trace, whatever its name says");
    refused(
        &["info", name(&bad)],
        1,
        &["byte 0", "not an Undercroft trace", "trace import"],
    );
    refused(&["info", name(&place.file("none"))], 1, &["No such file"]);
    refused(&["info", name(place.0.path())], 1, &["directory"]);
}

#[test]
fn impossible_options_are_usage_errors_that_name_them() {
    let place = Place::new();
    let trace = place.file("t.uct");
    let out = name(&trace);
    for (words, expected) in [
        (vec!["generate", "zipf:pages=0", "--out", out], "pages=0"),
        (
            vec!["generate", "zipf:size=5", "--out", out],
            "no option `size`",
        ),
        (
            vec!["generate", "spiral", "--out", out],
            "`spiral` is no pattern",
        ),
        (
            vec!["record", "--out", out, "--cache", "8M,100", "--", "true"],
            "ways",
        ),
        (
            vec!["record", "--out", out, "--granularity", "3K", "--", "true"],
            "power of two",
        ),
        (vec!["info", "x", "--sample", "rate=0"], "rate=SHARE"),
        (vec!["info", "x", "--sample", "7"], "pages=COUNT"),
        (vec!["import", "x", "--format", "xml", "--out", out], "xml"),
    ] {
        refused(&words, 2, &[expected]);
    }
    good(&["generate", "loop:pages=10", "--out", out]);
    refused(
        &["info", out, "--page-size", "512"],
        2,
        &["granularity", "--page-size"],
    );
    refused(&["info", out, "--plot", "x.gif"], 1, &["x.gif", ".svg"]);
    refused(
        &["generate", "loop", "--out", "/nowhere/t"],
        1,
        &["/nowhere/t", "fix:"],
    );
}

#[test]
fn bad_text_names_line_and_byte_and_leaves_no_trace() {
    let place = Place::new();
    let log = place.file("log");
    fs::write(&log, "I  04001000,3\nhello\n").expect("a file");
    let out = place.file("t.uct");
    refused(
        &[
            "import",
            "--format",
            "lackey",
            name(&log),
            "--out",
            name(&out),
        ],
        1,
        &["line 2, byte 14", "hello"],
    );
    fs::write(&log, "address,access,client\n1,R,3\n").expect("a file");
    refused(
        &["import", "--format", "csv", name(&log), "--out", name(&out)],
        1,
        &["client 3", "--clients"],
    );
    assert_eq!(place.files(), 1);
}
