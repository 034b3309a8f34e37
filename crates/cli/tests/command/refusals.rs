//! Refusals of the command line, by exit status and words of the message, and its output. Needs no
//! privilege.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

fn undercroft(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_undercroft"))
        .args(words)
        .env_remove("UNDERCROFT_DIR")
        .env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the binary runs")
}

/// Prints that a test did not run. Bypasses the harness's capture.
fn skip(name: &str, why: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED: {name}: {why}\n").as_bytes());
}

/// The status is `code`, and standard error has every one of `words`, and no panic.
#[track_caller]
fn refused(words: &[&str], code: i32, expected: &[&str]) {
    check(&undercroft(words), &words.join(" "), code, expected);
}

#[track_caller]
fn check(output: &Output, what: &str, code: i32, expected: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{what}: {errors}");
    for word in expected {
        assert!(
            errors.contains(word),
            "{what}: `{word}` is not in: {errors}"
        );
    }
    assert!(!errors.contains("panicked"), "{what}: {errors}");
}

#[track_caller]
fn printed(words: &[&str]) -> String {
    let output = undercroft(words);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn nonsense_limits_are_usage_errors() {
    for (size, word) in [
        ("0", "cannot make progress"),
        ("512K", "cannot make progress"),
        ("64", "did you mean 64M?"),
        ("lots", "examples"),
        ("12Q", "the unit is unknown"),
        ("-5M", "-5M"),
        ("", "memory-max"),
        ("999999999T", "999999999T"),
        ("1e99", "examples"),
        ("0%", "above 0"),
        ("101%", "up to 100"),
        ("0.000001%", "too small"),
    ] {
        let limit = format!("--memory-max={size}");
        refused(&["run", &limit, "--", "true"], 2, &[word]);
    }
}

#[test]
fn what_is_gone_names_what_to_use() {
    refused(
        &["run", "--page-size", "2M", "--", "true"],
        2,
        &["is gone", "undercroft vm --page-size 2M"],
    );
    for (old, new) in [
        ("--class=web", "--daemon=CLASS"),
        ("--latency-measure-only", "--latency p99=200us,measure"),
    ] {
        refused(&["run", old, "--", "true"], 2, &["is gone", new]);
    }
    refused(&["pause", "4711"], 2, &["is gone", "set PID paused=yes"]);
    refused(&["resume", "4711"], 2, &["is gone", "set PID paused=no"]);
    refused(
        &["run", "--tier", "disk:/x", "--", "true"],
        2,
        &["unknown tier kind `disk`", "file:PATH"],
    );
}

/// With the feature, `live/remote.rs` in `crates/tests` has the refusals.
#[test]
fn a_cluster_is_refused_with_the_feature_that_brings_it() {
    let words = ["run", "--tier", "redis:127.0.0.1:1", "--", "true"];
    if cfg!(feature = "redis") {
        refused(&words, 125, &["no node answers", "refused"]);
    } else {
        refused(
            &words,
            2,
            &["redis", "cargo build --release --features redis"],
        );
    }
}

/// With the feature, `live/plugins.rs` in `crates/tests` has the refusals.
#[test]
fn a_policy_file_is_refused_with_the_feature_that_brings_it() {
    let cases: [&[&str]; 2] = [
        &["run", "-m", "64M", "--policy", "/absent.wasm", "--", "true"],
        &["policy", "check", "/absent.wasm"],
    ];
    for words in cases {
        if cfg!(feature = "wasm") {
            refused(words, 2, &["/absent.wasm is no policy", "No such file"]);
        } else {
            refused(
                words,
                2,
                &["/absent.wasm", "cargo build --release --features wasm"],
            );
        }
    }
}

#[test]
fn latency_bounds_are_refused_with_the_form_of_one() {
    for (bound, word) in [
        ("200us", "p99=200us"),
        ("p99:200us", "p99=200us"),
        ("p100=200us", "below 100"),
        ("p99=200", "unit"),
        ("p99=2ns", "1 us"),
    ] {
        refused(&["run", "--latency", bound, "--", "true"], 2, &[word]);
    }
}

#[test]
fn unknown_names_are_answered_with_the_known_ones() {
    refused(
        &["run", "--policy", "fifo", "--", "true"],
        2,
        &["fifo", "active_inactive", "lru"],
    );
    refused(
        &["run", "--policy", "clock_w", "--", "true"],
        2,
        &[
            "earlier version",
            "--policy clock_w.wasm",
            "make -C policies",
        ],
    );
    refused(
        &["run", "--placement", "temperature", "--", "true"],
        2,
        &["--placement waterfall --policy temperature.wasm"],
    );
    refused(
        &["run", "--stall-max", "30%", "--", "true"],
        2,
        &["--stall-max is gone", "policy.stall_max_percent=30"],
    );
    refused(
        &["set", "1", "stall-max=30%"],
        2,
        &["policy.stall_max_percent=NUMBER"],
    );
    refused(
        &["run", "--prefetch", "psychic", "--", "true"],
        2,
        &["psychic", "majority", "readahead"],
    );
    refused(
        &["run", "--tier", "tape:/dev/st0", "--", "true"],
        2,
        &["tape", "ram"],
    );
    refused(
        &["run", "--memory-price=-1", "--", "true"],
        2,
        &["dollars a GiB"],
    );
    refused(
        &["run", "--tier", "ram,colour=blue", "--", "true"],
        2,
        &["colour", "max=SIZE"],
    );
    refused(
        &["run", "--tier", "ram,max=nonsense", "--", "true"],
        2,
        &["nonsense"],
    );
    refused(
        &["run", "--when-full", "panic", "--", "true"],
        2,
        &["stay", "kill"],
    );
    refused(&["levitate"], 2, &["levitate"]);
    refused(&["run", "--frobnicate", "--", "true"], 2, &["frobnicate"]);
    refused(&["run"], 2, &["CMD"]);
}

#[test]
fn too_many_tiers_are_refused() {
    let mut words = vec!["run"];
    words.extend(["--tier", "ram"].repeat(8));
    words.extend(["--", "true"]);
    refused(&words, 2, &["8 tiers are too many", "7"]);
}

#[test]
fn programs_that_cannot_run_have_their_own_statuses() {
    refused(
        &["run", "--", "no-such-program-anywhere"],
        127,
        &["no-such-program-anywhere", "not found", "fix:"],
    );
    refused(&["run", "--", "/no/such/path"], 127, &["/no/such/path"]);
    refused(&["run", "--", "/"], 126, &["directory"]);
    let here = tempfile::tempdir().expect("a temporary directory");
    let path = here.path().join("notes.txt");
    fs::write(&path, "no program").expect("write");
    let name = path.to_str().expect("a plain name");
    refused(&["run", "--", name], 126, &["notes.txt", "chmod +x"]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
    refused(&["run", "--", name], 126, &["notes.txt", "#!"]);
}

#[test]
fn static_programs_are_refused_with_the_reason() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let (source, program) = (here.path().join("main.c"), here.path().join("main"));
    fs::write(&source, "int main(void) { return 0; }\n").expect("write");
    let built = Command::new("cc")
        .arg("-static")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .output();
    if !built.is_ok_and(|output| output.status.success()) {
        skip(
            "static_programs_are_refused_with_the_reason",
            "no C compiler with a static C library",
        );
        return;
    }
    let name = program.to_str().expect("a plain name");
    refused(
        &["run", "--", name],
        125,
        &["statically linked", "why:", "fix:"],
    );
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_the_program_starts() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let mark = here.path().join("started");
    let mark = mark.to_str().expect("a plain name");
    refused(
        &[
            "run",
            "--report",
            "/nowhere/report.json",
            "--",
            "touch",
            mark,
        ],
        125,
        &["/nowhere/report.json", "--report"],
    );
    assert!(
        !std::path::Path::new(mark).exists(),
        "the program was started"
    );
}

#[test]
fn a_tier_directory_that_is_none_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_undercroft"))
        .args(["run", "--", "true"])
        .env("UNDERCROFT_DIR", "/no/such/directory")
        .output()
        .expect("the binary runs");
    check(
        &output,
        "UNDERCROFT_DIR",
        125,
        &["UNDERCROFT_DIR=/no/such/directory", "fix:"],
    );
}

#[test]
fn json_outputs_carry_their_version() {
    let json: serde_json::Value =
        serde_json::from_str(&printed(&["tiers", "--json"])).expect("JSON");
    assert_eq!(json["schema_version"], 1);
    // doctor's status depends on the machine. Its JSON does not.
    let output = undercroft(&["doctor", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let missing = json["verdict"] == "missing";
    assert_eq!(output.status.code(), Some(i32::from(missing)), "{json}");
    assert!(
        json["checks"]
            .as_array()
            .is_some_and(|checks| checks.len() > 10),
        "{json}"
    );
}

#[test]
fn tiers_are_measured_and_what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = format!("file:{},size=4M", folder.path().display());
    let words = ["tiers", "--json", "--measure", "ram,max=4M", &file];
    let json: serde_json::Value = serde_json::from_str(&printed(&words)).expect("JSON");
    for (at, kind) in ["ram", "file"].iter().enumerate() {
        let found = &json["measured"][at];
        assert_eq!(found["kind"], *kind, "{json}");
        assert!(found["capacity_bytes"].as_u64() <= Some(4 << 20), "{json}");
        for times in ["read_seconds", "write_seconds", "free_seconds"] {
            assert!(
                found[times]["p50"].as_f64() <= found[times]["p99"].as_f64(),
                "{json}"
            );
            assert!(found[times]["p99"].as_f64() > Some(0.0), "{json}");
        }
        assert!(
            found["read_bytes_per_second"].as_f64() > Some(0.0),
            "{json}"
        );
    }
    let table = printed(&["tiers", "--measure", "ram,max=4M,shape=cxl-dram"]);
    assert!(
        table.contains("(emulated)") && table.contains("capacity"),
        "{table}"
    );
    refused(
        &["tiers", "--measure", "ram,shape=floppy"],
        2,
        &["floppy", "hdd-7200"],
    );
    refused(
        &["tiers", "--measure", "nvm:/dev/null,size=4M"],
        1,
        &["/dev/null", "DAX"],
    );
}

#[test]
fn help_names_every_command_and_no_hidden_one() {
    let help = printed(&["--help"]);
    for name in [
        "run",
        "demo",
        "doctor",
        "status",
        "tiers",
        "completions",
        "man",
    ] {
        assert!(
            help.lines().any(|line| line.trim_start().starts_with(name)),
            "{name}: {help}"
        );
    }
    for name in ["manager", "demo-kv"] {
        assert!(
            !help.lines().any(|line| line.trim_start().starts_with(name)),
            "{name}: {help}"
        );
    }
    let help = printed(&["run", "--help"]);
    assert!(help.contains("redis-server --port 7001"));
    // Their lines begin further left than what is said of them.
    let options = help
        .lines()
        .filter(|line| line.find('-').is_some_and(|at| at <= 6));
    let options: Vec<&str> = options.map(str::trim_start).collect();
    let options: Vec<&str> = options
        .into_iter()
        .filter(|line| line.starts_with('-'))
        .collect();
    assert!(options.len() <= 13, "12 and --help: {options:?}");
    assert!(options.iter().any(|line| line.starts_with("--name <NAME>")));
}

#[test]
fn completions_and_manual_pages_are_made_from_the_same_definitions() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            printed(&["completions", shell]).contains("memory-max"),
            "{shell}"
        );
    }
    let here = tempfile::tempdir().expect("a temporary directory");
    let to = here.path().to_str().expect("a plain name");
    printed(&["man", "--out", to]);
    let page = fs::read_to_string(here.path().join("undercroft-run.1")).expect("a page for run");
    assert!(page.contains("memory\\-max"));
    assert!(
        !here.path().join("undercroft-manager.1").exists(),
        "hidden commands have no page"
    );
    assert!(!here.path().join("undercroft-help.1").exists());
    assert_eq!(printed(&["man", "run"]), page);
    let inner = fs::read_to_string(here.path().join("undercroft-tiers-add.1"));
    assert_eq!(printed(&["man", "tiers", "add"]), inner.expect("a page"));
    assert!(printed(&["man"]).contains("undercroft"));
    refused(&["man", "nothing"], 1, &["no subcommand", "run, vm, view"]);
    assert_eq!(printed(&["help", "run"]), printed(&["run", "--help"]));
}

#[test]
fn colours_stay_off_where_no_terminal_is() {
    let output = undercroft(&["doctor"]);
    assert!(!String::from_utf8_lossy(&output.stdout).contains('\x1b'));
}

#[test]
fn a_script_whose_interpreter_is_missing_is_named() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = folder.path().join("script");
    fs::write(&script, "#!/no/such\n").expect("a file");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("ours");
    let name = script.to_str().expect("UTF-8");
    refused(
        &["run", "--", name],
        126,
        &[name, "#! line", "/no/such: No such file"],
    );
}

#[test]
fn configurations_that_are_missing_or_have_no_tables_say_what_to_do() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("file.toml");
    let name = path.to_str().expect("UTF-8");
    let check = ["daemon", "check", "--config", name];
    refused(&check, 78, &["No such file", "name another with --config"]);
    for (text, word) in [
        (
            "memory = \"8G\"\n[class]\nweb = 4\n",
            "expected a table, such as [class.web]",
        ),
        (
            "memory = \"8G\"\ntier = [3]\n",
            "expected a table: [[tier]]",
        ),
        (
            "memory = \"8G\"\nclass = \"web\"\n",
            "expected tables, such as [class.web]",
        ),
        (
            "memory = \"8G\"\ntier = \"ram\"\n",
            "expected tables: [[tier]]",
        ),
    ] {
        fs::write(&path, text).expect("a file");
        refused(&check, 78, &[word, "mend it"]);
    }
}

#[test]
fn a_token_that_is_no_secret_stops_the_server_and_names_the_fix() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("token");
    let name = path.to_str().expect("UTF-8");
    let serve = ["serve", "--listen", "127.0.0.1:0", "--token-file", name];
    refused(&serve, 1, &["No such file", "openssl rand"]);
    fs::write(&path, "0123456789abcdef").expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("ours");
    refused(&serve, 1, &["every user may open it", "chmod 600"]);
    let socket = ["serve", "--listen", "unix:/x", "--token-file", name];
    refused(&socket, 2, &["needs no token"]);
}
