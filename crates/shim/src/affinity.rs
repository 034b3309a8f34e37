//! Stands in for the calls that read and set which CPUs a thread may use.
//!
//! The manager binds a thread to one CPU for some milliseconds when it alone faults (`pin.rs`). A
//! program that sizes its pool of threads at that moment would have one thread for life. So if the
//! kernel's answer is one CPU, and the command page says that the thread is bound, the program gets
//! the CPUs that it may really use. A choice of the program's own ends the binding. Raw system
//! calls bypass this.

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering::*};

use crate::library::{control_block, next};
use crate::page::{Page, command_page};
use crate::raw::{call3, fail, nr, own_id};

const WORD: usize = size_of::<u64>();

#[unsafe(no_mangle)]
unsafe extern "C" fn sched_getaffinity(tid: i32, bytes: usize, set: *mut u8) -> i32 {
    // SAFETY: the program's own call, passed on.
    fail(unsafe { ask(tid as u32, bytes, set) }) as i32
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sched_setaffinity(tid: i32, bytes: usize, set: *const u8) -> i32 {
    // SAFETY: the program's own call, passed on.
    fail(unsafe { choose(tid as u32, bytes, set) }) as i32
}

/// The library's own function, for a thread that is not the calling one.
type OfThread = unsafe extern "C" fn(usize, usize, *mut u8) -> i32;

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_getaffinity_np(thread: usize, bytes: usize, set: *mut u8) -> i32 {
    #[unsafe(link_section = ".data")]
    static REAL: AtomicUsize = AtomicUsize::new(0);
    if is_own(thread) {
        // SAFETY: the program's own call, passed on; 0 is the calling thread.
        return -unsafe { ask(0, bytes, set) } as i32;
    }
    // SAFETY: the program's own call, passed on.
    unsafe { of_thread(c"pthread_getaffinity_np", &REAL, thread, bytes, set) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_setaffinity_np(thread: usize, bytes: usize, set: *const u8) -> i32 {
    #[unsafe(link_section = ".data")]
    static REAL: AtomicUsize = AtomicUsize::new(0);
    if is_own(thread) {
        // SAFETY: the program's own call, passed on; 0 is the calling thread.
        return -unsafe { choose(0, bytes, set) }.min(0) as i32;
    }
    let set = set.cast_mut();
    // SAFETY: the program's own call, passed on.
    unsafe { of_thread(c"pthread_setaffinity_np", &REAL, thread, bytes, set) }
}

/// In both C libraries the handle of a thread is the address of its control block, which the thread
/// pointer holds too.
fn is_own(thread: usize) -> bool {
    control_block() == thread
}

unsafe fn of_thread(
    name: &CStr,
    real: &AtomicUsize,
    thread: usize,
    bytes: usize,
    set: *mut u8,
) -> i32 {
    const ENOSYS: i32 = 38;
    let real = next(name, real);
    if real == 0 {
        return ENOSYS;
    }
    // SAFETY: the C library's function of that name, with its signature.
    let real = unsafe { core::mem::transmute::<usize, OfThread>(real) };
    // SAFETY: the program's own call, passed on.
    unsafe { real(thread, bytes, set) }
}

/// Writes the CPUs that thread `tid` (0: the calling one) may use. Returns 0 or the negative error.
unsafe fn ask(tid: u32, bytes: usize, set: *mut u8) -> isize {
    let page = command_page();
    let who = if tid == 0 { own_id() } else { tid };
    let is_bound = |page: &Page| page.bound.load(SeqCst) == who;
    // Checked before and after the kernel's answer: the binding may begin or end in between.
    let before = page.as_ref().is_some_and(is_bound);
    // SAFETY: passed on.
    let got = unsafe { call3(nr::SCHED_GETAFFINITY, tid as usize, bytes, set as usize) };
    if got < 0 {
        return got;
    }
    let got = got as usize;
    // SAFETY: the kernel has written `got` of `bytes`; the C library clears the rest.
    unsafe { core::ptr::write_bytes(set.wrapping_add(got), 0, bytes - got) };
    // SAFETY: written above, whole.
    let ones = (0..bytes).map(|at| unsafe { set.wrapping_add(at).read() }.count_ones());
    if let Some(page) = page
        && (before || is_bound(&page))
        && ones.sum::<u32>() == 1
    {
        for (at, word) in page.cpus.iter().enumerate().take(bytes / WORD) {
            let to = set.cast::<u64>().wrapping_add(at);
            // SAFETY: inside the program's set; it need not be aligned.
            unsafe { to.write_unaligned(word.load(Relaxed)) };
        }
    }
    0
}

/// The program chooses CPUs for thread `tid`: the manager's binding ends here.
unsafe fn choose(tid: u32, bytes: usize, set: *const u8) -> isize {
    if let Some(page) = command_page() {
        let who = if tid == 0 { own_id() } else { tid };
        let _ = page.bound.compare_exchange(who, 0, SeqCst, Relaxed);
    }
    // SAFETY: passed on.
    unsafe { call3(nr::SCHED_SETAFFINITY, tid as usize, bytes, set as usize) }
}

/// The calling thread is about to start another, which would inherit its one CPU. Ends its binding.
pub(crate) fn free_own() {
    let Some(page) = command_page() else { return };
    if page.bound.load(Relaxed) == 0 {
        return;
    }
    let who = own_id();
    if page.bound.compare_exchange(who, 0, SeqCst, Relaxed).is_ok() {
        let mut set = [0u64; undercroft_wire::protocol::CPU_WORDS];
        for (to, from) in set.iter_mut().zip(&page.cpus) {
            *to = from.load(Relaxed);
        }
        // SAFETY: a live set of the calling thread's CPUs.
        unsafe {
            call3(
                nr::SCHED_SETAFFINITY,
                0,
                size_of_val(&set),
                set.as_ptr() as usize,
            )
        };
    }
}
