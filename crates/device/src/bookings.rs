//! When one channel is taken, if requests come in any order of time.
//!
//! ```text
//! taken    [ read ]   [ write     ][ read ]       [ write     ]
//! time   ------------------------------------------------------->
//!                  ^ a request that fits goes here
//! ```
//!
//! Clients of a simulation run on their own clocks, and one may be far ahead of another: it waited
//! for its writes. A request of the other must not wait for what is asked for later. Nor does a
//! read wait for writes that have not begun: they make way for it. Memory: a time for each request
//! after the earliest clock, which the caller tells ([`Bookings::forget`]).

use std::collections::VecDeque;

use crate::{Time, Written};

/// A write: when it was asked for, and by whom if they want to hear of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write {
    pub(crate) asked: Time,
    pub(crate) writer: Option<u32>,
}

impl Write {
    /// The notice to its writer, once it is complete.
    pub(crate) fn ended(self, end: Time) -> Option<Written> {
        let took = end - self.asked;
        self.writer.map(|writer| Written { writer, took })
    }
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    start: Time,
    end: Time,
    /// `None`: a read.
    write: Option<Write>,
}

/// A channel. No two times overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bookings {
    taken: VecDeque<Taken>,
    /// Nothing is asked for before.
    floor: Time,
}

impl Bookings {
    /// The first time from `from` on at which the channel is free for `length`. A read goes before
    /// writes that have not begun. O(log times), and those that are in the way.
    pub(crate) fn first_fit(&self, from: Time, length: Time, writes: bool) -> Time {
        let from = from.max(self.floor);
        let first = self.taken.partition_point(|taken| taken.end <= from);
        let mut start = from;
        for next in self.taken.range(first..) {
            let makes_way = !writes && next.write.is_some() && next.start >= from;
            if makes_way {
                continue;
            }
            if start + length <= next.start {
                break;
            }
            start = start.max(next.end);
        }
        start
    }

    /// Whether it writes at a time.
    pub(crate) fn writes_at(&self, time: Time) -> bool {
        let at = self.taken.partition_point(|taken| taken.end <= time);
        let taken = self.taken.get(at);
        taken.is_some_and(|taken| taken.write.is_some() && taken.start <= time)
    }

    /// Takes it from `start` on, which is a time of [`Bookings::first_fit`]. Writes that make way
    /// come later.
    ///
    /// * `write`: `None` is a read.
    pub(crate) fn book(&mut self, start: Time, length: Time, write: Option<Write>) {
        let end = start + length;
        let at = self.taken.partition_point(|taken| taken.end <= start);
        let over = self
            .taken
            .partition_point(|taken| taken.start < end)
            .max(at);
        let moved: Vec<Taken> = self.taken.drain(at..over).collect();
        let make_way = moved
            .iter()
            .all(|other| other.write.is_some() && other.start >= start);
        assert!(
            moved.is_empty() || (write.is_none() && make_way),
            "a channel does one thing at a time"
        );
        self.taken.insert(at, Taken { start, end, write });
        for other in moved {
            let length = other.end - other.start;
            let start = self.first_fit(other.start, length, true);
            self.book(start, length, other.write);
        }
    }

    /// Nothing is asked for before `now` any more. Adds the writes that ended by then.
    pub(crate) fn forget(&mut self, now: Time, written: &mut Vec<Written>) {
        self.floor = self.floor.max(now);
        let over = self.taken.partition_point(|taken| taken.end <= now);
        let past = self.taken.drain(..over);
        written.extend(past.filter_map(|taken| taken.write?.ended(taken.end)));
    }

    /// When it is free for good.
    pub(crate) fn end(&self) -> Time {
        self.taken.back().map_or(self.floor, |last| last.end)
    }
}
