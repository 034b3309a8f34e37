//! Which swap is on, and whether pages can be moved out beside it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::{Check, degraded, missing, ok, sysfs, version};

/// The first kernel in which UFFDIO_MOVE handles pages in the swap cache correctly (repaired in
/// March and June 2025). Distributions may have the repairs in older kernels; that is not relied
/// on.
const MOVES_BESIDE_SWAP: (u32, u32) = (6, 16);

/// The swap of a kernel, as `/proc/swaps` says, for one who looks again and again.
#[derive(Debug)]
pub struct Swaps {
    file: Option<File>,
    kernel: Option<(u32, u32)>,
}

impl Swaps {
    /// That of this machine.
    pub fn open() -> Swaps {
        Swaps::of(
            Path::new("/proc/swaps"),
            &sysfs("/proc/sys/kernel/osrelease"),
        )
    }

    /// That of a file like `/proc/swaps`, under a kernel of this release. A file that cannot be
    /// opened names no swap.
    pub fn of(file: &Path, release: &str) -> Swaps {
        Swaps {
            file: File::open(file).ok(),
            kernel: version(release),
        }
    }

    /// The swap of now: `Missing` if pages that are moved out may be lost. Cost: some microseconds.
    pub fn check(&self) -> Check {
        swap(&self.text(), self.kernel).named("kernel swap")
    }

    /// Whether the kernel has any swap. Cost: some microseconds.
    pub fn is_any(&self) -> bool {
        !active(&self.text()).is_empty()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if let Some(mut file) = self.file.as_ref() {
            let _ = file.seek(SeekFrom::Start(0));
            let _ = file.read_to_string(&mut text);
        }
        text
    }

    /// The file to poll, if swap that is switched on later would lose pages: its event is
    /// `POLLPRI`, at each change.
    pub fn to_watch(&self) -> Option<&File> {
        self.file.as_ref().filter(|_| is_old(self.kernel))
    }
}

/// Whether a kernel loses pages that are moved out while it swaps them.
fn is_old(kernel: Option<(u32, u32)>) -> bool {
    kernel.is_some_and(|version| version < MOVES_BESIDE_SWAP)
}

/// The names in a text like that of `/proc/swaps`.
fn active(swaps: &str) -> Vec<&str> {
    let lines = swaps.lines().skip(1);
    lines
        .filter_map(|line| line.split_ascii_whitespace().next())
        .collect()
}

pub(super) fn swap(swaps: &str, kernel: Option<(u32, u32)>) -> Check {
    let active = active(swaps);
    if active.is_empty() {
        return ok("none active");
    }
    if is_old(kernel) {
        return missing(
            format!(
                "{} active on a kernel older than 6.16, which may lose pages that are moved out while it swaps them",
                active.join(", ")
            ),
            &format!("swapoff {}, or use Linux 6.16 or newer", active.join(" ")),
        );
    }
    degraded(
        format!(
            "{} active underneath: pages may be swapped twice, and reclaim enters the fault path",
            active.join(", ")
        ),
        &format!("swapoff {}", active.join(" ")),
    )
}
