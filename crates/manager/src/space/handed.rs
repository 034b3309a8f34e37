//! The memory of a virtual machine that another process runs, and has handed over. It is not the
//! program's: nothing of ours is in that process, so no page of it can leave. It begins as the
//! pages of a file.

use std::os::fd::AsFd;

use undercroft_base::{Bytes, Slot, VirtPage, VirtRange};
use undercroft_proto::legacy::{Fds, Flag, Number, Row};
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::{self, Vma};
use undercroft_sys::uffd::{Uffd, UffdError};

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

    /// Whether the page is of memory that other processes may have mapped. If one of them gives it
    /// back, it is taken away from all, and no event tells of it.
    pub(crate) fn is_shared(&self, page: VirtPage) -> bool {
        let mut maps = String::new();
        let mapped = procfs::read_maps(self.pid, &mut maps);
        let mut all = maps.lines().filter_map(Vma::parse);
        mapped.is_ok() && all.any(|of| of.shared && of.range.contains(page))
    }

    /// Makes every page an error that a fork child of the monitor lacks: with `child` closed, it
    /// would be zeros. Also where the monitor registered memory that it did not name.
    ///
    /// * `ranges`: of the machine's memory.
    pub(super) fn refuse_child(&self, ranges: &[VirtRange], child: &Uffd) {
        let mut maps = String::new();
        let mapped = procfs::read_maps(self.pid, &mut maps);
        let others = maps.lines().filter_map(Vma::parse).map(|of| of.range);
        // Most of them are not registered, and refuse.
        let others = others.filter(|_| mapped.is_ok());
        ranges
            .iter()
            .copied()
            .chain(others)
            .for_each(|range| refuse(child, range));
    }
}

fn refuse(child: &Uffd, range: VirtRange) {
    let mut next = range.start;
    while next < range.end {
        next = match child.poison(VirtRange::new(next, range.end)) {
            Err(UffdError::Exists { done }) => next.plus(done + 1),
            Err(UffdError::LayoutChanging { done } | UffdError::NoMemory { done }) if done > 0 => {
                next.plus(done)
            }
            _ => return,
        };
    }
}
