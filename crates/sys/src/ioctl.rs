//! The numbers of ioctl requests, built as the kernel's `_IO*` macros do, and the one function that
//! issues them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const fn request(direction: u32, group: u32, number: u32, size: usize) -> u64 {
    ((direction << 30) | ((size as u32) << 16) | (group << 8) | number) as u64
}

pub(crate) const fn io(group: u32, number: u32) -> u64 {
    request(0, group, number, 0)
}

pub(crate) const fn read<T>(group: u32, number: u32) -> u64 {
    request(2, group, number, size_of::<T>())
}

pub(crate) const fn read_write<T>(group: u32, number: u32) -> u64 {
    request(3, group, number, size_of::<T>())
}

/// Issues `request` with a structure of the size that its number names.
///
/// # Safety
/// `T` is the `repr(C)` structure of `request`. Each address in it is another process's, or memory
/// that no Rust reference covers for writing: the kernel reads or writes there.
pub(crate) unsafe fn call<T>(
    fd: BorrowedFd<'_>,
    request: u64,
    argument: &mut T,
) -> io::Result<i32> {
    // SAFETY: `argument` is a live, exclusive reference to the structure `request` takes (caller's
    // promise).
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}
