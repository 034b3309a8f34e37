//! Takes the agent's rights away. The C library does not know of this thread of the program. When
//! the program gives up rights, by setuid() or capset(), the agent would keep them, in memory that
//! the program can write.
//!
//! The agent needs no rights: its descriptors allow what it does. It has no seccomp filter of its
//! own. With one, the kernel would refuse the program's SECCOMP_FILTER_FLAG_TSYNC, because the
//! agent's filter is not one of the caller's.

use crate::raw::{call3, call6, nr, own_id};

/// The user and group of an agent that was root's: this number with its thread id in the low bits.
/// No other process has them, not even another program's agent, so none may trace or signal it.
const NOBODY_ELSE: usize = 0xE000_0000;

/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

const PR_GET_DUMPABLE: usize = 3;
const PR_SET_DUMPABLE: usize = 4;
const PR_SET_NO_NEW_PRIVS: usize = 38;

/// The calling thread keeps no rights from now on except its descriptors.
pub(crate) fn drop_rights() {
    // The raw calls change this thread alone (the C library's would change all).
    // SAFETY: takes numbers; the kernel wants the unused ones to be 0.
    unsafe { call6(nr::PRCTL, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0) };
    // A property of the whole address space: it is lost when any thread changes its user.
    let dumpable = change(nr::PRCTL, [PR_GET_DUMPABLE, 0, 0]);
    let id = NOBODY_ELSE | own_id() as usize;
    // Refused to all but root, and where a user namespace has no such number.
    if change(nr::SETGROUPS, [0; 3]) == 0 && change(nr::SETRESGID, [id; 3]) == 0 {
        change(nr::SETRESUID, [id; 3]);
    }
    let header = [CAPABILITY_VERSION, 0u32];
    let none = [0u32; 6];
    let (header, none) = (header.as_ptr() as usize, none.as_ptr() as usize);
    // SAFETY: both are live.
    unsafe { call3(nr::CAPSET, header, none, 0) };
    if dumpable == 0 || dumpable == 1 {
        change(nr::PRCTL, [PR_SET_DUMPABLE, dumpable as usize, 0]);
    }
}

/// A call that changes what a thread may do.
fn change(call: usize, [a, b, c]: [usize; 3]) -> isize {
    // SAFETY: the calls above take numbers.
    unsafe { call3(call, a, b, c) }
}
