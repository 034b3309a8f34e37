//! Another process's memory by `/proc/PID/mem`. It is opened once, with the permission of that
//! moment, and stays with the address space of that moment.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// The memory of the address space that a process had when it was opened.
#[derive(Debug)]
pub struct ProcessMemory(File);

impl From<OwnedFd> for ProcessMemory {
    fn from(fd: OwnedFd) -> ProcessMemory {
        ProcessMemory(File::from(fd))
    }
}

impl AsFd for ProcessMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ProcessMemory {
    /// Opens it; needs ptrace permission.
    pub fn open(pid: u32) -> io::Result<ProcessMemory> {
        Ok(ProcessMemory(File::open(format!("/proc/{pid}/mem"))?))
    }

    /// Reads `dst.len()` bytes at `address`. Never waits for a userfaultfd: missing pages cannot be
    /// read. Cost: a quarter more than `process_vm_readv`.
    ///
    /// Errors: some of it cannot be read, or the address space is gone.
    pub fn read(&self, address: u64, dst: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(dst, address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_nothing_where_nothing_is() {
        let memory = ProcessMemory::open(std::process::id()).unwrap();
        let bytes = *b"found by address";
        let mut seen = [0u8; 16];
        memory.read(bytes.as_ptr() as u64, &mut seen).unwrap();
        assert_eq!(seen, bytes);
        assert!(memory.read(4096, &mut seen).is_err());
    }
}
