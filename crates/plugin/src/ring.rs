//! A bounded queue of records of four words, without a lock: a thread puts in, another takes out.
//!
//! `head` is written by the taker, `tail` by the giver; both only grow. Record i is at i modulo
//! the size, a power of two. The words are atomics, so that the queue needs no `unsafe`. Two givers
//! at a time would mix records, and break no memory.

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) type Record = [u64; 4];

pub(crate) struct Ring {
    records: Box<[[AtomicU64; 4]]>,
    head: AtomicU64,
    tail: AtomicU64,
    dropped: AtomicU64,
}

impl Ring {
    /// For `size` records, a power of two.
    pub(crate) fn new(size: usize) -> Ring {
        assert!(size.is_power_of_two());
        Ring {
            records: (0..size).map(|_| Default::default()).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    fn at(&self, number: u64) -> &[AtomicU64; 4] {
        &self.records[number as usize & (self.records.len() - 1)]
    }

    /// Puts a record in. False if it is full: the record is counted as dropped. Never waits.
    #[inline]
    pub(crate) fn push(&self, record: Record) -> bool {
        let tail = self.tail.load(Ordering::Relaxed);
        if tail.wrapping_sub(self.head.load(Ordering::Acquire)) >= self.records.len() as u64 {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        for (to, word) in self.at(tail).iter().zip(record) {
            to.store(word, Ordering::Relaxed);
        }
        self.tail.store(tail + 1, Ordering::Release);
        true
    }

    /// Takes the oldest record out.
    #[inline]
    pub(crate) fn pop(&self) -> Option<Record> {
        let record = self.peek()?;
        let head = self.head.load(Ordering::Relaxed);
        self.head.store(head + 1, Ordering::Release);
        Some(record)
    }

    /// The oldest record, which stays. For the thread that takes out.
    pub(crate) fn peek(&self) -> Option<Record> {
        let head = self.head.load(Ordering::Relaxed);
        let any = head != self.tail.load(Ordering::Acquire);
        any.then(|| std::array::from_fn(|at| self.at(head)[at].load(Ordering::Relaxed)))
    }

    /// Counts a record that was not put in.
    pub(crate) fn refuse(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that did not fit so far.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_drops_and_counts_and_keeps_the_order() {
        let ring = Ring::new(4);
        let pushed: Vec<bool> = (0..6).map(|n| ring.push([n, n, n, n])).collect();
        assert_eq!(pushed, [true, true, true, true, false, false]);
        assert_eq!(ring.dropped(), 2);
        assert_eq!(ring.pop(), Some([0; 4]));
        assert!(ring.push([9; 4]));
        let rest: Vec<u64> = std::iter::from_fn(|| ring.pop()).map(|r| r[0]).collect();
        assert_eq!(rest, [1, 2, 3, 9]);
    }

    #[test]
    fn two_threads_lose_nothing_that_was_taken_in_and_see_whole_records() {
        let ring = std::sync::Arc::new(Ring::new(64));
        let giver = ring.clone();
        let given = std::thread::spawn(move || {
            (0..100_000u64)
                .filter(|n| giver.push([*n, n ^ 1, n ^ 2, n ^ 3]))
                .count()
        });
        let (mut got, mut last) = (0, None);
        loop {
            let ended = given.is_finished();
            while let Some([n, a, b, c]) = ring.pop() {
                assert_eq!([a, b, c], [n ^ 1, n ^ 2, n ^ 3]);
                assert!(last.is_none_or(|last| n > last));
                (last, got) = (Some(n), got + 1);
            }
            if ended {
                break;
            }
        }
        assert_eq!(got, given.join().expect("the giver"));
        assert_eq!(got as u64 + ring.dropped(), 100_000);
    }
}
