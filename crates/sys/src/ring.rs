//! Page reads and writes through an io_uring, over an arena that the ring owns.
//!
//! A ring carries out the operations of this file and no others, for ever: seccomp sees none of
//! them, and a ring can also open files and make connections.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};
use undercroft_base::PageSize;

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

/// Rings that are made and not in use.
static SPARE: Mutex<Vec<IoUring>> = Mutex::new(Vec::new());

/// Makes `count` rings for up to `entries` operations at once. [`PageRing::new`] takes one of them,
/// and gives it back. For a process that will make no ring any more ([`crate::restrict`]).
pub fn reserve(count: usize, entries: u32) -> io::Result<()> {
    for _ in 0..count {
        let ring = restricted(entries)?;
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(ring);
    }
    Ok(())
}

/// A ring that reads, writes and waits.
fn restricted(entries: u32) -> io::Result<IoUring> {
    let ring = IoUring::builder().setup_r_disabled().build(entries)?;
    let flags = squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS;
    ring.submitter().register_restrictions(&mut [
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Timeout::CODE),
        Restriction::sqe_flags_allowed(flags.bits()),
        Restriction::register_op(ENABLE_RINGS),
    ])?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// `IORING_REGISTER_ENABLE_RINGS`: restrictions hold for it, too. It does nothing the second time.
const ENABLE_RINGS: u8 = 12;

/// The smallest spare ring with room for `entries`, if there is one.
fn spare(entries: u32) -> Option<IoUring> {
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes = spare
        .iter()
        .map(|ring| ring.params().sq_entries())
        .enumerate();
    let fitting = sizes.filter(|(_, size)| *size >= entries);
    let (at, _) = fitting.min_by_key(|(_, size)| *size)?;
    Some(spare.swap_remove(at))
}

/// A ring and its arena. Pages in an operation are in flight until its completion is reaped.
/// Dropping the ring waits for all.
pub struct PageRing {
    ring: ManuallyDrop<IoUring>,
    /// Whether it was made before, and is to be used again.
    is_spare: bool,
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
    /// A page of the operation is in flight already.
    #[error("a page is in flight already")]
    PageBusy,
}

impl PageRing {
    /// A ring for `entries` operations at once over `pages` pages of its own.
    pub fn new(entries: u32, pages: usize, page: PageSize) -> io::Result<PageRing> {
        let operations = entries as usize;
        let arena = PageArena::new(pages, page)?;
        let spare = spare(entries);
        let is_spare = spare.is_some();
        let ring = spare.map_or_else(|| restricted(entries), Ok)?;
        Ok(PageRing {
            ring: ManuallyDrop::new(ring),
            is_spare,
            arena,
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
        let len = self.arena.bytes(end - start) as u32;
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
        let len = self.arena.bytes(end - start) as u32;
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
        let len = self.arena.bytes(end - start) as u32;
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
            ..
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
                n if waited && n == -libc::ETIME => Ok(arena.bytes(pages)),
                n if n < 0 => Err(-n),
                n => Ok(n as usize),
            };
            done(operation.token, result);
        }
    }
}

/// Page `offset` of a file or a device, which may be open for direct reads: these need memory that
/// is aligned. `None`: it cannot be read whole.
pub fn read_page(fd: RawFd, offset: u64, page: PageSize) -> Option<Vec<u8>> {
    let arena = PageArena::new(1, page).ok()?;
    let bytes = page.bytes();
    // SAFETY: the kernel writes at most a page into the only page of the arena, which no other has.
    let got = unsafe { libc::pread(fd, arena.address(0).cast(), bytes, offset as i64) };
    let page = arena.pages(0, 1).filter(|_| got == bytes as isize);
    page.map(<[u8]>::to_vec)
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
                let empty = PageArena::new(0, PageSize::Base);
                if let Ok(empty) = empty {
                    std::mem::forget(std::mem::replace(&mut self.arena, empty));
                }
                return; // and so is the ring
            }
            self.reap(|_, _| {});
        }
        // SAFETY: taken once, here, and `self` is not used after `drop`.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if self.is_spare {
            let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            spare.push(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use undercroft_base::BASE_PAGE_BYTES;

    use super::*;

    /// For tests that make a ring: they share the spare ones.
    static TURN: Mutex<()> = Mutex::new(());

    fn turn() -> std::sync::MutexGuard<'static, ()> {
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn ring_reads_back_what_it_wrote_and_refuses_pages_in_flight() {
        let _turn = turn();
        let mut file = tempfile();
        file.write_all(&[9; 3 * BASE_PAGE_BYTES]).unwrap();
        let mut ring = PageRing::new(2, 4, PageSize::Base).unwrap();
        ring.arena_mut().page_mut(3).unwrap().fill(5);
        let fd = file.as_raw_fd();
        ring.write(fd, BASE_PAGE_BYTES as u64, 3, 4, 30).unwrap();
        assert_eq!(ring.read(fd, 0, 3, 4, 31), Err(Refused::PageBusy));
        ring.submit(1).unwrap();
        let mut seen = Vec::new();
        ring.reap(|token, result| seen.push((token, result)));
        assert_eq!(seen, [(30, Ok(BASE_PAGE_BYTES))]);
        ring.read(fd, 0, 0, 2, 1).unwrap();
        ring.read(fd, 1 << 30, 2, 3, 2).unwrap();
        assert_eq!(ring.read(fd, 0, 3, 4, 3), Err(Refused::Full));
        assert!(ring.arena().pages(0, 1).is_none());
        ring.submit(2).unwrap();
        seen.clear();
        ring.reap(|token, result| seen.push((token, result)));
        seen.sort_unstable();
        assert_eq!(seen, [(1, Ok(2 * BASE_PAGE_BYTES)), (2, Ok(0))]);
        let pages = ring.arena().pages(0, 2).unwrap();
        assert_eq!((pages[0], pages[BASE_PAGE_BYTES]), (9, 5));
    }

    /// Each read completes once, in full or at the end of the file, and none before its time.
    #[test]
    fn slow_reads_complete_once_and_not_before_their_time() {
        let _turn = turn();
        let mut file = tempfile();
        file.write_all(&[9; 2 * BASE_PAGE_BYTES]).unwrap();
        let fd = file.as_raw_fd();
        let mut ring = PageRing::new(4, 8, PageSize::Base).unwrap();
        for round in 0..20u64 {
            let begun = std::time::Instant::now();
            let least =
                |slot: u64| Duration::from_millis(if round % 2 == 0 { 3 + slot } else { 0 });
            ring.read_slowly((fd, 0), 0, 2, 0, least(0)).unwrap();
            ring.read_slowly((fd, BASE_PAGE_BYTES as u64), 2, 3, 1, least(1))
                .unwrap();
            // Beyond the end, and across it: at once, as they are.
            ring.read_slowly((fd, 1 << 30), 3, 4, 2, Duration::from_secs(50))
                .unwrap();
            let across = (fd, BASE_PAGE_BYTES as u64);
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
            let one = Ok(BASE_PAGE_BYTES);
            assert_eq!(
                seen,
                [(0, Ok(2 * BASE_PAGE_BYTES)), (1, one), (2, Ok(0)), (3, one)]
            );
            assert_eq!(ring.in_flight(), 0);
            assert!(begun.elapsed() < Duration::from_secs(20));
            ring.read(fd, 0, 0, 1, 9).unwrap();
            ring.submit(1).unwrap();
            seen.clear();
            ring.reap(|token, result| seen.push((token, result)));
            assert_eq!(seen, [(9, one)], "nothing was left over");
        }
        assert_eq!(ring.arena().pages(0, 2).unwrap(), [9; 2 * BASE_PAGE_BYTES]);
    }

    /// No operation but those of this file is carried out, and nothing can be registered.
    #[test]
    fn a_ring_does_nothing_but_read_write_and_wait() {
        let mut ring = restricted(4).unwrap();
        let entries = [
            opcode::Nop::new().build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), c"/".as_ptr()).build(),
        ];
        for entry in &entries {
            // SAFETY: the path is static, and the others name no memory.
            unsafe { ring.submission().push(entry) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            let refused = ring.completion().next().unwrap().result();
            assert_eq!(refused, -libc::EACCES);
        }
        let files = ring.submitter().register_files(&[0]);
        assert_eq!(files.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }

    /// In a thread of its own: the filter is that thread's, and stays.
    #[test]
    fn a_process_that_may_make_no_ring_uses_those_that_it_has() {
        let _turn = turn();
        reserve(1, 4096).unwrap();
        let tested = std::thread::spawn(|| {
            crate::restrict::give_up_rights(crate::restrict::Network::None).unwrap();
            for _ in 0..3 {
                let mut file = tempfile();
                file.write_all(&[9; BASE_PAGE_BYTES]).unwrap();
                let mut ring = PageRing::new(4096, 1, PageSize::Base).unwrap();
                ring.read(file.as_raw_fd(), 0, 0, 1, 9).unwrap();
                ring.submit(1).unwrap();
                ring.reap(|_, got| assert_eq!(got, Ok(BASE_PAGE_BYTES)));
                let another = PageRing::new(4096, 1, PageSize::Base).err();
                assert_eq!(another.unwrap().raw_os_error(), Some(libc::EPERM));
                assert_eq!(
                    read_page(file.as_raw_fd(), 0, PageSize::Base),
                    Some(vec![9; BASE_PAGE_BYTES])
                );
                assert_eq!(
                    read_page(file.as_raw_fd(), 1, PageSize::Base),
                    None,
                    "not whole"
                );
            }
        });
        tested.join().unwrap();
    }

    fn tempfile() -> std::fs::File {
        let memory = rustix::fs::memfd_create("ring", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(memory)
    }
}
