//! Builds the tiers of a run. The keeper opens the memory and files, which survive the manager. The
//! manager builds tiers over them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, PAGE_BYTES};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_policy::place::pool_percent;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::procfs;
use undercroft_tier::file::{Backing, BackingError, FileTier, FileTierError, WAITING_PAGES_MAX};
use undercroft_tier::nvm::{NvmBacking, NvmError, NvmTier, NvmTierError};
use undercroft_tier::ram::{RamPool, RamPoolError};
use undercroft_tier::spec::{RamSpec, TierSpec};

use crate::books::metered::MeteredTier;
use crate::options::ClientOptions;

/// Descriptors of one tier, as the keeper hands them over.
#[derive(Debug, Serialize, Deserialize)]
pub struct TierLaunch {
    /// Pool memory, or slot table.
    pub memory: i32,
    /// File, mapping or device: descriptor, name, usable bytes.
    pub backing: Option<(i32, String, u64)>,
}

/// The keeper's part of one tier.
#[derive(Debug)]
pub(crate) struct OpenTier {
    memory: SharedMemory,
    below: Below,
}

/// What keeps the bytes of a tier.
#[derive(Debug)]
enum Below {
    /// The tier's memory itself.
    Memory,
    Nvm(NvmBacking),
    File(Backing),
}

/// Why a tier cannot be opened or built. The text has the fix, where there is one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TierError {
    /// No memory or descriptor for a pool or a table.
    #[error("memory for a tier: {0}")]
    Memory(#[from] io::Error),
    /// The file or device cannot be used.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// The file or device cannot be used as memory.
    #[error(transparent)]
    Nvm(#[from] NvmError),
    /// It cannot be mapped.
    #[error(transparent)]
    NvmTier(#[from] NvmTierError),
    /// The pool refused its memory.
    #[error(transparent)]
    Pool(#[from] RamPoolError),
    /// The file tier refused its slot table.
    #[error(transparent)]
    File(#[from] FileTierError),
    /// The inherited descriptors do not fit the options: a defect.
    #[error("the keeper handed tier {0} over without its file")]
    NotInherited(usize),
}

/// The capacity of the pool that is tier `index`.
fn ram_capacity(options: &ClientOptions, index: usize, ram: &RamSpec) -> Bytes {
    let limit = options.memory_max.min(total_memory());
    let percent = pool_percent(index + 1 == options.tiers.len());
    let default = Bytes((limit.0 as f64 * f64::from(percent) / 100.0) as u64);
    ram.max.map_or(default, |max| max.resolve(limit))
}

/// The machine's DRAM; more than any machine has if it is unknown.
fn total_memory() -> Bytes {
    procfs::total_memory().unwrap_or(Bytes(u64::MAX / 2))
}

/// Opens the memory, file or device of each tier.
///
/// Errors: no memory, or the file or device cannot be used.
pub(crate) fn open(options: &ClientOptions) -> Result<Vec<OpenTier>, TierError> {
    let mut tiers = Vec::new();
    for (index, spec) in options.tiers.iter().enumerate() {
        tiers.push(match spec {
            TierSpec::Ram(ram) => {
                let reserve = RamPool::reserve_for(ram_capacity(options, index, ram));
                let memory = SharedMemory::create("uc-ram-tier", reserve.0 as usize)?;
                OpenTier {
                    memory,
                    below: Below::Memory,
                }
            }
            TierSpec::Nvm(nvm) => {
                let backing = NvmBacking::open(&nvm.path, nvm.size)?;
                let table = NvmTier::table_bytes(backing.bytes());
                OpenTier {
                    memory: SharedMemory::create("uc-slot-table", table)?,
                    below: Below::Nvm(backing),
                }
            }
            TierSpec::File(file) => {
                let backing = Backing::open(&file.path, file.size)?;
                let table = FileTier::table_bytes(backing.bytes());
                let memory = SharedMemory::create("uc-slot-table", table)?;
                OpenTier {
                    memory,
                    below: Below::File(backing),
                }
            }
        });
    }
    Ok(tiers)
}

impl OpenTier {
    /// All descriptors that the manager inherits.
    pub(crate) fn descriptors(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let mut fds = vec![self.memory.as_fd()];
        match &self.below {
            Below::Memory => {}
            Below::Nvm(backing) => fds.push(backing.as_fd()),
            Below::File(backing) => fds.push(backing.as_fd()),
        }
        fds
    }

    pub(crate) fn launch(&self) -> TierLaunch {
        TierLaunch {
            memory: self.memory.as_fd().as_raw_fd(),
            backing: match &self.below {
                Below::Memory => None,
                Below::Nvm(b) => Some((b.as_fd().as_raw_fd(), b.name().to_owned(), b.bytes().0)),
                Below::File(b) => Some((b.as_fd().as_raw_fd(), b.name().to_owned(), b.bytes().0)),
            },
        }
    }

    /// True if the tier's file is in a memory file system, so that it saves no memory.
    pub(crate) fn is_in_memory(&self) -> bool {
        match &self.below {
            Below::Memory => false,
            Below::Nvm(backing) => backing.is_in_memory(),
            Below::File(backing) => backing.is_in_memory(),
        }
    }
}

/// Pages that may wait to be written: a 64th of the limit, at most 1 MiB. None if that is less than
/// two batches of the evictor.
fn waiting_pages(limit: Bytes) -> usize {
    let pages = (limit.0 / 64 / PAGE_BYTES as u64).min(WAITING_PAGES_MAX as u64) as usize;
    if pages < 2 * EVICT_PAGES_MAX {
        return 0;
    }
    pages
}

/// DRAM for pages that wait to be written, if the first tier is a file. Below another tier no page
/// waits.
pub(crate) fn write_behind(options: &ClientOptions) -> Bytes {
    let pages = match options.tiers.first() {
        Some(TierSpec::File(_)) => waiting_pages(options.memory_max),
        Some(TierSpec::Ram(_) | TierSpec::Nvm(_)) | None => 0,
    };
    Bytes((pages * PAGE_BYTES) as u64)
}

/// One tier as the manager inherits it: memory, and file or device with its name and usable bytes.
pub(crate) type Inherited = (SharedMemory, Option<(OwnedFd, String, u64)>);

/// Builds the tiers over inherited descriptors.
pub(crate) fn build(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
) -> Result<Vec<MeteredTier>, TierError> {
    let mut tiers = Vec::new();
    for (index, (memory, backing)) in inherited.into_iter().enumerate() {
        let spec = &options.tiers[index];
        let shape = spec.shape();
        let metered = match (spec, backing) {
            (TierSpec::Ram(ram), _) => {
                let capacity = ram_capacity(options, index, ram);
                let pool = RamPool::new(memory, ram.compressor, capacity)?;
                MeteredTier::memory(pool, shape)
            }
            (TierSpec::Nvm(_), Some((fd, name, bytes))) => {
                let backing = NvmBacking::inherit(fd, name, Bytes(bytes));
                MeteredTier::nvm(NvmTier::new(backing, memory)?, shape)
            }
            (TierSpec::File(_), Some((fd, name, bytes))) => {
                let backing = Backing::inherit(fd, name, Bytes(bytes))?;
                let waiting = waiting_pages(options.memory_max);
                let mut tier = FileTier::new(backing, memory)?.write_behind(waiting);
                if let Some(name) = shape {
                    tier = tier.shaped(name);
                }
                let meter = tier.meter();
                MeteredTier::new(Box::new(tier), Some(meter))
            }
            (TierSpec::Nvm(_) | TierSpec::File(_), None) => {
                return Err(TierError::NotInherited(index));
            }
        };
        tiers.push(metered.slowed(shape));
    }
    Ok(tiers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_wait_take_a_64th_of_the_limit_or_a_mebibyte_at_most() {
        let of = |mib: u64| waiting_pages(Bytes(mib << 20));
        assert_eq!([0, 1, 31].map(of), [0, 0, 0]);
        assert_eq!([32, 48, 64, 1 << 20].map(of), [128, 192, 256, 256]);
    }
}
