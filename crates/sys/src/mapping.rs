//! Memory that outlives the manager (memfd, mapped shared) and page-aligned private buffers.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{self, MapFlags, ProtFlags};
use undercroft_base::{BASE_PAGE_BYTES, PageSize};

/// A mapping of this process, unmapped on drop.
#[derive(Debug)]
pub(crate) struct OwnMapping {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: a mapping is plain memory owned by this value. The types that wrap it decide what several
// threads may do with it.
unsafe impl Send for OwnMapping {}
// SAFETY: as above; `&OwnMapping` alone gives no access.
unsafe impl Sync for OwnMapping {}

impl Drop for OwnMapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours (made by mmap with this length), and nothing borrows from it
        // any more.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A memfd mapped shared: ledger, RAM tier, slot tables, command pages. Sparse: only touched pages
/// take memory.
///
/// Other processes may map and change it, so no `&[u8]` into it is ever given out: words are
/// atomics, bytes are copied.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    /// Where the mapping begins in the memfd.
    start: u64,
    map: OwnMapping,
}

impl SharedMemory {
    /// A new memfd of `len` bytes (rounded up to pages), all zero, closed on exec.
    pub fn create(name: &str, len: usize) -> io::Result<SharedMemory> {
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, len.next_multiple_of(BASE_PAGE_BYTES) as u64)?;
        SharedMemory::from_fd(fd)
    }

    /// As [`SharedMemory::create`], with a sealed size: a process that gets the descriptor cannot
    /// take pages away from other processes that have it mapped.
    pub fn create_sealed(name: &str, len: usize) -> io::Result<SharedMemory> {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&fd, len.next_multiple_of(BASE_PAGE_BYTES) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        SharedMemory::from_fd(fd)
    }

    /// Maps an existing memfd whole.
    pub fn from_fd(fd: OwnedFd) -> io::Result<SharedMemory> {
        let file = File::from(fd);
        let len = file.metadata()?.len() as usize;
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the shared memory is empty",
            ));
        }
        let fd = OwnedFd::from(file);
        SharedMemory::of_length(fd, len)
    }

    /// Maps the first `len` bytes of `fd`.
    pub(crate) fn of_length(fd: OwnedFd, len: usize) -> io::Result<SharedMemory> {
        SharedMemory::of_part(fd, 0, len)
    }

    fn of_part(fd: OwnedFd, from: u64, len: usize) -> io::Result<SharedMemory> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address the kernel chooses; it overlaps nothing.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), len, prot, flags, &fd, from) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(SharedMemory {
            fd,
            start: from,
            map: OwnMapping { start, len },
        })
    }

    /// Maps the memory again, in parts of `len` bytes, a multiple of the page size. The last part
    /// may be shorter.
    pub fn parts(&self, len: usize) -> io::Result<Vec<SharedMemory>> {
        let part = |from: usize| {
            let fd = self.fd.try_clone()?;
            let len = len.min(self.map.len - from);
            SharedMemory::of_part(fd, self.start + from as u64, len)
        };
        (0..self.map.len).step_by(len).map(part).collect()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Never: an empty one cannot be made.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memory as words, shared with every process that maps it.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, zero-initialised or written through atomics and raw copies; atomics
        // may be changed by others at any time. The slice lives no longer than the mapping.
        unsafe { std::slice::from_raw_parts(self.map.start.as_ptr().cast(), self.map.len / 8) }
    }

    /// The memory as 32-bit words, for futexes.
    pub fn halves(&self) -> &[AtomicU32] {
        // SAFETY: as in `words`.
        unsafe { std::slice::from_raw_parts(self.map.start.as_ptr().cast(), self.map.len / 4) }
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.map.len),
            "access outside the shared memory"
        );
    }

    /// Copies bytes out. A racing writer leaves torn bytes, so the reader verifies a checksum.
    pub fn bytes_out(&self, offset: usize, dst: &mut [u8]) {
        self.check(offset, dst.len());
        let src = self.map.start.as_ptr().wrapping_add(offset);
        // SAFETY: the source range is inside the mapping (checked); `dst` is exclusive and cannot
        // overlap it. A racing writer makes the bytes unpredictable, not the copy unsound in
        // practice: `copy_nonoverlapping` is a plain memcpy, and the bytes are used only after
        // their checksum verifies.
        unsafe { std::ptr::copy_nonoverlapping(src, dst.as_mut_ptr(), dst.len()) };
    }

    /// Copies bytes in. The caller is the only writer of the range.
    pub fn bytes_in(&self, offset: usize, src: &[u8]) {
        self.check(offset, src.len());
        let dst = self.map.start.as_ptr().wrapping_add(offset);
        // SAFETY: the target range is inside the mapping (checked) and `src` cannot overlap it: no
        // reference into the mapping is ever given out.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) };
    }

    /// Frees the pages of the range; they read as zeros. Partial pages at the ends are zeroed.
    pub fn punch(&self, offset: usize, len: usize) -> io::Result<()> {
        self.check(offset, len);
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(
            &self.fd,
            flags,
            self.start + offset as u64,
            len as u64,
        )?)
    }

    /// Behind this offset of the memfd, nothing was ever written, or it was freed: it reads as
    /// zeros.
    pub fn data_end(&self) -> io::Result<u64> {
        use rustix::fs::SeekFrom;
        let (mut at, mut end) = (0, 0);
        // Not by the descriptor's offset, which nothing uses.
        while let Ok(data) = rustix::fs::seek(&self.fd, SeekFrom::Data(at)) {
            end = rustix::fs::seek(&self.fd, SeekFrom::Hole(data))?;
            at = end;
        }
        Ok(end)
    }

    /// Bytes of memory that the memfd uses.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_blocks as u64 * 512)
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Private, page-aligned memory, touched in advance: buffers of the fault path and of O_DIRECT.
#[derive(Debug)]
pub struct PageBuf {
    map: OwnMapping,
    page: PageSize,
}

impl PageBuf {
    /// `pages` zeroed pages of this size, already in memory.
    pub fn new(pages: usize, page: PageSize) -> io::Result<PageBuf> {
        let len = pages.max(1) * page.bytes();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses; it overlaps nothing.
        let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = OwnMapping { start, len };
        Ok(PageBuf { map, page })
    }

    /// `pages` zero pages that are all the kernel's one zero page, so reading them stays in the
    /// first-level cache. The type allows no writing: it gives out shared slices only.
    pub fn zeros(pages: usize) -> io::Result<ZeroPages> {
        let len = pages.max(1) * BASE_PAGE_BYTES;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a fresh anonymous read-only mapping at an address the kernel chooses; it overlaps
        // nothing.
        let start =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(ZeroPages(OwnMapping { start, len }))
    }

    /// The address of byte `offset`, for the kernel to read or write. Not derived from a reference.
    pub(crate) fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.map.len);
        // SAFETY: inside the mapping (asserted).
        unsafe { self.map.start.as_ptr().add(offset) }
    }

    /// Size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.page
    }

    /// Page `index` of the buffer.
    pub fn page(&self, index: usize) -> &[u8] {
        &self[index * self.page.bytes()..][..self.page.bytes()]
    }

    /// Page `index` of the buffer, to write.
    pub fn page_mut(&mut self, index: usize) -> &mut [u8] {
        let bytes = self.page.bytes();
        &mut self[index * bytes..][..bytes]
    }
}

/// Zero pages to read; see [`PageBuf::zeros`].
#[derive(Debug)]
pub struct ZeroPages(OwnMapping);

impl Deref for ZeroPages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a private read-only mapping: zeros for as long as it lives.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) }
    }
}

impl Deref for PageBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is private to this value, initialised (zero) memory, and borrowed
        // with `self`.
        unsafe { std::slice::from_raw_parts(self.map.start.as_ptr(), self.map.len) }
    }
}

impl DerefMut for PageBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.start.as_ptr(), self.map.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn shared_memory_is_seen_through_a_second_mapping_and_punches_to_zero() {
        let memory = SharedMemory::create("test", 8 * BASE_PAGE_BYTES).unwrap();
        let again = SharedMemory::from_fd(memory.as_fd().try_clone_to_owned().unwrap()).unwrap();
        memory.bytes_in(BASE_PAGE_BYTES, &[7; 100]);
        memory.words()[0].store(42, Ordering::Relaxed);
        let mut out = [0; 100];
        again.bytes_out(BASE_PAGE_BYTES, &mut out);
        assert_eq!(
            (out, again.words()[0].load(Ordering::Relaxed)),
            ([7; 100], 42)
        );
        again.punch(BASE_PAGE_BYTES, BASE_PAGE_BYTES).unwrap();
        memory.bytes_out(BASE_PAGE_BYTES, &mut out);
        assert_eq!(out, [0; 100]);
        assert!(memory.allocated().unwrap() <= 2 * BASE_PAGE_BYTES as u64);
    }

    #[test]
    fn sealed_memory_keeps_its_size_whoever_has_it() {
        let memory = SharedMemory::create_sealed("test", BASE_PAGE_BYTES).unwrap();
        let given = memory.as_fd().try_clone_to_owned().unwrap();
        for size in [0, 1, 2 * BASE_PAGE_BYTES as u64] {
            assert!(rustix::fs::ftruncate(&given, size).is_err(), "{size}");
        }
        let more = rustix::fs::SealFlags::WRITE;
        assert!(rustix::fs::fcntl_add_seals(&given, more).is_err());
        memory.words()[0].store(1, Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn shared_memory_access_beyond_the_end_panics() {
        SharedMemory::create("test", BASE_PAGE_BYTES)
            .unwrap()
            .bytes_in(BASE_PAGE_BYTES - 1, &[1, 2]);
    }
}
