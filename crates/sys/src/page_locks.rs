//! Page locks of guest memory: a memfd in which the programs that use the memory count, for each
//! page, the reasons to leave it in memory. A device that writes to a page by another way than a
//! page table (registered buffers, direct I/O, the memory's descriptor) writes to no page that has
//! left, if that page is locked meanwhile.
//!
//! ```text
//! page 0   words: MAGIC, pages of the guest, bytes of one, pages that a client may lock, CLIENTS,
//!          STRIDE; from word 8 on, for each client: 1 if it was ever in use
//! then     of each client: STRIDE bytes, a count for each page
//! ```
//! A client has a place as long as it holds a lock of the kernel on the byte of that number
//! (`F_OFD_SETLK`). So its page locks end when it does, however that comes.
//!
//! `include/uc_page_lock.h` is the other side. Nothing here is believed: a count keeps a page of
//! the guest itself, and the caller bounds how many.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageSize, VirtPage};

use crate::mapping::SharedMemory;
use crate::object;

/// Programs that can have page locks at the same time.
pub const CLIENTS: usize = 4;

/// `UCLOCKS1`.
const MAGIC: u64 = u64::from_le_bytes(*b"UCLOCKS1");

/// The word of the first client's mark.
const MARKS: usize = 8;

/// Bytes of one client's counts.
fn stride(pages: PageCount) -> u64 {
    pages.0.next_multiple_of(BASE_PAGE_BYTES as u64)
}

fn length(pages: PageCount) -> u64 {
    BASE_PAGE_BYTES as u64 + CLIENTS as u64 * stride(pages)
}

/// Makes the memfd for a guest of `pages` pages of size `page`. A program that this process starts
/// gets the descriptor. No process can make it shorter.
///
/// * `each_max`: pages that one client may lock. Clients read it there.
pub fn create(pages: PageCount, page: PageSize, each_max: PageCount) -> io::Result<OwnedFd> {
    let memfd = object::create("undercroft-locks", Bytes(length(pages)), PageSize::Base)?;
    let memory = SharedMemory::from_fd(memfd.try_clone()?)?;
    let header = [
        MAGIC,
        pages.0,
        page.bytes() as u64,
        each_max.0,
        CLIENTS as u64,
        stride(pages),
    ];
    for (word, value) in memory.words().iter().zip(header) {
        word.store(value, Ordering::Relaxed);
    }
    Ok(memfd)
}

/// The lock of the kernel that has this place.
fn lock_of(place: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: place as i64,
        l_len: 1,
        l_pid: 0,
    }
}

/// The manager's side.
#[derive(Debug)]
pub struct PageLocks {
    memory: SharedMemory,
    /// Opened anew: its locks are not those of the descriptor that programs inherit.
    file: File,
    pages: PageCount,
}

impl PageLocks {
    /// Errors: the memfd is none of [`create`] for this many pages.
    pub fn of(memfd: BorrowedFd<'_>, pages: PageCount) -> io::Result<PageLocks> {
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() != length(pages) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let memory = SharedMemory::from_fd(file.try_clone()?.into())?;
        Ok(PageLocks {
            memory,
            file,
            pages,
        })
    }

    /// Number of the guest's pages.
    pub fn pages(&self) -> PageCount {
        self.pages
    }

    /// Whether any program has ever had this place. So the counts of a place that no program uses
    /// take no memory.
    pub fn was_used(&self, client: usize) -> bool {
        self.memory.words()[MARKS + client].load(Ordering::Relaxed) != 0
    }

    /// Locks that were set before a thread touched a page are seen from here on, if the caller has
    /// protected the page since.
    pub fn synchronize(&self) {
        fence(Ordering::SeqCst);
    }

    /// Whether a page is locked by a client, if that lives.
    pub fn is_set(&self, client: usize, page: VirtPage) -> bool {
        if page.0 >= self.pages.0 {
            return false;
        }
        let byte = BASE_PAGE_BYTES as u64 + client as u64 * stride(self.pages) + page.0;
        let word = self.memory.words()[byte as usize / 8].load(Ordering::SeqCst);
        word.to_le_bytes()[byte as usize % 8] != 0
    }

    /// Whether a program has this place now. Cost: a system call.
    ///
    /// If the kernel does not say, a program has it: a page too many stays.
    pub fn lives(&self, client: usize) -> bool {
        let mut of = lock_of(client);
        // SAFETY: the kernel writes to `of` alone, which is ours and of the type it expects.
        let told = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut of) };
        told != 0 || of.l_type != libc::F_UNLCK as i16
    }
}

impl AsFd for PageLocks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A program of its own that locks pages, for tests. Dropping it is its end.
#[derive(Debug)]
pub struct Client {
    /// Its lock of the kernel ends with it.
    _claim: File,
    memory: SharedMemory,
    place: usize,
    stride: u64,
}

impl Client {
    /// Takes the place `place`, as the header file does.
    pub fn take(memfd: BorrowedFd<'_>, place: usize) -> io::Result<Client> {
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        let mut of = lock_of(place);
        // SAFETY: the kernel reads `of` alone, which is of the type it expects.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut of) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // By another open file: a mapping would keep the lock of this one.
        let memory = SharedMemory::from_fd(memfd.try_clone_to_owned()?)?;
        memory.words()[MARKS + place].store(1, Ordering::SeqCst);
        let stride = memory.words()[5].load(Ordering::Relaxed);
        Ok(Client {
            _claim: file,
            memory,
            place,
            stride,
        })
    }

    /// Counts a page up (`true`) or to nothing.
    pub fn set(&self, page: VirtPage, locked: bool) {
        let byte = BASE_PAGE_BYTES as u64 + self.place as u64 * self.stride + page.0;
        self.memory.bytes_in(byte as usize, &[u8::from(locked)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_locked_as_long_as_its_client_lives() {
        let pages = PageCount(5000);
        let memfd = create(pages, PageSize::Base, PageCount(7)).expect("a memfd");
        let locks = PageLocks::of(memfd.as_fd(), pages).expect("it is one");
        assert!(PageLocks::of(memfd.as_fd(), PageCount(9000)).is_err());
        assert!(!locks.was_used(1) && !locks.lives(1));
        let client = Client::take(memfd.as_fd(), 1).expect("it is free");
        assert!(Client::take(memfd.as_fd(), 1).is_err(), "it is taken");
        client.set(VirtPage(4999), true);
        locks.synchronize();
        let set = |page| locks.is_set(1, VirtPage(page));
        assert_eq!([4998, 4999, 5000].map(set), [false, true, false]);
        assert!(!locks.is_set(0, VirtPage(4999)) && !locks.is_set(2, VirtPage(4999)));
        assert!(locks.was_used(1) && locks.lives(1) && !locks.lives(0));
        drop(client);
        assert!(!locks.lives(1));
    }
}
