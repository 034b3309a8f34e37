//! Memory objects of huge pages, as the memory of a virtual machine.

use std::ffi::CStr;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use undercroft_base::{Bytes, PageSize, VirtPage, VirtRange};
use undercroft_sys::huge_pages::HugePages;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::{self, MemoryObject};
use undercroft_sys::uffd::{Features, RegisterMode, UffdError};

use crate::bed::*;

crate::facts! {
    a_huge_page_is_copied_whole_and_protected_if_asked,
    a_huge_page_is_told_by_continue_alone,
    a_huge_page_is_punched_whole_and_a_part_of_it_is_zeroed_in_place,
    where_the_pool_is_empty_a_copy_is_refused_and_no_thread_dies,
    memory_that_may_be_transparent_huge_pages_says_large_blocks_and_has_base_pages,
}

const HUGE: usize = PageSize::Large.bytes();
const PAGES: usize = 4;
/// Base pages of a huge page.
const EACH: usize = HUGE / PAGE;
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// The pool of huge pages, with these in it. Dropping it restores the old number.
struct Pool(u64);

impl Pool {
    fn more(pages: u64) -> Pool {
        let before = HugePages::now().map_or(0, |pool| pool.pages);
        let pool = Pool(before);
        let _ = fs::write(POOL, (before + pages).to_string());
        if HugePages::now().map_or(0, |pool| pool.available) < pages {
            drop(pool);
            crate::skip("no pool of huge pages can be made here");
        }
        pool
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.0.to_string());
    }
}

/// An object of four huge pages, mapped here and registered: nothing is in it.
fn large() -> (MemoryObject, Ear, Area, Pool) {
    let pool = Pool::more(PAGES as u64);
    let bytes = Bytes((PAGES * HUGE) as u64);
    let memfd = object::create("uc-contract", bytes, PageSize::Large).unwrap();
    let object = MemoryObject::of(memfd.as_fd()).unwrap();
    let memory = SharedMemory::from_fd(memfd).unwrap();
    let area = Area::shared(&memory);
    std::mem::forget(memory); // the threads of a fact use it to the end
    let ear = Ear::new(Features::THREAD_ID);
    ear.register(area.range(), RegisterMode::MISSING_WP)
        .unwrap();
    (object, ear, area, pool)
}

fn one(area: Area, page: usize) -> VirtRange {
    area.part(page * EACH, EACH).range()
}

fn filled(byte: u8) -> Vec<u8> {
    vec![byte; HUGE]
}

fn a_huge_page_is_copied_whole_and_protected_if_asked() {
    let (_object, mut ear, area, _pool) = large();
    let reader = doing(move || area.read(EACH + 7));
    let fault = ear.fault();
    assert!(one(area, 1).contains(fault.page) && !fault.wp, "{fault:?}");
    let zeros = ear.zeropage(one(area, 1), false);
    assert_eq!(zeros, Err(UffdError::Invalid), "there are no zeros to map");
    ear.copy(one(area, 1).start, &filled(5), false).unwrap();
    assert_eq!(reader.done(), 5);
    doing(move || area.write(EACH + 7, 6)).done();
    ear.copy_protected(one(area, 2).start, &filled(7)).unwrap();
    assert_eq!(doing(move || area.read(2 * EACH + 9)).done(), 7);
    ear.silent();
    let writer = doing(move || area.write(2 * EACH + 9, 8));
    let fault = ear.fault();
    assert!(fault.wp && one(area, 2).contains(fault.page), "{fault:?}");
    writer.blocked();
    ear.write_protect(one(area, 2), false).unwrap();
    writer.done();
    let again = ear.copy(one(area, 1).start, &filled(9), false);
    assert_eq!(again, Err(UffdError::Exists { done: 0 }));
}

fn a_huge_page_is_told_by_continue_alone() {
    let (object, mut ear, area, _pool) = large();
    ear.copy_protected(one(area, 1).start, &filled(7)).unwrap();
    let data = object.data(object.whole().start).unwrap();
    let all = VirtRange::new(VirtPage(0), VirtPage((PAGES * EACH) as u64));
    assert_eq!(data, Some(all), "a seek says that all is there");
    let is = |page: usize| ear.is_in_file(one(area, page)).unwrap();
    assert_eq!([0, 1, 2].map(is), [false, true, false]);
    // In the file, and in no page table: it stays protected.
    assert_eq!(area.part(EACH, EACH).advise(libc::MADV_DONTNEED), 0);
    assert!(is(1));
    let writer = doing(move || area.write(EACH, 8));
    assert!(ear.fault().wp);
    ear.write_protect(one(area, 1), false).unwrap();
    writer.done();
}

fn a_huge_page_is_punched_whole_and_a_part_of_it_is_zeroed_in_place() {
    let (object, mut ear, area, _pool) = large();
    ear.copy_protected(one(area, 1).start, &filled(7)).unwrap();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let at = (HUGE + PAGE) as u64;
    rustix::fs::fallocate(object.as_fd(), flags, at, PAGE as u64).unwrap();
    let read = |page: usize| doing(move || area.read(page)).done();
    assert_eq!([0, 1, 2].map(|at| read(EACH + at)), [7, 0, 7]);
    ear.silent(); // the protection does not tell of it
    object.punch(VirtRange::one(VirtPage(1))).unwrap();
    assert!(!ear.is_in_file(one(area, 1)).unwrap());
    assert_eq!(object.allocated().unwrap(), Bytes(0));
}

fn where_the_pool_is_empty_a_copy_is_refused_and_no_thread_dies() {
    let (_object, mut ear, area, pool) = large();
    // The mapping has reserved pages, so this is a second one without.
    let bytes = Bytes(HUGE as u64);
    let memfd = object::create("uc-contract", bytes, PageSize::Large).unwrap();
    let (flags, fd) = (libc::MAP_SHARED | libc::MAP_NORESERVE, memfd.as_fd());
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let other = Area::mapped(EACH, libc::PROT_READ | libc::PROT_WRITE, flags, raw);
    ear.register(other.range(), RegisterMode::MISSING_WP)
        .unwrap();
    let reader = doing(move || other.read(0));
    assert_eq!(ear.fault().page, other.at(0));
    let refused = ear.copy(other.at(0), &filled(5), false);
    let [exists, no_memory] = [
        UffdError::Exists { done: 0 },
        UffdError::NoMemory { done: 0 },
    ];
    // The kernel says that a page is there. There is none.
    assert!(
        [Err(exists), Err(no_memory)].contains(&refused),
        "{refused:?}"
    );
    assert!(!ear.is_in_file(other.range()).unwrap());
    reader.blocked();
    fs::write(POOL, (pool.0 + PAGES as u64 + 1).to_string()).unwrap();
    ear.copy(other.at(0), &filled(5), false).unwrap();
    assert_eq!(reader.done(), 5);
    let _ = area;
}

fn mount(at: &CStr, kind: &CStr, flags: libc::c_ulong, data: &CStr) -> bool {
    let (what, kind, data) = (c"none".as_ptr(), kind.as_ptr(), data.as_ptr().cast());
    // SAFETY: strings that end with zero and live through the call.
    unsafe { libc::mount(what, at.as_ptr(), kind, flags, data) == 0 }
}

/// A file system whose memory may be transparent huge pages, mounted over `/tmp` for this process.
/// False: not permitted.
fn mount_transparent() -> bool {
    // SAFETY: takes a number, and this process has one thread.
    let alone = unsafe { libc::unshare(libc::CLONE_NEWNS) == 0 };
    alone
        && mount(c"/", c"", libc::MS_REC | libc::MS_PRIVATE, c"")
        && mount(c"/tmp", c"tmpfs", 0, c"huge=always")
}

/// As a memfd is while `shmem_enabled` is `always`: an administrator may change that at any time.
fn memory_that_may_be_transparent_huge_pages_says_large_blocks_and_has_base_pages() {
    if !mount_transparent() {
        crate::skip("no file system can be mounted here");
    }
    let file = fs::File::create_new("/tmp/uc-contract").unwrap();
    file.set_len(2 * HUGE as u64).unwrap();
    assert_eq!(file.metadata().unwrap().blksize(), HUGE as u64);
    let object = MemoryObject::of(file.as_fd()).unwrap();
    assert_eq!(object.page_size(), PageSize::Base);
    assert_eq!(object.whole().count().0, 2 * EACH as u64);
}
