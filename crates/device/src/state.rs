//! The state of a device as words, for processes that share one: each takes the words over, asks
//! for one request, and puts the words back that have changed.
//!
//! ```text
//! 0 .. channels   until when each channel is taken, picoseconds; the lowest bit: it writes
//! channels        of a disk: the byte that comes next without any movement
//! channels + 1    of a disk: until when it does
//! ```
//!
//! Any words are a state: the process that wrote them may have died, or lie. A time further ahead
//! than [`QUEUE_MAX`] counts as none, so no request waits longer than that for words alone.
//! Deferred writes and bookings are none of the state: a device in real time has neither.

use crate::disk::Head;
use crate::{Channel, Device, Profile, Time};

/// The longest queue of a channel that is believed.
pub const QUEUE_MAX: Time = Time(5_000_000_000_000);

const WRITES: u64 = 1;

/// Words of the state of a device.
pub fn words(profile: &Profile) -> usize {
    profile.channels.max(1) as usize + if profile.disk.is_some() { 2 } else { 0 }
}

/// A time that words say.
fn believed(time: u64, now: Time) -> Time {
    let time = Time(time);
    if time <= now + QUEUE_MAX {
        time
    } else {
        Time::default()
    }
}

impl Device {
    /// Takes the state over that words say, at `now`. Panics if they are not [`words`] long.
    pub fn take_over(&mut self, state: &[u64], now: Time) {
        assert_eq!(state.len(), words(&self.profile), "a state of this device");
        let (channels, head) = state.split_at(self.channels.len());
        for (channel, word) in self.channels.iter_mut().zip(channels) {
            *channel = Channel {
                free: believed(word & !WRITES, now),
                writes: word & WRITES != 0,
            };
        }
        if let (Some(disk), [next, until]) = (self.profile.disk, head) {
            self.head = Some(Head::at(disk, *next, believed(*until, now)));
        }
    }

    /// Says the state in words. Panics if they are not [`words`] long.
    pub fn put(&self, state: &mut [u64]) {
        assert_eq!(state.len(), words(&self.profile), "a state of this device");
        let (channels, head) = state.split_at_mut(self.channels.len());
        for (channel, word) in self.channels.iter().zip(channels) {
            *word = channel.free.0 & !WRITES | u64::from(channel.writes);
        }
        if let (Some(at), [next, until]) = (&self.head, head) {
            (*next, *until) = (at.next().0, at.next().1.0);
        }
    }

    /// Words of channels: of these, a request changes one.
    pub fn channel_words(&self) -> usize {
        self.channels.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NAMES, by_name};
    use undercroft_seeded::Random;

    /// Two equal devices, one of which forgets all but the words after each request.
    #[test]
    fn device_that_goes_through_words_serves_the_same() {
        for name in NAMES {
            let profile = by_name(name).expect(name);
            let mut whole = Device::new(profile.clone());
            let mut state = vec![0; words(&profile)];
            let mut random = Random::new(3);
            let mut now = Time::default();
            for _ in 0..2_000 {
                let pause = if profile.disk.is_some() {
                    50_000_000_000
                } else {
                    100_000_000
                };
                now += Time(random.below(pause));
                let (offset, bytes) = (random.below(1 << 36), 4096 * (1 + random.below(4)));
                let mut other = Device::new(profile.clone());
                other.take_over(&state, now);
                let (one, two) = match random.below(2) {
                    0 => (
                        whole.read(now, offset, bytes),
                        other.read(now, offset, bytes),
                    ),
                    _ => (
                        whole.write(now, offset, bytes),
                        other.write(now, offset, bytes),
                    ),
                };
                // The lowest bit of a time is the flag.
                let late = one.end.0.abs_diff(two.end.0);
                assert!(late < 10_000, "{name}: {late} ps at {now:?}");
                other.put(&mut state);
            }
        }
    }

    #[test]
    fn no_words_have_a_request_wait_for_longer_than_the_longest_queue() {
        let mut random = Random::new(5);
        for name in NAMES {
            let profile = by_name(name).expect(name);
            let alone = Time(40_000_000_000) + profile.write.time(4096) + profile.write.time(4096);
            for round in 0..500 {
                let word = |random: &mut Random| match round % 3 {
                    0 => u64::MAX,
                    1 => random.below(u64::MAX),
                    _ => random.below(1 << 50),
                };
                let state: Vec<u64> = (0..words(&profile)).map(|_| word(&mut random)).collect();
                let mut device = Device::new(profile.clone());
                let now = Time(random.below(1 << 52));
                device.take_over(&state, now);
                let end = device.read(now, random.below(1 << 40), 4096).end;
                assert!(
                    end >= now && end <= now + QUEUE_MAX + alone,
                    "{name}: {state:?}"
                );
                let end = device.write(now, random.below(u64::MAX), 4096).end;
                let longest = QUEUE_MAX + alone + alone;
                assert!(end >= now && end <= now + longest, "{name}: {state:?}");
            }
        }
    }
}
