//! Kernel swap for one run, set up and taken down again: a zram device or a file, with or without
//! zswap in front.

use super::{Facts, RigError};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

/// How long the rig waits for another swap to go before it refuses.
const OTHER_SWAP_PATIENCE: Duration = Duration::from_secs(30);
const ZRAM: &str = "/sys/block/zram0";
const ZSWAP: &str = "/sys/module/zswap/parameters";

/// Active swap. On drop: `swapoff`, then the zswap parameters, the device or the file are restored.
pub(crate) struct SwapGuard {
    path: PathBuf,
    on: bool,
    backing: Backing,
    zswap_before: Vec<(PathBuf, String)>,
}

enum Backing {
    Zram,
    File,
}

/// Locks out every other lab on this machine: the kernel has one zram0 and one zswap.
pub(crate) fn lock() -> Result<File, RigError> {
    let path = std::env::temp_dir().join("undercroft-lab.lock");
    let what = || RigError::failed(format!("lock {}", path.display()));
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(what())?;
    if file.try_lock().is_err() {
        eprintln!(
            "lab: waiting for another lab on this machine ({})",
            path.display()
        );
        file.lock().map_err(what())?;
    }
    Ok(file)
}

/// The active swap areas, without the header line.
pub fn active() -> Vec<String> {
    let text = fs::read_to_string("/proc/swaps").unwrap_or_default();
    text.lines().skip(1).map(str::to_owned).collect()
}

/// Waits a while for another swap to go, such as that of tests on the same machine. Then refuses.
pub fn wait_until_alone() -> Result<(), RigError> {
    let until = Instant::now() + OTHER_SWAP_PATIENCE;
    let mut said = false;
    while let Some(other) = active().first() {
        if crate::interrupt::requested() {
            return Err(RigError::Interrupted);
        }
        if Instant::now() > until {
            return Err(RigError::OtherSwap(other.clone()));
        }
        if !said {
            eprintln!("lab: waiting for another swap to go: {other}");
            said = true;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// The kernel's swap read-ahead, as it was. It is put back on drop.
#[derive(Debug)]
pub struct ReadAhead(String);

const READ_AHEAD: &str = "/proc/sys/vm/page-cluster";

/// Lets the kernel read only pages that a program touches, as long as the result lives.
pub fn without_read_ahead() -> Result<ReadAhead, RigError> {
    let before =
        fs::read_to_string(READ_AHEAD).map_err(RigError::failed(format!("read {READ_AHEAD}")))?;
    write(READ_AHEAD, "0")?;
    Ok(ReadAhead(before.trim().to_owned()))
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        if let Err(error) = write(READ_AHEAD, &self.0) {
            eprintln!("lab: the kernel's read-ahead stays off: {error}");
        }
    }
}

/// Checks what every swap rig needs: no other swap is active, memory cgroups, and the tools.
pub fn check(rig: &'static str) -> Result<(), RigError> {
    wait_until_alone()?;
    let unavailable = |why: &str, fix| RigError::Unavailable {
        rig,
        why: why.to_owned(),
        fix,
    };
    if !super::cgroup::Cgroup::available() {
        return Err(unavailable(
            "memory cgroups cannot be made here",
            "run as root; in a container, where cgroups can be written",
        ));
    }
    for tool in ["mkswap", "swapon", "swapoff"] {
        if Command::new(tool)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_err()
        {
            return Err(unavailable(
                &format!("{tool} is missing"),
                "install util-linux",
            ));
        }
    }
    Ok(())
}

impl SwapGuard {
    /// zram0 with lz4 as the only swap. `swap`: device size (logical).
    pub(crate) fn zram(swap: Bytes, facts: &mut Facts) -> Result<SwapGuard, RigError> {
        let unavailable = |why: String| RigError::Unavailable {
            rig: "zram",
            why,
            fix: "load the zram module with lz4 support",
        };
        if !Path::new(ZRAM).exists() {
            return Err(unavailable(format!("{ZRAM} does not exist")));
        }
        write(&format!("{ZRAM}/reset"), "1")?;
        let mut guard = SwapGuard {
            path: PathBuf::from("/dev/zram0"),
            on: false,
            backing: Backing::Zram,
            zswap_before: Vec::new(),
        };
        write(&format!("{ZRAM}/comp_algorithm"), "lz4")
            .map_err(|error| unavailable(error.to_string()))?;
        write(&format!("{ZRAM}/disksize"), &swap.0.to_string())?;
        guard.turn_on(facts)?;
        facts.insert(
            "compressor".into(),
            chosen(&format!("{ZRAM}/comp_algorithm")),
        );
        Ok(guard)
    }

    /// A swap file in `directory`. `zswap`: compress in front of it.
    pub(crate) fn file(
        directory: &Path,
        swap: Bytes,
        zswap: bool,
        facts: &mut Facts,
    ) -> Result<SwapGuard, RigError> {
        let path = directory.join(format!("undercroft-lab-{}.swap", std::process::id()));
        let file =
            File::create(&path).map_err(RigError::failed(format!("create {}", path.display())))?;
        let mut guard = SwapGuard {
            path,
            on: false,
            backing: Backing::File,
            zswap_before: Vec::new(),
        };
        let private = file.set_permissions(fs::Permissions::from_mode(0o600));
        private.map_err(RigError::failed("make the swap file private"))?;
        drop(file);
        run(
            "fallocate",
            &["-l", &swap.0.to_string(), &guard.path.display().to_string()],
        )?;
        if zswap {
            guard.zswap_on(facts)?;
        } else if fs::read_to_string(format!("{ZSWAP}/enabled"))
            .is_ok_and(|text| text.trim() == "Y")
        {
            guard.zswap_set("enabled", "N")?; // else the "swap file" rows would be of zswap
        }
        guard.turn_on(facts)?;
        Ok(guard)
    }

    /// The source of zram's memory use.
    pub(crate) fn zram_meter() -> PathBuf {
        PathBuf::from(format!("{ZRAM}/mm_stat"))
    }

    fn turn_on(&mut self, facts: &mut Facts) -> Result<(), RigError> {
        let path = self.path.display().to_string();
        run("mkswap", &[&path])?;
        run("swapon", &[&path])?;
        self.on = true;
        facts.insert(
            "swap".into(),
            active()
                .join("; ")
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" "),
        );
        for name in ["page-cluster", "swappiness"] {
            let text = fs::read_to_string(format!("/proc/sys/vm/{name}")).unwrap_or_default();
            facts.insert(format!("vm.{name}"), text.trim().to_owned());
        }
        Ok(())
    }

    fn zswap_on(&mut self, facts: &mut Facts) -> Result<(), RigError> {
        if !Path::new(ZSWAP).exists() {
            return Err(RigError::Unavailable {
                rig: "zswap",
                why: format!("{ZSWAP} does not exist"),
                fix: "use a kernel with CONFIG_ZSWAP",
            });
        }
        let offered = self.zswap_set("compressor", "lz4").is_ok();
        let compressor = fs::read_to_string(format!("{ZSWAP}/compressor")).unwrap_or_default();
        facts.insert("compressor".into(), compressor.trim().to_owned());
        if !offered || compressor.trim() != "lz4" {
            facts.insert(
                "compressor-note".into(),
                "lz4 is not offered to zswap by this kernel".into(),
            );
        }
        self.zswap_set("max_pool_percent", "50")?;
        self.zswap_set("enabled", "Y")
    }

    fn zswap_set(&mut self, name: &str, value: &str) -> Result<(), RigError> {
        let path = PathBuf::from(format!("{ZSWAP}/{name}"));
        let before = fs::read_to_string(&path)
            .unwrap_or_default()
            .trim()
            .to_owned();
        write(&path.display().to_string(), value)?;
        self.zswap_before.push((path, before));
        Ok(())
    }
}

impl Drop for SwapGuard {
    fn drop(&mut self) {
        let complain = |what: &str, error: RigError| eprintln!("lab: {what}: {error}");
        if self.on
            && let Err(error) = run("swapoff", &[&self.path.display().to_string()])
        {
            complain("swap stays on", error);
            return; // resetting the device or deleting the file under active swap would lose pages
        }
        for (path, before) in self.zswap_before.drain(..).rev() {
            if let Err(error) = write(&path.display().to_string(), &before) {
                complain("zswap parameter not restored", error);
            }
        }
        let undone = match self.backing {
            Backing::Zram => write(&format!("{ZRAM}/reset"), "1"),
            Backing::File => {
                fs::remove_file(&self.path).map_err(RigError::failed("remove the swap file"))
            }
        };
        if let Err(error) = undone {
            complain("not put back", error);
        }
    }
}

fn write(path: &str, value: &str) -> Result<(), RigError> {
    fs::write(path, value).map_err(RigError::failed(format!("write {value} to {path}")))
}

/// The bracketed word of a sysfs choice such as `lzo [lz4]`.
fn chosen(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let inside = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(text.trim().to_owned(), |(word, _)| word.to_owned())
}

fn run(program: &str, arguments: &[&str]) -> Result<(), RigError> {
    let what = format!("{program} {}", arguments.join(" "));
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = output.map_err(RigError::failed(what.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(RigError::CommandFailed {
        what,
        how: format!("{} {text}", output.status),
    })
}
