//! userfaultfd over a memory object, which may be in huge pages: what no other memory needs.

use std::os::fd::AsFd;

use undercroft_base::{VirtPage, VirtRange};

use crate::ioctl;
use crate::uffd::{CONTINUE, MODE_DONT_WAKE, Ranged, Uffd, UffdError, fold};

const COPY_WP: u64 = 2;
const CONTINUE_WP: u64 = 2;

impl Uffd {
    /// As [`Uffd::copy`]. The pages are write-protected from the beginning, and no thread is woken.
    pub fn copy_protected(&self, dst: VirtPage, src: &[u8]) -> Result<(), UffdError> {
        self.copy_as(dst, src, MODE_DONT_WAKE | COPY_WP)
    }

    /// Whether the file that is mapped here has the page. If no process has it in its page table,
    /// it is mapped now, and protected. The range is one page of the mapping.
    ///
    /// Errors: it cannot be told now.
    pub fn is_in_file(&self, page: VirtRange) -> Result<bool, UffdError> {
        let mut argument = Ranged {
            range: page.into(),
            // Protection that a page without an entry has would be lost.
            mode: MODE_DONT_WAKE | CONTINUE_WP,
            done: 0,
        };
        // SAFETY: CONTINUE takes `struct uffdio_continue`; it maps into the client's address space
        // only, and only what the file has.
        match unsafe { ioctl::call(self.as_fd(), CONTINUE, &mut argument) } {
            Ok(_) => Ok(true),
            Err(error) => match fold(&error, argument.done) {
                UffdError::Exists { .. } => Ok(true),
                UffdError::Other(libc::EFAULT) => Ok(false),
                error => Err(error),
            },
        }
    }
}
