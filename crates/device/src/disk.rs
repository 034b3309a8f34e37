//! A disk's head: seek by distance, then the turn of the platter until the sector comes.
//!
//! Seek: `settle + k * sqrt(cylinders / all)`, the usual law for short and middle distances
//! (Ruemmler and Wilkes, "An introduction to disk drive modeling", IEEE Computer 27(3), 1994), with
//! k such that the mean over random places is the data sheet's average seek (the mean of sqrt of a
//! random distance is 8/15). Turn: the angle at the head follows from the time, so that the run is
//! deterministic and the mean wait at random places is half a turn. Where the head stands right
//! behind the last sector, a request that continues there pays neither. Not modelled: zones, the
//! track buffer, reordering.

use crate::Time;

/// A disk's geometry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disk {
    /// Bytes of the whole disk.
    pub capacity_bytes: u64,
    /// Bytes of one cylinder that pass the head in one turn.
    pub track_bytes: u64,
    /// Time of a turn, ns.
    pub turn_ns: f64,
    /// Seek to the next cylinder, ns.
    pub settle_ns: f64,
    /// Average seek of a read, ns.
    pub seek_read_ns: f64,
    /// Average seek of a write, ns: the head must settle more exactly.
    pub seek_write_ns: f64,
}

/// Mean of the square root of the distance of two random places on a line of length 1.
const MEAN_ROOT: f64 = 8.0 / 15.0;

/// Where the head is.
#[derive(Clone, Debug)]
pub struct Head {
    disk: Disk,
    cylinder: u64,
    /// Byte that would come next without any movement, and until when it does.
    next: u64,
    next_at: Time,
}

impl Head {
    /// At the start of the disk.
    pub fn new(disk: Disk) -> Head {
        Head {
            disk,
            cylinder: 0,
            next: 0,
            next_at: Time::default(),
        }
    }

    /// Behind the last byte before `next`, which comes without any movement until `next_at`.
    pub(crate) fn at(disk: Disk, next: u64, next_at: Time) -> Head {
        let next = next.min(disk.capacity_bytes);
        Head {
            disk,
            cylinder: next.saturating_sub(1) / disk.track_bytes,
            next,
            next_at,
        }
    }

    /// The values that [`Head::at`] takes.
    pub(crate) fn next(&self) -> (u64, Time) {
        (self.next, self.next_at)
    }

    /// The cylinder it is over.
    pub fn cylinder(&self) -> u64 {
        self.cylinder
    }

    /// Seek and turn before a transfer of `bytes` at `offset` that could begin at `now`; the head
    /// is behind its last byte afterwards.
    pub fn reach(&mut self, now: Time, offset: u64, bytes: u64, write: bool) -> Time {
        let offset = offset % self.disk.capacity_bytes;
        let target = offset / self.disk.track_bytes;
        let transfer =
            Time::from_ns(self.disk.turn_ns * bytes as f64 / self.disk.track_bytes as f64);
        // Reads go into the drive's buffer, and writes out of it, while the host thinks: a sequence
        // goes on unless the sector has passed by a whole turn.
        let follows = offset == self.next && now <= self.next_at + Time::from_ns(self.disk.turn_ns);
        let wait = if follows {
            self.next_at - now
        } else {
            let seek = self.seek(target, write);
            seek + self.turn(now + seek, offset)
        };
        self.cylinder = (offset + bytes.max(1) - 1) / self.disk.track_bytes;
        self.next = offset + bytes;
        self.next_at = now + wait + transfer;
        wait
    }

    fn seek(&self, target: u64, write: bool) -> Time {
        let distance = self.cylinder.abs_diff(target);
        if distance == 0 {
            return Time::default();
        }
        let average = if write {
            self.disk.seek_write_ns
        } else {
            self.disk.seek_read_ns
        };
        let all = (self.disk.capacity_bytes / self.disk.track_bytes).max(1) as f64;
        let k = (average - self.disk.settle_ns) / MEAN_ROOT;
        Time::from_ns(self.disk.settle_ns + k * (distance as f64 / all).sqrt())
    }

    fn turn(&self, now: Time, offset: u64) -> Time {
        let angle = (now.ns() / self.disk.turn_ns).fract();
        let sector = (offset % self.disk.track_bytes) as f64 / self.disk.track_bytes as f64;
        Time::from_ns((sector - angle).rem_euclid(1.0) * self.disk.turn_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, by_name};
    use undercroft_seeded::Random;

    #[test]
    fn random_reads_take_the_average_seek_and_half_a_turn() {
        let profile = by_name("hdd-7200").expect("a known profile");
        let disk = profile.disk.expect("a disk");
        let expected = disk.seek_read_ns + disk.turn_ns / 2.0 + profile.read.time(4096).ns();
        let mut device = Device::new(profile);
        let mut random = Random::new(7);
        let (mut now, count) = (Time::default(), 20_000);
        for _ in 0..count {
            let place = random.below(disk.capacity_bytes / 4096) * 4096;
            // The host thinks for a random moment, or the angles would follow from each other.
            now = device
                .read(now + Time(random.below(8_333_000_000)), place, 4096)
                .end;
        }
        let mean = device.counters().read_busy.ns() / f64::from(count);
        assert!(
            (mean / expected - 1.0).abs() < 0.02,
            "{mean} against {expected}"
        );
    }

    #[test]
    fn a_sequence_runs_at_the_speed_of_the_platter() {
        let mut device = Device::new(by_name("hdd-7200").expect("a known profile"));
        let disk = device.profile().disk.expect("a disk");
        let (mut now, pages) = (Time::default(), 20_000u64);
        for page in 0..pages {
            now = device.read(now, page * 4096, 4096).end;
        }
        let speed = (pages * 4096) as f64 / now.seconds();
        let platter = disk.track_bytes as f64 / disk.turn_ns * 1e9;
        assert!(
            speed > 0.9 * platter && speed <= 1.01 * platter,
            "{speed} of {platter}"
        );
    }
}
