//! Takes the agent's rights away. The C library does not know of this thread of the program. When
//! the program gives up rights, by setuid() or capset(), the agent would keep them, in memory that
//! the program can write.
//!
//! The agent needs no rights: its descriptors allow what it does. It has no seccomp filter of its
//! own. With one, the kernel would refuse the program's SECCOMP_FILTER_FLAG_TSYNC, because the
//! agent's filter is not one of the caller's.

use crate::raw::{call3, call6, nr};

/// The user and group of an agent that was root's: this number with its thread id in the low bits.
/// No other process has them, not even another program's agent, so none may trace or signal it.
const NOBODY_ELSE: usize = 0xE000_0000;

/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

const PR_GET_DUMPABLE: usize = 3;
const PR_SET_DUMPABLE: usize = 4;
const PR_SET_NO_NEW_PRIVS: usize = 38;

/// The calling thread keeps no rights from now on except its descriptors.
pub(crate) unsafe fn drop_rights() {
    // SAFETY: the raw calls change this thread alone (the C library's would change all); arguments
    // are numbers or live locals.
    unsafe {
        call6(nr::PRCTL, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0);
        // A property of the whole address space: it is lost when any thread changes its user.
        let dumpable = call3(nr::PRCTL, PR_GET_DUMPABLE, 0, 0);
        let id = NOBODY_ELSE | call3(nr::GETTID, 0, 0, 0) as usize;
        // Refused to all but root, and where a user namespace has no such number.
        if call3(nr::SETGROUPS, 0, 0, 0) == 0 && call3(nr::SETRESGID, id, id, id) == 0 {
            call3(nr::SETRESUID, id, id, id);
        }
        let header = [CAPABILITY_VERSION, 0u32];
        let none = [0u32; 6];
        let (header, none) = (header.as_ptr() as usize, none.as_ptr() as usize);
        call3(nr::CAPSET, header, none, 0);
        if dumpable == 0 || dumpable == 1 {
            call3(nr::PRCTL, PR_SET_DUMPABLE, dumpable as usize, 0);
        }
    }
}
