//! Page reads and writes through an io_uring, over an arena that the ring owns.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use undercroft_base::PAGE_BYTES;

use crate::arena::PageArena;

/// The operation in flight in one slot of the ring.
#[derive(Clone, Copy, Debug)]
struct Operation {
    token: u64,
    start: usize,
    end: usize,
}

/// Marks the completion of the wait that follows a read ([`PageRing::read_slowly`]).
const WAIT: u64 = 1 << 32;

/// A ring and its arena. Pages in an operation are in flight until its completion is reaped.
/// Dropping the ring waits for all.
pub struct PageRing {
    ring: IoUring,
    arena: PageArena,
    operations: Vec<Option<Operation>>,
    free: Vec<usize>,
    /// When the wait of the operation in each slot ends. The kernel reads it when it takes the
    /// operation up; the vector is never resized.
    until: Vec<types::Timespec>,
}

/// The operation was not started, so nothing of it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// As many operations as the ring holds are in flight: reap first.
    #[error("the ring is full")]
    Full,
    /// One of the pages is in flight already.
    #[error("a page is in flight already")]
    PageBusy,
}

impl PageRing {
    /// A ring for `entries` operations at once over `pages` pages of its own.
    pub fn new(entries: u32, pages: usize) -> io::Result<PageRing> {
        let operations = entries as usize;
        Ok(PageRing {
            ring: IoUring::new(entries)?,
            arena: PageArena::new(pages)?,
            operations: vec![None; operations],
            free: (0..operations).rev().collect(),
            until: vec![types::Timespec::new(); operations],
        })
    }

    /// The pages.
    pub fn arena(&self) -> &PageArena {
        &self.arena
    }

    /// The pages, to fill.
    pub fn arena_mut(&mut self) -> &mut PageArena {
        &mut self.arena
    }

    /// Operations in flight.
    pub fn in_flight(&self) -> usize {
        self.operations.len() - self.free.len()
    }

    fn start(&mut self, token: u64, start: usize, end: usize) -> Result<(usize, *mut u8), Refused> {
        let slot = *self.free.last().ok_or(Refused::Full)?;
        if !self.arena.start(start, end) {
            return Err(Refused::PageBusy);
        }
        self.free.pop();
        self.operations[slot] = Some(Operation { token, start, end });
        Ok((slot, self.arena.address(start)))
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) {
        if self.ring.submission().is_full() {
            let _ = self.submit(0);
        }
        // SAFETY: the buffer of `entry` is pages of the arena that are marked in flight: nothing
        // reads, writes or frees them until the completion is reaped, and `drop` waits for it. A
        // wait names a time in `until`, which lives as long as the ring.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(
            pushed.is_ok(),
            "the submission queue holds as many entries as there are operations"
        );
    }

    /// Reads pages `start..end` of the arena from `offset` of `fd`.
    pub fn read(
        &mut self,
        fd: RawFd,
        offset: u64,
        start: usize,
        end: usize,
        token: u64,
    ) -> Result<(), Refused> {
        let (slot, address) = self.start(token, start, end)?;
        let len = ((end - start) * PAGE_BYTES) as u32;
        let entry = opcode::Read::new(types::Fd(fd), address, len)
            .offset(offset)
            .build();
        self.push(&entry.user_data(slot as u64));
        Ok(())
    }

    /// As [`PageRing::read`], but the read is not complete before `least` has passed.
    ///
    /// The kernel waits (a linked timeout), no thread does. There is one completion: of the wait if
    /// all was read, otherwise of the read, at once.
    pub fn read_slowly(
        &mut self,
        (fd, offset): (RawFd, u64),
        start: usize,
        end: usize,
        token: u64,
        least: Duration,
    ) -> Result<(), Refused> {
        let (slot, address) = self.start(token, start, end)?;
        // A link holds only between operations that are submitted together.
        let queue = self.ring.submission();
        let room = queue.capacity() - queue.len();
        drop(queue);
        if room < 2 {
            let _ = self.submit(0);
        }
        let len = ((end - start) * PAGE_BYTES) as u32;
        let read = opcode::Read::new(types::Fd(fd), address, len)
            .offset(offset)
            .build()
            .flags(squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS)
            .user_data(slot as u64);
        self.until[slot] = (monotonic_now() + least).into();
        let wait = opcode::Timeout::new(&self.until[slot])
            .flags(types::TimeoutFlags::ABS)
            .build()
            .user_data(slot as u64 | WAIT);
        self.push(&read);
        self.push(&wait);
        Ok(())
    }

    /// Writes pages `start..end` of the arena to `offset` of `fd`.
    pub fn write(
        &mut self,
        fd: RawFd,
        offset: u64,
        start: usize,
        end: usize,
        token: u64,
    ) -> Result<(), Refused> {
        let (slot, address) = self.start(token, start, end)?;
        let len = ((end - start) * PAGE_BYTES) as u32;
        let entry = opcode::Write::new(types::Fd(fd), address.cast_const(), len)
            .offset(offset)
            .build();
        self.push(&entry.user_data(slot as u64));
        Ok(())
    }

    /// Submits the started operations, and waits until at least `wait` operations have completed.
    pub fn submit(&mut self, wait: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
        }
    }

    /// Calls `done(token, result)` for each completed operation: bytes transferred, or errno.
    pub fn reap(&mut self, mut done: impl FnMut(u64, Result<usize, i32>)) {
        let PageRing {
            ring,
            arena,
            operations,
            free,
            until: _,
        } = self;
        for completion in ring.completion() {
            let waited = completion.user_data() & WAIT != 0;
            let slot = (completion.user_data() & !WAIT) as usize;
            let Some(operation) = operations[slot].take() else {
                continue;
            };
            arena.finish(operation.start, operation.end);
            free.push(slot);
            let pages = operation.end - operation.start;
            let result = match completion.result() {
                n if waited && n == -libc::ETIME => Ok(pages * PAGE_BYTES),
                n if n < 0 => Err(-n),
                n => Ok(n as usize),
            };
            done(operation.token, result);
        }
    }
}

/// The clock of the kernel's absolute timeouts.
fn monotonic_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

impl AsFd for PageRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.ring` and lives as long as the borrow of `self`.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for PageRing {
    fn drop(&mut self) {
        while self.in_flight() > 0 {
            if self.submit(1).is_err() {
                // The kernel may still write into the pages. Leak them: they must not be reused.
                let empty = PageArena::new(0);
                if let Ok(empty) = empty {
                    std::mem::forget(std::mem::replace(&mut self.arena, empty));
                }
                return;
            }
            self.reap(|_, _| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn ring_reads_back_what_it_wrote_and_refuses_pages_in_flight() {
        let mut file = tempfile();
        file.write_all(&[9; 3 * PAGE_BYTES]).unwrap();
        let mut ring = PageRing::new(2, 4).unwrap();
        ring.arena_mut().page_mut(3).unwrap().fill(5);
        let fd = file.as_raw_fd();
        ring.write(fd, PAGE_BYTES as u64, 3, 4, 30).unwrap();
        assert_eq!(ring.read(fd, 0, 3, 4, 31), Err(Refused::PageBusy));
        ring.submit(1).unwrap();
        let mut seen = Vec::new();
        ring.reap(|token, result| seen.push((token, result)));
        assert_eq!(seen, [(30, Ok(PAGE_BYTES))]);
        ring.read(fd, 0, 0, 2, 1).unwrap();
        ring.read(fd, 1 << 30, 2, 3, 2).unwrap();
        assert_eq!(ring.read(fd, 0, 3, 4, 3), Err(Refused::Full));
        assert!(ring.arena().pages(0, 1).is_none());
        ring.submit(2).unwrap();
        seen.clear();
        ring.reap(|token, result| seen.push((token, result)));
        seen.sort_unstable();
        assert_eq!(seen, [(1, Ok(2 * PAGE_BYTES)), (2, Ok(0))]);
        let pages = ring.arena().pages(0, 2).unwrap();
        assert_eq!((pages[0], pages[PAGE_BYTES]), (9, 5));
    }

    /// One completion each, in full or at the end of the file, and none before its time.
    #[test]
    fn slow_reads_complete_once_and_not_before_their_time() {
        let mut file = tempfile();
        file.write_all(&[9; 2 * PAGE_BYTES]).unwrap();
        let fd = file.as_raw_fd();
        let mut ring = PageRing::new(4, 8).unwrap();
        for round in 0..20u64 {
            let begun = std::time::Instant::now();
            let least =
                |slot: u64| Duration::from_millis(if round % 2 == 0 { 3 + slot } else { 0 });
            ring.read_slowly((fd, 0), 0, 2, 0, least(0)).unwrap();
            ring.read_slowly((fd, PAGE_BYTES as u64), 2, 3, 1, least(1))
                .unwrap();
            // Beyond the end, and across it: at once, as they are.
            ring.read_slowly((fd, 1 << 30), 3, 4, 2, Duration::from_secs(50))
                .unwrap();
            let across = (fd, PAGE_BYTES as u64);
            ring.read_slowly(across, 4, 6, 3, Duration::from_secs(50))
                .unwrap();
            assert_eq!(ring.read(fd, 0, 6, 7, 4), Err(Refused::Full));
            let mut seen = Vec::new();
            while seen.len() < 4 {
                ring.submit(1).unwrap();
                let before = seen.len();
                ring.reap(|token, result| seen.push((token, result)));
                for (token, _) in &seen[before..] {
                    let early = *token < 2 && begun.elapsed() < least(*token);
                    assert!(!early, "{token} after {:?}", begun.elapsed());
                }
            }
            seen.sort_unstable();
            let one = Ok(PAGE_BYTES);
            assert_eq!(
                seen,
                [(0, Ok(2 * PAGE_BYTES)), (1, one), (2, Ok(0)), (3, one)]
            );
            assert_eq!(ring.in_flight(), 0);
            assert!(begun.elapsed() < Duration::from_secs(20));
            ring.read(fd, 0, 0, 1, 9).unwrap();
            ring.submit(1).unwrap();
            seen.clear();
            ring.reap(|token, result| seen.push((token, result)));
            assert_eq!(seen, [(9, one)], "nothing was left over");
        }
        assert_eq!(ring.arena().pages(0, 2).unwrap(), [9; 2 * PAGE_BYTES]);
    }

    fn tempfile() -> std::fs::File {
        let memory = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(memory)
    }
}
