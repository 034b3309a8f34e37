//! Needs of a run, and what it leaves to the program: capabilities, and a container without the
//! device. `doctor` says the same as `run` does.

use rustix::process::geteuid;
use undercroft_tests::{Job, Outcome, build, find, skip, turn, undercroft};

/// A user that no one else has.
const USER: &str = "54221";

/// Programs in front of a command that gives it a user without rights, and these capabilities.
fn as_user(capabilities: &str) -> Vec<String> {
    let mut words: Vec<String> = [
        "setpriv",
        "--reuid",
        USER,
        "--regid",
        USER,
        "--clear-groups",
    ]
    .map(str::to_owned)
    .into();
    if !capabilities.is_empty() {
        let capabilities = capabilities.split(',').map(|name| format!("+{name}"));
        let capabilities = capabilities.collect::<Vec<_>>().join(",");
        words.extend(["--inh-caps".to_owned(), capabilities.clone()]);
        words.extend(["--ambient-caps".to_owned(), capabilities]);
    }
    words
}

/// A `/dev` without userfaultfd, as in a container.
fn without_device() -> Option<Vec<String>> {
    find("bwrap")?;
    let words = "bwrap --bind / / --dev /dev --cap-add ALL --";
    Some(words.split(' ').map(str::to_owned).collect())
}

fn doctor(before: &[String]) -> Outcome {
    Job::new(undercroft()).arg("doctor").before(before).run()
}

/// `undercroft run` of a command in 32 MiB. Its report would be in a folder of the test's user.
fn run(before: &[String]) -> Job {
    Job::new(undercroft())
        .args(["run", "-q", "-m", "32M", "--"])
        .before(before)
}

/// A program that fills more than its limit and verifies it.
fn filled(before: &[String]) -> Outcome {
    run(before)
        .arg(build("touch"))
        .args(["96", "--rounds", "2"])
        .run()
}

/// The capabilities of the program.
fn effective(before: &[String]) -> u64 {
    let outcome = run(before)
        .args(["sed", "-n", "s/^CapEff:.//p", "/proc/self/status"])
        .run()
        .expect(0);
    u64::from_str_radix(outcome.text().trim(), 16).expect("a mask")
}

const PTRACE: u64 = 1 << 19;
const NICE: u64 = 1 << 23;

#[test]
fn users_with_the_capability_run_what_doctor_says_and_without_it_neither_works() {
    turn!(beside_others, "a plain run needs no rights");
    if !geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    for (capabilities, status) in [
        ("", 1),
        ("sys_nice", 1),
        ("perfmon", 1),
        ("bpf", 1),
        ("sys_ptrace", 0),
    ] {
        let before = as_user(capabilities);
        let said = doctor(&before).expect(status);
        if status == 0 {
            filled(&before).expect(0);
        } else {
            let recipe = format!("setpriv --reuid {USER} --regid {USER} --init-groups");
            assert!(said.text().contains(&recipe), "{said}");
            let refused = filled(&before).expect(125);
            assert!(refused.errors.contains("CAP_SYS_PTRACE"), "{refused}");
        }
    }
}

#[test]
fn program_does_not_keep_the_capability_that_undercroft_was_given() {
    turn!(beside_others, "a plain run takes no capability");
    if !geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    let mode = std::fs::metadata("/dev/userfaultfd");
    let mode = mode.map_or(0, |of| {
        std::os::unix::fs::PermissionsExt::mode(&of.permissions())
    });
    let has_device = mode & 0o006 == 0o006;
    let before = as_user("sys_ptrace,sys_nice");
    let expected = if has_device { NICE } else { NICE | PTRACE };
    assert_eq!(
        effective(&before),
        expected,
        "the device opens: {has_device}"
    );
    let group = std::fs::metadata("/dev/userfaultfd").ok();
    let group = group.map(|of| std::os::unix::fs::MetadataExt::gid(&of).to_string());
    if let Some(group) = group.filter(|_| mode & 0o060 == 0o060) {
        // The user is of the device's group: the program needs the capability no more.
        let mut words = before;
        words[4] = group;
        assert_eq!(effective(&words), NICE);
    }
    // Root's programs have it by their user, as without us.
    assert_ne!(effective(&[]) & PTRACE, 0);
}

#[test]
fn without_the_device_the_system_call_serves() {
    turn!(beside_others, "a plain run needs no device");
    let Some(before) = without_device().filter(|_| geteuid().is_root()) else {
        return skip("needs root and bwrap");
    };
    let said = doctor(&before).expect(0);
    assert!(
        said.text().contains("the system call serves instead"),
        "{said}"
    );
    filled(&before).expect(0);
    // Forks and programs that it starts, each with a userfaultfd of its own.
    let script = "for i in 1 2; do (exec sort) < $0 | cksum & done; wait";
    let text: String = (0..50_000u32)
        .map(|at| format!("{}\n", at.reverse_bits()))
        .collect();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("lines");
    std::fs::write(&path, text).expect("a file");
    let sorted = |job: Job| {
        let job = job.args(["-c", script]).arg(&path);
        job.run().expect(0).text()
    };
    let plain = sorted(Job::new("sh"));
    assert_eq!(sorted(run(&before).arg("sh")), plain);
    // Neither the device nor the call.
    let mut words = before.clone();
    words.extend(as_user(""));
    let refused = filled(&words).expect(125);
    assert!(refused.errors.contains("--cap-add SYS_PTRACE"), "{refused}");
}

#[test]
fn without_proc_or_sys_doctor_says_which_to_mount() {
    turn!(beside_others, "a plain run asks no doctor");
    if find("bwrap").is_none() || !geteuid().is_root() {
        return skip("needs root and bwrap");
    }
    for place in ["proc", "sys"] {
        let words =
            format!("bwrap --bind / / --dev-bind /dev /dev --tmpfs /{place} --cap-add ALL --");
        let before: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let said = doctor(&before).text();
        let mounts = said.lines().filter(|line| line.contains("fix: mount"));
        let of_it = format!("fix: mount -t {place}");
        assert!(mounts.clone().count() > 0, "{said}");
        assert!(mounts.clone().all(|line| line.contains(&of_it)), "{said}");
        for wrong in [
            "cannot read the version",
            "perf_event_paranoid",
            "fix: a kernel built",
        ] {
            assert!(!said.contains(wrong), "{said}");
        }
    }
}
