//! The agent of one process, as far as the kernel vouches for it. What the process says of itself
//! is not believed: its thread id, its addresses and its answers are in memory that it may write.
//!
//! Each fact, and its source:
//! ```text
//! the process     pidfd of the peer of its socket
//! its memory      /proc/PID/mem, opened at the handshake: it stays that address space, whatever
//!                 the process executes later
//! the agent       the word `agent` names a thread. It is accepted once, if it is a thread of that
//!                 process, and then held by a pidfd and an open status file: the number may
//!                 belong to another thread later
//! holding area    registered by the manager with a userfaultfd of the same address space
//! ```
//! [`Proof`] ties them together. The manager installs a number in the holding area by userfaultfd,
//! and reads it back by the open memory and by process id.
//!
//! All reads go through `/proc/PID/mem`, which never waits for a userfaultfd: `process_vm_readv`
//! would wait for ever at a page that the process has taken away.

use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use undercroft_base::{PAGE_BYTES, VirtPage, VirtRange};
use undercroft_engine::Held;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::ThreadStatus;
use undercroft_sys::uffd::{Uffd, UffdError};
use undercroft_wire::protocol::{STAGING_PAGES, next_run};

use crate::legacy::{Fds, Heir, Number, Row};
use crate::space::command::{Commands, Done};

/// The agent of a process that has announced itself, and its memory.
pub(crate) struct Agent {
    pub commands: Commands,
    /// Keeps the holding area's registration alive.
    _holding_uffd: Uffd,
    /// Address of the holding area, where moved pages are read.
    pub holding: u64,
    /// The shim's own memory: staging area, holding area and agent stack; never managed.
    pub private: VirtRange,
    pub memory: ProcessMemory,
    pub proof: Proof,
    /// Found once, when the first command is due. `None`: the process named no thread of its own.
    thread: OnceLock<Option<Thread>>,
    /// Thread id of `thread`; 0 before.
    tid: AtomicU32,
    row: Row,
    /// The command of the group that a dead manager was evicting: see [`Number::Command`].
    group: u64,
}

/// The agent's thread, held so that its number cannot become another thread's.
struct Thread {
    /// `None` before Linux 6.9.
    pidfd: Option<PidFd>,
    status: ThreadStatus,
    /// Seccomp filters at the agent's start: those that the program had when it was started or
    /// forked.
    filters: u32,
}

/// A number in the first page of the holding area until the first command. If it can be read back
/// through a descriptor, that descriptor is of the same address space.
pub(crate) struct Proof {
    pid: u32,
    nonce: [u8; 16],
}

/// Whether the agent can be given a command now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// It has not started yet, is stopped by a signal or a debugger, or is gone.
    NotNow,
    /// The program has put a seccomp filter on all its threads: a system call of the agent may kill
    /// the program.
    Filtered,
}

/// Why a process is not taken for the one that it says it is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProofError {
    /// The number was not found in the memory of the process.
    #[error("its userfaultfd is of another process")]
    OtherProcess,
    /// The holding area is not as the shim makes it.
    #[error("its holding area cannot be filled: {0}")]
    HoldingArea(#[from] UffdError),
    /// Its memory cannot be read, or there are no random numbers.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl Proof {
    /// Installs the number, and zeros at the other places of the holding area.
    ///
    /// Errors: `holding_uffd` is not of process `pid`, or the area has pages already.
    pub(crate) fn install(
        pid: u32,
        memory: &ProcessMemory,
        holding_uffd: &Uffd,
        holding: u64,
    ) -> Result<Proof, ProofError> {
        let proof = Proof {
            pid,
            nonce: process::random_bytes()?,
        };
        let mut page = [0u8; PAGE_BYTES];
        page[..16].copy_from_slice(&proof.nonce);
        let first = VirtPage::of(holding);
        holding_uffd.copy(first, &page, false)?;
        // Zeros at the other places, because faults there are not served.
        let others = VirtRange::new(first.plus(1), first.plus(STAGING_PAGES as u64));
        holding_uffd.zeropage(others, false)?;
        let mut seen = [0u8; 16];
        memory.read(holding, &mut seen)?;
        // By process id last: all that was opened by process id before this is of that address
        // space too.
        if seen == proof.nonce && proof.holds(holding) {
            Ok(proof)
        } else {
            Err(ProofError::OtherProcess)
        }
    }

    /// True if the process still has the address space of the handshake. Only before its first
    /// command.
    fn holds(&self, holding: u64) -> bool {
        let mut seen = [0u8; 16];
        let read = ProcessMemory::open(self.pid).and_then(|m| m.read(holding, &mut seen));
        read.is_ok() && seen == self.nonce
    }
}

impl Agent {
    pub(crate) fn new(
        commands: Commands,
        holding_uffd: Uffd,
        holding: u64,
        private: VirtRange,
        memory: ProcessMemory,
        proof: Proof,
        row: Row,
    ) -> Agent {
        row.put_fd(Fds::HoldingUffd, Some(holding_uffd.as_fd()));
        row.put_fd(Fds::CommandPage, Some(commands.as_fd()));
        row.put_fd(Fds::Memory, Some(memory.as_fd()));
        row.put(Number::Holding, holding);
        row.put(Number::PrivateStart, private.start.0);
        row.put(Number::PrivateEnd, private.end.0);
        let (low, high) = proof.nonce.split_at(8);
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        row.put(Number::ProofLow, word(low));
        row.put(Number::ProofHigh, word(high));
        Agent {
            row,
            group: 0,
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

    /// The agent that a dead manager knew. Nothing that it had verified is verified again: its
    /// descriptors are of that process.
    pub(crate) fn again(
        commands: Commands,
        holding_uffd: Uffd,
        memory: ProcessMemory,
        thread: (Option<PidFd>, Option<ThreadStatus>),
        heir: &Heir,
        row: Row,
    ) -> Agent {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&heir.number(Number::ProofLow).to_ne_bytes());
        nonce[8..].copy_from_slice(&heir.number(Number::ProofHigh).to_ne_bytes());
        let page = |of| VirtPage(heir.number(of));
        let found = match thread {
            (pidfd, Some(status)) if heir.number(Number::Agent) != 0 => {
                let filters = heir.number(Number::Filters) as u32;
                OnceLock::from(Some(Thread {
                    pidfd,
                    status,
                    filters,
                }))
            }
            _ => OnceLock::new(),
        };
        Agent {
            row,
            group: heir.number(Number::Command),
            commands,
            _holding_uffd: holding_uffd,
            holding: heir.number(Number::Holding),
            private: VirtRange::new(page(Number::PrivateStart), page(Number::PrivateEnd)),
            memory,
            proof: Proof {
                pid: heir.number(Number::Pid) as u32,
                nonce,
            },
            tid: AtomicU32::new(found.get().map_or(0, |_| heir.number(Number::Agent) as u32)),
            thread: found,
        }
    }

    /// A group is about to be taken out: the command posted next is about its pages.
    pub(crate) fn begins_group(&self) {
        let next = self.commands.last().wrapping_add(1);
        self.row.put(Number::Command, 1 << 32 | u64::from(next));
    }

    /// The last group is published, or has stayed: fork() in the program goes on.
    pub(crate) fn ends_group(&self) {
        self.row.put(Number::Command, 0);
        self.commands.release();
    }

    /// Where the page at `place` of the group is that a dead manager was evicting. The agent has no
    /// command any more.
    pub(crate) fn held(&self, place: usize) -> Held {
        let group = self.group;
        let posted = group >> 32 == 1 && self.commands.last() == group as u32;
        let done = self.commands.result();
        if !posted || done.moved >> place & 1 == 0 {
            return Held::NotMoved;
        }
        let mut page = [0u8; PAGE_BYTES];
        if self.read_one(done, place, &mut page) {
            Held::Here
        } else {
            Held::OwnerGone
        }
    }

    /// Reads one page of the last group. False if it cannot be read.
    pub(crate) fn read_one(&self, done: Done, place: usize, page: &mut [u8]) -> bool {
        let staged = done.stranded >> place & 1 == 1;
        let area = if staged {
            self.private.start.address()
        } else {
            self.holding
        };
        let from = area + (place * PAGE_BYTES) as u64;
        self.memory.read(from, page).is_ok()
    }

    /// The agent's thread id, which is verified; 0 before the first command, and if it has none.
    /// Cost: one load.
    #[inline]
    pub(crate) fn tid(&self) -> u32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Asks the kernel. Cost: 9 us, the first time 150 us. For the evictor only.
    pub(crate) fn readiness(&self) -> Readiness {
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

    /// Thread `said`, if it is of the process and not its first one. The first thread survives
    /// exec; an agent never does.
    fn find(&self, said: u32) -> Option<Thread> {
        if said == self.proof.pid {
            return None;
        }
        // The thread is held first and then shown to be of the address space, so that an exec in
        // between is seen.
        let pidfd = PidFd::open_thread(said).ok();
        let status = ThreadStatus::open(self.proof.pid, said).ok()?;
        let filters = status.read().ok()?.filters;
        let same = self.proof.holds(self.holding) && status.read().is_ok();
        if !same {
            return None;
        }
        self.row
            .put_fd(Fds::AgentPidfd, pidfd.as_ref().map(AsFd::as_fd));
        self.row.put_fd(Fds::AgentStatus, Some(status.as_fd()));
        self.row.put(Number::Filters, filters.into());
        self.row.put(Number::Agent, said.into());
        self.tid.store(said, Ordering::Relaxed);
        Some(Thread {
            pidfd,
            status,
            filters,
        })
    }

    /// The state of its thread, as ps shows it; `?` if it cannot be told.
    pub(crate) fn state(&self) -> char {
        let thread = self.thread.get().and_then(Option::as_ref);
        thread.map_or('?', |thread| {
            thread.status.read().map_or('?', |of| of.state)
        })
    }

    /// True if the agent has run and is gone: its process has ended or called exec.
    pub(crate) fn has_ended(&self) -> bool {
        match self.thread.get() {
            Some(Some(thread)) => match &thread.pidfd {
                Some(pidfd) => pidfd.has_exited(),
                None => thread.status.read().is_err(),
            },
            _ => self.commands.agent() == 0,
        }
    }

    /// Reads the moved pages, each to its own place in `buffer`, with one call for each run of
    /// pages. Those `stranded` are still in the staging area. False if they cannot be read.
    pub(crate) fn read_moved(&self, done: Done, count: usize, buffer: &mut [u8]) -> bool {
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
