//! The C library in this process: its own functions, behind those that the shim stands in for, and
//! the control blocks of its threads.

use core::arch::{asm, global_asm};
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

global_asm!(".weak dlsym");
unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const u8) -> *mut c_void;
}

const RTLD_NEXT: *mut c_void = usize::MAX as *mut c_void;

/// The next definition of `name` after ours, or 0. Looked up once.
pub(crate) fn next(name: &CStr, found: &AtomicUsize) -> usize {
    let mut at = found.load(Relaxed);
    if at == 0 && dlsym as *const () as usize != 0 {
        // SAFETY: the C library's own.
        at = unsafe { dlsym(RTLD_NEXT, name.as_ptr().cast()) } as usize;
        found.store(at, Relaxed);
    }
    at
}

/// Address of the calling thread's control block. Both C libraries keep it in the block's first
/// word.
#[inline(always)]
pub(crate) fn control_block() -> usize {
    let block: usize;
    // SAFETY: reads the word that the thread pointer points to.
    unsafe {
        asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags));
    }
    block
}
