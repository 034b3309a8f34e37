//! Memory that this process lends to another one: a memfd whose descriptor the other gets. It is
//! mapped here, too, and registered with a userfaultfd of this process: who has that can fill it
//! for both.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::FallocateFlags;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageSize, VirtPage, VirtRange};

use crate::mapping::OwnMapping;
use crate::object;

/// A memfd of fixed size, and where its last part is mapped. This process reads and writes nothing
/// there.
#[derive(Debug)]
pub struct Lent {
    memfd: OwnedFd,
    /// The page of the memfd that is mapped first.
    before: VirtPage,
    map: OwnMapping,
}

impl Lent {
    /// A new one, all holes.
    ///
    /// * `before`: pages that are not mapped here, in front of the `pages` that are.
    pub fn create(name: &str, before: PageCount, pages: PageCount) -> io::Result<Lent> {
        let whole = Bytes(before.bytes().0 + pages.bytes().0);
        let memfd = object::create(name, whole, PageSize::Base)?;
        let (len, from) = (pages.bytes().0 as usize, before.bytes().0);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let no = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address the kernel chooses; it overlaps nothing.
        let start = unsafe { mm::mmap(no, len, ProtFlags::READ, flags, &memfd, from) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Lent {
            memfd,
            before: VirtPage(before.0),
            map: OwnMapping { start, len },
        })
    }

    /// Where it is mapped.
    pub fn range(&self) -> VirtRange {
        let start = self.map.start.as_ptr() as u64;
        VirtRange::of_addresses(start, start + self.map.len as u64)
    }

    /// Has pages put into the memfd, those that are missing by the userfaultfd, and waits for them.
    ///
    /// * `pages`: of the mapping, from 0 on.
    ///
    /// Errors: one cannot be had.
    pub fn bring(&self, pages: VirtRange) -> io::Result<()> {
        let whole = VirtRange::new(VirtPage(0), VirtPage(self.range().count().0));
        if pages.intersect(whole) != pages {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = self
            .map
            .start
            .as_ptr()
            .wrapping_add(pages.start.address() as usize);
        let len = pages.count().bytes().0 as usize;
        // SAFETY: the range is within our mapping, and the call changes no contents of it.
        unsafe { mm::madvise(at.cast(), len, Advice::LinuxPopulateRead) }?;
        Ok(())
    }

    /// Puts a page of zeros into the memfd, if the page is missing there.
    ///
    /// * `page`: of the mapping, from 0 on.
    pub fn fill(&self, page: VirtPage) -> io::Result<()> {
        let (at, len) = (self.before.plus(page.0).address(), BASE_PAGE_BYTES as u64);
        let flags = FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.memfd, flags, at, len)?)
    }

    /// Reads a page of the memfd; one that is missing reads as zeros.
    ///
    /// * `page`: of the mapping, from 0 on.
    pub fn read(&self, page: VirtPage, bytes: &mut [u8; BASE_PAGE_BYTES]) -> io::Result<()> {
        let at = self.before.plus(page.0).address();
        match rustix::io::pread(&self.memfd, &mut bytes[..], at)? {
            BASE_PAGE_BYTES => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl AsFd for Lent {
    /// The memfd.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::{Features, Message, MessageBuf, RegisterMode};
    use crate::uffd_source::UffdSource;

    #[test]
    fn pages_that_a_userfaultfd_fills_are_in_the_memfd_and_one_that_is_poisoned_is_an_error() {
        let lent = Lent::create("uc-test-lent", PageCount(2), PageCount(3)).expect("a memfd");
        let Ok(uffd) = UffdSource::open().and_then(|source| source.create()) else {
            return eprintln!("SKIPPED: lent memory, no userfaultfd here");
        };
        uffd.api(Features::default()).expect("its API");
        uffd.register(lent.range(), RegisterMode::MISSING)
            .expect("registered");
        let start = lent.range().start;
        let pages = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
        uffd.copy(start.plus(1), &[7; 4096], false).expect("copied");
        lent.bring(pages(1, 2)).expect("it is there");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| lent.bring(pages(0, 2)));
            let mut buffer = MessageBuf::default();
            let page = loop {
                let messages = uffd.read_messages(&mut buffer).expect("read");
                if let Some(Message::Fault { page, .. }) = messages.into_iter().next() {
                    break page;
                }
            };
            assert_eq!(page, start);
            uffd.copy(start, &[5; 4096], false).expect("copied");
            assert!(waits.join().expect("no panic").is_ok());
        });
        uffd.poison(VirtRange::one(start.plus(2)))
            .expect("poisoned");
        assert!(lent.bring(pages(2, 3)).is_err());
        assert!(lent.bring(pages(2, 4)).is_err());
        let first = |page: u64| {
            let mut bytes = [1; 4096];
            lent.read(VirtPage(page), &mut bytes).expect("read");
            bytes[0]
        };
        assert_eq!([0, 1, 2].map(first), [5, 7, 0]);
        let object = object::MemoryObject::of(lent.as_fd()).expect("it opens anew");
        object.punch(pages(2, 3)).expect("punched");
        for page in [0, 1] {
            lent.fill(VirtPage(page)).expect("filled");
        }
        lent.bring(pages(0, 2)).expect("no fault waits");
        assert_eq!([0, 1].map(first), [0, 7]);
    }
}
