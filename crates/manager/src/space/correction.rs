//! Corrects the books of a fork child by its own mappings, before a page of it is served or leaves.
//! The books are a copy of the parent's.
//!
//! - A mapping that is marked `MADV_DONTFORK` is absent, one marked `MADV_WIPEONFORK` has zeros.
//! - A mapping that the parent moved at the moment of the fork may be at its other place
//!   ([`crate::space::moves`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::VirtRange;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::procfs;
use undercroft_sys::uffd::UffdError;

use crate::gauges::scale::is_out_of_descriptors;
use crate::signals::Doom;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;
use crate::space::{cow, parts};
use crate::sync::lock;

/// Longest wait for a move that the parent's kernel has not reported yet. A thread of the parent is
/// on its way out of the kernel meanwhile, and may have no CPU.
const MOVE_WAIT_MAX: Duration = Duration::from_millis(250);

/// The books of a fork child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum ChildBooks {
    /// Those of its memory; also those of a process that is no fork child, or is gone.
    Right,
    /// An event of its parent, or of its own, has to be read first. Ask again.
    Later,
    /// There is no descriptor to look at it. It was counted. Ask again after a pause.
    Short,
    /// It cannot be looked at. Its missing pages must not be served.
    Never,
}

/// Who the child is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Who {
    /// Its first fault names this thread, which may be another process's that reads the child's
    /// memory, or a number of another pid namespace.
    Faulted(u32),
    /// It has proved that this is its only thread.
    Known(u32),
}

/// Corrects the books of a process, once. Its only thread waits, for an answer or a page. The
/// caller holds no lock. Cost: reads the child's smaps, a few ms a GiB.
///
/// * `zeros`: any page.
pub(crate) fn correct(shared: &Shared, process: &Process, who: Who, zeros: &[u8]) -> ChildBooks {
    if process.is_corrected() {
        return ChildBooks::Right;
    }
    // A second thread waits for the first.
    let mut since = lock(&process.correction);
    if process.is_corrected() {
        return ChildBooks::Right;
    }
    if process.unreadable.load(Ordering::Relaxed) {
        return ChildBooks::Never;
    }
    let since = *since.get_or_insert_with(Instant::now);
    let books = match only_thread(&shared.processes, process, who) {
        Ok(Some(tid)) => by_mappings(shared, process, tid, since),
        Ok(None) => ChildBooks::Never,
        Err(Shortage) => ChildBooks::Short,
    };
    let books = match books {
        ChildBooks::Right | ChildBooks::Later => books,
        _ if process.has_lost_its_memory(zeros) => ChildBooks::Right, // it was killed meanwhile
        _ => books,
    };
    match books {
        ChildBooks::Right => process.corrected.store(true, Ordering::Release),
        ChildBooks::Later => {}
        ChildBooks::Short => shared.gauges.shortages.no_descriptor(),
        ChildBooks::Never => {
            process.unreadable.store(true, Ordering::Relaxed);
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
    /// Those with missing-page tracking (`um`): every managed one has it.
    tracked: Vec<VirtRange>,
    wiped: Vec<VirtRange>,
    /// Huge pages and shared memory.
    foreign: Vec<VirtRange>,
}

fn by_mappings(shared: &Shared, process: &Process, tid: u32, since: Instant) -> ChildBooks {
    let _layout = process.layout.write();
    let _held = shared.gauges.layout_holds.hold();
    // What it changed itself before its first fault.
    let is_settled = || !process.event_pending() && process.has_applied_all();
    if !is_settled() {
        return ChildBooks::Later;
    }
    let mut now = Mapped::default();
    let (mut huge, mut public) = (Vec::new(), Vec::new());
    let wanted = &mut [
        ("wf", &mut now.wiped),
        ("um", &mut now.tracked),
        ("ht", &mut huge),
        ("sh", &mut public),
    ];
    match procfs::mappings_with_flags(tid, wanted) {
        Err(error) if is_out_of_descriptors(&error) => return ChildBooks::Short,
        Err(_) => return ChildBooks::Never,
        Ok(()) => {}
    }
    if !now
        .tracked
        .iter()
        .any(|range| range.contains(process.beacon))
    {
        return ChildBooks::Never; // another process
    }
    if !is_settled() {
        return ChildBooks::Later;
    }
    let is_in = |range: &VirtRange, of: &[VirtRange]| !range.overlapping(of).is_empty();
    now.foreign.extend(huge.into_iter().chain(public));
    now.foreign.retain(|range| is_in(range, &now.tracked));
    now.foreign.sort_by_key(|range| range.start);
    now.tracked.retain(|range| !is_in(range, &now.foreign));
    let Some(gone) = follow_moves(shared, process, &now.tracked, since) else {
        return ChildBooks::Later;
    };
    for absent in gone {
        parts::dropped(shared, process.space, absent, true);
    }
    for range in now.wiped {
        parts::dropped(shared, process.space, range, false);
    }
    for range in now.foreign {
        let _ = process.memory.unregister(range); // as `foreign.rs`, which needs an identity
    }
    shared.books.free_released();
    cow::protect(&shared.books, process, tid);
    ChildBooks::Right
}

/// Has the books follow the moves of the parent that the child shows. Returns what is absent in the
/// child then. `None`: the kernel may still report a move of the parent.
fn follow_moves(
    shared: &Shared,
    process: &Process,
    tracked: &[VirtRange],
    since: Instant,
) -> Option<Vec<VirtRange>> {
    let minus = |of: &[VirtRange], holes: &[VirtRange]| -> Vec<VirtRange> {
        let parts = of.iter();
        let parts = parts.flat_map(|range| range.minus(&holes[range.overlapping(holes)]));
        parts.collect()
    };
    loop {
        // Asked first: all that was reported by now is in the list.
        let is_quiet = is_quiet(shared, process) || since.elapsed() > MOVE_WAIT_MAX;
        let regions = shared.books.regions(process.space);
        let (gone, new) = (minus(&regions, tracked), minus(tracked, &regions));
        let around = process.fork_moves.as_ref();
        if gone.is_empty() || new.is_empty() {
            return Some(gone);
        }
        let Some(step) = around.and_then(|moves| moves.next(&gone, &new, &process.moves)) else {
            return is_quiet.then_some(gone);
        };
        if parts::moved(shared, process.space, step.from, step.to.start).is_err() {
            shared.signals.doom(Doom::TableFullByFork);
            return Some(Vec::new());
        }
    }
}

/// True if every change that the child's parent has made by now is in its books.
fn is_quiet(shared: &Shared, process: &Process) -> bool {
    let parent = process.parent.and_then(|space| shared.processes.get(space));
    parent.is_none_or(|parent| {
        // Not waited for: the parent's lock comes before a child's.
        let Ok(_layout) = parent.layout.try_read() else {
            return false;
        };
        !parent.event_pending() && parent.has_applied_all()
    })
}

/// There is no descriptor left.
struct Shortage;

/// The only thread of a fork child. So a number is put on the child's beacon, and that page is read
/// in each process that may be the child. `None`: it is in none. Where no number can be put, the
/// thread that the fault names is returned, and the caller verifies it.
fn only_thread(processes: &Processes, child: &Process, who: Who) -> Result<Option<u32>, Shortage> {
    let tid = match (who, child.pid()) {
        (Who::Known(tid), _) | (_, Some(tid)) => return Ok(Some(tid)),
        (Who::Faulted(tid), None) => tid,
    };
    if let Some(thread) = child.proven.get() {
        return Ok(Some(*thread));
    }
    let nonce = match child.issue_ticket(tid) {
        Ok(nonce) => nonce,
        Err(UffdError::Exists { .. }) => match &*lock(&child.ticket) {
            Some(ticket) => ticket.nonce,
            None => return Ok(Some(tid)),
        },
        Err(_) => return Ok(Some(tid)),
    };
    let mut short = false;
    let mut shows = |pid: &u32| {
        let mut seen = [0u8; 8];
        let address = child.beacon.address();
        let read = ProcessMemory::open(*pid).and_then(|memory| memory.read(address, &mut seen));
        short |= (read.as_ref()).is_err_and(is_out_of_descriptors);
        read.is_ok() && u64::from_ne_bytes(seen) == nonce
    };
    let parent = child.parent.and_then(|parent| processes.get(parent));
    let parent = parent.and_then(|parent: Arc<Process>| parent.pid());
    // A child made with `CLONE_PARENT` is its parent's brother. One whose parent has ended has
    // a new parent, which is not known.
    let above = parent.and_then(|pid| procfs::status_number(pid, "PPid"));
    let parents = || parent.into_iter().chain(above.map(|pid| pid as u32));
    let found = [tid].into_iter().find(&mut shows);
    let found = found.or_else(|| parents().flat_map(procfs::children).find(&mut shows));
    let found = match (found, procfs::processes()) {
        (Some(found), _) => Some(found),
        (None, Ok(all)) => all.into_iter().find(&mut shows),
        (None, Err(error)) => {
            short |= is_out_of_descriptors(&error);
            None
        }
    };
    if let Some(thread) = found {
        child.give_ticket(thread);
        let _ = child.proven.set(thread);
    }
    if found.is_none() && short {
        return Err(Shortage);
    }
    Ok(found)
}
