//! Keeps the control blocks of the program's threads in memory. The kernel writes there when a
//! thread ends, and that write bypasses userfaultfd. If the block is missing then, a thread that
//! joins it waits for ever.
//!
//! Stands in for `pthread_create`: each new thread locks its own block before it runs the program's
//! function. The kernel then refuses to move the page out. Threads made in other ways are found by
//! the manager a little later.

use core::arch::naked_asm;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

use crate::library::{control_block, next};
use crate::page::command_page;
use crate::raw::call3;

const MLOCK: usize = 149;

/// glibc's and musl's `struct pthread` are smaller.
const CONTROL_BLOCK: usize = 0x900;

/// Most threads between creation and start at once. Further ones do not lock their blocks.
const STARTS: usize = 64;

/// The start of a new thread: the function that it will run.
struct Start {
    taken: AtomicU32,
    function: AtomicUsize,
    argument: AtomicUsize,
}

#[unsafe(link_section = ".data")]
static STARTING: [Start; STARTS] = [const {
    Start {
        taken: AtomicU32::new(0),
        function: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; STARTS];

type Create = unsafe extern "C" fn(*mut c_void, *const c_void, *const c_void, *mut c_void) -> i32;

const EAGAIN: i32 = 11;

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attributes: *const c_void,
    function: *const c_void,
    argument: *mut c_void,
) -> i32 {
    #[unsafe(link_section = ".data")]
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let real = next(c"pthread_create", &REAL);
    if real == 0 {
        return EAGAIN;
    }
    crate::affinity::free_own();
    // SAFETY: it is the C library's pthread_create, with its signature.
    let real: Create = unsafe { core::mem::transmute(real) };
    let free = |start: &&Start| start.taken.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
    let start = match command_page() {
        Some(_) => STARTING.iter().find(free),
        None => None,
    };
    let Some(start) = start else {
        // SAFETY: the program's own call, passed on.
        return unsafe { real(thread, attributes, function, argument) };
    };
    start.function.store(function as usize, Relaxed);
    start.argument.store(argument as usize, Relaxed);
    let start_at = core::ptr::from_ref(start) as *mut c_void;
    // SAFETY: `begin` has the signature of a thread's function, and `start` lives for ever.
    let result = unsafe { real(thread, attributes, begin as *const c_void, start_at) };
    if result != 0 {
        start.taken.store(0, Release);
    }
    result
}

/// First function of a thread: gets ready, then jumps to the program's function, and leaves nothing
/// on the stack.
#[unsafe(naked)]
unsafe extern "C" fn begin(start: *mut c_void) -> *mut c_void {
    naked_asm!(
        "sub rsp, 8",
        "call {get_ready}",
        "add rsp, 8",
        "mov rdi, rdx",
        "jmp rax",
        get_ready = sym get_ready,
    )
}

/// Returned in rax and rdx.
#[repr(C)]
struct Call {
    function: usize,
    argument: usize,
}

unsafe extern "C" fn get_ready(start: *const Start) -> Call {
    // If locking is refused (RLIMIT_MEMLOCK), the manager locks it later.
    // SAFETY: both C libraries keep the address of the control block in its first word.
    unsafe { call3(MLOCK, control_block(), CONTROL_BLOCK, 0) };
    // SAFETY: `pthread_create` above passed it, and it lives for ever.
    let start = unsafe { &*start };
    let call = Call {
        function: start.function.load(Relaxed),
        argument: start.argument.load(Relaxed),
    };
    start.taken.store(0, Release);
    call
}
