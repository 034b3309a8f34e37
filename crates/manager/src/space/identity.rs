//! A process as the kernel knows it: its numbers, and the files of its address space.

use std::os::fd::AsFd;

use undercroft_proto::legacy::{Fds, Number, Row};
use undercroft_sys::maps::Maps;
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::Tasks;

/// Identity of a process, once known.
pub(crate) struct Identity {
    pub pid: u32,
    pub pidfd: PidFd,
    /// Whether it is in a pid namespace below ours. The kernel's messages then name its threads by
    /// numbers that are others' here.
    pub is_below: bool,
    /// These belong to the address space of the handshake, whatever the process executes later.
    pub pagemap: Pagemap,
    pub maps: Maps,
    pub tasks: Tasks,
}

impl Identity {
    /// Writes it down for a successor.
    pub(crate) fn note(&self, row: &Row) {
        row.put(Number::Pid, self.pid.into());
        row.put_fd(Fds::Pidfd, Some(self.pidfd.as_fd()));
        row.put_fd(Fds::Pagemap, Some(self.pagemap.as_fd()));
        row.put_fd(Fds::Maps, Some(self.maps.as_fd()));
        row.put_fd(Fds::Tasks, Some(self.tasks.as_fd()));
    }
}
