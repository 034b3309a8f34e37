//! The emulated devices that clients share: one for each tier with `shape=`. A client has it with
//! its grant, and gives it to the next daemon with its claim. So it stays one device if the daemon
//! dies.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use undercroft_tier::shared_device::SharedDevice;

use crate::config::Budget;

/// By the descriptions of their tiers.
#[derive(Debug, Default)]
pub(crate) struct Devices(BTreeMap<String, SharedDevice>);

impl Devices {
    /// Forgets those of tiers that are in the configuration no more.
    pub(crate) fn keep_only(&mut self, tiers: &[Budget]) {
        self.0.retain(|spec, _| named(tiers, spec).is_some());
    }

    /// The device that a client of an earlier daemon uses is the one of its tier, unless another
    /// client was faster.
    pub(crate) fn claim(&mut self, tiers: &[Budget], spec: &str, memory: OwnedFd) {
        let shape = named(tiers, spec).and_then(|tier| tier.spec.shape);
        if let Some(name) = shape
            && !self.0.contains_key(spec)
            && let Ok(device) = SharedDevice::open(name, memory)
        {
            self.0.insert(spec.to_owned(), device);
        }
    }

    /// The devices of these tiers, for one more client: which tiers, and the memory of each. A tier
    /// for whose device there is no memory is left out: its client has a device of its own.
    pub(crate) fn lend(&mut self, tiers: &[Budget], wanted: &[u8]) -> (Vec<u8>, Vec<OwnedFd>) {
        let (mut lent, mut memories) = (Vec::new(), Vec::new());
        for at in wanted {
            let tier = tiers.get(usize::from(*at));
            if let Some(memory) = tier.and_then(|tier| self.memory_of(tier)) {
                lent.push(*at);
                memories.push(memory);
            }
        }
        (lent, memories)
    }

    fn memory_of(&mut self, tier: &Budget) -> Option<OwnedFd> {
        let (name, spec) = (tier.spec.shape?, tier.spec.to_string());
        if !self.0.contains_key(&spec) {
            let device = SharedDevice::create(name).ok()?;
            self.0.insert(spec.clone(), device);
        }
        self.0.get(&spec)?.memory().try_clone_to_owned().ok()
    }
}

/// The tier with this description.
fn named<'a>(tiers: &'a [Budget], spec: &str) -> Option<&'a Budget> {
    tiers.iter().find(|tier| tier.spec.to_string() == spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiers() -> Vec<Budget> {
        let of = |spec: &str| Budget {
            spec: spec.parse().expect("a tier"),
            sizes: None,
            profile: None,
        };
        ["ram,shape=pcm", "ram", "file:/a,size=64M,shape=nvme"]
            .map(of)
            .into()
    }

    /// The number by which the kernel knows a file.
    fn inode(memory: &OwnedFd) -> u64 {
        rustix::fs::fstat(memory).expect("a file").st_ino
    }

    #[test]
    fn clients_of_a_tier_have_one_device_also_after_the_daemon() {
        let tiers = tiers();
        let wanted = crate::load::emulated(&tiers);
        assert_eq!(wanted, [0, 2]);
        let mut devices = Devices::default();
        let (lent, first) = devices.lend(&tiers, &wanted);
        assert_eq!(lent, wanted);
        let (_, second) = devices.lend(&tiers, &wanted);
        let inodes = |memories: &[OwnedFd]| memories.iter().map(inode).collect::<Vec<_>>();
        assert_eq!(inodes(&first), inodes(&second));
        let spec = tiers[2].spec.to_string();
        let mut next = Devices::default();
        let mut first = first.into_iter();
        let (other, own) = (
            first.next().expect("of the pool"),
            first.next().expect("a file's"),
        );
        next.claim(&tiers, &spec, other); // it is another device
        next.claim(
            &tiers,
            "file:/b,size=64M,shape=nvme",
            own.try_clone().expect("a descriptor"),
        );
        assert!(next.0.is_empty());
        next.claim(&tiers, &spec, own.try_clone().expect("a descriptor"));
        let (_, third) = next.lend(&tiers, &[2]);
        assert_eq!(inode(&third[0]), inode(&own));
        next.keep_only(&tiers[..2]);
        assert!(next.0.is_empty());
    }
}
