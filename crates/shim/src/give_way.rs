//! Stands in for ioctl: if the program registers memory with a userfaultfd of its own and the
//! kernel refuses that because of ours, the manager is asked to give the memory up first.
//!
//! Raw system calls bypass this.

use core::sync::atomic::Ordering::Relaxed;

use undercroft_wire::protocol::{GiveWay, KIND_GIVE_WAY, MAGIC};

use crate::OWNER;
use crate::handshake::{connect, receive_answer};
use crate::raw::{EBUSY, PAGE, call3, close, close_all, fail, nr};
use crate::socket::send;

/// `UFFDIO_REGISTER`.
const REGISTER: u32 = 0xC020_AA00;

/// Times that the manager is asked. Another thread of the program may map memory there meanwhile.
const TRIES: u32 = 3;

/// The beginning of `struct uffdio_register`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    bytes: u64,
}

/// Stands in for the C library's ioctl.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(descriptor: i32, request: usize, argument: usize) -> i32 {
    let descriptor = descriptor as u32 as usize;
    // SAFETY: the program's own call, passed on.
    let mut result = unsafe { call3(nr::IOCTL, descriptor, request, argument) };
    let mut tries = 0;
    while result == EBUSY && request as u32 == REGISTER && tries < TRIES {
        tries += 1;
        // SAFETY: the kernel has read the range at this address; EFAULT otherwise.
        let range = unsafe { core::ptr::read_volatile(argument as *const Range) };
        if !is_given_up(range) {
            break;
        }
        // SAFETY: as above, once more.
        result = unsafe { call3(nr::IOCTL, descriptor, request, argument) };
    }
    fail(result) as i32
}

/// Has the manager give the range up, and waits for it. False: the manager has no such range, or
/// cannot.
fn is_given_up(range: Range) -> bool {
    // SAFETY: takes no arguments.
    let process = unsafe { call3(nr::GETPID, 0, 0, 0) } as u32;
    let Some(end) = range.start.checked_add(range.bytes) else {
        return false;
    };
    if OWNER.load(Relaxed) != process || !(range.start | end).is_multiple_of(PAGE as u64) {
        return false;
    }
    // SAFETY: the address is written at the start of the program only.
    let Some(socket) = (unsafe { connect() }) else {
        return false;
    };
    let ask = GiveWay {
        magic: MAGIC,
        kind: KIND_GIVE_WAY,
        start: range.start,
        end,
    };
    // SAFETY: a message of plain numbers, and no descriptors.
    let sent = unsafe { send(socket, &ask, [-1; 2], 0) };
    let answer = if sent { receive_answer(socket) } else { None };
    close(socket as usize);
    answer.map(close_all).is_some()
}
