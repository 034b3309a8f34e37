//! The miss-ratio curve of a run, beside runs under the other limits.

use undercroft_tests::{Job, MIB, Outcome, build, say, turn, undercroft};

/// Goes four times round 96 MiB whose words are checked, over a file.
fn job(limit: u64, folder: &tempfile::TempDir) -> Job {
    let spill = folder.path().join(format!("spill-{limit}"));
    Job::new(build("touch"))
        .args(["96", "--rounds", "4"])
        .limit(limit)
        .options(["--policy", "lru", "--prefetch", "none"])
        .tier(&format!("file:{},size=1G", spill.display()))
}

fn number(outcome: &Outcome, path: &str) -> f64 {
    outcome
        .number(path)
        .unwrap_or_else(|| panic!("no number `{path}` in the report: {outcome}"))
}

/// The report of a run on another limit: reads, at least, at most.
fn said(outcome: &Outcome, limit: u64) -> (f64, f64, Option<f64>) {
    let report = outcome.report.as_ref().expect("a report");
    let limits = report["mrc"]["limits"].as_array().cloned();
    let limits = limits.unwrap_or_else(|| panic!("no curve in the report: {outcome}"));
    let of = |point: &&serde_json::Value| point["memory_max_bytes"].as_u64() == Some(limit);
    let point = limits.iter().find(of);
    let point = point.unwrap_or_else(|| panic!("no point at {limit}: {limits:?}"));
    let field = |name: &str| point[name].as_f64();
    let least = field("swap_in_least").expect("a number");
    let swap_in = field("swap_in").expect("a number");
    (swap_in, least, field("swap_in_most"))
}

#[test]
fn curve_of_one_run_is_near_the_faults_of_runs_under_other_limits() {
    let name = "curve_of_one_run_is_near_the_faults_of_runs_under_other_limits";
    turn!(one_at_a_time, "a plain run has no limit");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (present, other, enough) = (48 * MIB, 72 * MIB, 144 * MIB);
    let one = job(present, &folder).run().expect(0);
    let swap_in = number(&one, "faults.swap_in");
    assert!(swap_in > 10_000.0, "{one}");
    assert_eq!(said(&one, present), (swap_in, swap_in, Some(swap_in)));
    let (none, least, _) = said(&one, enough);
    assert!(none < swap_in / 100.0 && least == 0.0, "{one}");
    let two = job(other, &folder).run().expect(0);
    let (measured, estimate) = (number(&two, "faults.swap_in"), said(&one, other).0);
    say(&format!(
        "{name}: {estimate} estimated, {measured} measured"
    ));
    let off = (estimate / measured - 1.0).abs();
    assert!(off < 0.15, "{estimate}, {measured}: {one} {two}");
}

#[test]
fn status_shows_other_limits_while_the_program_runs() {
    turn!(beside_others, "a plain run has no status");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let home = folder.path().display().to_string();
    let run = job(48 * MIB, &folder).env("UNDERCROFT_DIR", &home).start();
    let pid = run.pid().to_string();
    let ask = |words: &[&str]| {
        let args = ["status", "--mrc"].iter().chain(words);
        let job = Job::new(undercroft())
            .args(args)
            .env("UNDERCROFT_DIR", &home);
        job.run()
    };
    let status = |words: &[&str]| ask(words).expect(0).text();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let text = loop {
        // Others may run beside it. At first there is no run of this number yet.
        let text = ask(&[&pid]).text();
        if text.contains("reads") {
            break text;
        }
        assert!(std::time::Instant::now() < deadline, "no curve: {text}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert!(text.starts_with(&run.keeper().to_string()), "{text}");
    let present = text.lines().find(|line| line.starts_with('>'));
    assert!(
        present.is_some_and(|line| line.contains(" 48.0 MiB ")),
        "{text}"
    );
    let one = status(&[&pid]);
    let limits = one.lines().filter(|line| line.contains(" MiB "));
    assert_eq!(limits.count(), 12, "{one}");
    let json: serde_json::Value = serde_json::from_str(&status(&[&pid, "--json"])).expect("JSON");
    let limits = json["clients"][0]["mrc"]["limits"].as_array();
    assert_eq!(limits.map(Vec::len), Some(12), "{json}");
    run.wait().expect(0);
}
