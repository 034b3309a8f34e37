//! The port `Space` over private anonymous memory, by a userfaultfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::uffd::{MessageBuf, Messages, RegisterMode, Uffd, UffdError as Refused};

use super::port::{Space, Wake};

/// The memory of one address space, by its userfaultfd.
pub(crate) struct Anonymous(Uffd);

impl Anonymous {
    /// * `uffd`: its API is enabled, by us or because it came with a FORK event.
    pub(crate) fn new(uffd: Uffd) -> Anonymous {
        Anonymous(uffd)
    }
}

impl AsFd for Anonymous {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Space for Anonymous {
    fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), Refused> {
        self.0.register(range, mode)
    }

    fn unregister(&self, range: VirtRange) -> Result<(), Refused> {
        self.0.unregister(range)
    }

    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        self.0.read_messages(buffer)
    }

    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), Refused> {
        self.0.copy(at, bytes, wake == Wake::Later)
    }

    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), Refused> {
        self.0.zeropage(range, wake == Wake::Later)
    }

    fn wake(&self, range: VirtRange) {
        // Refused only below `lowest`, where no thread waits.
        let _ = self.0.wake(range);
    }

    fn protect(&self, range: VirtRange, on: bool) -> Result<(), Refused> {
        self.0.write_protect(range, on)
    }

    fn poison(&self, range: VirtRange) -> Result<(), Refused> {
        self.0.poison(range)
    }

    fn is_gone(&self) -> bool {
        undercroft_sys::held::is_gone(self.0.as_fd())
    }

    fn lowest(&self) -> VirtPage {
        self.0.lowest_page()
    }
}
