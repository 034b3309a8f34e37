//! Bad input, missing permissions and full disks: clear errors and right exit statuses, never a
//! wrong byte.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use undercroft_tests::{
    Job, MIB, Outcome, beside_others, build, find, one_at_a_time, plain_only, skip, turn,
    undercroft,
};

/// Runs `undercroft WORDS` as they are.
fn undercroft_with(words: &[&str]) -> Outcome {
    Job::new(undercroft()).args(words).run()
}

/// The status is one of `codes`, and standard error has `words`, which say what was wrong.
#[track_caller]
fn refused(outcome: Outcome, codes: &[i32], words: &[&str]) {
    assert!(
        outcome.code().is_some_and(|code| codes.contains(&code)),
        "expected a status of {codes:?}: {outcome}"
    );
    let errors = outcome.errors.to_lowercase();
    for word in words {
        assert!(
            errors.contains(&word.to_lowercase()),
            "the message should name `{word}`: {outcome}"
        );
    }
    assert!(
        !errors.contains("panicked"),
        "an error message, not a panic: {outcome}"
    );
}

// Usage errors are status 2 of the command itself; `run` may give 125 for every failure of ours.
const USAGE: &[i32] = &[2, 125];

macro_rules! needs_undercroft {
    ($name:expr) => {
        turn!(one_at_a_time, "it tests the binary itself");
    };
}

#[test]
fn tier_path_that_cannot_be_written_is_refused() {
    needs_undercroft!("tier_path_that_cannot_be_written_is_refused");
    for path in ["/nowhere/at/all/swap", "/proc/undercroft-swap"] {
        let tier = format!("file:{path},size=64M");
        let run = undercroft_with(&["run", "--memory-max", "64M", "--tier", &tier, "--", "true"]);
        refused(run, USAGE, &[path]);
    }
}

#[test]
fn exit_status_is_the_programs_own() {
    let _turn = beside_others();
    for code in [0, 1, 3, 42, 125, 255] {
        let job = Job::new(build("touch")).args(["8", "--exit", &code.to_string()]);
        job.limit(64 * MIB).run().expect(code);
    }
}

#[test]
fn signal_n_gives_128_plus_n() {
    let _turn = beside_others();
    for number in [1, 6, 9, 10, 11, 15] {
        let job = Job::new(build("touch")).args(["8", "--signal", &number.to_string()]);
        job.limit(64 * MIB).run().expect(128 + number);
    }
}

#[test]
fn exit_status_and_output_pass_while_swapping() {
    let _turn = beside_others();
    let outcome = Job::new(build("touch"))
        .args(["48", "--rounds", "2", "--fork", "2", "--exit", "7"])
        .limit(16 * MIB)
        .run()
        .expect(7);
    assert_eq!(outcome.text(), "ready\n", "{outcome}");
    outcome.expect_swapping(4000.0);
}

#[test]
fn standard_input_and_arguments_reach_the_program() {
    let _turn = beside_others();
    let script = "printf '%s|' \"$@\"; cat";
    let outcome = Job::new("sh")
        .args(["-c", script, "name", "two words", "", "--memory-max", "*"])
        .input("from standard input\n")
        .limit(64 * MIB)
        .run()
        .expect(0);
    assert_eq!(
        outcome.text(),
        "two words||--memory-max|*|from standard input\n",
        "{outcome}"
    );
}

#[test]
fn report_path_that_cannot_be_written_is_refused_or_warned() {
    needs_undercroft!("report_path_that_cannot_be_written_is_refused_or_warned");
    let run = undercroft_with(&[
        "run",
        "--memory-max",
        "64M",
        "--report",
        "/nowhere/report.json",
        "--",
        "true",
    ]);
    refused(run, &[0, 2, 125], &["/nowhere/report.json"]);
}

/// The binary and the program, in a place where a user other than root can run them.
fn for_everyone() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::Builder::new()
        .prefix("undercroft-tests-")
        .tempdir_in("/tmp")
        .expect("a scratch folder");
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    };
    open(folder.path());
    let binary = folder.path().join("undercroft");
    let program = folder.path().join("touch");
    std::fs::copy(undercroft(), &binary).expect("a copy of the binary");
    std::fs::copy(build("touch"), &program).expect("a copy of the program");
    open(&binary);
    open(&program);
    (folder, binary, program)
}

/// Without CAP_SYS_PTRACE the kernel refuses fork events. Then the run is refused clearly, or no
/// byte is lost in any fork child. Anything else is a failure.
#[test]
fn without_capabilities_it_refuses_clearly_or_works_exactly() {
    needs_undercroft!("without_capabilities_it_refuses_clearly_or_works_exactly");
    if !rustix::process::geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    let (folder, binary, program) = for_everyone();
    let drop_ptrace = [
        "setpriv",
        "--bounding-set=-sys_ptrace",
        "--inh-caps=-sys_ptrace",
    ];
    let other_user = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    for wrapper in [&drop_ptrace[..], &other_user[..]] {
        let outcome = Job::new(wrapper[0])
            .args(&wrapper[1..])
            .arg(&binary)
            .args(["run", "--quiet", "--memory-max", "16M", "--"])
            .arg(&program)
            .args(["48", "--rounds", "1", "--fork", "2", "--exit", "7"])
            .folder(folder.path())
            .env("TMPDIR", "/tmp")
            .run();
        match outcome.code() {
            Some(7) => {}
            Some(77 | 125) => assert!(
                ["permission", "cap_sys_ptrace", "capability", "userfaultfd"]
                    .iter()
                    .any(|word| outcome.errors.to_lowercase().contains(word)),
                "a refusal names what is missing: {outcome}"
            ),
            _ => panic!("neither refused nor exact ({wrapper:?}): {outcome}"),
        }
    }
}

/// ENOSPC: the file tier is on a file system far smaller than the size it was given. The program
/// must run on exactly, or be stopped with a clear error.
#[test]
fn full_disk_never_costs_a_byte() {
    needs_undercroft!("full_disk_never_costs_a_byte");
    if !rustix::process::geteuid().is_root() || find("unshare").is_none() {
        return skip("needs root and unshare for a small file system of its own");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let small = folder.path().display().to_string();
    // tmpfs refuses O_DIRECT on old kernels; the refusal then names it.
    let outcome = Job::new(undercroft())
        .before(["unshare", "-m", "sh", "-c"])
        .before([format!(
            "mount -t tmpfs -o size=8M none {small} && exec \"$@\""
        )])
        .before(["sh"])
        .args(["run", "--quiet", "--memory-max", "16M", "--tier"])
        .arg(format!("file:{small}/spill,size=1G"))
        .arg("--")
        .arg(build("touch"))
        .args(["64", "--random-data", "--rounds", "2", "--exit", "7"])
        .run();
    match outcome.code() {
        Some(7) => {}
        Some(2 | 125) => assert!(
            ["space", "full", "enospc", "o_direct", "direct"]
                .iter()
                .any(|word| outcome.errors.to_lowercase().contains(word)),
            "a refusal says why: {outcome}"
        ),
        _ => panic!("neither exact nor stopped with an error: {outcome}"),
    }
}

/// The program frees what fills the tier. Pages above the limit must then soon move there.
#[test]
fn room_that_comes_back_is_used() {
    needs_undercroft!(name);
    let Some(python) = find("python3") else {
        return skip("no python3");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = "import hashlib, mmap, os, time\n\
        waste = mmap.mmap(-1, 20 << 20, mmap.MAP_PRIVATE)\n\
        for at in range(0, 20 << 20, 4096): waste[at:at + 4096] = os.urandom(4096)\n\
        data = [os.urandom(1 << 20) for _ in range(36)]\n\
        sums = [hashlib.md5(part).digest() for part in data]\n\
        time.sleep(0.5)\n\
        waste.close()\n\
        time.sleep(4)\n\
        assert sums == [hashlib.md5(part).digest() for part in data]\n";
    let outcome = Job::new(python)
        .args(["-c", script])
        .limit(24 * MIB)
        .tier(&format!(
            "file:{},size=20M",
            folder.path().join("tier").display()
        ))
        .run()
        .expect(0);
    let seconds = outcome.number("limit_exceeded.seconds");
    let wall = outcome.number("wall_seconds");
    println!("above the limit for {seconds:?} of {wall:?} s");
    assert!(
        outcome
            .number("limit_exceeded.bytes_peak")
            .is_some_and(|bytes| bytes > 8e6),
        "it was far above: {outcome}"
    );
    assert!(
        seconds < wall.map(|wall| wall - 2.0),
        "it went on above the limit: {outcome}"
    );
}

/// The tiers hold far less than the pages that must leave. By default pages stay, and the report
/// says by how much the limit is exceeded. With `--when-full kill` the run ends with 125 and says
/// why.
#[test]
fn full_tiers_let_the_program_stay_or_end_it_as_asked() {
    let _turn = one_at_a_time();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let tier = |name: &str| format!("file:{},size=12M", folder.path().join(name).display());
    let job = Job::new(build("touch"))
        .args([
            "64",
            "--random-data",
            "--rounds",
            "2",
            "--hold",
            "3",
            "--exit",
            "7",
        ])
        .limit(16 * MIB);
    let stayed = job.clone().tier(&tier("stay")).run().expect(7);
    if plain_only() {
        return;
    }
    assert!(
        stayed
            .number("limit_exceeded.bytes_peak")
            .is_some_and(|bytes| bytes > 16e6),
        "the report says how far the limit was exceeded: {stayed}"
    );
    // Each of them is a page that was moved out and back in vain. Without a rest between tries
    // there would be tens of thousands.
    let refused_stores = stayed.number("counters.refused_store");
    let seconds = stayed.number("limit_exceeded.seconds");
    println!("refused stores: {refused_stores:?} in {seconds:?} s");
    assert!(
        refused_stores.is_some_and(|pages| pages < 1000.0 + 250.0 * seconds.unwrap_or(0.0)),
        "while nothing has room, little is tried: {stayed}"
    );
    let killed = job
        .tier(&tier("kill"))
        .options(["--when-full", "kill"])
        .run();
    refused(killed, &[125], &["full"]);
}
