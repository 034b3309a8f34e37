//! Stands in for calls of the C library that change memory without telling userfaultfd.

use core::arch::global_asm;

use crate::raw::{call3, nr};

const MADV_GUARD_INSTALL: usize = 102;

/// Stands in for the C library's madvise. Guard pages drop contents without telling userfaultfd: dropping them once more, which
/// tells it, changes nothing for the program, and keeps the old contents from coming back when the guard is removed.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: usize, length: usize, advice: i32) -> i32 {
    // SAFETY: the program's own call, passed on.
    let result = unsafe { call3(nr::MADVISE, address, length, advice as u32 as usize) };
    if result == 0 && advice as u32 as usize == MADV_GUARD_INSTALL {
        // SAFETY: the contents are gone already; this keeps the guards and tells the manager.
        unsafe { call3(nr::MADVISE, address, length, 4) };
    }
    if result >= 0 {
        return result as i32;
    }
    // SAFETY: the C library's own; it is there when this object is loaded by a C library's dynamic linker.
    unsafe {
        if __errno_location as *const () as usize != 0 {
            *__errno_location() = -result as i32;
        }
    }
    -1
}

global_asm!(".weak __errno_location");
unsafe extern "C" {
    fn __errno_location() -> *mut i32;
}
