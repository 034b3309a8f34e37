//! Raw system calls and their numbers.

use core::arch::{asm, global_asm};

pub(crate) const PAGE: usize = 4096;
pub(crate) const STACK: usize = 4 * PAGE;

pub(crate) mod nr {
    pub(crate) const READ: usize = 0;
    pub(crate) const WRITE: usize = 1;
    pub(crate) const OPEN: usize = 2;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const FSTAT: usize = 5;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const MPROTECT: usize = 10;
    pub(crate) const MUNMAP: usize = 11;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const IOCTL: usize = 16;
    pub(crate) const PREAD64: usize = 17;
    pub(crate) const SCHED_YIELD: usize = 24;
    pub(crate) const MREMAP: usize = 25;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const SHMAT: usize = 30;
    pub(crate) const SHMCTL: usize = 31;
    pub(crate) const DUP2: usize = 33;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const SOCKET: usize = 41;
    pub(crate) const SHMDT: usize = 67;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const CONNECT: usize = 42;
    pub(crate) const SENDMSG: usize = 46;
    pub(crate) const RECVMSG: usize = 47;
    pub(crate) const SETSOCKOPT: usize = 54;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const EXIT: usize = 60;
    pub(crate) const WAIT4: usize = 61;
    pub(crate) const CHDIR: usize = 80;
    pub(crate) const READLINK: usize = 89;
    pub(crate) const SETPGID: usize = 109;
    pub(crate) const SETGROUPS: usize = 116;
    pub(crate) const SETRESUID: usize = 117;
    pub(crate) const SETRESGID: usize = 119;
    pub(crate) const CAPSET: usize = 126;
    pub(crate) const MUNLOCK: usize = 150;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const GETTID: usize = 186;
    pub(crate) const FUTEX: usize = 202;
    pub(crate) const SCHED_SETAFFINITY: usize = 203;
    pub(crate) const SCHED_GETAFFINITY: usize = 204;
    pub(crate) const RESTART_SYSCALL: usize = 219;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const UNSHARE: usize = 272;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const SENDMMSG: usize = 307;
    pub(crate) const PROCESS_VM_WRITEV: usize = 311;
    pub(crate) const SECCOMP: usize = 317;
    pub(crate) const FALLOCATE: usize = 285;
    pub(crate) const EXECVEAT: usize = 322;
    pub(crate) const USERFAULTFD: usize = 323;
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const FUTEX_WAITV: usize = 449;
}

/// Advice of madvise(2).
pub(crate) mod advice {
    pub(crate) const DONTNEED: usize = 4;
    pub(crate) const REMOVE: usize = 9;
    pub(crate) const DONTFORK: usize = 10;
    pub(crate) const DOFORK: usize = 11;
    pub(crate) const NOHUGEPAGE: usize = 15;
    pub(crate) const WIPEONFORK: usize = 18;
    pub(crate) const POPULATE_WRITE: usize = 23;
    pub(crate) const GUARD_INSTALL: usize = 102;
}

pub(crate) const EINTR: isize = -4;
pub(crate) const EBADF: isize = -9;
pub(crate) const EAGAIN: isize = -11;
pub(crate) const ENOMEM: isize = -12;
pub(crate) const EACCES: isize = -13;
pub(crate) const EFAULT: isize = -14;
pub(crate) const EBUSY: isize = -16;
pub(crate) const EEXIST: isize = -17;
pub(crate) const EINVAL: isize = -22;
pub(crate) const EMFILE: isize = -24;
pub(crate) const ENOTTY: isize = -25;

/// A raw system call.
///
/// # Safety
/// The arguments are those of call `n`; pointers are valid for what the kernel does with them.
#[inline(always)]
pub(crate) unsafe fn call6(
    n: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let result;
    // SAFETY: the `syscall` instruction clobbers rcx and r11 only; memory effects are the caller's
    // promise.
    unsafe {
        asm!("syscall", inlateout("rax") n as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

#[inline(always)]
pub(crate) unsafe fn call3(n: usize, a: usize, b: usize, c: usize) -> isize {
    // SAFETY: passed on.
    unsafe { call6(n, a, b, c, 0, 0, 0) }
}

/// The calling thread's number.
pub(crate) fn own_id() -> u32 {
    // SAFETY: takes no arguments.
    unsafe { call3(nr::GETTID, 0, 0, 0) as u32 }
}

/// Does `work` while the calling thread receives no signal.
pub(crate) fn unsignalled<T>(work: impl FnOnce() -> T) -> T {
    const SET_MASK: usize = 2;
    let (all, mut old) = (u64::MAX, 0u64);
    let all_at = core::ptr::from_ref(&all) as usize;
    let old_at = core::ptr::from_mut(&mut old) as usize;
    // SAFETY: two live sets of the kernel's size, 8 bytes.
    unsafe { call6(nr::RT_SIGPROCMASK, SET_MASK, all_at, old_at, 8, 0, 0) };
    let result = work();
    // SAFETY: the set that the kernel wrote above.
    unsafe { call6(nr::RT_SIGPROCMASK, SET_MASK, old_at, 0, 8, 0, 0) };
    result
}

/// Closes a descriptor that the shim made or got.
pub(crate) fn close(descriptor: usize) {
    // SAFETY: takes a number; no value of this program owns the descriptor.
    unsafe { call3(nr::CLOSE, descriptor, 0, 0) };
}

/// The same for those that came with a message, each -1 if there is none.
pub(crate) fn close_all(descriptors: [i32; 2]) {
    for descriptor in descriptors {
        if let Ok(descriptor) = usize::try_from(descriptor) {
            close(descriptor);
        }
    }
}

global_asm!(".weak __errno_location");
unsafe extern "C" {
    fn __errno_location() -> *mut i32;
}

/// The result that a C library function returns for a system call: -1 and `errno` for an error, the
/// value otherwise.
pub(crate) fn fail(result: isize) -> isize {
    if !(-4095..0).contains(&result) {
        return result;
    }
    if __errno_location as *const () as usize != 0 {
        // SAFETY: the C library's own.
        let errno = unsafe { __errno_location() };
        // SAFETY: of the calling thread.
        unsafe { errno.write(-result as i32) };
    }
    -1
}
