//! The shim: a shared object that is loaded into each program of a client. It connects to the
//! manager at start, and keeps one agent thread that moves pages out on command.
//!
//! It runs inside another program. So it uses no heap, no stdio, no thread-local storage and only
//! raw system calls. Its only libc calls are the registration of the fork handler, and the
//! functions that it stands in for. The agent touches only its stack, the command page and the
//! staging area, none of which is ever managed.

#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

mod affinity;
mod agent;
mod handshake;
mod library;
mod mapping;
mod move_out;
mod mremap;
mod page;
mod powerless;
mod raw;
mod socket;
mod stand_in;
mod threads;

#[cfg(shared_object)]
use core::arch::asm;
use core::arch::global_asm;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicU64};

use undercroft_wire::command;
use undercroft_wire::protocol::{KIND_FORK, KIND_START, SOCKET_VARIABLE};

use crate::handshake::{SockAddr, join};
use crate::page::command_page;
use crate::raw::{PAGE, advice, call3, nr};

#[cfg(shared_object)]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here panics by design. If it does, stop at once rather than run on in another
    // program.
    loop {
        // SAFETY: an undefined instruction ends the process.
        unsafe { asm!("ud2", options(noreturn)) }
    }
}

// Precompiled `core` names it; nothing unwinds here, so it is never called. Hidden, so that it does
// not take the place of the same symbol in programs written in Rust.
global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: ud2"
);

// glibc runs the child handler in every fork() child. In other C libraries it is absent: their
// children are served, but not evicted from.
global_asm!(".weak __register_atfork", ".weak __environ");
unsafe extern "C" {
    static __environ: *const *const u8;
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        dso: *const u8,
    ) -> i32;
}

#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn(i32, *const *const u8, *const *const u8) = init;

/// Path of the socket, NUL-terminated `sockaddr_un`.
// All that is written here is in the file's data. Memory without a file would be a mapping that can
// merge with the program's.
#[unsafe(link_section = ".data")]
pub(crate) static mut ADDRESS: SockAddr = SockAddr {
    family: 1,
    path: [0; 108],
};
/// The beacon page of this process; 0 before the first handshake.
#[unsafe(link_section = ".data")]
pub(crate) static BEACON: AtomicU64 = AtomicU64::new(0);
/// The command page of this process; 0 before the first handshake.
#[unsafe(link_section = ".data")]
pub(crate) static COMMAND: AtomicU64 = AtomicU64::new(0);
/// The process that owns the command page. Children that were not made by fork() inherit the
/// number, but not the page.
#[unsafe(link_section = ".data")]
pub(crate) static OWNER: AtomicU32 = AtomicU32::new(0);

extern "C" fn init(_argc: i32, _argv: *const *const u8, envp: *const *const u8) {
    // SAFETY: the dynamic linker passes the environment as a null-terminated array of C strings;
    // `ADDRESS` is written once, here, before any other thread exists.
    unsafe {
        // musl passes its initialisers nothing, but has set the variable before; glibc has not.
        let register: unsafe extern "C" fn(_, _, _, _) -> i32 = __register_atfork;
        let environment = core::ptr::addr_of!(__environ);
        // Without `black_box`, the compiler assumes that a symbol's address is never 0.
        let is_glibc = core::hint::black_box(register as usize) != 0;
        let environment = core::hint::black_box(environment);
        let envp = match is_glibc || environment.is_null() {
            true => envp,
            false => core::ptr::read_volatile(environment),
        };
        if envp.is_null() || !find_socket(envp) {
            return;
        }
        if join(KIND_START, 0) && is_glibc {
            let (before, after) = (Some(before_fork as _), Some(after_fork as _));
            register(before, after, Some(in_fork_child), core::ptr::null());
        }
    }
}

/// Copies the socket's path out of the environment. False if it is not there.
unsafe fn find_socket(mut envp: *const *const u8) -> bool {
    let name = SOCKET_VARIABLE.as_bytes();
    // SAFETY: walks C strings up to their NUL and the array up to its null, as the ABI lays them
    // out.
    unsafe {
        while !(*envp).is_null() {
            let entry = *envp;
            let mut i = 0;
            while i < name.len() && *entry.add(i) == *name.as_ptr().add(i) {
                i += 1;
            }
            if i == name.len() && *entry.add(i) == b'=' {
                let path = core::ptr::addr_of_mut!(ADDRESS.path).cast::<u8>();
                let value = entry.add(i + 1);
                let mut j = 0;
                while *value.add(j) != 0 {
                    if j >= 107 {
                        return false;
                    }
                    core::ptr::write_volatile(path.add(j), *value.add(j));
                    j += 1;
                }
                return j > 0;
            }
            envp = envp.add(1);
        }
    }
    false
}

/// Runs in the parent before fork(): no page may be moving out while the child's memory is copied.
extern "C" fn before_fork() {
    affinity::free_own();
    if let Some(page) = command_page() {
        command::before_fork(&page);
    }
}

/// Runs in the parent after fork().
extern "C" fn after_fork() {
    if let Some(page) = command_page() {
        command::after_fork(&page);
    }
}

/// Runs in the child of fork(), alone: announces it and gives it an agent of its own.
extern "C" fn in_fork_child() {
    // The parent's command page is not mapped here.
    COMMAND.store(0, Relaxed);
    let beacon = BEACON.load(Relaxed);
    if beacon == 0 {
        return;
    }
    // SAFETY: the beacon page is ours and readable. If the parent was managed it is missing, the
    // read faults, and the manager answers with a number that names this child's userfaultfd.
    let nonce = unsafe { core::ptr::read_volatile(beacon as *const u64) };
    // SAFETY: the page is ours; it must be missing again before this child forks.
    unsafe { call3(nr::MADVISE, beacon as usize, PAGE, advice::DONTNEED) };
    // SAFETY: only this thread exists, as in `init`.
    unsafe { join(KIND_FORK, nonce) };
}
