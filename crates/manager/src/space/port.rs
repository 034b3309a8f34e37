//! The port of a client's memory: the calls that discovery, the fault path and the eviction path
//! make. A kind of memory is one file beside this one: `anonymous.rs` is that of processes,
//! `guest.rs` that of virtual machines, `model.rs` that of tests.
//!
//! The pages of all calls and messages are those of a *memory object*. For a process that is its
//! address space, so nothing is translated. Memory that is mapped at several addresses, or in
//! several processes, translates in its [`Space::events`] on the way in and in the other calls on
//! the way out, and nowhere else.
//!
//! [`WayOut`] is how pages leave it. For processes that is their agent (`agent.rs`).
//!
//! Other memory that processes share than a guest's (`views.rs`) is not prepared: an entry belongs
//! to one space and page, so a page of two spaces would have two. It needs one entry for both, a
//! count of its users, and another way out.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_sys::uffd::{MessageBuf, Messages, RegisterMode, UffdError};

/// When the threads that wait for a page are woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// By its installation.
    Now,
    /// When the caller calls [`Space::wake`].
    Later,
}

/// The memory of one address space. Its descriptor is readable while messages are pending.
///
/// Nine methods that act, and four questions. No question changes anything in the address space,
/// whatever the program has mapped, and wherever.
///
/// In an error, `done` is the number of pages that were installed from the start of the range.
pub(crate) trait Space: AsFd + Send + Sync {
    /// From now on, [`Space::events`] reports faults on the mappings in the range.
    fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), UffdError>;

    /// No fault in the range is reported from now on. Missing pages read as the mapping has them.
    fn unregister(&self, range: VirtRange) -> Result<(), UffdError>;

    /// Reads pending messages. A layout event that was read is acknowledged: the client goes on.
    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>>;

    /// Installs whole pages from `bytes` at `at`, where nothing is, each atomically.
    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError>;

    /// As [`Space::install`], woken later. The tier keeps the copy that the bytes are of, and no
    /// thread is about to write to them. Memory that can tell whether one did says so when the
    /// pages leave ([`Taken::kept`]).
    fn install_unwritten(&self, at: VirtPage, bytes: &[u8]) -> Result<(), UffdError> {
        self.install(at, bytes, Wake::Later)
    }

    /// Maps the shared zero page over the range, where nothing is.
    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError>;

    /// Wakes the threads that wait in the range. They fault again where a page is still missing.
    fn wake(&self, range: VirtRange);

    /// Write-protects the range, or removes the protection and wakes the threads that wait.
    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError>;

    /// Makes every access to the missing pages of the range fail from now on.
    fn poison(&self, range: VirtRange) -> Result<(), UffdError>;

    /// True when the address space no longer exists (exit or exec).
    fn is_gone(&self) -> bool;

    /// The lowest page that can be registered, and that threads can wait for.
    fn lowest(&self) -> VirtPage;

    /// True when a layout event waits to be read. Asks with a change of protection of no page: it
    /// is refused, for one reason or the other, before the kernel takes the lock of the address
    /// space. Threads of the program may hold that lock for long.
    fn is_event_pending(&self) -> bool {
        let none = VirtRange::new(VirtPage(0), VirtPage(0));
        let asked = self.protect(none, false);
        matches!(asked, Err(UffdError::LayoutChanging { .. }))
    }

    /// The memory's own way out; `None`: pages are taken out by the process's agent.
    fn way_out(&self) -> Option<&dyn WayOut> {
        None
    }
}

/// How the pages of an address space leave it, up to 64 at a time: [`WayOut::begin`] ->
/// [`WayOut::wait`] -> [`WayOut::take`], and [`WayOut::resume`] as long as it is late ->
/// [`WayOut::stay`] for pages that are put back -> [`WayOut::leaving`] and [`WayOut::left`] for
/// those that are published elsewhere -> [`WayOut::end`].
///
/// Every page of a group that was taken is either put back, given up or left, before `end`. A
/// second group may begin before the first has ended, once that is no more waited for.
pub(crate) trait WayOut {
    /// Claims the way for one group, and asks for its pages: they may leave from here on. Fork() in
    /// the program waits, until the end.
    fn begin(&self, group: &[EvictItem]) -> Begun;

    /// Waits until it is known which pages have left.
    fn wait(&self, asked: Asked) -> Answered;

    /// Takes those pages, each to its place in `buffer`. A page that was taken is only there, until
    /// it is put back.
    fn take(&self, answered: Answered, group: &[EvictItem], buffer: &mut [u8]) -> Took;

    /// Goes on with a group that was late.
    ///
    /// * `age`: for how long.
    fn resume(&self, late: Late, age: Duration, group: &[EvictItem], buffer: &mut [u8]) -> Took;

    /// Puts one page back, and wakes the threads that wait for it. The caller holds the layout
    /// lock.
    fn stay(&self, page: VirtPage, bytes: &[u8]) -> Result<(), UffdError>;

    /// These pages of the group, one bit each, are about to be published. They may be readable
    /// where they were until [`WayOut::left`], and none of them is installed before.
    fn leaving(&self, _: &[EvictItem], _: u64) {}

    /// These pages of the group are published: they do not come back. They are those of
    /// [`WayOut::leaving`], but for pages that the program has dropped meanwhile.
    fn left(&self, group: &[EvictItem], pages: u64);

    /// The group is finished: fork() in the program goes on.
    fn end(&self, group: &[EvictItem]);
}

/// The answer of [`WayOut::begin`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Begun {
    Yes(Asked),
    /// The process does not run now: it is stopped, or has just started.
    NotNow,
    /// The process is inside fork(), or ends, or its layout events are not applied yet.
    No,
}

/// A group that was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Asked {
    /// The number of the command.
    pub seq: u32,
    /// When it was given, if there is one.
    pub at: Option<Instant>,
    /// Pages that share their frames with relatives.
    pub sharing: u64,
    /// Pages that are as the copies that tiers keep of them.
    pub kept: u64,
    /// Pages that stay, because a program has locked them.
    pub locked: u64,
}

/// The state of a group that was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answered {
    /// The memory knows which pages have left.
    Done(Asked),
    /// The memory does not know it yet.
    Late(Late),
}

/// The fate of a group, as sets of places in it.
#[derive(Debug)]
pub(crate) enum Took {
    Pages(Taken),
    /// The answer is not there yet. The group waits, and is resumed.
    Later(Late),
    /// Pages may have been moved, and can never be read.
    Lost(u64),
}

/// Pages that were taken. Those in neither set may be where they were.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// They are out of the address space.
    pub moved: u64,
    /// The kernel refused to move them.
    pub refused: u64,
    /// Of those that are out: they are as the copies that tiers keep, and are not in the buffer.
    pub kept: u64,
    pub read: Read,
}

/// Whether the bytes of the moved pages are in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Yes,
    /// They cannot be read now: the process ends.
    NotNow,
    Never,
}

/// Why a group is late.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Late {
    /// A command was given up, and has no answer.
    Answer(GivenUp),
    /// The process ends. These pages of the group may have been moved out, and cannot be read.
    End(u64),
    /// The agent has ended, so the kernel frees the memory of the process. The pages are as for
    /// `End`; those of the second set shared their frames with relatives, which is not noted yet.
    Gone(u64, u64),
}

/// A command without an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GivenUp {
    pub seq: u32,
    /// Pages that shared their frames with relatives.
    pub sharing: u64,
    /// CPU time that the agent had used.
    pub agent_time: Option<Duration>,
    /// When the CPU time was read last, by `age`.
    pub asked: Duration,
}
