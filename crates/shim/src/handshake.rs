//! The handshake: connects to the manager and makes what the manager needs of this process.

use core::mem::size_of;
use core::sync::atomic::Ordering::Relaxed;

use undercroft_wire::protocol::*;

use crate::agent::start_agent;
use crate::raw::{PAGE, STACK, call3, call6, nr};
use crate::socket::{receive, send};
use crate::{ADDRESS, BEACON, COMMAND, OWNER};

#[repr(C)]
pub(crate) struct SockAddr {
    pub(crate) family: u16,
    pub(crate) path: [u8; 108],
}

/// The handshake. True if the process is managed from now on. On any failure it runs on unmanaged.
pub(crate) unsafe fn join(kind: u32, nonce: u64) -> bool {
    // SAFETY: see the callees; every descriptor made here is closed here, except those the agent
    // keeps.
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
        if !send(
            socket,
            &Hello {
                magic: MAGIC,
                kind,
                nonce,
            },
            [-1; 2],
            0,
        ) {
            return false;
        }
        let mut answer = Answer {
            magic: 0,
            refused: 1,
        };
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

/// Number of the request: see ioctl_userfaultfd(2).
const UFFD_NEW: usize = 0xAA00;

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
        // Not in children: each has its own. No huge pages: pages are moved one by one.
        call3(nr::MADVISE, command, PAGE, 10);
        call3(nr::MADVISE, own, own_len, 10);
        call3(nr::MADVISE, own, own_len, 15);
        // A program that locks all it maps has locked and filled this: it must be neither.
        call3(nr::MUNLOCK, own, own_len, 0);
        call3(nr::MADVISE, own, own_len, 4);
        // The stack must be resident before it is needed inside a MOVE.
        core::ptr::write_bytes((own + 2 * STAGING_PAGES * PAGE) as *mut u8, 0, STACK);
        let mut beacon = BEACON.load(Relaxed);
        if beacon == 0 {
            let fresh = call6(nr::MMAP, 0, PAGE, 3, 0x22, usize::MAX, 0);
            if fresh < 0 {
                return false;
            }
            beacon = fresh as u64;
            // Missing in every fork child, whatever touches it here; and in a mapping of its own.
            call3(nr::MUNLOCK, fresh as usize, PAGE, 0);
            call3(nr::MADVISE, fresh as usize, PAGE, 4);
            call3(nr::MADVISE, fresh as usize, PAGE, 18);
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
        let mut answer = Answer {
            magic: 0,
            refused: 1,
        };
        let mut joined = false;
        if send(socket, &ready, fds, count)
            && let Some([guard, _]) = receive(socket, &mut answer)
            && guard >= 0
        {
            // The agent must receive no signal of the program's: block all, start it, restore.
            let (all, mut old) = (u64::MAX, 0u64);
            let old_at = core::ptr::from_mut(&mut old) as usize;
            call6(
                nr::RT_SIGPROCMASK,
                2,
                core::ptr::from_ref(&all) as usize,
                old_at,
                8,
                0,
                0,
            );
            joined = core::ptr::read_volatile(&answer.refused) == 0
                && start_agent(
                    command,
                    own,
                    staging as usize,
                    guard as usize,
                    own + own_len,
                );
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
