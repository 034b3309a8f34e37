//! Devices in virtual time: how long a transfer takes, which requests wait, and the cost in energy
//! and wear.
//!
//! One law for all: `T = T_access + T_transfer * bytes`, separately for reads and writes (PCM swap
//! §III-1), on one of the device's channels. Around it: requests wait for a free channel. Deferred
//! writes ([`Device::write_behind`]) start only when no read needs the channel, but a read waits
//! for one that has started. An SSD reads slower while it writes. A disk has a head and turns
//! ([`disk`]). All constants are in [`profiles`].
//!
//! Level 0: depends on nothing. The simulator asks it in virtual time, a tier with `shape=` in real
//! time. Processes that share one in real time share its state as words ([`state`]).
//!
//! Requests are served in the order they are submitted. Two clients' requests may be submitted out
//! of order by less than one service time. Then the later one waits. Where clients' clocks are
//! further apart, [`Device::set_unordered`] gives a request the first time that is free for it.
//! Not modelled: garbage collection, caches inside the device, failures.

mod bookings;
pub mod disk;
pub mod profiles;
pub mod state;
mod time;

use std::collections::VecDeque;

pub use profiles::{NAMES, Profile, by_name};
pub use time::Time;

use bookings::{Bookings, Write};
use disk::Head;

/// Service time of a direction: `access + bytes * per_byte`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Law {
    /// T_access, nanoseconds: paid once a request.
    pub access_ns: f64,
    /// T_transfer, nanoseconds a byte.
    pub per_byte_ns: f64,
}

impl Law {
    /// The time of one request of `bytes`.
    pub fn time(self, bytes: u64) -> Time {
        Time::from_ns(self.access_ns + self.per_byte_ns * bytes as f64)
    }
}

/// How a device is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attach {
    /// On the memory bus: the processor moves every page itself, and its thread waits.
    Memory,
    /// Behind a controller with direct memory access: neighbouring pages make one request, and
    /// writes can be left to it.
    Block,
}

/// A device's counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Read requests.
    pub reads: u64,
    /// Bytes they asked for.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes they wrote.
    pub written_bytes: u64,
    /// Bytes written in whole units of the device.
    pub worn_bytes: u64,
    /// Channel time of reads.
    pub read_busy: Time,
    /// Channel time of writes.
    pub write_busy: Time,
    /// Time reads waited for a channel.
    pub read_queued: Time,
    /// Reads slowed by a write in progress.
    pub interfered: u64,
    /// Requests for which a disk's head moved.
    pub seeks: u64,
}

/// When a request started and ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// A channel took it up.
    pub start: Time,
    /// The request is complete.
    pub end: Time,
}

/// A deferred write of a writer, complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Who asked for it.
    pub writer: u32,
    /// From then until the device had it: the wait for a slot and for a channel, and the write.
    pub took: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct Channel {
    free: Time,
    writes: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    ready: Time,
    offset: u64,
    bytes: u64,
    writer: Option<u32>,
}

/// A device. Deterministic: the same requests at the same times end at the same times.
#[derive(Clone, Debug)]
pub struct Device {
    profile: Profile,
    channels: Vec<Channel>,
    /// Instead of `channels`, if requests come in any order of time.
    bookings: Option<Vec<Bookings>>,
    head: Option<Head>,
    waiting: VecDeque<Waiting>,
    /// Channels that deferred writes may use, the first ones.
    write_channels: usize,
    /// Writes that may wait.
    behind_max: usize,
    written: Vec<Written>,
    counters: Counters,
}

/// Writes that may wait behind reads, if no other number is set. With more, the writer waits.
pub const BEHIND_MAX: usize = 64;

impl Device {
    /// An idle device at time zero, a disk's head at offset 0.
    pub fn new(profile: Profile) -> Device {
        Device {
            channels: vec![Channel::default(); profile.channels.max(1) as usize],
            bookings: None,
            head: profile.disk.map(Head::new),
            waiting: VecDeque::with_capacity(BEHIND_MAX + 1),
            write_channels: profile.channels.max(1) as usize,
            behind_max: BEHIND_MAX,
            written: Vec::new(),
            counters: Counters::default(),
            profile,
        }
    }

    /// Bounds the queue of deferred writes: at most `slots` wait, and they use at most that many
    /// channels. So if there are fewer slots than channels, a read finds a channel without writes.
    pub fn set_write_slots(&mut self, slots: u32) {
        let slots = slots.max(1) as usize;
        self.behind_max = slots;
        self.set_write_channels(slots as u32);
    }

    /// Bounds the channels that deferred writes use at once. As many as before may wait.
    pub fn set_write_channels(&mut self, channels: u32) {
        self.write_channels = (channels.max(1) as usize).min(self.channels.len());
    }

    /// Requests come in any order of time: of clients whose clocks are far apart. Before the first
    /// request. Costs memory and a search for each request.
    pub fn set_unordered(&mut self) {
        assert_eq!(self.counters, Counters::default(), "before any request");
        self.bookings = Some(vec![Bookings::default(); self.channels.len()]);
    }

    /// No request comes for a time before `now` any more; see [`Device::set_unordered`].
    pub fn forget(&mut self, now: Time) {
        for channel in self.bookings.iter_mut().flatten() {
            channel.forget(now, &mut self.written);
        }
    }

    /// Deferred writes that are complete, of those with a writer: since the last call, in any
    /// order. Of a device whose requests come unordered, those that no read can delay any more.
    pub fn take_written(&mut self) -> std::vec::Drain<'_, Written> {
        self.written.drain(..)
    }

    /// Its constants.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Its counts so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Reads `bytes` at `offset`, asked for at `now`. O(channels).
    pub fn read(&mut self, now: Time, offset: u64, bytes: u64) -> Served {
        self.start_waiting(now);
        let (mut time, mut at, mut start) =
            self.plan(now, offset, bytes, false, self.channels.len());
        if self.is_writing(start) && self.profile.read_beside_write > 1.0 {
            time = Time::from_ns(time.ns() * self.profile.read_beside_write);
            self.counters.interfered += 1;
            (at, start) = self.first_fit(now, time, false, self.channels.len());
        }
        self.counters.reads += 1;
        self.counters.read_bytes += bytes;
        self.counters.read_busy += time;
        self.counters.read_queued += start - now;
        self.occupy(at, start, time, None)
    }

    /// Writes `bytes` at `offset`, requested at `now`, in turn with all other requests.
    /// O(channels).
    pub fn write(&mut self, now: Time, offset: u64, bytes: u64) -> Served {
        self.start_waiting(now);
        let request = Waiting {
            ready: now,
            offset,
            bytes,
            writer: None,
        };
        self.write_now(request, self.channels.len())
    }

    /// Leaves a write to the device, for when no read needs the channel. Returns when the caller
    /// may continue: at once; or, with more than [`BEHIND_MAX`] deferred (or the number set), when
    /// the oldest has started.
    ///
    /// * `writer`: who hears when it is complete, by [`Device::take_written`].
    pub fn write_behind(
        &mut self,
        now: Time,
        offset: u64,
        bytes: u64,
        writer: Option<u32>,
    ) -> Time {
        self.start_waiting(now);
        // Those that are asked for later do not wait yet.
        let place = match &self.bookings {
            Some(_) => self.waiting.partition_point(|other| other.ready <= now),
            None => self.waiting.len(),
        };
        let waiting = Waiting {
            ready: now,
            offset,
            bytes,
            writer,
        };
        self.waiting.insert(place, waiting);
        if place < self.behind_max {
            return now;
        }
        self.start_oldest()
            .map_or(now, |served| served.start.max(now))
    }

    /// How many writes can be left to the device at `now` without a wait.
    pub fn write_slots_free(&mut self, now: Time) -> usize {
        self.start_waiting(now);
        self.behind_max.saturating_sub(self.waiting.len())
    }

    /// Finishes all deferred writes. Returns when the last request is complete.
    pub fn finish_writes(&mut self) -> Time {
        while self.start_oldest().is_some() {}
        let free = self.channels.iter().map(|channel| channel.free);
        let booked = self.bookings.iter().flatten().map(Bookings::end);
        let end = free.chain(booked).max().unwrap_or_default();
        self.forget(end);
        end
    }

    /// Starts deferred writes on channels that are free before `now`.
    fn start_waiting(&mut self, now: Time) {
        while let Some(oldest) = self.waiting.front() {
            // Nothing but a disk's place changes the time of a write.
            let time = self.profile.write.time(oldest.bytes);
            let (_, start) = self.first_fit(oldest.ready, time, true, self.write_channels);
            if start >= now {
                break;
            }
            self.start_oldest();
        }
    }

    fn start_oldest(&mut self) -> Option<Served> {
        let oldest = self.waiting.pop_front()?;
        Some(self.write_now(oldest, self.write_channels))
    }

    /// * `channels`: how many of them it may use, the first ones.
    fn write_now(&mut self, request: Waiting, channels: usize) -> Served {
        let Waiting {
            ready,
            offset,
            bytes,
            writer,
        } = request;
        let (time, at, start) = self.plan(ready, offset, bytes, true, channels);
        let unit = self.profile.unit_bytes.max(1);
        self.counters.writes += 1;
        self.counters.written_bytes += bytes;
        self.counters.worn_bytes += bytes.next_multiple_of(unit);
        self.counters.write_busy += time;
        let write = Write {
            asked: ready,
            writer,
        };
        self.occupy(at, start, time, Some(write))
    }

    fn service(&mut self, start: Time, offset: u64, bytes: u64, write: bool) -> Time {
        let law = if write {
            self.profile.write
        } else {
            self.profile.read
        };
        let moved = bytes.next_multiple_of(self.profile.unit_bytes.max(1));
        let place = match &mut self.head {
            Some(head) => {
                let before = head.cylinder();
                let time = head.reach(start + Time::from_ns(law.access_ns), offset, moved, write);
                self.counters.seeks += u64::from(head.cylinder() != before);
                time
            }
            None => Time::default(),
        };
        place + law.time(moved)
    }

    /// How long a request takes, and by which of the first `channels` and when it is served.
    fn plan(
        &mut self,
        now: Time,
        offset: u64,
        bytes: u64,
        write: bool,
        channels: usize,
    ) -> (Time, usize, Time) {
        if self.bookings.is_some() {
            // The head is told the time at which it begins: it has the queue before it in that.
            let law = if write {
                self.profile.write
            } else {
                self.profile.read
            };
            let (_, soonest) = self.first_fit(now, law.time(bytes), write, channels);
            let time = self.service(soonest, offset, bytes, write);
            let (at, start) = self.first_fit(soonest, time, write, channels);
            return (time, at, start);
        }
        let (at, start) = self.first_fit(now, Time::default(), write, channels);
        (self.service(start, offset, bytes, write), at, start)
    }

    /// The channel, of the first `channels`, that is free first for a request of this length; and
    /// when.
    fn first_fit(&self, now: Time, length: Time, write: bool, channels: usize) -> (usize, Time) {
        let free = |at: usize| match &self.bookings {
            Some(bookings) => bookings[at].first_fit(now, length, write),
            None => self.channels[at].free,
        };
        let first = (0..channels).map(|at| (free(at), at)).min();
        let (free, at) = first.unwrap_or_default();
        (at, free.max(now))
    }

    fn is_writing(&self, time: Time) -> bool {
        let mut channels = self.channels.iter();
        let mut booked = self.bookings.iter().flatten();
        booked.any(|channel| channel.writes_at(time))
            || channels.any(|channel| channel.writes && channel.free > time)
    }

    /// * `write`: `None` is a read.
    fn occupy(&mut self, at: usize, start: Time, time: Time, write: Option<Write>) -> Served {
        let end = start + time;
        if let Some(bookings) = &mut self.bookings {
            bookings[at].book(start, time, write);
        } else {
            let writes = write.is_some();
            self.channels[at] = Channel { free: end, writes };
            let written = write.and_then(|write| write.ended(end));
            self.written.extend(written);
        }
        Served { start, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str) -> Device {
        Device::new(by_name(name).expect("a known profile"))
    }

    #[test]
    fn time_of_a_request_is_the_papers_formula() {
        for name in ["pcm", "optane-dimm", "dram", "cxl-dram"] {
            let mut device = device(name);
            let profile = device.profile().clone();
            let mut now = Time::default();
            for pages in [1u64, 8, 256] {
                let bytes = pages * 512;
                let read = device.read(now, 0, bytes);
                let expected = profile.read.access_ns + profile.read.per_byte_ns * bytes as f64;
                assert!(((read.end - now).ns() - expected).abs() < 0.001, "{name}");
                let write = device.write(read.end, 0, bytes);
                let expected = profile.write.access_ns + profile.write.per_byte_ns * bytes as f64;
                assert!(((write.end - read.end).ns() - expected).abs() < 0.001);
                now = write.end;
            }
        }
    }

    #[test]
    fn requests_beyond_the_channels_wait() {
        let mut device = device("nvme");
        let channels = device.profile().channels as usize;
        let ends: Vec<_> = (0..=channels)
            .map(|at| device.read(Time::default(), at as u64 * 4096, 4096).end)
            .collect();
        assert!(ends[..channels].iter().all(|end| *end == ends[0]));
        assert_eq!(ends[channels], ends[0] + ends[0]);
        assert_eq!(device.counters().read_queued, ends[0]);
    }

    #[test]
    fn a_read_goes_before_writes_put_aside_and_waits_for_one_that_runs() {
        let mut profile = by_name("sata-ssd").expect("a known profile");
        profile.channels = 1;
        profile.read_beside_write = 1.0;
        let mut device = Device::new(profile.clone());
        let write = profile.write.time(4096);
        for at in 0..10 {
            assert_eq!(
                device.write_behind(Time::default(), at * 4096, 4096, None),
                Time::default()
            );
        }
        let read = device.read(Time::from_ns(1.0), 0, 4096);
        assert_eq!(
            read.start, write,
            "behind the one that has started, before nine others"
        );
        let end = device.finish_writes();
        assert_eq!(end, read.end + Time(write.0 * 9));
        assert_eq!(device.counters().writes, 10);
    }

    #[test]
    fn an_ssd_reads_slower_beside_a_write() {
        let mut device = device("sata-ssd");
        let alone = device.read(Time::default(), 0, 4096).end;
        let now = Time::from_ns(1e9);
        device.write(now, 0, 1 << 20);
        let beside = device.read(now + Time::from_ns(1.0), 0, 4096);
        assert!(beside.end - beside.start > alone);
        assert_eq!(device.counters().interfered, 1);
    }

    #[test]
    fn who_puts_too_many_writes_aside_waits() {
        let mut device = device("hdd-7200");
        let mut now = Time::default();
        for at in 0..2 * BEHIND_MAX as u64 {
            now = device.write_behind(now, at << 30, 4096, None);
        }
        assert!(now > Time::from_ns(1e8), "{now:?}");
    }

    /// Eight writes and then a read, with all channels for writes or some.
    #[test]
    fn a_read_finds_a_channel_if_writes_have_fewer_slots() {
        let start_of_read = |slots: Option<u32>| {
            let mut profile = by_name("sata-ssd").expect("a known profile");
            profile.channels = 4;
            let mut device = Device::new(profile);
            slots
                .into_iter()
                .for_each(|slots| device.set_write_slots(slots));
            let mut writer = Time::default();
            for at in 0..8 {
                writer = device.write_behind(writer, at << 20, 4096, None);
            }
            let now = Time::from_ns(1.0);
            (device.read(now, 0, 4096).start > now, writer > now)
        };
        assert_eq!(start_of_read(None), (true, false), "all channels write");
        assert_eq!(start_of_read(Some(4)), (true, false), "half wait");
        assert_eq!(
            start_of_read(Some(3)),
            (false, true),
            "the writer waits instead"
        );
        assert_eq!(start_of_read(Some(1)), (false, true));
    }

    /// In order, both ways give the same; out of order, no request waits for what comes later.
    #[test]
    fn unordered_requests_take_the_first_time_that_is_free() {
        let of = |unordered: bool| {
            let mut device = device("sata-ssd");
            if unordered {
                device.set_unordered();
            }
            device
        };
        let (mut plain, mut other) = (of(false), of(true));
        let mut now = Time::default();
        for at in 0..2_000u64 {
            now += Time::from_ns((at * 7919 % 60_000) as f64);
            let offset = at << 12;
            if at.is_multiple_of(3) {
                assert_eq!(plain.read(now, offset, 4096), other.read(now, offset, 4096));
            } else {
                let waits = plain.write_behind(now, offset, 4096, None);
                assert_eq!(waits, other.write_behind(now, offset, 4096, None));
                now = waits;
            }
        }
        assert_eq!(plain.counters(), other.counters());
        assert!(plain.counters().interfered > 0, "{:?}", plain.counters());
        let late = now + Time::from_ns(1e9);
        for at in 0..100 {
            other.write(late, at << 12, 4096);
        }
        let early = now + Time::from_ns(0.5e9);
        assert_eq!(other.read(early, 0, 4096).start, early);
        assert!(plain.write(late, 0, 4096).start == late);
        let end = other.finish_writes();
        let least = late + Time(11 * other.profile().write.time(4096).0);
        assert!(end >= least, "100 writes on 9 channels: {end:?}");
    }

    /// The head of a disk is told when a request begins, so the queue before it counts once.
    #[test]
    fn a_burst_on_a_disk_takes_as_long_if_requests_may_come_unordered() {
        let ends = [false, true].map(|unordered| {
            let mut disk = device("hdd-7200");
            if unordered {
                disk.set_unordered();
            }
            let now = Time::from_ns(1e6);
            let mut ends = (0..64).map(|at| disk.write(now, (1 << 30) + (at << 12), 4096).end);
            let first = ends.next().expect("the first");
            (first, ends.last().expect("the last"))
        });
        assert_eq!(ends[0], ends[1]);
        let transfers = ends[0].1 - ends[0].0;
        assert!(
            transfers < Time::from_ns(5e6),
            "{transfers:?} behind a seek"
        );
    }

    /// A channel with a write, a read that goes before the others, and two more writes.
    #[test]
    fn a_writer_hears_how_long_each_write_took() {
        for unordered in [false, true] {
            let mut profile = by_name("sata-ssd").expect("a known profile");
            (profile.channels, profile.read_beside_write) = (1, 1.0);
            let (write, read) = (profile.write.time(4096), profile.read.time(4096));
            let mut device = Device::new(profile);
            if unordered {
                device.set_unordered();
            }
            for writer in [Some(7), None, Some(8)] {
                device.write_behind(Time::default(), 0, 4096, writer);
            }
            device.read(Time::from_ns(1.0), 0, 4096);
            let end = device.finish_writes();
            assert_eq!(end, write + read + write + write);
            let done = |writer, took| Written { writer, took };
            let written: Vec<_> = device.take_written().collect();
            assert_eq!(written, [done(7, write), done(8, end)], "{unordered}");
            assert_eq!(device.take_written().count(), 0, "told once");
        }
    }

    /// A booked write that makes way for a read of an earlier time is reported with its last end.
    #[test]
    fn a_write_that_made_way_took_longer() {
        let mut profile = by_name("sata-ssd").expect("a known profile");
        (profile.channels, profile.read_beside_write) = (1, 1.0);
        let (write, read) = (profile.write.time(4096), profile.read.time(4096));
        let mut device = Device::new(profile);
        device.set_unordered();
        let at = Time::from_ns(1e6);
        device.write_behind(at, 0, 4096, Some(1));
        device.read(at + write + Time::from_ns(1e6), 0, 4096); // has the write booked
        device.read(at - Time::from_ns(1.0), 0, 4096);
        device.forget(at + write);
        assert_eq!(device.take_written().count(), 0, "not complete yet");
        device.forget(at + write + read);
        let took = write + read - Time::from_ns(1.0);
        let written: Vec<_> = device.take_written().collect();
        assert_eq!(written, [Written { writer: 1, took }]);
    }

    #[test]
    fn wear_counts_whole_units() {
        let mut device = device("optane-dimm");
        device.write(Time::default(), 0, 512 + 1);
        assert_eq!(device.counters().written_bytes, 513);
        assert_eq!(device.counters().worn_bytes, 768);
    }
}
