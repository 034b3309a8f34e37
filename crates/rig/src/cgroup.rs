//! A memory cgroup (v1 or v2) for one run: limit, peak, and removal with everything in it.

use super::RigError;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

/// Where the first version's memory controller is mounted.
const FIRST: &str = "/sys/fs/cgroup/memory";
/// Where the second version is mounted: alone, or beside the first.
const SECOND: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// How long leftover processes may take to end, before and after SIGKILL.
const DRAIN: Duration = Duration::from_secs(3);

/// The memory controller of a machine, in one of its versions.
#[derive(Debug, PartialEq, Eq)]
struct Controller {
    /// The folder in which groups are made.
    root: PathBuf,
    /// The file of a group's limit.
    limit: &'static str,
    /// The file of its highest use.
    peak: &'static str,
    /// Files of each group with other values than the kernel's, and these values.
    also: &'static [(&'static str, &'static str)],
    /// The file and the value with which no page of a group goes to swap.
    no_swap: (&'static str, &'static str),
}

impl Controller {
    /// The controller in `first`, if that has the files of the first version.
    fn first(first: &Path) -> Option<Controller> {
        first
            .join("memory.limit_in_bytes")
            .exists()
            .then(|| Controller {
                root: first.to_owned(),
                limit: "memory.limit_in_bytes",
                peak: "memory.max_usage_in_bytes",
                // Anonymous memory is reclaimed first. The second version has no such file.
                also: &[("memory.swappiness", "100")],
                no_swap: ("memory.swappiness", "0"),
            })
    }

    /// The controller in `second`, if groups there can have the memory controller. It is switched
    /// on for them if it is not yet.
    fn second(second: &Path) -> Option<Controller> {
        let has = |file: &str| {
            let text = fs::read_to_string(second.join(file)).unwrap_or_default();
            text.split_whitespace().any(|word| word == "memory")
        };
        let on = "cgroup.subtree_control";
        let can =
            has("cgroup.controllers") && (has(on) || fs::write(second.join(on), "+memory").is_ok());
        can.then(|| Controller {
            root: second.to_owned(),
            limit: "memory.max",
            peak: "memory.peak",
            also: &[],
            no_swap: ("memory.swap.max", "0"),
        })
    }

    /// The one of this machine, if groups can be made.
    fn here() -> Option<Controller> {
        let second = || SECOND.iter().find_map(|at| Self::second(Path::new(at)));
        let found = Self::first(Path::new(FIRST)).or_else(second)?;
        can_make_groups(&found.root).then_some(found)
    }
}

/// A directory under the memory controller. On drop its processes are killed, then it is removed.
pub(crate) struct Cgroup {
    path: PathBuf,
    controller: Controller,
}

impl Cgroup {
    /// Whether groups with the memory controller can be made.
    pub(crate) fn available() -> bool {
        Controller::here().is_some()
    }

    /// Creates a group. `limit`: None = only metered.
    pub(crate) fn create(limit: Option<Bytes>) -> Result<Cgroup, RigError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let controller = Controller::here().ok_or_else(|| RigError::Unavailable {
            rig: "cgroup",
            why: "memory cgroups cannot be made here".to_owned(),
            fix: "run as root on a kernel with memory cgroups",
        })?;
        let name = format!("undercroft-lab-{}-{number}", std::process::id());
        let path = controller.root.join(name);
        fs::create_dir(&path).map_err(RigError::failed(format!(
            "create cgroup {}",
            path.display()
        )))?;
        let group = Cgroup { path, controller };
        for (file, value) in group.controller.also {
            group.write(file, value)?;
        }
        if let Some(limit) = limit {
            group.limit(limit)?;
        }
        Ok(group)
    }

    /// Limits the group to so much.
    pub(crate) fn limit(&self, limit: Bytes) -> Result<(), RigError> {
        self.write(self.controller.limit, &limit.0.to_string())
    }

    /// Creates a group as a container without swap has it.
    pub(crate) fn without_swap(limit: Bytes) -> Result<Cgroup, RigError> {
        let group = Cgroup::create(Some(limit))?;
        let (file, value) = group.controller.no_swap;
        // A kernel without swap has no such file.
        if group.path.join(file).exists() {
            group.write(file, value)?;
        }
        Ok(group)
    }

    /// The file into which a process writes itself.
    pub(crate) fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Highest use so far, as the kernel counted it.
    pub(crate) fn peak(&self) -> Bytes {
        let text = fs::read_to_string(self.path.join(self.controller.peak));
        Bytes(
            text.ok()
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(0),
        )
    }

    fn write(&self, name: &str, value: &str) -> Result<(), RigError> {
        let path = self.path.join(name);
        fs::write(&path, value).map_err(RigError::failed(format!(
            "write {value} to {}",
            path.display()
        )))
    }

    fn members(&self) -> Vec<String> {
        let text = fs::read_to_string(self.procs()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Waits for the processes to end, then kills those that remain. Returns false if some are
    /// still there.
    pub(crate) fn empty(&self) -> bool {
        for kill in [false, true] {
            if kill && !self.members().is_empty() {
                let _ = std::process::Command::new("kill")
                    .arg("-KILL")
                    .args(self.members())
                    .status();
            }
            let until = Instant::now() + DRAIN;
            while Instant::now() < until {
                if self.members().is_empty() {
                    return true;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        false
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        self.empty();
        let until = Instant::now() + DRAIN;
        while let Err(error) = fs::remove_dir(&self.path) {
            if Instant::now() > until {
                eprintln!(
                    "lab: cgroup {} stays behind: {error}; remove it with rmdir",
                    self.path.display()
                );
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The groups that the rigs of process `pid` have now.
pub fn groups_of(pid: u32) -> Vec<PathBuf> {
    let ours = format!("undercroft-lab-{pid}-");
    let roots = [FIRST].into_iter().chain(SECOND);
    let all = roots.filter_map(|root| fs::read_dir(root).ok());
    let paths = all.flatten().flatten();
    let named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(&ours)
    };
    paths.map(|entry| entry.path()).filter(named).collect()
}

/// Whether a directory can be made in `root`. It is tried, because capabilities and mount options
/// both decide it.
fn can_make_groups(root: &Path) -> bool {
    let probe = root.join(format!(
        "undercroft-lab-probe-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    fs::create_dir(&probe).is_ok_and(|()| fs::remove_dir(&probe).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second version, by files that stand for the kernel's.
    #[test]
    fn the_second_version_is_switched_on_where_it_is_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |file: &str, text: &str| {
            fs::write(folder.path().join(file), text).expect("a file");
        };
        assert_eq!(Controller::second(folder.path()), None, "no controllers");
        put("cgroup.controllers", "cpu hugetlb\n");
        assert_eq!(
            Controller::second(folder.path()),
            None,
            "another controller"
        );
        put("cgroup.controllers", "cpu memory pids\n");
        let found = Controller::second(folder.path()).expect("the memory controller");
        assert_eq!((found.limit, found.peak), ("memory.max", "memory.peak"));
        let on = folder.path().join("cgroup.subtree_control");
        assert_eq!(fs::read_to_string(&on).expect("written"), "+memory");
        put("cgroup.subtree_control", "memory pids\n");
        Controller::second(folder.path()).expect("the memory controller");
        assert_eq!(fs::read_to_string(&on).expect("as it was"), "memory pids\n");
        assert_eq!(Controller::first(folder.path()), None);
    }
}
