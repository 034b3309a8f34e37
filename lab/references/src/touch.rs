//! A touch of memory before any filter, of any length, as recorders and importers deliver it; and
//! its split into lines.

use undercroft_trace::{Access, Reference};

/// Bytes of a line if no cache says otherwise. The smallest page is larger.
pub const LINE_BYTES: u64 = 64;

/// A touch, of `bytes` bytes from `address` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// When, in the trace's unit.
    pub time: u64,
    /// First byte.
    pub address: u64,
    /// How many; 0 counts as 1.
    pub bytes: u32,
    /// Its kind.
    pub access: Access,
    /// Which client, from 0.
    pub client: u16,
    /// Which thread of it, from 0.
    pub thread: u16,
}

impl Touch {
    /// Numbers of the first and last line of 2^`shift` bytes. A touch past the end of the address
    /// space ends there.
    pub fn lines(&self, shift: u8) -> std::ops::RangeInclusive<u64> {
        let last = self
            .address
            .saturating_add(u64::from(self.bytes.saturating_sub(1)));
        self.address >> shift..=last >> shift
    }

    /// The references of this touch at granularity 2^`granularity`. They are its address, rounded
    /// down to a granule, and the beginning of every further line that it reaches. A line is 64
    /// bytes, or a granule if that is larger.
    pub fn references(self, granularity: u8) -> impl Iterator<Item = Reference> {
        let line = granularity.max(LINE_BYTES.trailing_zeros() as u8);
        let first = self.address >> granularity << granularity;
        let lines = self.lines(line);
        let begin = *lines.start();
        lines.map(move |number| Reference {
            time: self.time,
            address: if number == begin {
                first
            } else {
                number << line
            },
            access: self.access,
            client: self.client,
            thread: self.thread,
        })
    }
}
