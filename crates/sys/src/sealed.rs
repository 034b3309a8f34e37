//! Bytes in a memfd that stay as they are: a process that is given one uses what it has checked,
//! and is not kept waiting.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

/// A memfd with these bytes.
pub fn of(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create(name, flags)?);
    file.write_all(bytes)?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// The bytes of such a memfd, which another process has made. One byte more than `most` if it has
/// more. Errors: it is another file, or its bytes may change.
pub fn read(memfd: OwnedFd, most: usize) -> io::Result<Vec<u8>> {
    let seals = fcntl_get_seals(&memfd).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) {
        return Err(io::Error::other(
            "it is no sealed memfd: its bytes may change",
        ));
    }
    let file = File::from(memfd);
    let mut bytes = vec![0; file.metadata()?.len().min(most as u64 + 1) as usize];
    file.read_exact_at(&mut bytes, 0)?; // not from its offset, which the other shares
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_bytes_are_read_whole_and_others_are_refused() {
        let memfd = of("test", b"bytes").expect("a memfd");
        let mut again = File::from(memfd.try_clone().expect("a descriptor"));
        assert!(again.write_all(b"other").is_err());
        assert_eq!(read(again.into(), 10).expect("sealed"), b"bytes");
        assert_eq!(read(memfd, 3).expect("sealed"), b"byte", "a byte too many");
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).expect("a memfd");
        assert!(read(open, 10).is_err());
        let (pipe, _writer) = rustix::pipe::pipe().expect("a pipe");
        assert!(read(pipe, 10).is_err(), "it would be waited for");
    }
}
