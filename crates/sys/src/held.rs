//! Whether address spaces still exist, and those whose userfaultfds this process has open. If the
//! last descriptor of one closes, absent pages read as zeros. So a process asks here before it
//! closes them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;

use undercroft_base::{VirtPage, VirtRange};

use crate::ioctl;
use crate::uffd::{CONTINUE, MODE_DONT_WAKE, Ranged, UffdError, fold};

/// How many userfaultfds are open here, anywhere in the descriptor table, whose address space still
/// exists. A process has two. 0: no process can see what is lost with them.
///
/// Errors: the table cannot be read, so nothing is known.
pub fn address_spaces() -> io::Result<usize> {
    let mut held = 0;
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // An error: it was closed meanwhile.
        let kind = fs::read_link(entry.path()).unwrap_or_default();
        if kind.as_os_str() == OsStr::new("anon_inode:[userfaultfd]") {
            // SAFETY: used for one question. If another thread closes it meanwhile, the question
            // fails, or goes to the file that took its number, which does not understand it.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            held += usize::from(life(fd) == Life::Lives);
        }
    }
    Ok(held)
}

/// Nearly every address: valid in each address space, whatever `vm.mmap_min_addr` is. No mapping
/// covers it, because a program has several.
const EVERYWHERE: VirtRange = VirtRange {
    start: VirtPage(0x4_0000),
    end: VirtPage(0x7_ffff_ffff),
};

/// State of the address space of a userfaultfd, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// The address space exists.
    Lives,
    /// The address space has ended: exit or exec.
    Gone,
    /// The descriptor is of no address space.
    Never,
}

/// Asks for the address space of a userfaultfd. Changes nothing in it.
///
/// The question is a CONTINUE of [`EVERYWHERE`]: the errno of the refusal is the answer. It is
/// always refused, because the range has to be within one mapping. Private anonymous memory would
/// refuse it besides.
///
/// Rejected: requests of one page "that no program maps". Programs map every address. A COPY puts
/// its bytes there, and a WRITEPROTECT takes a protection away.
fn life(fd: BorrowedFd<'_>) -> Life {
    let mut argument = Ranged {
        range: EVERYWHERE.into(),
        mode: MODE_DONT_WAKE,
        done: 0,
    };
    // SAFETY: CONTINUE takes `struct uffdio_continue`; no memory of this process is concerned. It
    // is refused, as above.
    let asked = unsafe { ioctl::call(fd, CONTINUE, &mut argument) };
    match asked.map_err(|error| fold(&error, 0)) {
        Err(UffdError::ClientGone) => Life::Gone,
        Err(UffdError::Invalid | UffdError::Other(_)) => Life::Never,
        _ => Life::Lives,
    }
}

/// True if the address space of a userfaultfd no longer exists: exit or exec. Changes nothing in
/// it.
pub fn is_gone(fd: BorrowedFd<'_>) -> bool {
    life(fd) == Life::Gone
}
