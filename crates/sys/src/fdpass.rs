//! Bytes and descriptors over a unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::process::PidFd;

/// Most descriptors in one message.
pub const FDS_MAX: usize = 12;

/// The process that was at the other end of a unix socket when it connected.
#[derive(Debug)]
pub struct Peer {
    /// The process. Its number is not kept: it may be another's by now.
    pub pidfd: PidFd,
    /// User id.
    pub uid: u32,
}

/// Sends `bytes` with `fds`, at most [`FDS_MAX`]. Errors: also if not all of them could be sent.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if send_some(socket, bytes, fds)? != bytes.len() {
        return Err(io::Error::new(io::ErrorKind::WriteZero, "short message"));
    }
    Ok(())
}

/// As [`send`], but a stream may take a part of `bytes`, with all of `fds`. Returns how many bytes.
pub fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    assert!(fds.len() <= FDS_MAX);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let sent = sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(sent)
}

/// Receives up to `bytes.len()` bytes, and the descriptors that came along (closed on exec). 0
/// bytes: the peer is gone.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok((got.bytes, fds))
}

/// The peer's credentials, as the kernel vouches for them.
///
/// Cost: two system calls. Errors: it has ended already.
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    // Not rustix's: it has no room for pid 0, which a process outside this pid namespace has.
    let credentials: libc::ucred = option(socket.as_fd(), libc::SO_PEERCRED)?;
    let fd: libc::c_int = option(socket.as_fd(), SO_PEERPIDFD)?;
    // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(Peer {
        pidfd: pidfd.into(),
        uid: credentials.uid,
    })
}

/// Linux 6.5; not in `libc` yet.
const SO_PEERPIDFD: libc::c_int = 77;

fn option<T: Copy>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::uninit();
    let mut len = size_of::<T>() as libc::socklen_t;
    let (at, len_at) = (value.as_mut_ptr(), std::ptr::from_mut(&mut len));
    // SAFETY: the kernel writes at most `len` bytes into `value`, a live local, and into `len`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            at.cast(),
            len_at,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if len as usize != size_of::<T>() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: all of it was written, and `T` (`ucred`, `c_int`) is plain numbers.
    Ok(unsafe { value.assume_init() })
}
