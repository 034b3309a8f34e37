//! Builds the tiers of a run. The keeper opens the memory and files, which survive the manager. The
//! manager builds tiers over them.

use std::os::fd::OwnedFd;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageKey, PageSize, SlotSet};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_proto::options::ClientOptions;
use undercroft_proto::tiers::capacity_of;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::restrict::Network;
use undercroft_tier::file::WAITING_PAGES_MAX;
use undercroft_tier::open::{Handed, MadeTier, OpenError, OpenTier};
use undercroft_tier::profile::Profile;
use undercroft_tier::shape::Shape;

use crate::books::metered::MeteredTier;

/// Pages that may wait to be written: a 64th of the limit, at most 1 MiB. None if that is less than
/// two batches of the evictor, or if they are large.
pub(crate) fn waiting_pages(limit: Bytes, page: PageSize) -> usize {
    if page != PageSize::Base {
        return 0;
    }
    let pages = (limit.0 / 64 / BASE_PAGE_BYTES as u64).min(WAITING_PAGES_MAX as u64) as usize;
    if pages < 2 * EVICT_PAGES_MAX {
        return 0;
    }
    pages
}

/// DRAM for pages that wait to be written, if the first tier is a file. Below another tier no page
/// waits.
pub(crate) fn write_behind(options: &ClientOptions) -> Bytes {
    match options.tiers.first() {
        Some(first) if first.facts().is_local_device() => {
            Bytes((waiting_pages(options.memory_max, options.page_size) * BASE_PAGE_BYTES) as u64)
        }
        _ => Bytes(0),
    }
}

/// The manager's rights on the network: connect to the nodes of a remote tier, if there is one.
pub(crate) fn network(options: &ClientOptions) -> Network {
    if options.tiers.iter().any(|tier| tier.facts().remote) {
        Network::Internet
    } else {
        Network::None
    }
}

/// A tier as the manager inherits it.
pub(crate) struct Inherited {
    /// Pool memory, or slot table.
    pub memory: SharedMemory,
    /// Its file or device.
    pub below: Option<Handed<OwnedFd>>,
    /// Memory of the emulated device that it shares with other runs.
    pub device: Option<OwnedFd>,
    /// Eventfd that it rings when half of what its quota leaves is full.
    pub bell: Option<OwnedFd>,
    /// Earlier measurements of its device.
    pub profile: Option<Profile>,
}

/// Builds the tiers over inherited descriptors. They are empty.
pub(crate) fn build(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
    key: &PageKey,
) -> Result<Vec<MeteredTier>, OpenError> {
    Ok(made(options, inherited, key, false)?.0)
}

/// The tiers that a dead manager had built, and the slots in use of each.
pub(crate) fn recover(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
    key: &PageKey,
) -> Result<(Vec<MeteredTier>, Vec<SlotSet>), OpenError> {
    made(options, inherited, key, true)
}

fn made(
    options: &ClientOptions,
    inherited: Vec<Inherited>,
    key: &PageKey,
    again: bool,
) -> Result<(Vec<MeteredTier>, Vec<SlotSet>), OpenError> {
    let (mut tiers, mut slots) = (Vec::new(), Vec::new());
    for (index, tier) in inherited.into_iter().enumerate() {
        let spec = &options.tiers[index];
        let mut opened = OpenTier::inherit(spec, options.page_size, tier.memory, tier.below)?;
        if let Some(device) = tier.device {
            opened.share_device(spec, device)?;
        }
        opened.bell = tier.bell;
        let shape = opened.take_shape(spec);
        let pool = capacity_of(options, index);
        let made = if again {
            opened.recover(pool, key)?
        } else {
            opened.make(pool, key)?
        };
        let mut used = SlotSet::default();
        if again {
            made.for_each_slot(&mut |slot| _ = used.insert(slot));
        }
        slots.push(used);
        let waiting = waiting_pages(options.memory_max, options.page_size);
        let metered = metered(made, shape, waiting);
        tiers.push(metered.of(spec, tier.profile));
    }
    Ok((tiers, slots))
}

/// A tier with its counters.
///
/// * `shape`: the device whose times it is given.   * `waiting`: see [`waiting_pages`].
pub(crate) fn metered(
    made: Box<dyn MadeTier>,
    shape: Option<Shape>,
    waiting: usize,
) -> MeteredTier {
    let name = shape.as_ref().map(Shape::name);
    let (file, mapped_as) = (made.file_meter(), made.mapping());
    let tier = made.finish(shape, waiting);
    let mut metered = MeteredTier::new(tier, file);
    metered.mapped_as = mapped_as;
    metered.slowed(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_wait_take_a_64th_of_the_limit_or_a_mebibyte_at_most() {
        let of = |mib: u64| waiting_pages(Bytes(mib << 20), PageSize::Base);
        assert_eq!([0, 1, 31].map(of), [0, 0, 0]);
        assert_eq!([32, 48, 64, 1 << 20].map(of), [128, 192, 256, 256]);
    }
}
