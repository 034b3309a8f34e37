//! Messages and descriptors over the manager's socket.

use core::mem::size_of;

use crate::raw::{EINTR, call3, close_all, nr};

#[repr(C)]
pub(crate) struct IoVec {
    base: usize,
    len: usize,
}

#[repr(C)]
pub(crate) struct MsgHdr {
    name: usize,
    name_len: u32,
    iov: *const IoVec,
    iov_len: usize,
    pub control: usize,
    pub control_len: usize,
    flags: i32,
}

/// A control buffer for up to two descriptors.
#[repr(C, align(8))]
struct ControlBuffer {
    len: usize,
    level: i32,
    kind: i32,
    fds: [i32; 2],
}

/// Sends `message` with the first `count` of `fds`.
pub(crate) unsafe fn send<T>(socket: isize, message: &T, fds: [i32; 2], count: usize) -> bool {
    let control = ControlBuffer {
        len: 16 + 4 * count,
        level: 1,
        kind: 1,
        fds,
    };
    let iov = IoVec {
        base: core::ptr::from_ref(message) as usize,
        len: size_of::<T>(),
    };
    let header = MsgHdr {
        name: 0,
        name_len: 0,
        iov: &iov,
        iov_len: 1,
        control: if count == 0 {
            0
        } else {
            core::ptr::from_ref(&control) as usize
        },
        control_len: if count == 0 {
            0
        } else {
            size_of::<ControlBuffer>()
        },
        flags: 0,
    };
    let header = core::ptr::from_ref(&header) as usize;
    loop {
        // SAFETY: header, iov and control are live locals; 0x4000 = MSG_NOSIGNAL.
        match unsafe { call3(nr::SENDMSG, socket as usize, header, 0x4000) } {
            EINTR => continue,
            sent => return sent == size_of::<T>() as isize,
        }
    }
}

/// Receives `message`. Returns the descriptors that came along, or -1 for each missing one.
pub(crate) unsafe fn receive<T>(socket: isize, message: &mut T) -> Option<[i32; 2]> {
    let mut control = ControlBuffer {
        len: 0,
        level: 0,
        kind: 0,
        fds: [-1; 2],
    };
    let iov = IoVec {
        base: core::ptr::from_mut(message) as usize,
        len: size_of::<T>(),
    };
    let header = MsgHdr {
        name: 0,
        name_len: 0,
        iov: &iov,
        iov_len: 1,
        control: core::ptr::from_mut(&mut control) as usize,
        control_len: size_of::<ControlBuffer>(),
        flags: 0,
    };
    let header = core::ptr::from_ref(&header) as usize;
    let got = loop {
        // SAFETY: as in `send`; 0x40000000 = MSG_CMSG_CLOEXEC.
        match unsafe { call3(nr::RECVMSG, socket as usize, header, 0x4000_0000) } {
            EINTR => continue,
            got => break got,
        }
    };
    // SAFETY: the kernel filled the control buffer; volatile because it did so behind the
    // compiler's back.
    let fds = unsafe { core::ptr::read_volatile(&control.fds) };
    if got != size_of::<T>() as isize {
        close_all(fds);
        return None;
    }
    Some(fds)
}
