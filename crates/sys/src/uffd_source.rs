//! Where userfaultfds come from: the device, or the system call where there is none.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::uffd::{Uffd, UffdDevice};

/// Where userfaultfds come from that see the faults of system calls, too.
#[derive(Debug)]
pub enum UffdSource {
    /// Any process that is given it can make one.
    Device(UffdDevice),
    /// The device is not to be had, and the system call is allowed to this process. Each process
    /// that makes one needs CAP_SYS_PTRACE for it, or the sysctl vm.unprivileged_userfaultfd. The
    /// descriptor stands for the device, and makes none.
    Call(OwnedFd),
}

impl UffdSource {
    /// The device, or the system call where there is none.
    ///
    /// Errors: neither is to be had; the error is that of the device.
    pub fn open() -> io::Result<UffdSource> {
        let error = match UffdDevice::open() {
            Ok(device) => return Ok(UffdSource::Device(device)),
            Err(error) => error,
        };
        if Uffd::create_by_syscall().is_err() {
            return Err(error);
        }
        let null = std::fs::File::open("/dev/null")?;
        Ok(UffdSource::Call(null.into()))
    }

    /// Whether it is the device.
    pub fn is_device(&self) -> bool {
        matches!(self, UffdSource::Device(_))
    }

    /// A new userfaultfd of the calling process, non-blocking, closed on exec.
    pub fn create(&self) -> io::Result<Uffd> {
        match self {
            UffdSource::Device(device) => device.create(),
            UffdSource::Call(_) => Uffd::create_by_syscall(),
        }
    }
}

impl AsFd for UffdSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            UffdSource::Device(device) => device.as_fd(),
            UffdSource::Call(null) => null.as_fd(),
        }
    }
}
