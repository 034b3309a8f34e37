//! The agent of one process, as far as the kernel vouches for it. Nothing the process says of
//! itself is believed: its thread id, its addresses and its answers come from memory that it may
//! write.
//!
//! What is known, and by what:
//! ```text
//! the process     pidfd of the peer of its socket
//! its memory      /proc/PID/mem, opened at the handshake: that address space for ever, whatever
//!                 the process executes later
//! the agent       the word `agent` names a thread; it is taken only if it is a thread of that
//!                 process, once, and then by a pidfd and an open status file of its own: the
//!                 number may be anybody's later
//! holding area    registered by the manager with a userfaultfd of the same address space
//! ```
//! [`Proof`] ties them together: a number that the manager installed in the holding area by
//! userfaultfd is read back by the open memory, and by process id.
//!
//! All reads go through `/proc/PID/mem`, which never waits for a userfaultfd: `process_vm_readv`
//! would wait for ever at a page that the process has taken away.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use undercroft_base::{PAGE_BYTES, VirtPage, VirtRange};
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::ThreadStatus;
use undercroft_sys::uffd::Uffd;
use undercroft_wire::protocol::{STAGING_PAGES, next_run};

use crate::space::command::{Commands, Done};

/// What a process has that announced itself.
pub(crate) struct Agent {
    pub commands: Commands,
    /// Keeps the holding area's registration alive.
    pub _holding_uffd: Uffd,
    /// Where moved pages are read.
    pub holding: u64,
    /// The shim's own memory: staging area, holding area and agent stack; never managed.
    pub private: VirtRange,
    pub memory: ProcessMemory,
    pub proof: Proof,
    /// Found once, when the first order is due; `None`: what it named was no thread of its own.
    thread: OnceLock<Option<Thread>>,
    /// Thread id of `thread`; 0 before.
    tid: AtomicU32,
}

/// The agent's thread, held so that its number cannot become somebody else's.
struct Thread {
    /// `None` before Linux 6.9.
    pidfd: Option<PidFd>,
    status: ThreadStatus,
    /// Seccomp filters it began with: those the program had when it was started or forked.
    filters: u32,
}

/// A number in the first page of the holding area until the first order. Who can read it back
/// shares the address space.
pub(crate) struct Proof {
    pid: u32,
    nonce: [u8; 16],
}

/// Whether the agent can be given an order now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// Not started yet, stopped by a signal or a debugger, or gone.
    NotNow,
    /// The program has put a filter of its own on all its threads: a system call of the agent may
    /// kill the program.
    Filtered,
}

impl Proof {
    /// Installs it, and zeros at the other places of the holding area. The memory of process `pid`
    /// and `holding_uffd`'s must be the same.
    ///
    /// Errors: they are not, or the area has something already.
    pub fn install(
        pid: u32,
        memory: &ProcessMemory,
        holding_uffd: &Uffd,
        holding: u64,
    ) -> io::Result<Proof> {
        let proof = Proof {
            pid,
            nonce: process::random_bytes()?,
        };
        let mut page = [0u8; PAGE_BYTES];
        page[..16].copy_from_slice(&proof.nonce);
        let first = VirtPage::of(holding);
        holding_uffd.copy(first, &page, false)?;
        // Zeros at the other places: nobody serves faults there.
        let others = VirtRange::new(first.plus(1), first.plus(STAGING_PAGES as u64));
        holding_uffd.zeropage(others, false)?;
        let mut seen = [0u8; 16];
        memory.read(holding, &mut seen)?;
        // By number last: everything that was opened by number before this is of that address space
        // too.
        if seen == proof.nonce && proof.holds(holding) {
            Ok(proof)
        } else {
            Err(io::Error::other("its userfaultfd is of another process"))
        }
    }

    /// The process still has the address space of the handshake. Before its first order only.
    fn holds(&self, holding: u64) -> bool {
        let mut seen = [0u8; 16];
        let read = ProcessMemory::open(self.pid).and_then(|m| m.read(holding, &mut seen));
        read.is_ok() && seen == self.nonce
    }
}

impl Agent {
    pub fn new(
        commands: Commands,
        holding_uffd: Uffd,
        holding: u64,
        private: VirtRange,
        memory: ProcessMemory,
        proof: Proof,
    ) -> Agent {
        Agent {
            commands,
            _holding_uffd: holding_uffd,
            holding,
            private,
            memory,
            proof,
            thread: OnceLock::new(),
            tid: AtomicU32::new(0),
        }
    }

    /// Its thread id, which is one of its process; 0 before its first order, and when it has none.
    /// Cost: one load.
    #[inline]
    pub fn tid(&self) -> u32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Asks the kernel: 9 us, 150 us the first time. For the evictor only.
    pub fn readiness(&self) -> Readiness {
        let said = self.commands.agent();
        if said == 0 {
            return Readiness::NotNow;
        }
        let Some(thread) = self.thread.get_or_init(|| self.find(said)) else {
            return Readiness::NotNow;
        };
        match thread.status.read() {
            Ok(status) if status.filters > thread.filters => Readiness::Filtered,
            Ok(status) if !matches!(status.state, 'T' | 't' | 'Z' | 'X') => Readiness::Ready,
            _ => Readiness::NotNow,
        }
    }

    /// The thread `said`, if it is one of the process, and not its first: that one survives exec,
    /// an agent never does.
    fn find(&self, said: u32) -> Option<Thread> {
        if said == self.proof.pid {
            return None;
        }
        // Held first, then shown to be of the address space: no exec in between can go unseen.
        let pidfd = PidFd::open_thread(said).ok();
        let status = ThreadStatus::open(self.proof.pid, said).ok()?;
        let filters = status.read().ok()?.filters;
        let same = self.proof.holds(self.holding) && status.read().is_ok();
        if !same {
            return None;
        }
        self.tid.store(said, Ordering::Relaxed);
        Some(Thread {
            pidfd,
            status,
            filters,
        })
    }

    /// The agent has run and is gone: its process has ended or called exec.
    pub fn has_ended(&self) -> bool {
        match self.thread.get() {
            Some(Some(thread)) => match &thread.pidfd {
                Some(pidfd) => pidfd.has_exited(),
                None => thread.status.read().is_err(),
            },
            _ => self.commands.agent() == 0,
        }
    }

    /// Reads the moved pages, each to its own place in `buffer`; runs in one call each. The
    /// `stranded` are still in the staging area. False when they cannot be read.
    pub fn read_moved(&self, done: Done, count: usize, buffer: &mut [u8]) -> bool {
        let staging = self.private.start.address();
        let further = done.moved & !done.stranded;
        self.read_places(self.holding, further, count, buffer)
            && self.read_places(staging, done.moved & done.stranded, count, buffer)
    }

    fn read_places(&self, area: u64, places: u64, count: usize, buffer: &mut [u8]) -> bool {
        let mut at = 0;
        while let Some((first, end)) = next_run(places, at, count) {
            at = end;
            let from = area + (first * PAGE_BYTES) as u64;
            let bytes = &mut buffer[first * PAGE_BYTES..end * PAGE_BYTES];
            if self.memory.read(from, bytes).is_err() {
                return false;
            }
        }
        true
    }
}
