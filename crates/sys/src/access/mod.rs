//! Finds which pages of a process were used: a BPF program walks its page tables and reports the
//! Accessed bits.
//!
//! ```text
//!  scan:   control map (blocks of 2 MiB wanted)
//!          -> BPF iterator over the process's threads (bpf/access.bpf.c): walks from mm->pgd,
//!             copies each block's 512 entries to the tables map
//!          -> read here, both maps being mapped
//!  clear:  `1` to /proc/PID/clear_refs: the kernel clears the bit of every page of the process
//! ```
//! The walk takes no lock, so its answer is a *hint*: the tables may change while an entry is read.
//! The walk only reads memory, and checks every table address against the end of memory.
//!
//! The kernel also sets the bit when it maps a page: the faulting page and those mapped along. So
//! the bit says nothing of a page that came since the last scan. [`BlockScan::frames`] shows which
//! pages those are.
//!
//! Source: measured, see `docs/design/0010-access-bits.md`. Limits: x86-64 with 4-level paging,
//! kernels with BTF, CAP_BPF and CAP_PERFMON. A CPU that still has a page's translation cached can
//! use the page without setting its bit.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};

use crate::mapping::SharedMemory;

mod bpf;
mod btf;
mod object;
pub mod vcpu;

/// Pages of a block: one lowest-level table maps them.
pub const BLOCK_PAGES: u64 = 512;

/// Blocks of one run of the program, and so tables: half a MiB. A run takes some 100 us.
const BLOCKS: usize = 128;
/// Addresses tried in one run while calibrating.
const CANDIDATES: u64 = 32;

// `struct control` of bpf/access.bpf.c, in words.
const PHYS_MAX: usize = 0;
const BASE: usize = 1;
const CANDIDATE: usize = 2;
const FOUND: usize = 3;
const DONE: usize = 4;
const COUNT: usize = 5;
const TASK_MM: usize = 6;
const MM_PGD: usize = 7;
const BLOCK: usize = 8;
const STATE: usize = BLOCK + BLOCKS;
const CONTROL_WORDS: usize = STATE + BLOCKS;

// `enum state`.
const TABLE: u64 = 1;
const HUGE: u64 = 2;
const HUGE_ACCESSED: u64 = 3;

// Of a page-table entry.
const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

const GIB: u64 = 1 << 30;

/// Ranges of one call (UIO_MAXIOV).
const VECTORS_MAX: usize = 1024;
/// Pages of one call. Layout changes wait for the call: some 0.5 ms at most.
const CLEAR_PAGES: u64 = 4096;
/// The same where pages are taken out of the page tables: some 1 ms.
const ZAP_PAGES: u64 = 512;

static OBJECT: &[u8] = include_bytes!("../../bpf/access.bpf.o");

/// Why access bits are not available.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The kernel does not let this process load the program.
    #[error(
        "the kernel refused {0} (not permitted): run as root or with CAP_BPF and CAP_PERFMON, on a \
         kernel that is not locked down for confidentiality"
    )]
    NotPermitted(&'static str),
    /// The kernel does not describe its own types.
    #[error(
        "/sys/kernel/btf/vmlinux cannot be read ({0}): a kernel built with CONFIG_DEBUG_INFO_BTF is needed"
    )]
    NoTypes(io::Error),
    /// The kernel's types lack one that is needed, or have an unknown form.
    #[error(
        "the kernel's types say nothing of {0}: a kernel 6.1 or newer with BPF iterators is needed"
    )]
    UnknownKernel(&'static str),
    /// The kernel uses five levels of page tables.
    #[error(
        "this kernel uses 5-level page tables (la57), which are not walked: boot with no5lvl to have access bits"
    )]
    FiveLevels,
    /// No base of the direct map fits the page tables.
    #[error(
        "where the kernel maps memory was not found, so page tables cannot be walked (encrypted \
         memory, or a kernel that is built otherwise): {0}"
    )]
    NotCalibrated(&'static str),
    /// Another refusal, with the verifier's last words.
    #[error("the kernel refused {what}: {source}{log}")]
    Refused {
        /// The request.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
        /// The end of the verifier's log; may be empty.
        log: String,
    },
    /// The process has ended, or has no memory any more.
    #[error("the process is gone")]
    Gone,
}

impl AccessError {
    fn of(what: &'static str, source: io::Error, log: String) -> AccessError {
        match source.kind() {
            io::ErrorKind::PermissionDenied if log.is_empty() => AccessError::NotPermitted(what),
            _ => AccessError::Refused { what, source, log },
        }
    }
}

/// The page table of one block.
#[derive(Clone, Debug)]
pub struct BlockScan {
    /// Its first page, a multiple of [`BLOCK_PAGES`].
    pub start: VirtPage,
    /// For each page: 0 if it is not in memory, otherwise a fingerprint of its page frame. A page
    /// that left and came back since the last scan has another fingerprint, except one in 255.
    pub frames: [u8; BLOCK_PAGES as usize],
    /// A bit for each page: the page was used since its bit was cleared, or was mapped since.
    pub accessed: [u64; BLOCK_PAGES as usize / 64],
}

impl BlockScan {
    fn empty() -> BlockScan {
        BlockScan {
            start: VirtPage(0),
            frames: [0; BLOCK_PAGES as usize],
            accessed: [0; BLOCK_PAGES as usize / 64],
        }
    }

    fn set(&mut self, at: usize, frame: u64, accessed: bool) {
        // Neighbouring frames differ, and so do frames that differ in high bits only.
        let mixed = (frame.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 255;
        self.frames[at] = 1 + mixed as u8;
        self.accessed[at / 64] |= u64::from(accessed) << (at % 64);
    }

    /// Whether the page at `at` is in memory.
    pub fn is_present(&self, at: usize) -> bool {
        self.frames[at] != 0
    }

    /// Whether the bit of the page at `at` is set.
    pub fn is_accessed(&self, at: usize) -> bool {
        self.accessed[at / 64] >> (at % 64) & 1 == 1
    }
}

/// The blocks that `ranges` touch, ascending and once each when the ranges are ascending.
pub fn blocks_of(ranges: &[VirtRange]) -> Vec<VirtPage> {
    let mut blocks: Vec<VirtPage> = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        let first = range.start.0 / BLOCK_PAGES;
        let last = (range.end.0 - 1) / BLOCK_PAGES;
        for block in first..=last {
            let page = VirtPage(block * BLOCK_PAGES);
            if blocks.last() != Some(&page) {
                blocks.push(page);
            }
        }
    }
    blocks
}

/// A loaded program and its maps. Nothing is pinned: all of it ends when this is dropped or the
/// process ends.
#[derive(Debug)]
pub struct AccessScanner {
    program: bpf::Program,
    control: SharedMemory,
    tables: SharedMemory,
    found: Box<BlockScan>,
}

impl AccessScanner {
    /// Loads the program, finds where the kernel maps memory, and checks both on this process's own
    /// memory. Cost: some 45 ms, most of it for reading the kernel's types; 7 MB meanwhile.
    pub fn open() -> Result<AccessScanner, AccessError> {
        if has_five_levels() {
            return Err(AccessError::FiveLevels);
        }
        let types = btf::Types::read().map_err(AccessError::NoTypes)?;
        let unknown = AccessError::UnknownKernel;
        let known = |number: Option<u32>, name| number.ok_or(unknown(name));
        let target = known(types.function("bpf_iter_task"), "bpf_iter_task")?;
        let task_mm = known(types.member("task_struct", "mm"), "task_struct.mm")?;
        let mm_pgd = known(types.member("mm_struct", "pgd"), "mm_struct.pgd")?;
        drop(types);
        let control = bpf::array(c"uc_control", CONTROL_WORDS * 8, 1)?;
        let tables = bpf::array(c"uc_tables", BASE_PAGE_BYTES, BLOCKS)?;
        let maps = [("control", &control), ("tables", &tables)];
        let code = object::link(OBJECT, "iter/task", &maps)
            .ok_or_else(|| unknown("the program this was built with"))?;
        let program = bpf::Program::load_iterator(&code, target)?;
        let mut scanner = AccessScanner {
            program,
            control,
            tables,
            found: Box::new(BlockScan::empty()),
        };
        scanner.put(TASK_MM, task_mm.into());
        scanner.put(MM_PGD, mm_pgd.into());
        scanner.calibrate()?;
        Ok(scanner)
    }

    fn put(&self, word: usize, value: u64) {
        self.control.words()[word].store(value, Ordering::Relaxed);
    }

    fn get(&self, word: usize) -> u64 {
        self.control.words()[word].load(Ordering::Relaxed)
    }

    /// Finds the base of the direct map: the one under which the address of this process's own top
    /// table translates to itself, and a look at its own memory is right. Under a wrong base any
    /// page is taken for a table, and what is in it may pass the first of the two.
    fn calibrate(&mut self) -> Result<(), AccessError> {
        let text = std::fs::read_to_string("/proc/zoneinfo").unwrap_or_default();
        let phys_max = end_of_memory(&text).ok_or(AccessError::NotCalibrated(
            "/proc/zoneinfo tells no end of memory",
        ))?;
        self.put(PHYS_MAX, phys_max);
        // The direct map begins on a GiB boundary, at or below every table, and less than the size
        // of memory below it. It is randomised, and no table's address is known here. So every
        // possible base is tried, from the highest down.
        let run = self.program.on(std::process::id())?;
        let mut any_fits = false;
        // Relative to the top table's own address, which the program knows.
        let mut tried = 0;
        while tried <= phys_max / GIB {
            self.put(FOUND, 0);
            self.put(CANDIDATE, tried + 1);
            self.run(&run)?;
            let (found, last) = (self.get(FOUND), self.get(CANDIDATE));
            self.put(CANDIDATE, 0);
            if found == 0 {
                tried += CANDIDATES;
                continue;
            }
            any_fits = true;
            tried = last;
            self.put(BASE, found);
            if self.sees_own_memory()? {
                return Ok(());
            }
        }
        Err(AccessError::NotCalibrated(if any_fits {
            "a look at this process's own memory is wrong"
        } else {
            "no base of the direct map explains this process's tables"
        }))
    }

    fn run(&self, run: &bpf::Link) -> Result<(), AccessError> {
        self.put(DONE, 0);
        run.read_once()?;
        match self.get(DONE) {
            0 => Err(AccessError::Gone),
            _ => Ok(()),
        }
    }

    /// Whether a scan of memory of our own says what is known of it.
    fn sees_own_memory(&mut self) -> Result<bool, AccessError> {
        const TOUCHED: [usize; 4] = [0, 1, 5, 100];
        let Ok(memory) = OwnMemory::new(2 * BLOCK_PAGES as usize) else {
            return Ok(false);
        };
        for at in TOUCHED {
            memory.touch(at);
        }
        let range = memory.range();
        let (mut present, mut accessed) = (Vec::new(), Vec::new());
        self.scan(std::process::id(), &blocks_of(&[range]), |block| {
            let pages = (0..BLOCK_PAGES as usize).map(|at| (at, block.start.plus(at as u64)));
            for (at, page) in pages.filter(|(_, page)| range.contains(*page)) {
                let place = (page.0 - range.start.0) as usize;
                present.extend(block.is_present(at).then_some(place));
                accessed.extend(block.is_accessed(at).then_some(place));
            }
        })?;
        // A monitor of the kernel may clear a bit meanwhile.
        let strangers = accessed.iter().any(|place| !present.contains(place));
        Ok(present == TOUCHED && !strangers && accessed.len() + 1 >= TOUCHED.len())
    }

    /// Calls `each`, in order, for every block of `blocks` (multiples of [`BLOCK_PAGES`]) that has
    /// pages in memory.
    ///
    /// Errors: `Gone` if no thread of the process has memory. Cost: some 4 ns a page of the blocks.
    pub fn scan(
        &mut self,
        pid: u32,
        blocks: &[VirtPage],
        mut each: impl FnMut(&BlockScan),
    ) -> Result<(), AccessError> {
        let link = self.program.on(pid)?;
        for group in blocks.chunks(BLOCKS) {
            for (at, block) in group.iter().enumerate() {
                assert!(
                    block.0.is_multiple_of(BLOCK_PAGES),
                    "not the start of a block"
                );
                self.put(BLOCK + at, block.address());
                self.put(STATE + at, 0);
            }
            self.put(COUNT, group.len() as u64);
            self.run(&link)?;
            for (at, block) in group.iter().enumerate() {
                if self.decode(at, *block) {
                    each(&self.found);
                }
            }
        }
        Ok(())
    }

    /// Fills `found` from table `at`. False if none of its pages is in memory.
    fn decode(&mut self, at: usize, block: VirtPage) -> bool {
        let state = self.get(STATE + at);
        if state == 0 {
            return false;
        }
        *self.found = BlockScan::empty();
        self.found.start = block;
        let pages = BLOCK_PAGES as usize;
        if state == HUGE || state == HUGE_ACCESSED {
            // The frame is not reported. We have not evicted a huge page that was replaced by
            // another.
            for page in 0..pages {
                self.found.set(page, page as u64, state == HUGE_ACCESSED);
            }
            return true;
        }
        if state != TABLE {
            return false; // an impossible answer: one hint less
        }
        let mut any = false;
        let words = &self.tables.words()[at * pages..][..pages];
        for (page, word) in words.iter().enumerate() {
            let entry = word.load(Ordering::Relaxed);
            if entry & PRESENT != 0 {
                any = true;
                let frame = (entry & FRAME) / BASE_PAGE_BYTES as u64;
                self.found.set(page, frame, entry & ACCESSED != 0);
            }
        }
        any
    }
}

/// An open `/proc/PID/clear_refs`. It belongs to the process, not to its number.
#[derive(Debug)]
pub struct ClearRefs(File);

impl ClearRefs {
    /// Errors: the process is gone, or another user's.
    pub fn open(pid: u32) -> io::Result<ClearRefs> {
        let path = format!("/proc/{pid}/clear_refs");
        Ok(ClearRefs(File::options().write(true).open(path)?))
    }

    /// Clears the Accessed bit of every page of the process, managed or not. Translations cached by
    /// a CPU remain.
    ///
    /// Cost: some 75 ns a page in memory. Page faults and installations of the process wait
    /// meanwhile.
    pub fn clear(&self) -> io::Result<()> {
        (&self.0).write_all(b"1")
    }
}

/// Clears the Accessed bits of `ranges` of a process, and translations that a CPU has cached. A
/// page used after this has its bit set. These keep their bits: pages that fork relatives share,
/// and new pages that are in none of the kernel's lists yet (at most 31 of each CPU). Parts that
/// are not mapped, or locked, are skipped.
///
/// The kernel then takes the pages for cold (`MADV_COLD`): it reclaims them first when the whole
/// machine runs short. Errors: no CAP_SYS_NICE, or the process is gone. Cost: some 90 ns a page
/// that was used; and for each range an interrupt to each CPU that runs the process. Page faults go
/// on meanwhile.
pub fn clear(pidfd: BorrowedFd<'_>, ranges: &[VirtRange]) -> io::Result<()> {
    advise(pidfd, ranges, libc::MADV_COLD, CLEAR_PAGES)
}

/// Takes pages of shared memory out of the page tables of a process (`MADV_PAGEOUT`). They stay in
/// their file, and a protection by userfaultfd stays, too. The next use of a page maps it again,
/// without a message if its mapping is not registered for minor faults. So a page that is mapped
/// later was used meanwhile, also by a virtual CPU, whose uses set no Accessed bit.
///
/// Without an error, these stay mapped: pages that another mapping has mapped too, pages of
/// hugetlbfs, pinned ones, and new pages that are in none of the kernel's lists yet. If the kernel
/// has swap, it may swap the pages. Errors: no CAP_SYS_NICE, or the process is gone. Cost: some 2
/// us a page that was mapped. Page faults go on meanwhile; changes of the layout wait for 1 ms.
pub fn zap(pidfd: BorrowedFd<'_>, ranges: &[VirtRange]) -> io::Result<()> {
    advise(pidfd, ranges, libc::MADV_PAGEOUT, ZAP_PAGES)
}

/// * `most`: pages of one call.
fn advise(pidfd: BorrowedFd<'_>, ranges: &[VirtRange], advice: i32, most: u64) -> io::Result<()> {
    let mut group: Vec<VirtRange> = Vec::with_capacity(VECTORS_MAX);
    let mut pages = 0;
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let end = start.plus(most - pages).min(range.end);
            group.push(VirtRange::new(start, end));
            pages += end.0 - start.0;
            start = end;
            if pages == most || group.len() == VECTORS_MAX {
                advise_at_once(pidfd, &group, advice)?;
                group.clear();
                pages = 0;
            }
        }
    }
    advise_at_once(pidfd, &group, advice)
}

/// [`advise`] of at most [`VECTORS_MAX`] ranges.
fn advise_at_once(pidfd: BorrowedFd<'_>, ranges: &[VirtRange], advice: i32) -> io::Result<()> {
    let vectors: Vec<libc::iovec> = ranges
        .iter()
        .map(|range| libc::iovec {
            iov_base: range.start.address() as *mut libc::c_void,
            iov_len: range.count().bytes().0 as usize,
        })
        .collect();
    let mut rest = &vectors[..];
    while let Some(first) = rest.first() {
        // SAFETY: the addresses are another process's, or our own, where neither MADV_COLD nor
        // MADV_PAGEOUT changes any content; the vectors are a live slice of that length.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                pidfd.as_raw_fd(),
                rest.as_ptr(),
                rest.len(),
                advice,
                0,
            )
        };
        let done = match done {
            -1 => {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    // The first range has unmapped or locked parts.
                    Some(libc::ENOMEM | libc::EINVAL) => first.iov_len,
                    _ => return Err(error),
                }
            }
            // It stopped before a range with unmapped or locked parts, which is skipped.
            done => done as usize + 1,
        };
        let mut left = done.max(1);
        while let (Some(next), true) = (rest.first(), left > 0) {
            left = left.saturating_sub(next.iov_len);
            rest = &rest[1..];
        }
    }
    Ok(())
}

/// Fresh private memory of this process, without huge pages, unmapped on drop.
struct OwnMemory {
    start: *mut u8,
    pages: usize,
}

impl OwnMemory {
    fn new(pages: usize) -> io::Result<OwnMemory> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh anonymous mapping at an address the kernel chooses; it overlaps nothing.
        let start = unsafe {
            mm::mmap_anonymous(std::ptr::null_mut(), pages * BASE_PAGE_BYTES, prot, flags)
        }?
        .cast();
        let memory = OwnMemory { start, pages };
        // SAFETY: the whole of our own mapping; the advice changes no content. A kernel without
        // huge pages refuses it.
        let _ = unsafe {
            mm::madvise(
                start.cast(),
                pages * BASE_PAGE_BYTES,
                Advice::LinuxNoHugepage,
            )
        };
        Ok(memory)
    }

    fn touch(&self, page: usize) {
        assert!(page < self.pages);
        let at = self.start.wrapping_add(page * BASE_PAGE_BYTES);
        // SAFETY: inside our mapping (asserted), writable, and nothing refers to it.
        unsafe { at.write_volatile(1) };
    }

    fn range(&self) -> VirtRange {
        let start = VirtPage::of(self.start as u64);
        VirtRange::new(start, start.plus(self.pages as u64))
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping with this length; nothing refers to it.
        let _ = unsafe { mm::munmap(self.start.cast(), self.pages * BASE_PAGE_BYTES) };
    }
}

/// Whether the kernel uses five levels of page tables. If not, it hides the CPU's flag.
fn has_five_levels() -> bool {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "la57"))
}

/// The first physical address after all memory, from `/proc/zoneinfo`.
fn end_of_memory(zones: &str) -> Option<u64> {
    let number = |line: &str, name: &str| -> Option<u64> {
        let rest = line.trim_start().strip_prefix(name)?;
        rest.trim_start_matches(':').trim().parse().ok()
    };
    let (mut spanned, mut end) = (0, 0);
    for line in zones.lines() {
        if let Some(pages) = number(line, "spanned ") {
            spanned = pages;
        } else if let Some(first) = number(line, "start_pfn") {
            if spanned > 0 {
                end = end.max(first + spanned);
            }
            spanned = 0;
        }
    }
    (end > 0).then_some(end * BASE_PAGE_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn blocks_of_ranges_come_once_each() {
        let blocks = blocks_of(&[
            range(5, 6),
            range(10, 511),
            range(511, 1025),
            range(1500, 1500),
        ]);
        assert_eq!(blocks, [VirtPage(0), VirtPage(512), VirtPage(1024)]);
    }

    #[test]
    fn end_of_memory_is_that_of_the_highest_zone_that_has_any() {
        let zones = "Node 0, zone   DMA\n  pages free 3\n        spanned  4095\n        present  \
                     3997\n  start_pfn:           1\n\
                     Node 0, zone  Normal\n        spanned  5000000\n  start_pfn:           1048576\n\
                     Node 0, zone  Movable\n        spanned  0\n  start_pfn:           9999999\n";
        assert_eq!(end_of_memory(zones), Some(6_048_576 * 4096));
        assert_eq!(end_of_memory(""), None);
    }

    #[test]
    fn fingerprints_are_never_zero_and_tell_neighbours_apart() {
        let mut block = BlockScan::empty();
        for at in 0..512 {
            block.set(at, 0x12_3456 + at as u64, at % 2 == 0);
        }
        assert!((0..512).all(|at| block.is_present(at)));
        let same = block
            .frames
            .windows(2)
            .filter(|pair| pair[0] == pair[1])
            .count();
        assert!(same < 16, "{same} neighbours look the same");
        assert!(block.is_accessed(2) && !block.is_accessed(3));
    }

    #[test]
    fn no_wrong_base_of_the_direct_map_sees_own_memory() {
        let mut scanner = match AccessScanner::open() {
            Ok(scanner) => scanner,
            Err(error) => return eprintln!("SKIPPED: no access bits here: {error}"),
        };
        let (base, phys_max) = (scanner.get(BASE), scanner.get(PHYS_MAX));
        assert!(scanner.sees_own_memory().unwrap());
        for off in 1..=phys_max / GIB {
            for wrong in [base + off * GIB, base.wrapping_sub(off * GIB)] {
                scanner.put(BASE, wrong);
                assert!(!scanner.sees_own_memory().unwrap(), "{off} GiB off");
            }
        }
    }
}
