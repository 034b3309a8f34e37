//! The handshake: connects to the manager and makes what the manager needs of this process.

use core::mem::size_of;
use core::sync::atomic::Ordering::Relaxed;

use undercroft_wire::protocol::*;

use crate::agent::{Start, start_agent};
use crate::life::Life;
use crate::mapping::Mapping;
use crate::raw::{ENOTTY, PAGE, STACK, advice, call3, close, close_all, nr, unsignalled};
use crate::socket::{receive, send};
use crate::{ADDRESS, BEACON, COMMAND, OWNER};

#[repr(C)]
pub(crate) struct SockAddr {
    pub(crate) family: u16,
    pub(crate) path: [u8; 108],
}

/// The handshake. True if the process is managed from now on. On any failure it runs on unmanaged.
///
/// # Safety
/// [`ADDRESS`] is not being written. This process has no agent yet.
pub(crate) unsafe fn join(kind: u32, nonce: u64) -> bool {
    // SAFETY: the caller's promise.
    let Some(socket) = (unsafe { connect() }) else {
        return false;
    };
    // SAFETY: the caller's promise.
    let joined = unsafe { handshake(socket, kind, nonce) };
    close(socket as usize);
    joined
}

/// A connection to the manager.
///
/// # Safety
/// [`ADDRESS`] is not being written.
pub(crate) unsafe fn connect() -> Option<isize> {
    let flags = 5 | 0o2000000; // SOCK_SEQPACKET | SOCK_CLOEXEC
    // SAFETY: takes numbers only; 1 = AF_UNIX.
    let socket = unsafe { call3(nr::SOCKET, 1, flags, 0) };
    if socket < 0 {
        return None;
    }
    let address = core::ptr::addr_of!(ADDRESS) as usize;
    // SAFETY: `ADDRESS` is a whole socket address, and nothing writes it (the caller's promise).
    let connected = unsafe { call3(nr::CONNECT, socket as usize, address, size_of::<SockAddr>()) };
    if connected != 0 {
        close(socket as usize);
        return None;
    }
    Some(socket)
}

/// # Safety
/// This process has no agent yet.
unsafe fn handshake(socket: isize, kind: u32, nonce: u64) -> bool {
    let hello = Hello {
        magic: MAGIC,
        kind,
        nonce,
    };
    // SAFETY: a message of plain numbers, and no descriptors.
    if !unsafe { send(socket, &hello, [-1; 2], 0) } {
        return false;
    }
    let Some([device, page]) = receive_answer(socket) else {
        return false;
    };
    let ready = device >= 0 && page >= 0 && {
        // SAFETY: the caller's promise; both descriptors have just come.
        unsafe { set_up(socket, device as usize, page as usize, nonce) }
    };
    close_all([device, page]);
    ready
}

/// The descriptors that come with the manager's answer, each -1 if it is missing. `None`: it is no
/// answer, or it refuses; no descriptor is left open then.
pub(crate) fn receive_answer(socket: isize) -> Option<[i32; 2]> {
    match receive_code(socket)? {
        (0, descriptors) => Some(descriptors),
        (_, descriptors) => {
            close_all(descriptors);
            None
        }
    }
}

/// The manager's answer: its `refused`, and what comes along. `None`: it is no answer.
pub(crate) fn receive_code(socket: isize) -> Option<(u32, [i32; 2])> {
    let mut answer = Answer {
        magic: 0,
        refused: 1,
    };
    // SAFETY: every value of an answer's bytes is one of its type.
    let descriptors = unsafe { receive(socket, &mut answer) }?;
    // SAFETY: a live local; volatile because the kernel wrote it behind the compiler's back.
    let answer = unsafe { core::ptr::read_volatile(&answer) };
    if answer.magic == MAGIC {
        return Some((answer.refused, descriptors));
    }
    close_all(descriptors);
    None
}

/// Staging area, holding area, and the agent's stack at the end.
const OWN_BYTES: usize = 2 * STAGING_PAGES * PAGE + STACK;

/// Makes the memory and the descriptors, passes them on, and starts the agent.
///
/// # Safety
/// `device` and `page` are descriptors from the manager. This process has no agent yet.
unsafe fn set_up(socket: isize, device: usize, page: usize, nonce: u64) -> bool {
    let Some((command, own)) = map_areas(page) else {
        return false;
    };
    let Some(beacon) = beacon() else {
        return false;
    };
    let Some(uffds) = Uffds::create(device, nonce) else {
        return false;
    };
    let ready = Ready {
        magic: MAGIC,
        reserved: 0,
        staging: own.start as u64,
        private_end: own.end() as u64,
        beacon,
    };
    let joined = match offer(socket, &ready, &uffds) {
        Some(process) => {
            // SAFETY: both areas are mapped above, and nothing else uses them.
            let started = unsafe { start_unsignalled(&command, &own, uffds.holding, process) };
            close(process);
            started
        }
        None => false,
    };
    if joined {
        // SAFETY: takes no arguments.
        let process = unsafe { call3(nr::GETPID, 0, 0, 0) } as u32;
        OWNER.store(process, Relaxed);
        COMMAND.store(command.start as u64, Relaxed);
    }
    uffds.close();
    joined
}

/// Maps the command page, whose descriptor is `page`, and the shim's own area, ready for the agent.
fn map_areas(page: usize) -> Option<(Mapping, Mapping)> {
    let command = Mapping::page_of(page)?;
    let own = Mapping::private(OWN_BYTES)?;
    // Not in children: each has its own. No huge pages: pages are moved one by one.
    command.advise(advice::DONTFORK);
    own.advise(advice::DONTFORK);
    own.advise(advice::NOHUGEPAGE);
    own.empty();
    let stack = (own.end() - STACK) as *mut u8;
    // The stack must be resident before it is needed inside a MOVE.
    // SAFETY: the last pages of the area, which are not in use yet.
    unsafe { core::ptr::write_bytes(stack, 0, STACK) };
    Some((command, own))
}

/// Address of the beacon page. It is a mapping of its own, made once. It is missing in every fork
/// child, whatever touches it here.
fn beacon() -> Option<u64> {
    let known = BEACON.load(Relaxed);
    if known != 0 {
        return Some(known);
    }
    let fresh = Mapping::private(PAGE)?;
    fresh.empty();
    fresh.advise(advice::WIPEONFORK);
    BEACON.store(fresh.start as u64, Relaxed);
    Some(fresh.start as u64)
}

/// Number of the request: see ioctl_userfaultfd(2).
const UFFD_NEW: usize = 0xAA00;

/// The userfaultfds that are made here.
struct Uffds {
    /// The process's own userfaultfd; none in a child whose userfaultfd came with the fork.
    process: Option<usize>,
    /// The holding area's userfaultfd, by which the staging area is cleared.
    holding: usize,
}

impl Uffds {
    /// * `nonce`: 0 unless this is such a child.
    fn create(device: usize, nonce: u64) -> Option<Uffds> {
        let process = match nonce {
            0 => Some(new_uffd(device)?),
            _ => None,
        };
        let Some(holding) = new_uffd(device) else {
            if let Some(process) = process {
                close(process);
            }
            return None;
        };
        Some(Uffds { process, holding })
    }

    /// The descriptors to send, and how many there are.
    fn to_send(&self) -> ([i32; 2], usize) {
        match self.process {
            Some(process) => ([process as i32, self.holding as i32], 2),
            None => ([self.holding as i32, -1], 1),
        }
    }

    fn close(self) {
        if let Some(process) = self.process {
            close(process);
        }
        close(self.holding);
    }
}

/// By the device. A manager that has none gives another file, which does not know the request:
/// then by the system call.
fn new_uffd(device: usize) -> Option<usize> {
    let flags = 0o2000000 | 0o4000; // O_CLOEXEC | O_NONBLOCK
    // SAFETY: the request takes flags, no address.
    let mut made = unsafe { call3(nr::IOCTL, device, UFFD_NEW, flags) };
    if made == ENOTTY {
        // SAFETY: takes flags.
        made = unsafe { call3(nr::USERFAULTFD, flags, 0, 0) };
    }
    usize::try_from(made).ok()
}

/// Passes on what was made here. Returns the process's own userfaultfd; `None` if the manager
/// refuses.
fn offer(socket: isize, ready: &Ready, uffds: &Uffds) -> Option<usize> {
    let (descriptors, count) = uffds.to_send();
    // SAFETY: a message of plain numbers; `count` descriptors are open.
    if !unsafe { send(socket, ready, descriptors, count) } {
        return None;
    }
    let [process, none] = receive_answer(socket)?;
    close_all([-1, none]);
    usize::try_from(process).ok()
}

/// Starts the agent. It must receive no signal of the program's, so all are blocked meanwhile.
///
/// # Safety
/// `command` is the command page and `own` of [`OWN_BYTES`]; nothing else uses either.
unsafe fn start_unsignalled(
    command: &Mapping,
    own: &Mapping,
    holding_uffd: usize,
    process_uffd: usize,
) -> bool {
    let start = Start {
        command: command.start,
        staging: own.start,
        stack_top: own.end(),
        holding_uffd,
        process_uffd,
        life: Life::of_caller(),
    };
    unsignalled(|| {
        // SAFETY: the caller's promise; the area ends with the stack.
        unsafe { start_agent(&start) }
    })
}
