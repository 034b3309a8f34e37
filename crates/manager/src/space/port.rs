//! The port of a client's memory: the calls that discovery, the fault path and the eviction path
//! make. A kind of memory is one file beside this one: `anonymous.rs` is that of processes,
//! `model.rs` that of tests.
//!
//! Pages are taken out by the client's agent (`agent.rs`), not here.

use std::io;
use std::os::fd::AsFd;

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::uffd::{MessageBuf, Messages, NOWHERE, RegisterMode, UffdError};

/// When the threads that wait for a page are woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// By its installation.
    Now,
    /// When the caller calls [`Space::wake`].
    Later,
}

/// The memory of one address space. Its descriptor is readable while messages are pending.
///
/// Seven methods, each one call of the kernel. The two questions at the end follow from them, and
/// stay apart: each has its own call, and no caller asks both.
///
/// In an error, `done` is the number of pages that were installed from the start of the range.
pub(crate) trait Space: AsFd + Send + Sync {
    /// From now on, [`Space::events`] reports faults on the mappings in the range.
    fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), UffdError>;

    /// No fault in the range is reported from now on. Missing pages read as the mapping has them.
    fn unregister(&self, range: VirtRange) -> Result<(), UffdError>;

    /// Reads pending messages. A layout event that was read is acknowledged: the client goes on.
    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>>;

    /// Installs whole pages from `bytes` at `at`, where nothing is, each atomically.
    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError>;

    /// Maps the shared zero page over the range, where nothing is.
    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError>;

    /// Wakes the threads that wait in the range. They fault again where a page is still missing.
    fn wake(&self, range: VirtRange);

    /// Write-protects the range, or removes the protection and wakes the threads that wait.
    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError>;

    /// Makes every access to the missing pages of the range fail from now on.
    fn poison(&self, range: VirtRange) -> Result<(), UffdError>;

    /// True when the address space no longer exists (exit or exec). Asks with an installation where
    /// no program maps anything: it is refused, for one reason or the other. `page`: any page.
    fn is_gone(&self, page: &[u8]) -> bool {
        self.install(NOWHERE, page, Wake::Later) == Err(UffdError::ClientGone)
    }

    /// True when a layout event waits to be read. Asks with a change of protection of no page: it
    /// is refused, for one reason or the other, before the kernel takes the lock of the address
    /// space. Threads of the program may hold that lock for long.
    fn is_event_pending(&self) -> bool {
        let asked = self.protect(VirtRange::new(NOWHERE, NOWHERE), false);
        matches!(asked, Err(UffdError::LayoutChanging { .. }))
    }
}
