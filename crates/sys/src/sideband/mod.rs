//! Follows a process tree's layout changes by the kernel's perf side band: new mappings, forks,
//! execs, exits.
//!
//! A *hint*, never the truth. Records of different CPUs come unordered, and can be lost (which is
//! reported). A record names the whole mapping, after merging with its neighbours. The caller then
//! reads `/proc/PID/maps`.
//!
//! Reported: mmap of any kind, `brk` growth, mprotect, growth of a stack, fork, thread start, exec,
//! exit. **Not reported** (kept as tests): mremap, munmap, madvise, brk shrinking. Moves and
//! removals in registered memory come as userfaultfd events. A mapping *grown* by mremap stays in
//! its registered VMA and simply faults. A set-user-id exec ends the watch of that process.
//!
//! ```text
//!  per CPU:  owner event (this process, reports nothing) ── ring, mapped ── poll
//!               ^ output of
//!            one event for each thread watched, inherited by every thread and process it starts
//! ```
//! Children inherit the watch. So a process is watched by its id only if no watched process started
//! it. Its events are closed when it and all its descendants have ended (`roots.rs`).
//!
//! The ring belongs to an event of our own, because polling the event of an exited thread reports a
//! hang-up for ever. Cost for the program (figures: docs/design/0004, by the contract fact
//! `overhead`):
//!
//! * `Wake::EachRecord` makes an mmap some microseconds longer: the kernel interrupts its own CPU
//!   to wake us.
//! * `Wake::HalfFull` adds less than can be measured.
//! * A fork or thread start copies one event a CPU.
//!
//! Source: `perf_event_open(2)`, `include/uapi/linux/perf_event.h`.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll;
use rustix::mm::{self, MapFlags, ProtFlags};
use undercroft_base::BASE_PAGE_BYTES;

use crate::ioctl;
use crate::procfs;

mod record;
mod roots;

use roots::Roots;

pub use record::{Record, parse};

/// Pages of each CPU's ring: about 1400 records of a mapping. Less than the 516 KiB a CPU that
/// every user may lock.
const RING_PAGES: usize = 32;
/// The longest record: a mapping with a path of 4096 bytes.
const RECORD_BYTES_MAX: usize = 4096 + 128;
/// How often threads that started while we attached are searched for.
const ATTACH_ROUNDS_MAX: usize = 4;

/// `struct perf_event_attr`, the 112 bytes of version 5.
#[repr(C)]
#[derive(Default)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_watermark: u32,
    bp_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clock_id: i32,
    sample_regs_intr: u64,
    aux_watermark: u32,
    sample_max_stack: u16,
    reserved: u16,
}

const _: () = assert!(size_of::<Attr>() == 112);

const TYPE_SOFTWARE: u32 = 1;
const COUNT_SW_DUMMY: u64 = 9;
const INHERIT: u64 = 1 << 1;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const MMAP: u64 = 1 << 8;
const COMM: u64 = 1 << 9;
const TASK: u64 = 1 << 13;
const WATERMARK: u64 = 1 << 14;
const MMAP_DATA: u64 = 1 << 17;
const MMAP2: u64 = 1 << 23;
const COMM_EXEC: u64 = 1 << 24;
/// The reports of a watched thread's event.
const REPORTS: u64 = INHERIT | MMAP | MMAP_DATA | MMAP2 | COMM | COMM_EXEC | TASK;

const FLAG_FD_CLOEXEC: u64 = 8;
const SET_OUTPUT: u64 = ioctl::io('$' as u32, 5);

/// When the watcher wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// At every record, within some 10 us. This costs the program an interrupt on its CPU for each
    /// mapping it makes.
    EachRecord,
    /// When a ring is half full (700 mappings), for a watcher that drains by a clock anyway. Costs
    /// the program little.
    HalfFull,
}

impl Wake {
    fn watermark(self) -> u32 {
        match self {
            Wake::EachRecord => 1,
            Wake::HalfFull => (RING_BYTES / 2) as u32,
        }
    }
}

fn open_event(thread: u32, cpu: usize, reports: u64, wake: Wake) -> io::Result<OwnedFd> {
    let attr = Attr {
        kind: TYPE_SOFTWARE,
        size: size_of::<Attr>() as u32,
        config: COUNT_SW_DUMMY,
        // It counts nothing of the kernel, so it needs no privilege beyond ptrace.
        flags: reports | WATERMARK | EXCLUDE_KERNEL | EXCLUDE_HV,
        wakeup_watermark: wake.watermark(),
        ..Attr::default()
    };
    // SAFETY: perf_event_open reads `attr.size` bytes of `attr`, a live local of that size; the
    // rest are numbers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attr,
            thread as i32,
            cpu as i32,
            -1,
            FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A CPU's ring: a control page, then `RING_PAGES` of records, which the kernel writes and we
/// release.
#[derive(Debug)]
struct CpuRing {
    cpu: usize,
    owner: Arc<OwnedFd>,
    start: NonNull<u8>,
}

const RING_BYTES: usize = RING_PAGES * BASE_PAGE_BYTES;
const MAP_BYTES: usize = RING_BYTES + BASE_PAGE_BYTES;
/// Places in `struct perf_event_mmap_page`.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

// SAFETY: the mapping is shared with the kernel only and owned by this value. Only a holder of
// `&mut Sideband` reads it, through raw copies.
unsafe impl Send for CpuRing {}

impl CpuRing {
    fn open(cpu: usize, wake: Wake) -> io::Result<CpuRing> {
        let owner = open_event(std::process::id(), cpu, 0, wake)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses; it overlaps nothing.
        let start = unsafe {
            mm::mmap(
                std::ptr::null_mut(),
                MAP_BYTES,
                prot,
                MapFlags::SHARED,
                &owner,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let owner = Arc::new(owner);
        Ok(CpuRing { cpu, owner, start })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < BASE_PAGE_BYTES);
        let at = self.start.as_ptr().wrapping_add(offset);
        // SAFETY: inside the mapped control page, aligned, and only ever accessed as whole words by
        // the kernel and us.
        unsafe { &*at.cast::<AtomicU64>() }
    }

    /// Copies `out.len()` bytes from position `at` of the endless stream.
    fn copy(&self, at: u64, out: &mut [u8]) {
        let from = at as usize % RING_BYTES;
        let first = out.len().min(RING_BYTES - from);
        let (head, rest) = out.split_at_mut(first);
        assert!(rest.len() <= from, "a record is shorter than the ring");
        let data = self.start.as_ptr().wrapping_add(BASE_PAGE_BYTES);
        for (from, to) in [(data.wrapping_add(from), head), (data, rest)] {
            // SAFETY: both pieces lie inside the data pages (bounded above); the kernel does not
            // write between tail and head, which is where the caller reads; `out` cannot overlap
            // the mapping.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        }
    }

    /// Calls `each` for each record in the ring. Returns how many there were, known or not.
    fn drain(&self, scratch: &mut Vec<u8>, each: &mut impl FnMut(Record<'_>)) -> usize {
        let head = self.word(DATA_HEAD).load(Ordering::Acquire);
        let mut tail = self.word(DATA_TAIL).load(Ordering::Relaxed);
        let mut count = 0;
        // The kernel reports a loss only with the next record on this CPU, which may never come.
        if head.wrapping_sub(tail) > (RING_BYTES - RECORD_BYTES_MAX) as u64 {
            each(Record::Lost(0));
        }
        while let Some(left) = head.checked_sub(tail).filter(|left| *left >= 8) {
            let mut header = [0; 8];
            self.copy(tail, &mut header);
            let size = u16::from_ne_bytes([header[6], header[7]]);
            // An impossible size: the ring is not what we expect. The rest of it counts as lost.
            if size < 8 || u64::from(size) > left || usize::from(size) > RING_BYTES {
                each(Record::Lost(1));
                tail = head;
                break;
            }
            scratch.resize(size.into(), 0);
            self.copy(tail, scratch);
            tail += u64::from(size);
            count += 1;
            if let Some(record) = parse(scratch) {
                each(record);
            }
        }
        self.word(DATA_TAIL).store(tail, Ordering::Release);
        count
    }
}

impl Drop for CpuRing {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours with this length and nothing borrows from it.
        let _ = unsafe { mm::munmap(self.start.as_ptr().cast(), MAP_BYTES) };
    }
}

/// The watch of one or more process trees. Ends when dropped.
#[derive(Debug)]
pub struct Sideband {
    /// The rings that [`Sideband::take_rings`] has not given away.
    rings: Vec<CpuRing>,
    /// The CPU and the owner of every ring.
    owners: Vec<(usize, Arc<OwnedFd>)>,
    /// Shared with the rings that were given away: their records show which processes are watched.
    roots: Arc<Mutex<Roots>>,
    epoll: OwnedFd,
    wake: Wake,
    scratch: Vec<u8>,
}

impl Sideband {
    /// Watches a process, its threads, and everything they start from now on. Wakes at each record.
    ///
    /// Descriptors: one a CPU, and one a CPU for each thread that the process has now, so attach
    /// while it has few. A thread that starts during the call may be reported twice. Errors:
    /// `PermissionDenied` (another user's process, `perf_event_paranoid` above 2, seccomp),
    /// `NotFound`-like (gone).
    pub fn open(pid: u32) -> io::Result<Sideband> {
        let mut sideband = Sideband::idle(Wake::EachRecord)?;
        sideband.watch(pid)?;
        Ok(sideband)
    }

    /// A watch of no process yet: see [`Sideband::watch`].
    pub fn idle(wake: Wake) -> io::Result<Sideband> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut rings = Vec::new();
        for cpu in online_cpus()? {
            let ring = CpuRing::open(cpu, wake)?;
            let data = epoll::EventData::new_u64(cpu as u64);
            epoll::add(&epoll, &*ring.owner, data, epoll::EventFlags::IN)?;
            rings.push(ring);
        }
        let owners = rings.iter().map(|ring| (ring.cpu, ring.owner.clone()));
        Ok(Sideband {
            owners: owners.collect(),
            rings,
            roots: Arc::default(),
            epoll,
            wake,
            scratch: Vec::new(),
        })
    }

    /// Watches one more process with its threads and the processes they start. Does nothing if the
    /// process is known to be watched, as the children of a watched one are.
    ///
    /// Errors: as [`Sideband::open`]; `QuotaExceeded` where it would take more than half of the
    /// descriptors that this process may have. Nothing of it is kept then.
    pub fn watch(&mut self, pid: u32) -> io::Result<()> {
        let mut room = {
            let mut roots = lock(&self.roots);
            if roots.knows(pid) {
                return Ok(());
            }
            let most = descriptors_max() / 2;
            if roots.events() > most / 2 {
                roots.prune();
            }
            most.saturating_sub(roots.events())
        };
        let (mut done, mut events) = (BTreeSet::new(), Vec::new());
        for _ in 0..ATTACH_ROUNDS_MAX {
            let new: Vec<u32> = procfs::thread_ids(pid)?
                .into_iter()
                .filter(|thread| done.insert(*thread))
                .collect();
            if new.is_empty() {
                break;
            }
            for thread in new {
                room = room
                    .checked_sub(self.owners.len())
                    .ok_or(io::ErrorKind::QuotaExceeded)?;
                match self.watch_thread(thread) {
                    Ok(of_thread) => events.extend(of_thread),
                    // It ended meanwhile; only the process itself must be there.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) && thread != pid => {}
                    Err(error) => return Err(error),
                }
            }
        }
        lock(&self.roots).add(pid, events);
        Ok(())
    }

    /// Descriptors held for what is watched.
    pub fn descriptors(&self) -> usize {
        lock(&self.roots).events()
    }

    fn watch_thread(&self, thread: u32) -> io::Result<Vec<OwnedFd>> {
        let mut events = Vec::with_capacity(self.owners.len());
        for (cpu, owner) in &self.owners {
            let event = open_event(thread, *cpu, REPORTS, self.wake)?;
            // SAFETY: SET_OUTPUT takes a descriptor by value; both are live perf events of the same
            // CPU.
            let result =
                unsafe { libc::ioctl(event.as_raw_fd(), SET_OUTPUT as _, owner.as_raw_fd()) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
            events.push(event);
        }
        Ok(events)
    }

    /// Gives the rings away, one a CPU. The holder of each drains it.
    pub fn take_rings(&mut self) -> Vec<RecordRing> {
        let rings = std::mem::take(&mut self.rings).into_iter();
        let ring = |ring| RecordRing {
            ring,
            roots: self.roots.clone(),
            scratch: Vec::new(),
        };
        rings.map(ring).collect()
    }

    /// Calls `each` for every record that is there now. Returns how many there were, unknown ones
    /// included. Drain after each wake-up: readiness is reported once for all records before it.
    pub fn drain(&mut self, mut each: impl FnMut(Record<'_>)) -> usize {
        let Sideband {
            rings,
            scratch,
            roots,
            ..
        } = self;
        let mut heard = |record: Record<'_>| hear(roots, record, &mut each);
        let rings = rings.iter();
        rings.map(|ring| ring.drain(scratch, &mut heard)).sum()
    }
}

/// The records of one CPU. Readable when there is a record.
#[derive(Debug)]
pub struct RecordRing {
    ring: CpuRing,
    roots: Arc<Mutex<Roots>>,
    scratch: Vec<u8>,
}

impl RecordRing {
    /// The CPU.
    pub fn cpu(&self) -> usize {
        self.ring.cpu
    }

    /// As [`Sideband::drain`], for this CPU.
    pub fn drain(&mut self, mut each: impl FnMut(Record<'_>)) -> usize {
        let RecordRing {
            ring,
            roots,
            scratch,
        } = self;
        ring.drain(scratch, &mut |record| hear(roots, record, &mut each))
    }
}

/// Follows which processes are watched, and passes the record on.
fn hear(roots: &Mutex<Roots>, record: Record<'_>, each: &mut impl FnMut(Record<'_>)) {
    if let Record::Fork { .. } | Record::Exit { .. } = record {
        lock(roots).hear(&record);
    }
    each(record);
}

fn lock(roots: &Mutex<Roots>) -> MutexGuard<'_, Roots> {
    roots.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AsFd for RecordRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.owner.as_fd()
    }
}

/// Readable when there is a record on any CPU.
impl AsFd for Sideband {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn descriptors_max() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| limit as usize)
}

fn online_cpus() -> io::Result<Vec<usize>> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
    parse_cpu_list(text.trim()).ok_or_else(|| io::Error::other("the list of CPUs is unreadable"))
}

/// Parses `0-3,6`.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_parse() {
        assert_eq!(parse_cpu_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(parse_cpu_list("0"), Some(vec![0]));
        assert_eq!(parse_cpu_list("a"), None);
    }
}
