//! The memory of a virtual machine that another process runs, and has handed over. It is not the
//! program's: nothing of ours is in that process, so no page of it can leave. It begins as the
//! pages of a file.

use std::os::fd::AsFd;

use undercroft_base::{Bytes, Slot};
use undercroft_proto::legacy::{Fds, Flag, Number, Row};
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;

/// The process that has the memory: its monitor.
pub(crate) struct Handed {
    pub pid: u32,
    pub pidfd: PidFd,
    pub pagemap: Pagemap,
    /// The first of the slots that are its own: as many as the file has pages.
    pub first: Slot,
    /// As much as it has.
    pub bytes: Bytes,
}

impl Handed {
    /// Writes it down for a successor.
    pub(crate) fn note(&self, row: &Row) {
        row.put(Number::Pid, self.pid.into());
        row.put(Number::SLOT, self.first.0);
        row.put_fd(Fds::Pidfd, Some(self.pidfd.as_fd()));
        row.put_fd(Fds::Pagemap, Some(self.pagemap.as_fd()));
        row.set(Flag::Managed);
        row.set(Flag::Handed);
    }
}
