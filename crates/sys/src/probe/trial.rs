//! The trials of the probe that need their own memory or a child.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use rustix::mm::{self, MapFlags, ProtFlags};
use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};

use crate::access;
use crate::mapping::SharedMemory;
use crate::pagemap::{Category, Pagemap};
use crate::process::{self, PidFd};
use crate::uffd::{Features, RegisterMode, Uffd, UffdError};

/// A private page that no Rust reference ever covers, unmapped on drop.
struct OwnPage(NonNull<u8>);

impl OwnPage {
    fn new() -> io::Result<OwnPage> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses; it overlaps nothing.
        let start =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), BASE_PAGE_BYTES, prot, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(OwnPage(start))
    }

    fn page(&self) -> VirtPage {
        VirtPage::of(self.0.as_ptr() as u64)
    }

    fn range(&self) -> VirtRange {
        VirtRange::new(self.page(), self.page().plus(1))
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the page is ours alone, mapped writable, and no reference into it exists.
        unsafe { std::ptr::write_bytes(self.0.as_ptr(), byte, BASE_PAGE_BYTES) };
    }

    fn byte(&self, offset: usize) -> u8 {
        assert!(offset < BASE_PAGE_BYTES);
        let at = self.0.as_ptr().wrapping_add(offset);
        // SAFETY: inside the page (asserted), which is mapped. It must not be missing and
        // registered, or the read waits for ever: callers read only what they filled or moved in.
        unsafe { at.read_volatile() }
    }
}

impl Drop for OwnPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours with this length and nothing refers to it.
        let _ = unsafe { mm::munmap(self.0.as_ptr().cast(), BASE_PAGE_BYTES) };
    }
}

const TRIES_MAX: usize = 4;

/// Takes a shared page of this process out of its page tables. False: it stays mapped.
pub(super) fn zap_one_page() -> io::Result<bool> {
    let memory = SharedMemory::create("uc-probe", BASE_PAGE_BYTES)?;
    let (pidfd, own) = (PidFd::open(std::process::id())?, std::process::id());
    let page = VirtPage::of(memory.words().as_ptr() as u64);
    let range = VirtRange::one(page);
    // A page that is new on another CPU stays mapped, and the next try may be on that CPU.
    for _ in 0..TRIES_MAX {
        memory.words()[0].store(1, Ordering::Relaxed);
        access::zap(pidfd.as_fd(), &[range])?;
        if (Pagemap::open(own)?.first(range, Category::PRESENT)?).is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Moves one page between two mappings of this process and checks its bytes.
pub(super) fn move_one_page(uffd: &Uffd) -> io::Result<()> {
    uffd.api(Features::MOVE)?;
    let (from, to) = (OwnPage::new()?, OwnPage::new()?);
    uffd.register(to.range(), RegisterMode::MISSING)?;
    for tries_left in (0..TRIES_MAX).rev() {
        // Written each time: a fork elsewhere in this process shares the page (Busy), and the write
        // ends the sharing.
        from.fill(0xa5);
        // SAFETY: no Rust reference points into `from`; after the move it reads as zeros.
        match unsafe { uffd.move_pages(to.page(), from.range()) } {
            Ok(()) => break,
            Err(UffdError::Busy { .. } | UffdError::LayoutChanging { .. }) if tries_left > 0 => {}
            Err(error) => return Err(error.into()),
        }
    }
    let arrived = [0, BASE_PAGE_BYTES - 1].map(|offset| to.byte(offset));
    match (arrived, from.byte(0)) {
        ([0xa5, 0xa5], 0) => Ok(()),
        other => Err(io::Error::other(format!("wrong bytes after it: {other:?}"))),
    }
}

static PATTERN: [u8; 32] = *b"undercroft reads this of a child";

/// Forks a child that only waits, and reads a constant of ours in its memory.
pub(super) fn read_child() -> io::Result<()> {
    let holder = process::spawn_waiting_child()?;
    let mut bytes = [0; PATTERN.len()];
    let read = process::read_memory(holder, PATTERN.as_ptr() as u64, &mut bytes);
    let pidfd = PidFd::open(holder)?;
    pidfd.kill()?;
    let ended = pidfd.wait_exit(super::CHILD_WAIT_MAX);
    if ended {
        rustix::process::waitid(
            rustix::process::WaitId::PidFd(pidfd.as_fd()),
            rustix::process::WaitIdOptions::EXITED,
        )?;
    }
    read?;
    if bytes != PATTERN {
        return Err(io::Error::other("wrong bytes"));
    }
    Ok(())
}
