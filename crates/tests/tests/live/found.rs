//! How a run is found by what people know of it, and what `--log json` says.

use rustix::process::geteuid;
use serde_json::Value;
use undercroft_tests::{Job, Running, find, skip, turn, undercroft};

/// `undercroft` with these words, of runs in this folder.
fn asked(folder: &std::path::Path, words: &[&str]) -> Job {
    Job::new(undercroft())
        .args(words)
        .env("UNDERCROFT_DIR", folder)
}

fn clients(text: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(text).expect("JSON");
    all["clients"].as_array().expect("clients").clone()
}

#[test]
fn run_is_found_by_its_name_or_its_program_and_several_are_listed() {
    turn!(beside_others, "a plain run has no name");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let start = |name: &str| -> (Running, String) {
        let mut run = asked(
            folder.path(),
            &["run", "-q", "--name", name, "--", "sleep", "60"],
        )
        .start();
        let keeper = run.until("the run", 20, |_| {
            let shown = asked(folder.path(), &["status", name, "--json"]).run();
            shown.output.first()?; // there is no run of this name yet
            let of = clients(&shown.text()).pop()?;
            assert_eq!(of["name"], name);
            Some(of["pid"].to_string())
        });
        (run, keeper)
    };
    let (_first, first) = start("web-1");
    let said = |words: &[&str]| asked(folder.path(), words).run();
    assert!(
        said(&["status", "sleep"])
            .expect(0)
            .text()
            .contains("name web-1; up")
    );
    let (_second, second) = start("web-2");
    for (words, keeper) in [
        (&["set", "web-2", "memory-max=64M"][..], &second),
        (&["tiers", "show", "web-1"], &first),
        (&["tiers", "drain", "web-1", "2", "--json"], &first),
        (&["upgrade", "web-2", "--json"], &second),
        (&["status", "web-1", "--mrc"], &first),
    ] {
        let outcome = said(words).expect(0);
        assert!(outcome.text().contains(keeper.as_str()), "{outcome}");
    }
    let several = said(&["set", "sleep", "paused=yes"]).expect(1);
    for part in [
        "2 runs are called sleep",
        &first,
        &second,
        "web-1  sleep 60",
    ] {
        assert!(several.errors.contains(part), "{several}");
    }
    let none = said(&["status", "web"]).expect(1);
    assert!(none.errors.contains("no run is called web"), "{none}");
    for name in ["7up", "a b", "-w"] {
        let name = format!("--name={name}");
        said(&["run", &name, "--", "true"]).expect(2);
    }
}

#[test]
fn root_sees_the_runs_of_other_users_and_is_not_led_by_their_folders() {
    turn!(beside_others, "a plain run cannot be found");
    if !geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    let user = 54_300 + std::process::id() % 1000;
    let id = user.to_string();
    let own = tempfile::tempdir().expect("a scratch folder");
    let mut run = Job::new(undercroft())
        .args(["run", "-q", "--name", "theirs", "--", "sh", "-c"])
        .arg("grep Cap /proc/self/status; sleep 60 & echo child $!; wait")
        .before(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"])
        .before(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace"])
        .env_remove("UNDERCROFT_DIR")
        .start();
    let child = run.until("the child", 20, |run| {
        let text = std::fs::read_to_string(run.scratch().join("output")).ok()?;
        Some(text.split_once("child ")?.1.trim().to_owned())
    });
    let said = |words: &[&str]| asked(own.path(), words).run();
    assert_eq!(
        said(&["status"]).expect(0).text().trim(),
        "Nothing runs under undercroft now."
    );
    for word in ["theirs", &child] {
        said(&["status", word]).expect(1);
        let shown = said(&["status", word, "--all", "--json"]).expect(0);
        let found = clients(&shown.text());
        assert_eq!(found.len(), 1, "{shown}");
        assert_eq!(
            (&found[0]["uid"], &found[0]["name"]),
            (&user.into(), &"theirs".into())
        );
        assert!(found[0]["client_pid"].as_u64() > Some(1), "{shown}");
    }
    let text = said(&["status", "theirs", "--all"]).expect(0);
    assert!(
        text.text()
            .contains(&format!("name theirs; user {user}; up")),
        "{text}"
    );
    // Root changes nothing of another user's by it.
    said(&["set", "theirs", "paused=yes"]).expect(1);
    // Only root may ask.
    let refused = Job::new(undercroft())
        .args(["status", "--all"])
        .before(["setpriv", "--reuid", &id, "--clear-groups"])
        .run()
        .expect(1);
    assert!(refused.errors.contains("--all is for root"), "{refused}");
}

/// As a unit of systemd has it: `User=`, and a directory of that user as `UNDERCROFT_DIR`.
#[test]
fn root_sees_the_runs_of_a_user_in_the_directory_that_both_have_chosen() {
    turn!(beside_others, "a plain run cannot be found");
    if !geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    let user = 55_300 + std::process::id() % 1000;
    let id = user.to_string();
    let theirs = tempfile::tempdir().expect("a scratch folder");
    std::os::unix::fs::chown(theirs.path(), Some(user), None).expect("root");
    let mut run = asked(theirs.path(), &["run", "-q", "--", "sh", "-c"])
        .arg("echo begun; sleep 60")
        .before(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"])
        .before(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace"])
        .start();
    run.until("the program", 20, |run| {
        let text = std::fs::read_to_string(run.scratch().join("output")).ok()?;
        text.contains("begun").then_some(())
    });
    let shown = asked(theirs.path(), &["status", "--all"]).run().expect(0);
    assert!(
        shown.text().contains(&format!("user {user}; up")),
        "{shown}"
    );
}

fn lines(errors: &str) -> Vec<Value> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
    errors.lines().map(line).collect()
}

#[test]
fn log_for_programs_has_an_object_a_line() {
    turn!(beside_others, "a plain run says nothing");
    let run = |words: &[&str]| {
        Job::new(undercroft())
            .args(["run", "--log", "json"])
            .args(words)
            .run()
    };
    let ended = run(&["--name", "a", "-m", "999T", "--", "sh", "-c", "kill -9 $$"]).expect(137);
    let all = lines(&ended.errors);
    let events: Vec<_> = all
        .iter()
        .map(|line| line["event"].as_str().unwrap_or(""))
        .collect();
    assert_eq!(events, ["message", "started", "ended"], "{ended}");
    assert!(
        all[0]["text"]
            .as_str()
            .is_some_and(|text| text.contains("more than this machine"))
    );
    assert_eq!(
        (&all[1]["program"], &all[1]["name"]),
        (&"sh".into(), &"a".into())
    );
    assert_eq!(
        (&all[2]["signal"], &all[2]["pid"]),
        (&9.into(), &all[1]["pid"]),
        "{ended}"
    );
    assert!(all[2]["memory_bytes_peak"].as_u64().is_some(), "{ended}");
    assert!(all.iter().all(|line| {
        line["time"]
            .as_str()
            .is_some_and(|time| time.ends_with('Z'))
    }));
    let refused = run(&["--", "/no/such"]).expect(127);
    let all = lines(&refused.errors);
    assert_eq!(
        (&all[0]["event"], &all[0]["status"]),
        (&"failed".into(), &127.into())
    );
    assert!(all[0]["fix"].as_str().is_some(), "{refused}");
    let quiet = run(&["-q", "--", "true"]).expect(0);
    assert_eq!(quiet.errors, "");
}
