//! A memory cgroup (v1) for one run: limit, peak, and removal with everything in it.

use super::RigError;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

const ROOT: &str = "/sys/fs/cgroup/memory";
/// How long leftover processes may take to end, before and after SIGKILL.
const DRAIN: Duration = Duration::from_secs(3);

/// A directory under the memory controller. On drop its processes are killed, then it is removed.
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Whether the v1 memory controller is mounted and writable.
    pub(crate) fn available() -> bool {
        Path::new(ROOT).join("memory.limit_in_bytes").exists() && can_make_groups(ROOT)
    }

    /// Creates a group. `limit`: None = only metered. Swappiness is set to 100, so that anonymous
    /// memory is reclaimed first.
    pub(crate) fn create(limit: Option<Bytes>) -> Result<Cgroup, RigError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(ROOT).join(format!("undercroft-lab-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(RigError::failed(format!(
            "create cgroup {}",
            path.display()
        )))?;
        let group = Cgroup { path };
        group.write("memory.swappiness", "100")?;
        if let Some(limit) = limit {
            group.write("memory.limit_in_bytes", &limit.0.to_string())?;
        }
        Ok(group)
    }

    /// The file into which a process writes itself.
    pub(crate) fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Highest use so far, as the kernel counted it.
    pub(crate) fn peak(&self) -> Bytes {
        let text = fs::read_to_string(self.path.join("memory.max_usage_in_bytes"));
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

/// Whether a directory can be made in `root`. It is tried, because capabilities and mount options
/// both decide it.
fn can_make_groups(root: &str) -> bool {
    let probe = Path::new(root).join(format!(
        "undercroft-lab-probe-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    fs::create_dir(&probe).is_ok_and(|()| fs::remove_dir(&probe).is_ok())
}
