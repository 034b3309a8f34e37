//! Builds the tiers of a run. The keeper opens the memory and files, which survive the manager. The
//! manager builds tiers over them.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, PAGE_BYTES, Slot};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_policy::place::pool_percent;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::procfs;
use undercroft_sys::restrict::Network;
use undercroft_tier::file::WAITING_PAGES_MAX;
use undercroft_tier::open::{Handed, MadeTier, OpenError, OpenTier};
use undercroft_tier::profile::Profile;
use undercroft_tier::shape::Shape;
use undercroft_tier::spec::{RamSpec, TierSpec};

use crate::books::metered::MeteredTier;
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
    /// What it rings when half of what its quota leaves is full.
    pub bell: Option<i32>,
    /// What was measured of its device before.
    pub profile: Option<Profile>,
}

/// The capacity of a pool under a limit.
///
/// * `last`: no tier is below it.
pub(crate) fn pool_capacity(ram: &RamSpec, memory_max: Bytes, last: bool) -> Bytes {
    let limit = memory_max.min(total_memory());
    let percent = pool_percent(last);
    let default = Bytes((limit.0 as f64 * f64::from(percent) / 100.0) as u64);
    ram.max.map_or(default, |max| max.resolve(limit))
}

/// The capacity of a tier at first, as far as the limit decides it.
///
/// * `last`: no tier is below it.
pub(crate) fn first_capacity(spec: &TierSpec, memory_max: Bytes, last: bool) -> Bytes {
    match spec {
        TierSpec::Ram(ram) => pool_capacity(ram, memory_max, last),
        TierSpec::Nvm(_) | TierSpec::File(_) | TierSpec::Remote(_) => Bytes(0),
    }
}

/// The capacity of tier `index` at the start.
fn capacity_of(options: &ClientOptions, index: usize) -> Bytes {
    let last = index + 1 == options.tiers.len();
    first_capacity(&options.tiers[index], options.memory_max, last)
}

/// The machine's DRAM; more than any machine has if it is unknown.
fn total_memory() -> Bytes {
    procfs::total_memory().unwrap_or(Bytes(u64::MAX / 2))
}

/// Opens the memory, file or device of each tier.
///
/// Errors: no memory, or the file or device cannot be used.
pub(crate) fn open(options: &ClientOptions) -> Result<Vec<OpenTier>, OpenError> {
    let tiers = options.tiers.iter().enumerate();
    tiers
        .map(|(index, spec)| OpenTier::open(spec, capacity_of(options, index)))
        .collect()
}

/// All descriptors of a tier that the manager inherits.
pub(crate) fn descriptors(tier: &OpenTier) -> Vec<BorrowedFd<'_>> {
    let below = tier.below().map(|(fd, ..)| fd);
    let more = below.into_iter().chain(tier.device()).chain(tier.bell());
    [tier.memory()].into_iter().chain(more).collect()
}

/// What the manager is told of a tier.
pub(crate) fn launch(tier: &OpenTier) -> TierLaunch {
    let below = tier.below();
    TierLaunch {
        memory: tier.memory().as_raw_fd(),
        backing: below.map(|(fd, name, bytes)| (fd.as_raw_fd(), name, bytes.0)),
        device: tier.device().map(|memory| memory.as_raw_fd()),
        bell: tier.bell().map(|bell| bell.as_raw_fd()),
        profile: tier.profile().cloned(),
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
        Some(TierSpec::Ram(_) | TierSpec::Nvm(_) | TierSpec::Remote(_)) | None => 0,
    };
    Bytes((pages * PAGE_BYTES) as u64)
}

/// What the manager may do on the network: connect to the nodes of a remote tier, if there is one.
pub(crate) fn network(options: &ClientOptions) -> Network {
    let is_remote = |tier: &TierSpec| matches!(tier, TierSpec::Remote(_));
    if options.tiers.iter().any(is_remote) {
        Network::Internet
    } else {
        Network::None
    }
}

/// One tier as the manager inherits it.
pub(crate) struct Inherited {
    /// Pool memory, or slot table.
    pub memory: SharedMemory,
    /// Its file or device.
    pub below: Option<Handed<OwnedFd>>,
    /// Memory of the emulated device that it shares with other runs.
    pub device: Option<OwnedFd>,
    /// What it rings when half of what its quota leaves is full.
    pub bell: Option<OwnedFd>,
    /// What was measured of its device before.
    pub profile: Option<Profile>,
}

/// Builds the tiers over inherited descriptors. They are empty.
pub(crate) fn build(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
) -> Result<Vec<MeteredTier>, OpenError> {
    Ok(made(options, inherited, false)?.0)
}

/// The tiers that a dead manager had built, and the slots in use of each.
pub(crate) fn recover(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
) -> Result<(Vec<MeteredTier>, Vec<Vec<Slot>>), OpenError> {
    made(options, inherited, true)
}

fn made(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
    again: bool,
) -> Result<(Vec<MeteredTier>, Vec<Vec<Slot>>), OpenError> {
    let (mut tiers, mut slots) = (Vec::new(), Vec::new());
    for (index, tier) in inherited.into_iter().enumerate() {
        let spec = &options.tiers[index];
        let mut opened = OpenTier::inherit(spec, tier.memory, tier.below)?;
        if let Some(device) = tier.device {
            opened.share_device(spec, device)?;
        }
        if let Some(bell) = tier.bell {
            opened.give_bell(bell);
        }
        let shape = opened.take_shape(spec);
        let pool = capacity_of(options, index);
        let made = if again {
            opened.recover(spec, pool)?
        } else {
            opened.make(spec, pool)?
        };
        slots.push(if again { made.slots() } else { Vec::new() });
        let metered = metered(made, shape, options.memory_max);
        tiers.push(metered.of(spec, tier.profile));
    }
    Ok((tiers, slots))
}

/// A tier with its counters.
///
/// * `shape`: the device whose times it is given.
pub(crate) fn metered(made: MadeTier, shape: Option<Shape>, limit: Bytes) -> MeteredTier {
    let name = shape.as_ref().map(Shape::name);
    let metered = match made {
        MadeTier::Ram(pool) => MeteredTier::memory(*pool, shape),
        MadeTier::Nvm(tier) => MeteredTier::nvm(*tier, shape),
        MadeTier::Remote(tier) => MeteredTier::remote(*tier),
        MadeTier::File(tier) => {
            let tier = tier.write_behind(waiting_pages(limit));
            let meter = tier.meter();
            let tier = match shape {
                Some(shape) => tier.shaped(shape),
                None => tier,
            };
            MeteredTier::new(Box::new(tier), Some(meter))
        }
    };
    metered.slowed(name)
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
