//! The C library in this process: its own functions, behind those that the shim stands in for, its
//! environment, and the control blocks of its threads.

use core::arch::{asm, global_asm};
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

global_asm!(".weak dlsym", ".weak __environ");
unsafe extern "C" {
    static __environ: *const *const u8;
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

/// The environment of this process, or null.
pub(crate) fn environment() -> *const *const u8 {
    // Without `black_box`, the compiler assumes that a symbol's address is never 0.
    let at = core::hint::black_box(core::ptr::addr_of!(__environ));
    match at.is_null() {
        true => core::ptr::null(),
        // SAFETY: the C library's own variable.
        false => unsafe { core::ptr::read_volatile(at) },
    }
}

/// The value of the first variable that begins with `name`, which ends with `=`.
///
/// # Safety
/// The environment is not changed meanwhile, nor as long as the value is in use.
pub(crate) unsafe fn variable(name: &[u8]) -> Option<&'static [u8]> {
    // SAFETY: the caller's promise.
    unsafe { variable_of(environment(), name) }
}

/// The same of an environment, which may be null.
///
/// # Safety
/// As above.
pub(crate) unsafe fn variable_of(mut at: *const *const u8, name: &[u8]) -> Option<&'static [u8]> {
    if at.is_null() {
        return None;
    }
    loop {
        // SAFETY: the array goes on up to its null.
        let entry = unsafe { at.read() };
        if entry.is_null() {
            return None;
        }
        // SAFETY: a C string (the caller's promise).
        let entry = unsafe { bytes_of(entry) };
        if let Some(value) = entry.strip_prefix(name) {
            return Some(value);
        }
        at = at.wrapping_add(1);
    }
}

/// The bytes of a C string, without its NUL.
///
/// # Safety
/// The string is not changed, nor goes away, as long as they are in use.
pub(crate) unsafe fn bytes_of(string: *const u8) -> &'static [u8] {
    let mut length = 0;
    // SAFETY: the string goes on up to its NUL.
    while unsafe { string.wrapping_add(length).read() } != 0 {
        length += 1;
    }
    // SAFETY: read above.
    unsafe { core::slice::from_raw_parts(string, length) }
}
