//! Stands in for madvise, which can drop pages without telling userfaultfd.

use crate::raw::{call3, fail, nr};

const DONTNEED: usize = 4;
const GUARD_INSTALL: usize = 102;

/// Stands in for the C library's madvise.
///
/// Guard pages drop contents and tell nobody. Dropping them once more tells the manager, and keeps
/// the old contents from coming back when the guard is removed. A page that was on its way back
/// meanwhile may have taken the guard's place, so it is installed once more.
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
