//! The port of a client's memory: what the fault path and the eviction path ask of it. A kind of
//! memory is one file beside this one; `anonymous.rs` is the first.
//!
//! Pages are taken out by the client's agent (`agent.rs`), not here.

use std::io;

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::uffd::{MessageBuf, Messages, UffdError};

/// When the threads that wait for a page go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// With its installation.
    Now,
    /// When the caller calls [`Space::wake`].
    Later,
}

/// The memory of one address space. Calls are static: none costs more than its system call.
///
/// An error tells in `done` how many pages from the start of the range were installed.
pub(crate) trait Space {
    /// Reads pending messages. A layout event that was read is acknowledged: the client goes on.
    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>>;

    /// Installs whole pages from `bytes` at `at`, where nothing is, each atomically.
    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError>;

    /// Maps the shared zero page over the range, where nothing is.
    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError>;

    /// Wakes the threads that wait in the range. They fault again where a page is still missing.
    fn wake(&self, range: VirtRange);

    /// Protects the range from writes, or removes that and wakes who waits.
    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError>;

    /// Every access to the missing pages of the range fails from now on.
    fn poison(&self, range: VirtRange) -> Result<(), UffdError>;
}
