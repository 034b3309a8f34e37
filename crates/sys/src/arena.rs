//! Pages that a thread shares with the kernel's I/O. The owner of each page is checked at run time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use undercroft_base::PageSize;

use crate::mapping::PageBuf;

/// A buffer of pages. A page in flight belongs to the kernel: it cannot be borrowed until its I/O
/// is reaped. One thread owns the arena. Only the in-flight marks are shared with a
/// [`crate::ring::PageRing`].
#[derive(Debug)]
pub struct PageArena {
    buffer: PageBuf,
    in_flight: Vec<AtomicBool>,
}

impl PageArena {
    /// `pages` zeroed pages of this size, already in memory.
    pub fn new(pages: usize, page: PageSize) -> io::Result<PageArena> {
        let in_flight = (0..pages).map(|_| AtomicBool::new(false)).collect();
        Ok(PageArena {
            buffer: PageBuf::new(pages, page)?,
            in_flight,
        })
    }

    /// Bytes of `pages` pages.
    pub fn bytes(&self, pages: usize) -> usize {
        pages * self.buffer.page_size().bytes()
    }

    /// How many pages.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// True when it has no page.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn is_idle(&self, start: usize, end: usize) -> bool {
        self.in_flight[start..end]
            .iter()
            .all(|flag| !flag.load(Ordering::Acquire))
    }

    /// Pages `start..end`; `None` while one of them is in flight.
    pub fn pages(&self, start: usize, end: usize) -> Option<&[u8]> {
        let idle = self.is_idle(start, end);
        idle.then(|| &self.buffer[self.bytes(start)..self.bytes(end)])
    }

    /// Pages `start..end`, to write; `None` while one of them is in flight.
    pub fn pages_mut(&mut self, start: usize, end: usize) -> Option<&mut [u8]> {
        let (idle, range) = (self.is_idle(start, end), self.bytes(start)..self.bytes(end));
        idle.then(|| &mut self.buffer[range])
    }

    /// Page `index`, to write; `None` while it is in flight.
    pub fn page_mut(&mut self, index: usize) -> Option<&mut [u8]> {
        self.pages_mut(index, index + 1)
    }

    /// Makes page `to` one of the bytes of page `from`. False, with nothing changed, while one of
    /// them is in flight. Cost: none if they are the same.
    pub fn copy(&mut self, from: usize, to: usize) -> bool {
        if !self.is_idle(from, from + 1) || !self.is_idle(to, to + 1) {
            return false;
        }
        if from != to {
            let range = self.bytes(from)..self.bytes(from + 1);
            let to = self.bytes(to);
            self.buffer.copy_within(range, to);
        }
        true
    }

    /// Marks pages as the kernel's. False, with nothing marked, if one already is.
    pub(crate) fn start(&self, start: usize, end: usize) -> bool {
        if !self.is_idle(start, end) {
            return false;
        }
        for flag in &self.in_flight[start..end] {
            flag.store(true, Ordering::Release);
        }
        true
    }

    pub(crate) fn finish(&self, start: usize, end: usize) {
        for flag in &self.in_flight[start..end] {
            flag.store(false, Ordering::Release);
        }
    }

    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        self.buffer.address(self.bytes(page))
    }
}
