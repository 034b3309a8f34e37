//! Slows a tier down to the speed of another device, in real time: `shape=PROFILE`.
//!
//! The simulator's model of the device says when each request would be served, with its queue and
//! its head. A tier in memory waits in `load` and `store` ([`Shaped`]). A file tier says how long
//! a read must take ([`Tier::reading`]), and the reader holds the page back, so that no thread
//! waits for one page alone. A shape adds time and takes none away: what is slower below stays
//! slower. A tier has a device of its own, or one that processes share (`shared_device.rs`).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, LoadError, Loaded, Nanos, Slot, Stamp, Store, StoreError, Tier,
    TierInfo, TierUsage,
};
use undercroft_device::{Device, Time};

pub use crate::device_name::{ShapeName, UnknownShape, names};
use crate::shared_device::{SharedDevice, monotonic_ns};

/// Shorter waits keep the processor; longer ones sleep first.
const SPIN_MAX: Duration = Duration::from_micros(20);

/// A device of which only the times are real.
#[derive(Debug)]
pub struct Shape {
    name: ShapeName,
    device: Mutex<Device>,
    /// By CLOCK_MONOTONIC, which all processes share.
    begun_ns: u64,
    /// The device of several processes, and where the file of this one begins on it.
    shared: Option<(SharedDevice, u64)>,
}

impl Shape {
    /// An idle device.
    pub fn new(name: ShapeName) -> Shape {
        Shape {
            name,
            device: Mutex::new(Device::new(name.profile())),
            begun_ns: monotonic_ns(),
            shared: None,
        }
    }

    /// A device that others use, too: one more file on it. `shared` is a device of this name.
    pub fn over(name: ShapeName, shared: SharedDevice) -> Shape {
        let begins = shared.new_file();
        Shape {
            begun_ns: shared.begun_ns(),
            shared: Some((shared, begins)),
            ..Shape::new(name)
        }
    }

    /// Which device it is.
    pub fn name(&self) -> ShapeName {
        self.name
    }

    /// A read begins now. Returns when it ends.
    pub fn read(&self, offset: u64, bytes: u64) -> Instant {
        self.ask(offset, |device, now, at| device.read(now, at, bytes).end)
    }

    /// A write begins now. Returns when it ends.
    pub fn write(&self, offset: u64, bytes: u64) -> Instant {
        self.ask(offset, |device, now, at| device.write(now, at, bytes).end)
    }

    fn ask(&self, offset: u64, request: impl Fn(&mut Device, Time, u64) -> Time) -> Instant {
        // A panic in the model leaves only times behind.
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Instant::now();
        let now = Time::from_ns(monotonic_ns().saturating_sub(self.begun_ns) as f64);
        let end = match &self.shared {
            None => request(&mut device, now, offset),
            Some((shared, begins)) => {
                let place = begins.wrapping_add(offset);
                shared.ask(&mut device, now, |device, now| request(device, now, place))
            }
        };
        at + Duration::from_nanos((end - now).ns() as u64)
    }
}

/// Waits until `when`: a short wait spins, a longer one sleeps first.
pub fn wait_until(when: Instant) {
    loop {
        let left = when.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPIN_MAX {
            std::thread::sleep(left - SPIN_MAX);
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Most time of one read of `name` when the device is idle; where a disk's head is does not count.
pub fn read_time(name: ShapeName) -> Nanos {
    let profile = name.profile();
    let head = profile
        .disk
        .map_or(0.0, |disk| disk.seek_read_ns + disk.turn_ns / 2.0);
    Nanos((profile.read.time(BASE_PAGE_BYTES as u64).ns() + head) as u64)
}

/// A tier that answers from memory, as slow as a device.
#[derive(Debug)]
pub struct Shaped<T> {
    tier: T,
    info: TierInfo,
    shape: Shape,
}

impl<T: Tier> Shaped<T> {
    /// `tier`, with the times of `shape`.
    pub fn new(tier: T, shape: Shape) -> Shaped<T> {
        Shaped {
            info: TierInfo {
                emulated: true,
                ..tier.info().clone()
            },
            tier,
            shape,
        }
    }
}

impl<T: Tier> Tier for Shaped<T> {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn capacity(&self) -> Bytes {
        self.tier.capacity()
    }

    fn usage(&self) -> TierUsage {
        self.tier.usage()
    }

    fn dram(&self) -> Bytes {
        self.tier.dram()
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let begun = Instant::now();
        self.tier.store(batch);
        let page = self.info.page.bytes() as u64;
        let stored = batch.iter().filter_map(|item| item.result.ok());
        let ends = stored.map(|slot| self.shape.write(slot.0.wrapping_mul(page), page));
        wait_until(ends.max().unwrap_or(begun));
    }

    fn tidy(&self) -> bool {
        self.tier.tidy()
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let page = self.info.page.bytes() as u64;
        let end = self.shape.read(slot.0.wrapping_mul(page), page);
        let loaded = self.tier.load(slot, stamp, dst);
        wait_until(end);
        loaded
    }

    fn reading(&self, offset: u64, bytes: u64) -> Nanos {
        self.tier.reading(offset, bytes)
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        self.tier.checksum(slot, stamp)
    }

    fn update(&self, slot: Slot, item: &Store<'_>) -> Option<Result<Bytes, StoreError>> {
        let updated = self.tier.update(slot, item)?;
        if let Ok(Bytes(bytes @ 1..)) = updated {
            let offset = slot.0.wrapping_mul(self.info.page.bytes() as u64);
            wait_until(self.shape.write(offset, bytes));
        }
        Some(updated)
    }

    fn close(&self) {
        self.tier.close();
    }

    fn free(&self, slots: &[Slot]) {
        self.tier.free(slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times of a shape are never shorter than the device's. Queued requests wait for each other.
    #[test]
    fn requests_take_their_time_and_wait_for_each_other() {
        let shape = Shape::new("hdd-7200".parse().unwrap());
        let begun = Instant::now();
        let ends: Vec<_> = (1..4u64).map(|at| shape.read(at << 33, 4096)).collect();
        assert!(ends[0] > begun + Duration::from_micros(1500));
        assert!(ends.is_sorted(), "one head: {ends:?}");
        wait_until(ends[2]);
        assert!(Instant::now() >= ends[2]);
    }

    #[test]
    fn two_files_of_one_device_slow_each_other_and_a_device_of_its_own_does_not() {
        let name: ShapeName = "sata-ssd".parse().unwrap();
        let device = SharedDevice::create(name).expect("memory");
        let [one, two] = [(); 2].map(|()| {
            let memory = device.memory().try_clone_to_owned().expect("a descriptor");
            Shape::over(name, SharedDevice::open(name, memory).expect("the device"))
        });
        let alone = Shape::new(name);
        // 500 rounds on nine channels, 640 us each.
        for at in 0..4500 {
            one.write(at << 20, 4096);
        }
        let (beside, alone) = (two.read(0, 4096), alone.read(0, 4096));
        let waits = beside.saturating_duration_since(alone);
        assert!(waits > Duration::from_millis(100), "{waits:?}");
    }
}
