//! Takes the agent's rights away. When the program gives up rights, by setuid() or capset(), the
//! agent would keep them, in memory that the program can write.
//!
//! The agent needs no rights: its descriptors allow what it does. A seccomp filter of its own
//! leaves it the calls that it makes. So a program that writes to its stack gains no call that its
//! sandbox forbids. The filter is no thread's of the program, so it stands in no other's way.

use crate::alone::CLONE_VM;
use crate::raw::{call3, call6, nr, own_id};

/// The user and group of an agent that was root's: this number with its process id in the low bits.
/// No other process has them, not even another program's agent, so none may trace or signal it.
const NOBODY_ELSE: usize = 0xE000_0000;

/// The calls that the agent makes once it has its descriptors.
const CALLS: [usize; 9] = [
    nr::FUTEX,
    nr::FUTEX_WAITV,
    nr::IOCTL,
    nr::MADVISE,
    nr::MUNLOCK,
    nr::MPROTECT,
    nr::SCHED_YIELD,
    nr::RESTART_SYSCALL,
    nr::EXIT_GROUP,
];

/// `struct sock_filter`: an instruction.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    value: u32,
}

/// `struct sock_fprog`.
#[repr(C)]
struct Program {
    length: u16,
    at: *const Instruction,
}

/// Loads a word of `struct seccomp_data`; goes on with one of two instructions; returns.
const fn load(offset: u32) -> Instruction {
    instruction(0x20, 0, 0, offset)
}
const fn is(value: u32, if_true: u8, if_false: u8) -> Instruction {
    instruction(0x15, if_true, if_false, value)
}
const fn give(value: u32) -> Instruction {
    instruction(0x06, 0, 0, value)
}
const fn instruction(code: u16, if_true: u8, if_false: u8, value: u32) -> Instruction {
    Instruction {
        code,
        if_true,
        if_false,
        value,
    }
}

const CALL_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const FIRST_ARGUMENT_AT: u32 = 16;
const X86_64: u32 = 0xC000_003E;
const ALLOW: u32 = 0x7fff_0000;
const REFUSE: u32 = 0x0005_0001; // EPERM

const LENGTH: usize = CALLS.len() + 8;

/// Allows [`CALLS`], and the question whether the memory has another user.
static FILTER: [Instruction; LENGTH] = {
    let allow = (LENGTH - 1) as u8;
    let refuse = allow - 1;
    let mut all = [give(REFUSE); LENGTH];
    all[0] = load(ARCHITECTURE_AT);
    all[1] = is(X86_64, 0, refuse - 2);
    all[2] = load(CALL_AT);
    let mut at = 0;
    while at < CALLS.len() {
        let next = 3 + at as u8 + 1;
        all[3 + at] = is(CALLS[at] as u32, allow - next, 0);
        at += 1;
    }
    let at = 3 + CALLS.len();
    all[at] = is(nr::UNSHARE as u32, 0, refuse - (at as u8 + 1));
    all[at + 1] = load(FIRST_ARGUMENT_AT);
    all[at + 2] = is(CLONE_VM as u32, allow - (at as u8 + 3), 0);
    all[LENGTH - 1] = give(ALLOW);
    all
};

const SECCOMP_SET_MODE_FILTER: usize = 1;
/// Without it, older kernels make the agent slower than the program.
const SECCOMP_FILTER_FLAG_SPEC_ALLOW: usize = 4;

/// The calling process makes no other calls from now on, if the kernel allows that.
pub(crate) fn keep_few_calls() {
    let program = Program {
        length: LENGTH as u16,
        at: FILTER.as_ptr(),
    };
    let at = core::ptr::from_ref(&program) as usize;
    let (filter, flags) = (SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW);
    // SAFETY: the kernel copies the program, which is live.
    unsafe { call3(nr::SECCOMP, filter, flags, at) };
}

/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

const PR_GET_DUMPABLE: usize = 3;
const PR_SET_DUMPABLE: usize = 4;
const PR_SET_NO_NEW_PRIVS: usize = 38;

/// The calling process keeps no rights from now on except its descriptors.
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
