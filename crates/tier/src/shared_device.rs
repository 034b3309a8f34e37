//! An emulated device for several processes: its state is in memory that all of them map. The
//! daemon makes it, and a process that has the descriptor has the device.
//!
//! ```text
//! word 0    which device it is, and the version of this layout
//!      1    when it began, by CLOCK_MONOTONIC, nanoseconds
//!      2    files on it so far
//!      8..  its state (`undercroft_device::state`)
//! ```
//!
//! No process holds a lock. A request takes a channel by one exchange of its word: if another
//! process was faster, it looks again. So a process that dies takes nothing with it, and one that
//! lies makes others wait for [`QUEUE_MAX`](undercroft_device::state::QUEUE_MAX) at most. The place
//! of a disk's head is two words, and a race of two processes may mix them: a seek is wrong then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::time::{ClockId, clock_gettime};
use undercroft_device::{Device, NAMES, Time, state};
use undercroft_sys::mapping::SharedMemory;

use crate::device_name::ShapeName;

const MAGIC: u64 = 0x7563_6465_7600_0100;
const MAGIC_WORD: usize = 0;
const BEGUN_WORD: usize = 1;
const FILES_WORD: usize = 2;
const STATE_WORD: usize = 8;

/// Bytes of the device between the beginnings of two files.
const FILE_BYTES: u64 = 16 << 30;

/// Attempts to take a channel, if others are faster each time. One that never is has its time, and
/// the others do not see it.
const TRIES: usize = 64;

/// A device that processes share.
#[derive(Debug)]
pub struct SharedDevice(SharedMemory);

/// This memory is no such device.
#[derive(Debug, thiserror::Error)]
pub enum SharedDeviceError {
    /// The memory cannot be mapped.
    #[error("the memory of a shared device: {0}")]
    Memory(#[from] io::Error),
    /// The memory is another device, or none.
    #[error("what was given as the device {0} that is shared is none")]
    NotThis(ShapeName),
}

fn magic(name: ShapeName) -> u64 {
    let text = name.to_string();
    let at = NAMES.iter().position(|of| *of == text);
    MAGIC + at.unwrap_or(0) as u64
}

impl SharedDevice {
    /// An idle device. Errors: no memory.
    pub fn create(name: ShapeName) -> io::Result<SharedDevice> {
        let words = STATE_WORD + state::words(&name.profile());
        let memory = SharedMemory::create_sealed("uc-device", words * 8)?;
        memory.words()[MAGIC_WORD].store(magic(name), Relaxed);
        memory.words()[BEGUN_WORD].store(monotonic_ns(), Relaxed);
        Ok(SharedDevice(memory))
    }

    /// The device that another process made.
    ///
    /// Errors: it cannot be mapped, it could shrink, or it is another device.
    pub fn open(name: ShapeName, memory: OwnedFd) -> Result<SharedDevice, SharedDeviceError> {
        let seals = fcntl_get_seals(&memory).map_err(io::Error::from)?;
        let memory = SharedMemory::from_fd(memory)?;
        let words = memory.words();
        let is_whole = words.len() >= STATE_WORD + state::words(&name.profile());
        if !is_whole
            || !seals.contains(SealFlags::SHRINK)
            || words[MAGIC_WORD].load(Relaxed) != magic(name)
            || words[BEGUN_WORD].load(Relaxed) > monotonic_ns()
        {
            return Err(SharedDeviceError::NotThis(name));
        }
        Ok(SharedDevice(memory))
    }

    /// To hand it over.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// When it began, by CLOCK_MONOTONIC.
    pub(crate) fn begun_ns(&self) -> u64 {
        self.0.words()[BEGUN_WORD].load(Relaxed)
    }

    /// Where one more file begins on it.
    pub(crate) fn new_file(&self) -> u64 {
        let files = self.0.words()[FILES_WORD].fetch_add(1, Relaxed);
        files.wrapping_mul(FILE_BYTES)
    }

    /// Makes a request at `now`, through `device`. Returns when it ends.
    pub(crate) fn ask(
        &self,
        device: &mut Device,
        now: Time,
        request: impl Fn(&mut Device, Time) -> Time,
    ) -> Time {
        let count = state::words(device.profile());
        let words = &self.0.words()[STATE_WORD..][..count];
        let mut found = [0; WORDS_MAX];
        let (found, mut before, mut after) = (&mut found[..count], [0; WORDS_MAX], [0; WORDS_MAX]);
        let mut end = now;
        for _ in 0..TRIES {
            read(words, found);
            device.take_over(found, now);
            device.put(&mut before[..count]);
            end = request(device, now);
            device.put(&mut after[..count]);
            if book(words, found, &before[..count], &after[..count], device) {
                break;
            }
        }
        end
    }
}

/// Nanoseconds of CLOCK_MONOTONIC.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// More words than the state of any device has.
const WORDS_MAX: usize = 128;

fn read(words: &[AtomicU64], to: &mut [u64]) {
    let pairs = words.iter().zip(to);
    pairs.for_each(|(word, to)| *to = word.load(Relaxed));
}

/// Takes the channel that a request uses. False: another process has taken it since `found`.
fn book(
    words: &[AtomicU64],
    found: &[u64],
    before: &[u64],
    after: &[u64],
    device: &Device,
) -> bool {
    let channels = device.channel_words();
    if let Some(at) = (0..channels).find(|at| before[*at] != after[*at]) {
        let taken = words[at].compare_exchange(found[at], after[at], Relaxed, Relaxed);
        if taken.is_err() {
            return false;
        }
    }
    let head = words.iter().zip(after).skip(channels);
    head.for_each(|(word, after)| word.store(*after, Relaxed));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> ShapeName {
        name.parse().expect(name)
    }

    /// The same memory as another process maps it.
    fn again(of: &SharedDevice, name: &str) -> SharedDevice {
        let memory = of.memory().try_clone_to_owned().expect("a descriptor");
        SharedDevice::open(named(name), memory).expect("the same device")
    }

    #[test]
    fn every_device_has_room_for_its_state() {
        for name in NAMES {
            assert!(state::words(&named(name).profile()) <= WORDS_MAX);
        }
    }

    /// Four processes ask at once. No channel serves two at a time, so the work of all of them
    /// takes as long as that of one.
    #[test]
    fn requests_of_all_processes_wait_for_each_other() {
        for name in ["optane-dimm", "sata-ssd", "hdd-7200"] {
            let device = SharedDevice::create(named(name)).expect("memory");
            let profile = named(name).profile();
            let each = 100_u32;
            let now = Time::from_ns(1e9);
            let ends: Vec<Time> = std::thread::scope(|scope| {
                let asking = |_| {
                    let (own, mut model) = (again(&device, name), Device::new(profile.clone()));
                    scope.spawn(move || {
                        let asks = |model: &mut Device, now| model.write(now, 0, 4096).end;
                        let ends = (0..each).map(|_| own.ask(&mut model, now, asks));
                        ends.collect::<Vec<_>>()
                    })
                };
                let threads: Vec<_> = (0..4).map(asking).collect();
                let ends = threads
                    .into_iter()
                    .map(|thread| thread.join().expect("it ends"));
                ends.flatten().collect()
            });
            let last = ends.iter().max().copied().unwrap_or_default() - now;
            let alone = profile.write.time(4096).seconds();
            let least = f64::from(4 * each) * alone / f64::from(profile.channels);
            assert!(
                last.seconds() >= least * 0.999,
                "{name}: {last:?} of {least} s"
            );
        }
    }

    #[test]
    fn memory_of_another_kind_is_refused() {
        let device = SharedDevice::create(named("pcm")).expect("memory");
        let owned = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");
        assert!(SharedDevice::open(named("nvme"), owned(device.memory())).is_err());
        assert!(SharedDevice::open(named("pcm"), owned(device.memory())).is_ok());
        device.0.words()[BEGUN_WORD].store(u64::MAX, Relaxed);
        assert!(SharedDevice::open(named("pcm"), owned(device.memory())).is_err());
        // One that could be cut, so that its users die.
        let soft = SharedMemory::create("soft", 4096).expect("memory");
        soft.words()[MAGIC_WORD].store(magic(named("pcm")), Relaxed);
        assert!(SharedDevice::open(named("pcm"), owned(soft.as_fd())).is_err());
    }
}
