//! userfaultfd: our own bindings for every ioctl through MOVE. Each result is folded into what the
//! caller should do.
//!
//! The ranges and addresses are the client's, never this process's own managed memory. Source:
//! `ioctl_userfaultfd(2)` and `include/uapi/linux/userfaultfd.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use undercroft_base::{BASE_PAGE_BYTES, PageSize, ThreadId, VirtPage, VirtRange};

use crate::ioctl;
use crate::mapping::SharedMemory;
use crate::object_view::View;

const GROUP: u32 = 0xAA;

/// Feature bits of `UFFDIO_API`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

#[allow(missing_docs, reason = "the kernel's names: see ioctl_userfaultfd(2)")]
impl Features {
    pub const PAGEFAULT_FLAG_WP: Features = Features(1 << 0);
    pub const EVENT_FORK: Features = Features(1 << 1);
    pub const EVENT_REMAP: Features = Features(1 << 2);
    pub const EVENT_REMOVE: Features = Features(1 << 3);
    pub const MISSING_HUGETLBFS: Features = Features(1 << 4);
    pub const MISSING_SHMEM: Features = Features(1 << 5);
    pub const EVENT_UNMAP: Features = Features(1 << 6);
    pub const SIGBUS: Features = Features(1 << 7);
    pub const THREAD_ID: Features = Features(1 << 8);
    pub const MINOR_HUGETLBFS: Features = Features(1 << 9);
    pub const MINOR_SHMEM: Features = Features(1 << 10);
    pub const EXACT_ADDRESS: Features = Features(1 << 11);
    pub const WP_HUGETLBFS_SHMEM: Features = Features(1 << 12);
    pub const WP_UNPOPULATED: Features = Features(1 << 13);
    pub const POISON: Features = Features(1 << 14);
    pub const WP_ASYNC: Features = Features(1 << 15);
    pub const MOVE: Features = Features(1 << 16);
    /// The four layout events.
    pub const EVENTS: Features = Features(1 << 1 | 1 << 2 | 1 << 3 | 1 << 6);

    /// Every feature with its name in the kernel's header, without the prefix.
    pub const NAMES: [(&'static str, Features); 17] = [
        ("PAGEFAULT_FLAG_WP", Features::PAGEFAULT_FLAG_WP),
        ("EVENT_FORK", Features::EVENT_FORK),
        ("EVENT_REMAP", Features::EVENT_REMAP),
        ("EVENT_REMOVE", Features::EVENT_REMOVE),
        ("MISSING_HUGETLBFS", Features::MISSING_HUGETLBFS),
        ("MISSING_SHMEM", Features::MISSING_SHMEM),
        ("EVENT_UNMAP", Features::EVENT_UNMAP),
        ("SIGBUS", Features::SIGBUS),
        ("THREAD_ID", Features::THREAD_ID),
        ("MINOR_HUGETLBFS", Features::MINOR_HUGETLBFS),
        ("MINOR_SHMEM", Features::MINOR_SHMEM),
        ("EXACT_ADDRESS", Features::EXACT_ADDRESS),
        ("WP_HUGETLBFS_SHMEM", Features::WP_HUGETLBFS_SHMEM),
        ("WP_UNPOPULATED", Features::WP_UNPOPULATED),
        ("POISON", Features::POISON),
        ("WP_ASYNC", Features::WP_ASYNC),
        ("MOVE", Features::MOVE),
    ];

    pub fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    pub fn has(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Kinds of fault that a registration tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisterMode {
    /// Missing pages fault.
    pub missing: bool,
    /// Write-protected pages fault on write.
    pub wp: bool,
    /// Pages in the page cache but not mapped fault (shared memory).
    pub minor: bool,
}

impl RegisterMode {
    /// Missing faults only.
    pub const MISSING: RegisterMode = RegisterMode {
        missing: true,
        wp: false,
        minor: false,
    };
    /// Missing and write-protect faults.
    pub const MISSING_WP: RegisterMode = RegisterMode {
        missing: true,
        wp: true,
        minor: false,
    };
}

/// The result of an ioctl, by what to do about it. `done`: whole pages that succeeded before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UffdError {
    /// A layout event is pending. Have it read, then continue after `done`.
    #[error("the client's layout is changing")]
    LayoutChanging {
        /// Pages done.
        done: u64,
    },
    /// A page is there already. No thread was woken.
    #[error("the page is already mapped")]
    Exists {
        /// Pages done.
        done: u64,
    },
    /// No registered mapping is there (any more), or the source page is missing.
    #[error("no registered mapping at that address")]
    NotMapped {
        /// Pages done.
        done: u64,
    },
    /// The host or the client's memory group is out of memory.
    #[error("out of memory")]
    NoMemory {
        /// Pages done.
        done: u64,
    },
    /// MOVE: pinned, or shared with another process.
    #[error("the page is pinned or shared")]
    Busy {
        /// Pages done.
        done: u64,
    },
    /// The address space is gone (exit or exec).
    #[error("the client's address space is gone")]
    ClientGone,
    /// Missing permission.
    #[error("not permitted")]
    Denied,
    /// This kernel or mapping does not support the request.
    #[error("invalid request")]
    Invalid,
    /// Anything else: errno.
    #[error("unexpected error {0}")]
    Other(i32),
}

impl From<UffdError> for io::Error {
    fn from(error: UffdError) -> io::Error {
        let kind = match error {
            UffdError::Other(errno) => return io::Error::from_raw_os_error(errno),
            UffdError::Denied => io::ErrorKind::PermissionDenied,
            UffdError::Invalid => io::ErrorKind::InvalidInput,
            UffdError::NoMemory { .. } => io::ErrorKind::OutOfMemory,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

pub(crate) fn fold(error: &io::Error, done_bytes: i64) -> UffdError {
    // A negative count is an error code, never progress.
    let done = done_bytes.max(0) as u64 / BASE_PAGE_BYTES as u64;
    match error.raw_os_error().unwrap_or(0) {
        libc::EAGAIN => UffdError::LayoutChanging { done },
        libc::EEXIST => UffdError::Exists { done },
        libc::ENOENT => UffdError::NotMapped { done },
        libc::ENOMEM => UffdError::NoMemory { done },
        libc::EBUSY => UffdError::Busy { done },
        libc::ESRCH => UffdError::ClientGone,
        libc::EPERM => UffdError::Denied,
        libc::EINVAL => UffdError::Invalid,
        other => UffdError::Other(other),
    }
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Range {
    start: u64,
    len: u64,
}

impl From<VirtRange> for Range {
    fn from(range: VirtRange) -> Range {
        Range {
            start: range.start.address(),
            len: range.count().bytes().0,
        }
    }
}

#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Transfer {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
pub(crate) struct Ranged {
    pub range: Range,
    pub mode: u64,
    pub done: i64,
}

#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

const API: u64 = ioctl::read_write::<Api>(GROUP, 0x3F);
const REGISTER: u64 = ioctl::read_write::<Register>(GROUP, 0x00);
const UNREGISTER: u64 = ioctl::read::<Range>(GROUP, 0x01);
const WAKE: u64 = ioctl::read::<Range>(GROUP, 0x02);
const COPY: u64 = ioctl::read_write::<Transfer>(GROUP, 0x03);
const ZEROPAGE: u64 = ioctl::read_write::<Ranged>(GROUP, 0x04);
const MOVE: u64 = ioctl::read_write::<Transfer>(GROUP, 0x05);
const WRITEPROTECT: u64 = ioctl::read_write::<WriteProtect>(GROUP, 0x06);
pub(crate) const CONTINUE: u64 = ioctl::read_write::<Ranged>(GROUP, 0x07);
const POISON: u64 = ioctl::read_write::<Ranged>(GROUP, 0x08);
const IOC_NEW: u64 = ioctl::io(GROUP, 0x00);

pub(crate) const MODE_DONT_WAKE: u64 = 1;

/// `/dev/userfaultfd`. A process that has it open may create userfaultfds that also see kernel-mode
/// faults.
#[derive(Debug)]
pub struct UffdDevice(OwnedFd);

impl UffdDevice {
    /// Opens the device.
    ///
    /// Errors: `NotFound` (kernel before 6.1), `PermissionDenied` (mode of the node).
    pub fn open() -> io::Result<UffdDevice> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")?;
        Ok(UffdDevice(file.into()))
    }

    /// A new userfaultfd of the calling process, non-blocking, closed on exec.
    pub fn create(&self) -> io::Result<Uffd> {
        // SAFETY: IOC_NEW takes its flags by value and touches no memory of ours.
        let fd = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                IOC_NEW as _,
                libc::O_CLOEXEC | libc::O_NONBLOCK,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
        Ok(Uffd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

impl From<OwnedFd> for UffdDevice {
    fn from(fd: OwnedFd) -> UffdDevice {
        UffdDevice(fd)
    }
}

impl AsFd for UffdDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A userfaultfd. When its last descriptor closes, faults in its ranges read as zeros. So a process
/// that evicts must keep it open.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Uffd {
        Uffd(fd)
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Uffd {
    /// A userfaultfd of the calling process by system call; needs `CAP_SYS_PTRACE` or the sysctl.
    pub fn create_by_syscall() -> io::Result<Uffd> {
        // SAFETY: takes flags by value only.
        let fd =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
        Ok(Uffd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Takes a descriptor that another process made, if it is a userfaultfd. It is non-blocking
    /// from now on.
    ///
    /// Errors: `InvalidData` if it is something else.
    pub fn from_stranger(fd: OwnedFd) -> io::Result<Uffd> {
        let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        if what.as_os_str() != "anon_inode:[userfaultfd]" {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // The other process can change that back: `read_messages` does not rely on it.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Uffd(fd))
    }

    /// The handshake: works once a descriptor. Returns the features that the kernel has.
    ///
    /// Errors: `Denied` for EVENT_FORK without `CAP_SYS_PTRACE` in the caller; `Invalid` for an
    /// unknown feature or a second call.
    pub fn api(&self, features: Features) -> Result<Features, UffdError> {
        let mut api = Api {
            api: 0xAA,
            features: features.0,
            ioctls: 0,
        };
        // SAFETY: API takes `struct uffdio_api`, which holds no addresses.
        unsafe { ioctl::call(self.as_fd(), API, &mut api) }.map_err(|e| fold(&e, 0))?;
        Ok(Features(api.features))
    }

    /// Registers a range of the client's address space; works from any process.
    pub fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), UffdError> {
        let bits = u64::from(mode.missing) | u64::from(mode.wp) << 1 | u64::from(mode.minor) << 2;
        let mut register = Register {
            range: range.into(),
            mode: bits,
            ioctls: 0,
        };
        // SAFETY: REGISTER takes `struct uffdio_register`; the range is the client's and no memory
        // is written.
        unsafe { ioctl::call(self.as_fd(), REGISTER, &mut register) }.map_err(|e| fold(&e, 0))?;
        Ok(())
    }

    /// Unregisters a range: its missing pages read as zeros from now on.
    pub fn unregister(&self, range: VirtRange) -> Result<(), UffdError> {
        self.ranged(UNREGISTER, range)
    }

    /// The lowest page that the kernel accepts in a request: 0, or before Linux 6.16 what
    /// `vm.mmap_min_addr` and the kernel's configuration say. Asks by waking: a thread that waits
    /// where it is asked faults again. Cost: a system call, or 19.
    pub fn lowest_page(&self) -> VirtPage {
        let accepts = |page: u64| self.wake(VirtRange::one(VirtPage(page))).is_ok();
        let (mut low, mut accepted) = (0, 0x4_0000);
        let mut asked = 0;
        while low < accepted {
            if accepts(asked) {
                accepted = asked;
            } else {
                low = asked + 1;
            }
            asked = low.midpoint(accepted);
        }
        VirtPage(accepted)
    }

    /// Wakes the threads that wait in the range. They fault again if the page is still missing.
    pub fn wake(&self, range: VirtRange) -> Result<(), UffdError> {
        self.ranged(WAKE, range)
    }

    fn ranged(&self, request: u64, range: VirtRange) -> Result<(), UffdError> {
        let mut range = Range::from(range);
        // SAFETY: WAKE and UNREGISTER take `struct uffdio_range` and write nothing to memory of
        // this process.
        unsafe { ioctl::call(self.as_fd(), request, &mut range) }.map_err(|e| fold(&e, 0))?;
        Ok(())
    }

    /// Installs whole pages from `src` at `dst`, each atomically, and wakes the threads that wait
    /// there (unless `dont_wake`). Cost: 0.3-0.6 us a page.
    pub fn copy(&self, dst: VirtPage, src: &[u8], dont_wake: bool) -> Result<(), UffdError> {
        self.copy_as(dst, src, if dont_wake { MODE_DONT_WAKE } else { 0 })
    }

    pub(crate) fn copy_as(&self, dst: VirtPage, src: &[u8], mode: u64) -> Result<(), UffdError> {
        debug_assert!(src.len().is_multiple_of(BASE_PAGE_BYTES));
        let mut copy = Transfer {
            dst: dst.address(),
            src: src.as_ptr() as u64,
            len: src.len() as u64,
            mode,
            done: 0,
        };
        // SAFETY: COPY takes `struct uffdio_copy`. The kernel only reads `src`, which the borrow
        // keeps alive; it writes to the client's address space, which is never a managed range of
        // this process.
        let result = unsafe { ioctl::call(self.as_fd(), COPY, &mut copy) };
        result.map_err(|e| fold(&e, copy.done))?;
        Ok(())
    }

    /// Maps the shared zero page over the range.
    pub fn zeropage(&self, range: VirtRange, dont_wake: bool) -> Result<(), UffdError> {
        let mode = if dont_wake { MODE_DONT_WAKE } else { 0 };
        let mut zero = Ranged {
            range: range.into(),
            mode,
            done: 0,
        };
        // SAFETY: ZEROPAGE takes `struct uffdio_zeropage`; it maps into the client's address space
        // only.
        let result = unsafe { ioctl::call(self.as_fd(), ZEROPAGE, &mut zero) };
        result.map_err(|e| fold(&e, zero.done))?;
        Ok(())
    }

    /// Makes every access to the (missing) pages fail: SIGBUS, or EFAULT in system calls.
    pub fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        let mut argument = Ranged {
            range: range.into(),
            mode: 0,
            done: 0,
        };
        // SAFETY: POISON takes `struct uffdio_poison`; it marks the client's address space only.
        let result = unsafe { ioctl::call(self.as_fd(), POISON, &mut argument) };
        result.map_err(|e| fold(&e, argument.done))?;
        Ok(())
    }

    /// Write-protects the range, or removes the protection and wakes the threads that wait.
    pub fn write_protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        let mut argument = WriteProtect {
            range: range.into(),
            mode: u64::from(on),
        };
        // SAFETY: WRITEPROTECT takes `struct uffdio_writeprotect`; it changes page protection of
        // the client only.
        unsafe { ioctl::call(self.as_fd(), WRITEPROTECT, &mut argument) }
            .map_err(|e| fold(&e, 0))?;
        Ok(())
    }

    /// Moves pages inside the *calling* process's address space. `dst` is registered with this
    /// descriptor and missing.
    ///
    /// # Safety
    /// No Rust reference points into the source pages. They become missing there, and fault or read
    /// as zeros.
    pub unsafe fn move_pages(&self, dst: VirtPage, src: VirtRange) -> Result<(), UffdError> {
        let mut argument = Transfer {
            dst: dst.address(),
            src: src.start.address(),
            len: src.count().bytes().0,
            mode: 0,
            done: 0,
        };
        // SAFETY: MOVE takes `struct uffdio_move`; the caller promises that nothing refers to the
        // source.
        let result = unsafe { ioctl::call(self.as_fd(), MOVE, &mut argument) };
        result.map_err(|e| fold(&e, argument.done))?;
        Ok(())
    }

    /// Reads the pending messages into `buffer`; having none is not an error. Reading a layout
    /// event acknowledges it: the client continues.
    ///
    /// Errors: `OutOfMemory`-like kinds if a FORK message finds no free descriptor (EMFILE). Raise
    /// the limit and read again.
    pub fn read_messages<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        let slots = buffer.slots();
        let at = slots.as_ptr().cast_mut().cast();
        let got = self.read_without_waiting(at, size_of_val(slots));
        let count = match got {
            -1 => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => 0,
                error if error.kind() == io::ErrorKind::Interrupted => 0,
                error => return Err(error),
            },
            bytes => bytes as usize / MESSAGE_BYTES,
        };
        Ok(Messages {
            slots: &slots[..count * MESSAGE_WORDS],
            next: 0,
            view: None,
        })
    }
}

/// Whether `RWF_NOWAIT` works on userfaultfds (Linux 6.10). Cleared when it turns out not to.
static NOWAIT: AtomicBool = AtomicBool::new(true);

impl Uffd {
    /// Reads without waiting, even if the client, which has the same open file, has made it
    /// blocking.
    #[inline]
    fn read_without_waiting(&self, to: *mut libc::c_void, bytes: usize) -> isize {
        let fd = self.0.as_raw_fd();
        if NOWAIT.load(Ordering::Relaxed) {
            let into = libc::iovec {
                iov_base: to,
                iov_len: bytes,
            };
            // SAFETY: the kernel writes at most `bytes` bytes to `to`, which the caller has
            // borrowed exclusively.
            let got = unsafe { libc::preadv2(fd, &into, 1, -1, libc::RWF_NOWAIT) };
            let unknown = || {
                let error = io::Error::last_os_error().raw_os_error();
                matches!(error, Some(libc::EOPNOTSUPP | libc::EINVAL))
            };
            if got != -1 || !unknown() {
                return got;
            }
            NOWAIT.store(false, Ordering::Relaxed);
        }
        // SAFETY: as above.
        unsafe { libc::read(fd, to, bytes) }
    }
}

/// Size of a message of the kernel (`struct uffd_msg`): the event's number in the first byte, then
/// three words.
const MESSAGE_BYTES: usize = 32;
const MESSAGE_WORDS: usize = MESSAGE_BYTES / 8;

/// Words of a [`MessageBuf`].
pub const MESSAGE_BUF_WORDS: usize = MessageBuf::MESSAGES * MESSAGE_WORDS;

/// Room for 32 messages. It is reused, so reading allocates nothing. All zero while no message in
/// it waits.
pub struct MessageBuf(Room);

enum Room {
    Own(Box<[AtomicU64; MESSAGE_BUF_WORDS]>),
    /// Memory that outlives this process, from this word on.
    Shared(Arc<SharedMemory>, usize),
}

impl MessageBuf {
    /// How many messages one read brings at most.
    pub const MESSAGES: usize = 32;

    /// Room in shared memory, from word `at` on: [`MESSAGE_BUF_WORDS`] words. A message that was
    /// read stays there if this process dies, until it is cleared. Nothing else writes there.
    pub fn over(memory: Arc<SharedMemory>, at: usize) -> MessageBuf {
        assert!(at + MESSAGE_BUF_WORDS <= memory.words().len());
        MessageBuf(Room::Shared(memory, at))
    }

    fn slots(&self) -> &[AtomicU64] {
        match &self.0 {
            Room::Own(words) => &words[..],
            Room::Shared(memory, at) => &memory.words()[*at..*at + MESSAGE_BUF_WORDS],
        }
    }

    /// True if no message in it waits.
    pub fn is_clear(&self) -> bool {
        let mut slots = self.slots().iter().step_by(MESSAGE_WORDS);
        slots.all(|word| word.load(Ordering::Relaxed) == 0)
    }
}

impl Default for MessageBuf {
    fn default() -> MessageBuf {
        let words = [const { AtomicU64::new(0) }; MESSAGE_BUF_WORDS];
        MessageBuf(Room::Own(Box::new(words)))
    }
}

/// The message at `slot`, of which the event's number is cleared if it is a fault. `None`: there is
/// none, or it is of a kind that is not asked for. The descriptor of a FORK is returned as its
/// number: `child` makes it the message's own.
fn message(
    slot: &[AtomicU64],
    view: Option<View>,
    child: impl FnOnce(i32) -> Option<Uffd>,
) -> Option<Message> {
    let word = |at: usize| slot[at].load(Ordering::Relaxed);
    let [a, b, c] = [word(1), word(2), word(3)];
    Some(match word(0) as u8 {
        0x12 => {
            slot[0].store(0, Ordering::Relaxed);
            Message::Fault {
                page: view.map_or(Some(VirtPage::of(b)), |view| view.page(VirtPage::of(b)))?,
                write: a & 1 != 0,
                wp: a & 2 != 0 && view.is_none(),
                minor: a & 4 != 0,
                thread: ThreadId(c as u32),
            }
        }
        0x13 => Message::Fork {
            child: child(a as u32 as i32)?,
        },
        0x14 => Message::Remap {
            from: VirtRange::of_addresses(a, a + c),
            to: VirtPage::of(b),
        },
        0x15 => Message::Remove(VirtRange::of_addresses(a, b)),
        0x16 => Message::Unmap(VirtRange::of_addresses(a, b)),
        _ => return None,
    })
}

/// A layout event that a dead process had read, and had not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Which of the messages of its buffer.
    pub slot: usize,
    /// How far the dead process had come: [`Receipt::begin`].
    pub phase: u8,
    /// FORK: the number of the descriptor in the table of the process that has read it.
    pub child: Option<i32>,
    /// FORK: the second number of the descriptor, and for which generation it is true
    /// ([`renumber_fork`]).
    pub renumbered: (u8, i32),
}

/// The layout events that are left in `words`, the memory of a [`MessageBuf`]. Faults that were
/// read are cleared: their threads are woken, and fault again.
pub fn leftovers(words: &[AtomicU64]) -> Vec<Leftover> {
    let mut found = Vec::new();
    for (slot, words) in words.chunks_exact(MESSAGE_WORDS).enumerate() {
        let word = words[0].load(Ordering::Relaxed);
        match word as u8 {
            0 => {}
            event @ 0x13..=0x16 => {
                let numbers = words[1].load(Ordering::Relaxed);
                found.push(Leftover {
                    slot,
                    phase: (word >> 8) as u8,
                    child: (event == 0x13).then_some(numbers as u32 as i32),
                    renumbered: ((word >> 16) as u8, (numbers >> 32) as u32 as i32),
                });
            }
            _ => words[0].store(0, Ordering::Relaxed),
        }
    }
    found
}

/// The message of a [`Leftover`] in `words`. `child`: the descriptor of a FORK, which this process
/// has now.
pub fn leftover_message(
    words: &[AtomicU64],
    left: Leftover,
    child: Option<Uffd>,
) -> Option<Message> {
    let at = left.slot * MESSAGE_WORDS;
    message(words.get(at..at + MESSAGE_WORDS)?, None, |_| child)
}

/// Writes down that the descriptor of a FORK has number `child` for `generation`, which is not 0.
/// Its first number stays. One of the kernel's own has generation 0.
pub fn renumber_fork(words: &[AtomicU64], left: Leftover, generation: u8, child: i32) {
    let words = &words[left.slot * MESSAGE_WORDS..][..2];
    let number = words[1].load(Ordering::Relaxed) as u32;
    let both = u64::from(number) | u64::from(child as u32) << 32;
    words[1].store(both, Ordering::Relaxed);
    let word = words[0].load(Ordering::Relaxed) & !0xff_0000;
    words[0].store(word | u64::from(generation) << 16, Ordering::Release);
}

/// The record of a layout event while it is applied, where its message was read.
#[derive(Clone, Debug, Default)]
pub struct Receipt(Option<(Arc<SharedMemory>, usize)>);

impl Receipt {
    /// For the message at `slot` of a buffer over `memory`, from word `at` on.
    pub fn over(memory: Arc<SharedMemory>, at: usize, slot: usize) -> Receipt {
        Receipt(Some((memory, at + slot * MESSAGE_WORDS)))
    }

    /// The event is being applied, and has come as far as `phase`, which is not 0.
    pub fn begin(&self, phase: u8) {
        if let Some((memory, at)) = &self.0 {
            let word = &memory.words()[*at];
            let rest = word.load(Ordering::Relaxed) & !0xff00;
            word.store(rest | u64::from(phase) << 8, Ordering::Release);
        }
    }

    /// The event is applied.
    pub fn done(self) {
        if let Some((memory, at)) = &self.0 {
            memory.words()[*at].store(0, Ordering::Release);
        }
    }
}

/// A message from the kernel.
#[derive(Debug)]
pub enum Message {
    /// A thread faulted and waits.
    Fault {
        /// The address, page-aligned.
        page: VirtPage,
        /// The access was a write.
        write: bool,
        /// The page is there but write-protected.
        wp: bool,
        /// The page is in the page cache but not mapped.
        minor: bool,
        /// The faulting thread, if THREAD_ID was asked for.
        thread: ThreadId,
    },
    /// The client forked; the child's userfaultfd.
    Fork {
        /// Owns the descriptor.
        child: Uffd,
    },
    /// A mapping moved.
    Remap {
        /// Where it was.
        from: VirtRange,
        /// Where it is.
        to: VirtPage,
    },
    /// Contents dropped.
    Remove(VirtRange),
    /// Unmapped.
    Unmap(VirtRange),
}

/// The messages of one read. Each is yielded once. A FORK's descriptor is owned by its message;
/// messages that were not taken are drained on drop, so that none leaks.
pub struct Messages<'a> {
    slots: &'a [AtomicU64],
    next: usize,
    view: Option<View>,
}

impl<'a> Messages<'a> {
    /// The faults at `view`, where a memory object is mapped, by its pages of this size. Other
    /// messages are left out. A write to a protected page is a fault like any other.
    pub fn of_object(mut self, view: VirtRange, size: PageSize) -> Messages<'a> {
        self.view = Some(View(view, size));
        self
    }

    /// How many are left.
    pub fn len(&self) -> usize {
        self.slots.len() / MESSAGE_WORDS - self.next
    }

    /// True when none is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The place in its buffer of the message that was yielded last.
    pub fn slot(&self) -> usize {
        self.next.saturating_sub(1)
    }
}

impl Iterator for Messages<'_> {
    type Item = Message;

    fn next(&mut self) -> Option<Message> {
        loop {
            let at = self.next * MESSAGE_WORDS;
            let slot = self.slots.get(at..at + MESSAGE_WORDS)?;
            self.next += 1;
            // SAFETY: a FORK message gives the reader a new descriptor, and each message is
            // yielded once.
            let child = |number| Some(Uffd(unsafe { OwnedFd::from_raw_fd(number) }));
            if let Some(message) = message(slot, self.view, child) {
                return Some(message);
            }
        }
    }
}

impl Drop for Messages<'_> {
    fn drop(&mut self) {
        for _ in self.by_ref() {}
    }
}
