//! The shim: a shared object that is loaded into each program of a client. It connects to the
//! manager at start, and keeps one agent that moves pages out on command.
//!
//! It runs inside another program. So it uses no heap, no stdio, no thread-local storage and only
//! raw system calls. Its only libc calls are the registration of the fork handler, and the
//! functions that it stands in for. The agent touches only its stack, the command page and the
//! staging area, none of which is ever managed.

#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

mod affinity;
mod agent;
mod alone;
mod exec;
mod give_way;
mod given_back;
mod handshake;
mod image;
mod interpreted;
mod library;
mod life;
mod mapping;
mod move_out;
mod mremap;
mod namespace;
mod page;
mod passed_on;
mod pinned;
mod powerless;
mod preload;
mod raw;
mod socket;
mod stand_in;
mod threads;
mod view;

#[cfg(shared_object)]
use core::arch::asm;
use core::arch::global_asm;
use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicU32, AtomicU64};

use undercroft_wire::command;
use undercroft_wire::protocol::{KIND_FORK, KIND_START, SOCKET_VARIABLE};

use crate::handshake::{SockAddr, join};
use crate::library::bytes_of;
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

// Precompiled `core` names this symbol. Nothing unwinds here, so it is never called. It is hidden,
// so that it does not replace the same symbol in programs written in Rust.
global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality: ud2"
);

// The compiler calls these two. They are our own, because the agent must run no code of the C
// library: a debugger of the program may set breakpoints there, and does not trace the agent.
#[cfg(shared_object)]
global_asm!(
    ".globl memcpy",
    ".hidden memcpy",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    ".globl memset",
    ".hidden memset",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
);

// glibc runs the child handler in every fork() child. In other C libraries it is absent: their
// children are served, but not evicted from.
global_asm!(".weak __register_atfork");
unsafe extern "C" {
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
    // musl passes its initialisers nothing, but has set the variable before; glibc has not.
    let register: unsafe extern "C" fn(_, _, _, _) -> i32 = __register_atfork;
    // Without `black_box`, the compiler assumes that a symbol's address is never 0.
    let is_glibc = core::hint::black_box(register as usize) != 0;
    let envp = match is_glibc {
        true => envp,
        false => library::environment(),
    };
    // SAFETY: the dynamic linker passes the environment as a null-terminated array of C strings; no
    // other thread exists.
    if envp.is_null() || !unsafe { find_socket(envp) } {
        return;
    }
    exec::look_up();
    passed_on::look_up();
    // SAFETY: as above.
    unsafe { view::look_up(envp) };
    if interpreted::by_valgrind() {
        return;
    }
    // SAFETY: the process has one thread, and no agent yet.
    let joined = unsafe { join(KIND_START, 0) };
    match command_page() {
        Some(page) if joined => view::begin(page),
        _ if view::is_view() => view::refuse(),
        _ => {}
    }
    if joined && is_glibc {
        let (before, after) = (Some(before_fork as _), Some(after_fork as _));
        // SAFETY: the C library's own; the functions are of the kind that it calls.
        unsafe { register(before, after, Some(in_fork_child), core::ptr::null()) };
    }
}

/// Copies the socket's path out of the environment. False if it is not there.
///
/// # Safety
/// `envp` is a null-terminated array of C strings that live for ever. No other thread exists.
unsafe fn find_socket(mut envp: *const *const u8) -> bool {
    loop {
        // SAFETY: the array goes on up to its null.
        let entry = unsafe { envp.read() };
        if entry.is_null() {
            return false;
        }
        // SAFETY: a C string that lives for ever.
        let entry = unsafe { bytes_of(entry) };
        let value = entry.strip_prefix(SOCKET_VARIABLE.as_bytes());
        if let Some(value) = value.and_then(|rest| rest.strip_prefix(b"=")) {
            // SAFETY: no other thread exists.
            return unsafe { keep_path(value) };
        }
        envp = envp.wrapping_add(1);
    }
}

/// Copies the path to `ADDRESS`. False if it is empty or too long.
///
/// # Safety
/// No other thread exists.
unsafe fn keep_path(path: &[u8]) -> bool {
    let address = core::ptr::addr_of_mut!(ADDRESS);
    // SAFETY: nothing else refers to it.
    let kept = unsafe { &mut (*address).path };
    let fits = path.len() < kept.len();
    if fits {
        kept[..path.len()].copy_from_slice(path);
    }
    fits && !path.is_empty()
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
