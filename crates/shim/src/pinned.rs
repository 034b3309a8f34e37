//! Stands in for setsockopt: memory that the kernel pins for AF_XDP must be there.
//!
//! The kernel pins it with the lock of the address space held, and so cannot wait for a userfaultfd
//! there: one page that is out refuses all of it (ENOMEM, or EFAULT if it is the first). So the
//! pages are brought in and the call is made again. Pages that are pinned do not leave. Raw system
//! calls bypass this.

use crate::raw::{EFAULT, ENOMEM, PAGE, advice, call3, call6, fail, nr};

/// `SOL_XDP`, `XDP_UMEM_REG`.
const XDP: (i32, i32) = (283, 4);

/// Times that the pages are brought in. Some may leave again before they are pinned.
const TRIES: u32 = 8;

/// The beginning of `struct xdp_umem_reg`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Umem {
    start: u64,
    bytes: u64,
}

/// Stands in for the C library's setsockopt.
#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    socket: i32,
    level: i32,
    name: i32,
    value: usize,
    length: u32,
) -> i32 {
    let call = || {
        let (socket, length) = (socket as u32 as usize, length as usize);
        let (level, name) = (level as u32 as usize, name as u32 as usize);
        // SAFETY: the program's own call, passed on.
        unsafe { call6(nr::SETSOCKOPT, socket, level, name, value, length, 0) }
    };
    let mut result = call();
    let mut tries = 0;
    while (result == ENOMEM || result == EFAULT)
        && (level, name) == XDP
        && length as usize >= size_of::<Umem>()
        && tries < TRIES
    {
        tries += 1;
        // SAFETY: the kernel has read as many bytes at this address; EFAULT otherwise.
        let umem = unsafe { core::ptr::read_volatile(value as *const Umem) };
        let start = umem.start as usize & !(PAGE - 1);
        let bytes = umem.start as usize - start + umem.bytes as usize;
        // SAFETY: it makes the pages present and writable, as the program's call does.
        let here = unsafe { call3(nr::MADVISE, start, bytes, advice::POPULATE_WRITE) };
        if here != 0 {
            break;
        }
        result = call();
    }
    fail(result) as i32
}
