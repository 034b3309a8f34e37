//! The shim: a shared object loaded into each program of a client. It connects to the manager at start, and keeps one
//! agent thread that moves pages out on command.
//!
//! Runs inside somebody else's program, so: no heap, no stdio, no thread-local storage, no libc call but the registration of
//! the fork handler and those it stands in for; raw system calls only. The agent touches nothing but its stack, the command page and the staging area,
//! none of which is ever managed.

#![no_std]
#![deny(unsafe_op_in_unsafe_fn)]

#[allow(dead_code)] // the manager's half
mod command;
mod protocol;
mod threads;

use core::arch::{asm, global_asm};
use core::mem::size_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, Ordering::*};
use core::time::Duration;

use command::{Shared, Word};
use protocol::*;

const PAGE: usize = 4096;
const STACK: usize = 4 * PAGE;

mod nr {
    pub const CLOSE: usize = 3;
    pub const MMAP: usize = 9;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const IOCTL: usize = 16;
    pub const SCHED_YIELD: usize = 24;
    pub const MADVISE: usize = 28;
    pub const DUP2: usize = 33;
    pub const GETPID: usize = 39;
    pub const SOCKET: usize = 41;
    pub const FCNTL: usize = 72;
    pub const CONNECT: usize = 42;
    pub const SENDMSG: usize = 46;
    pub const RECVMSG: usize = 47;
    pub const PRCTL: usize = 157;
    pub const FUTEX: usize = 202;
    pub const CLOSE_RANGE: usize = 436;
}

const EINTR: isize = -4;
const EBUSY: isize = -16;
const EEXIST: isize = -17;
const EINVAL: isize = -22;

/// A raw system call.
///
/// # Safety
/// The arguments are those of call `n`; pointers are valid for what the kernel does with them.
#[inline(always)]
unsafe fn call6(n: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let result;
    // SAFETY: the `syscall` instruction clobbers rcx and r11 only; memory effects are the caller's promise.
    unsafe {
        asm!("syscall", inlateout("rax") n as isize => result, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

#[inline(always)]
unsafe fn call3(n: usize, a: usize, b: usize, c: usize) -> isize {
    // SAFETY: passed on.
    unsafe { call6(n, a, b, c, 0, 0, 0) }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing here panics by design; if it does, stop at once rather than run on in somebody's program.
    loop {
        // SAFETY: an undefined instruction ends the process.
        unsafe { asm!("ud2", options(noreturn)) }
    }
}

// Named by precompiled `core`, never called: nothing unwinds here. Hidden, so that it does not take the place of the
// same symbol in programs written in Rust.
global_asm!(".globl rust_eh_personality", ".hidden rust_eh_personality", "rust_eh_personality: ud2");

const MADV_GUARD_INSTALL: usize = 102;

/// Stands in for the C library's madvise. Guard pages drop contents without telling userfaultfd: dropping them once more, which
/// tells it, changes nothing for the program, and keeps the old contents from coming back when the guard is removed.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: usize, length: usize, advice: i32) -> i32 {
    // SAFETY: the program's own call, passed on.
    let result = unsafe { call3(nr::MADVISE, address, length, advice as u32 as usize) };
    if result == 0 && advice as u32 as usize == MADV_GUARD_INSTALL {
        // SAFETY: the contents are gone already; this keeps the guards and tells the manager.
        unsafe { call3(nr::MADVISE, address, length, 4) };
    }
    if result >= 0 {
        return result as i32;
    }
    // SAFETY: the C library's own; it is there when this object is loaded by a C library's dynamic linker.
    unsafe {
        if __errno_location as *const () as usize != 0 {
            *__errno_location() = -result as i32;
        }
    }
    -1
}

global_asm!(".weak __errno_location");
unsafe extern "C" {
    fn __errno_location() -> *mut i32;
}

// glibc runs the child handler in every fork() child; absent in other C libraries, whose children are then served
// but not evicted from.
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
static mut ADDRESS: SockAddr = SockAddr { family: 1, path: [0; 108] };
/// The beacon page of this process; 0 before the first handshake.
static BEACON: AtomicU64 = AtomicU64::new(0);
/// The command page of this process; 0 before the first handshake.
static COMMAND: AtomicU64 = AtomicU64::new(0);
/// The process it belongs to: children that did not come from fork() inherit the number, not the page.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The command page, if this process has one.
fn command_page() -> Option<&'static CommandPage> {
    let command = COMMAND.load(Relaxed) as *const CommandPage;
    // SAFETY: takes no arguments.
    let pid = unsafe { call3(nr::GETPID, 0, 0, 0) } as u32;
    if command.is_null() || OWNER.load(Relaxed) != pid {
        return None;
    }
    // SAFETY: it stays mapped as long as the address space of its owner, which is this process.
    Some(unsafe { &*command })
}

#[repr(C)]
struct SockAddr {
    family: u16,
    path: [u8; 108],
}

extern "C" fn init(_argc: i32, _argv: *const *const u8, envp: *const *const u8) {
    // SAFETY: the dynamic linker passes the environment as a null-terminated array of C strings; `ADDRESS` is written once,
    // here, before any other thread exists.
    unsafe {
        if envp.is_null() || !find_socket(envp) {
            return;
        }
        if join(KIND_START, 0) {
            let register: unsafe extern "C" fn(_, _, _, _) -> i32 = __register_atfork;
            if register as usize != 0 {
                let (before, after) = (Some(before_fork as _), Some(after_fork as _));
                register(before, after, Some(in_fork_child), core::ptr::null());
            }
        }
    }
}

/// Copies the socket's path out of the environment; false when it is not there.
unsafe fn find_socket(mut envp: *const *const u8) -> bool {
    let name = SOCKET_VARIABLE.as_bytes();
    // SAFETY: walks C strings up to their NUL and the array up to its null, as the ABI lays them out.
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

/// Runs in the parent before fork(): no page may be on its way out while the child's memory is copied.
extern "C" fn before_fork() {
    if let Some(page) = command_page() {
        command::before_fork(page);
    }
}

/// Runs in the parent after fork().
extern "C" fn after_fork() {
    if let Some(page) = command_page() {
        command::after_fork(page);
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
    // SAFETY: the beacon page is ours and readable. If the parent was managed it is missing, the read faults, and the manager
    // answers with a number that names this child's userfaultfd.
    let nonce = unsafe { core::ptr::read_volatile(beacon as *const u64) };
    // SAFETY: the page is ours; it must be missing again before this child forks.
    unsafe { call3(nr::MADVISE, beacon as usize, PAGE, 4) };
    // SAFETY: only this thread exists, as in `init`.
    unsafe { join(KIND_FORK, nonce) };
}

#[repr(C)]
struct IoVec {
    base: usize,
    len: usize,
}

#[repr(C)]
struct MsgHdr {
    name: usize,
    name_len: u32,
    iov: *const IoVec,
    iov_len: usize,
    control: usize,
    control_len: usize,
    flags: i32,
}

/// A control buffer for up to two descriptors.
#[repr(C, align(8))]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    fds: [i32; 2],
}

/// Sends `message` with the first `count` of `fds`.
unsafe fn send<T>(socket: isize, message: &T, fds: [i32; 2], count: usize) -> bool {
    let control = Control { len: 16 + 4 * count, level: 1, kind: 1, fds };
    let iov = IoVec { base: core::ptr::from_ref(message) as usize, len: size_of::<T>() };
    let header = MsgHdr {
        name: 0,
        name_len: 0,
        iov: &iov,
        iov_len: 1,
        control: if count == 0 { 0 } else { core::ptr::from_ref(&control) as usize },
        control_len: if count == 0 { 0 } else { size_of::<Control>() },
        flags: 0,
    };
    let header = core::ptr::from_ref(&header) as usize;
    loop {
        // SAFETY: header, iov and control are live locals; 0x4000 = MSG_NOSIGNAL.
        match unsafe { call3(nr::SENDMSG, socket as usize, header, 0x4000) } {
            EINTR => continue,
            sent => return sent == size_of::<T>() as isize,
        }
    }
}

/// Receives `message`; the descriptors that came along, or -1.
unsafe fn receive<T>(socket: isize, message: &mut T) -> Option<[i32; 2]> {
    let mut control = Control { len: 0, level: 0, kind: 0, fds: [-1; 2] };
    let iov = IoVec { base: core::ptr::from_mut(message) as usize, len: size_of::<T>() };
    let header = MsgHdr {
        name: 0,
        name_len: 0,
        iov: &iov,
        iov_len: 1,
        control: core::ptr::from_mut(&mut control) as usize,
        control_len: size_of::<Control>(),
        flags: 0,
    };
    let header = core::ptr::from_ref(&header) as usize;
    let got = loop {
        // SAFETY: as in `send`; 0x40000000 = MSG_CMSG_CLOEXEC.
        match unsafe { call3(nr::RECVMSG, socket as usize, header, 0x4000_0000) } {
            EINTR => continue,
            got => break got,
        }
    };
    // SAFETY: the kernel filled the control buffer; volatile because it did so behind the compiler's back.
    let fds = unsafe { core::ptr::read_volatile(&control.fds) };
    (got == size_of::<T>() as isize).then_some(fds)
}

/// The handshake. True when the process is under management; on any failure it goes on unmanaged.
unsafe fn join(kind: u32, nonce: u64) -> bool {
    // SAFETY: see the callees; every descriptor made here is closed here, except those the agent keeps.
    unsafe {
        let socket = call3(nr::SOCKET, 1, 5 | 0o2000000, 0); // AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC
        if socket < 0 {
            return false;
        }
        let address = core::ptr::addr_of!(ADDRESS) as usize;
        let connected = call3(nr::CONNECT, socket as usize, address, size_of::<SockAddr>()) == 0;
        let joined = connected && handshake(socket, kind, nonce);
        call3(nr::CLOSE, socket as usize, 0, 0);
        joined
    }
}

unsafe fn handshake(socket: isize, kind: u32, nonce: u64) -> bool {
    // SAFETY: as in `join`.
    unsafe {
        if !send(socket, &Hello { magic: MAGIC, kind, nonce }, [-1; 2], 0) {
            return false;
        }
        let mut answer = Answer { magic: 0, refused: 1 };
        let Some([device, page]) = receive(socket, &mut answer) else {
            return false;
        };
        if core::ptr::read_volatile(&answer.magic) != MAGIC
            || core::ptr::read_volatile(&answer.refused) != 0
            || device < 0
            || page < 0
        {
            return false;
        }
        let ready = set_up(socket, device as usize, page as usize, nonce);
        call3(nr::CLOSE, device as usize, 0, 0);
        call3(nr::CLOSE, page as usize, 0, 0);
        ready
    }
}

/// Numbers of uffd requests: see ioctl_userfaultfd(2).
const UFFD_NEW: usize = 0xAA00;
const UFFD_API: usize = 0xC018_AA3F;
const UFFD_REGISTER: usize = 0xC020_AA00;
const UFFD_MOVE: usize = 0xC028_AA05;

unsafe fn set_up(socket: isize, device: usize, page: usize, nonce: u64) -> bool {
    // SAFETY: fresh mappings at addresses the kernel chooses; ioctls with live local structures.
    unsafe {
        let command = call6(nr::MMAP, 0, PAGE, 3, 1, page, 0);
        let own_len = 2 * STAGING_PAGES * PAGE + STACK;
        let own = call6(nr::MMAP, 0, own_len, 3, 0x22, usize::MAX, 0);
        if command < 0 || own < 0 {
            return false;
        }
        let (command, own) = (command as usize, own as usize);
        // Not in children: each has its own. No huge pages: pages are moved in one by one.
        call3(nr::MADVISE, command, PAGE, 10);
        call3(nr::MADVISE, own, own_len, 10);
        call3(nr::MADVISE, own, own_len, 15);
        // The stack must be there before it is needed inside a MOVE.
        core::ptr::write_bytes((own + 2 * STAGING_PAGES * PAGE) as *mut u8, 0, STACK);
        let mut beacon = BEACON.load(Relaxed);
        if beacon == 0 {
            let fresh = call6(nr::MMAP, 0, PAGE, 3, 0x22, usize::MAX, 0);
            if fresh < 0 {
                return false;
            }
            beacon = fresh as u64;
            BEACON.store(beacon, Relaxed);
        }
        let flags = 0o2000000 | 0o4000; // O_CLOEXEC | O_NONBLOCK
        let process = match nonce {
            0 => call3(nr::IOCTL, device, UFFD_NEW, flags),
            _ => -1,
        };
        let staging = call3(nr::IOCTL, device, UFFD_NEW, flags);
        if staging < 0 || (nonce == 0 && process < 0) {
            return false;
        }
        let mut api = [0xAAu64, 1 << 16, 0];
        call3(nr::IOCTL, staging as usize, UFFD_API, api.as_mut_ptr() as usize);
        let hold = own + STAGING_PAGES * PAGE;
        let mut register = [hold as u64, (STAGING_PAGES * PAGE) as u64, 1, 0];
        call3(nr::IOCTL, staging as usize, UFFD_REGISTER, register.as_mut_ptr() as usize);
        let ready = Ready {
            magic: MAGIC,
            reserved: 0,
            staging: own as u64,
            private_end: (own + own_len) as u64,
            beacon,
        };
        let count = if nonce == 0 { 2 } else { 1 };
        let fds = match nonce {
            0 => [process as i32, staging as i32],
            _ => [staging as i32, -1],
        };
        let mut answer = Answer { magic: 0, refused: 1 };
        let mut joined = false;
        if send(socket, &ready, fds, count)
            && let Some([guard, _]) = receive(socket, &mut answer)
            && guard >= 0
        {
            // The agent must receive no signal of the program's: block all, start it, restore.
            let (all, mut old) = (u64::MAX, 0u64);
            let old_at = core::ptr::from_mut(&mut old) as usize;
            call6(nr::RT_SIGPROCMASK, 2, core::ptr::from_ref(&all) as usize, old_at, 8, 0, 0);
            joined = core::ptr::read_volatile(&answer.refused) == 0
                && start_agent(command, own, staging as usize, guard as usize, own + own_len);
            call6(nr::RT_SIGPROCMASK, 2, old_at, 0, 8, 0, 0);
            call3(nr::CLOSE, guard as usize, 0, 0);
        }
        if joined {
            OWNER.store(call3(nr::GETPID, 0, 0, 0) as u32, Relaxed);
            COMMAND.store(command as u64, Relaxed);
        }
        if process >= 0 {
            call3(nr::CLOSE, process as usize, 0, 0);
        }
        call3(nr::CLOSE, staging as usize, 0, 0);
        joined
    }
}

/// Starts the agent and waits until it has a descriptor table of its own.
unsafe fn start_agent(
    command: usize,
    staging: usize,
    uffd: usize,
    guard: usize,
    stack_top: usize,
) -> bool {
    let page = command as *const CommandPage;
    // VM | FS | SIGHAND | THREAD | SYSVSEM | CHILD_CLEARTID | CHILD_SETTID: a thread of the program, but *not* FILES: its
    // own descriptor table, so that the program may close what it likes and sees nothing of ours.
    let flags: usize = 0x100 | 0x200 | 0x800 | 0x1_0000 | 0x4_0000 | 0x20_0000 | 0x100_0000;
    // SAFETY: the new thread runs `agent` on its own mapped stack and never returns; registers carry its arguments. The word
    // that the kernel clears when it dies is in the command page, which is shared with the manager.
    unsafe {
        let tid = core::ptr::addr_of!((*page).agent) as usize;
        let result: isize;
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "mov rsi, r13",
            "mov rdx, r14",
            "mov rcx, r15",
            "and rsp, -16",
            "call {agent}",
            "ud2",
            "2:",
            agent = sym agent,
            inlateout("rax") 56isize => result,
            in("rdi") flags,
            in("rsi") stack_top,
            in("rdx") tid,
            in("r10") tid,
            in("r8") 0usize,
            in("r12") command,
            in("r13") staging,
            in("r14") uffd,
            in("r15") guard,
            lateout("rcx") _,
            lateout("r11") _,
        );
        if result < 0 {
            return false;
        }
        command::wait_for_agent(&*page);
        true
    }
}

/// The word of that name.
#[inline(always)]
fn word_of(page: &CommandPage, word: Word) -> &AtomicU32 {
    // SAFETY: the offset is that of a field of this type.
    unsafe { &*core::ptr::from_ref(page).byte_add(CommandPage::offset(word)).cast() }
}

/// The words as they are: in the mapped page, with the processor's own atomics and the kernel's futexes.
impl Shared for CommandPage {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        word_of(self, word).load(order)
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        word_of(self, word).store(value, order);
    }

    #[inline(always)]
    fn add(&self, word: Word, value: u32) {
        word_of(self, word).fetch_add(value, SeqCst);
    }

    #[inline(always)]
    fn wait(&self, word: Word, expected: u32, limit: Option<Duration>) {
        let limit = limit.map(|limit| [limit.as_secs(), u64::from(limit.subsec_nanos())]);
        let limit = limit.as_ref().map_or(0, |limit| limit.as_ptr() as usize);
        let at = core::ptr::from_ref(word_of(self, word)) as usize;
        // SAFETY: the word is live, and so is the time-out if there is one.
        unsafe { call6(nr::FUTEX, at, 0, expected as usize, limit, 0, 0) };
    }

    #[inline(always)]
    fn wake(&self, word: Word, count: u32) {
        let at = core::ptr::from_ref(word_of(self, word)) as usize;
        // SAFETY: the word is live.
        unsafe { call6(nr::FUTEX, at, 1, count as usize, 0, 0, 0) };
    }

    #[inline(always)]
    fn pause(&self, long: bool) {
        core::hint::spin_loop();
        if long {
            // SAFETY: takes no arguments.
            unsafe { call3(nr::SCHED_YIELD, 0, 0, 0) };
        }
    }
}

/// The agent thread.
unsafe extern "C" fn agent(
    page: *const CommandPage,
    staging: usize,
    uffd: usize,
    guard: usize,
) -> ! {
    // SAFETY: the command page and staging area live as long as the address space; descriptors are this thread's own.
    unsafe {
        call3(nr::PRCTL, 15, c"uc-agent".as_ptr() as usize, 0);
        // 0: the process's userfaultfd, 1: that of the holding area; nothing else stays open.
        let (uffd, guard) = (call3(nr::FCNTL, uffd, 0, 10), call3(nr::FCNTL, guard, 0, 10));
        call3(nr::DUP2, guard as usize, 0, 0);
        call3(nr::DUP2, uffd as usize, 1, 0);
        call3(nr::CLOSE_RANGE, 2, u32::MAX as usize, 0);
        let page = &*page;
        command::announce(page);
        let mut seq = 0;
        loop {
            seq = command::next_order(page, seq);
            let count = (page.count.load(Relaxed) as usize).min(STAGING_PAGES);
            match page.op.load(Relaxed) {
                OP_MOVE => move_out(page, seq, count, staging),
                _ => {}
            }
            command::answer(page, seq);
        }
    }
}

/// Pages and MOVEs in one exclusion of the reader: bounds how long a fault waits for the agent, some 20 us. Fewer at a time are no
/// better: each fault that comes between two MOVEs costs the program's CPU an interrupt, to flush what it has cached of the next page.
const MOVE_PAGES_MAX: usize = 16;
const MOVES_MAX: usize = 8;

/// Moves the listed pages into the staging area, page i to place i, and on into the holding area behind it.
///
/// The first move is made on the process's own userfaultfd, which refuses it while a layout event waits to be read: a page of a
/// mapping that took the place of the one meant is never moved. The second empties the staging area without an event,
/// which dropping its pages would raise.
unsafe fn move_out(page: &CommandPage, seq: u32, count: usize, staging: usize) {
    // SAFETY: the pages are the program's own, moved on the manager's word; nothing here refers to them.
    unsafe {
        let hold = staging + STAGING_PAGES * PAGE;
        call3(nr::MADVISE, hold, STAGING_PAGES * PAGE, 4); // DONTNEED: what was there is stored
        let (mut moved, mut refused) = (0u64, 0u64);
        let mut whole = true;
        let mut retried = usize::MAX;
        let mut alone = usize::MAX;
        let mut at = 0;
        while at < count {
            if page.pages[at].load(Relaxed) == 0 {
                at += 1; // dropped by the program before the command was posted
                continue;
            }
            let last = count.min(at + MOVE_PAGES_MAX);
            let moving = || move_runs(page, staging, at, last, alone);
            let Some(Moved { done, result, tried, stuck }) =
                command::between_events(page, seq, moving)
            else {
                break; // cancelled
            };
            whole &= result == 0;
            moved |= low_bits(done) << at;
            at += done;
            // After some progress the kernel says EAGAIN whatever stopped it: the next call tells.
            if !stuck {
                continue;
            }
            // A range over two mappings moves nothing: the rest of the batch goes page by page.
            if result == EINVAL && tried > 1 {
                alone = at;
                continue;
            }
            if result == EBUSY && retried != at {
                // Shared with a fork relative, or pinned. Breaking the sharing changes no byte and helps the first; the
                // second stays busy.
                retried = at;
                let start = page.pages[at].load(Relaxed) as usize;
                call3(nr::MADVISE, start, PAGE, 23); // MADV_POPULATE_WRITE
                continue;
            }
            refused |= 1 << at;
            at += 1;
        }
        // A forgotten page lies in the staging area, unknown: after an order that did not go through whole every place is tried.
        let sought = if whole { moved } else { u64::MAX };
        let mut stranded = 0u64;
        let mut at = 0;
        while let Some((first, end)) = next_run(sought, at, count) {
            at = first;
            let (to, from) = (hold + at * PAGE, staging + at * PAGE);
            let len = ((end - at) * PAGE) as u64;
            let mut request = [to as u64, from as u64, len, 0, 0u64];
            let result = call3(nr::IOCTL, 1, UFFD_MOVE, request.as_mut_ptr() as usize);
            let done = pages_moved(result, &request);
            moved |= low_bits(done) << at;
            at += done;
            if done == 0 {
                // An empty place; or what nothing in the kernel does to private pages: the manager ends the program.
                stranded |= moved & 1 << at;
                at += 1;
            }
        }
        page.moved.store(moved, Relaxed);
        page.refused.store(refused & !moved, Relaxed);
        page.stranded.store(stranded, Relaxed);
    }
}

/// What became of some pages of an order.
struct Moved {
    /// So many, from the first on, have moved.
    done: usize,
    /// What the last MOVE said: 0, or why it did not move its run.
    result: isize,
    /// Pages of the last run.
    tried: usize,
    /// Nothing of the last run moved, and `result` says why.
    stuck: bool,
}

/// Moves the pages of places `at..last` into the staging area, a run of neighbours at a time, until one does not move whole. Place `at`
/// has a page; from place `alone` on a run is of one page.
unsafe fn move_runs(
    page: &CommandPage,
    staging: usize,
    at: usize,
    last: usize,
    alone: usize,
) -> Moved {
    let (mut next, mut result, mut tried, mut stuck) = (at, 0, 0, false);
    for _ in 0..MOVES_MAX {
        let start = if next < last { page.pages[next].load(Relaxed) } else { 0 };
        if start == 0 || result != 0 {
            break;
        }
        tried = 1;
        while next + tried < last
            && next < alone
            && page.pages[next + tried].load(Relaxed) == start + (tried * PAGE) as u64
        {
            tried += 1;
        }
        let to = (staging + next * PAGE) as u64;
        let mut request = [to, start, (tried * PAGE) as u64, 0, 0u64];
        // SAFETY: the pages are the program's own, moved on the manager's word.
        unsafe {
            result = call3(nr::IOCTL, 0, UFFD_MOVE, request.as_mut_ptr() as usize);
            let done = pages_moved(result, &request);
            stuck = done == 0;
            next += done;
        }
    }
    Moved {
        done: next - at,
        result,
        tried,
        stuck,
    }
}

/// Pages that a MOVE (its `uffdio_move`, and what the call said) has moved, from the first on. Its target was empty.
///
/// Linux 6.18 forgets pages that it moved right after it had to look at one again (a page used by another processor meanwhile is
/// enough). It then finds them at the target and says EEXIST: so where EEXIST comes first, one has moved.
unsafe fn pages_moved(result: isize, request: &[u64; 5]) -> usize {
    // SAFETY: `request` is live; the kernel has written to it.
    let said = unsafe { core::ptr::read_volatile(&request[4]) } as i64;
    match (result, said.max(0) as usize / PAGE) {
        (0, _) => request[2] as usize / PAGE,
        (EEXIST, 0) => 1,
        (_, done) => done,
    }
}

/// The lowest `count` bits, at most [`MOVE_PAGES_MAX`] or all of a staging area.
fn low_bits(count: usize) -> u64 {
    1u64.checked_shl(count as u32).unwrap_or(0).wrapping_sub(1)
}
