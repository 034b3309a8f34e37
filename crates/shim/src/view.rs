//! Stands in for mmap: what the program maps of its run's machine is registered with the manager
//! before the program can touch it. Until then a page that is away would read as zeros, and these
//! would take its place for all who map the memory.
//!
//! The range is mapped without access first, and not for children: theirs would not be registered.
//! The process that maps the memory first is the machine's monitor, which the manager finds by
//! itself; it is let do as it likes. A move of such a mapping is refused, because the kernel ends
//! its registration. Raw system calls bypass this.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicBool, AtomicU64};

use undercroft_wire::protocol::{KIND_VIEW, MAGIC, NO_MACHINE_YET, VIEW_VARIABLE, View};

use crate::handshake::{connect, receive_code};
use crate::library::variable_of;
use crate::page::Page;
use crate::raw::advice::{DOFORK, DONTFORK};
use crate::raw::{EACCES, PAGE, call3, call6, close, close_all, fail, nr};
use crate::socket::send;

const ANONYMOUS: usize = 0x20;
const KINDS: usize = 0xf;
const PRIVATE: usize = 2;
/// Flags that would touch every page.
const TOUCHES: usize = 0x8000 | 0x2000;

/// Times that the manager is asked: another may take over in between.
const TRIES: u32 = 3;

/// `struct stat`, in words: device, inode, and the rest.
const STAT_WORDS: usize = 18;

/// The memory of the run's machine: device and inode; 0: there is none.
#[unsafe(link_section = ".data")]
static MACHINE: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Keeps in mind what the manager has written of the machine.
pub(crate) fn begin(page: Page) {
    for (to, from) in MACHINE.iter().zip(&page.machine) {
        to.store(from.load(Relaxed), Relaxed);
    }
}

/// Whether this process may map the memory only as a view.
#[unsafe(link_section = ".data")]
static IS_VIEW: AtomicBool = AtomicBool::new(false);

/// Looks that up in the environment that the program begins with.
///
/// # Safety
/// As for [`variable_of`].
pub(crate) unsafe fn look_up(environment: *const *const u8) {
    // SAFETY: the caller's promise.
    let found = unsafe { variable_of(environment, VIEW_VARIABLE.as_bytes()) };
    IS_VIEW.store(found.is_some(), Relaxed);
}

pub(crate) fn is_view() -> bool {
    IS_VIEW.load(Relaxed)
}

/// Ends a view that cannot be managed: the program would read zeros where pages are away.
pub(crate) fn refuse() -> ! {
    let text = b"undercroft: the run does not take this process as a view of its machine\n";
    // SAFETY: a live text; standard error may be closed.
    unsafe { call3(nr::WRITE, 2, text.as_ptr() as usize, text.len()) };
    loop {
        // SAFETY: takes a number, and does not return.
        unsafe { call3(nr::EXIT_GROUP, 125, 0, 0) };
    }
}

/// Stands in for the C library's mmap.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: usize,
    bytes: usize,
    protection: i32,
    flags: i32,
    file: i32,
    offset: i64,
) -> isize {
    let (protection, flags) = (protection as u32 as usize, flags as u32 as usize);
    let (file, offset) = (file as isize as usize, offset as usize);
    let result = if flags & ANONYMOUS == 0 && is_machine(file) {
        // SAFETY: the program's own call.
        unsafe { map([address, bytes, protection, flags, file, offset]) }
    } else {
        // SAFETY: the program's own call, passed on.
        unsafe { call6(nr::MMAP, address, bytes, protection, flags, file, offset) }
    };
    fail(result)
}

/// The same function by its other name.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: usize,
    bytes: usize,
    protection: i32,
    flags: i32,
    file: i32,
    offset: i64,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { mmap(address, bytes, protection, flags, file, offset) }
}

/// Whether a descriptor is of the memory of the run's machine.
pub(crate) fn is_machine(file: usize) -> bool {
    let [device, inode] = [0, 1].map(|at: usize| MACHINE[at].load(Relaxed));
    if inode == 0 {
        return false;
    }
    let mut stat = [0u64; STAT_WORDS];
    // SAFETY: `stat` is live and of the size of `struct stat`, which the kernel fills.
    let result = unsafe { call3(nr::FSTAT, file, stat.as_mut_ptr() as usize, 0) };
    result == 0 && stat[0] == device && stat[1] == inode
}

/// Maps memory of the machine as the program asked. The kernel's answer, or a refusal.
///
/// # Safety
/// As for mmap(2).
unsafe fn map([address, bytes, protection, flags, file, offset]: [usize; 6]) -> isize {
    if flags & KINDS == PRIVATE && is_view() {
        return EACCES;
    }
    let quiet = flags & !TOUCHES;
    // SAFETY: the program's own call; nothing can be touched there yet.
    let mapped = unsafe { call6(nr::MMAP, address, bytes, 0, quiet, file, offset) };
    if (-4095..0).contains(&mapped) {
        return mapped;
    }
    let bytes = bytes.next_multiple_of(PAGE); // the kernel has mapped as much
    let at = mapped as usize;
    // SAFETY: mapped above.
    unsafe { call3(nr::MADVISE, at, bytes, DONTFORK) };
    let result = match ask(at, bytes) {
        Some(0) => 0,
        // Registered when the machine's memory is, before a page leaves.
        Some(NO_MACHINE_YET) if is_view() => 0,
        // SAFETY: mapped above. It may be the monitor, whose own affair that is.
        Some(NO_MACHINE_YET) => unsafe { call3(nr::MADVISE, at, bytes, DOFORK) },
        _ => EACCES,
    };
    let result = match result {
        // SAFETY: mapped above.
        0 => unsafe { call3(nr::MPROTECT, at, bytes, protection) },
        refused => refused,
    };
    if result == 0 {
        return mapped;
    }
    // SAFETY: mapped above, and the program does not know of it.
    unsafe { call3(nr::MUNMAP, at, bytes, 0) };
    result
}

/// Has the manager register the range. Its answer; `None`: there is none.
fn ask(start: usize, bytes: usize) -> Option<u32> {
    let view = View {
        magic: MAGIC,
        kind: KIND_VIEW,
        start: start as u64,
        end: start as u64 + bytes as u64,
    };
    ask_with(&view, None)
}

/// Asks the manager. Its answer; `None`: there is none.
pub(crate) fn ask_with<T>(message: &T, descriptor: Option<i32>) -> Option<u32> {
    let descriptors = [descriptor.unwrap_or(-1), -1];
    (0..TRIES).find_map(|_| {
        // SAFETY: the address is written at the start of the program only.
        let socket = unsafe { connect() }?;
        // SAFETY: a message of plain numbers.
        let sent = unsafe { send(socket, message, descriptors, descriptor.iter().count()) };
        let answer = if sent { receive_code(socket) } else { None };
        close(socket as usize);
        let (code, descriptors) = answer?;
        close_all(descriptors);
        Some(code)
    })
}

/// Whether a mapping of this file is one of the machine's memory.
///
/// * `device`: its two numbers.
pub(crate) fn is_machine_of(inode: u64, device: [u32; 2]) -> bool {
    let [own_device, own_inode] = [0, 1].map(|at: usize| MACHINE[at].load(Relaxed));
    let (major, minor) = (u64::from(device[0]), u64::from(device[1]));
    // As makedev(3) has it.
    let number =
        (major & !0xfff) << 32 | (major & 0xfff) << 8 | (minor & !0xff) << 12 | minor & 0xff;
    own_inode != 0 && own_inode == inode && own_device == number
}

pub(crate) fn has_machine() -> bool {
    MACHINE[1].load(Relaxed) != 0
}
