//! Private anonymous memory of a process, by its userfaultfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::uffd::{
    MessageBuf, Messages, NOWHERE, RegisterMode, Uffd, UffdError as Refused,
};

use super::port::{Space, Wake};

/// The memory that one userfaultfd sees.
pub(crate) struct Anonymous(Uffd);

impl Anonymous {
    /// * `uffd`: its API is enabled, by us or because a FORK event brought it.
    pub fn new(uffd: Uffd) -> Anonymous {
        Anonymous(uffd)
    }

    /// Registers what is mapped in the range.
    pub fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), Refused> {
        self.0.register(range, mode)
    }

    /// True when the address space no longer exists (exit or exec). Asks with an installation where
    /// no program maps anything: it is refused, for one reason or the other. `page`: any page.
    pub fn is_gone(&self, page: &[u8]) -> bool {
        self.0.copy(NOWHERE, page, true) == Err(Refused::ClientGone)
    }

    /// True when a layout event waits to be read. Asks with a change of protection where nothing is
    /// mapped: it is refused, for one reason or the other.
    pub fn is_event_pending(&self) -> bool {
        let asked = self.0.write_protect(VirtRange::one(NOWHERE), false);
        matches!(asked, Err(Refused::LayoutChanging { .. }))
    }
}

impl AsFd for Anonymous {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Space for Anonymous {
    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        self.0.read_messages(buffer)
    }

    #[inline]
    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), Refused> {
        self.0.copy(at, bytes, wake == Wake::Later)
    }

    #[inline]
    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), Refused> {
        self.0.zeropage(range, wake == Wake::Later)
    }

    #[inline]
    fn wake(&self, range: VirtRange) {
        // Refused when the address space is gone, and then no thread waits.
        let _ = self.0.wake(range);
    }

    #[inline]
    fn protect(&self, range: VirtRange, on: bool) -> Result<(), Refused> {
        self.0.write_protect(range, on)
    }

    fn poison(&self, range: VirtRange) -> Result<(), Refused> {
        self.0.poison(range)
    }
}
