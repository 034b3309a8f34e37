//! Stands in for sendmsg and sendmmsg: a descriptor of the machine's memory is sent only to a
//! process of the run, or one that `undercroft view` has started. Any other would map the memory
//! unheard, and read zeros where pages are away. Raw system calls bypass this.

use core::sync::atomic::AtomicUsize;

use undercroft_wire::protocol::{Hello, KIND_PASS_ON, MAGIC};

use crate::library::next;
use crate::raw::{EACCES, call6, fail, nr};
use crate::socket::MsgHdr;
use crate::view::{ask_with, has_machine, is_machine};

const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;

/// `struct cmsghdr`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    bytes: usize,
    level: i32,
    kind: i32,
}

/// `struct mmsghdr`.
#[repr(C)]
pub(crate) struct Several {
    message: MsgHdr,
    sent: u32,
}

type Real = unsafe extern "C" fn(i32, *const MsgHdr, i32) -> isize;
type RealOfSeveral = unsafe extern "C" fn(i32, *mut Several, u32, i32) -> i32;

/// The C library's own.
#[unsafe(link_section = ".data")]
static ONE: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = ".data")]
static SEVERAL: AtomicUsize = AtomicUsize::new(0);

/// Looks for them at the start of the program: handlers of signals may send, and may not look.
pub(crate) fn look_up() {
    next(c"sendmsg", &ONE);
    next(c"sendmmsg", &SEVERAL);
}

/// Stands in for the C library's sendmsg.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(socket: i32, message: *const MsgHdr, flags: i32) -> isize {
    // SAFETY: the program's own message.
    if has_machine() && unsafe { is_refused(socket, message) } {
        return fail(EACCES);
    }
    match next(c"sendmsg", &ONE) {
        0 => {
            let (socket, flags) = (socket as u32 as usize, flags as u32 as usize);
            let message = message as usize;
            // SAFETY: the program's own call, passed on.
            fail(unsafe { call6(nr::SENDMSG, socket, message, flags, 0, 0, 0) })
        }
        real => {
            // SAFETY: the C library's function of that name, with its signature.
            let real = unsafe { core::mem::transmute::<usize, Real>(real) };
            // SAFETY: the program's own call, passed on.
            unsafe { real(socket, message, flags) }
        }
    }
}

/// Stands in for the C library's sendmmsg.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(socket: i32, all: *mut Several, count: u32, flags: i32) -> i32 {
    let at = |of: u32| all.wrapping_add(of as usize).cast_const().cast();
    // SAFETY: the program's own messages. Each begins with a header.
    if has_machine() && (0..count).any(|of| unsafe { is_refused(socket, at(of)) }) {
        return fail(EACCES) as i32;
    }
    match next(c"sendmmsg", &SEVERAL) {
        0 => {
            let (socket, flags) = (socket as u32 as usize, flags as u32 as usize);
            let (all, count) = (all as usize, count as usize);
            // SAFETY: the program's own call, passed on.
            fail(unsafe { call6(nr::SENDMMSG, socket, all, count, flags, 0, 0) }) as i32
        }
        real => {
            // SAFETY: the C library's function of that name, with its signature.
            let real = unsafe { core::mem::transmute::<usize, RealOfSeveral>(real) };
            // SAFETY: the program's own call, passed on.
            unsafe { real(socket, all, count, flags) }
        }
    }
}

/// Whether a message has a descriptor of the memory, and goes to a stranger.
///
/// # Safety
/// As for sendmsg(2).
unsafe fn is_refused(socket: i32, message: *const MsgHdr) -> bool {
    // SAFETY: the caller's promise.
    if !unsafe { passes_on(message) } {
        return false;
    }
    let asks = Hello {
        magic: MAGIC,
        kind: KIND_PASS_ON,
        nonce: 0,
    };
    ask_with(&asks, Some(socket)) != Some(0)
}

/// Whether a message has a descriptor of the memory. What the kernel would refuse has none.
///
/// # Safety
/// As for sendmsg(2).
unsafe fn passes_on(message: *const MsgHdr) -> bool {
    // SAFETY: the caller's promise.
    let Some(message) = (unsafe { message.as_ref() }) else {
        return false;
    };
    let (head, mut at, mut left) = (size_of::<Part>(), message.control, message.control_len);
    while at != 0 && left >= head {
        // SAFETY: in the message, whose parts need not be aligned for us.
        let part = unsafe { (at as *const Part).read_unaligned() };
        if part.bytes < head || part.bytes > left {
            return false;
        }
        if part.level == SOL_SOCKET && part.kind == SCM_RIGHTS {
            let fds = (at + head) as *const i32;
            let count = (part.bytes - head) / size_of::<i32>();
            // SAFETY: as above.
            let fd = |of: usize| unsafe { fds.wrapping_add(of).read_unaligned() };
            if (0..count).any(|of| is_machine(fd(of) as u32 as usize)) {
                return true;
            }
        }
        let step = part.bytes.next_multiple_of(size_of::<usize>());
        (at, left) = (at + step, left.saturating_sub(step));
    }
    false
}
