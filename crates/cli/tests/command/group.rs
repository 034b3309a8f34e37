//! Limits in a control group with a memory limit. Needs root, and control groups of either version.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// A control group of 200 MiB, removed when it is dropped.
struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

impl Group {
    fn new() -> Option<Group> {
        let has_memory = |root: &Path| {
            let on = fs::read_to_string(root.join("cgroup.subtree_control"));
            on.is_ok_and(|on| on.split_whitespace().any(|name| name == "memory"))
        };
        let first = Path::new("/sys/fs/cgroup/memory");
        let second = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
        let (root, file) = if first.join("memory.limit_in_bytes").exists() {
            (first, "memory.limit_in_bytes")
        } else {
            let root = second.into_iter().find(|root| has_memory(root))?;
            (root, "memory.max")
        };
        let path = root.join(format!("undercroft-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let group = Group(path);
        fs::write(group.0.join(file), (200 * MIB).to_string()).ok()?;
        Some(group)
    }

    /// The limit of a run in the group, and what it says.
    fn run(&self, options: &[&str]) -> (Option<u64>, String) {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let report = folder.path().join("report");
        let script = "echo $$ > \"$1\"; shift; exec \"$@\"";
        let output = Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(self.0.join("cgroup.procs"))
            .args([
                env!("CARGO_BIN_EXE_undercroft"),
                "run",
                "--wait-all",
                "--report",
            ])
            .arg(&report)
            .args(options)
            .args(["--", "true"])
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let report = fs::read(&report).expect(&said);
        let report: serde_json::Value = serde_json::from_slice(&report).expect("JSON");
        (report["memory_max_bytes"].as_u64(), said)
    }
}

#[test]
fn a_percentage_and_auto_are_of_the_control_groups_limit_and_none_is_warned_of() {
    let Some(group) = Group::new() else {
        let line = "SKIPPED: a_percentage_and_auto_are_of_the_control_groups_limit_and_none_is_warned_of: \
                    no memory control group can be made\n";
        let _ = std::io::stderr().write_all(line.as_bytes());
        return;
    };
    let (limit, said) = group.run(&["-m", "50%"]);
    assert_eq!(limit, Some(100 * MIB), "{said}");
    assert!(!said.contains("control group"), "{said}");
    let (limit, said) = group.run(&["-m", "auto"]);
    assert_eq!(limit, Some(180 * MIB), "{said}");
    assert!(!said.contains("control group"), "{said}");
    let (limit, said) = group.run(&[]);
    assert_eq!(limit, None);
    assert!(
        said.contains("limit of 200.0 MiB") && said.contains("-max auto"),
        "{said}"
    );
    let (_, said) = group.run(&["--quiet"]);
    assert!(!said.contains("control group"), "{said}");
    let (_, said) = group.run(&["-m", "195M"]);
    assert!(said.contains("this control group, 200.0 MiB"), "{said}");
}
