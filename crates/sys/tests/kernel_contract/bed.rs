//! The tools of the facts: raw memory, a userfaultfd whose messages are read, threads with
//! time-outs, children that always end.

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use undercroft_base::{BASE_PAGE_BYTES, ThreadId, VirtPage, VirtRange};
use undercroft_sys::fdpass;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::uffd::{
    Features, Message, MessageBuf, RegisterMode, Uffd, UffdDevice, UffdError,
};

pub(crate) const PAGE: usize = BASE_PAGE_BYTES;
/// Long enough for anything that happens at all.
pub(crate) const SOON: u64 = 1500;
/// Long enough to believe that nothing happens.
pub(crate) const QUIET: u64 = 60;
pub(crate) const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Raw pages of this process. Never unmapped: the process ends soon. Only volatile accesses, no
/// references.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Area {
    pub address: usize,
    pub pages: usize,
}

impl Area {
    pub(crate) fn mapped(pages: usize, prot: i32, flags: i32, fd: i32) -> Area {
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, fd, 0) };
        assert_ne!(
            start,
            libc::MAP_FAILED,
            "mmap: {}",
            std::io::Error::last_os_error()
        );
        Area {
            address: start as usize,
            pages,
        }
    }

    /// Private anonymous pages, not touched.
    pub(crate) fn new(pages: usize) -> Area {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let area = Area::mapped(pages, RW, flags, -1);
        area.advise(libc::MADV_NOHUGEPAGE);
        area
    }

    /// Private pages, page `i` filled with `10 + i`.
    pub(crate) fn filled(pages: usize) -> Area {
        let area = Area::new(pages);
        (0..pages).for_each(|page| area.fill(page, 10 + page as u8));
        area
    }

    /// A shared mapping of a memfd.
    pub(crate) fn shared(memory: &SharedMemory) -> Area {
        let fd = memory.as_fd().as_raw_fd();
        Area::mapped(memory.len() / PAGE, RW, libc::MAP_SHARED, fd)
    }

    /// `count` pages from page `first`.
    pub(crate) fn part(self, first: usize, count: usize) -> Area {
        assert!(first + count <= self.pages);
        Area {
            address: self.address + first * PAGE,
            pages: count,
        }
    }

    pub(crate) fn at(self, page: usize) -> VirtPage {
        VirtPage::of((self.address + page * PAGE) as u64)
    }

    pub(crate) fn range(self) -> VirtRange {
        VirtRange::new(self.at(0), self.at(self.pages))
    }

    pub(crate) fn pointer(self) -> *mut libc::c_void {
        self.address as *mut _
    }

    pub(crate) fn bytes(self) -> usize {
        self.pages * PAGE
    }

    pub(crate) fn fill(self, page: usize, byte: u8) {
        // SAFETY: mapped memory of this process that no Rust reference covers.
        unsafe { std::ptr::write_bytes((self.address + page * PAGE) as *mut u8, byte, PAGE) };
    }

    pub(crate) fn read(self, page: usize) -> u8 {
        // SAFETY: as in `fill`; it may wait for a userfaultfd, which is what the caller wants to
        // see.
        unsafe { ((self.address + page * PAGE) as *const u8).read_volatile() }
    }

    pub(crate) fn write(self, page: usize, byte: u8) {
        // SAFETY: as in `read`.
        unsafe { ((self.address + page * PAGE) as *mut u8).write_volatile(byte) };
    }

    /// madvise of the whole area: 0 or errno.
    pub(crate) fn advise(self, advice: i32) -> i32 {
        // SAFETY: memory of this process that no Rust reference covers; its contents may go.
        errno(unsafe { libc::madvise(self.pointer(), self.bytes(), advice) }.into())
    }

    pub(crate) fn protect(self, prot: i32) {
        // SAFETY: as above; no reference is invalidated.
        let result = unsafe { libc::mprotect(self.pointer(), self.bytes(), prot) };
        assert_eq!(errno(result.into()), 0, "mprotect");
    }

    pub(crate) fn unmap(self) {
        // SAFETY: as above; nothing uses the area afterwards.
        let result = unsafe { libc::munmap(self.pointer(), self.bytes()) };
        assert_eq!(errno(result.into()), 0, "munmap");
    }

    /// mremap to `pages` with flags, to `target` with MREMAP_FIXED or DONTUNMAP.
    pub(crate) fn remap(self, pages: usize, flags: i32, target: usize) -> Area {
        // SAFETY: as above; the target is an area of ours or chosen by the kernel.
        let start =
            unsafe { libc::mremap(self.pointer(), self.bytes(), pages * PAGE, flags, target) };
        assert_ne!(
            start,
            libc::MAP_FAILED,
            "mremap: {}",
            std::io::Error::last_os_error()
        );
        Area {
            address: start as usize,
            pages,
        }
    }
}

/// 0, or errno if a call returned -1.
pub(crate) fn errno(result: i64) -> i32 {
    match result {
        -1 => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
        _ => 0,
    }
}

/// A page fault, as its message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub page: VirtPage,
    pub write: bool,
    pub wp: bool,
    pub thread: ThreadId,
}

/// A userfaultfd and the messages read from it.
pub(crate) struct Ear {
    uffd: Uffd,
    heard: VecDeque<Message>,
    buffer: MessageBuf,
}

impl Deref for Ear {
    type Target = Uffd;

    fn deref(&self) -> &Uffd {
        &self.uffd
    }
}

impl Ear {
    pub(crate) fn of(uffd: Uffd) -> Ear {
        Ear {
            uffd,
            heard: VecDeque::with_capacity(64),
            buffer: MessageBuf::default(),
        }
    }

    /// A new userfaultfd of this process, its handshake done.
    pub(crate) fn new(features: Features) -> Ear {
        let uffd = UffdDevice::open().and_then(|device| device.create());
        let uffd = match uffd {
            Ok(uffd) => uffd,
            Err(error) => crate::skip(&format!("no userfaultfd here: {error}")),
        };
        uffd.api(features).unwrap();
        Ear::of(uffd)
    }

    /// An ear that has all four events and a registered area of `pages` present pages (`10 + i`).
    pub(crate) fn with_area(features: Features, pages: usize) -> (Ear, Area) {
        let (ear, area) = (Ear::new(features), Area::filled(pages));
        ear.register(area.range(), RegisterMode::MISSING).unwrap();
        (ear, area)
    }

    /// The next message within `ms`.
    pub(crate) fn hear(&mut self, ms: u64) -> Option<Message> {
        if self.heard.is_empty() && poll_in(self.uffd.as_fd(), ms) != 0 {
            let messages = self.uffd.read_messages(&mut self.buffer).unwrap();
            self.heard.extend(messages);
        }
        self.heard.pop_front()
    }

    pub(crate) fn fault(&mut self) -> Fault {
        match self.hear(SOON) {
            Some(Message::Fault {
                page,
                write,
                wp,
                thread,
                ..
            }) => Fault {
                page,
                write,
                wp,
                thread,
            },
            other => panic!("expected a fault, heard {other:?}"),
        }
    }

    pub(crate) fn fork(&mut self) -> Ear {
        match self.hear(SOON) {
            Some(Message::Fork { child }) => Ear::of(child),
            other => panic!("expected a fork, heard {other:?}"),
        }
    }

    pub(crate) fn silent(&mut self) {
        let heard = self.hear(QUIET);
        assert!(heard.is_none(), "expected silence, heard {heard:?}");
    }

    /// Installs a page of `byte` and wakes the threads that wait.
    pub(crate) fn serve(&self, page: VirtPage, byte: u8) {
        self.uffd.copy(page, &[byte; PAGE], false).unwrap();
    }

    /// Serves until the page is there, whatever happens to the layout meanwhile.
    pub(crate) fn try_serve(&self, page: VirtPage, byte: u8) -> Result<(), UffdError> {
        self.uffd.copy(page, &[byte; PAGE], false)
    }
}

/// The events of poll(2) within `ms`; 0 if there are none.
pub(crate) fn poll_in(fd: BorrowedFd<'_>, ms: u64) -> i16 {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live structure.
    unsafe { libc::poll(&mut poll, 1, ms as i32) };
    poll.revents
}

/// The work of another thread of this process.
pub(crate) struct Doing<T> {
    result: Receiver<T>,
    pub thread: u32,
}

impl<T> Doing<T> {
    /// Its result, if it ends within `ms`.
    pub(crate) fn within(&self, ms: u64) -> Option<T> {
        self.result.recv_timeout(Duration::from_millis(ms)).ok()
    }

    pub(crate) fn done(&self) -> T {
        self.within(SOON).expect("the thread is still waiting")
    }

    /// Asserts that it has not ended: it waits for the kernel.
    pub(crate) fn blocked(&self) {
        assert!(self.within(QUIET).is_none(), "the thread should be waiting");
    }
}

/// Starts a thread. It is never joined; its result comes by a channel.
pub(crate) fn doing<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Doing<T> {
    let (send, result) = channel();
    let (send_id, id) = channel();
    std::thread::spawn(move || {
        let _ = send_id.send(undercroft_sys::process::thread_id());
        let _ = send.send(work());
    });
    let thread = id.recv().unwrap();
    Doing { result, thread }
}

/// A child process with a socket to it; killed and reaped on drop.
pub(crate) struct Child {
    pub pid: u32,
    socket: UnixStream,
    reaped: bool,
}

/// The child's end.
pub(crate) struct Parent(UnixStream);

/// Forks; the child runs `work` and exits with what it returns. Called by a thread only if the
/// child's work needs no lock.
pub(crate) fn child(work: impl FnOnce(&Parent) -> i32) -> Child {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let timeout = Some(Duration::from_millis(6 * SOON));
    ours.set_read_timeout(timeout).unwrap();
    // SAFETY: the facts fork while their other threads hold no lock that the child's work needs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: numbers only: the child goes when its parent's thread goes.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        drop(ours);
        let status = work(&Parent(theirs));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(status) };
    }
    Child {
        pid: pid as u32,
        socket: ours,
        reaped: false,
    }
}

impl Parent {
    /// Sends descriptors and waits for the answer.
    pub(crate) fn hand_over(&self, fds: &[BorrowedFd<'_>]) {
        fdpass::send(self.0.as_fd(), b"f", fds).unwrap();
        self.wait();
    }

    pub(crate) fn say(&self, byte: u8) {
        let _ = fdpass::send(self.0.as_fd(), &[byte], &[]);
    }

    pub(crate) fn wait(&self) -> Vec<OwnedFd> {
        fdpass::receive(self.0.as_fd(), &mut [0]).unwrap().1
    }
}

impl Child {
    pub(crate) fn go(&self) {
        fdpass::send(self.socket.as_fd(), b"g", &[]).unwrap();
    }

    pub(crate) fn send(&self, fds: &[BorrowedFd<'_>]) {
        fdpass::send(self.socket.as_fd(), b"f", fds).unwrap();
    }

    /// The child's answer: a byte and descriptors.
    pub(crate) fn hear(&self) -> (u8, Vec<OwnedFd>) {
        let mut byte = [0];
        let (count, fds) = fdpass::receive(self.socket.as_fd(), &mut byte).unwrap();
        assert_eq!(count, 1, "the child went away");
        (byte[0], fds)
    }

    pub(crate) fn uffd(&self) -> Ear {
        Ear::of(self.hear().1.remove(0).into())
    }

    pub(crate) fn kill(&self) {
        // SAFETY: the child is ours and not reaped yet, so the number is its own.
        unsafe { libc::kill(self.pid as i32, libc::SIGKILL) };
    }

    /// Its wait status, once it has ended.
    pub(crate) fn end(&mut self) -> i32 {
        let mut status = 0;
        // SAFETY: writes one int to a live local; the child is ours.
        let got = unsafe { libc::waitpid(self.pid as i32, &mut status, 0) };
        assert_eq!(got, self.pid as i32);
        self.reaped = true;
        status
    }

    /// Its exit status. Panics if it was killed.
    pub(crate) fn exit_status(&mut self) -> i32 {
        let status = self.end();
        assert!(libc::WIFEXITED(status), "killed: {status:#x}");
        libc::WEXITSTATUS(status)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            self.end();
        }
    }
}

/// Waits for something that another process will do.
pub(crate) fn until(what: &str, mut met: impl FnMut() -> bool) {
    for _ in 0..SOON {
        if met() {
            return;
        }
        pause(1);
    }
    panic!("never happened: {what}");
}

pub(crate) fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// Forks from a thread of its own, because a fork may wait for its event. The child reads page
/// `page` and exits with it.
///
/// Uses a raw call: glibc's fork would hold the allocator's locks meanwhile, and the fact itself
/// would hang.
pub(crate) fn forking_reader(area: Area, page: usize) -> Doing<i32> {
    doing(move || {
        // SAFETY: clone without flags is fork; the child reads one byte and exits, touching no
        // lock.
        let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        assert!(pid >= 0);
        if pid == 0 {
            let byte = area.read(page);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(byte.into()) };
        }
        let mut status = 0;
        // SAFETY: writes one int to a live local; the child is ours.
        unsafe { libc::waitpid(pid, &mut status, 0) };
        assert!(libc::WIFEXITED(status), "killed: {status:#x}");
        libc::WEXITSTATUS(status)
    })
}

/// A pipe: read end, write end.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    // SAFETY: writes two ints to a live array.
    assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: the kernel just gave us both; nothing else owns them.
    fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).into()
}

/// write(2) of `count` bytes of an area to a descriptor. Returns the call's result and errno.
pub(crate) fn write_from(fd: BorrowedFd<'_>, area: Area, count: usize) -> (isize, i32) {
    // SAFETY: the kernel reads the area, which is mapped; it may wait or fail, which is what the
    // caller wants to see.
    let got = unsafe { libc::write(fd.as_raw_fd(), area.pointer(), count) };
    (got, errno(got as i64))
}

/// Drops a page as an evictor would, in an area without REMOVE events.
pub(crate) fn evict(area: Area, page: usize) {
    assert_eq!(area.part(page, 1).advise(libc::MADV_DONTNEED), 0);
}
