//! The demo, small: both stores, unlimited and at a quarter of their footprint, every value compared.

use std::io::Write;
use std::process::Command;

fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn undercroft(words: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft"))
        .args(words)
        .output()
        .expect("the binary runs")
}

/// Runs the demo with `store` and checks its two first rows.
fn demo(name: &str, store: &str) {
    let doctor = undercroft(&["doctor", "--json"]);
    let machine: serde_json::Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    if machine["verdict"] == "missing" {
        say(&format!(
            "SKIPPED: {name}: this machine cannot run undercroft; see `undercroft doctor`"
        ));
        return;
    }
    let output = undercroft(&[
        "demo",
        "--store",
        store,
        "--size",
        "32M",
        "--ops",
        "5000",
        "--no-kernel-swap",
        "--json",
    ]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let values = json["values"].as_u64().expect("a count");
    let limit = json["memory_max_bytes"].as_u64().expect("a size");
    for row in [&json["rows"][0], &json["rows"][1]] {
        assert_eq!(row["values_verified"].as_u64(), Some(values), "{row}");
        assert_eq!(row["values_wrong"].as_u64(), Some(0), "{row}");
    }
    let unlimited = json["rows"][0]["dram_bytes_peak"].as_u64().expect("a size");
    assert!(
        unlimited > 32 << 20,
        "the store holds 32 MiB of values: {unlimited}"
    );
    // 2 % over the limit is allowed for a moment.
    let limited = json["rows"][1]["dram_bytes_peak"].as_u64().expect("a size");
    assert!(
        limited > 0 && limited <= limit + limit / 50,
        "{limited} of {limit}"
    );
    assert!(
        json["rows"][1]["report"]["pages"]["swapped_in"].as_u64() > Some(0),
        "nothing was swapped: {json}"
    );
    assert!(json["rows"][2]["absent_because"].is_string(), "{json}");
}

#[test]
fn bundled_store_keeps_every_value_at_a_quarter() {
    demo("bundled_store_keeps_every_value_at_a_quarter", "bundled");
}

#[test]
fn redis_keeps_every_value_at_a_quarter() {
    let name = "redis_keeps_every_value_at_a_quarter";
    if Command::new("redis-server")
        .arg("--version")
        .output()
        .is_err()
    {
        say(&format!("SKIPPED: {name}: redis-server is not installed"));
        return;
    }
    demo(name, "redis");
}
