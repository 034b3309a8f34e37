//! The figures that a user chooses a limit by, and how a run is found.

use undercroft_tests::{Job, MIB, Running, build, turn, undercroft};

/// The program fills 96 MiB and goes on for some seconds.
fn filled(limit: &[&str]) -> Running {
    let words = ["run"]
        .into_iter()
        .chain(limit.iter().copied())
        .chain(["--"]);
    Job::new(undercroft())
        .args(words)
        .args([build("touch").as_os_str()])
        .args(["96", "--rounds", "40"])
        .timeout(100)
        .start()
}

#[test]
fn memory_and_its_peak_are_known_without_a_limit_and_far_below_one() {
    turn!(beside_others, "a plain run has no figures");
    for (limit, said) in [
        (&[][..], "MiB, without a limit; try -m "),
        (&["-m", "4G"], "MiB, within the limit of 4.0 GiB"),
    ] {
        let mut run = filled(limit);
        let shown = run.until("96 MiB in the status", 20, |run| {
            let shown = run.status()?;
            (shown["memory_bytes"].as_u64()? >= 96 * MIB).then_some(shown)
        });
        for key in [
            "memory_bytes",
            "memory_bytes_peak",
            "resident_bytes",
            "dram_bytes",
        ] {
            let bytes = shown[key].as_u64().unwrap_or(0);
            assert!((96 * MIB..112 * MIB).contains(&bytes), "{key}: {shown}");
        }
        let outcome = run.wait().expect(0);
        assert!(outcome.errors.contains(said), "{outcome}");
        assert_eq!(outcome.errors.lines().count(), 1, "{outcome}");
    }
}

#[test]
fn peak_of_a_program_that_swaps_is_what_it_has_in_memory_and_out_of_it() {
    turn!(one_at_a_time, "a plain run has no report");
    let outcome = Job::new(build("touch"))
        .args(["96", "--rounds", "2"])
        .limit(32 * MIB)
        .run()
        .expect(0);
    let peak = outcome.number("memory_bytes_peak").unwrap_or(0.0) as u64;
    assert!((96 * MIB..112 * MIB).contains(&peak), "{peak}: {outcome}");
    let most = outcome.number("dram_bytes_peak").unwrap_or(0.0) as u64;
    assert!(most < 40 * MIB, "{most}: {outcome}");
}

/// The report comes behind the program's own output, through a file and through a pipe.
#[test]
fn report_on_standard_output_comes_behind_the_programs() {
    turn!(beside_others, "a plain run has no report");
    for to in ["-", "/dev/stdout"] {
        let outcome = Job::new(undercroft())
            .args([
                "run",
                "-q",
                "--report",
                to,
                "--",
                "sh",
                "-c",
                "echo out; kill -9 $$",
            ])
            .run()
            .expect(137);
        let text = outcome.text();
        let report = text.strip_prefix("out\n").expect("the program's output");
        let report: serde_json::Value = serde_json::from_str(report).expect("a report");
        assert_eq!(report["signal"], 9, "{outcome}");
        assert!(report["pid"].as_u64() > Some(1), "{outcome}");
        assert!(
            report["started_unix_seconds"].as_f64() > Some(1.7e9),
            "{outcome}"
        );
    }
}

/// A child of the program names the run, and a folder of its own hides a run from the others.
#[test]
fn run_is_found_by_any_of_its_processes_and_only_where_it_is() {
    turn!(beside_others, "a plain run cannot be found");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut run = Job::new("sh")
        .args(["-c", "sleep 60 & echo $!; wait"])
        .env("UNDERCROFT_DIR", folder.path())
        .options::<&str>([])
        .start();
    let child = run.until("the child", 20, |run| {
        let text = std::fs::read_to_string(run.scratch().join("output")).ok()?;
        text.trim().parse::<i32>().ok()
    });
    let keeper = run.keeper().to_string();
    let said = |words: &[&str], there: bool| {
        let job = Job::new(undercroft()).args(words);
        if there {
            job.env("UNDERCROFT_DIR", folder.path()).run()
        } else {
            job.run()
        }
    };
    let child = child.to_string();
    let shown = said(&["status", &child], true).expect(0);
    assert!(shown.text().starts_with(&keeper), "{shown}");
    let set = said(&["set", &child, "memory-max=64M"], true).expect(0);
    assert!(
        set.text()
            .contains(&format!("Run {keeper} keeps to 64.0 MiB")),
        "{set}"
    );
    said(&["status", &child], false).expect(1);
    // Others are not seen from there, and `upgrade` touches what `status` shows.
    let other = Job::new("sleep").args(["60"]).options::<&str>([]).start();
    let (there, all) = (
        said(&["status"], true).expect(0),
        other.keeper().to_string(),
    );
    assert!(!there.text().contains(&all), "{there}");
    let upgraded = said(&["upgrade", "--json"], true).expect(0);
    assert!(upgraded.text().contains(&keeper), "{upgraded}");
    assert!(!upgraded.text().contains(&all), "{upgraded}");
}
