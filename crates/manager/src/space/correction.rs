//! Corrects the books of a fork child by its own mappings, before a page of it is served or leaves.
//! The books are a copy of the parent's.
//!
//! The FORK event brings the child's userfaultfd, but not its process id, and the thread that
//! faults does not always tell it: a debugger may read the child's memory first. So the child is
//! the process whose memory holds the number of its beacon ([`only_thread`]). If no descriptor is
//! left to look with, the child waits. One that cannot be looked at gets SIGBUS for its missing
//! pages. After the correction the child's pages are write-protected (`cow.rs`).
//!
//! A mapping that is marked `MADV_DONTFORK` is absent, one marked `MADV_WIPEONFORK` has zeros.
//!
//! Not followed: a move that another thread of the parent made at the moment of the fork, and that
//! the kernel reported in the wrong order. From the mappings alone such a move looks like a mapping
//! that the child does not inherit beside a fresh one that the books do not have yet. A repair that
//! took one for the other gave a child bytes of another page.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use undercroft_base::VirtRange;
use undercroft_proto::legacy::{Flag, Number};
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::procfs;
use undercroft_sys::uffd::UffdError;

use crate::gauges::scale::Short;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;
use crate::space::{cow, foreign, parts};
use crate::sync::lock;

/// The books of a fork child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum ChildBooks {
    /// The books are those of its memory. Also the answer for a process that is no fork child, or
    /// is gone.
    Right,
    /// An event of its own has to be read first. Ask again.
    Later,
    /// There is no descriptor, or no memory in the kernel, to look at it. It was counted. Ask again
    /// after a pause.
    Short,
    /// The child cannot be looked at. Its missing pages must not be served.
    Never,
}

/// Who the child is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    /// Its first fault names this thread, which may be another process's that reads the child's
    /// memory, or a number of another pid namespace.
    Faulted(u32),
    /// The child has proved that this is its only thread.
    Known(u32),
}

/// Corrects the books of a process, once. Its only thread waits, for an answer or a page. The
/// caller holds no lock. Cost: reads the child's smaps, a few ms a GiB.
pub(crate) fn correct(shared: &Shared, process: &Process, who: Who) -> ChildBooks {
    if process.is_corrected() {
        return ChildBooks::Right;
    }
    // A second thread waits for the first.
    let _turn = lock(&process.relatives.correction);
    if process.is_corrected() {
        return ChildBooks::Right;
    }
    if process.relatives.unreadable.load(Ordering::Relaxed) {
        return ChildBooks::Never;
    }
    let books = match only_thread(&shared.processes, process, who) {
        Ok(Some(tid)) => by_mappings(shared, process, tid),
        Ok(None) => Ok(ChildBooks::Never),
        Err(short) => Err(short),
    };
    let books = books.unwrap_or_else(|short| {
        shared.gauges.shortages.note(short);
        // The child waits for a descriptor as long as it takes: others end.
        if short == Short::Descriptors || process.short_looks.may_end(shared.elapsed()) {
            ChildBooks::Short
        } else {
            ChildBooks::Never
        }
    });
    let books = match books {
        ChildBooks::Right | ChildBooks::Later => books,
        _ if process.has_lost_its_memory() => ChildBooks::Right, // it was killed meanwhile
        _ => books,
    };
    match books {
        ChildBooks::Right => {
            process.row.set(Flag::Corrected);
            process.relatives.corrected.store(true, Ordering::Release);
        }
        ChildBooks::Later | ChildBooks::Short => {}
        ChildBooks::Never => {
            process.row.set(Flag::Unreadable);
            process.relatives.unreadable.store(true, Ordering::Relaxed);
            crate::log::say(
                "the mappings of a fork child cannot be read (is it in another pid namespace?): \
                 its memory is refused to it (SIGBUS)",
            );
        }
    }
    books
}

/// The mappings of a fork child.
#[derive(Default)]
struct Mapped {
    /// Mappings with missing-page tracking (`um`): every managed one has it.
    tracked: Vec<VirtRange>,
    wiped: Vec<VirtRange>,
    /// Huge pages and shared memory.
    foreign: Vec<VirtRange>,
}

fn by_mappings(shared: &Shared, process: &Process, tid: u32) -> Result<ChildBooks, Short> {
    let _layout = process.layout.write();
    let _held = shared.gauges.layout_holds.hold();
    // The child may have changed its mappings itself before its first fault.
    if !process.books_are_current() {
        return Ok(ChildBooks::Later);
    }
    let mut now = Mapped::default();
    let (mut huge, mut public) = (Vec::new(), Vec::new());
    let wanted = &mut [
        ("wf", &mut now.wiped),
        ("um", &mut now.tracked),
        ("ht", &mut huge),
        ("sh", &mut public),
    ];
    if let Err(error) = procfs::mappings_with_flags(tid, wanted) {
        return Short::of(&error).map_or(Ok(ChildBooks::Never), Err);
    }
    process.short_looks.ends();
    if !now
        .tracked
        .iter()
        .any(|range| range.contains(process.relatives.beacon))
    {
        return Ok(ChildBooks::Never); // another process
    }
    if !process.books_are_current() {
        return Ok(ChildBooks::Later);
    }
    let is_in = |range: &VirtRange, of: &[VirtRange]| !range.overlapping(of).is_empty();
    now.foreign.extend(huge.into_iter().chain(public));
    now.foreign.retain(|range| is_in(range, &now.tracked));
    now.foreign.sort_by_key(|range| range.start);
    now.tracked.retain(|range| !is_in(range, &now.foreign));
    for region in shared.books.regions(process.space) {
        for absent in region.minus(&now.tracked[region.overlapping(&now.tracked)]) {
            parts::dropped(shared, process.space, absent, true);
        }
    }
    for range in now.wiped {
        parts::dropped(shared, process.space, range, false);
    }
    for range in now.foreign {
        foreign::unregister(process, range);
    }
    if !process.books_are_current() {
        return Ok(ChildBooks::Later); // it has more threads than one
    }
    shared.books.free_released();
    cow::protect(&shared.books, process, tid);
    Ok(ChildBooks::Right)
}

/// The only thread of a fork child. To find it, a number is put on the child's beacon, and that
/// page is read in each process that may be the child. `None`: no process has the number. If no
/// number can be put there, the thread that the fault names is returned, and the caller verifies
/// it.
fn only_thread(processes: &Processes, child: &Process, who: Who) -> Result<Option<u32>, Short> {
    let tid = match (who, child.pid()) {
        (Who::Known(tid), _) | (_, Some(tid)) => return Ok(Some(tid)),
        (Who::Faulted(tid), None) => tid,
    };
    if let Some(thread) = child.relatives.proven.get() {
        return Ok(Some(*thread));
    }
    let nonce = match child.issue_ticket(tid) {
        Ok(nonce) => nonce,
        Err(UffdError::Exists { .. }) => match &*lock(&child.relatives.ticket) {
            Some(ticket) => ticket.nonce,
            None => return Ok(Some(tid)),
        },
        Err(UffdError::NoMemory { .. }) => return Err(Short::Memory),
        Err(_) => return Ok(Some(tid)),
    };
    let mut short = None;
    let mut shows = |pid: &u32| {
        let mut seen = [0u8; 8];
        let address = child.relatives.beacon.address();
        let read = ProcessMemory::open(*pid).and_then(|memory| memory.read(address, &mut seen));
        short = short.or((read.as_ref()).err().and_then(Short::of));
        read.is_ok() && u64::from_ne_bytes(seen) == nonce
    };
    let parent = child
        .relatives
        .parent
        .and_then(|parent| processes.get(parent));
    let parent = parent.and_then(|parent: Arc<Process>| parent.pid());
    // A child made with `CLONE_PARENT` is its parent's brother. One whose parent has ended has
    // a new parent, which is not known.
    let above = parent.and_then(|pid| procfs::status_number(pid, "PPid"));
    let parents = || parent.into_iter().chain(above.map(|pid| pid as u32));
    let found = [tid].into_iter().find(&mut shows);
    let found = found.or_else(|| parents().flat_map(procfs::children).find(&mut shows));
    let found = match found {
        Some(found) => Some(found),
        None => match procfs::processes() {
            Ok(all) => all.into_iter().find(&mut shows),
            Err(error) => {
                short = short.or(Short::of(&error));
                None
            }
        },
    };
    if let Some(thread) = found {
        child.give_ticket(thread);
        child.row.put(Number::Proven, thread.into());
        let _ = child.relatives.proven.set(thread);
    }
    match (found, short) {
        (None, Some(short)) => Err(short),
        _ => Ok(found),
    }
}
