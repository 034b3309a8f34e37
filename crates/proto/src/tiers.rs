//! Tiers as the keeper opens and hands them over: their memory and files survive the manager.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use serde::{Deserialize, Serialize};
use undercroft_base::Bytes;
use undercroft_policy::place::pool_percent;
use undercroft_sys::procfs;
use undercroft_tier::open::{OpenError, OpenTier};
use undercroft_tier::profile::Profile;
use undercroft_tier::spec::Limit;

use crate::options::ClientOptions;

/// Descriptors of one tier, as the keeper hands them over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TierLaunch {
    /// Pool memory, or slot table.
    pub memory: i32,
    /// File, mapping or device: descriptor, name, usable bytes.
    pub backing: Option<(i32, String, u64)>,
    /// Memory of the emulated device that it shares with other runs.
    pub device: Option<i32>,
    /// Eventfd that it rings when half of what its quota leaves is full.
    pub bell: Option<i32>,
    /// Earlier measurements of its device.
    pub profile: Option<Profile>,
}

/// The capacity of a pool under a limit.
///
/// * `max`: as the user described it.
/// * `last`: no tier is below it.
pub fn pool_capacity(max: Option<Limit>, memory_max: Bytes, last: bool) -> Bytes {
    let limit = memory_max.min(total_memory());
    let percent = pool_percent(last);
    let default = Bytes((limit.0 as f64 * f64::from(percent) / 100.0) as u64);
    max.map_or(default, |max| max.resolve(limit))
}

/// The capacity of tier `index` at the start, if it is a pool.
pub fn capacity_of(options: &ClientOptions, index: usize) -> Bytes {
    let last = index + 1 == options.tiers.len();
    pool_capacity(options.tiers[index].max, options.memory_max, last)
}

/// The machine's DRAM; more than any machine has if it is unknown.
fn total_memory() -> Bytes {
    procfs::total_memory().unwrap_or(Bytes(u64::MAX / 2))
}

/// Opens the memory, file or device of each tier.
///
/// Errors: no memory, or the file or device cannot be used.
pub fn open(options: &ClientOptions) -> Result<Vec<OpenTier>, OpenError> {
    let tiers = options.tiers.iter().enumerate();
    tiers
        .map(|(index, spec)| OpenTier::open(spec, options.page_size, capacity_of(options, index)))
        .collect()
}

/// All descriptors of a tier that the manager inherits.
pub fn descriptors(tier: &OpenTier) -> Vec<BorrowedFd<'_>> {
    let below = tier.below().map(|(fd, ..)| fd);
    let bell = tier.bell.as_ref().map(AsFd::as_fd);
    let more = below.into_iter().chain(tier.device()).chain(bell);
    [tier.memory()].into_iter().chain(more).collect()
}

/// The description of a tier for the manager.
pub fn launch(tier: &OpenTier) -> TierLaunch {
    let below = tier.below();
    TierLaunch {
        memory: tier.memory().as_raw_fd(),
        backing: below.map(|(fd, name, bytes)| (fd.as_raw_fd(), name, bytes.0)),
        device: tier.device().map(|memory| memory.as_raw_fd()),
        bell: tier.bell.as_ref().map(AsRawFd::as_raw_fd),
        profile: tier.profile.clone(),
    }
}
