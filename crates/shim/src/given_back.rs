//! Stands in for fallocate: tells the manager which pages of a guest's memory are given back.
//!
//! The kernel raises no event, and a page that was away is a hole before and after. So once the
//! hole is made, the manager is told, and the call returns when the manager has forgotten the
//! copies. The other order would be wrong: a page could leave between the two, with the bytes that
//! are given back. Raw system calls bypass this: copies stay then, and are read again.
//!
//! A hole may begin or end within a large page. The kernel fills that part with zeros if the page
//! is in memory, and leaves the copy of one that is away as it is. So the part is written here.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use undercroft_wire::command;

use crate::library::next;
use crate::page::{Page, command_page};
use crate::raw::{PAGE, call3, call6, fail, nr, own_id, unsignalled};

const PUNCH_HOLE: i32 = 2;

/// Values of `gives`.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
const WAITED_FOR: u32 = 2;

/// `struct stat`, in words: device, inode, and the rest.
const STAT_WORDS: usize = 18;

type Real = unsafe extern "C" fn(i32, i32, i64, i64) -> i32;

/// Stands in for the C library's fallocate.
#[unsafe(no_mangle)]
unsafe extern "C" fn fallocate(file: i32, mode: i32, offset: i64, bytes: i64) -> i32 {
    #[unsafe(link_section = ".data")]
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let result = match next(c"fallocate", &REAL) {
        0 => {
            let (file, mode) = (file as u32 as usize, mode as u32 as usize);
            let (offset, bytes) = (offset as usize, bytes as usize);
            // SAFETY: the program's own call, passed on.
            fail(unsafe { call6(nr::FALLOCATE, file, mode, offset, bytes, 0, 0) }) as i32
        }
        real => {
            // SAFETY: the C library's function of that name, with its signature.
            let real = unsafe { core::mem::transmute::<usize, Real>(real) };
            // SAFETY: the program's own call, passed on.
            unsafe { real(file, mode, offset, bytes) }
        }
    };
    if result == 0 && mode & PUNCH_HOLE != 0 {
        of_file(file, offset as u64, bytes as u64);
    }
    result
}

/// The same function by its other name.
#[unsafe(no_mangle)]
unsafe extern "C" fn fallocate64(file: i32, mode: i32, offset: i64, bytes: i64) -> i32 {
    // SAFETY: the program's own call.
    unsafe { fallocate(file, mode, offset, bytes) }
}

/// The command page, if the manager hears of guest memory.
fn listener() -> Option<Page> {
    command_page().filter(|page| page.listens.load(SeqCst) != 0)
}

/// The program has made a hole in an open file.
fn of_file(file: i32, offset: u64, bytes: u64) {
    let Some(page) = listener() else { return };
    let mut stat = [0u64; STAT_WORDS];
    let at = stat.as_mut_ptr() as usize;
    // SAFETY: `stat` is live and of the size of `struct stat`, which the kernel fills.
    let asked = unsafe { call3(nr::FSTAT, file as u32 as usize, at, 0) };
    let is = |at: usize| page.guest[at].load(Relaxed) == stat[at];
    if asked == 0 && is(0) && is(1) {
        given(&page, offset, offset.saturating_add(bytes));
    }
}

/// The program has made a hole in what is mapped here.
pub(crate) fn at(address: usize, bytes: usize) {
    let Some(page) = listener() else { return };
    let [base, whole] = [2, 3].map(|at: usize| page.guest[at].load(Relaxed));
    let (start, end) = (
        address as u64,
        (address as u64).saturating_add(bytes as u64),
    );
    let (start, end) = (start.max(base), end.min(base.saturating_add(whole)));
    if start < end {
        given(&page, start - base, end - base);
    }
}

/// The program has made a hole from one byte of the memory to another.
fn given(page: &Page, start: u64, end: u64) {
    tell(page, start, end);
    let size = u64::from(page.listens.load(Relaxed)) * PAGE as u64;
    if size <= PAGE as u64 {
        return; // no monitor is known to make a hole in a part of a base page
    }
    let [base, whole] = [2, 3].map(|at: usize| page.guest[at].load(Relaxed));
    let (start, end) = (start.min(whole), end.min(whole));
    let (first, last) = (start.next_multiple_of(size), end - end % size);
    if last < first {
        return clear(base + start, base + end);
    }
    clear(base + start, base + first);
    clear(base + last, base + end);
}

/// Writes zeros, where the program may write. By the kernel: it may have protected the memory.
fn clear(mut from: u64, to: u64) {
    static ZEROS: [u8; PAGE] = [0; PAGE];
    while from < to {
        let bytes = (to - from).min(PAGE as u64) as usize;
        let local = [ZEROS.as_ptr() as usize, bytes];
        let remote = [from as usize, bytes];
        let at = |vector: &[usize; 2]| vector.as_ptr() as usize;
        // SAFETY: the kernel reads the zeros and both vectors, which are live, and writes where the
        // program has just made a hole.
        let written = unsafe {
            call6(
                nr::PROCESS_VM_WRITEV,
                own_id() as usize,
                at(&local),
                1,
                at(&remote),
                1,
                0,
            )
        };
        if written <= 0 {
            return; // nothing is mapped there, or to be read only
        }
        from += written as u64;
    }
}

/// Tells the manager, and waits until it has acted. A handler of a signal could come here, too, and
/// wait for this thread: so there is none meanwhile.
fn tell(page: &Page, start: u64, end: u64) {
    unsignalled(|| {
        let at = core::ptr::from_ref(&page.gives) as usize;
        let free = page.gives.compare_exchange(FREE, TAKEN, Acquire, Relaxed);
        while free.is_err() && page.gives.swap(WAITED_FOR, Acquire) != FREE {
            // SAFETY: the word is live.
            unsafe { call6(nr::FUTEX, at, 0, WAITED_FOR as usize, 0, 0, 0) };
        }
        command::tell(page, || {
            page.given[0].store(start, Relaxed);
            page.given[1].store(end, Relaxed);
        });
        if page.gives.swap(FREE, SeqCst) == WAITED_FOR {
            // SAFETY: as above.
            unsafe { call3(nr::FUTEX, at, 1, 1) };
        }
    });
}
