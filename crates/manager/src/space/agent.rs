//! The agent of one process, as far as the kernel vouches for it. What the process says of itself
//! is not believed: its agent's number, its addresses and its answers are in memory that it may
//! write.
//!
//! Each fact, and its source:
//! ```text
//! the process     pidfd of the peer of its socket
//! its memory      /proc/PID/mem, opened at the handshake: it stays that address space, whatever
//!                 the process executes later
//! the agent       the word `agent` names a process. It is accepted once, if kcmp(2) says that it
//!                 has the memory of that process, and then held by a pidfd and an open status
//!                 file: the number may belong to another process later
//! holding area    registered by the manager with a userfaultfd of the same address space
//! ```
//! [`Proof`] ties them together. The manager installs a number in the holding area by userfaultfd,
//! and reads it back by the open memory and by process id.
//!
//! All reads go through `/proc/PID/mem`, which never waits for a userfaultfd: `process_vm_readv`
//! would wait for ever at a page that the process has taken away.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};
use undercroft_engine::HeldPage;
use undercroft_proto::legacy::{Fds, Heir, Number, Row};
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::{self, ThreadStatus};
use undercroft_sys::uffd::{Uffd, UffdError};
use undercroft_wire::protocol::{HALF_PAGES, STAGING_PAGES, next_run, places_of};

use crate::space::command::{Commands, Done};

/// The agent of a process that has announced itself, and its memory.
pub(crate) struct Agent {
    pub commands: Commands,
    /// Keeps the holding area's registration alive.
    holding_uffd: Uffd,
    /// Address of the holding area, where moved pages are read.
    pub holding: u64,
    /// The shim's own memory: staging area, holding area and agent stack; never managed.
    pub private: VirtRange,
    pub memory: ProcessMemory,
    pub proof: Proof,
    /// Found once, when the first command is due. `None`: the process named none that is its own.
    task: OnceLock<Option<Task>>,
    /// Its process id; 0 before.
    tid: AtomicU32,
    /// The same in its own pid namespace.
    number: AtomicU32,
    /// See [`crate::cpus::CpuPlan::place_agent`].
    pub placed: AtomicU64,
    row: Row,
    /// The commands of the groups that a dead manager was evicting, by half of the holding area:
    /// see [`Number::Command`].
    groups: [u64; 2],
    /// Where its pages are, if the agent died with its manager.
    left: OnceLock<Done>,
}

/// The command of the group in each half of the holding area.
const COMMANDS: [Number; 2] = [Number::Command, Number::CommandHigh];

/// Whether a page is in its place, or swapped out by the kernel. `None`: that cannot be read.
pub(crate) fn is_present(pagemap: &Pagemap, page: VirtPage) -> Option<bool> {
    let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
    let found = pagemap.first(VirtRange::one(page), any).ok()?;
    Some(found.is_some())
}

/// A process's number in its own pid namespace; 0 if it is gone.
fn number_of(process: &PidFd) -> u32 {
    let numbers = process.numbers().unwrap_or_default();
    numbers.last().copied().unwrap_or(0)
}

/// The agent's process, held so that its number cannot become another's.
struct Task {
    pidfd: PidFd,
    status: ThreadStatus,
}

/// A number in the first page of the holding area until the first command. If it can be read back
/// through a descriptor, that descriptor is of the same address space.
pub(crate) struct Proof {
    pub pid: u32,
    nonce: [u8; 16],
}

/// Whether the agent can be given a command now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Ready,
    /// The agent has not started yet, is stopped by a signal or a debugger, or is gone.
    NotNow,
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
        let mut page = [0u8; BASE_PAGE_BYTES];
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
            groups: [0; 2],
            commands,
            holding_uffd,
            holding,
            private,
            memory,
            proof,
            task: OnceLock::new(),
            tid: AtomicU32::new(0),
            number: AtomicU32::new(0),
            placed: AtomicU64::new(0),
            left: OnceLock::new(),
        }
    }

    /// A userfaultfd of the process that hears of no layout event: that of the holding area, where
    /// no fault is answered.
    pub(crate) fn quiet_uffd(&self) -> io::Result<Uffd> {
        Ok(self.holding_uffd.as_fd().try_clone_to_owned()?.into())
    }

    /// The agent that a dead manager knew. Nothing that it had verified is verified again: its
    /// descriptors are of that process.
    pub(crate) fn again(
        commands: Commands,
        holding_uffd: Uffd,
        memory: ProcessMemory,
        task: (Option<PidFd>, Option<ThreadStatus>),
        heir: &Heir,
        row: Row,
    ) -> Agent {
        let mut nonce = [0; 16];
        nonce[..8].copy_from_slice(&heir.number(Number::ProofLow).to_ne_bytes());
        nonce[8..].copy_from_slice(&heir.number(Number::ProofHigh).to_ne_bytes());
        let page = |of| VirtPage(heir.number(of));
        let found = match task {
            (Some(pidfd), Some(status)) if heir.number(Number::Agent) != 0 => {
                OnceLock::from(Some(Task { pidfd, status }))
            }
            _ => OnceLock::new(),
        };
        let known = found.get().and_then(Option::as_ref);
        let number = known.map_or(0, |task| number_of(&task.pidfd));
        Agent {
            row,
            number: AtomicU32::new(number),
            placed: AtomicU64::new(0),
            left: OnceLock::new(),
            groups: COMMANDS.map(|of| heir.number(of)),
            commands,
            holding_uffd,
            holding: heir.number(Number::Holding),
            private: VirtRange::new(page(Number::PrivateStart), page(Number::PrivateEnd)),
            memory,
            proof: Proof {
                pid: heir.number(Number::Pid) as u32,
                nonce,
            },
            tid: AtomicU32::new(found.get().map_or(0, |_| heir.number(Number::Agent) as u32)),
            task: found,
        }
    }

    /// A group at these places of the holding area is about to be taken out: the command posted
    /// next is about its pages.
    pub(crate) fn begins_group(&self, places: Range<usize>) {
        let next = self.commands.last().wrapping_add(1);
        self.note_group(&places, 1 << 32 | u64::from(next));
    }

    /// The group at these places is published, or has stayed: fork() in the program goes on.
    pub(crate) fn ends_group(&self, places: Range<usize>) {
        self.note_group(&places, 0);
        self.commands.release();
    }

    /// The groups of a dead manager are published.
    pub(crate) fn ends_all_groups(&self) {
        self.note_group(&(0..STAGING_PAGES), 0);
        self.commands.release_all();
    }

    fn note_group(&self, places: &Range<usize>, command: u64) {
        let set = places_of(places.start, places.end);
        for (half, of) in COMMANDS.into_iter().enumerate() {
            if set >> (half * HALF_PAGES) & 1 == 1 {
                self.row.put(of, command);
            }
        }
    }

    /// Whether the command of a dead manager's group at `place` was posted, and whether it is the
    /// last one.
    fn posted(&self, place: usize) -> (bool, bool) {
        let group = self.groups[place / HALF_PAGES];
        let ago = self.commands.last().wrapping_sub(group as u32) as i32;
        let posted = group >> 32 == 1 && ago >= 0;
        (posted, posted && ago == 0)
    }

    /// Finds where the pages of the command are in the middle of which the agent died. A place of
    /// the holding area may show an older page: then its page has not moved, and is where it was.
    /// False: it cannot be told.
    pub(crate) fn find_left(&self, pagemap: &Pagemap) -> bool {
        let mut done = self.commands.result();
        for place in 0..STAGING_PAGES {
            if !self.posted(place).1 {
                continue; // what an earlier command did there is answered
            }
            done.moved &= !(1 << place);
            done.stranded &= !(1 << place);
            let Some((staged, held)) = self.is_at(pagemap, place) else {
                return false;
            };
            done.moved |= u64::from(staged || held) << place;
            done.stranded |= u64::from(staged) << place;
        }
        self.left.set(done).is_ok()
    }

    /// Whether a place of the staging area, and the same of the holding area, has a page. `None`:
    /// that cannot be read.
    pub(crate) fn is_at(&self, pagemap: &Pagemap, place: usize) -> Option<(bool, bool)> {
        let at = |area: VirtPage| is_present(pagemap, area.plus(place as u64));
        Some((at(self.private.start)?, at(VirtPage::of(self.holding))?))
    }

    /// Whether the agent died with its manager, in the middle of a command.
    pub(crate) fn died_at_work(&self) -> bool {
        self.left.get().is_some()
    }

    /// The result of the last command, if there is none in progress.
    pub(crate) fn result(&self) -> Done {
        self.left
            .get()
            .copied()
            .unwrap_or_else(|| self.commands.result())
    }

    /// Where the page at `place` of the group is that a dead manager was evicting. The agent has no
    /// command any more.
    pub(crate) fn held(&self, place: usize) -> HeldPage {
        let done = self.result();
        if !self.posted(place).0 || done.moved >> place & 1 == 0 {
            return HeldPage::NotMoved;
        }
        let mut page = [0u8; BASE_PAGE_BYTES];
        if self.read_one(done, place, &mut page) {
            HeldPage::Here
        } else {
            HeldPage::OwnerGone
        }
    }

    /// Reads one page of a group. False if it cannot be read.
    pub(crate) fn read_one(&self, done: Done, place: usize, page: &mut [u8]) -> bool {
        let staged = done.stranded >> place & 1 == 1;
        let area = if staged {
            self.private.start.address()
        } else {
            self.holding
        };
        let from = area + (place * BASE_PAGE_BYTES) as u64;
        self.memory.read(from, page).is_ok()
    }

    /// The agent's process id, which is verified; 0 before the first command, and if it has none.
    /// Cost: one load.
    #[inline]
    pub(crate) fn tid(&self) -> u32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Its number in the kernel's messages: that of its own pid namespace. As [`Agent::tid`].
    #[inline]
    pub(crate) fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// Asks the kernel. Cost: 9 us, the first time 150 us. For the evictor only.
    pub(crate) fn readiness(&self) -> Readiness {
        let said = self.commands.agent();
        if said == 0 {
            return Readiness::NotNow;
        }
        let Some(task) = self.task.get_or_init(|| self.find(said)) else {
            return Readiness::NotNow;
        };
        match task.status.read() {
            Ok(status) if !matches!(status.state, 'T' | 't' | 'Z' | 'X') => Readiness::Ready,
            _ => Readiness::NotNow,
        }
    }

    /// Process `said`, if it is another than the program's and has the same memory. The number is
    /// of the program's pid namespace.
    fn find(&self, number: u32) -> Option<Task> {
        let program = PidFd::open(self.proof.pid).ok()?;
        let said = if program.is_below() {
            self.find_below(number)?
        } else {
            number
        };
        if said == self.proof.pid {
            return None;
        }
        // Both are held first and then shown to be of the address space, so that an exec in between
        // is seen.
        let pidfd = PidFd::open(said).ok()?;
        let status = ThreadStatus::open(said, said).ok()?;
        let same = process::share_memory(self.proof.pid, said).unwrap_or(false)
            && self.proof.holds(self.holding)
            && !pidfd.has_exited();
        if !same {
            return None;
        }
        self.row.put_fd(Fds::AgentPidfd, Some(pidfd.as_fd()));
        self.row.put_fd(Fds::AgentStatus, Some(status.as_fd()));
        self.row.put(Number::Agent, said.into());
        self.tid.store(said, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        Some(Task { pidfd, status })
    }

    /// The process that has the program's memory and `number` in its own pid namespace. Cost: a
    /// system call for each process of the machine.
    fn find_below(&self, number: u32) -> Option<u32> {
        let shares = |id: &u32| process::share_memory(self.proof.pid, *id).unwrap_or(false);
        let is_it = |id: &u32| PidFd::open(*id).is_ok_and(|of| number_of(&of) == number);
        let all = procfs::processes().ok()?.into_iter();
        all.filter(shares).find(is_it)
    }

    /// The state of its process, as ps shows it; `?` if it cannot be told.
    pub(crate) fn state(&self) -> char {
        let task = self.task.get().and_then(Option::as_ref);
        task.map_or('?', |task| task.status.read().map_or('?', |of| of.state))
    }

    /// True if the agent has run and is gone: its process has ended or called exec, or someone has
    /// killed the agent. Also if none could be made.
    pub(crate) fn has_ended(&self) -> bool {
        match self.task.get() {
            Some(Some(task)) => task.pidfd.has_exited(),
            _ => self.commands.agent_is_gone(),
        }
    }

    /// Reads the moved pages of a group whose first page has place `from`. Each goes to its own
    /// place in `buffer`; one call reads a run of pages. Those `stranded` are still in the staging
    /// area. False if they cannot be read.
    /// * `done`: bit i = page i of the group.
    pub(crate) fn read_moved(
        &self,
        done: Done,
        (from, count): (usize, usize),
        buffer: &mut [u8],
    ) -> bool {
        let offset = (from * BASE_PAGE_BYTES) as u64;
        let staging = self.private.start.address() + offset;
        let further = done.moved & !done.stranded;
        self.read_places(self.holding + offset, further, count, buffer)
            && self.read_places(staging, done.moved & done.stranded, count, buffer)
    }

    fn read_places(&self, area: u64, places: u64, count: usize, buffer: &mut [u8]) -> bool {
        let mut at = 0;
        while let Some((first, end)) = next_run(places, at, count) {
            at = end;
            let from = area + (first * BASE_PAGE_BYTES) as u64;
            let bytes = &mut buffer[first * BASE_PAGE_BYTES..end * BASE_PAGE_BYTES];
            if self.memory.read(from, bytes).is_err() {
                return false;
            }
        }
        true
    }
}
