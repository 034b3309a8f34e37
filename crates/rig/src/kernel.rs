//! The kernel's rigs: no limit, zram, zswap, and a swap file, each in its own memory cgroup.

use super::cgroup::Cgroup;
use super::swap::{self, SwapGuard};
use super::{Facts, Rig, RigError, Stage, StoreMeter};
use std::path::PathBuf;
use undercroft_base::Bytes;

/// No limit at all; metered by a cgroup if one can be made.
pub struct Plain;

/// zram0 with lz4 under a memcg limit.
pub struct Zram {
    /// Logical size of the device; at least the footprint.
    pub swap: Bytes,
}

/// zswap (lz4 if the kernel offers it) in front of a swap file, under a memcg limit.
pub struct Zswap {
    /// Size of the swap file; at least the footprint.
    pub swap: Bytes,
    /// Where the file goes; its disk is the measured device.
    pub directory: PathBuf,
}

/// A swap file under a memcg limit, with the kernel's own read-ahead setting.
pub struct SwapFile {
    /// Size of the file; at least the footprint.
    pub swap: Bytes,
    /// Where the file goes; its disk is the measured device.
    pub directory: PathBuf,
}

impl Rig for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn stores_outside_limit(&self) -> bool {
        false
    }

    fn set_up(&self, _limit: Bytes) -> Result<Stage, RigError> {
        let cgroup = if Cgroup::available() {
            Some(Cgroup::create(None)?)
        } else {
            None
        };
        Ok(Stage {
            prefix: Vec::new(),
            facts: Facts::new(),
            limit: Bytes(0),
            meter: StoreMeter::None,
            report: None,
            _swap: None,
            cgroup,
            _lock: None,
        })
    }
}

impl Rig for Zram {
    fn name(&self) -> &'static str {
        "zram"
    }

    fn stores_outside_limit(&self) -> bool {
        true
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        stage(
            "zram",
            limit,
            StoreMeter::Zram(SwapGuard::zram_meter()),
            |facts| SwapGuard::zram(self.swap, facts),
        )
    }
}

impl Rig for Zswap {
    fn name(&self) -> &'static str {
        "zswap"
    }

    fn stores_outside_limit(&self) -> bool {
        true
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        stage("zswap", limit, StoreMeter::Zswap, |facts| {
            SwapGuard::file(&self.directory, self.swap, true, facts)
        })
    }
}

impl Rig for SwapFile {
    fn name(&self) -> &'static str {
        "swapfile"
    }

    fn stores_outside_limit(&self) -> bool {
        false
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        stage("swapfile", limit, StoreMeter::None, |facts| {
            SwapGuard::file(&self.directory, self.swap, false, facts)
        })
    }
}

fn stage(
    rig: &'static str,
    limit: Bytes,
    meter: StoreMeter,
    swap: impl FnOnce(&mut Facts) -> Result<SwapGuard, RigError>,
) -> Result<Stage, RigError> {
    crate::interrupt::install();
    let lock = swap::lock()?;
    swap::check(rig)?;
    let mut facts = Facts::new();
    let cgroup = Cgroup::create(Some(limit))?;
    let swap = swap(&mut facts)?;
    Ok(Stage {
        prefix: Vec::new(),
        facts,
        limit,
        meter,
        report: None,
        _swap: Some(swap),
        cgroup: Some(cgroup),
        _lock: Some(lock),
    })
}
