//! Slows a tier down to the speed of another device, in real time: `shape=PROFILE`.
//!
//! The simulator's model of the device says when each request would be served, with its queue and
//! its head. A tier in memory waits in `load` and `store` ([`Shaped`]). A file tier says how long
//! a read must take ([`Tier::reading`]), and the reader holds the page back, so that no thread
//! waits for one page alone. A shape adds time and takes none away: what is slower below stays
//! slower. A tier has a device of its own, or one that processes share (`shared_device.rs`).

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use undercroft_base::{
    Bytes, LoadError, Loaded, Nanos, PAGE_BYTES, Slot, Stamp, Store, StoreError, Tier, TierInfo,
    TierUsage,
};
use undercroft_device::{Device, NAMES, Profile, Time, by_name};

use crate::shared_device::SharedDevice;

/// Shorter waits keep the processor; longer ones sleep first.
const SPIN_MAX: Duration = Duration::from_micros(20);

/// The name of a device that there is a model of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapeName(&'static str);

impl ShapeName {
    /// The device's constants.
    pub fn profile(self) -> Profile {
        by_name(self.0).expect("a name of the list")
    }
}

/// The names of all devices.
pub fn names() -> String {
    NAMES.join(", ")
}

/// There is no such device; the text names those that there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no device `{0}`; use one of: {list}", list = names())]
pub struct UnknownShape(String);

impl FromStr for ShapeName {
    type Err = UnknownShape;

    fn from_str(text: &str) -> Result<ShapeName, UnknownShape> {
        let known = NAMES.into_iter().find(|name| *name == text);
        known
            .map(ShapeName)
            .ok_or_else(|| UnknownShape(text.to_owned()))
    }
}

impl fmt::Display for ShapeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

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

/// Nanoseconds of CLOCK_MONOTONIC.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
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
    Nanos((profile.read.time(PAGE_BYTES as u64).ns() + head) as u64)
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

    fn usage(&self) -> TierUsage {
        self.tier.usage()
    }

    fn dram(&self) -> Bytes {
        self.tier.dram()
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        let begun = Instant::now();
        self.tier.store(batch);
        let page = PAGE_BYTES as u64;
        let stored = batch.iter().filter_map(|item| item.result.ok());
        let ends = stored.map(|slot| self.shape.write(slot.0.wrapping_mul(page), page));
        wait_until(ends.max().unwrap_or(begun));
    }

    fn tidy(&self) {
        self.tier.tidy();
    }

    fn load(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let page = PAGE_BYTES as u64;
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
            let offset = slot.0.wrapping_mul(PAGE_BYTES as u64);
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

    #[test]
    fn shapes_are_the_names_of_the_devices() {
        for name in NAMES {
            let shape: ShapeName = name.parse().expect(name);
            assert_eq!(
                (shape.to_string().as_str(), shape.profile().name),
                (name, name)
            );
        }
        let refused = "floppy".parse::<ShapeName>().unwrap_err().to_string();
        assert!(refused.contains("`floppy`") && refused.contains("optane-dimm, "));
    }

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
}
