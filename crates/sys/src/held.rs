//! The address spaces whose userfaultfds this process has open. If the last descriptor of one
//! closes, absent pages read as zeros. So a process asks here before it closes them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;

use crate::uffd;

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
            held += usize::from(!uffd::space_is_gone(fd));
        }
    }
    Ok(held)
}
