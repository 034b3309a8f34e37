//! Capacity of a device: channels that writes need, and how long the tail of its reads takes beside
//! a load (NVSwap §V asks for the measured capacity).
//!
//! Writes are kept to as few channels as they need, and reads go before those that have not begun.
//! So reads are served by the channels
//! that no write keeps busy: a queue with that many servers. The chance of a wait
//! is that of Erlang's C formula, and a wait is longer than `t` with `exp(-2 (r / s - reads) t)`,
//! for `r` channels and a service time `s` that hardly varies. Arrivals are taken to be random.

use std::ops::{Add, Sub};

use undercroft_base::Nanos;

use crate::bound::Percentile;

/// Pages a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Page-ins.
    pub reads: f64,
    /// Page-outs that write.
    pub writes: f64,
}

/// A device as it was measured, or as its model says. Times are of one page, of an idle device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Service {
    /// The time of a page-in besides its read.
    pub path: Nanos,
    /// A read.
    pub read: Nanos,
    /// A write.
    pub write: Nanos,
    /// How much longer a read takes beside a write: 1 at least.
    pub beside: f64,
    /// Requests that it serves at once.
    pub channels: u32,
}

/// Writes get this much more than they need on average: they come in batches.
const WRITES_SPARE: f64 = 1.5;

/// A device whose reads keep its channels busier than this has no tail worth a promise.
const BUSY_MAX: f64 = 0.95;

/// Writes that are under way for less of the time than this slow no tail.
const RARE: f64 = 0.002;

impl Load {
    /// The load of a client that waits for each page-in as long as its bound allows (NVSwap Eq. 2),
    /// if nothing else is known. Each page-in lets a page leave.
    pub fn of_bound(limit: Nanos) -> Load {
        let each = 1e9 / limit.0.max(1) as f64;
        Load {
            reads: each,
            writes: each,
        }
    }

    /// A part of it.
    pub fn times(self, part: f64) -> Load {
        Load {
            reads: self.reads * part,
            writes: self.writes * part,
        }
    }

    /// Finite and not negative, whatever a client says.
    pub fn sane(self) -> Load {
        let sane = |rate: f64| {
            if rate.is_finite() {
                rate.clamp(0.0, 1e9)
            } else {
                0.0
            }
        };
        Load {
            reads: sane(self.reads),
            writes: sane(self.writes),
        }
    }
}

impl Add for Load {
    type Output = Load;

    fn add(self, other: Load) -> Load {
        Load {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
        }
    }
}

impl Sub for Load {
    type Output = Load;

    fn sub(self, other: Load) -> Load {
        Load {
            reads: (self.reads - other.reads).max(0.0),
            writes: (self.writes - other.writes).max(0.0),
        }
    }
}

impl Service {
    /// Channels that this many writes a second need: one at least.
    pub fn write_channels(&self, writes: f64) -> u32 {
        let busy = writes * self.write.seconds() * WRITES_SPARE;
        (busy.ceil() as u32).clamp(1, self.channels.max(1))
    }

    /// The percentile of its reads beside a load. `None`: it cannot serve the load. O(channels).
    pub fn tail(&self, percentile: Percentile, load: Load) -> Option<Nanos> {
        let load = load.sane();
        let writing = load.writes * self.write.seconds();
        if self.channels <= 1 {
            return self.tail_of_one(percentile, load);
        }
        if writing > f64::from(self.channels) * BUSY_MAX {
            return None;
        }
        let beside = if writing > RARE { self.beside } else { 1.0 };
        let service = self.read.seconds() * beside.max(1.0);
        // Reads find the channels that writes may use, and do not, too.
        let for_writes = if writing > RARE {
            writing.ceil() as u32
        } else {
            0
        };
        let channels = self.channels - for_writes.min(self.channels);
        let busy = load.reads * service;
        if busy > f64::from(channels) * BUSY_MAX {
            return None;
        }
        let late = 1.0 - percentile.percent() / 100.0;
        let waits = chance_of_a_wait(channels, busy);
        let wait = if waits > late {
            let rate = 2.0 * (f64::from(channels) - busy) / service;
            (waits / late).ln() / rate
        } else {
            0.0
        };
        Some(Nanos(((service + wait) * 1e9).ceil() as u64 + self.path.0))
    }

    /// A device with one channel: reads wait for its writes, too.
    fn tail_of_one(&self, percentile: Percentile, load: Load) -> Option<Nanos> {
        let (read, write) = (self.read.seconds(), self.write.seconds());
        let busy = load.reads * read + load.writes * write;
        if busy > BUSY_MAX {
            return None;
        }
        let late = 1.0 - percentile.percent() / 100.0;
        let longest = if load.writes > 0.0 {
            read.max(write)
        } else {
            read
        };
        let wait = if busy > late {
            longest + (busy / late).ln() * longest / (2.0 * (1.0 - busy))
        } else {
            0.0
        };
        Some(Nanos(((read + wait) * 1e9).ceil() as u64 + self.path.0))
    }
}

/// Erlang's C formula: the chance that all of `channels` are taken, if `busy` are on average.
fn chance_of_a_wait(channels: u32, busy: f64) -> f64 {
    if busy <= 0.0 {
        return 0.0;
    }
    // Erlang B by its recursion, which does not overflow.
    let blocked = (1..=channels).fold(1.0, |blocked, channels| {
        let taken = busy * blocked;
        taken / (f64::from(channels) + taken)
    });
    let all = f64::from(channels);
    let idle = 1.0 - busy / all;
    (blocked / (idle + (1.0 - idle) * blocked)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The SSD of the paper: 90 us to read, 640 us to write, nine channels.
    const SSD: Service = Service {
        path: Nanos(0),
        read: Nanos(90_000),
        write: Nanos(640_000),
        beside: 2.0,
        channels: 9,
    };

    fn p99() -> Percentile {
        "99".parse().expect("a percentile")
    }

    #[test]
    fn tails_are_those_of_the_formula() {
        let load = |reads: f64, writes: f64| Load { reads, writes };
        let tail = |of| SSD.tail(p99(), of).map(|tail| tail.0 / 1000);
        assert_eq!(tail(load(100.0, 0.0)), Some(90), "idle");
        assert_eq!(tail(load(5_000.0, 1_000.0)), Some(180), "beside writes");
        // 3,000 writes keep 1.9 channels busy; 20,000 reads keep 3.6 of the other 7 busy.
        let busy = tail(load(20_000.0, 3_000.0)).expect("it is served");
        assert!((200..400).contains(&busy), "{busy}");
        assert_eq!(tail(load(38_000.0, 3_000.0)), None, "6.8 of 7");
        assert_eq!(tail(load(0.0, 15_000.0)), None, "9.6 of 9");
    }

    #[test]
    fn chance_of_a_wait_is_that_of_the_tables() {
        for (channels, busy, chance) in [(1, 0.5, 0.5), (2, 1.0, 1.0 / 3.0), (5, 4.0, 0.5541)] {
            let found = chance_of_a_wait(channels, busy);
            assert!((found - chance).abs() < 1e-4, "{channels}: {found}");
        }
    }

    proptest! {
        /// More load makes no tail shorter, and no load is worse than nothing but a number.
        #[test]
        fn more_load_is_no_faster(
            reads in 0.0f64..60_000.0,
            writes in 0.0f64..20_000.0,
            more in 1.0f64..2.0,
            channels in 1u32..12,
        ) {
            let device = Service { channels, ..SSD };
            let load = Load { reads, writes };
            let least = device.tail(p99(), load);
            let most = device.tail(p99(), load.times(more));
            prop_assert!(most.is_none() || (least.is_some() && most >= least), "{least:?} {most:?}");
        }
    }
}
