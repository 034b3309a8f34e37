//! Stands in for madvise, which can drop pages without telling userfaultfd.

use crate::raw::advice::{DONTNEED, GUARD_INSTALL};
use crate::raw::{call3, fail, nr};

/// Stands in for the C library's madvise.
///
/// Guard pages drop contents without an event. Dropping the contents once more gives the manager
/// its event. It also keeps the old contents from returning when the guard is removed. A page that
/// was being loaded meanwhile may have replaced the guard, so the guard is installed once more.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: usize, length: usize, advice: i32) -> i32 {
    let advice = advice as u32 as usize;
    // SAFETY: the program's own call, passed on.
    let result = unsafe { call3(nr::MADVISE, address, length, advice) };
    if result == 0 && advice == GUARD_INSTALL {
        // SAFETY: the contents are gone already, as the program asked.
        unsafe {
            call3(nr::MADVISE, address, length, DONTNEED);
            call3(nr::MADVISE, address, length, GUARD_INSTALL);
        }
    }
    fail(result) as i32
}
