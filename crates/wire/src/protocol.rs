//! The messages of the handshake between shim and manager, and the command page that they share.
//!
//! Compiled into both sides, `no_std`: only `core`, only plain data. There is one handshake at
//! program start and one in each fork child:
//! ```text
//! shim -> manager   Hello { kind, nonce }
//! manager -> shim   Welcome + [uffd device, command page]
//! shim -> manager   Ready { addresses, agent } + [uffd of the process (unless it has one),
//!                                                  uffd of the holding area]
//! manager -> shim   Go + [uffd of the process]
//! ```
//! The shim makes both userfaultfds, that of the holding area without events; a fork child makes
//! only the second, because the FORK event brought the first. Only the manager needs the right to
//! enable events. It registers both areas, proves that userfaultfds, areas and agent are of one
//! address space, and hands the process's userfaultfd back for the agent. Later it registers
//! mappings from its own process. It believes nothing that the client says of itself
//! (docs/security.md).
//!
//! A command is about places `from..count` of both areas: all of them, or one half ([`places_of`]).
//! It changes nothing at the other places, where pages of the command before may be.
//!
//! A page goes into the staging area by the process's userfaultfd: the kernel refuses that while a
//! layout event of the process is unread. It goes on into the holding area by the other one, which
//! raises no event. A *stranded* page is in use in the staging area and cannot go on: the manager
//! reads it there, and no command uses its place until the place is free.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::command::Word;

/// First word of every message.
pub const MAGIC: u32 = 0x5543_0004;

/// Pages of the staging area, and so the most pages of one command.
pub const STAGING_PAGES: usize = 64;

/// Environment variable with the path of the manager's socket.
pub const SOCKET_VARIABLE: &str = "UNDERCROFT_SOCKET";

/// File name by which a program loads the shim. AddressSanitizer as a shared library starts only if
/// the name of the first library contains `libasan`. Linked statically, it starts only if no
/// mapping's name does: so this is a link.
pub const SHIM_LINK: &str = "libundercroft_shim-beside-libasan.so";

/// Directory, below that of the run, with the shim for 64-bit loaders and a stub for 32-bit ones:
/// each puts the name of its own platform here.
pub const BY_PLATFORM: &str = "$PLATFORM";

/// A program that has just started.
pub const KIND_START: u32 = 0;
/// A fork child.
pub const KIND_FORK: u32 = 1;

/// A process that is managed asks for a range to be given up.
pub const KIND_GIVE_WAY: u32 = 2;

/// A process that is managed maps memory of the run's machine.
pub const KIND_VIEW: u32 = 3;

/// A process of the same user wants to map it, and asks for its descriptor. A message as [`Hello`].
pub const KIND_JOIN: u32 = 4;

/// A process that is managed sends a descriptor of the machine's memory by a socket. A message as
/// [`Hello`], with that socket. `refused`: the process at its other end is not of the run.
pub const KIND_PASS_ON: u32 = 5;

/// Another value of [`Answer::refused`], to [`KIND_VIEW`]: the range is not registered, because the
/// process is the machine's monitor, or none is known yet; nothing has left the memory then.
pub const NO_MACHINE_YET: u32 = 2;

/// Environment variable of processes that may map the memory only as views of a machine.
pub const VIEW_VARIABLE: &str = "UNDERCROFT_VIEW";

/// Asks the manager to register what the program maps of a machine's memory, before the program can
/// touch it. The only message of its connection. The range is mapped without access meanwhile.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`KIND_VIEW`].
    pub kind: u32,
    /// First address.
    pub start: u64,
    /// End.
    pub end: u64,
}

/// Asks the manager to give a range up, because the program registers it with a userfaultfd of its
/// own. The only message of its connection. The manager's [`Answer`] comes when the range has all
/// its pages in memory and is registered no more, or `refused`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GiveWay {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`KIND_GIVE_WAY`].
    pub kind: u32,
    /// First address.
    pub start: u64,
    /// End.
    pub end: u64,
}

/// First message of the shim.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u32,
    /// `KIND_*`.
    pub kind: u32,
    /// Fork child: what the beacon page held. 0 if the parent was not managed: the child has no
    /// userfaultfd yet.
    pub nonce: u64,
}

/// The manager's answers: Welcome and Go.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// [`MAGIC`].
    pub magic: u32,
    /// 0, or the program stays unmanaged. Other values: [`NO_MACHINE_YET`].
    pub refused: u32,
}

/// The memory that the shim has set up. All addresses are the client's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// [`MAGIC`].
    pub magic: u32,
    /// Always 0.
    pub reserved: u32,
    /// Staging area of [`STAGING_PAGES`] pages, which the manager registers with the process's
    /// userfaultfd. The holding area follows, as large; then the agent's stack up to `private_end`.
    pub staging: u64,
    /// End of the shim's mapping that starts at `staging`.
    pub private_end: u64,
    /// A page that only fork children touch.
    pub beacon: u64,
}

/// Words of a set of CPUs: for as many CPUs as the kernel can have (`CONFIG_NR_CPUS` of 8192).
pub const CPU_WORDS: usize = 128;

/// Move the listed pages into the staging area.
pub const OP_MOVE: u32 = 1;

/// Pages of one half of the staging area.
pub const HALF_PAGES: usize = STAGING_PAGES / 2;

/// The places that a command may change that lists `from..count`, as bits: a half, or all.
pub const fn places_of(from: usize, count: usize) -> u64 {
    let low = u64::MAX >> HALF_PAGES;
    match (from < HALF_PAGES, count > HALF_PAGES) {
        (true, false) => low,
        (false, true) => !low,
        _ => u64::MAX,
    }
}

/// The first run of set bits of `mask` within `from..count`, as (first bit, one past the last).
/// `count` is at most 64.
pub fn next_run(mask: u64, from: usize, count: usize) -> Option<(usize, usize)> {
    let set = |at: &usize| mask >> *at & 1 == 1;
    let first = (from..count).find(set)?;
    let end = (first..count).find(|at| !set(at)).unwrap_or(count);
    Some((first, end))
}

/// The program ends: its agent ends first.
pub const QUIT: u32 = 1;

/// Another process has the memory, perhaps a vfork child: the agent stays when the program ends.
pub const STAY: u32 = 2;

/// The page shared by one agent and the manager. All zero at first. `command.rs` has what each side
/// does to it, and in which order.
///
/// `seq`/`done`: a command is posted by writing `op`, `count` and `pages`, then increasing `seq`
/// and waking its waiter. It is done when `done == seq`. `busy`/`reader_wants` keep the agent from
/// moving pages while a layout event is acknowledged: each side sets its word, then reads the
/// other's.
#[repr(C)]
pub struct CommandPage {
    /// Number of the last command posted; futex.
    pub seq: AtomicU32,
    /// Number of the last command done; futex.
    pub done: AtomicU32,
    /// Process id of the agent. It is cleared when the agent ends, and its waiters are woken
    /// (futex): by the kernel if another process uses the memory, by the agent itself otherwise.
    pub agent: AtomicU32,
    /// The agent is inside a MOVE; futex.
    pub busy: AtomicU32,
    /// The manager is about to read messages, or reads them. `READER_SLEEPS`: it sleeps until
    /// `busy` is cleared.
    pub reader_wants: AtomicU32,
    /// Number of a command that must stop.
    pub cancelled: AtomicU32,
    /// `OP_*`.
    pub op: AtomicU32,
    /// The end of the listed places.
    pub count: AtomicU32,
    /// Result: bit i = page i was moved (dropped, touched). A command leaves the bits of other
    /// places as they are, here and in the other results.
    pub moved: AtomicU64,
    /// Result: bit i = page i is pinned or shared.
    pub refused: AtomicU64,
    /// Addresses, ascending; 0 = skip this place.
    pub pages: [AtomicU64; STAGING_PAGES],
    /// Result: bit i = page i was moved to the staging area, but not on into the holding area,
    /// because a thread reads it in the staging area. It is no longer written.
    pub stranded: AtomicU64,
    /// How many threads of the program are inside fork(). The manager then starts no command.
    pub forking: AtomicU32,
    /// A command is posted, or its pages are in the staging area and not yet read. fork() waits: a
    /// child must not depend on a staging area that ends with its parent.
    pub in_hand: AtomicU32,
    /// The agent has its own descriptor table; futex. The thread that starts the agent waits for
    /// it. Also set if no agent could be made: until then one may still come.
    pub ready: AtomicU32,
    /// The thread that the manager has bound to one CPU for the moment; 0: none. The program clears
    /// it when it chooses CPUs itself.
    pub bound: AtomicU32,
    /// The CPUs that thread may use, as a set of bits.
    pub cpus: [AtomicU64; CPU_WORDS],
    /// The staging area has zeros that the manager mapped where a thread of the program read, or
    /// pages that did not move on. Bit 0: in the low half; bit 1: in the high one. The agent clears
    /// them, and the bit, before its next command there.
    pub strays: AtomicU32,
    /// 0, [`QUIT`] or [`STAY`]; futex.
    pub quit: AtomicU32,
    /// The first listed place.
    pub from: AtomicU32,
    /// The shim is making the agent. What the process has started until then is the shim's own.
    pub starting: AtomicU32,
    /// Taken by a thread that gives memory back: 1; 2: others wait for it. Futex.
    pub gives: AtomicU32,
    /// Number of the last range that was told to be given back; futex.
    pub told: AtomicU32,
    /// Number of the last such range that the manager has acted on; futex.
    pub heard: AtomicU32,
    /// Whether the manager hears of guest memory that is given back. It is set before a page of
    /// that memory leaves.
    pub listens: AtomicU32,
    /// Bytes of the guest memory that are given back: from, and up to.
    pub given: [AtomicU64; 2],
    /// The guest memory: device and inode, where it is mapped, and its bytes.
    pub guest: [AtomicU64; 4],
    /// The memory of the run's machine: device and inode; 0: the run has none. Written before the
    /// program begins.
    pub machine: [AtomicU64; 2],
}

const _: () = assert!(size_of::<CommandPage>() <= 4096, "it is mapped as one page");

impl CommandPage {
    /// The byte offset of the word of that name.
    pub const fn offset(word: Word) -> usize {
        match word {
            Word::Seq => offset_of!(CommandPage, seq),
            Word::Done => offset_of!(CommandPage, done),
            Word::Agent => offset_of!(CommandPage, agent),
            Word::Busy => offset_of!(CommandPage, busy),
            Word::ReaderWants => offset_of!(CommandPage, reader_wants),
            Word::Cancelled => offset_of!(CommandPage, cancelled),
            Word::Forking => offset_of!(CommandPage, forking),
            Word::InHand => offset_of!(CommandPage, in_hand),
            Word::Ready => offset_of!(CommandPage, ready),
            Word::Told => offset_of!(CommandPage, told),
            Word::Heard => offset_of!(CommandPage, heard),
        }
    }
}
