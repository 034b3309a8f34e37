//! Stands in for madvise and shmat, which can drop pages without telling userfaultfd.

use crate::given_back;
use crate::mremap::{FIXED, MAYMOVE, whole};
use crate::raw::advice::{DONTNEED, GUARD_INSTALL, REMOVE};
use crate::raw::{EINVAL, PAGE, call3, call6, fail, nr};

/// Flags of shmat(2): round the address down; take the place of what is mapped there.
const SHM_RND: usize = 0o20000;
const SHM_REMAP: usize = 0o40000;

/// `IPC_STAT`.
const STAT: usize = 2;
/// `struct shmid_ds`, in words, and its word `shm_segsz`.
const SEGMENT_WORDS: usize = 14;
const SEGMENT_BYTES: usize = 6;

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
        unsafe { call3(nr::MADVISE, address, length, DONTNEED) };
        // SAFETY: as above.
        unsafe { call3(nr::MADVISE, address, length, GUARD_INSTALL) };
    }
    if result == 0 && advice == REMOVE {
        given_back::at(address, length);
    }
    fail(result) as i32
}

/// Stands in for the C library's shmat.
///
/// If the segment takes the place of other memory (`SHM_REMAP`), that memory goes without an event.
/// So the segment is attached elsewhere and moved there: mremap raises the event. If any of this is
/// refused, the program's own call decides.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmat(id: i32, address: usize, flags: i32) -> isize {
    let (id, flags) = (id as u32 as usize, flags as u32 as usize);
    // SAFETY: the program's own call.
    let moved = unsafe { attach_and_move(id, address, flags) };
    if moved >= 0 {
        return moved;
    }
    // SAFETY: the program's own call, passed on.
    fail(unsafe { call3(nr::SHMAT, id, address, flags) })
}

/// Puts segment `id` in the place of what is at `address`. An error if that is not asked for, or if
/// the kernel refuses a part of it; nothing is changed then.
///
/// # Safety
/// The program lets go of what is there.
unsafe fn attach_and_move(id: usize, mut address: usize, flags: usize) -> isize {
    if flags & SHM_RND != 0 {
        address &= !(PAGE - 1);
    }
    if flags & SHM_REMAP == 0 || address == 0 || !address.is_multiple_of(PAGE) {
        return EINVAL;
    }
    let mut segment = [0usize; SEGMENT_WORDS];
    // SAFETY: `segment` is live and of the size of `struct shmid_ds`, which the kernel fills.
    let asked = unsafe { call3(nr::SHMCTL, id, STAT, segment.as_mut_ptr() as usize) };
    if asked < 0 {
        return asked;
    }
    let Some(bytes) = whole(segment[SEGMENT_BYTES]) else {
        return EINVAL;
    };
    // SAFETY: at an address that the kernel chooses.
    let elsewhere = unsafe { call3(nr::SHMAT, id, 0, flags & !(SHM_REMAP | SHM_RND)) };
    if (-4095..0).contains(&elsewhere) {
        return elsewhere;
    }
    let from = elsewhere as usize;
    // SAFETY: the mapping was just made; the program lets go of what is at `address`.
    let moved = unsafe { call6(nr::MREMAP, from, bytes, bytes, MAYMOVE | FIXED, address, 0) };
    if moved < 0 {
        // SAFETY: the mapping was just made.
        unsafe { call3(nr::SHMDT, from, 0, 0) };
    }
    moved
}
